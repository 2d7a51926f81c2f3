"""Weights on a grid in the groups of 32 that llama.cpp has: the same whole numbers and scales, and no rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
from torch import Tensor

from niwaki.layer.grid import Grid
from niwaki.models.ends import embedding_keys
from niwaki.models.scales import bits_in, embedding_grid_of, grid_of, read_embedding_scales, read_scales
from niwaki.models.streamed import StreamedModel

Kind = Literal["F16", "Q8_0", "Q5_0", "Q4_0"]

GROUP = 32  # weights that have a scale in Q8_0, Q5_0 and Q4_0
#: The bits of a whole number there, the fewest first.
BITS: dict[Kind, int] = {"Q4_0": 4, "Q5_0": 5, "Q8_0": 8}


@dataclass(frozen=True)
class TensorOnGrid:
    """A tensor of a checkpoint that is on a ``grid``, how to read its scales (rows, groups), and the bits that it has.

    Of mixed bits these are known once it is written.
    """

    grid: Grid
    scales: Callable[[], Tensor]
    find_bits: Callable[[], int]

    @cached_property
    def bits(self) -> int:
        """Of its whole numbers."""
        return self.find_bits()

    def fits(self, kind: Kind, columns: int) -> bool:
        """Whether ``kind`` has its whole numbers, and a scale wherever the grid has one."""
        return self.bits <= BITS[kind] and (self.grid.group or columns) % GROUP == 0


def tensors_on_grids(model: StreamedModel) -> dict[tuple[str, int | None], TensorOnGrid]:
    """By key and index, those that ``model`` has on a grid: matrices of its blocks, and embeddings and head.

    CheckpointError where config.json names no grid that there is.
    """
    checkpoint, found = model.checkpoint, dict[tuple[str, int | None], TensorOnGrid]()
    grid, ends = grid_of(checkpoint), embedding_grid_of(checkpoint)
    if grid is not None:
        for matrix in model.matrices():
            if checkpoint.pruning.includes(matrix.block):
                of_it = checkpoint, matrix, grid
                found[matrix.entry] = TensorOnGrid(grid, partial(read_scales, *of_it), partial(bits_in, *of_it))
    if ends is not None:
        for key in embedding_keys(model):
            found[key, None] = TensorOnGrid(
                ends, partial(read_embedding_scales, checkpoint, key, ends), lambda: ends.bits
            )
    return found


def groups_of(codes: Tensor, scales: Tensor, kind: str) -> np.ndarray[Any, Any]:
    """(rows, bytes) uint8: whole numbers (rows, columns) times ``scales`` (rows, groups), as ``kind`` stores them.

    A group of the file is its scale in float16 and then its numbers: a byte each in Q8_0; in Q4_0 16 bytes with q + 8
    of one of the first 16 in the low half and of one of the others in the high half; in Q5_0 the same of the lowest
    four bits of q + 16, and before them four bytes with the fifth bit of each.
    """
    rows, columns = codes.shape
    numbers: np.ndarray[Any, Any]
    whole = codes.numpy().astype(np.int8).reshape(rows, -1, GROUP)
    if kind == "Q8_0":
        numbers = whole.view(np.uint8)
    else:
        unsigned = (whole + (8 if kind == "Q4_0" else 16)).astype(np.uint8)
        lowest = unsigned & 15
        numbers = lowest[..., : GROUP // 2] | (lowest[..., GROUP // 2 :] << 4)
        if kind == "Q5_0":
            fifth = np.packbits(unsigned >> 4, axis=2, bitorder="little")
            numbers = np.concatenate([fifth, numbers], axis=2)
    each = np.repeat(scales.float().numpy(), columns // GROUP // scales.shape[1], axis=1).astype(np.float16)
    return np.concatenate([each[..., None].view(np.uint8), numbers], axis=2).reshape(rows, -1)
