"""``niwaki report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from niwaki.cli.common import out, quiet_libraries
from niwaki.cli.screen import Screen


def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What `niwaki prune` or `niwaki compare` wrote.")],
    file: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="\\[default: DIR/report.html]")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="paper: published results too, marked as such and not measured.")
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="What the models continue; can be given several times."),
    ] = None,
    samples: Annotated[bool, typer.Option(help="Generate text from the model, dense and pruned.")] = True,
) -> None:
    """Write a page about a pruned model or a comparison: one HTML file that needs nothing else."""
    from niwaki.reports.material import load
    from niwaki.reports.page import check_extra, render, write

    with Screen(f"drawing {directory}") as screen:
        material = load(directory)
        check_extra()
        found = None
        if not material.compared:
            screen.status("reading masks and generating text")
            quiet_libraries()
            from niwaki.reports.from_model import extras

            (record,) = (run.record for run in material.runs)
            assert record is not None
            found = extras(directory, record, (prompts or None) if samples else [])
        path = write(render(material, found, reference=reference), directory, file)
    size = path.stat().st_size / 2**20
    out.print(f"written to {path} ({size:.1f} MiB)", soft_wrap=True, markup=False)
