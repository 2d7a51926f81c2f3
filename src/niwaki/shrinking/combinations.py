"""Blocks, heads and neurons that go together: those that cost least among all that leave a model of a given size."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from niwaki.errors import UnsupportedModelError, UsageError
from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.records.progress import Progress
from niwaki.runs.duration import passes
from niwaki.shrinking.configuration import Tensors
from niwaki.shrinking.depth import (
    FITTED,
    Blocks,
    cheapest,
    kinds_of,
    most_blocks,
    operations_of_runs,
    parts,
    some_of,
)
from niwaki.shrinking.trial import Trial, Way
from niwaki.shrinking.units import ColumnRemoval, ColumnUnits, heads_of, neurons_of

#: Runs of removed blocks are at most so long: what longer ones cost takes as long to measure for each block more.
LONGEST_RUN = 4
#: At most so much goes of the blocks, and of the heads and the neurons of each block that stays.
_MOST = {"blocks": 0.5, "heads": 0.67, "neurons": 0.75}
#: At most so many numbers of blocks are tried, with at most so many numbers of heads each.
_BLOCKS, _HEADS = 12, 4
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
        return ", ".join(f"{count:,} {kind}" for kind, count in self.counts.items())


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

    def removals(self, units: Mapping[str, int]) -> list[ColumnRemoval]:
        """Those of so many ``units`` of each kind."""
        return [kind.without(units[kind.kind]) for kind in self.kinds if kind.kind in units]

    def of(self, costs: Mapping[Blocks, float]) -> list[Combination]:
        """Those to try, where runs of blocks have these ``costs``: for numbers of blocks and heads, as many neurons.

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
        """Those of finding the cheapest one, about, see :mod:`niwaki.runs.duration`."""
        few = 1 + sum(min(_HEADS - 1, len(self._counts(kind))) for kind in self.kinds[:-1])
        ways = few * min(_BLOCKS, self.most_blocks + 1)
        searched = operations_of_runs(self.model, min(self.most_blocks, LONGEST_RUN))
        return searched + passes(self.model, _COMPARED, count=ways, head=True)

    def _few(self) -> Iterator[list[ColumnRemoval]]:
        """What goes of the kinds of which few numbers are tried: all kinds but the last."""
        yield []
        for kind in self.kinds[:-1]:
            for count in _evenly(self._counts(kind), _HEADS - 1):
                yield [kind.without(count)]

    def _last(self, few: list[ColumnRemoval], blocks: Sequence[int]) -> list[ColumnRemoval] | None:
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

    def _size(self, removals: Sequence[ColumnRemoval], blocks: Sequence[int]) -> int:
        return self.tensors.parameters(self.model, removals, blocks)


def best_of(ways: Sequence[Combination], costs: Sequence[float]) -> Combination:
    """The one of ``ways`` that costs least; one of a single kind, unless more kinds cost less by a margin."""
    in_order = sorted(zip(costs, ways, strict=True), key=lambda each: each[0])
    least, best = in_order[0]
    alone = [each for each in in_order if len(each[1].counts) == 1]
    return alone[0][1] if alone and least > (1 - _MARGIN) * alone[0][0] else best


def note_on(chosen: str, costs: Mapping[str, float], few: int = 3) -> str:
    """What the record says of the ``chosen`` combination, and of the ``few`` that cost least."""
    best = sorted(costs, key=costs.__getitem__)[:few]
    others = ", ".join(f"{words}: {costs[words]:.3g}" for words in best if words != chosen)
    beside = f" ({others})" if others else ""
    return (
        f"without {chosen} the predictions on the calibration text change by {costs[chosen]:.3g} nats, before blocks "
        f"are fitted; that was chosen of {len(costs)} ways to this size{beside}"
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
        states = model.embed(fitted), model.embed(compared)
        ways = [Way(each.blocks, each.units) for each in combinations]
        return Trial(model, *states, ways, world, progress, budget, kinds, importance).costs()
