"""The commands that measure and show: eval, bench, compare, demo, inspect, generate and solvers."""

import dataclasses
import io
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from rich.table import Table

from niwaki.checkpoints.gguf_header import checked_header
from niwaki.checkpoints.local import find_local
from niwaki.cli.common import in_session, names, out, record_file, writing, written
from niwaki.cli.options import Field, Length, Model, RecordFile, options
from niwaki.cli.screen import Screen, TableDisplay
from niwaki.cli.tables import gguf_tables, inspection_tables, speed_table, task_table
from niwaki.effort import PLAIN_EFFORT
from niwaki.errors import UsageError
from niwaki.files import GGUF, replace_file
from niwaki.options import USUAL_TEXT, Calibration, Compute, Measurement
from niwaki.records.comparison import METHODS
from niwaki.records.wording import printable


@options(without=("tf32", "max_memory"))
def evaluate(
    model: Model,
    text: Annotated[str | None, "TEXT"] = None,
    against: Annotated[str | None, "MODEL"] = None,
    length: Length = None,
    samples: Annotated[int | None, "N", "--samples", "--text-samples"] = None,
    field: Field = None,
    bos: bool = True,
    tasks: Annotated[str | None, "NAMES"] = None,
    limit: Annotated[int | None, "N"] = None,
    compute: Compute = Compute(),
    record: RecordFile = None,
) -> None:
    """Measure the perplexity of MODEL, its scores on tasks, or both.

    Example: niwaki eval MODEL --text wikitext2

    Options:
        text: Text to measure perplexity on. {text} [default: {usual_text}; none with --tasks]
        against: Another model, such as the dense one: measure also how far the predictions are from its (KL).
        samples: Use the first N windows of the text. [default: all]
        tasks: Tasks, separated by commas: those of lm-evaluation-harness, such as boolq,arc_easy; files of questions
            (.jsonl); which-follows.
        limit: Ask the first N questions of each task. [default: all]
    """
    if tasks is None:
        text = USUAL_TEXT if text is None else text
        if limit is not None:
            raise UsageError("--limit is for --tasks; --samples is for --text")
    elif text is None and (not bos or any(given is not None for given in (against, length, samples, field))):
        raise UsageError("--against, --length, --samples, --field and --no-bos are for --text; --limit is for --tasks")
    measurement = Measurement(text, samples=samples, length=length, bos=bos, field=field)
    measurement.some()
    with Screen(f"evaluating {model}") as screen, in_session():
        from niwaki.records.record import versions
        from niwaki.runs.stage import current_session

        file = record_file(record)
        if tasks is not None:
            from niwaki.evaluation.tasks import evaluate_tasks, find_tasks

            find_tasks(names(tasks))
        began = time.perf_counter()
        values: dict[str, Any] = {"command": current_session().command, "model": model}
        if text is not None:
            from niwaki.evaluation.evaluate import evaluate as run

            perplexity = run(model, measurement, against=against, compute=compute, progress=screen)
            screen.line(f"perplexity {perplexity}")
            if perplexity.divergence:
                screen.line(f"KL from {against}: {perplexity.divergence}")
                values["against"] = against
            screen.line(perplexity.protocol, style="dim")
            values["perplexity"] = {**dataclasses.asdict(perplexity), "protocol": perplexity.protocol}
        if tasks is not None:
            with screen.above():  # where the harness has bars of its own
                scores = evaluate_tasks(model, names(tasks), limit=limit, compute=compute, progress=screen)
                out.print(task_table(scores))
            part = f"of the first {limit} questions of each task" if limit is not None else "of all questions"
            screen.line(f"% {part}; lm-evaluation-harness {scores.harness}, {scores.dtype} on {scores.device}")
            values["tasks"] = dataclasses.asdict(scores)
            if scores.mean is not None:
                values["tasks"]["mean"] = dict(zip(("value", "standard_error"), scores.mean, strict=True))
        if file is not None:
            values |= {"seconds": time.perf_counter() - began, "versions": versions()}
            replace_file(file, json.dumps(values, indent=2) + "\n")


