"""Writes a checkpoint whose tensors have other names and shapes than those of the model it comes from.

A tensor that keeps its shape keeps its values; one that is cut is written when its new values are known. Each shard
keeps its name and what it held, and one tensor at a time is in memory.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from niwaki.blocks import StreamedModel
from niwaki.checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint, _reserve, output_errors
from niwaki.errors import OutputError, UnsupportedModelError
from niwaki.record import write_json
from niwaki.units import Cut


@dataclass(frozen=True)
class Target:
    """What a tensor becomes.

    Attributes:
        key: Its new key.
        shape: Its new shape.
    """

    key: str
    shape: tuple[int, ...]


def targets(model: StreamedModel, kept: Sequence[int], cuts: Sequence[Cut]) -> dict[str, Target]:
    """By key, what becomes of each tensor when only the blocks ``kept`` stay, and those with ``cuts``.

    Tensors of other blocks are not in it.

    Raises:
        UnsupportedModelError: a key of a block does not say of which.
    """
    last = re.escape(model.path.rpartition(".")[2])
    prefixes: set[str] = set()  # what is before the number of a block in keys
    for index, block in enumerate(model.blocks):
        for name in block.state_dict():
            for key in model.layout.keys(f"{model.path}.{index}.{name}"):
                found = re.match(rf"(?:.*?\.)??{last}\.(?={index}\.)", key)
                if found is None:
                    raise UnsupportedModelError(f"{key!r} does not say that it belongs to block {index}")
                prefixes.add(found[0])
    numbered = re.compile(rf"({'|'.join(map(re.escape, sorted(prefixes)))})(\d+)\.(.*)")
    new = {old: number for number, old in enumerate(kept)}
    result = {}
    for key, entry in model.checkpoint.entries.items():
        # Tensors that are no parameters of the model, such as buffers in old files, go with their block.
        found = numbered.fullmatch(key)
        if found is None:
            result[key] = Target(key, entry.shape)
        elif int(found[2]) in new:
            result[key] = Target(f"{found[1]}{new[int(found[2])]}.{found[3]}", entry.shape)
    for key, dimension, length in (cut for index in kept for all_ in cuts for cut in all_.lengths(index)):
        old = result[key]
        result[key] = Target(old.key, (*old.shape[:dimension], length, *old.shape[dimension + 1 :]))
    return result


class ReshapingWriter:
    """Writes ``targets``.

    As a context manager: on leaving without an error every tensor that keeps its shape and was not written is
    copied from the source. Headers and the index are there from the start, so that the directory can be looked at
    as a model, and so is the disk space.

    Args:
        source: The checkpoint that they are of.
        directory: Where the shards go.
        targets: By key of the source; what is not in it is left out.

    Raises:
        OutputError: no space, or the directory cannot be written.
    """

    def __init__(self, source: Checkpoint, directory: Path, targets: dict[str, Target]) -> None:
        self._source = source
        self._directory = directory
        self._targets = targets
        self._files: dict[str, BinaryIO] = {}
        self._offsets: dict[str, int] = {}
        self._written: set[str] = set()

    def __enter__(self) -> ReshapingWriter:
        try:
            with output_errors(self._directory):
                for shard in self._source.shards:
                    self._open(shard)
            self._write_index()
        except BaseException:
            self._close()
            raise
        return self

    def write(self, key: str, tensor: Tensor) -> None:
        """Writes what the tensor ``key`` of the source becomes.

        Raises:
            OutputError: it has another dtype or shape than was said, or cannot be written.
        """
        shape, dtype = self._targets[key].shape, self._source.dtype(key)
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise OutputError(
                f"{key!r} was to be {dtype} {shape} and cannot become {tensor.dtype} {tuple(tensor.shape)}"
            )
        raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        with output_errors(self._directory):
            file = self._files[self._source.entries[key].shard]
            file.seek(self._offsets[key])
            file.write(raw.data)
        self._written.add(key)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with output_errors(self._directory):
                    self._copy_the_rest()
        finally:
            self._close()

    def _open(self, shard: str) -> None:
        entries = self._source.entries
        keys = [key for key in self._targets if entries[key].shard == shard]
        if not keys:
            return
        # The widest numbers first, as safetensors does it, so that each tensor is aligned.
        keys.sort(key=lambda key: (-self._source.dtype(key).itemsize, entries[key].offset))
        with safe_open(self._source.path / shard, framework="pt") as original:
            header: dict[str, Any] = {"__metadata__": original.metadata() or {"format": "pt"}}
        end = 0
        for key in keys:
            target, start = self._targets[key], end
            end += math.prod(target.shape) * self._source.dtype(key).itemsize
            header[target.key] = {
                "dtype": entries[key].dtype,
                "shape": target.shape,
                "data_offsets": [start, end],
            }
            self._offsets[key] = start
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        for key in keys:
            self._offsets[key] += 8 + len(text)
        file = self._files[shard] = (self._directory / shard).open("w+b")
        _reserve(file, 8 + len(text) + end)
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()

    def _write_index(self) -> None:
        if self._source.shards == [SINGLE_NAME]:
            return
        entries = self._source.entries
        size = sum(
            math.prod(target.shape) * self._source.dtype(key).itemsize
            for key, target in self._targets.items()
        )
        index = {
            "metadata": {"total_size": size},
            "weight_map": {target.key: entries[key].shard for key, target in self._targets.items()},
        }
        write_json(self._directory / INDEX_NAME, json.dumps(index, indent=2) + "\n")

    def _copy_the_rest(self) -> None:
        for key, target in self._targets.items():
            if key not in self._written:
                if self._source.entries[key].shape != target.shape:
                    raise OutputError(f"{key!r} was to become smaller and was not written")
                self.write(key, self._source.read(key))
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def _close(self) -> None:
        for file in self._files.values():
            file.close()


def verify(directory: Path, source: Checkpoint, targets: dict[str, Target]) -> None:
    """Opens what was written with the safetensors library and checks it against what was meant.

    Raises:
        OutputError: something is missing, of another shape or dtype, or not finite.
    """
    for shard in {source.entries[key].shard for key in targets}:
        path = directory / shard
        meant = {target.key: key for key, target in targets.items() if source.entries[key].shard == shard}
        try:
            with safe_open(path, framework="pt") as file:
                if set(file.keys()) != set(meant):
                    raise OutputError(f"{path} does not have the tensors that were meant; was the disk full?")
                for new, key in meant.items():
                    tensor = file.get_tensor(new)
                    if tuple(tensor.shape) != targets[key].shape or tensor.dtype != source.dtype(key):
                        raise OutputError(f"{path}: {new!r} is not {source.dtype(key)} {targets[key].shape}")
                    if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
                        raise OutputError(f"{path}: {new!r} has NaN or infinite values")
        except (OSError, SafetensorError) as error:
            raise OutputError(f"{path} cannot be read back: {error}") from error
