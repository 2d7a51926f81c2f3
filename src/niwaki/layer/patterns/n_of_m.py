"""n of every m weights in a row: as they are, each matrix with its own n, and with a quota."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from niwaki.arguments import check_fields
from niwaki.errors import PatternError
from niwaki.layer.patterns._base import ByRows, Counted, Pattern, Slices, runs, short_number
from niwaki.layer.patterns.rows import Rows
from niwaki.layer.patterns.selection import keep_highest_of_each, middle_of_each
from niwaki.layer.patterns.unstructured import PerRow, Unstructured
from niwaki.quantities import check_n_of_m


@dataclass(frozen=True)
class NM(ByRows):
    """At most ``n`` of every ``m`` consecutive weights of a row are nonzero; GPUs support 2:4.

    Raises:
        PatternError: n or m is out of range, or, when a matrix is known, m does not divide the number of its columns.
    """

    prefix: ClassVar[str] = ""
    n: int
    m: int

    def __str__(self) -> str:
        return f"{self.prefix}{self.n}:{self.m}"

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


@dataclass(frozen=True)
class MixedNM(NM):
    """A choice of n for each matrix, with the same m, so that all matrices together have the sparsity of n:m.

    Until :mod:`niwaki.pruning.plan` has chosen, it acts as n:m.
    """

    prefix = "mixed-"

    def at(self, sparsity: float) -> Pattern | None:
        kept = math.floor((1 - sparsity) * self.m + 1e-9)
        return NM(min(self.m, max(1, kept)), self.m, rows=self.rows)


@dataclass(frozen=True)
class Quota(Counted):
    """n:m with more zeros: at most n of every m weights are nonzero, and the sparsity is above 1 - n/m.

    The mask is that of ``within``, followed by the selection of ``quota`` (for each row, or the matrix) among the
    remaining weights. With such nested (laminar) limits it is optimal to take the highest scores that fit.

    Raises:
        PatternError: the sparsity of ``quota`` is below that of ``within``.
    """

    within: NM
    quota: PerRow | Unstructured

    def __post_init__(self) -> None:
        check_fields(self)
        if self.quota.sparsity < self.within.sparsity:
            raise PatternError(
                f"the pattern {self} asks for {short_number(self.quota.sparsity)} zeros in all, and "
                f"{self.within} alone has {short_number(self.within.sparsity)}; raise the first to at least that"
            )

    def __str__(self) -> str:
        return f"{self.within}+{self.quota}"

    @property
    def sparsity(self) -> float:
        return self.quota.sparsity

    @property
    def group(self) -> int:
        return self.within.group

    def exchange(self, columns: int) -> int:
        return self.within.exchange(columns)

    def check(self, shape: Sequence[int]) -> None:
        self.within.check(shape)

    def for_rows(self, rows: Rows) -> Pattern | None:
        return replace(self, quota=replace(self.quota, rows=rows), rows=rows)

    def keep(self, scores: Tensor, zeros: int) -> Tensor:
        allowed = self.within.mask(scores)
        # A run of columns may be left to ``within`` alone, where others have many zeros: of these not all are chosen.
        return self.quota.keep(scores.masked_fill(~allowed, -math.inf), zeros) & allowed

    def room(self, places: Tensor) -> Tensor:
        of_group: Tensor = places.unflatten(1, (-1, self.group)).sum(dim=2)
        return of_group.clamp_(max=self.within.n).sum(dim=0)

    def at(self, sparsity: float) -> Pattern | None:
        return replace(self, quota=replace(self.quota, sparsity=max(sparsity, self.within.sparsity)))
