"""Model directories of safetensors: read by key, written shard by shard; nothing here knows of transformers.

A pruned tensor has the dtype and shape of the original, so every shard keeps its header, and each
tensor its place in the file. That makes writing a matter of filling in a copy of the shard in any
order, with one tensor in memory at a time. Format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from niwaki.errors import CheckpointError, OutputError, UsageError, first_line

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
#: Other copies of the dense weights. In the output they would be stale, and as large as the model.
WEIGHT_SUFFIXES = PICKLE_SUFFIXES | {".safetensors", ".h5", ".msgpack", ".gguf", ".onnx"}

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
_CHUNK = 1 << 24
_PIECE = 1 << 18  # numbers, which stay in the cache


@dataclass(frozen=True)
class Entry:
    """Where a tensor is.

    Attributes:
        shard: File name inside the directory.
        dtype: Safetensors' name of the dtype, such as "BF16".
        shape: Its shape.
        offset: First byte, from the start of the file.
        size: Number of bytes.
    """

    shard: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int

    def part(self, index: int) -> Entry:
        """Where ``tensor[index]`` is."""
        size = self.size // self.shape[0]
        return Entry(self.shard, self.dtype, self.shape[1:], self.offset + index * size, size)


class Checkpoint:
    """The weights of a model directory, by key.

    Args:
        path: A directory with ``config.json`` and ``model.safetensors``, or shards and their index.

    Raises:
        CheckpointError: a file is missing, truncated, malformed, or holds pickled weights.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: dict[str, Any] = read_json(path / "config.json")
        self.entries: dict[str, Entry] = {}
        weight_map = self._weight_map()
        self.shards: list[str] = sorted(set(weight_map.values()) if weight_map else {SINGLE_NAME})
        for shard in self.shards:
            for key, entry in read_header(path / shard).items():
                if weight_map is None or weight_map.get(key) == shard:
                    self.entries[key] = entry
        for key, shard in (weight_map or {}).items():
            if key not in self.entries:
                raise CheckpointError(
                    f"{path / shard} lacks the tensor {key!r} that {INDEX_NAME} places there"
                )

    def _weight_map(self) -> dict[str, str] | None:
        if (self.path / INDEX_NAME).exists() and not (self.path / SINGLE_NAME).exists():
            index = read_json(self.path / INDEX_NAME).get("weight_map")
            if not isinstance(index, dict) or not index:
                raise CheckpointError(
                    f"{self.path / INDEX_NAME} has no weight_map; is the download complete?"
                )
            for shard in index.values():
                # A path in the index could name any file of the machine, to read or to write.
                if not isinstance(shard, str) or Path(shard).name != shard:
                    raise CheckpointError(
                        f"{self.path / INDEX_NAME} names a shard outside its directory: {shard!r}"
                    )
                if not (self.path / shard).exists():
                    raise CheckpointError(f"{self.path} lacks the shard {shard}; is the download complete?")
            return index
        if not (self.path / SINGLE_NAME).exists():
            pickled = sorted(p.name for p in self.path.iterdir() if p.suffix in PICKLE_SUFFIXES)
            if pickled:
                raise CheckpointError(
                    f"{self.path} holds pickled weights ({pickled[0]}), which can run code when they are read; "
                    "convert them to safetensors (load in transformers where you trust them, then save_pretrained)"
                )
            if (self.path / "packed.json").exists():
                raise CheckpointError(
                    f"{self.path} is packed; make it dense again with `niwaki unpack {self.path} OUT`"
                )
            raise CheckpointError(f"{self.path} has neither {SINGLE_NAME} nor {INDEX_NAME}")
        return None

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def dtype(self, key: str) -> torch.dtype:
        """The dtype that the tensor under ``key`` is stored in."""
        return DTYPES[self.entries[key].dtype]

    def read(self, key: str, part: int | None = None) -> Tensor:
        """The tensor under ``key``, or its part at that index, on the CPU, in the dtype that it is stored in.

        Raises:
            CheckpointError: there is none, it cannot be read, or it is not finite.
        """
        if key not in self.entries:
            raise CheckpointError(f"{self.path} has no tensor {key!r}")
        entry = self.entries[key]
        if entry.dtype not in DTYPES:
            raise CheckpointError(
                f"{self.path / entry.shard}: {key!r} has the dtype {entry.dtype}, unknown here"
            )
        return read_tensor(self.path / entry.shard, key, entry if part is None else entry.part(part))


