"""The command line: thin. A module for each command or two; this one puts them together."""

import contextlib
import errno
import io
import os
import signal
import sys
import tempfile
import traceback
from typing import Annotated, NoReturn

# Before anything imports torch. OpenMP threads that wait by spinning take the core from the thread that they wait for
# when another program is busy (docs/methods.md). Short spinning costs nothing measurable otherwise.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# The next file that is opened would get the number of a closed stream, and with it what is printed.
for _name in ("stdin", "stdout", "stderr"):
    if getattr(sys, _name) is None:
        setattr(sys, _name, open(os.devnull, "r+"))

import typer
from rich.text import Text

import niwaki
from niwaki.cli.bench import bench
from niwaki.cli.common import Terminal, out
from niwaki.cli.compare import compare, demo
from niwaki.cli.evaluate import evaluate
from niwaki.cli.generate import generate
from niwaki.cli.inspect import inspect
from niwaki.cli.pack import export, pack, unpack
from niwaki.cli.prune import prune
from niwaki.cli.report import report
from niwaki.cli.shrink import shrink
from niwaki.cli.solvers import solvers
from niwaki.errors import NiwakiError, first_line

app = typer.Typer(
    help="Prunes large language models after training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In the order in which `niwaki --help` lists them.
_COMMANDS = (prune, shrink, evaluate, export, pack, unpack, generate, bench, report, inspect, solvers, compare, demo)
for _command in _COMMANDS:
    app.command("eval" if _command is evaluate else None)(_command)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        out.print(f"niwaki {niwaki.__version__}")
        raise typer.Exit


def main() -> None:
    """The entry point: one line for what went wrong; 2 for usage, 1 for failure, 70 for what nobody foresaw."""
    signal.signal(signal.SIGTERM, _stop)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # such as for "±" where the output is ASCII
    try:
        try:
            app(prog_name="niwaki")
        finally:
            sys.stdout.flush()
    except NiwakiError as error:
        _end(str(error), error.exit_code)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF) or error.filename:
            _end_unforeseen(error)
        sys.stdout = open(os.devnull, "w")  # what is in its buffer cannot be written at the exit either
        _end(f"standard output cannot be written: {error.strerror}", 1)
    except Exception as error:
        _end_unforeseen(error)


def _end(what: str, code: int) -> NoReturn:
    """Says ``what`` ended the command, in one line."""
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    who = f"error in process {os.environ.get('RANK', 0)}: " if several else "error: "
    Terminal(stderr=True).print(Text.assemble((who, "bold red"), " ".join(what.split())), soft_wrap=True)
    sys.exit(code)


def _end_unforeseen(error: Exception) -> NoReturn:
    """One line for an error that is not ours, with its traceback in a file for who has to mend it."""
    if isinstance(error, MemoryError) or ("alloc" in str(error) and "memory" in str(error)):
        _end(f"there is not enough memory: {first_line(error)}; docs/troubleshooting.md says what takes less", 1)
    where = "its traceback could not be kept"
    with contextlib.suppress(OSError):
        descriptor, name = tempfile.mkstemp(prefix="niwaki-", suffix=".txt", text=True)
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            print(f"niwaki {niwaki.__version__}, Python {sys.version}, {sys.platform}: {sys.argv}", file=file)
            traceback.print_exception(error, file=file)
        where = f"a report of it should have {name}"
    _end(f"this is a bug in niwaki: {type(error).__name__}: {first_line(error)}; {where}", 70)


def _stop(*_: object) -> None:
    """SIGTERM, from Slurm or ``timeout``, cleans up as Ctrl-C does."""
    raise KeyboardInterrupt
