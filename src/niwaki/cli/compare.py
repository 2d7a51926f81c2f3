"""``niwaki compare`` and ``niwaki demo``."""

from typing import Annotated

from typer import Option

from niwaki.cli.common import in_session, names, written
from niwaki.cli.display import TableDisplay
from niwaki.cli.options import Model, RecordFile, spread
from niwaki.effort import PLAIN_EFFORT
from niwaki.files import write_json
from niwaki.options import USUAL_TEXT, Calibration, Compute, Measurement, parse_time
from niwaki.records.comparison import METHODS

OUTPUT = Option("-o", "--out", metavar="DIR", help="For the table and all records; what is there is resumed.")
SOLVERS = Option(metavar="NAMES", help="Names as for prune --solver, each with an effort after an @ if you like.")
SPARSITY = Option(metavar="PATTERNS", help="Fractions, and patterns such as 2:4 or per-row:0.6.")
EFFORT = Option(metavar="NAME", help="For solvers that have none of their own: fast, balanced or best.")
TEXTS = Option(
    metavar="TEXT", help=rf"What to measure perplexity on; may be given several times. \[default: {USUAL_TEXT}]"
)
TEXT_SAMPLES = Option(metavar="N", help=r"Windows of each. \[default: all, or 256 of the calibration text]")
BUDGET = Option(metavar="TIME", help="Such as 90m or 2h: start no run that would end later.")
_USUAL = ",".join(METHODS)


@spread(without=("tf32",), text=Annotated[list[str] | None, TEXTS], text_samples=Annotated[int | None, TEXT_SAMPLES])
def compare(
    model: Model,
    output: Annotated[str, OUTPUT],
    solvers: Annotated[str, SOLVERS] = _USUAL,
    sparsity: Annotated[str, SPARSITY] = "0.5,0.6,0.7,0.8,2:4",
    effort: Annotated[str, EFFORT] = PLAIN_EFFORT,
    calibration: Calibration = Calibration(),
    measurement: Measurement = Measurement(),
    compute: Compute = Compute(),
    keep: Annotated[bool, Option("--keep", metavar="", help="Keep the pruned models, in DIR/models.")] = False,
    budget: Annotated[str | None, BUDGET] = None,
) -> None:
    """Prune MODEL by several methods to several sparsities; table, JSON, CSV and all records go to DIR.

    What is done in DIR is not done again: an interrupted command resumes when it is repeated, and one with more solvers
    or sparsities adds to the table.
    """
    seconds = parse_time(budget) if budget is not None else None
    with TableDisplay(f"comparing methods on {model}") as display, in_session():
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


def demo(
    samples: Annotated[int, Option(metavar="N", help="Windows of 256 tokens to calibrate on.")] = 64,
    text_samples: Annotated[int, Option(metavar="N", help="Windows of 256 tokens to measure on.")] = 64,
    record: RecordFile = None,
) -> None:
    """Prune the embedded model by the methods of table 1 of Boza 2024 and by the default."""
    calibration = Calibration("demo", samples=samples, length=256)
    measurement = Measurement("demo-held", samples=text_samples)
    with TableDisplay("pruning the embedded model by several methods") as display, in_session():
        from niwaki.evaluation.compare import compare as run
        from niwaki.runs.workplace import check_record

        file = None if record is None else check_record(record, "cells")
        comparison = run("demo", calibration=calibration, measurement=measurement, progress=display)
    if file is not None:
        write_json(file, comparison.to_json())
