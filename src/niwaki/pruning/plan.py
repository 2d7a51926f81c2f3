"""Examines the dense model before it is pruned: how sparse each matrix may be, and which outputs matter most."""

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from niwaki.choices import TF32
from niwaki.effort import Planning
from niwaki.errors import named
from niwaki.layer.patterns import Pattern, Unstructured
from niwaki.layer.problem import Gram, LayerProblem
from niwaki.layer.solvers import Wanda
from niwaki.models.block import DecoderBlock
from niwaki.models.gram_capture import InputGram
from niwaki.models.hidden_states import HiddenStates
from niwaki.models.layout import Matrix
from niwaki.models.processes import World
from niwaki.models.sensitivity import measured, measured_couplings, pilot_of, row_weights
from niwaki.models.streamed import StreamedModel
from niwaki.pruning.mixed_bits import Place
from niwaki.pruning.request import PatternOf
from niwaki.records.progress import Progress
from niwaki.runs.store import Kept
from niwaki.texts.conversations import Samples

# How sparse each matrix may be, so that all together have a given number of zeros and lose the least.

#: The highest sparsity of a matrix, unless more is asked for: see :func:`ceiling`.
MOST = 0.99
#: Points of a curve between 0 and 1, interpolated between the measured ones.
_STEPS = 256


@dataclass(frozen=True)
class Curve:
    """What sparsity costs a matrix."""

    weights: int  # their number
    points: tuple[tuple[float, float], ...]  # (sparsity, loss), both increasing, from the lowest to the highest allowed

    def at(self, sparsity: float) -> float:
        """The loss at a sparsity, on straight lines between the points."""
        i = min(max(1, bisect.bisect_left(self.points, (sparsity,))), len(self.points) - 1)
        (before, less), (after, more) = self.points[i - 1], self.points[i]
        return less + (more - less) * (sparsity - before) / (after - before)


def ceiling(weights: Sequence[int], zeros: int) -> float:
    """The highest sparsity of matrices with so many ``weights``, of which ``zeros`` in total are to go.

    It leaves each matrix half of the mean density, or nothing where that is less than a weight.
    """
    if zeros <= sum(round(MOST * count) for count in weights):
        return MOST
    least = (1 - zeros / sum(weights)) / 2
    return 1 - least if least * min(weights) >= 1 else 1.0


def smooth(
    weights: int, measured: Sequence[tuple[float, float]], all_zero: float, least: float = 0.0, most: float = MOST
) -> Curve:
    """The curve of a matrix of which (sparsity, loss) was ``measured``, at increasing sparsities above 0.

    Logarithms of losses are interpolated; below the first point the loss goes to 0 as a power of the sparsity, and
    above the last one to ``all_zero``, the loss without any weights. Allowed are sparsities from ``least`` to ``most``,
    or ``least`` alone where that is not less.
    """
    points = [*measured, (1.0, all_zero)]
    sparsities = [sparsity for sparsity, _ in points]
    tiny = 1e-30  # of a matrix whose inputs are all 0
    losses = list(itertools.accumulate((max(loss, tiny) for _, loss in points), max))
    power = 1.0
    if len(measured) > 1:
        power = max(power, math.log(losses[1] / losses[0]) / math.log(sparsities[1] / sparsities[0]))

    def loss_at(sparsity: float) -> float:
        i = bisect.bisect_left(sparsities, sparsity)
        if i == 0:
            return losses[0] * math.pow(sparsity / sparsities[0], power)
        share = (sparsity - sparsities[i - 1]) / (sparsities[i] - sparsities[i - 1])
        return math.exp((1 - share) * math.log(losses[i - 1]) + share * math.log(losses[i]))

    steps = [step / _STEPS for step in range(_STEPS)]
    if most > MOST:  # where a step is too long
        steps = sorted({*steps, *sparsities})
    grid = [least, *(step for step in steps if least < step < most), *([most] if least < most else [])]
    return Curve(weights, tuple((sparsity, loss_at(sparsity)) for sparsity in grid))


