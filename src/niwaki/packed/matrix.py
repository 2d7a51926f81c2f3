"""A matrix as a bit mask and its values that are not zero, in the order of rows; or all of its whole numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

WORD = 64  # columns whose bits are one word of the mask; rows are filled up to whole ones
PADDING = 64  # zeros after the last value, so that whole registers can be read anywhere
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # that a matrix can have
COMPONENTS = ("mask", "values", "starts", "scales")  # the tensors that a packed matrix consists of

#: Rows that are side by side in a strip.
STRIP = 16

#: Of whole numbers in a matrix without a mask; with one there are 4 and 8.
WHOLE_BITS = (2, 3, 4, 5, 6, 8)

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class PackedMatrix:
    """W (rows, columns) without its zeros.

    A zero is +0.0, all bits of which are 0; everything else is a value, so that W comes back bit for bit. Of whole
    numbers few of which are 0 all are there instead, without a mask: the matrix is whole then.

    Attributes:
        mask: (rows, stride) uint8: bit j % 8, counted from the lowest, of byte j / 8 says whether column j has a value.
            Rows are whole words of 64 columns; bits after the last column are 0. None: every column has one.
        values: (count + PADDING,) row by row, then zeros; of W's dtype, or with ``scales`` int8, or uint8 with two
            numbers of 4 bits in each, the first one in the lower half; those of a word of the mask begin with a byte.
            Without a mask rows are whole words too, filled up with 0. Numbers of 2, 3, 5 and 6 bits, which only such
            matrices have, are made of fields of 4, 2 and 1 bits, as whole numbers are of powers of two, and a word has
            those of all its columns one after the other, the one with the lowest bits first: of 4 bits byte i of 32
            has the columns i and i + 32, of 2 bits byte i of 16 the columns i, i + 16, i + 32 and i + 48, the first of
            them in its lowest bits, and bit i of 64 is that of column i.
        dtype: That of W.
        starts: (rows + 1,) int64: where each row's values begin, and where the last one's end. None without a mask.
        scales: (rows, groups) float32: W is a whole number times that of its row and group of columns, rounded to
            ``dtype``.
        strips: Whether rows without a mask are in strips, as some kernels read them and no file has them: 16 side by
            side in the place of the same rows, of values the first four bytes of each, then the next four, and so on,
            and of each group the scales of all. What is left of rows behind the last strip is as ever.
    """

    mask: Tensor | None
    values: Tensor
    columns: int
    dtype: torch.dtype
    starts: Tensor | None
    scales: Tensor | None = None
    strips: bool = False

    @property
    def in_strips(self) -> int:
        """The rows that are in strips, from the first on."""
        return self.shape[0] // STRIP * STRIP if self.strips and self.mask is None else 0

    @property
    def shape(self) -> tuple[int, int]:
        rows = self.scales if self.mask is None else self.mask
        assert rows is not None
        return len(rows), self.columns

    @property
    def count(self) -> int:
        """The number of values, or of their bytes where two share one."""
        return len(self.values) - PADDING

    @property
    def bits(self) -> int:
        """The bits of each of its whole numbers; 0 where it has other values."""
        if self.scales is None:
            return 0
        if self.mask is not None:
            return 4 if self.values.dtype == torch.uint8 else 8
        return self.count // (self.shape[0] * stride(self.columns))

    @property
    def kept(self) -> int:
        """The weights that are stored."""
        return math.prod(self.shape) if self.mask is None else int(_counts(self.mask.cpu()).sum())

    @property
    def components(self) -> dict[str, Tensor]:
        return {name: value for name in COMPONENTS if (value := getattr(self, name)) is not None}

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.components.values())

    def to(self, device: torch.device) -> PackedMatrix:
        moved: dict[str, Any] = {name: value.to(device) for name, value in self.components.items()}
        return replace(self, **moved)


def pack(
    W: Tensor, codes: Tensor | None = None, scales: Tensor | None = None, bits: int = 8, whole: bool | None = None
) -> PackedMatrix:
    """``W`` (rows, columns), a float tensor on the CPU, packed.

    ``codes`` int8, 0 only where W is 0, and ``scales`` replace its values; they have to give W to the bit. Of fewer
    ``bits`` than 8 they are from -2^(bits-1) to 2^(bits-1) - 1; with a mask all are stored as 4 or 8. ``whole`` says
    whether all of them are kept, without a mask; None: if that takes fewer bytes.
    """
    if codes is not None and whole:
        return _whole(codes, W.dtype, scales, bits)
    nonzero = W.contiguous().view(_BITS[W.dtype.itemsize]) != 0
    if codes is None:
        return _masked(nonzero, W, W.dtype)
    masked = _masked(nonzero, codes, W.dtype, scales, 4 if bits <= 4 else 8)
    assert masked.mask is not None
    if whole is None:
        whole = size_of_whole(*masked.shape, bits) < masked.mask.nbytes + masked.count
    return _whole(codes, W.dtype, scales, bits) if whole else masked


def _whole(codes: Tensor, dtype: torch.dtype, scales: Tensor | None, bits: int) -> PackedMatrix:
    """A matrix with all of the ``codes``."""
    columns = codes.shape[1]
    values = functional.pad(codes, (0, -columns % WORD))
    if bits < 8:
        words = values.view(torch.uint8).unflatten(1, (-1, WORD))
        parts, below = [], 0
        for width in _fields(bits):
            apart = _by_bytes(words >> below & (1 << width) - 1, width)
            parts.append((apart << torch.arange(0, 8, width, dtype=torch.uint8)).sum(dim=3, dtype=torch.uint8))
            below += width
        values = torch.cat(parts, dim=2).flatten(1)
    return PackedMatrix(None, functional.pad(values.flatten(), (0, PADDING)), columns, dtype, None, scales)


def _fields(bits: int) -> tuple[int, ...]:
    """The widths of the fields that numbers of fewer than 8 ``bits`` are made of, from the lowest bits on."""
    return tuple(width for width in (4, 2, 1) if bits & width)


def _by_bytes(words: Tensor, width: int) -> Tensor:
    """(rows, words, bytes, numbers of one byte) of ``words`` (rows, words, WORD), a field of that ``width``."""
    each = 8 // width
    apart: Tensor = words.unflatten(2, (-1, each) if width == 1 else (each, -1))
    return apart if width == 1 else apart.transpose(2, 3)


def _masked(
    nonzero: Tensor, values: Tensor, dtype: torch.dtype, scales: Tensor | None = None, bits: int = 8
) -> PackedMatrix:
    """A matrix with those of the ``values`` (rows, columns) that are ``nonzero``."""
    rows, columns = nonzero.shape
    wide = torch.zeros(rows, stride(columns) * 8, dtype=torch.bool)
    wide[:, :columns] = nonzero
    mask = torch.from_numpy(np.packbits(wide.numpy(), axis=1, bitorder="little"))
    values = values[nonzero]
    if bits == 4:
        halves = torch.zeros(2 * int(_starts(mask, 4)[-1]), dtype=torch.uint8)
        halves[_places_of_halves(mask)] = values.view(torch.uint8) & 15
        values = halves[::2] | halves[1::2] << 4
    values = torch.cat([values, torch.zeros(PADDING, dtype=values.dtype)])
    return PackedMatrix(mask, values, columns, dtype, _starts(mask, bits), scales)


def unpacked(
    mask: Tensor | None, values: Tensor, columns: int, dtype: torch.dtype, scales: Tensor | None = None
) -> PackedMatrix:
    """What :func:`pack` made, from tensors of a file whose dtypes and dimensions agree with its index.

    ``scales`` may have another float dtype. ValueError where their contents do not go together: kernels rely on what is
    checked here.
    """
    if scales is not None and not bool((scales.abs() > 0).all()):
        raise ValueError("a scale is 0 or not a number")
    wide = None if scales is None else scales.float()
    if mask is None:
        return _checked_whole(PackedMatrix(None, values, columns, dtype, None, wide))
    starts = _starts(mask, 4 if values.dtype == torch.uint8 else 8)
    if len(values) != int(starts[-1]) + PADDING or bool(values[-PADDING:].any()):
        raise ValueError(f"a mask of {int(starts[-1]):,} ones needs as many values and {PADDING} zeros")
    last = np.unpackbits(mask[:, -WORD // 8 :].numpy(), axis=1, bitorder="little")
    if columns % WORD and last[:, columns % WORD :].any():
        raise ValueError(f"a mask has ones after column {columns}")
    return PackedMatrix(mask, values, columns, dtype, starts, wide)


def _checked_whole(W: PackedMatrix) -> PackedMatrix:
    """``W``, which has no mask; ValueError where it is not valid."""
    if W.scales is None or W.values.dtype not in (torch.int8, torch.uint8):
        raise ValueError("what has no mask needs whole numbers and scales")
    possible = possible_bits(W)
    count = size_of_whole(*W.shape, max((bits for bits in possible if bits <= W.bits), default=possible[0]))
    if W.count != count or bool(W.values[count:].any()):
        raise ValueError(f"a matrix without a mask needs {count:,} bytes of numbers and {PADDING} zeros")
    last = _numbers(_rows(W)[:, -WORD // 8 * W.bits :], W.bits)
    if W.columns % WORD and last[:, W.columns % WORD :].any():
        raise ValueError(f"a matrix has numbers after column {W.columns}")
    return W


def all_numbers(W: PackedMatrix, rows: slice | Tensor = slice(None)) -> Tensor:
    """The numbers of some ``rows``, a slice or (n,) int64, of a matrix without a mask, (n, columns) int8."""
    return _numbers(_rows(in_rows(W))[rows], W.bits)[:, : W.columns]


def _rows(W: PackedMatrix) -> Tensor:
    """The values of a matrix without a mask, a row of them for each row."""
    return W.values[: W.count].view(W.shape[0], -1)


def in_strips(W: PackedMatrix, empty: Callable[[Tensor], Tensor] = torch.empty_like) -> PackedMatrix:
    """``W`` with its rows in strips, if it has no mask, in the memory that is ``empty`` for a tensor like another."""
    return _in_order(W, True, empty)


def in_rows(W: PackedMatrix) -> PackedMatrix:
    """``W`` with its rows one after the other."""
    return _in_order(W, False, torch.empty_like)


def _in_order(W: PackedMatrix, strips: bool, empty: Callable[[Tensor], Tensor]) -> PackedMatrix:
    if W.strips == strips or W.mask is not None or W.shape[0] < STRIP:
        return W
    rows = W.shape[0] // STRIP * STRIP
    moved = dict[str, Any]()
    for name, value in W.components.items():
        moved[name] = empty(value)
        before, after = _whole_words(value).view(-1), moved[name].view(torch.int32).view(-1)
        count = rows * (W.count // 4 if name == "values" else value.numel()) // W.shape[0]
        apart = before[:count].view(-1, *((STRIP, count // rows) if strips else (count // rows, STRIP))).transpose(1, 2)
        after[:count].view(apart.shape).copy_(apart)
        after[count:] = before[count:]
    return replace(W, **moved, strips=strips)


def _whole_words(value: Tensor) -> Tensor:
    """Four bytes as one number; a copy where none could begin."""
    begins = value.storage_offset() * value.itemsize % 4 == 0
    return (value if begins else value.clone()).view(torch.int32)


def _numbers(values: Tensor, bits: int) -> Tensor:
    """Rows of whole words as int8."""
    if bits == 8:
        return values
    words = values.unflatten(1, (-1, WORD // 8 * bits))
    found, below = torch.zeros(*words.shape[:2], WORD, dtype=torch.uint8, device=values.device), 0
    widths = _fields(bits)
    for width, field in zip(widths, words.split([WORD // 8 * width for width in widths], dim=2), strict=True):
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=values.device)
        apart = field.unsqueeze(3) >> shifts & (1 << width) - 1
        found |= (apart if width == 1 else apart.transpose(2, 3)).flatten(2) << below
        below += width
    return _signed(found.flatten(1), bits)


def _signed(numbers: Tensor, bits: int = 4) -> Tensor:
    """From 0 on as the numbers of so many bits that have a sign."""
    found = numbers.to(torch.int8)
    return torch.where(found >= 1 << (bits - 1), found - (1 << bits), found)


def in_bytes(W: PackedMatrix, first: int = 0, last: int | None = None) -> Tensor:
    """The values of rows ``first`` to ``last`` of a matrix with 4 bits as int8, without zeros behind them."""
    last = W.shape[0] if last is None else last
    assert W.mask is not None
    assert W.starts is not None
    values = W.values[int(W.starts[first]) : int(W.starts[last])]
    halves = torch.stack([values & 15, values >> 4], dim=1).flatten()
    return _signed(halves[_places_of_halves(W.mask[first:last].cpu()).to(halves.device)])


def with_bytes(W: PackedMatrix) -> PackedMatrix:
    """``W`` on the CPU with a mask, and no fewer than 8 bits for a value, for kernels that read nothing else."""
    if W.mask is None:
        numbers = all_numbers(W)
        return _masked(numbers != 0, numbers, W.dtype, W.scales)
    if W.values.dtype != torch.uint8:
        return W
    values = torch.cat([in_bytes(W), torch.zeros(PADDING, dtype=torch.int8)])
    return replace(W, values=values, starts=_starts(W.mask, 8))


def stride(columns: int) -> int:
    """Bytes of mask for a row."""
    return math.ceil(columns / WORD) * (WORD // 8)


def possible_bits(W: PackedMatrix) -> tuple[int, ...]:
    """The bits that numbers of a matrix without a mask can have, by the dtype of its values."""
    return (8,) if W.values.dtype == torch.int8 else WHOLE_BITS[:-1]


def size_of_whole(rows: int, columns: int, bits: int) -> int:
    """Bytes of the numbers of a matrix without a mask."""
    return rows * stride(columns) * bits


def groups_fit(columns: int, groups: int) -> bool:
    """Whether rows can have this number of scales: one, or one for each run of whole words of equal length."""
    return groups == 1 or (groups > 0 and columns % (groups * WORD) == 0)


def _starts(mask: Tensor, bits: int) -> Tensor:
    """Where the values of each row begin; with 4 ``bits``, which byte of them."""
    counts = _counts(mask)
    counts = ((counts + 1) // 2 if bits == 4 else counts).sum(axis=1, dtype=np.int64)
    return torch.from_numpy(np.concatenate([np.zeros(1, np.int64), counts.cumsum()]))


def _counts(mask: Tensor) -> np.ndarray:
    """(rows, words): the ones of each word."""
    return np.bitwise_count(mask.numpy().view(np.uint64)).astype(np.int64)


def _places_of_halves(mask: Tensor) -> Tensor:
    """For each one of the mask the half of a byte that has its value, counted from the first row's first."""
    counts = _counts(mask).ravel()
    even = counts + counts % 2
    before = np.cumsum(even) - even - (np.cumsum(counts) - counts)  # halves that are left out
    return torch.from_numpy(np.arange(counts.sum()) + np.repeat(before, counts))
