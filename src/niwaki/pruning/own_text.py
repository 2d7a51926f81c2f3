"""Text that the dense model writes itself, to prune and to fit to in addition to the given text."""

import contextlib
import math
from collections.abc import Callable
from typing import Any, cast

import psutil
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList

from niwaki.errors import UnsupportedModelError, one_line
from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.records.progress import Progress

#: The share of a window's tokens that is from the given text.
_PROMPT = 1 / 32
#: The share of the memory left by the weights that is for keys and values.
_CACHE = 1 / 2
#: The most sequences at a time: more are hardly faster.
_SAMPLES = 256
#: Bytes that Python and the libraries take, about.
_PROGRAM = 2**29
#: What models raise that cannot generate.
_REFUSALS = (NotImplementedError, TypeError, ValueError, AttributeError)


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
    together = min(world.collected(_together(model, length, budget)))
    if not together:
        return None
    parts = world.share(prompts).split(together)
    progress.stage(0, "synthesis", len(parts) * (length - width))
    drawn: list[Tensor] = []
    cuda = [model.device] if model.device.type == "cuda" else []
    with model.whole() as whole, torch.random.fork_rng(cuda):
        for turn, part in enumerate(parts):
            torch.manual_seed(1_000_003 * world.rank + turn)
            drawn.append(_continued(whole, part.to(model.device), length, progress.step))
    return torch.cat(world.collected(torch.cat(drawn)))


def _continued(whole: PreTrainedModel, prompts: Tensor, length: int, done: Callable[[], None]) -> Tensor:
    """(samples, length) on the CPU, that begin with ``prompts``; ``done`` is called after each token."""

    def never_stop(ids: Tensor, *_: Any, **__: Any) -> Tensor:
        done()
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    # A cache that does not grow takes half the time, but not all models can use it.
    with contextlib.suppress(*_REFUSALS):
        return _generated(whole, prompts, length, never_stop, "static")
    try:
        return _generated(whole, prompts, length, never_stop, "dynamic")
    except _REFUSALS as error:
        raise UnsupportedModelError(
            f"transformers cannot generate text with this model ({one_line(error)}); try the effort best:synthetic=0"
        ) from error


def _generated(whole: PreTrainedModel, prompts: Tensor, length: int, criterion: Any, cache: str) -> Tensor:
    drawing = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_length": length}
    settings = GenerationConfig(**drawing, pad_token_id=0, cache_implementation=cache, disable_compile=True)
    inputs = {"attention_mask": torch.ones_like(prompts), "stopping_criteria": StoppingCriteriaList([criterion])}
    # Otherwise what is not set here, such as the end of text, would come from the model's own settings.
    own, whole.generation_config = whole.generation_config, settings
    try:
        text: Tensor = cast("Any", whole).generate(prompts, generation_config=settings, **inputs)
    finally:
        whole.generation_config = own
    return text.cpu()


def _together(model: StreamedModel, length: int, budget: int | None) -> int:
    """How many sequences to write at a time; 0 where the model does not fit."""
    # Not by how much of the memory is free: the same run on the same machine draws the same text.
    if budget is None and model.device.type == "cuda":
        budget = torch.cuda.get_device_properties(model.device).total_memory
    elif budget is None:
        budget = psutil.virtual_memory().total
    config = model.config.get_text_config()
    heads = int(config.num_attention_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    pairs = len(model.blocks) * (getattr(config, "num_key_value_heads", None) or heads)
    # Also the last token's logits in float32, once more for probabilities and once for their sums.
    sequence = 2 * pairs * width * length * model.dtype.itemsize + 3 * 4 * config.vocab_size
    return min(_SAMPLES, int(max(0, budget - _PROGRAM - model.size) * _CACHE / sequence))
