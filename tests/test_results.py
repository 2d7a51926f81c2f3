"""The tables in the documentation are those of the record in the repository."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_tables_are_those_of_the_record() -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "results.py"), "--check"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
