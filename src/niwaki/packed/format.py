"""The files of a packed model: ``packed.json`` and safetensors; docs/format.md describes them.

Everything is checked against a digest before it is used, so that a damaged file is an error and not another model.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from torch import Tensor

from niwaki.checkpoints.reading import INDEX_NAME, PACKED_INDEX, Checkpoint, shards_of
from niwaki.checkpoints.tensors import DTYPES, Entry, raw_bytes, read_header, read_json, read_tensor
from niwaki.errors import CheckpointError, shown
from niwaki.packed.kernels import expand
from niwaki.packed.matrix import (
    DTYPES as PACKABLE,
    PADDING,
    WHOLE_BITS,
    PackedMatrix,
    groups_fit,
    size_of_whole,
    stride,
    unpacked,
)

INDEX = PACKED_INDEX
FORMAT, VERSION = "niwaki-packed", 7

Number = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]


class Part(NamedTuple):
    """A packed matrix of so many rows and columns, with so many values, and scales for each row."""

    rows: int
    columns: int
    values: int
    groups: int


@dataclass(frozen=True)
class PackedTensor:
    """A tensor of the dense checkpoint, as the packed one has it."""

    file: str
    dtype: str
    shape: tuple[Number, ...]
    packed: bool  # as a mask and values, or all of its whole numbers, or else as it is
    transposed: bool  # packed rows run along its last dimension but one, and not the last
    count: Number  # of values, if it is packed; with fewer bits than 8, of their bytes
    bits: Number  # of its values, if these are whole numbers with scales: 4 or 8, if it is whole 5 and 6 too, or else 0
    groups: Number  # scales for each row, if its values are whole numbers; of the left one of two factors
    sha256: str  # of its bytes in the file: of mask, scales and values in this order, or of those of both factors
    inner: Number = 0  # the columns of the left one of the two factors whose product it is; 0 if it is no product
    count_right: Number = 0  # of values of the right one; ``count`` then are those of the left one
    groups_right: Number = 0  # scales for each row of the right one, if values of both are whole numbers
    whole: bool = False  # all of its whole numbers are stored, without a mask

    def components(self, key: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """(dtype, shape) of the tensors that it is stored as, by their keys in the file, in the order of its digest."""
        if not self.packed:
            return {key: (self.dtype, self.shape)}
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, part in zip((f"{key}.left", f"{key}.right") if self.inner else (key,), self.parts, strict=True):
            if not self.whole:
                found[f"{name}.mask"] = "U8", (part.rows, stride(part.columns))
            if self.bits:
                found[f"{name}.scales"] = self.dtype, (part.rows, part.groups)
            found[f"{name}.values"] = {0: self.dtype, 8: "I8"}.get(self.bits, "U8"), (part.values + PADDING,)
        return found

    @property
    def parts(self) -> list[Part]:
        """The matrix that it is stored as, if it is packed, or the left and the right factor."""
        *outer, columns = self.untransposed
        left = Part(math.prod(outer), self.inner or columns, self.count, self.groups)
        return [left, Part(self.inner, columns, self.count_right, self.groups_right)] if self.inner else [left]

    @property
    def untransposed(self) -> tuple[int, ...]:
        """The shape with the packed columns last; all dimensions before are the packed rows."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.transposed else self.shape

    @property
    def size(self) -> int:
        """Bytes of the dense tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def check(self) -> None:
        """Raises ValueError unless there can be such a tensor; what kernels rely on begins here."""
        if self.dtype not in DTYPES or math.prod(filter(None, self.shape)) >= 2**48:
            raise ValueError(f"there is no tensor {shown(self.dtype)} {self.shape}")
        if (self.inner > 0 and not self.packed) or (self.count_right + self.groups_right > 0 and not self.inner):
            raise ValueError("what has no two factors cannot have inner columns, or values or scales of a right one")
        if not self.packed:
            if self.whole:
                raise ValueError("what is not packed cannot be whole numbers without a mask")
            return
        if DTYPES[self.dtype] not in PACKABLE or len(self.shape) < 2 or 0 in self.shape:
            raise ValueError(f"{self.dtype} {self.shape} cannot be packed")
        if self.inner and (len(self.shape) != 2 or self.bits not in (0, 8)):
            raise ValueError(f"{self.dtype} {self.shape} with {self.bits} bits is not a product of two factors here")
        rows, columns, *_ = self.parts[0]
        if self.whole and (self.inner or not self.bits):
            raise ValueError("only one matrix of whole numbers can have no mask")
        if self.whole and self.count != size_of_whole(rows, columns, self.bits):
            raise ValueError(f"{self.count} is not the number of bytes of {self.shape} in {self.bits} bits")
        for part in self.parts:
            if self.bits not in (WHOLE_BITS if self.whole else (0, 4, 8)) or (self.bits > 0) != (part.groups > 0):
                raise ValueError(f"values of {self.bits} bits cannot have {part.groups} scales for a row")
            if part.groups and not groups_fit(part.columns, part.groups):
                raise ValueError(f"rows of {part.columns} columns cannot have {part.groups} scales")


@dataclass(frozen=True)
class Place:
    """Where a safetensors header says that a tensor is."""

    dtype: str
    shape: tuple[Number, ...]
    data_offsets: tuple[Number, Number]


@dataclass(frozen=True)
class Shard:
    """A file of the dense checkpoint."""

    name: str
    header: str
    keys: list[str]  # in the order of their bytes
    sha256: str

    def check(self, tensors: dict[str, PackedTensor]) -> None:
        """Raises ValueError unless its header is that of its tensors, one after the other."""
        header = parse(self.header)
        msgspec.convert(header.pop("__metadata__", None), dict[str, str] | None)
        places, end = msgspec.convert(header, dict[str, Place]), 0
        for key in self.keys:
            stored, place = tensors[key], places.pop(key, None)
            size = stored.size
            at = (end, end + size) if size or place is None else place.data_offsets
            if place != Place(stored.dtype, stored.shape, at):
                raise ValueError(f"the header of {self.name!r} does not have {key!r} in its place")
            end += size
        if places:
            raise ValueError(f"the header of {self.name!r} has other tensors: {min(places)!r}")


@dataclass(frozen=True)
class Index:
    """What ``packed.json`` says: the texts of the dense checkpoint's own files, its shards, and its tensors by key."""

    config: str
    index: str  # empty if there is none
    shards: list[Shard]
    tensors: dict[str, PackedTensor]

    def to_json(self) -> str:
        """The text of the file."""
        values = {
            "about": "The weights of a model without its zeros, or as whole numbers of a few bits, written by niwaki. "
            "In Python: niwaki.load(DIR). The dense model: niwaki unpack DIR OUT.",
            "format": FORMAT,
            "version": VERSION,
            **asdict(self),
        }
        return json.dumps({**values, "sha256": digest_of(values)}, indent=1) + "\n"

    @classmethod
    def read(cls, directory: Path) -> Index:
        """Reads that of a packed model; CheckpointError if unreadable, not what was written, or of another version."""
        path = directory / INDEX
        try:
            values = parse(path.read_bytes().decode())
            if values.get("format") != FORMAT:
                raise CheckpointError(f"{path} is not the index of a model that niwaki packed")
            if values.pop("sha256", None) != digest_of(values):
                raise CheckpointError(f"{path} is damaged: it is not what was written; download it again")
            if (version := values["version"]) != VERSION:
                raise CheckpointError(
                    f"{path} has version {shown(version)} of the format and this niwaki reads {VERSION}; "
                    "install the niwaki that packed it, or pack the dense model again"
                )
            json.dumps(values, ensure_ascii=False).encode()  # half of a surrogate pair is no text that files can have
            index = msgspec.convert(values, cls)
            index.check()
        except (OSError, ValueError, KeyError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        return index

    def check(self) -> None:
        """Raises ValueError where it is not valid; anybody can write a digest."""
        names = [shard.name for shard in self.shards]
        for name in {*names, *(tensor.file for tensor in self.tensors.values())}:
            # A path could name any file of the machine, to read or to write.
            if Path(name).name != name or not name.endswith(".safetensors") or "\0" in name or len(name.encode()) > 200:
                raise ValueError(f"it names a file that cannot be one of weights: {name!r}")
        for key, stored in self.tensors.items():
            try:
                stored.check()
            except ValueError as error:
                raise ValueError(f"{key!r}: {error}") from error
        if sorted(key for shard in self.shards for key in shard.keys) != sorted(self.tensors):
            raise ValueError("its files do not have its tensors")
        if len({*names}) < len(names):
            raise ValueError("two of its files have the same name")
        for shard in self.shards:
            shard.check(self.tensors)
        parse(self.config)
        if self.index:
            try:
                shards_of(parse(self.index))
            except ValueError as error:
                raise ValueError(f"its {INDEX_NAME} {error}") from error


class PackedCheckpoint(Checkpoint):
    """A packed model directory, read like the dense one; CheckpointError where a file is missing or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index = Index.read(path)
        self.config: dict[str, Any] = parse(self.index.config)
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
            self.entries[key] = Entry(stored.file, stored.dtype, stored.shape, 0, stored.size)
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

    def packed(self, key: str) -> tuple[PackedMatrix, ...]:
        """The tensor without its zeros: one matrix, of more than two dimensions too, or the left and the right factor.

        CheckpointError if damaged.
        """
        tensors, parts = self.components(key), self.index.tensors[key].parts
        each = len(tensors) // len(parts)
        return tuple(
            self._sparse(key, tensors[i * each : (i + 1) * each], part.columns) for i, part in enumerate(parts)
        )

    def _sparse(self, key: str, tensors: list[Tensor], columns: int) -> PackedMatrix:
        """A matrix of so many ``columns`` from its ``tensors``."""
        stored = self.index.tensors[key]
        mask = None if stored.whole else tensors[0]
        *scales, values = tensors if stored.whole else tensors[1:]
        try:
            W = unpacked(mask, values, columns, DTYPES[stored.dtype], *scales)
            # All else is finite. What the largest scale cannot make infinite need not be looked at.
            risky = W.scales is not None and not (W.scales.abs().max() * 128).to(W.dtype).isfinite()
            if risky and not expand(W).isfinite().all():
                raise ValueError("its scales make infinite values")
        except ValueError as error:
            raise CheckpointError(f"{self.path / stored.file}: {key!r} is not valid: {error}") from error
        return W

    def fingerprint(self) -> str:
        """SHA-256 of the index, which has a digest of all else."""
        return sha256([self.index.to_json().encode()])

    def components(self, key: str) -> list[Tensor]:
        """The tensors of :meth:`PackedTensor.components`; CheckpointError if damaged."""
        stored = self.index.tensors[key]
        file = self.path / stored.file
        tensors = [read_tensor(file, name, self._components[name]) for name in stored.components(key)]
        if sha256(map(raw_bytes, tensors)) != stored.sha256:
            raise CheckpointError(f"{file} is damaged: {key!r} is not what was written; download it again")
        return tensors


def marked(config: dict[str, Any]) -> dict[str, Any]:
    """``config.json`` of a packed model: other libraries stop at a quantization that they do not know."""
    return {**config, "quantization_config": {"quant_method": FORMAT, "version": VERSION}}


def open_checkpoint(path: Path) -> Checkpoint:
    """The weights of a model directory, dense or packed, or the CheckpointError of their class."""
    return PackedCheckpoint(path) if (path / INDEX).exists() else Checkpoint(path)


def dense(W: Sequence[PackedMatrix], stored: PackedTensor) -> Tensor:
    """The tensor as the dense checkpoint has it; a product up to rounding, which depends on the processor."""
    value = expanded(W).view(stored.untransposed)
    return value.transpose(-1, -2).contiguous() if stored.transposed else value


def expanded(W: Sequence[PackedMatrix]) -> Tensor:
    """(rows, columns) in their dtype: the matrix, or the product of two."""
    first, *others = map(expand, W)
    return (first.float() @ others[0].float()).to(first.dtype) if others else first


def parse(text: str) -> dict[str, Any]:
    """The object in a JSON text; ValueError where there is none, or one has a key twice, of which readers differ."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(values := dict(pairs)) < len(pairs):
            raise ValueError("an object has a key twice")
        return values

    values = json.loads(text, object_pairs_hook=once)
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    return values


def sha256(pieces: Iterable[bytes | memoryview]) -> str:
    """The digest of all of them, in this order."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def digest_of(values: dict[str, Any]) -> str:
    """The digest of an index, from its values."""
    return sha256([json.dumps(values, sort_keys=True).encode()])
