"""Rows of a table as texts: of which columns, and through the model's chat template or not."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import re
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from niwaki.errors import CalibrationError, first_line, raised_as, shown
from niwaki.records.wording import counted, several

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Chat templates, which are programs of a model's maker: run by a process of their own, with limits.
#
# One that does not end, or takes all memory, cannot be stopped within this process: ``'a' * 10**10`` is a single step.

#: Characters of a template or of what it makes of a conversation, and of what it makes of all.
_LONGEST, _LONGEST_TEXTS = 1 << 20, 1 << 28
#: Seconds of a processor for all conversations together, of which there may be many, and some more for each.
_SECONDS, _SECONDS_EACH = 20, 0.02
#: Seconds in which the other process has begun; four times its own time is its limit where processors are not measured.
_START = 60
#: Bytes beyond what the libraries take.
_MEMORY = 1 << 30


class TemplateError(ValueError):
    """A template cannot be rendered for the conversation of this ``number``, which counts from 0."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number


def rendered(
    template: str, conversations: Sequence[Sequence[Mapping[str, Any]]], special: Mapping[str, Any], *, ask: bool
) -> list[str]:
    """The texts of :func:`rendered_each`; TemplateError where it refuses one."""
    texts = list[str]()
    for text in rendered_each(template, conversations, special, ask=ask):
        if isinstance(text, TemplateError):
            raise text
        texts.append(text)
    return texts


def rendered_each(
    template: str,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    special: Mapping[str, Any],
    tools: Sequence[Any] = (),
    *,
    ask: bool,
) -> list[str | TemplateError]:
    """What ``template`` makes of each of ``conversations``; with ``ask`` up to where the model's answer begins.

    ``special`` are the names and texts of special tokens, and ``tools`` the definitions of those that each may call.
    Of a conversation that it refuses that is the error. TemplateError is
    raised where it takes too long, too much memory, or makes too much of all.
    """
    if len(template) > _LONGEST:
        raise TemplateError(0, f"it has {len(template):,} characters, and at most {_LONGEST:,} are allowed")
    seconds = math.ceil(_SECONDS + _SECONDS_EACH * len(conversations))
    asked = {"template": template, "conversations": conversations, "special": special, "ask": ask, "seconds": seconds}
    asked["tools"] = [*tools] or [None] * len(conversations)
    made = _rendered(json.dumps(asked, default=str), len(conversations), seconds)
    return [TemplateError(i, error) if error else text for i, (text, error) in enumerate(made)]


def verbatim(text: str) -> str:
    """A template that makes ``text`` of everything."""
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}"


@functools.lru_cache(maxsize=4)
def _rendered(asked: str, count: int, seconds: int) -> tuple[tuple[str, str], ...]:
    """The answers of the other process to ``asked``, which has ``count`` conversations: the text, or else an error."""
    command = [sys.executable, "-m", __name__]
    place = Path(__file__).parents[2]  # or modules of the present directory would come before all others
    patience, ended = _START + 4 * seconds, f"it does not end within {seconds} s"
    try:
        ran = subprocess.run(  # noqa: S603
            command, input=asked.encode(), cwd=place, capture_output=True, timeout=patience, check=False
        )
        said = ran.stdout
        if -ran.returncode not in (signal.SIGXCPU, signal.SIGKILL):
            ended = "it ended unexpectedly"
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
    answers = list[tuple[str, str]]()
    for line in said.splitlines():
        try:
            answer = json.loads(line)
        except ValueError:  # a line that was not finished
            break
        if "end" in answer:
            raise TemplateError(len(answers), answer["end"])
        answers.append((answer.get("text", ""), answer.get("error", "")))
    if len(answers) < count:
        raise TemplateError(len(answers), ended)
    return tuple(answers)


