"""Which blocks matter least."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from niwaki.errors import NumericalError
from niwaki.models.hidden_states import HiddenStates
from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.records.progress import Progress

_ALONE = World()


def influences(model: StreamedModel, states: HiddenStates, progress: Progress, world: World = _ALONE) -> list[float]:
    """The influence of each block: 1 - the mean cosine of its input and output over the tokens.

    ShortGPT, arXiv 2403.03853, eq. 1; differences: none known. Cost: a forward pass, in which ``states``, the inputs of
    the first block, become the outputs of the last one. Each process of ``world`` has a share of the tokens. Raises
    NumericalError where a block's outputs are not finite.
    """
    influence = []
    for block in model.stream():
        progress.stage(block.index, "influence", len(states.hidden))
        total, tokens = 0.0, 0
        for i in range(len(states.hidden)):
            before = states.hidden[i]
            handed = states.arguments.handed(block.index, i)
            with torch.no_grad():
                after = block.run(before, states, i, handed=handed).to(before.dtype)
            cosines = nn.functional.cosine_similarity(before.float(), after.float(), dim=-1)
            total += float(cosines.sum(dtype=torch.float64))
            tokens += cosines.numel()
            states.hidden[i] = after
            states.arguments.hand_on(block.index, i, handed)
            progress.step()
        total, tokens = (sum(each) for each in zip(*world.collected((total, tokens)), strict=True))
        if not math.isfinite(total):
            raise NumericalError(
                f"block {block.index}: its outputs are NaN or infinite on the calibration text; try dtype float32"
            )
        influence.append(1 - total / tokens)
    return influence


def lowest(scores: Sequence[float], count: int) -> list[int]:
    """The ``count`` blocks with the lowest scores, in ascending order; of equal ones the first."""
    return sorted(sorted(range(len(scores)), key=lambda index: scores[index])[:count])
