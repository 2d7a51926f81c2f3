"""How much a model's loss depends on the outputs of each of its matrices."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from niwaki.errors import NumericalError, UnsupportedModelError
from niwaki.layer.linalg import is_finite
from niwaki.models.block import DecoderBlock
from niwaki.models.hidden_states import HiddenStates, SpillList, pieces
from niwaki.models.layout import Matrix
from niwaki.models.processes import World
from niwaki.models.streamed import TOKENS_PER_BATCH, StreamedModel
from niwaki.models.training import HandedGradients, gradients, input_gradient
from niwaki.records.progress import Progress

#: Path of a parameter, and which expert's part of it; None outside experts.
_Weights = tuple[str, int | None]

#: The least importance of an output, relative to the mean: without any influence its weights still count.
_LEAST = 1e-4
#: The largest product of the gradients of two outputs, relative to the mean square: what float16 has.
_MOST = torch.finfo(torch.float16).max
#: Rows of gradients that are squared at a time, in float64.
_ROWS = 512
#: The most tokens on which it is seen what errors cost together, about.
_COUPLED = 16384
#: What couplings may take in memory.
_BYTES = 1 << 30
#: Rows that are rounded at a time.
_STRIP = 64
#: Logits, probabilities, their sums, and gradients, which are in memory at once.
_COPIES = 4


def sensitivities(
    model: StreamedModel, tokens: Tensor, world: World | None = None, done: Callable[[], None] = lambda: None
) -> list[dict[str, Tensor]]:
    """The mean square of the gradient of the loss with respect to each output of each matrix that can be pruned.

        g_o = (1 / tokens) sum_t (dL / dy_to)^2,    y = x W^T,    L = - sum_t log p(label_t | tokens up to t)

    over ``tokens`` (samples, length) int64, of which this is the process's share; those of all processes are in order.
    There is a label for each position, drawn from the model's own predictions (up to rounding, by the sample's place
    among those of all processes). So g is a diagonal of the Fisher information: to second order, independent noise of
    variance v in output o of every token raises the loss by g_o v / 2 per token. For an expert the sum is over the
    tokens routed to it. ``done`` is called after each batch in each block, forwards and backwards.

    The last norm, the head and the loss are in float32 whatever the blocks run in.

    Cost: all weights are read twice; two forward passes, and a backward pass that takes as much as one of them. Memory:
    one block, its activations and gradients for one batch, and the inputs of all blocks within the model's budget.

    References: Martens and Grosse 2015, arXiv 1503.05671, for the factors of the Fisher matrix; Kunstner et al. 2019,
    arXiv 1905.12558, for why labels are drawn and not taken from the text.

    Returns:
        For each block by the name of each matrix (out,) float32 on the CPU, in squared nats per squared output; the
        same in all processes. For a matrix that several blocks share it is the sum over all of them.

    Raises:
        NumericalError: a gradient is NaN or infinite.
        UnsupportedModelError: a matrix takes part in the model in an unknown way.
    """
    world = world or World()
    sums: dict[tuple[str, int | None], Tensor] = {}  # by what a matrix is in the files

    def add(squares: _Squares, predicted: int) -> None:
        found = squares.means(world, predicted)
        for matrix in squares.matrices:
            sums[matrix.entry] = sums.get(matrix.entry, 0) + found[matrix.name]

    _backwards(model, tokens, world, done, _Squares, add)
    return [{matrix.name: sums[matrix.entry] for matrix in model.matrices(i)} for i in range(len(model.blocks))]


@dataclass(frozen=True)
class Coupling:
    """What errors of several outputs of a matrix cost the loss together, and in which tokens they cost more.

    With g_t the gradient of the loss with respect to the outputs of token t (out,), in whose products the Fisher matrix
    consists, its nearest Kronecker product has as factors means of g_t g_t^T and of x_t x_t^T in which tokens count by
    how large the other factor is. Here each takes a root of |g_t|^2.

    Attributes:
        outputs: (out, width) float16, blocks of so many consecutive outputs on the diagonal of the mean of
            g_t g_t^T / |g_t|, below each other, relative to the mean of the diagonal. They are as large as each other,
            up to a multiple of 64.
        tokens: (samples, length) float16, |g_t| of each token of all processes, of mean 1; the mean over all matrices
            with the same inputs.
    """

    outputs: Tensor
    tokens: Tensor


def couplings(
    model: StreamedModel, tokens: Tensor, width: int, world: World, done: Callable[[], None] = lambda: None
) -> list[dict[str, Coupling]]:
    """For each block by name the coupling of each matrix, other than experts' and those that several blocks share.

    Gradients, cost, memory and errors are those of :func:`sensitivities`; beside them a matrix of a block takes
    (out, width) in float64 while it is looked at.

    References: Tseng et al. 2025, arXiv 2505.22988, for roundings of both factors.
    """
    found: list[dict[str, Coupling]] = [{} for _ in model.blocks]

    def add(coupled: _Coupled, _: int) -> None:
        found[coupled.block] = coupled.means(world)

    _backwards(model, tokens, world, done, partial(_Coupled, width=width, length=tokens.shape[1]), add)
    return found


class _Watcher(Protocol):
    """What looks at the passes of a block.

    ``scale`` is what the gradients of the batch were divided by.
    """

    scale: float

    def inputs(self, parameter: str, expert: int | None, X: Tensor, together: bool) -> None: ...

    def outputs(self, parameter: str, expert: int | None, X: Tensor, together: bool) -> None: ...


T = TypeVar("T", bound=_Watcher)


def _backwards(
    model: StreamedModel,
    tokens: Tensor,
    world: World,
    done: Callable[[], None],
    kind: Callable[[DecoderBlock], T],
    add: Callable[[T, int], None],
) -> None:
    """Has one of this ``kind`` look at each block, from the last one on; gives it to ``add``.

    With how many tokens all processes have predicted.
    """
    first = min((matrix.block for matrix in model.matrices()), default=0)
    counts = world.collected(len(tokens))
    # Drawn for all processes, of which each takes its own.
    draws = torch.rand(sum(counts), tokens.shape[1], generator=torch.Generator().manual_seed(0))
    with model.budget.lent() as budget:
        states = model.embed(tokens, budget=budget)
        inputs: list[SpillList] = []
        for block in model.stream():
            if block.index >= first:
                inputs.append(SpillList(budget))
                for hidden in states.hidden:
                    inputs[-1].append(hidden.cpu())
            block.advance(states, done)
        handed = HandedGradients(budget)
        predicted = sum(world.collected(sum(hidden.shape[:2].numel() for hidden in states.hidden)))
        exponents = _start(model, states, draws.split(counts)[world.rank])
        for block in model.stream(range(len(model.blocks))[::-1]):
            watcher = kind(block)
            for i, hidden in enumerate(inputs.pop()):
                watcher.scale = 2.0 ** exponents[i]
                hidden = hidden.to(model.device)
                gradient = input_gradient(block, hidden, states, i, handed, watcher.inputs, watcher.outputs)
                states.hidden[i], change = _normalized(gradient, f"block {block.index}")
                handed.scale(i, -change)
                exponents[i] += change
                done()
            add(watcher, predicted)
            if block.index == first:
                break


def _start(model: StreamedModel, states: HiddenStates, draws: Tensor) -> list[int]:
    """Replaces the hidden states after the last block by gradients of the loss, over 2^the exponent of each batch."""
    exponents = []
    rows = model.tokens_at_a_time(_COPIES)
    with model.head(torch.float32) as head:
        for i, drawn in enumerate(draws.split([len(batch) for batch in states.tokens])):
            hidden = states.hidden[i]
            gradient = torch.empty(hidden.shape, device=hidden.device)
            for *inputs, out in pieces(rows, hidden, states.tokens[i], drawn[:, : hidden.shape[1]], gradient):
                out.copy_(_gradient(head, *inputs))
            gradient, exponent = _normalized(gradient, "the model's outputs")
            states.hidden[i] = gradient.to(hidden.dtype)
            exponents.append(exponent)
    return exponents


def _gradient(head: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, tokens: Tensor, draws: Tensor) -> Tensor:
    """(samples, length, width) float32: the gradient of the loss with respect to ``hidden``."""
    hidden = hidden.detach().float().requires_grad_()
    with gradients(hidden.device):
        logits = head(hidden, tokens)
        p = logits.detach().softmax(-1)
        p.scatter_add_(-1, _labels(p, draws.to(p.device)), torch.full_like(p[..., :1], -1.0))
        return torch.autograd.grad(logits, hidden, p)[0]


def _labels(p: Tensor, draws: Tensor) -> Tensor:
    """(.., 1): the first label up to which the probabilities ``p`` (.., vocabulary) sum to more than ``draws`` (..)."""
    sums = p.cumsum(-1)
    # Their total is 1 only up to rounding.
    return torch.searchsorted(sums, draws.unsqueeze(-1) * sums[..., -1:], right=True).clamp_(max=p.shape[-1] - 1)


def _normalized(gradient: Tensor, where: str) -> tuple[Tensor, int]:
    """(gradient / 2^exponent, the exponent): of a magnitude up to 1, because small ones would be 0 in float16."""
    largest = gradient.abs().max()
    _check(largest, where)
    exponent = math.frexp(float(largest))[1]
    # In two steps: 2^-exponent itself can be infinite in float32.
    half = exponent // 2
    return gradient.mul(2.0**-half).mul_(2.0 ** (half - exponent)), exponent


class _Squares:
    """Sums of squared gradients with respect to the outputs of the matrices of a block."""

    def __init__(self, block: DecoderBlock) -> None:
        self._block, self.matrices = block, [*block.matrices, *block.shared]
        self.scale = 1.0
        heights: dict[_Weights, int] = {}
        for matrix in self.matrices:
            weights = (matrix.parameter, matrix.expert)
            heights[weights] = max(heights.get(weights, 0), matrix.start + matrix.shape[0])
        # One tensor, in the order of the matrices: processes do not see experts in the same order.
        self._all = torch.zeros(sum(heights.values()), dtype=torch.float64, device=block.device)
        self._sums = dict(zip(heights, self._all.split(list(heights.values())), strict=True))
        self._seen: set[str] = set()
        #: Where all experts run on the same number of rows: which of these are their tokens, in each product.
        self._own: dict[_Weights, list[Tensor]] = {}

    def inputs(self, parameter: str, expert: int | None, X: Tensor, together: bool) -> None:
        """Notes, in the forward pass, which rows of ``X`` are an expert's tokens where all run ``together``."""
        if together:
            self._own.setdefault((parameter, expert), []).append(X.any(dim=1))

    def outputs(self, parameter: str, expert: int | None, X: Tensor, together: bool) -> None:
        """Adds the squares of gradients ``X`` in the backward pass, which has the products in reverse order."""
        sums, found = self._sums[parameter, expert], X.flatten(0, -2)
        if found.shape[1] != len(sums):
            raise UnsupportedModelError(f"{parameter} is used in parts when its block runs; please report this model")
        self._seen.add(parameter)
        if together:
            found = found[self._own[parameter, expert].pop()]
        for rows in found.split(_ROWS):
            sums.add_(rows.double().square_().sum(dim=0), alpha=self.scale**2)

    def means(self, world: World, tokens: int) -> dict[str, Tensor]:
        """(out,) for each matrix: the means over the ``tokens`` of all processes."""
        for parameter, _ in self._sums:
            if parameter not in self._seen and ".experts." not in parameter:  # of which some have no tokens
                raise UnsupportedModelError(f"{parameter} is not used when its block runs; please report this model")
        world.sum([self._all])
        _check(self._all, f"block {self._block.index}")
        self._all /= tokens
        rows = {m.name: self._sums[m.parameter, m.expert].narrow(0, m.start, m.shape[0]) for m in self.matrices}
        return {name: value.to("cpu", torch.float32) for name, value in rows.items()}


