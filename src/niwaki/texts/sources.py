"""Sources of text: files, data sets, excerpts that ship with niwaki; see :mod:`niwaki.texts.texts`."""

import contextlib
import dataclasses
import importlib.util
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from niwaki.checkpoints.local import is_unreachable, refusal
from niwaki.errors import CalibrationError, UnknownNameError, UsageError, first_line, raised_as
from niwaki.files import given_path
from niwaki.options import OWN_ANSWERS, USUAL_CALIBRATION, USUAL_TEXT, Calibration
from niwaki.records.progress import Progress
from niwaki.texts.files import EXTRA, JSON, ROWS, SUFFIXES, kind, pieces, rows
from niwaki.texts.rows import (
    JOINT,
    TEXT,
    ChatTemplate,
    Column,
    Form,
    Messages,
    Rows,
    Talk,
    as_texts,
    message_of,
    refused_note,
)


@dataclass(frozen=True)
class DataSet:
    """A data set of the ``datasets`` library, and how its rows become one text."""

    repository: str  # on the hub, or a directory
    configuration: str | None = None
    split: str = "train"
    files: str | None = None  # of the split; None for all
    revision: str | None = None
    field: str | None = None  # of texts; None for what form_of finds
    separator: str = JOINT
    rows: int | None = None  # only the first N; None for all
    windows: int | None = None  # that are measured on by default; None for all

    def described(self, form: Form) -> str:
        """What it is, in words, where its rows become texts like this."""
        rows = "rows" if self.rows is None else f"first {self.rows:,} rows"
        how = f"{rows} joined by {self.separator!r}" if self.is_usual(form) else str(form)
        parts = [self.repository, self.configuration, f"split {self.split}", self.files]
        return ", ".join(filter(None, [*parts, how]))

    def is_usual(self, form: Form) -> bool:
        """Whether rows are joined as the data set says."""
        return form == Column(self.field or TEXT)


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
    USUAL_CALIBRATION: "c4 (the default of --calibration)",
    USUAL_TEXT: "wikitext2 (the default of --text in eval and compare)",
}

#: Excerpts that ship with niwaki: of the embedded model's training text, and of books that it never saw.
EXCERPTS = {"demo": "calibration.txt.xz", "demo-held": "held.txt.xz"}
#: The one to calibrate on.
SHIPPED = "demo"
#: What else there is for those who have no data sets.
_OFFLINE = "a text that ships with niwaki (--calibration demo, --text demo-held)"
#: Prompts of many kinds that ship with niwaki, for a model to answer.
PROMPTS = {OWN_ANSWERS: "prompts.jsonl"}

_DATA = Path(str(files("niwaki"))) / "data"
_MOST_FILES = 10_000  # in the directory of a data set


