"""Runs that are parts of a call: how they go, in the words of the whole, and what it adds to their records."""

from collections.abc import Iterable
from pathlib import Path

from niwaki.records.progress import SOON, Progress
from niwaki.records.record import Record
from niwaki.records.wording import estimated
from niwaki.runs.stage import current_session

_NAME = "niwaki.json"


def finished(directory: Path) -> Record:
    """The record of the run whose output is there."""
    return Record.load(directory / _NAME)


def with_notes(record: Record, notes: Iterable[str], directory: Path) -> Record:
    """``record`` with more notes, but for those that it has, which that in the output ``directory`` gets too."""
    notes = [note for note in notes if note not in record.notes]
    record.notes += notes
    if current_session().world.first and (directory / _NAME).exists():
        written = finished(directory)
        written.notes += notes
        written.size, written.loss = record.size, record.loss  # of its last form, as packed
        written.save(directory / _NAME)
    return record


class PartOf(Progress):
    """Tells ``outer`` in a line with a ``name`` what a part of it does, such as one trial of several."""

    def __init__(self, outer: Progress, name: str) -> None:
        self._outer, self._name, self._stage = outer, name, name
        #: How many blocks the part goes through, as far as that is known.
        self.blocks = 0
        self._about = ""

    def status(self, what: str, done: int = 0, count: int = 0) -> None:
        self._outer.status(f"{self._stage}{self._about}: {what}", done, count)

    def note(self, text: str) -> None:
        self._outer.note(text)

    def estimate(self, seconds: float) -> None:
        if seconds >= SOON:
            self._about = f" (about {estimated(seconds)})"
            self._outer.status(f"{self._stage}{self._about}")

    def turn(self, number: int, count: int, stage: str) -> None:
        self._stage = f"{self._name}, {stage}"
        self._outer.status(f"{self._stage}{self._about}")

    def begin(self, record: Record, blocks: int, matrices: int) -> None:
        self.blocks = blocks

    def stage(self, block: int, name: str, steps: int) -> None:
        self._outer.status(f"{self._stage}{self._about}: {name}", block, self.blocks)

    def stopped(self, done: int, blocks: int, where: str = "") -> None:
        self._outer.stopped(done, blocks, ", ".join(filter(None, (self._name, where))))
