"""Text to windows of tokens.

A source of text is a file (any text, or rows in JSON, CSV or Parquet, see :mod:`niwaki.models.text_rows`; also
compressed as ``.gz``, ``.xz``, ``.bz2`` or ``.zst``), ``demo`` or ``demo-held`` for an excerpt that ships with niwaki
(where no file is called so; a directory may be), or a data set for the ``datasets`` library, which is streamed. Windows
are cut from the running text, without padding or special tokens, but for the one that the model's tokenizer itself puts
before a text (BOS): each window begins with it, as texts did that the model was trained on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from niwaki.arguments import check_fields
from niwaki.errors import CalibrationError, UsageError
from niwaki.models.conversations import Conversations, Samples, find_conversations
from niwaki.models.text_rows import ChatTemplate
from niwaki.models.text_sources import check_field, find_data_set, find_file, read_text
from niwaki.models.tokens import check_known, encode, find_bos, in_windows, load_tokenizer
from niwaki.options import Calibration, Measurement, Order

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from niwaki.models.processes import World
    from niwaki.models.streamed import StreamedModel
    from niwaki.records.record import CalibrationRecord

#: Windows after those of the calibration, where the same text is measured on and nobody says how many.
WINDOWS_AFTER = 256
#: First guess at the number of characters that hold a token; more are read where it is too low.
_CHARACTERS_PER_TOKEN = 8
#: Characters of a text that all windows are taken of, where nobody says how many: its tokens take 50 times the memory.
_LONGEST = 1 << 28
#: Random windows of a data set are drawn from this many times as much text as they need.
_RANDOM_POOL = 64


@dataclass(frozen=True)
class Windows:
    """Token windows and where they come from.

    Attributes:
        tokens: (windows, length) int64.
        source: The text's name, as it was given.
        order: ``first`` or ``random``.
        origin: What text it is, how it became tokens, and which windows of it, in words; "" for given tokens.
        notes: What else a record should say of them.
        bos: The token that texts of the model begin with; None where they begin with none, or that is not known.
    """

    tokens: Tensor
    source: str
    order: Order = "first"
    origin: str = ""
    notes: tuple[str, ...] = ()
    bos: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def described(self, seed: int) -> CalibrationRecord:
        """What a record has of calibration windows; ``seed`` is that of random ones."""
        described: CalibrationRecord = {
            "source": self.source,
            "samples": len(self.tokens),
            "sequence_length": self.tokens.shape[1],
            "order": self.order,
            "seed": seed,
            "tokens_sha256": self.fingerprint(),
        }
        if self.origin:
            described["origin"] = self.origin
        if self.bos is not None and bool((self.tokens[:, 0] == self.bos).all()):
            described["bos"] = self.bos
        return described

    def fingerprint(self) -> str:
        """SHA-256 of the tokens: whether two runs saw the same text."""
        return hashlib.sha256(self.tokens.contiguous().numpy().tobytes()).hexdigest()


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
) -> Windows:
    """Non-overlapping windows of ``length`` tokens of a text, named as in the module's docstring.

    ``count`` windows are needed, None for all of the text; ``spare`` more are welcome. With the order ``first`` they
    are from its start. With ``random`` they are from all of it, from the starts of words in stretches that ``seed``
    chooses; where it is too short for that they are all of its windows, shuffled. Of a text that is very long, only the
    first part is drawn from, of which there is a note then. Each begins with the token that the tokenizer puts before a
    text, if it does and ``bos`` is not off, and has one token less of the text. Rows of a table have their text in the
    column ``field``. CalibrationError where it is not available or too short, UsageError for a ``length`` below 2 or
    ``count`` below 1.
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
    notes = opened.notes
    if count is None:
        text = _characters(opened.pieces, _LONGEST + 1)
        if len(text) > _LONGEST:
            raise CalibrationError(
                f"{source} has more than {_LONGEST:,} characters; say how many samples of it to take"
            )
        ids = encode(tokenizer, text)
        whole = len(ids) // step
        wanted = min(whole, (None if file else find_data_set(source).windows) or whole)
        chosen, left = "all" if wanted == whole else "first", len(ids) - wanted * step
        which = f"{chosen} windows, {left:,} tokens behind them left out"
    elif order == "random":
        pool = _LONGEST if file else min(_LONGEST, _RANDOM_POOL * wanted * length * _CHARACTERS_PER_TOKEN)
        text = _characters(opened.pieces, pool)
        if next(opened.pieces, None) is not None:
            notes += (f"random windows are from the first {len(text):,} characters of {source}, which has more",)
        ids = _random_windows(text, tokenizer, step, wanted, seed)
    else:
        ids = _first_tokens(opened.pieces, tokenizer, wanted * step)
    check_known(ids, tokenizer, source)
    piece = "" if ids or not file else next(read_text(source, field, template).pieces, "")
    if piece.strip() and not encode(tokenizer, piece.strip()):
        raise CalibrationError(f"the model's tokenizer makes no tokens of {source}; is its vocabulary there?")
    available = min(wanted, len(ids) // step)
    if available < needed and order == "random":
        raise CalibrationError(f"{source} has only {available} random windows of {length} tokens, {needed} are needed")
    if available < needed:
        total, one = needed * step, "" if first is None else ", of which one is BOS,"
        raise CalibrationError(
            f"{source} is too short: {needed} windows of {length} tokens{one} need {total} tokens, it has {len(ids)}, "
            f"{total - len(ids)} are missing; give more text, shorter windows (--seqlen)"
            + (f", or --samples {available}" if available else "")
        )
    tokens = in_windows(torch.tensor(ids, dtype=torch.int64), available, length, first)
    none = ", no BOS" if opened.notes else ", no special tokens (no BOS)"  # a chat template has some of its own
    how = none if first is None else f"; each window begins with BOS (token id {first})"
    return Windows(tokens, source, order, f"{opened.origin}; one text{how}; {which}", notes, first)


def _characters(pieces: Iterator[str], count: float) -> str:
    """At least the next ``count`` characters, or all that are left."""
    parts: list[str] = []
    while count > 0 and (piece := next(pieces, None)) is not None:
        parts.append(piece)
        count -= len(piece)
    return "".join(parts)


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


@dataclass(frozen=True)
class Texts:
    """All texts of a run: to calibrate on, and by name of the text to measure on; and notes for the record."""

    calibration: Windows | Conversations
    heldout: dict[str, Windows]
    notes: tuple[str, ...] = ()

    @classmethod
    def read(
        cls,
        model: StreamedModel,
        calibration: Calibration,
        measurement: Measurement,
        usual: int | None = None,
        fewer: bool = False,
    ) -> Texts:
        """Reads them with the tokenizer of ``model``, and checks that it takes them.

        With ``usual`` a text to measure on may have fewer windows than the measurement says, and they are this many
        where it does not say. Without, they are all of the text, or as many as the measurement says. With ``fewer`` the
        calibration may have fewer windows than it says too, and where it has no order those of a file are random ones,
        and not the first. Errors are as of :func:`read_heldout`; also UsageError
        where a text has nothing after the calibration windows. Conversations with images are taken where they are the
        calibration's only text, see :func:`.find_conversations`.
        """
        if conversations := find_conversations(model, calibration):
            other = cls.read(model, Calibration(_no_text(model)), measurement, usual)
            return cls(conversations, other.heldout, (*other.notes, *conversations.notes))
        count = usual if measurement.samples is None else measurement.samples
        texts = () if count == 0 else measurement.texts
        names = [text for text in calibration.texts if isinstance(text, str)]
        after = [each is None or (isinstance(each, str) and each in names) for each in texts]
        check_field(calibration.field or measurement.field, [*names, *texts])
        parts = [None if isinstance(text, str) else _given_windows(model, text) for text in calibration.texts]
        given = [part for part in parts if part]
        length = model.window_length(calibration.length or (given[0].tokens.shape[1] if given else None))
        tokenizer = load_tokenizer(model.checkpoint.path) if names else None
        notes = [note for part in given for note in part.notes]
        if names and not given:
            if calibration.length is None:
                notes.append(f"sequence length {length:,}, because none was asked for")
            if tokenizer and tokenizer.chat_template:
                notes.append(
                    "this model has a chat template; if it is to answer questions, --calibration answers calibrates on "
                    "what it answers itself"
                )
        spare, rests = (count or WINDOWS_AFTER) if any(after) else 0, dict[str, Windows]()
        for i, (text, samples) in enumerate(zip(calibration.texts, calibration.shares, strict=True)):
            if tokenizer and isinstance(text, str):
                usual_order: Order = "random" if fewer and find_file(text) else "first"
                needed = 1 if fewer else samples
                windows = read_windows(
                    text,
                    tokenizer,
                    length,
                    needed,
                    spare=spare + samples - needed,
                    order=calibration.order or usual_order,
                    seed=calibration.seed,
                    bos=calibration.bos and not model.sees_ahead,
                    field=calibration.field,
                )
                model.check(windows.tokens)
                notes += windows.notes
                parts[i], rests[text] = _parted(windows, samples)
        heldout = {}
        for each, follows in zip(texts, after, strict=True):
            if not follows:
                name = each if isinstance(each, str) else ""
                asked = dataclasses.replace(measurement, length=measurement.length or length, samples=count)
                heldout[name] = read_heldout(model, each, asked, usual is not None, tokenizer)
                notes += [note for note in heldout[name].notes if name and note not in notes]
                continue
            left = [rest for name, rest in rests.items() if each in (None, name) and len(rest.tokens)]
            if left:
                _check_alike(measurement, calibration, length)
                rest = _in_turn(left)
                name = each if isinstance(each, str) else " + ".join(names)
                heldout[name] = dataclasses.replace(rest, tokens=rest.tokens[:spare])
            elif each is None:
                notes.append(
                    "perplexity was not measured: no text was given and the calibration text has no more of it"
                )
            else:
                raise UsageError(f"{each} has nothing after the calibration windows to measure on; try another text")
        return cls(_in_turn([part for part in parts if part]), heldout, tuple(notes))

    @property
    def windows(self) -> Windows:
        """Those to calibrate on; UsageError where these are conversations with images."""
        if isinstance(self.calibration, Conversations):
            raise UsageError(f"{self.calibration.source} has images, on which only prune calibrates; give a text")
        return self.calibration

    @property
    def samples(self) -> Samples:
        """Those to calibrate on: tokens of text, or conversations with images."""
        return self.calibration if isinstance(self.calibration, Conversations) else self.calibration.tokens

    def shared(self, world: World) -> Texts:
        """This process's share of all windows; UsageError where there are more processes than windows."""
        if isinstance(self.calibration, Conversations):
            if world.size > 1:
                raise UsageError(f"{self.calibration.source} has images, on which only one process calibrates")
            return self
        every = (self.calibration, *self.heldout.values())
        first, *others = (dataclasses.replace(each, tokens=world.share(each.tokens)) for each in every)
        return Texts(first, dict(zip(self.heldout, others, strict=True)), self.notes)

    @property
    def only(self) -> Windows | None:
        """The windows to measure on, where there is one text or none."""
        return next(iter(self.heldout.values()), None)


def read_heldout(
    model: StreamedModel,
    text: object,
    measurement: Measurement,
    fewer: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Windows:
    """The windows of one of its texts that a ``measurement`` asks for; with ``fewer`` those it has.

    Errors are as of :func:`read_windows`.
    """
    if not isinstance(text, str):
        return _given_windows(model, text)
    count, length = measurement.samples, model.window_length(measurement.length)
    needed, spare = (1, count - 1) if fewer and count else (count, 0)
    tokenizer = tokenizer or load_tokenizer(model.checkpoint.path)
    bos = measurement.bos and not model.sees_ahead
    windows = read_windows(text, tokenizer, length, needed, spare=spare, bos=bos, field=measurement.field)
    model.check(windows.tokens)
    return windows


def _no_text(model: StreamedModel) -> Tensor:
    """A window for what is not calibrated on text; what is measured beside it is as long."""
    return torch.zeros(1, model.window_length(None), dtype=torch.int64)


def _parted(windows: Windows, samples: int) -> tuple[Windows, Windows]:
    """The first ``samples`` windows of a text, to calibrate on, and those after them."""
    first, rest = (
        dataclasses.replace(windows, tokens=part) for part in (windows.tokens[:samples], windows.tokens[samples:])
    )
    source = f"the text after the calibration windows of {windows.source}"
    return first, dataclasses.replace(rest, source=source, origin=f"after the calibration windows: {windows.origin}")


def _check_alike(measurement: Measurement, calibration: Calibration, length: int) -> None:
    """Raises UsageError where what follows the calibration windows is to be measured in other windows than these."""
    same = measurement.length in (None, length) and measurement.field in (None, calibration.field)
    if not same or (calibration.bos and not measurement.bos):
        raise UsageError("what follows the calibration windows is measured in windows of their length, field and bos")


def _in_turn(parts: list[Windows]) -> Windows:
    """The first window of each text, then the second of each, and so on, as of one text; of one alone what it is."""
    if len(parts) == 1:
        return parts[0]
    lengths = {part.tokens.shape[1] for part in parts}
    if len(lengths) > 1:
        raise UsageError(f"windows of several texts have the same length; got {' and '.join(map(str, lengths))} tokens")
    turns = itertools.zip_longest(*(part.tokens for part in parts))
    tokens = torch.stack([window for turn in turns for window in turn if window is not None])
    origin = "; ".join(f"{part.source}: {part.origin}" for part in parts if part.origin)
    bos = next((part.bos for part in parts if part.bos is not None), None)
    return Windows(tokens, " + ".join(part.source for part in parts), parts[0].order, origin, bos=bos)


def _given_windows(model: StreamedModel, text: object) -> Windows:
    """Windows or tokens that were given instead of the name of a text."""
    windows = Windows(text, "given tokens") if isinstance(text, Tensor) else text
    if not isinstance(windows, Windows) or not isinstance(windows.tokens, Tensor):
        raise UsageError(f"a text is a name, windows or a tensor of tokens; got {text!r}")
    model.check(windows.tokens)
    return windows
