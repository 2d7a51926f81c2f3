"""What is said while something runs; imports no torch."""

from collections.abc import Sequence

from niwaki.records.comparison import Cell, Comparison
from niwaki.records.healing import HealingRecord
from niwaki.records.record import FitRecord, MatrixRecord, Record

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
