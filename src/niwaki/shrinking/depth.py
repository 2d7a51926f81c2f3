"""Which blocks go: those without which, after the repair, the model's predictions change least."""

import inspect
import math
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.records.progress import Progress
from niwaki.runs.duration import passes
from niwaki.shrinking.trial import Trial, Way

#: A run of neighbouring blocks: the first one, and the first one behind it.
Blocks = tuple[int, int]

#: What the parts of blocks call the cache that they are given.
_CACHES = {"past_key_values", "past_key_value", "cache_params", "layer_past", "past_states"}
#: Tokens that repairs are fitted to, and others on which predictions are compared, of all processes.
FITTED, _COMPARED = 16_384, 2_048


@torch.no_grad()
def costs_of_runs(
    model: StreamedModel, samples: Tensor, longest: int, world: World, progress: Progress
) -> dict[Blocks, float]:
    """What the removal of each run of up to ``longest`` neighbouring blocks costs, in nats a token.

    That is the KL divergence of the model without them from the dense one, on every fourth of about 2,048 tokens
    of ``samples`` (samples, length) int64, of which this is the process's share. The block before them is repaired (see
    :func:`.bridge.bridge`), fitted to about 16,384 other tokens: without that, runs would seem to cost more than single
    blocks here and there, which in the end cost more. Of a model without a head it is the squared error of the last
    hidden states, relative to them.

    Cost: one pass over the model's weights, in which all runs are under way: about half of ``longest`` times its depth
    forward passes for the tokens that are compared, and ``longest`` regressions for each block.

    Raises NumericalError where predictions are NaN or infinite.
    """
    fitted, compared = map(world.share, parts(torch.cat(world.collected(samples)), world.size))
    depth = len(model.blocks)
    runs = [(start, stop) for stop in range(1, depth + 1) for start in range(max(0, stop - longest), stop)]
    runs = [run for run in runs if _can_go(model, range(*run))]
    with model.budget.lent() as budget:
        states = model.embed(fitted), model.embed(compared)
        trial = Trial(model, *states, [Way(range(*run)) for run in runs], world, progress, budget)
        return dict(zip(runs, trial.costs(), strict=True))


def _can_go(model: StreamedModel, blocks: range) -> bool:
    """Whether a model is left without them: the first blocks of an encoder and its decoder do more than others."""
    if model.pairs is not None:
        return not any(start in blocks for start in model.starts)
    return len(blocks) < len(model.blocks)


def operations_of_runs(model: StreamedModel, longest: int) -> float:
    """Those of :func:`costs_of_runs`, about, see :mod:`niwaki.runs.duration`."""
    return passes(model, _COMPARED, count=len(model.blocks) * longest / 2, head=True)


def parts(samples: Tensor, processes: int) -> tuple[Tensor, Tensor]:
    """(samples to fit to, samples to compare predictions on): different ones, where there are enough of them.

    There is one of each for each of the ``processes`` at least, and so many that two choose as one does.
    """
    length = samples.shape[1]
    count = max(processes, min(math.ceil(_COMPARED / length), max(2, len(samples) // 4), len(samples)))
    chosen = torch.zeros(len(samples), dtype=torch.bool)
    chosen[torch.arange(count).mul(len(samples)).div(count, rounding_mode="floor").long()] = True
    rest = samples[~chosen] if len(samples) >= 2 * count else samples
    return some_of(rest, FITTED, processes), samples[chosen]


def some_of(samples: Tensor, tokens: int, processes: int) -> Tensor:
    """Samples here and there with about so many ``tokens``, at least one for each of the ``processes``."""
    most = max(processes, math.ceil(tokens / samples.shape[1]))
    return samples[:: max(1, len(samples) // most)][:most]


def kinds_of(model: StreamedModel) -> list[frozenset[str]]:
    """Of each block how it remembers what was before: the classes of its parts that take a cache.

    Programs that continue texts expect each of them at least once in a model, attention among others.
    """
    return [
        frozenset(
            type(module).__name__
            for module in block.modules()
            if module is not block and _CACHES & inspect.signature(module.forward).parameters.keys()
        )
        for block in model.blocks
    ]


def most_blocks(model: StreamedModel) -> int:
    """How many blocks can go at most: one of each kind stays, and the first of an encoder and of its decoder."""
    return len(model.blocks) - max(len(model.starts), len({*kinds_of(model)}))


def cheapest(costs: Mapping[Blocks, float], kinds: Sequence[Hashable], count: int) -> list[int]:
    """The ``count`` blocks to remove, in ascending order: the runs whose ``costs`` sum to least.

    Of each of the ``kinds`` of blocks at least one stays. Runs do not touch, or they would be one. Of equal sums the
    one with the first blocks.
    """
    depth, all_kinds = len(kinds), frozenset(kinds)
    # By the number of blocks so far, of which the last one stays, of those removed, and the kinds of those that stay:
    # the cost and what was removed.
    best: dict[tuple[int, int, frozenset[Hashable]], tuple[float, list[int]]] = {(0, 0, frozenset()): (0.0, [])}
    for at in range(depth):
        here = sorted((item for item in best.items() if item[0][0] == at), key=lambda item: item[0][1])
        for (_, removed, stay), (cost, gone) in here:
            for stop in range(at, min(depth, at + count - removed) + 1):
                if stop > at and (at, stop) not in costs:
                    continue
                total = cost + (costs[at, stop] if stop > at else 0.0)
                place = (min(stop + 1, depth), removed + stop - at, stay | {*kinds[stop : stop + 1]})
                if place not in best or total < best[place][0]:
                    best[place] = total, [*gone, *range(at, stop)]
    return best[depth, count, all_kinds][1]
