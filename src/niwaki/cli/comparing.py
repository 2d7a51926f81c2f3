"""``niwaki compare`` and ``niwaki demo``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from niwaki.cli.common import command_line, out, quiet_libraries
from niwaki.cli.display import TableDisplay
from niwaki.cli.options import TEXT, Device, Dtype, Length, Model, RecordFile
from niwaki.errors import UsageError
from niwaki.files import write_json
from niwaki.pruning.effort import PLAIN_EFFORT
from niwaki.records.comparison import METHODS


def compare(
    model: Model,
    output: Annotated[
        Path,
        typer.Option("-o", "--out", metavar="DIR", help="For the table and all records; gone on with if there."),
    ],
    solvers: Annotated[
        str, typer.Option(help="Names as for prune --solver, each with an effort behind an @ if you like.")
    ] = ",".join(METHODS),
    sparsity: Annotated[
        str, typer.Option(help="Fractions, and patterns such as 2:4 or per-row:0.6.")
    ] = "0.5,0.6,0.7,0.8,2:4",
    effort: Annotated[
        str, typer.Option(help="For solvers that have none of their own: fast, balanced or best.")
    ] = PLAIN_EFFORT,
    calibration: Annotated[str, typer.Option(help=TEXT)] = "c4",
    samples: Annotated[int, typer.Option(help="Windows of calibration text.")] = 128,
    length: Length = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="What to measure perplexity on; may be given several times. \\[default: wikitext2]"),
    ] = None,
    text_samples: Annotated[
        int | None, typer.Option(help="Windows of each. \\[default: all, or 256 of the calibration text]")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Such as 8GiB; as for prune.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the pruned models, in DIR/models.")] = False,
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Such as 90m or 2h: start no run that would not end by then."),
    ] = None,
) -> None:
    """Prune MODEL by several methods to several sparsities; table, JSON, CSV and all records go to DIR.

    What is done in DIR is not done again: a call that was stopped goes on, and one with more solvers or
    sparsities adds to the table.
    """
    seconds = _seconds(budget) if budget is not None else None
    quiet_libraries()
    from niwaki.evaluation.compare import compare as run
    from niwaki.options import parse_size

    with TableDisplay(out) as display:
        run(
            model,
            output,
            solvers=_list(solvers),
            sparsities=_list(sparsity),
            effort=effort,
            calibration=calibration,
            samples=samples,
            length=length,
            texts=text or ["wikitext2"],
            text_samples=text_samples,
            device=device,
            dtype=dtype,
            memory=parse_size(memory) if memory is not None else None,
            keep=keep,
            budget=seconds,
            command=command_line(),
            progress=display,
        )
        out.print(f"written to {output}", soft_wrap=True, markup=False)


def demo(
    samples: Annotated[int, typer.Option(help="Windows of 256 tokens to calibrate on.")] = 64,
    text_samples: Annotated[int, typer.Option(help="Windows of 256 tokens to measure on.")] = 64,
    record: RecordFile = None,
) -> None:
    """Prune the embedded model by the methods of the paper's table 1 and by the default."""
    quiet_libraries()
    from niwaki.evaluation.compare import compare as run
    from niwaki.models.output import check_record

    record = record and check_record(record)
    with TableDisplay(out) as display:
        found = run(
            "demo",
            calibration="demo",
            samples=samples,
            length=256,
            texts=["demo-held"],
            text_samples=text_samples,
            command=command_line(),
            progress=display,
        )
    if record is not None:
        write_json(record, found.to_json())


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _seconds(text: str) -> float:
    """Of a time such as "2h", "90 min" or "1h30m"."""
    number = r"(\d+(?:\.\d+)?)"
    match = re.fullmatch(rf"(?:{number}h)?(?:{number}m(?:in)?)?(?:{number}s)?", text.lower().replace(" ", ""))
    parts = match.groups(default="0") if match else ()
    seconds = sum(float(part) * unit for part, unit in zip(parts, (3600, 60, 1), strict=False))
    if not seconds:
        raise UsageError(f"--budget takes a time such as 2h, 90m or 1h30m; got {text!r}")
    return seconds
