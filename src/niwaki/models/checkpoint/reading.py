"""Model directories: where they are, and their weights by key."""

import hashlib
import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from niwaki.errors import CheckpointError, UsageError, first_line
from niwaki.files import given_path
from niwaki.models.checkpoint.tensors import DTYPES, Entry, read_header, read_json, read_tensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PACKED_INDEX = "packed.json"
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
_SAMPLE = 4096  # bytes


def locate_model(model: str) -> Path:
    """The directory of a model: itself, "demo" for the embedded one, or the local copy of a hub id.

    The hub only gives safetensors, JSON and tokenizer files, never pickles or code. UsageError where there is no such
    directory and it cannot be a hub id; CheckpointError where the hub does not have it, or cannot be reached.
    """
    path = given_path(model)
    if model == "demo" and not path.exists():
        return Path(str(files("niwaki"))) / "data" / "model"
    if path.is_dir():
        _check_directory(path)
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
        reason = f"{model} is not a directory here and not available from the hub: {first_line(error)}"
        raise CheckpointError(reason) from error


def _check_directory(path: Path) -> None:
    """CheckpointError where it cannot be listed or entered, or has a pipe or a device: some are read for ever."""
    try:
        odd = [each for each in path.iterdir() if each.exists() and not (each.is_file() or each.is_dir())]
    except OSError as error:
        raise CheckpointError(f"{error.filename or path} cannot be read: {error.strerror}") from error
    if odd:
        raise CheckpointError(f"{odd[0]} is not a file but a pipe, a socket or a device; remove it")


def shards_of(index: dict[str, Any]) -> dict[str, str]:
    """By key, the file of each tensor in an index's values; ValueError, without the index's name, for any other."""
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
    if any(path.glob("packed-*.safetensors")):
        return CheckpointError(f"{path} is a packed model without its {PACKED_INDEX}; is the download complete?")
    return None


@dataclass(frozen=True)
class Pruning:
    """What ``pruning_config`` in config.json says that others have to know; the rest is in the record."""

    quantization: str | None = None  # the grid of the weights
    blocks: tuple[int, int] | None = None  # those that were pruned; None for all


class Checkpoint:
    """The weights of a model directory by key; CheckpointError where a file is missing, malformed or pickled."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: dict[str, Any] = read_json(path / "config.json")
        self.entries: dict[str, Entry] = {}
        weight_map = self._weight_map()
        self.shards: list[str] = sorted(set(weight_map.values()) if weight_map else {SINGLE_NAME})
        found: dict[str, Entry] = {}
        for shard in self.shards:
            for key, entry in read_header(path / shard).items():
                if key in found:  # which one counts is up to the reader
                    raise CheckpointError(f"{path} has the tensor {key!r} twice, in {found[key].shard} and in {shard}")
                found[key] = entry
        for key, shard in (weight_map or {}).items():
            if key not in found or found[key].shard != shard:
                raise CheckpointError(f"{path / shard} lacks the tensor {key!r} that {INDEX_NAME} places there")
        self.entries.update({key: entry for key, entry in found.items() if weight_map is None or key in weight_map})

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
        pickled = sorted(path.name for path in self.path.iterdir() if path.suffix in PICKLE_SUFFIXES)
        if pickled:
            return (
                f"{self.path} holds pickled weights ({pickled[0]}), which can run code when they are read; "
                "convert them to safetensors (load in transformers where you trust them, then save_pretrained)"
            )
        if (self.path / PACKED_INDEX).exists():
            return f"{self.path} is packed; make it dense again with `niwaki unpack {self.path} OUT`"
        if error := without_index(self.path):
            return str(error)
        return f"{self.path} has neither {SINGLE_NAME} nor {INDEX_NAME}"

    @property
    def pruning(self) -> Pruning:
        """What niwaki says in config.json of how it made this model; CheckpointError where it makes no sense."""
        value = self.config.get("pruning_config")
        own = isinstance(value, dict) and value.get("library") == "niwaki"
        try:
            return msgspec.convert(value if own else {}, Pruning)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{self.path / 'config.json'}, pruning_config: {error}") from error

    @property
    def size(self) -> int:
        """Bytes of its weight files."""
        return sum((self.path / shard).stat().st_size for shard in self.shards)

    def dtype(self, key: str) -> torch.dtype:
        """The dtype that the tensor under ``key`` is stored in; CheckpointError where torch has none like it."""
        entry = self.entries[key]
        if entry.dtype not in DTYPES:
            raise CheckpointError(f"{self.path / entry.shard}: {key!r} has the dtype {entry.dtype}, unknown here")
        return DTYPES[entry.dtype]

    def read(self, key: str, index: int | None = None) -> Tensor:
        """The tensor under ``key``, or its element at ``index``, as it is stored; CheckpointError if not finite."""
        if key not in self.entries:
            raise CheckpointError(f"{self.path} has no tensor {key!r}")
        self.dtype(key)
        entry = self.entries[key].at(index)
        return read_tensor(self.path / entry.shard, key, entry)

    def fingerprint(self) -> str:
        """SHA-256 of its configuration, the place of its tensors, and some bytes of each of them."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for key, entry in sorted(self.entries.items()):
            digest.update(f"{key} {entry}".encode())
            with (self.path / entry.shard).open("rb") as file:
                for start in (0, max(0, entry.size // 2 - _SAMPLE), max(0, entry.size - _SAMPLE)):
                    file.seek(entry.offset + start)
                    digest.update(file.read(min(_SAMPLE, entry.size)))
        return digest.hexdigest()
