"""Perplexity, a block at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from niwaki.errors import UsageError
from niwaki.models.checkpoint import locate_model
from niwaki.models.device import resident
from niwaki.models.hidden_states import MemoryBudget
from niwaki.models.perplexity import perplexity
from niwaki.models.streamed import StreamedModel
from niwaki.models.text import Windows, load_tokenizer, read_windows
from niwaki.packed.format import open_checkpoint
from niwaki.records.record import Perplexity


def evaluate(
    model: str | Path,
    text: str | Windows = "wikitext2",
    *,
    length: int | None = None,
    samples: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    memory: int | None = None,
    done: Callable[[int, int], None] = lambda *_: None,
) -> Perplexity:
    """The perplexity of the model in a directory (or hub id), dense or pruned, on a text.

    Args:
        model: A directory or a hub id.
        text: A text, see :mod:`niwaki.models.text`, or windows of one, which ``length`` and ``samples`` say
            nothing about then.
        length: Tokens in a window; by default 2,048, or what the model has positions for if fewer.
        samples: The first so many windows; by default all of the text.
        device: As in :func:`niwaki.prune`.
        dtype: As in :func:`niwaki.prune`.
        memory: As in :func:`niwaki.prune`.
        done: Called as done(blocks, of) after each block.

    Raises:
        NiwakiError: see :mod:`niwaki.errors`.
    """
    checkpoint = open_checkpoint(locate_model(str(model)))
    with contextlib.closing(MemoryBudget()) as budget:
        streamed = StreamedModel(checkpoint, device, dtype, budget)
        if isinstance(text, str):
            length, _ = streamed.window_length(length)
            text = read_windows(text, load_tokenizer(checkpoint.path), length, samples)
        elif not isinstance(text, Windows):
            raise UsageError(f"one text at a time, or windows of it; got {text!r}")
        if memory is not None:
            # Besides a block's weights as much again for its activations.
            budget.limit(max(0, memory - resident() - 2 * streamed.block_size))
        return perplexity(streamed, text, done)
