"""What is decided before anything is removed: text to calibrate on, outputs that matter, and blocks to remove."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from niwaki.effort import Effort
from niwaki.models.sensitivity import measured, pilot_of, row_weights
from niwaki.models.streamed import StreamedModel
from niwaki.records.record import Record
from niwaki.runs.kept import Kept
from niwaki.runs.own_text import joined, written
from niwaki.runs.stage import Run
from niwaki.shrinking.combinations import LONGEST_RUN, Combinations, best_of, costs_of_combinations, note_on
from niwaki.shrinking.depth import Blocks, cheapest, costs_of_runs, kinds_of
from niwaki.shrinking.units import ColumnRemoval


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
    samples: Tensor,
    bos: int | None,
    columns: Sequence[ColumnRemoval],
    count: int,
    combinations: Combinations | None,
    record: Record,
    run: Run,
) -> ShrinkPlan:
    """The plan for the removal of ``count`` blocks and of ``columns``, or of one of ``combinations``.

    All is decided by the dense model. ``samples`` (samples, length) int64 are the process's share of the calibration
    text, of which each window begins with ``bos`` if there is one.
    """
    synthetic = None
    if effort.synthetic:
        synthetic = written(run, model, record, effort.synthetic, samples, bos)
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
    texts = samples, synthetic
    found = costs_of_combinations(model, *texts, ways, combinations.kinds, importance, run.world, run.progress)
    run.clock.lap("influence")
    way, tried = best_of(ways, found), {str(each): cost for each, cost in zip(ways, found, strict=True)}
    run.note(record, note_on(str(way), tried))
    return replace(plan, dropped=[*way.blocks], units={**way.units}, tried=tried)
