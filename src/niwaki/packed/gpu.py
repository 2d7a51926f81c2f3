"""Products with packed matrices on a GPU, for a few vectors at a time: a Triton kernel. Imports Triton.

The floor is bytes over bandwidth; what keeps the kernel from it is decoding, because all positions are looked at, also
those of zeros (docs/packed.md). So it saves instructions:

* A word of the mask is 32 columns. A column's value is found by counting the ones before it: in the words before by
  one scan over the words of a step, in the word by a population count of the bits below.
* Two columns share a lane, their count and their address: the value of the second is the first or the second one at
  that place. The lanes of a warp then read neighbouring values, 64 columns with one instruction.
* Loads have no condition: after a zero the next value is read and not used; after the last one there is PADDING.
* Before a row ends nothing is added up over lanes, and only the words' counts go through shared memory.
* The words of the next step are read before this one is computed.

For 3 to 16 vectors in the half precision of W the decoded values of 16 rows go to the tensor cores, with 64 positions
in flight for each lane to hide the latency of memory. All else is multiply-adds of 2 vectors at a time, with 32.
"""

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
    y = torch.empty(vectors, rows, dtype=x.dtype, device=x.device)
    words = W.mask.shape[1] // 4
    tensors = (W.mask.view(torch.uint32), W.values, W.starts, W.scales, x.contiguous(), y)
    if vectors > _FEW and W.dtype == x.dtype != torch.float32:
        batch, tile, length, warps = triton.next_power_of_2(vectors), 16, 16, 4
        # In Triton's interpreter tl.dot takes the bits of bfloat16 for whole numbers.
        wrong = x.dtype == torch.bfloat16 and not isinstance(_by_tiles, triton.JITFunction)
        factors = tl.float32 if wrong else _DTYPES[x.dtype]
    else:
        tile, warps = _tile(rows)
        # Each lane has 32 positions of a step.
        batch, length, factors = min(vectors, _FEW), 32 // tile * warps, None
    constants = {"BATCH": batch, "ROWS": tile, "WORDS": length, "FACTORS": factors, "DTYPE": _DTYPES[W.dtype]}
    # The fusion is said although it is what it was always: without it Triton warns.
    options = {"enable_fp_fusion": True, "num_warps": warps, "num_stages": 2}
    with torch.cuda.device_of(x):
        _by_tiles[(triton.cdiv(rows, tile), triton.cdiv(vectors, batch))](
            *tensors, rows, columns, words, groups, vectors, SCALED=W.scales is not None, **constants, **options
        )
    return y


def _tile(rows: int) -> tuple[int, int]:
    """(rows at a time for few vectors, warps that share them). Four read x less often; few rows are then few warps."""
    return 4 if rows >= 8192 else 2, 1 if rows >= 4096 else 2 if rows >= 2048 else 4


