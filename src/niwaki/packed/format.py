"""The files of a packed model: ``packed.json`` and safetensors; docs/format.md describes them.

Everything is checked against a digest before it is used, so that a damaged file is an error and not another model.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from niwaki.errors import CheckpointError
from niwaki.models.checkpoint.reading import PACKED_INDEX, Checkpoint
from niwaki.models.checkpoint.tensors import DTYPES, Entry, read_header, read_json, read_tensor
from niwaki.packed.kernels import expand
from niwaki.packed.matrix import PADDING, PackedMatrix, stride, unpacked

INDEX = PACKED_INDEX
FORMAT, VERSION = "niwaki-packed", 1

Number = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]


@dataclass(frozen=True)
class Stored:
    """A tensor of the dense checkpoint, as the packed one has it."""

    file: str
    dtype: str
    shape: tuple[Number, ...]
    packed: bool  # as a mask and values, or else as it is
    transposed: bool  # packed rows run along its last dimension but one, and not the last
    count: Number  # of values, if it is packed
    groups: Number  # scales for each row, if its values are whole numbers of 8 bits
    sha256: str  # of its bytes in the file: of mask, scales and values in this order

    def components(self, key: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """(dtype, shape) of the tensors that it is stored as, by their keys in the file, in the order of its digest."""
        if not self.packed:
            return {key: (self.dtype, self.shape)}
        *outer, columns = self.untransposed
        rows = math.prod(outer)
        mask = {f"{key}.mask": ("U8", (rows, stride(columns)))}
        scales = {f"{key}.scales": ("F32", (rows, self.groups))} if self.groups else {}
        return mask | scales | {f"{key}.values": ("I8" if self.groups else self.dtype, (self.count + PADDING,))}

    @property
    def untransposed(self) -> tuple[int, ...]:
        """Its shape with the packed columns last; all dimensions before are the packed rows."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.transposed else self.shape


@dataclass(frozen=True)
class Shard:
    """A file of the dense checkpoint."""

    name: str
    header: str
    keys: list[str]  # in the order of their bytes
    sha256: str


