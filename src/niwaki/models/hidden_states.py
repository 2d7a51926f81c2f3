"""Token sequences on their way through a model, in memory as far as there is room and else in a file."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from niwaki.files import output_errors

#: What a block is called with: (positional, by name).
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class MemoryBudget:
    """Bytes of memory that hidden states may take, and where they go beyond that.

    Args:
        size: The bytes; None for any number.
        directory: Where the file is made that takes the rest; by default the system's temporary directory.
    """

    def __init__(self, size: int | None = None, directory: Path | None = None) -> None:
        self._left = size
        self._directory = directory
        self._file: BinaryIO | None = None
        self._end = 0

    @property
    def outside(self) -> int:
        """Bytes in the file."""
        return self._end

    @property
    def limited(self) -> bool:
        """Whether there is a limit."""
        return self._left is not None

    def limit(self, size: int) -> None:
        """From now on there is room for ``size`` bytes."""
        self._left = size

    def take(self, size: int) -> bool:
        """Whether there is room for ``size`` bytes more; they are taken then."""
        if self._left is None:
            return True
        if size > self._left:
            return False
        self._left -= size
        return True

    def reserve(self, size: int) -> int:
        """Where in the file ``size`` bytes may go."""
        start, self._end = self._end, self._end + size
        return start

    def write(self, start: int, tensor: Tensor) -> None:
        """Writes ``tensor`` there."""
        raw = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
        with self._errors():
            if self._file is None:
                # Without a name from the start, so that nothing is left of it however the process ends.
                self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115
            self._file.seek(start)
            done = 0
            while done < len(raw):  # without a buffer a large write may be done in part
                done += self._file.write(raw[done:].data)

    def read(self, start: int, like: Tensor) -> Tensor:
        """A tensor like ``like``, which is on the meta device, from there."""
        assert self._file is not None
        data = bytearray(like.numel() * like.element_size())
        view = memoryview(data)
        with self._errors():
            self._file.seek(start)
            done = 0
            while done < len(data):
                done += self._file.readinto(view[done:])  # type: ignore[attr-defined]
        return torch.frombuffer(data, dtype=like.dtype).view(like.shape)

    @contextlib.contextmanager
    def lent(self) -> Iterator[MemoryBudget]:
        """What is left of it, as a room of its own with a file of its own, which is given back at the end."""
        with contextlib.closing(MemoryBudget(self._left, self._directory)) as room:
            yield room

    def close(self) -> None:
        """Lets go of the file."""
        if self._file is not None:
            self._file.close()

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        where = self._directory or Path(tempfile.gettempdir())
        return output_errors(where, "hidden states go there; give more --memory, or another place as TMPDIR")


class SpillList:
    """A list of tensors of which some are in a file."""

    def __init__(self, room: MemoryBudget) -> None:
        self.room = room
        self._held: list[Tensor] = []  # on the meta device if in the file
        self._places: list[int | None] = []
        self._devices: list[torch.device] = []

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> Tensor:
        place = self._places[i]
        if place is None:
            return self._held[i]
        return self.room.read(place, self._held[i]).to(self._devices[i])

    def part(self, i: int, rows: slice) -> Tensor:
        """``self[i][rows]``, of which no more is read."""
        place, held = self._places[i], self._held[i][rows]
        if place is None:
            return held
        before = int(held.storage_offset()) * held.element_size()
        return self.room.read(place + before, held).to(self._devices[i])

    def __setitem__(self, i: int, tensor: Tensor) -> None:
        """Puts a tensor of the same shape and dtype in the place of another."""
        place = self._places[i]
        if place is None:
            self._held[i] = tensor
        else:
            self.room.write(place, tensor)

    def append(self, tensor: Tensor) -> None:
        """One more."""
        size = tensor.numel() * tensor.element_size()
        inside = self.room.take(size)
        place = None if inside else self.room.reserve(size)
        self._held.append(tensor if inside else tensor.to("meta"))
        self._places.append(place)
        self._devices.append(tensor.device)
        if place is not None:
            self.room.write(place, tensor)


@dataclass
class HiddenStates:
    """Token sequences between two blocks.

    Attributes:
        tokens: SpillList of (samples, length) int64.
        hidden: For each batch (samples, length, width), the inputs of the block that comes next.
        arguments: For each block and number of samples in a batch, what it is called with besides.
        inner: Where they were asked for, the outputs of each sub-block of the block before, like ``hidden``.
    """

    tokens: list[Tensor]
    hidden: SpillList
    arguments: dict[tuple[int, int], Arguments] = field(default_factory=dict)
    inner: list[SpillList] = field(default_factory=list)

    def parts(self, tokens: int) -> list[tuple[int, slice]]:
        """Pieces of batches with so many tokens, of one sample at least: the number of the batch, and which samples."""
        found = []
        for i, batch in enumerate(self.tokens):
            size = max(1, tokens // batch.shape[1])
            found += [(i, slice(start, min(start + size, len(batch)))) for start in range(0, len(batch), size)]
        return found

    def keep(self, i: int, outputs: list[Tensor]) -> None:
        """Puts ``outputs``, of the sub-blocks for batch ``i``, into ``inner``; batches come in order."""
        del self.inner[len(outputs) :]
        self.inner += [SpillList(self.hidden.room) for _ in outputs[len(self.inner) :]]
        for batches, output in zip(self.inner, outputs, strict=True):
            if i == len(batches):
                batches.append(output)
            else:
                batches[i] = output
