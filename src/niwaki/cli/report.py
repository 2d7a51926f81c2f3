"""``niwaki report``."""

from typing import Annotated

from typer import Argument, Option

from niwaki.cli.common import quiet_libraries
from niwaki.cli.screen import Screen
from niwaki.files import given_path
from niwaki.records.wording import size

FILE = Option("-o", "--output", metavar="FILE", help=r"\[default: DIR/report.html]")
REFERENCE = Option(metavar="NAME", help="paper: published results too, marked as such and not measured.")
PROMPTS = Option("--prompt", metavar="TEXT", help="What the models continue; can be given several times.")


def report(
    directory: Annotated[str, Argument(metavar="DIR", help="What `niwaki prune` or `niwaki compare` wrote.")],
    file: Annotated[str | None, FILE] = None,
    reference: Annotated[str | None, REFERENCE] = None,
    prompts: Annotated[list[str] | None, PROMPTS] = None,
    samples: Annotated[bool, Option(metavar="", help="Generate text from the model, dense and pruned.")] = True,
) -> None:
    """Write a page about a pruned model or a comparison: one HTML file that needs nothing else."""
    from niwaki.reports.page import report as write

    with Screen(f"drawing {directory}") as screen:
        if (given_path(directory) / "niwaki.json").is_file():  # a model, from which masks and text are
            quiet_libraries()
        asked = (prompts or None) if samples else []
        path = write(directory, file, prompts=asked, reference=reference, progress=screen)
    screen.line(f"written to {path} ({size(path.stat().st_size)})")
