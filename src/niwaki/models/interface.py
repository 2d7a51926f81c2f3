"""How blocks and the model around them work together, and what they receive: found and recorded by running it."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from niwaki.errors import UnsupportedModelError
from niwaki.models.hidden_states import ADDED, BEGUN, Call, HiddenStates, Place, replaced, same, samples_first

#: By name, what the whole model receives for one sample: tokens, (1, length) int64, pixels, where images are.
Inputs = Mapping[str, Tensor]

#: (samples, length) of what the model is tried with: two sizes that no other dimension of hidden states comes in.
_SHAPE = (3, 2)


@dataclass(frozen=True)
class Interface:
    """What blocks receive and answer with."""

    answers: int  # values of an answer that begins with hidden states; 0 where it is these alone
    streams: tuple[int, ...]  # sizes of hidden states in the dimensions before the samples: (4,) in Gemma 3n
    per_token: list[frozenset[Place]]  # which arguments of each block depend on the tokens

    @property
    def leading(self) -> int:
        """The number of these dimensions."""
        return len(self.streams)

    def answer(self, hidden: Tensor) -> Any:
        """What a block answers with whose outputs are ``hidden``."""
        return _answer(hidden, self.answers)


def find_interface(decoder: nn.Module, blocks: Sequence[nn.Module], device: torch.device, vocabulary: int) -> Interface:
    """The interface of ``blocks``, of which the first has its weights, as has ``decoder`` outside of them."""
    one = torch.zeros(1, 1, dtype=torch.int64, device=device)
    answers = count_answers(partial(decoder, input_ids=one, use_cache=False), blocks)
    calls: list[list[Call]] = [[] for _ in blocks]
    seen: list[Tensor] = []  # of the present text, what the blocks receive: the first one's inputs, all of them

    def forward(index: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls[index].append((args, kwargs))
        if seen and not torch.equal(hidden, seen[0]):
            raise UnsupportedModelError(f"it changes what block {index} receives of the block before")
        seen.append(hidden)
        return _answer(hidden, answers)

    some = torch.arange(_SHAPE[0] * _SHAPE[1], device=device).view(_SHAPE)
    with replaced_blocks(blocks, forward):
        for first in (vocabulary // 2, vocabulary // 4):
            seen.clear()
            decoder(input_ids=(some + first) % vocabulary, use_cache=False)
    if again := [str(index) for index, both in enumerate(calls) if len(both) > 2]:
        raise UnsupportedModelError(f"it runs blocks more than once ({', '.join(again)})")
    shape = seen[0].shape
    # Some models put more before the tokens, such as prompts.
    usual = 0 if shape[:1] == _SHAPE[:1] else None
    leading = next((i for i in range(len(shape)) if shape[i : i + 2] == _SHAPE), usual)
    if leading is None:
        raise UnsupportedModelError(
            f"hidden states of its blocks are {tuple(shape)} for {_SHAPE[0]} texts of {_SHAPE[1]}"
        )
    return Interface(answers, shape[:leading], [_per_token(*both) if len(both) == 2 else frozenset() for both in calls])


def count_answers(run: Callable[[], object], blocks: Sequence[nn.Module], constant: bool = False) -> int:
    """How many values the first block answers with where a model is ``run``; 0 where it is not a tuple.

    UnsupportedModelError where the next one receives more of them than hidden states, unless these are ``constant``.
    """
    found: list[int] = []
    beside: list[Tensor] = []

    def check(_: Place, value: Any) -> None:
        if any(value is each for each in beside):
            raise UnsupportedModelError("its blocks hand on more than hidden states in what they answer with")

    def forward(index: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if index:
            replaced((args, kwargs), check)
            return _answer(hidden, found[0])
        answer = type(blocks[0]).forward(blocks[0], hidden, *args, **kwargs)
        found.append(len(answer) if isinstance(answer, tuple | list) else 0)
        if found[0] and not constant:
            # Choices are whole numbers: who needs them and has none says so.
            beside.extend(value for value in answer[1:] if isinstance(value, Tensor) and value.is_floating_point())
        return answer

    with replaced_blocks(blocks, forward):
        run()
    return found[0]


def _answer(hidden: Tensor, answers: int) -> Any:
    return (hidden, *[None] * (answers - 1)) if answers else hidden


def _per_token(one: Call, other: Call) -> frozenset[Place]:
    """Where tensors with an entry for each sample differ between two texts."""
    values: dict[Place, Any] = {}
    found: set[Place] = set()

    def compare(place: Place, value: Any) -> None:
        if isinstance(value, Tensor) and value.shape[:1] == _SHAPE[:1] and not same(values.get(place), value):
            found.add(place)

    replaced(one, values.__setitem__)
    replaced(other, compare)
    return frozenset(found)


@contextlib.contextmanager
def replaced_blocks(blocks: Sequence[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """``blocks`` with ``forward(index, hidden, ...)`` as their forward passes; attributes, which parents read, stay."""
    try:
        for index, block in enumerate(blocks):
            block.forward = partial(forward, index)
        yield
    finally:
        for block in blocks:
            block.__dict__.pop("forward", None)


def check_towers(model: nn.Module, inside: tuple[str, ...], directory: Path) -> None:
    """Raises UnsupportedModelError where something has no weights now whose name does not begin like blocks."""
    for name, value in model.named_parameters():
        if value.is_meta and not name.startswith(inside):
            raise UnsupportedModelError(
                f"{directory} has {name!r} in its files in a way that niwaki does not follow; calibrate on a text"
            )


class BlocksEndError(Exception):
    """The way out of a forward pass after the last block."""


def record_text(
    run: Callable[[Tensor], Any],
    blocks: Sequence[nn.Module],
    interface: Interface,
    states: HiddenStates,
    tokens_per_minibatch: int | None,
) -> None:
    """Records in ``states`` what ``blocks`` receive where a model is ``run`` on each batch of their tokens.

    With ``tokens_per_minibatch`` also for the numbers of samples in :meth:`HiddenStates.minibatches`.
    """
    seen: list[Tensor] = []

    def forward(keep: bool, index: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        samples = hidden.shape[interface.leading]
        states.arguments.record(index, samples, (args, kwargs), interface.per_token[index], keep)
        seen.append(hidden)
        return interface.answer(hidden)

    with replaced_blocks(blocks, partial(forward, True)):
        for batch in states.tokens:
            run(batch)
            states.hidden.append(samples_first(seen[0], interface.leading))
            states.arguments.end_batch()
            seen.clear()
    pieces = states.minibatches(tokens_per_minibatch) if tokens_per_minibatch else []
    with replaced_blocks(blocks, partial(forward, False)):
        for samples in {rows.stop - rows.start for _, rows in pieces}:
            run(states.tokens[0][:samples])


def record_each(
    runs: Iterable[tuple[Tensor, Callable[[], object]]],
    blocks: Sequence[nn.Module],
    states: HiddenStates,
    answer: Callable[[int, Tensor, Call], Any],
) -> None:
    """Records in ``states`` what ``blocks`` receive in each of ``runs``, the tokens of a batch and its forward pass.

    Blocks ``answer(index, hidden states, other arguments)`` meanwhile, with hidden states of zeros, so that what the
    next one receives is what the model adds between the two. Of an encoder with a decoder ``states`` have the crossing.
    """
    crossing, arguments, last = states.crossing, states.arguments, len(blocks) - 1

    def forward(index: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        arguments.record_own(index, (args, kwargs), crossing.places[index] if crossing else ())
        if crossing and index in (0, crossing.first):
            _check_shape(hidden, states.tokens[-1].shape[1] if index else None)
        received = samples_first(hidden, states.leading)
        if index == 0:
            states.hidden.append(received)
        elif crossing and index == crossing.first:
            arguments.keep(index, BEGUN, received)
        elif hidden.any():
            arguments.keep(index - 1, ADDED, received)
        if index == last:
            raise BlocksEndError
        return answer(index, hidden, (args, kwargs))

    with replaced_blocks(blocks, forward):
        for tokens, run in runs:
            states.tokens.append(tokens)
            with contextlib.suppress(BlocksEndError):
                run()
            arguments.end_batch()


def _check_shape(hidden: Tensor, tokens: int | None) -> None:
    """UnsupportedModelError unless ``hidden`` is (1, tokens, width), of any number of tokens where that is None."""
    if hidden.ndim != 3 or hidden.shape[0] != 1 or tokens not in (None, hidden.shape[1]):
        of = "the sources" if tokens is None else f"{tokens} tokens"
        raise UnsupportedModelError(f"hidden states of its blocks are {tuple(hidden.shape)} for {of} of one pair")
