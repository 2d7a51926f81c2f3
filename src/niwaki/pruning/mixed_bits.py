"""How many bits each matrix has on a grid of mixed bits: few where their errors cost the loss least."""

import contextlib
import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from niwaki.checkpoints.tensors import raw_bytes
from niwaki.choices import TF32
from niwaki.errors import NiwakiError, named
from niwaki.files import read_cached, write_cached
from niwaki.layer.grid import AnyGrid, holding, scale_dtype
from niwaki.layer.problem import Gram, LayerProblem
from niwaki.layer.rounding import onto_grid, to_nearest, unsolved
from niwaki.models.block import DecoderBlock
from niwaki.models.hidden_states import HiddenStates, MemoryBudget
from niwaki.models.layout import Matrix
from niwaki.models.processes import World
from niwaki.models.sensitivity import measured, pilot_of
from niwaki.models.streamed import StreamedModel
from niwaki.records.progress import Progress
from niwaki.runs.stage import remembered

T = TypeVar("T")

#: What fitting leaves of the cost of rounding to the nearest, where it is not tried: 0.1 to 0.9 in single matrices.
_FITTED = 0.6
#: How much more matrices cost together than each alone, by what the sum is: on two models 1.05 times where it is 0.01
#: nats, 1.4 to 1.6 where it is 0.06 to 0.08: 1 and so many times the sum.
_TOGETHER = 8.0
#: The most that it is, from 0.12 nats on.
_AT_MOST = 2.0

#: A matrix by block and name.
Place = tuple[int, str]


@dataclass(frozen=True)
class BitCosts:
    """What rounding a matrix of so many ``weights`` to each number of bits is foreseen to cost, in nats a token."""

    weights: int
    nats: dict[float, float]


@dataclass(frozen=True)
class Look:
    """How closely matrices are looked at before anything is done to them.

    Attributes:
        tokens: On about how many tokens of the calibration text.
        rows: How many rows of each stand for all.
        fitted: Whether numbers are fitted, as in the run itself, or rounded to the nearest, which costs much less.
    """

    tokens: int = 8192
    rows: int = 128
    fitted: bool = True


#: How closely a run looks.
CLOSE = Look()
#: How closely a plan looks, in a twentieth of the time.
COARSE = Look(1024, 16, fitted=False)


@dataclass(frozen=True)
class Looked:
    """A matrix that is looked at before anything is done to it.

    Attributes:
        block: Its block, in memory.
        matrix: What it is.
        gram: That of its inputs on one half of the text, for what is fitted; other matrices may share it.
        other: That on the other half, by which errors count: what is fitted to few tokens looks too good on them.
        importance: (out,) what a squared error of each output costs the loss, as of :func:`.sensitivities`.
        look: How closely.
    """

    block: DecoderBlock
    matrix: Matrix
    gram: Gram
    other: Gram
    importance: Tensor
    look: Look

    def rows(self) -> tuple[Tensor, Callable[[Tensor], float]]:
        """(rows, in) weights that stand for all, and what others in their place cost the loss, in nats a token.

        That is half of the squared errors of all outputs, weighted by their importance.
        """
        W = self.block.weight(self.matrix)
        rows = torch.randperm(len(W), generator=torch.Generator().manual_seed(0))
        rows = rows[: self.look.rows].sort().values
        roots = self.importance[rows].to(W.device).sqrt().unsqueeze(1)
        W = W[rows.to(W.device)]
        problem, scale = LayerProblem(W * roots, self.other), self.matrix.shape[0] / len(rows) / 2
        return W, lambda What: scale * problem.loss(What * roots)


class AtEnd(Protocol):
    """What else is looked at with the same passes."""

    def changed(self, tokens: Tensor, budget: MemoryBudget) -> list[HiddenStates]:
        """The first block's inputs for some of the first of ``tokens`` (samples, length), otherwise than they are."""

    def see(self, halves: list[HiddenStates], changed: list[HiddenStates]) -> None:
        """Receives them after the last block, and those of the text itself in two halves, or one."""


class Found:
    """What looking at a model has found so far: kept in ``directory``, if any, for a call that goes on from there.

    For each block it has a list of the type ``kind``. Of several processes the first keeps it.
    """

    def __init__(self, directory: Path | None, kind: Any, world: World) -> None:
        self._directory, self._kind, self._world = directory if world.first else None, kind, world

    def sensitivity(self, find: Callable[[], list[dict[str, Tensor]]]) -> list[dict[str, Tensor]]:
        """What ``find`` finds, or has found."""
        kept = self.read("sensitivity", list[dict[str, list[float]]])
        if kept is not None:
            return [{name: torch.tensor(values) for name, values in each.items()} for each in kept]
        found = find()
        self.keep("sensitivity", [{name: values.tolist() for name, values in each.items()} for each in found])
        return found

    def of_block(self, block: int) -> dict[Place, Any] | None:
        """What was found of the matrices of a block; None where that is not known."""
        kept = self.read(f"block-{block}", self._kind)
        return None if kept is None else dict(kept)

    def read(self, name: str, kind: Any) -> Any:
        """What was kept under that name, of the type ``kind``; None where there is none."""
        return self._world.received(read_cached(self._directory / f"{name}.json", kind) if self._directory else None)

    def keep(self, name: str, value: Any, whole: bool = False) -> None:
        """Keeps ``value`` under that name: a part of what is found, or the ``whole``, which replaces the parts."""
        if self._directory:
            with contextlib.suppress(NiwakiError, OSError):  # it only takes longer the next time
                write_cached(self._directory / f"{name}.json", value)
                if whole:
                    for file in (*self._directory.glob("block-*.json"), self._directory / "sensitivity.json"):
                        file.unlink(missing_ok=True)


