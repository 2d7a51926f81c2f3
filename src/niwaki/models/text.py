"""Text to windows of tokens.

A source of text is a file (``.txt`` or anything else that is text, ``.jsonl`` with a field ``text``;
also compressed as ``.gz``, ``.xz`` or ``.bz2``), ``demo`` or ``demo-held`` for an excerpt that ships with
niwaki, or the name of a data set for the ``datasets`` library, which is streamed. No padding and no special
tokens are added: windows are cut from the running text.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from niwaki.errors import CalibrationError, UsageError
from niwaki.models.text_sources import describe_source, find_data_set, is_file, read_pieces, read_text
from niwaki.options import Calibration, Measurement, Order

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from niwaki.models.streamed import StreamedModel


#: First guess at the number of characters that hold a token; more are read where it is too low.
_CHARACTERS_PER_TOKEN = 8
#: Random windows of a data set are drawn from this many times as much text as they need.
_RANDOM_POOL = 64


@dataclass(frozen=True)
class Windows:
    """Token windows and where they come from.

    Attributes:
        tokens: (windows, length) int64.
        source: The text's name, as it was given.
        order: ``first`` or ``random``.
        dropped: Tokens behind the last whole window, where all of the text was asked for.
        origin: What text it is, how it became tokens, and which windows of it, in words; "" for given tokens.
    """

    tokens: Tensor
    source: str
    order: Order = "first"
    dropped: int = 0
    origin: str = ""

    def described(self, seed: int = 0) -> dict[str, Any]:
        """What a record has of calibration windows; ``seed`` is that of random ones."""
        return {
            "source": self.source,
            "samples": len(self.tokens),
            "sequence_length": self.tokens.shape[1],
            "order": self.order,
            "seed": seed,
            "tokens_sha256": self.fingerprint(),
        }

    def fingerprint(self) -> str:
        """SHA-256 of the tokens: whether two runs saw the same text."""
        return hashlib.sha256(self.tokens.contiguous().numpy().tobytes()).hexdigest()


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory.

    Raises:
        CalibrationError: there is none, or it needs code from the directory.
    """
    from transformers import AutoTokenizer

    try:
        # Texts are longer than any context; without this each one would be warned about.
        unlimited = sys.maxsize
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False, model_max_length=unlimited)
    except Exception as error:  # a broken tokenizer.json surfaces as nearly anything
        raise CalibrationError(f"{path} has no tokenizer that can be loaded: {str(error).splitlines()[0]}") from error


