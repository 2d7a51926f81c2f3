"""What is said while something runs; imports no torch."""

import time
from collections.abc import Sequence

from niwaki.records.comparison import Cell, Comparison
from niwaki.records.record import FitRecord, HealingRecord, MatrixRecord, Record
from niwaki.records.wording import duration, estimated

#: Seconds that a run may take without saying before that it does.
SOON = 15


class Progress:
    """Receives the progress of anything that takes time. This base class ignores it; subclass it to show it.

    :class:`niwaki.ProgressBar` is one such subclass, the command line has others.
    """

    #: Whether to call ``solving``, for which solvers have to estimate their error.
    wants_steps = False

    def status(self, what: str, done: int = 0, count: int = 0) -> None:
        """Called with what is being done, such as "packing", and how much of it is ``done`` if that is countable."""

    def note(self, text: str) -> None:
        """Called with a note that the user should see."""

    # Of a run, pruning or shrinking.

    def estimate(self, seconds: float) -> None:
        """Called before a run with about how many seconds it will take."""

    def turn(self, number: int, count: int, stage: str) -> None:
        """Called when a stage of a run of several begins: ``stage``, ``number`` of ``count``, from 1."""

    def begin(self, record: Record, blocks: int, matrices: int) -> None:
        """Called when all inputs are read; ``blocks`` with ``matrices`` in total are to come."""

    def stage(self, block: int, name: str, steps: int) -> None:
        """Called when a part of a block begins: "capture", "solve", "fit" or "advance", in ``steps`` steps.

        Before these, if the effort asks for them, come one "sensitivity", an "allocation" for each block and a
        "synthesis"; and, where blocks share matrices, a "sharing" for each block. Structured pruning has an "influence"
        for each block. A "perplexity" for all of them can come before and after all others, and where embeddings are
        put on a grid a "rounding" comes last.
        """

    def step(self) -> None:
        """Called after each step of a part."""

    def solving(self, matrix: str, step: int, steps: int, error: float) -> None:
        """Called after a solver's ``step`` of ``steps``, with the estimated relative error."""

    def solved(self, matrix: MatrixRecord) -> None:
        """Called when a matrix is done."""

    def stopped(self, done: int, blocks: int, where: str = "") -> None:
        """Called when a run ends early with ``done`` of its ``blocks`` on disk; the same call resumes after them.

        ``where`` is the stage, in a run of several, such as "stage 2 of 3, heal".
        """

    def lost(self) -> None:
        """Called when a run is interrupted and nothing of it is kept; the same call starts over."""

    def end(self, record: Record) -> None:
        """Called when the output is in place."""

    def fitted(self, fit: FitRecord) -> None:
        """Called when a block is healed, in healing block by block."""

    def healing(self, record: HealingRecord, share: float, seconds: float) -> None:
        """Called during healing: ``share`` of it is done after ``seconds``, and ``record`` may have a new point."""

    # Of a comparison, which also calls those of its runs.

    def table(self, comparison: Comparison, runs: int) -> None:
        """Called when all texts are read; ``comparison`` has the finished cells, and ``runs`` are to come."""

    def run(self, method: str, pattern: str, done: int, runs: int, expected: Sequence[float]) -> None:
        """Called when a run begins, after ``done`` of ``runs``, with the ``expected`` seconds of all that remain.

        The seconds are 0 where nothing is known. For the dense model, which is measured before the runs, there are
        none.
        """

    def done(self, cell: Cell) -> None:
        """Called when a cell is done and on disk."""

    def paused(self, done: int, missing: int) -> None:
        """Called when a comparison ends early with ``done`` runs on disk; the same call does the ``missing`` ones."""

    def finished(self, comparison: Comparison, left_out: Sequence[tuple[str, str]]) -> None:
        """Called when a comparison is done, except for the (method, pattern) pairs that its time limit ``left_out``."""


# How far a run is and how much time is left, from what it tells its progress; imports no torch.

#: Parts that are not of a block: a walk over all before or after that which prunes, or something else for all.
PLANNING = ("sensitivity", "allocation", "sharing", "synthesis", "influence", "perplexity", "rounding")
#: What those of them are called whose steps are all that they have to do, and not those of a block.
_OF_ALL = {"sensitivity": "planning", "synthesis": "planning", "perplexity": "measuring", "rounding": "rounding"}


