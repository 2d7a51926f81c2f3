"""Examines the dense model before it is pruned: how sparse each matrix may be, and which outputs matter most."""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from niwaki.choices import TF32
from niwaki.effort import Planning
from niwaki.errors import named
from niwaki.layer.patterns import Pattern, Unstructured
from niwaki.layer.problem import Gram, LayerProblem
from niwaki.layer.solvers import Wanda
from niwaki.models.block import DecoderBlock
from niwaki.models.hidden_states import HiddenStates
from niwaki.models.layout import Matrix
from niwaki.models.processes import World
from niwaki.models.sensitivity import measured, pilot_of, row_weights
from niwaki.models.streamed import StreamedModel
from niwaki.pruning.allocation import CostCurves, Curve, ceiling, outlier_ratios, rounded, smooth
from niwaki.pruning.later_inputs import LaterInputs, later_inputs
from niwaki.pruning.request import PatternOf
from niwaki.records.progress import Progress
from niwaki.runs.kept import Kept
from niwaki.texts.conversations import Samples

#: Densities where the cost of sparsity is measured, relative to the requested one.
_DENSITIES = (2.2, 1.5, 1.0, 0.65, 0.35)
#: About how many rows of a matrix are pruned for that.
_ROWS = 256
#: What prunes them. Only the shape of the curves counts, not their height: those of solvers that take many times as
#: long give no better models (benchmarks/LOG.md).
_SOLVER = Wanda()
#: An outlier, for OWL: a score this many times the mean. Yin et al. 2024, arXiv 2310.05175, table 6.
_OUTLIER = 5.0

#: A matrix by block and name.
Place = tuple[int, str]


@dataclass(frozen=True)
class Plan(Kept):
    """What is decided before anything is pruned."""

    zeros: dict[Place, int] = field(default_factory=dict)  # of each matrix; empty where all have the same pattern
    #: For each matrix (out,), the weight of each output's squared error; empty where all count the same.
    importance: dict[Place, Tensor] = field(default_factory=dict)
    synthetic: Tensor | None = None  # (samples, length) int64, text that the dense model wrote, if any
    bits: dict[Place, int] = field(default_factory=dict)  # of each matrix; empty where all have as many

    def pattern(self, matrix: Matrix, usual: PatternOf) -> Pattern:
        """That of ``matrix``, which without a plan would be its ``usual`` one."""
        pattern, zeros = usual(matrix), self.zeros.get(matrix.place)
        return pattern if zeros is None else _at(pattern, zeros / matrix.size)


def plan(
    model: StreamedModel,
    planning: Planning,
    pattern_of: PatternOf,
    samples: Samples,
    tf32: TF32,
    world: World,
    progress: Progress,
    revive: bool = False,
) -> Plan:
    """Examines the dense model as far as ``planning`` needs it, on this process's calibration ``samples``.

    ``allocation="loss"``: zeros go where the model's loss is expected to grow least. Some rows of each matrix are
    pruned to several sparsities; through their squared errors, weighted by how sensitive the loss is to these outputs
    (:mod:`niwaki.models.sensitivity`), goes a curve of what the next zero costs. "error" uses errors relative to the
    squared outputs instead, "owl" the share of outliers in each block (Yin et al. 2024). Only matrices whose pattern
    can have another sparsity (:meth:`Pattern.at`) take part. Each has at least the zeros that it has already, unless
    it may ``revive`` them.
    """
    matrices = [matrix for matrix in model.matrices() if pattern_of(matrix).at(0.0) is not None]
    if not matrices:
        return Plan()
    samples = _pilot(samples, planning.pilot, world)
    importance: dict[Place, Tensor] = {}
    if isinstance(samples, Tensor) and (planning.allocation == "loss" or planning.importance > 0):
        by_block = measured(model, samples, world, progress)
        importance = {matrix.place: by_block[matrix.block][matrix.name] for matrix in matrices}
    zeros: dict[Place, int] = {}
    if planning.allocation != "uniform":
        later = later_inputs(model, samples, tf32, world, progress)
        allocation: _Allocation
        if planning.allocation == "owl":
            allocation = _Outliers(matrices, pattern_of, world, later)
        else:
            by_loss = importance if planning.allocation == "loss" else None
            allocation = _Costs(matrices, pattern_of, world, later, by_loss, revive)
        last = matrices[-1].block
        with model.budget.lent() as budget:
            states = model.embed(samples, budget=budget)
            for block in itertools.islice(model.stream(), last + 1):
                progress.stage(block.index, "allocation", len(states.hidden))
                allocation.measure(block, states, tf32, progress.step)
                if block.index < last:
                    block.advance(states)
        zeros = allocation.zeros()
    power = planning.importance
    weights = {place: row_weights(value, power) for place, value in importance.items() if power}
    return Plan(zeros, weights)


def _pilot(samples: Samples, share: float, world: World) -> Samples:
    """This process's part of a ``share`` of the samples of all."""
    if isinstance(samples, Tensor):
        return pilot_of(samples, share, world)
    return samples[:: max(1, min(math.floor(1 / share), len(samples)))]  # those of one process


