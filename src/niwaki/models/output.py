"""The directory that a run writes: it appears when it is complete, and an interrupted run can resume.

Until then ``.OUT.partial`` next to OUT has what is written so far, ``.OUT.partial.plan.safetensors`` what was decided
before, and ``.OUT.partial.json``, the journal, says what was asked for and which blocks are done. If OUT exists already
(an empty directory may be a mount point or somebody's working directory) they are inside it, as ``.partial`` and so on.
A run of two parts, see :mod:`niwaki.pruning.healing.after_pruning`, keeps the result of its first one beside them, as
``.OUT.partial.first`` with a journal of its own, until its own is complete.
"""

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from niwaki import __version__
from niwaki.errors import OutputError, UsageError
from niwaki.files import check_replaced, given_path, locked, nearest, output_errors, set_usual_mode, write_json
from niwaki.models.journal import Journal, digests
from niwaki.records.record import Record

#: What a run is: all that is asked for, or the first or second part of it.
Part = Literal["whole", "first", "second"]
#: Characters that names beside the output have more than its own: ``.OUT.partial.first.json.tmp`` and 8 others.
_LONGER = 32
#: What only records of pruning, of comparisons and of speed have, one each. Those of `niwaki eval` have none.
_PARTS = {"matrices", "cells", "speeds"}


def check_output(source: Path, given: str | Path, *read: Path) -> Path:
    """``given`` as an absolute path; UsageError where it is not empty, may not be written, or is inside the model's.

    ``read`` are directories of other models that the run reads, in which it may not be either.
    """
    out = given_path(given, _LONGER).resolve()
    _, path = _places(out)
    # What is in it may be our own where a run was stopped while it moved its directory.
    if _taken(out, path) and not _finished(path) and not _first_is_done(out):
        raise _exists(out)
    for directory in (source, *read):
        if out.is_relative_to(directory.resolve()):
            whose = "the model's own directory" if directory == source else f"{directory}, which the run reads"
            raise UsageError(f"{out} is inside {whose}; choose another place")
    _check_folder(nearest(out), f"{out} cannot be written")
    return out


def check_record(given: str | Path, part: str = "") -> Path:
    """``given`` as an absolute path; UsageError where it cannot be a file, not be written, or has anything else.

    A record may replace one of the same command: what sets that apart is ``part``, one of ``_PARTS``, or none of them.
    """

    def ours(file: BinaryIO) -> bool:
        if file.read(1) != b"{":  # files of weights are large
            return False
        file.seek(0)
        values: dict[str, Any] = json.load(file)
        return {"command", "model"} <= values.keys() and {part} - {""} == values.keys() & _PARTS

    file = given_path(given, 12).absolute()  # as many more has a temporary file
    _check_folder(nearest(file.parent), f"{given} cannot be the record's file")
    if file.exists() and not file.is_file():
        raise UsageError(f"{given} cannot be the record's file: something else has this name")
    check_replaced(file, ours, "is not a record that this command wrote")
    return file


def _check_folder(folder: Path, what: str) -> None:
    """UsageError, which says ``what``, where nothing can be written to ``folder``."""
    if not folder.is_dir():
        raise UsageError(f"{what}: {folder} is not a directory")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{what}: {folder} may not be written to")


