"""All texts of a run: what it calibrates on, and what it measures on, as windows of tokens.

A source of text is a file (any text, or rows in JSON, CSV or Parquet, see :mod:`niwaki.texts.files`; also compressed as
``.gz``, ``.xz``, ``.bz2`` or ``.zst``), ``demo`` or ``demo-held`` for an excerpt that ships with niwaki (where no file
is called so; a directory may be), or a data set for the ``datasets`` library, which is streamed. Windows are cut from
the running text, without padding or special tokens, but for the one that the model's tokenizer itself puts before a
text (BOS): each window begins with it, as texts did that the model was trained on.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from niwaki.choices import Order
from niwaki.errors import CalibrationError, UsageError, shown
from niwaki.models.pairs import NOTHING, count_tokens, padded
from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.models.tokens import check_known, encode, find_bos, in_windows
from niwaki.options import USUAL_CALIBRATION, USUAL_SAMPLES, Calibration, Measurement
from niwaki.records.record import CalibrationRecord
from niwaki.records.wording import counted
from niwaki.texts.conversations import Conversations, Samples, find_conversations, has_images
from niwaki.texts.pairs import read_pairs
from niwaki.texts.rows import ChatTemplate
from niwaki.texts.sources import check_field, find_data_set, find_file, read_text
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
        text = characters(opened.pieces, pool)
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


def characters(pieces: Iterator[str], count: float) -> str:
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
    text = characters(pieces, _LONGEST + 1)
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
        text += characters(pieces, enough - len(text))
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


#: Windows after those of the calibration, where the same text is measured on and nobody says how many.
WINDOWS_AFTER = 256
#: Where nobody says how much text there is to be: windows are shorter where a text has fewer to calibrate on, and to
#: measure on.
_FEW, _FEW_MEASURED = 16, 2
#: And a CPU calibrates on so many tokens times weights, with the usual effort an hour or two on two cores, but on no
#: fewer than so many tokens.
_ON_A_CPU, _LEAST_TOKENS = 1 << 44, 16 * 512


@dataclass(frozen=True)
class Texts:
    """All texts of a run: to calibrate on, and by name of the text to measure on; and notes for the record.

    ``calibration`` is None in a stage that needs none.
    """

    calibration: Windows | Conversations | None
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
        and not the first. Where it does not say how many, it has those of :func:`usual_size`, or what the text has, but
        for a few to measure on, whatever is measured. Errors are as of :func:`read_heldout`; also UsageError
        where a text has nothing after the calibration windows. Conversations with images are taken where they are the
        calibration's only text, see :func:`.find_conversations`.
        """
        if conversations := find_conversations(model, calibration):
            # A window for what is not calibrated on text; what is measured beside it is as long.
            no_text = torch.zeros(1, model.window_length(None), dtype=torch.int64)
            other = cls.read(model, Calibration(no_text), measurement, usual)
            return cls(conversations, other.heldout, (*other.notes, *conversations.notes))
        if measurement.samples is None:
            measurement = dataclasses.replace(measurement, samples=usual)
        return _Reading(model, calibration, measurement, fewer, usual is not None).texts()

    @classmethod
    def to_measure(cls, model: StreamedModel, calibration: Calibration, measurement: Measurement, usual: int) -> Texts:
        """The texts of a stage that calibrates on nothing: one to measure on, if the measurement names it.

        Else it is the first that the calibration names, from its beginning, as no window of it is calibrated on; none
        where that is the usual one or has to be written first.
        """
        asked = dataclasses.replace(
            measurement,
            samples=usual if measurement.samples is None else measurement.samples,
            length=measurement.length or calibration.length,  # without either of them windows may be shorter
        )
        if asked.samples == 0:
            return cls(None, {})
        if asked.text is None:
            text, is_usual = calibration.texts[0], calibration.text == USUAL_CALIBRATION
            if is_usual or calibration.answered[0] or has_images(calibration):
                return cls(None, {})
            asked = dataclasses.replace(asked, text=text, field=asked.field or calibration.field)
        (measured,) = asked.texts
        windows = read_heldout(model, measured, asked, fewer=True)
        return cls(None, {measured if isinstance(measured, str) else "": windows}, windows.notes)

    @property
    def windows(self) -> Windows:
        """The windows to calibrate on; UsageError where these are conversations with images."""
        assert self.calibration is not None
        if isinstance(self.calibration, Conversations):
            raise UsageError(f"{self.calibration.source} has images, and only prune calibrates on images; give a text")
        return self.calibration

    @property
    def samples(self) -> Samples:
        """What to calibrate on: tokens of text, or conversations with images."""
        if self.calibration is None:
            return torch.zeros(0, 0, dtype=torch.int64)
        return self.calibration if isinstance(self.calibration, Conversations) else self.calibration.tokens

    def shared(self, world: World) -> Texts:
        """This process's share of all windows; UsageError where there are more processes than windows."""
        if isinstance(self.calibration, Conversations):
            if world.size > 1:
                raise UsageError(f"{self.calibration.source} has images, which only a single process can calibrate on")
            return self

        def own(windows: Windows) -> Windows:
            return windows.of(world.share(torch.arange(len(windows.tokens))))

        first = self.calibration and own(self.calibration)
        return Texts(first, {name: own(windows) for name, windows in self.heldout.items()}, self.notes)

    @property
    def only(self) -> Windows | None:
        """The windows to measure on, where there is one text or none."""
        return next(iter(self.heldout.values()), None)

    def described(self, seed: int) -> CalibrationRecord:
        """What a record has of the calibration; ``seed`` is that of random windows."""
        if self.calibration is None:
            return {}
        if isinstance(windows := self.calibration, Conversations):
            return windows.described(seed)
        described: CalibrationRecord = {
            "source": windows.source,
            "samples": len(windows.tokens),
            "sequence_length": windows.tokens.shape[1],
            "order": windows.order,
            "seed": seed,
            "tokens_sha256": windows.fingerprint(),
        }
        if bool((windows.tokens == NOTHING).any()):
            described["pairs"] = count_tokens(windows.tokens)
        if windows.origin:
            described["origin"] = windows.origin
        if windows.bos is not None and bool((windows.tokens[:, 0] == windows.bos).all()):
            described["bos"] = windows.bos
        return described


