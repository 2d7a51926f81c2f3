"""A matrix as a bit mask and its values that are not zero, in the order of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from niwaki.errors import CheckpointError

#: Columns whose bits are one word of the mask.
WORD = 64
#: Zeros behind the last value, so that whole registers can be read anywhere.
PADDING = 64

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class PackedMatrix:
    """W (rows, columns) without its zeros.

    A zero is +0.0, all bits of which are 0; everything else is a value, so that W comes back bit for bit.

    Attributes:
        mask: (rows, stride) uint8: bit j % 8, counted from the lowest, of byte j / 8 says whether column j has a value.
            Rows are whole words of 64 columns; the bits behind the last column are 0.
        values: (count + PADDING,) those of the first row in the order of columns, of the second, and so on; of W's
            dtype, or int8 with ``scales``. Zeros at the end.
        columns: The number of columns.
        scales: (rows, groups) float32. A value is an int8 times the scale of its row and group of columns,
            rounded to ``dtype``.
        dtype: Of W.
        starts: (rows + 1,) int64: where each row's values begin, and where the last one's end.
    """

    mask: Tensor
    values: Tensor
    columns: int
    dtype: torch.dtype
    starts: Tensor
    scales: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.mask.shape[0], self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of all of it in memory."""
        parts = (self.mask, self.values, self.starts, self.scales)
        return sum(part.nbytes for part in parts if part is not None)

    def to(self, device: torch.device) -> PackedMatrix:
        """The same on another device."""
        scales = None if self.scales is None else self.scales.to(device)
        return PackedMatrix(
            self.mask.to(device),
            self.values.to(device),
            self.columns,
            self.dtype,
            self.starts.to(device),
            scales,
        )


def pack(W: Tensor, codes: Tensor | None = None, scales: Tensor | None = None) -> PackedMatrix:
    """``W`` (rows, columns), a float tensor on the CPU, packed.

    With ``codes`` (rows, columns) int8 and ``scales`` (rows, groups) float32 these take the place of its values. They
    have to give W to the bit, and 0 only where W is.
    """
    rows, columns = W.shape
    kept = W.contiguous().view(_BITS[W.dtype.itemsize]) != 0
    wide = torch.zeros(rows, stride(columns) * 8, dtype=torch.bool)
    wide[:, :columns] = kept
    mask = torch.from_numpy(np.packbits(wide.numpy(), axis=1, bitorder="little"))
    source = W if codes is None else codes
    values = torch.cat([source[kept], torch.zeros(PADDING, dtype=source.dtype)])
    return PackedMatrix(mask, values, columns, W.dtype, _starts(mask), scales)


def unpacked(
    mask: Tensor, values: Tensor, columns: int, dtype: torch.dtype, scales: Tensor | None = None
) -> PackedMatrix:
    """What :func:`pack` made, from its parts.

    Raises:
        CheckpointError: they contradict each other.
    """
    starts = _starts(mask)
    if mask.ndim != 2 or mask.shape[1] != stride(columns):
        raise CheckpointError(f"a mask for {columns} columns has the shape {tuple(mask.shape)}")
    if values.shape != (int(starts[-1]) + PADDING,):
        raise CheckpointError(f"a mask of {int(starts[-1])} ones has {tuple(values.shape)} values")
    if values.dtype != (dtype if scales is None else torch.int8):
        raise CheckpointError(f"values of a packed {dtype} are {values.dtype}")
    if scales is not None and (
        scales.ndim != 2 or len(scales) != len(mask) or not groups_fit(columns, scales.shape[1])
    ):
        raise CheckpointError(f"scales for {len(mask)} x {columns} have the shape {tuple(scales.shape)}")
    if columns % WORD and bool(_last_bits(mask, columns).any()):
        raise CheckpointError(f"a mask has ones behind column {columns}")
    return PackedMatrix(mask, values, columns, dtype, starts, scales)


def stride(columns: int) -> int:
    """Bytes of mask for a row."""
    return math.ceil(columns / WORD) * (WORD // 8)


def groups_fit(columns: int, groups: int) -> bool:
    """Whether so many scales for a row can be had: one, or one for each so many whole words."""
    return groups == 1 or (groups > 0 and columns % (groups * WORD) == 0)


def _starts(mask: Tensor) -> Tensor:
    counts = np.bitwise_count(mask.numpy()).sum(axis=1, dtype=np.int64)
    return torch.from_numpy(np.concatenate([np.zeros(1, np.int64), counts.cumsum()]))


def _last_bits(mask: Tensor, columns: int) -> Tensor:
    """(rows, 64) bool, of the last word, with those of columns set to 0."""
    bits = torch.from_numpy(np.unpackbits(mask[:, -WORD // 8 :].numpy(), axis=1, bitorder="little"))
    return bits[:, columns % WORD :]