@triton.jit
def _ones(words):
    """How many bits of each are 1; LLVM makes it one instruction."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return (words * 0x01010101) >> 24


@triton.jit
def _decode(bits, at, base, scale, DTYPE: tl.constexpr, SCALED: tl.constexpr):
    """The values of even and of odd columns, (ROWS, WORDS, 16) each, and where the next ones are.

    ``bits`` (ROWS, WORDS) uint32, ``at`` (ROWS,) uint32 counted from ``base``, ``scale`` (ROWS, WORDS).
    """
    pair = tl.arange(0, 16).to(tl.uint32)
    even = ((pair * 0 + 1) << (2 * pair))[None, None, :]
    counts = _ones(bits)
    before = tl.cumsum(counts, 1) - counts + at[:, None]
    spread = bits[:, :, None]
    place = base + (before[:, :, None] + _ones(spread & (even - 1)))
    first = tl.load(place)
    second = tl.load(place + 1)
    if SCALED:
        first = (first.to(tl.float32) * scale[:, :, None]).to(DTYPE)
        second = (second.to(tl.float32) * scale[:, :, None]).to(DTYPE)
    zero = tl.zeros_like(first)
    there = (spread & even) != 0
    left = tl.where(there, first, zero)
    right = tl.where((spread & (even + even)) != 0, tl.where(there, second, first), zero)
    return left, right, at + tl.sum(counts, 1)


@triton.jit
def _read_words(mask, scales, row, rows, word, words, groups, SCALED: tl.constexpr):
    """The bits and scales, (ROWS, WORDS) each, of words ``word`` (WORDS,) of rows ``row`` (ROWS,); 0 outside."""
    inside = (row < rows)[:, None] & (word < words)[None, :]
    line = row.to(tl.int64)[:, None]
    bits = tl.load(mask + line * words + word[None, :], mask=inside, other=0)
    scale = 0.0
    if SCALED:
        group = word // (words // groups)
        scale = tl.load(scales + line * groups + group[None, :], mask=inside, other=0.0)
    return bits, scale


@triton.jit
def _add(sums, left, right, x, FACTORS: tl.constexpr):
    """``sums`` and the products of one step's columns, even and odd, with ``x``; by tensor cores if in FACTORS."""
    if FACTORS is None:
        x_left, x_right = tl.split(x.to(tl.float32))
        sums += x_left[:, None] * left.to(tl.float32)[None]
        sums += x_right[:, None] * right.to(tl.float32)[None]
    else:
        weights = tl.reshape(tl.join(left, right), (left.shape[0], left.shape[1] * 32))
        sums = tl.dot(weights.to(FACTORS), x.to(FACTORS), sums)
    return sums


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
    WORDS: tl.constexpr,
    DTYPE: tl.constexpr,
    SCALED: tl.constexpr,
    FACTORS: tl.constexpr,
):
    """BATCH outputs of ROWS rows, by WORDS words of the mask at a time; by tensor cores, in FACTORS, or by lanes."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = tl.load(starts + tl.program_id(0) * ROWS)
    base = values + start
    at = (tl.load(starts + tl.minimum(row, rows - 1)) - start).to(tl.uint32)
    word = tl.arange(0, WORDS)
    vector = tl.program_id(1) * BATCH + tl.arange(0, BATCH)
    # After the last vector the last one is taken again, and not stored.
    taken = tl.minimum(vector, vectors - 1)
    if FACTORS is None:
        column = tl.reshape(tl.arange(0, WORDS * 32), (WORDS, 16, 2))[None]
        inputs = x + taken[:, None, None, None] * columns + column
        sums = tl.zeros((BATCH, ROWS, WORDS, 16), tl.float32)
    else:
        column = tl.arange(0, WORDS * 32)[:, None]
        inputs = x + taken[None, :] * columns + column
        sums = tl.zeros((ROWS, BATCH), tl.float32)
    bits, scale = _read_words(mask, scales, row, rows, word, words, groups, SCALED)
    whole = columns // (32 * WORDS) * WORDS
    for done in range(0, whole, WORDS):
        bits_then, scale_then = _read_words(mask, scales, row, rows, done + WORDS + word, words, groups, SCALED)
        left, right, at = _decode(bits, at, base, scale, DTYPE, SCALED)
        sums = _add(sums, left, right, tl.load(inputs + done * 32), FACTORS)
        bits, scale = bits_then, scale_then
    if whole < words:
        left, right, at = _decode(bits, at, base, scale, DTYPE, SCALED)
        inside = whole * 32 + column < columns
        sums = _add(sums, left, right, tl.load(inputs + whole * 32, mask=inside, other=0.0), FACTORS)
    sums = tl.sum(tl.reshape(sums, (BATCH, ROWS, WORDS * 16)), 2) if FACTORS is None else tl.trans(sums)
    stored = (vector < vectors)[:, None] & (row < rows)[None, :]
    tl.store(y + vector[:, None] * rows + row[None, :], sums.to(y.dtype.element_ty), mask=stored)
