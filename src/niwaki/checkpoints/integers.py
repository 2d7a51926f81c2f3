"""Whole numbers of a few bits with a scale for each group of inputs, as other programs store quantized weights.

A weight is s (q - z), for q from 0 to 2^bits - 1, a scale s and a whole number z of its row and group. Numbers are
packed into words of 32 bits, the lowest bits first, and 3, 5, 6 or 7 bits without gaps, so that some are in two words.

| | q (words of) | z (words of) | s |
|---|---|---|---|
| GPTQ | inputs, (.., out) | outputs, (groups, ..), less 1 in its first version | (groups, out) |
| AWQ | outputs, (in, ..), eight in an order of their own | the same, (groups, ..) | (groups, out) |
| compressed-tensors | inputs, (out, ..) | outputs, (.., groups); 2^(bits - 1) if there are none | (out, groups) |

In GPTQ and compressed-tensors another tensor can say which group each input belongs to. Sources: the layers of
AutoGPTQ, AutoAWQ and compressed-tensors 0.20, which write them; AutoRound writes the first two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from niwaki.checkpoints.encodings import Encoded
from niwaki.checkpoints.tensors import DTYPES, Entry
from niwaki.errors import CheckpointError

#: The place of each of eight outputs in a word of AWQ's.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_Names = tuple[tuple[str, ...], tuple[str, ...]]
#: How the names end of codes, of scales, of what else has to be there, and of what can be; in GPTQ and AWQ, and in
#: compressed-tensors.
_WEIGHTS: _Names = (".qweight", ".scales", ".qzeros"), (".g_idx",)
_PACKED: _Names = (".weight_packed", ".weight_scale", ".weight_shape"), (".weight_zero_point", ".weight_g_idx")
#: Rows that are unpacked at once, so that they stay in the cache.
_ROWS = 64
#: By ``checkpoint_format`` and ``packing_format``, what zeros are stored less.
_LESS = {"gptq": 1, "gptq_v2": 0, "auto_round:auto_gptq": 1, "auto_round:gptqmodel": 0, "auto_round": 0}


@dataclass(frozen=True)
class Integers(Encoded):
    """A matrix (out, in) of whole numbers times scales, as the program ``by`` stores it.

    Attributes:
        by: "GPTQ", "AWQ" or "compressed-tensors".
        bits: 2 to 8.
        group: Inputs that share a scale, unless ``order`` says which do.
        zeros: Where the z are; None where all are 2^(bits - 1).
        order: Where the group of each input is; None where inputs are in the order of groups.
        less: What z are stored less.
    """

    by: str
    bits: int
    group: int
    zeros: Entry | None
    order: Entry | None
    less: int = 0
    beside: tuple[Entry, ...] = ()  # what else is in the files

    def __str__(self) -> str:
        return f"{self.by}, {self.bits} bits"

    @property
    def dtype(self) -> str:
        return self.scales.dtype

    @property
    def parts(self) -> tuple[Entry, ...]:
        return (*super().parts, *(part for part in (self.zeros, self.order) if part), *self.beside)

    @property
    def is_unpacked(self) -> bool:
        """Whether each number has a byte of its own, with its sign, as compressed-tensors has them for W8A8."""
        return self.codes.dtype == "I8"

    @property
    def fits(self) -> bool:
        """Whether the shapes and dtypes of the tensors fit each other."""
        (rows, columns), bits, by = self.shape, self.bits, self.by
        transposed = by == "compressed-tensors"
        groups = -(-columns // self.group) if self.group > 0 else 0
        inputs = columns if by == "AWQ" else _words(columns, bits)
        outputs = _words(rows, bits)
        if self.is_unpacked:
            inputs = columns
        codes = (rows, inputs) if transposed else (inputs, outputs if by == "AWQ" else rows)
        zeros = (outputs, groups) if transposed else (groups, outputs)
        return (
            bits > 0
            and groups > 0
            and self.codes.shape == codes
            and self.scales.shape == ((rows, groups) if transposed else (groups, rows))
            and self.scales.dtype in ("F16", "BF16", "F32")
            and (self.zeros is None or (self.zeros.shape == zeros and self.zeros.dtype == "I32"))
            and (self.order is None or (self.order.shape == (columns,) and self.order.dtype in ("I32", "I64")))
            and (by != "AWQ" or (bits == 4 and rows % 8 == 0))
        )

    def is_certain(self, scales: Tensor) -> bool:
        return bool((scales.abs().max().float() * 2**self.bits).to(scales.dtype).isfinite())

    def read(self, read: Callable[[Entry], Tensor], index: int | None) -> Tensor:
        (rows, columns), codes = self.shape, read(self.codes)
        if self.is_unpacked:
            q = codes.int() + 128
        elif self.by == "AWQ":
            q = _unpacked(codes, self.bits, rows).unflatten(1, (-1, 8))[:, :, _PLACES].flatten(1).T
        else:
            q = _unpacked(codes.T if self.by == "GPTQ" else codes, self.bits, columns)
        scales, zeros = self.groups(read)
        group = torch.arange(columns) // self.group if self.order is None else read(self.order).long()
        if not bool(((group >= 0) & (group < scales.shape[1])).all()):
            raise CheckpointError(f"{self.keys[0]!r} has inputs of groups that are not there")
        zeros, scales = zeros.index_select(1, group), scales.float().index_select(1, group)
        value: Tensor = (q - zeros).float().mul_(scales)
        return value.to(DTYPES[self.dtype])

    def groups(self, read: Callable[[Entry], Tensor]) -> tuple[Tensor, Tensor]:
        """The s and the z (out, groups)."""
        scales, middle = read(self.scales), 1 << (self.bits - 1)
        if self.zeros is None:
            return scales, torch.full(scales.shape, middle, dtype=torch.int32)
        zeros, rows = read(self.zeros), self.shape[0]
        if self.by == "compressed-tensors":
            return scales, _unpacked(zeros.T, self.bits, rows).T
        z = _unpacked(zeros, self.bits, rows)
        if self.by == "AWQ":
            z = z.unflatten(1, (-1, 8))[:, :, _PLACES].flatten(1)
        return scales.T, ((z + self.less) & (2 * middle - 1)).T

    def has_order(self, read: Callable[[Entry], Tensor]) -> bool:
        """Whether inputs that share a scale are beside each other, as many in each group."""
        index = torch.arange(self.shape[1]) // self.group
        return self.shape[1] % self.group == 0 and (self.order is None or torch.equal(read(self.order).long(), index))


def _unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """(rows, count) int32: the numbers of so many ``bits`` in the ``words`` (rows, ..) int32."""
    low = words.long() & 0xFFFFFFFF
    windows = low | (torch.nn.functional.pad(low[:, 1:], (0, 1)) << 32)
    first = torch.arange(count) * bits
    parts = (part.index_select(1, first // 32) >> (first % 32) for part in windows.split(_ROWS))
    return torch.cat([(part & ((1 << bits) - 1)).int() for part in parts])


def _words(count: int, bits: int) -> int:
    """How many words ``count`` numbers fill."""
    return -(-count * bits // 32)


def _bits(count: int, words: int, asked: object = None) -> int:
    """Of how many bits ``count`` numbers are that fill so many ``words``, by choice as ``asked``; 0 of none."""
    possible = [bits for bits in range(2, 9) if _words(count, bits) == words]
    return asked if isinstance(asked, int) and asked in possible else (possible or [0])[0]


def find_integers(
    settings: Mapping[str, Any], entries: Mapping[str, Entry], read: Callable[[str, Entry], Tensor]
) -> dict[str, Encoded]:
    """The matrices in ``entries`` that ``settings``, of config.json, are about, by their names in the model.

    Empty where niwaki does not know the layout. CheckpointError where tensors do not fit each other, or are missing.
    """
    method, packing = settings.get("quant_method"), str(settings.get("packing_format") or "auto_round:auto_gptq")
    layout = packing if method == "auto-round" else str(settings.get("checkpoint_format") or "gptq")
    find: Callable[[str, dict[str, Entry]], Integers | None]
    needed, others = _WEIGHTS
    if method == "compressed-tensors":
        (needed, others), find = _PACKED, partial(_compressed_tensors, read)
    elif method == "awq" or (method == "auto-round" and "awq" in packing):
        if str(settings.get("version", "gemm")).lower() != "gemm":
            return {}
        find = partial(_gptq_or_awq, settings, None)
    elif method in ("gptq", "auto-round") and layout in _LESS:
        find = partial(_gptq_or_awq, settings, _LESS[layout])
    else:
        return {}
    found = dict[str, Encoded]()
    for key, codes in entries.items():
        if codes.dtype == "I8" and method == "compressed-tensors" and key.endswith(".weight"):
            found[key] = _bytes(key, codes, entries)
            continue
        name = key.removesuffix(needed[0])
        if name == key or codes.dtype != "I32":
            continue
        if f"{name}.weight" in entries:  # which one counts is up to the reader
            raise CheckpointError(f"the tensor '{name}.weight' appears twice, also quantized as {key!r}")
        parts = {end: entries[name + end] for end in (*needed, *others) if name + end in entries}
        if missing := [end for end in needed if end not in parts]:
            raise CheckpointError(f"{key!r} is quantized, and {name + missing[0]!r}, which belongs to it, is missing")
        made = find(name, parts) if all(len(part.shape) == 2 for part in map(parts.get, needed[:2]) if part) else None
        if made is None or not made.fits:
            shapes = ", ".join(f"{end} {part.dtype} {part.shape}" for end, part in parts.items())
            raise CheckpointError(f"{name!r} is quantized, and its tensors do not fit each other: {shapes}")
        found[f"{name}.weight"] = made
    return found


def _bytes(key: str, codes: Entry, entries: Mapping[str, Entry]) -> Integers:
    """A matrix of compressed-tensors with a byte for each number; CheckpointError where its scales are none for it."""
    scales, zeros = entries.get(f"{key}_scale"), entries.get(f"{key}_zero_point")
    if scales is not None and zeros is None and len(scales.shape) == len(codes.shape) == 2 and scales.shape[1]:
        rows, columns = codes.shape
        keys = key, f"{key}_scale"
        made = Integers(
            keys, codes, scales, (rows, columns), "compressed-tensors", 8, columns // scales.shape[1], None, None
        )
        if made.fits:
            return made
    shapes = ", ".join(f"{each.dtype} {each.shape}" for each in (codes, scales, zeros) if each)
    raise CheckpointError(
        f"{key!r} is quantized to whole numbers of a byte ({shapes}); those with scales for each row are read, without "
        "zero points"
    )


def _gptq_or_awq(settings: Mapping[str, Any], less: int | None, name: str, parts: dict[str, Entry]) -> Integers | None:
    """A matrix of GPTQ, with zeros that are stored ``less`` that, or of AWQ."""
    (codes_end, scales_end, zeros_end), (order_end,) = _WEIGHTS
    codes, scales, zeros, order = parts[codes_end], parts[scales_end], parts[zeros_end], parts.get(order_end)
    groups, rows = scales.shape
    bits = _bits(rows, zeros.shape[-1], settings.get("bits"))
    if not bits:
        return None
    columns = codes.shape[0] if less is None else codes.shape[0] * 32 // bits if order is None else order.shape[0]
    asked = settings.get("group_size")
    group = columns // max(1, groups) if not isinstance(asked, int) or columns % max(1, groups) == 0 else asked
    by, keys = "AWQ" if less is None else "GPTQ", (name + codes_end, name + scales_end)
    return Integers(keys, codes, scales, (rows, columns), by, bits, group, zeros, order, less or 0)


def _compressed_tensors(read: Callable[[str, Entry], Tensor], name: str, parts: dict[str, Entry]) -> Integers | None:
    """A matrix of compressed-tensors, whose shape is ``read``."""
    (codes_end, scales_end, shape_end), (zeros_end, order_end) = _PACKED
    codes, scales = parts[codes_end], parts[scales_end]
    shape = read(name + shape_end, parts[shape_end]).flatten().tolist()
    if len(shape) != 2 or not all(type(length) is int and length > 0 for length in shape):
        return None
    (rows, columns), keys = shape, (name + codes_end, name + scales_end)
    bits, group = _bits(columns, codes.shape[1]), columns // max(1, scales.shape[1])
    others = parts.get(zeros_end), parts.get(order_end), 0, (parts[shape_end],)
    return Integers(keys, codes, scales, (rows, columns), "compressed-tensors", bits, group, *others)
