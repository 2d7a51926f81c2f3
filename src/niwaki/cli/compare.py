"""``niwaki compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from niwaki.cli.common import in_session, names, out, written
from niwaki.cli.display import TableDisplay
from niwaki.cli.options import Model, spread
from niwaki.options import Calibration, Compute, Measurement, parse_time
from niwaki.pruning.effort import PLAIN_EFFORT
from niwaki.records.comparison import METHODS

_TEXTS = Annotated[
    list[str] | None,
    typer.Option(help=r"What to measure perplexity on; may be given several times. \[default: wikitext2]"),
]
_TEXT_SAMPLES = Annotated[
    int | None, typer.Option(help=r"Windows of each. \[default: all, or 256 of the calibration text]")
]


@spread(without=("tf32",), text=(_TEXTS, None), text_samples=(_TEXT_SAMPLES, None))
def compare(
    model: Model,
    output: Annotated[
        Path,
        typer.Option("-o", "--out", metavar="DIR", help="For the table and all records; what is there is resumed."),
    ],
    solvers: Annotated[
        str, typer.Option(help="Names as for prune --solver, each with an effort after an @ if you like.")
    ] = ",".join(METHODS),
    sparsity: Annotated[
        str, typer.Option(help="Fractions, and patterns such as 2:4 or per-row:0.6.")
    ] = "0.5,0.6,0.7,0.8,2:4",
    effort: Annotated[
        str, typer.Option(help="For solvers that have none of their own: fast, balanced or best.")
    ] = PLAIN_EFFORT,
    calibration: Calibration = Calibration(),
    measurement: Measurement = Measurement(),
    compute: Compute = Compute(),
    keep: Annotated[bool, typer.Option("--keep", help="Keep the pruned models, in DIR/models.")] = False,
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Such as 90m or 2h: start no run that would end later."),
    ] = None,
) -> None:
    """Prune MODEL by several methods to several sparsities; table, JSON, CSV and all records go to DIR.

    What is done in DIR is not done again: an interrupted command resumes when it is repeated, and one with more solvers
    or sparsities adds to the table.
    """
    seconds = parse_time(budget) if budget is not None else None
    with TableDisplay(out, f"comparing methods on {model}") as display, in_session():
        from niwaki.evaluation.compare import compare as run

        run(
            model,
            output,
            solvers=names(solvers),
            patterns=names(sparsity),
            effort=effort,
            calibration=calibration,
            measurement=measurement,
            compute=compute,
            keep=keep,
            budget=seconds,
            progress=display,
        )
        written(output)
