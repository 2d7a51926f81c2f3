"""The directory in which a run works until its output is complete, and from which an interrupted run resumes.

For an output OUT that is ``.OUT.partial`` next to it. If OUT exists already (an empty directory may be a mount point or
somebody's working directory) it is ``OUT/.partial``. Beside it is ``.OUT.partial.json``, the journal: what was asked
for, which stages are done, and which blocks of the one at work (:mod:`.journal`). In it are:

* ``1``, ``2`` and so on: the model that each stage writes; the one before it is there as long as it is read;
* ``plan.safetensors`` and ``scratch``: what the stage at work keeps besides.

The last stage's directory becomes OUT, and then all of this goes, the journal at the very end.
"""

import contextlib
import dataclasses
import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from niwaki.errors import CheckpointError, OutputError, UsageError, shown
from niwaki.files import (
    GGUF,
    check_replaced,
    digests,
    given_path,
    locked,
    nearest,
    output_errors,
    replace_file,
    set_usual_mode,
)
from niwaki.records.record import Record
from niwaki.records.wording import counted

# The journal of a run: what was asked for, how far it has come, and digests of what is on disk.


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
    if any(isinstance(side, str) and re.fullmatch("[0-9a-f]{64}", side) for side in (there, here)):
        return ""
    return "{} there, {} here".format(*("none" if side is None else shown(side).strip("'") for side in (there, here)))


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


#: Characters that the name of a workplace, and of a file that is being written, has more than that of the output.
_LONGER = 32
#: The folder of a workplace for what a stage keeps besides its output.
_SCRATCH = "scratch"
#: What only records of pruning, of comparisons and of speed have, one each. Those of `niwaki eval` have none.
_PARTS = {"matrices", "cells", "speeds"}


def check_output(source: Path | None, given: str | Path, *read: Path) -> Path:
    """``given`` as an absolute path; UsageError where it is not empty, may not be written, or is inside the model's.

    It may also not be called like a file for llama.cpp, and no other process may be writing there, be it by a run or by
    trials. ``source`` is the model's directory, None where that is not here yet; ``read`` are directories of other
    models that the run reads, in which it may not be either.
    """
    out = given_path(given, _LONGER).resolve()
    if out.suffix.lower() == GGUF and not out.is_dir():
        raise UsageError(
            f"{given} would be a directory, with the file for llama.cpp in it; give it a name without {GGUF}, such as "
            f"{Path(given).with_suffix('')}"
        )
    path = _place(out)
    # What is in it may be our own where a run was stopped while it moved its directory.
    if _taken(out, path) and not is_complete(out):
        raise _exists(out)
    for place in filter(Path.is_dir, (path, trials_place(out))):
        with output_errors(out), locked(place, out, shared=True):
            pass
    for directory in filter(None, (source, *read)):
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

    file = check_file(given)
    check_replaced(file, ours, "is not a record that this command wrote")
    return file


def check_file(given: str | Path) -> Path:
    """``given`` as an absolute path; UsageError where no record can be written to it."""
    file = given_path(given, 12).absolute()  # as many more has a temporary file
    _check_folder(nearest(file.parent), f"{given} cannot be the record's file")
    if file.exists() and not file.is_file():
        raise UsageError(f"{given} cannot be the record's file: something else has this name")
    return file


def check_comparison(out: Path, model: Path, source: Path | None) -> None:
    """Raises UsageError unless ``out`` may have a comparison of ``model``.

    ``source`` is the model's directory, None where that is not here yet.
    """
    if out == model.resolve():  # the next cell would find it, and not the model
        raise UsageError(f"{out} is what the model is called; choose another directory")
    if source and source.resolve() in [out, *out.parents]:
        raise UsageError(f"{out} is inside the model's own directory; choose another place")
    with output_errors(out):
        # A kill may have left a temporary file of compare.json, and nothing else.
        there = [path.name for path in out.iterdir()] if out.is_dir() else [""] if out.exists() else []
        if "compare.json" not in there and not all(name.startswith("compare.json") for name in there):
            raise UsageError(f"{out} exists and has no comparison to resume; choose another directory")
        for folder in (out / "models", out / "records"):
            if os.path.lexists(folder) and not folder.is_dir():
                raise UsageError(f"{folder} is in the way of a directory; move it away")


def _check_folder(folder: Path, what: str) -> None:
    """UsageError, which says ``what``, where nothing can be written to ``folder``."""
    if not folder.is_dir():
        raise UsageError(f"{what}: {folder} is not a directory")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{what}: {folder} may not be written to")


