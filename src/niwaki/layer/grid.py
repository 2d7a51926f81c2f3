"""Grids for weights: whole or floating-point numbers of a few bits, times a scale for each row and group of inputs."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from niwaki.arguments import check_fields
from niwaki.choices import FLOAT_GRIDS
from niwaki.errors import UsageError
from niwaki.layer.block_types import BLOCK_TYPES, BlockGrid, parse_block_grid
from niwaki.layer.floats import E2M1, E4M3
from niwaki.layer.linalg import AT_ONCE, fitted_scales, scale_systems
from niwaki.quantities import check_grid, parse_bits

#: How many scales are tried for a group. Grids of at most 4 bits have half of them for each sign.
_CANDIDATES = 32
#: Groups that other programs have kernels for.
_USUAL = (128, 64, 32)
#: The integers that are as wide as a number of so many bytes.
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Grid:
    """A grid for weights: the numbers q s with whole q from -2^(bits-1) to 2^(bits-1) - 1, and scales s.

    Each row has one scale for every ``group`` consecutive inputs, or one for all if ``group`` is None. Scales are not 0
    and representable in ``dtype``; q s is rounded to ``dtype``, as in a product in that dtype. Given s, a number q s of
    the grid is restored by the whole number next to q s / s. A negative scale has one number more on the positive side.

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

    keeps_zeros = True  # 0 is a number of every grid
    trains_scales = True  # healing can

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
    def family(self) -> tuple[tuple[int, ...], int | None]:
        """What the grids of matrices can be, whatever the mean."""
        return self.choices(), self.group

    def choices(self, columns: int = 0) -> tuple[int, ...]:
        """The numbers of bits that a matrix may have, of any width: those that exist in the formats with such groups.

        Packed models, with groups of a multiple of 64, have more of them than GGUF files, with groups of 32.
        """
        if not self.is_mixed:
            return (self.bits,)
        return (4, 5, 8) if self.group and self.group % 64 else (2, 3, 4, 5, 6, 8)

    def of(self, bits: float) -> "Grid":
        """The grid of a matrix with this number of ``bits``."""
        return Grid(int(bits), self.group)

    def fewest(self, codes: Tensor) -> int:
        """The smallest of the :attr:`choices` of bits that can hold all of the whole numbers ``codes``."""
        low, high = (int(codes.min()), int(codes.max())) if codes.numel() else (0, 0)
        return next(bits for bits in self.choices() if self.of(bits).lowest <= low and high <= self.of(bits).highest)

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
            sizes = [n for n in range(min(self.group, common), 0, -1) if common % n == 0]
            near = next((n for n in sizes if n in _USUAL), sizes[0])
            raise UsageError(
                f"{odd[0]} inputs cannot be divided into groups of {self.group} that share a scale; try "
                f"int{self.bits}:{near}, or int{self.bits} for one scale for each row"
            )

    def scales(self, W: Tensor, importance: Tensor, dtype: torch.dtype) -> Tensor:
        """The best scales for W (out, in) among some candidates: (out, groups) in the dtype of W.

        The scale of a group that is on the grid already is that of :meth:`exact`. Elsewhere it has the least squared
        rounding error, weighted by ``importance`` (in,). The candidates put the group's largest weight at the lower end
        of the grid, which is one number longer than the upper one, a little inside, or as far out as it can pay to clip
        it; the best of them is refined by two steps of least squares for its whole numbers.

        Cost: W rounded 34 times, and some times more with 8 bits; memory of some copies of 2^18 weights.
        """
        shape = self.groups(W.shape[1]), -1
        some = W.split(max(1, AT_ONCE // W.shape[1]))
        return torch.cat([self._scales(rows.unflatten(1, shape), importance.view(shape), dtype) for rows in some])

    def _scales(self, W: Tensor, importance: Tensor, dtype: torch.dtype) -> Tensor:
        """The scales (rows, groups) of W (rows, groups, width)."""
        exact = self.exact(W.flatten(1), dtype)
        if bool(exact.all()):
            return exact
        largest = W.gather(2, W.abs().argmax(dim=2, keepdim=True)).squeeze(2)
        chosen, least = torch.ones_like(largest), torch.full_like(largest, math.inf)

        def rounded(scales: Tensor) -> Tensor:
            return self.nearest(W / scales.unsqueeze(2))

        def best_of(scales: Tensor) -> tuple[Tensor, Tensor]:
            scales = self.usable(scales, dtype)
            codes = rounded(scales)
            error = torch.addcmul(W, codes, scales.unsqueeze(2), value=-1, out=codes).square_().mul_(importance).sum(2)
            return torch.where(error < least, scales, chosen), torch.minimum(error, least)

        for code in self._largest_codes(W.shape[2]):
            chosen, least = best_of(largest / code)
        for _ in range(2):
            codes = rounded(chosen)
            weighted = codes * importance
            power = codes.mul_(weighted).sum(2)
            chosen, least = best_of(torch.where(power > 0, weighted.mul_(W).sum(2) / power, chosen))
        return torch.where(exact != 0, exact, chosen)

    def scale_dtype(self, stored: torch.dtype) -> torch.dtype:
        """The dtype of scales of weights that are ``stored`` so."""
        return scale_dtype(stored)

    def are_scales(self, scales: Tensor) -> bool:
        """Whether ``scales`` can be those of a matrix."""
        return bool(((scales != 0) & scales.isfinite()).all())

    def finest(self, W: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The scales of :meth:`exact` for W, which is on the grid with ``scales``: they depend on nothing but W."""
        exact = self.exact(W, dtype)
        return torch.where(exact != 0, exact, scales)

    def refitted(self, W: Tensor, codes: Tensor, scales: Tensor, H: Tensor, dtype: torch.dtype) -> Tensor:
        """(out, groups): scales with the least (w - q s) H (w - q s)^T of each row for ``codes`` q.

        There is a ridge towards the old ``scales``; an old one stays where the new one has another sign.
        """
        A, b = scale_systems(W, codes, H, W.shape[1] // scales.shape[1])
        return self.usable(fitted_scales(A, b, scales), dtype)

    def _largest_codes(self, width: int) -> list[float]:
        """The numbers, not whole ones, at which scales put the largest of ``width`` weights: candidates.

        Clipping a weight by c steps costs c^2, and steps that are as much finer gain width c / (6 end) for all. Up to
        twice the c where these are equal is tried, and 3 steps for weights that count less than others.
        """
        end = -self.lowest
        first, last = 0.87 * end, end + min(end, 3 + width / (3 * end))
        signs = (-1, 1) if self.bits <= 4 else (-1,)
        count = _CANDIDATES // len(signs)
        return [sign * (first + (last - first) * i / (count - 1)) for sign in signs for i in range(count)]

    def exact(self, W: Tensor, dtype: torch.dtype, of_scales: torch.dtype | None = None) -> Tensor:
        """The finest scales with which groups of W (out, in) are on the grid to the bit; 0 for others: (out, groups).

        The smallest weight of such a group is j s, rounded to ``dtype``, where j is whole and at most 2^(bits-1) times
        what that weight is of the largest one. All such j are tried, and each leaves three numbers that s can be. With
        another dtype ``of_scales``, these are next to the middle of what all weights leave. The scale of a group of
        zeros is 1.
        """
        stored = of_scales or dtype
        grouped = W.reshape(W.shape[0] * self.groups(W.shape[1]), -1)
        sizes = grouped.abs()
        # Relative to a number, the most that it can be off the grid.
        off, integers = torch.finfo(dtype).eps + 2 * torch.finfo(W.dtype).eps, _INTEGERS[stored.itemsize]
        largest, highest = sizes.amax(1), grouped.amax(1)
        found, small, at_least = (largest == 0).to(W.dtype), list[Tensor](), torch.zeros_like(largest)
        for _ in range(4):  # rounding to ``dtype`` hides least of what these are
            at_least = sizes.masked_fill_(sizes <= at_least.unsqueeze(1), math.inf).amin(1)
            small.append(torch.where(at_least.isinf(), small[0] if small else 1.0, at_least))
        some, most = torch.stack(small, dim=1), (small[0] / largest * (-self.lowest * (1 + 2 * off))).floor_()
        for step in range(-self.lowest):
            (left,) = ((found == 0) & (most > step)).nonzero(as_tuple=True)
            if not len(left):
                break
            scales = small[0][left] / (most[left] - step)
            codes = some[left] / scales.unsqueeze(1)
            fits = ((codes - codes.round()).abs_() <= off * codes).all(1)
            left, scales = left[fits], scales[fits]
            if stored != dtype and len(left):
                scales = _middle(grouped[left], scales, dtype)
            for to_next in (0, 1, -1):  # numbers above 0 are in the order of their bits
                s = (self.usable(scales, stored).to(stored).view(integers) + to_next).view(stored).to(W.dtype)
                s = torch.where(highest[left] / s > self.highest + 0.5, -s, s)
                fits = (self.project(grouped[left], s.unsqueeze(1), dtype) == grouped[left]).all(1)
                found[left[fits]] = s[fits]
                left, scales = left[~fits], scales[~fits]
        return found.view(len(W), -1)

    def free(self, scales: Tensor) -> Tensor:
        """(out, n): those of the ``scales`` that can be any numbers, all of them."""
        return scales

    def scaled(self, scales: Tensor) -> int:
        """How many of the :meth:`free` numbers of a row scale weights; those after them are taken off."""
        return scales.shape[1]

    def with_free(self, scales: Tensor, free: Tensor) -> Tensor:
        """``scales`` with other :meth:`free` numbers; gradients go through."""
        return free

    def nearest(self, values: Tensor) -> Tensor:
        """The whole numbers next to ``values``, which are changed."""
        return values.round_().clamp_(self.lowest, self.highest)

    def usable(self, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """``scales`` rounded to what they can be in ``dtype``, in their own; 1 where that is 0."""
        rounded = scales.to(dtype).to(scales.dtype)
        return torch.where(rounded != 0, rounded, 1.0)

    def codes(self, W: Tensor, scales: Tensor) -> Tensor:
        """The whole numbers q nearest to W (out, in), as (out, in) in the dtype of W."""
        return self.nearest(W.unflatten(1, (scales.shape[1], -1)) / scales.unsqueeze(2)).flatten(1)

    def values(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers q s for ``codes`` (out, in), rounded to ``dtype`` and returned in the dtype of ``codes``."""
        grouped: Tensor = codes.unflatten(1, (scales.shape[1], -1)) * scales.unsqueeze(2)
        # Adding +0.0 makes +0.0 of -0.0, which a scale below 0 makes of 0.
        return grouped.flatten(1).add_(0.0).to(dtype).to(codes.dtype)

    def project(self, W: Tensor, scales: Tensor, dtype: torch.dtype, same_zeros: bool = False) -> Tensor:
        """The nearest numbers of the grid to W (out, in), in its dtype; with ``same_zeros`` only zeros become zero."""
        codes = self.codes(W, scales)
        if same_zeros:
            signs = (W.unflatten(1, (scales.shape[1], -1)) * scales.sign().unsqueeze(2)).sign_().flatten(1)
            codes = torch.where(codes == 0, signs, codes)
        return self.values(codes, scales, dtype)

    def has(self, W: Tensor, scales: Tensor) -> bool:
        """Whether all of W (out, in) is on the grid with these ``scales``, rounded to their dtype, bit for bit."""
        W = W.float()
        return torch.equal(self.project(W, scales.float(), scales.dtype), W)


def _middle(W: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The middle of the numbers (groups,) by which all of W (groups, width) can be multiples, near ``scales``."""
    codes, sizes = (W / scales.unsqueeze(1)).round_().abs_(), W.abs()
    fraction, exponent = sizes.frexp()
    half = torch.ldexp(torch.full_like(W, torch.finfo(dtype).eps / 4), exponent)  # of the last bit
    low = (sizes - torch.where(fraction == 0.5, half / 2, half)) / codes  # there it is that of smaller numbers
    high = (sizes + half) / codes
    none = codes == 0
    return (low.masked_fill_(none, 0.0).amax(1) + high.masked_fill_(none, math.inf).amin(1)) / 2


#: Rows by which a matrix is seen not to be on a grid.
ROWS_TO_SEE = 16
#: The types of llama.cpp that have all numbers of Q4_0.
WITH_Q4_0 = ("Q4_0", "Q5_0", "Q8_0")


def scales_of_q4_0(W: Tensor, dtype: torch.dtype) -> Tensor | None:
    """(out, in / 32): scales in float16 with which W (out, in) is numbers of llama.cpp's Q4_0, rounded to ``dtype``.

    None where not all of it is, or all of it is 0.
    """
    grid = Grid(4, 32)
    if W.shape[1] % 32 or not bool((W != 0).any()):
        return None
    for rows in (W[:ROWS_TO_SEE], W):  # nearly all others are seen not to be by a few
        if not bool((scales := grid.exact(rows, dtype, torch.float16)).all()):
            return None
    return scales


def holding(grid: "AnyGrid", W: Tensor, stored: torch.dtype) -> "AnyGrid":
    """``grid``; Q4_0 for any type of as many bits, if W (out, in) is numbers of it already, rounded to ``stored``."""
    kind = BLOCK_TYPES["Q4_0"]
    is_any = isinstance(grid, BlockGrid) and not (grid.name or grid.is_mixed) and grid.bits == kind.bits
    return BlockGrid(kind.bits, kind.name) if is_any and scales_of_q4_0(W, stored) is not None else grid


def held(W: Tensor, grid: "AnyGrid", stored: torch.dtype) -> Tensor | None:
    """The scales with which W (out, in) stays as it is on ``grid``: a type that has all numbers of Q4_0, as W are.

    None for others, and other grids, which have :meth:`Grid.exact`.
    """
    if not (isinstance(grid, BlockGrid) and (kind := grid.type_of(W.shape[1])).name in WITH_Q4_0):
        return None
    scales = scales_of_q4_0(W, stored)
    return None if scales is None else kind.spread(torch.stack([scales, torch.ones_like(scales)], 2))


def scale_dtype(stored: torch.dtype) -> torch.dtype:
    """The dtype of the scales of weights that are stored in ``stored``: the same, but not above float32."""
    return torch.float32 if stored == torch.float64 else stored


# Floating-point numbers of four bits, which servers compute with.

#: The largest number, and the scale below which a group of a matrix has none, relative to its largest scale: what E4M3
#: has without losing digits, less what matrices differ by that servers make one of, which share what it is a multiple
#: of.
_LARGEST_FLOAT, _LEAST_SCALE = 12, 2.0**-10
#: Candidates for a scale.
_FLOAT_CANDIDATES = 16


@dataclass(frozen=True)
class FloatGrid(Grid):
    """The numbers q s with q = 0, 1, 2, 3, 4, 6, 8 and 12 of either sign, twice those of E2M1, and scales s above 0.

    In "nvfp4" 16 weights share a scale, which is a number of E4M3 times a power of two; in "mxfp4" 32 share one, which
    is a power of two.

    Reference: Open Compute Project, Microscaling Formats (MX) Specification 1.0, 2023, for E2M1 and MXFP4.
    """

    bits: int = 4
    group: int | None = 16

    trains_scales = False  # they have too few digits

    def __str__(self) -> str:
        return next(name for name, group in FLOAT_GRIDS.items() if group == self.group)

    @property
    def family(self) -> tuple[str, ...]:  # type: ignore[override]
        return (str(self),)

    @property
    def lowest(self) -> int:
        return -_LARGEST_FLOAT

    @property
    def highest(self) -> int:
        return _LARGEST_FLOAT

    @property
    def _has_powers(self) -> bool:
        return self.group == FLOAT_GRIDS["mxfp4"]

    def scales(self, W: Tensor, importance: Tensor, dtype: torch.dtype) -> Tensor:
        found, largest = super().scales(W, importance, dtype), W.abs().max() / _LARGEST_FLOAT
        least = float(self.usable(torch.where(largest > 0, largest, 1.0) * _LEAST_SCALE, dtype))
        # A scale of 1 for zeros would be far above all others, which have to be multiples of the same power.
        zeros = (W == 0).unflatten(1, (found.shape[1], -1)).all(2)
        return found.clamp_(min=least).masked_fill_(zeros, least)

    def refitted(self, W: Tensor, codes: Tensor, scales: Tensor, H: Tensor, dtype: torch.dtype) -> Tensor:
        return super().refitted(W, codes, scales, H, dtype).clamp_(min=float(scales.min()))

    def are_scales(self, scales: Tensor) -> bool:
        return super().are_scales(scales) and torch.equal(self.usable(scales.float(), scales.dtype), scales.float())

    def exact(self, W: Tensor, dtype: torch.dtype, of_scales: torch.dtype | None = None) -> Tensor:
        """0 for all groups: none is looked for, since :meth:`scales` finds some where weights are on the grid."""
        return W.new_zeros(len(W), self.groups(W.shape[1]))

    def usable(self, scales: Tensor, dtype: torch.dtype) -> Tensor:
        mantissa, exponent = torch.frexp(super().usable(scales.abs(), dtype))  # from 0.5 to 1
        if self._has_powers:  # up where the next power is nearer by its logarithm
            return torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa < 0.5**0.5).int())
        return torch.ldexp((mantissa * 16).round_(), exponent - 4)

    def nearest(self, values: Tensor) -> Tensor:
        return E2M1.nearest(values.float().abs().div_(2)).mul_(2).to(values.dtype).copysign_(values).add_(0.0)

    def _largest_codes(self, width: int) -> list[float]:
        # At 6, 8 or 12 is the largest of weights that are on the grid already, with one scale or half of it.
        return [8.0, *(_LARGEST_FLOAT * (0.5 + i / _FLOAT_CANDIDATES) for i in range(_FLOAT_CANDIDATES + 1))]


def fp4_codes(codes: Tensor) -> Tensor:
    """(out, in / 2) uint8: two of the numbers (out, in) in a byte, the first in its lower half, as E2M1 has them."""
    of = torch.searchsorted(2 * E2M1.magnitudes, codes.abs().contiguous()) | torch.where(codes < 0, E2M1.sign, 0)
    return (of[:, ::2] | of[:, 1::2] << 4).to(torch.uint8)


def shared_power(scales: Tensor) -> int | None:
    """The exponent of the power of two of which all ``scales`` of "nvfp4" are multiples by numbers of E4M3, if any."""
    exponent = math.ceil(math.log2(float(scales.max()) / E4M3.highest))
    multiples = torch.ldexp(scales.double(), torch.tensor(-exponent))
    return exponent if torch.equal(E4M3.nearest(multiples.float()).double(), multiples) else None


#: What weights can be on.
AnyGrid = Grid | BlockGrid


def parse_grid(text: str) -> AnyGrid:
    """The grid of a text: "int4:128", "int8" for a scale for each row, "nvfp4", "q4_k" for a type of llama.cpp's.

    UsageError if it is not valid.
    """
    if group := FLOAT_GRIDS.get(text.strip().lower()):
        return FloatGrid(group=group)
    return parse_block_grid(text) or Grid(*parse_bits(text))
