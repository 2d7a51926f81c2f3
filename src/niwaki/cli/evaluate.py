"""``niwaki eval``."""

import dataclasses
import json
import time
from typing import Annotated, Any

from typer import Option

from niwaki.cli.common import in_session, names, out
from niwaki.cli.options import TEXT, Bos, Field, Length, Model, RecordFile, spread
from niwaki.cli.screen import Screen
from niwaki.cli.tables import task_table
from niwaki.errors import UsageError
from niwaki.files import write_json
from niwaki.options import USUAL_TEXT, Compute, Measurement

TASKS = Option(
    metavar="NAMES",
    help="Tasks of lm-evaluation-harness, such as boolq,arc_easy; files of questions (.jsonl); which-follows.",
)
SAMPLES = Option("--samples", "--text-samples", metavar="N", help=r"The first N windows of the text. \[default: all]")
LIMIT = Option(metavar="N", help=r"The first N questions of each task. \[default: all]")


@spread(without=("tf32", "memory"))
def evaluate(
    model: Model,
    text: Annotated[
        str | None, Option(metavar="TEXT", help=rf"{TEXT} \[default: {USUAL_TEXT}; with --tasks none]")
    ] = None,
    length: Length = None,
    samples: Annotated[int | None, SAMPLES] = None,
    field: Field = None,
    bos: Bos = True,
    tasks: Annotated[str | None, TASKS] = None,
    limit: Annotated[int | None, LIMIT] = None,
    compute: Compute = Compute(),
    record: RecordFile = None,
) -> None:
    """Measure the perplexity of MODEL, or its scores on tasks, or both."""
    if tasks is None:
        text = USUAL_TEXT if text is None else text
        if limit is not None:
            raise UsageError("--limit is for --tasks; --samples is for --text")
    elif text is None and (length is not None or samples is not None or field is not None or not bos):
        raise UsageError("--seqlen, --samples, --field and --no-bos are for --text; --limit is for --tasks")
    measurement = Measurement(text, samples=samples, length=length, bos=bos, field=field)
    with Screen(f"evaluating {model}") as screen, in_session():
        from niwaki.records.record import versions
        from niwaki.runs.session import current_session
        from niwaki.runs.workplace import check_record

        file = None if record is None else check_record(record)
        began = time.perf_counter()
        values: dict[str, Any] = {"command": current_session().command, "model": model}
        if tasks is not None:
            from niwaki.evaluation.tasks import evaluate_tasks

            with screen.above():  # where the harness has bars of its own
                scores = evaluate_tasks(model, names(tasks), limit=limit, compute=compute, progress=screen)
                out.print(task_table(scores))
            part = f"of the first {limit} questions of each task" if limit is not None else "of all questions"
            screen.line(f"% {part}; lm-evaluation-harness {scores.harness}, {scores.dtype} on {scores.device}")
            values["tasks"] = dataclasses.asdict(scores)
            if scores.mean is not None:
                values["tasks"]["mean"] = dict(zip(("value", "standard_error"), scores.mean, strict=True))
        if text is not None:
            from niwaki.evaluation.evaluate import evaluate as run

            perplexity = run(model, measurement, compute=compute, progress=screen)
            screen.line(f"perplexity {perplexity}")
            screen.line(perplexity.protocol, style="dim")
            values["perplexity"] = {**dataclasses.asdict(perplexity), "protocol": perplexity.protocol}
        if file is not None:
            values |= {"seconds": time.perf_counter() - began, "versions": versions()}
            write_json(file, json.dumps(values, indent=2) + "\n")
