"""The experts of a decoder block: which of them each token goes to, with what weight, and what each one answers."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from niwaki.errors import UnsupportedModelError, one_line, raised_as
from niwaki.models.block import DecoderBlock
from niwaki.models.gram_capture import Products
from niwaki.models.hidden_states import HiddenStates
from niwaki.models.structure import choice

#: What modules of experts call the matrices whose outputs are the experts' own.
DOWN = "down_proj"


@dataclass
class Routed:
    """Tokens as they reach the experts."""

    X: Tensor  # (tokens, in) inputs of the experts
    experts: Tensor  # (tokens, chosen) of each token
    gates: Tensor  # (tokens, chosen) their weights in the sum
    Y: Tensor  # (tokens, out) the sum of their outputs

    def to(self, expert: int) -> tuple[Tensor, Tensor]:
        """(tokens that go to ``expert``, their gates (tokens, 1) float32)."""
        tokens, place = torch.where(self.experts == expert)
        return tokens, self.gates[tokens, place, None].float()


def find_experts(block: nn.Module) -> str | None:
    """The path of a block's experts, where there are some that niwaki can run one at a time."""
    paths = [
        path
        for path, module in block.named_modules()
        if any(name == DOWN and value.ndim == 3 for name, value in module.named_parameters(recurse=False))
        and len(inspect.signature(module.forward).parameters) >= 3
    ]
    return paths[0] if len(paths) == 1 else None


class Mixture:
    """The experts at ``path`` of ``block``, whose weights are in memory."""

    def __init__(self, block: DecoderBlock, path: str) -> None:
        self.block, self.path = block, path
        self.experts = block.module.get_submodule(path)
        #: The matrices whose outputs are the experts' own, by expert.
        self.down = {m.expert: m for m in block.matrices if m.parameter == f"{path}.{DOWN}" and m.expert is not None}

    @torch.no_grad()
    def observe(self, states: HiddenStates, done: Callable[[], None]) -> tuple[list[tuple[Any, ...]], Routed]:
        """(for each batch of ``states`` what the module receives that has the experts and their router, all tokens).

        ``states`` stay as they are. ``done`` is called after each batch.
        """
        calls: list[tuple[Any, ...]] = []
        arguments: list[tuple[Any, ...]] = []
        parent = self.block.module.get_submodule(self.path.rpartition(".")[0])
        hooks = [
            parent.register_forward_pre_hook(lambda _, given: arguments.append(given)),
            self.experts.register_forward_hook(lambda _, given, answer: calls.append((*given, answer))),
        ]
        try:
            for i, hidden in enumerate(states.hidden):
                self.block.forward(hidden, states, i)
                done()
        finally:
            for hook in hooks:
                hook.remove()
        if not len(arguments) == len(calls) == len(states.hidden) or not all(arguments) or len(calls[0]) != 4:
            raise self._unknown()
        X, experts, gates, Y = map(torch.cat, zip(*calls, strict=True))
        if experts.is_floating_point() or experts.ndim != 2 or experts.shape != gates.shape or len(X) != len(experts):
            raise self._unknown()
        return arguments, Routed(X, experts, gates, Y)

    def answer(self, expert: int, X: Tensor) -> tuple[Tensor, Tensor]:
        """(inputs of ``expert``'s last matrix, its outputs) float32 for inputs ``X`` (tokens, in)."""
        seen: list[Tensor] = []

        def on_product(_: str, index: int | None, rows: Tensor, __: bool) -> None:
            if index == expert:
                seen.append(rows)

        only = torch.full((len(X), 1), expert, device=X.device)
        parameters = {self.down[expert].parameter: self.experts.get_parameter(DOWN)}
        with torch.no_grad(), Products([self.down[expert]], parameters, on_product):
            outputs = self.experts(X, only, torch.ones(len(X), 1, dtype=X.dtype, device=X.device))
        if len(seen) != 1 or len(seen[0]) != len(X):
            raise self._unknown()
        return seen[0].float(), outputs.float()

    def _unknown(self) -> UnsupportedModelError:
        return UnsupportedModelError(f"the experts of block {self.block.index} run in a way that is unknown here")


class Router:
    """What chooses between the experts at ``path`` of ``block``, whose other weights are not needed."""

    def __init__(self, block: nn.Module, path: str) -> None:
        self._parent = block.get_submodule(path.rpartition(".")[0])
        self._experts = block.get_submodule(path)

    @torch.no_grad()
    def route(self, arguments: list[tuple[Any, ...]]) -> tuple[Tensor, Tensor]:
        """(experts, gates) (tokens, chosen) for what the module receives that has the experts and this router."""
        calls: list[tuple[Tensor, Tensor]] = []

        def stop(X: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
            calls.append((experts, gates))
            return torch.zeros_like(X)

        refusals, what = (TypeError, ValueError, AttributeError, RuntimeError), "a router cannot be run alone"
        with raised_as(UnsupportedModelError, what, refusals, reason=one_line), self._alone(stop):
            for given in arguments:
                self._parent(*given)
        experts, gates = map(torch.cat, zip(*calls, strict=True))
        return experts, gates

    @contextlib.contextmanager
    def _alone(self, stop: Any) -> Iterator[None]:
        """The module without its experts, those that are shared among them."""
        others = [
            part for name, part in self._parent.named_children() if not choice(name) and part is not self._experts
        ]
        try:
            self._experts.forward = stop
            for part in others:
                part.forward = lambda X, *_, **__: torch.zeros_like(X)
            yield
        finally:
            for part in (self._experts, *others):
                part.__dict__.pop("forward", None)
