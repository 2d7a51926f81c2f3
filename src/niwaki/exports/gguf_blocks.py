"""The bytes of llama.cpp's types: the numbers and the scales of a block, in the order that its files have them in."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from niwaki.layer.block_types import BLOCK_TYPES, BlockType, stored_type

Bytes = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Blocks:
    """Some blocks, each a row of uint8: d and e in float16, k and l of its groups, and q of its weights, from 0 on."""

    d: Bytes
    e: Bytes
    k: Bytes
    l: Bytes  # noqa: E741 - as in the formulas
    q: Bytes

    def scales_and_minima(self) -> Bytes:
        """Eight k and eight l of six bits in 12 bytes, the highest bits of the last four above the first four."""
        first = [each[:, :4] | (each[:, 4:] >> 4 << 6) for each in (self.k, self.l)]
        return np.concatenate([*first, (self.k[:, 4:] & 15) | ((self.l[:, 4:] & 15) << 4)], axis=1)


def _lots(values: Bytes, lots: int, width: int, bits: int) -> Bytes:
    """Bytes with ``lots`` of numbers of so many ``bits`` one above the other, each next to ``width`` others."""
    shifts = bits * np.arange(lots, dtype=np.uint8)[:, None]
    shifted = values.reshape(len(values), -1, lots, width) << shifts
    together: Bytes = np.bitwise_or.reduce(shifted, axis=2).reshape(len(values), -1)
    return together


#: The parts of a block, as ggml-common.h has them.
_PARTS: dict[str, Callable[[_Blocks], list[Bytes]]] = {
    "Q4_0": lambda b: [b.d, _lots(b.q, 2, 16, 4)],
    "IQ4_NL": lambda b: [b.d, _lots(b.q, 2, 16, 4)],
    "Q4_1": lambda b: [b.d, b.e, _lots(b.q, 2, 16, 4)],
    "Q5_0": lambda b: [b.d, _lots(b.q >> 4, 8, 1, 1), _lots(b.q & 15, 2, 16, 4)],
    "Q5_1": lambda b: [b.d, b.e, _lots(b.q >> 4, 8, 1, 1), _lots(b.q & 15, 2, 16, 4)],
    "Q8_0": lambda b: [b.d, b.q ^ 128],
    "Q2_K": lambda b: [b.k | (b.l << 4), _lots(b.q, 4, 32, 2), b.d, b.e],
    "Q3_K": lambda b: [
        *(_lots(b.q >> 2, 8, 32, 1), _lots(b.q & 3, 4, 32, 2)),
        *(_lots(b.k & 15, 2, 8, 4), _lots(b.k >> 4, 4, 4, 2), b.d),
    ],
    "Q4_K": lambda b: [b.d, b.e, b.scales_and_minima(), _lots(b.q, 2, 32, 4)],
    "Q5_K": lambda b: [b.d, b.e, b.scales_and_minima(), _lots(b.q >> 4, 8, 32, 1), _lots(b.q & 15, 2, 32, 4)],
    "Q6_K": lambda b: [_lots(b.q & 15, 2, 64, 4), _lots(b.q >> 4, 4, 32, 2), b.k ^ 128, b.d],
    "IQ4_XS": lambda b: [b.d, _lots(b.k >> 4, 4, 1, 2), _lots(b.k & 15, 2, 1, 4), _lots(b.q, 2, 16, 4)],
}


def bytes_of(codes: Tensor, scales: Tensor) -> Bytes:
    """(rows, bytes) uint8 of a matrix on a :class:`.BlockGrid`, by its levels (rows, columns) and its ``scales``."""
    kind = stored_type(scales)
    parameters, count = kind.gathered(scales.float()), 1 + kind.block // kind.group
    d, k, e, whole = (
        parameters[..., at] for at in (slice(1), slice(1, count), slice(count, count + 1), slice(count + 1, None))
    )
    return _joined(kind, codes, d, k, e, whole)


def bytes_of_whole_numbers(codes: Tensor, scales: Tensor, name: str) -> Bytes:
    """The same of whole numbers (rows, columns) times ``scales`` (rows, groups), in the type ``name``."""
    kind = BLOCK_TYPES[name]
    d = scales.float().repeat_interleave(codes.shape[1] // kind.block // scales.shape[1], dim=1).unsqueeze(2)
    return _joined(kind, codes, d, torch.ones_like(d), d[..., :0], d[..., :0])


def _joined(kind: BlockType, codes: Tensor, d: Tensor, k: Tensor, e: Tensor, l: Tensor) -> Bytes:  # noqa: E741
    """(rows, bytes) of levels (rows, columns), and (rows, blocks, ...) of the rest."""
    count = codes.numel() // kind.block

    def whole(values: Tensor, first: int = 0) -> Bytes:
        return (values - first).to(torch.uint8).numpy().reshape(count, values.numel() // count)

    def half(values: Tensor) -> Bytes:
        return values.half().numpy().astype("<f2").view(np.uint8).reshape(count, 2 * values.shape[2])

    if kind.is_table:
        q = whole(torch.bucketize(codes.contiguous(), codes.new_tensor(kind.levels)))
    else:
        q = whole(codes, -128 if kind.name == "Q8_0" else kind.levels[0])
    # The file adds what it calls the minimum of blocks of 32, and takes off that of others.
    blocks = _Blocks(half(d), half(-e if kind.is_plain else e), whole(k, min(0, kind.steps[0])), whole(l), q)
    return np.concatenate(_PARTS[kind.name](blocks), axis=1).reshape(len(codes), -1)
