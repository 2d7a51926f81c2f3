"""How often each token is in a text, all of it and not only its windows."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from niwaki.errors import CalibrationError
from niwaki.models.streamed import StreamedModel
from niwaki.models.tokens import encode, find_bos
from niwaki.options import Calibration
from niwaki.texts.rows import ChatTemplate
from niwaki.texts.sources import read_text
from niwaki.texts.texts import characters
from niwaki.windows import Windows

#: Characters that are counted of a text, which takes half a minute; and how many become tokens at a time.
MOST, _AT_ONCE = 1 << 25, 1 << 18


@dataclass(frozen=True)
class Counts:
    """The ``shares`` (tokens,) float64 of each token in several texts, texts alike; and how many were counted."""

    shares: Tensor
    tokens: int
    characters: int
    notes: tuple[str, ...]


def count_tokens(model: StreamedModel, calibration: Calibration, without: Tensor | None = None) -> Counts:
    """Counts all tokens of the texts of ``calibration``, of each the first 2^25 characters.

    Those of windows ``without`` (windows, length), which are measured on, are taken off again. CalibrationError where
    nothing is there to count.
    """
    size, read, found, notes = model.config.vocab_size, 0, list[Tensor](), list[str]()
    for text in calibration.texts:
        if isinstance(text, str):
            counts, length, is_cut, said = _of_text(model, text, calibration)
            read += length
            notes += said
            if is_cut:
                notes.append(f"only the first {length:,} characters of {text} were counted")
        else:
            tokens: Any = text.tokens if isinstance(text, Windows) else text
            counts = torch.bincount(tokens.flatten(), minlength=size)
        found.append(counts.double())
    total = int(sum(float(each.sum()) for each in found))
    if without is not None:
        held = torch.bincount(without.flatten(), minlength=size).double() / len(found)
        found = [(each - held).clamp(min=0) for each in found]
    if not all(float(each.sum()) for each in found):
        raise CalibrationError("the text to count tokens in has only what perplexity is measured on; give more text")
    shares = torch.stack([each / each.sum() for each in found]).mean(dim=0)
    return Counts(shares, total, read, tuple(notes))


def _of_text(model: StreamedModel, name: str, calibration: Calibration) -> tuple[Tensor, int, bool, tuple[str, ...]]:
    """(counts (tokens,), characters that were counted, whether there are more, notes on how they were read)."""
    template = ChatTemplate.of(model.tokenizer, find_bos(model.tokenizer))
    opened, size, read = read_text(name, calibration.field, template), model.config.vocab_size, 0
    counts = torch.zeros(size, dtype=torch.int64)
    while read < MOST and (text := characters(opened.pieces, min(_AT_ONCE, MOST - read))):
        read += len(text)
        tokens = torch.tensor(encode(model.tokenizer, text), dtype=torch.int64)
        counts += torch.bincount(tokens, minlength=size)[:size]
    return counts, read, next(opened.pieces, None) is not None, opened.notes
