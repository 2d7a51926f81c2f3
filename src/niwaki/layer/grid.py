"""Grids for weights: whole numbers of a few bits, times a scale for each row and group of inputs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from niwaki.errors import UsageError

#: How far a group's largest weight may be outside of the grid: what is tried for its scale, relative to the first.
_CLIPPING = tuple(1 - 0.05 * i for i in range(11))


@dataclass(frozen=True)
class Grid:
    """The numbers q s with whole q from -2^(bits-1) to 2^(bits-1) - 1 and a scale s for each row and group of inputs.

    Scales are positive and representable in ``dtype``, and so is what is computed: q s is rounded to ``dtype``, as
    everybody finds it who multiplies q and s in that dtype. With s at hand q is the whole number next to q s / s. 0 is
    on the grid.

    Attributes:
        bits: From 2 to 8.
        group: How many consecutive inputs have a scale in common; None for all of a row.

    Raises:
        UsageError: there is no such grid.
    """

    bits: int
    group: int | None = None

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise UsageError(f"a grid has 2 to 8 bits; got {self.bits}")
        if self.group is not None and self.group < 1:
            raise UsageError(f"a scale is for 1 input or more; got groups of {self.group}")

    def __str__(self) -> str:
        return f"int{self.bits}" + ("" if self.group is None else f":{self.group}")

    @property
    def lowest(self) -> int:
        return -(1 << (self.bits - 1))

    @property
    def highest(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def groups(self, columns: int) -> int:
        """The number of scales of a row with so many inputs.

        Raises:
            UsageError: they cannot be divided into groups.
        """
        if self.group is None:
            return 1
        self.check([columns])
        return columns // self.group

    def check(self, widths: Iterable[int]) -> None:
        """Raises UsageError where matrices with so many inputs cannot all be divided into groups."""
        widths = list(widths)
        if self.group is None or not (odd := [columns for columns in widths if columns % self.group]):
            return
        common = math.gcd(*widths)
        near = next(n for n in range(min(self.group, common), 0, -1) if common % n == 0)
        raise UsageError(
            f"{odd[0]} inputs cannot be divided into groups of {self.group} that share a scale; try "
            f"int{self.bits}:{near}, or int{self.bits} for one scale for each row"
        )

    def scales(self, W: Tensor, importance: Tensor, dtype: torch.dtype) -> Tensor:
        """(out, groups) in the dtype of W: of some scales for each group the one with the least squared error.

        They are those at which the largest weight of the group is at the end of the grid, and down to half of that,
        where it is cut off. The error is that of rounding W (out, in) to the nearest, weighted by ``importance`` (in,).
        A group of zeros has the scale 1.
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
        """(out, in), the numbers of the grid nearest to W (out, in), in its dtype; what is zero stays so.

        With ``same_zeros`` nothing else becomes zero.
        """
        codes = self.codes(W, scales)
        if same_zeros:
            codes = torch.where((W != 0) & (codes == 0), W.sign(), codes)
        return self.values(codes, scales, dtype)


def usable(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """``scales`` rounded to ``dtype``, in their own; 1 where that is not above 0."""
    rounded = scales.to(dtype).to(scales.dtype)
    return torch.where(rounded > 0, rounded, 1.0)


def scale_dtype(stored: torch.dtype) -> torch.dtype:
    """The dtype of the scales of weights that are stored in that one: the same, but not above float32."""
    return torch.float32 if stored == torch.float64 else stored


def parse_grid(text: str) -> Grid:
    """A grid from what its ``str`` is: ``"int4:128"``, or ``"int8"`` for one scale for each row.

    Raises:
        UsageError: it is none.
    """
    match = re.fullmatch(r"int([0-9]{1,9})(?::([0-9]{1,9}))?", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no grid for weights; try int4:128, int4 or int8")
    return Grid(int(match[1]), int(match[2]) if match[2] else None)
