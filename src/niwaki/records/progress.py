"""What is said while something runs; imports no torch."""

from collections.abc import Sequence

from niwaki.records.comparison import Cell, Comparison
from niwaki.records.healing import HealingRecord
from niwaki.records.record import FitRecord, MatrixRecord, Record

#: Seconds that a run may take without saying before that it does.
SOON = 15


class Progress:
    """Receives how anything that takes its time goes. This one ignores it; the command line has some that draw."""

    #: Whether to call ``solving``, for which solvers have to estimate their error.
    wants_steps = False

    def status(self, what: str, done: int = 0, count: int = 0) -> None:
        """What is being done now, such as "packing", and how far that is where it can be counted."""

    def note(self, text: str) -> None:
        """Something that the user should know."""

    # Of a run, pruning or shrinking.

    def estimate(self, seconds: float) -> None:
        """All that comes takes about this long."""

    def turn(self, number: int, count: int, stage: str) -> None:
        """It is the turn of ``stage``, ``number`` of the ``count`` of a run of several, from 1."""

    def begin(self, record: Record, blocks: int, matrices: int) -> None:
        """All inputs are read, ``blocks`` with ``matrices`` in total to come."""

    def stage(self, block: int, name: str, steps: int) -> None:
        """A part of a block begins: "capture", "solve", "fit" or "advance", in ``steps`` steps.

        Before all of them come, where the effort asks for it, one "sensitivity", an "allocation" for each block and a
        "synthesis", and where blocks share matrices a "sharing" for each block; with structured pruning an "influence"
        for each block and, also after all others, a "perplexity".
        """

    def step(self) -> None:
        """One step of the stage is done."""

    def solving(self, matrix: str, step: int, steps: int, error: float) -> None:
        """The solver is at ``step`` of ``steps`` with this estimated relative error."""

    def solved(self, matrix: MatrixRecord) -> None:
        """A matrix is done."""

    def stopped(self, done: int, blocks: int, where: str = "") -> None:
        """The run ends early, with ``done`` of the ``blocks`` to prune on disk; the same call resumes after them.

        ``where`` is the stage of a run of several, such as "stage 2 of 3, heal".
        """

    def lost(self) -> None:
        """The run is interrupted, and nothing of it is kept; the same call starts over."""

    def end(self, record: Record) -> None:
        """The output is in place."""

    def fitted(self, fit: FitRecord) -> None:
        """A block is healed."""

    def healing(self, record: HealingRecord, share: float, seconds: float) -> None:
        """``share`` of a training is done after ``seconds``; ``record`` may have a new point."""

    # Of a comparison, which also calls those of its runs.

    def table(self, comparison: Comparison, runs: int) -> None:
        """All texts are read; ``comparison`` has what is there already, ``runs`` are to come."""

    def run(self, method: str, pattern: str, done: int, runs: int, expected: Sequence[float]) -> None:
        """A run begins after ``done`` of ``runs``; the seconds that it and those after it will take.

        0 where nothing is known; no seconds at all for the dense model, which is measured before the runs.
        """

    def done(self, cell: Cell) -> None:
        """A cell is done, and on disk."""

    def paused(self, done: int, missing: int) -> None:
        """The comparison ends early with ``done`` runs on disk; the same call does those that are missing."""

    def finished(self, comparison: Comparison, left_out: Sequence[tuple[str, str]]) -> None:
        """All is done but what the limit of time ``left_out``."""
