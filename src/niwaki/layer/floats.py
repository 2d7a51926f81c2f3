"""Floating-point numbers of 4 and 8 bits with a scale for each tile of a matrix, as in files in FP8 and MXFP4."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

#: The scales that are tried for a tile, relative to the one that puts its largest weight at the highest number.
_RATIOS = tuple(2 ** (i / 4) for i in range(4))
#: The same for powers of two, where the next smaller one cuts off what is up to twice too large.
_POWERS = (1.0, 0.5, 2.0)


@dataclass(frozen=True)
class Floats:
    """The numbers of a sign, so many bits of ``exponent`` with the usual bias, and so many of ``mantissa``.

    Attributes:
        count: The number of those that are not negative, from 0: some formats have codes for NaN.
    """

    exponent: int
    mantissa: int
    count: int

    @cached_property
    def magnitudes(self) -> Tensor:
        """(count,) float32, ascending: what the codes without a sign stand for."""
        steps = 1 << self.mantissa
        values = []
        for code in range(self.count):
            exponent, fraction = divmod(code, steps)
            exponent_of_step = max(exponent, 1) - self._bias - self.mantissa
            values.append(math.ldexp(fraction + steps * (exponent > 0), exponent_of_step))
        return torch.tensor(values)

    @property
    def is_coarse(self) -> bool:
        """Whether other weights gain from making up for the rounding of each (measured: docs/quantization.md)."""
        return self.mantissa < 2

    @property
    def lowest(self) -> float:
        """The smallest number above 0."""
        return float(self.magnitudes[1])

    @property
    def highest(self) -> float:
        return float(self.magnitudes[-1])

    @property
    def _bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    def nearest(self, values: Tensor) -> Tensor:
        """The numbers nearest to ``values``, float32 and not below 0; of two the one with the even code."""
        # By the exponents in the bits of float32, with a bias of 127: searching the numbers takes 17 times as long.
        exponents = (values.view(torch.int32) >> 23).clamp_(min=127 + 1 - self._bias)
        steps = ((exponents - self.mantissa) << 23).view(torch.float32)
        return (values / steps).round_().mul_(steps).clamp_(max=self.highest)

    @property
    def sign(self) -> int:
        """The bit of a code that is its sign."""
        return 1 << (self.exponent + self.mantissa)


#: Without infinities, and with one NaN of each sign.
E4M3 = Floats(4, 3, 127)
E2M1 = Floats(2, 1, 8)


@dataclass(frozen=True)
class TiledFloats:
    """``numbers`` times a scale that the weights of each ``tile`` (rows, columns) share, rounded to bfloat16.

    Scales are (tiles down, tiles across) float32, above 0, with values that ``dtype`` has: powers of two where that is
    None. Tiles at the end of a matrix may be cut off.
    """

    numbers: Floats
    tile: tuple[int, int]
    dtype: torch.dtype | None

    @property
    def transposed(self) -> "TiledFloats":
        """The format of the transpose of a matrix in this one."""
        return replace(self, tile=self.tile[::-1])

    def tiles(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The number of tiles down and across a matrix of this shape, which is the shape of its scales."""
        return -(-shape[0] // self.tile[0]), -(-shape[1] // self.tile[1])

    def factors(self, scales: Tensor, shape: tuple[int, ...]) -> Tensor:
        """(.., rows, columns) float32: the scale of each weight of matrices of this ``shape``."""
        rows, columns = shape[-2:]
        down, across = self.tile
        return scales.repeat_interleave(down, -2)[..., :rows, :].repeat_interleave(across, -1)[..., :columns]

    def codes(self, W: Tensor, factors: Tensor, kept: Tensor) -> Tensor:
        """(rows, columns) uint8: the nearest codes of W, 0 where it is not ``kept``, and nowhere else."""
        codes = torch.searchsorted(self.numbers.magnitudes.to(W.device), self._nearest(W, factors, kept))
        return torch.where(kept & (W < 0), codes | self.numbers.sign, codes).to(torch.uint8)

    def project(self, W: Tensor, factors: Tensor, kept: Tensor) -> Tensor:
        """(rows, columns) float32: what :meth:`codes` stand for, and +0.0 where W, in float32, is not ``kept``."""
        rounded = self._nearest(W, factors, kept).mul_(factors).bfloat16().float()
        return torch.where(W < 0, -rounded, rounded).masked_fill_(~kept, 0.0)

    def scales(self, W: Tensor, importance: Tensor, stored: Tensor) -> Tensor:
        """The scales with the least squared error, among those ``stored`` and some that fit W (rows, columns).

        The error is that of rounding W, weighted by ``importance`` (columns,). Where nothing is gained the stored ones
        stay, so that weights that stay keep their codes.
        """
        kept = W != 0
        lowest = torch.finfo(torch.bfloat16).tiny / self.numbers.lowest  # 0 is for what is not kept
        fresh = self._fresh(self._tiled(W.abs()).amax(dim=(1, 3)), lowest)
        chosen, least = fresh[0], torch.full_like(fresh[0], math.inf)
        for scales in (torch.where(stored >= lowest, stored, fresh[0]), *fresh):
            errors = self.project(W, self.factors(scales, W.shape), kept).sub_(W).square_().mul_(importance)
            error = self._tiled(errors).sum(dim=(1, 3))
            chosen, least = torch.where(error < least, scales, chosen), torch.minimum(error, least)
        return chosen

    def raised(self, W: Tensor, factors: Tensor) -> int:
        """The number of weights that are not 0 and next to it, for which the lowest number stands."""
        half = factors * (self.numbers.lowest / 2)
        return int(((W != 0) & (W.abs() <= half)).sum())

    def _fresh(self, widest: Tensor, lowest: float) -> list[Tensor]:
        """Scales, none below ``lowest``, to try for tiles whose largest weights are ``widest``."""
        fitting = widest / self.numbers.highest
        if self.dtype is None:
            powers = torch.exp2(fitting.clamp(min=lowest).log2().ceil())
            return [(powers * ratio).clamp(min=lowest) for ratio in _POWERS]
        lowest = max(lowest, torch.finfo(self.dtype).tiny)
        return [(fitting * ratio).clamp(min=lowest).to(self.dtype).float() for ratio in _RATIOS]

    def _nearest(self, W: Tensor, factors: Tensor, kept: Tensor) -> Tensor:
        """(rows, columns) float32, without signs and scales; the lowest number for kept weights that round to 0."""
        return self.numbers.nearest((W / factors).abs_()).clamp_(min=self.numbers.lowest).masked_fill_(~kept, 0.0)

    def _tiled(self, values: Tensor) -> Tensor:
        """(tiles down, rows of one, tiles across, columns of one), filled up with zeros."""
        (rows, columns), (down, across) = values.shape, self.tile
        whole: Tensor = pad(values, (0, -columns % across, 0, -rows % down))
        tiled: Tensor = whole.unflatten(1, (-1, across)).unflatten(0, (-1, down))
        return tiled
