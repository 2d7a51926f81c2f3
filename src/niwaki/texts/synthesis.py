"""Text that the dense model writes itself, to prune and to fit to in addition to the given text."""

import math

import torch
from torch import Tensor

from niwaki.errors import UnsupportedModelError
from niwaki.models.generation import at_a_time, continued, device_memory, for_writing
from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.models.tokens import in_windows
from niwaki.records.progress import Progress

#: Tokens of one text, at most: its time goes with their number, and so much says what kind of text it is.
_LONGEST = 128
#: The most texts at a time: more are hardly faster.
_TOGETHER = 256


def synthesize(
    model: StreamedModel,
    count: int,
    length: int,
    budget: int | None,
    world: World,
    progress: Progress,
    seed: int = 0,
    bos: int | None = None,
) -> Tensor:
    """(``count``, ``length``) int64: texts drawn from the dense model, token by token from its own probabilities.

    Each begins with a token that is drawn from all, so that they are of as many kinds as the model knows (Liu et al.
    2023, arXiv 2305.17888), and after the end of a text another one follows. They are short, and joined to windows. All
    processes have the same; another ``seed`` gives other texts. Where the model's texts begin with a token ``bos``,
    these are written after it, and each window begins with it.

    The whole model with its keys and values takes up to ``budget`` bytes of each process, by default half of the
    device's, because the usual effort does this unasked.

    Cost: a pass of the whole model for each position of a text and each batch of texts, a step for ``progress``.

    Why: a fit to more text holds better on unseen text, and the model's own is nearly as good for that as real text; on
    text unlike the given text it is better (docs/prune.md). Williams et al. 2024, arXiv 2410.17170, calibrate pruning
    on such text alone.

    Raises UnsupportedModelError where the model does not fit or transformers cannot generate text with it.
    """
    if model.sees_ahead:
        raise UnsupportedModelError("it is an encoder, which writes no text")
    if model.pairs is not None:
        raise UnsupportedModelError("it is an encoder with a decoder, which needs a source to write anything")
    model = for_writing(model)
    budget = device_memory(model.device) // 2 if budget is None else budget
    own = bos is not None  # tokens before each text and in each window that are not of a text
    short = max(min(length, _LONGEST), 2 + own)
    drawing = torch.Generator().manual_seed(seed)
    known = model.config.get_text_config().vocab_size
    first = torch.randint(known, (math.ceil(count * (length - own) / (short - own)), 1), generator=drawing)
    if bos is not None:
        first = torch.nn.functional.pad(first, (1, 0), value=bos)
    together = min(world.collected(at_a_time(model, short, budget, _TOGETHER)))
    if not together:
        raise UnsupportedModelError(f"its {model.size / 2**30:,.1f} GiB do not fit in memory")
    parts = world.share(first).split(together)
    progress.stage(0, "synthesis", len(parts) * (short - 1 - own))
    drawn: list[Tensor] = []
    cuda = [model.device] if model.device.type == "cuda" else []
    with model.whole() as whole, torch.random.fork_rng(cuda):
        for turn, part in enumerate(parts):
            torch.manual_seed(1_000_003 * world.rank + turn + 1_000_000_007 * seed)
            drawn.append(continued(whole, part.to(model.device), short, progress.step))
    return in_windows(torch.cat(world.collected(torch.cat(drawn)))[:, own:].flatten(), count, length, bos)
