"""Gradients through a decoder block, and training of its weights."""

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from niwaki.models.block import DecoderBlock
from niwaki.models.hidden_states import HiddenStates
from niwaki.models.layout import Matrix
from niwaki.models.products import OnProduct, Products


def _trained(block: DecoderBlock) -> dict[str, nn.Parameter]:
    """The parameters that ``block.matrices`` are in, by path."""
    return {matrix.parameter: block.module.get_parameter(matrix.parameter) for matrix in block.matrices}


@contextlib.contextmanager
def trainable(block: DecoderBlock) -> Iterator[list[nn.Parameter]]:
    """The parameters that ``block.matrices`` are in, with gradients; meanwhile all of the block are in float32.

    At the end it computes with what they have become, in its dtype. What it computed with before is not changed.
    """
    parameters = list(_trained(block).values())
    dtypes = {value: value.dtype for value in block.module.parameters()}
    try:
        for value in dtypes:
            value.data = value.data.float()
        for value in parameters:
            value.data = value.data.clone()
            value.requires_grad_(True)
        yield parameters
    finally:
        for value, dtype in dtypes.items():
            value.requires_grad_(False)
            value.grad = None
            value.data = value.data.to(dtype)


@contextlib.contextmanager
def projected(block: DecoderBlock, project: Callable[[Matrix, Tensor], Tensor] | None) -> Iterator[None]:
    """While it is :func:`trainable`, the block with ``project(matrix, its weights)``, if that is given.

    Weights are as before at the end, with the gradients of those that it computed with meanwhile.
    """
    if project is None:
        yield
        return
    parameters = _trained(block)
    before = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for parameter in parameters.values():
            parameter.data = parameter.data.clone()
        for matrix in block.matrices:
            weights = matrix.within(parameters[matrix.parameter].data)
            weights.copy_(project(matrix, weights))
        yield
    finally:
        for name, value in before.items():
            parameters[name].data = value


def trained_weights(block: DecoderBlock) -> Iterator[tuple[str, int | None, Tensor]]:
    """(key, index, tensor) of each matrix, as the checkpoint has it; from then on the block computes with that."""
    for matrix in block.matrices:
        stored = block.stored(matrix, matrix.within(block.module.get_parameter(matrix.parameter)))
        block.put(matrix, stored)
        yield matrix.key, matrix.index, stored


def smallest_weight(block: DecoderBlock) -> float:
    """A magnitude that is not rounded to 0 in the dtype of the block, nor in that of the checkpoint."""
    dtypes = {block.dtype, *(block.stored_dtype(matrix) for matrix in block.matrices)}
    return max(torch.finfo(dtype).tiny for dtype in dtypes)


def root_mean_square(value: Tensor) -> float:
    """Of what is not zero."""
    squares = float(value.detach().square().sum(dtype=torch.float64))
    return math.sqrt(squares / max(1, int(value.count_nonzero())))


@torch.enable_grad()
def input_gradient(
    block: DecoderBlock,
    batch: int,
    hidden: Tensor,
    gradient: Tensor,
    states: HiddenStates,
    on_input: OnProduct,
    on_out: OnProduct,
) -> Tensor:
    """(samples, length, width): the gradient with respect to ``hidden``, given that with respect to the outputs.

    ``hidden`` is the ``batch`` of this number of ``states``, ``gradient`` has its shape and dtype. ``on_input``
    receives the inputs of each matrix, ``on_out`` the gradients with respect to its outputs, see :class:`Products`.
    """
    parameters = dict(block.module.named_parameters())
    hidden = hidden.detach().requires_grad_()
    with Products(block.matrices, parameters, on_input):
        out = block.forward(hidden, states, batch)
    with Products(block.matrices, parameters, on_out, backward=True):
        (pulled,) = torch.autograd.grad(out, hidden, gradient)
    return pulled