def _render(asked: dict[str, Any]) -> Iterator[dict[str, str]]:
    """What the template makes of each conversation, or why it refuses it, in the process with limits."""
    from transformers.utils.chat_template_utils import render_jinja_template

    with contextlib.suppress(ImportError, OSError, ValueError):  # on systems without them there is the time alone
        import resource

        used = math.ceil(time.process_time()) + asked["seconds"]
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (used, used + 1))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    left = _LONGEST_TEXTS
    for messages, tools in zip(asked["conversations"], asked["tools"], strict=True):
        try:
            made: Any = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=asked["template"],
                add_generation_prompt=asked["ask"],
                **asked["special"],
            )
        except MemoryError:
            raise
        except Exception as error:  # of the template
            yield {"error": first_line(error)[:200] or type(error).__name__}
            continue
        text: str = made[0][0] if isinstance(made, tuple) else made[0]
        left -= len(text)
        if len(text) > _LONGEST or left < 0:
            raise ValueError(f"it makes {len(text):,} characters of a conversation, more than are allowed")
        yield {"text": text}


def _main() -> None:
    try:
        for answer in _render(json.load(sys.stdin)):
            _say(answer)
    except MemoryError:
        _say({"end": f"it takes more than {_MEMORY / 2**30:.0f} GiB"})
    except Exception as error:
        _say({"end": first_line(error)[:200]})


