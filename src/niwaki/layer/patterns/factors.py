"""Two sparse factors in the place of a matrix."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from niwaki.choices import TWO_FACTORS
from niwaki.errors import PatternError
from niwaki.layer.grid import Grid
from niwaki.layer.patterns._base import BySparsity, Slices, short_number

#: A row of a mask is whole words of so many bits, and a scale is for all columns of some words.
_WORD = 64
#: The least rows and columns of a matrix.
_LEAST = _WORD
#: The bits of a value on a grid: with 4, and as many bytes, one matrix loses half of what two factors do, or less.
_BITS_ON_GRID = 8
#: The least weights of the square factor, for each of its columns.
_LEAST_IN_COLUMN = 2
#: The bits of a value or a scale, as models are stored. Every place of a mask has one bit.
_BITS = 16
#: The share of the kept weights that the square factor has: where the matrix is square too, and elsewhere.
_SHARES = 0.3, 0.2
#: The same on a grid: of fewer values that factor needs more.
_SHARES_ON_GRID = 0.4, 0.25


@dataclass(frozen=True)
class TwoFactors(BySparsity):
    """Two sparse factors whose product is W, in the bytes of one sparse matrix with this ``sparsity``.

    For W (out, in) the left factor is (out, n) and the right one (n, in), with n the lesser of ``out`` and ``in``, so
    one of them is square. A value counts 16 bits, or those of the ``grid``, whose scales count 16; every place of a
    mask counts one. What a second mask and its scales take therefore leaves two factors fewer values than one matrix
    would have. The solver is :class:`~niwaki.layer.solvers.DoubleSparse`.

    Raises:
        PatternError: the sparsity is out of range, or the grid has other than 8 bits, or groups that are no multiple of
            64 inputs.
    """

    grid: Grid | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grid and self.grid.bits != _BITS_ON_GRID:
            raise PatternError(
                f"the values of two factors have 8 bits on a grid, not {self.grid.bits}: with fewer one matrix loses "
                "less in the same bytes; take int8, or a pattern of one matrix"
            )
        if self.grid and (self.grid.group or 0) % _WORD:
            raise PatternError(
                f"the scales of two factors are for rows or groups of a multiple of {_WORD} inputs, not of "
                f"{self.grid.group}; take int8, or int8:{_WORD}"
            )

    def __str__(self) -> str:
        return f"{TWO_FACTORS}:{short_number(self.sparsity)}" + (f":{self.grid}" if self.grid else "")

    @property
    def has_factors(self) -> bool:
        return True

    def kept_in_factors(self, shape: Sequence[int]) -> tuple[int, int]:
        """See :meth:`Pattern.kept_in_factors`; PatternError if two factors cannot be made from such a matrix."""
        rows, columns = shape
        least = min(rows, columns)
        total = rows * columns - self.zeros(rows * columns) - self._beside(least)
        square = min(int(self._share(shape) * total), least**2)
        if least < _LEAST:
            raise PatternError(f"a matrix of {rows} x {columns} is too small for {self}: from {_LEAST} on")
        # A column of the left factor and its row of the right one count for nothing unless both have weights.
        if square < _LEAST_IN_COLUMN * least:
            raise PatternError(
                f"{self} leaves a matrix of {rows} x {columns} fewer than {_LEAST_IN_COLUMN * least} weights for its "
                "square factor: the masks take the rest; ask for fewer zeros"
            )
        return (square, total - square) if rows < columns else (total - square, square)

    def _share(self, shape: Sequence[int]) -> float:
        """The share of the kept weights that the square factor has."""
        rows, columns = shape
        return (_SHARES_ON_GRID if self.grid else _SHARES)[rows != columns]

    def _beside(self, least: int) -> int:
        """The weights that are given up for the mask and the scales of a square factor, which one matrix has not."""
        if self.grid is None:
            return math.ceil(least**2 / _BITS)
        return math.ceil((least**2 + _BITS * least * self.grid.groups(least)) / self.grid.bits)

    def highest_sparsity(self, shape: Sequence[int]) -> float:
        rows, columns = shape
        least = min(rows, columns)
        total = (_LEAST_IN_COLUMN * least + 1) / self._share(shape) + self._beside(least) + 1
        return max(0.0, 1 - total / (rows * columns))

    def check(self, shape: Sequence[int]) -> None:
        self.kept_in_factors(shape)

    def keep(self, scores: Tensor, zeros: int) -> NoReturn:
        self._refuse()

    def slices(self, shape: Sequence[int], width: int, places: Tensor | None = None) -> Slices:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise PatternError(f"{self} has no mask; take the solver double-sparse, or another pattern")
