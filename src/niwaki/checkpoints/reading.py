"""Model directories: their weights by key."""

import contextlib
import copy
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from niwaki.checkpoints.encodings import Encoded, find_floats
from niwaki.checkpoints.foreign import quantized, recognized, wrapped
from niwaki.checkpoints.integers import find_integers
from niwaki.checkpoints.tensors import (
    DTYPES,
    Entry,
    header_bytes,
    header_of,
    pieces_of,
    placed,
    read_header,
    read_json,
    read_tensor,
)
from niwaki.choices import TWO_FACTORS
from niwaki.errors import CheckpointError, UnsupportedModelError, raised_as
from niwaki.files import input_errors
from niwaki.layer.linalg import is_finite

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PACKED_INDEX = "packed.json"
#: Where a directory that was made from a GGUF file says so, see :mod:`niwaki.models.gguf`.
ORIGIN = ".gguf.json"
_SAMPLE = 4096  # bytes
#: What weights are stored in that stand for others, and how the scales of states end that compressed-tensors has beside
#: those of weights: nothing reads them here.
_CODES = ("F8_E4M3", "F8_E5M2", "I8", "U8")
_OF_STATES = (".input_scale", ".input_zero_point", ".output_scale", ".q_scale", ".k_scale", ".v_scale")
#: Bytes of codes in FP8 that are looked through before any work, some seconds' worth.
_LOOKED_THROUGH = 1 << 35


def shards_of(index: dict[str, Any]) -> dict[str, str]:
    """The file of each tensor in an index's values, by key; ValueError, without the index's name, for any other."""
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ValueError("has no weight_map; is the download complete?")
    for shard in shards.values():
        # A path in the index could name any file of the machine, to read or to write.
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"names a shard outside its directory: {shard!r}")
        if not shard.endswith(".safetensors"):
            raise ValueError(f"names a shard that is not a safetensors file: {shard!r}")
    return shards


def without_index(path: Path) -> CheckpointError | None:
    """What to say of a directory that has the weights of a packed model, if it has, where their index is missing."""
    with input_errors(path):
        is_packed = any(path.glob("packed-*.safetensors"))
    if is_packed:
        return CheckpointError(f"{path} is a packed model without its {PACKED_INDEX}; is the download complete?")
    return None


@dataclass(frozen=True)
class PruningConfig:
    """What ``pruning_config`` in config.json says that others have to know; the rest is in the record."""

    quantization: str | None = None  # the grid of the weights
    embeddings: str | None = None  # that of token embeddings and the head
    blocks: tuple[int, int] | None = None  # those that were pruned; None for all
    pattern: str | None = None
    sparsity: float = 0.0  # fraction of zeros in the matrices of these

    @property
    def has_factors(self) -> bool:
        """Whether matrices are products of two sparse factors, which are beside them."""
        return (self.pattern or "").startswith(TWO_FACTORS)

    def includes(self, block: int) -> bool:
        """Whether ``block`` was pruned, and is on the grid or has factors, where there are such."""
        start, stop = self.blocks or (0, math.inf)
        return start <= block < stop


#: Model directories with codes and scales, and when their files were changed, that this process has looked through.
_SOUND = set[tuple[Path, tuple[int, ...]]]()


def _has(path: Path, entry: Entry, wanted: tuple[bytes, ...]) -> bool:
    """Whether any of the bytes at ``entry`` is one of those ``wanted``."""
    with (path / entry.shard).open("rb") as file:
        return bool(wanted) and any(one in piece for piece in pieces_of(file, entry) for one in wanted)


