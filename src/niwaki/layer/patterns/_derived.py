"""Patterns with a part of their zeros, and those of runs of columns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from niwaki.layer.patterns._base import ByRows, Pattern, zeros_of
from niwaki.layer.patterns.rows import Rows
from niwaki.layer.patterns.selection import keep_highest, keep_highest_blocks, keep_highest_per_row


@dataclass(frozen=True)
class Partial(Pattern):
    """Keeps what ``final`` keeps; of the other weights a ``fraction``, the lowest, are zero.

    For n:m that is Boza 2024, section 3.2: "we always keep the two highest elements from each group of four and then
    prune 2 s_t weights from the remaining ones".
    """

    final: Pattern
    fraction: float

    @property
    def sparsity(self) -> float:
        return self.final.sparsity * self.fraction

    @property
    def rows(self) -> Rows:
        return self.final.rows

    def check(self, shape: tuple[int, int]) -> None:
        self.final.check(shape)

    def mask(self, scores: Tensor) -> Tensor:
        safe = self.final.mask(scores)
        # The count comes from the final mask, so that fraction 1 is that mask to the weight.
        zeros_at_end = self.rows.total(safe.numel() - int(safe.count_nonzero()))
        zeros = round(self.fraction * zeros_at_end)
        if zeros == zeros_at_end:
            return safe
        return keep_highest(scores.masked_fill(safe, math.inf), zeros, self.rows)

    def partial(self, fraction: float) -> Pattern:
        return Partial(self.final, self.fraction * fraction)

    def slices(self, shape: tuple[int, int], width: int) -> Iterator[tuple[int, int, Pattern]]:
        raise NotImplementedError("gradual solvers do not go column by column")


@dataclass(frozen=True)
class Run(ByRows):
    """A run of the columns of a matrix, with a given number of zeros, or of blocks of zeros."""

    zeros: int

    @property
    def sparsity(self) -> float:
        raise NotImplementedError("a number of zeros is a sparsity only for a known shape")

    def partial(self, fraction: float) -> Pattern:
        return replace(self, zeros=round(self.zeros * fraction))

    def slices(self, shape: tuple[int, int], width: int) -> Iterator[tuple[int, int, Pattern]]:
        raise NotImplementedError("column runs are not cut again")


@dataclass(frozen=True)
class Count(Run):
    """A number of zeros, anywhere or the same in each row to within one, and within n:m or not."""

    per_row: bool = False
    within: Pattern | None = None

    def mask(self, scores: Tensor) -> Tensor:
        left = left_by(self.within, scores) if self.within else scores
        return (keep_highest_per_row if self.per_row else keep_highest)(left, self.zeros, self.rows)


@dataclass(frozen=True)
class BlockCount(Run):
    """A number of blocks of zeros."""

    shape: tuple[int, int]

    def mask(self, scores: Tensor) -> Tensor:
        return keep_highest_blocks(scores, self.shape, self.zeros)


def left_by(pattern: Pattern, scores: Tensor) -> Tensor:
    """The scores, with those that ``pattern`` drops below all others."""
    return scores.masked_fill(~pattern.mask(scores), -math.inf)


def shares(pattern: Pattern, shape: tuple[int, int], width: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, zeros) of runs of columns, with the zeros of all rows of the matrix."""
    rows = pattern.rows.of(shape[0])
    for start, stop in runs(shape[1], width, pattern.group):
        yield start, stop, zeros_of(pattern.sparsity, rows * stop) - zeros_of(pattern.sparsity, rows * start)


def runs(columns: int, width: int, group: int = 1) -> Iterator[tuple[int, int]]:
    """Runs that end at the multiples of ``width``, or at the last multiple of ``group`` before."""
    start = 0
    for end in range(width, columns + width, width):
        stop = min(end, columns) // group * group
        if stop > start:
            yield start, stop
            start = stop
