"""Fits what is left of a block's weights to the outputs of the dense block, by gradient descent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from niwaki.errors import NumericalError
from niwaki.models.block import DecoderBlock, cut_sub_blocks
from niwaki.models.hidden_states import HiddenStates
from niwaki.models.layout import Matrix
from niwaki.models.processes import World
from niwaki.models.training import projected, smallest_weight, trainable
from niwaki.pruning.effort import Effort
from niwaki.records.record import FitRecord

#: One in so many batches is held out, the first one at least, to see whether a fit holds.
_HELD = 16

#: How many times the weights are in memory, in float32: as they are, as they were best, two averages and gradients.
COPIES = 5


def fit(
    block: DecoderBlock,
    states: HiddenStates,
    targets: HiddenStates,
    effort: Effort,
    world: World,
    done: Callable[[], None],
    on_grid: Callable[[Matrix, Tensor], Tensor] | None = None,
) -> FitRecord:
    """Changes the weights of ``block`` that are not zero, so that its outputs come near those of the dense block.

    Adam on |f(x) - y|^2, where x are the block's inputs in the pruned model and y the outputs of the dense block for
    the dense model's inputs. Steps are relative to the root mean square of each parameter's weights that are not zero,
    and fall to 0 in a line. Some batches are held out (of one batch alone, itself); the weights are those after the
    epoch with the lowest error there, before the first one, or in the end. None becomes zero.

    Sub-blocks that are fitted apart have the inputs that the pruned ones before them give, and the error is the sum of
    theirs. Each, with the norms before it, gets the gradients of its own error only.

    Cost: in each epoch a forward and a backward pass of the block for all batches, the latter as much as two of the
    former; memory of five float32 copies of the weights and of the activations of a batch.

    References: EBFT, arXiv 2402.12419, fits blocks to the outputs of dense ones on dense inputs; arXiv 2510.14444
    sub-blocks.

    Args:
        block: The pruned block.
        states: Its inputs. Not changed.
        targets: What its outputs should be, of all samples, or of the first ones to fit it to these. In batches for the
            same parts as ``states``. With their ``sub_outputs`` if sub-blocks are fitted apart. Not changed.
        effort: How long, and with which rate.
        world: The processes of which each has some of the states; a step takes one batch of each.
        done: Called after each batch, see :func:`batches`.
        on_grid: (out, in), the weights of a matrix rounded to its grid, with none that becomes zero. The block computes
            with these, in the end too; steps are made by weights that are not rounded, with the gradients of these.

    Raises:
        NumericalError: the error is not finite.
    """
    began = time.perf_counter()
    parts = targets.minibatches(tokens_per_part(effort, world))
    held, rest = _divided(min(world.collected(len(parts))))
    order = torch.Generator().manual_seed(block.index)
    with trainable(block, effort.norms) as parameters:
        # Vectors are fitted as a whole.
        masks = [value != 0 if value.ndim > 1 else torch.ones_like(value).bool() for value in parameters]
        optimizer = torch.optim.Adam(
            [{"params": [value], "rate": effort.rate * _root_mean_square(value, mask)}
             for value, mask in zip(parameters, masks, strict=True)],
            lr=0.0,
            eps=1e-16,  # relative errors of large blocks have gradients far below the usual 1e-8
            fused=True,
        )  # fmt: skip
        wanted = targets.sub_outputs if effort.apart else [targets.hidden]
        mine = [sum(float(y.samples(*parts[i]).double().square().sum()) for i in held) for y in wanted]
        powers = [max(sum(power), 1e-30) for power in zip(*world.collected(mine), strict=True)]

        def squares(i: int) -> Tensor:
            with cut_sub_blocks(block.module, block.matrices if effort.apart else []) as answers:
                answer = block.run(states.hidden.samples(*parts[i]), targets)
            dense = [y.samples(*parts[i]).float() for y in wanted]
            found = [
                (answer.reshape(y.shape).float() - y).square() / power
                for answer, y, power in zip(answers if effort.apart else [answer], dense, powers, strict=True)
            ]
            return torch.stack(found)

        def error() -> float:
            mine = 0.0
            with projected(block, on_grid):
                for i in held:
                    with torch.no_grad():  # in float64 a few huge activations do not hide the rest
                        mine += float(squares(i).sum(dtype=torch.float64))
                    done()
            found = sum(world.collected(mine))
            if not math.isfinite(found):
                raise NumericalError(
                    f"block {block.index}: fitting it arrived at NaN or infinite outputs; try a lower rate than "
                    f"rate={effort.rate:g}, or --dtype float32"
                )
            return found

        best = before = error()
        kept, at = [value.detach().clone() for value in parameters], 0.0
        steps = _steps(len(rest), passes(states, targets, effort))
        for step in range(steps):
            if step % len(rest) == 0:
                epoch = torch.randperm(len(rest), generator=order).tolist()
            with projected(block, on_grid), torch.enable_grad():
                squares(rest[epoch[step % len(rest)]]).sum().backward()
            gradients = [_gradient(value) for value in parameters]
            world.sum(gradients)
            for gradient, mask in zip(gradients, masks, strict=True):
                gradient.mul_(mask)  # a pruned weight without gradient stays where it is
            for group in optimizer.param_groups:
                group["lr"] = group["rate"] * (1 - step / steps)
            optimizer.step()
            optimizer.zero_grad()
            done()
            if (step + 1) % len(rest) and step + 1 < steps:
                continue
            now = error()
            if now < best:
                best, at = now, (step + 1) / len(rest)
                for old, value in zip(kept, parameters, strict=True):
                    old.copy_(value.detach())
        for old, value, mask in zip(kept, parameters, masks, strict=True):
            value.data = _off_zero(old, mask, smallest_weight(block)) if value.ndim > 1 else old
        with projected(block, on_grid):
            rounded = [value.data for value in parameters]
        for value, data in zip(parameters, rounded, strict=True):
            value.data = data
    return FitRecord(block.index, before, best, at, time.perf_counter() - began)


def tokens_per_part(effort: Effort, world: World) -> int:
    """Tokens of each process in a step."""
    return max(1, effort.batch // world.size)


def passes(states: HiddenStates, targets: HiddenStates, effort: Effort) -> float:
    """How often a fit goes over ``targets``, of which there may be fewer than ``states`` because it is once."""
    return 1.0 if sum(map(len, targets.tokens)) < sum(map(len, states.tokens)) else effort.epochs


def batches(states: HiddenStates, targets: HiddenStates, effort: Effort, world: World) -> int:
    """How many batches pass through the block in a fit."""
    held, rest = _divided(len(targets.minibatches(tokens_per_part(effort, world))))
    steps = _steps(len(rest), passes(states, targets, effort))
    return len(held) * (1 + math.ceil(steps / len(rest))) + steps


def _steps(count: int, epochs: float) -> int:
    return max(1, round(epochs * count))


def _divided(count: int) -> tuple[list[int], list[int]]:
    """(what is held out, what is fitted to); of one batch alone both are the same."""
    held = list(range(0, count, _HELD))
    return held, [i for i in range(count) if i % _HELD] or held


def _root_mean_square(value: Tensor, mask: Tensor) -> float:
    weights = int(mask.count_nonzero())
    return math.sqrt(float(value.detach().square().sum(dtype=torch.float64)) / max(1, weights))


def _gradient(value: nn.Parameter) -> Tensor:
    if value.grad is None:  # experts that none of these tokens went to
        value.grad = torch.zeros_like(value)
    return value.grad


def _off_zero(value: Tensor, mask: Tensor, smallest: float) -> Tensor:
    """``value``, whose weights on the mask are nowhere below ``smallest``: rounded they would count as pruned."""
    close = mask & (value.abs() < smallest)
    return value.masked_scatter_(close, torch.full_like(value[close], smallest).copysign(value[close]))