def examined(
    model: StreamedModel,
    samples: Tensor,
    tf32: TF32,
    world: World,
    progress: Progress,
    examine: Callable[[Looked], T],
    at_end: AtEnd | None = None,
    look: Look = CLOSE,
    kept: Found | None = None,
) -> dict[Place, T]:
    """What ``examine`` makes of each matrix of ``model``, by some of this process's ``samples`` (count, length) int64.

    What an earlier call has ``kept`` is not looked at again.

    Cost: two forward passes and one backward, and those of ``at_end``.
    """
    kept = kept or Found(None, None, world)
    share = min(1.0, look.tokens / sum(world.collected(samples.numel())))
    pilot = pilot_of(samples, share, world)
    sensitivity = kept.sensitivity(lambda: measured(model, pilot_of(samples, share / 2, world), world, progress))
    found: dict[Place, T] = {}
    last = model.matrices()[-1].block
    count = len(model.blocks) if at_end else last + 1
    with model.budget.lent() as budget:
        halves = [model.embed(half, budget=budget) for half in (pilot[::2], pilot[1::2]) if len(half)]
        changed = at_end.changed(halves[-1].tokens[0], budget) if at_end else []
        for block in islice(model.stream(), count):
            progress.stage(block.index, "allocation", sum(len(half.hidden) for half in halves))
            here = kept.of_block(block.index)
            if here is None and block.index <= last:
                here = {}
                for matrix, grams in _inputs(block, halves, progress, world, tf32):
                    with named(matrix.label):
                        importance = sensitivity[block.index][matrix.name]
                        here[matrix.place] = examine(Looked(block, matrix, grams[0], grams[-1], importance, look))
                kept.keep(f"block-{block.index}", [*here.items()])
            else:
                for states in halves:
                    block.advance(states)
            found |= here or {}
            for states in changed:
                block.advance(states)
        if at_end:
            at_end.see(halves, changed)
    return world.received(found)


def costs_of_bits(
    model: StreamedModel, grid: AnyGrid, samples: Tensor, tf32: TF32, world: World, progress: Progress
) -> dict[Place, BitCosts]:
    """The costs of all matrices of ``model`` with each of the :attr:`.Grid.choices`, by this process's ``samples``.

        nats = 1/2 sum_o g_o (E H E^T)_oo,    E = W - numbers of the grid,

    where g_o is how sensitive the loss is to output o (:func:`.sensitivities`) and H the second moments of the inputs:
    to second order, what independent errors of all outputs add to the loss. The numbers are the nearest ones, times
    what :func:`.onto_grid` leaves of their cost: a tenth in some matrices, nine tenths in others. That is seen with the
    fewest bits, the most and some between, and taken to change evenly from one to the next; where all are fitted, in
    two to four times the time, the bits that are chosen are foreseen to cost 1 to 3 % less. Some rows of each matrix
    stand for all, and some windows for all of them.
    """
    return remembered_costs(
        model, grid, samples, tf32, lambda: examined(model, samples, tf32, world, progress, partial(cost_of_bits, grid))
    )


def remembered_costs(
    model: StreamedModel, grid: AnyGrid, samples: Tensor, tf32: TF32, find: Callable[[], dict[Place, BitCosts]]
) -> dict[Place, BitCosts]:
    """What ``find`` finds, unless an earlier run of the same call has found it: see :func:`.remembered`."""
    text = hashlib.sha256(raw_bytes(samples)).hexdigest()
    how = grid.family, text, str(model.device), str(model.dtype), tf32
    return remembered("costs of bits", model.checkpoint, how, find)


