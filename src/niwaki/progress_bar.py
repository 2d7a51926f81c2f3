"""A bar for notebooks and for one's own programs; the command line has a screen of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tqdm.auto import tqdm

from niwaki.records.comparison import Cell, Comparison
from niwaki.records.progress import SOON, Pace, Progress
from niwaki.records.record import HealingRecord, Record
from niwaki.records.wording import estimated

#: Seconds from one drawing to the next.
_INTERVAL = 0.1
_FORMAT = "{desc}: {percentage:3.0f} %|{bar}| {elapsed}{postfix}"


class ProgressBar(Progress):
    """A progress bar for Jupyter and terminals, drawn by tqdm: hand it to any function that takes ``progress``.

    For example ``niwaki.prune("demo", "out", 0.6, progress=niwaki.ProgressBar())``. A first line says about how long
    the run will take. The bar names the current part and the time left, and notes are printed above it. The same bar
    can be used for one run after another.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._drawn = 0.0
        self._pace, self._prefix = Pace(), ""
        self._is_comparison = False
        self._notes: set[str] = set()

    def status(self, what: str, done: int = 0, count: int = 0) -> None:
        self._show(what, done / count if count else 0.0)

    def note(self, text: str) -> None:
        if text not in self._notes:  # stages have most of them in common
            self._notes.add(text)
            tqdm.write(f"note: {text}")

    def estimate(self, seconds: float) -> None:
        self._pace.estimate(seconds)
        if seconds >= SOON and not self._is_comparison:
            tqdm.write(f"this takes about {estimated(seconds)}")

    def turn(self, number: int, count: int, stage: str) -> None:
        self._pace = Pace()  # the estimate was for all stages
        self._prefix = f"stage {number}/{count}, {stage}: "

    def begin(self, record: Record, blocks: int, matrices: int) -> None:
        for note in record.notes:
            self.note(note)
        self._pace.begin(blocks)

    def stage(self, block: int, name: str, steps: int) -> None:
        self._pace.end_part()
        if self._pace.is_next(block, name):
            self._pace.end_block(is_like_others=not self._pace.is_planning)
        self._pace.stage(block, name, steps)
        self._show_pace()

    def step(self) -> None:
        self._pace.step()
        self._show_pace()

    def healing(self, record: HealingRecord, share: float, seconds: float) -> None:
        self._pace.healing(share, seconds)
        self._show_pace()

    def table(self, comparison: Comparison, runs: int) -> None:
        self._is_comparison = True

    def run(self, method: str, pattern: str, done: int, runs: int, expected: Sequence[float]) -> None:
        self._pace, self._prefix = Pace(), f"run {done + 1}/{runs}, {f'{method} {pattern}'.strip()}: "

    def done(self, cell: Cell) -> None:
        tqdm.write(str(cell))

    def stopped(self, done: int, blocks: int, where: str = "") -> None:
        self._close()

    def lost(self) -> None:
        self._close()

    def paused(self, done: int, missing: int) -> None:
        self._close()

    def end(self, record: Record) -> None:
        if not self._is_comparison:  # which has more runs
            self._show("done", 1.0)
            self._close()

    def finished(self, comparison: Comparison, left_out: Sequence[tuple[str, str]]) -> None:
        self._close()

    def _show_pace(self) -> None:
        where, fraction, left = self._pace.where()
        self._show(where, fraction, left)

    def _show(self, what: str, fraction: float, left: str = "") -> None:
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
        self._bar, self._is_comparison, self._notes = None, False, set()
        self._pace, self._prefix = Pace(), ""