class Checkpoint:
    """The weights of a model directory by key; CheckpointError where a file is missing, malformed or pickled.

    Those that are stored as codes and scales, in FP8 or MXFP4 (:mod:`.encodings`) or as whole numbers
    (:mod:`.integers`), are dense here, and nothing but ``encoded`` and ``stored`` says that they were not.
    """

    #: By key, those that are stored as codes and scales.
    encoded: Mapping[str, Encoded] = {}
    index_name = ""
    _encoding: object = None  # what config.json says of them

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.is_dir() and not (path / "config.json").exists():
            has_weights = any((path / name).exists() for name in (SINGLE_NAME, INDEX_NAME, PACKED_INDEX))
            if reason := recognized(path, has_weights):
                raise CheckpointError(reason)
        self.config: dict[str, Any] = read_json(path / "config.json")
        weight_map = self._weight_map()
        shards = sorted(set(weight_map.values()) if weight_map else {SINGLE_NAME})
        #: The file that says which tensor is in which shard; "" where one file has all.
        self.index_name = INDEX_NAME if weight_map else ""
        found: dict[str, Entry] = {}
        for shard in shards:
            for key, entry in read_header(path / shard).items():
                if key in found:  # which one counts is up to the reader
                    raise CheckpointError(f"{path} has the tensor {key!r} twice, in {found[key].shard} and in {shard}")
                found[key] = entry
        for key, shard in (weight_map or {}).items():
            if key not in found or found[key].shard != shard:
                raise CheckpointError(f"{path / shard} lacks the tensor {key!r} that {INDEX_NAME} places there")
        #: Where tensors are in the files.
        self._stored = {key: entry for key, entry in found.items() if weight_map is None or key in weight_map}
        self.encoded = self._find_encoded()
        #: By key, where tensors are, or would be in files that have all of them dense.
        self.entries: dict[str, Entry] = self._decoded_entries() if self.encoded else self._stored
        #: Those files.
        self.shards = sorted({each.shard for each in self.entries.values()} if self.encoded else shards)
        if self.encoded:
            self._encoding = self.config.pop("quantization_config")
            changed = tuple((path / shard).stat().st_mtime_ns for shard in shards)
            if (path, changed) not in _SOUND:
                self._check_encoded()
                _SOUND.add((path, changed))

    def _find_encoded(self) -> Mapping[str, Encoded]:
        """The tensors that are stored as codes and scales, as ``quantization_config`` says."""
        settings = self.config.get("quantization_config")
        if not isinstance(settings, dict) or self.pruning.quantization:  # which niwaki has exported
            return {}
        found = find_floats(settings, self._stored)
        if settings.get("quant_method") in ("fp8", "mxfp4"):
            return found
        found |= find_integers(
            settings, self._stored, lambda key, entry: read_tensor(self.path / entry.shard, key, entry)
        )
        parts = {id(entry) for each in found.values() for entry in each.parts}
        for key, entry in self._stored.items() if found else ():
            if key.endswith(".weight") and entry.dtype in _CODES and id(entry) not in parts:
                raise CheckpointError(f"{key!r} is quantized ({entry.dtype}), and not as other matrices of {self.path}")
        return found

    def _check_encoded(self) -> None:
        """CheckpointError where scales, or codes if there are not too many, stand for NaN or infinity.

        Of more codes each is seen when its tensor is read, as in files of other dtypes.
        """
        looked = sum(each.codes.size for each in self.encoded.values()) <= _LOOKED_THROUGH
        for key, each in self.encoded.items():
            scales = read_tensor(self.path / each.scales.shard, each.keys[1], each.scales)
            if not each.is_certain(scales) or (looked and _has(self.path, each.codes, each.no_numbers)):
                for index in range(each.shape[0]) if len(each.shape) > 2 else [None]:
                    self.read(key, index)

    @property
    def is_encoded(self) -> bool:
        """Whether some of its tensors are stored as codes and scales."""
        return bool(self.encoded)

    @property
    def encoded_as(self) -> str:
        """How those are stored, in words."""
        return " and ".join(sorted({str(each) for each in self.encoded.values()}))

    @property
    def stored(self) -> "Checkpoint":
        """The same files without a look at what codes stand for: these and scales are tensors of their own."""
        whole = copy.copy(self)
        if self.encoded:
            whole.encoded, whole.entries, whole.shards = {}, self._stored, sorted(self.files)
            whole.config = {**self.config, "quantization_config": self._encoding}
        return whole

    def _decoded_entries(self) -> dict[str, Entry]:
        """A place for each tensor, in the file where it is."""
        hidden = {id(entry) for each in self.encoded.values() for entry in each.parts}
        tensors = {
            key: entry
            for key, entry in self._stored.items()
            if id(entry) not in hidden and not key.endswith(_OF_STATES)
        }
        for key, encoded in self.encoded.items():
            size = DTYPES[encoded.dtype].itemsize * math.prod(encoded.shape)
            tensors[key] = Entry(encoded.codes.shard, encoded.dtype, encoded.shape, 0, size)
        entries: dict[str, Entry] = {}
        for shard in sorted(self.files):
            entries |= placed({key: one for key, one in tensors.items() if one.shard == shard})
        return entries

    @property
    def files(self) -> set[str]:
        """All files that its tensors are in."""
        return {entry.shard for entry in self._stored.values()} if self.encoded else set(self.shards)

    def header(self, shard: str) -> bytes:
        """What the file ``shard`` has before its tensors, or would have with all of them dense."""
        return header_of(self.tensors(shard)) if self.encoded else header_bytes(self.path / shard)

    def tensors(self, shard: str) -> dict[str, Entry]:
        """All tensors of the file ``shard``, also such as the index does not name."""
        if self.encoded:
            return {key: entry for key, entry in self.entries.items() if entry.shard == shard}
        return read_header(self.path / shard)

    def bytes_of(self, key: str, entry: Entry) -> Entry | None:
        """Where the bytes are of what :meth:`tensors` has as ``entry``; None if they are codes and scales."""
        return None if key in self.encoded else self._stored.get(key, entry)

    def _weight_map(self) -> dict[str, str] | None:
        """The shard of each key; None where one file has all."""
        if (self.path / SINGLE_NAME).exists():
            return None
        file = self.path / INDEX_NAME
        if not file.exists():
            raise CheckpointError(self._without_weights())
        try:
            return shards_of(read_json(file))
        except ValueError as error:
            raise CheckpointError(f"{file} {error}") from error

    def _without_weights(self) -> str:
        """What to say of a directory without safetensors."""
        if (self.path / PACKED_INDEX).exists():
            return f"{self.path} is packed; make it dense again with `niwaki unpack {self.path} OUT`"
        if error := without_index(self.path):
            return str(error)
        return recognized(self.path, has_weights=False) or f"{self.path} has neither {SINGLE_NAME} nor {INDEX_NAME}"

    @property
    def notes(self) -> list[str]:
        """What a careful reader should know of the files: which of two sets of weights is read, what they were."""
        notes = []
        if not self.index_name and (self.path / INDEX_NAME).exists() and (self.path / SINGLE_NAME).exists():
            with contextlib.suppress(ValueError, CheckpointError):  # an old one need not make sense
                shards = {*shards_of(read_json(self.path / INDEX_NAME)).values()} - {SINGLE_NAME}
                if shards and all((self.path / shard).exists() for shard in shards):
                    notes.append(
                        f"the weights appear twice: {SINGLE_NAME} is read, as by transformers, and not the "
                        f"{len(shards)} shards of {INDEX_NAME}"
                    )
        if (self.path / ORIGIN).is_file():
            values = read_json(self.path / ORIGIN)
            file = f"the GGUF file {values.get('file')} (SHA-256 {values.get('sha256')})"
            notes.append(f"the model is {file}, as transformers reads it, in {self.config.get('dtype')}")
        return notes

    @property
    def pruning(self) -> PruningConfig:
        """What niwaki says in config.json of how it made this model; CheckpointError where it makes no sense."""
        value = self.config.get("pruning_config")
        own = isinstance(value, dict) and value.get("library") == "niwaki"
        with raised_as(CheckpointError, f"{self.path / 'config.json'}, pruning_config", msgspec.ValidationError):
            return msgspec.convert(value if own else {}, PruningConfig)

    def check_kind(self) -> None:
        """Raises UnsupportedModelError for weights that were quantized, or saved within something else."""
        if self.config.get("quantization_config") is not None and self.pruning.quantization:
            raise UnsupportedModelError(
                f"{self.path} was exported for other programs; give the directory that it was made from"
            )
        if reason := quantized(self.config, self.entries) or wrapped(self.entries):
            raise UnsupportedModelError(f"{self.path} is {reason}")

    @property
    def size(self) -> int:
        """Bytes of its weight files, with all of them dense."""
        if self.encoded:
            return sum(entry.size for entry in self.entries.values())
        with input_errors(self.path):
            return sum((self.path / shard).stat().st_size for shard in self.shards)

    @property
    def size_in_files(self) -> int:
        """Bytes of its weight files as they are, or of the GGUF file that it was made from."""
        size = read_json(self.path / ORIGIN).get("size") if (self.path / ORIGIN).is_file() else None
        return size if isinstance(size, int) else self.stored.size

    def dtype(self, key: str) -> torch.dtype:
        """The dtype that the tensor under ``key`` is stored in; CheckpointError where torch has none like it."""
        entry = self.entries[key]
        if entry.dtype not in DTYPES:
            raise CheckpointError(f"{self.path / entry.shard}: {key!r} has the dtype {entry.dtype}, unknown here")
        return DTYPES[entry.dtype]

    def like(self, key: str) -> Tensor:
        """A tensor on the meta device with the dtype and shape of that under ``key``; errors as of :meth:`dtype`."""
        return torch.empty(self.entries[key].shape, dtype=self.dtype(key), device="meta")

    def read(self, key: str, index: int | None = None) -> Tensor:
        """The tensor under ``key``, or its element at ``index``, as it is stored; CheckpointError if not finite."""
        if key not in self.entries:
            raise CheckpointError(f"{self.path} has no tensor {key!r}")
        self.dtype(key)
        if (encoded := self.encoded.get(key)) is not None:
            value = encoded.read(self.reader(encoded), index)
            if not is_finite(value):  # scales can be infinite
                raise CheckpointError(f"{self.path / encoded.codes.shard}: {key!r} has NaN or infinite values")
            return value
        entry = self._stored[key].at(index)
        return read_tensor(self.path / entry.shard, key, entry)

    def reader(self, encoded: Encoded) -> Callable[[Entry], Tensor]:
        """What reads the parts of ``encoded``."""
        return lambda entry: read_tensor(self.path / entry.shard, encoded.keys[0], entry)

    def fingerprint(self) -> str:
        """SHA-256 of its configuration, the place of its tensors, and some bytes of each of them."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        if self.encoded:
            digest.update(json.dumps(self._encoding, sort_keys=True).encode())
        for key, entry in sorted(self._stored.items()):
            digest.update(f"{key} {entry}".encode())
            with input_errors(self.path / entry.shard), (self.path / entry.shard).open("rb") as file:
                for start in (0, max(0, entry.size // 2 - _SAMPLE), max(0, entry.size - _SAMPLE)):
                    file.seek(entry.offset + start)
                    digest.update(file.read(min(_SAMPLE, entry.size)))
        return digest.hexdigest()


# What follows a transformer in a directory of sentence-transformers.

#: Which directories beside a transformer belong to a pipeline of sentence-transformers: layers that follow it.
_MODULES = "modules.json"


def pipeline(directory: Path) -> list[tuple[str, str]]:
    """The type and the folder of each layer of the pipeline in ``directory``; the transformer's own folder is "".

    Nothing where there is no pipeline, or its file is nobody's.
    """
    try:
        values = json.loads((directory / _MODULES).read_text(encoding="utf-8"))
        return [(str(each.get("type")), each["path"]) for each in values]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []
