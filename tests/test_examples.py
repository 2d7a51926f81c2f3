"""Each example runs as it is, and says what it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.models import save_some_of_the_embedded
from support.scripts import run_script

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
#: A part of what each prints.
SAYS = {
    "compare": ["| admm-grad |", "best at 2:4: "],
    "own_solver": ["Power(power=0.5): relative error 0.", "power 50 %: ", "wanda 50 %: "],
    "prune": ["perplexity before ", "perplexity after ", "60.00 % zeros"],
    "read_record": ["50.00 % zeros", "block ", "total: "],
}


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = save_some_of_the_embedded(tmp_path / "demo")
    assert run_script(path) is None
    printed = capsys.readouterr().out
    for part in SAYS[path.stem]:
        assert part in printed
    assert list(tmp_path.iterdir()) == [model]
