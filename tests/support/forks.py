"""The command line in forks of this process, which has imported all of it: many runs, whatever becomes of each.

Only for processes with one thread (OMP_NUM_THREADS=1): one with OpenMP threads cannot be forked.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from niwaki.cli import main as cli
from niwaki.cli.common import quiet_libraries
from support.speed import measure_once

#: Seconds after which a command is killed, which then counts as one that does not end.
PATIENCE = 120.0


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, or minus the signal that it was killed by, and what it printed."""

    code: int
    out: str
    err: str


def warm_up() -> None:
    """Imports what a first command imports, so that forks have it: more than half of the time of a tiny model's run."""
    quiet_libraries()
    importlib.import_module("niwaki.recipes")  # what `inspect` does not import
    measure_once()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        sys.argv = ["niwaki", "inspect", "demo"]
        cli.main()
    gc.collect()
    gc.freeze()


class Running:
    """A fork that does ``work``: it ends with 0 where that returns, 1 where it raises, and as a SystemExit says.

    Args:
        out: The file that gets what it prints, in place of one that :meth:`ended` reads.
    """

    def __init__(self, work: Callable[[], None], out: int | None = None) -> None:
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self.process = os.fork()
        if not self.process:
            os.dup2(self._out.fileno() if out is None else out, 1)
            os.dup2(self._err.fileno(), 2)
            finish(work)

    def ended(self, patience: float = PATIENCE) -> Ended:
        """What became of it, when it has come to its end."""
        deadline = time.monotonic() + patience
        while not (waited := os.waitpid(self.process, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(self.process, signal.SIGKILL)
                os.waitpid(self.process, 0)
                raise AssertionError(f"it did not end within {patience:.0f} s")
            time.sleep(0.002)
        texts = []
        for file in (self._out, self._err):
            with file:
                file.seek(0)
                texts.append(file.read().decode())
        return Ended(os.waitstatus_to_exitcode(waited[1]), *texts)


def finish(work: Callable[[], None]) -> NoReturn:
    """Does ``work`` in a fork that prints to 1 and 2, heeds signals, and ends with it as a program would."""
    # Those of pytest write to files of its own.
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    signal.alarm(0)
    for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # whatever this process ignores or does
    code = 1
    try:
        work()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def forked(work: Callable[[], None], patience: float = PATIENCE) -> Ended:
    """What becomes of ``work`` in a fork."""
    return Running(work).ended(patience)


def begun(
    arguments: Sequence[object],
    directory: Path | None = None,
    before: Callable[[], None] = lambda: None,
    out: int | None = None,
) -> Running:
    """``niwaki ARGUMENTS`` in ``directory``, which is also the home; ``before`` is called in the fork first."""

    def work() -> None:
        if directory is not None:
            os.chdir(directory)
            os.environ["HOME"] = str(directory)
        sys.argv = ["niwaki", *map(str, arguments)]
        before()
        cli.main()

    return Running(work, out)


def command(
    arguments: Sequence[object],
    directory: Path | None = None,
    before: Callable[[], None] = lambda: None,
    patience: float = PATIENCE,
) -> Ended:
    """What becomes of ``begun(...)``."""
    return begun(arguments, directory, before).ended(patience)


def refused(ended: Ended) -> str:
    """The line in which a command said what is wrong; AssertionError where it ended in any other way."""
    assert ended.code in (1, 2), f"exit code {ended.code}: {ended.err[-2000:]}"
    assert "Traceback" not in ended.err, ended.err
    lines = [line for line in ended.err.splitlines() if line.startswith("error")]
    assert len(lines) == 1, f"not one line: {ended.err!r}"
    assert ended.err.splitlines()[-1] == lines[0], f"not the last line: {ended.err!r}"
    unprintable = {c for c in ended.out + ended.err if not c.isprintable()} - {"\n"}
    assert not unprintable, f"{unprintable} in {ended.err!r}"
    return ended.err
