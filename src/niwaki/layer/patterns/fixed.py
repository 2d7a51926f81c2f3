"""A given mask."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from niwaki.arguments import check_fields
from niwaki.layer.patterns._base import ByRows, Pattern, Slices, check_places, check_shape, runs
from niwaki.layer.patterns.rows import Rows


@dataclass(frozen=True, eq=False)
class Fixed(ByRows):
    """A given mask, such as that of another program: ``values`` (out, in) bool, True for kept weights.

    ``within`` is the pattern that the mask was chosen from; solvers may refine the mask within it.

    Raises:
        PatternError: ``values`` is not (out, in) bool.
    """

    values: Tensor
    within: Pattern | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_places("a mask is", self.values)

    def __str__(self) -> str:
        return f"fixed:{self.sparsity:.4g}"

    @property
    def sparsity(self) -> float:
        return 1 - self.rows.total(int(self.values.count_nonzero())) / self.weights(self.values)

    def for_rows(self, rows: Rows) -> Pattern | None:
        return replace(self, values=rows.own(self.values), within=self.within and self.within.for_rows(rows), rows=rows)

    def check(self, shape: Sequence[int]) -> None:
        check_shape("mask has", self.values, shape)

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

    def slices(self, shape: Sequence[int], width: int, places: Tensor | None = None) -> Slices:
        self.check(shape)
        for start, stop in runs(shape[1], width):
            yield start, stop, Fixed(self.values[:, start:stop]).mask
