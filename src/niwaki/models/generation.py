"""Text drawn from the whole dense model, token by token, many sequences at a time."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, cast

import psutil
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList

from niwaki.errors import UnsupportedModelError, one_line
from niwaki.models.device import writing_dtype
from niwaki.models.streamed import StreamedModel

#: The share of the memory left by the weights that is for keys and values.
_CACHE = 1 / 2
#: Bytes that Python and the libraries take, about.
_PROGRAM = 2**29
#: What models raise that cannot generate.
_REFUSALS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: by the model's own probabilities, unless something else is said.

    Logits are divided by ``temperature``; of the ``top_k`` most likely tokens (0 for all) those are drawn that have the
    share ``top_p`` of the probability together.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __str__(self) -> str:
        top_k = f", top-k {self.top_k}" if self.top_k else ""
        return f"temperature {self.temperature:g}, top-p {self.top_p:g}{top_k}"


def for_writing(model: StreamedModel) -> StreamedModel:
    """The model that writes its text: itself, or the same in :func:`niwaki.models.device.writing_dtype`."""
    dtype = writing_dtype(model.dtype, model.device, model.checkpoint)
    if dtype == model.dtype:
        return model
    return StreamedModel(model.checkpoint, str(model.device), str(dtype).removeprefix("torch."))


def continued(
    whole: PreTrainedModel,
    prompts: Tensor,
    length: int,
    done: Callable[[], None],
    mask: Tensor | None = None,
    ends: Collection[int] = (),
    sampling: Sampling = Sampling(),
) -> Tensor:
    """(samples, up to ``length``) on the CPU: ``prompts`` (samples, tokens), continued; ``done`` after each token.

    ``mask``, as ``prompts``, is 0 for what is only there, on the left, so that all have the same length. After one of
    the tokens ``ends`` a sequence has ended, and what it has there means nothing; while some sequence has none of them,
    all go on. UnsupportedModelError where transformers cannot generate text with this model.
    """
    mask = torch.ones_like(prompts) if mask is None else mask
    last = torch.tensor(list(ends), device=prompts.device)

    def step(ids: Tensor, *_: Any, **__: Any) -> Tensor:
        done()
        return torch.isin(ids[:, -1], last)

    # A cache that does not grow takes half the time, but not all models can use it.
    for cache in ("static", "dynamic"):
        try:
            return _generated(whole, prompts, mask, length, step, cache, sampling)
        except torch.OutOfMemoryError:
            raise
        except _REFUSALS as error:
            refusal = error
    raise UnsupportedModelError(f"transformers cannot generate text with this model ({one_line(refusal)})") from refusal


def _generated(
    whole: PreTrainedModel, prompts: Tensor, mask: Tensor, length: int, criterion: Any, cache: str, sampling: Sampling
) -> Tensor:
    settings = GenerationConfig(
        do_sample=True,
        **dataclasses.asdict(sampling),
        max_length=length,
        pad_token_id=0,
        cache_implementation=cache,
        disable_compile=True,
    )
    inputs = {"attention_mask": mask, "stopping_criteria": StoppingCriteriaList([criterion])}
    # Otherwise what is not set here, such as the end of text, would come from the model's own settings.
    own, whole.generation_config = whole.generation_config, settings
    try:
        with _in_one_product(whole):
            text: Tensor = cast("Any", whole).generate(prompts, generation_config=settings, **inputs)
    finally:
        whole.generation_config = own
    return text.cpu()


def _in_one_product(whole: PreTrainedModel) -> contextlib.AbstractContextManager[Any]:
    """Within it the head's logits are one product for all sequences.

    transformers gives the head the last state of each prompt as a view of all of them. torch multiplies what cannot be
    viewed as a matrix sequence by sequence, and oneDNN copies the head for each: 22 GB for 33 sequences of Gemma 3
    270M.
    """
    head: nn.Module | None = whole.get_output_embeddings()
    if head is None:
        return contextlib.nullcontext()
    return head.register_forward_pre_hook(lambda _, states: states[0].contiguous())


def device_memory(device: torch.device) -> int:
    """Bytes of it, and not how many are free, so that the same run on the same machine draws the same text."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def at_a_time(model: StreamedModel, length: int, budget: int | None, most: int) -> int:
    """How many sequences of ``length`` tokens to draw together, up to ``most``; 0 where the model does not fit.

    In ``budget`` bytes, by default the device's memory.
    """
    budget = device_memory(model.device) if budget is None else budget
    config = model.config.get_text_config()
    width = config.hidden_size
    with contextlib.suppress(AttributeError, RuntimeError):  # without attention, or with another one in each block
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or width // heads
        width = size * (getattr(config, "num_key_value_heads", None) or heads)
    # Also the last token's logits in float32, once more for probabilities and once for their sums.
    sequence = 2 * len(model.blocks) * width * length * model.dtype.itemsize + 3 * 4 * config.vocab_size
    return min(most, int(max(0, budget - _PROGRAM - model.size) * _CACHE / sequence))
