"""A matrix as a bit mask and its values that are not zero, in the order of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
        values: (count + PADDING,) row by row, then zeros; of W's dtype, or int8 with ``scales``.
        dtype: That of W.
        starts: (rows + 1,) int64: where each row's values begin, and where the last one's end.
        scales: (rows, groups) float32: W is an int8 times that of its row and group of columns, rounded to ``dtype``.
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


def pack(W: Tensor, codes: Tensor | None = None, scales: Tensor | None = None) -> PackedMatrix:
    """``W`` (rows, columns), a float tensor on the CPU, packed.

    ``codes`` int8, 0 only where W is 0, and ``scales`` replace its values; they have to give W to the bit.
    """
    rows, columns = W.shape
    nonzero = W.contiguous().view(_BITS[W.dtype.itemsize]) != 0
    wide = torch.zeros(rows, stride(columns) * 8, dtype=torch.bool)
    wide[:, :columns] = nonzero
    mask = torch.from_numpy(np.packbits(wide.numpy(), axis=1, bitorder="little"))
    source = W if codes is None else codes
    values = torch.cat([source[nonzero], torch.zeros(PADDING, dtype=source.dtype)])
    return PackedMatrix(mask, values, columns, W.dtype, _starts(mask), scales)


def unpacked(
    mask: Tensor, values: Tensor, columns: int, dtype: torch.dtype, scales: Tensor | None = None
) -> PackedMatrix:
    """What :func:`pack` made, from tensors of a file whose dtypes and dimensions agree with its index.

    ValueError where their contents do not go together: kernels rely on what is checked here.
    """
    starts = _starts(mask)
    if len(values) != int(starts[-1]) + PADDING or bool(values[-PADDING:].any()):
        raise ValueError(f"a mask of {int(starts[-1]):,} ones needs as many values and {PADDING} zeros")
    last = np.unpackbits(mask[:, -WORD // 8 :].numpy(), axis=1, bitorder="little")
    if columns % WORD and last[:, columns % WORD :].any():
        raise ValueError(f"a mask has ones after column {columns}")
    if scales is not None and not bool((scales > 0).all()):
        raise ValueError("a scale is not above 0")
    return PackedMatrix(mask, values, columns, dtype, starts, scales)


def stride(columns: int) -> int:
    """Bytes of mask for a row."""
    return math.ceil(columns / WORD) * (WORD // 8)


def groups_fit(columns: int, groups: int) -> bool:
    """Whether rows can have this number of scales: one, or one for each run of whole words of equal length."""
    return groups == 1 or (groups > 0 and columns % (groups * WORD) == 0)


def _starts(mask: Tensor) -> Tensor:
    counts = np.bitwise_count(mask.numpy()).sum(axis=1, dtype=np.int64)
    return torch.from_numpy(np.concatenate([np.zeros(1, np.int64), counts.cumsum()]))
