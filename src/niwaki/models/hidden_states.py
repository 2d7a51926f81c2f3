"""Token sequences on their way through a model: their hidden states, and what blocks receive besides these.

Much of that is the same for every text of a shape: rotary embeddings, masks. Some is made of the tokens before the
first block, such as an embedding of its own for each block (Gemma 3n), and stays as it is whatever is pruned; of a
batch with images that can be anything, such as which tokens see each other. The rest blocks hand on to later ones, such
as keys and values, and it changes with them.
"""

import contextlib
import tempfile
from collections import UserDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor, nn

from niwaki.checkpoints.tensors import raw_bytes
from niwaki.errors import UnsupportedModelError
from niwaki.files import output_errors
from niwaki.models.pairs import parted

# Tensors in memory as far as a budget allows, the rest in a temporary file.


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


#: The arguments of a block: positional, by name.
Call = tuple[tuple[Any, ...], dict[str, Any]]
#: Where a value is among them: (1, "per_layer_input").
Place = tuple[str | int, ...]
#: And of what the model adds to a block's outputs, and what a decoder begins with, which are not among them.
ADDED: Place = ("added",)
BEGUN: Place = ("begun",)
#: By which name a decoder's first block hands on what it and the others attend to.
ENCODED = "encoded"


@dataclass(frozen=True)
class PerToken:
    """Stands for a tensor (samples, ..) that depends on the tokens, or any of a batch with its own arguments."""


@dataclass(frozen=True)
class HandedOn:
    """Stands for the dictionary in which blocks hand on."""


@dataclass(frozen=True)
class OfEncoder:
    """Stands for what a decoder attends to of its encoder: of so many positions, which it may have padded."""

    length: int


@dataclass(frozen=True)
class Crossing:
    """What is between an encoder and its decoder."""

    first: int  # the number of the decoder's first block
    tail: tuple[nn.Module, ...]  # the encoder's modules after its last block, with their weights
    places: tuple[frozenset[Place], ...]  # where each block receives what comes out of them

    def encode(self, hidden: Tensor) -> Tensor:
        """What the decoder attends to, of the outputs of the last encoder block."""
        for module in self.tail:
            hidden = module(hidden)
        return hidden


class Handed(UserDict[str | int, tuple[Tensor, ...]]):
    """What blocks hand on, (samples, ..) each, by the names that they give it; UnsupportedModelError for one twice."""

    def __setitem__(self, name: str | int, values: tuple[Tensor, ...]) -> None:
        if name in self.data:
            raise UnsupportedModelError(
                f"blocks hand on {name!r} more than once; models like this one are not supported"
            )
        super().__setitem__(name, values)