class Workplace:
    """Where a run for ``out`` works, and the ``journal`` of how far its stages have come that were ``asked`` for."""

    def __init__(self, out: Path, asked: list[dict[str, Any]]) -> None:
        self.path = _place(out)
        #: Where what the stage at work decides before its blocks is kept, see :mod:`niwaki.pruning.plan`.
        self.plan = self.path / "plan.safetensors"
        self.scratch = self.path / _SCRATCH
        self._out, self._journal = out, _journal(self.path)
        self.journal = Journal(asked)

    @property
    def directory(self) -> Path:
        """What the stage at work writes to; of a run that is complete, what becomes the output."""
        return self.path / str(min(self.journal.done + 1, len(self.journal.asked)))

    @property
    def source(self) -> Path | None:
        """The model that the stage at work reads, where another stage wrote it."""
        return self.path / str(self.journal.done) if self.journal.done else None

    def resume(self, restart: bool | None) -> None:
        """Takes over what an earlier run left, or with ``restart`` discards it; the workplace is there and locked.

        None is for commands that have no such option, which messages name otherwise. UsageError where that run was
        asked for something else, or OUT has other files.
        """
        asked, hint = self.journal.asked, "" if restart is None else "start over with --restart, or "
        for stray in self.path.parent.glob(f"{glob.escape(self._journal.name)}?*"):
            stray.unlink()
        with contextlib.suppress(FileNotFoundError):  # the longest of our names: one that is too long shows now
            self._journal.with_name(f"{self._journal.name}.tmp12345678").stat()
        earlier = None
        with contextlib.suppress(OutputError) if restart else contextlib.nullcontext():
            earlier = Journal.read(self._journal, hint) if self._journal.exists() else None
        if earlier and earlier.complete:
            self._take_back(earlier)
        differing = earlier.differences(asked) if earlier else []
        if earlier and earlier.complete and not self._last(earlier).is_dir():  # it was moved
            if not restart and not differing and self._moved() == earlier.files:
                self.journal = earlier
                return
            earlier = None
        if earlier and not restart:
            if differing:
                same = f"ask for the same to resume it, {hint}" if hint else "choose another place, or "
                raise UsageError(
                    f"{self._out} has an unfinished run ({earlier.extent} done) that differs in "
                    f"{'; '.join(differing)}; {same}remove {self._journal}"
                )
            self._check(earlier, hint)
            self.journal = earlier
            self.journal.asked = asked
        else:
            self.clear_all()
        if _taken(self._out, self.path):
            raise _exists(self._out)
        with output_errors(self._out):
            self.directory.mkdir(exist_ok=True)

    def _check(self, earlier: Journal, hint: str) -> None:
        """Sees whether what the last stage that is done wrote is still there; the very last one is done again."""
        if not earlier.done or digests(self.path / str(earlier.done)) == earlier.files:
            return
        if not earlier.complete:
            raise OutputError(f"{self.path / str(earlier.done)} is damaged; {hint}remove {self._journal}")
        earlier.done -= 1

    def _last(self, journal: Journal) -> Path:
        return self.path / str(len(journal.asked))

    def _take_back(self, journal: Journal) -> None:
        """Undoes a move into an existing directory."""
        names, last = {name.partition("/")[0] for name in journal.files}, self._last(journal)
        for path in self._out.iterdir() if self._inside and last.is_dir() else ():
            if path.name in names and not (last / path.name).exists():
                path.rename(last / path.name)

    def _moved(self) -> dict[str, str]:
        """The digests of what is in OUT, without what is ours."""
        found = digests(self._out) if self._out.is_dir() else {}
        return {name: value for name, value in found.items() if not (self._inside and name.startswith(self.path.name))}

    @property
    def _inside(self) -> bool:
        return self._out == self.path.parent

    def clear(self, kept: Collection[str]) -> None:
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
        replace_file(self._journal, journal.to_json(), sync=True)
        vars(self.journal).update(changes)

    def save_block(self, block: int, digest: str, record: Record) -> None:
        """Writes the journal with ``block`` done, whose weights on disk have this ``digest``."""
        digests = [*self.journal.digests, *[""] * (block + 1 - self.journal.blocks)]
        digests[block] = digest
        self.save(digests=digests, record=record.to_json())

    def finish_stage(self, record: Record | None = None) -> None:
        """Says that all of a stage is written and checked; ``record`` is that of all stages so far, if there is one."""
        done, result = self.journal.done + 1, record.to_json() if record else ""
        with output_errors(self._out):
            files = digests(self.directory, sync=True)
            if done == len(self.journal.asked):
                self.save(done=done, files=files, result=result)
                return
            self.save(done=done, files=files, result=result, digests=[], zeros={}, record="", plan="")
            self._remove({str(done)})
            self.directory.mkdir()

    @property
    def has_more_to_come(self) -> bool:
        """Whether the same call has something to resume from, and the directory is not in place."""
        return self.journal.begun and self._journal.exists()

    def move(self) -> None:
        """Moves the output into place."""
        last = self.directory
        with output_errors(self._out):
            if last.is_dir():
                if _taken(self._out, self.path):
                    raise OutputError(f"{self._out} is no longer empty; move its contents away and repeat the command")
                if self._inside:
                    for path in sorted(last.iterdir()):
                        path.rename(self._out / path.name)
                    last.rmdir()
                else:
                    set_usual_mode(last, 0o777)
                    last.rename(self._out)
            self._remove(set())
            self.path.rmdir()
            self._journal.unlink(missing_ok=True)

    def clear_all(self) -> None:
        """Removes all that an earlier run left, the journal last: where that fails, the same command does it again."""
        self._remove(set())
        self._journal.unlink(missing_ok=True)

    def _remove(self, kept: set[str]) -> None:
        for path in self.path.iterdir():
            if path.name in kept:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def workplace(out: Path, asked: list[dict[str, Any]], restart: bool | None = None) -> Iterator[Workplace]:
    """A place to write ``out`` at, with what an earlier run that was ``asked`` for the same left there.

    A run that fails before its first block is done leaves nothing. Later, the same command resumes after the last
    block that is done. UsageError where there is an unfinished run of something else, or one that is still running.
    """
    place = Workplace(out, asked)
    path = place.path
    made = [each for each in [path, *path.parents] if not each.exists()]
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_empty, made)
        with output_errors(out):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.enter_context(locked(path, out))
            place.resume(restart)
        try:
            yield place
        except BaseException:
            if not place.journal.begun:
                with contextlib.suppress(OSError):
                    place.clear_all()
                shutil.rmtree(path, ignore_errors=True)
            raise


