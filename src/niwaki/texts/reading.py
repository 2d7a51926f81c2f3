"""A text by name to windows of tokens.

A source of text is a file (any text, or rows in JSON, CSV or Parquet, see :mod:`niwaki.texts.rows`; also
compressed as ``.gz``, ``.xz``, ``.bz2`` or ``.zst``), ``demo`` or ``demo-held`` for an excerpt that ships with niwaki
(where no file is called so; a directory may be), or a data set for the ``datasets`` library, which is streamed. Windows
are cut from the running text, without padding or special tokens, but for the one that the model's tokenizer itself puts
before a text (BOS): each window begins with it, as texts did that the model was trained on.
"""

import random
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from niwaki.choices import Order
from niwaki.errors import CalibrationError, UsageError
from niwaki.models.tokens import check_known, encode, find_bos, in_windows
from niwaki.texts.rows import ChatTemplate
from niwaki.texts.sources import find_data_set, find_file, read_text
from niwaki.windows import Windows

#: First guess at the number of characters that hold a token; more are read where it is too low.
_CHARACTERS_PER_TOKEN = 8
#: Characters of a text that all windows are taken of, where nobody says how many: its tokens take 50 times the memory.
_LONGEST = 1 << 28
#: Random windows of a data set are drawn from this many times as much text as they need.
_RANDOM_POOL = 64
#: Windows that are usually measured on, and the shortest ones that are read where nobody says how long.
_MEASURED, _SHORTEST = 16, 128