class Workplace:
    """Where a run writes: the ``directory`` that becomes OUT, and the ``journal`` of how far the run has come."""

    def __init__(self, out: Path, fingerprint: dict[str, Any], part: Part = "whole") -> None:
        self.directory, self._path = _places(out, part)
        self._part, self._main = part, _places(out)[1]
        self._first = None if part == "first" else Workplace(out, {}, "first")
        #: Where the plan is kept until the run is done, see :mod:`niwaki.pruning.plan`.
        self.plan = self._path.with_name(f"{self.directory.name}.plan.safetensors")
        #: A folder for what else a run keeps until it is done.
        self.scratch = self._path.with_name(f"{self.directory.name}.scratch")
        self._out, self.journal = out, Journal(fingerprint)

    def resume(self, restart: bool | None) -> None:
        """Takes over what an earlier run left, or with ``restart`` discards it; ``directory`` is there and locked.

        None is for commands that have no such option, which messages name otherwise.
        UsageError where that run was asked for something else, or OUT has other files.
        """
        for stray in self._path.parent.iterdir():
            if stray.name.startswith(self._path.name) and stray != self._path:
                stray.unlink()
        with contextlib.suppress(FileNotFoundError):
            self.plan.stat()  # the longest of our names: one that is too long for the disk shows now
        earlier, hint = None, "" if restart is None else "start over with --restart, or "
        if self._first and self._part == "whole":
            self._first.give_way(restart, hint)
        with contextlib.suppress(OutputError) if restart else contextlib.nullcontext():
            earlier = Journal.read(self._path, hint) if self._path.exists() else None
        if earlier and earlier.complete and self._first:
            self._take_back(earlier)
        differing = earlier.differences(self.journal.fingerprint) if earlier else []
        if earlier and earlier.discarded and not restart and not differing:
            self.journal = earlier
            return
        if earlier and earlier.complete and not any(self.directory.iterdir()):  # it was moved
            if not restart and not differing and digests(self._out) == earlier.files:
                self.journal = earlier
                return
            earlier = None
        if earlier and not restart:
            if differing:
                same = f"ask for the same to resume it, {hint}" if hint else "choose another place, or "
                raise UsageError(
                    f"{self._out} has an unfinished run ({earlier.extent} done) that differs in "
                    f"{'; '.join(differing)}; {same}remove {self._path}"
                )
            if earlier.complete and digests(self.directory) != earlier.files:
                earlier.files = {}
            self.journal = earlier
        else:
            self.forget()
        if _taken(self._out, self._main):
            raise _exists(self._out)

    def give_way(self, restart: bool | None, hint: str) -> None:
        """Removes the first part of another run, for one that is whole; UsageError where it is unfinished."""
        with contextlib.ExitStack() as stack:
            if self.directory.is_dir():
                stack.enter_context(locked(self.directory, self._out))
            if self._path.exists() and not restart and not Journal.read(self._path, hint).discarded:
                raise _another_run(self._out, self._path, hint)
            self._remove()

    def _remove(self) -> None:
        if self.directory.is_dir():
            shutil.rmtree(self.directory)
        self.forget()

    def use_up(self) -> None:
        """Removes the result of a first part, after its journal says so: that of the second one is complete."""
        if self._path.exists():
            self.journal = Journal.read(self._path)
            self.save(discarded=True)
        if self.directory.is_dir():
            shutil.rmtree(self.directory)

    def _take_back(self, journal: Journal) -> None:
        """Undoes a move into an existing directory."""
        names = {name.partition("/")[0] for name in journal.files}
        for path in self._out.iterdir() if self._inside else ():
            if path.name in names and not (self.directory / path.name).exists():
                path.rename(self.directory / path.name)

    @property
    def _inside(self) -> bool:
        return self._out == self.directory.parent

    def clear(self, kept: list[str]) -> None:
        """Removes what an earlier run left, except the files ``kept``, which have the blocks that it has done."""
        keep = {self.directory / name for name in kept} if self.journal.blocks else set()
        with output_errors(self._out):
            for path in sorted(self.directory.rglob("*"), reverse=True):  # what is in a folder before the folder
                if path.is_dir() and not path.is_symlink():
                    if not any(path.iterdir()):
                        path.rmdir()
                elif path not in keep or path.is_symlink() or not path.is_file():
                    path.unlink()

    def save(self, **changes: Any) -> None:
        """Writes the journal with these changes: what it says is done has to be on disk before."""
        journal = dataclasses.replace(self.journal, **changes)
        write_json(self._path, journal.to_json(), sync=True)
        vars(self.journal).update(changes)

    def save_block(self, block: int, digest: str, record: Record) -> None:
        """Writes the journal with ``block`` done, whose weights on disk have this ``digest``."""
        digests = [*self.journal.digests, *[""] * (block + 1 - self.journal.blocks)]
        digests[block] = digest
        self.save(digests=digests, record=record.to_json())

    def finish(self) -> None:
        """Says that all is written and checked: only the move into place is missing."""
        with output_errors(self._out):
            self.save(files=digests(self.directory, sync=True))

    @property
    def has_more_to_come(self) -> bool:
        """Whether the same call has something to resume from, and the directory is not in place."""
        return bool(self.journal.blocks or self.journal.complete) and self._path.exists()

    @property
    def finished_record(self) -> Record:
        """That of a run that only has to be moved, or was."""
        if self.journal.discarded:
            return Record.from_json(self.journal.record)
        return Record.load((self.directory if any(self.directory.iterdir()) else self._out) / "niwaki.json")

    def move(self) -> None:
        """Moves the directory into place."""
        with output_errors(self._out):
            if self._first:
                self._first.use_up()
            if not any(self.directory.iterdir()):
                self.directory.rmdir()
            elif _taken(self._out, self._main):
                raise OutputError(f"{self._out} is no longer empty; move what is in it away and repeat the command")
            elif self._inside:
                for path in sorted(self.directory.iterdir()):
                    path.rename(self._out / path.name)
                self.directory.rmdir()
            else:
                set_usual_mode(self.directory, 0o777)
                self.directory.rename(self._out)
            self.forget()
            if self._first:
                self._first.forget()

    def forget(self) -> None:
        """Removes the plan, the scratch folder and the journal."""
        self.plan.unlink(missing_ok=True)
        if self.scratch.is_dir():
            shutil.rmtree(self.scratch)  # where that fails the journal stays, and the same command does it again
        self._path.unlink(missing_ok=True)


