"""Writes tests/slow.txt, which names the tests that `make quick` leaves out, from the times of a run of all tests.

pytest -n auto --dist worksteal --junitxml=times.xml
python scripts/slow_tests.py times.xml [LIMIT]

A test is one function with all its cases, and slow if these take more than LIMIT seconds together (0.3).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
HEAD = "# Written by scripts/slow_tests.py: what `make quick` leaves out, as it does what is marked as slow.\n"


def name(classname: str, function: str) -> str:
    """``tests/layer/test_rows.py::TestThis::test_that`` from what a JUnit file has."""
    parts = classname.split(".")
    depth = next(i for i in range(1, len(parts) + 1) if Path(ROOT, *parts[:i]).with_suffix(".py").exists())
    return "::".join(["/".join(parts[:depth]) + ".py", *parts[depth:], function.partition("[")[0]])


def main() -> None:
    """Writes the file."""
    limit = float(sys.argv[2]) if len(sys.argv) > 2 else 0.3
    times: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(sys.argv[1]).iter("testcase"):  # noqa: S314 - pytest's own file
        times[name(case.attrib["classname"], case.attrib["name"])] += float(case.attrib["time"])
    slow = sorted(test for test, seconds in times.items() if seconds > limit)
    rest = sum(times.values()) - sum(times[test] for test in slow)
    (ROOT / "tests" / "slow.txt").write_text(HEAD + "".join(f"{test}\n" for test in slow))
    print(f"{len(slow)} of {len(times)} tests are slow; the others take {rest:.0f} s")


if __name__ == "__main__":
    main()