class _Coupled:
    """The couplings of the matrices of a block, over windows of so many tokens (``length``)."""

    def __init__(self, block: DecoderBlock, width: int, length: int) -> None:
        self.block, self.scale, self._length = block.index, 1.0, length
        alone = _alone(block.matrices)
        sizes = {m.name: (m.shape[0], _even(m.shape[0], width)) for m in alone}
        self._sums = {
            name: torch.zeros(*size, dtype=torch.float64, device=block.device) for name, size in sizes.items()
        }
        self._matrices = {m.parameter: [each for each in alone if each.parameter == m.parameter] for m in alone}
        self._norms: dict[str, list[Tensor]] = {m.name: [] for m in alone}  # of gradients, of each batch
        self._shared: dict[str, tuple[int, ...]] = {}  # by parameter, the input in the last pass
        self._seen: list[Tensor] = []  # which stay, so that no other is where they are

    def inputs(self, parameter: str, expert: int | None, X: Tensor, together: bool) -> None:
        """Notes, in the forward pass, which parameters have the same inputs."""
        if parameter not in self._matrices:
            return
        if parameter in self._shared:  # the next batch
            self._shared.clear()
            self._seen.clear()
        self._shared[parameter] = (X.data_ptr(), *X.shape, X._version)
        self._seen.append(X)

    def outputs(self, parameter: str, expert: int | None, X: Tensor, together: bool) -> None:
        """Adds what gradients ``X`` in the backward pass say."""
        for matrix in self._matrices.get(parameter, ()):
            rows = X.flatten(0, -2)[:, matrix.start : matrix.start + matrix.shape[0]].float()
            norms = torch.linalg.vector_norm(rows, dim=1)
            if len(norms) % self._length:
                raise UnsupportedModelError(f"{matrix.label} does not run on all tokens of a window alike")
            self._norms[matrix.name].append(norms.double() * self.scale)
            rows = rows * norms.clamp(min=torch.finfo(norms.dtype).tiny).rsqrt().unsqueeze(1)
            sums = self._sums[matrix.name]
            for some, own in zip(rows.split(sums.shape[1], dim=1), sums.split(sums.shape[1]), strict=True):
                own[:, : len(own)].add_(some.T @ some, alpha=self.scale)

    def means(self, world: World) -> dict[str, Coupling]:
        """The coupling of each matrix by name, over all processes."""
        if unused := self._matrices.keys() - self._shared.keys():
            raise UnsupportedModelError(f"{min(unused)} is not used when its block runs")
        world.sum([*self._sums.values()])
        by_input: dict[tuple[int, ...], list[str]] = {}
        for parameter, matrices in self._matrices.items():
            by_input.setdefault(self._shared[parameter], []).extend(m.name for m in matrices)
        tokens: dict[str, Tensor] = {}
        for same in by_input.values():
            of_each = torch.stack([torch.cat(self._norms[name]) for name in same]).cpu()
            relative = _relative(torch.cat(world.collected(of_each), dim=1)).mean(dim=0)
            tokens |= dict.fromkeys(same, relative.clamp_(max=_MOST).view(-1, self._length).half())
        found = {}
        for name, sums in self._sums.items():
            _check(sums, f"block {self.block}")
            rows = torch.arange(len(sums), device=sums.device)
            mean = sums[rows, rows % sums.shape[1]].mean().clamp(min=torch.finfo(sums.dtype).tiny)
            outputs = (sums / mean).clamp_(-_MOST, _MOST)
            found[name] = Coupling(outputs.to("cpu", torch.float16), tokens[name])
        return found