class CostCurves:
    """The curves of several matrices, to share out any number of zeros among them where these cost least.

    For convex curves, as they nearly are, no other distribution costs less; of others the greatest convex curve below
    is used. Totals are exact as far as curves reach.
    """

    def __init__(self, curves: Sequence[Curve]) -> None:
        self._least = [round(curve.points[0][0] * curve.weights) for curve in curves]
        pieces = [
            ((after[1] - before[1]) / ((after[0] - before[0]) * curve.weights), i, after[0])
            for i, curve in enumerate(curves)
            for before, after in itertools.pairwise(_convex(curve.points))
        ]
        # Of one matrix in order, because the slopes of convex curves grow.
        self._steps = [(i, round(sparsity * curves[i].weights)) for _, i, sparsity in sorted(pieces)]
        self._totals, chosen, total = list[int](), list(self._least), sum(self._least)
        for i, count in self._steps:
            total += count - chosen[i]
            chosen[i] = count
            self._totals.append(total)

    def share_out(self, zeros: int) -> list[int]:
        """The number of zeros in each matrix, ``zeros`` in total."""
        if zeros <= sum(self._least):
            return list(self._least)
        whole = bisect.bisect_left(self._totals, zeros)
        last = dict(self._steps[:whole])
        chosen = [last.get(i, least) for i, least in enumerate(self._least)]
        if whole < len(self._steps):  # a part of that step
            chosen[self._steps[whole][0]] += zeros - sum(chosen)
        return chosen


