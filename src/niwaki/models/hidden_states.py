"""Token sequences on their way through a model: in memory as far as a budget allows, the rest in a temporary file."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from niwaki.files import output_errors

#: What a block is called with: (positional, by name).
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class SpillFile:
    """A temporary file for tensors that do not fit in memory.

    Args:
        directory: Where the file is made; by default the system's temporary directory.

    Attributes:
        size: Bytes reserved in it.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.size = 0
        self._directory = directory
        self._file: BinaryIO | None = None

    def reserve(self, size: int) -> int:
        """Where in the file ``size`` bytes may go."""
        start, self.size = self.size, self.size + size
        return start

    def write(self, start: int, tensor: Tensor) -> None:
        """Writes ``tensor`` at byte ``start``."""
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
        """The tensor at byte ``start``, with the shape and dtype of ``like``, which is on the meta device."""
        assert self._file is not None
        data = bytearray(like.numel() * like.element_size())
        view = memoryview(data)
        with self._errors():
            self._file.seek(start)
            done = 0
            while done < len(data):
                done += self._file.readinto(view[done:])  # type: ignore[attr-defined]
        return torch.frombuffer(data, dtype=like.dtype).view(like.shape)

    def close(self) -> None:
        """Frees it."""
        if self._file is not None:
            self._file.close()

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        directory = self._directory or Path(tempfile.gettempdir())
        return output_errors(directory, "hidden states go there; give more --memory, or another place as TMPDIR")


class MemoryBudget:
    """Bytes of memory that hidden states may take, and the file that they go to beyond that.

    Args:
        size: The bytes; None for no limit.
        directory: See :class:`SpillFile`.
    """

    def __init__(self, size: int | None = None, directory: Path | None = None) -> None:
        self._left = size
        self._directory = directory
        self.file = SpillFile(directory)

    @property
    def limited(self) -> bool:
        """Whether there is a limit."""
        return self._left is not None

    def limit(self, size: int) -> None:
        """From now on ``size`` bytes are left."""
        self._left = size

    def take(self, size: int) -> bool:
        """Takes ``size`` bytes if as many are left; whether they were."""
        if self._left is None:
            return True
        if size > self._left:
            return False
        self._left -= size
        return True

    @contextlib.contextmanager
    def lent(self) -> Iterator[MemoryBudget]:
        """A budget of what is left, with a file of its own that is freed at the end; this one stays as it is."""
        with contextlib.closing(MemoryBudget(self._left, self._directory)) as budget:
            yield budget

    def close(self) -> None:
        """Frees the file."""
        self.file.close()


class _Spilled(NamedTuple):
    """Where a tensor is in the file."""

    start: int
    like: Tensor  # on the meta device
    device: torch.device


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
        return self._budget.file.read(start, like).to(item.device)

    def __setitem__(self, i: int, tensor: Tensor) -> None:
        """Replaces a tensor by one of the same shape and dtype."""
        item = self._items[i]
        if isinstance(item, Tensor):
            self._items[i] = tensor
        else:
            self._budget.file.write(item.start, tensor)

    def append(self, tensor: Tensor) -> None:
        """Adds ``tensor``, in memory if it fits."""
        size, file = tensor.numel() * tensor.element_size(), self._budget.file
        if self._budget.take(size):
            self._items.append(tensor)
        else:
            item = _Spilled(file.reserve(size), tensor.to("meta"), tensor.device)
            self._items.append(item)
            file.write(item.start, tensor)


@dataclass
class HiddenStates:
    """Token sequences between two blocks.

    Attributes:
        tokens: Batches of (samples, length) int64.
        hidden: For each batch (samples, length, width), the inputs of the next block.
        arguments: For each block and number of samples in a batch, its other arguments.
    """

    tokens: list[Tensor]
    hidden: SpillList
    arguments: dict[tuple[int, int], Arguments] = field(default_factory=dict)

    def minibatches(self, tokens: int) -> list[tuple[int, slice]]:
        """Pieces of batches with ``tokens`` tokens, at least one sample: the index of the batch, and which samples."""
        pieces = []
        for i, batch in enumerate(self.tokens):
            size = max(1, tokens // batch.shape[1])
            pieces += [(i, slice(start, min(start + size, len(batch)))) for start in range(0, len(batch), size)]
        return pieces
