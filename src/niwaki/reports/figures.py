"""The charts of a report as files, for papers and slides."""

import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

import vl_convert

from niwaki.errors import UsageError
from niwaki.files import input_errors, nearest, replace_file
from niwaki.reports.tables import Section

_KINDS = (".svg", ".pdf")
#: Titles of so many characters are not in names of files.
_LONG = 32


def check_figures(folder: Path) -> None:
    """UsageError where ``folder`` is something else, or has files that are no figures."""
    if not folder.is_dir() and (folder.exists() or not nearest(folder).is_dir()):
        raise UsageError(f"{folder} cannot have figures: it is not a directory")
    with input_errors(folder):
        names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    for name in names:
        if not name.endswith(_KINDS) and not name.startswith("."):
            raise UsageError(f"{folder} has {name}, which is no figure; give a new or an empty directory")


def write_figures(shown: Sequence[Section], folder: Path) -> list[Path]:
    """Each chart of the sections as SVG and as PDF in ``folder``; returns the files.

    OutputError where they cannot be written.
    """
    written = []
    for name, svg in _charts(shown):
        written += [folder / f"{name}{kind}" for kind in _KINDS]
        replace_file(written[-2], svg)
        replace_file(written[-1], vl_convert.svg_to_pdf(svg))
    return written


def _charts(shown: Sequence[Section]) -> Iterator[tuple[str, str]]:
    """The wide form of each chart with a name for its file, such as "time" or "errors-1-wanda"."""
    style = (files("niwaki.reports") / "templates/report.css").read_text(encoding="utf-8")
    light = dict(re.findall(r"--([\w-]+): (#\w+)", style.partition("@media")[0]))
    for section in shown:
        drawn = [(exhibit.title, figure.wide) for exhibit in section.exhibits for figure in exhibit.figures]
        for number, (title, svg) in enumerate(drawn, 1):
            words = re.sub(r"\W+", "-", title.lower()).strip("-") if len(title) < _LONG else ""
            parts = [section.id, f"{number}", words] if len(drawn) > 1 else [section.id]
            drawn_in = re.sub(r"var\(--([\w-]+)\)", lambda match: light.get(match[1], match[0]), svg)
            yield "-".join(filter(None, parts)), drawn_in
