"""What decoder blocks receive, recorded from a model's own forward pass with other blocks in their place."""

from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from niwaki.errors import UnsupportedModelError
from niwaki.models.hidden_states import HiddenStates

#: By name, what the whole model receives for one sample: tokens, (1, length) int64, pixels, where images are.
Inputs = Mapping[str, Tensor]


class NotShared(UserDict[str, Any]):
    """What blocks hand keys and values on in; UnsupportedModelError where one does."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise UnsupportedModelError(
            "a block uses keys and values of an earlier one; models like this one are not supported"
        )


class BlocksEndError(Exception):
    """The way out of a forward pass after the last block."""


def not_shared(named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a block by name, without what blocks would hand on."""
    return {name: NotShared() if isinstance(value, UserDict) else value for name, value in named.items()}


def same(a: Any, b: Any) -> bool:
    """Whether two arguments of a block are equal."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict | UserDict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and (a is b or (isinstance(a, bool | int | float | str | None) and a == b))


def recorder(
    states: HiddenStates, batch: int, last: int, answer: Callable[[Tensor], Any]
) -> Callable[[int], Callable[..., Any]]:
    """Blocks, by number, that record what a ``batch`` gives them in ``states``, which have its arguments apart.

    Their outputs are zeros, so that what the next one receives is what the model adds between the two. The ``last`` one
    ends the forward pass by BlocksEndError.
    """

    def make(index: int) -> Callable[..., Any]:
        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            states.arguments[index, batch] = args, not_shared(kwargs)
            if index == 0:
                states.hidden.append(hidden)
            elif hidden.any():
                states.add(index - 1, batch, hidden)
            if index == last:
                raise BlocksEndError
            return answer(torch.zeros_like(hidden))

        return forward

    return make
