"""The page: sections put together, and written."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from niwaki.errors import OutputError, UsageError
from niwaki.files import write_json
from niwaki.records.record import REPORT_NAME
from niwaki.reports.material import Extras, Material, _data_uri, _digest


def check_extra() -> None:
    """Raises OutputError where the libraries for charts and templates are missing."""
    try:
        import altair  # noqa: F401
        import jinja2  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise OutputError(f"reports need {error.name}; install it with pip install 'niwaki[report]'") from None


def render(material: Material, extras: Extras | None = None, *, reference: str | None = None) -> str:
    """The page as HTML.

    Args:
        material: What it is about.
        extras: Masks and text, where there is a model.
        reference: "paper" to show published numbers too.

    Raises:
        OutputError: the libraries for it are missing.
        UsageError: there is no such reference.
    """
    if reference not in (None, "paper"):
        raise UsageError(f"--reference takes paper; got {reference!r}")
    check_extra()
    import jinja2

    from niwaki.reports.view import View

    folder = files("niwaki.reports") / "templates"
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8")),
        autoescape=True,  # names and generated text come from anywhere
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["data_uri"] = _data_uri
    style, script = ((folder / f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    page: str = environment.get_template("report.html.jinja").render(
        view=View(material, extras or Extras(), reference is not None),
        style=style,
        script=script,
        # Nothing else runs or loads, whatever a name or a generated text says.
        policy="default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src '{_digest(style)}'; script-src '{_digest(script)}'",
    )
    # JSON can hold halves of characters, which no file can.
    return page.encode("utf-8", "replace").decode("utf-8")


def write(page: str, directory: Path, file: Path | None = None) -> Path:
    """Writes ``page`` to ``file``, by default in ``directory``, whole or not at all; returns where.

    Raises:
        OutputError: it cannot be written.
    """
    path = file.expanduser() if file is not None else directory / REPORT_NAME
    if path.is_dir():
        raise OutputError(f"cannot write {path}: it is a directory; give a file, as in -o report.html")
    write_json(path, page)
    return path
