"""What is decided before anything is removed: text to calibrate on, outputs that matter, and blocks to remove."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from niwaki.effort import Effort
from niwaki.models.sensitivity import measured, pilot_of, row_weights
from niwaki.models.streamed import StreamedModel
from niwaki.records.record import Record
from niwaki.runs.kept import load_tensors, save_tensors
from niwaki.runs.own_text import joined, written
from niwaki.runs.stage import Run
from niwaki.shrinking.depth import cheapest, costs_of_runs
from niwaki.shrinking.units import ColumnRemoval

#: The key of the dense model's text in the file of a plan.
_SYNTHETIC = "synthetic"


@dataclass(frozen=True)
class ShrinkPlan:
    """What is decided before the first block."""

    synthetic: Tensor | None  # (samples, length) int64, text that the dense model wrote, if any
    dropped: list[int]  # blocks to remove, in ascending order
    influence: list[float]  # of each block, what its removal alone would cost; empty where none is removed
    #: Of matrices that lose columns, by block and name (out,): what to weight outputs by.
    importance: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def save(self, path: Path, expected: str = "") -> str:
        """Writes it, in safetensors, and returns the file's SHA-256; OutputError if another one was ``expected``."""
        tensors = {f"{block} {name}": value for (block, name), value in self.importance.items()}
        blocks = {"dropped": json.dumps(self.dropped), "influence": json.dumps(self.influence)}
        if self.synthetic is not None:
            tensors[_SYNTHETIC] = self.synthetic
        return save_tensors(path, tensors, blocks, expected)

    @classmethod
    def load(cls, path: Path, digest: str) -> "ShrinkPlan | None":
        """What :meth:`save` wrote; None where it is not there or has another SHA-256."""
        if (kept := load_tensors(path, digest)) is None:
            return None
        tensors, blocks = kept
        synthetic = tensors.pop(_SYNTHETIC, None)
        places = ((key.split(" ", 1), value) for key, value in tensors.items())
        importance = {(int(block), name): value for (block, name), value in places}
        return cls(synthetic, json.loads(blocks["dropped"]), json.loads(blocks["influence"]), importance)


def planned(
    model: StreamedModel,
    effort: Effort,
    samples: Tensor,
    bos: int | None,
    columns: list[ColumnRemoval],
    count: int,
    record: Record,
    run: Run,
) -> ShrinkPlan:
    """The plan for the removal of ``count`` blocks and of ``columns``, by the dense model.

    ``samples`` (samples, length) int64 are the process's share of the calibration text, of which each window begins
    with ``bos`` if there is one.
    """
    synthetic = None
    if effort.synthetic:
        synthetic = written(run, model, record, effort.synthetic, samples, bos)
        run.clock.lap("plan")
    importance: dict[tuple[int, str], Tensor] = {}
    if columns and effort.plan.importance:
        pilot = pilot_of(samples, effort.plan.pilot, run.world)
        found = measured(model, pilot, run.world, run.progress)
        places = [matrix.place for each in columns for matrix in each.matrices]
        importance = {(at, name): row_weights(found[at][name], effort.plan.importance) for at, name in places}
        run.clock.lap("plan")
    dropped, influence = list[int](), list[float]()
    if count:
        depth = len(model.blocks)
        costs = costs_of_runs(model, joined(run, samples, synthetic), count, run.world, run.progress)
        dropped = cheapest(costs, depth, count)
        influence = [costs[i, i + 1] for i in range(depth)]
        run.clock.lap("influence")
    return ShrinkPlan(synthetic, dropped, influence, importance)
