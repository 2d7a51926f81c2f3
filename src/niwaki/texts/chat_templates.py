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
    """What ``template`` makes of each of ``conversations``; with ``ask`` up to where the model's answer begins.

    ``special`` are the names and texts of special tokens. TemplateError where it fails, takes too long, or makes too
    much of one.
    """
    if len(template) > _LONGEST:
        raise TemplateError(0, f"it has {len(template):,} characters, and at most {_LONGEST:,} are allowed")
    seconds = math.ceil(_SECONDS + _SECONDS_EACH * len(conversations))
    asked = {"template": template, "conversations": conversations, "special": special, "ask": ask, "seconds": seconds}
    return [*_rendered(json.dumps(asked, default=str), len(conversations), seconds)]


def verbatim(text: str) -> str:
    """A template that makes ``text`` of everything."""
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}"


@functools.lru_cache(maxsize=4)
def _rendered(asked: str, count: int, seconds: int) -> tuple[str, ...]:
    """The answers of the other process to ``asked``, which has ``count`` conversations."""
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
    texts = list[str]()
    for line in said.splitlines():
        try:
            answer = json.loads(line)
        except ValueError:  # a line that was not finished
            break
        if "error" in answer:
            raise TemplateError(len(texts), answer["error"])
        texts.append(answer["text"])
    if len(texts) < count:
        raise TemplateError(len(texts), ended)
    return tuple(texts)


def _render(asked: dict[str, Any]) -> Iterator[str]:
    """What the template makes of each conversation, in the process with limits."""
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
        made: Any = render_jinja_template(
            conversations=[messages],
            chat_template=asked["template"],
            add_generation_prompt=asked["ask"],
            **asked["special"],
        )
        text: str = made[0][0] if isinstance(made, tuple) else made[0]
        left -= len(text)
        if len(text) > _LONGEST or left < 0:
            raise ValueError(f"it makes {len(text):,} characters of a conversation, more than are allowed")
        yield text


def _main() -> None:
    try:
        for text in _render(json.load(sys.stdin)):
            _say({"text": text})
    except MemoryError:
        _say({"error": f"it takes more than {_MEMORY / 2**30:.0f} GiB"})
    except Exception as error:  # of the template
        _say({"error": first_line(error)[:200]})


def _say(answer: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _main()
