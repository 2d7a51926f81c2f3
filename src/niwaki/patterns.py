"""Which weights may be non-zero.

A pattern is a value with one operation that matters: ``pattern.mask(scores)``, the mask of the best
weights that the pattern allows. For scores ``|w|`` that is the Euclidean projection of ``w`` onto the
matrices of the pattern::

    argmin_Z  |Z - W|^2   subject to   the support of Z being allowed   =   W * pattern.mask(|W|)

Counts are exact, ties are broken by position, and True means that a weight is kept.
"""

from __future__ import annotations

import abc
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from niwaki.errors import PatternError
from niwaki.rows import ALL, Rows
from niwaki.selection import (
    keep_best_tiles,
    keep_highest,
    keep_highest_blocks,
    keep_highest_of_each,
    keep_highest_per_row,
    kth_smallest,
    kth_smallest_per_row,
    middle_of_each,
)


class Pattern(abc.ABC):
    """A set of allowed supports for a matrix of shape (out, in)."""

    if TYPE_CHECKING:  # at run time a dataclass field would take the property for its default

        @property
        def sparsity(self) -> float:
            """The fraction of zeros that is asked for, in [0, 1)."""

    @abc.abstractmethod
    def mask(self, scores: Tensor) -> Tensor:
        """The allowed mask with the greatest sum of squares of the scores that it keeps.

        Where weights are chosen one by one only the order of the scores matters; where several stand
        or fall together their sizes do, so scores are magnitudes and never their squares.

        Args:
            scores: (out, in), floating point, finite, at least 0, such as |W|. Not changed.

        Returns:
            (out, in) bool, True where a weight is kept.

        Raises:
            PatternError: the pattern does not fit the shape.
        """

    @abc.abstractmethod
    def partial(self, fraction: float) -> Pattern:
        """The pattern on the way to this one that has ``fraction`` (in [0, 1]) of its zeros.

        What this pattern would keep of some scores, the partial one keeps too. A mask that is given
        (``Fixed``) has no way to it and is all there from the start.
        """

    @abc.abstractmethod
    def slices(self, shape: tuple[int, int], width: int) -> Iterator[tuple[int, int, Pattern]]:
        """Cuts a matrix of ``shape`` into runs of columns, for solvers that go from left to right.

        Yields:
            (start, stop, pattern of columns start..stop), in order; the counts of the parts add up
            to the count of the whole. Runs are about ``width`` wide, or the pattern's own group, and
            never cross a multiple of ``width`` that is a multiple of ``group``.
        """

    def at(self, sparsity: float) -> Pattern | None:
        """This kind of pattern with another sparsity, or the nearest that it can have.

        None if it has one only: n:m is what hardware takes, and a mask that is given is that mask.
        """
        return None

    @property
    def group(self) -> int:
        """The number of columns that stand or fall together: m for n:m, a block's columns, otherwise 1."""
        return 1

    def exchange(self, columns: int) -> int:
        """Within how many consecutive ``columns`` of a row a kept and a pruned weight may change places.

        Runs start at multiples of the number. 0: nowhere, because weights of several rows or columns
        stand or fall together.
        """
        return columns

    def reordered(self, columns: Tensor) -> Pattern:
        """The same pattern for a matrix whose columns are taken in the order ``columns``, groups as a whole."""
        return self

    def threshold(self, scores: Tensor) -> Tensor | None:
        """The numbers between the scores that ``mask`` keeps and those that it drops, for a choice by degrees.

        Returns:
            Broadcastable to ``scores``; up to ties ``mask(scores)`` is where a score is above it. None if it
            is not each score for itself that decides (blocks, masks that are given), or if nothing goes.
        """
        return None

    def apart(self, scores: Sequence[Tensor]) -> list[Pattern] | None:
        """Patterns of runs of columns, in whole groups, that together keep of ``scores`` what this one keeps.

        ``scores`` are those of each run. None if a run cannot be left to the threshold of its own scores.
        """
        return None

    @property
    def rows(self) -> Rows:
        """Which rows of the matrix are here, that is in ``scores`` and in masks."""
        return ALL

    def among(self, rows: Rows) -> Pattern | None:
        """The pattern of the same matrix where only ``rows`` are here: what this one answers, for these.

        Sparsity, counts and thresholds stay those of the whole matrix. Whoever has its other rows makes the same
        calls in the same order. None if rows stand or fall together.
        """
        return None

    def weights(self, scores: Tensor) -> int:
        """The number of weights in the whole matrix, of which ``scores`` has the rows that are here."""
        return self.rows.of(scores.shape[0]) * scores.shape[1]

    @property
    def single(self) -> bool:
        """Whether weights can be removed one by one, with every set on the way part of an allowed one."""
        return True

    def check(self, shape: tuple[int, int]) -> None:  # noqa: B027 - most patterns fit every shape
        """Raises PatternError where the pattern does not fit a matrix of ``shape``."""