@dataclass
class _Reading:
    """One call of :meth:`Texts.read` without images: its arguments, and what is found on the way."""

    model: StreamedModel
    calibration: Calibration
    measurement: Measurement  # of as many windows as are measured; None for all of a text
    fewer: bool
    fewer_heldout: bool  # whether a text to measure on may have fewer windows

    def __post_init__(self) -> None:
        texts = self.calibration.texts
        self._names = [text for text in texts if isinstance(text, str)]
        self._measured = () if self.measurement.samples == 0 else self.measurement.texts
        check_field(self.calibration.field or self.measurement.field, [*self._names, *self._measured])
        #: The calibration's windows that were given as such; None where a name was.
        self._given = [None if isinstance(text, str) else _given_windows(self.model, text) for text in texts]
        given = next((part.tokens.shape[1] for part in self._given if part and self.model.pairs is None), None)
        asked = dataclasses.replace(self.calibration, length=self.calibration.length or given)
        self._samples, self._length = usual_size(self.model, asked)
        #: Whether they may be shorter: nobody has said anything of them.
        self._is_free = asked.samples is None and asked.length is None and self.model.pairs is None
        #: Windows of each text to measure on after its calibration windows, and what there is, by the text's name.
        follows = any(map(self._follows, self._measured))
        self._spare = (self.measurement.samples or WINDOWS_AFTER) if follows else 0
        self._rests: dict[str, Windows] = {}
        self._notes: list[str] = []

    def texts(self) -> Texts:
        windows = self._calibrated()
        heldout: dict[str, Windows] = {}
        for text in self._measured:
            heldout |= self._after(text) if self._follows(text) else self._apart(text)
        return Texts(windows, heldout, tuple(self._notes))

    def _follows(self, text: object) -> bool:
        """Whether ``text`` is measured on after its calibration windows."""
        return text is None or (isinstance(text, str) and text in self._names)

    def _calibrated(self) -> Windows:
        """The calibration's windows; what is left of their texts is kept for :meth:`_after`."""
        self._notes += [note for part in self._given if part for note in part.notes]
        texts, longest = self.calibration.texts, self._length
        shares = self.calibration.shares(self._samples)
        few = math.ceil(_FEW / len(texts)) if self._is_free else 0
        read = {name: self._read(name, share, few) for name, share in self._named(shares)}
        if few and read and (least := min(windows.tokens.shape[1] for windows in read.values())) < longest:
            self._length, self._samples = least, min(USUAL_SAMPLES, self._samples * longest // least)
            shares = self.calibration.shares(self._samples)
            read = {name: self._read(name, share) for name, share in self._named(shares)}
        parts = list(self._given)
        for i, (text, share) in enumerate(zip(texts, shares, strict=True)):
            if isinstance(text, str):
                parts[i], self._rests[text] = self._split(read[text], share)
                self._notes += read[text].notes
        whole = _in_turn([part for part in parts if part])
        if self._names and not any(self._given):
            self._note_size(len(whole.tokens))
        return whole

    def _named(self, shares: list[int]) -> list[tuple[str, int]]:
        """The texts that were given by name, each with how many windows it contributes."""
        return [(text, n) for text, n in zip(self.calibration.texts, shares, strict=True) if isinstance(text, str)]

    def _note_size(self, samples: int) -> None:
        """Says how many windows there are, and of which length, where nobody has said it; and what else there is."""
        most = USUAL_SAMPLES * self.model.window_length(None)
        if self.calibration.samples is None and samples < USUAL_SAMPLES and samples * self._length < most:
            no_more = "the text has no more, but for what is left to measure on"
            why = "more would take a CPU long" if samples == self._samples else no_more
            what = counted(samples, "window" if self.model.pairs is None else "pair")
            of = f" of {self._length:,} tokens" if self.model.pairs is None else ""
            self._notes.append(f"calibrating on {what}{of}: {why}; --samples and --length set others")
        elif self.calibration.length is None and self.model.pairs is None:
            self._notes.append(f"windows of {self._length:,} tokens, because no length was given")
        if self.model.tokenizer.chat_template:
            self._notes.append(
                "this model has a chat template; if it will answer questions, '--calibration answers' calibrates "
                "on its own answers"
            )

    @property
    def _takes_fewer(self) -> bool:
        """Whether the text may have fewer windows than are asked for."""
        return self.fewer or self.calibration.samples is None

    def _read(self, name: str, samples: int, few: int = 0) -> Windows:
        """``samples`` windows of a text to calibrate on, or fewer where it may have fewer, and some after them."""
        usual: Order = "random" if self.fewer and find_file(name) else "first"
        how = self.calibration.order or usual, self.calibration.seed, few
        needed = 1 if self._takes_fewer else samples
        spare = samples - needed + max(self._spare, _FEW if self._takes_fewer else 0)
        return _read(self.model, name, self.calibration, self._length, needed, spare, *how)

    def _split(self, windows: Windows, samples: int) -> tuple[Windows, Windows]:
        """The first ``samples`` of the windows of a text, to calibrate on, and those after them."""
        there = len(windows.tokens)
        if self._takes_fewer:
            samples = min(samples, there - left_to_measure(there))
        source = f"the text after the calibration windows of {windows.source}"
        origin = f"after the calibration windows: {windows.origin}"
        rest = windows.of(torch.arange(samples, max(samples, there)))
        return windows.of(torch.arange(samples)), dataclasses.replace(rest, source=source, origin=origin)

    def _apart(self, text: object) -> dict[str, Windows]:
        """The windows of a text that is only measured on."""
        name = text if isinstance(text, str) else ""
        windows = read_heldout(self.model, text, self.measurement, self.fewer_heldout, self._length)
        self._notes += [note for note in windows.notes if name and note not in self._notes]
        return {name: windows}

    def _after(self, text: object) -> dict[str, Windows]:
        """The windows after the calibration's of one of its texts, or of all where ``text`` is None."""
        left = [rest for name, rest in self._rests.items() if text in (None, name) and len(rest.tokens)]
        if left:
            self._check_alike()
            rest = _in_turn(left)
            name = text if isinstance(text, str) else " + ".join(self._names)
            return {name: rest.of(torch.arange(min(self._spare, len(rest.tokens))))}
        if text is not None:
            raise UsageError(f"{text} has nothing after the calibration windows to measure on; try another text")
        self._notes.append("perplexity was not measured: no text was given and the calibration text has no more of it")
        return {}

    def _check_alike(self) -> None:
        """Raises UsageError where what follows the calibration is to be measured in other windows than its own."""
        asked, calibration = self.measurement, self.calibration
        same = asked.length in (None, self._length) and asked.field in (None, calibration.field)
        if not same or (calibration.bos and not asked.bos):
            raise UsageError(
                "what follows the calibration windows is measured in windows of their length, field and bos"
            )


def usual_size(model: StreamedModel, calibration: Calibration) -> tuple[int, int]:
    """(windows, length) that ``model`` calibrates on, where ``calibration`` does not say it: no more is read.

    That is the same on every machine, but for whether there is a GPU.
    """
    length = model.window_length(calibration.length)
    if calibration.samples is not None or model.pairs is not None:
        return calibration.samples or USUAL_SAMPLES, length
    tokens = USUAL_SAMPLES * length
    if model.device.type == "cpu":
        tokens = min(tokens, max(_LEAST_TOKENS, _ON_A_CPU // sum(matrix.size for matrix in model.matrices())))
    while calibration.length is None and tokens < _FEW * length and (less := shorter(length)):
        length = less
    return max(1, len(calibration.texts), min(USUAL_SAMPLES, tokens // length)), length


def read_heldout(
    model: StreamedModel, text: object, measurement: Measurement, fewer: bool = False, usual: int | None = None
) -> Windows:
    """The windows of one of its texts that a ``measurement`` asks for; with ``fewer`` those it has.

    Where it asks for no length they are of the ``usual`` one, or shorter where the text has hardly one of these. Errors
    are as of :func:`.read_windows`.
    """
    if not isinstance(text, str):
        return _given_windows(model, text)
    asked = measurement.length
    count, length = measurement.samples, model.window_length(usual if asked is None else asked)
    needed, spare = (1, count - 1) if fewer and count else (count, 0)
    few = 0 if asked is not None else min(_FEW_MEASURED, count or _FEW_MEASURED)
    windows = _read(model, text, measurement, length, needed, spare, few=few)
    if model.pairs is None and (less := windows.tokens.shape[1]) < length:
        windows = dataclasses.replace(
            windows,
            notes=(*windows.notes, f"measured in windows of {less:,} tokens: {text} is too short for {length:,}"),
        )
    return windows


def _read(
    model: StreamedModel,
    name: str,
    options: Calibration | Measurement,
    length: int,
    needed: int | None,
    spare: int,
    order: Order = "first",
    seed: int = 0,
    few: int = 0,
) -> Windows:
    """Windows of a text that ``model`` takes, ``needed`` ones and up to ``spare`` more, as of :func:`.read_windows`."""
    if model.pairs is not None:
        if options.field is not None or not options.bos:
            option = "--no-bos" if options.field is None else "--field"
            raise UsageError(f"{option} is for running text; {name} has pairs, with the columns source and target")
        windows = read_pairs(model, name, length, needed, spare, order, seed)
        model.check(windows.tokens)
        return windows
    bos, field = options.bos and not model.sees_ahead, options.field
    windows = read_windows(
        name, model.tokenizer, length, needed, spare=spare, order=order, seed=seed, bos=bos, field=field, few=few
    )
    model.check(windows.tokens)
    return windows


def _in_turn(parts: list[Windows]) -> Windows:
    """The first window of each text, then the second of each, and so on, as of one text; of one alone what it is."""
    if len(parts) == 1:
        return parts[0]
    lengths = {part.tokens.shape[1] for part in parts}
    if any((part.tokens == NOTHING).any() for part in parts):  # pairs are of any length
        parts = [dataclasses.replace(part, tokens=padded(part.tokens, max(lengths))) for part in parts]
    elif len(lengths) > 1:
        raise UsageError(f"windows of several texts have the same length; got {' and '.join(map(str, lengths))} tokens")
    turns = itertools.zip_longest(*(part.tokens for part in parts))
    tokens = torch.stack([window for turn in turns for window in turn if window is not None])
    origin = "; ".join(f"{part.source}: {part.origin}" for part in parts if part.origin)
    digest = "".join(part.digest for part in parts)
    bos = next((part.bos for part in parts if part.bos is not None), None)
    return Windows(tokens, " + ".join(part.source for part in parts), parts[0].order, origin, bos=bos, digest=digest)


def _given_windows(model: StreamedModel, text: object) -> Windows:
    """Windows or tokens that were given instead of the name of a text."""
    windows = Windows(text, "given tokens") if isinstance(text, Tensor) else text
    if not isinstance(windows, Windows) or not isinstance(windows.tokens, Tensor):
        raise UsageError(f"a text is a name, windows or a tensor of tokens; got {shown(text)}")
    model.check(windows.tokens)
    return windows