def _say(answer: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _main()


Rows: TypeAlias = Iterator[tuple[str, Any]]
Messages: TypeAlias = list[dict[str, Any]]

#: The column of texts, where nobody names another one; between texts of one or several rows.
TEXT, JOINT = "text", "\n\n"
#: Columns of conversations.
_TALKS = ("messages", "conversations", "conversation")
#: Columns of a task, of more about it, which some rows or tables do not have, and of the answer.
_TASKS = (
    ("instruction", "input", "output"),
    ("instruction", "context", "response"),
    ("prompt", "", "completion"),
    ("prompt", "", "response"),
    ("question", "", "answer"),
)
#: What roles are called elsewhere.
_ROLES = {"human": "user", "gpt": "assistant"}
#: Conversations that the template is given together, at first and at most: each time takes a moment.
_FIRST, _MOST = 512, 8192
#: Names of columns in an error.
_NAMED = 12
#: What is no text alone: a number, as tables have them.
_NUMBER = re.compile(r"\s*[-+]?[\d.,]*\d(e[-+]?\d+)?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class ChatTemplate:
    """A model's chat template.

    Attributes:
        template: Its text.
        special: The texts of special tokens by name.
        bos: The text of the token that windows begin with, which is taken from the start of what the template makes; ""
            where they begin with none.
    """

    template: str
    special: Mapping[str, Any]
    bos: str

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, bos: int | None) -> ChatTemplate | None:
        """The chat template of a tokenizer, if it has one; ``bos`` is the token that windows begin with, if any."""
        if not getattr(tokenizer, "chat_template", None):
            return None
        with raised_as(CalibrationError, "the model's chat template", ValueError):  # several, of which none is usual
            template = tokenizer.get_chat_template()
        begins = "" if bos is None else str(tokenizer.convert_ids_to_tokens(bos))
        return cls(template, tokenizer.special_tokens_map, begins)

    def texts(
        self,
        wheres: Sequence[str],
        conversations: Sequence[Messages],
        refused: list[str],
        tools: Sequence[Any] = (),
        *,
        ask: bool = False,
    ) -> list[str | None]:
        """What it makes of each of ``conversations``; None where it refuses one, and why goes to ``refused``.

        With ``ask`` up to where the model's answer begins. CalibrationError, which says where one is, if it takes too
        long or too much memory.
        """

        def said(error: TemplateError) -> str:
            return f"{wheres[error.number]}: the model's chat template fails: {first_line(error)}"

        try:
            made = rendered_each(self.template, conversations, self.special, tools, ask=ask)
        except TemplateError as error:
            raise CalibrationError(said(error)) from error
        refused += (said(each) for each in made if isinstance(each, TemplateError))
        return [None if isinstance(text, TemplateError) else text.removeprefix(self.bos) for text in made]


def refused_note(source: str, refused: Sequence[str]) -> list[str]:
    """What a record is to say of the conversations of ``source`` that the chat template ``refused``, if any."""
    if not refused:
        return []
    return [
        f"left out of {source} ({counted(len(refused), 'conversation')}, which the chat template refuses): {refused[0]}"
    ]


class Form(ABC):
    """How rows become texts."""

    #: What is between two of them.
    joint = JOINT

    @abstractmethod
    def texts(self, rows: Rows) -> Iterator[str]:
        """The text of each row; CalibrationError, which says where a row is, if it has none."""


@dataclass(frozen=True)
class Column(Form):
    """Rows that have their text in a column, or are texts themselves."""

    name: str | None

    def __str__(self) -> str:
        column = "" if self.name in (None, TEXT) else f" of the column {self.name!r}"
        return f"texts{column} joined by {self.joint!r}"

    def texts(self, rows: Rows) -> Iterator[str]:
        for where, row in rows:
            text = row if self.name is None else row.get(self.name) if isinstance(row, dict) else None
            if not isinstance(text, str):
                what = "a text" if self.name is None else f"an object with a field {self.name!r} that is text"
                raise CalibrationError(f"{where}: not {what}; got {shown(row)}")
            yield text


@dataclass(frozen=True)
class Talk(Form):
    """Rows that are conversations, which the chat template makes texts of."""

    columns: tuple[str, ...]
    template: ChatTemplate
    #: Why conversations that were read so far are left out.
    refused: list[str] = field(default_factory=list, compare=False)
    joint = ""  # the template ends each as its model expects

    def __str__(self) -> str:
        return f"conversations of {_listed(self.columns)} in the model's chat template"

    def texts(self, rows: Rows) -> Iterator[str]:
        size = _FIRST
        while batch := [
            (where, self.messages(row, where), _tools(row, where)) for where, row in itertools.islice(rows, size)
        ]:
            wheres, conversations, tools = zip(*batch, strict=True)
            made = self.template.texts(wheres, conversations, self.refused, tools)
            if size == _FIRST and not any(text is not None for text in made):
                raise CalibrationError(self.refused[0])
            yield from (text for text in made if text is not None)
            size = min(2 * size, _MOST)

    def messages(self, row: Any, where: str) -> Messages:
        """The conversation in a row."""
        parts = [_talk(row.get(column)) if isinstance(row, dict) else [] for column in self.columns]
        if len(self.columns) > 1 and not parts[0]:
            asked, answer = _task(self.columns, row, where)
            return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        if not all(parts):
            raise CalibrationError(f"{where}: no messages in a field {self.columns[-1]!r}; got {shown(row)}")
        messages = [message_of(each, where) for part in parts for each in part]
        before = row.get("system")
        if isinstance(before, str) and before.strip() and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": before})
        return messages


@dataclass(frozen=True)
class TaskRows(Form):
    """Rows that are tasks with answers, for models without a chat template."""

    columns: tuple[str, ...]

    def __str__(self) -> str:
        return f"{_listed(self.columns)} joined by {self.joint!r}, because the model has no chat template"

    def texts(self, rows: Rows) -> Iterator[str]:
        for where, row in rows:
            yield self.joint.join(_task(self.columns, row, where))


def form_of(row: Any, where: str, field: str | None, template: ChatTemplate | None) -> Form:
    """How rows like the first one become texts; CalibrationError where that is not known.

    By ``field``, or by what columns there are: "text", a conversation, or a task with its answer.
    """
    if isinstance(row, str) and field is None:
        return Column(None)
    if not isinstance(row, dict):
        raise CalibrationError(f"{where}: not an object with a field {field or TEXT!r}; got {shown(row)}")
    if field is not None and field not in row:
        raise CalibrationError(f"{where}: no column {field!r}, only {_names(row)}")
    if field is None and TEXT in row:
        field = TEXT
    talks: list[tuple[str, ...]] = [(name,) for name in ([field] if field else _TALKS)]
    talks += [] if field else [("prompt", "completion"), ("prompt", "response")]
    talk = next((names for names in talks if all(_talk(row.get(name)) for name in names)), None)
    if talk and template is None:
        raise CalibrationError(
            f"{where}: the model has no chat template, which conversations need ({talk[0]!r}); give a text, or --field "
            "with a column of texts"
        )
    if talk and template:
        return Talk(talk, template)
    if field:
        return Column(field)
    for task, more, answer in _TASKS:
        if isinstance(row.get(task), str) and isinstance(row.get(answer), str):
            columns = (task, more, answer) if more else (task, answer)
            return TaskRows(columns) if template is None else Talk(columns, template)
    hint = "; for the model's own answers to prompts, --answers own" if "prompt" in row else ""
    raise CalibrationError(
        f"{where}: no column {TEXT!r}, and no other that is known, only {_names(row)}; choose one with --field{hint}"
    )


def as_texts(rows: Rows, field: str | None, template: ChatTemplate | None) -> tuple[Form, Iterator[str]]:
    """How ``rows`` become texts, as the first one says, and these."""
    first = next(rows, None)
    if first is None:
        return Column(field or TEXT), iter(())
    form = form_of(first[1], first[0], field, template)
    rows = itertools.chain([first], rows)
    return form, form.texts(_not_of_numbers(rows, form.name) if isinstance(form, Column) and form.name else rows)


def _not_of_numbers(rows: Rows, column: str) -> Rows:
    """``rows``; CalibrationError where the first ones have numbers alone in ``column``, as another one than meant."""
    seen, numbers = list[tuple[str, Any]](), list[str]()
    for where, row in itertools.islice(rows, _FIRST):
        seen.append((where, row))
        value = row.get(column) if isinstance(row, dict) else None
        if not isinstance(value, str) or (value.strip() and not _NUMBER.fullmatch(value)):
            break
        if value.strip():
            numbers.append(value.strip())
    else:
        if numbers:
            raise CalibrationError(
                f"{seen[0][0]}: the column {column!r} has numbers alone, such as {numbers[0]}, which are not text; of "
                f"{_names(seen[0][1])}, choose one of texts with --field"
            )
    return itertools.chain(seen, rows)


def _task(columns: Sequence[str], row: Any, where: str) -> tuple[str, str]:
    """(what is asked, the answer) of a row with these columns."""
    values: list[Any] = [row.get(name) if isinstance(row, dict) else None for name in columns]
    values[1:-1] = ["" if value is None else value for value in values[1:-1]]
    if not all(isinstance(value, str) for value in values):
        raise CalibrationError(f"{where}: not all of {_listed(columns)} are text; got {shown(row)}")
    *asked, answer = values
    return JOINT.join(filter(None, asked)), answer


def message_of(given: Any, where: str) -> dict[str, Any]:
    """A message as chat templates take it, with all that it has."""
    message = {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else {}
    role, content = message.pop("role", message.pop("from", None)), message.pop("content", message.pop("value", None))
    if isinstance(content, list) and all(isinstance(each, dict) for each in content):
        if any(each.get("type") == "image" for each in content):
            raise CalibrationError(f"{where}: an image; only prune takes some, to calibrate on, as its only text")
        parts = [each.get("text") for each in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    calls = "tool_calls" in message
    if calls:
        message["tool_calls"] = _read(message["tool_calls"])
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_with_objects(each) for each in message["tool_calls"]]
    if not isinstance(role, str) or not (isinstance(content, str) or (calls and content is None)):
        raise CalibrationError(f"{where}: not a message with a role and a content that is text; got {shown(given)}")
    return {"role": _ROLES.get(role, role), "content": content or "", **message}


def _with_objects(call: Any) -> Any:
    """A call of a tool with its arguments as an object, which templates expect; many files have them as JSON text."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_objects(call["function"])}
    if isinstance(call.get("arguments"), str):
        with contextlib.suppress(ValueError):
            if isinstance(read := json.loads(call["arguments"] or "{}"), dict):
                return {**call, "arguments": read}
    return call


def _talk(value: Any) -> list[Any]:
    """The messages of a conversation, which some files have as JSON text; none of what is no conversation."""
    read = _read(value)
    if not (isinstance(read, list) and read and isinstance(read[0], dict)):
        return []
    return read if read is value or read[0].keys() & {"role", "from"} else []  # text can be JSON of anything


def _tools(row: Any, where: str) -> Any:
    """The definitions of tools beside a conversation."""
    tools = _read(row.get("tools")) or None
    if tools is not None and not isinstance(tools, list):
        raise CalibrationError(f"{where}: tools are not a list of definitions; got {shown(tools)}")
    return tools


def _read(value: Any) -> Any:
    """What a list of objects is that is there as JSON text; other values as they are."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _names(row: dict[Any, Any]) -> str:
    """The columns of a row, as many as an error can have."""
    return several([shown(name) if name else "a column without a name" for name in row], _NAMED)


def _listed(columns: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(columns[:-1]), columns[-1]]))