@contextlib.contextmanager
def new_directory(out: Path, asked: dict[str, Any], restart: bool | None = None) -> Iterator[Path | None]:
    """An empty directory that becomes ``out`` at the end; after an error nothing is left of it.

    None where an earlier run that was ``asked`` for the same was stopped while it moved a complete directory into
    place: nothing is left to write. Errors are those of :func:`workplace`.
    """
    with workplace(out, [asked], restart) as place:
        if place.journal.complete:
            yield None
        else:
            place.clear([])
            with output_errors(out):
                yield place.directory
            place.finish_stage()
        place.move()


def unfinished_size(out: Path, with_source: bool = False) -> int:
    """Bytes on the disk of what an earlier run for ``out`` was writing, in place of which it is written again.

    Also those of what that stage was reading, if asked for ``with_source``.
    """
    path = _place(out)
    with contextlib.suppress(OSError, OutputError):  # the run may be going on
        journal = Journal.read(_journal(path)) if _journal(path).exists() else Journal([{}])
        least = journal.done + (not journal.complete and not with_source)
        folders = [each for each in path.iterdir() if each.name.isdigit() and int(each.name) >= least]
        if journal.complete and out.is_dir():  # what is moved already
            folders += [each for each in out.iterdir() if each != path]
        return sum(_size(file) for folder in folders for file in (folder, *folder.rglob("*")))
    return 0


def scratch_size(out: Path) -> int:
    """Bytes on the disk of what the stage at work of an earlier run for ``out`` keeps besides its output."""
    with contextlib.suppress(OSError):
        return sum(map(_size, (_place(out) / _SCRATCH).rglob("*")))
    return 0


def kept(given: str | Path) -> Literal["", "part", "output"]:
    """What there is for the output at ``given``: all of it, or a part from which the same command resumes."""
    out = given_path(given, _LONGER).resolve()
    path, trials = _place(out), trials_place(out)
    if _journal(path).exists() or (trials.is_dir() and any(trials.iterdir())):
        return "part"
    return "output" if _taken(out, path) else ""


def _size(file: Path) -> int:
    status = file.lstat()
    return int(getattr(status, "st_blocks", status.st_size // 512) * 512)  # a file may have holes


def trials_place(out: Path) -> Path:
    """Where trials are, of which one becomes ``out``."""
    return out.with_name(f".{out.name}.trials")


def _place(out: Path) -> Path:
    """The workplace of a run for ``out``."""
    beside = out.parent / f".{out.name}.partial"
    return out / ".partial" if out.is_dir() and not _journal(beside).exists() else beside


def _journal(place: Path) -> Path:
    return place.with_name(f"{place.name}.json")


def _taken(out: Path, place: Path) -> bool:
    """Whether there is anything at ``out`` but the workplace."""
    if not out.is_dir():
        return out.exists()
    return any(not path.name.startswith(place.name) for path in out.iterdir())


def _exists(out: Path) -> UsageError:
    return UsageError(f"{out} exists and is not an empty directory; choose another or remove it")


def is_complete(out: Path) -> bool:
    """Whether an earlier run for ``out`` only has to move its output there."""
    journal = _journal(_place(out))
    with contextlib.suppress(OutputError):
        return journal.exists() and Journal.read(journal).complete
    return False


def _remove_empty(directories: list[Path]) -> None:
    """Removes those that are empty: others may have put something there."""
    for directory in directories:
        with contextlib.suppress(OSError):
            directory.rmdir()