class CheckpointWriter:
    """Writes a copy of a checkpoint with some tensors changed, one tensor at a time.

    As a context manager: on leaving without an error, every tensor that was not written is copied from
    the source byte for byte. Disk space is reserved at the start, so that a disk which is too small
    shows before the work and not after it.

    Args:
        source: The checkpoint to follow.
        directory: Where the shards go; it exists and holds none of them, except to resume.
        resume: Go on with the shards that an earlier writer left there.
        added: By key, the tensors of a shard that the source does not have, see :func:`new_shard`.

    Raises:
        OutputError: no space, or the directory cannot be written.
    """

    def __init__(
        self,
        source: Checkpoint,
        directory: Path,
        resume: bool = False,
        added: Mapping[str, Entry] | None = None,
    ) -> None:
        self._source = source
        self._added = dict(added or {})
        self._entries = {**source.entries, **self._added}
        self._directory = directory
        self._resume = resume
        self._files: dict[str, BinaryIO] = {}
        self._dirty: set[str] = set()
        #: By key, the parts that were written; None for the whole tensor.
        self._written: dict[str, set[int | None]] = {}

    def __enter__(self) -> CheckpointWriter:
        try:
            self._open()
        except BaseException:
            self._close()
            raise
        return self

    def _close(self) -> OSError | None:
        failed = None
        for file in self._files.values():
            try:
                file.close()
            except OSError as error:
                failed = error
        return failed

    def _open(self) -> None:
        with output_errors(self._directory):
            for shard in self._source.shards:
                original = self._source.path / shard
                file = self._reserved(shard, original.stat().st_size)
                with original.open("rb") as read:
                    _copy(read, file, 0, _header_end(read, original))
            for shard in {entry.shard for entry in self._added.values()}:
                (self._directory / shard).parent.mkdir(exist_ok=True)
                end = max(entry.offset + entry.size for entry in self._added.values())
                self._reserved(shard, end).write(_header(self._added))

    def _reserved(self, shard: str, size: int) -> BinaryIO:
        path = self._directory / shard
        if self._resume and not path.exists():
            raise OutputError(f"{path} of an unfinished run is gone; start over with --restart")
        file = self._files[shard] = path.open("r+b" if self._resume else "w+b")
        _reserve(file, size)
        return file

    def write(self, key: str, tensor: Tensor, part: int | None = None) -> None:
        """Writes ``tensor`` in the place of ``key``, or of its part at that index.

        Raises:
            OutputError: it has another dtype or shape than the original, or cannot be written.
        """
        entry = self._entries[key]
        if part is not None:
            entry = entry.part(part)
        if tuple(tensor.shape) != entry.shape or tensor.dtype != DTYPES[entry.dtype]:
            raise OutputError(
                f"{key!r} was {entry.dtype} {entry.shape} and cannot become {tensor.dtype} {tuple(tensor.shape)}"
            )
        raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        with output_errors(self._directory):
            file = self._files[entry.shard]
            file.seek(entry.offset)
            file.write(raw.data)
        self._written.setdefault(key, set()).add(part)
        self._dirty.add(entry.shard)

    def read(self, key: str, part: int | None = None) -> Tensor:
        """What this writer or an earlier one wrote in the place of ``key``; it counts as written.

        Raises:
            CheckpointError: it is not there, or not finite.
        """
        entry = self._entries[key]
        with output_errors(self._directory):
            self._files[entry.shard].flush()
        found = read_tensor(self._directory / entry.shard, key, entry if part is None else entry.part(part))
        self._written.setdefault(key, set()).add(part)
        return found

    def sync(self) -> None:
        """Waits until all that was written is on disk."""
        with output_errors(self._directory):
            for shard in self._dirty:
                self._files[shard].flush()
                os.fsync(self._files[shard].fileno())
        self._dirty.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with output_errors(self._directory):
                    self._copy_the_rest()
        except BaseException:
            self._close()
            raise
        failed = self._close()
        if kind is None and failed:
            with output_errors(self._directory):
                raise failed

    def _copy_the_rest(self) -> None:
        for shard in self._source.shards:
            file = self._files[shard]
            with (self._source.path / shard).open("rb") as read:
                # Straight from the file's own header: tensors that the index does not name move along.
                for key, entry in read_header(self._source.path / shard).items():
                    written = self._written.get(key, set())
                    if not written:
                        _copy(read, file, entry.offset, entry.size)
                    elif None not in written:
                        for index in set(range(entry.shape[0])) - written:
                            part = entry.part(index)
                            _copy(read, file, part.offset, part.size)
            file.flush()
            os.fsync(file.fileno())