@contextlib.contextmanager
def workplace(
    out: Path, fingerprint: dict[str, Any], restart: bool | None = None, part: Part = "whole"
) -> Iterator[Workplace]:
    """A place to write ``out`` or a ``part`` of it at, with what an earlier run with this ``fingerprint`` left there.

    A run that fails before its first block is done leaves nothing. Later, the same command resumes after the last
    block that is done. UsageError where there is an unfinished run of something else, or one that is still running.
    """
    place = Workplace(out, fingerprint, part)
    directory = place.directory
    made = [each for each in [directory, *directory.parents] if not each.exists()]
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_empty, made)
        with output_errors(out):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.enter_context(locked(directory, out))
            place.resume(restart)
        try:
            yield place
        except BaseException:
            if not place.journal.blocks and not place.journal.complete:
                with contextlib.suppress(OSError):
                    place.forget()
                shutil.rmtree(directory, ignore_errors=True)
            raise


@contextlib.contextmanager
def new_directory(out: Path, fingerprint: dict[str, Any]) -> Iterator[Path | None]:
    """An empty directory that becomes ``out`` at the end; after an error nothing is left of it.

    None where an earlier run with this ``fingerprint`` was stopped while it moved a complete directory into place:
    nothing is left to write. Errors are those of :func:`workplace`.
    """
    with workplace(out, fingerprint) as place:
        if place.journal.complete:
            yield None
        else:
            place.clear([])
            with output_errors(out):
                yield place.directory
            place.finish()
        place.move()


def first_part(out: Path) -> Path:
    """Where the first part of a run for ``out`` has left its result."""
    return _places(out, "first")[0]


def is_begun(out: Path) -> bool:
    """Whether a run for ``out`` has something to resume from, or is complete."""
    return _places(out)[1].exists() or (out / "niwaki.json").exists()


def check_same_run(out: Path) -> None:
    """UsageError where ``out`` has an unfinished run, but not one that has a finished first part."""
    if (journal := _places(out)[1]).exists() and not _finished(_places(out, "first")[1]):
        raise _another_run(out, journal)


def finish_move(out: Path) -> Record | None:
    """Moves the result of a run of two parts into place, of which the first is discarded; its record.

    None where none was interrupted there.
    """
    if not _first_is_done(out):
        return None
    if (path := _places(out)[1]).exists():
        with workplace(out, Journal.read(path).fingerprint, part="second") as place:
            if not place.journal.complete:
                raise OutputError(f"{place.directory} is damaged; start over with --restart")
            place.move()
    else:
        with output_errors(out):
            Workplace(out, {}, "first").forget()
    return Record.load(out / "niwaki.json")


def unfinished_size(out: Path, part: Part = "whole") -> int:
    """Bytes on the disk that an earlier run for ``out``, or the same ``part`` of it, holds."""
    size, (directory, first) = 0, (_places(out, each)[0] for each in (part, "first"))
    with contextlib.suppress(OSError):  # the run may be going on
        for file in (out if out.exists() and part != "first" else directory).rglob("*"):
            if part == "first" or first not in file.parents:
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


def _places(out: Path, part: Part = "whole") -> tuple[Path, Path]:
    """(the directory to write to, the journal)."""
    first = ".first" if part == "first" else ""
    beside = (out.parent / f".{out.name}.partial{each}.json" for each in ("", ".first"))
    inside = out.is_dir() and not any(path.exists() for path in beside)
    name, parent = (f".partial{first}", out) if inside else (f".{out.name}.partial{first}", out.parent)
    return parent / name, parent / f"{name}.json"


def _taken(out: Path, journal: Path) -> bool:
    """Whether there is anything at ``out`` but what belongs to ``journal``."""
    if not out.is_dir():
        return out.exists()
    return any(not path.name.startswith(journal.stem) for path in out.iterdir())


def _exists(out: Path) -> UsageError:
    return UsageError(f"{out} exists and is not an empty directory; choose another or remove it")


def _finished(path: Path) -> bool:
    """Whether the journal is that of an earlier run that only has to move its directory."""
    with contextlib.suppress(OutputError):
        return path.exists() and Journal.read(path).complete
    return False


def _first_is_done(out: Path) -> bool:
    """Whether a run of two parts is complete, and was interrupted while it was moved into place."""
    journal = _places(out, "first")[1]
    return _finished(journal) and Journal.read(journal).discarded


def _another_run(out: Path, journal: Path, hint: str = "start over with --restart, or ") -> UsageError:
    return UsageError(
        f"{out} has an unfinished run that was asked for something else; ask for the same to resume it, {hint}remove "
        f"{journal}"
    )


def _remove_empty(directories: list[Path]) -> None:
    """Removes those that are empty: others may have put something there."""
    for directory in directories:
        with contextlib.suppress(OSError):
            directory.rmdir()
