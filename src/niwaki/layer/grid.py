"""Grids for weights: whole numbers of a few bits, times a scale for each row and group of inputs."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from niwaki.arguments import check_fields
from niwaki.errors import UsageError
from niwaki.quantities import check_grid, parse_bits

#: The scales that are tried for a group, relative to the one that puts its largest weight at the end of the grid.
_CLIPPING = tuple(1 - 0.05 * i for i in range(11))


@dataclass(frozen=True)
class Grid:
    """The numbers q s with whole q from -2^(bits-1) to 2^(bits-1) - 1 and a scale s for each row and group of inputs.

    Scales are positive and representable in ``dtype``; q s is rounded to ``dtype``, as in a product in that dtype.
    Given s, q is the whole number next to q s / s. ``bits`` are 2 to 8, and ``group`` consecutive inputs share a scale,
    or all of a row if it is None; UsageError if out of range.

    With an ``average`` of bits matrices of a model have different ones, the :attr:`choices`, see
    :mod:`niwaki.pruning.mixed_bits`; ``bits`` are the most, which have the numbers of all.
    """

    bits: int
    group: int | None = None
    average: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_grid(self.bits, self.group, self.average)

    def __str__(self) -> str:
        bits = self.bits if self.average is None else self.average
        return f"int{bits}" + ("" if self.group is None else f":{self.group}")

    @property
    def is_mixed(self) -> bool:
        """Whether matrices have different numbers of bits."""
        return self.average is not None

    @property
    def choices(self) -> tuple[int, ...]:
        """The bits that a matrix may have: what the formats have that take such groups.

        Packed models, in groups of a multiple of 64, have more of them than GGUF files, in groups of 32.
        """
        if not self.is_mixed:
            return (self.bits,)
        return (4, 5, 8) if self.group and self.group % 64 else (2, 3, 4, 5, 6, 8)

    def of(self, bits: int) -> "Grid":
        """The grid of a matrix with so many ``bits``."""
        return Grid(bits, self.group)

    def fewest(self, codes: Tensor) -> int:
        """The fewest bits, of those that a matrix may have, that have all of the whole numbers ``codes``."""
        low, high = (int(codes.min()), int(codes.max())) if codes.numel() else (0, 0)
        return next(bits for bits in self.choices if self.of(bits).lowest <= low and high <= self.of(bits).highest)

    @property
    def lowest(self) -> int:
        return -(1 << (self.bits - 1))

    @property
    def highest(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def groups(self, columns: int) -> int:
        """The number of scales of a row with ``columns`` inputs, which must divide into groups (UsageError)."""
        self.check([columns])
        return columns // self.group if self.group else 1

    def check(self, widths: Iterable[int]) -> None:
        """Raises UsageError unless matrices with these numbers of inputs can all be divided into groups."""
        widths = list(widths)
        if self.group and (odd := [columns for columns in widths if columns % self.group]):
            common = math.gcd(*widths)
            near = next(n for n in range(min(self.group, common), 0, -1) if common % n == 0)
            raise UsageError(
                f"{odd[0]} inputs cannot be divided into groups of {self.group} that share a scale; try "
                f"int{self.bits}:{near}, or int{self.bits} for one scale for each row"
            )

    def scales(self, W: Tensor, importance: Tensor, dtype: torch.dtype) -> Tensor:
        """(out, groups) in the dtype of W: of some scales for each group the one with the least squared error.

        The error is that of rounding W (out, in), weighted by ``importance`` (in,). The largest weight of a group is at
        the end of the grid, or up to twice outside, where it is cut off. A group of zeros has the scale 1.
        """
        grouped = W.unflatten(1, (self.groups(W.shape[1]), -1))
        widest = grouped.abs().amax(dim=2).div_((self.highest - self.lowest) / 2)
        chosen, least = torch.ones_like(widest), torch.full_like(widest, math.inf)
        for ratio in _CLIPPING:
            scales = usable(widest * ratio, dtype)
            errors = self.project(W, scales, dtype).sub_(W).square_().mul_(importance)
            error = errors.view_as(grouped).sum(dim=2)
            chosen, least = torch.where(error < least, scales, chosen), torch.minimum(error, least)
        return chosen

    def codes(self, W: Tensor, scales: Tensor) -> Tensor:
        """(out, in), the q nearest to W (out, in), as whole numbers in the dtype of W."""
        grouped: Tensor = W.unflatten(1, (scales.shape[1], -1)) / scales.unsqueeze(2)
        return grouped.round_().clamp_(self.lowest, self.highest).flatten(1)

    def values(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """(out, in), q s in the dtype of ``codes``, rounded to ``dtype``."""
        grouped: Tensor = codes.unflatten(1, (scales.shape[1], -1)) * scales.unsqueeze(2)
        return grouped.flatten(1).to(dtype).to(codes.dtype)

    def project(self, W: Tensor, scales: Tensor, dtype: torch.dtype, same_zeros: bool = False) -> Tensor:
        """(out, in), the nearest numbers of the grid, in the dtype of W; with ``same_zeros`` only zeros become zero."""
        codes = self.codes(W, scales)
        if same_zeros:
            codes = torch.where((W != 0) & (codes == 0), W.sign(), codes)
        return self.values(codes, scales, dtype)

    def has(self, W: Tensor, scales: Tensor) -> bool:
        """Whether all of W (out, in) are whole numbers times these ``scales``, rounded to their dtype, to the bit."""
        W = W.float()
        return torch.equal(self.project(W, scales.float(), scales.dtype), W)


def usable(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """``scales`` rounded to ``dtype``, in their own; 1 where that is not above 0."""
    rounded = scales.to(dtype).to(scales.dtype)
    return torch.where(rounded > 0, rounded, 1.0)


def scale_dtype(stored: torch.dtype) -> torch.dtype:
    """The dtype of the scales of weights that are stored in ``stored``: the same, but not above float32."""
    return torch.float32 if stored == torch.float64 else stored


def parse_grid(text: str) -> Grid:
    """The grid of a text such as ``"int4:128"``, or ``"int8"`` for one scale for each row; UsageError if not valid."""
    return Grid(*parse_bits(text))
