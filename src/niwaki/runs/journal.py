"""The journal of a run: what was asked for, how far it has come, and digests of what is on disk."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from niwaki.errors import CheckpointError, OutputError, shown
from niwaki.records.record import Record
from niwaki.records.wording import counted


@dataclass
class Journal:
    """How far a run has come: which stages are done, and of the one at work which blocks."""

    asked: list[dict[str, Any]]  # of each stage, by name, all that has to be the same to resume
    done: int = 0  # stages
    result: str = ""  # the record of these, as JSON
    files: dict[str, str] = field(default_factory=dict)  # of the last of these, by path, their digests
    # Of the stage at work; of the last stage also when it is done, should its files be damaged before they are moved.
    digests: list[str] = field(default_factory=list)  # of what each block that is done has on disk; "" for nothing
    zeros: dict[str, int] = field(default_factory=dict)  # that were written, by checkpoint key
    record: str = ""  # when the last block was done, as JSON
    plan: str = ""  # its digest, if there is one

    @property
    def blocks(self) -> int:
        """How many blocks of the stage at work are done and on disk."""
        return len(self.digests)

    @property
    def begun(self) -> bool:
        """Whether there is anything to resume from."""
        return bool(self.done or self.digests)

    @property
    def complete(self) -> bool:
        """Whether all is written and checked, and only the move into place is missing."""
        return self.done == len(self.asked)

    @property
    def extent(self) -> str:
        """How much is done, in words."""
        healing = Record.from_json(self.record).healing if self.record else None
        here = f"{healing.points[-1].tokens:,} tokens" if healing and not healing.by_block else f"{self.blocks} blocks"
        if len(self.asked) == 1:
            return here
        return f"{self.done} of {counted(len(self.asked), 'stage')}" + f" and {here}" * (
            self.blocks and not self.complete
        )

    def to_json(self) -> str:
        """JSON text, with a digest of itself."""
        values = asdict(self)
        return json.dumps({**values, "sha256": _digest(values)}) + "\n"

    @classmethod
    def read(cls, path: Path, hint: str = "") -> "Journal":
        """What :meth:`to_json` wrote there (OutputError if it is anything else, which says what to do: ``hint``)."""
        try:
            values = json.loads(path.read_bytes())
            if not isinstance(values, dict) or values.pop("sha256", None) != _digest(values):
                raise ValueError("it is not what was written")
            journal = msgspec.convert(values, cls)
            for record in filter(None, (journal.record, journal.result)):
                Record.from_json(record)
            if not 0 <= journal.done <= len(journal.asked) or not journal.asked:
                raise ValueError("it has more stages done than there are")
        except (OSError, ValueError, RecursionError, CheckpointError) as error:
            raise OutputError(f"{path} is not readable as the journal of a run; {hint}remove it") from error
        return journal

    def differences(self, asked: list[dict[str, Any]]) -> list[str]:
        """In which ways what was asked for differs from ``asked``, in words.

        Only what has begun counts: a stage that is still to come may have other parameters.
        """
        names = [[stage.get("stage") for stage in each] for each in (self.asked, asked)]
        if names[0] != names[1]:
            if None in (*names[0], *names[1]):
                return ["the command"]
            there, here = (", ".join(map(str, each)) for each in names)
            return [f"the stages ({there} there, {here} here)"]
        begun = self.done + bool(self.digests)
        found = []
        for before, now in list(zip(self.asked, asked, strict=True))[: max(1, begun)]:
            where = f"{now['stage']} " if len(asked) > 1 else ""
            found += [f"{where}{each}" for each in _differences(before, now)]
        return found


def _differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    here = json.loads(json.dumps(here))
    if here.keys() != there.keys():
        return ["the command"]
    differing = []
    for name, value in here.items():
        if there[name] != value:
            differing.append(f"{name} ({words})" if (words := _in_words(there[name], value)) else name)
    return differing


def _in_words(there: Any, here: Any) -> str:
    """How two values differ: those with a name in that or in their parameters; "" where nobody could read it."""
    if isinstance(there, dict) and isinstance(here, dict):
        names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
        if "name" not in names:
            return ", ".join(f"{name} {_in_words(there.get(name), here.get(name))}" for name in names)
        there, here = there.get("name"), here.get("name")
    if any(isinstance(side, str) and _is_digest(side) for side in (there, here)):
        return ""
    return "{} there, {} here".format(*("none" if side is None else shown(side).strip("'") for side in (there, here)))


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _is_digest(value: str) -> bool:
    return len(value) == 64 and set(value) <= set("0123456789abcdef")
