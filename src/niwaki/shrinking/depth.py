"""Which blocks go: those without which, after the repair, the model's predictions change least."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from niwaki.errors import NumericalError
from niwaki.layer.ridge import Ridge
from niwaki.models.block import DecoderBlock
from niwaki.models.hidden_states import HiddenStates, pieces
from niwaki.models.layout import Matrix
from niwaki.models.processes import World
from niwaki.models.spill import MemoryBudget, SpillList
from niwaki.models.streamed import LOGITS_PER_BATCH, StreamedModel
from niwaki.records.progress import Progress
from niwaki.runs.duration import passes
from niwaki.shrinking.bridge import (
    DAMPING,
    advance_with_inputs,
    last_matrix,
    summed_inputs,
    summed_residuals,
    with_change,
)

#: A run of neighbouring blocks: the first one, and the first one behind it.
Blocks = tuple[int, int]

#: Tokens that repairs are fitted to, and others on which predictions are compared, of all processes.
FITTED, _COMPARED = 16_384, 2_048
#: Predictions of one in so many of these are: neighbours are alike, and the head takes as long as many blocks.
_EVERY = 4
#: Logits, probabilities and their differences, which are in memory at once.
_COPIES = 4


@dataclass
class _Before:
    """The dense model up to a block behind which others may be removed."""

    block: int  # -1 for the embeddings
    matrix: Matrix | None  # what repairs; None where nothing does
    ridge: Ridge | None  # of its inputs
    fitted: SpillList  # its outputs
    compared: SpillList
    fitted_inputs: SpillList  # of the matrix; none where there is no matrix
    compared_inputs: SpillList


@torch.no_grad()
def costs_of_runs(
    model: StreamedModel, samples: Tensor, longest: int, world: World, progress: Progress
) -> dict[Blocks, float]:
    """What the removal of each run of up to ``longest`` neighbouring blocks costs, in nats a token.

    That is the KL divergence of the model without them from the dense one, on every fourth of about 2,048 tokens
    of ``samples`` (samples, length) int64, of which this is the process's share. The block before them is repaired (see
    :func:`.bridge.bridge`), fitted to about 16,384 other tokens: without that, runs would seem to cost more than single
    blocks here and there, which in the end cost more. Of a model without a head it is the squared error of the last
    hidden states, relative to them.

    Cost: one pass over the model's weights, in which all runs are under way: about half of ``longest`` times its depth
    forward passes for the tokens that are compared, and ``longest`` regressions for each block.

    Raises NumericalError where predictions are NaN or infinite.
    """
    fitted, compared = map(world.share, parts(torch.cat(world.collected(samples)), world.size))
    with model.budget.lent() as budget:
        return _Search(model, model.embed(fitted), model.embed(compared), longest, world, progress, budget).costs()


def operations_of_runs(model: StreamedModel, longest: int) -> float:
    """Those of :func:`costs_of_runs`, about, see :mod:`niwaki.runs.duration`."""
    return passes(model, _COMPARED, count=len(model.blocks) * longest / 2, head=True)


def parts(samples: Tensor, processes: int) -> tuple[Tensor, Tensor]:
    """(samples to fit to, samples to compare predictions on): different ones, where there are enough of them.

    There is one of each for each of the ``processes`` at least, and so many that two choose as one does.
    """
    length = samples.shape[1]
    count = max(processes, min(math.ceil(_COMPARED / length), max(2, len(samples) // 4), len(samples)))
    chosen = torch.zeros(len(samples), dtype=torch.bool)
    chosen[torch.arange(count).mul(len(samples)).div(count, rounding_mode="floor").long()] = True
    rest = samples[~chosen] if len(samples) >= 2 * count else samples
    return some_of(rest, FITTED, processes), samples[chosen]


def some_of(samples: Tensor, tokens: int, processes: int) -> Tensor:
    """Samples here and there with about so many ``tokens``, at least one for each of the ``processes``."""
    most = max(processes, math.ceil(tokens / samples.shape[1]))
    return samples[:: max(1, len(samples) // most)][:most]


@dataclass
class _Search:
    model: StreamedModel
    fitted: HiddenStates
    compared: HiddenStates
    longest: int
    world: World
    progress: Progress
    budget: MemoryBudget

    def costs(self) -> dict[Blocks, float]:
        """What all runs cost."""
        runs: dict[Blocks, HiddenStates] = {}
        before = deque([self._embeddings()], self.longest)
        for block in self.model.stream():
            self.progress.stage(block.index, "influence", 1 + len(runs))
            for states in runs.values():
                block.advance(states)
                self.progress.step()
            present = self._advanced(block)
            for each in before:
                blocks = (each.block + 1, block.index + 1)
                if self._can_go(range(*blocks)):
                    runs[blocks] = self._without(each)
            before.append(present)
            self.progress.step()
        found = divergences(self.model, self.compared, list(runs.values()), self.world)
        return dict(zip(runs, found, strict=True))

    def _can_go(self, blocks: range) -> bool:
        """Whether a model is left without them: the first blocks of an encoder and its decoder do more than others."""
        if self.model.pairs is not None:
            return not any(start in blocks for start in self.model.starts)
        return len(blocks) < len(self.model.blocks)

    def _embeddings(self) -> _Before:
        none = SpillList(self.budget)
        return _Before(-1, None, None, none, copied(self.compared, self.budget), none, none)

    def _advanced(self, block: DecoderBlock) -> _Before:
        """Runs ``block``, and keeps what a repair there needs."""
        matrix, inputs = last_matrix(block, self.compared), list[SpillList]()
        for states in (self.fitted, self.compared):
            inputs.append(advance_with_inputs(block, matrix, states, self.budget) if matrix else SpillList(self.budget))
            if not matrix:
                block.advance(states)
        # What all repairs with the matrix share: they differ in what its outputs should be.
        ridge = Ridge(summed_inputs(matrix, inputs[0], self.fitted.hidden, self.world), DAMPING) if matrix else None
        own = copied(self.fitted, self.budget), copied(self.compared, self.budget)
        return _Before(block.index, matrix, ridge, *own, *inputs)

    def _without(self, before: _Before) -> HiddenStates:
        """What is compared, without the blocks from ``before`` to the present one."""
        hidden = SpillList(self.budget)
        change = None
        if before.matrix and before.ridge:
            wanted = self.fitted.hidden
            C = summed_residuals(before.matrix, before.fitted_inputs, before.fitted, wanted, self.world)
            change = before.ridge.change(C)
        for i, states in enumerate(before.compared):
            if change is not None:
                states = with_change(states, before.compared_inputs[i], change)
            hidden.append(states)
        return self.compared.branch(hidden)


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
                    chosen = tokens[:, ::_EVERY]
                    count += chosen.numel()
                    p = head(hidden[:, ::_EVERY], chosen).float().log_softmax(-1)
                    for k, other in enumerate(some):
                        q = head(other[:, ::_EVERY], chosen).float().log_softmax(-1)
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


def cheapest(costs: Mapping[Blocks, float], depth: int, count: int) -> list[int]:
    """The ``count`` of ``depth`` blocks to remove, in ascending order: the runs whose ``costs`` sum to least.

    Runs do not touch, or they would be one. Of equal sums the one with the first blocks.
    """
    # By the number of blocks so far, of which the last one stays, and of those removed: the cost and what was removed.
    best: dict[tuple[int, int], tuple[float, list[int]]] = {(0, 0): (0.0, [])}
    for at in range(depth + 1):
        for removed in range(count + 1):
            if (at, removed) not in best or at == depth:
                continue
            cost, gone = best[at, removed]
            for stop in range(at, min(depth, at + count - removed) + 1):
                if stop > at and (at, stop) not in costs:
                    continue
                total = cost + (costs[at, stop] if stop > at else 0.0)
                place = (min(stop + 1, depth), removed + stop - at)
                if place not in best or total < best[place][0]:
                    best[place] = total, [*gone, *range(at, stop)]
    return best[depth, count][1]
