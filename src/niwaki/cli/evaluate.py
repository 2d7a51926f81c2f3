"""``niwaki eval``."""

import dataclasses
import json
import time
from typing import Annotated, Any

from niwaki.cli.common import in_session, names, out, record_file
from niwaki.cli.options import Field, Length, Model, RecordFile, options
from niwaki.cli.screen import Screen
from niwaki.cli.tables import task_table
from niwaki.errors import UsageError
from niwaki.files import replace_file
from niwaki.options import USUAL_TEXT, Compute, Measurement


@options(without=("tf32", "max_memory"))
def evaluate(
    model: Model,
    text: Annotated[str | None, "TEXT"] = None,
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
        samples: Use the first N windows of the text. [default: all]
        tasks: Tasks, separated by commas: those of lm-evaluation-harness, such as boolq,arc_easy; files of questions
            (.jsonl); which-follows.
        limit: Ask the first N questions of each task. [default: all]
    """
    if tasks is None:
        text = USUAL_TEXT if text is None else text
        if limit is not None:
            raise UsageError("--limit is for --tasks; --samples is for --text")
    elif text is None and (length is not None or samples is not None or field is not None or not bos):
        raise UsageError("--length, --samples, --field and --no-bos are for --text; --limit is for --tasks")
    measurement = Measurement(text, samples=samples, length=length, bos=bos, field=field)
    measurement.some()
    with Screen(f"evaluating {model}") as screen, in_session():
        from niwaki.records.record import versions
        from niwaki.runs.session import current_session

        file = record_file(record)
        if tasks is not None:
            from niwaki.evaluation.tasks import evaluate_tasks, find_tasks

            find_tasks(names(tasks))
        began = time.perf_counter()
        values: dict[str, Any] = {"command": current_session().command, "model": model}
        if text is not None:
            from niwaki.evaluation.evaluate import evaluate as run

            perplexity = run(model, measurement, compute=compute, progress=screen)
            screen.line(f"perplexity {perplexity}")
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
