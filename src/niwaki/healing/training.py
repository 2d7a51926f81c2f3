"""Training of a pruned model's weights towards the dense model's predictions."""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from niwaki.errors import NumericalError
from niwaki.healing.points import Points
from niwaki.healing.schedule import Schedule
from niwaki.healing.student import Student
from niwaki.healing.teacher import Lessons
from niwaki.models.pairs import count_tokens
from niwaki.models.processes import World
from niwaki.models.training import gradients
from niwaki.records.healing import HealingRecord
from niwaki.records.progress import Progress

#: Tokens of the first round of lessons; each further one has twice as many, up to bytes of hidden states.
_ROUND, _STATES = 1 << 15, 1 << 30
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
    adam: torch.optim.Adam
    lessons: Lessons
    record: HealingRecord  # what was asked for
    schedule: Schedule
    points: Points
    teach: Callable[[range], None]  # makes the lessons of these windows
    progress: Progress
    world: World
    _pace: float = 0.0  # seconds for the lessons of a token, as far as it is known

    def run(self) -> dict[str, Tensor]:
        """What is trained, as files are to have it; it resumes where ``record`` has points.

        NumericalError where the pruned model's predictions are not finite as it came.
        """
        self._ask(range(self.points.held))
        if self.record.points:
            self.points.resume()
        else:
            self.points.add()
        while not self._train():
            self.record.halved += 1
            if self.record.halved > _HALVED:
                self._say("it ends here; try a lower --rate")
                break
            self._say("it resumes from the best point, with half the learning rate")
            self.points.restart()  # what was trained on counts
        return self.points.best

    def _say(self, what: str) -> None:
        trained = f"{self.schedule.trained:,} tokens"
        self.progress.note(f"healing became NaN or infinite after {trained}; {what}")

    def _train(self) -> bool:
        """Trains to the end; False where it arrives at something that is not finite."""
        schedule, points = self.schedule, self.points
        for windows in itertools.islice(self._batches(), schedule.steps, None):
            share = schedule.now()
            share, is_time_for_a_point = self.world.received((share, points.is_due(share)))
            if is_time_for_a_point:
                try:
                    points.add()
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
        drawing, count, held = torch.Generator().manual_seed(0), len(self.lessons.tokens), self.points.held
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
            self.adam.zero_grad()
            return False
        rate = self.record.rate * 0.5**self.record.halved * self.schedule.rate(share)
        for group in self.adam.param_groups:
            group["lr"] = rate * group["size"]
        self.adam.step()
        self.adam.zero_grad()
        self.points.losses.append(float(loss))
        self.schedule.steps += 1
        self.schedule.trained += count_tokens(tokens) * self.world.size
        return True
