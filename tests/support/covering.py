"""Cases that cover instead of multiply: every pair of values of two parameters meets in some case."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

#: With NIWAKI_FULL_TESTS=1 every case is run, not only a choice of them.
FULL = os.environ.get("NIWAKI_FULL_TESTS", "") not in ("", "0")

Test = TypeVar("Test", bound=Callable[..., Any])


def some(values: Iterable[Any], count: int) -> list[Any]:
    """So many of ``values``, evenly spaced, the first and the last among them: where all would take too long."""
    every = list(values)
    if FULL or count >= len(every):
        return every
    return [every[round(i * (len(every) - 1) / max(1, count - 1))] for i in range(count)]


def in_turns(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """As many cases as the longest of ``axes`` has values: each value is in one, but not each pair."""
    values: list[Sequence[Any]] = [list(axis) for axis in axes]
    if FULL:
        return list(itertools.product(*values))
    return [tuple(axis[i % len(axis)] for axis in values) for i in range(max(map(len, values)))]


def covering(*axes: Iterable[Any], allowed: Callable[..., bool] | None = None) -> list[tuple[Any, ...]]:
    """A small part of the product of ``axes`` in which each pair of values meets that meets in an allowed case.

    The choice is greedy and always the same. 21 x 5 x 4 x 2 = 840 cases become 105.

    Args:
        allowed: Called with a value of each axis; says whether they go together.
    """
    values: list[Sequence[Any]] = [list(axis) for axis in axes]
    cases = [
        case
        for case in itertools.product(*(range(len(axis)) for axis in values))
        if allowed is None or allowed(*(axis[i] for axis, i in zip(values, case, strict=True)))
    ]
    chosen = cases if FULL or len(axes) < 3 else _chosen(cases)
    return [tuple(axis[i] for axis, i in zip(values, case, strict=True)) for case in chosen]


def _chosen(cases: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Always a case with the most pairs that have not met yet; in the order of ``cases``."""
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in cases}
    missing = set().union(*pairs.values())
    counts = {case: len(met) for case, met in pairs.items()}  # of its pairs that are missing, or were before
    chosen = []
    while missing:
        best, most = cases[0], 0
        for case in cases:
            if counts[case] > most:
                counts[case] = len(pairs[case] & missing)
                if counts[case] > most:
                    best, most = case, counts[case]
        chosen.append(best)
        missing -= pairs[best]
    return sorted(chosen)


def covered(test: Test) -> Test:
    """Above three or more ``pytest.mark.parametrize``: a choice of their product in which all pairs meet.

    @covered
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("size", [1, 2, 3])
    @pytest.mark.parametrize("pattern", PATTERNS, ids=str)
    def test_a_mask(pattern: Pattern, size: int, dtype: torch.dtype) -> None: ...
    """
    marks: list[pytest.Mark] = test.pytestmark  # type: ignore[attr-defined]
    stacked = [mark for mark in marks if mark.name == "parametrize"]
    names = [name for mark in stacked for name in _names(mark)]
    cases = covering(*map(_named_values, stacked))
    parameters = [
        pytest.param(*itertools.chain(*(row for _, row in case)), id="-".join(name for name, _ in case))
        for case in cases
    ]
    test.pytestmark = [mark for mark in marks if mark.name != "parametrize"]  # type: ignore[attr-defined]
    decorated: Test = pytest.mark.parametrize(names, parameters)(test)
    return decorated


def _names(mark: pytest.Mark) -> list[str]:
    names = mark.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _named_values(mark: pytest.Mark) -> list[tuple[str, tuple[Any, ...]]]:
    """The values of a mark, each with its part of the name of a case."""
    single = len(_names(mark)) == 1
    rows = [(value,) if single else tuple(value) for value in mark.args[1]]
    ids = mark.kwargs.get("ids")
    if ids is not None and not callable(ids):
        return list(zip(ids, rows, strict=True))
    name = ids or (lambda value: value.__name__ if callable(value) and hasattr(value, "__name__") else str(value))
    return [("-".join(str(name(value)) for value in row), row) for row in rows]
