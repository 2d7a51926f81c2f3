"""A matrix as a bit mask and its values that are not zero, in the order of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

WORD = 64  # columns whose bits are one word of the mask
PADDING = 64  # zeros after the last value, so that whole registers can be read anywhere
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # that a matrix can have
COMPONENTS = ("mask", "values", "starts", "scales")  # the tensors that a packed matrix consists of

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class PackedMatrix:
    """W (rows, columns) without its zeros.

    A zero is +0.0, all bits of which are 0; everything else is a value, so that W comes back bit for bit.

    Attributes:
        mask: (rows, stride) uint8: bit j % 8, counted from the lowest, of byte j / 8 says whether column j has a value.
            Rows are whole words of 64 columns; bits after the last column are 0.
        values: (count + PADDING,) row by row, then zeros; of W's dtype, or with ``scales`` int8, or uint8 with two
            numbers of 4 bits in each, the first one in the lower half; those of a word of the mask begin with a byte.
        dtype: That of W.
        starts: (rows + 1,) int64: where each row's values begin, and where the last one's end.
        scales: (rows, groups) float32: W is a whole number times that of its row and group of columns, rounded to
            ``dtype``.
    """

    mask: Tensor
    values: Tensor
    columns: int
    dtype: torch.dtype
    starts: Tensor
    scales: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.mask.shape[0], self.columns

    @property
    def components(self) -> dict[str, Tensor]:
        return {name: value for name in COMPONENTS if (value := getattr(self, name)) is not None}

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.components.values())

    def to(self, device: torch.device) -> PackedMatrix:
        moved = {name: value.to(device) for name, value in self.components.items()}
        return PackedMatrix(columns=self.columns, dtype=self.dtype, **moved)


def pack(W: Tensor, codes: Tensor | None = None, scales: Tensor | None = None, bits: int = 8) -> PackedMatrix:
    """``W`` (rows, columns), a float tensor on the CPU, packed.

    ``codes`` int8, 0 only where W is 0, and ``scales`` replace its values; they have to give W to the bit. Of 4
    ``bits`` they are from -8 to 7.
    """
    rows, columns = W.shape
    nonzero = W.contiguous().view(_BITS[W.dtype.itemsize]) != 0
    wide = torch.zeros(rows, stride(columns) * 8, dtype=torch.bool)
    wide[:, :columns] = nonzero
    mask = torch.from_numpy(np.packbits(wide.numpy(), axis=1, bitorder="little"))
    values = (W if codes is None else codes)[nonzero]
    if bits == 4:
        halves = torch.zeros(2 * int(_starts(mask, 4)[-1]), dtype=torch.uint8)
        halves[_places_of_halves(mask)] = values.view(torch.uint8) & 15
        values = halves[::2] | halves[1::2] << 4
    values = torch.cat([values, torch.zeros(PADDING, dtype=values.dtype)])
    return PackedMatrix(mask, values, columns, W.dtype, _starts(mask, bits if codes is not None else 8), scales)


def unpacked(
    mask: Tensor, values: Tensor, columns: int, dtype: torch.dtype, scales: Tensor | None = None
) -> PackedMatrix:
    """What :func:`pack` made, from tensors of a file whose dtypes and dimensions agree with its index.

    ``scales`` may have another float dtype. ValueError where their contents do not go together: kernels rely on what is
    checked here.
    """
    starts = _starts(mask, 4 if values.dtype == torch.uint8 else 8)
    if len(values) != int(starts[-1]) + PADDING or bool(values[-PADDING:].any()):
        raise ValueError(f"a mask of {int(starts[-1]):,} ones needs as many values and {PADDING} zeros")
    last = np.unpackbits(mask[:, -WORD // 8 :].numpy(), axis=1, bitorder="little")
    if columns % WORD and last[:, columns % WORD :].any():
        raise ValueError(f"a mask has ones after column {columns}")
    if scales is not None and not bool((scales > 0).all()):
        raise ValueError("a scale is not above 0")
    return PackedMatrix(mask, values, columns, dtype, starts, None if scales is None else scales.float())


def in_bytes(W: PackedMatrix, first: int = 0, last: int | None = None) -> Tensor:
    """The values of rows ``first`` to ``last`` of a matrix with 4 bits as int8, without zeros behind them."""
    last = W.shape[0] if last is None else last
    values = W.values[int(W.starts[first]) : int(W.starts[last])]
    halves = torch.stack([values & 15, values >> 4], dim=1).flatten()
    found = halves[_places_of_halves(W.mask[first:last].cpu()).to(halves.device)].to(torch.int8)
    return torch.where(found > 7, found - 16, found)


def with_bytes(W: PackedMatrix) -> PackedMatrix:
    """``W`` on the CPU; if its values have 4 bits, with the same ones in 8, for kernels that read no others."""
    if W.values.dtype != torch.uint8:
        return W
    values = torch.cat([in_bytes(W), torch.zeros(PADDING, dtype=torch.int8)])
    return replace(W, values=values, starts=_starts(W.mask, 8))


def stride(columns: int) -> int:
    """Bytes of mask for a row."""
    return math.ceil(columns / WORD) * (WORD // 8)


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
