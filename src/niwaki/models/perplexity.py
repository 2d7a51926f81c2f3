"""Perplexity, a block at a time."""

from __future__ import annotations

from collections.abc import Callable

from niwaki.models.streamed import StreamedModel
from niwaki.models.text import Windows
from niwaki.records.record import Perplexity


def perplexity(
    model: StreamedModel, windows: Windows, done: Callable[[int, int], None] = lambda *_: None
) -> Perplexity:
    """The perplexity of ``model`` on ``windows``; ``done(blocks, of)`` is called after each block."""
    states = model.embed(windows.tokens)
    for block in model.stream():
        block.advance(states)
        done(block.index + 1, len(model.blocks))
    return Perplexity.of(model.losses(states), windows.source, windows.origin)