@dataclass(frozen=True)
class _ByRows(Pattern):
    """A pattern that answers for some ``rows`` of a matrix too."""

    rows: Rows = field(default=ALL, kw_only=True, repr=False, compare=False)

    def among(self, rows: Rows) -> Pattern | None:
        return replace(self, rows=rows)


@dataclass(frozen=True)
class Unstructured(_ByRows):
    """The lowest ``round(sparsity * out * in)`` scores of the whole matrix are zero."""

    sparsity: float

    def __post_init__(self) -> None:
        _check_sparsity(self.sparsity)

    def __str__(self) -> str:
        return f"unstructured:{_number(self.sparsity)}"

    def mask(self, scores: Tensor) -> Tensor:
        return keep_highest(scores, _zeros(self.sparsity, self.weights(scores)), self.rows)

    def threshold(self, scores: Tensor) -> Tensor | None:
        zeros = _zeros(self.sparsity, self.weights(scores))
        return kth_smallest(scores.reshape(-1), zeros, self.rows) if zeros else None

    def apart(self, scores: Sequence[Tensor]) -> list[Pattern] | None:
        # Not the same sparsity for all: runs with every fourth column can be of another scale.
        threshold = self.threshold(torch.cat(list(scores), dim=1))
        if threshold is None:
            return [self] * len(scores)
        kept = self.rows.sum(torch.stack([(part > threshold).count_nonzero() for part in scores])).tolist()
        return [
            replace(self, sparsity=1 - max(1, count) / self.weights(part))
            for count, part in zip(kept, scores, strict=True)
        ]

    def at(self, sparsity: float) -> Pattern | None:
        return replace(self, sparsity=sparsity)

    def partial(self, fraction: float) -> Pattern:
        return replace(self, sparsity=self.sparsity * fraction)

    def slices(self, shape: tuple[int, int], width: int) -> Iterator[tuple[int, int, Pattern]]:
        for start, stop, zeros in _shares(self, shape, width):
            yield start, stop, _Count(zeros, rows=self.rows)


@dataclass(frozen=True)
class PerRow(_ByRows):
    """Every row (output) has the same number of zeros, to within one.

    Where ``sparsity * in`` is not a whole number, each row has the next lower number of zeros and the
    rows whose next weight has the lowest score have one more, so that the total is exactly
    ``round(sparsity * out * in)``. (Solvers that choose masks for one block of columns after another
    keep to that within each block.) Rounding every row down instead, as public code does, leaves 59.9 %
    where 60 % were asked for.
    """

    sparsity: float

    def __post_init__(self) -> None:
        _check_sparsity(self.sparsity)

    def __str__(self) -> str:
        return f"per-row:{_number(self.sparsity)}"

    def mask(self, scores: Tensor) -> Tensor:
        return keep_highest_per_row(scores, _zeros(self.sparsity, self.weights(scores)), self.rows)

    def threshold(self, scores: Tensor) -> Tensor | None:
        zeros = _zeros(self.sparsity, self.weights(scores)) // self.rows.of(scores.shape[0])
        return kth_smallest_per_row(scores, zeros) if zeros else None

    def at(self, sparsity: float) -> Pattern | None:
        return replace(self, sparsity=sparsity)

    def partial(self, fraction: float) -> Pattern:
        return replace(self, sparsity=self.sparsity * fraction)

    def slices(self, shape: tuple[int, int], width: int) -> Iterator[tuple[int, int, Pattern]]:
        # Each run has to give every row its share, so the rows' remainders are settled at the end of
        # each run: a row is then never more than one zero per run away from its fair share.
        for start, stop, zeros in _shares(self, shape, width):
            yield start, stop, _Count(zeros, per_row=True, rows=self.rows)


@dataclass(frozen=True)
class _NOfM(_ByRows):
    """``n`` of ``m`` weights are kept in each of the groups that columns fall into, every group on its own."""

    n: int
    m: int

    def __post_init__(self) -> None:
        if not 0 < self.n <= self.m:
            raise PatternError(f"the pattern {self} keeps n of every m weights; n must be 1 to m")

    @property
    def sparsity(self) -> float:
        return 1 - self.n / self.m

    @property
    def group(self) -> int:
        return self.m

    def partial(self, fraction: float) -> Pattern:
        return _Partial(self, fraction)

    def slices(self, shape: tuple[int, int], width: int) -> Iterator[tuple[int, int, Pattern]]:
        self.check(shape)
        for start, stop in _runs(shape[1], self.m):
            yield start, stop, self