@dataclass(frozen=True)
class OpenText:
    """A text that is read while it is used.

    Attributes:
        origin: What text it is, in words.
        pieces: Join to the whole; CalibrationError where more of it is not available.
        source: Its name.
        form: How rows became it.
    """

    origin: str
    pieces: Iterator[str]
    source: str = ""
    form: Form | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a record should say of how it was read so far."""
        if self.form is None or isinstance(self.form, Column):
            return ()
        refused = self.form.refused if isinstance(self.form, Talk) else ()
        return (f"{self.source} was read as {self.form}", *refused_note(self.source, refused))


def read_text(source: str, field: str | None = None, template: ChatTemplate | None = None) -> OpenText:
    """The text called ``source``; CalibrationError where it is not available.

    Of rows it is what :func:`.form_of` says, by ``field`` and with the model's chat ``template``.
    """
    path = find_file(source)
    if path is None:
        return _dataset_text(source, field, template)
    if path.parent == _DATA:
        return OpenText(f"the excerpt {source} that ships with niwaki", pieces(path, source))
    if kind(path) not in ROWS:
        return OpenText(source, pieces(path, source))
    form, texts = as_texts(rows(path, source), field, template)
    return OpenText(f"{source}, {form}", _joined(texts, form.joint), source, form)


def usual_calibration(given: Calibration, progress: Progress) -> Calibration:
    """``given``, or where it is the usual text and that is not available, one that ships with niwaki, with a note."""
    is_usual = isinstance(given.text, str) and given.text == USUAL_CALIBRATION
    if not is_usual or not (why := _not_available(DATASETS[USUAL_CALIBRATION])):
        return given
    progress.note(
        f"calibrating on books that ship with niwaki, because {USUAL_CALIBRATION} {why}; for better results give "
        "--calibration a text like those the model will be used for"
    )
    return dataclasses.replace(given, text=SHIPPED)


def _not_available(wanted: DataSet) -> str:
    """Why a data set cannot be read, "" if it can."""
    if importlib.util.find_spec("datasets") is None:
        return f"needs an extra ({EXTRA})"
    return "is on the Hugging Face hub, which cannot be reached" if refusal("dataset", wanted.repository) else ""


def check_field(field: str | None, sources: Iterable[object]) -> None:
    """Raises UsageError where a ``field`` is named, and none of the texts ``sources`` has columns."""
    if field is not None and not any(isinstance(each, str) and each and _has_columns(each) for each in sources):
        raise UsageError(f"--field is for files and data sets with columns, and none was given; got {field!r}")


def _has_columns(source: str) -> bool:
    path = find_file(source)
    return source not in DATASETS if path is None else kind(path) in ROWS


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


def read_prompts(source: str) -> tuple[list[Messages], int]:
    """The conversations in a file that await an answer, each a list of messages with a role and a content.

    A row has a field ``prompt``, or ``messages`` as chat templates take them, of which the last answers are left out;
    the second value is how many had some. CalibrationError where the file is not there or has anything else.
    """
    path = find_file(source) or (_DATA / PROMPTS[source] if source in PROMPTS else None)
    if path is None or kind(path) not in ROWS:
        raise CalibrationError(
            f"{source} has no prompts; give a file of rows, such as JSONL, with a field 'prompt' or 'messages', or "
            "'answers' for the prompts that ship with niwaki"
        )
    prompts, answered = list[Messages](), 0
    for where, value in rows(path, source):
        conversation = _conversation(value, where)
        length = len(conversation)
        while conversation and conversation[-1]["role"] == "assistant":
            conversation.pop()
        if not conversation:
            raise CalibrationError(f"{where}: there is nothing to answer")
        prompts.append(conversation)
        answered += len(conversation) < length
    if not prompts:
        raise CalibrationError(f"{source} has no prompts")
    return prompts, answered


def _conversation(value: Any, where: str) -> Messages:
    if isinstance(value, dict) and isinstance(value.get("prompt"), str) and value["prompt"].strip():
        return [{"role": "user", "content": value["prompt"]}]
    if not (messages := _messages_of(value)):
        raise CalibrationError(f"{where}: neither a field 'prompt' that is text nor 'messages'")
    return [message_of(each, where) for each in messages]


@dataclass(frozen=True)
class Conversation:
    """A conversation with images, as chat templates take it."""

    where: str  # the file and the line
    messages: list[dict[str, Any]]  # paths of images are absolute
    text: str | None = None  # what the model's chat template makes of it, where that is known

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
    if path is None or kind(path) not in JSON:
        return []
    talks = ((where, _messages_of(row)) for where, row in rows(path, source))
    until = itertools.takewhile(lambda talk: talk[1] is not None, talks)
    if not any(_has_images(messages or []) for _, messages in until):
        return []
    return [_with_images(_messages_of(row), where, path.parent) for where, row in rows(path, source)]


def _messages_of(row: Any) -> list[Any] | None:
    messages = row.get("messages") if isinstance(row, dict) else None
    return messages if isinstance(messages, list) else None


def _has_images(messages: list[Any]) -> bool:
    contents = [each.get("content") for each in messages if isinstance(each, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") == "image" for part in parts)


def _with_images(messages: list[Any] | None, where: str, folder: Path) -> Conversation:
    if messages is None:
        raise CalibrationError(f"{where}: no field 'messages', which the lines before it have")
    parts = "{'type': 'text', 'text': ...} or {'type': 'image', 'path': ...}"
    what = f"{where}: the parts of messages are {parts} here"
    with raised_as(CalibrationError, what, msgspec.ValidationError):
        turns = msgspec.convert(messages, list[_Turn])
    filled: list[dict[str, Any]] = []
    for turn in turns:
        content = [_TextPart(turn["content"])] if isinstance(turn["content"], str) else turn["content"]
        for part in content:
            if isinstance(part, _ImagePart):
                part.path = str(image := folder / given_path(part.path))
                if not image.is_file():
                    raise CalibrationError(f"{where}: there is no image {image}")
        filled.append({"role": turn["role"], "content": msgspec.to_builtins(content)})
    return Conversation(where, filled)


def find_data_set(source: str) -> DataSet:
    """``source`` is a short name, or repository[:configuration[:split]], or a directory of a data set."""
    if source in DATASETS:
        return DATASETS[source]
    parts = [*source.split(":"), "", ""]
    return DataSet(parts[0], parts[1] or None, parts[2] or "train")


def data_set_rows(source: str) -> Rows:
    """The rows of the data set ``source``, see :func:`find_data_set`; CalibrationError where it is not available."""
    _check_data_set(source)
    wanted, named = find_data_set(source), f"the data set {_USUAL.get(source, source)}"
    try:
        import datasets
    except ImportError as error:
        raise _extra(source) from error
    is_offline = not given_path(wanted.repository).is_dir() and is_unreachable(refusal("dataset", wanted.repository))
    try:
        files = wanted.files and {wanted.split: wanted.files}
        which = {"split": wanted.split, "data_files": files, "revision": wanted.revision}
        with _only_cached() if is_offline else contextlib.nullcontext():
            found = datasets.load_dataset(wanted.repository, wanted.configuration, **which, streaming=True)
        for number, row in enumerate(itertools.islice(found, wanted.rows), 1):
            yield f"{source}, row {number}", row
    except Exception as error:  # the library raises errors of its own, of the hub, of httpx and of the OS
        why = "the Hugging Face hub cannot be reached" if is_offline else first_line(error)
        raise CalibrationError(f"{named} is not available ({why}); give a text file, or {_OFFLINE}") from error


def _dataset_text(source: str, field: str | None, template: ChatTemplate | None) -> OpenText:
    wanted = find_data_set(source)
    field = wanted.field or TEXT if source in DATASETS else field
    form, texts = as_texts(data_set_rows(source), field, template)
    joint = wanted.separator if wanted.is_usual(form) else form.joint
    return OpenText(wanted.described(form), _joined(texts, joint), source, form)


def _joined(texts: Iterator[str], separator: str) -> Iterator[str]:
    for i, text in enumerate(texts):
        yield separator + text if i else text


@contextlib.contextmanager
def _only_cached() -> Iterator[None]:
    """Lets the library look for data sets in its cache alone; it asks a hub that is not there for half a minute."""
    import datasets

    before, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _check_data_set(source: str) -> None:
    """CalibrationError where ``source`` is no data set, as its name shows; UnknownNameError where it may be another."""
    if not source:
        raise UsageError("the name of a text is empty")
    if source in DATASETS:
        return
    if (directory := given_path(source)).is_dir():
        below = (name for _, _, names in os.walk(directory) for name in names)
        if len(list(itertools.islice(below, _MOST_FILES + 1))) > _MOST_FILES:  # which the library looks at for hours
            raise CalibrationError(f"the directory {source} has more than {_MOST_FILES:,} files; is it a data set?")
    elif source.startswith((".", "/", "~")) or Path(source).suffix.lower() in SUFFIXES:
        raise CalibrationError(f"there is no file {source}")
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", find_data_set(source).repository):  # all of the hub's have an owner today
        instead = "give a file, or a data set as OWNER/NAME:CONFIG:SPLIT"
        raise UnknownNameError("text", source, [*EXCERPTS, *DATASETS], instead)


def _extra(source: str) -> CalibrationError:
    """Says that the package that reads data sets is missing."""
    hint = f"install it ({EXTRA}), or give a text file, or {_OFFLINE}"
    named = f"the data set {_USUAL.get(source, source)} needs"
    what = named if source in DATASETS else f"{source} is not a file, and data sets need"
    return CalibrationError(f"{what} an extra; {hint}")


def check_text(source: str) -> None:
    """Raises what reading the text called ``source`` would raise at its very beginning; a hub is not asked.

    CalibrationError where there is no such file, or it has no text; UnknownNameError where no text has this name.
    """
    if source in PROMPTS:
        return
    if (path := find_file(source)) is None:
        _check_data_set(source)
        if importlib.util.find_spec("datasets") is None and source != USUAL_CALIBRATION:  # for which there is another
            raise _extra(source)
        return
    beginning = rows(path, source) if kind(path) in ROWS else pieces(path, source)
    next(iter(beginning), None)
