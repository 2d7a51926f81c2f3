"""Smaller models side by side, in one pass over the dense model's weights: how far their predictions are from its."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from niwaki.errors import NumericalError, named
from niwaki.layer.problem import Gram, LayerProblem
from niwaki.layer.ridge import Ridge
from niwaki.layer.unit_removal import removals_of_units
from niwaki.models.block import DecoderBlock
from niwaki.models.hidden_states import HiddenStates, pieces
from niwaki.models.layout import Matrix
from niwaki.models.processes import World
from niwaki.models.spill import MemoryBudget, SpillList
from niwaki.models.streamed import LOGITS_PER_BATCH, StreamedModel
from niwaki.records.progress import Progress
from niwaki.shrinking.bridge import (
    DAMPING,
    advance_with_inputs,
    last_matrix,
    summed_inputs,
    summed_residuals,
    with_change,
)
from niwaki.shrinking.units import ColumnUnits

#: Predictions of one in so many tokens are compared: neighbours are alike, and the head takes as long as many blocks.
EVERY = 4
#: Logits, probabilities and their differences, which are in memory at once.
_COPIES = 4


@dataclass
class _Repair:
    """The dense model behind a block after which others are gone, for the repair of its last matrix."""

    matrix: Matrix
    inputs: SpillList
    outputs: SpillList  # of the block
    #: Of its inputs, which all repairs with the matrix share; where it loses columns, its weights (out, in) and H.
    ridge: Ridge | tuple[Tensor, Tensor]


@dataclass
class _Gap:
    """Blocks that are gone, behind which the dense model has not come yet."""

    start: int  # the block before them
    inputs: SpillList  # of its last matrix
    change: Tensor | None  # (out, in) float32, what the removal of units did to that


@dataclass
class Way:
    """A model without ``blocks``, and in the others without so many units of each kind."""

    blocks: Sequence[int]
    units: Mapping[str, int] = field(default_factory=dict)
    states: HiddenStates | None = None  # None as long as they are the dense model's
    gap: _Gap | None = None


@dataclass
class Trial:
    """Runs all ``ways`` on the tokens that are ``compared``, each block repaired or cut by what is ``fitted``.

    The block before a gap is repaired (see :func:`.bridge.bridge`) on the inputs that the dense model has. What blocks
    hand on that are gone stays the dense model's.
    """

    model: StreamedModel
    fitted: HiddenStates
    compared: HiddenStates
    ways: Sequence[Way]
    world: World
    progress: Progress
    budget: MemoryBudget
    kinds: Sequence[ColumnUnits] = ()
    importance: Mapping[tuple[int, str], Tensor] = field(default_factory=dict)

    def costs(self) -> list[float]:
        """What all ways cost, see :func:`divergences`."""
        repairs: dict[int, _Repair] = {}
        for block in self.model.stream():
            at = block.index
            for way in self.ways:
                if way.states is None and (way.units or at in way.blocks or at + 1 in way.blocks):
                    way.states = self.compared.branch(copied(self.compared, self.budget))
            present = [way for way in self.ways if way.states and at not in way.blocks]
            self.progress.stage(at, "influence", 2 + len(present))
            grams = self._grams(block)
            self.progress.step()
            repair = self._dense(block, any(at + 1 in way.blocks for way in present))
            if repair:
                repairs[at] = repair
            self.progress.step()
            self._cut(block, self.kinds, grams, present, repair)
            residuals: dict[int, Tensor] = {}
            for way in self.ways:
                if way.states and at in way.blocks:
                    way.states.arguments.adopt(self.compared.arguments, at)
                if way.gap and at > way.gap.start and at + 1 not in way.blocks:
                    self._repair(way, way.gap, repairs[way.gap.start], residuals)
                    way.gap = None
            waiting = {way.gap.start for way in self.ways if way.gap}
            repairs = {start: each for start, each in repairs.items() if start in waiting}
        return divergences(self.model, self.compared, [way.states or self.compared for way in self.ways], self.world)

    def _grams(self, block: DecoderBlock) -> dict[str, Gram]:
        """Of the inputs that the dense model has, by the name of each matrix that loses columns."""
        if not self.kinds:
            return {}
        matrices = [kind.matrices[block.index] for kind in self.kinds]
        found = block.input_grams(self.fitted, world=self.world, matrices=matrices)
        return {name: each.gram(shared=False) for each in found for name in each.names}

    def _cut(
        self,
        block: DecoderBlock,
        kinds: Sequence[ColumnUnits],
        grams: Mapping[str, Gram],
        ways: Sequence[Way],
        repair: _Repair | None,
    ) -> None:
        """Runs ``block`` for ``ways``, each without its units of ``kinds``; one number of them after the other."""
        if not kinds:
            for way in ways:
                self._advance(block, way, repair)
                self.progress.step()
            return
        matrix, kind = kinds[0].matrices[block.index], kinds[0].kind
        numbers = sorted({way.units.get(kind, 0) for way in ways})
        W = block.weight(matrix)
        for number, weights in self._solved(kinds[0], matrix, W, grams[matrix.name], numbers):
            block.put(matrix, block.stored(matrix, weights))
            some = [way for way in ways if way.units.get(kind, 0) == number]
            self._cut(block, kinds[1:], grams, some, repair)

    def _solved(
        self, units: ColumnUnits, matrix: Matrix, W: Tensor, gram: Gram, numbers: Sequence[int]
    ) -> Iterator[tuple[int, Tensor]]:
        """``numbers`` in ascending order, with the weights (out, in) without so many of ``units``."""
        counts = [number for number in numbers if number]
        if counts != numbers:
            yield 0, W
        if counts:
            with named(matrix.label):
                rows = self.importance.get(matrix.place)
                for count, each in zip(
                    counts, removals_of_units(LayerProblem(W, gram), units.size, counts, rows), strict=True
                ):
                    yield count, each.W

    def _dense(self, block: DecoderBlock, is_before_gap: bool) -> _Repair | None:
        """Runs the dense ``block``; what a repair there needs, if others ``is_before_gap`` and it can be repaired."""
        matrix = last_matrix(block, self.compared) if is_before_gap else None
        block.advance(self.compared)
        if matrix is None:
            block.advance(self.fitted)
            return None
        inputs = advance_with_inputs(block, matrix, self.fitted, self.budget)
        H = summed_inputs(matrix, inputs, self.fitted.hidden, self.world)
        ridge = (block.weight(matrix), H) if self.kinds else Ridge(H, DAMPING)
        return _Repair(matrix, inputs, copied(self.fitted, self.budget), ridge)

    def _advance(self, block: DecoderBlock, way: Way, repair: _Repair | None) -> None:
        """Runs ``block``, without the units that go, and before a gap keeps what its repair needs."""
        assert way.states
        if not repair or block.index + 1 not in way.blocks:
            block.advance(way.states)
            return
        inputs, change = advance_with_inputs(block, repair.matrix, way.states, self.budget), None
        if isinstance(repair.ridge, tuple):
            own = repair.matrix.within(block.module.get_parameter(repair.matrix.parameter))
            change = own.float() - repair.ridge[0]
        way.gap = _Gap(block.index, inputs, change)

    def _repair(self, way: Way, gap: _Gap, repair: _Repair, residuals: dict[int, Tensor]) -> None:
        """Adds to the outputs of the block before ``gap`` what its last matrix, repaired, would add."""
        assert way.states
        if gap.start not in residuals:
            parts = repair.matrix, repair.inputs, repair.outputs, self.fitted.hidden
            residuals[gap.start] = summed_residuals(*parts, self.world)
        C, ridge = residuals[gap.start], repair.ridge
        if isinstance(ridge, tuple):
            weights, H = ridge
            if gap.change is not None and gap.change.any():
                C = C - gap.change @ H  # what the units that go have left undone
                kept = (weights + gap.change != 0).any(dim=0)
                H, C = H * kept * kept.unsqueeze(1), C * kept
            ridge = Ridge(H, DAMPING)
        change = ridge.change(C)
        for i, inputs in enumerate(gap.inputs):
            way.states.hidden[i] = with_change(way.states.hidden[i], inputs, change)


def copied(states: HiddenStates, budget: MemoryBudget) -> SpillList:
    """The hidden states of each batch as they are now."""
    copy = SpillList(budget)
    for hidden in states.hidden:
        copy.append(hidden)
    return copy


def divergences(model: StreamedModel, dense: HiddenStates, others: Sequence[HiddenStates], world: World) -> list[float]:
    """How far the predictions from the last hidden states of each of ``others`` are from those of ``dense``.

    That is the KL divergence in nats a token, on every fourth token; of a model without a head the squared error of the
    states, relative to them. NumericalError where predictions are NaN or infinite.
    """
    sums, count = torch.zeros(len(others), dtype=torch.float64), 0.0
    if model.has_head:
        rows = max(1, LOGITS_PER_BATCH // (_COPIES * model.config.vocab_size))
        with model.head() as head:
            for i, states in enumerate(dense.hidden):
                all_states = (each.hidden[i] for each in others)
                for hidden, tokens, *some in pieces(rows, states, dense.tokens[i], *all_states):
                    chosen = tokens[:, ::EVERY]
                    count += chosen.numel()
                    p = head(hidden[:, ::EVERY], chosen).float().log_softmax(-1)
                    for k, other in enumerate(some):
                        q = head(other[:, ::EVERY], chosen).float().log_softmax(-1)
                        sums[k] += float((p.exp() * (p - q)).sum(dtype=torch.float64))
    else:
        for i, states in enumerate(dense.hidden):
            count += float(states.double().square().sum())
            for k, each in enumerate(others):
                sums[k] += float((each.hidden[i].double() - states.double()).square().sum())
    world.sum([sums])
    costs = (sums / sum(world.collected(count))).tolist()
    if not all(map(math.isfinite, costs)):
        raise NumericalError("predictions are NaN or infinite on the calibration text; try dtype float32")
    return [max(0.0, cost) for cost in costs]
