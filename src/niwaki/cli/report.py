"""``niwaki report``."""

from typing import Annotated

from niwaki.cli.common import quiet_libraries
from niwaki.cli.options import options
from niwaki.cli.screen import Screen
from niwaki.files import given_path
from niwaki.records.wording import size


@options()
def report(
    directory: Annotated[str, "DIR"],
    file: Annotated[str | None, "FILE", "-o", "--output"] = None,
    reference: Annotated[str | None, "NAME"] = None,
    prompts: Annotated[list[str] | None, "TEXT", "--prompt"] = None,
    samples: bool = True,
) -> None:
    """Write a page about a pruned model or a comparison: one HTML file that needs nothing else.

    Options:
        directory: What `niwaki prune` or `niwaki compare` wrote.
        file: [default: DIR/report.html]
        reference: paper: published results too, marked as such and not measured.
        prompts: What the models continue; can be given several times.
        samples: Generate text from the model, dense and pruned.
    """
    from niwaki.reports.page import report as write

    with Screen(f"drawing {directory}") as screen:
        if (given_path(directory) / "niwaki.json").is_file():  # a model, from which masks and text are
            quiet_libraries()
        asked = (prompts or None) if samples else []
        path = write(directory, file, prompts=asked, reference=reference, progress=screen)
    screen.line(f"written to {path} ({size(path.stat().st_size)})")