def _alone(matrices: Iterable[Matrix]) -> list[Matrix]:
    """Those that see all tokens once."""
    return [m for m in matrices if m.expert is None and ".experts." not in m.name and not m.blocks]


def _even(rows: int, most: int) -> int:
    """The size of the fewest blocks of at most so many of the ``rows``, a multiple of 64 where there are several."""
    count = math.ceil(rows / most)
    return rows if count == 1 else min(most, math.ceil(rows / count / _STRIP) * _STRIP)


def _by_place(tokens: Tensor) -> Tensor:
    """(length,): means of ``tokens`` (samples, length), of the first, the second, the next two, four and so on."""
    values = tokens.float().mean(dim=0)
    smooth, start = values.clone(), 1
    while start < len(values):
        smooth[start : 2 * start] = values[start : 2 * start].mean()
        start *= 2
    return smooth


def _relative(values: Tensor) -> Tensor:
    """``values`` (.., count) of mean 1; all 1 where they are 0."""
    mean = values.mean(dim=-1, keepdim=True)
    return torch.where(mean > 0, values / mean, 1.0)


def _check(values: Tensor, where: str) -> None:
    if not is_finite(values):
        raise NumericalError(
            f"{where}: gradients are NaN or infinite on the calibration text; try dtype float32, or another text"
        )


