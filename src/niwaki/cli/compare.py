"""``niwaki compare`` and ``niwaki demo``."""

from dataclasses import dataclass
from typing import Annotated

from niwaki.cli.common import in_session, names, record_file, written
from niwaki.cli.display import TableDisplay
from niwaki.cli.options import Model, RecordFile, options
from niwaki.effort import PLAIN_EFFORT
from niwaki.files import write_json
from niwaki.options import Calibration, Compute, Measurement
from niwaki.records.comparison import METHODS

_USUAL = ",".join(METHODS)


@dataclass(frozen=True)
class Comparing:
    """How all methods are compared: arguments of :func:`niwaki.compare`.

    Options:
        effort: For solvers that have none of their own: {efforts}.
        text: What to measure perplexity on; may be given several times. [default: {usual_text}]
        text_samples: Windows of each. [default: all, or 256 of the calibration text]
        keep: Keep the pruned models, in DIR/models.
        max_time: Such as 90m or 2h: start no run that would end later.
    """

    effort: Annotated[str, "NAME"] = PLAIN_EFFORT
    calibration: Calibration = Calibration()
    measurement: Measurement = Measurement()
    compute: Compute = Compute()
    keep: bool = False
    max_time: Annotated[str | None, "TIME"] = None


@options(without=("tf32",), text=Annotated[list[str] | None, "TEXT"])
def compare(
    model: Model,
    output: Annotated[str, "DIR", "-o", "--out"],
    solvers: Annotated[str, "NAMES"] = _USUAL,
    sparsity: Annotated[str, "PATTERNS"] = "0.5,0.6,0.7,0.8,2:4",
    comparing: Comparing = Comparing(),
) -> None:
    """Prune MODEL by several methods to several sparsities; tables (also for LaTeX), JSON and all records go to DIR.

    What is done in DIR is not done again: an interrupted command resumes when it is repeated, and one with more solvers
    or sparsities adds to the table.

    Options:
        output: For the table and all records; what is there is resumed.
        solvers: Names as for prune --solver, each with an effort after an @ if you like.
        sparsity: Fractions, and patterns such as 2:4 or per-row:0.6.
    """
    with TableDisplay(f"comparing methods on {model}") as display, in_session():
        from niwaki.evaluation.compare import compare as run

        asked = {"solvers": names(solvers), "patterns": names(sparsity), **vars(comparing)}
        run(model, output, **asked, progress=display)
        written(output)


@options()
def demo(samples: Annotated[int, "N"] = 64, text_samples: Annotated[int, "N"] = 64, record: RecordFile = None) -> None:
    """Prune the embedded model by the methods of table 1 of Boza 2024 and by the default.

    Options:
        samples: Windows of 256 tokens to calibrate on.
        text_samples: Windows of 256 tokens to measure on.
    """
    calibration = Calibration("demo", samples=samples, length=256)
    measurement = Measurement("demo-held", samples=text_samples)
    with TableDisplay("pruning the embedded model by several methods") as display, in_session():
        from niwaki.evaluation.compare import compare as run

        file = record_file(record, "cells")
        comparison = run("demo", calibration=calibration, measurement=measurement, progress=display)
    if file is not None:
        write_json(file, comparison.to_json())
