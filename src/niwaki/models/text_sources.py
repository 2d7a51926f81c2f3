"""Sources of text: files, data sets, excerpts that ship with niwaki; see :mod:`niwaki.models.text`."""

import bz2
import contextlib
import gzip
import itertools
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TextIO, TypedDict

import msgspec

from niwaki.errors import CalibrationError, UnknownNameError, first_line
from niwaki.files import given_path
from niwaki.options import OWN_ANSWERS, USUAL_CALIBRATION, USUAL_TEXT


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

#: What errors say of the texts that nobody has to have named.
_USUAL = {
    USUAL_CALIBRATION: "c4 (which is read without --calibration text.txt)",
    USUAL_TEXT: "wikitext2 (which eval and compare read without --text text.txt)",
}

#: Excerpts that ship with niwaki: of the embedded model's training text, and of books that it never saw.
EXCERPTS = {"demo": "calibration.txt.xz", "demo-held": "held.txt.xz"}
#: Prompts of many kinds that ship with niwaki, for a model to answer.
PROMPTS = {OWN_ANSWERS: "prompts.jsonl"}

_DATA = Path(str(files("niwaki"))) / "data"
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
_JSON = {".jsonl", ".json"}
_JOINT = "\n\n"  # between the texts of a JSONL file
_PIECE = 1 << 20  # characters read at a time
_MOST_FILES = 10_000  # in the directory of a data set
_LONGEST = 1 << 27  # characters in a line of JSONL


def describe_source(source: str) -> str:
    """What text ``source`` is, in words."""
    path = find_file(source)
    if path is None:
        return str(find_data_set(source))
    if path.parent == _DATA:
        return f"the excerpt {source} that ships with niwaki"
    return f"{source}, texts joined by {_JOINT!r}" if _kind(path) in _JSON else source


def find_file(source: str) -> Path | None:
    """The file that ``source`` is, or an excerpt's; None for a data set.

    A directory that is called like an excerpt is not meant: many keep the embedded model in one called "demo".
    """
    path = given_path(source)
    if source in EXCERPTS and not path.is_file():
        return _DATA / EXCERPTS[source]
    if path.exists() and not path.is_dir() and not path.is_file():
        raise CalibrationError(f"{source} is a pipe or a device; give a file")  # which could be read for ever
    return path if path.is_file() else None


def _kind(path: Path) -> str:
    """The suffix, without that of a compression."""
    return Path(path.stem).suffix if path.suffix in _OPENERS else path.suffix


def read_pieces(source: str) -> Iterator[str]:
    """The text in pieces that join to the whole; CalibrationError where it is not available."""
    path = find_file(source)
    if path is None:
        yield from _dataset_texts(source)
        return
    with _opened(path, source) as file:
        if _kind(path) in _JSON:
            yield from _joined((_text_of(value, where) for where, value in _json_lines(file, path)), _JOINT)
            return
        while piece := file.read(_PIECE):
            if "\0" in piece:
                raise CalibrationError(f"{source} is no text: it has NUL characters, as UTF-16 and binary files do")
            yield piece


@contextlib.contextmanager
def _opened(path: Path, source: str) -> Iterator[TextIO]:
    """The text of a file, compressed or not; CalibrationError where it cannot be opened or read."""
    try:
        with _OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8-sig") as file:
            yield file
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError, zlib.error) as error:
        raise CalibrationError(f"{source} cannot be read as UTF-8 text: {first_line(error)}") from error


def read_prompts(source: str) -> list[list[dict[str, str]]]:
    """The conversations in a JSONL file that await an answer, each a list of messages with a role and a content.

    A line has a field ``prompt``, or ``messages`` as chat templates take them, of which the model's own last answers
    are left out. CalibrationError where the file is not there or has anything else.
    """
    path = find_file(source) or (_DATA / PROMPTS[source] if source in PROMPTS else None)
    if path is None or _kind(path) not in _JSON:
        raise CalibrationError(
            f"{source} has no prompts; give a JSONL file with a field 'prompt' or 'messages', or 'answers' for the "
            "prompts that ship with niwaki"
        )
    with _opened(path, source) as file:
        prompts = [_conversation(value, where) for where, value in _json_lines(file, path)]
    if not prompts:
        raise CalibrationError(f"{source} has no prompts")
    return prompts


def _conversation(value: Any, where: str) -> list[dict[str, str]]:
    if isinstance(value, dict) and isinstance(value.get("prompt"), str) and value["prompt"].strip():
        return [{"role": "user", "content": value["prompt"]}]
    messages = value.get("messages") if isinstance(value, dict) else None
    try:
        conversation = msgspec.convert(messages, list[_Message])
    except msgspec.ValidationError as error:
        raise CalibrationError(f"{where}: neither a field 'prompt' that is text nor 'messages': {error}") from error
    while conversation and conversation[-1]["role"] == "assistant":
        conversation.pop()
    if not conversation:
        raise CalibrationError(f"{where}: there is nothing to answer")
    return [{"role": message["role"], "content": message["content"]} for message in conversation]


class _Message(TypedDict):
    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """A conversation with images, as chat templates take it."""

    where: str  # the file and the line
    messages: list[dict[str, Any]]  # paths of images are absolute

    @property
    def images(self) -> list[Path]:
        """The files of its images."""
        return [Path(part["path"]) for each in self.messages for part in each["content"] if part["type"] == "image"]


class _ImagePart(msgspec.Struct, tag_field="type", tag="image", forbid_unknown_fields=True):
    path: str


class _TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str


class _Turn(TypedDict):
    role: str
    content: str | list[_ImagePart | _TextPart]


