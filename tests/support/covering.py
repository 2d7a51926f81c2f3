"""Cases that cover instead of multiply: every pair of values of two axes meets in some case."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

#: With NIWAKI_FULL_TESTS=1 every case is run, not only a covering choice of them.
FULL = os.environ.get("NIWAKI_FULL_TESTS", "") not in ("", "0")


def covering(*axes: Iterable[Any], allowed: Callable[..., bool] | None = None) -> list[tuple[Any, ...]]:
    """A small part of the product of ``axes`` in which all pairs of values meet that meet in an allowed case.

    The choice is greedy and always the same. 20 x 5 x 4 x 2 = 800 cases become about 100.

        @pytest.mark.parametrize(("solver", "pattern", "kind", "dtype"), covering(SOLVERS, PATTERNS, KINDS, DTYPES))

    Args:
        allowed: Called with a value of each axis; says whether they go together.
    """
    values: list[Sequence[Any]] = [list(axis) for axis in axes]
    cases = [
        case
        for case in itertools.product(*(range(len(axis)) for axis in values))
        if allowed is None or allowed(*(axis[i] for axis, i in zip(values, case, strict=True)))
    ]
    if not FULL:
        cases = _chosen(cases)
    return [tuple(axis[i] for axis, i in zip(values, case, strict=True)) for case in cases]


def _chosen(cases: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Always the case with the most pairs that have not met; the first of several, and in the old order."""
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in cases}
    missing = set().union(*pairs.values())
    # How many pairs of each case had not met when it was last counted: never less than today.
    counts = {case: len(met) for case, met in pairs.items()}
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
