"""Healing of a pruned model that is in memory as a whole."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file
from torch import Tensor

from niwaki.checkpoints.writing import write_tensors
from niwaki.errors import NumericalError, OutputError
from niwaki.files import check_space, digest, output_errors
from niwaki.healing.objective import Logits, States
from niwaki.healing.run import HealingRun
from niwaki.healing.student import RANK, FactoredStudent, LowRankStudent, ScaledStudent, Student
from niwaki.healing.teacher import Lessons, teach
from niwaki.healing.translation import Translation
from niwaki.models.pairs import count_tokens
from niwaki.models.processes import World
from niwaki.models.streamed import TOKENS_PER_BATCH
from niwaki.models.training import gradients
from niwaki.options import SCALES_RATE
from niwaki.records.progress import Progress
from niwaki.records.record import HealingPoint, HealingRecord
from niwaki.records.wording import counted

# How far a training has come, of the tokens or of the time that it may take.

#: The share of a training in which the learning rate rises.
_WARMUP = 0.1
#: Nats a token that are lost at first, from which on scales are trained at their full rate.
_FULL_RATE = 0.3


@dataclass
class Schedule:
    """The learning rate rises for a short time and falls to 0 by the end: of ``tokens``, or earlier of ``seconds``."""

    tokens: int
    seconds: float  # infinite for no limit
    is_by_loss: bool = False  # whether what is lost at first says how high the rate is, as :meth:`by_loss` has it
    steps: int = 0  # so far
    trained: int = 0  # tokens so far
    at_the_end: float = 0.0  # seconds that are to be left for what is not a step
    _began: float = field(default_factory=time.monotonic)

    @property
    def is_limited(self) -> bool:
        """Whether time may end the training."""
        return not math.isinf(self.seconds)

    def resume(self, point: HealingPoint) -> None:
        """The training goes on at ``point``."""
        self.steps, self.trained = point.steps, point.tokens
        self._began -= point.seconds

    def spent(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._began

    def share(self, tokens: int, seconds: float) -> float:
        """How much of what the training may take these are, up to 1."""
        left_for_steps = max(1.0, self.seconds - self.at_the_end)
        return min(1.0, max(tokens / self.tokens, seconds / left_for_steps))

    def now(self) -> float:
        """The share of the training that is behind."""
        return self.share(self.trained, self.spent())

    @staticmethod
    def by_loss(lost: float) -> float:
        """The highest learning rate of scales for a model that has ``lost`` so many nats a token.

        Steps have a length that is given, and a direction that is mostly chance where few tokens say it. Chance in the
        scales costs nats in proportion to the rate and to the size of gradients, which goes by the root of what is
        lost; so the rate does.
        """
        return SCALES_RATE * min(1.0, math.sqrt(lost / _FULL_RATE))

    def rate(self, share: float) -> float:
        """The learning rate at this ``share`` of the training, relative to the highest."""
        return min(1.0, (share + 1e-3) / _WARMUP) * (1 - share)


# Training of a pruned model's weights towards the dense model's predictions.

#: How many times in a training what is held out is measured at most.
_POINTS = 20
#: How many times it is measured at least.
_FEW_POINTS = 4
#: What a token that is measured costs, relative to one that is trained on: a forward pass without a backward one.
_MEASURED = 1 / 3
#: The share of the time since the last point that a point may take, and without a limit of time, of the work.
_POINT_TIME = 0.1
#: The share of the time since all was saved that saving it may take.
_SAVING_TIME = 0.1
#: Seconds that saving may always take.
_LITTLE = 1.0
#: Tokens of the first round of lessons; each further one has twice as many.
_ROUND = 1 << 15
#: Bytes of hidden states that a round of lessons has at most.
_STATES = 1 << 30
#: The share of the time that is left that a round may take, where there is a limit.
_ROUND_TIME = 0.1
#: How often the rate may be halved: where that does not help, training ends.
_HALVED = 8


def optimizer(student: Student) -> torch.optim.Adam:
    """What trains all parameters of ``student``, each with its own "size"."""
    parameters = student.parameters
    groups = [{"params": [value], "size": student.sizes[name]} for name, value in parameters.items()]
    # Gradients of large models are far below the usual epsilon, 1e-8.
    adam = torch.optim.Adam(groups, lr=0.0, eps=1e-16, fused=True)
    for value in parameters.values():  # a step of nothing, so that all of its state is there
        value.grad = torch.zeros_like(value)
    adam.step()
    adam.zero_grad()
    return adam


def point_file(record: HealingRecord) -> str:
    """The name of the file with all of the last point."""
    return f"point-{len(record.points)}.safetensors"


@dataclass
class Training:
    """Adam on KL(dense model | pruned model), one batch of windows after another.

    ``lessons`` has the ``held`` windows first, on which the error is measured. All others are trained on, in rounds
    that the dense model is asked about when their turn comes, in random order within a round, and all of them again
    where there are fewer than ``tokens``. Steps are relative to the root mean square of each parameter's weights, so
    that one rate suits all of them; it rises for a short time and then falls to 0 with the share that is left of
    ``tokens``, or of ``seconds`` where that is less. No weight becomes zero, and none that is zero changes. After
    predictions or gradients that are not finite training goes on from the best point, with half the rate.

    At a point what is held out is measured, and now and then all that a stopped run needs is saved. The result has the
    weights with the lowest error of all points, rounded as files have them. The first point is the pruned model as it
    came, so the result is never worse than that on what is held out.

    Each process has windows of its own, and its part of each batch. The first one has those that are ``held``, says
    when points are due, and saves.

    Cost: a forward and a backward pass for each token. Memory: four float32 numbers for each weight, of which two are
    Adam's, a copy of all weights in the files' dtype, and the activations of a batch.
    """

    student: Student
    lessons: Lessons
    held: int
    record: HealingRecord  # what was asked for, to which points are added
    schedule: Schedule
    directory: Path  # for what is kept of the last point
    saved: Callable[[Path], None]  # called when all of a new point is in this file
    teach: Callable[[range], None]  # makes the lessons of these windows
    progress: Progress
    world: World
    best: dict[str, Tensor] = field(default_factory=dict)  # what is trained at the best point, as files have it
    losses: list[float] = field(default_factory=list)  # of the steps since the last point
    _pace: float = 0.0  # seconds for the lessons of a token, as far as it is known

    def __post_init__(self) -> None:
        self._adam = optimizer(self.student)
        affordable = int(_POINT_TIME * self.record.tokens / (_MEASURED * self.record.held))
        self._count = max(_FEW_POINTS, min(_POINTS, affordable))
        self._measuring = self._saving = 0.0  # seconds that the last point took, and to save all of it
        self._saved = time.monotonic()  # when that was done

    def run(self) -> dict[str, Tensor]:
        """What is trained, as files are to have it; it resumes where ``record`` has points.

        NumericalError where the pruned model's predictions are not finite as it came.
        """
        self._ask(range(self.held))
        if self.record.points:
            self._resume()
        else:
            self._add_point()
        if self.schedule.is_by_loss:
            self.record.rate = self.schedule.by_loss(self.record.points[0].error)
            self.progress.note(f"for what is lost, the learning rate is {self.record.rate:.2g}; --rate gives another")
        while not self._train():
            self.record.halved += 1
            if self.record.halved > _HALVED:
                self._say("it ends here; try a lower --rate")
                break
            self._say("it resumes from the best point, with half the learning rate")
            self._restart()  # what was trained on counts
        return self.best

    def _say(self, what: str) -> None:
        trained = f"{self.schedule.trained:,} tokens"
        self.progress.note(f"healing became NaN or infinite after {trained}; {what}")

    def _train(self) -> bool:
        """Trains to the end; False where it arrives at something that is not finite."""
        schedule = self.schedule
        for windows in itertools.islice(self._batches(), schedule.steps, None):
            share = schedule.now()
            share, is_time_for_a_point = self.world.received((share, self._is_due(share)))
            if is_time_for_a_point:
                try:
                    self._add_point()
                except NumericalError:
                    return False
            if share >= 1:
                break
            self.progress.healing(self.record, share, schedule.spent())
            if not self._step(windows, share):
                return False
        return True

    @property
    def _length(self) -> int:
        return self.lessons.tokens.shape[1]

    def _batches(self) -> Iterator[Tensor]:
        """The numbers of the windows of each step, without end."""
        drawing, count, held = torch.Generator().manual_seed(0), len(self.lessons.tokens), self.held
        together, start = max(1, self.record.batch // (self._length * self.world.size)), held
        size = max(1, _ROUND // self._length)
        most = _STATES // (4 * self.student.head.width * self._length)
        while start < count:
            windows = range(start, min(count, start + max(together, min(size, most, self._affordable))))
            self._ask(windows)
            yield from (start + torch.randperm(len(windows), generator=drawing)).split(together)
            start, size = windows.stop, 2 * size
        while True:
            yield from (held + torch.randperm(count - held, generator=drawing)).split(together)

    @property
    def _affordable(self) -> int:
        """Windows whose lessons do not take too much of the time that is left; without a limit any number."""
        if not (self.schedule.is_limited and self._pace):
            return len(self.lessons.tokens)
        left = max(0.0, self.schedule.seconds - self.schedule.spent())
        return int(_ROUND_TIME * left / (self._pace * self._length))

    def _ask(self, windows: range) -> None:
        if not self.lessons.has(windows):
            began = time.monotonic()
            self.teach(windows)
            self.lessons.keep(windows)
            self._pace = (time.monotonic() - began) / (len(windows) * self._length)

    def _step(self, windows: Tensor, share: float) -> bool:
        """A step, unless the model's predictions or their gradients are not finite."""
        tokens, *kept = self.lessons.of(windows, self.student.device)
        with self.student.computing(), gradients(self.student.device):
            states = self.student.states(tokens)
            losses, gradient = self.student.head.divergence(states.detach(), *kept)
            states.backward(gradient.div_(len(gradient) * self.world.size).to(states.dtype))
        found = []
        for name, value in self.student.parameters.items():
            if value.grad is None:  # as of experts that none of these tokens went to
                if self.world.size == 1:
                    continue
                value.grad = torch.zeros_like(value)
            if name in self.student.masks:
                value.grad.mul_(self.student.masks[name])
            found.append(value.grad)
        loss = losses.mean(dim=0, keepdim=True).div_(self.world.size)
        self.world.sum([*found, loss])
        if not math.isfinite(float(loss) + float(torch.nn.utils.get_total_norm(found))):
            self._adam.zero_grad()
            return False
        rate = self.record.rate * 0.5**self.record.halved * self.schedule.rate(share)
        for group in self._adam.param_groups:
            group["lr"] = rate * group["size"]
        self._adam.step()
        self._adam.zero_grad()
        self.losses.append(float(loss))
        self.schedule.steps += 1
        self.schedule.trained += count_tokens(tokens) * self.world.size
        return True

    def _is_due(self, share: float) -> bool:
        """Whether there is to be a point at this ``share`` of the training."""
        last, schedule = self.record.points[-1], self.schedule
        measured = math.floor(self._count * schedule.share(last.tokens, last.seconds))
        if schedule.steps <= last.steps or math.floor(self._count * share) <= measured:
            return False
        # It should take little of the time, where that is limited; the last one always is worth it.
        since = schedule.spent() - last.seconds
        return share >= 1 or not schedule.is_limited or self._measuring < _POINT_TIME * since

    def _add_point(self) -> None:
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

    def _resume(self) -> None:
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

    def _restart(self) -> None:
        """Goes back to the weights of the best point, with all of Adam's state as at the start."""
        for name, value in self.student.parameters.items():
            value.data.copy_(self.best[name])
            for each in self._adam.state[value].values():
                each.zero_()
        self.losses = []

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
            tensors |= {f"{key}.{name}": each for key, each in self._adam.state[value].items()}
        return tensors


