"""Training of a pruned model's weights towards the dense model's predictions."""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from niwaki.checkpoints.shards import write_tensors
from niwaki.errors import NumericalError
from niwaki.files import output_errors
from niwaki.healing.student import Student
from niwaki.healing.teacher import Lessons
from niwaki.models.processes import World
from niwaki.models.streamed import TOKENS_PER_BATCH
from niwaki.records.healing import HealingPoint, HealingRecord
from niwaki.records.progress import Progress

#: The share of a training in which the learning rate rises.
_WARMUP = 0.1
#: How many times in a training what is held out is measured, and all is saved, at most and at least.
_POINTS, _FEW_POINTS = 20, 4
#: What a token that is measured costs, relative to one that is trained on: a forward pass without a backward one.
_MEASURED = 1 / 3
#: Tokens of the first round of lessons; each further one has twice as many, up to bytes of hidden states.
_ROUND, _STATES = 1 << 15, 1 << 30
#: The share of the time that is left that a round may take, where there is a limit.
_ROUND_TIME = 0.1
#: Likewise the share of the time since the last point that a point may take, and without a limit, of the work.
_POINT_TIME = 0.1
#: The share of the time since all was saved that saving it may take, and seconds that it always may.
_SAVING_TIME, _LITTLE = 0.1, 1.0
#: How often the rate may be halved: where that does not help, training ends.
_HALVED = 8


