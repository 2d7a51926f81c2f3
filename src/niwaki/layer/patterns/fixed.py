"""A given mask."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from niwaki.arguments import check_fields
from niwaki.errors import PatternError
from niwaki.layer.patterns._base import ByRows, Choice, Pattern, runs
from niwaki.layer.patterns.rows import Rows


@dataclass(frozen=True, eq=False)
class Fixed(ByRows):
    """A mask from elsewhere, ``values`` (out, in) bool, True where a weight is kept.

    ``within`` is the pattern that it was chosen from, within which solvers may refine it.
    """

    values: Tensor
    within: Pattern | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.values.ndim != 2 or self.values.dtype != torch.bool:
            raise PatternError(f"a mask is (out, in) bool; got {tuple(self.values.shape)} {self.values.dtype}")

    def __str__(self) -> str:
        return f"fixed:{self.sparsity:.4g}"

    @property
    def sparsity(self) -> float:
        return 1 - self.rows.total(int(self.values.count_nonzero())) / self.weights(self.values)

    def for_rows(self, rows: Rows) -> Pattern | None:
        return replace(self, values=rows.own(self.values), within=self.within and self.within.for_rows(rows), rows=rows)

    def check(self, shape: Sequence[int]) -> None:
        if tuple(self.values.shape) != tuple(shape):
            raise PatternError(f"the given mask has shape {tuple(self.values.shape)}, the matrix {tuple(shape)}")

    def reordered(self, columns: Tensor) -> Pattern:
        within = self.within and self.within.reordered(columns)
        return replace(self, values=self.values[:, columns.to(self.values.device)], within=within)

    def exchange(self, columns: int) -> int:
        return self.within.exchange(columns) if self.within else 0

    @property
    def exchangeable(self) -> Tensor | None:
        return self.within.exchangeable if self.within else None

    def mask(self, scores: Tensor) -> Tensor:
        self.check(scores.shape)
        return self.values.to(scores.device)

    def partial(self, fraction: float) -> Pattern:
        return self

    def slices(
        self, shape: Sequence[int], width: int, places: Tensor | None = None
    ) -> Iterator[tuple[int, int, Choice]]:
        self.check(shape)
        for start, stop in runs(shape[1], width):
            yield start, stop, Fixed(self.values[:, start:stop]).mask
