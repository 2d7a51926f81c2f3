"""Writes the reference pages from the program: docs/cli.md from the commands, docs/api.md from the public names.

python scripts/reference.py           # after a change of an option, of help, of a signature or of a docstring
python scripts/reference.py --check   # fails if a page would change

Each entry stands between marks with its name. On the site the whole docstring takes the place of an entry of
docs/api.md (scripts/site_hooks.py); what is in the file is for those who read it on a code host or in an editor.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
import typing
from pathlib import Path
from typing import Any

import typer.main

import niwaki
import niwaki.errors
from niwaki.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
WIDTH = 110


def plain(text: str) -> str:
    """A part of a docstring as Markdown in one line: names in code, without the markup of Sphinx."""
    text = re.sub(r":mod:`([\w.]+)`", r"`\1`", text)  # whose last word alone says little
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    return " ".join(text.split()).removesuffix("::").strip()


def cell(text: str) -> str:
    """``text`` in a table."""
    return plain(text).replace("|", "\\|")


# The command line


def command_entry(name: str, command: Any) -> str:
    """A command: what it does, how it is called, its arguments and options."""
    description = [plain(part) for part in re.split(r"\n\s*\n", command.help or "")]
    arguments = [each for each in command.params if not each.opts[0].startswith("-")]
    options = [each for each in command.params if each.opts[0].startswith("-")]
    usage = " ".join(["niwaki", name, *(each.metavar or each.name.upper() for each in arguments)])
    lines = [f"## `niwaki {name}`", "", *"\n\n".join(description).splitlines(), "", f"    {usage}"]
    if options:
        lines[-1] += " [OPTIONS]"
    if arguments or options:
        lines += ["", "| | |", "|---|---|"]
    lines += [f"| `{each.metavar or each.name.upper()}` | {cell(each.help or '')} |" for each in arguments]
    lines += [f"| {_option(each)} | {cell(_help(each))} |" for each in options]
    return "\n".join(lines)


def _option(option: Any) -> str:
    """An option with what it takes: "`--order first/random`"."""
    if option.is_flag:
        return ", ".join(f"`{each}`" for each in (*option.opts, *option.secondary_opts))
    if hasattr(option, "type_descriptor"):  # of a typer that has no click below it
        kind = option.type_descriptor.annotation
        choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    else:
        choices = getattr(option.type, "choices", ())
    takes = "/".join(choices) or option.metavar or option.name.upper()
    return ", ".join(f"`{each} {takes}`" for each in option.opts)


def _help(option: Any) -> str:
    """The help of an option, with its default where it does not say it itself."""
    text = str(option.help or "").replace("\\[", "[")
    default = option.default
    if option.is_flag or callable(default) or default in (None, "", [], ()) or "[default" in text:
        return text
    shown = ", ".join(map(str, default)) if isinstance(default, (list, tuple)) else str(default)
    return f"{text} [default: {shown}]"


# Python


def name_entry(name: str, value: Any) -> str:
    """A public name: what it is, how it is called, and what its arguments, or attributes, mean."""
    lines = [f"### `niwaki.{name}`", ""]
    if isinstance(value, dict):
        return "\n".join([*lines, _VALUES[name].format(", ".join(f"`{key}`" for key in value))])
    parts = _parts(inspect.getdoc(value) or "")
    lines += [plain(parts[""])]
    if called := _called(name, value):
        lines += ["", textwrap.indent(called, "    ")]
    for title in ("Args", "Attributes"):
        if fields := _fields(parts.get(title, "")):
            lines += ["", f"| {'argument' if title == 'Args' else 'attribute'} | |", "|---|---|"]
            lines += [f"| `{field}` | {cell(text)} |" for field, text in fields]
    if "Returns" in parts:
        lines += ["", f"Returns: {plain(parts['Returns'])}"]
    if methods := _methods(value):
        lines += ["", "| method | |", "|---|---|", *(f"| `{method}` | {cell(text)} |" for method, text in methods)]
    return "\n".join(lines)


#: What is shown of classes that have many more methods, for niwaki's own pages.
_SHOWN = {
    "Record": ("costs", "mean_error", "save", "load", "to_json", "from_json"),
    "Recipe": ("read", "toml"),
    "ProgressBar": (),  # those of Progress
}
_VALUES = {
    "EFFORTS": "The efforts by name, each an `Effort`: {}.",
    "SOLVERS": "The solvers by name, each with its defaults: {}.",
}


def _parts(doc: str) -> dict[str, str]:
    """The first paragraph of a docstring as "", and its sections by their titles."""
    found = {"": doc.split("\n\n")[0]}
    for title, body in re.findall(r"^(Args|Attributes|Returns|Raises):\n((?:[ ]+.*\n?|\n)+)", doc, re.MULTILINE):
        found[title] = textwrap.dedent(body)
    return found


def _fields(body: str) -> list[tuple[str, str]]:
    """Names and meanings of a section with a field a line, whose further lines are indented."""
    found = re.findall(r"^([\w*, ]+): ((?:.*\n?)(?:[ ]+.*\n?|\n(?=[ ]))*)", body, re.MULTILINE)
    return [(name, text.split("\n\n")[0]) for name, text in found]


def _called(name: str, value: Any) -> str:
    """A call with all parameters and their defaults, without annotations; "" where nobody is to call it."""
    is_made_by_niwaki = getattr(value, "__module__", "").startswith("niwaki.records.") and name != "Progress"
    if is_made_by_niwaki or inspect.isabstract(value) or getattr(value, "_is_protocol", False):
        return ""
    if isinstance(value, type) and issubclass(value, BaseException):
        return ""
    shown: list[str] = []
    star = False
    fields = {field.name: field for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else {}
    for parameter in inspect.signature(value).parameters.values():
        is_own = bool(fields and fields[parameter.name].metadata)
        if is_own or " at 0x" in repr(parameter.default) or "<factory>" in repr(parameter.default):
            continue  # what only niwaki itself gives
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            shown, star = [*shown, "*"], True
        has_default = parameter.default is not parameter.empty
        shown.append(parameter.name + (f"={_default(parameter.default)}" if has_default else ""))
    call = f"niwaki.{name}({', '.join(shown)})"
    return "\n".join(textwrap.wrap(call, WIDTH, subsequent_indent="    ", break_on_hyphens=False))


def _default(value: Any) -> str:
    """A default as it is written: that of an object with none but its own defaults as "Compute()"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = [
            f"{field.name}={_default(getattr(value, field.name))}"
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != field.default
        ]
        return f"{type(value).__name__}({', '.join(given)})"
    return repr(value).replace("'", '"')


