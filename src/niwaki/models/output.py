"""The directory that a run writes: it appears when it is complete, and an interrupted run can resume.

Until then ``.OUT.partial`` next to OUT has what is written so far, and ``.OUT.partial.json``, the journal, says what
was asked for and which blocks are done. If OUT exists already (an empty directory may be a mount point or somebody's
working directory) both are inside it, as ``.partial`` and ``.partial.json``.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from niwaki import __version__
from niwaki.errors import OutputError, UsageError
from niwaki.files import given_path, locked, nearest, output_errors, set_usual_mode, write_json
from niwaki.records.record import Record

#: Characters that names of files beside the output have more than its own: ``.OUT.partial.json`` and 8 of a temporary.
_LONGER = 22


@dataclass
class Journal:
    """How far a run has come."""

    fingerprint: dict[str, Any]  # what was asked for, by name: a run resumes only if all of it is the same
    blocks: int = 0  # that are done and on disk
    zeros: dict[str, int] = field(default_factory=dict)  # that were written, by checkpoint key
    record: str = ""  # so far, as JSON
    complete: bool = False  # all is written and checked; only the move into place is missing


def check_output(source: Path, given: str | Path) -> Path:
    """``given`` as an absolute path; UsageError where it is not empty, may not be written, or is inside the model's."""
    out = given_path(given, _LONGER).resolve()
    directory, journal = _places(out)
    taken = out.exists() and (
        # A temporary file of the journal is ours too.
        not out.is_dir() or any(path != directory and not path.name.startswith(journal.name) for path in out.iterdir())
    )
    # What is in it is our own where a run was stopped while it moved its directory.
    moving = _finished(journal) is not None and (directory.name == ".partial" or not directory.exists())
    if taken and not moving:
        raise UsageError(f"{out} exists and is not an empty directory; choose another or remove it")
    if source.resolve() in [out, *out.parents]:
        raise UsageError(f"{out} is inside the model's own directory; choose another place")
    _check_folder(nearest(out), f"{out} cannot be written")
    return out


def check_record(given: str | Path) -> Path:
    """``given`` as an absolute path; UsageError where it cannot be a file, or not be written."""
    file = given_path(given, 8).absolute()  # as many more has a temporary file
    _check_folder(nearest(file.parent), f"{given} cannot be the record's file")
    if file.exists() and not file.is_file():
        raise UsageError(f"{given} cannot be the record's file: something else has this name")
    return file


def _check_folder(folder: Path, what: str) -> None:
    """UsageError, which says ``what``, where nothing can be written to ``folder``."""
    if not folder.is_dir():
        raise UsageError(f"{what}: {folder} is not a directory")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{what}: {folder} may not be written to")


class Workplace:
    """Where a run writes: the ``directory`` that becomes OUT, and the ``journal`` of how far the run has come."""

    def __init__(self, out: Path, journal: Journal) -> None:
        self.directory, self._path = _places(out)
        self._out, self.journal = out, journal

    def clear(self, shards: list[str]) -> None:
        """Removes what an earlier run left, except the shards, or folders, that hold the blocks it has done."""
        kept = {*shards, self.plan.name} if self.journal.blocks else set()
        with output_errors(self._out):
            for path in self.directory.iterdir():
                if path.is_dir() and not path.is_symlink() and path.name not in kept:
                    shutil.rmtree(path)
                elif path.name not in kept:
                    path.unlink()

    def save(self, **changes: Any) -> None:
        """Writes the journal with these changes: what it says is done has to be on disk before."""
        journal = dataclasses.replace(self.journal, **changes)
        write_json(self._path, json.dumps(dataclasses.asdict(journal)) + "\n", sync=True)
        vars(self.journal).update(changes)

    @property
    def plan(self) -> Path:
        """Where the plan is kept until the run is done, see :mod:`niwaki.pruning.plan`."""
        return self.directory / "plan.safetensors"

    @property
    def has_more_to_come(self) -> bool:
        """Whether blocks are done and kept, and the directory is not in place."""
        return self.journal.blocks > 0 and self._path.exists()

    def move(self) -> None:
        """Moves the directory into place."""
        with output_errors(self._out):
            if self._out == self.directory.parent:
                for path in sorted(self.directory.iterdir()):
                    path.rename(self._out / path.name)
                self.directory.rmdir()
            elif self.directory.exists():
                set_usual_mode(self.directory, 0o777)
                self.directory.rename(self._out)
            self._path.unlink()


