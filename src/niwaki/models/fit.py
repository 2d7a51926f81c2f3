"""Fits the remaining weights of a block to the outputs of the dense block, by gradient descent."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from niwaki.effort import Fitting
from niwaki.errors import NumericalError
from niwaki.models.block import DecoderBlock
from niwaki.models.hidden_states import HiddenStates
from niwaki.models.processes import World
from niwaki.models.training import (
    FactorProjection,
    Projection,
    TrainedFactors,
    TrainedWeights,
    gradients,
    root_mean_square,
    smallest_weight,
    trainable,
)
from niwaki.records.record import FitRecord

#: One batch in this many is held out, the first one at least, to see whether a fit holds.
_HELD = 16

#: How many times the weights are in memory, in float32: as they are, as they were best, two averages and gradients.
COPIES = 5


@dataclass
class Fit:
    """Fits the weights of ``block`` that are not zero, so that its outputs come near those of the dense block.

    Adam on |f(x) - y|^2, where x are the block's inputs in the pruned model and y the outputs of the dense block for
    the dense model's inputs (as in EBFT, arXiv 2402.12419). Steps are relative to the root mean square of each
    parameter's weights that are not zero, and decrease linearly to 0. Some batches are held out (of one batch alone,
    itself); the weights are those of the epoch with the lowest error there, or the original ones if none is better. No
    weight becomes zero. A step takes one batch of each process. With ``on_grid`` the block computes with rounded
    weights, whose gradients change unrounded ones. Where matrices are products of two ``factors``, the first of their
    parts by name, these are trained on their own masks, in the same way with ``project_factors``, and are replaced by
    what has become of them.

    Cost: per epoch a forward and a backward pass of the block for all batches; memory of five float32 copies of the
    weights and of the activations of a batch.
    """

    block: DecoderBlock
    states: HiddenStates  # the inputs of the pruned block, which stay as they are
    targets: HiddenStates  # what its outputs should be, in batches for the same parts; of the first samples at least
    settings: Fitting
    world: World
    done: Callable[[], None]  # called after each of the ``batches`` that pass through the block
    on_grid: Projection | None = None
    factors: Mapping[str, Sequence[Tensor]] | None = None
    project_factors: FactorProjection | None = None
    seconds: float = math.inf  # that it may take; the rate then decreases with the share that is left of them

    def __post_init__(self) -> None:
        self.states.arguments.share_calls(self.targets.arguments)  # the last batch can be smaller there
        self._parts = self.targets.steps(self.settings.tokens_per_part(self.world.size))
        count = min(self.world.collected(len(self._parts)))
        self._held = list(range(0, count, _HELD))
        self._rest = [i for i in range(count) if i % _HELD] or self._held
        some = sum(map(len, self.targets.tokens)) < sum(map(len, self.states.tokens))
        self._steps = max(1, round((1.0 if some else self.settings.epochs) * len(self._rest)))
        self.batches = len(self._held) * (1 + math.ceil(self._steps / len(self._rest))) + self._steps

    def run(self) -> FitRecord:
        """The fit; NumericalError where its error is not finite."""
        began = time.perf_counter()
        block, steps, rest = self.block, self._steps, self._rest
        held = (self._target(part) for i in self._held for part in self._parts[i])
        power = sum(float(target.double().square().sum()) for target in held)
        self._power = max(sum(self.world.collected(power)), 1e-30)
        order = torch.Generator().manual_seed(block.index)
        with trainable(block) as weights:
            factors = None
            if self.factors and self.project_factors:
                factors = TrainedFactors(block, self.factors, self.project_factors)
            self._trained = factors or TrainedWeights(block, weights, self.on_grid)
            parameters = self._trained.values
            masks = [value != 0 for value in parameters]
            optimizer = _optimizer(parameters, self.settings.rate)
            best = before = self._error()
            kept, at = [value.detach().clone() for value in parameters], 0.0
            for step in range(steps):
                if step % len(rest) == 0:
                    epoch = torch.randperm(len(rest), generator=order).tolist()
                with self._trained.computing(), gradients(parameters[0].device):
                    for squares in self._squares(rest[epoch[step % len(rest)]]):
                        squares.sum().backward()
                found = self._trained.gradients()
                self.world.sum(found)
                for gradient, mask in zip(found, masks, strict=True):
                    gradient.mul_(mask)  # a pruned weight without gradient stays where it is
                share = self._share(step, began)
                for group in optimizer.param_groups:
                    group["lr"] = group["rate"] * (1 - share)
                optimizer.step()
                optimizer.zero_grad()
                self.done()
                is_last = step + 1 == steps or share == 1
                if (step + 1) % len(rest) and not is_last:
                    continue
                now = self._error()
                if now < best:
                    best, at = now, (step + 1) / len(rest)
                    for old, value in zip(kept, parameters, strict=True):
                        old.copy_(value.detach())
                if is_last:
                    break
            for old, value, mask in zip(kept, parameters, masks, strict=True):
                value.data = _off_zero(old, mask, smallest_weight(block))
            self._trained.settle()
            self.factors = factors.parts if factors else None
        return FitRecord(block.index, before, best, at, time.perf_counter() - began, step + 1)

    def _share(self, step: int, began: float) -> float:
        """How much of what the fit may take is behind it before ``step``, up to 1, in all processes."""
        if math.isinf(self.seconds):
            return step / self._steps
        return self.world.received(min(1.0, max(step / self._steps, (time.perf_counter() - began) / self.seconds)))

    def _target(self, part: tuple[int, slice]) -> Tensor:
        return self.targets.hidden.samples(*part)

    def _squares(self, i: int) -> Iterator[Tensor]:
        """What each output of the parts of step ``i`` contributes to the error, relative to the held-out targets."""
        for part in self._parts[i]:
            answer = self.block.run(self.states.hidden.samples(*part), self.states, *part)
            wanted = self._target(part).float()
            yield (answer.reshape(wanted.shape).float() - wanted).square() / self._power

    def _error(self) -> float:
        """The error of what is held out, in all processes."""
        error = 0.0
        with self._trained.computing():
            for i in self._held:
                with torch.no_grad():  # in float64 a few huge activations do not hide the rest
                    error += sum(float(squares.sum(dtype=torch.float64)) for squares in self._squares(i))
                self.done()
        error = sum(self.world.collected(error))
        if not math.isfinite(error):
            raise NumericalError(
                f"block {self.block.index}: fitting it arrived at NaN or infinite outputs; try a lower rate than "
                f"rate={self.settings.rate:g}, or dtype float32"
            )
        return error


def samples_to_fit(count: int, epochs: float) -> tuple[Tensor, int]:
    """An order of so many samples, and on how many of the first of them the dense model runs.

    For less than one epoch these are only some, drawn from all; in more than one, all are used again.
    """
    if epochs >= 1:
        return torch.arange(count), count
    return torch.randperm(count, generator=torch.Generator().manual_seed(0)), max(1, round(epochs * count))


def _optimizer(parameters: list[nn.Parameter], rate: float) -> torch.optim.Adam:
    """Each parameter with its own "rate"."""
    groups = [{"params": [value], "rate": rate * root_mean_square(value)} for value in parameters]
    # Relative errors of large blocks have gradients far below the usual epsilon, 1e-8.
    return torch.optim.Adam(groups, lr=0.0, eps=1e-16, fused=True)


def _off_zero(value: Tensor, mask: Tensor, smallest: float) -> Tensor:
    """``value`` with weights on the mask no smaller than ``smallest``: rounded to 0 they would count as pruned."""
    close = mask & (value.abs() < smallest)
    return value.masked_scatter_(close, torch.full_like(value[close], smallest).copysign(value[close]))
