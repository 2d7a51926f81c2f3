"""Sources of text: files, data sets, excerpts that ship with niwaki; see :mod:`niwaki.models.text`."""

import bz2
import gzip
import itertools
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from niwaki.errors import CalibrationError, first_line
from niwaki.files import given_path


@dataclass(frozen=True)
class DataSet:
    """A data set of the ``datasets`` library, and how its rows become one text."""

    repository: str  # on the hub, or a directory
    configuration: str | None = None
    split: str = "train"
    files: str | None = None  # of the split; None for all
    revision: str | None = None
    field: str = "text"
    separator: str = "\n\n"
    rows: int | None = None  # only the first N; None for all
    windows: int | None = None  # that are measured on by default; None for all

    def __str__(self) -> str:
        rows = "rows" if self.rows is None else f"first {self.rows:,} rows"
        parts = [self.repository, self.configuration, f"split {self.split}", self.files]
        return ", ".join(filter(None, [*parts, f"{rows} joined by {self.separator!r}"]))


#: Short names for the texts that the SparseGPT and Wanda papers calibrate and measure on.
DATASETS = {
    "c4": DataSet("allenai/c4", files="en/c4-train.00000-of-01024.json.gz"),
    "c4-validation": DataSet(
        "allenai/c4",
        None,
        "validation",
        "en/c4-validation.00000-of-00008.json.gz",
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

_DATA = Path(str(files("niwaki"))) / "data"
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
_JOINT = "\n\n"  # between the texts of a JSONL file
_PIECE = 1 << 20  # characters read at a time


def describe_source(source: str) -> str:
    """What text ``source`` is, in words."""
    path = find_file(source)
    if path is None:
        return str(find_data_set(source))
    if path.parent == _DATA:
        return f"the excerpt {source} that ships with niwaki"
    return f"{source}, texts joined by {_JOINT!r}" if {".jsonl", ".json"} & set(path.suffixes) else source


def find_file(source: str) -> Path | None:
    """The file that ``source`` is, or an excerpt's; None for a data set."""
    path = given_path(source)
    if source in EXCERPTS and not path.exists():
        return _DATA / EXCERPTS[source]
    return path if path.is_file() else None


def read_pieces(source: str) -> Iterator[str]:
    """The text in pieces that join to the whole; CalibrationError where it is not available."""
    path = find_file(source)
    if path is None:
        yield from _dataset_texts(source)
        return
    opener = _OPENERS.get(path.suffix, open)
    kind = Path(path.stem).suffix if path.suffix in _OPENERS else path.suffix
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            if kind in {".jsonl", ".json"}:
                yield from _joined(_json_texts(file, path), _JOINT)
            else:
                while piece := file.read(_PIECE):
                    yield piece
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError, zlib.error) as error:
        raise CalibrationError(f"{source} cannot be read as UTF-8 text: {error}") from error


def _json_texts(lines: Iterator[str], path: Path) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                text = json.loads(line)["text"]
                if not isinstance(text, str):
                    raise TypeError
                yield text
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise CalibrationError(f"{path}, line {number}: not a JSON object with a field 'text'") from error


def _joined(texts: Iterator[str], separator: str) -> Iterator[str]:
    for i, text in enumerate(texts):
        yield separator + text if i else text


def find_data_set(source: str) -> DataSet:
    """``source`` is a short name, or repository[:configuration[:split]], or a directory of a data set."""
    if source in DATASETS:
        return DATASETS[source]
    parts = [*source.split(":"), "", ""]
    return DataSet(parts[0], parts[1] or None, parts[2] or "train")


def _dataset_texts(source: str) -> Iterator[str]:
    """The rows of a data set, joined."""
    wanted = find_data_set(source)
    like_a_file = source.startswith((".", "/", "~")) or Path(source).suffix in {".txt", ".jsonl", ".json", *_OPENERS}
    if like_a_file and source not in DATASETS and not given_path(source).is_dir():
        raise CalibrationError(f"there is no file {source}")
    try:
        import datasets
    except ImportError as error:
        extra = "pip install 'niwaki[datasets]'"
        raise CalibrationError(f"{source} is not a file, and data sets need an extra: {extra}") from error
    try:
        files = wanted.files and {wanted.split: wanted.files}
        which = {"split": wanted.split, "data_files": files, "revision": wanted.revision}
        rows = datasets.load_dataset(wanted.repository, wanted.configuration, **which, streaming=True)
        yield from _joined(_values(itertools.islice(rows, wanted.rows), wanted.field, source), wanted.separator)
    except CalibrationError:
        raise
    except Exception as error:  # the library raises errors of its own, of the hub, of httpx and of the OS
        raise CalibrationError(
            f"the data set {source} is not available ({first_line(error)}); give a text file instead, or "
            "'demo' (to calibrate) or 'demo-held' (to measure) for the excerpts that ship with niwaki"
        ) from error


def _values(rows: Iterator[dict[str, str]], field: str, source: str) -> Iterator[str]:
    for row in rows:
        if field not in row:
            raise CalibrationError(f"the data set {source} has no field {field!r}, only {', '.join(row)}")
        yield row[field]
