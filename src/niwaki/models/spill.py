"""Tensors in memory as far as a budget allows, the rest in a temporary file."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from niwaki.checkpoints.tensors import raw_bytes
from niwaki.files import output_errors


class _Spilled(NamedTuple):
    """Where a tensor is in the file."""

    start: int
    like: Tensor  # on the meta device
    device: torch.device


class MemoryBudget:
    """Bytes of memory that hidden states may take, None for no limit, and the temporary file for what exceeds them."""

    def __init__(self, size: int | None = None) -> None:
        self.left = size  # that may still be taken
        self.spilled = 0  # bytes in the file
        self._file: BinaryIO | None = None

    def take(self, size: int) -> bool:
        """Takes ``size`` bytes if that many are left; whether they were."""
        if self.left is not None:
            if size > self.left:
                return False
            self.left -= size
        return True

    def lent(self) -> contextlib.closing["MemoryBudget"]:
        """A budget of what is left, with a file of its own that is freed at the end; this one stays as it is."""
        return contextlib.closing(MemoryBudget(self.left))

    def spill(self, tensor: Tensor) -> _Spilled:
        """Adds ``tensor`` to the file."""
        place = _Spilled(self.spilled, tensor.to("meta"), tensor.device)
        self.spilled += tensor.nbytes
        self.write(place.start, tensor)
        return place

    def write(self, start: int, tensor: Tensor) -> None:
        """Writes ``tensor`` at byte ``start`` of the file."""
        raw = raw_bytes(tensor)
        with _file_errors():
            if self._file is None:
                # Without a name from the start, so that nothing is left of it however the process ends.
                self._file = tempfile.TemporaryFile()  # noqa: SIM115
            self._file.seek(start)
            self._file.write(raw)
            self._file.flush()  # so that a full disk shows here

    def read(self, start: int, like: Tensor) -> Tensor:
        """The tensor at byte ``start`` of the file, with the shape and dtype of ``like``."""
        assert self._file is not None
        data = bytearray(like.nbytes)
        with _file_errors():
            self._file.seek(start)
            self._file.readinto(data)  # type: ignore[attr-defined]
        return torch.frombuffer(data, dtype=like.dtype).view(like.shape)

    def close(self) -> None:
        """Frees the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # of a full disk, for what nobody reads any more
                self._file.close()


def _file_errors() -> contextlib.AbstractContextManager[None]:
    directory = Path(tempfile.gettempdir())
    return output_errors(directory, "hidden states go there; give more --max-memory, or another place as TMPDIR")


class SpillList:
    """A list of tensors, those beyond ``budget`` in its file."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._items: list[Tensor | _Spilled] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> Tensor:
        item = self._items[i]
        return item if isinstance(item, Tensor) else self.samples(i, slice(None))

    def samples(self, i: int, chosen: slice) -> Tensor:
        """``self[i][chosen]``, of which no more is read."""
        item = self._items[i]
        if isinstance(item, Tensor):
            return item[chosen]
        like = item.like[chosen]
        start = item.start + int(like.storage_offset()) * like.element_size()
        return self._budget.read(start, like).to(item.device)

    def __setitem__(self, i: int, tensor: Tensor) -> None:
        """Replaces a tensor, whose space in the file is used again where it is enough."""
        item = self._items[i]
        if isinstance(item, Tensor):
            self._items[i] = tensor
        elif tensor.nbytes > item.like.nbytes:
            self._items[i] = self._budget.spill(tensor)
        else:
            self._budget.write(item.start, tensor)
            self._items[i] = _Spilled(item.start, tensor.to("meta"), tensor.device)

    def append(self, tensor: Tensor) -> None:
        """Adds ``tensor``, in memory if it fits."""
        self._items.append(tensor if self._budget.take(tensor.nbytes) else self._budget.spill(tensor))

    def put(self, i: int, tensor: Tensor) -> None:
        """Replaces tensor ``i``, or adds it as the next one."""
        if i < len(self):
            self[i] = tensor
        else:
            self.append(tensor)
