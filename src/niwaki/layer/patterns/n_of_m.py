"""n of every m weights in a row."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from niwaki.arguments import check_fields
from niwaki.errors import PatternError
from niwaki.layer.patterns._base import ByRows, Pattern, Slices, runs
from niwaki.layer.patterns.selection import keep_highest_of_each, middle_of_each
from niwaki.quantities import check_n_of_m


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

    def exchange(self, columns: int) -> int:
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
