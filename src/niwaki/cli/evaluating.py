"""``niwaki eval``."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from niwaki.cli.common import command_line, out, quiet_libraries
from niwaki.cli.options import TEXT, Device, Dtype, Length, Model, RecordFile
from niwaki.errors import UsageError
from niwaki.files import write_json

if TYPE_CHECKING:
    from niwaki.evaluation.tasks import TaskScores


def evaluate(
    model: Model,
    text: Annotated[str | None, typer.Option(help=f"{TEXT} \\[default: wikitext2; with --tasks none]")] = None,
    length: Length = None,
    samples: Annotated[
        int | None,
        typer.Option("--samples", "--text-samples", help="The first so many windows of the text. \\[default: all]"),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Tasks of lm-evaluation-harness, such as boolq,arc_easy; files of questions (.jsonl); which-follows.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="The first so many questions of each task. \\[default: all]")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    record: RecordFile = None,
) -> None:
    """Measure the perplexity of MODEL, or its scores on tasks, or both."""
    if tasks is None:
        text = text or "wikitext2"
        if limit is not None:
            raise UsageError("--limit is for --tasks; --samples is for --text")
    elif text is None and (length is not None or samples is not None):
        raise UsageError("--seqlen and --samples are for --text; --limit is for --tasks")
    quiet_libraries()
    from niwaki.models.output import check_record
    from niwaki.records.record import versions

    record = record and check_record(record)
    began = time.perf_counter()
    values: dict[str, Any] = {"command": command_line(), "model": model}
    if tasks is not None:
        from niwaki.evaluation.tasks import evaluate_tasks

        names = [name.strip() for name in tasks.split(",") if name.strip()]
        scores = evaluate_tasks(model, names, limit=limit, device=device, dtype=dtype, progress=sys.stderr.isatty())
        out.print(_table(scores))
        part = f"of the first {limit} questions of each task" if limit is not None else "of all questions"
        out.print(
            f"% {part}; lm-evaluation-harness {scores.harness}, {scores.dtype} on {scores.device}",
            soft_wrap=True,
        )
        values["tasks"] = dataclasses.asdict(scores)
        if scores.mean is not None:
            values["tasks"]["mean"] = dict(zip(("value", "standard_error"), scores.mean, strict=True))
    if text is not None:
        from niwaki.evaluation.evaluate import evaluate as run

        with out.status("reading") as status:
            found = run(
                model,
                text,
                length=length,
                samples=samples,
                device=device,
                dtype=dtype,
                done=lambda block, blocks: status.update(f"block {block}/{blocks}"),
            )
        out.print(f"perplexity {found}", soft_wrap=True, markup=False)
        out.print(found.protocol, soft_wrap=True, markup=False, style="dim")
        values["perplexity"] = {**dataclasses.asdict(found), "protocol": found.protocol}
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
