"""What removed blocks did, put back as far as it goes: into the last matrix of the block before them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from niwaki.errors import NumericalError
from niwaki.layer.linalg import is_finite
from niwaki.layer.ridge import ridge
from niwaki.models.block import DecoderBlock
from niwaki.models.hidden_states import Handed, HiddenStates
from niwaki.models.layout import Matrix
from niwaki.models.processes import World
from niwaki.models.products import Products
from niwaki.models.spill import SpillList
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


@dataclass
class Moments:
    """Sums over tokens, of which those with large states count for as much as others.

    With inputs u (in,) of a matrix, the states y (width,) behind its block and what these lack, r: H is the sum of
    u u^T / |y|^2 and C that of r u^T / |y|^2. What norms do behind blocks depends on directions, and a few tokens have
    states a thousand times as long as all others.
    """

    H: Tensor  # (in, in) float32
    C: Tensor  # (width, in) float32
    error: float = 0.0  # the sum of |r|^2 / |y|^2

    @classmethod
    def of(cls, matrix: Matrix, device: torch.device) -> "Moments":
        """Sums of nothing."""
        rows, columns = matrix.shape
        return cls(torch.zeros(columns, columns, device=device), torch.zeros(rows, columns, device=device))

    def add_inputs(self, inputs: Tensor, outputs: Tensor) -> None:
        """Adds tokens to H: ``inputs`` (tokens, in) and ``outputs`` (samples, length, width)."""
        self.H.addmm_((inputs * _weights(outputs)).T, inputs)

    def add_residuals(self, inputs: Tensor, outputs: Tensor, wanted: Tensor) -> None:
        """Adds tokens to C and the error: also what the outputs should be, ``wanted`` (samples, length, width)."""
        weights = _weights(outputs)
        residuals = (wanted.float() - outputs.float()).flatten(0, -2)
        weighted = residuals * weights
        self.C.addmm_(weighted.T, inputs)
        self.error += float((residuals * weighted).sum(dtype=torch.float64))

    def change(self, world: World, columns: Tensor | None = None) -> tuple[Tensor, float, float]:
        """(D (width, in) to add to the matrix, error before, error after), the same in all processes.

        H is that of all processes already. Only ``columns`` (in,) bool change, by default all. NumericalError where
        states are NaN or infinite.
        """
        world.sum([self.C])
        before = sum(world.collected(self.error))
        if not is_finite(self.H) or not is_finite(self.C):
            raise NumericalError("hidden states are NaN or infinite on the calibration text; try dtype float32")
        if columns is not None:
            self.H[~columns], self.H[:, ~columns], self.C[:, ~columns] = 0.0, 0.0, 0.0
        D = ridge(self.H, self.C, DAMPING)
        after = before - 2 * float((D * self.C).sum(dtype=torch.float64)) + float(((D @ self.H) * D).sum())
        return D, before, max(after, 0.0)


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

        minimise  sum_t |r_t - D u_t|^2 / |y_t|^2 + ridge,

    where u are the inputs of the matrix, y the block's outputs and r what they lack: ReplaceMe (Shopkhoev et al. 2025,
    arXiv 2505.02819) with all inputs of the matrix instead of its outputs, which fits better (docs/structured.md), and
    with tokens that count alike.

    Returns:
        What was put into ``block``, in the layout of the checkpoint; the squared errors before and after, relative to
        the outputs, as means over tokens; the number of tokens.
    """
    sums, tokens = Moments.of(matrix, block.device), 0
    for i in range(len(states.hidden)):
        found = run_with_inputs(block, matrix, states, i)
        assert found  # as in last_matrix
        sums.add_inputs(found[1], found[0])
        sums.add_residuals(found[1], found[0], wanted[i])
        tokens += len(found[1])
        done()
    tokens = sum(world.collected(tokens))
    world.sum([sums.H])
    W = matrix.within(block.module.get_parameter(matrix.parameter)).detach().float()
    D, before, after = sums.change(world, (W != 0).any(dim=0))
    stored = world.send(block.stored(matrix, W + D), 0)
    block.put(matrix, stored)
    return stored, before / tokens, after / tokens, tokens