class BlockArguments:
    """What blocks receive besides the hidden states of some token sequences, in batches.

    Tensors that belong to the tokens may take ``budget``.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._calls: dict[tuple[int, int], Call] = {}  # by block and number of samples
        self._own: dict[tuple[int, int], Call] = {}  # by block and batch, where that has its own
        self._kept = SpillList(budget)  # tensors that belong to the tokens
        self._where: dict[tuple[int, int, Place], int] = {}  # by block and batch, where they are in it
        self._handed: dict[str | int, list[SpillList]] = {}  # with an item for each batch
        self._makers: dict[str | int, int] = {}  # the blocks that hand on
        self._batch = 0  # the present one
        self._present: list[tuple[Tensor, int]] = []  # what is kept of it, and where

    def record(self, block: int, samples: int, call: Call, per_token: Collection[Place], keep: bool) -> None:
        """Notes that ``block`` receives ``call`` for so many samples; what is ``per_token`` to be kept, or not.

        The batches to keep come in order, with :meth:`end_batch` after each. UnsupportedModelError where another text
        of the same shape had other arguments.
        """

        def stand_in(place: Place, value: Any) -> Any:
            if isinstance(value, UserDict):
                return HandedOn()
            if place not in per_token or not isinstance(value, Tensor) or value.shape[:1] != (samples,):
                return value
            if keep:
                self.keep(block, place, value)
            return PerToken()

        call = replaced(call, stand_in)
        if not same(self._calls.setdefault((block, samples), call), call):
            raise UnsupportedModelError(
                f"block {block} receives something about the tokens that is not in its hidden states; models like "
                "this one are not supported"
            )

    def record_own(self, block: int, call: Call, encoded: Collection[Place] = ()) -> None:
        """Notes that ``block`` receives ``call`` for the present batch, which has its own and is always run whole.

        At the places ``encoded`` it receives what is handed on by this name.
        """

        def stand_in(place: Place, value: Any) -> Any:
            if place in encoded:
                return OfEncoder(value.shape[1])
            if isinstance(value, Tensor) and value.numel() > 1:
                self.keep(block, place, value)
                return PerToken()
            return HandedOn() if isinstance(value, UserDict) else value

        self._own[block, self._batch] = replaced(call, stand_in)

    def keep(self, block: int, place: Place, value: Tensor) -> None:
        """Keeps a ``value`` of the present batch at a ``place`` of ``block``, which may be :data:`ADDED` or BEGUN."""
        kept = next((kept for tensor, kept in self._present if tensor is value), None)
        if kept is None:  # what several blocks receive is kept once
            kept = len(self._kept)
            self._kept.append(value.contiguous())  # and not a view of what all blocks receive
            self._present.append((value, kept))
        self._where[block, self._batch, place] = kept

    def end_batch(self) -> None:
        """Ends the present batch: what is recorded after this belongs to the next one."""
        self._batch += 1
        self._present.clear()

    def has(self, block: int, samples: int, i: int) -> bool:
        """Whether ``block`` has been called for batch ``i``, or with so many samples: some run with images only."""
        return (block, i) in self._own or (block, samples) in self._calls

    def call(self, block: int, samples: int, i: int, rows: slice, handed: Handed) -> Call:
        """The arguments of ``block`` for ``rows`` of batch ``i``, which are so many samples."""
        own = self._own.get((block, i))
        chosen = rows if own is None else slice(None)

        def value(place: Place, stand_in: Any) -> Any:
            if isinstance(stand_in, PerToken):
                return self._kept.samples(self._where[block, i, place], chosen)
            if isinstance(stand_in, OfEncoder):
                return handed[ENCODED][0][:, : stand_in.length]
            return handed if isinstance(stand_in, HandedOn) else stand_in

        call: Call = replaced(own or self._calls[block, samples], value)
        return call

    def kept(self, block: int, i: int, place: Place) -> Tensor | None:
        """What :meth:`keep` was given of ``block`` and a ``place`` for batch ``i``; None where that is nothing."""
        kept = self._where.get((block, i, place))
        return None if kept is None else self._kept[kept]

    def share_calls(self, others: "BlockArguments") -> None:
        """Adds what is known of other numbers of samples from ``others``, of sequences of the same length."""
        self._calls = {**others._calls, **self._calls}

    def branch(self) -> "BlockArguments":
        """A copy for the same token sequences, to which blocks can hand on other values from now on."""
        copy = BlockArguments(self._budget)
        copy._calls, copy._own, copy._kept, copy._where = self._calls, self._own, self._kept, self._where
        copy._handed, copy._makers = dict(self._handed), dict(self._makers)
        return copy

    def adopt(self, others: "BlockArguments", block: int) -> None:
        """Has ``block``, which does not run here, hand on what it has handed on in ``others``."""
        names = [name for name, maker in others._makers.items() if maker == block]
        self._makers |= dict.fromkeys(names, block)
        self._handed |= {name: others._handed[name] for name in names}

    def handed(self, block: int, i: int, rows: slice = slice(None)) -> Handed:
        """What the blocks before ``block`` have handed on for ``rows`` of batch ``i``; a copy to add to."""
        earlier = {name: values for name, values in self._handed.items() if self._makers[name] < block}
        return Handed({name: tuple(v.samples(i, rows) for v in values) for name, values in earlier.items()})

    def hand_on(self, block: int, i: int, handed: Handed) -> None:
        """Keeps what ``block`` has added to ``handed`` for batch ``i``; batches come in order."""
        for name, values in handed.items():
            if self._makers.setdefault(name, block) == block:
                kept = self._handed.setdefault(name, [SpillList(self._budget) for _ in values])
                for one, value in zip(kept, values, strict=True):
                    one.put(i, value.contiguous())


@dataclass
class HiddenStates:
    """Token sequences between two blocks."""

    tokens: list[Tensor]  # batches of (samples, length) int64
    hidden: SpillList  # for each batch (samples, length, [streams,] width), the inputs of the next block
    #: What blocks receive besides these.
    arguments: BlockArguments = field(default_factory=lambda: BlockArguments(MemoryBudget()))
    leading: int = 0  # dimensions that blocks have before the samples, for streams
    #: Of an encoder with a decoder, whose batches are pairs, a row each: tokens are what goes into the decoder.
    crossing: Crossing | None = None
    rows: list[Tensor] = field(default_factory=list)

    def branch(self, hidden: SpillList) -> "HiddenStates":
        """A copy for the same token sequences with other hidden states, which go their own way from here on."""
        return HiddenStates(self.tokens, hidden, self.arguments.branch(), self.leading, self.crossing, self.rows)

    def labels(self, i: int) -> Tensor:
        """The tokens of batch ``i`` that are predicted, (samples, tokens)."""
        return parted(self.rows[i][0])[1][None, 1:] if self.rows else self.tokens[i][:, 1:]

    def steps(self, tokens: int) -> list[list[tuple[int, slice]]]:
        """The pieces of :meth:`minibatches`, each alone; pairs, a batch each, in groups of about so many tokens."""
        if not self.rows:
            return [[piece] for piece in self.minibatches(tokens)]
        groups: list[list[tuple[int, slice]]] = []
        left = 0
        for i, rows in self.minibatches(tokens):
            size = (rows.stop - rows.start) * self.tokens[i].shape[1]
            if size > left:
                groups.append([])
                left = tokens
            groups[-1].append((i, rows))
            left -= size
        return groups

    def minibatches(self, tokens: int) -> list[tuple[int, slice]]:
        """Pieces of batches with ``tokens`` tokens, at least one sample: the index of the batch, and which samples."""
        pieces = []
        for i, batch in enumerate(self.tokens):
            size = max(1, tokens // batch.shape[1])
            pieces += [(i, slice(start, min(start + size, len(batch)))) for start in range(0, len(batch), size)]
        return pieces


def samples_first(hidden: Tensor, leading: int) -> Tensor:
    """(samples, length, [streams,] width): what a block has with so many dimensions before the samples."""
    return hidden.movedim([*range(leading)], [*range(2, 2 + leading)]).contiguous() if leading else hidden


def streams_first(hidden: Tensor, leading: int) -> Tensor:
    """([streams,] samples, length, width): the inverse of :func:`samples_first`."""
    return hidden.movedim([*range(2, 2 + leading)], [*range(leading)]) if leading else hidden


def pieces(rows: int, *values: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Corresponding views of ``values`` (samples, length, ..), each of so many tokens: whole samples if possible."""
    samples = max(1, rows // values[0].shape[1])
    for some in zip(*(value.split(samples) for value in values), strict=True):
        yield from zip(*(value.split(rows, dim=1) for value in some), strict=True)


def replaced(value: Any, change: Callable[[Place, Any], Any], place: Place = ()) -> Any:
    """``value`` with ``change(its place, each)`` instead of each value in its tuples, lists and dictionaries."""
    if type(value) is dict:
        return {key: replaced(each, change, (*place, key)) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(replaced(each, change, (*place, i)) for i, each in enumerate(value))
    return change(place, value)


def same(a: Any, b: Any) -> bool:
    """Whether two arguments of a block are equal."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    simple = isinstance(a, bool | int | float | str | PerToken | HandedOn | OfEncoder | None)
    return type(a) is type(b) and (a is b or (simple and a == b))
