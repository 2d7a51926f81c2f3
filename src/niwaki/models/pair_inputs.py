"""What an encoder with a decoder receives for pairs, and what it makes of them as a whole."""

import contextlib
import functools
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from niwaki.errors import UnsupportedModelError, UsageError, raised_as
from niwaki.models.interface import BlocksEndError, Inputs
from niwaki.models.pairs import SOURCES, parted, predicting
from niwaki.models.tokens import check_known_tokens

#: By the name of their inputs, what encoders read that do not read text.
_SOURCES: dict[str, Literal["sound", "image"]] = {
    **dict.fromkeys(("input_features", "input_values", "inputs"), "sound"),
    **dict.fromkeys(("pixel_values", "flattened_patches"), "image"),
}


@dataclass
class _EncoderOutput(BaseModelOutput):
    """What an encoder answers with, of whatever kind."""

    router_logits: tuple[Tensor, ...] | None = None
    attention_mask: Tensor | None = None


def _vocabulary(part: Any, config: Any) -> int:
    """How many tokens an encoder or a decoder has embeddings for."""
    with contextlib.suppress(NotImplementedError, AttributeError):
        return int(part.get_input_embeddings().num_embeddings)
    return int(getattr(config, "vocab_size", 0))


class PairInputs:
    """How ``model``, an encoder with a decoder of this ``config``, is run on pairs; ``last`` has the last blocks.

    Attributes:
        sources: What its encoder reads: text, or files of sound or images.
        decoder: Whose outputs are the last states, without a head.
        positions: The most tokens of a source; None where there is no limit.
    """

    def __init__(self, model: PreTrainedModel, config: PreTrainedConfig, last: nn.Module, device: torch.device) -> None:
        self._model, self._device, self._blank = model, device, config.pad_token_id or 0
        self.sources: Literal["text", "sound", "image"] = _SOURCES.get(model.main_input_name, "text")
        self._has_global_attention = "global_attention_mask" in signature(model.forward).parameters
        encoder, decoder = model.get_encoder(), model.get_decoder()
        of_source = getattr(encoder, "config", config)
        self._width = getattr(of_source, "hidden_size", config.hidden_size)
        self.decoder = last
        self._sizes = _vocabulary(encoder, of_source), _vocabulary(decoder, config)
        self.positions = getattr(of_source, "max_position_embeddings", None)

    def of(self, rows: Tensor) -> Inputs:
        """What the model receives for ``rows``: all tokens of the targets but the last go into the decoder.

        UnsupportedModelError for files of several sizes.
        """
        sources, targets = zip(*map(parted, rows), strict=True)
        pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        given = {"decoder_input_ids": pad([target[:-1] for target in targets], padding_value=self._blank)}
        if self.sources != "text":
            files = [SOURCES[int(source[0])] for source in sources]
            what = f"sources of several sizes ({self.sources}) cannot be together in a step; give a smaller batch"
            with raised_as(UnsupportedModelError, what, RuntimeError):
                return given | {name: torch.cat([each[name] for each in files]) for name in files[0]}
        given["input_ids"] = pad(list(sources), padding_value=self._blank)
        if self._has_global_attention:  # as LED is used: to and from the first token
            given["global_attention_mask"] = torch.zeros_like(given["input_ids"])
            given["global_attention_mask"][:, 0] = 1
        if len(rows) > 1:
            given["attention_mask"] = pad([torch.ones_like(source) for source in sources])
        return given

    def check(self, row: Tensor, longest: int | None) -> None:
        """Raises UsageError unless ``row`` is a pair that the model takes, with targets up to the ``longest``."""
        parts = parted(row)
        limits = zip(("source", "target"), parts, self._sizes, (self.positions, longest), strict=True)
        for what, tokens, size, positions in [*limits][self.sources != "text" :]:
            check_known_tokens(tokens, size)
            length = len(tokens) - (what == "target")  # the last token of a target is not read
            if positions is not None and length > positions:
                raise UsageError(f"a {what} of {length:,} tokens is more than the model's {positions:,} positions")

    def behind_blocks(self, tokens: Tensor, dtype: torch.dtype) -> dict[str, Any]:
        """What the model receives where its blocks have run: what goes into the decoder, and nothing to attend to."""
        nothing = torch.zeros(len(tokens), 1, self._width, dtype=dtype, device=self._device)
        given = {"encoder_outputs": _EncoderOutput(last_hidden_state=nothing), "decoder_input_ids": tokens}
        return {**given, "input_ids": tokens[:, :1]} if self.sources == "text" else given  # some ask for these too

    def target_states(self, rows: Tensor, given: Inputs) -> Tensor:
        """(predictions, width): the decoder's last states by which it predicts the targets of ``rows``.

        ``given`` is what :meth:`of` makes of these, on the device. The whole model is in memory.
        """
        seen: list[Tensor] = []

        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            seen.append(output.last_hidden_state)
            raise BlocksEndError  # the head is not needed

        hook = self.decoder.register_forward_hook(keep)
        try:
            with contextlib.suppress(BlocksEndError):
                self._model(**given, use_cache=False)
        finally:
            hook.remove()
        counts = predicting(rows).sum(1)
        return seen[0][(torch.arange(seen[0].shape[1]) < counts.unsqueeze(1)).to(self._device)]
