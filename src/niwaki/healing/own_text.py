"""Text of the dense model's own among the text that is trained on."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.records.progress import Progress
from niwaki.texts.synthesis import synthesize

#: Tokens of the first part and of the longest: each has twice as many as the one before.
_FIRST, _LONGEST = 1 << 11, 1 << 15


def written(
    dense: StreamedModel,
    count: int,
    length: int,
    budget: int | None,
    world: World,
    progress: Progress,
    is_enough: Callable[[], bool],
    bos: int | None = None,
) -> Tensor:
    """(up to ``count``, ``length``) int64: text of ``dense``, see :func:`niwaki.texts.synthesis.synthesize`.

    In parts, at least one, until ``is_enough``, which the first process decides; the next part takes about as long as
    all before it. UnsupportedModelError where the dense model cannot write.
    """
    parts, there, tokens = list[Tensor](), 0, _FIRST
    while there < count and not (there and world.received(is_enough())):
        # No fewer than one for each process, of which the last are left out.
        size = max(world.size, min(tokens // length, count - there))
        parts.append(synthesize(dense, size, length, budget, world, progress, len(parts), bos))
        there, tokens = there + size, min(2 * tokens, _LONGEST)
    return torch.cat(parts)[:count] if parts else torch.empty(0, length, dtype=torch.int64)


def windows(tokens: int, length: int, real: int, share: float) -> tuple[int, int]:
    """How many windows of ``real`` ones, and of own text, make up what is trained on, for so many ``tokens``."""
    wanted = math.ceil(tokens / length)
    chosen = max(1, min(real, wanted - round(share * wanted)))
    return chosen, round(chosen * share / (1 - share))


def mixed(real: Tensor, own: Tensor, share: float) -> Tensor:
    """Windows of both in turn, so that the first ones have the same ``share`` of own text as all.

    Where there is less own text than that, it comes first.
    """
    places = [torch.arange(len(each)).add(0.5).div(part) for each, part in ((real, 1 - share), (own, share))]
    return torch.cat([real, own])[torch.cat(places).argsort(stable=True)]
