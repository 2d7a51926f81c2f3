"""What removed blocks did, put back as far as it goes: into the last matrix of the block before them."""

from collections.abc import Callable

import torch
from torch import Tensor

from niwaki.errors import NumericalError
from niwaki.layer.linalg import is_finite
from niwaki.layer.ridge import Ridge
from niwaki.models.block import DecoderBlock
from niwaki.models.hidden_states import Handed, HiddenStates
from niwaki.models.layout import Matrix
from niwaki.models.processes import World
from niwaki.models.products import Products
from niwaki.models.spill import MemoryBudget, SpillList
from niwaki.shrinking.units import mlps

#: The ridge of the regression, relative to the mean square of each input.
DAMPING = 0.1
#: How much the outputs of a block may differ from what they would be if its last matrix were added to them.
_TOLERANCE = 0.1


@torch.no_grad()
def last_matrix(block: DecoderBlock, states: HiddenStates) -> Matrix | None:
    """The matrix whose products are added to the outputs of ``block`` as they are; None where there is no such matrix.

    There is none where a norm follows it (Gemma 2, BERT), or where experts take its place. It is tried, with twice the
    matrix, on the first batch of ``states``, the inputs of the block.
    """
    found = mlps(block.matrices)
    if len(found) != 1 or states.leading:
        return None
    matrix, _ = found[0]
    before = run_with_inputs(block, matrix, states, 0)
    if before is None:
        return None
    outputs, inputs = before
    weight = matrix.within(block.module.get_parameter(matrix.parameter))
    own = weight.clone()
    weight.mul_(2)
    twice = block.forward(states.hidden[0], states, 0).float()
    weight.copy_(own)
    added = (inputs @ own.float().T).view(outputs.shape)
    is_added = (twice - outputs - added).norm() <= _TOLERANCE * added.norm()
    return matrix if is_added else None


def run_with_inputs(
    block: DecoderBlock, matrix: Matrix, states: HiddenStates, i: int, handed: Handed | None = None
) -> tuple[Tensor, Tensor] | None:
    """(outputs (samples, length, width), inputs of ``matrix`` (tokens, in)), float32, for batch ``i`` of ``states``.

    None where ``matrix`` has not one input for each token. What the block hands on is added to ``handed``, as in
    :meth:`.DecoderBlock.forward`.
    """
    seen: list[Tensor] = []
    parameters = dict(block.module.named_parameters())
    with torch.no_grad(), Products([matrix], parameters, lambda _, __, X, ___: seen.append(X.flatten(0, -2))):
        outputs = block.forward(states.hidden[i], states, i, handed=handed).float()
    tokens = outputs.shape[:-1].numel()
    if outputs.ndim != 3 or len(seen) != 1 or len(seen[0]) != tokens:
        return None
    return outputs, seen[0].float()


def advance_with_inputs(block: DecoderBlock, matrix: Matrix, states: HiddenStates, budget: MemoryBudget) -> SpillList:
    """Runs ``block``, whose last matrix is ``matrix``; the inputs of that, as in :func:`run_with_inputs`, by batch."""
    seen = SpillList(budget)
    for i in range(len(states.hidden)):
        handed = states.arguments.handed(block.index, i)
        found = run_with_inputs(block, matrix, states, i, handed)
        assert found  # as in last_matrix
        states.hidden[i] = found[0].to(states.hidden[i].dtype)
        states.arguments.hand_on(block.index, i, handed)
        seen.append(found[1])
    return seen


def add_inputs(H: Tensor, inputs: Tensor, outputs: Tensor) -> None:
    """Adds u u^T / |y|^2 to H (in, in), for tokens with ``inputs`` u (tokens, in) of a matrix.

    Their block's ``outputs`` y are (samples, length, width). So tokens with large states count for as much as others:
    what norms do behind blocks depends on directions, and a few tokens have states a thousand times as long as all
    others.
    """
    H.addmm_((inputs * _weights(outputs)).T, inputs)