def read_windows(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    count: int | None = None,
    *,
    spare: int = 0,
    order: Order = "first",
    seed: int = 0,
) -> Windows:
    """Non-overlapping windows of ``length`` tokens.

    Args:
        source: See the module's docstring.
        tokenizer: The model's.
        length: Tokens in a window.
        count: Windows that are needed; None for all of the text.
        spare: Windows that are welcome on top, if the text has them.
        order: ``first`` takes the text from its start; ``random`` cuts all of it into stretches and takes
            windows from the starts of words in some of them.
        seed: For ``random``.

    Raises:
        CalibrationError: the text cannot be had, or has fewer than ``count`` windows.
        UsageError: ``length`` or ``count`` is no positive number.
    """
    if length < 2 or (count is not None and count < 1):
        raise UsageError(f"windows need at least 2 tokens and there must be 1 of them; got {count} of {length}")
    which = f"{order} windows"
    if count is None:
        ids = _encode(tokenizer, read_text(source))
        wanted = len(ids) // length
        which = "all windows"
        most = None if is_file(source) else find_data_set(source).windows
        if most is not None and wanted > most:
            wanted, which = most, "first windows"
        which += f", {len(ids) - wanted * length:,} tokens behind them left out"
        count = 1
    else:
        wanted = count + spare
        if order == "random":
            stream = read_pieces(source)
            limit = None if is_file(source) else wanted * _RANDOM_POOL
            ids = _random_windows(stream, tokenizer, length, wanted, limit, seed)
        else:
            ids = _first_tokens(read_pieces(source), tokenizer, wanted * length)
    got = min(wanted, len(ids) // length)
    if got < count:
        if order == "random":
            raise CalibrationError(f"{source} has only {got} random windows of {length} tokens, {count} are needed")
        missing = count * length - len(ids)
        raise CalibrationError(
            f"{source} is too short: {count} windows of {length} tokens need {count * length} tokens, it has "
            f"{len(ids)}, {missing} are missing; give more text, fewer samples or a shorter sequence length"
        )
    tokens = torch.tensor(ids[: got * length], dtype=torch.int64).view(got, length)
    origin = f"{describe_source(source)}; one text, no special tokens (no BOS); {which}"
    return Windows(tokens, source, order, len(ids) - got * length if spare == 0 else 0, origin)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _first_tokens(pieces: Iterator[str], tokenizer: PreTrainedTokenizerBase, count: int) -> list[int]:
    """The first ``count`` tokens, or all if there are fewer, the same as from the whole text at once."""
    text, enough = "", count * _CHARACTERS_PER_TOKEN
    while True:
        size = len(text)
        parts = [text]
        while size < enough and (piece := next(pieces, None)) is not None:
            parts.append(piece)
            size += len(piece)
        text = "".join(parts)
        if size < enough:
            return _encode(tokenizer, text)[:count]
        ids = _encode(tokenizer, text[:enough])
        if len(ids) >= count + 16:  # the last few could come out differently with more text behind them
            return ids[:count]
        enough *= 2


def _random_windows(
    pieces: Iterator[str],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    count: int,
    stretches: int | None,
    seed: int,
) -> list[int]:
    stretch = length * _CHARACTERS_PER_TOKEN
    limit = None if stretches is None else stretches * stretch
    text, size = [], 0
    for piece in pieces:
        text.append(piece)
        size += len(piece)
        if limit is not None and size >= limit:
            break
    joined = "".join(text)
    starts = list(range(0, len(joined) - stretch + 1, stretch))
    random.Random(seed).shuffle(starts)
    ids: list[int] = []
    for start in starts:
        excerpt = joined[start : start + stretch]
        # The first word is cut, unless a space happens to come first.
        window = _encode(tokenizer, excerpt[excerpt.find(" ") + 1 :])[:length]
        if len(window) == length:
            ids += window
        if len(ids) == count * length:
            break
    return ids


#: Windows after those of the calibration, where the same text is measured on and nobody says how many.
WINDOWS_AFTER = 256


@dataclass(frozen=True)
class Texts:
    """All windows of a run.

    Attributes:
        calibration: To calibrate on.
        heldout: To measure perplexity on, by name of the text.
        notes: What a reader should know of them.
    """

    calibration: Windows
    heldout: dict[str, Windows]
    notes: tuple[str, ...] = ()

    @classmethod
    def read(
        cls, model: StreamedModel, calibration: Calibration, measurement: Measurement, usual: int | None = None
    ) -> Texts:
        """Reads them, and checks that ``model`` takes them.

        Args:
            model: Its tokenizer and number of positions count.
            calibration: What to calibrate on.
            measurement: What to measure on.
            usual: How many windows of a text where the measurement does not say; a text may have fewer. None for all
                of it, and then a text has to have as many as the measurement says.

        Raises:
            CalibrationError: a text is not available, or too short.
            UsageError: a window has more tokens than the model has positions, or a text has nothing after the
                calibration windows.
        """
        text = calibration.text
        own = None if isinstance(text, str) else as_windows(text)
        notes = []
        if own is not None and calibration.length is None:
            model.check(own.tokens)
            length = own.tokens.shape[1]
        else:
            length, note = model.window_length(calibration.length)
            notes += [note] if note else []
        count = usual if measurement.samples is None else measurement.samples
        texts = () if count == 0 else measurement.texts
        after = [each is None or (isinstance(text, str) and isinstance(each, str) and each == text) for each in texts]
        names = [text, *(each for each, follows in zip(texts, after, strict=True) if not follows)]
        tokenizer = load_tokenizer(model.checkpoint.path) if any(isinstance(name, str) for name in names) else None
        if own is not None:
            windows, rest = own, own.tokens[:0]
        else:
            assert tokenizer is not None
            windows = read_windows(
                str(text),
                tokenizer,
                length,
                calibration.samples,
                spare=(count or WINDOWS_AFTER) if any(after) else 0,
                order=calibration.order,
                seed=calibration.seed,
            )
            rest = windows.tokens[calibration.samples :]
            windows = dataclasses.replace(windows, tokens=windows.tokens[: calibration.samples])
        heldout = {}
        for each, follows in zip(texts, after, strict=True):
            if not follows:
                name = each if isinstance(each, str) else ""
                heldout[name] = _heldout(
                    each,
                    tokenizer,
                    length if measurement.length is None else measurement.length,
                    count,
                    usual is not None,
                )
            elif len(rest):
                if measurement.length not in (None, length):
                    raise UsageError("what follows the calibration windows is measured in windows of their length")
                heldout[str(text)] = Windows(
                    rest, f"the text after the calibration windows of {text}", calibration.order
                )
            elif each is None:
                notes.append(
                    "perplexity was not measured: no text was given and the calibration text has no more of it"
                )
            else:
                raise UsageError(f"{each} has nothing after the calibration windows to measure on; try another text")
        for each in (windows, *heldout.values()):
            model.check(each.tokens)
        return cls(windows, heldout, tuple(notes))

    @property
    def only(self) -> Windows | None:
        """The windows to measure on, where there is one text or none."""
        return next(iter(self.heldout.values()), None)


def _heldout(
    text: object, tokenizer: PreTrainedTokenizerBase | None, length: int, count: int | None, fewer: bool
) -> Windows:
    if not isinstance(text, str):
        return as_windows(text)
    assert tokenizer is not None
    if fewer and count:
        return read_windows(text, tokenizer, length, 1, spare=count - 1)
    return read_windows(text, tokenizer, length, count)


def as_windows(text: object) -> Windows:
    """Of windows or tokens that were given.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(text, Tensor):
        return Windows(text, "given tokens")
    if not isinstance(text, Windows):
        raise UsageError(f"a text is a name, windows or a tensor of tokens; got {text!r}")
    return text
