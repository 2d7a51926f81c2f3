"""``niwaki report``, ``niwaki inspect`` and ``niwaki solvers``."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from niwaki.cli.common import out, quiet_libraries
from niwaki.cli.options import Model
from niwaki.cli.tables import inspection_tables
from niwaki.records.wording import size

#: What solvers of one module do that differ in their parameters; all others are described by their module.
_BY_PARAMETERS = {
    "admm-grad": "ADMM with the mask chosen on the way, while the weights adapt; arXiv 2401.02938.",
    "admm1": "ADMM on the weights of a mask that is chosen first; arXiv 2401.02938.",
    "adam": "Fits the weights to a mask by gradient descent with Adam; arXiv 2102.08124.",
    "sgd": "Fits the weights to a mask by gradient descent with momentum; arXiv 2102.08124.",
}


def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What `niwaki prune` or `niwaki compare` wrote.")],
    file: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="\\[default: DIR/report.html]")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="paper: published results too, marked as such and not measured.")
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="What the models continue; can be given several times."),
    ] = None,
    samples: Annotated[bool, typer.Option(help="Generate text from the model, dense and pruned.")] = True,
) -> None:
    """Write a page about a pruned model or a comparison: one HTML file that needs nothing else."""
    from niwaki.reports.page import report as write

    if (directory / "niwaki.json").is_file():  # a model, from which masks and text are
        quiet_libraries()
    with out.status("reading masks and generating text"):
        path = write(directory, file, prompts=(prompts or None) if samples else [], reference=reference)
    out.print(f"written to {path} ({size(path.stat().st_size)})", soft_wrap=True, markup=False)


def inspect(model: Model) -> None:
    """Show what would be pruned in MODEL, and how sparse it is."""
    quiet_libraries()
    from niwaki.evaluation.inspect import inspect

    with out.status("reading"):
        found = list(inspect(model))
    for table in inspection_tables(found):
        out.print(table)
        out.print()


def solvers() -> None:
    """List the solvers and their parameters, for --solver and --set."""
    from niwaki.layer.solvers import SOLVERS

    table = Table("name", "what it does", "parameters and defaults", box=None, padding=(0, 2, 0, 0))
    for name, solver in SOLVERS.items():
        module = sys.modules[type(solver).__module__]
        what = _BY_PARAMETERS.get(name) or (module.__doc__ or "").partition(":")[2].strip()
        values = ", ".join(f"{key}={value}" for key, value in dataclasses.asdict(solver).items())
        table.add_row(name, what[:1].upper() + what[1:], values)
    out.print(table)
