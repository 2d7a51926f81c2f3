"""Which blocks, heads and neurons go: those without which predictions change least, alone or to a given size."""

import inspect
import math
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from niwaki.effort import Effort
from niwaki.errors import UnsupportedModelError, UsageError
from niwaki.models.processes import World
from niwaki.models.sensitivity import measured, pilot_of, row_weights
from niwaki.models.streamed import StreamedModel
from niwaki.records.progress import Progress
from niwaki.records.record import Record
from niwaki.records.wording import counted
from niwaki.runs.duration import passes
from niwaki.runs.stage import Run, joined, written
from niwaki.runs.store import Kept
from niwaki.shrinking.configuration import Tensors
from niwaki.shrinking.trial import RemovalTrial, Variant
from niwaki.shrinking.units import ColumnUnits, Removal, heads_of, neurons_of
from niwaki.windows import Windows

# Which blocks go: those without which, after the repair, the model's predictions change least.

#: A run of neighbouring blocks: the first one, and the first one behind it.
Blocks = tuple[int, int]

#: What the parts of blocks call the cache that they are given.
_CACHES = {"past_key_values", "past_key_value", "cache_params", "layer_past", "past_states"}
#: Tokens of all processes that repairs are fitted to.
FITTED = 16_384
#: Others of all processes on which predictions without a run of blocks are compared.
_RUNS_COMPARED = 2_048


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
    depth = len(model.blocks)
    runs = [(start, stop) for stop in range(1, depth + 1) for start in range(max(0, stop - longest), stop)]
    runs = [run for run in runs if _can_go(model, range(*run))]
    with model.budget.lent() as budget:
        ways = [Variant(range(*run)) for run in runs]
        trial = RemovalTrial(model, model.embed(fitted), model.embed(compared), ways, world, progress, budget)
        return dict(zip(runs, trial.costs(), strict=True))


def _can_go(model: StreamedModel, blocks: range) -> bool:
    """Whether a model is left without them: the first blocks of an encoder and its decoder do more than others."""
    if model.pairs is not None:
        return not any(start in blocks for start in model.starts)
    return len(blocks) < len(model.blocks)


def operations_of_runs(model: StreamedModel, longest: int) -> float:
    """About how many operations :func:`costs_of_runs` takes, see :mod:`niwaki.runs.duration`."""
    return passes(model, _RUNS_COMPARED, count=len(model.blocks) * longest / 2, head=True)


