"""``niwaki eval``."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from niwaki.cli.common import command_line, in_session, names, out
from niwaki.cli.options import TEXT, Length, Model, RecordFile, spread
from niwaki.cli.screen import Screen
from niwaki.errors import UsageError
from niwaki.files import write_json
from niwaki.options import Compute, Measurement

if TYPE_CHECKING:
    from niwaki.evaluation.tasks import TaskScores


@spread(without=("tf32", "memory"))
def evaluate(
    model: Model,
    text: Annotated[str | None, typer.Option(help=f"{TEXT} \\[default: wikitext2; with --tasks none]")] = None,
    length: Length = None,
    samples: Annotated[
        int | None,
        typer.Option("--samples", "--text-samples", help="The first N windows of the text. \\[default: all]"),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Tasks of lm-evaluation-harness, such as boolq,arc_easy; files of questions (.jsonl); which-follows.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="The first N questions of each task. \\[default: all]")] = None,
    compute: Compute = Compute(),
    record: RecordFile = None,
) -> None:
    """Measure the perplexity of MODEL, or its scores on tasks, or both."""
    if tasks is None:
        text = text or "wikitext2"
        if limit is not None:
            raise UsageError("--limit is for --tasks; --samples is for --text")
    elif text is None and (length is not None or samples is not None):
        raise UsageError("--seqlen and --samples are for --text; --limit is for --tasks")
    measurement = Measurement(text, samples=samples, length=length)
    with Screen(f"evaluating {model}") as screen, in_session():
        from niwaki.models.output import check_record
        from niwaki.records.record import versions

        record = record and check_record(record)
        began = time.perf_counter()
        values: dict[str, Any] = {"command": command_line(), "model": model}
        if tasks is not None:
            from niwaki.evaluation.tasks import evaluate_tasks

            with screen.above():  # where the harness has bars of its own
                scores = evaluate_tasks(model, names(tasks), limit=limit, compute=compute, progress=screen)
                out.print(_table(scores))
            part = f"of the first {limit} questions of each task" if limit is not None else "of all questions"
            screen.line(out, f"% {part}; lm-evaluation-harness {scores.harness}, {scores.dtype} on {scores.device}")
            values["tasks"] = dataclasses.asdict(scores)
            if scores.mean is not None:
                values["tasks"]["mean"] = dict(zip(("value", "standard_error"), scores.mean, strict=True))
        if text is not None:
            from niwaki.evaluation.evaluate import evaluate as run

            perplexity = run(model, measurement, compute=compute, progress=screen)
            screen.line(out, f"perplexity {perplexity}")
            screen.line(out, perplexity.protocol, style="dim")
            values["perplexity"] = {**dataclasses.asdict(perplexity), "protocol": perplexity.protocol}
        if record is not None:
            values |= {"seconds": time.perf_counter() - began, "versions": versions()}
            write_json(record, json.dumps(values, indent=2) + "\n")


def _table(found: TaskScores) -> Table:
    """A row for each task and metric, in %."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("task", "version"):
        table.add_column(name)
    for name in ("few-shot", "questions"):
        table.add_column(name, justify="right")
    table.add_column("metric")
    table.add_column("score", justify="right")
    before = None
    for score in found.scores:
        what = [score.task, score.version, str(score.shots), f"{score.questions:,}"]
        if score.task == before:
            what = [""] * len(what)
        before = score.task
        table.add_row(*what, score.metric, _percent(score.value, score.standard_error))
    if found.mean is not None:
        table.add_row("mean", "", "", "", "acc", _percent(*found.mean))
    return table


def _percent(value: float, error: float | None) -> str:
    return f"{100 * value:.2f}" + ("" if error is None else f" ± {100 * error:.2f}")