@dataclass
class Training:
    """Adam on KL(dense model | pruned model), one batch of windows after another.

    ``lessons`` has the ``held`` windows first, on which the error is measured. All others are trained on, in rounds
    that the dense model is asked about when their turn comes, in random order within a round, and all of them again
    where there are fewer than ``tokens``. Steps are relative to the root mean square of each parameter's weights, so
    that one rate suits all of them; it rises for a short time and then falls to 0 with the share that is left of
    ``tokens``, or of ``seconds`` where that is less. No weight becomes zero, and none that is zero changes. After
    predictions or gradients that are not finite training goes on from the best point, with half the rate.

    The result has the weights with the lowest error of all points, rounded as files have them. The first point is the
    pruned model as it came, so the result is never worse than that on what is held out.

    Each process has windows of its own, and its part of each batch. The first one has those that are ``held``, says
    when points are due, and saves.

    Cost: a forward and a backward pass for each token. Memory: four float32 numbers for each weight, of which two are
    Adam's, a copy of all weights in the files' dtype, and the activations of a batch.
    """

    student: Student
    lessons: Lessons
    held: int  # windows
    record: HealingRecord  # what was asked for, with the points so far, which it adds to
    seconds: float  # that it may take, with those of the lessons
    teach: Callable[[range], None]  # makes the lessons of these windows
    directory: Path  # for what it keeps of the last point
    saved: Callable[[Path], None]  # called when all of a new point is in this file
    progress: Progress
    world: World
    _best: dict[str, Tensor] = field(default_factory=dict)  # what is trained at the best point, as files have it
    _losses: list[float] = field(default_factory=list)  # of the steps since the last point

    def __post_init__(self) -> None:
        parameters = self.student.parameters
        groups = [{"params": [value], "size": self.student.sizes[name]} for name, value in parameters.items()]
        # Gradients of large models are far below the usual epsilon, 1e-8.
        self._adam = torch.optim.Adam(groups, lr=0.0, eps=1e-16, fused=True)
        for value in parameters.values():  # a step of nothing, so that all of Adam's state is there
            value.grad = torch.zeros_like(value)
        self._adam.step()
        self._adam.zero_grad()
        self._length = self.lessons.tokens.shape[1]
        self._steps = self._trained = 0
        affordable = int(_POINT_TIME * self.record.tokens / (_MEASURED * self.record.held))
        self._points = max(_FEW_POINTS, min(_POINTS, affordable))
        self._began = time.monotonic()
        self._measuring = self._saving = 0.0  # seconds that the last point took, and to save all of it
        self._saved = self._began  # when that was done
        self._pace = 0.0  # seconds for the lessons of a token, as far as it is known

    def run(self) -> dict[str, Tensor]:
        """What is trained, as files are to have it; it resumes where ``record`` has points.

        NumericalError where the pruned model's predictions are not finite as it came.
        """
        self._ask(range(self.held))
        if self.record.points:
            self._return()
            self._began -= self.record.points[-1].seconds
        else:
            self._point()
        while not self._train():
            self.record.halved += 1
            if self.record.halved > _HALVED:
                self._say("it ends here; try a lower --rate")
                break
            self._say("it goes on from the best point, with half the learning rate")
            self._restart()
        return self._best

    def _say(self, what: str) -> None:
        self.progress.note(f"healing became NaN or infinite after {self._trained:,} tokens; {what}")

    def _train(self) -> bool:
        """Trains to the end; False where it arrives at something that is not finite."""
        for windows in itertools.islice(self._batches(), self._steps, None):
            share, is_time_for_a_point = self.world.received(self._next())
            if is_time_for_a_point:
                try:
                    self._point()
                except NumericalError:
                    return False
            if share >= 1:
                break
            self.progress.healing(self.record, share, self._spent())
            if not self._step(windows, share):
                return False
        return True

    def _next(self) -> tuple[float, bool]:
        """The share of the training that is behind, and whether a point is due."""
        last, share = self.record.points[-1], self._share(self._trained, self._spent())
        measured = math.floor(self._points * self._share(last.tokens, last.seconds))
        due = self._steps > last.steps and math.floor(self._points * share) > measured and self._is_worth_it(share)
        return share, due

    def _is_worth_it(self, share: float) -> bool:
        """Whether a point takes little of the time, where that is limited; the last one always is."""
        since = self._spent() - self.record.points[-1].seconds
        return share >= 1 or math.isinf(self.seconds) or self._measuring < _POINT_TIME * since

    def _share(self, tokens: int, seconds: float) -> float:
        """How much of what the training may take these are, up to 1."""
        left_for_steps = max(1.0, self.seconds - self._measuring - self._saving)  # for what is not the point at the end
        return min(1.0, max(tokens / self.record.tokens, seconds / left_for_steps))

    def _spent(self) -> float:
        return time.monotonic() - self._began

    def _batches(self) -> Iterator[Tensor]:
        """The numbers of the windows of each step, without end."""
        drawing, count = torch.Generator().manual_seed(0), len(self.lessons.tokens)
        together, start = max(1, self.record.batch // (self._length * self.world.size)), self.held
        size = max(1, _ROUND // self._length)
        most = _STATES // (4 * self.student.head.weight.shape[1] * self._length)
        while start < count:
            windows = range(start, min(count, start + max(together, min(size, most, self._affordable))))
            self._ask(windows)
            yield from (start + torch.randperm(len(windows), generator=drawing)).split(together)
            start, size = windows.stop, 2 * size
        while True:
            yield from (self.held + torch.randperm(count - self.held, generator=drawing)).split(together)

    @property
    def _affordable(self) -> int:
        """Windows whose lessons do not take too much of the time that is left; without a limit any number."""
        if math.isinf(self.seconds) or not self._pace:
            return len(self.lessons.tokens)
        return int(_ROUND_TIME * max(0.0, self.seconds - self._spent()) / (self._pace * self._length))

    def _ask(self, windows: range) -> None:
        if not self.lessons.has(windows):
            began = time.monotonic()
            self.teach(windows)
            self.lessons.keep(windows)
            self._pace = (time.monotonic() - began) / (len(windows) * self._length)

    def _step(self, windows: Tensor, share: float) -> bool:
        """A step, unless the model's predictions or their gradients are not finite."""
        tokens, *kept = self.lessons.of(windows, self.student.device)
        with self.student.rounding():
            states = self.student.states(tokens)
            losses, gradient = self.student.head.divergence(states.detach(), *kept)
            states.backward(gradient.div_(len(gradient) * self.world.size).to(states.dtype))
        gradients = []
        for name, value in self.student.parameters.items():
            if value.grad is None:  # as of experts that none of these tokens went to
                if self.world.size == 1:
                    continue
                value.grad = torch.zeros_like(value)
            if name in self.student.masks:
                value.grad.mul_(self.student.masks[name])
            gradients.append(value.grad)
        loss = losses.mean(dim=0, keepdim=True).div_(self.world.size)
        self.world.sum([*gradients, loss])
        if not math.isfinite(float(loss) + float(torch.nn.utils.get_total_norm(gradients))):
            self._adam.zero_grad()
            return False
        rate = self.record.rate * 0.5**self.record.halved * min(1.0, (share + 1e-3) / _WARMUP) * (1 - share)
        for group in self._adam.param_groups:
            group["lr"] = rate * group["size"]
        self._adam.step()
        self._adam.zero_grad()
        self._losses.append(float(loss))
        self._steps += 1
        self._trained += tokens.numel() * self.world.size
        return True

    def _point(self) -> None:
        """Measures what is held out; now and then, keeps all that a stopped run needs."""
        began = time.monotonic()
        stored = self.student.stored()
        with self.student.holding(stored):
            error = self.world.received(self._error())
        if not math.isfinite(error):
            raise NumericalError("the pruned model's outputs are NaN or infinite on this text; try dtype float32")
        points = self.record.points
        if not points or error < points[self.record.best].error:
            self._best, self.record.best = stored, len(points)
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        points.append(HealingPoint(self._trained, self._steps, self._spent(), error, loss))
        self._losses = []
        self._measuring = time.monotonic() - began
        if self.world.first and self._saving < max(_LITTLE, _SAVING_TIME * (time.monotonic() - self._saved)):
            self._save()
        self.progress.healing(self.record, self._share(self._trained, self._spent()), self._spent())

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

    def _error(self) -> float:
        """The mean KL of what is held out, in nats a token; 0 where that is nothing."""
        if not self.held:
            return 0.0
        total, count = 0.0, 0
        for windows in torch.arange(self.held).split(max(1, TOKENS_PER_BATCH // self._length)):
            tokens, *kept = self.lessons.of(windows, self.student.device)
            with torch.no_grad():
                losses, _ = self.student.head.divergence(self.student.states(tokens), *kept)
            total, count = total + float(losses.sum(dtype=torch.float64)), count + len(losses)
        return max(0.0, total / count) if math.isfinite(total) else total

    def _kept(self) -> dict[str, Tensor]:
        """All that changes, by name; the weights and Adam's state as they are, and not copies."""
        tensors = {f"best.{name}": value for name, value in self._best.items()}
        for name, value in self.student.parameters.items():
            tensors[f"weights.{name}"] = value.detach()
            tensors |= {f"{key}.{name}": each for key, each in self._adam.state[value].items()}
        return tensors

    def _return(self) -> None:
        """To the last point that was saved."""
        saved, self._best = dict[str, Tensor](), self.student.stored()
        if self.world.first:
            with output_errors(self.directory):
                saved = load_file(self.directory / point_file(self.record))
        for name, value in self._kept().items():
            if name in saved:
                value.copy_(saved[name])
            self.world.send(value, 0)
        self._trained, self._steps = self.record.points[-1].tokens, self.record.points[-1].steps

    def _restart(self) -> None:
        """Where the best point was, with all of Adam's state as at the start; what was trained on counts."""
        for name, value in self.student.parameters.items():
            value.data.copy_(self._best[name])
            for each in self._adam.state[value].values():
                each.zero_()
        self._losses = []


def point_file(record: HealingRecord) -> str:
    """The name of the file with all of the last point."""
    return f"point-{len(record.points)}.safetensors"
