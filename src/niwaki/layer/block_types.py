"""The types of numbers that llama.cpp has, as grids for weights: levels, times a scale, less a minimum."""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from niwaki.choices import BLOCK_TYPE_BITS
from niwaki.errors import NumericalError, UsageError
from niwaki.layer.linalg import AT_ONCE, fitted_scales, scale_systems
from niwaki.quantities import parse_block_types

#: The largest number in float16.
_LARGEST = 65504.0
#: How many scales are tried for a group, or steps between its smallest and its largest weight.
_CANDIDATES = 32
#: How many scales of a block are tried for each end of its whole numbers.
_TRIED = 8
#: Entries of the systems for scales that are in memory at once.
_ENTRIES = 1 << 26
#: Rounds of whole scales one after the other, and then of what they are multiples of.
_ROUNDS = 2
#: No matrix of sound weights is so far from its numbers, relative to its norm: 2 bits leave 0.2.
_FAR = 0.7
#: The fewest weights that share a scale.
FINEST = 16


@dataclass(frozen=True)
class BlockType:
    """Numbers s c - m with c one of the ``levels``, where each ``group`` of a row has its s, and its m if there is one.

    s = d k and m = e l: a ``block`` of groups has d and e, in float16, and each of its groups whole numbers k and l.
    Parameters of a matrix (out, in) are (out, blocks of a row, 1 + groups of a block), or twice as many with m: d and
    all k of a block, and then e and all l.

    Attributes:
        name: As llama.cpp has it.
        number: That of the type there.
        levels: In ascending order.
        group: Weights with the same s.
        block: Weights with the same d.
        steps: The least and the largest k.
        minimum: The least and the largest l; None where there is no m.
    """

    name: str
    number: int
    levels: tuple[int, ...]
    group: int
    block: int
    steps: tuple[int, int] = (1, 1)
    minimum: tuple[int, int] | None = None

    @property
    def bits(self) -> float:
        """Bits for each weight that are stored."""
        return BLOCK_TYPE_BITS[self.name.lower()]

    @property
    def is_table(self) -> bool:
        """Whether levels are at distances of their own."""
        return self.levels[-1] - self.levels[0] + 1 > len(self.levels)

    @property
    def is_plain(self) -> bool:
        """Whether a block is one group."""
        return self.group == self.block

    def found(self, W: Tensor, importance: Tensor) -> Tensor:
        """Parameters for W (out, in) with a small squared rounding error, weighted by ``importance`` (in,).

        Each group is given an s and an m of its own, the best of some candidates. Then k and l are those that come
        next to these, for the d and e that leave least of the squared errors by them.

        Cost: W rounded some 40 times.
        """
        some = W.split(max(1, AT_ONCE // W.shape[1]))
        return torch.cat([self._found(rows, importance) for rows in some])

    def _found(self, W: Tensor, importance: Tensor) -> Tensor:
        blocks = W.unflatten(1, (-1, self.block // self.group, self.group))
        weights = importance.view(blocks.shape[1:]).expand_as(blocks)
        s, m = self._best(blocks, weights)
        codes = self.nearest((blocks + m.unsqueeze(-1)) / torch.where(s == 0, 1.0, s).unsqueeze(-1))
        found = [*self._whole(s, (weights * codes.square()).sum(-1), self.steps)]
        if self.minimum:
            found += self._whole(m, weights.sum(-1), self.minimum)
        return torch.cat(found, dim=-1)

    def _best(self, W: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
        """The s and the m of each group, neither of them rounded."""
        low, high = self.levels[0], self.levels[-1]
        largest = W.gather(-1, W.abs().argmax(-1, keepdim=True)).squeeze(-1)
        bottom, top = W.amin(-1), W.amax(-1)
        if self.minimum and self.minimum[0] == 0:  # m is not below 0
            bottom = bottom.clamp(max=0)
        s, m = torch.ones_like(largest), torch.zeros_like(largest)
        least = torch.full_like(largest, math.inf)

        def tried(s_: Tensor, m_: Tensor) -> None:
            nonlocal s, m, least
            s_ = torch.where(s_ == 0, 1.0, s_)
            codes = self.nearest((W + m_.unsqueeze(-1)) / s_.unsqueeze(-1))
            s_, m_ = self._refined(W, importance, codes, s_, m_)
            error = (codes * s_.unsqueeze(-1)).sub_(m_.unsqueeze(-1)).sub_(W).square_().mul_(importance).sum(-1)
            better = error < least
            s, m, least = torch.where(better, s_, s), torch.where(better, m_, m), torch.minimum(error, least)

        for i in range(_CANDIDATES):
            at = i / (_CANDIDATES - 1)
            if self.minimum:
                steps = high - low + 1.6 * at - 1.1
                tried((top - bottom) / steps, -bottom)
            else:
                # As far inside as it can pay, and as far out: see Grid.scales.
                out = min(1.0, 3 / high + self.group / (3 * high**2))
                tried(largest / ((low, high)[i % 2] * (0.87 + (0.13 + out) * at)), m)
        for _ in range(2):
            tried(s, m)
        # Of a group of the same number, which needs no scale, none is to count in a block.
        flat = bottom == top if self.minimum else largest == 0
        return torch.where(flat, 0.0, s), torch.where(flat, -bottom, m) if self.minimum else m

    def _refined(self, W: Tensor, importance: Tensor, codes: Tensor, s: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        """Those with the least squared errors for ``codes``; the old ones where that has no answer."""
        weighted = codes * importance
        cc, cw = (weighted * codes).sum(-1), (weighted * W).sum(-1)
        if not self.minimum:
            return torch.where(cc > 0, cw / cc, s), m
        i, c, w = importance.sum(-1), weighted.sum(-1), (importance * W).sum(-1)
        determinant = i * cc - c.square()
        sound = determinant > 1e-6 * i * cc
        new_s, new_m = (i * cw - c * w) / determinant, (c * cw - cc * w) / determinant
        if self.minimum[0] == 0:
            alone = sound & (new_m < 0)
            new_s, new_m = torch.where(alone, cw / cc, new_s), torch.where(alone, 0.0, new_m)
        sound &= new_s > 0
        return torch.where(sound, new_s, s), torch.where(sound, new_m, m)

    def _whole(self, values: Tensor, weights: Tensor, steps: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Numbers d (..., 1) in float16 and whole k (..., groups) with products near ``values``, by ``weights``."""
        if steps[0] == steps[1]:
            return in_half(values), torch.ones_like(values)
        largest = values.gather(-1, values.abs().argmax(-1, keepdim=True))
        ends = steps if steps[0] < 0 else steps[1:]
        d, least = torch.ones_like(largest), torch.full_like(largest, math.inf)

        def multiples(d: Tensor) -> Tensor:
            return (values / torch.where(d == 0, 1.0, d)).round_().clamp_(*steps)

        for end in ends:
            for i in range(_TRIED):
                tried = in_half(largest / (end * (1 - i / 2 / max(_TRIED, abs(end)))))
                for _ in range(2):
                    k = multiples(tried)
                    power = (weights * k.square()).sum(-1, keepdim=True)
                    best = (weights * k * values).sum(-1, keepdim=True) / power
                    tried = in_half(torch.where((power > 0) & best.isfinite(), best, tried))
                k = multiples(tried)
                error = (weights * (values - tried * k).square()).sum(-1, keepdim=True)
                d, least = torch.where(error < least, tried, d), torch.minimum(error, least)
        return d, multiples(d)

    def nearest(self, values: Tensor) -> Tensor:
        """The levels next to ``values``."""
        if not self.is_table:
            return values.round_().clamp_(self.levels[0], self.levels[-1])
        # By halves of steps, at which all levels change, from a table: ten times as fast as a search.
        first, last = 2 * self.levels[0], 2 * self.levels[-1]
        at = (values * 2).floor_().clamp_(first, last).sub_(first).int().flatten()
        return _by_halves(self.levels, values.dtype, values.device).index_select(0, at).view_as(values)

    def refitted(self, W: Tensor, codes: Tensor, parameters: Tensor, H: Tensor) -> Tensor:
        """Parameters with less of (w - q) H (w - q)^T for each row, where q are the numbers of ``codes``.

        d and e are those with the least, with a ridge towards the old ones; before that k and l are changed one after
        the other, each to what is best beside the others as they are.

        Cost: 1 or 2 products of (out, in) with (in, in), and systems of as many unknowns as a row has groups.
        """
        unknowns = codes.shape[1] // self.group * (2 if self.minimum else 1)
        rows = max(1, _ENTRIES // unknowns**2)
        parts = zip(W.split(rows), codes.split(rows), parameters.split(rows), strict=True)
        return torch.cat([self._refitted(*part, H) for part in parts])

    def _refitted(self, W: Tensor, codes: Tensor, parameters: Tensor, H: Tensor) -> Tensor:
        A, b = self._system(W, codes, H)
        d, k = self._unknowns(parameters)
        for _ in range(_ROUNDS):
            if not self.is_plain:
                k = self._stepped(A, b, d, k)
            d = self._least(A, b, d, k)
        per = self.block // self.group
        d, k = (each.unflatten(1, (2 if self.minimum else 1, -1)).transpose(1, 2) for each in (d, k))
        d, k = d.unflatten(1, (-1, per))[:, :, 0], k.unflatten(1, (-1, per)).transpose(2, 3)
        return torch.cat([d.unsqueeze(3), k], dim=3).flatten(2)

    def spread(self, parameters: Tensor) -> Tensor:
        """(out, 1 + columns / 4): the number of the type, and then d, k, e and l of each 16 weights of a row."""
        per = self.block // self.group
        parts = parameters.split(1 + per, dim=-1)
        each = [value for part in parts for value in (part[..., :1].expand(-1, -1, per), part[..., 1:])]
        each += [torch.zeros_like(each[0])] * (4 - len(each))
        all_of_row = torch.stack(each, dim=-1).flatten(1, 2).repeat_interleave(self.group // FINEST, dim=1).flatten(1)
        return torch.cat([all_of_row.new_full((len(all_of_row), 1), self.number), all_of_row], dim=1)

    def gathered(self, scales: Tensor) -> Tensor:
        """The parameters that :meth:`spread` has made ``scales`` of."""
        each = scales[:, 1:].unflatten(1, (-1, 4))[:, :: self.group // FINEST]
        blocks = each.unflatten(1, (-1, self.block // self.group))
        parts = [
            torch.cat([blocks[:, :, :1, at], blocks[..., at + 1]], dim=2) for at in ((0, 2) if self.minimum else (0,))
        ]
        return torch.cat(parts, dim=2)

    def _unknowns(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """What s and m are multiples of, and the multiples, (out, groups) of s and then of m."""
        per = self.block // self.group
        parts = parameters.split(1 + per, dim=-1)
        d = [part[..., :1].expand(-1, -1, per).flatten(1) for part in parts]
        return torch.cat(d, dim=1), torch.cat([part[..., 1:].flatten(1) for part in parts], dim=1)

    def _system(self, W: Tensor, codes: Tensor, H: Tensor) -> tuple[Tensor, Tensor]:
        """A (out, n, n) and b (out, n): errors are x A x^T - 2 b x^T and a constant, for x of s and then m."""
        A, b = scale_systems(W, codes, H, self.group)
        if not self.minimum:
            return A, b
        # As scales of codes that are all -1.
        each = b.shape[1], self.group
        sums = H.unflatten(1, each).sum(2)
        mixed = torch.einsum("rgc,gcn->rgn", codes.unflatten(1, each), sums.unflatten(0, each)).neg_()
        of_minima = sums.unflatten(0, each).sum(1).expand(len(A), -1, -1)
        A = torch.cat([torch.cat([A, mixed], dim=2), torch.cat([mixed.mT, of_minima], dim=2)], dim=1)
        return A, torch.cat([b, (W @ sums).neg_()], dim=1)

    def _stepped(self, A: Tensor, b: Tensor, d: Tensor, k: Tensor) -> Tensor:
        """Whole numbers with less error, changed one after the other."""
        left = b - torch.einsum("rij,rj->ri", A, d * k)
        k, half = k.clone(), k.shape[1] // (2 if self.minimum else 1)
        per_error = (A.diagonal(dim1=1, dim2=2) * d).reciprocal_().nan_to_num_(0.0, 0.0, 0.0)
        for n in range(k.shape[1]):
            steps = self.steps if n < half or not self.minimum else self.minimum
            new = torch.addcmul(k[:, n], left[:, n], per_error[:, n]).round_().clamp_(*steps)
            change = (new - k[:, n]) * d[:, n]
            left.addcmul_(A[:, n], change.unsqueeze(1), value=-1)
            k[:, n] = new
        return k

    def _least(self, A: Tensor, b: Tensor, d: Tensor, k: Tensor) -> Tensor:
        """The d of each block with the least error; the old one where the new one has another sign."""
        per = self.block // self.group
        shape = k.shape[1] // per, per
        multiples = k.new_zeros(len(k), *shape, shape[0])
        multiples.diagonal(dim1=1, dim2=3).copy_(k.unflatten(1, shape).mT)
        multiples = multiples.flatten(1, 2)
        small = multiples.mT @ (A @ multiples)
        right = (b * k).unflatten(1, shape).sum(2)
        found = in_half(fitted_scales(small, right, d.unflatten(1, shape)[:, :, 0]))
        return found.unsqueeze(2).expand(-1, -1, per).flatten(1)


@functools.cache
def _by_halves(levels: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The level next to each half of a step, from the first level to the last one."""
    of = torch.tensor(levels, dtype=dtype, device=device)
    halves = torch.arange(2 * levels[0], 2 * levels[-1] + 1, dtype=dtype, device=device)
    return of[torch.bucketize((halves + 0.5) / 2, (of[1:] + of[:-1]) / 2)]


def in_half(values: Tensor) -> Tensor:
    """``values`` rounded to float16, in their own dtype."""
    return values.clamp(-_LARGEST, _LARGEST).half().to(values.dtype)


def _whole_numbers(bits: int, signed: bool = True) -> tuple[int, ...]:
    first = -(1 << (bits - 1)) if signed else 0
    return tuple(range(first, first + (1 << bits)))


_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
#: By name. Of those with the same bits the first that fits a row is the better one.
BLOCK_TYPES = {
    each.name: each
    for each in (
        BlockType("Q2_K", 10, _whole_numbers(2, signed=False), 16, 256, (0, 15), (0, 15)),
        BlockType("Q3_K", 11, _whole_numbers(3), 16, 256, (-32, 31)),
        BlockType("IQ4_XS", 23, _TABLE, 32, 256, (-32, 31)),
        BlockType("Q4_K", 12, _whole_numbers(4, signed=False), 32, 256, (0, 63), (0, 63)),
        BlockType("IQ4_NL", 20, _TABLE, 32, 32),
        BlockType("Q4_0", 2, _whole_numbers(4), 32, 32),
        BlockType("Q4_1", 3, _whole_numbers(4, signed=False), 32, 32, minimum=(1, 1)),
        BlockType("Q5_K", 13, _whole_numbers(5, signed=False), 32, 256, (0, 63), (0, 63)),
        BlockType("Q5_0", 6, _whole_numbers(5), 32, 32),
        BlockType("Q5_1", 7, _whole_numbers(5, signed=False), 32, 32, minimum=(1, 1)),
        BlockType("Q6_K", 14, _whole_numbers(6), 16, 256, (-128, 127)),
        BlockType("Q8_0", 8, tuple(range(-127, 128)), 32, 32),
    )
}
#: The types that matrices are given, by what their rows are multiples of. Q4_1 loses more than a mixture of others.
_OF_256 = ("Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
_OF_32 = ("IQ4_NL", "Q5_0", "Q5_1", "Q8_0")
_BY_NUMBER = {each.number: each for each in BLOCK_TYPES.values()}


@dataclass(frozen=True)
class BlockGrid:
    """A type of llama.cpp's as the grid of a model's weights, or for each matrix one that it can have.

    What it calls scales, (out, 1 + in / 4) in float16, is all that a matrix has beside its whole numbers: see
    :meth:`BlockType.spread`. Weights are stored in the model's dtype as usual, next to the numbers of the type, which
    they stand for. 0 is no number of most types, so that zeros are not kept.

    Attributes:
        bits: Those that are stored for each weight, with scales; the most of a mixture.
        name: The type; "" for whichever has so many bits and fits a row.
        average: The mean of bits over the matrices of a model, which have different types; None for the same in all.
    """

    bits: float
    name: str = ""
    average: float | None = None

    keeps_zeros = False  # 0 is no number of most types
    trains_scales = True

    def __str__(self) -> str:
        return self.name.lower() if self.average is None else f"q{self.average:g}"

    @property
    def is_mixed(self) -> bool:
        """Whether matrices have different types."""
        return self.average is not None

    @property
    def family(self) -> tuple[str, ...]:
        """What the grids of matrices can be, whatever the mean."""
        return (self.name,) if self.name else tuple(BLOCK_TYPES)

    def choices(self, columns: int) -> tuple[float, ...]:
        """The bits that matrices with rows of so many ``columns`` can have, the fewest first."""
        if not self.is_mixed:
            return (self.bits,)
        return tuple(BLOCK_TYPES[name].bits for name in (_OF_32 if columns % 256 else _OF_256))

    def of(self, bits: float) -> "BlockGrid":
        """The grid of a matrix with so many ``bits``."""
        return BlockGrid(bits)

    def groups(self, columns: int) -> int:
        """The numbers that "scales" of a row of ``columns`` weights are."""
        self.check([columns])
        return 1 + 4 * (columns // FINEST)

    def check(self, widths: Iterable[int]) -> None:
        """Raises UsageError unless rows of all these ``widths`` can be divided into blocks."""
        block = BLOCK_TYPES[self.name].block if self.name else 32
        if odd := [columns for columns in widths if columns % block]:
            other = "" if block == 32 or odd[0] % 32 else "; iq4_nl, q5_0, q5_1 and q8_0 have blocks of 32"
            raise UsageError(f"{odd[0]} inputs cannot be divided into the blocks of {block} that {self} has{other}")

    def type_of(self, columns: int) -> BlockType:
        """The type of a matrix with rows of so many ``columns``."""
        if self.name:
            return BLOCK_TYPES[self.name]
        fitting = (each for each in BLOCK_TYPES.values() if each.bits == self.bits and columns % each.block == 0)
        return next(fitting)

    def scale_dtype(self, stored: torch.dtype) -> torch.dtype:
        """The dtype of scales, whatever weights are ``stored`` in."""
        return torch.float16

    def scales(self, W: Tensor, importance: Tensor, dtype: torch.dtype) -> Tensor:
        """Scales for W (out, in) with a small squared rounding error, weighted by ``importance`` (in,).

        NumericalError for weights that are far from all numbers of the type.
        """
        self.check([W.shape[1]])
        kind = self.type_of(W.shape[1])
        scales = kind.spread(kind.found(W, importance))
        roots = importance.sqrt()
        if not (self.project(W, scales, dtype).sub_(W).mul_(roots)).norm() <= _FAR * (W * roots).norm():
            raise NumericalError(f"its weights are too small or too large for {kind.name}, whose scales are in float16")
        return scales

    def refitted(self, W: Tensor, codes: Tensor, scales: Tensor, H: Tensor, dtype: torch.dtype) -> Tensor:
        """Scales with less squared error (w - q) H (w - q)^T of each row, where q are the numbers of ``codes``."""
        kind = stored_type(scales)
        return kind.spread(kind.refitted(W, codes, kind.gathered(scales), H))

    def finest(self, W: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The ``scales`` as they are: others would not be the same to the bit."""
        return scales

    def are_scales(self, scales: Tensor) -> bool:
        """Whether ``scales`` can be those of a matrix."""
        numbers = scales[:, 0]
        return bool(scales.isfinite().all()) and bool((numbers == numbers[0]).all()) and int(numbers[0]) in _BY_NUMBER

    def free(self, scales: Tensor) -> Tensor:
        """(out, n): those of the ``scales`` that can be any numbers, each d of a row and then each e if it has some."""
        kind = stored_type(scales)
        each = scales[:, 1:].unflatten(1, (-1, 4))[:, :: kind.block // FINEST]
        return torch.cat([each[..., at] for at in ((0, 2) if kind.minimum else (0,))], dim=1)

    def scaled(self, scales: Tensor) -> int:
        """How many of the :meth:`free` numbers of a row scale weights; those after them are taken off."""
        return (scales.shape[1] - 1) // 4 * FINEST // stored_type(scales).block

    def with_free(self, scales: Tensor, free: Tensor) -> Tensor:
        """``scales`` with other :meth:`free` numbers; gradients go through."""
        kind, each = stored_type(scales), scales[:, 1:].unflatten(1, (-1, 4))
        parts = free.unflatten(1, (2 if kind.minimum else 1, -1)).repeat_interleave(kind.block // FINEST, dim=2)
        e = parts[:, 1] if kind.minimum else each[..., 2]
        columns = torch.stack([parts[:, 0], each[..., 1], e, each[..., 3]], dim=2)
        return torch.cat([scales[:, :1], columns.flatten(1)], dim=1)

    def codes(self, W: Tensor, scales: Tensor) -> Tensor:
        """The levels whose numbers are nearest to W (out, in), as (out, in) in the dtype of W."""
        s, m = _parts(scales)
        grouped: Tensor = W.unflatten(1, (-1, FINEST)) + m
        return stored_type(scales).nearest(grouped.div_(torch.where(s == 0, 1.0, s))).flatten(1)

    def values(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers of ``codes`` (out, in), as llama.cpp has them in float32."""
        s, m = _parts(scales)
        grouped: Tensor = codes.unflatten(1, (-1, FINEST)) * s
        return grouped.sub_(m).add_(0.0).flatten(1)  # which makes +0.0 of -0.0

    def project(self, W: Tensor, scales: Tensor, dtype: torch.dtype, same_zeros: bool = False) -> Tensor:
        """The nearest numbers to W (out, in), in its dtype; with ``same_zeros`` only zeros become zero."""
        codes = self.codes(W, scales)
        numbers = self.values(codes, scales, dtype)
        lost = (numbers == 0) & (W != 0) if same_zeros else None
        if lost is None or not bool(lost.any()):
            return numbers
        # Tables have no 0, so that the next level is one away; or the other one, at the end of the levels.
        levels, (s, _) = stored_type(scales).levels, _parts(scales)
        away = (W.unflatten(1, (-1, FINEST)) * s.sign()).sign_().flatten(1)
        away = torch.where((codes + away < levels[0]) | (codes + away > levels[-1]), -away, away)
        return torch.where(lost, self.values(codes + away, scales, dtype), numbers)

    def has(self, W: Tensor, scales: Tensor) -> bool:
        """Whether all of W (out, in) are numbers of the type with these ``scales``, rounded to the dtype of W."""
        return torch.equal(self.project(W.float(), scales.float(), W.dtype).to(W.dtype), W)


def stored_type(scales: Tensor) -> BlockType:
    """The type of a matrix with these ``scales``."""
    return _BY_NUMBER[int(scales[0, 0])]


def _parts(scales: Tensor) -> tuple[Tensor, Tensor]:
    """The s and the m of all weights, (out, in / 16, 1) each."""
    each = scales[:, 1:].unflatten(1, (-1, 4)).unsqueeze(3)
    return each[:, :, 0] * each[:, :, 1], each[:, :, 2] * each[:, :, 3]


def parse_block_grid(text: str) -> BlockGrid | None:
    """The grid of a text such as "q4_k", or "q4.25" for types of so many bits a weight in the mean; None of others."""
    if (parsed := parse_block_types(text)) is None:
        return None
    name, bits = parsed
    return BlockGrid(bits, name.upper()) if name else BlockGrid(max(BLOCK_TYPE_BITS.values()), average=bits)
