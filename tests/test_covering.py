"""Which tests are run: covering choices of cases, and what `make quick` leaves out."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support import covering
from support.covering import _chosen

TESTS = Path(__file__).parent


def pairs(cases: Sequence[tuple[Any, ...]]) -> set[object]:
    return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}


@pytest.mark.parametrize(("sizes", "most"), [((21, 5, 4, 2), 105), ((3, 3, 3, 3), 11), ((4, 3), 12), ((2,) * 8, 10)])
def test_all_pairs_meet_in_few_cases(sizes: tuple[int, ...], most: int) -> None:
    cases = list(itertools.product(*map(range, sizes)))
    chosen = _chosen(cases)
    assert len(chosen) == len(set(chosen)) <= most
    assert pairs(chosen) == pairs(cases)
    assert chosen == _chosen(cases)


def test_pairs_that_are_not_allowed_are_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(covering, "FULL", False)
    axes = (range(6), range(5), "ab")
    cases = covering.covering(*axes, allowed=lambda i, j, letter: i > j or letter == "a")
    allowed = [case for case in itertools.product(*axes) if case[0] > case[1] or case[2] == "a"]
    assert set(cases) <= set(allowed)
    assert pairs(cases) == pairs(allowed)
    assert len(cases) < len(allowed)
    monkeypatch.setattr(covering, "FULL", True)
    assert covering.covering(*axes) == list(itertools.product(*axes))
