"""The points of a training: what is held out is measured, and all that a stopped run needs is saved."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from niwaki.checkpoints.shards import write_tensors
from niwaki.errors import NumericalError
from niwaki.files import output_errors
from niwaki.healing.schedule import Schedule
from niwaki.healing.student import Student
from niwaki.healing.teacher import Lessons
from niwaki.models.processes import World
from niwaki.models.streamed import TOKENS_PER_BATCH
from niwaki.records.healing import HealingPoint, HealingRecord
from niwaki.records.progress import Progress

#: How many times in a training what is held out is measured, at most and at least.
_POINTS, _FEW_POINTS = 20, 4
#: What a token that is measured costs, relative to one that is trained on: a forward pass without a backward one.
_MEASURED = 1 / 3
#: The share of the time since the last point that a point may take, and without a limit of time, of the work.
_POINT_TIME = 0.1
#: The share of the time since all was saved that saving it may take, and seconds that it always may.
_SAVING_TIME, _LITTLE = 0.1, 1.0


@dataclass
class Points:
    """Measures the ``student`` on the first ``held`` windows of ``lessons``, and keeps the best and the last point.

    The first process says when points are due, measures and saves.
    """

    student: Student
    adam: torch.optim.Optimizer
    lessons: Lessons
    held: int
    record: HealingRecord  # which they are added to
    schedule: Schedule
    directory: Path  # for what is kept of the last point
    saved: Callable[[Path], None]  # called when all of a new point is in this file
    progress: Progress
    world: World
    best: dict[str, Tensor] = field(default_factory=dict)  # what is trained at the best point, as files have it
    losses: list[float] = field(default_factory=list)  # of the steps since the last point

    def __post_init__(self) -> None:
        affordable = int(_POINT_TIME * self.record.tokens / (_MEASURED * self.record.held))
        self._count = max(_FEW_POINTS, min(_POINTS, affordable))
        self._measuring = self._saving = 0.0  # seconds that the last point took, and to save all of it
        self._saved = time.monotonic()  # when that was done

    def is_due(self, share: float) -> bool:
        """Whether there is to be a point at this ``share`` of the training."""
        last, schedule = self.record.points[-1], self.schedule
        measured = math.floor(self._count * schedule.share(last.tokens, last.seconds))
        if schedule.steps <= last.steps or math.floor(self._count * share) <= measured:
            return False
        # It should take little of the time, where that is limited; the last one always is worth it.
        since = schedule.spent() - last.seconds
        return share >= 1 or not schedule.is_limited or self._measuring < _POINT_TIME * since

    def add(self) -> None:
        """Measures what is held out; now and then, keeps all that a stopped run needs.

        NumericalError where the student's predictions are not finite.
        """
        began = time.monotonic()
        stored, points, schedule = self.student.stored(), self.record.points, self.schedule
        with self.student.holding(stored):
            error = self.world.received(self._error())
        if not math.isfinite(error):
            raise NumericalError("the pruned model's outputs are NaN or infinite on this text; try dtype float32")
        if not points or error < points[self.record.best].error:
            self.best, self.record.best = stored, len(points)
        loss = sum(self.losses) / len(self.losses) if self.losses else None
        points.append(HealingPoint(schedule.trained, schedule.steps, schedule.spent(), error, loss))
        self.losses = []
        self._measuring = time.monotonic() - began
        if self.world.first and self._saving < max(_LITTLE, _SAVING_TIME * (time.monotonic() - self._saved)):
            self._save()
        schedule.at_the_end = self._measuring + self._saving
        self.progress.healing(self.record, schedule.now(), schedule.spent())

    def resume(self) -> None:
        """Goes back to the last point, which was saved."""
        saved, self.best = dict[str, Tensor](), self.student.stored()
        if self.world.first:
            with output_errors(self.directory):
                saved = load_file(self.directory / point_file(self.record))
        for name, value in self._kept().items():
            if name in saved:
                value.copy_(saved[name])
            self.world.send(value, 0)
        self.schedule.resume(self.record.points[-1])

    def restart(self) -> None:
        """Goes back to the weights of the best point, with all of Adam's state as at the start."""
        for name, value in self.student.parameters.items():
            value.data.copy_(self.best[name])
            for each in self.adam.state[value].values():
                each.zero_()
        self.losses = []

    def _error(self) -> float:
        """The mean KL of what is held out, in nats a token; 0 where that is nothing."""
        if not self.held:
            return 0.0
        total, count = 0.0, 0
        for windows in torch.arange(self.held).split(max(1, TOKENS_PER_BATCH // self.lessons.tokens.shape[1])):
            tokens, *kept = self.lessons.of(windows, self.student.device)
            with torch.no_grad():
                losses, _ = self.student.head.divergence(self.student.states(tokens), *kept)
            total, count = total + float(losses.sum(dtype=torch.float64)), count + len(losses)
        return max(0.0, total / count) if math.isfinite(total) else total

    def _save(self) -> None:
        """Keeps all that a run that is stopped from now on needs."""
        began = time.monotonic()
        file = self.directory / point_file(self.record)
        write_tensors(file, self._kept())
        self.saved(file)
        with output_errors(self.directory):
            for older in self.directory.glob("point-*.safetensors"):
                if older != file:
                    older.unlink()
        self._saved = time.monotonic()
        self._saving = self._saved - began

    def _kept(self) -> dict[str, Tensor]:
        """All that changes, by name; the weights and Adam's state as they are, and not copies."""
        tensors = {f"best.{name}": value for name, value in self.best.items()}
        for name, value in self.student.parameters.items():
            tensors[f"weights.{name}"] = value.detach()
            tensors |= {f"{key}.{name}": each for key, each in self.adam.state[value].items()}
        return tensors


def point_file(record: HealingRecord) -> str:
    """The name of the file with all of the last point."""
    return f"point-{len(record.points)}.safetensors"
