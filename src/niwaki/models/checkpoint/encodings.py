"""Weights in FP8 or MXFP4, as some models come: read a tensor at a time as bfloat16, in which they are written too.

FP8 is what DeepSeek V3 uses: float8_e4m3fn, and for each block of (by default) 128 x 128 a factor under the tensor's
name with "_scale_inv". MXFP4 is what gpt-oss uses: four-bit floating-point numbers (1 sign, 2 exponent and 1 mantissa
bit) two in a byte, and for each 32 of a row a power of two, of which the model has the transpose. Sources: DeepSeek-V3
technical report, arXiv 2412.19437, section 3.3; OCP Microscaling Formats (MX) v1.0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from niwaki.errors import CheckpointError
from niwaki.models.checkpoint.tensors import Entry

#: What the codes 0 to 15 of four bits stand for.
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP4_BIAS = 127  # of the exponents of MXFP4
_FP8_SUFFIX = "_scale_inv"
_MXFP4_SUFFIXES = "_blocks", "_scales"
#: The numbers of a row that share a power of two.
_GROUP = 32


@dataclass(frozen=True)
class Encoded:
    """A tensor of ``shape`` that is stored as codes and scales, and read as bfloat16."""

    codes: Entry
    scales: Entry
    shape: tuple[int, ...]
    decode: Callable[[Tensor, Tensor], Tensor]  # of codes and scales, or of one element of each

    def read(self, read: Callable[[Entry], Tensor], index: int | None) -> Tensor:
        """The tensor, or its element at ``index``; ``read`` reads what is stored."""
        if index is None and len(self.shape) > 2:  # one element after the other: decoding takes some copies
            whole = torch.empty(self.shape, dtype=torch.bfloat16)
            for i, part in enumerate(whole):
                part.copy_(self.read(read, i))
            return whole
        return self.decode(read(self.codes.at(index)), read(self.scales.at(index)))


def find_encoded(config: Mapping[str, Any], entries: Mapping[str, Entry]) -> dict[str, Encoded]:
    """By the names that their tensors have in the model, those of ``entries`` that ``quantization_config`` is about.

    Empty where that is none, or another format. CheckpointError where codes and scales do not fit each other.
    """
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        return {}
    if settings.get("quant_method") == "fp8":
        return _find_fp8(settings.get("weight_block_size", [128, 128]), entries)
    return _find_mxfp4(entries) if settings.get("quant_method") == "mxfp4" else {}


def _find_fp8(block: Any, entries: Mapping[str, Entry]) -> dict[str, Encoded]:
    found: dict[str, Encoded] = {}
    for key, codes in entries.items():
        if codes.dtype != "F8_E4M3" or len(codes.shape) < 2:
            continue
        if (scales := entries.get(f"{key}{_FP8_SUFFIX}")) is None:
            raise CheckpointError(f"{key!r} is in FP8 without its scales, {key}{_FP8_SUFFIX}")
        sizes = codes.shape[-2:] if block is None else block
        if not (isinstance(sizes, list | tuple) and len(sizes) == 2 and all(type(n) is int and n > 0 for n in sizes)):
            raise CheckpointError(f"weight_block_size is two whole numbers above 0; got {block!r}")
        wanted = (*codes.shape[:-2], *(-(-n // size) for n, size in zip(codes.shape[-2:], sizes, strict=True)))
        fits = scales.shape == wanted or (block is None and scales.shape in ((), (1,)))
        if not fits or scales.dtype not in ("F64", "F32", "F16", "BF16"):
            raise CheckpointError(
                f"{key!r} is FP8 {codes.shape} in blocks of {tuple(sizes)}, whose scales would be {wanted}; they are "
                f"{scales.dtype} {scales.shape}"
            )
        found[key] = Encoded(codes, scales, codes.shape, partial(decode_fp8, block=tuple(sizes)))
    return found


def _find_mxfp4(entries: Mapping[str, Entry]) -> dict[str, Encoded]:
    found: dict[str, Encoded] = {}
    codes_suffix, scales_suffix = _MXFP4_SUFFIXES
    for key, codes in entries.items():
        if codes.dtype != "U8" or not key.endswith(codes_suffix):
            continue
        name = key.removesuffix(codes_suffix)
        if name in entries:  # which one counts is up to the reader
            raise CheckpointError(f"the tensor {name!r} is there twice, also in MXFP4 as {key!r}")
        scales = entries.get(f"{name}{scales_suffix}")
        if (
            scales is None
            or scales.dtype != "U8"
            or codes.shape != (*scales.shape, _GROUP // 2)
            or len(codes.shape) < 3
        ):
            has = "none" if scales is None else f"{scales.dtype} {scales.shape}"
            raise CheckpointError(f"{key!r} is MXFP4 {codes.shape}, whose scales would be U8 {codes.shape[:-1]}: {has}")
        *first, rows, groups, _ = codes.shape
        found[name] = Encoded(codes, scales, (*first, groups * _GROUP, rows), decode_mxfp4)
    return found


def decode_fp8(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """(.., rows, columns) bfloat16: ``codes`` float8_e4m3fn, each times the factor of its ``block`` in ``scales``."""
    rows, columns = codes.shape[-2:]
    factors = scales.float()
    if factors.ndim:
        factors = factors.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :columns]
    return (codes.float() * factors).to(torch.bfloat16)


def decode_mxfp4(codes: Tensor, scales: Tensor) -> Tensor:
    """(.., columns, rows) bfloat16, exactly: ``codes`` (.., rows, groups, 16) and ``scales`` (.., rows, groups) uint8.

    The lower four bits of a byte come first.
    """
    values = torch.cat([_FP4, -_FP4]).to(torch.bfloat16)
    pairs = torch.stack([values[(codes & 15).int()], values[(codes >> 4).int()]], dim=-1).flatten(-2)
    powers = torch.ldexp(torch.ones(scales.shape), scales.int() - _FP4_BIAS).to(torch.bfloat16)
    return (pairs * powers[..., None]).flatten(-2).mT.contiguous()
