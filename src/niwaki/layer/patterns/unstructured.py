"""Zeros anywhere, in the whole matrix or in each row."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from niwaki.layer.patterns._base import BySparsity, Pattern, short_number
from niwaki.layer.patterns.selection import keep_highest, keep_highest_per_row, kth_smallest, kth_smallest_per_row


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
