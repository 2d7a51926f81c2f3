"""From an encoder to its decoder: what makes of the last encoder block's outputs what decoder blocks attend to.

It is found by running the model on a sample: the modules that the outputs pass through, such as a last norm, and the
places among the arguments of decoder blocks where the result arrives. The first decoder block does this with its
inputs, and hands the result on to the others as blocks hand on anything, so all that is done a block at a time crosses
over without knowing of it, gradients included.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from niwaki.errors import UnsupportedModelError
from niwaki.models.hidden_states import Call, Crossing, HiddenStates, Place, replaced, same
from niwaki.models.interface import BlocksEndError, replaced_blocks
from niwaki.models.pairs import parted


def find_crossing(run: Callable[[], object], blocks: Sequence[nn.Module], first: int) -> Crossing:
    """That of a model of which ``run`` is the forward pass on one sample; ``first`` is its decoder's first block.

    All weights outside the blocks are there, and those of the first block of each of the two. UnsupportedModelError
    where more than a chain of modules is between the two, or decoder blocks receive anything else of the encoder.
    """
    one, tail, result = _traced(run, blocks, first, seed=0)
    other, _, _ = _traced(run, blocks, first, seed=1)
    places: list[frozenset[Place]] = []
    for index, both in enumerate(zip(one, other, strict=True)):
        values, others = map(_tensors, both)
        found = {place for place, value in values.items() if index >= first and _begins(result, value)}
        differing = [place for place in values.keys() - found if not same(others.get(place), values[place])]
        if differing or (index == first and not found):
            what = "more of the encoder than its outputs" if differing else "none of the encoder's outputs"
            raise UnsupportedModelError(f"its decoder blocks receive {what}; models like this one are not supported")
        places.append(frozenset(found))
    return Crossing(first, tuple(copy.deepcopy(module) for module in tail), tuple(places))


def _tensors(call: Call) -> dict[Place, Tensor]:
    """Those among the arguments of a block."""
    values: dict[Place, Any] = {}
    replaced(call, values.__setitem__)
    return {place: value for place, value in values.items() if isinstance(value, Tensor)}


def _begins(result: Tensor, value: Tensor) -> bool:
    """Whether the first positions of ``result`` are ``value``: an encoder may have padded its inputs."""
    return value.ndim == result.ndim and same(result[:, : value.shape[1]], value)


def _traced(
    run: Callable[[], object], blocks: Sequence[nn.Module], first: int, seed: int
) -> tuple[list[Any], list[nn.Module], Tensor]:
    """What each block receives, the modules behind the last encoder block, and what comes out of them.

    That block's outputs are random numbers.
    """
    calls: list[Any] = [None] * len(blocks)
    drawing = torch.Generator().manual_seed(seed)
    answers = Answers(blocks, first)
    tail: list[nn.Module] = []
    now: list[Tensor] = []

    def recorded(index: int) -> Callable[..., Any]:
        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            calls[index] = (args, kwargs)
            if index == len(blocks) - 1:
                raise BlocksEndError
            answer = answers.of(index, hidden, args, kwargs)
            if index == first - 1:
                made = torch.randn(hidden.shape, generator=drawing).to(hidden)
                now[:] = [made]
                return answers.like(made, answer)
            return answer

        return forward

    def follow(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        is_next = now and len(inputs) == 1 and isinstance(inputs[0], Tensor) and _is_same_memory(inputs[0], now[0])
        if is_next and isinstance(output, Tensor) and not [*module.children()] and calls[first] is None:
            tail.append(module)
            now[:] = [output]

    hook = register_module_forward_hook(follow)
    try:
        with replaced_blocks(blocks, recorded), contextlib.suppress(BlocksEndError):
            run()
    finally:
        hook.remove()
    return calls, tail, now[0]


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape


class Answers:
    """What blocks that do not run answer with: zeros, and what else the first block of their list answers with.

    That is what does not depend on its inputs, such as what T5 adds by the distance of two tokens.
    """

    def __init__(self, blocks: Sequence[nn.Module], first: int) -> None:
        self._blocks, self._starts = blocks, (0, first)
        self._others: Any = ()

    def of(self, index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """That of the block ``index`` for these arguments; blocks are asked in their order."""
        if index in self._starts:
            block = self._blocks[index]
            one, other = (
                type(block).forward(block, inputs, *args, **kwargs) for inputs in (hidden, torch.zeros_like(hidden))
            )
            self._others = one if not isinstance(one, tuple | list) else tuple(map(_constant, one, other))
        return self.like(torch.zeros_like(hidden), self._others)

    @staticmethod
    def like(hidden: Tensor, answer: Any) -> Any:
        """``answer`` with these hidden states."""
        return (hidden, *answer[1:]) if isinstance(answer, tuple | list) else hidden


def _constant(one: Any, other: Any) -> Any:
    return one if same(one, other) else None


def _check_shape(hidden: Tensor, tokens: int | None) -> None:
    """UnsupportedModelError unless ``hidden`` is (1, tokens, width), of any number of tokens where that is None."""
    if hidden.ndim != 3 or hidden.shape[0] != 1 or tokens not in (None, hidden.shape[1]):
        of = "the sources" if tokens is None else f"{tokens} tokens"
        raise UnsupportedModelError(f"hidden states of its blocks are {tuple(hidden.shape)} for {of} of one pair")


def record_pairs(
    runs: Iterator[tuple[Tensor, Callable[[], object]]],
    blocks: Sequence[nn.Module],
    crossing: Crossing,
    states: HiddenStates,
) -> None:
    """Records in ``states`` what ``blocks`` receive in each of ``runs``, forward passes of one pair each.

    Before each of them is its row, (1, length). The first blocks of encoder and decoder have their weights.
    """
    answers, last = Answers(blocks, crossing.first), len(blocks) - 1
    arguments = states.arguments

    def recorded(index: int) -> Callable[..., Any]:
        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            arguments.record_own(index, (args, kwargs), crossing.places[index])
            if index == 0:
                _check_shape(hidden, None)
                states.hidden.append(hidden)
            elif index == crossing.first:
                _check_shape(hidden, states.tokens[-1].shape[1])
                arguments.begin(index, hidden)
            elif hidden.any():
                arguments.add(index - 1, hidden)
            if index == last:
                raise BlocksEndError
            return answers.of(index, hidden, args, kwargs)

        return forward

    states.crossing = crossing
    with replaced_blocks(blocks, recorded):
        for row, run in runs:
            states.rows.append(row)
            states.tokens.append(parted(row[0])[1][None, :-1])
            with contextlib.suppress(BlocksEndError):
                run()
            arguments.end_batch()