@dataclass(frozen=True)
class Index:
    """What ``packed.json`` says: the texts of the dense checkpoint's own files, its shards, and its tensors by key."""

    config: str
    index: str  # empty if there is none
    shards: list[Shard]
    tensors: dict[str, Stored]

    def to_json(self) -> str:
        """The text of the file."""
        values = {
            "about": "The weights of a pruned model without its zeros, written by niwaki. In Python: niwaki.load(DIR). "
            "The dense model: niwaki unpack DIR OUT.",
            "format": FORMAT,
            "version": VERSION,
            **asdict(self),
        }
        return json.dumps({**values, "sha256": digest_of(values)}, indent=1) + "\n"

    @classmethod
    def read(cls, directory: Path) -> Index:
        """That of a packed model; CheckpointError if not readable, not what was written, or of a later version."""
        path = directory / INDEX
        try:
            values = json.loads(path.read_bytes())
            if not isinstance(values, dict) or values.get("format") != FORMAT:
                raise CheckpointError(f"{path} is not the index of a model that niwaki packed")
            if values.pop("sha256", None) != digest_of(values):
                raise CheckpointError(f"{path} is damaged: it is not what was written; download it again")
            if values["version"] != VERSION:
                raise CheckpointError(
                    f"{path} has version {values['version']} of the format and this niwaki reads {VERSION}; "
                    "install a later one"
                )
            json.dumps(values, ensure_ascii=False).encode()  # half of a surrogate pair is no text that files can have
            index = msgspec.convert(values, cls)
            index.check()
        except (OSError, ValueError, KeyError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        return index

    def check(self) -> None:
        """Raises ValueError where it is not valid; anybody can write a digest."""
        for name in {tensor.file for tensor in self.tensors.values()} | {shard.name for shard in self.shards}:
            # A path could name any file of the machine, to read or to write.
            if Path(name).name != name or not name.endswith(".safetensors") or "\0" in name or len(name) > 200:
                raise ValueError(f"it names a file that cannot be one of weights: {name!r}")
        for key, stored in self.tensors.items():
            if stored.dtype not in DTYPES or (stored.packed and len(stored.shape) < 2):
                raise ValueError(f"{key!r} cannot be {stored.dtype} {stored.shape}")
        if sorted(key for shard in self.shards for key in shard.keys) != sorted(self.tensors):
            raise ValueError("its files do not have its tensors")
        if not isinstance(json.loads(self.config), dict):
            raise ValueError("its config.json is not an object")


class PackedCheckpoint(Checkpoint):
    """A packed model directory, read like the dense one; CheckpointError where a file is missing or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index = Index.read(path)
        self.config: dict[str, Any] = json.loads(self.index.config)
        if read_json(path / "config.json") != marked(self.config):
            raise CheckpointError(
                f"{path / 'config.json'} is not what was written; edit that of the dense model, and pack it again"
            )
        tensors = self.index.tensors
        self.shards = sorted({stored.file for stored in tensors.values()})
        self._components: dict[str, Entry] = {}
        for file in self.shards:
            if not (path / file).exists():
                raise CheckpointError(f"{path} lacks the file {file}; is the download complete?")
            self._components |= read_header(path / file)
        #: The dense tensors; where they begin is unknown.
        self.entries: dict[str, Entry] = {}
        for key, stored in tensors.items():
            size = math.prod(stored.shape) * DTYPES[stored.dtype].itemsize
            self.entries[key] = Entry(stored.file, stored.dtype, stored.shape, 0, size)
            for name, (dtype, shape) in stored.components(key).items():
                entry = self._components.get(name)
                if entry is None or (entry.shard, entry.dtype, entry.shape) != (stored.file, dtype, shape):
                    raise CheckpointError(f"{path / stored.file} is damaged: {name!r} should be there, {dtype} {shape}")

    def read(self, key: str, index: int | None = None) -> Tensor:
        """The dense tensor, see :meth:`Checkpoint.read`."""
        if key not in self.index.tensors:
            raise CheckpointError(f"{self.path} has no tensor {key!r}")
        stored = self.index.tensors[key]
        value = dense(self.packed(key), stored) if stored.packed else self.components(key)[0]
        return value if index is None else value[index]

    def packed(self, key: str) -> PackedMatrix:
        """The tensor without its zeros, of more than two dimensions as one matrix; CheckpointError if damaged."""
        stored = self.index.tensors[key]
        mask, *scales, values = self.components(key)
        return unpacked(mask, values, stored.untransposed[-1], DTYPES[stored.dtype], *scales)

    def components(self, key: str) -> list[Tensor]:
        """The tensors of :meth:`Stored.components`; CheckpointError if damaged."""
        stored = self.index.tensors[key]
        file = self.path / stored.file
        tensors = [read_tensor(file, name, self._components[name]) for name in stored.components(key)]
        if sha256(map(raw, tensors)) != stored.sha256:
            raise CheckpointError(f"{file} is damaged: {key!r} is not what was written; download it again")
        return tensors


def marked(config: dict[str, Any]) -> dict[str, Any]:
    """``config.json`` of a packed model: other libraries stop at a quantisation that they do not know."""
    return {**config, "quantization_config": {"quant_method": FORMAT, "version": VERSION}}


def open_checkpoint(path: Path) -> Checkpoint:
    """The weights of a model directory, dense or packed, or the CheckpointError of their class."""
    return PackedCheckpoint(path) if (path / INDEX).exists() else Checkpoint(path)


def dense(W: PackedMatrix, stored: Stored) -> Tensor:
    """The tensor as the dense checkpoint has it."""
    value = expand(W).view(stored.untransposed)
    return value.transpose(-1, -2).contiguous() if stored.transposed else value


def raw(value: Tensor) -> memoryview:
    """Its bytes."""
    return value.contiguous().view(-1).view(torch.uint8).numpy().data


def sha256(pieces: Iterable[bytes | memoryview]) -> str:
    """The digest of all of them, in this order."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def digest_of(values: dict[str, Any]) -> str:
    """The digest of an index, from its values."""
    return sha256([json.dumps(values, sort_keys=True).encode()])