def carry_over(source: Path, directory: Path, shards: list[str]) -> list[str]:
    """Copies all files of ``source`` but its weights into ``directory``.

    Returns:
        The files that were left behind: other copies of the dense weights, with the folders' names.
    """
    left: list[str] = []
    with output_errors(directory):
        for path in sorted(_files(source, set())):
            name = path.relative_to(source)
            if name.parts[0] in {".git", ".cache"} or str(name) in shards:
                continue
            if path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".bin.index.json"):
                left.append(str(name))
                continue
            target = directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)  # contents only: hub caches hold links into a blob store
    return left


def _files(directory: Path, above: set[Path]) -> Iterator[Path]:
    """All files below ``directory``, through links too, but never in a circle."""
    above = above | {directory.resolve()}
    for path in directory.iterdir():
        if not path.is_dir():
            yield path
        elif path.resolve() not in above:
            yield from _files(path, above)


@contextlib.contextmanager
def output_errors(path: Path, hint: str = "the output is as large as the model") -> Iterator[None]:
    """Turns an OSError inside into an OutputError of one line; ``hint`` ends it where the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(path).free / 2**30
            raise OutputError(
                f"no space left on disk for {path} ({free:.2f} GiB are free); {hint}"
            ) from error
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


def locate_model(model: str) -> Path:
    """The directory of a model: itself, "demo" for the embedded one, or the local copy of a hub id.

    Of a hub repository only safetensors, JSON and tokenizer files are fetched, never pickles or code.

    Raises:
        UsageError: there is no such directory and it cannot be a hub id.
        CheckpointError: the hub does not have it, or cannot be reached.
    """
    if not model:
        raise UsageError("the name of the model is empty")
    path = Path(model).expanduser()
    if model == "demo" and not path.exists():
        return Path(str(files("niwaki"))) / "data" / "model"
    if path.is_dir():
        return path
    if path.exists():
        raise UsageError(f"{model} is a file; a model is a directory or a hub id")
    if model.count("/") > 1 or model.startswith((".", "/", "~")) or model.endswith("/"):
        raise UsageError(f"there is no directory {model}")
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.md", "LICENSE*"]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # the hub client raises errors of its own, of httpx and of the OS
        raise CheckpointError(
            f"{model} is no directory here and could not be had from the hub: {first_line(error)}"
        ) from error


def read_tensor(path: Path, key: str, entry: Entry) -> Tensor:
    """The tensor at ``entry`` of the file ``path``.

    Raises:
        CheckpointError: it cannot be read, or is not finite.
    """
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
    # In pieces, or there would be some copies of it in float32.
    if dtype.is_floating_point and not all(
        bool(torch.isfinite(piece.float()).all()) for piece in tensor.view(-1).split(_PIECE)
    ):
        raise CheckpointError(f"{path}: {key!r} has NaN or infinite values")
    return tensor


def _reserve(file: BinaryIO, size: int) -> None:
    """Makes the file ``size`` bytes long, on disk and not only in name where the system can do that."""
    if hasattr(os, "posix_fallocate") and size:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
    file.truncate(size)


def _copy(read: BinaryIO, write: BinaryIO, offset: int, size: int) -> None:
    read.seek(offset)
    write.seek(offset)
    while size:
        chunk = read.read(min(size, _CHUNK))
        if not chunk:
            raise CheckpointError(f"{read.name} is shorter than its header says; is the download complete?")
        write.write(chunk)
        size -= len(chunk)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: it is not there, or no such file.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}; is it a model directory?") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value


def new_shard(shard: str, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Entry]:
    """Places for ``tensors`` (dtype and shape by key) in a file of this name, for :class:`CheckpointWriter`."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    entries: dict[str, Entry] = {}
    end = 0
    for key, (dtype, shape) in tensors.items():
        entries[key] = Entry(shard, names[dtype], shape, end, math.prod(shape) * dtype.itemsize)
        end += entries[key].size
    start = len(_header(entries))
    return {key: replace(entry, offset=start + entry.offset) for key, entry in entries.items()}


