"""The page: sections put together, and written."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from niwaki.arguments import checked
from niwaki.errors import OutputError, UsageError
from niwaki.files import check_replaced, given_path, input_errors, nearest, replace_file
from niwaki.records.progress import Progress
from niwaki.records.record import REPORT_NAME
from niwaki.records.wording import printable
from niwaki.reports.material import Extras, Material, load

if TYPE_CHECKING:
    from niwaki.reports.charts import Section


# The charts of a report as files, for papers and slides.

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
    import vl_convert

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


#: Bytes at the start of a page in which it says that niwaki wrote it.
_HEAD = 4096


@checked
def report(
    directory: str | Path,
    out: str | Path | None = None,
    *,
    prompts: Sequence[str] | None = None,
    figures: str | Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Writes a page about a pruned model or a comparison: one self-contained HTML file.

    Args:
        directory: Output of :func:`niwaki.prune`, :func:`niwaki.shrink`, :func:`niwaki.compare` and the like.
        out: The file to write; by default ``report.html`` in ``directory``.
        prompts: Prompts that the pruned and the dense model continue; by default three sentences, none for [] or a
            comparison.
        figures: A directory that receives each chart of the page as SVG and as PDF, for papers and slides. It may have
            no other files in it.
        progress: Receives the progress of the report.

    Returns:
        The path of the page.

    Raises:
        UsageError: the directory has no record or comparison, ``out`` exists and is not such a page, or ``figures`` has
            files that are not figures.
        CheckpointError: files in the directory cannot be read.
        OutputError: the page cannot be written, or the libraries of ``niwaki[report]`` are missing.
    """
    directory = given_path(directory)
    material = load(directory)
    check_extra()
    path = given_path(directory / REPORT_NAME if out is None else out, 12)
    if path.is_dir():
        raise OutputError(f"cannot write {path}: it is a directory; give a file, as in -o report.html")
    check_replaced(path, _is_page, "is not a page that niwaki wrote")
    from niwaki.reports import sections

    folder = None if figures is None else given_path(figures, 40).absolute()
    if folder:
        check_figures(folder)
    extras = None
    if material.record is not None:
        (progress or Progress()).status("reading masks and generating text")
        from niwaki.reports.from_model import extras as read_extras

        extras = read_extras(directory, material.record, prompts)
    shown = sections.sections(material)
    replace_file(path, render(material, extras, shown))
    if folder:
        write_figures(shown, folder)
    return path


def check_extra() -> None:
    """Raises OutputError where the libraries for charts and templates are missing."""
    try:
        import altair  # noqa: F401
        import jinja2  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise OutputError(f"reports need {error.name}: pip install altair jinja2 vl-convert-python") from None


def render(material: Material, extras: Extras | None, shown: Sequence[Section]) -> str:
    """The page as HTML: the sections ``shown``, and what was read from the model."""
    import jinja2

    from niwaki.reports import charts, sections

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("niwaki.reports"),
        autoescape=True,  # names and generated text come from anywhere
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["data_uri"] = _data_uri
    folder = files("niwaki.reports") / "templates"
    style, script = ((folder / f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    page: str = environment.get_template("report.html.jinja").render(
        material=material,
        title=sections.title(material),
        tiles=sections.tiles(material),
        notes=sections.notes(material),
        facts=sections.facts(material),
        sections=shown,
        extras=extras or Extras(),
        runs=sections.details(material),
        steps=range(charts.STEPS),
        style=style,
        script=script,
        # Nothing else runs or loads, whatever a name or a generated text says.
        policy="default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src '{_digest(style)}'; script-src '{_digest(script)}'",
    )
    return printable(page)


def _is_page(file: BinaryIO) -> bool:
    """Whether a file begins as the template has it."""
    start = file.read(_HEAD).lstrip()
    return start.startswith(b"<!doctype html>") and b'<meta name="generator" content="niwaki ' in start


def _data_uri(content: bytes | str, kind: str) -> str:
    raw = content.encode("utf-8", "replace") if isinstance(content, str) else content
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
