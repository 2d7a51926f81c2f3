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
    prompts: Annotated[list[str] | None, "TEXT", "--prompt"] = None,
    figures: Annotated[str | None, "DIR"] = None,
    samples: bool = True,
) -> None:
    """Write a report on a model that niwaki made, or on a comparison, as one self-contained HTML file.

    Example: niwaki report OUT

    Options:
        directory: Output directory of 'niwaki compare', or of a command that made a model.
        file: HTML file to write. [default: DIR/report.html]
        prompts: Prompt for the text samples; may be repeated.
        figures: Also write each chart to this directory, as SVG and PDF.
        samples: Show text that the original and the new model generate.
    """
    from niwaki.reports.page import report as write

    with Screen(f"drawing {directory}") as screen:
        if (given_path(directory) / "niwaki.json").is_file():  # a model, from which masks and text are
            quiet_libraries()
        asked = (prompts or None) if samples else []
        path = write(directory, file, prompts=asked, figures=figures, progress=screen)
    screen.line(f"written to {path} ({size(path.stat().st_size)})")
    if figures:
        screen.line(f"figures written to {figures}")