@dataclass(frozen=True)
class NM(_NOfM):
    """At most ``n`` of every ``m`` consecutive weights of a row are non-zero, as in 2:4."""

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    def exchange(self, columns: int) -> int:
        return self.m

    def check(self, shape: tuple[int, int]) -> None:
        if shape[1] % self.m:
            raise PatternError(
                f"the pattern {self} needs a number of columns that {self.m} divides; this matrix has {shape[1]}"
            )

    def mask(self, scores: Tensor) -> Tensor:
        self.check((scores.shape[0], scores.shape[1]))
        return keep_highest_of_each(scores, self.n, self.m)

    def threshold(self, scores: Tensor) -> Tensor | None:
        return middle_of_each(scores, self.n, self.m) if self.n < self.m else None

    def apart(self, scores: Sequence[Tensor]) -> list[Pattern] | None:
        return [self] * len(scores)


@dataclass(frozen=True)
class MixedNM(NM):
    """n:m, or another number than n of every m, the same in a matrix: so that all have that sparsity together.

    Of itself it is n:m; see :mod:`niwaki.planning` for which matrix gets which number.
    """

    def __str__(self) -> str:
        return f"mixed-{self.n}:{self.m}"

    def at(self, sparsity: float) -> Pattern | None:
        kept = math.floor((1 - sparsity) * self.m + 1e-9)
        return NM(min(self.m, max(1, kept)), self.m, rows=self.rows)


class _Tiled(Pattern):
    """Weights of several rows and columns are chosen together, tile by tile."""

    @property
    @abc.abstractmethod
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a tile."""

    def exchange(self, columns: int) -> int:
        return 0

    def among(self, rows: Rows) -> Pattern | None:
        return None  # also of a pattern n:m

    @property
    def single(self) -> bool:
        return False

    def check(self, shape: tuple[int, int]) -> None:
        height, width = self.tile
        if shape[0] % height or shape[1] % width:
            raise PatternError(
                f"the pattern {self} cuts a matrix into tiles of {height} x {width}, which must divide its rows "
                f"and columns; this matrix is {shape[0]} x {shape[1]}"
            )


@dataclass(frozen=True)
class TransposableNM(_Tiled, _NOfM):
    """Every m x m tile has ``n`` weights in each row and each column, so that W and W^T are both n:m.

    A sparse product with W^T, as in training, is then as fast as one with W. The projection is exact:
    of all such tiles (90 for 2:4, 24 for 1:4 and 3:4) the one with the greatest sum of squares. Of
    equal sums the first one is taken, where tiles are read row by row and a dropped weight comes before
    a kept one. For greater m, Hubara et al. solve a minimum-cost flow for each tile, or approximate it.

    Reference: Hubara et al. 2021, arXiv 2102.08124, where N counts zeros; here n counts what is kept.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.m > 4:
            raise PatternError(
                f"the pattern {self} is not affordable: its exact projection tries all tiles, and of 6 x 6 with "
                f"3 per row there are 297,200; use m up to 4, as in transposable-2:4, or plain {self.n}:{self.m}"
            )

    def __str__(self) -> str:
        return f"transposable-{self.n}:{self.m}"

    @property
    def tile(self) -> tuple[int, int]:
        return (self.m, self.m)

    def mask(self, scores: Tensor) -> Tensor:
        self.check((scores.shape[0], scores.shape[1]))
        return keep_best_tiles(scores, self.n, self.m)


