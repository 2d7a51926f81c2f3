"""New safetensors files, with one tensor in memory at a time, and the index of several."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from niwaki.checkpoints.reading import INDEX_NAME
from niwaki.checkpoints.tensors import NAMES, framed, raw_bytes
from niwaki.files import output_errors, replace_file, reserve

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
