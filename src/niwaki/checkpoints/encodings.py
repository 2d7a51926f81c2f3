"""Weights in FP8 or MXFP4, as some models come: read a tensor at a time as bfloat16, and put back into codes.

Whole numbers of other programs are read in the same way (:mod:`.integers`), and not put back.

FP8 is what DeepSeek V3 uses: float8_e4m3fn, and for each block of (by default) 128 x 128 a factor under the tensor's
name with "_scale_inv"; or, in compressed-tensors, for each row, block or matrix under its name with "_scale". MXFP4 is
what gpt-oss uses: four-bit floating-point numbers (1 sign, 2 exponent and 1 mantissa bit) two in a byte, and for each
32 of a row a power of two, of which the model has the transpose. Sources: DeepSeek-V3 technical report, arXiv
2412.19437, section 3.3; OCP Microscaling Formats (MX) v1.0.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from niwaki.checkpoints.tensors import DTYPES, Entry
from niwaki.errors import CheckpointError
from niwaki.layer.floats import E2M1, E4M3, TiledFloats

_FP4_BIAS = 127  # of the exponents of MXFP4
_FP8_SUFFIX = "_scale_inv"
_MXFP4_SUFFIXES = "_blocks", "_scales"
#: The numbers of a row that share a power of two.
_GROUP = 32


@dataclass(frozen=True)
class Encoded(ABC):
    """A tensor of ``shape`` that is stored as codes and scales."""

    keys: tuple[str, str]  # of codes and scales in the files
    codes: Entry
    scales: Entry
    shape: tuple[int, ...]

    #: Codes that stand for NaN.
    no_numbers: ClassVar[tuple[bytes, ...]] = ()

    @property
    def dtype(self) -> str:
        """What it is read as, by the name that safetensors has."""
        return "BF16"

    @property
    def parts(self) -> tuple[Entry, ...]:
        """What it is made of in the files."""
        return self.codes, self.scales

    @abstractmethod
    def read(self, read: Callable[[Entry], Tensor], index: int | None) -> Tensor:
        """The tensor, or its element at ``index``; ``read`` reads what is stored."""

    @abstractmethod
    def is_certain(self, scales: Tensor) -> bool:
        """Whether all codes that are numbers stand for finite ones with these scales."""


class EncodedFloats(Encoded):
    """One of floating-point numbers, which is read as bfloat16, and can be put back."""

    def read(self, read: Callable[[Entry], Tensor], index: int | None) -> Tensor:
        if index is None and len(self.shape) > 2:  # one element after the other: decoding takes some copies
            whole = torch.empty(self.shape, dtype=torch.bfloat16)
            for i, part in enumerate(whole):
                part.copy_(self.read(read, i))
            return whole
        return self.decode(read(self.codes.at(index)), read(self.scales.at(index)))

    @property
    @abstractmethod
    def format(self) -> TiledFloats:
        """The format of the tensor, or of each element."""

    def is_certain(self, scales: Tensor) -> bool:
        most = scales.float().abs().max() if scales.is_floating_point() else _powers(scales).max()
        return bool((most * self.format.numbers.magnitudes.max()).to(torch.bfloat16).isfinite())

    @abstractmethod
    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The tensor, or an element, of what is stored of it."""

    @abstractmethod
    def tiles(self, scales: Tensor) -> Tensor:
        """The scales of a matrix as :class:`TiledFloats` has them, from how they are stored."""

    @abstractmethod
    def encode(self, W: Tensor, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """The codes and scales to store, of which :meth:`decode` makes the matrix W, whose values have the format."""

    def _codes(self, W: Tensor, tiles: Tensor) -> Tensor:
        return self.format.codes(W.float(), self.format.factors(tiles, tuple(W.shape)), W != 0)


@dataclass(frozen=True)
class FP8(EncodedFloats):
    """float8_e4m3fn (.., rows, columns) with a scale for each ``block``; powers of two if it ``has_powers``."""

    block: tuple[int, int]
    has_powers: bool

    no_numbers: ClassVar[tuple[bytes, ...]] = (b"\x7f", b"\xff")

    def __str__(self) -> str:
        if self.block == self.shape[-2:] or self.block[0] == 1:
            return f"FP8, a scale for each {'row' if self.block[0] == 1 else 'matrix'}"
        return "FP8, blocks of {} x {}".format(*self.block)

    @property
    def format(self) -> TiledFloats:
        return TiledFloats(E4M3, self.block, None if self.has_powers else DTYPES[self.scales.dtype])

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        *first, rows, columns = codes.shape
        tiles = scales.float().reshape(*first, *self.format.tiles((rows, columns)))
        return (codes.float() * self.format.factors(tiles, codes.shape)).to(torch.bfloat16)

    def tiles(self, scales: Tensor) -> Tensor:
        return scales.float().reshape(self.format.tiles((self.shape[-2], self.shape[-1])))

    def encode(self, W: Tensor, tiles: Tensor) -> tuple[Tensor, Tensor]:
        scales = tiles.to(DTYPES[self.scales.dtype]).reshape(self.scales.shape[len(self.shape) - 2 :])
        return self._codes(W, tiles).view(torch.float8_e4m3fn), scales


@dataclass(frozen=True)
class MXFP4(EncodedFloats):
    """Codes of four bits, and a power of two for each ``_GROUP`` of a row of what is stored transposed.

    Codes are (.., rows, groups, 16) uint8 and scales (.., rows, groups), of a tensor (.., columns, rows).
    """

    def __str__(self) -> str:
        return "MXFP4"

    @property
    def format(self) -> TiledFloats:
        return TiledFloats(E2M1, (_GROUP, 1), None)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        # The lower four bits of a byte come first; bfloat16 has all of the products exactly.
        values = torch.cat([E2M1.magnitudes, -E2M1.magnitudes]).to(torch.bfloat16)
        pairs = torch.stack([values[(codes & 15).int()], values[(codes >> 4).int()]], dim=-1).flatten(-2)
        return (pairs * _powers(scales).to(torch.bfloat16)[..., None]).flatten(-2).mT.contiguous()

    def tiles(self, scales: Tensor) -> Tensor:
        return _powers(scales).mT

    def encode(self, W: Tensor, tiles: Tensor) -> tuple[Tensor, Tensor]:
        pairs = self._codes(W, tiles).mT.unflatten(-1, (-1, _GROUP // 2, 2))
        return pairs[..., 0] | pairs[..., 1] << 4, (tiles.log2().round() + _FP4_BIAS).to(torch.uint8).mT


def find_floats(settings: Mapping[str, Any], entries: Mapping[str, Entry]) -> dict[str, Encoded]:
    """The tensors in ``entries`` that ``settings``, of config.json, are about, by their names in the model.

    Empty where that is another format. CheckpointError where codes and scales do not fit each other.
    """
    if settings.get("quant_method") == "fp8":
        powers = settings.get("scale_fmt") == "ue8m0"
        return _find_fp8(settings.get("weight_block_size", [128, 128]), powers, _FP8_SUFFIX, entries)
    if settings.get("quant_method") == "compressed-tensors":
        groups = settings.get("config_groups")
        every = groups.values() if isinstance(groups, dict) else ()
        weights = [each.get("weights") for each in every if isinstance(each, dict)]
        blocks = [each["block_structure"] for each in weights if isinstance(each, dict) and each.get("block_structure")]
        return _find_fp8(blocks[0] if blocks else None, False, "_scale", entries)
    return _find_mxfp4(entries) if settings.get("quant_method") == "mxfp4" else {}


def _find_fp8(block: Any, powers: bool, suffix: str, entries: Mapping[str, Entry]) -> dict[str, Encoded]:
    found: dict[str, Encoded] = {}
    for key, codes in entries.items():
        if codes.dtype != "F8_E4M3" or len(codes.shape) < 2 or (suffix != _FP8_SUFFIX and not key.endswith(".weight")):
            continue
        keys = key, f"{key}{suffix}"
        if (scales := entries.get(keys[1])) is None:
            raise CheckpointError(f"{key!r} is in FP8 without its scales, {keys[1]}")
        in_rows = suffix != _FP8_SUFFIX and scales.shape == (*codes.shape[:-1], 1)
        sizes = (1, codes.shape[-1]) if in_rows else codes.shape[-2:] if block is None else block
        if not (isinstance(sizes, list | tuple) and len(sizes) == 2 and all(type(n) is int and n > 0 for n in sizes)):
            raise CheckpointError(f"weight_block_size is two whole numbers above 0; got {block!r}")
        wanted = (*codes.shape[:-2], *(-(-n // size) for n, size in zip(codes.shape[-2:], sizes, strict=True)))
        fits = scales.shape == wanted or (block is None and len(codes.shape) == 2 and scales.shape in ((), (1,)))
        if not fits or scales.dtype not in ("F64", "F32", "F16", "BF16"):
            raise CheckpointError(
                f"{key!r} is FP8 {codes.shape} in blocks of {tuple(sizes)}, whose scales would be {wanted}; they are "
                f"{scales.dtype} {scales.shape}"
            )
        found[key] = FP8(keys, codes, scales, codes.shape, (sizes[0], sizes[1]), powers)
    return found


def _find_mxfp4(entries: Mapping[str, Entry]) -> dict[str, Encoded]:
    found: dict[str, Encoded] = {}
    codes_suffix, scales_suffix = _MXFP4_SUFFIXES
    for key, codes in entries.items():
        if codes.dtype != "U8" or not key.endswith(codes_suffix):
            continue
        name = key.removesuffix(codes_suffix)
        if name in entries:  # which one counts is up to the reader
            raise CheckpointError(f"the tensor {name!r} appears twice, also in MXFP4 as {key!r}")
        keys = key, f"{name}{scales_suffix}"
        scales = entries.get(keys[1])
        has = "none" if scales is None else f"{scales.dtype} {scales.shape}"
        if scales is None or has != f"U8 {codes.shape[:-1]}" or codes.shape[-1] != _GROUP // 2 or len(codes.shape) < 3:
            raise CheckpointError(f"{key!r} is MXFP4 {codes.shape}, whose scales would be U8 {codes.shape[:-1]}: {has}")
        *first, rows, groups, _ = codes.shape
        found[name] = MXFP4(keys, codes, scales, (*first, groups * _GROUP, rows))
    return found


def _powers(scales: Tensor) -> Tensor:
    """float32: the powers of two that ``scales`` uint8 stand for."""
    return torch.ldexp(torch.ones(scales.shape), scales.int() - _FP4_BIAS)
