"""A sign of life: at once what is being done, and at least every 30 seconds how far it is."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import ClassVar, Self

from rich.console import Console
from rich.status import Status
from rich.text import Text

from niwaki.cli.common import Terminal, out
from niwaki.records.progress import SOON, Progress
from niwaki.records.wording import estimated

#: Seconds without a line after which a log gets one.
INTERVAL = 30.0

#: What is said after an interruption, by what :func:`niwaki.runs.workplace.kept` finds.
_KEPT = {
    "": "stopped: nothing was written; repeat the command to start over",
    "part": "stopped: what is done is kept; repeat the command to resume",
    "output": "stopped, but the result was already written",
}


class Screen(Progress):
    """Says on standard error what is being done, such as "pruning demo": a spinner on a terminal, lines in a log.

    It is there before torch and transformers are imported, which takes seconds. Results go to ``console``. Where a
    command is stopped, the ``output`` tells what is kept; without one it says ``stopped``.
    """

    #: That of the command that runs.
    current: "ClassVar[Screen | None]" = None

    def __init__(
        self,
        what: str,
        console: Console = out,
        *,
        output: str = "",
        stopped: str = "stopped before the result: nothing was written",
    ) -> None:
        self._doing, self._console, self._output, self._when_stopped = what, console, output, stopped
        self._has_ended = False
        self._notes: set[str] = set()
        self._errors = Terminal(stderr=True)
        self._spinner: Status | None = None
        self._ended = threading.Event()
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        if os.environ.get("RANK", "0") != "0":  # of several processes the first one speaks
            return self
        Screen.current = self
        if self._errors.is_terminal:
            self._spinner = self._errors.status(Text(self._doing))
            self._spinner.start()
        else:
            self._say(self.describe())
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.stop_spinner()

    def status(self, what: str, done: int = 0, count: int = 0) -> None:
        self._doing = f"{what} {done}/{count}" if count else what
        self.show()

    def describe(self) -> str:
        """What is being done, in a line."""
        return self._doing

    def show(self) -> None:
        """Brings the spinner up to date."""
        if self._spinner is not None:
            self._spinner.update(Text(self.describe()))

    def stop_spinner(self) -> None:
        """Removes it, for other things to be drawn."""
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None

    @contextlib.contextmanager
    def above(self) -> Iterator[None]:
        """Meanwhile there is no spinner, so that lines can be printed."""
        if self._spinner is not None:
            self._spinner.stop()
        try:
            yield
        finally:
            if self._spinner is not None:
                self._spinner.start()
            self.said()

    def line(self, text: str, style: str | None = None) -> None:
        """Prints a line as it is: no markup, which paths could hold, and no wrapping, which logs do not want."""
        with self.above():
            self._console.print(text, style=style, highlight=False, soft_wrap=True, markup=False)

    def note(self, text: str) -> None:
        if text not in self._notes:  # stages, and runs of a comparison, have most of them in common
            self._notes.add(text)
            self.line(f"note: {text}", style="yellow")

    def estimate(self, seconds: float) -> None:
        if seconds >= SOON:
            self.line(f"this takes about {estimated(seconds)}")

    def last_words(self, text: str) -> None:
        """Ends the display, and says what stays."""
        self.__exit__()
        self._has_ended = True
        self._say(text)

    def lost(self) -> None:
        self.last_words(_KEPT[""])

    def interrupted(self) -> None:
        """Says what stays after an interruption, unless that has been said."""
        if not self._has_ended:
            from niwaki.runs.workplace import kept

            self.last_words(_KEPT[kept(self._output)] if self._output else self._when_stopped)

    def said(self) -> None:
        """To be called after each line: a log gets no other soon."""
        self._last_line = time.monotonic()

    def _say(self, text: str) -> None:
        self._errors.print(text, soft_wrap=True, markup=False)
        self.said()

    def _beat(self) -> None:
        while not self._ended.wait(max(0.0, self._last_line + INTERVAL - time.monotonic())):
            if time.monotonic() >= self._last_line + INTERVAL:
                self._say(self.describe())
