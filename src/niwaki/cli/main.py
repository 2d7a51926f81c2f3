"""The command line: thin. A module for each command or two; this one puts them together."""

import os
import signal
import sys
from typing import Annotated

# Before anything imports torch. OpenMP threads that wait by spinning take the core from the thread that they wait for
# when another program is busy (docs/methods.md). Short spinning costs nothing measurable otherwise.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import typer
from rich.console import Console
from rich.text import Text

import niwaki
from niwaki.cli.bench import bench
from niwaki.cli.common import out
from niwaki.cli.compare import compare, demo
from niwaki.cli.evaluate import evaluate
from niwaki.cli.generate import generate
from niwaki.cli.inspect import inspect
from niwaki.cli.pack import export, pack, unpack
from niwaki.cli.prune import prune
from niwaki.cli.report import report
from niwaki.cli.shrink import shrink
from niwaki.cli.solvers import solvers
from niwaki.errors import NiwakiError

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
    """The entry point: one line for what went wrong, 2 for usage and 1 for failure."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        app(prog_name="niwaki")
    except NiwakiError as error:
        several = os.environ.get("WORLD_SIZE", "1") != "1"
        what = f"error in process {os.environ.get('RANK', 0)}: " if several else "error: "
        Console(stderr=True).print(Text.assemble((what, "bold red"), str(error)), soft_wrap=True)
        sys.exit(error.exit_code)


def _stop(*_: object) -> None:
    """SIGTERM, from Slurm or ``timeout``, cleans up as Ctrl-C does."""
    raise KeyboardInterrupt
