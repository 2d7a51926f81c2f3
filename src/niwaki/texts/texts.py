"""All texts of a run: what it calibrates on, and what it measures on."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from niwaki.choices import Order
from niwaki.errors import UsageError, shown
from niwaki.models.pairs import NOTHING, count_tokens, padded
from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.options import USUAL_CALIBRATION, Calibration, Measurement
from niwaki.records.record import CalibrationRecord
from niwaki.texts.conversations import Conversations, Samples, find_conversations, has_images
from niwaki.texts.pairs import read_pairs
from niwaki.texts.reading import read_windows
from niwaki.texts.sources import check_field, find_file
from niwaki.windows import Windows

#: Windows after those of the calibration, where the same text is measured on and nobody says how many.
WINDOWS_AFTER = 256
#: One of so many windows of a text that is shorter than what is asked for is left to measure on.
_SHARE_AFTER = 8


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
        and not the first. Errors are as of :func:`read_heldout`; also UsageError
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
        """Those of a stage that calibrates on nothing: a text to measure on, if the measurement names one.

        Else it is the first that the calibration names, from its beginning, as no window of it is calibrated on; none
        where that is the usual one or has to be written first.
        """
        asked = dataclasses.replace(
            measurement,
            samples=usual if measurement.samples is None else measurement.samples,
            length=measurement.length or calibration.length,
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
        """Those to calibrate on; UsageError where these are conversations with images."""
        assert self.calibration is not None
        if isinstance(self.calibration, Conversations):
            raise UsageError(f"{self.calibration.source} has images, and only prune calibrates on images; give a text")
        return self.calibration

    @property
    def samples(self) -> Samples:
        """Those to calibrate on: tokens of text, or conversations with images."""
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
        self._length = self.model.window_length(self.calibration.length or given)
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
        if self._names and not any(self._given):
            if self.calibration.length is None and self.model.pairs is None:
                self._notes.append(f"windows of {self._length:,} tokens, because no length was given")
            if self.model.tokenizer.chat_template:
                self._notes.append(
                    "this model has a chat template; if it will answer questions, '--calibration answers' calibrates "
                    "on its own answers"
                )
        parts = list(self._given)
        for i, (text, samples) in enumerate(zip(self.calibration.texts, self.calibration.shares, strict=True)):
            if isinstance(text, str):
                parts[i], self._rests[text] = self._read(text, samples)
        return _in_turn([part for part in parts if part])

    def _read(self, name: str, samples: int) -> tuple[Windows, Windows]:
        """The first ``samples`` windows of a text, to calibrate on, and those after them."""
        usual: Order = "random" if self.fewer and find_file(name) else "first"
        order = self.calibration.order or usual
        needed = 1 if self.fewer else samples
        spare = self._spare + samples - needed
        windows = _read(self.model, name, self.calibration, self._length, needed, spare, order, self.calibration.seed)
        if self.fewer and len(windows.tokens) < samples + self._spare:  # of a short text some is left to measure on
            samples = min(samples, len(windows.tokens) - min(self._spare, len(windows.tokens) // _SHARE_AFTER))
        self._notes += windows.notes
        source = f"the text after the calibration windows of {name}"
        origin = f"after the calibration windows: {windows.origin}"
        return (
            windows.of(torch.arange(min(samples, len(windows.tokens)))),
            dataclasses.replace(
                windows.of(torch.arange(samples, max(samples, len(windows.tokens)))), source=source, origin=origin
            ),
        )

    def _apart(self, text: object) -> dict[str, Windows]:
        """The windows of a text that is only measured on."""
        name = text if isinstance(text, str) else ""
        asked = dataclasses.replace(self.measurement, length=self.measurement.length or self._length)
        windows = read_heldout(self.model, text, asked, self.fewer_heldout)
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


def read_heldout(model: StreamedModel, text: object, measurement: Measurement, fewer: bool = False) -> Windows:
    """The windows of one of its texts that a ``measurement`` asks for; with ``fewer`` those it has.

    Errors are as of :func:`.read_windows`.
    """
    if not isinstance(text, str):
        return _given_windows(model, text)
    count, length = measurement.samples, model.window_length(measurement.length)
    needed, spare = (1, count - 1) if fewer and count else (count, 0)
    return _read(model, text, measurement, length, needed, spare)


def _read(
    model: StreamedModel,
    name: str,
    options: Calibration | Measurement,
    length: int,
    needed: int | None,
    spare: int,
    order: Order = "first",
    seed: int = 0,
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
        name, model.tokenizer, length, needed, spare=spare, order=order, seed=seed, bos=bos, field=field
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
