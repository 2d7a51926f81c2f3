"""One decoder block of a transformers model: its forward pass, its weights, its matrices' inputs."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from niwaki.choices import TF32
from niwaki.errors import NumericalError, UnsupportedModelError, named, one_line
from niwaki.layer.linalg import is_finite
from niwaki.models.gram_capture import InputGram, InputGrams
from niwaki.models.hidden_states import (
    ADDED,
    BEGUN,
    ENCODED,
    Handed,
    HiddenStates,
    MemoryBudget,
    Place,
    replaced,
    samples_first,
    streams_first,
)
from niwaki.models.layout import Layout, Matrix
from niwaki.models.processes import World


class _Beside(torch.autograd.Function):
    """A value as it is, which for gradients depends on another one, with gradients of 0.

    A decoder's first inputs, and embeddings of positions, depend on nothing that is computed, and gradients of what is
    made of them are asked for.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, other: Tensor) -> Tensor:
        ctx.like = other.to("meta"), other.device
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, Tensor]:
        like, device = ctx.like
        return None, torch.zeros_like(like, device=device)


def _beside(hidden: Tensor, _place: Place, value: Any) -> Any:
    """What matrices may be applied to without any gradient, such as embeddings of positions, beside ``hidden``."""
    is_constant = isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad
    if is_constant and value.shape[-1:] == hidden.shape[-1:]:
        return _Beside.apply(value, hidden)  # type: ignore[no-untyped-call]
    return value


