"""Text to windows of tokens.

A source of text is a file (``.txt`` or anything else that is text, ``.jsonl`` with a field ``text``;
also compressed as ``.gz``, ``.xz`` or ``.bz2``), ``demo`` or ``demo-held`` for an excerpt that ships with
niwaki, or the name of a data set for the ``datasets`` library, which is streamed. No padding and no special
tokens are added: windows are cut from the running text.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import itertools
import json
import lzma
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from niwaki.errors import CalibrationError, UsageError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Order = Literal["first", "random"]


@dataclass(frozen=True)
class DataSet:
    """A data set of the ``datasets`` library, and how its rows become one text.

    Attributes:
        repository: On the hub, or a directory.
        configuration: If it has several.
        split: Which part.
        files: Which of its files; None for all of the split.
        revision: Of the repository, if not its main one.
        field: Of each row, that has a text.
        separator: Goes between two rows.
        rows: The first so many; None for all.
        windows: As many are measured on where nobody says how many; None for all.
    """

    repository: str
    configuration: str | None = None
    split: str = "train"
    files: str | None = None
    revision: str | None = None
    field: str = "text"
    separator: str = "\n\n"
    rows: int | None = None
    windows: int | None = None

    def __str__(self) -> str:
        rows = "rows" if self.rows is None else f"first {self.rows:,} rows"
        parts = [self.repository, self.configuration, f"split {self.split}", self.files]
        return ", ".join(filter(None, [*parts, f"{rows} joined by {self.separator!r}"]))


#: Short names, for the texts that the SparseGPT and Wanda papers calibrate and measure on, as they do.
DATASETS = {
    "c4": DataSet("allenai/c4", files="en/c4-train.00000-of-01024.json.gz"),
    "c4-validation": DataSet(
        "allenai/c4",
        split="validation",
        files="en/c4-validation.00000-of-00008.json.gz",
        separator=" ",
        rows=1100,
        windows=256,
    ),
    "ptb": DataSet(
        "ptb-text-only/ptb_text_only",
        split="test",
        files="penn_treebank/test/*.parquet",
        revision="refs/convert/parquet",  # the main one is a script
        field="sentence",
        separator=" ",
    ),
    "wikitext2": DataSet("Salesforce/wikitext", "wikitext-2-raw-v1", "test"),
    "wikitext2-train": DataSet("Salesforce/wikitext", "wikitext-2-raw-v1", "train"),
}
#: Excerpts that ship with niwaki: of the embedded model's training text, and of books that it never saw.
EXCERPTS = {"demo": "calibration.txt.xz", "demo-held": "held.txt.xz"}
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
_JOINT = "\n\n"  # between the texts of a JSONL file
_PIECE = 1 << 20  # characters read at a time
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
        raise CalibrationError(
            f"{path} has no tokenizer that can be loaded: {str(error).splitlines()[0]}"
        ) from error


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
        raise UsageError(
            f"windows need at least 2 tokens and there must be 1 of them; got {count} of {length}"
        )
    which = f"{order} windows"
    if count is None:
        ids = _encode(tokenizer, read_text(source))
        wanted = len(ids) // length
        which = "all windows"
        most = None if _is_file(source) else _data_set(source).windows
        if most is not None and wanted > most:
            wanted, which = most, "first windows"
        which += f", {len(ids) - wanted * length:,} tokens behind them left out"
        count = 1
    else:
        wanted = count + spare
        if order == "random":
            stream = _pieces(source)
            limit = None if _is_file(source) else wanted * _RANDOM_POOL
            ids = _random_windows(stream, tokenizer, length, wanted, limit, seed)
        else:
            ids = _first_tokens(_pieces(source), tokenizer, wanted * length)
    got = min(wanted, len(ids) // length)
    if got < count:
        if order == "random":
            raise CalibrationError(
                f"{source} has only {got} random windows of {length} tokens, {count} are needed"
            )
        missing = count * length - len(ids)
        raise CalibrationError(
            f"{source} is too short: {count} windows of {length} tokens need {count * length} tokens, it has "
            f"{len(ids)}, {missing} are missing; give more text, fewer samples or a shorter sequence length"
        )
    tokens = torch.tensor(ids[: got * length], dtype=torch.int64).view(got, length)
    origin = f"{_described(source)}; one text, no special tokens (no BOS); {which}"
    return Windows(tokens, source, order, len(ids) - got * length if spare == 0 else 0, origin)


def read_text(source: str) -> str:
    """All of a text, see the module's docstring.

    Raises:
        CalibrationError: it cannot be had.
    """
    return "".join(_pieces(source))


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


def _described(source: str) -> str:
    """What text ``source`` is, in words."""
    if not _is_file(source):
        return str(_data_set(source))
    path = Path(source).expanduser()
    if source in EXCERPTS and not path.exists():
        return f"the excerpt {source} that ships with niwaki"
    return f"{source}, texts joined by {_JOINT!r}" if {".jsonl", ".json"} & set(path.suffixes) else source


def _is_file(source: str) -> bool:
    return source in EXCERPTS or Path(source).expanduser().is_file()


def _pieces(source: str) -> Iterator[str]:
    """The text in pieces that join to the whole."""
    path = Path(source).expanduser()
    if source in EXCERPTS and not path.exists():
        path = Path(str(files("niwaki"))) / "data" / EXCERPTS[source]
    if path.is_file():
        suffixes = path.suffixes
        opener = _OPENERS.get(suffixes[-1] if suffixes else "", open)
        kind = suffixes[-2] if opener is not open and len(suffixes) > 1 else path.suffix
        try:
            with opener(path, "rt", encoding="utf-8") as file:
                if kind in {".jsonl", ".json"}:
                    yield from _joined(_json_texts(file, path), _JOINT)
                else:
                    while piece := file.read(_PIECE):
                        yield piece
        except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError, zlib.error) as error:
            raise CalibrationError(f"{source} cannot be read as UTF-8 text: {error}") from error
    else:
        yield from _dataset_texts(source)


def _json_texts(lines: Iterator[str], path: Path) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                text = json.loads(line)["text"]
                if not isinstance(text, str):
                    raise TypeError
                yield text
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise CalibrationError(
                    f"{path}, line {number}: not a JSON object with a field 'text'"
                ) from error


def _joined(texts: Iterator[str], separator: str) -> Iterator[str]:
    first = next(texts, None)
    if first is not None:
        yield first
        for text in texts:
            yield separator + text


def _data_set(source: str) -> DataSet:
    """``source`` is a short name, or repository[:configuration[:split]], or a directory of a data set."""
    if source in DATASETS:
        return DATASETS[source]
    parts = [*source.split(":"), "", ""]
    return DataSet(parts[0], parts[1] or None, parts[2] or "train")


def _dataset_texts(source: str) -> Iterator[str]:
    """The rows of a data set, joined."""
    wanted = _data_set(source)
    if (
        source not in DATASETS
        and not Path(source).expanduser().is_dir()
        and (
            source.startswith((".", "/", "~"))
            or Path(source).suffix in {".txt", ".jsonl", ".json", *_OPENERS}
        )
    ):
        raise CalibrationError(f"there is no file {source}")
    try:
        import datasets
    except ImportError as error:
        raise CalibrationError(
            f"{source} is no file, and data sets need an extra: pip install 'niwaki[datasets]'"
        ) from error
    try:
        rows = iter(
            datasets.load_dataset(
                wanted.repository,
                wanted.configuration,
                split=wanted.split,
                data_files=wanted.files and {wanted.split: wanted.files},
                revision=wanted.revision,
                streaming=True,
            )
        )
        first = next(rows, None)
        if first is not None and wanted.field not in first:
            raise CalibrationError(
                f"the data set {source} has no field {wanted.field!r}, only {', '.join(first)}"
            )
        known = [] if first is None else [first]
        chosen = itertools.islice(itertools.chain(known, rows), wanted.rows)
        yield from _joined((row[wanted.field] for row in chosen), wanted.separator)
    except CalibrationError:
        raise
    except Exception as error:  # the library raises errors of its own, of the hub, of httpx and of the OS
        raise CalibrationError(
            f"the data set {source} could not be had ({first_line(error)}); give a text file instead, or "
            "'demo' (to calibrate) or 'demo-held' (to measure) for the excerpts that ship with niwaki"
        ) from error
