"""The base of all patterns."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from niwaki.arguments import check_fields
from niwaki.errors import PatternError
from niwaki.layer.patterns.rows import ALL, Rows
from niwaki.layer.patterns.selection import keep_highest
from niwaki.quantities import check_sparsity

#: Sparsities up to this are none: fewer zeros than one in a matrix of a million million weights.
_NONE = 1e-12
#: From scores (out, in) the mask of the weights that are kept.
Choice: TypeAlias = Callable[[Tensor], Tensor]
#: Runs of columns: (start, stop, the choice among them).
Slices: TypeAlias = Iterator[tuple[int, int, Choice]]


class Pattern(abc.ABC):
    """A rule for where the zeros of a matrix (out, in) may be; solvers ask it for masks."""

    if TYPE_CHECKING:  # at run time a dataclass field would take the property for its default

        @property
        def sparsity(self) -> float:
            """The wanted fraction of zeros, in [0, 1)."""

    @abc.abstractmethod
    def mask(self, scores: Tensor) -> Tensor:
        """The allowed mask that keeps the greatest sum of squared scores: (out, in) bool, True for kept weights.

        ``scores`` (out, in) must be floating point, finite and at least 0, and are not changed. They are magnitudes
        such as |W|, not squares, because thresholds lie between them.

        Raises:
            PatternError: the shape does not fit the pattern.
        """

    @property
    def has_factors(self) -> bool:
        """Whether matrices become products of two sparse factors."""
        return False

    def kept_in_factors(self, shape: Sequence[int]) -> tuple[int, int]:
        """The numbers of weights in the left and the right factor of a matrix; PatternError if there are no factors."""
        raise PatternError(f"{self} is a pattern of one matrix, and not of two factors")

    def highest_sparsity(self, shape: Sequence[int]) -> float:
        """The highest sparsity that a pattern of this kind can have for a matrix of this ``shape``."""
        return 1.0

    def partial(self, fraction: float) -> Pattern:
        """A pattern with ``fraction`` (in [0, 1]) of the zeros, which keeps everything that this one keeps."""
        return _Partial(self, fraction)

    @abc.abstractmethod
    def slices(self, shape: Sequence[int], width: int, places: Tensor | None = None) -> Slices:
        """Yields runs of columns, for solvers that go from left to right: (start, stop, function that makes the mask).

        The counts of the runs add up to that of the whole. Runs are about ``width`` columns wide, or as wide as the
        pattern's group, and never cross a multiple of both. If all weights but those at ``places`` (out, in) bool are
        zero, each run keeps its share of what is there.
        """

    def at(self, sparsity: float) -> Pattern | None:
        """A pattern of this kind with the nearest possible ``sparsity``; None if the kind has only one (n:m, masks)."""
        return None

    @property
    def group(self) -> int:
        """The number of columns whose mask is chosen together: m for n:m, otherwise 1."""
        return 1

    def reordered(self, columns: Tensor) -> Pattern:
        """The pattern for a matrix whose columns are taken in the order ``columns``, with groups kept together."""
        return self

    def threshold(self, scores: Tensor) -> Tensor | None:
        """The value that kept scores exceed, up to ties (broadcastable); None if there is none, or all are kept."""
        return None

    def split(self, scores: Sequence[Tensor]) -> list[Pattern] | None:
        """Patterns for runs of whole groups with these ``scores``, equal to this one together; None if impossible."""
        return None

    @property
    def rows(self) -> Rows:
        """The rows of the matrix that ``scores`` and masks cover."""
        return ALL

    def for_rows(self, rows: Rows) -> Pattern | None:
        """The pattern, counts included, for scores and masks that cover only ``rows``; None if all rows are needed."""
        return None

    def weights(self, scores: Tensor) -> int:
        """The number of weights in the whole matrix, of which ``scores`` covers some rows."""
        return self.rows.of(scores.shape[0]) * scores.shape[1]

    def check(self, shape: Sequence[int]) -> None:  # noqa: B027 - most patterns fit every shape
        """Raises PatternError if the pattern does not fit a matrix of this ``shape``."""


@dataclass(frozen=True)
class _Partial(Pattern):
    """Keeps what ``final`` keeps; of the others a ``fraction``, the lowest, are zero (Boza 2024, section 3.2)."""

    final: Pattern
    fraction: float

    @property
    def sparsity(self) -> float:
        return self.final.sparsity * self.fraction

    @property
    def rows(self) -> Rows:
        return self.final.rows

    def check(self, shape: Sequence[int]) -> None:
        self.final.check(shape)

    def mask(self, scores: Tensor) -> Tensor:
        safe, rows = self.final.mask(scores), self.final.rows
        # The count comes from the final mask, so that fraction 1 is that mask to the weight.
        zeros_at_end = rows.total(safe.numel() - int(safe.count_nonzero()))
        zeros = round(self.fraction * zeros_at_end)
        return safe if zeros == zeros_at_end else keep_highest(scores.masked_fill(safe, math.inf), zeros, rows)

    def slices(self, shape: Sequence[int], width: int, places: Tensor | None = None) -> Slices:
        raise NotImplementedError("gradual solvers do not go column by column")


@dataclass(frozen=True, eq=False)
class ByRows(Pattern):
    """A pattern that can be restricted to some ``rows`` of a matrix."""

    rows: Rows = field(default=ALL, kw_only=True, repr=False, compare=False)

    def for_rows(self, rows: Rows) -> Pattern | None:
        return replace(self, rows=rows)


@dataclass(frozen=True)
class BySparsity(ByRows):
    """A pattern of any ``sparsity``, the fraction of zeros, of which each run of columns has its share."""

    sparsity: float

    def __post_init__(self) -> None:
        check_fields(self)
        check_sparsity(self.sparsity)

    @abc.abstractmethod
    def keep(self, scores: Tensor, zeros: int) -> Tensor:
        """The mask with this number of zeros in all rows of the matrix together."""

    def zeros(self, weights: int) -> int:
        """The number of zeros among this many weights.

        It is the only such formula, because s * rows * columns depends on the order of the products.
        """
        return round(self.sparsity * weights)

    def mask(self, scores: Tensor) -> Tensor:
        return self.keep(scores, self.zeros(self.weights(scores)))

    def slices(self, shape: Sequence[int], width: int, places: Tensor | None = None) -> Slices:
        rows = self.rows.of(shape[0])
        zeros_before = self._zeros_before(rows, places)
        for start, stop in runs(shape[1], width):
            zeros = zeros_before(stop) - zeros_before(start)
            yield start, stop, functools.partial(self.keep, zeros=zeros)

    def _zeros_before(self, rows: int, places: Tensor | None) -> Callable[[int], int]:
        """From a column to the zeros in all that are before it."""
        if places is None:
            return lambda column: self.zeros(rows * column)
        room = [0, *self.rows.sum(places.sum(dim=0)).cumsum(0).tolist()]
        weights = rows * places.shape[1]
        kept = min(weights - self.zeros(weights), room[-1])
        return lambda column: rows * column - kept * room[column] // max(1, room[-1])

    def at(self, sparsity: float) -> Pattern | None:
        return replace(self, sparsity=sparsity)

    def partial(self, fraction: float) -> Pattern:
        sparsity = self.sparsity * fraction
        return replace(self, sparsity=sparsity if sparsity > _NONE else 0.0)


def check_places(what: str, places: Tensor) -> None:
    """Raises PatternError, which begins with ``what``, unless ``places`` is (out, in) bool."""
    if places.ndim != 2 or places.dtype != torch.bool:
        raise PatternError(f"{what} (out, in) bool; got {tuple(places.shape)} {places.dtype}")


def check_shape(what: str, places: Tensor, shape: Sequence[int]) -> None:
    """Raises PatternError where ``places``, which are called ``what``, are not those of a matrix of ``shape``."""
    if tuple(places.shape) != tuple(shape):
        raise PatternError(f"the given {what} shape {tuple(places.shape)}, the matrix {tuple(shape)}")


def runs(columns: int, width: int) -> Iterator[tuple[int, int]]:
    """Runs of ``width`` columns, the last one of those that are left."""
    for start in range(0, columns, width):
        yield start, min(start + width, columns)


def short_number(value: float) -> str:
    """The short form of a number if it reads back as the same one, otherwise all its digits."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
