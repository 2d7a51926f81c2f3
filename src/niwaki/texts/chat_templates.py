"""Chat templates, which are programs of a model's maker: run by a process of their own, with limits.

One that does not end, or takes all memory, cannot be stopped within this process: ``'a' * 10**10`` is a single step.
"""

import contextlib
import functools
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from niwaki.errors import first_line

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
    """As :func:`rendered_each`; TemplateError where it refuses one."""
    texts = list[str]()
    for text in rendered_each(template, conversations, special, ask=ask):
        if isinstance(text, TemplateError):
            raise text
        texts.append(text)
    return texts


def rendered_each(
    template: str, conversations: Sequence[Sequence[Mapping[str, Any]]], special: Mapping[str, Any], *, ask: bool
) -> list[str | TemplateError]:
    """What ``template`` makes of each of ``conversations``; with ``ask`` up to where the model's answer begins.

    ``special`` are the names and texts of special tokens. Of one that it refuses that is the error. TemplateError is
    raised where it takes too long, too much memory, or makes too much of all.
    """
    if len(template) > _LONGEST:
        raise TemplateError(0, f"it has {len(template):,} characters, and at most {_LONGEST:,} are allowed")
    seconds = math.ceil(_SECONDS + _SECONDS_EACH * len(conversations))
    asked = {"template": template, "conversations": conversations, "special": special, "ask": ask, "seconds": seconds}
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
    for messages in asked["conversations"]:
        try:
            made: Any = render_jinja_template(
                conversations=[messages],
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
