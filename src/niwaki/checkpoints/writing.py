"""Copies of checkpoints with some tensors changed.

A pruned tensor has the dtype and shape of the original, so every shard keeps its header and each tensor its place: a
copy of the shard can be filled in in any order, with one tensor in memory at a time.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError, safe_open
from torch import Tensor

from niwaki.checkpoints.reading import INDEX_NAME, Checkpoint
from niwaki.checkpoints.tensors import CHUNK, DTYPES, NAMES, Entry, framed, header_of, pieces_of, raw_bytes, read_tensor
from niwaki.errors import CheckpointError, OutputError, raised_as
from niwaki.files import input_errors, output_errors, replace_file, reserve
from niwaki.layer.linalg import is_finite

# New safetensors files, with one tensor in memory at a time, and the index of several.

_ORDER = [*NAMES]


class Shards:
    """Writes tensors to several safetensors files in ``directory``, and their index; OutputError where it cannot."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._size = 0
        self._shards: dict[str, str] = {}

    def write(self, name: str, like: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
        """Writes the file ``name``, see :func:`write_file`."""
        write_file(self._directory / name, like, read)
        self._size += sum(value.nbytes for value in like.values())
        self._shards |= dict.fromkeys(like, name)

    def finish(self) -> None:
        """Writes the index, if there is more than one file."""
        if len(set(self._shards.values())) > 1:
            write_index(self._directory, self._size, self._shards)


def write_file(path: Path, like: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
    """Writes a safetensors file, byte for byte that of safetensors' own writer, which is on disk at the return.

    ``like`` has the dtypes and shapes of its tensors, which can be on the meta device; ``read`` gives the tensor of a
    key, once each. Disk space is reserved first, so that a full disk shows before the work. OutputError where the file
    cannot be written: what is there then is not whole.
    """
    keys = sorted(like, key=lambda key: (_ORDER.index(like[key].dtype), key))
    header = _header({key: like[key] for key in keys})
    with output_errors(path.parent), path.open("wb") as file:
        reserve(file, len(header) + sum(value.nbytes for value in like.values()))
        file.write(header)
        for key in keys:
            value = read(key)
            assert (value.dtype, value.shape) == (like[key].dtype, like[key].shape), key
            file.write(raw_bytes(value))
            del value  # or it would stay while the next one is read
        file.flush()
        os.fsync(file.fileno())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes ``tensors`` to a safetensors file, see :func:`write_file`."""
    write_file(path, tensors, tensors.__getitem__)


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    values: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, value in tensors.items():
        start, end = end, end + value.nbytes
        values[key] = {"dtype": NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [start, end]}
    return framed(json.dumps(values, ensure_ascii=False, separators=(",", ":")))


def write_index(directory: Path, size: int, shards: Mapping[str, str]) -> None:
    """Writes which of the ``shards`` of ``directory``, of ``size`` bytes in all, has which key."""
    index = {"metadata": {"total_size": size}, "weight_map": dict(shards)}
    replace_file(directory / INDEX_NAME, json.dumps(index, indent=2) + "\n")


class CheckpointWriter:
    """Writes a copy of ``source`` with some tensors changed to ``directory``, one tensor at a time.

    A context manager: without an error, the tensors that were not written are copied at the end. Disk space is
    reserved at the start, so that a full disk shows before the work. With ``resume`` the shards are those that an
    earlier writer left there, as far as they are there: :meth:`digest` says what they have. ``added`` are the tensors
    of another shard, see :func:`new_shard`.
    """

    def __init__(
        self, source: Checkpoint, directory: Path, resume: bool = False, added: Mapping[str, Entry] | None = None
    ) -> None:
        self._source, self._directory, self._resume = source, directory, resume
        self._added = dict(added or {})
        self._entries = {**source.entries, **self._added}
        self._files: dict[str, BinaryIO] = {}
        self._stack = contextlib.ExitStack()
        #: By key, the indices that were written; None for the whole tensor.
        self._written: dict[str, set[int | None]] = {}
        self._digests: dict[tuple[str, int | None], bytes] = {}  # SHA-256 of what this writer wrote

    def __enter__(self) -> "CheckpointWriter":
        with output_errors(self._directory), self._stack:
            for shard in self._source.shards:
                end = max((each.offset + each.size for each in self._source.tensors(shard).values()), default=0)
                header = self._source.header(shard)
                self._open(shard, header, max(len(header), end))
            for shard in {entry.shard for entry in self._added.values()}:
                (self._directory / shard).parent.mkdir(exist_ok=True)
                end = max(entry.offset + entry.size for entry in self._added.values())
                self._open(shard, header_of(self._added), end)
            self._stack = self._stack.pop_all()
        return self

    def _open(self, shard: str, header: bytes, size: int) -> None:
        path = self._directory / shard
        file = self._files[shard] = self._stack.enter_context(
            path.open("r+b" if self._resume and path.exists() else "w+b")
        )
        reserve(file, size)
        file.write(header)

    def write(self, key: str, tensor: Tensor, index: int | None = None) -> None:
        """Writes ``tensor``, of the original's dtype and shape, in the place of ``key`` or its element at ``index``."""
        entry = self._entries[key].at(index)
        if tuple(tensor.shape) != entry.shape or tensor.dtype != DTYPES[entry.dtype]:
            raise OutputError(
                f"{key!r} was {entry.dtype} {entry.shape} and cannot become {tensor.dtype} {tuple(tensor.shape)}"
            )
        raw = raw_bytes(tensor)
        with output_errors(self._directory):
            file = self._files[entry.shard]
            file.seek(entry.offset)
            file.write(raw)
        self._written.setdefault(key, set()).add(index)
        self._digests[key, index] = hashlib.sha256(raw).digest()

    def digest(self, places: Iterable[tuple[str, int | None]], on_disk: bool = False) -> str:
        """SHA-256 of the digests of these tensors: as they were written, or as an earlier writer left them on disk.

        All as they are ``on_disk`` if that is wanted.
        """
        whole = hashlib.sha256()
        for key, index in places:
            if on_disk or (digest := self._digests.get((key, index))) is None:
                digest = self._digest_on_disk(self._entries[key].at(index))
            whole.update(digest)
        return whole.hexdigest()

    def _digest_on_disk(self, entry: Entry) -> bytes:
        digest = hashlib.sha256()
        with output_errors(self._directory):
            for piece in pieces_of(self._files[entry.shard], entry):
                digest.update(piece)
        return digest.digest()

    def read(self, key: str, index: int | None = None) -> Tensor:
        """What this writer or an earlier one wrote there, which counts as written; CheckpointError if not finite."""
        entry = self._entries[key].at(index)
        with output_errors(self._directory):
            self._files[entry.shard].flush()
        tensor = read_tensor(self._directory / entry.shard, key, entry)
        self._written.setdefault(key, set()).add(index)
        return tensor

    def is_written(self, key: str, index: int | None = None) -> bool:
        """Whether that was written, and will not be copied from the source at the end."""
        return not {None, index}.isdisjoint(self._written.get(key, ()))

    def sync(self) -> None:
        """Waits until all that was written is on disk."""
        with output_errors(self._directory):
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with output_errors(self._directory) if kind is None else contextlib.suppress(OSError), self._stack:
            if kind is None:
                self._copy_the_rest()

    def _copy_the_rest(self) -> None:
        if self._source.is_encoded and (self._source.path / INDEX_NAME).exists():  # which is about other tensors
            entries = self._source.entries
            size = sum(entry.size for entry in entries.values())
            write_index(self._directory, size, {key: entry.shard for key, entry in entries.items()})
        for shard in self._source.shards:
            file, path = self._files[shard], self._source.path / shard
            with input_errors(path):
                opened = path.open("rb")
            with opened as read:
                for key, entry in self._source.tensors(shard).items():
                    written = self._written.get(key, set())
                    if None in written:
                        continue
                    stored = self._source.bytes_of(key, entry)
                    for index in set(range(entry.shape[0])) - written if written else {None}:
                        if stored is None:
                            self.write(key, self._source.read(key, index), index)
                        else:
                            _copy(read, file, stored.at(index), entry.at(index))
        self.sync()


def _copy(read: BinaryIO, write: BinaryIO, stored: Entry, entry: Entry) -> None:
    read.seek(stored.offset)
    write.seek(entry.offset)
    for start in range(0, entry.size, CHUNK):
        size = min(entry.size - start, CHUNK)
        with input_errors(Path(read.name)):
            piece = read.read(size)
        if write.write(piece) < size:
            raise CheckpointError(f"{read.name} is shorter than its header says; is the download complete?")


def verify(directory: Path, source: Checkpoint, zeros: dict[str, int]) -> None:
    """Raises OutputError unless ``directory`` has the tensors of ``source``, finite and with these ``zeros``."""
    for shard in source.shards:
        path, expected = directory / shard, source.tensors(shard)
        kinds = OSError, SafetensorError, RuntimeError  # which torch raises for too many open files
        with raised_as(OutputError, f"{path} cannot be read back", kinds), safe_open(path, framework="pt") as file:
            if set(file.keys()) != set(expected):
                raise OutputError(f"{path} does not have the tensors of the source; was the disk full?")
            for key, entry in expected.items():
                view = file.get_slice(key)
                if tuple(view.get_shape()) != entry.shape or view.get_dtype() != entry.dtype:
                    raise OutputError(f"{path}: {key!r} is no longer {entry.dtype} {entry.shape}")
                if key in zeros:
                    check_zeros(path, key, file.get_tensor(key), zeros[key])


def check_zeros(path: Path, key: str, tensor: Tensor, zeros: int) -> None:
    """Raises OutputError unless ``tensor``, of the file ``path``, is finite and has so many zeros, none negative."""
    if not is_finite(tensor):
        raise OutputError(f"{path}: {key!r} has NaN or infinite values")
    count = tensor.numel() - int(tensor.count_nonzero())
    if count != zeros:
        raise OutputError(f"{path}: {key!r} has {count} zeros on disk instead of {zeros}")
    if bool(((tensor == 0) & tensor.float().signbit()).any()):
        raise OutputError(f"{path}: {key!r} has negative zeros, which some sparse kernels get wrong")