def measured(model: StreamedModel, pilot: Tensor, world: World, progress: Progress) -> list[dict[str, Tensor]]:
    """:func:`sensitivities` on the process's share of ``pilot`` (samples, length), with a step for each batch."""
    _begin(model, pilot, progress)
    return sensitivities(model, pilot, world, progress.step)


def measured_couplings(
    model: StreamedModel, samples: Tensor, width: int, world: World, progress: Progress
) -> list[dict[str, Coupling]]:
    """:func:`couplings` likewise, of up to ``width`` outputs, fewer where they would take more than 1 GiB.

    Where ``samples`` are many some of them are looked at. Tokens of others count as much as those that were seen do at
    their place in a window.
    """
    heights = [matrix.shape[0] for matrix in _alone(model.matrices())]
    while width > _STRIP and sum(rows * _even(rows, width) for rows in heights) * 2 > _BYTES:
        width //= 2
    counts = world.collected(len(samples))
    step = _step(sum(counts), _COUPLED / (sum(counts) * samples.shape[1]), world)
    pilot = world.share(torch.cat(world.collected(samples))[::step]) if step > 1 else samples
    _begin(model, pilot, progress)
    found = couplings(model, pilot, width, world, progress.step)
    for here in found if step > 1 else []:
        for name, coupling in here.items():
            tokens = _by_place(coupling.tokens).half().repeat(sum(counts), 1)
            tokens[::step] = coupling.tokens
            here[name] = replace(coupling, tokens=tokens)
    return found


def _begin(model: StreamedModel, pilot: Tensor, progress: Progress) -> None:
    batches = math.ceil(len(pilot) / max(1, TOKENS_PER_BATCH // pilot.shape[1]))
    progress.stage(0, "sensitivity", 2 * len(model.blocks) * batches)


def pilot_of(samples: Tensor, share: float, world: World) -> Tensor:
    """This process's part of a ``share`` of the samples of all, at least one for each process."""
    whole = torch.cat(world.collected(samples))
    return world.share(whole[:: _step(len(whole), share, world)])


def _step(samples: int, share: float, world: World) -> int:
    """The first of each so many of the ``samples`` of all makes about this ``share``."""
    return max(1, min(math.floor(1 / share), samples // world.size))


def row_weights(importance: Tensor, power: float) -> Tensor:
    """(out,): what to multiply the rows of a matrix by, so that the errors of important outputs count for more.

    That is the root of a ``power`` of their ``importance`` (out,), as of :func:`sensitivities`; its mean square is 1.
    """
    mean = importance.mean()
    if not mean > 0:
        return torch.ones_like(importance)
    relative = (importance / mean).clamp(min=_LEAST).pow(power)
    return (relative / relative.mean()).sqrt()
