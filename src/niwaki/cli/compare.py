"""``niwaki compare`` and ``niwaki demo``."""

from dataclasses import dataclass
from typing import Annotated

from niwaki.cli.common import in_session, names, record_file, written
from niwaki.cli.display import TableDisplay
from niwaki.cli.options import Model, RecordFile, options
from niwaki.effort import PLAIN_EFFORT
from niwaki.files import replace_file
from niwaki.options import Calibration, Compute, Measurement
from niwaki.records.comparison import METHODS

_USUAL = ",".join(METHODS)


@dataclass(frozen=True)
class Comparing:
    """How all methods are compared: arguments of :func:`niwaki.compare`.

    Options:
        effort: Effort for methods that do not name one: {efforts}.
        text: Text to measure perplexity on; may be repeated. {text} [default: {usual_text}]
        max_time: Time limit, such as 90m or 2h; runs that would not finish in time are not started.

    More options:
        text_samples: Windows of each text to measure on. [default: all, or 256 of the calibration text]
        keep: Keep the pruned models, in DIR/models.
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
    results: Annotated[str, "DIR", "-o", "--out"],
    solvers: Annotated[str, "NAMES"] = _USUAL,
    patterns: Annotated[str, "PATTERNS", "--sparsity"] = "0.5,0.6,0.7,0.8,2:4",
    comparing: Comparing = Comparing(),
) -> None:
    """Compare pruning methods on MODEL; write tables (also for LaTeX), JSON and all records to DIR.

    If a run is interrupted, repeat the command to resume it. More solvers or sparsities extend the same table.

    Example: niwaki compare MODEL -o DIR --solvers wanda,continuation --sparsity 0.5,2:4

    Options:
        results: Output directory; results that are already there are reused.
        solvers: Methods as for 'prune --solver', separated by commas; method@effort sets an effort.
        patterns: Fractions of zeros and patterns, such as 2:4 or per-row:0.6, separated by commas.
    """
    with TableDisplay(f"comparing methods on {model}") as display, in_session():
        from niwaki.evaluation.compare import compare as run

        asked = {"solvers": names(solvers), "patterns": names(patterns), **vars(comparing)}
        run(model, results, **asked, progress=display)
        written(results)


@options()
def demo(samples: Annotated[int, "N"] = 64, text_samples: Annotated[int, "N"] = 64, record: RecordFile = None) -> None:
    """Compare the methods of table 1 in Boza 2024, and the default, on the small model that ships with niwaki.

    Example: niwaki demo

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
        replace_file(file, comparison.to_json())