def cost_of_bits(grid: AnyGrid, looked: Looked) -> BitCosts:
    """What is foreseen for one matrix: see :func:`costs_of_bits`."""
    W, cost = looked.rows()
    stored = scale_dtype(looked.block.stored_dtype(looked.matrix))
    choices = grid.choices(W.shape[1])
    held = looked.matrix.expert is None  # all experts of a block have one type
    grids = {bits: holding(grid.of(bits), W, stored) if held else grid.of(bits) for bits in choices}
    nats = {bits: cost(to_nearest(W, grids[bits], stored)[0]) for bits in choices}
    left = {choices[0]: _FITTED}
    if looked.look.fitted:
        problem = LayerProblem(W, looked.gram)
        solution = unsolved(problem)
        for bits in (choices[0], choices[len(choices) // 2], choices[-1]):
            fitted = cost(onto_grid(problem, solution, grids[bits], stored)[0].W)
            left[bits] = fitted / nats[bits] if nats[bits] else 1.0  # where weights are on that grid already
    shares = np.interp(choices, [*left], [*left.values()]).tolist()
    return BitCosts(looked.matrix.size, {bits: share * nats[bits] for bits, share in zip(choices, shares, strict=True)})


def _inputs(
    block: DecoderBlock, states: Sequence[HiddenStates], progress: Progress, world: World, tf32: TF32
) -> Iterator[tuple[Matrix, list[Gram]]]:
    """Each matrix with the Gram matrices of its inputs in all ``states``, which become the inputs of the next block."""
    matrices = {matrix.name: matrix for matrix in block.matrices}
    every = zip(*(block.input_grams(each, progress.step, world, tf32, advance=True) for each in states), strict=True)
    for groups in every:
        grams = [group.gram(shared=True) for group in groups]
        yield from ((matrices[name], grams) for name in groups[0].names)


def choose_alike(
    costs: dict[Place, BitCosts], average: float, matrices: Iterable[Matrix], alike: Callable[[Matrix], Hashable]
) -> dict[Place, float]:
    """:func:`choose_bits`, with the same for all ``matrices`` of which ``alike`` says the same."""
    which = {matrix.place: alike(matrix) for matrix in matrices}
    chosen = choose_bits(summed(costs, which), average)
    return {place: chosen[which[place]] for place in costs}


def summed(costs: dict[Place, BitCosts], which: Mapping[Place, T]) -> dict[T, BitCosts]:
    """The ``costs`` of all matrices together that have the same in ``which``."""
    sums = dict[T, BitCosts]()
    for place, each in costs.items():
        before = sums.get(which[place], BitCosts(0, dict.fromkeys(each.nats, 0.0)))
        nats = {bits: before.nats[bits] + more for bits, more in each.nats.items()}
        sums[which[place]] = BitCosts(before.weights + each.weights, nats)
    return sums


def choose_bits(costs: dict[T, BitCosts], average: float) -> dict[T, float]:
    """The bits of each matrix, ``average`` ones or a little fewer for each weight, at the least foreseen cost.

    Matrices get more bits in the order of what a bit more of each weight gains, a step at a time, if that is anything.
    """
    chosen = {place: min(each.nats) for place, each in costs.items()}
    left = average * sum(each.weights for each in costs.values())
    left -= math.fsum(chosen[place] * each.weights for place, each in costs.items())
    steps = [(gain, place, before, after) for place, each in costs.items() for gain, before, after in _steps(each)]
    for gain, place, before, after in sorted(steps, key=lambda step: -step[0]):
        more = (after - before) * costs[place].weights
        if chosen[place] == before and more <= left and gain > 0:
            chosen[place] = after
            left -= more
    return chosen


def _steps(costs: BitCosts) -> Iterator[tuple[float, float, float]]:
    """What each bit more of a weight gains, from some bits to others, in the order of ever smaller gains.

    Bits that lie above a line between others are left out: a mixture of those others costs less.
    """
    bits, here = sorted(costs.nats), min(costs.nats)

    def gain(more: float, fewer: float) -> float:
        return (costs.nats[fewer] - costs.nats[more]) / ((more - fewer) * costs.weights)

    while here < bits[-1]:
        after = max((each for each in bits if each > here), key=lambda more: (gain(more, here), more))
        yield gain(after, here), here, after
        here = after


def foreseen(costs: dict[Place, BitCosts], chosen: dict[Place, float]) -> float:
    """What all matrices are foreseen to cost with the ``chosen`` bits, in nats a token: the sum of what each does."""
    return math.fsum(costs[place].nats[bits] for place, bits in chosen.items())


def together(nats: float) -> float:
    """What errors of all matrices cost together that cost so many ``nats`` if each is the only one."""
    return nats * min(_AT_MOST, 1 + _TOGETHER * nats)


def in_words(costs: dict[Place, BitCosts], chosen: dict[Place, float], grid: AnyGrid) -> str:
    """What a record is to say of the ``chosen`` bits."""
    counts = {bits: sum(each == bits for each in chosen.values()) for bits in sorted({*chosen.values()})}
    which = ", ".join(f"{count:,} of {bits:g} bits" for bits, count in counts.items())
    weights = sum(each.weights for each in costs.values())
    mean = sum(bits * costs[place].weights for place, bits in chosen.items()) / weights
    return (
        f"{grid}: {which}, {mean:.3g} bits a weight, by what rounding each matrix is foreseen to cost the loss: "
        f"{together(foreseen(costs, chosen)):.2g} nats a token in all"
    )