@options(without=("tf32", "max_memory"))
def bench(
    model: Model,
    prompt_tokens: Annotated[int, "N"] = 128,
    tokens: Annotated[int, "N"] = 32,
    repeats: Annotated[int, "N"] = 3,
    compute: Compute = Compute(),
    record: RecordFile = None,
) -> None:
    """Measure how fast MODEL generates text and how much memory and disk space it takes, dense and packed.

    Whichever form is missing is made in the temporary directory (TMPDIR) and removed afterwards.

    Example: niwaki bench MODEL

    Options:
        prompt_tokens: Tokens in the prompt.
        tokens: Tokens to generate.
        repeats: Number of runs; the median is shown.

    More options:
        record: JSON file for the results; 'niwaki report' shows those in MODEL/niwaki-bench.json.
    """
    with Screen(f"measuring {model}") as screen, in_session():
        from niwaki.evaluation.bench import bench as run

        file = record_file(record, "speeds")
        speed = run(
            model, prompt_tokens=prompt_tokens, tokens=tokens, repeats=repeats, compute=compute, progress=screen
        )
    out.print(speed_table(speed))
    screen.line(speed.conditions())
    if file is not None:
        replace_file(file, speed.to_json())
        written(file)


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


def _print(tables: Iterable[Table]) -> None:
    for table in tables:
        out.print(table)
        out.print()


@options()
def inspect(model: Model) -> None:
    """Show which matrices of MODEL would be pruned and how sparse they are now; of a GGUF file also its types.

    Example: niwaki inspect MODEL
    """
    with Screen(f"reading {model}") as screen:
        file = find_local(model)
        if file is not None and file.suffix == GGUF and file.is_file():  # at once: what comes next takes seconds
            header, types = checked_header(file)
            with screen.above():
                _print(gguf_tables(header.tensors, types))
        with in_session():
            from niwaki.evaluation.inspect import opened, summaries
            from niwaki.models.outside import find_extra

            found = opened(model)
            matrices, extra, pruning = list(summaries(found)), find_extra(found), found.checkpoint.pruning
    _print(inspection_tables(matrices, found.left_dense, extra))
    if found.checkpoint.is_encoded:
        out.print(f"the files are in {found.checkpoint.encoded_as}")
    if (lying := sum(summary.is_q4_0 for summary in matrices)) and not found.checkpoint.is_encoded:
        out.print(
            f"{lying:,} of {len(matrices):,} matrices are numbers of Q4_0 already, as after training with it: 'niwaki "
            f"export {model} OUT.gguf --format gguf-q4_0' keeps them"
        )
    if pruning.has_factors:
        out.print(f"{pruning.pattern}: these matrices are products of two sparse factors, which the tables do not show")


@options(without=("tf32", "max_memory"))
def generate(
    model: Model,
    prompt: Annotated[str, "PROMPT"],
    tokens: Annotated[int, "N"] = 100,
    temperature: Annotated[float, "NUMBER"] = 0.0,
    seed: Annotated[int, "N"] = 0,
    raw: bool = False,
    compute: Compute = Compute(),
) -> None:
    """Generate text with MODEL, dense or packed. It answers PROMPT, or continues it if it has no chat template.

    Example: niwaki generate MODEL "What is a bonsai?"

    Options:
        prompt: The prompt; if it exceeds the context, its beginning is cut off.
        tokens: Generate at most N tokens.
        temperature: 0 always takes the most likely token, 1 samples from the model's probabilities.
        seed: Random seed for sampling.
        raw: Continue PROMPT as it stands, without the chat template.
    """
    with Screen(f"loading {model}", stopped="stopped") as screen, in_session():
        from niwaki.evaluation.generate import generate as run

        def say(text: str) -> None:
            screen.stop_spinner()
            screen.said()
            with writing(sys.stdout):
                sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
                sys.stdout.flush()

        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # what the terminal's encoding lacks
        how: Any = {"temperature": temperature, "seed": seed, "raw": raw, "compute": compute}
        run(model, prompt, tokens=tokens, **how, say=say, echo=True)
        say("\n")


#: What solvers of one module do that differ in their parameters; all others are described by their module.
_BY_PARAMETERS = {
    "admm-grad": "ADMM with the mask chosen on the way, while the weights adapt; arXiv 2401.02938.",
    "admm1": "ADMM on the weights of a mask that is chosen first; arXiv 2401.02938.",
    "adam": "Fits the weights to a mask by gradient descent with Adam; arXiv 2102.08124.",
    "sgd": "Fits the weights to a mask by gradient descent with momentum; arXiv 2102.08124.",
}


@options()
def solvers() -> None:
    """List the pruning methods for --solver, with their parameters.

    Example: niwaki solvers
    """
    from niwaki.layer.solvers import SOLVERS

    table = Table("name", "what it does", "parameters and defaults", box=None, padding=(0, 2, 0, 0))
    for name, solver in SOLVERS.items():
        module = sys.modules[type(solver).__module__]
        what = _BY_PARAMETERS.get(name) or (module.__doc__ or "").partition(":")[2].strip()
        values = ", ".join(f"{key}={value}" for key, value in dataclasses.asdict(solver).items())
        table.add_row(name, what[:1].upper() + what[1:], values)
    out.print(table)
