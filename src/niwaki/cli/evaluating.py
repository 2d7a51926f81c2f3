"""``niwaki eval``."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Annotated

import typer

from niwaki.cli.common import command_line, out, quiet_libraries
from niwaki.cli.options import TEXT, Device, Dtype, Length, Model, RecordFile
from niwaki.record import write_json


def evaluate(
    model: Model,
    text: Annotated[str, typer.Option(help=TEXT)] = "wikitext2",
    length: Length = None,
    samples: Annotated[int | None, typer.Option(help="The first so many windows. \\[default: all]")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    record: RecordFile = None,
) -> None:
    """Measure the perplexity of MODEL."""
    quiet_libraries()
    from niwaki.perplexity import evaluate as run
    from niwaki.record import versions

    began = time.perf_counter()
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
    if record is not None:
        values = {
            "command": command_line(),
            "model": model,
            "perplexity": dataclasses.asdict(found),
            "seconds": time.perf_counter() - began,
            "versions": versions(),
        }
        write_json(record, json.dumps(values, indent=2) + "\n")
