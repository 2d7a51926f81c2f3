"""Files of safetensors: headers and tensors. Format: https://huggingface.co/docs/safetensors."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from niwaki.errors import CheckpointError

#: By safetensors' names.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
_PIECE = 1 << 18  # numbers, which stay in the cache


@dataclass(frozen=True)
class Entry:
    """Where a tensor is: ``size`` bytes from byte ``offset`` of the file ``shard`` of the directory."""

    shard: str
    dtype: str  # safetensors' name, such as "BF16"
    shape: tuple[int, ...]
    offset: int
    size: int

    def at(self, index: int | None) -> "Entry":
        """Where ``tensor[index]`` is; with None all of it."""
        if index is None:
            return self
        size = self.size // self.shape[0]
        return Entry(self.shard, self.dtype, self.shape[1:], self.offset + index * size, size)


def new_shard(shard: str, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Entry]:
    """Places for ``tensors`` (dtype and shape by key) in a file of this name, for :class:`CheckpointWriter`."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    entries: dict[str, Entry] = {}
    end = 0
    for key, (dtype, shape) in tensors.items():
        entries[key] = Entry(shard, names[dtype], shape, end, math.prod(shape) * dtype.itemsize)
        end += entries[key].size
    start = len(header_of(entries))
    return {key: replace(entry, offset=start + entry.offset) for key, entry in entries.items()}


def header_of(entries: Mapping[str, Entry]) -> bytes:
    """The header of a safetensors file that has ``entries`` and nothing else."""
    start = min(entry.offset for entry in entries.values())
    values = {}
    for key, entry in entries.items():
        ends = [entry.offset - start, entry.offset - start + entry.size]
        values[key] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": ends}
    text = json.dumps(values).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def header_bytes(path: Path) -> bytes:
    """What a safetensors file has before its tensors; CheckpointError where it is not such a file."""
    try:
        with path.open("rb") as file:
            start, size = file.read(8), path.stat().st_size
            length = int.from_bytes(start, "little")
            if size >= 8 and length <= min(size - 8, _MAX_HEADER):
                return start + file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    raise CheckpointError(f"{path} is truncated or not a safetensors file: its header does not fit in {size} bytes")


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file; CheckpointError where it is not one, or some of their bytes are not there."""
    start = header_bytes(path)
    end, entries = len(start), {}
    try:
        header = json.loads(start[8:])
        header.pop("__metadata__", None)
        for key, value in header.items():
            first, last = value["data_offsets"]
            shape = tuple(value["shape"])
            if not all(type(n) is int and n >= 0 for n in (first, last, *shape)) or type(value["dtype"]) is not str:
                raise ValueError(f"the entry for {key!r} makes no sense")
            entries[key] = Entry(path.name, value["dtype"], shape, end + first, last - first)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
    size = path.stat().st_size
    for key, entry in entries.items():
        expected = math.prod(entry.shape) * DTYPES[entry.dtype].itemsize if entry.dtype in DTYPES else entry.size
        if entry.offset < end or entry.size < 0 or entry.size != expected:
            raise CheckpointError(f"{path}: the header's entry for {key!r} contradicts itself")
        last = entry.offset + entry.size
        if last > size:
            raise CheckpointError(
                f"{path} is truncated: {key!r} ends at byte {last} and the file has {size}; download it again"
            )
    return entries


def read_tensor(path: Path, key: str, entry: Entry) -> Tensor:
    """The tensor at ``entry`` of the file ``path``; CheckpointError where it cannot be read, or is not finite."""
    data = bytearray(entry.size)
    try:
        with path.open("rb") as file:
            file.seek(entry.offset)
            got = file.readinto(data)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if got != entry.size:
        raise CheckpointError(f"{path} ends inside {key!r}; is the download complete?")
    dtype = DTYPES[entry.dtype]
    if not data:
        return torch.empty(entry.shape, dtype=dtype)
    tensor = torch.frombuffer(data, dtype=dtype).view(entry.shape)
    pieces = tensor.view(-1).split(_PIECE)  # or there would be some copies of it in float32
    if dtype.is_floating_point and not all(bool(torch.isfinite(piece.float()).all()) for piece in pieces):
        raise CheckpointError(f"{path}: {key!r} has NaN or infinite values")
    return tensor


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; CheckpointError where there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}; is it a model directory?") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value
