"""Zeros anywhere, in the whole matrix or in each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from niwaki.layer.patterns._base import ByRows, Pattern, check_sparsity, short_number, zeros_of
from niwaki.layer.patterns._derived import Count, shares
from niwaki.layer.patterns.selection import (
    keep_highest,
    keep_highest_per_row,
    kth_smallest,
    kth_smallest_per_row,
)


@dataclass(frozen=True)
class _OneByOne(ByRows):
    """Weights are chosen one by one."""

    sparsity: float

    def __post_init__(self) -> None:
        check_sparsity(self.sparsity)

    def zeros(self, scores: Tensor) -> int:
        """The number of zeros in all rows of the matrix."""
        return zeros_of(self.sparsity, self.weights(scores))

    def at(self, sparsity: float) -> Pattern | None:
        return replace(self, sparsity=sparsity)

    def partial(self, fraction: float) -> Pattern:
        return replace(self, sparsity=self.sparsity * fraction)


@dataclass(frozen=True)
class Unstructured(_OneByOne):
    """The lowest ``round(sparsity * out * in)`` scores of the whole matrix are zero."""

    def __str__(self) -> str:
        return f"unstructured:{short_number(self.sparsity)}"

    def mask(self, scores: Tensor) -> Tensor:
        return keep_highest(scores, self.zeros(scores), self.rows)

    def threshold(self, scores: Tensor) -> Tensor | None:
        zeros = self.zeros(scores)
        return kth_smallest(scores.reshape(-1), zeros, self.rows) if zeros else None

    def split(self, scores: Sequence[Tensor]) -> list[Pattern] | None:
        # Not the same sparsity for all: runs with every fourth column can be of another scale.
        threshold = self.threshold(torch.cat(list(scores), dim=1))
        if threshold is None:
            return [self] * len(scores)
        kept = self.rows.sum(torch.stack([(run > threshold).count_nonzero() for run in scores])).tolist()
        return [
            replace(self, sparsity=1 - max(1, count) / self.weights(run))
            for count, run in zip(kept, scores, strict=True)
        ]

    def slices(self, shape: tuple[int, int], width: int) -> Iterator[tuple[int, int, Pattern]]:
        for start, stop, zeros in shares(self, shape, width):
            yield start, stop, Count(zeros, rows=self.rows)


@dataclass(frozen=True)
class PerRow(_OneByOne):
    """Every row (output) has the same number of zeros, to within one.

    Where ``sparsity * in`` is not a whole number, rows whose next weight has the lowest score have one more: the total
    is exactly ``round(sparsity * out * in)``. (Solvers that choose masks for one block of columns after another
    do so within each block.) Rounding every row down, as public code does, gives 59.9 % for 60 %.
    """

    def __str__(self) -> str:
        return f"per-row:{short_number(self.sparsity)}"

    def mask(self, scores: Tensor) -> Tensor:
        return keep_highest_per_row(scores, self.zeros(scores), self.rows)

    def threshold(self, scores: Tensor) -> Tensor | None:
        zeros = self.zeros(scores) // self.rows.of(scores.shape[0])
        return kth_smallest_per_row(scores, zeros) if zeros else None

    def slices(self, shape: tuple[int, int], width: int) -> Iterator[tuple[int, int, Pattern]]:
        # Remainders are settled at the end of each run: a row is at most one zero per run away from its share.
        for start, stop, zeros in shares(self, shape, width):
            yield start, stop, Count(zeros, per_row=True, rows=self.rows)
