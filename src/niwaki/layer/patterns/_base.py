"""The base of all patterns."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from niwaki.errors import PatternError
from niwaki.layer.patterns.rows import ALL, Rows


class Pattern(abc.ABC):
    """A set of allowed supports for a matrix of shape (out, in)."""

    if TYPE_CHECKING:  # at run time a dataclass field would take the property for its default

        @property
        def sparsity(self) -> float:
            """The wanted fraction of zeros, in [0, 1)."""

    @abc.abstractmethod
    def mask(self, scores: Tensor) -> Tensor:
        """The allowed mask with the greatest sum of squares of the scores that it keeps.

        Scores are magnitudes, not squares: where several weights are chosen together their sizes matter.

        Args:
            scores: (out, in), floating point, finite, at least 0, such as |W|. Not changed.

        Returns:
            (out, in) bool, True where a weight is kept.

        Raises:
            PatternError: the pattern does not fit the shape.
        """

    @abc.abstractmethod
    def partial(self, fraction: float) -> Pattern:
        """The pattern with ``fraction`` (in [0, 1]) of its zeros, which keeps all that this one would keep.

        A given mask (``Fixed``) stays as it is.
        """

    @abc.abstractmethod
    def slices(self, shape: tuple[int, int], width: int) -> Iterator[tuple[int, int, Pattern]]:
        """Cuts a matrix of ``shape`` into runs of columns, for solvers that go from left to right.

        Yields:
            (start, stop, pattern of columns start..stop), in order; their counts add up to that of the whole. Runs are
            about ``width`` wide, or the pattern's own group, and never cross a multiple of ``width`` that is a multiple
            of ``group``.
        """

    def at(self, sparsity: float) -> Pattern | None:
        """This kind of pattern with another sparsity, or the nearest possible; None if it has one only (n:m, masks)."""
        return None

    @property
    def group(self) -> int:
        """The number of columns that are chosen together: m for n:m, a block's columns, otherwise 1."""
        return 1

    def exchange(self, columns: int) -> int:
        """The length of the runs of a row within which a kept and a pruned weight may change places.

        0 where weights of several rows or columns are chosen together.
        """
        return columns

    def reordered(self, columns: Tensor) -> Pattern:
        """The same pattern for a matrix whose columns are taken in the order ``columns``, groups as a whole."""
        return self

    def threshold(self, scores: Tensor) -> Tensor | None:
        """The thresholds between kept and dropped scores, broadcastable to ``scores``, for a choice by degrees.

        Up to ties ``mask(scores)`` is where a score is above it. None if scores do not decide one by one (blocks, given
        masks), or if nothing is dropped.
        """
        return None

    def split(self, scores: Sequence[Tensor]) -> list[Pattern] | None:
        """A pattern for each run of columns, in whole groups, which together keep what this one keeps.

        ``scores`` are those of each run. None if runs cannot choose on their own.
        """
        return None

    @property
    def rows(self) -> Rows:
        """The rows of the matrix that ``scores`` and masks have."""
        return ALL

    def for_rows(self, rows: Rows) -> Pattern | None:
        """The same pattern where ``scores`` and masks have only ``rows``; None if rows are chosen together.

        Sparsity, counts and thresholds stay those of the whole matrix. The processes with its other rows make the same
        calls in the same order.
        """
        return None

    def weights(self, scores: Tensor) -> int:
        """The number of weights in the whole matrix, of which ``scores`` has some rows."""
        return self.rows.of(scores.shape[0]) * scores.shape[1]

    @property
    def single(self) -> bool:
        """Whether weights can be removed one by one on the way to an allowed set."""
        return True

    def check(self, shape: tuple[int, int]) -> None:  # noqa: B027 - most patterns fit every shape
        """Raises PatternError where the pattern does not fit a matrix of ``shape``."""


@dataclass(frozen=True)
class ByRows(Pattern):
    """A pattern that can be restricted to some ``rows`` of a matrix."""

    rows: Rows = field(default=ALL, kw_only=True, repr=False, compare=False)

    def for_rows(self, rows: Rows) -> Pattern | None:
        return replace(self, rows=rows)


class Tiled(Pattern):
    """Weights of several rows and columns are chosen together, tile by tile."""

    @property
    @abc.abstractmethod
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a tile."""

    def exchange(self, columns: int) -> int:
        return 0

    def for_rows(self, rows: Rows) -> Pattern | None:
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


def check_sparsity(sparsity: float) -> None:
    if not 0 <= sparsity < 1:
        raise PatternError(f"sparsity is the fraction of zeros, from 0 to below 1; got {sparsity:g}")


def zeros_of(sparsity: float, weights: int) -> int:
    """The number of zeros: one formula, because s * rows * columns depends on the order of the products."""
    return round(sparsity * weights)


def short_number(value: float) -> str:
    """The short form of a number if it reads back as the same one, otherwise all its digits."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