def _methods(value: Any) -> list[tuple[str, str]]:
    """Public methods and properties of a class of niwaki's with their first lines, but for those of solvers."""
    if not isinstance(value, type) or issubclass(value, BaseException) or value.__module__.startswith(_HANDED_ON):
        return []
    found: dict[str, str] = {}
    for base in value.__mro__:
        if not base.__module__.startswith("niwaki."):
            continue
        for name, member in vars(base).items():
            of = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            is_own = not name.startswith("_") and (isinstance(member, property) or inspect.isfunction(of))
            is_own = is_own and name in _SHOWN.get(value.__name__, (name,))
            if is_own and of is not None and (doc := inspect.getdoc(of)):
                shown = name if isinstance(member, property) else f"{name}()"
                found.setdefault(shown, doc.split("\n\n")[0])
    return list(found.items())


#: Where things are defined that users call or hand on: solvers, patterns, grids, options, efforts, stages, windows.
_HANDED_ON = (
    *("niwaki.layer.solvers", "niwaki.layer.patterns", "niwaki.layer.grid", "niwaki.options", "niwaki.effort"),
    *("niwaki.pruning", "niwaki.healing", "niwaki.shrinking", "niwaki.exports.export", "niwaki.windows"),
)


def errors_entry() -> str:
    """The errors below NiwakiError, with the exit codes that they give commands."""
    rows = []
    for name, value in vars(niwaki.errors).items():
        if isinstance(value, type) and issubclass(value, niwaki.NiwakiError) and value is not niwaki.NiwakiError:
            bases = " and ".join(f"`{base.__name__}`" for base in value.__bases__)
            doc = (inspect.getdoc(value) or "").split("\n\n")[0]
            rows.append(f"| `{name}` | {bases} | {value.exit_code} | {cell(doc)} |")
    head = ["### `niwaki.errors`", "", "| error | is a | exit code | |", "|---|---|---|---|"]
    return "\n".join([*head, *rows])


# The pages


def filled(text: str, entries: dict[str, str]) -> str:
    """``text`` with each entry between its marks, in the order in which they stand there."""
    marks = re.findall(r"^<!-- (niwaki[. ][\w.]+) -->$", text, re.MULTILINE)
    if sorted(marks) != sorted(entries):
        differing = ", ".join(sorted(set(marks) ^ set(entries)))
        raise SystemExit(f"each entry has its marks once; these differ: {differing or 'one stands twice'}")
    between = r"^<!-- (niwaki[. ][\w.]+) -->$.*?^<!-- end of \1 -->$"

    def entry(found: re.Match[str]) -> str:
        return f"<!-- {found[1]} -->\n\n{entries[found[1]]}\n\n<!-- end of {found[1]} -->"

    return re.sub(between, entry, text, flags=re.MULTILINE | re.DOTALL)


def render() -> dict[Path, str]:
    """The text of both pages."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    names = {f"niwaki.{name}": name_entry(name, getattr(niwaki, name)) for name in niwaki.__all__}
    of_commands = {f"niwaki {name}": command_entry(name, command) for name, command in commands.items()}
    cli, api = DOCS / "cli.md", DOCS / "api.md"
    return {
        cli: filled(cli.read_text(encoding="utf-8"), of_commands),
        api: filled(api.read_text(encoding="utf-8"), {**names, "niwaki.errors": errors_entry()}),
    }


def main() -> None:
    """Writes, or with --check compares."""
    stale = {path: text for path, text in render().items() if path.read_text(encoding="utf-8") != text}
    if "--check" in sys.argv:
        sys.exit(
            f"not as the program: {', '.join(path.name for path in stale)}; run {Path(__file__).name}" if stale else 0
        )
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
