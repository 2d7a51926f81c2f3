"""Training of a pruned model's weights towards the dense model's predictions."""

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from niwaki.errors import NumericalError
from niwaki.files import output_errors
from niwaki.models.streamed import TOKENS_PER_BATCH
from niwaki.models.training import root_mean_square
from niwaki.pruning.healing.student import Student
from niwaki.pruning.healing.teacher import Lessons
from niwaki.records.progress import Progress
from niwaki.records.record import HealingPoint, HealingRecord

#: The share of a training in which the learning rate rises.
_WARMUP = 0.02
#: How many times in a training what is held out is measured, and all is saved.
_POINTS = 20
#: Tokens of the first round of lessons; each further one has twice as many, up to bytes of hidden states.
_ROUND, _STATES = 1 << 15, 1 << 30
#: How often the rate may be halved: where that does not help, something else is wrong.
_HALVED = 8


@dataclass
class Training:
    """Adam on KL(dense model | pruned model), one batch of windows after another.

    ``lessons`` has the ``held`` windows first, on which the error is measured. All others are trained on, in rounds
    that the dense model is asked about when their turn comes, in random order within a round, and all of them again
    where there are fewer than ``tokens``. Steps are relative to the root mean square of each parameter's weights, so
    that one rate suits all of them; it rises for a short time and then falls to 0 with the share that is left of
    ``tokens``, or of ``seconds`` where that is less. No weight becomes zero, and none that is zero changes. After
    predictions or gradients that are not finite training goes back to the last point, with half the rate.

    The result has the weights with the lowest error of all points, rounded as files have them. The first point is the
    pruned model as it came, so the result is never worse than that on what is held out.

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
    _best: dict[str, Tensor] = field(default_factory=dict)  # what is trained at the best point, as files have it
    _losses: list[float] = field(default_factory=list)  # of the steps since the last point

    def __post_init__(self) -> None:
        values = self.student.parameters.values()
        groups = [{"params": [value], "size": root_mean_square(value)} for value in values]
        # Gradients of large models are far below the usual epsilon, 1e-8.
        self._adam = torch.optim.Adam(groups, lr=0.0, eps=1e-16, fused=True)
        for value in values:  # a step of nothing, so that all of Adam's state is there
            value.grad = torch.zeros_like(value)
        self._adam.step()
        self._length = self.lessons.tokens.shape[1]
        self._steps = self._trained = 0
        self._began = time.monotonic()

    def run(self) -> dict[str, Tensor]:
        """What is trained, as files are to have it; it resumes where ``record`` has points.

        NumericalError where the model's predictions are not finite, whatever the rate.
        """
        if self.record.points:
            self._return()
            self._began -= self.record.points[-1].seconds
        else:
            self._ask(range(self.held))
            self._point()
        while not self._train():
            self.record.halved += 1
            if self.record.halved > _HALVED:
                raise NumericalError("the model's outputs or gradients become NaN or infinite; try dtype float32")
            point = self.record.points[-1]
            self.progress.note(
                f"healing became NaN or infinite after {self._trained:,} tokens; it goes back to {point.tokens:,}, "
                "with half the learning rate"
            )
            self._return()
        return self._best

    def _train(self) -> bool:
        """Trains to the end; False where it arrives at something that is not finite."""
        for windows in itertools.islice(self._batches(), self._steps, None):
            share = max(self._trained / self.record.tokens, self._spent() / self.seconds)
            if share * _POINTS >= len(self.record.points):
                self._point()
            if share >= 1:
                break
            self.progress.healing(self.record, share, self._spent())
            if not self._step(windows, share):
                return False
        return True

    def _spent(self) -> float:
        return time.monotonic() - self._began

    def _batches(self) -> Iterator[Tensor]:
        """The numbers of the windows of each step, without end."""
        drawing, count = torch.Generator().manual_seed(0), len(self.lessons.tokens)
        together, start = max(1, self.record.batch // self._length), self.held
        size, most = _ROUND // self._length, _STATES // (4 * self.lessons.c.shape[2] * self._length)
        while start < count:
            windows = range(start, min(count, start + max(together, min(size, most))))
            self._ask(windows)
            yield from (start + torch.randperm(len(windows), generator=drawing)).split(together)
            start, size = windows.stop, 2 * size
        while True:
            yield from (self.held + torch.randperm(count - self.held, generator=drawing)).split(together)

    def _ask(self, windows: range) -> None:
        if not self.lessons.has(windows):
            self.teach(windows)
            self.lessons.keep(windows)

    def _step(self, windows: Tensor, share: float) -> bool:
        """A step, unless the model's predictions or their gradients are not finite."""
        tokens, c, s = self.lessons.of(windows, self.student.device)
        states = self.student.states(tokens)
        losses, gradient = self.student.head.divergence(states.detach(), c, s)
        states.backward(gradient.div_(len(gradient)).to(states.dtype))
        for name, mask in self.student.masks.items():
            value = self.student.parameters[name]
            if value.grad is not None:  # as of experts that none of these tokens went to
                value.grad.mul_(mask)
        gradients = [value.grad for value in self.student.parameters.values() if value.grad is not None]
        if not math.isfinite(float(losses.sum()) + float(torch.nn.utils.get_total_norm(gradients))):
            self._adam.zero_grad()
            return False
        rate = self.record.rate * 0.5**self.record.halved * min(1.0, (share + 1e-3) / _WARMUP) * (1 - share)
        for group in self._adam.param_groups:
            group["lr"] = rate * group["size"]
        self._adam.step()
        self._adam.zero_grad()
        self._losses.append(float(losses.mean()))
        self._steps += 1
        self._trained += tokens.numel()
        return True

    def _point(self) -> None:
        """Measures what is held out, and keeps all that a stopped run needs."""
        stored = self.student.stored()
        with self.student.holding(stored):
            error = self._error()
        points = self.record.points
        if not points or error < points[self.record.best].error:
            self._best, self.record.best = stored, len(points)
        loss = sum(self._losses) / len(self._losses) if self._losses else error
        points.append(HealingPoint(self._trained, self._steps, self._spent(), error, loss))
        self._losses = []
        file = self.directory / point_file(self.record)
        self._save(file)
        self.saved(file)
        for older in self.directory.glob("point-*.safetensors"):
            if older != file:
                older.unlink()
        self.progress.healing(self.record, self._trained / self.record.tokens, self._spent())

    def _error(self) -> float:
        """The mean KL of what is held out, in nats a token."""
        total = count = 0.0
        for windows in torch.arange(self.held).split(max(1, TOKENS_PER_BATCH // self._length)):
            tokens, c, s = self.lessons.of(windows, self.student.device)
            with torch.no_grad():
                losses, _ = self.student.head.divergence(self.student.states(tokens), c, s)
            total, count = total + float(losses.sum(dtype=torch.float64)), count + len(losses)
        if not math.isfinite(total):
            raise NumericalError("the pruned model's outputs are NaN or infinite on this text; try dtype float32")
        return max(0.0, total / count)

    def _kept(self) -> dict[str, Tensor]:
        """All that changes, by name; the weights and Adam's state as they are, and not copies."""
        tensors = {f"best.{name}": value for name, value in self._best.items()}
        for name, value in self.student.parameters.items():
            tensors[f"weights.{name}"] = value.detach()
            tensors |= {f"{key}.{name}": each for key, each in self._adam.state[value].items()}
        return tensors

    def _save(self, file: Path) -> None:
        with output_errors(self.directory, "what a stopped run resumes from is kept there"):
            save_file({name: value.cpu().contiguous() for name, value in self._kept().items()}, file)
            with file.open("r+b") as written:
                os.fsync(written.fileno())

    def _return(self) -> None:
        """To the last point."""
        saved = load_file(self.directory / point_file(self.record))
        self._best = {key.removeprefix("best."): saved.pop(key) for key in [*saved] if key.startswith("best.")}
        for name, value in self._kept().items():
            if name in saved:
                value.copy_(saved[name])
        self._losses = []
        self._trained, self._steps = self.record.points[-1].tokens, self.record.points[-1].steps


def point_file(record: HealingRecord) -> str:
    """The name of the file with all of the last point."""
    return f"point-{len(record.points)}.safetensors"
