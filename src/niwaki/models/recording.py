"""What decoder blocks receive, recorded from a model's own forward pass with other blocks in their place."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from niwaki.errors import UnsupportedModelError
from niwaki.models.hidden_states import HiddenStates, samples_first
from niwaki.models.interface import Interface, replaced_blocks

#: By name, what the whole model receives for one sample: tokens, (1, length) int64, pixels, where images are.
Inputs = Mapping[str, Tensor]


def check_towers(model: nn.Module, blocks: str, directory: Path) -> None:
    """Raises UnsupportedModelError where something outside the ``blocks``, given by their path, has no weights now."""
    for name, value in model.named_parameters():
        if value.is_meta and not name.startswith(f"{blocks}."):
            raise UnsupportedModelError(
                f"{directory} has {name!r} in its files in a way that niwaki does not follow; calibrate on a text"
            )


class _BlocksEndError(Exception):
    """The way out of a forward pass after the last block."""


def record_text(
    run: Callable[[Tensor], Any],
    blocks: nn.ModuleList,
    interface: Interface,
    states: HiddenStates,
    tokens_per_minibatch: int | None,
) -> None:
    """Records in ``states`` what ``blocks`` receive where a model is ``run`` on each batch of their tokens.

    With ``tokens_per_minibatch`` also for the numbers of samples in :meth:`HiddenStates.minibatches`.
    """
    seen: list[Tensor] = []

    def recorded(keep: bool, index: int) -> Callable[..., Any]:
        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            samples = hidden.shape[interface.leading]
            states.arguments.record(index, samples, (args, kwargs), interface.per_token[index], keep)
            seen.append(hidden)
            return interface.answer(hidden)

        return forward

    with replaced_blocks(blocks, partial(recorded, True)):
        for batch in states.tokens:
            run(batch)
            states.hidden.append(samples_first(seen[0], interface.leading))
            states.arguments.end_batch()
            seen.clear()
    pieces = states.minibatches(tokens_per_minibatch) if tokens_per_minibatch else []
    with replaced_blocks(blocks, partial(recorded, False)):
        for samples in {rows.stop - rows.start for _, rows in pieces}:
            run(states.tokens[0][:samples])


def record_each(
    run: Callable[[Inputs], Any],
    blocks: nn.ModuleList,
    interface: Interface,
    states: HiddenStates,
    samples: Iterable[Inputs],
) -> None:
    """Records in ``states`` what ``blocks`` receive where a model is ``run`` on each of ``samples``, a batch each.

    Outputs of blocks are zeros meanwhile, so that what the next one receives is what the model adds between the two.
    """
    last = len(blocks) - 1

    def recorded(index: int) -> Callable[..., Any]:
        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            states.arguments.record_own(index, (args, kwargs))
            if index == 0:
                states.hidden.append(samples_first(hidden, interface.leading))
            elif hidden.any():
                states.arguments.add(index - 1, samples_first(hidden, interface.leading))
            if index == last:
                raise _BlocksEndError
            return interface.answer(torch.zeros_like(hidden))

        return forward

    with replaced_blocks(blocks, recorded):
        for inputs in samples:
            states.tokens.append(inputs["input_ids"])
            with contextlib.suppress(_BlocksEndError):
                run(inputs)
            states.arguments.end_batch()
