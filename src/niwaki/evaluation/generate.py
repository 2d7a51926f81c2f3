"""Text from a model, token by token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from niwaki.arguments import checked
from niwaki.errors import CheckpointError, NumericalError, UsageError, first_line
from niwaki.evaluation import llama_cpp
from niwaki.models.locate import check_continues, locate_model
from niwaki.models.tokens import check_known, check_tokens, encode, load_tokenizer, room_for_prompt
from niwaki.options import Compute, check_count
from niwaki.packed.format import open_checkpoint
from niwaki.packed.load import load
from niwaki.quantities import check_temperature
from niwaki.texts.rows import rendered

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: What a text does not end with for certain: half of a character, and a space.
_WAITING = "\N{REPLACEMENT CHARACTER} "


@checked
def generate(
    model: str | Path,
    prompt: str,
    *,
    tokens: int = 100,
    temperature: float = 0.0,
    seed: int = 0,
    raw: bool = False,
    compute: Compute | str = Compute(),
    say: Callable[[str], None] | None = None,
    echo: bool = False,
) -> str:
    """Generates text with a model, dense, pruned or packed: its answer to ``prompt``, or a continuation.

    A model with a chat template answers the prompt as a user's message; any other model continues it. The whole model
    has to fit in memory. A GGUF file runs in llama.cpp if llama-cpp-python is installed and no dtype is given.

    Args:
        model: A directory or hub id.
        prompt: The text to answer or to continue.
        tokens: Largest number of tokens to generate.
        temperature: 0 takes the most likely token each time; above 0, tokens are sampled from the model's probabilities
            at this temperature.
        seed: Random seed for sampling.
        raw: Continue the prompt as it is, without the chat template.
        compute: The device and the dtype, as in :func:`niwaki.bench`.
        say: Called with each piece of the text as soon as it is certain.
        echo: Whether a prompt that is continued goes before the first piece that ``say`` receives.

    Returns:
        The generated text.

    Raises:
        NiwakiError: see :mod:`niwaki.errors`.
    """
    compute = Compute.of(compute)
    compute.only("generate", "device", "dtype")
    check(prompt, tokens, temperature, seed)
    if file := llama_cpp.runnable(model, compute):
        asked: Any = {"max_tokens": tokens, "temperature": temperature, "seed": seed}
        return llama_cpp.write(file, prompt, raw, compute.device, say, echo, **asked)
    path = locate_model(str(model))
    check_continues(open_checkpoint(path), "generate")
    tokenizer = load_tokenizer(path)
    is_message = bool(tokenizer.chat_template) and not raw
    given = _as_message(tokenizer, prompt) if is_message else prompt
    loaded = load(model, compute.device, compute.dtype)
    before = iter([prompt] if echo and not is_message else [])  # nothing is said where nothing is generated

    def told(text: str) -> None:
        assert say
        say(next(before, "") + text)

    how: Any = {"temperature": temperature, "seed": seed, "say": told if say else None}
    return continue_text(loaded, tokenizer, given, tokens, is_message=is_message, **how)


def _as_message(tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """The text at whose end the model's answer to a user's message begins, by its chat template."""
    messages = [{"role": "user", "content": prompt}]
    try:
        (text,) = rendered(tokenizer.get_chat_template(), [messages], tokenizer.special_tokens_map, ask=True)
    except ValueError as error:  # of the template, or of a choice of several
        raise CheckpointError(
            f"the model's chat template fails on the prompt: {first_line(error)}; --raw continues it without"
        ) from error
    return text


def check(prompt: str, tokens: int, temperature: float, seed: int) -> None:
    """Raises UsageError for what no model continues."""
    check_count("tokens", tokens, 1)
    check_count("the seed", seed, 0)
    check_temperature(temperature)
    try:
        prompt.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise UsageError(f"the prompt {prompt!r} is not valid Unicode text; give it as UTF-8") from error


@torch.inference_mode()
def continue_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    tokens: int,
    *,
    is_message: bool = False,
    temperature: float = 0.0,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
) -> str:
    """What ``model``, any that transformers can generate text with, writes after ``prompt``; see :func:`generate`.

    What a chat template makes ``is_message``, which has all special tokens, the first one too.
    Of a prompt that is longer than the model's positions allow only the end is used, with a warning in the log. What
    ``say`` raises goes to the caller.

    Raises:
        UsageError: the prompt has no tokens or is not valid text, or a number is out of its range.
        CheckpointError: transformers cannot generate text with this model.
    """
    from transformers import GenerationConfig

    check(prompt, tokens, temperature, seed)
    given = _prompt_tokens(model, tokenizer, prompt, tokens, special=not is_message).to(model.device)
    if not hasattr(model, "generate"):  # it has no head
        raise CheckpointError("the model generates no text: it makes no predictions of words")
    own = model.generation_config
    end = own.eos_token_id if own is not None else None  # a number or several: chat models have more than one
    end = tokenizer.eos_token_id if end is None else end
    drawn: Any = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    # What is not set here would be taken from the model's own settings, which may draw or punish repetition.
    teller = _Teller(tokenizer, say) if say is not None else None
    write: Any = model.generate
    try:
        config = GenerationConfig(max_new_tokens=tokens, eos_token_id=end, pad_token_id=0, **drawn)
        model.generation_config = config
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(seed)
            how: Any = {"attention_mask": torch.ones_like(given), "generation_config": config, "streamer": teller}
            made = write(given, logits_processor=[_numbers], **how)
    except Exception as error:  # transformers raises nearly anything
        if (teller and error is teller.raised) or isinstance(error, NumericalError):
            raise
        raise CheckpointError(f"the model generates no text: {first_line(error)}") from error
    finally:
        model.generation_config = own
    return str(tokenizer.decode(made[0, given.shape[1] :], skip_special_tokens=True))


class _Teller:
    """Tells ``say`` the text of each token at once, which transformers' streamers keep back until there is a space.

    Only the first bytes of a character wait for the others, and a space for what follows: some tokenizers remove it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None]) -> None:
        self._tokenizer, self._say = tokenizer, say
        self._tokens = list[int]()
        self._told, self._had_prompt = 0, False  # which comes first
        self.raised: Exception | None = None  # by ``say``

    def put(self, value: Tensor) -> None:
        if self._had_prompt:
            self._tokens += value.flatten().tolist()
            self._tell(_WAITING)
        self._had_prompt = True

    def end(self) -> None:
        self._tell("")

    def _tell(self, waiting: str) -> None:
        text = str(self._tokenizer.decode(self._tokens, skip_special_tokens=True)).rstrip(waiting)
        if piece := text[self._told :]:
            self._told = len(text)
            try:
                self._say(piece)
            except Exception as error:
                self.raised = error
                raise


def _numbers(_: Tensor, logits: Tensor) -> Tensor:
    """``logits``, of which the first token would be taken where they are NaN or infinite (NumericalError)."""
    if not (logits < torch.inf).all():
        raise NumericalError("the model's outputs are NaN or infinite; try --dtype float32")
    return logits


def _prompt_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, tokens: int, special: bool
) -> Tensor:
    """(1, length): the end of the prompt that leaves positions for ``tokens`` more.

    With the ``special`` tokens that the model expects at the start of a text, or without.
    """
    ids = encode(tokenizer, prompt, special=special)
    check_known(ids, tokenizer, "the prompt")
    given = torch.tensor([ids], dtype=torch.int64)
    if given.numel() == 0:
        raise UsageError(f"the prompt {prompt[:40]!r} has no tokens; give some text")
    check_tokens(given, model.config)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2 * tokens + 2048
    return given[:, -int(room_for_prompt(given.shape[1], tokens, longest)) :]