def _header(entries: Mapping[str, Entry]) -> bytes:
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
    """What a safetensors file has before its tensors.

    Raises:
        CheckpointError: it is no such file.
    """
    try:
        with path.open("rb") as file:
            end = _header_end(file, path)
            file.seek(0)
            return file.read(end)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _header_end(file: BinaryIO, path: Path) -> int:
    size = path.stat().st_size
    end = 8 + int.from_bytes(file.read(8), "little")
    if size < 8 or end > min(size, 8 + _MAX_HEADER):
        raise CheckpointError(
            f"{path} is truncated or no safetensors file: its header does not fit in {size} bytes"
        )
    return end


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file, after a check that all their bytes are there.

    Raises:
        CheckpointError: they are not, or it is no such file.
    """
    try:
        with path.open("rb") as file:
            end = _header_end(file, path)
            header = json.loads(file.read(end - 8))
        header.pop("__metadata__", None)
        entries = {}
        for key, value in header.items():
            first, last = value["data_offsets"]
            shape = tuple(value["shape"])
            if (
                not all(type(n) is int and n >= 0 for n in (first, last, *shape))
                or type(value["dtype"]) is not str
            ):
                raise ValueError(f"the entry for {key!r} makes no sense")
            entries[key] = Entry(path.name, value["dtype"], shape, end + first, last - first)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is no readable safetensors file: {error}") from error
    size = path.stat().st_size
    for key, entry in entries.items():
        expected = DTYPES[entry.dtype].itemsize if entry.dtype in DTYPES else None
        count = 1
        for n in entry.shape:
            count *= n
        if entry.offset < end or entry.size < 0 or (expected is not None and entry.size != count * expected):
            raise CheckpointError(f"{path}: the header's entry for {key!r} contradicts itself")
        if entry.offset + entry.size > size:
            raise CheckpointError(
                f"{path} is truncated: {key!r} ends at byte {entry.offset + entry.size} and the file has {size}; "
                "download it again"
            )
    return entries


def verify(directory: Path, source: Checkpoint, zeros: dict[str, int]) -> None:
    """Opens what was written with the safetensors library and checks it against what was meant.

    Args:
        directory: What was written.
        source: What it was made from: the same keys, shapes and dtypes have to be there.
        zeros: For each pruned matrix the number of zeros that it must have.

    Raises:
        OutputError: something is missing, of another shape or dtype, not finite, -0.0, or not as sparse.
    """
    for shard in source.shards:
        path = directory / shard
        expected = read_header(source.path / shard)
        try:
            with safe_open(path, framework="pt") as file:
                if set(file.keys()) != set(expected):
                    raise OutputError(f"{path} does not have the tensors of the source; was the disk full?")
                for key, entry in expected.items():
                    view = file.get_slice(key)
                    if tuple(view.get_shape()) != entry.shape or view.get_dtype() != entry.dtype:
                        raise OutputError(f"{path}: {key!r} is no longer {entry.dtype} {entry.shape}")
                    if key in zeros:
                        _check_zeros(path, key, file.get_tensor(key), zeros[key])
        except (OSError, SafetensorError) as error:
            raise OutputError(f"{path} cannot be read back: {error}") from error


def _check_zeros(path: Path, key: str, tensor: Tensor, zeros: int) -> None:
    if not torch.isfinite(tensor.float()).all():
        raise OutputError(f"{path}: {key!r} has NaN or infinite values")
    found = tensor.numel() - int(tensor.count_nonzero())
    if found != zeros:
        raise OutputError(f"{path}: {key!r} has {found} zeros on disk and {zeros} were meant")
    if bool(((tensor == 0) & tensor.float().signbit()).any()):
        raise OutputError(f"{path}: {key!r} has negative zeros, on which sparse kernels have gone wrong")