#: Bytes on disk for each weight, in what a stopped run resumes from: it, two moments, and the best so far.
_POINT = 4 + 8 + 4


@dataclass
class WholeRun(HealingRun):
    """Trains the whole model at once, see :class:`.training.Training`."""

    logits: Logits | States = field(kw_only=True)  # of both models
    translation: Translation | None = field(kw_only=True, default=None)  # where the pruned model has other tokens

    def _train(self, tokens: Tensor) -> None:
        """What is saved meanwhile the first process saves."""
        healing, place, length = self.healing, self.run.place, tokens.shape[1]
        if healing.method == "full":
            kind = FactoredStudent if self.format.has_factors else Student
            student = kind(self.model, self.logits, length, half=self.dense.dtype != torch.float32)
        elif healing.method == "scales":
            student = ScaledStudent(self.model, self.logits, length)
        else:
            student = LowRankStudent(self.model, self.logits, length, RANK if healing.method == "lora" else 0)
        with contextlib.ExitStack() as stack:
            scratch = place.scratch if place else Path(stack.enter_context(TemporaryDirectory()))
            self._check_scratch(scratch, tokens, student)
            training = self._training(student, tokens, scratch)
            trained = training.run()
        self.run.clock.lap("heal")
        if healing.halved:
            how_often = counted(healing.halved, "time")
            self.record.notes.append(f"healing became NaN or infinite, and its learning rate was halved, {how_often}")
        if healing.best == 0:
            why = "no step was made" if not healing.points[-1].steps else "no point was better on what was held out"
            self.run.note(self.record, f"the weights are those of the pruned model: {why}")
        if place:
            with self._writer(place.directory) as writer:
                for key, value in student.tensors(trained):
                    writer.write(key, value)
                self.write_signless_zeros(writer)
        self.model.unload()  # perplexity takes memory next

    def _check_scratch(self, scratch: Path, tokens: Tensor, student: Student) -> None:
        """OutputError where the first process has no space for what a stopped run resumes from, or that is damaged."""
        healing, place = self.healing, self.run.place
        if not place:
            return
        if not healing.points:
            weights = sum(value.numel() for value in student.parameters.values())
            check_space(scratch, 2 * _POINT * weights)  # for a moment there are a new point and the last one
            there = count_tokens(tokens[self.held :])
            if there < healing.tokens and healing.limit is None:
                self.note_reuse(there)
            return
        file = scratch / point_file(healing)
        if not (file.is_file() and digest(file) in place.journal.digests):
            raise OutputError(f"{file} is missing or damaged; start over with --restart")

    def _training(self, student: Student, tokens: Tensor, scratch: Path) -> Training:
        healing, run, place = self.healing, self.run, self.run.place
        lessons = Lessons(scratch, self.share(tokens), student.head, self.translation)

        def ask(asked: range) -> None:
            run.clock.lap("heal")
            teach(self.dense, student.head, lessons, asked, run.progress)
            run.clock.lap("teach")

        def saved(file: Path) -> None:
            assert place
            run.clock.lap("heal")
            self.record.seconds = dict(run.clock.seconds)
            with output_errors(place.directory):
                place.save(digests=[digest(file)], record=self.record.to_json())

        run.clock.lap("prepare")
        limit = math.inf
        if healing.limit is not None:
            others = sum(spent for stage, spent in run.clock.seconds.items() if stage not in ("heal", "teach"))
            limit = max(1.0, healing.limit - others - self.measuring)
        # The record of a run has the rate that was asked for, or that is usual, unless the loss is to say it.
        schedule = Schedule(healing.tokens, limit, is_by_loss="rate" not in self.record.solver)
        held = self.held if place else 0
        return Training(
            student, lessons, held, healing, schedule, scratch, saved, teach=ask, progress=run.progress, world=run.world
        )
