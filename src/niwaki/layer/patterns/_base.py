"""What all patterns are."""

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

    def split(self, scores: Sequence[Tensor]) -> list[Pattern] | None:
        """Patterns of runs of columns, in whole groups, that together keep of ``scores`` what this one keeps.

        ``scores`` are those of each run. None if a run cannot be left to the threshold of its own scores.
        """
        return None

    @property
    def rows(self) -> Rows:
        """Which rows of the matrix are here, that is in ``scores`` and in masks."""
        return ALL

    def for_rows(self, rows: Rows) -> Pattern | None:
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
class ByRows(Pattern):
    """A pattern that answers for some ``rows`` of a matrix too."""

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
    """One formula for a whole and for its parts: s * rows * columns depends on the order of the products."""
    return round(sparsity * weights)


def short_number(value: float) -> str:
    """The short form of a number where it reads back as the same one, otherwise all its digits."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
