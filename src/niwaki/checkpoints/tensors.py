"""Files of safetensors: headers and tensors. Format: https://huggingface.co/docs/safetensors."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from niwaki.checkpoints.foreign import is_pointer
from niwaki.errors import CheckpointError, first_line, raised_as
from niwaki.files import input_errors
from niwaki.layer.linalg import is_finite

#: By safetensors' names, in the order of its own writer: the widest numbers first, so that all are aligned.
DTYPES = {
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PIECE = 1 << 18  # numbers, which stay in the cache
CHUNK = 1 << 24  # bytes that are read at a time


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
    return placed(
        {
            key: Entry(shard, NAMES[dtype], shape, 0, math.prod(shape) * dtype.itemsize)
            for key, (dtype, shape) in tensors.items()
        }
    )


def placed(tensors: Mapping[str, Entry]) -> dict[str, Entry]:
    """``tensors``, of one file, each after the other behind a header."""
    entries: dict[str, Entry] = {}
    end = 0
    for key, entry in tensors.items():
        entries[key] = replace(entry, offset=end)
        end += entry.size
    start = len(header_of(entries)) if entries else 0
    return {key: replace(entry, offset=start + entry.offset) for key, entry in entries.items()}


def header_of(entries: Mapping[str, Entry]) -> bytes:
    """The header of a safetensors file that has ``entries`` and nothing else."""
    start = min(entry.offset for entry in entries.values())
    values = {}
    for key, entry in entries.items():
        ends = [entry.offset - start, entry.offset - start + entry.size]
        values[key] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": ends}
    return framed(json.dumps(values))


def framed(header: str) -> bytes:
    """A ``header`` in JSON as safetensors files have it: behind its length, and filled up to align the tensors."""
    text = header.encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def header_bytes(path: Path) -> bytes:
    """What a safetensors file has before its tensors; CheckpointError where the library refuses it."""
    try:
        # The judge of everything: that tensors cover the file, each byte once, and that shapes fit.
        with safe_open(path, framework="pt"), path.open("rb") as file:
            start = file.read(8)
            return start + file.read(int.from_bytes(start, "little"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} lacks the shard {path.name}; is the download complete?") from None
    except SafetensorError as error:
        if is_pointer(path):
            raise CheckpointError(f"{path} is only a Git LFS pointer; run git lfs pull") from error
        # Without the list of all dtypes, where one is unknown.
        reason = first_line(error).partition(", expected one of")[0]
        raise CheckpointError(f"{path} is truncated or not a safetensors file ({reason}); download it again") from error
    except (OSError, ValueError, RuntimeError) as error:  # a name with a NUL or half a character; torch's own of files
        raise CheckpointError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or first_line(error)}"
        ) from error


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file; CheckpointError where it is not one, or some of their bytes are not there."""
    start = header_bytes(path)
    header, entries = json.loads(start[8:].decode()), {}
    header.pop("__metadata__", None)
    for key, value in header.items():
        first, last = value["data_offsets"]
        entries[key] = Entry(path.name, value["dtype"], tuple(value["shape"]), len(start) + first, last - first)
    return entries


def read_tensor(path: Path, key: str, entry: Entry) -> Tensor:
    """The tensor at ``entry`` of the file ``path``; CheckpointError where it cannot be read, or is not finite."""
    data = bytearray(entry.size)
    with input_errors(path), path.open("rb") as file:
        file.seek(entry.offset)
        got = file.readinto(data)
    if got != entry.size:
        raise CheckpointError(f"{path} ends inside {key!r}; is the download complete?")
    dtype = DTYPES[entry.dtype]
    if not data:
        return torch.empty(entry.shape, dtype=dtype)
    tensor = torch.frombuffer(data, dtype=dtype).view(entry.shape)
    pieces = tensor.view(-1).split(_PIECE)  # or there would be some copies of it in float32
    if dtype.is_floating_point and not all(is_finite(piece) for piece in pieces):
        raise CheckpointError(f"{path}: {key!r} has NaN or infinite values")
    return tensor


def pieces_of(file: BinaryIO, entry: Entry) -> Iterator[bytes]:
    """The bytes at ``entry`` of ``file``, some at a time."""
    file.seek(entry.offset)
    for start in range(0, entry.size, CHUNK):
        yield file.read(min(entry.size - start, CHUNK))


def raw_bytes(value: Tensor) -> memoryview:
    """``value`` as files have it, without a copy where it is on the CPU and contiguous."""
    return value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; CheckpointError where there is no such file."""
    with raised_as(
        CheckpointError, f"{path} cannot be read as JSON", (OSError, ValueError, RecursionError), reason=str
    ):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path.parent} has no {path.name}; is it a model directory?") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value


def read_beside(file: Path, places: Mapping[str, Entry], what: str, why: str) -> list[Tensor]:
    """The tensors of a ``file`` of niwaki's beside the checkpoint, by the order of ``places``.

    CheckpointError where they are not there, which are ``what``, or have another dtype or shape than ``why`` says.
    """
    none = raised_as(CheckpointError, f"{file} has no {what}", (OSError, SafetensorError), reason=str)
    with none, safe_open(file, framework="pt") as opened:
        tensors: list[Tensor] = [opened.get_tensor(key) for key in places]
    for (key, place), tensor in zip(places.items(), tensors, strict=True):
        if (tensor.dtype, tensor.shape) != (DTYPES[place.dtype], place.shape):
            raise CheckpointError(f"{file}: {key!r} should be {place.dtype} {place.shape}{why}")
    return tensors