@dataclass(eq=False)
class DecoderBlock:
    """One decoder block with its weights in memory; :mod:`niwaki.models.training` changes them by gradients."""

    index: int  # from 0
    module: nn.Module
    matrices: list[Matrix]  # what can be pruned in it
    shared: list[Matrix]  # what it computes with that is an earlier block's to prune
    path: str  # where it is in the model, with a dot at the end
    layout: Layout  # has the original weights
    budget: MemoryBudget  # if it is limited, weights that can be read again are not kept
    device: torch.device
    dtype: torch.dtype  # what it runs in
    released: set[str] = field(default_factory=set)  # paths of parameters whose weights are missing

    def forward(
        self, hidden: Tensor, states: HiddenStates, i: int, rows: slice = slice(None), handed: Handed | None = None
    ) -> Tensor:
        """The outputs for ``hidden``, which are ``rows`` of batch ``i`` of ``states``, by default all.

        They are the inputs where text does not run the block. ``handed`` is by default what earlier blocks have handed
        on to ``states``; what this one hands on is added to it.
        """
        arguments, samples = states.arguments, hidden.shape[0]
        if not arguments.has(self.index, samples, i):
            return hidden
        if handed is None:
            handed = arguments.handed(self.index, i, rows)
        if states.crossing and self.index == states.crossing.first:
            handed[ENCODED] = (states.crossing.encode(hidden),)
            hidden = _Beside.apply(arguments.kept(self.index, i, BEGUN), hidden)  # type: ignore[no-untyped-call]
        args, kwargs = arguments.call(self.index, samples, i, rows, handed)
        if hidden.requires_grad:
            args, kwargs = replaced((args, kwargs), partial(_beside, hidden))
        try:
            out = self.module(streams_first(hidden, states.leading), *args, **kwargs)
        except (TypeError, AttributeError, LookupError) as error:
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise UnsupportedModelError(
                f"block {self.index} cannot be run alone ({reason}); models like this one are not supported"
            ) from error
        outputs = samples_first(out[0] if isinstance(out, tuple | list) else out, states.leading)
        added = arguments.kept(self.index, i, ADDED)
        return outputs if added is None else outputs + added

    def run(
        self, hidden: Tensor, states: HiddenStates, i: int, rows: slice = slice(None), handed: Handed | None = None
    ) -> Tensor:
        """Like :meth:`forward`, for gradients: half precision is bfloat16, because in float16 small ones would be 0."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype != torch.float32):
            return self.forward(hidden, states, i, rows, handed)

    @torch.no_grad()
    def advance(self, states: HiddenStates, done: Callable[[], None] = lambda: None) -> None:
        """Runs the block: ``states`` become the inputs of the next one. ``done`` is called after each batch."""
        for i in range(len(states.hidden)):
            self._advance(states, i)
            done()

    def _advance(self, states: HiddenStates, i: int) -> None:
        handed = states.arguments.handed(self.index, i)
        states.hidden[i] = self.forward(states.hidden[i], states, i, handed=handed)
        states.arguments.hand_on(self.index, i, handed)

    @torch.no_grad()
    def input_grams(
        self,
        states: HiddenStates,
        done: Callable[[], None] = lambda: None,
        world: World | None = None,
        tf32: TF32 = "auto",
        matrices: list[Matrix] | None = None,
        advance: bool = False,
        weights: Mapping[str, Tensor] | None = None,
    ) -> list[InputGram]:
        """The Gram matrices of all distinct inputs of ``matrices``, by default of all, over all processes.

        In that of a matrix with ``weights`` (samples, length) by name tokens count so much.
        ``states`` stay as they are, unless they are to ``advance`` in the same pass: see :meth:`advance`.
        NumericalError for NaN or infinite activations.
        """
        wanted = self.matrices if matrices is None else matrices
        grams = InputGrams(wanted, dict(self.module.named_parameters()), tf32)
        first = 0
        for i, hidden in enumerate(states.hidden):
            own = slice(first, first := first + len(hidden))
            grams.weights = {name: tokens[own] for name, tokens in (weights or {}).items()}
            if advance:
                grams.watch(partial(self._advance, states, i), to_the_end=True)
            else:
                grams.watch(partial(self.forward, hidden, states, i))
            done()
        with named(f"block {self.index}"):
            return grams.finish(world or World())

    def weight(self, matrix: Matrix) -> Tensor:
        """(out, in) float32: its original weights."""
        return matrix.read(self.layout.checkpoint).to(self.device, torch.float32)

    def release(self, matrices: Collection[Matrix]) -> None:
        """Frees the weights of ``matrices`` if memory is limited; :meth:`put` them back before the block runs."""
        if self.budget.left is None:
            return
        sizes: Counter[str] = Counter()
        for matrix in matrices:
            sizes[matrix.parameter] += matrix.size
        for name, size in sizes.items():
            parameter = self.module.get_parameter(name)
            if size == parameter.numel():  # nothing else is in it
                self.released.add(name)
                parameter.data = parameter.data.new_empty(1).expand(parameter.shape)

    def stored_dtype(self, matrix: Matrix) -> torch.dtype:
        """What the checkpoint has it in."""
        return self.layout.checkpoint.dtype(matrix.key)

    def stored(self, matrix: Matrix, W: Tensor) -> Tensor:
        """W (out, in) as the checkpoint would have it, zeros exactly +0.0; NumericalError for too large a weight."""
        stored = W.to(self.stored_dtype(matrix)).add_(0.0)  # rounding can leave -0.0
        if not is_finite(stored):
            raise NumericalError(f"{matrix.key}: a pruned weight is too large for {stored.dtype}")
        return stored.T.contiguous() if matrix.is_stored_transposed else stored

    def empty(self, matrix: Matrix) -> Tensor:
        """Memory for ``matrix`` in the layout and dtype of the checkpoint."""
        shape = matrix.shape[::-1] if matrix.is_stored_transposed else matrix.shape
        return torch.empty(shape, dtype=self.stored_dtype(matrix), device=self.device)

    def put(self, matrix: Matrix, stored: Tensor) -> None:
        """From now on the block computes with ``stored``, in the layout of the checkpoint, as ``matrix``."""
        name, parameter = matrix.parameter, self.module.get_parameter(matrix.parameter)
        if name in self.released:
            self.released.remove(name)
            parameter.data = parameter.data.new_empty(parameter.shape)
        matrix.within(parameter).copy_(stored.T if matrix.is_stored_transposed else stored)