def add_residuals(C: Tensor, inputs: Tensor, outputs: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Likewise adds r u^T / |y|^2 to C (width, in), where r is what ``outputs`` lack to be ``wanted``.

    Returns r and r / |y|^2 (tokens, width).
    """
    residuals = (wanted.float() - outputs.float()).flatten(0, -2)
    weighted = residuals * _weights(outputs)
    C.addmm_(weighted.T, inputs)
    return residuals, weighted


def summed_inputs(matrix: Matrix, inputs: SpillList, outputs: SpillList, world: World) -> Tensor:
    """H of :func:`add_inputs` for the inputs of ``matrix`` and the outputs of its block, by batch, of all processes."""
    H = torch.zeros(matrix.shape[1], matrix.shape[1], device=outputs[0].device)
    for some, states in zip(inputs, outputs, strict=True):
        add_inputs(H, some, states)
    world.sum([H])
    check(H)
    return H


def summed_residuals(matrix: Matrix, inputs: SpillList, outputs: SpillList, wanted: SpillList, world: World) -> Tensor:
    """Likewise C of :func:`add_residuals`."""
    C = torch.zeros(matrix.shape, device=outputs[0].device)
    for some, states, others in zip(inputs, outputs, wanted, strict=True):
        add_residuals(C, some, states, others)
    world.sum([C])
    check(C)
    return C


def with_change(states: Tensor, inputs: Tensor, change: Tensor) -> Tensor:
    """The outputs ``states`` of a block after a ``change`` (out, in) of its last matrix, which has these ``inputs``."""
    return (states.float() + (inputs @ change.T).view(states.shape)).to(states.dtype)


def check(*moments: Tensor) -> None:
    """Raises NumericalError where sums over tokens are NaN or infinite."""
    if not all(map(is_finite, moments)):
        raise NumericalError("hidden states are NaN or infinite on the calibration text; try dtype float32")


def _weights(outputs: Tensor) -> Tensor:
    """(tokens, 1): the inverse squared lengths of ``outputs`` (samples, length, width)."""
    squares = outputs.float().flatten(0, -2).square().sum(1, keepdim=True)
    return 1 / squares.clamp_(min=torch.finfo(torch.float32).tiny)


def bridge(
    block: DecoderBlock,
    matrix: Matrix,
    states: HiddenStates,
    wanted: SpillList,
    world: World,
    done: Callable[[], None] = lambda: None,
) -> tuple[Tensor, float, float, int]:
    """Changes ``matrix``, the last one of ``block``, so that the block's outputs come near to ``wanted``.

    ``states`` are the inputs of the block, ``wanted`` the dense model's states behind the blocks that are gone, in the
    same batches. Columns of zeros stay zero. The new weights are W + D with

        minimize  sum_t |r_t - D u_t|^2 / |y_t|^2 + ridge,

    where u are the inputs of the matrix, y the block's outputs and r what they lack: ReplaceMe (Shopkhoev et al. 2025,
    arXiv 2505.02819) with all inputs of the matrix instead of its outputs, which fits better
    (docs/results-quality.md), and with tokens that count alike.

    Returns:
        What was put into ``block``, in the layout of the checkpoint; the squared errors before and after, relative to
        the outputs, as means over tokens; the number of tokens.
    """
    W = matrix.within(block.module.get_parameter(matrix.parameter)).detach().float()
    H, C = W.new_zeros(W.shape[1], W.shape[1]), torch.zeros_like(W)
    tokens, before = 0, 0.0
    for i in range(len(states.hidden)):
        found = run_with_inputs(block, matrix, states, i)
        assert found  # as in last_matrix
        outputs, inputs = found
        add_inputs(H, inputs, outputs)
        residuals, weighted = add_residuals(C, inputs, outputs, wanted[i])
        before += float((residuals * weighted).sum(dtype=torch.float64))
        tokens += len(inputs)
        done()
    tokens, before = (sum(each) for each in zip(*world.collected((tokens, before)), strict=True))
    world.sum([H, C])
    check(H, C)
    zero = ~(W != 0).any(dim=0)
    H[zero], H[:, zero], C[:, zero] = 0.0, 0.0, 0.0
    D = Ridge(H, DAMPING).change(C)
    gain = 2 * float((D * C).sum(dtype=torch.float64)) - float(((D @ H) * D).sum())
    stored = world.send(block.stored(matrix, W + D), 0)
    block.put(matrix, stored)
    return stored, before / tokens, max(before - gain, 0.0) / tokens, tokens
