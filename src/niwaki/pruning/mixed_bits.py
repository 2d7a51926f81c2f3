"""How many bits each matrix has on a grid of mixed bits: few where their errors cost the loss least."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from niwaki.choices import TF32
from niwaki.errors import named
from niwaki.layer.grid import Grid, scale_dtype
from niwaki.layer.problem import Gram, LayerProblem
from niwaki.layer.rounding import to_nearest
from niwaki.models.block import DecoderBlock
from niwaki.models.hidden_states import HiddenStates
from niwaki.models.layout import Matrix
from niwaki.models.processes import World
from niwaki.models.sensitivity import measured, pilot_of
from niwaki.models.streamed import StreamedModel
from niwaki.records.progress import Progress

#: The share of the calibration windows on which it is decided.
_PILOT = 0.25
#: About how many rows of a matrix are rounded for that.
_ROWS = 256

#: A matrix by block and name.
Place = tuple[int, str]


@dataclass(frozen=True)
class BitCosts:
    """What rounding a matrix of so many ``weights`` to each number of bits is foreseen to cost, in nats a token."""

    weights: int
    nats: dict[int, float]


def costs_of_bits(
    model: StreamedModel, grid: Grid, samples: Tensor, tf32: TF32, world: World, progress: Progress
) -> dict[Place, BitCosts]:
    """Those of all matrices of ``model`` with each of the :attr:`.Grid.choices`, by this process's ``samples``.

        nats = 1/2 sum_o g_o (E H E^T)_oo,    E = W - its nearest numbers of the grid,

    where g_o is how sensitive the loss is to output o (:func:`.sensitivities`) and H the second moments of the inputs:
    to second order, what independent errors of all outputs add to the loss. Rounding on a text regains a part of it, of
    all matrices about the same. Some rows of each matrix stand for all.

    Cost: a backward pass and two forward passes on a quarter of the windows.
    """
    pilot = pilot_of(samples, _PILOT, world)
    sensitivity = measured(model, pilot, world, progress)
    found: dict[Place, BitCosts] = {}
    last = model.matrices()[-1].block
    with model.budget.lent() as budget:
        states = model.embed(pilot, budget=budget)
        for block in islice(model.stream(), last + 1):
            progress.stage(block.index, "allocation", len(states.hidden))
            for matrix, gram in _inputs(block, states, progress, world, tf32):
                with named(matrix.label):
                    found[matrix.place] = _costs(block, matrix, gram, grid, sensitivity[block.index][matrix.name])
            if block.index < last:
                block.advance(states)
    return world.received(found)


def _inputs(
    block: DecoderBlock, states: HiddenStates, progress: Progress, world: World, tf32: TF32
) -> Iterator[tuple[Matrix, Gram]]:
    matrices = {matrix.name: matrix for matrix in block.matrices}
    for group in block.input_grams(states, progress.step, world, tf32):
        gram = group.gram(shared=True)
        yield from ((matrices[name], gram) for name in group.names)


def _costs(block: DecoderBlock, matrix: Matrix, gram: Gram, grid: Grid, importance: Tensor) -> BitCosts:
    W = block.weight(matrix)
    rows = torch.randperm(len(W), generator=torch.Generator().manual_seed(0))[:_ROWS].sort().values
    W, importance = W[rows.to(W.device)], importance[rows].to(W.device)
    weighted = importance.sqrt().unsqueeze(1)
    dtype = scale_dtype(block.stored_dtype(matrix))
    scale = matrix.shape[0] / len(rows) / 2
    problem = LayerProblem(W * weighted, gram)
    nats = {}
    for bits in grid.choices:
        rounded, _ = to_nearest(W, grid.of(bits), dtype)
        nats[bits] = scale * problem.loss(rounded * weighted)
    return BitCosts(matrix.size, nats)


def choose_bits(costs: dict[Place, BitCosts], average: float) -> dict[Place, int]:
    """The bits of each matrix, ``average`` ones or a little fewer for each weight, at the least foreseen cost.

    Matrices get more bits in the order of what a bit more of each weight gains, a step at a time.
    """
    chosen = {place: min(each.nats) for place, each in costs.items()}
    left = average * sum(each.weights for each in costs.values())
    left -= math.fsum(chosen[place] * each.weights for place, each in costs.items())
    steps = [(gain, place, before, after) for place, each in costs.items() for gain, before, after in _steps(each)]
    for _, place, before, after in sorted(steps, key=lambda step: -step[0]):
        more = (after - before) * costs[place].weights
        if chosen[place] == before and more <= left:
            chosen[place] = after
            left -= more
    return chosen


def _steps(costs: BitCosts) -> Iterator[tuple[float, int, int]]:
    """What each bit more of a weight gains, from some bits to others, in the order of ever smaller gains.

    Bits that lie above a line between others are left out: a mixture of those others costs less.
    """
    bits, here = sorted(costs.nats), min(costs.nats)

    def gain(more: int, fewer: int) -> float:
        return (costs.nats[fewer] - costs.nats[more]) / ((more - fewer) * costs.weights)

    while here < bits[-1]:
        after = max((each for each in bits if each > here), key=lambda more: (gain(more, here), more))
        yield gain(after, here), here, after
        here = after


def foreseen(costs: dict[Place, BitCosts], chosen: dict[Place, int]) -> float:
    """What all matrices together are foreseen to cost with the ``chosen`` bits, in nats a token."""
    return math.fsum(costs[place].nats[bits] for place, bits in chosen.items())


def in_words(costs: dict[Place, BitCosts], chosen: dict[Place, int], grid: Grid) -> str:
    """What a record is to say of the ``chosen`` bits."""
    counts = {bits: sum(each == bits for each in chosen.values()) for bits in sorted({*chosen.values()})}
    which = ", ".join(f"{count:,} of {bits} bits" for bits, count in counts.items())
    weights = sum(each.weights for each in costs.values())
    mean = sum(bits * costs[place].weights for place, bits in chosen.items()) / weights
    return (
        f"{grid}: {which}, {mean:.3g} bits a weight, by what rounding each matrix is foreseen to cost the loss: "
        f"{foreseen(costs, chosen):.2g} nats a token in all, of which what is fitted on the text regains a part"
    )