def parts(samples: Tensor, processes: int) -> tuple[Tensor, Tensor]:
    """(samples to fit to, samples to compare predictions on): different ones, where there are enough of them.

    There is one of each for each of the ``processes`` at least, and so many that two choose as one does.
    """
    length = samples.shape[1]
    count = max(processes, min(math.ceil(_RUNS_COMPARED / length), max(2, len(samples) // 4), len(samples)))
    chosen = torch.zeros(len(samples), dtype=torch.bool)
    chosen[torch.arange(count).mul(len(samples)).div(count, rounding_mode="floor").long()] = True
    rest = samples[~chosen] if len(samples) >= 2 * count else samples
    return some_of(rest, FITTED, processes), samples[chosen]


def some_of(samples: Tensor, tokens: int, processes: int) -> Tensor:
    """Samples here and there with about so many ``tokens``, at least one for each of the ``processes``."""
    most = max(processes, math.ceil(tokens / samples.shape[1]))
    return samples[:: max(1, len(samples) // most)][:most]


def kinds_of(model: StreamedModel) -> list[frozenset[str]]:
    """How each block remembers what was before: the classes of its parts that take a cache.

    Programs that continue texts expect each of them at least once in a model, attention among others.
    """
    return [
        frozenset(
            type(module).__name__
            for module in block.modules()
            if module is not block and _CACHES & inspect.signature(module.forward).parameters.keys()
        )
        for block in model.blocks
    ]


def most_blocks(model: StreamedModel) -> int:
    """How many blocks can go at most: one of each kind stays, and the first of an encoder and of its decoder."""
    return len(model.blocks) - max(len(model.starts), len({*kinds_of(model)}))


def cheapest(costs: Mapping[Blocks, float], kinds: Sequence[Hashable], count: int) -> list[int]:
    """The ``count`` blocks to remove, in ascending order: the runs whose ``costs`` sum to least.

    Of each of the ``kinds`` of blocks at least one stays. Runs do not touch, or they would be one. Of equal sums the
    one with the first blocks.
    """
    depth, all_kinds = len(kinds), frozenset(kinds)
    # By the number of blocks so far, of which the last one stays, of those removed, and the kinds of those that stay:
    # the cost and what was removed.
    best: dict[tuple[int, int, frozenset[Hashable]], tuple[float, list[int]]] = {(0, 0, frozenset()): (0.0, [])}
    for at in range(depth):
        here = sorted((item for item in best.items() if item[0][0] == at), key=lambda item: item[0][1])
        for (_, removed, stay), (cost, gone) in here:
            for stop in range(at, min(depth, at + count - removed) + 1):
                if stop > at and (at, stop) not in costs:
                    continue
                total = cost + (costs[at, stop] if stop > at else 0.0)
                place = (min(stop + 1, depth), removed + stop - at, stay | {*kinds[stop : stop + 1]})
                if place not in best or total < best[place][0]:
                    best[place] = total, [*gone, *range(at, stop)]
    return best[depth, count, all_kinds][1]


#: Runs of removed blocks are at most so long: what longer ones cost takes as long to measure for each block more.
LONGEST_RUN = 4
#: At most so much goes of the blocks, and of the heads and the neurons of each block that stays.
_MOST = {"blocks": 0.5, "heads": 0.67, "neurons": 0.75}
#: At most so many numbers of blocks are tried.
_BLOCKS = 12
#: At most so many numbers of heads are tried with each number of blocks.
_HEADS = 4
#: What several kinds have to cost less than the best one alone: what fits gain afterwards is not the same for all.
_MARGIN = 0.02
#: Tokens on which predictions are compared where repairs are fitted to text of the model's own.
_COMPARED = 4_096


@dataclass(frozen=True)
class Combination:
    """What goes: blocks by their numbers, and of each block that stays so many units of each kind."""

    blocks: tuple[int, ...]
    units: Mapping[str, int]  # by kind, where any go

    @property
    def counts(self) -> dict[str, int]:
        """How many go of each kind, where any go."""
        return {**({"blocks": len(self.blocks)} if self.blocks else {}), **self.units}

    def __str__(self) -> str:
        return ", ".join(counted(count, kind.removesuffix("s")) for kind, count in self.counts.items())


@dataclass(frozen=True)
class Combinations:
    """All that can be removed from a model, and how many parameters are to be left."""

    model: StreamedModel
    tensors: Tensors
    kinds: list[ColumnUnits]  # heads or neurons or both
    target: int

    @classmethod
    def all_of(cls, model: StreamedModel, tensors: Tensors) -> "tuple[Combinations, list[str]]":
        """With no target yet; and why heads or neurons stay."""
        kinds, stay = [], []
        for find in (heads_of, neurons_of):
            try:
                kinds.append(find(model))
            except UnsupportedModelError as error:
                stay.append(f"{error}; their number stays")
        return cls(model, tensors, kinds, 0), stay

    def check(self) -> None:
        """UsageError where nothing is to go, or more than can."""
        everything, depth, least = self.everything, len(self.model.blocks), self.least
        if self.target >= everything:
            raise UsageError(f"parameters {self.target:,}: the model has no more than that ({everything:,})")
        if self.target < least:
            kinds = ", ".join([f"{self.most_blocks} of {depth} blocks", *(f"most {kind.kind}" for kind in self.kinds)])
            raise UsageError(
                f"parameters {self.target:,} of {everything:,}: without {kinds} {least:,} are left; give at least "
                f"{least / everything:.2f}, or shrink twice"
            )

    @cached_property
    def everything(self) -> int:
        """How many parameters there are."""
        return self.tensors.parameters(self.model, [])

    @cached_property
    def least(self) -> int:
        """How many are left where the most that can goes."""
        removals = [kind.without(self._counts(kind)[-1]) for kind in self.kinds]
        return self.tensors.parameters(self.model, removals, self._smallest[: self.most_blocks])

    @cached_property
    def most_blocks(self) -> int:
        """How many blocks go at most: what brings it to its size whichever they are, and not more than half of them."""
        most = min(int(_MOST["blocks"] * len(self.model.blocks)), most_blocks(self.model))
        return next((n for n in range(1, most) if self._size([], self._smallest[:n]) <= self.target), most)

    @cached_property
    def _smallest(self) -> list[int]:
        """The blocks, those of the fewest parameters first: of several kinds the small ones may cost least."""
        return sorted(range(len(self.model.blocks)), key=lambda block: -self._size([], [block]))

    def removals(self, units: Mapping[str, int]) -> list[Removal]:
        """The removals of so many ``units`` of each kind."""
        return [kind.without(units[kind.kind]) for kind in self.kinds if kind.kind in units]

    def of(self, costs: Mapping[Blocks, float]) -> list[Combination]:
        """What to try, where runs of blocks have these ``costs``: for numbers of blocks and heads, as many neurons.

        Each leaves at most the parameters that are wanted, and would leave more with any fewer units of the last kind.
        """
        found, kinds = [], kinds_of(self.model)
        dropped = [cheapest(costs, kinds, count) for count in _evenly(range(self.most_blocks + 1), _BLOCKS)]
        for few in self._few():
            for blocks in dropped:
                if (last := self._last(few, blocks)) is not None:
                    found.append(Combination(tuple(blocks), {each.kind: each.count for each in [*few, *last]}))
                    if not last:
                        break  # with more blocks more would go than has to
        return found

    def operations(self) -> float:
        """About how many operations finding the cheapest one takes, see :mod:`niwaki.runs.duration`."""
        few = 1 + sum(min(_HEADS - 1, len(self._counts(kind))) for kind in self.kinds[:-1])
        ways = few * min(_BLOCKS, self.most_blocks + 1)
        searched = operations_of_runs(self.model, min(self.most_blocks, LONGEST_RUN))
        return searched + passes(self.model, _COMPARED, count=ways, head=True)

    def _few(self) -> Iterator[list[Removal]]:
        """What goes of the kinds of which few numbers are tried: all kinds but the last."""
        yield []
        for kind in self.kinds[:-1]:
            for count in _evenly(self._counts(kind), _HEADS - 1):
                yield [kind.without(count)]

    def _last(self, few: list[Removal], blocks: Sequence[int]) -> list[Removal] | None:
        """What goes of the last kind beside the rest, an empty list for nothing; None where all is not enough."""
        if self._size(few, blocks) <= self.target:
            return []
        for kind in self.kinds[-1:]:
            counts = self._counts(kind)
            at = bisect_left(counts, -self.target, key=lambda n: -self._size([*few, kind.without(n)], blocks))
            if at < len(counts):
                return [kind.without(counts[at])]
        return None

    def _counts(self, kind: ColumnUnits) -> list[int]:
        return [count for count in kind.counts if count <= _MOST[kind.kind] * kind.units]

    def _size(self, removals: Sequence[Removal], blocks: Sequence[int]) -> int:
        return self.tensors.parameters(self.model, removals, blocks)


def best_of(ways: Sequence[Combination], costs: Sequence[float]) -> Combination:
    """The one of ``ways`` that costs least; one of a single kind, unless more kinds cost less by a margin."""
    in_order = sorted(zip(costs, ways, strict=True), key=lambda each: each[0])
    least, best = in_order[0]
    alone = [each for each in in_order if len(each[1].counts) == 1]
    return alone[0][1] if alone and least > (1 - _MARGIN) * alone[0][0] else best


def note_on(chosen: str, costs: Mapping[str, float], predicts: bool, few: int = 3) -> str:
    """What the record says of the ``chosen`` combination, and of the ``few`` that cost least."""
    best = sorted(costs, key=costs.__getitem__)[:few]
    others = ", ".join(f"{words}: {costs[words]:.3g}" for words in best if words != chosen)
    beside = f" ({others})" if others else ""
    changed = "the predictions on the calibration text change by {} nats"
    if not predicts:
        changed = "the states behind the last block change by {} of their squares on the calibration text"
    return (
        f"without {chosen} {changed.format(f'{costs[chosen]:.3g}')}, before blocks are fitted; that was chosen of "
        f"{len(costs)} ways to this size{beside}"
    )


def _evenly(numbers: Sequence[int], most: int) -> list[int]:
    """At most so many of ``numbers``, with the first and the last one."""
    if len(numbers) <= most:
        return [*numbers]
    return [numbers[round(i * (len(numbers) - 1) / (most - 1))] for i in range(most)]


@torch.no_grad()
def costs_of_combinations(
    model: StreamedModel,
    samples: Tensor,
    own: Tensor | None,
    combinations: Sequence[Combination],
    kinds: Sequence[ColumnUnits],
    importance: Mapping[tuple[int, str], Tensor],
    world: World,
    progress: Progress,
) -> list[float]:
    """What each of ``combinations`` costs, in nats a token, as in :func:`.depth.costs_of_runs`.

    Heads and neurons are chosen, with ``importance`` by block and matrix where there is any, and the matrices that they
    go into fitted, as in the removal itself, but on the inputs that the dense model has. The block before a gap is
    repaired on these inputs too. The predictions are those of the whole smaller model.

    ``samples`` (samples, length) int64 are the process's share of the given text. Where there is ``own`` text, which
    the dense model wrote and all processes have, all is fitted to that and compared on the given one: what is compared
    on text of the kind that it was fitted to looks better than it is elsewhere, and heads and blocks the more so.

    Cost: one pass over the model's weights, in which all are under way: a forward pass for the tokens that are compared
    for each, and for each block one choice of each kind and a regression for each number of units.
    """
    given = torch.cat(world.collected(samples))
    if own is None:
        texts = parts(given, world.size)
    else:
        texts = some_of(own, FITTED, world.size), some_of(given, _COMPARED, world.size)
    fitted, compared = map(world.share, texts)
    with model.budget.lent() as budget:
        dense, others = model.embed(fitted), model.embed(compared)
        ways = [Variant(each.blocks, each.units) for each in combinations]
        return RemovalTrial(model, dense, others, ways, world, progress, budget, kinds, importance).costs()


# What is decided before anything is removed: text to calibrate on, outputs that matter, and blocks to remove.


@dataclass(frozen=True)
class ShrinkPlan(Kept):
    """What is decided before the first block."""

    synthetic: Tensor | None  # (samples, length) int64, text that the dense model wrote, if any
    dropped: list[int]  # blocks to remove, in ascending order
    influence: list[float]  # of each block, what its removal alone would cost; empty where none is removed
    #: Of matrices that lose columns, by block and name (out,): what to weight outputs by.
    importance: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    #: Of each kind of units how many go from each block, where that was looked for; and what each way would cost.
    units: dict[str, int] = field(default_factory=dict)
    tried: dict[str, float] = field(default_factory=dict)


def planned(
    model: StreamedModel,
    effort: Effort,
    windows: Windows,
    columns: Sequence[Removal],
    count: int,
    combinations: Combinations | None,
    record: Record,
    run: Run,
) -> ShrinkPlan:
    """The plan for the removal of ``count`` blocks and of ``columns``, or of one of ``combinations``.

    All is decided by the dense model. ``windows`` are the process's share of the calibration text.
    """
    samples, synthetic = windows.tokens, None
    if effort.synthetic:
        synthetic = written(run, model, record, effort.synthetic, samples, windows.bos)
        run.clock.lap("plan")
    importance: dict[tuple[int, str], Tensor] = {}
    kinds = combinations.kinds if combinations else columns
    if kinds and effort.plan.importance:
        pilot = pilot_of(samples, effort.plan.pilot, run.world)
        sensitivity = measured(model, pilot, run.world, run.progress)
        places = [matrix.place for each in kinds for matrix in each.matrices]
        importance = {(at, name): row_weights(sensitivity[at][name], effort.plan.importance) for at, name in places}
        run.clock.lap("plan")
    plan = ShrinkPlan(synthetic, [], [], importance)
    longest = min(combinations.most_blocks, LONGEST_RUN) if combinations else count
    text = joined(run, samples, synthetic)
    costs: dict[Blocks, float] = {}
    if longest:
        depth = len(model.blocks)
        costs = costs_of_runs(model, text, longest, run.world, run.progress)
        plan = replace(plan, influence=[costs[i, i + 1] for i in range(depth) if (i, i + 1) in costs])
        run.clock.lap("influence")
    if combinations is None:
        return replace(plan, dropped=cheapest(costs, kinds_of(model), count))
    ways = combinations.of(costs)
    found = costs_of_combinations(
        model, samples, synthetic, ways, combinations.kinds, importance, run.world, run.progress
    )
    run.clock.lap("influence")
    way, tried = best_of(ways, found), {str(each): cost for each, cost in zip(ways, found, strict=True)}
    run.note(record, note_on(str(way), tried, model.has_head))
    return replace(plan, dropped=[*way.blocks], units={**way.units}, tried=tried)