def _convex(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of the greatest convex function that is nowhere above the points."""
    hull: list[tuple[float, float]] = []
    for x, y in points:
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x1) < (y - y1) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return hull


# The inputs of matrices that several blocks share, in all of these but the first, where each of them is pruned.


@dataclass
class LaterInputs:
    """The Gram matrices of inputs in later blocks, summed over these: one for all matrices that have the same."""

    _grams: dict[tuple[str, int | None], InputGram] = field(default_factory=dict)  # by what a matrix is in the files

    def add(self, matrices: Sequence[Matrix], gram: InputGram) -> None:
        """Adds the inputs that ``matrices`` have in one block."""
        before = self._grams.get(matrices[0].entry)
        total = gram if before is None else _sum(before, gram)
        self._grams |= dict.fromkeys([matrix.entry for matrix in matrices], total)

    def joined(self, block: DecoderBlock, grams: list[InputGram]) -> list[InputGram]:
        """``grams`` of the inputs in ``block`` with those in later blocks, which are freed, where there are any."""
        entries = {matrix.name: matrix.entry for matrix in block.matrices}
        joined: list[InputGram] = []
        for gram in grams:
            names: dict[InputGram | None, list[str]] = {}
            for name in gram.names:
                names.setdefault(self._grams.pop(entries[name], None), []).append(name)
            for later, chosen in names.items():
                here = replace(gram, names=chosen)
                joined.append(here if later is None else _sum(here, later))
        return joined


def later_inputs(model: StreamedModel, samples: Samples, tf32: TF32, world: World, progress: Progress) -> LaterInputs:
    """The later inputs of ``samples``, this process's share, in the dense model; over all processes."""
    later = LaterInputs()
    last = max((max(matrix.blocks, default=-1) for matrix in model.matrices()), default=-1)
    if last < 0:
        return later
    with model.budget.lent() as budget:
        states = model.embed(samples, budget=budget)
        for block in model.stream():
            progress.stage(block.index, "sharing", len(states.hidden))
            if block.shared:
                matrices = {matrix.name: matrix for matrix in block.shared}
                for gram in block.input_grams(states, world=world, tf32=tf32, matrices=block.shared):
                    later.add([matrices[name] for name in gram.names], gram)
            if block.index == last:
                break
            block.advance(states, progress.step)
    return later


def _sum(gram: InputGram, other: InputGram) -> InputGram:
    """The Gram matrix of the tokens of both, for the matrices of ``gram``."""
    tokens, borrowed = gram.tokens + other.tokens, gram.borrowed + other.borrowed
    share = (other.tokens + other.borrowed) / max(1, tokens + borrowed)
    return InputGram(gram.names, gram.H.lerp(other.H, share), tokens, borrowed)


#: Densities where the cost of sparsity is measured, relative to the requested one.
_DENSITIES = (2.2, 1.5, 1.0, 0.65, 0.35)
#: About how many rows of a matrix are pruned for that.
_ROWS = 256
#: What prunes them. Only the shape of the curves counts, not their height: those of solvers that take many times as
#: long give no better models (benchmarks/LOG.md).
_SOLVER = Wanda()


@dataclass(frozen=True)
class Plan(Kept):
    """What is decided before anything is pruned."""

    zeros: dict[Place, int] = field(default_factory=dict)  # of each matrix; empty where all have the same pattern
    #: For each matrix (out,), the weight of each output's squared error; empty where all count the same.
    importance: dict[Place, Tensor] = field(default_factory=dict)
    synthetic: Tensor | None = None  # (samples, length) int64, text that the dense model wrote, if any
    bits: dict[Place, float] = field(default_factory=dict)  # of each matrix; empty where all have as many
    #: Of matrices that are rounded, what errors of outputs cost together, how much tokens count: :class:`.Coupling`.
    together: dict[Place, Tensor] = field(default_factory=dict)
    tokens: dict[Place, Tensor] = field(default_factory=dict)

    def pattern(self, matrix: Matrix, usual: PatternOf) -> Pattern:
        """The pattern of ``matrix``, which without a plan would be its ``usual`` one."""
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
    squared outputs instead. Only matrices whose pattern can have another sparsity (:meth:`Pattern.at`) take part. Each
    has at least the zeros that it has already, unless it may ``revive`` them.
    """
    matrices = [matrix for matrix in model.matrices() if pattern_of(matrix).at(0.0) is not None]
    if not matrices:
        return Plan()
    if isinstance(samples, Tensor):
        samples = pilot_of(samples, planning.pilot, world)
    else:  # those of one process
        samples = samples[:: max(1, min(math.floor(1 / planning.pilot), len(samples)))]
    importance: dict[Place, Tensor] = {}
    if isinstance(samples, Tensor) and (planning.allocation == "loss" or planning.importance > 0):
        by_block = measured(model, samples, world, progress)
        importance = {matrix.place: by_block[matrix.block][matrix.name] for matrix in matrices}
    zeros: dict[Place, int] = {}
    if planning.allocation != "uniform":
        later = later_inputs(model, samples, tf32, world, progress)
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


def coupled(made: Plan, model: StreamedModel, width: int, samples: Tensor, world: World, progress: Progress) -> Plan:
    """The plan ``made``, and the couplings of all matrices, see :func:`.couplings`."""
    found = measured_couplings(model, samples, width, world, progress)
    by_place = {(i, name): coupling for i, here in enumerate(found) for name, coupling in here.items()}
    outputs, tokens = ({k: getattr(v, part) for k, v in by_place.items()} for part in ("outputs", "tokens"))
    return replace(made, together=outputs, tokens=tokens)


@dataclass
class _Costs:
    """Shares zeros out among matrices by what sparsity costs each of them."""

    matrices: list[Matrix]
    pattern_of: PatternOf
    world: World
    later: LaterInputs
    #: By matrix, what an output's error costs the loss; None where errors relative to the outputs count.
    importance: dict[Place, Tensor] | None
    revive: bool
    _curves: dict[Place, Curve] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._total = round(math.fsum(self.pattern_of(matrix).sparsity * matrix.size for matrix in self.matrices))
        self._most = ceiling([matrix.size for matrix in self.matrices], self._total)

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
