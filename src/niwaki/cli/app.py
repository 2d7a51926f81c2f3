"""All commands together."""

from typing import Annotated

import typer

import niwaki
from niwaki.cli.common import out
from niwaki.cli.forms import export, imatrix, pack, push, report, unpack
from niwaki.cli.make import compress, heal, prune, quantize, run, shrink
from niwaki.cli.measure import bench, compare, demo, evaluate, generate, inspect, solvers
from niwaki.cli.options import Command

app = typer.Typer(
    help="Make large language models smaller and faster after training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In the order in which `niwaki --help` lists them.
_COMMANDS = (
    compress,
    prune,
    quantize,
    shrink,
    heal,
    run,
    evaluate,
    export,
    imatrix,
    pack,
    unpack,
    push,
    generate,
    bench,
    report,
    inspect,
    solvers,
    compare,
    demo,
)
for _command in _COMMANDS:
    app.command("eval" if _command is evaluate else None, cls=Command)(_command)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", metavar="", help="Print the version.")] = False) -> None:
    if version:
        out.print(f"niwaki {niwaki.__version__}")
        raise typer.Exit
