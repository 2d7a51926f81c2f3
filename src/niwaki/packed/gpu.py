"""Products with packed matrices on a GPU, for a few vectors at a time: a Triton kernel. Imports Triton.

The floor is bytes over bandwidth. What keeps the kernel from it is decoding, because all positions are looked at, also
those of zeros, and waiting for memory (benchmarks/LOG.md). So it saves instructions, and has many loads in flight:

* A word of the mask is 32 columns. A column's value is found by counting the ones before it: in the words before by
  one scan over the words of a step, in the word by a population count of the bits below.
* Four columns share a lane, their count and their address: their values are among the next four, and a column without
  one leaves the next value to the column after it. The lanes of a warp read neighbouring values.
* Loads have no condition: after a zero the next value is read and not used; after the last one there is PADDING.
* A step is 64 positions for each lane. All of its values are asked for before the first one is used.
* Before a row ends nothing is added up over lanes, and only the words and their counts go through shared memory.
* The words of the next step are read before this one is computed.

For 3 to 16 vectors in the half precision of W the decoded values of 16 rows go to the tensor cores, a part of the
columns for each warp. All else is multiply-adds of 2 vectors with 4 rows at a time.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from niwaki.packed.matrix import PackedMatrix

_FEW = 2  # vectors up to which each product is a multiply-add
_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def multiply(W: PackedMatrix, x: Tensor) -> Tensor:
    """(n, rows) in the dtype of x (n, columns): x W^T, added up in float32, on the GPU that both are on.

    Right for any n, and meant for 1 to 16. Without a C compiler Triton raises RuntimeError.
    """
    rows, columns = W.shape
    vectors, groups = len(x), 1 if W.scales is None else W.scales.shape[1]
    assert vectors > 0
    assert x.shape == (vectors, columns)
    assert {W.dtype, x.dtype} <= _DTYPES.keys()
    # Models have masks, and values of 8 bits, on a GPU instead.
    assert W.mask is not None
    assert W.values.dtype != torch.uint8
    y = torch.empty(vectors, rows, dtype=x.dtype, device=x.device)
    words = W.mask.shape[1] // 4
    tensors = (W.mask.view(torch.uint32), W.values, W.starts, W.scales, x.contiguous(), y)
    chosen = constants(rows, vectors, W.dtype, x.dtype) | {"SCALED": W.scales is not None}
    grid = (triton.cdiv(rows, chosen["ROWS"]), triton.cdiv(vectors, chosen["BATCH"]))
    # The fusion is said although it is what it was always: without it Triton warns.
    options = {"enable_fp_fusion": True, "num_warps": chosen["WARPS"], "num_stages": 2}
    with torch.cuda.device_of(x):
        _by_tiles[grid](*tensors, rows, columns, words, groups, vectors, **chosen, **options)
    return y


def constants(rows: int, vectors: int, weights: torch.dtype, inputs: torch.dtype) -> dict[str, Any]:
    """What the kernel is compiled for, for so many rows and vectors of these dtypes."""
    if vectors > _FEW and weights == inputs != torch.float32:
        # In Triton's interpreter tl.dot takes the bits of bfloat16 for whole numbers.
        wrong = inputs == torch.bfloat16 and not isinstance(_by_tiles, triton.JITFunction)
        batch, tile, warps = triton.next_power_of_2(vectors), 16, 4
        factors = tl.float32 if wrong else _DTYPES[inputs]
    else:
        batch, tile, warps, factors = min(vectors, _FEW), 4, _warps(rows), None
    return {"BATCH": batch, "ROWS": tile, "WARPS": warps, "FACTORS": factors, "DTYPE": _DTYPES[weights]}


def _warps(rows: int) -> int:
    """How many share four rows: more where there are few rows, so that a GPU has enough of them."""
    return 1 if rows >= 8192 else 2 if rows >= 4096 else 4


@triton.jit
def _ones(words):
    """How many bits of each are 1; LLVM makes it one instruction."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return (words * 0x01010101) >> 24


