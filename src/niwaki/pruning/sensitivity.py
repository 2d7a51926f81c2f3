"""How much a model's loss depends on the outputs of each of its matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from niwaki.errors import NumericalError, UnsupportedModelError
from niwaki.models.block import DecoderBlock
from niwaki.models.hidden_states import HiddenStates, SpillList
from niwaki.models.processes import World
from niwaki.models.streamed import LOGITS_PER_BATCH, StreamedModel
from niwaki.models.training import input_gradient

#: Path of a parameter, and which expert's part of it; None outside of experts.
_Part = tuple[str, int | None]

#: Rows of gradients that are squared at a time, in float64.
_ROWS = 512
#: Logits, probabilities, their sums, and gradients, which are in memory at once.
_COPIES = 4


def sensitivities(
    model: StreamedModel,
    tokens: Tensor,
    world: World | None = None,
    done: Callable[[], None] = lambda: None,
    seed: int = 0,
) -> list[dict[str, Tensor]]:
    """The mean square of the gradient of the loss with respect to each output of each matrix that can be pruned.

        g_o = (1 / tokens) sum_t (dL / dy_to)^2,    y = x W^T,    L = - sum_t log p(label_t | tokens up to t)

    with one label for each position, the last ones of the sequences included, drawn from the model's own predictions.
    So g is a diagonal of the Fisher information: to second order, independent noise of variance v in output o of every
    token raises the loss by g_o v / 2 per token.

    The sums go over all tokens of all processes. For an expert the squares are those of the tokens that are routed to
    it, divided by the number of all tokens: one that is rarely used has small values, and one that never is has zeros.
    Where several matrices share one product, such as the gate and up of an expert, each has its own rows.

    Labels depend on ``seed`` and a sample's place among those of all processes only, up to rounding. On a GPU
    gradients of attention and of experts are sums in no fixed order, so the last digits may differ between runs.

    Gradients are normalised by a power of two before each block, so that in float16 small ones are not 0. The last
    norm, the head and the loss are computed in float32 whatever the blocks run in.

    Cost: all weights are read twice. One forward pass and the pass through the head and back, and in the blocks from
    the last to the first that has matrices to prune one more forward and one backward pass, which leaves out the
    gradients of weights and so takes as much. Memory: one block, its activations and their gradients for one batch,
    and on the CPU the hidden states before each of those blocks, (samples, length, width) in the model's dtype for
    each. They go to a file where the model's budget has not enough left; all is freed at the end.

    References: Martens and Grosse 2015, arXiv 1503.05671, for the factors of the Fisher matrix; Kunstner et al. 2019,
    arXiv 1905.12558, for why labels are drawn and not taken from the text.

    Args:
        model: The dense model. Its weights are as before afterwards.
        tokens: (samples, length) int64, this process's share.
        world: The processes of which each has some of the samples, in order; by default there is one.
        done: Called after each batch in each block, on the way there and on the way back.
        seed: Of the labels.

    Returns:
        For each block by the name of each matrix (out,) float32 on the CPU, in squared nats per squared output; the
        same in all processes. Blocks without matrices to prune have none.

    Raises:
        NumericalError: a gradient is NaN or infinite.
        UnsupportedModelError: a matrix takes part in the model in a way that is unknown here.
    """
    world = world or World()
    found: list[dict[str, Tensor]] = [{} for _ in model.blocks]
    first = min((matrix.block for matrix in model.matrices()), default=0)
    counts = world.collected(len(tokens))
    total = sum(counts) * tokens.shape[1]
    # Drawn for all processes, of which each takes its own.
    draws = torch.rand(sum(counts), tokens.shape[1], generator=torch.Generator().manual_seed(seed))
    draws = draws.split(counts)[world.rank]
    with model.budget.lent() as budget:
        states = model.embed(tokens, budget=budget)
        kept: list[SpillList] = []
        for block in model.stream():
            if block.index >= first:
                kept.append(SpillList(budget))
                for hidden in states.hidden:
                    kept[-1].append(hidden.cpu())
            block.advance(states, done)
        exponents = _ends(model, states, draws)
        for block in model.stream(backwards=True):
            squares = _Squares(block, model.device)
            for i, hidden in enumerate(kept.pop()):
                squares.scale = 4.0 ** exponents[i]
                gradient = input_gradient(
                    block, hidden.to(model.device), states.hidden[i], states, squares.inputs, squares.outputs
                )
                states.hidden[i], change = _normalised(gradient, f"block {block.index}")
                exponents[i] += change
                done()
            found[block.index] = squares.finish(world, total)
            if block.index == first:
                break
    return found


def _ends(model: StreamedModel, states: HiddenStates, draws: Tensor) -> list[int]:
    """Puts gradients of the loss in the place of the hidden states behind the last block.

    Those of batch i are what is there times 2^exponents[i]; the exponents are the result.
    """
    exponents = []
    rows = max(1, LOGITS_PER_BATCH // (_COPIES * model.config.vocab_size))
    with model.head(torch.float32) as head:
        for i, drawn in enumerate(draws.split([len(batch) for batch in states.tokens])):
            hidden = states.hidden[i]
            gradient = torch.empty(hidden.shape, device=hidden.device)
            for *inputs, out in _pieces(rows, hidden, states.tokens[i], drawn, gradient):
                out.copy_(_gradient(head, *inputs))
            gradient, exponent = _normalised(gradient, "the model's outputs")
            states.hidden[i] = gradient.to(hidden.dtype)
            exponents.append(exponent)
    return exponents


def _pieces(rows: int, *values: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of values (samples, length, ..) that go together, each of so many tokens: whole samples if possible."""
    samples = max(1, rows // values[0].shape[1])
    for some in zip(*(value.split(samples) for value in values), strict=True):
        yield from zip(*(value.split(rows, dim=1) for value in some), strict=True)


@torch.enable_grad()
def _gradient(head: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, tokens: Tensor, draws: Tensor) -> Tensor:
    """(samples, length, width) float32: the gradient of the loss with respect to ``hidden``."""
    hidden = hidden.detach().float().requires_grad_()
    logits = head(hidden, tokens)
    p = logits.detach().softmax(-1)
    p.scatter_add_(-1, _labels(p, draws.to(p.device)), torch.full_like(p[..., :1], -1.0))
    return torch.autograd.grad(logits, hidden, p)[0]


def _labels(p: Tensor, draws: Tensor) -> Tensor:
    """(.., 1): the first label up to which the probabilities ``p`` (.., vocabulary) sum to more than ``draws`` (..)."""
    sums = p.cumsum(-1)
    # What they sum to in all is 1 up to rounding only.
    return torch.searchsorted(sums, draws.unsqueeze(-1) * sums[..., -1:], right=True).clamp_(max=p.shape[-1] - 1)


def _normalised(gradient: Tensor, where: str) -> tuple[Tensor, int]:
    """(gradient / 2^exponent, whose largest magnitude is from 0.5 to 1; the exponent).

    Raises:
        NumericalError: it is NaN or infinite.
    """
    largest = float(gradient.abs().max())
    _check(math.isfinite(largest), where)
    exponent = math.frexp(largest)[1]
    # In two steps: 2^-exponent itself can be infinite in float32.
    half = exponent // 2
    return gradient.mul(2.0**-half).mul_(2.0 ** (half - exponent)), exponent


class _Squares:
    """Sums of squared gradients with respect to the outputs of the matrices of a block.

    Attributes:
        scale: The factor of the squares that come.
    """

    def __init__(self, block: DecoderBlock, device: torch.device) -> None:
        self._index = block.index
        self._matrices = block.matrices
        self.scale = 1.0
        heights: dict[_Part, int] = {}
        for matrix in self._matrices:
            part = (matrix.parameter, matrix.expert)
            heights[part] = max(heights.get(part, 0), matrix.start + matrix.shape[0])
        # One tensor, in the order of the matrices: processes do not see experts in the same order.
        self._all = torch.zeros(sum(heights.values()), dtype=torch.float64, device=device)
        self._sums = dict(zip(heights, self._all.split(list(heights.values())), strict=True))
        self._seen: set[str] = set()
        #: Where all experts run on as many rows: which of these are tokens of theirs, in each product.
        self._own: dict[_Part, list[Tensor]] = {}

    def inputs(self, parameter: str, expert: int | None, X: Tensor, together: bool) -> None:
        """In the forward pass."""
        if together:
            self._own.setdefault((parameter, expert), []).append(X.any(dim=1))

    def outputs(self, parameter: str, expert: int | None, X: Tensor, together: bool) -> None:
        """In the backward pass, which has the products of the forward pass in reverse order."""
        sums, gradients = self._sums[parameter, expert], X.flatten(0, -2)
        if gradients.shape[1] != len(sums):
            raise UnsupportedModelError(f"{parameter} is used in parts when its block runs; please report this model")
        self._seen.add(parameter)
        if together:
            gradients = gradients[self._own[parameter, expert].pop()]
        for rows in gradients.split(_ROWS):
            sums.add_(rows.double().square_().sum(dim=0), alpha=self.scale)

    def finish(self, world: World, tokens: int) -> dict[str, Tensor]:
        """(out,) for each matrix: the means over ``tokens``, those of all processes.

        Raises:
            NumericalError: a gradient was NaN or infinite.
            UnsupportedModelError: a parameter had none.
        """
        for parameter, _ in self._sums:
            if parameter not in self._seen:
                raise UnsupportedModelError(f"{parameter} is not used when its block runs; please report this model")
        world.sum([self._all])
        _check(bool(torch.isfinite(self._all).all()), f"block {self._index}")
        self._all /= tokens
        return {
            matrix.name: self._sums[matrix.parameter, matrix.expert]
            .narrow(0, matrix.start, matrix.shape[0])
            .to("cpu", torch.float32)
            for matrix in self._matrices
        }


def _check(finite: bool, where: str) -> None:
    if not finite:
        raise NumericalError(
            f"{where}: gradients are NaN or infinite on the calibration text; try --dtype float32, or another text"
        )