@dataclass(frozen=True)
class Quota(_ByRows):
    """n:m with more zeros than n:m asks for: at most n of every m, and a sparsity above 1 - n/m.

    The mask is that of ``within``, then the selection of ``quota`` among the weights that are left. That
    is the best mask of the pattern: groups of m lie within rows and rows within the matrix, and with
    such nested (laminar) limits on counts taking the highest weights that fit is optimal.

    Args:
        within: The pattern n:m.
        quota: What the whole has to be, in each row or in total.

    Raises:
        PatternError: the quota asks for fewer zeros than n:m.
    """

    within: NM
    quota: PerRow | Unstructured

    def __post_init__(self) -> None:
        if self.quota.sparsity < self.within.sparsity:
            raise PatternError(
                f"the pattern {self} asks for {_number(self.quota.sparsity)} zeros in all, and {self.within} alone "
                f"has {_number(self.within.sparsity)}; raise the first to that or more"
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

    def check(self, shape: tuple[int, int]) -> None:
        self.within.check(shape)

    def among(self, rows: Rows) -> Pattern | None:
        return replace(self, quota=replace(self.quota, rows=rows), rows=rows)

    def mask(self, scores: Tensor) -> Tensor:
        return self.quota.mask(_left_by(self.within, scores))

    def at(self, sparsity: float) -> Pattern | None:
        return replace(self, quota=replace(self.quota, sparsity=max(sparsity, self.within.sparsity)))

    def partial(self, fraction: float) -> Pattern:
        return _Partial(self, fraction)

    def slices(self, shape: tuple[int, int], width: int) -> Iterator[tuple[int, int, Pattern]]:
        self.check(shape)
        per_row = isinstance(self.quota, PerRow)
        for start, stop, zeros in _shares(self, shape, width):
            yield start, stop, _Count(zeros, per_row, self.within, rows=self.rows)


@dataclass(frozen=True)
class Block(_Tiled):
    """Blocks of r x c weights stand or fall together: the lowest ``round(sparsity * blocks)`` are zero.

    A block's score is the sum of its squared scores, which makes the mask the Euclidean projection.

    Args:
        sparsity: The fraction of blocks that are zero.
        shape: (r, c), the rows and columns of a block.
    """

    sparsity: float
    shape: tuple[int, int] = (4, 4)

    def __post_init__(self) -> None:
        _check_sparsity(self.sparsity)
        if min(self.shape) < 1:
            raise PatternError(
                f"a block has at least 1 row and 1 column; got {self.shape[0]}x{self.shape[1]}"
            )

    def __str__(self) -> str:
        return f"block-{self.shape[0]}x{self.shape[1]}:{_number(self.sparsity)}"

    @property
    def group(self) -> int:
        return self.shape[1]

    @property
    def tile(self) -> tuple[int, int]:
        return self.shape

    def mask(self, scores: Tensor) -> Tensor:
        self.check((scores.shape[0], scores.shape[1]))
        blocks = scores.numel() // math.prod(self.shape)
        return keep_highest_blocks(scores, self.shape, _zeros(self.sparsity, blocks))

    def at(self, sparsity: float) -> Pattern | None:
        return replace(self, sparsity=sparsity)

    def partial(self, fraction: float) -> Pattern:
        return Block(self.sparsity * fraction, self.shape)

    def slices(self, shape: tuple[int, int], width: int) -> Iterator[tuple[int, int, Pattern]]:
        self.check(shape)
        for start, stop in _runs(shape[1], width, self.group):
            blocks = (shape[0] * end // math.prod(self.shape) for end in (start, stop))
            before, after = (_zeros(self.sparsity, number) for number in blocks)
            yield start, stop, _BlockCount(after - before, self.shape)


@dataclass(frozen=True, eq=False)
class Fixed(_ByRows):
    """A mask that comes from elsewhere: another solver, another model.

    Args:
        values: (out, in) bool, True where a weight is kept.
        within: The pattern that it was chosen from, which solvers that refine masks keep to.
    """

    values: Tensor
    within: Pattern | None = None

    def __str__(self) -> str:
        return f"fixed:{self.sparsity:.4g}"

    @property
    def sparsity(self) -> float:
        return 1 - self.rows.total(int(self.values.count_nonzero())) / self.weights(self.values)

    def among(self, rows: Rows) -> Pattern | None:
        return replace(self, values=rows.own(self.values), rows=rows)

    def check(self, shape: tuple[int, int]) -> None:
        if tuple(self.values.shape) != tuple(shape):
            raise PatternError(
                f"the given mask has shape {tuple(self.values.shape)}, the matrix {tuple(shape)}"
            )

    def reordered(self, columns: Tensor) -> Pattern:
        return replace(self, values=self.values[:, columns.to(self.values.device)])

    def exchange(self, columns: int) -> int:
        return self.within.exchange(columns) if self.within else 0

    def mask(self, scores: Tensor) -> Tensor:
        self.check((scores.shape[0], scores.shape[1]))
        return self.values.to(scores.device)

    def partial(self, fraction: float) -> Pattern:
        return self

    def slices(self, shape: tuple[int, int], width: int) -> Iterator[tuple[int, int, Pattern]]:
        self.check(shape)
        for start, stop in _runs(shape[1], width):
            yield start, stop, Fixed(self.values[:, start:stop])


def parse_pattern(text: str) -> Pattern:
    """A pattern from what its ``str`` is.

    ``"2:4"``, ``"unstructured:0.6"``, ``"per-row:0.6"``, ``"transposable-2:4"``, ``"mixed-2:4"``,
    ``"block-4x4:0.5"``, ``"2:4+per-row:0.6"`` or ``"2:4+unstructured:0.6"``.

    Raises:
        PatternError: it is none of these, or its numbers are out of range.
    """
    within, plus, quota = text.strip().partition("+")
    kind, _, number = within.partition(":")
    try:
        if plus:
            nm, rest = parse_pattern(within), parse_pattern(quota)
            if isinstance(nm, NM) and isinstance(rest, PerRow | Unstructured):
                return Quota(nm, rest)
        elif match := re.fullmatch(r"(transposable-|mixed-)?(\d+):(\d+)", within):
            n, m = int(match[2]), int(match[3])
            return (
                TransposableNM(n, m)
                if match[1] == "transposable-"
                else MixedNM(n, m)
                if match[1]
                else NM(n, m)
            )
        elif match := re.fullmatch(r"block-(\d+)x(\d+)", kind):
            return Block(float(number), (int(match[1]), int(match[2])))
        elif kind in ("unstructured", "per-row"):
            return (Unstructured if kind == "unstructured" else PerRow)(float(number))
    except ValueError as error:
        if isinstance(error, PatternError):
            raise
    raise PatternError(
        f"{text!r} is no pattern; try 2:4, unstructured:0.6 or per-row:0.6, "
        "or transposable-2:4, mixed-2:4, block-4x4:0.5 or 2:4+per-row:0.6"
    )


@dataclass(frozen=True)
class _Run(_ByRows):
    """A run of the columns of a matrix: a given number of zeros, or of blocks of them."""

    zeros: int

    @property
    def sparsity(self) -> float:
        raise NotImplementedError("a number of zeros is a sparsity only for a known shape")

    def partial(self, fraction: float) -> Pattern:
        return replace(self, zeros=round(self.zeros * fraction))

    def slices(self, shape: tuple[int, int], width: int) -> Iterator[tuple[int, int, Pattern]]:
        raise NotImplementedError("column runs are not cut again")


@dataclass(frozen=True)
class _Count(_Run):
    """So many zeros, in each row as many to within one or anywhere, and within n:m or not."""

    per_row: bool = False
    within: NM | None = None

    def mask(self, scores: Tensor) -> Tensor:
        left = _left_by(self.within, scores) if self.within else scores
        return (keep_highest_per_row if self.per_row else keep_highest)(left, self.zeros, self.rows)


@dataclass(frozen=True)
class _BlockCount(_Run):
    """So many blocks of zeros."""

    shape: tuple[int, int]

    def mask(self, scores: Tensor) -> Tensor:
        return keep_highest_blocks(scores, self.shape, self.zeros)


@dataclass(frozen=True)
class _Partial(Pattern):
    """A pattern half way: what its own mask keeps is safe, the lowest of the other weights are zero.

    For n:m that is Boza 2024, section 3.2: "we always keep the two highest elements from each group of
    four and then prune 2 s_t weights from the remaining ones".
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
        return _Partial(self.final, self.fraction * fraction)

    def slices(self, shape: tuple[int, int], width: int) -> Iterator[tuple[int, int, Pattern]]:
        raise NotImplementedError("gradual solvers do not go column by column")


def _check_sparsity(sparsity: float) -> None:
    if not 0 <= sparsity < 1:
        raise PatternError(f"sparsity is the fraction of zeros, from 0 to below 1; got {sparsity:g}")


def _left_by(pattern: Pattern, scores: Tensor) -> Tensor:
    """The scores, with those that ``pattern`` drops below all others."""
    return scores.masked_fill(~pattern.mask(scores), -math.inf)


def _zeros(sparsity: float, weights: int) -> int:
    """One formula for a whole and for its parts: s * rows * columns depends on the order of the products."""
    return round(sparsity * weights)


def _shares(pattern: Pattern, shape: tuple[int, int], width: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, zeros) of runs of columns, with the zeros of all rows of a matrix of which ``shape`` is here."""
    rows = pattern.rows.of(shape[0])
    for start, stop in _runs(shape[1], width, pattern.group):
        yield start, stop, _zeros(pattern.sparsity, rows * stop) - _zeros(pattern.sparsity, rows * start)


def _number(value: float) -> str:
    """The short form of a number where it reads back as the same one, otherwise all its digits."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def _runs(columns: int, width: int, group: int = 1) -> Iterator[tuple[int, int]]:
    """Runs that end at the multiples of ``width``, or at the last multiple of ``group`` before."""
    start = 0
    for end in range(width, columns + width, width):
        stop = min(end, columns) // group * group
        if stop > start:
            yield start, stop
            start = stop
