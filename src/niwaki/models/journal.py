"""The journal of a run: what was asked for, which blocks are done, and digests of what is on disk."""

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from niwaki.errors import CheckpointError, OutputError, shown
from niwaki.records.data import from_repr
from niwaki.records.record import Record

_PIECE = 1 << 20  # bytes


@dataclass
class Journal:
    """How far a run has come."""

    fingerprint: dict[str, Any]  # what was asked for, by name: a run resumes only if all of it is the same
    digests: list[str] = field(default_factory=list)  # of what each block that is done has on disk; "" for nothing
    zeros: dict[str, int] = field(default_factory=dict)  # that were written, by checkpoint key
    record: str = ""  # when the last block was done, as JSON
    plan: str = ""  # its digest, if there is one
    files: dict[str, str] = field(default_factory=dict)  # of a directory that only has to be moved, their digests
    discarded: bool = False  # that directory, of the first part of a run whose second one is complete

    @property
    def blocks(self) -> int:
        """How many are done and on disk."""
        return len(self.digests)

    @property
    def extent(self) -> str:
        """How much is done, in words."""
        healing = Record.from_json(self.record).healing if self.record else None
        is_whole = healing is not None and healing.method != "blocks"
        return f"{healing.points[-1].tokens:,} tokens" if healing and is_whole else f"{self.blocks} blocks"

    @property
    def complete(self) -> bool:
        """Whether all is written and checked, and only the move into place is missing."""
        return bool(self.files)

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
            if journal.blocks:
                Record.from_json(journal.record)
        except (OSError, ValueError, RecursionError, CheckpointError) as error:
            raise OutputError(f"{path} is not readable as the journal of a run; {hint}remove it") from error
        return journal

    def differences(self, fingerprint: dict[str, Any]) -> list[str]:
        """What was asked for otherwise than in ``fingerprint``, in words."""
        asked = json.loads(json.dumps(fingerprint))
        if asked.keys() != self.fingerprint.keys():
            return ["the command"]
        differing = []
        for name, here in asked.items():
            there = self.fingerprint[name]
            if there != here:
                differing.append(f"{name} ({words})" if (words := _in_words(there, here)) else name)
        return differing


def digests(directory: Path, sync: bool = False) -> dict[str, str]:
    """SHA-256 of each file below ``directory``, by its path there; with ``sync`` they are on disk at the return."""
    return {
        path.relative_to(directory).as_posix(): digest(path, sync)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def digest(path: Path, sync: bool = False) -> str:
    """SHA-256 of a file; with ``sync`` it is on disk at the return."""
    value = hashlib.sha256()
    with path.open("r+b" if sync else "rb") as file:
        while piece := file.read(_PIECE):
            value.update(piece)
        if sync:
            os.fsync(file.fileno())
    return value.hexdigest()


def _in_words(there: Any, here: Any) -> str:
    """How two values of a fingerprint differ: solvers in their names or parameters; "" where nobody could read it."""
    sides = [_parameters(value) for value in (there, here)]
    if all(isinstance(side, dict) for side in sides):
        names = [name for name in dict.fromkeys([*sides[0], *sides[1]]) if sides[0].get(name) != sides[1].get(name)]
        if "name" not in names:
            return ", ".join(f"{name} {_in_words(*(side.get(name) for side in sides))}" for name in names)
        sides = [side.get("name") for side in sides]
    if any(isinstance(side, str) and _is_digest(side) for side in sides):
        return ""
    return "{} there, {} here".format(*("none" if side is None else shown(side).strip("'") for side in sides))


def _parameters(value: Any) -> Any:
    """Those in the ``repr`` of a solver or an effort, with its "name"; other values as they are."""
    if isinstance(value, str) and (match := re.fullmatch(r"(\w+)\(.*\)", value)):
        described = from_repr(value, match[1])
        return {"name": match[1]} if "as written" in described else described
    return value


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _is_digest(value: str) -> bool:
    return len(value) == 64 and set(value) <= set("0123456789abcdef")
