"""Text from a model, token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from niwaki.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@torch.inference_mode()
def continue_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
) -> str:
    """What ``model`` goes on with after ``prompt``, to the end of the text or ``tokens`` further.

    Args:
        model: Any model that transformers can generate text with.
        tokenizer: Its tokenizer.
        prompt: Some text; only its end is used where it is longer than the model's positions allow.
        tokens: At most so many are written.
        temperature: 0 for the most likely token each time, else drawn from the model's probabilities at it.
        seed: Of what is drawn.
        say: Is told of each piece of the text as soon as it is certain.

    Raises:
        UsageError: the prompt has no tokens, or a number is out of its range.
        CheckpointError: transformers cannot generate text with this model.
    """
    from transformers import GenerationConfig, TextStreamer

    class Teller(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if say is not None:
                say(text)

    given = torch.tensor([tokenizer.encode(prompt)])  # with what the model expects at the start of a text
    if given.numel() == 0:
        raise UsageError(f"the prompt {prompt!r} has no tokens; give some text")
    if tokens < 1 or temperature < 0:
        raise UsageError(
            f"tokens are 1 or more and the temperature 0 or more; got {tokens} and {temperature}"
        )
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2 * tokens + 2048
    if tokens >= longest:
        raise UsageError(f"{tokens} tokens are more than the {longest} positions of the model have room for")
    given = given[:, -(longest - tokens) :].to(model.device)
    settings = GenerationConfig(
        max_new_tokens=tokens,
        do_sample=temperature > 0,
        temperature=temperature or None,
        top_k=0 if temperature else None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
    )
    # What is not set here would be taken from the model's own settings, which may draw or punish repetition.
    own, model.generation_config = model.generation_config, settings
    generate: Any = model.generate
    try:
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(seed)
            made = generate(
                given,
                attention_mask=torch.ones_like(given),
                generation_config=settings,
                streamer=Teller(tokenizer, skip_prompt=True, skip_special_tokens=True)
                if say is not None
                else None,
            )
    except Exception as error:  # transformers raises nearly anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"the model generates no text: {reason}") from error
    finally:
        model.generation_config = own
    return str(tokenizer.decode(made[0, given.shape[1] :], skip_special_tokens=True))