def left_to_measure(windows: int) -> int:
    """How many of all windows of a text are not calibrated on, where nobody says how many are."""
    return min(_MEASURED, windows // 4)


def shorter(length: int) -> int:
    """Half of a ``length`` of windows that nobody asked for; 0 where that is too short to be of use."""
    return length // 2 if length // 2 >= _SHORTEST else 0


def read_windows(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    count: int | None = None,
    *,
    spare: int = 0,
    order: Order = "first",
    seed: int = 0,
    bos: bool = True,
    field: str | None = None,
    few: int = 0,
) -> Windows:
    """Non-overlapping windows of ``length`` tokens of a text, named as in the module's docstring.

    ``count`` windows are needed, None for all of the text; ``spare`` more are welcome. With the order ``first`` they
    are from its start. With ``random`` they are from all of it, from the starts of words in stretches that ``seed``
    chooses; where it is too short for that they are all of its windows, shuffled. Of a text that is very long, only the
    first part is drawn from, of which there is a note then. Each begins with the token that the tokenizer puts before a
    text, if it does and ``bos`` is not off, and has one token less of the text. Rows of a table have their text in the
    column ``field``. Where the text has fewer windows than ``few``, they are shorter. CalibrationError where it is not
    available or too short, UsageError for a ``length`` below 2 or ``count`` below 1.
    """
    if length < 2 or (count is not None and count < 1):
        raise UsageError(f"windows need at least 2 tokens and there must be 1 of them; got {count} of {length}")
    if not source:
        raise UsageError("the name of a text is empty")
    file, needed, which = find_file(source), count or 1, f"{order} windows"
    wanted, first = needed + spare, find_bos(tokenizer) if bos else None
    step = length - (first is not None)  # tokens of the text in a window
    template = ChatTemplate.of(tokenizer, first)
    opened = read_text(source, field, template)
    notes = list[str]()
    if count is None:
        ids, which = _all_tokens(opened.pieces, tokenizer, step, source)
    elif order == "random":
        pool = _LONGEST if file else min(_LONGEST, _RANDOM_POOL * wanted * length * _CHARACTERS_PER_TOKEN)
        text = _characters(opened.pieces, pool)
        if next(opened.pieces, None) is not None:
            notes.append(f"random windows are from the first {len(text):,} characters of {source}, which has more")
        ids = _random_windows(text, tokenizer, step, wanted, seed)
    else:
        ids = _first_tokens(opened.pieces, tokenizer, wanted * step)
    check_known(ids, tokenizer, source)
    piece = "" if ids or not file else next(read_text(source, field, template).pieces, "")
    if piece.strip() and not encode(tokenizer, piece.strip()):
        raise CalibrationError(f"the model's tokenizer makes no tokens of {source}; is its vocabulary there?")
    available = len(ids) // step
    if available < few and (less := shorter(length)):
        how: dict[str, Any] = {"spare": 2 * spare + 1, "order": order, "seed": seed, "bos": bos, "field": field}
        return read_windows(source, tokenizer, less, count, **how, few=few)
    if available < needed and order == "random":
        raise CalibrationError(f"{source} has only {available} random windows of {length} tokens, {needed} are needed")
    if available < needed:
        most = available - left_to_measure(available)
        total, one = needed * step, "" if first is None else ", of which one is BOS,"
        raise CalibrationError(
            f"{source} is too short: {needed} windows of {length} tokens{one} need {total} tokens, it has {len(ids)}, "
            f"{total - len(ids)} are missing; give more text, shorter windows (--length)"
            + (f", or fewer (--samples {most})" if most else "")
        )
    tokens = in_windows(torch.tensor(ids, dtype=torch.int64), available, length, first)
    none = ", no BOS" if opened.notes else ", no special tokens (no BOS)"  # a chat template has some of its own
    begun = none if first is None else f"; each window begins with BOS (token id {first})"
    return Windows(tokens, source, order, f"{opened.origin}; one text{begun}; {which}", (*opened.notes, *notes), first)


def _characters(pieces: Iterator[str], count: float) -> str:
    """At least the next ``count`` characters, or all that are left."""
    parts: list[str] = []
    while count > 0 and (piece := next(pieces, None)) is not None:
        parts.append(piece)
        count -= len(piece)
    return "".join(parts)


def _all_tokens(
    pieces: Iterator[str], tokenizer: PreTrainedTokenizerBase, length: int, source: str
) -> tuple[list[int], str]:
    """(the tokens of all windows of a text, or of those of a data set that are measured on, which windows these are).

    Of a text that is shorter than a window all tokens.
    """
    text = _characters(pieces, _LONGEST + 1)
    if len(text) > _LONGEST:
        raise CalibrationError(f"{source} has more than {_LONGEST:,} characters; say how many samples of it to take")
    ids = encode(tokenizer, text)
    whole = len(ids) // length
    count = min(whole, (None if find_file(source) else find_data_set(source).windows) or whole)
    left = len(ids) - count * length
    which = f"{'all' if count == whole else 'first'} windows, {left:,} tokens after them left out"
    return ids[: max(1, count) * length], which


def _first_tokens(pieces: Iterator[str], tokenizer: PreTrainedTokenizerBase, count: int) -> list[int]:
    """The first ``count`` tokens, or all if there are fewer, the same as from the whole text at once."""
    text, enough = "", count * _CHARACTERS_PER_TOKEN
    while True:
        text += _characters(pieces, enough - len(text))
        ids = encode(tokenizer, text[:enough])
        # The last few could come out differently with more text after them. Some tokenizers make none of any text.
        if len(text) < enough or len(ids) >= count + 16 or not ids:
            return ids[:count]
        enough *= 2


def _random_windows(text: str, tokenizer: PreTrainedTokenizerBase, length: int, count: int, seed: int) -> list[int]:
    """The tokens of ``count`` windows, or of fewer, from all of a text."""
    stretch, chance = length * _CHARACTERS_PER_TOKEN, random.Random(seed)
    starts = list(range(0, len(text) - stretch + 1, stretch))
    chance.shuffle(starts)
    ids: list[int] = []
    for start in starts:
        excerpt = text[start : start + stretch]
        # The first word is cut, unless a space happens to come first.
        window = encode(tokenizer, excerpt[excerpt.find(" ") + 1 :])[:length]
        if len(window) == length:
            ids += window
        if len(ids) == count * length:
            return ids
    if len(text) >= (count + 1) * stretch:
        return ids
    whole = encode(tokenizer, text)
    places = list(range(0, len(whole) - length + 1, length))
    chance.shuffle(places)
    all_of_them = [token for place in places[:count] for token in whole[place : place + length]]
    return max(ids, all_of_them, key=len)
