"""What all commands need: the screen, quiet libraries, a session."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from niwaki.errors import OutputError
from niwaki.records.wording import printable

if TYPE_CHECKING:
    from niwaki.models.processes import World


class Terminal(Console):
    """A console on which no text, such as a name from a hostile model, can move the cursor: control codes are shown.

    No emoji: ":m:" is a part of n:m here. Where the output is a file, lines are as long as they need to be.
    """

    def __init__(self, stderr: bool = False) -> None:
        stream = sys.stderr if stderr else sys.stdout
        super().__init__(highlight=False, emoji=False, stderr=stderr, width=None if stream.isatty() else 160)

    def print(self, *objects: Any, **how: Any) -> None:
        with writing(self.file, messages=self.stderr):
            super().print(*objects, **how)

    def on_broken_pipe(self) -> None:
        raise  # rich calls this where it handles the error, and would end the program

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


out = Terminal()


@contextlib.contextmanager
def writing(stream: IO[str], messages: bool = False) -> Iterator[None]:
    """A ``stream`` that fails gets nothing more; without its results a command ends, without ``messages`` not."""
    try:
        yield
    except OSError as error:
        silence(stream)
        if isinstance(error, BrokenPipeError) and not messages:
            raise SystemExit(1) from error  # as with "| head", which has what it wants
        if not messages:
            raise OutputError(f"standard output cannot be written: {error.strerror}") from error


def silence(stream: IO[str]) -> None:
    """Nothing is written to ``stream`` any more, also not what is in its buffer, at the exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def names(text: str) -> list[str]:
    """The names in a list such as "wanda, continuation"."""
    return [part.strip() for part in text.split(",") if part.strip()]


def record_file(given: str | None, part: str = "") -> Path | None:
    """The file of --record, checked before the work begins; None in all processes but the first.

    ``part`` sets such records apart, see :func:`niwaki.runs.workplace.check_record`.
    """
    from niwaki.runs.stage import current_session
    from niwaki.runs.workplace import check_record

    return check_record(given, part) if given is not None and current_session().world.first else None


def written(path: str | Path) -> None:
    """Prints where the result is."""
    out.print(f"written to {path}", soft_wrap=True, markup=False)


def quiet_libraries() -> None:
    """Keeps libraries from printing about themselves, which would tear the progress bar apart."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for name in ("huggingface_hub", "datasets"):  # each retry of a hub out of reach is a line
        logging.getLogger(name).setLevel(logging.ERROR)
    # It prints all of a configuration that it then raises an error for.
    logging.getLogger("transformers.configuration_utils").setLevel(logging.CRITICAL)
    # On a GPU: it has a workspace for each stream, and finds the context that a thread begins without.
    warnings.filterwarnings("ignore", r"(?is).*\bcublas\b")


@contextlib.contextmanager
def in_session(world: World | None = None) -> Iterator[None]:
    """What is done within knows the command line and the processes; first torch and transformers are imported."""
    quiet_libraries()
    from niwaki.runs.stage import session

    with session(shlex.join(["niwaki", *sys.argv[1:]]), world):
        yield
