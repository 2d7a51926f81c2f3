"""Numbers of zeros: anywhere in the whole matrix, in each row, or in every few weights of a row."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from niwaki.arguments import check_fields
from niwaki.errors import PatternError
from niwaki.layer.patterns._base import ByRows, BySparsity, Pattern, Slices, runs, short_number
from niwaki.layer.patterns.selection import (
    keep_highest,
    keep_highest_of_each,
    keep_highest_per_row,
    kth_smallest,
    kth_smallest_per_row,
    middle_of_each,
)
from niwaki.quantities import check_n_of_m


@dataclass(frozen=True)
class Unstructured(BySparsity):
    """Zeros anywhere: the lowest ``round(sparsity * out * in)`` scores of the whole matrix are pruned."""

    def __str__(self) -> str:
        return f"unstructured:{short_number(self.sparsity)}"

    def keep(self, scores: Tensor, zeros: int) -> Tensor:
        return keep_highest(scores, zeros, self.rows)

    def threshold(self, scores: Tensor) -> Tensor | None:
        zeros = self.zeros(self.weights(scores))
        return kth_smallest(scores.reshape(-1), zeros, self.rows) if zeros else None

    def split(self, scores: Sequence[Tensor]) -> list[Pattern] | None:
        # Not the same sparsity for all: runs with every fourth column can be of another scale.
        threshold = self.threshold(torch.cat(list(scores), dim=1))
        if threshold is None:
            return [self] * len(scores)
        kept = self.rows.sum(torch.stack([(run > threshold).count_nonzero() for run in scores])).tolist()
        shares = (max(1, count) / self.weights(run) for count, run in zip(kept, scores, strict=True))
        return [replace(self, sparsity=1 - share) for share in shares]


@dataclass(frozen=True)
class PerRow(BySparsity):
    """The same number of zeros in every row (output), to within one.

    The total is exactly ``round(sparsity * out * in)``: rows whose next weight has the lowest score have one more.
    Solvers that choose masks for one run of columns after another apply this within each run.
    """

    def __str__(self) -> str:
        return f"per-row:{short_number(self.sparsity)}"

    def keep(self, scores: Tensor, zeros: int) -> Tensor:
        return keep_highest_per_row(scores, zeros, self.rows)

    def threshold(self, scores: Tensor) -> Tensor | None:
        zeros = self.zeros(self.weights(scores)) // self.rows.of(scores.shape[0])
        return kth_smallest_per_row(scores, zeros) if zeros else None


@dataclass(frozen=True)
class NM(ByRows):
    """At most ``n`` of every ``m`` consecutive weights of a row are nonzero; GPUs support 2:4.

    Raises:
        PatternError: n or m is out of range, or, when a matrix is known, m does not divide the number of its columns.
    """

    n: int
    m: int

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    def __post_init__(self) -> None:
        check_fields(self)
        check_n_of_m(str(self), self.n, self.m)

    @property
    def sparsity(self) -> float:
        return 1 - self.n / self.m

    @property
    def group(self) -> int:
        return self.m

    def check(self, shape: Sequence[int]) -> None:
        if shape[1] % self.m:
            raise PatternError(
                f"the pattern {self} needs a number of columns that {self.m} divides; this matrix has {shape[1]}"
            )

    def mask(self, scores: Tensor) -> Tensor:
        self.check(scores.shape)
        return keep_highest_of_each(scores, self.n, self.m)

    def slices(self, shape: Sequence[int], width: int, places: Tensor | None = None) -> Slices:
        self.check(shape)
        for start, stop in runs(shape[1], self.m):
            yield start, stop, self.mask

    def threshold(self, scores: Tensor) -> Tensor | None:
        return middle_of_each(scores, self.n, self.m) if self.n < self.m else None

    def split(self, scores: Sequence[Tensor]) -> list[Pattern] | None:
        return [self] * len(scores)
