"""Text that the dense model writes itself, to prune and to fit to in addition to the given text."""

import math

import torch
from torch import Tensor

from niwaki.errors import UnsupportedModelError
from niwaki.models.generation import at_a_time, continued
from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.records.progress import Progress

#: The share of a window's tokens that is from the given text.
_PROMPT = 1 / 32
#: The most sequences at a time: more are hardly faster.
_SAMPLES = 256


def synthesize(
    model: StreamedModel, tokens: Tensor, count: int, budget: int | None, world: World, progress: Progress
) -> Tensor | None:
    """(``count``, length) int64: text drawn from the dense model, token by token from its own probabilities.

    The windows, the same in all processes, are as long as those of ``tokens`` (samples, length), this process's share
    of the given text, and begin with a few tokens from within these; after the end of a text they continue. None where
    the model with its keys and values does not fit in ``budget`` bytes of each process, by default the device's.

    Cost: a pass of the whole model for each position of a window and each batch of sequences, a step for ``progress``.

    Why: a fit to more text holds better on unseen text, and the model's own is nearly as good for that as real text
    (docs/effort.md). Williams et al. 2024, arXiv 2410.17170, calibrate pruning on such text alone.

    Raises UnsupportedModelError where transformers cannot generate text with this model.
    """
    length = tokens.shape[1]
    given, width = torch.cat(world.collected(tokens)), max(1, round(length * _PROMPT))
    rounds = math.ceil(count / len(given))
    # Each round takes its prompts from another place of the windows; with one round, the middle.
    starts = [(turn + 1) * (length - width) // (rounds + 1) for turn in range(rounds)]
    prompts = torch.cat([given[:, start : start + width] for start in starts])[:count]
    together = min(world.collected(at_a_time(model, length, budget, _SAMPLES)))
    if not together:
        return None
    parts = world.share(prompts).split(together)
    progress.stage(0, "synthesis", len(parts) * (length - width))
    drawn: list[Tensor] = []
    cuda = [model.device] if model.device.type == "cuda" else []
    with model.whole() as whole, torch.random.fork_rng(cuda):
        for turn, part in enumerate(parts):
            torch.manual_seed(1_000_003 * world.rank + turn)
            try:
                drawn.append(continued(whole, part.to(model.device), length, progress.step))
            except UnsupportedModelError as error:
                raise UnsupportedModelError(f"{error}; try the effort best:synthetic=0") from error
    return torch.cat(world.collected(torch.cat(drawn)))