@dataclass
class _Allocation(ABC):
    """Shares zeros out among the matrices, by what is measured block by block."""

    matrices: list[Matrix]
    pattern_of: PatternOf
    world: World
    later: LaterInputs

    def __post_init__(self) -> None:
        self._total = round(math.fsum(self.pattern_of(matrix).sparsity * matrix.size for matrix in self.matrices))

    def measure(self, block: DecoderBlock, states: HiddenStates, tf32: TF32, done: Callable[[], None]) -> None:
        """Measures the matrices of ``block``, whose inputs are ``states``."""
        matrices = {matrix.name: matrix for matrix in self.matrices if matrix.block == block.index}
        if not matrices:
            return
        inputs: list[tuple[Matrix, Gram]] = []
        grams = block.input_grams(states, done, self.world, tf32, [*matrices.values()])
        for group in self.later.joined(block, grams):
            gram = group.gram(shared=True)
            inputs += [(matrices[name], gram) for name in group.names]
        self._measure(block, inputs)

    @abstractmethod
    def _measure(self, block: DecoderBlock, inputs: list[tuple[Matrix, Gram]]) -> None:
        """Measures the matrices of ``block``, each with its Gram matrix."""

    @abstractmethod
    def zeros(self) -> dict[Place, int]:
        """The number of zeros of each matrix."""


class _Outliers(_Allocation):
    """Shares zeros out among blocks by their outliers (OWL); all matrices of a block have the same sparsity."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ratios: list[float] = []  # of each block

    def _measure(self, block: DecoderBlock, inputs: list[tuple[Matrix, Gram]]) -> None:
        scores = torch.cat([(block.weight(matrix).abs() * gram.norm).flatten() for matrix, gram in inputs])
        self._ratios.append(float((scores > _OUTLIER * scores.mean()).float().mean()))

    def zeros(self) -> dict[Place, int]:
        groups = [[*group] for _, group in itertools.groupby(self.matrices, lambda matrix: matrix.block)]
        weights = [sum(matrix.size for matrix in group) for group in groups]
        least = _at(self.pattern_of(self.matrices[0]), 0.0).sparsity
        zeros: dict[Place, int] = {}
        shares = outlier_ratios(self._ratios, weights, self._total, least)
        for group, share, weight in zip(groups, shares, weights, strict=True):
            counts = rounded([share * matrix.size / weight for matrix in group], share)
            zeros |= zip([matrix.place for matrix in group], counts, strict=True)
        return zeros


@dataclass
class _Costs(_Allocation):
    """Shares zeros out among matrices by what sparsity costs each of them."""

    #: By matrix, what an output's error costs the loss; None where errors relative to the outputs count.
    importance: dict[Place, Tensor] | None
    revive: bool
    _curves: dict[Place, Curve] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._most = ceiling([matrix.size for matrix in self.matrices], self._total)

    def _measure(self, block: DecoderBlock, inputs: list[tuple[Matrix, Gram]]) -> None:
        mine: dict[Place, Curve] = {}
        for turn, (matrix, gram) in enumerate(inputs, 1):
            if turn % self.world.size == self.world.rank:
                with named(matrix.label):
                    mine[matrix.place] = self._curve(block.weight(matrix), gram, matrix)
        for curves in self.world.collected(mine):
            self._curves |= curves

    def _curve(self, W: Tensor, gram: Gram, matrix: Matrix) -> Curve:
        usual = self.pattern_of(matrix)
        highest = usual.highest_sparsity(matrix.shape)
        most = min(self._most, highest)
        least = _at(usual, 0.0).sparsity
        if not self.revive:
            least = max(least, 1 - int(W.count_nonzero()) / W.numel())
        # Not at even distances, because heads and their parts have these too.
        rows = torch.randperm(len(W), generator=torch.Generator().manual_seed(0))
        rows = rows[: max(_ROWS, math.ceil(len(W) / 16))].sort().values
        W = W[rows.to(W.device)]
        if self.importance is None:
            problem = LayerProblem(W, gram)
            scale = 1 / problem.power if problem.power > 0 else 1.0
        else:
            W.mul_(self.importance[matrix.place][rows].sqrt().unsqueeze(1).to(W.device))
            problem, scale = LayerProblem(W, gram), matrix.size / W.numel()
        losses, power = dict[float, float](), problem.power * scale
        for density in _DENSITIES:
            pattern = _at(usual, min(highest, 1 - min(0.9, (1 - usual.sparsity) * density)))
            if pattern.sparsity not in losses and pattern.sparsity > 0:
                losses[pattern.sparsity] = _SOLVER(problem, _chosen_at_once(pattern, matrix)).error * power
        return smooth(matrix.size, sorted(losses.items()), power, least, most)

    def zeros(self) -> dict[Place, int]:
        places = [matrix.place for matrix in self.matrices]
        curves = CostCurves([self._curves[place] for place in places])
        return dict(zip(places, curves.share_out(self._total), strict=True))


def _at(pattern: Pattern, sparsity: float) -> Pattern:
    # A matrix of which nothing stays has a sparsity below 1, too, of which the number of zeros is rounded.
    changed = pattern.at(min(sparsity, math.nextafter(1.0, 0.0)))
    assert changed is not None
    return changed


def _chosen_at_once(pattern: Pattern, matrix: Matrix) -> Pattern:
    """``pattern``, or in the place of two factors one matrix with as many weights, whose mask takes no iterations."""
    if not pattern.has_factors:
        return pattern
    return Unstructured(1 - sum(pattern.kept_in_factors(matrix.shape)) / matrix.size)