@triton.jit
def _read_values(bits, at, values):
    """The four values from where those of each lane's columns begin, (1, ROWS, WORDS, 8) each, and the next ``at``.

    ``bits`` (ROWS, WORDS) uint32, ``at`` (ROWS,) uint32: where the values of a step begin, counted from ``values``.
    """
    counts = _ones(bits)
    before = tl.cumsum(counts, 1) - counts + at[:, None]
    below = ((tl.full((8,), 1, tl.uint32) << (4 * tl.arange(0, 8)).to(tl.uint32)) - 1)[None, None, None, :]
    place = values + (before[None, :, :, None] + _ones(bits[None, :, :, None] & below))
    return tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3), at + tl.sum(counts, 1)


@triton.jit
def _decode(bits, a, b, c, d):
    """Whether the four columns of each lane have a value, and which; any other one where they have none.

    ``bits`` (ROWS, WORDS) uint32, ``a`` to ``d`` as read.
    """
    # Their bits are shifted to the front, so that the last test is of the sign: from four tests of the same kind LLVM
    # makes vectors of bits, which take twice the instructions.
    front = bits[None, :, :, None] << (28 - 4 * tl.arange(0, 8)).to(tl.uint32)[None, None, None, :]
    front = front.to(tl.int32, bitcast=True)
    has_a, has_b, has_c, has_d = (
        (front & 0x10000000) != 0,
        (front & 0x20000000) != 0,
        (front & 0x40000000) != 0,
        front < 0,
    )
    b, c, d = tl.where(has_a, b, a), tl.where(has_a, c, b), tl.where(has_a, d, c)
    c, d = tl.where(has_b, c, b), tl.where(has_b, d, c)
    d = tl.where(has_c, d, c)
    return has_a, has_b, has_c, has_d, a, b, c, d


@triton.jit
def _add(sums, bits, a, b, c, d, scale, x, DTYPE: tl.constexpr, SCALED: tl.constexpr, FACTORS: tl.constexpr):
    """``sums`` and the products of one step's columns with ``x``; by tensor cores if in FACTORS, otherwise by lanes."""
    has_a, has_b, has_c, has_d, a, b, c, d = _decode(bits, a, b, c, d)
    if FACTORS is None:
        even, odd = tl.split(tl.reshape(x.to(tl.float32), (x.shape[0], 1, x.shape[1], 8, 2, 2)))
        x_a, x_c = tl.split(even)
        x_b, x_d = tl.split(odd)
        part = tl.zeros_like(sums) if SCALED else sums
        # A choice between sums, so that the multiply-add is skipped: one instruction, not two.
        part = tl.where(has_a, part + x_a * a.to(tl.float32), part)
        part = tl.where(has_b, part + x_b * b.to(tl.float32), part)
        part = tl.where(has_c, part + x_c * c.to(tl.float32), part)
        part = tl.where(has_d, part + x_d * d.to(tl.float32), part)
        sums = sums + part * scale[None, :, :, None] if SCALED else part
    else:
        zero = tl.zeros_like(a)
        even = tl.join(tl.where(has_a, a, zero), tl.where(has_c, c, zero))
        odd = tl.join(tl.where(has_b, b, zero), tl.where(has_d, d, zero))
        weights = tl.join(even, odd)
        if SCALED:
            weights = (weights.to(tl.float32) * scale[None, :, :, None, None, None]).to(DTYPE)
        weights = tl.permute(tl.reshape(weights, (sums.shape[1], x.shape[0], x.shape[1])), (1, 0, 2))
        sums = tl.dot(weights.to(FACTORS), x.to(FACTORS), sums)
    return sums


