"""A bar for notebooks and for one's own programs; the command line has a screen of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tqdm.auto import tqdm

from niwaki.records.comparison import Cell, Comparison
from niwaki.records.progress import Paced
from niwaki.records.record import Record

#: Seconds from one drawing to the next.
_INTERVAL = 0.1
_FORMAT = "{desc}: {percentage:3.0f} %|{bar}| {elapsed}{postfix}"


class ProgressBar(Paced):
    """A progress bar for Jupyter and terminals, drawn by tqdm: hand it to any function that takes ``progress``.

    For example ``niwaki.prune("demo", "out", 0.6, progress=niwaki.ProgressBar())``. A first line says about how long
    the run will take. The bar names the current part and the time left, and notes are printed above it. The same bar
    can be used for one run after another.
    """

    def __init__(self) -> None:
        super().__init__()
        self._bar: Any = None
        self._drawn = 0.0
        self._prefix = ""
        self._is_comparison = False

    def line(self, text: str, style: str | None = None) -> None:
        tqdm.write(text)

    def show(self) -> None:
        self._draw(*self.where())

    def status(self, what: str, done: int = 0, count: int = 0) -> None:
        self._draw(what, done / count if count else 0.0)

    def estimate(self, seconds: float) -> None:
        if self._is_comparison:  # which has more runs
            self._end = time.monotonic() + seconds
        else:
            super().estimate(seconds)

    def turn(self, number: int, count: int, stage: str) -> None:
        super().turn(number, count, stage)
        self._prefix = f"stage {number}/{count}, {stage}: "

    def table(self, comparison: Comparison, runs: int) -> None:
        self._is_comparison = True

    def run(self, method: str, pattern: str, done: int, runs: int, expected: Sequence[float]) -> None:
        self.restart()
        self._prefix = f"run {done + 1}/{runs}, {f'{method} {pattern}'.strip()}: "

    def done(self, cell: Cell) -> None:
        self.line(str(cell))

    def stopped(self, done: int, blocks: int, where: str = "") -> None:
        self._close()

    def lost(self) -> None:
        self._close()

    def paused(self, done: int, missing: int) -> None:
        self._close()

    def end(self, record: Record) -> None:
        if not self._is_comparison:
            self._draw("done", 1.0)
            self._close()

    def finished(self, comparison: Comparison, left_out: Sequence[tuple[str, str]]) -> None:
        self._close()

    def _draw(self, what: str, fraction: float, left: str = "") -> None:
        now = time.monotonic()
        if self._bar is None:
            self._bar = tqdm(total=1.0, bar_format=_FORMAT)
        elif now < self._drawn + _INTERVAL and fraction < 1:
            return
        self._drawn = now
        self._bar.n = fraction
        self._bar.set_description_str(self._prefix + what, refresh=False)
        self._bar.set_postfix_str(left)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar, self._is_comparison, self._notes, self._prefix = None, False, set(), ""
        self.restart()
