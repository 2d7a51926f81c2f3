"""Perplexity, a block at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from niwaki.blocks import StreamedModel
from niwaki.calibration import Windows, load_tokenizer, read_windows
from niwaki.checkpoint import Checkpoint, locate_model


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean cross-entropy, and what it is the perplexity of.

    Non-overlapping windows of the running text, in each the first token is given and the others are
    predicted; this is the protocol of the SparseGPT and Wanda papers.

    Attributes:
        value: The perplexity.
        standard_error: Of ``value``, from the spread of the windows' mean losses. It says how another
            text of this kind would differ, not how two models on the same text compare: that is tighter.
        tokens: Tokens that were predicted.
        context: Tokens in a window. Perplexities of different contexts do not compare.
        windows: Number of windows.
        text: Which text.
    """

    value: float
    standard_error: float
    tokens: int
    context: int
    windows: int
    text: str

    @classmethod
    def of(cls, losses: Tensor, text: str) -> Perplexity:
        """From (windows, context - 1) cross-entropies in nats."""
        means = losses.double().mean(dim=1)
        value = _exp(means.mean().item())
        spread = means.std().item() / math.sqrt(len(means)) if len(means) > 1 else math.nan
        return cls(value, value * spread, losses.numel(), losses.shape[1] + 1, len(means), text)

    def __str__(self) -> str:
        return (
            f"{self.value:.2f} ± {self.standard_error:.2f} "
            f"({self.tokens:,} tokens of {self.text}, context {self.context:,})"
        )


def evaluate(
    model: str | Path,
    text: str = "wikitext2",
    *,
    length: int | None = None,
    samples: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    done: Callable[[int, int], None] = lambda *_: None,
) -> Perplexity:
    """The perplexity of the model in a directory (or hub id), dense or pruned, on a text.

    Args:
        model: A directory or a hub id.
        text: A text; see :mod:`niwaki.calibration`.
        length: Tokens in a window; by default 2,048, or what the model has positions for if fewer.
        samples: The first so many windows; by default all of the text.
        device: As in :func:`niwaki.prune`.
        dtype: As in :func:`niwaki.prune`.
        done: Called as done(blocks, of) after each block.

    Raises:
        NiwakiError: see :mod:`niwaki.errors`.
    """
    checkpoint = Checkpoint(locate_model(str(model)))
    streamed = StreamedModel(checkpoint, device, dtype)
    length, _ = streamed.window_length(length)
    return perplexity(streamed, read_windows(text, load_tokenizer(checkpoint.path), length, samples), done)


def perplexity(
    model: StreamedModel, windows: Windows, done: Callable[[int, int], None] = lambda *_: None
) -> Perplexity:
    """The perplexity of ``model`` on ``windows``; ``done(blocks, of)`` is called after each block."""
    states = model.embed(windows.tokens)
    for block in model.stream():
        block.advance(states)
        done(block.index + 1, len(model.blocks))
    return Perplexity.of(model.losses(states), windows.source)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