@triton.jit
def _step(
    sums,
    at,
    bits,
    x,
    ones,
    inside,
    scales,
    group,
    values,
    DTYPE: tl.constexpr,
    SCALED: tl.constexpr,
    FACTORS: tl.constexpr,
):
    """``sums`` with the products of one step, and ``at`` of the next one.

    ``bits`` (ROWS, WORDS) are at ``ones``, ``inside`` (1, WORDS) where the matrix has them, their scales at ``scales``.
    """
    scale = tl.load(scales + group, mask=inside, other=0.0) if SCALED else 0.0
    a, b, c, d, at = _read_values(bits, at, values)
    # Otherwise compilers put uses between the loads, and a step waits a dozen times instead of once: the bits that
    # choose among the values are read again, from the cache, when all values are on their way.
    tl.debug_barrier()
    bits = tl.load(ones, mask=inside, other=0)
    return _add(sums, bits, a, b, c, d, scale, x, DTYPE, SCALED, FACTORS), at


@triton.jit
def _by_tiles(
    mask,
    values,
    starts,
    scales,
    x,
    y,
    rows,
    columns,
    words,
    groups,
    vectors,
    BATCH: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    DTYPE: tl.constexpr,
    SCALED: tl.constexpr,
    FACTORS: tl.constexpr,
):
    """BATCH outputs of ROWS rows, 64 positions for each lane at a time; by tensor cores, in FACTORS, or by lanes."""
    LENGTH: tl.constexpr = 64 // ROWS  # words for each warp
    WORDS: tl.constexpr = LENGTH * WARPS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # After the last row and the last vector these are taken again, and not stored.
    line = tl.minimum(row, rows - 1)
    start = tl.load(starts + tl.program_id(0) * ROWS)
    at = (tl.load(starts + line) - start).to(tl.uint32)
    values += start
    word = tl.arange(0, WORDS)
    ones = mask + line.to(tl.int64)[:, None] * words + word[None, :]
    if SCALED:
        scales += line.to(tl.int64)[:, None] * groups
    vector = tl.program_id(1) * BATCH + tl.arange(0, BATCH)
    taken = tl.minimum(vector, vectors - 1)
    if FACTORS is None:
        four = tl.arange(0, 8)[None, None, :, None] * 4 + tl.arange(0, 4)[None, None, None, :]
        column = word[None, :, None, None] * 32 + four
        inputs = x + taken[:, None, None, None] * columns + column
        sums = tl.zeros((BATCH, ROWS, WORDS, 8), tl.float32)
    else:
        column = (tl.arange(0, WARPS) * (LENGTH * 32))[:, None, None] + tl.arange(0, LENGTH * 32)[None, :, None]
        inputs = x + taken[None, None, :] * columns + column
        sums = tl.zeros((WARPS, ROWS, BATCH), tl.float32)
    inside = (word < words)[None, :]
    bits = tl.load(ones, mask=inside, other=0)
    whole = columns // (32 * WORDS) * WORDS
    for done in range(0, whole, WORDS):
        then = (done + WORDS + word < words)[None, :]
        bits_then = tl.load(ones + (done + WORDS), mask=then, other=0)
        now = tl.load(inputs + done * 32)
        group = ((done + word) // (words // groups))[None, :]
        sums, at = _step(sums, at, bits, now, ones + done, inside, scales, group, values, DTYPE, SCALED, FACTORS)
        bits, inside = bits_then, then
    if whole < words:
        now = tl.load(inputs + whole * 32, mask=whole * 32 + column < columns, other=0.0)
        group = ((whole + word) // (words // groups))[None, :]
        sums, at = _step(sums, at, bits, now, ones + whole, inside, scales, group, values, DTYPE, SCALED, FACTORS)
    sums = tl.sum(tl.reshape(sums, (BATCH, ROWS, WORDS * 8)), 2) if FACTORS is None else tl.trans(tl.sum(sums, 0))
    stored = (vector < vectors)[:, None] & (row < rows)[None, :]
    tl.store(y + vector[:, None] * rows + row[None, :], sums.to(y.dtype.element_ty), mask=stored)
