"""What a run tells about itself while it runs; imports no torch."""

from __future__ import annotations

from niwaki.record import MatrixRecord, Record


class Progress:
    """Is told how a run goes. This one ignores it; the command line has one that draws.

    Attributes:
        wants_steps: Whether to call ``solving``, for which solvers have to estimate their error.
    """

    wants_steps = False

    def begin(self, record: Record, blocks: int, matrices: int) -> None:
        """All inputs are read, ``blocks`` with ``matrices`` in total to come."""

    def stage(self, block: int, name: str, steps: int) -> None:
        """A part of a block begins: "capture", "solve", "fit" or "advance", in so many steps.

        Before all of them come, where the effort asks for it, one "sensitivity", an "allocation" for each block
        and a "synthesis".
        """

    def step(self) -> None:
        """One step of the stage is done."""

    def solving(self, matrix: str, step: int, steps: int, error: float) -> None:
        """The solver is at ``step`` of ``steps`` with this estimated relative error."""

    def solved(self, matrix: MatrixRecord) -> None:
        """A matrix is done."""

    def note(self, text: str) -> None:
        """Something that the user should know."""

    def stopped(self, done: int, blocks: int) -> None:
        """The run ends early, with ``done`` of the ``blocks`` to prune on disk; the same call goes on with them."""

    def end(self, record: Record) -> None:
        """The output is in place."""
