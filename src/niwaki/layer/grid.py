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
    """A grid for weights: the numbers q s with whole q from -2^(bits-1) to 2^(bits-1) - 1, and scales s.

    Each row has one scale for every ``group`` consecutive inputs, or one for all if ``group`` is None. Scales are
    positive and representable in ``dtype``; q s is rounded to ``dtype``, as in a product in that dtype. Given s, a
    number q s of the grid is restored by the whole number next to q s / s.

    Attributes:
        bits: 2 to 8. With an ``average`` it is the largest number of bits, whose whole numbers include all others.
        group: Number of consecutive inputs that share a scale; None for a whole row.
        average: Average number of bits over the matrices of a model, which then have different ones, among
            :attr:`choices`; see :mod:`niwaki.pruning.mixed_bits`. None for the same ``bits`` in all.

    Raises:
        UsageError: a value is out of range.
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
        """The numbers of bits that a matrix may have: those that exist in the formats with such groups.

        Packed models, with groups of a multiple of 64, have more of them than GGUF files, with groups of 32.
        """
        if not self.is_mixed:
            return (self.bits,)
        return (4, 5, 8) if self.group and self.group % 64 else (2, 3, 4, 5, 6, 8)

    def of(self, bits: int) -> "Grid":
        """The grid of a matrix with this number of ``bits``."""
        return Grid(bits, self.group)

    def fewest(self, codes: Tensor) -> int:
        """The smallest of the :attr:`choices` of bits that can hold all of the whole numbers ``codes``."""
        low, high = (int(codes.min()), int(codes.max())) if codes.numel() else (0, 0)
        return next(bits for bits in self.choices if self.of(bits).lowest <= low and high <= self.of(bits).highest)

    @property
    def lowest(self) -> int:
        return -(1 << (self.bits - 1))

    @property
    def highest(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def groups(self, columns: int) -> int:
        """The number of scales for a row of ``columns`` inputs; UsageError if they cannot be divided into groups."""
        self.check([columns])
        return columns // self.group if self.group else 1

    def check(self, widths: Iterable[int]) -> None:
        """Raises UsageError unless rows of all these ``widths`` can be divided into groups."""
        widths = list(widths)
        if self.group and (odd := [columns for columns in widths if columns % self.group]):
            common = math.gcd(*widths)
            near = next(n for n in range(min(self.group, common), 0, -1) if common % n == 0)
            raise UsageError(
                f"{odd[0]} inputs cannot be divided into groups of {self.group} that share a scale; try "
                f"int{self.bits}:{near}, or int{self.bits} for one scale for each row"
            )

    def scales(self, W: Tensor, importance: Tensor, dtype: torch.dtype) -> Tensor:
        """The best scales for W (out, in) among a few candidates: (out, groups) in the dtype of W.

        The best scale of a group has the least squared rounding error, weighted by ``importance`` (in,). The candidates
        put the group's largest weight at the end of the grid or up to twice as far out, where it is clipped. The scale
        of a group of zeros is 1.
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
        """The whole numbers q nearest to W (out, in), as (out, in) in the dtype of W."""
        grouped: Tensor = W.unflatten(1, (scales.shape[1], -1)) / scales.unsqueeze(2)
        return grouped.round_().clamp_(self.lowest, self.highest).flatten(1)

    def values(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers q s for ``codes`` (out, in), rounded to ``dtype`` and returned in the dtype of ``codes``."""
        grouped: Tensor = codes.unflatten(1, (scales.shape[1], -1)) * scales.unsqueeze(2)
        return grouped.flatten(1).to(dtype).to(codes.dtype)

    def project(self, W: Tensor, scales: Tensor, dtype: torch.dtype, same_zeros: bool = False) -> Tensor:
        """The nearest numbers of the grid to W (out, in), in its dtype; with ``same_zeros`` only zeros become zero."""
        codes = self.codes(W, scales)
        if same_zeros:
            codes = torch.where((W != 0) & (codes == 0), W.sign(), codes)
        return self.values(codes, scales, dtype)

    def has(self, W: Tensor, scales: Tensor) -> bool:
        """Whether all of W (out, in) is on the grid with these ``scales``, rounded to their dtype, bit for bit."""
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