def read_conversations(source: str) -> list[Conversation]:
    """The conversations in a JSONL file, if some have images; [] where it is any other text.

    A line has a field ``messages`` as chat templates take them, in which the content of a message is text or a list of
    parts, of the types ``text`` and ``image`` with a ``path``, relative to the file's directory. CalibrationError,
    which names the line, for any other messages, and for a file of an image that is missing.
    """
    path = find_file(source)
    if path is None or _kind(path) not in _JSON:
        return []
    lines: list[tuple[str, list[Any]]] = []
    with _opened(path, source) as file:
        for where, value in _json_lines(file, path):
            messages = value.get("messages") if isinstance(value, dict) else None
            if not isinstance(messages, list):
                if any(_has_images(each) for _, each in lines):
                    raise CalibrationError(f"{where}: no field 'messages', which the lines before it have")
                return []
            lines.append((where, messages))
    if not any(_has_images(messages) for _, messages in lines):
        return []
    return [_with_images(messages, where, path.parent) for where, messages in lines]


def _has_images(messages: list[Any]) -> bool:
    contents = [each.get("content") for each in messages if isinstance(each, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") == "image" for part in parts)


def _with_images(messages: Any, where: str, folder: Path) -> Conversation:
    try:
        turns = msgspec.convert(messages, list[_Turn])
    except msgspec.ValidationError as error:
        raise CalibrationError(
            f"{where}: the parts of messages are {{'type': 'text', 'text': ...}} or {{'type': 'image', 'path': ...}} "
            f"here: {error}"
        ) from error
    filled: list[dict[str, Any]] = []
    for turn in turns:
        parts = [_TextPart(turn["content"])] if isinstance(turn["content"], str) else turn["content"]
        content: list[dict[str, str]] = []
        for part in parts:
            if isinstance(part, _TextPart):
                content.append({"type": "text", "text": part.text})
                continue
            image = folder / given_path(part.path)
            if not image.is_file():
                raise CalibrationError(f"{where}: there is no image {image}")
            content.append({"type": "image", "path": str(image)})
        filled.append({"role": turn["role"], "content": content})
    return Conversation(where, filled)


def _text_of(value: Any, where: str) -> str:
    text = value.get("text") if isinstance(value, dict) else None
    if isinstance(text, str):
        return text
    hint = ""
    if isinstance(value, dict) and not {"prompt", "messages"}.isdisjoint(value):
        hint = "; for the model's own answers to prompts, --answers own"
    raise CalibrationError(f"{where}: not a JSON object with a field 'text' that is text{hint}")


def _json_lines(file: TextIO, path: Path) -> Iterator[tuple[str, Any]]:
    """Where each line with something in it is, and its value."""
    for number in itertools.count(1):
        line, where = file.readline(_LONGEST), f"{path}, line {number}"
        if not line:
            return
        if len(line) == _LONGEST:
            raise CalibrationError(f"{where}: longer than {_LONGEST:,} characters; are there no line ends?")
        if line.strip():
            try:
                value = parse_json(line)
            except ValueError as error:
                raise CalibrationError(f"{where}: not a JSON object: {error}") from error
            yield where, value


def parse_json(text: str) -> Any:
    """The value of a JSON text, all of it Unicode; ValueError says in a few words why it has none."""
    try:
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON ({error.msg}, column {error.colno})") from error
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deeply") from error
    except UnicodeEncodeError as error:
        raise ValueError("half of a surrogate pair, which is no character") from error
    except ValueError as error:
        raise ValueError("a number has too many digits") from error
    return value


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
    if source in DATASETS:
        pass
    elif (directory := given_path(source)).is_dir():
        below = (name for _, _, names in os.walk(directory) for name in names)
        if len(list(itertools.islice(below, _MOST_FILES + 1))) > _MOST_FILES:  # which the library looks at for hours
            raise CalibrationError(f"the directory {source} has more than {_MOST_FILES:,} files; is it a data set?")
    elif source.startswith((".", "/", "~")) or Path(source).suffix in {".txt", *_JSON, *_OPENERS}:
        raise CalibrationError(f"there is no file {source}")
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", wanted.repository):  # all of the hub's have an owner today
        instead = "give a file, or a data set as OWNER/NAME:CONFIG:SPLIT"
        raise UnknownNameError("text", source, [*EXCERPTS, *DATASETS], instead)
    named = f"the data set {_USUAL.get(source, source)}"
    try:
        import datasets
    except ImportError as error:
        extra = "pip install '.[datasets]' in niwaki's checkout"
        hint = f"give a file, 'demo' or 'demo-held', or install the extra: {extra}"
        what = f"{named} needs" if source in DATASETS else f"{source} is not a file, and data sets need"
        raise CalibrationError(f"{what} an extra; {hint}") from error
    try:
        files = wanted.files and {wanted.split: wanted.files}
        which = {"split": wanted.split, "data_files": files, "revision": wanted.revision}
        rows = datasets.load_dataset(wanted.repository, wanted.configuration, **which, streaming=True)
        yield from _joined(_values(itertools.islice(rows, wanted.rows), wanted.field, source), wanted.separator)
    except CalibrationError:
        raise
    except Exception as error:  # the library raises errors of its own, of the hub, of httpx and of the OS
        raise CalibrationError(
            f"{named} is not available ({first_line(error)}); give a text file instead, or "
            "'demo' (to calibrate) or 'demo-held' (to measure) for the excerpts that ship with niwaki"
        ) from error


def _values(rows: Iterator[dict[str, str]], field: str, source: str) -> Iterator[str]:
    for row in rows:
        if not isinstance(row.get(field), str):
            raise CalibrationError(f"the data set {source} has no field {field!r} with text, only {', '.join(row)}")
        yield row[field]