@contextlib.contextmanager
def workplace(out: Path, fingerprint: dict[str, Any], restart: bool = False) -> Iterator[Workplace]:
    """A place to write ``out`` at, with what an earlier run with the same ``fingerprint`` left there.

    A run that fails before its first block is done leaves nothing. Later, the same command resumes after the last
    block that is done. UsageError where there is an unfinished run of something else, or one that is still running.
    """
    directory, path = _places(out)
    made = [parent for parent in [path.parent, *path.parent.parents] if not parent.exists()]
    with contextlib.ExitStack() as stack:
        with output_errors(out):
            path.parent.mkdir(parents=True, exist_ok=True)
            moved = path.exists() and not directory.exists()  # stopped in its last step
            directory.mkdir(mode=0o700, exist_ok=True)
            stack.enter_context(locked(directory, out))
            for stray in path.parent.iterdir():  # temporary files of the journal
                if stray.name.startswith(path.name) and stray != path:
                    stray.unlink()
            journal = None if restart else _journal_to_resume(path, out, fingerprint)
            if journal is None:
                path.unlink(missing_ok=True)
            elif moved:
                directory.rmdir()
        place = Workplace(out, journal or Journal(fingerprint))
        try:
            yield place
        except BaseException:
            if place.journal.blocks == 0:
                path.unlink(missing_ok=True)
                shutil.rmtree(directory, ignore_errors=True)
                with contextlib.suppress(OSError):  # others may have put something there meanwhile
                    for parent in made:
                        parent.rmdir()
            raise


@contextlib.contextmanager
def new_directory(out: Path, fingerprint: dict[str, Any]) -> Iterator[Path | None]:
    """An empty directory that becomes ``out`` at the end; after an error nothing is left of it.

    None where an earlier run with this ``fingerprint`` was stopped while it moved a complete directory into place:
    nothing is left to write. Errors are those of :func:`workplace`, but for other unfinished runs, which it replaces.
    """
    earlier = _finished(_places(out)[1])
    with workplace(out, fingerprint, restart=earlier is None or earlier.fingerprint != fingerprint) as place:
        if place.journal.complete:
            yield None
        else:
            place.clear([])
            yield place.directory
            place.save(complete=True)
        place.move()


def unfinished_size(out: Path) -> int:
    """Bytes on the disk that an earlier run for ``out`` holds."""
    size = 0
    with contextlib.suppress(OSError):  # the run may be going on
        for file in (out if out.exists() else _places(out)[0]).rglob("*"):
            status = file.lstat()
            size += getattr(status, "st_blocks", status.st_size // 512) * 512  # a file may have holes
    return size


def write_config(directory: Path, values: dict[str, Any], record: Record) -> None:
    """``config.json``: ``values`` with ``pruning_config``, an extra key that transformers keeps and ignores.

    Not ``quantization_config``: with a sparsity format there, transformers loads random weights.
    """
    pruning = {
        "library": "niwaki",
        "version": __version__,
        **{name: getattr(record, name) for name in ("method", "solver", "effort", "mask_from", "pattern")},
        "sparsity": round(record.sparsity, 6),
        **{name: value for name in ("quantization", "blocks") if (value := getattr(record, name))},
    }
    write_json(directory / "config.json", json.dumps({**values, "pruning_config": pruning}, indent=2) + "\n")


def _places(out: Path) -> tuple[Path, Path]:
    """(the directory to write to, the journal)."""
    inside = out.is_dir() and not (out.parent / f".{out.name}.partial.json").exists()
    name, parent = (".partial", out) if inside else (f".{out.name}.partial", out.parent)
    return parent / name, parent / f"{name}.json"


def _read_journal(path: Path) -> Journal:
    try:
        return Journal(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise OutputError(f"{path} is not readable as the journal of a run; start over with --restart") from error


def _finished(path: Path) -> Journal | None:
    """The journal of an earlier run that only has to move its directory, if there is one."""
    with contextlib.suppress(OSError, OutputError):
        if (journal := _read_journal(path)).complete:
            return journal
    return None


def _journal_to_resume(path: Path, out: Path, fingerprint: dict[str, Any]) -> Journal | None:
    """The journal of an earlier run, if there is one; UsageError where it was asked for something else."""
    if not path.exists():
        return None
    journal, asked = _read_journal(path), json.loads(json.dumps(fingerprint))
    differing = []
    for name in dict.fromkeys([*asked, *journal.fingerprint]):
        there, here = journal.fingerprint.get(name), asked.get(name)
        sums = any(re.fullmatch("[0-9a-f]{64}", str(value)) for value in (there, here))  # SHA-256, which says nothing
        if there != here:
            differing.append(name if sums else f"{name} ({there} there, {here} here)")
    if differing:
        raise UsageError(
            f"{out} has an unfinished run ({journal.blocks} blocks done) that differs in {'; '.join(differing)}; ask "
            "for the same to resume it, or start over with --restart"
        )
    return journal