class Paced(Progress):
    """Progress that knows how far a run is and how much time is left, by how long the parts of the last block took.

    Before the first block is done the time left comes from the estimate for all of the run. Those that show it have
    :meth:`line` and :meth:`show`.
    """

    def __init__(self) -> None:
        self._notes: set[str] = set()
        self.restart()

    def restart(self) -> None:
        """Forgets how far the run was: another one begins, or another stage of it."""
        self._blocks = self._block = 0
        self._is_planning = False
        self._shares = [0.3, 0.5, 0.2]  # of each part in the time of a block, as in the one before
        self._spent: list[float] = []  # by the parts of this block so far
        self._began = self._part_began = time.monotonic()
        self._part, self._steps, self._done = "", 1, 0
        self._at: tuple[str, float, str] | None = None  # where healing is
        self._end = 0.0  # when all should be done, while nothing better is known

    def line(self, text: str, style: str | None = None) -> None:
        """Prints a line that stays."""

    def show(self) -> None:
        """Brings up to date what is shown of the pace."""

    def note(self, text: str) -> None:
        if text not in self._notes:  # stages, and runs of a comparison, have most of them in common
            self._notes.add(text)
            self.line(f"note: {text}", style="yellow")

    def estimate(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        if seconds >= SOON:
            self.line(f"this takes about {estimated(seconds)}")

    def turn(self, number: int, count: int, stage: str) -> None:
        self.restart()  # the estimate was for all stages

    def begin(self, record: Record, blocks: int, matrices: int) -> None:
        for note in record.notes:
            self.note(note)
        self._blocks, self._began = blocks, time.monotonic()

    def stage(self, block: int, name: str, steps: int) -> None:
        self.end_part()
        planning = name in PLANNING
        if block != self._block or self._is_planning != planning:  # another block, or another walk
            self.end_block()
        if self._is_planning and not planning:
            self._began = time.monotonic()  # the time so far says nothing of what comes
        self._is_planning = planning
        self._block, self._part, self._steps, self._done = block, name, steps, 0
        self._part_began, self._at = time.monotonic(), None
        self.show()

    def step(self) -> None:
        self._done += 1
        self.show()

    def healing(self, record: HealingRecord, share: float, seconds: float) -> None:
        left = f"{duration(seconds * (1 - share) / share)} left" if share else ""
        self._at = "healing", share, left
        self.show()

    def end_part(self) -> None:
        """Ends the part that has begun, if one has."""
        if self._part:
            self._spent.append(time.monotonic() - self._part_began)
        self._part = ""

    def end_block(self) -> None:
        """Ends the block, or the walk over all of them, that has begun."""
        self.seconds_of_block(is_like_others=not self._is_planning)

    def seconds_of_block(self, is_like_others: bool) -> float:
        """The seconds of the block so far; the next one takes as long if this one ``is_like_others``."""
        spent, self._spent = self._spent, []
        total = sum(spent)
        if is_like_others and total > 0:
            self._shares = [seconds / total for seconds in spent]
        return total

    def where(self) -> tuple[str, float, str]:
        """What is at work, the fraction of it that is done, and the time left in words, or ""."""
        if self._at:
            return self._at
        part = min(1.0, self._done / max(1, self._steps))
        rest = self._end - time.monotonic()
        left = f"about {estimated(rest)} left" if rest > 0 else ""
        if self._is_planning:
            what = _OF_ALL.get(self._part, "")
            if not left and part and what not in ("", "planning"):
                left = f"{duration((time.monotonic() - self._part_began) * (1 - part) / part)} left"
            return what or "planning", part if what else (self._block + part) / max(1, self._blocks), left
        done = sum(self._shares[: len(self._spent)]) + sum(self._shares[len(self._spent) :][:1]) * part
        fraction = (self._block + done) / max(1, self._blocks)
        if self._block > 0:
            left = f"{duration((time.monotonic() - self._began) * (1 - fraction) / fraction)} left"
        return f"block {self._block + 1}/{self._blocks}", fraction, left
