"""What the documentation says of functions and options; its links are checked by mkdocs (scripts/check)."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import concepts_picture
import pytest
import reference
import typer.main

import niwaki
from niwaki.cli.app import app
from niwaki.records.record import CalibrationRecord, HealingRecord, StructureRecord
from support.command import Command
from support.models import save_some_of_the_embedded

ROOT = Path(__file__).parent.parent
LOG = ROOT / "benchmarks" / "LOG.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", LOG, *sorted((ROOT / "docs").glob("*.md"))]


def code(page: Path) -> list[ast.Module]:
    """The Python blocks of a page."""
    blocks = re.findall(r"^( *)```python\n(.*?)^\1```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [ast.parse(inspect.cleandoc("\n" + block)) for _, block in blocks]


def test_the_reference_is_that_of_the_program() -> None:
    """Each command and each public name has its entry, with the options, arguments and words that it has now."""
    for page, text in reference.render().items():
        assert page.read_text(encoding="utf-8") == text, f"{page.name}: python scripts/reference.py"


def test_the_picture_of_the_concepts_is_as_it_is_drawn() -> None:
    for path, text in concepts_picture.pictures().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: python scripts/concepts_picture.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_functions_are_called_with_arguments_that_they_have(page: Path) -> None:
    for block in code(page):
        for node in ast.walk(block):
            if isinstance(node, ast.ImportFrom) and node.module == "niwaki":
                assert {alias.name for alias in node.names} <= set(niwaki.__all__)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "niwaki":
                assert node.attr in niwaki.__all__
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                name = ast.unparse(node.func).removeprefix("niwaki.")
                if name in niwaki.__all__:
                    values = {keyword.arg or "": None for keyword in node.keywords}
                    inspect.signature(getattr(niwaki, name)).bind(*node.args, **values)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_the_options_that_are_shown(page: Path) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for name, rest in re.findall(r"(?:^[ $]*|`|-m |\bdo |&& )niwaki ([a-z]+)\b([^`#&;\n]*)", text, re.MULTILINE):
        if name in commands:
            known = {flag for option in commands[name].params for flag in (*option.opts, *option.secondary_opts)}
            shown = re.findall(r"(?<!\S)(--[a-z][a-z0-9-]*)", rest)
            assert set(shown) <= {*known, "--help"}, (name, rest)


@pytest.mark.parametrize(("page", "address"), [("index.md", "./"), ("methods.md", "methods/")])
def test_pictures_are_found_on_the_site(page: str, address: str) -> None:
    """Where a page is a directory, what its HTML says is relative to that."""
    hooks = pytest.importorskip("site_hooks")
    file = SimpleNamespace(src_uri=page, url=address)
    source = "docs/figures/zeros-dark.svg" if page == "index.md" else "figures/zeros-dark.svg"
    said = f'<source srcset="{source}"> ![scaling]({source})'
    made = hooks.on_page_markdown(said, SimpleNamespace(file=file), SimpleNamespace(repo_url=""), None)
    up = "" if page == "index.md" else "../"
    assert made == f'<source srcset="{up}figures/zeros-dark.svg"> ![scaling](figures/zeros-dark.svg)'


def _anchors(page: Path) -> set[str]:
    """What its headings are called in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_from_and_to_the_log_lead_somewhere() -> None:
    """The log is no page of the site, where mkdocs checks them."""
    for page in (*PAGES, ROOT / "CHANGELOG.md"):
        links = re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8"))
        for target, anchor in links:
            to = (page.parent / target).resolve() if target else page
            if LOG in (page, to):
                assert to.exists(), (page.name, target)
                assert not anchor or anchor in _anchors(to), (page.name, target, anchor)


# The table of names


def _rows() -> list[tuple[list[str], list[str], list[str]]]:
    """Of each row of the table in docs/commands.md the names in Python, on the command line and in the record."""
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    table = text.split("## The same in Python and in the record")[1].split("\n## ")[0]
    rows = [line.split(" |") for line in table.splitlines() if line.startswith("| ")][1:]
    return [tuple(re.findall(r"`([^`]+)`", cell) for cell in row[1:4]) for row in rows]  # type: ignore[misc]


def test_the_table_of_names_has_all_arguments() -> None:
    functions = ("compress", "prune", "quantize", "shrink", "heal", "run", "compare", "evaluate", "evaluate_tasks")
    there = {name for each in functions for name in inspect.signature(getattr(niwaki, each)).parameters}
    for group in (niwaki.Calibration, niwaki.Measurement, niwaki.Compute):
        there |= {f"{group.__name__}.{name}" for name in inspect.signature(group).parameters}
    assert {name for names, _, _ in _rows() for name in names} == there | {"Record.save"}
    assert hasattr(niwaki.Record, "save")


def test_the_table_of_names_has_all_options() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    there: set[str] = set()
    for name in ("compress", "prune", "quantize", "shrink", "heal", "run", "compare", "eval"):
        for option in commands[name].params:
            names = (*option.opts, *option.secondary_opts)
            there |= {each for each in names if each.startswith("--")} or {option.metavar}
    listed = {name for _, names, _ in _rows() for name in names}
    assert listed - {"eval"} == there - {"--help-all"}


def test_the_table_of_names_has_what_is_in_the_record() -> None:
    groups = {
        "structure": StructureRecord.__annotations__,
        "healing": HealingRecord.__annotations__,
        "calibration": CalibrationRecord.__annotations__,
        "perplexity": niwaki.Perplexity.__annotations__,
    }
    for _, _, names in _rows():
        for name in names:
            first, _, rest = name.partition(".")
            assert first in niwaki.Record.__annotations__
            assert not rest or rest in groups[first], name


def test_names_are_the_same_in_python_and_on_the_command_line() -> None:
    """But for those of a group's first field, of several things at once, of what is measured, and words of Python."""
    others = {"patterns", "stages", "measurement", "Measurement.samples", "compute", "Record.save", "progress"}
    others |= {"Calibration.text", "Measurement.before", "runtime"}
    for names, options, _ in _rows():
        for name in set(names) - others:
            last = name.rpartition(".")[2]
            assert {f"--{last.replace('_', '-')}", last.upper()} & set(options), name


# Commands that are shown


def _table(page: Path) -> dict[str, str]:
    """Of a table of which command when, what to do by what is wanted."""
    rows = re.findall(r"^\| ([^|]+) \| (`niwaki [^|]+) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    return dict(rows)


def test_readme_has_rows_of_the_one_table() -> None:
    all_of_them, some = _table(ROOT / "docs" / "commands.md"), _table(ROOT / "README.md")
    assert len(some) == 9
    for want, do in some.items():
        assert all_of_them[want].startswith(do.split("`")[1].join("``")), want


def _shown(page: str) -> list[str]:
    """The commands that a page shows with the embedded model or with what came of it."""
    lines = re.findall(r"^ {4}(?:\$ )?niwaki (.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    shown = [line.partition(" #")[0].strip() for line in lines]
    return [line for line in shown if not {"MODEL", "path/to/model"} & set(line.split())]


@pytest.mark.slow
def test_commands_for_the_embedded_model_run(niwaki_: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand, one after the other, on less text and with fewer blocks, and each once."""
    monkeypatch.chdir(tmp_path)
    save_some_of_the_embedded(tmp_path / "demo")
    assert len(_shown("README.md")) > 1
    for line in dict.fromkeys([*_shown("docs/quick-start.md"), *_shown("README.md")]):
        text = line.replace("--samples 64 --length 256", "--samples 4 --length 64 --text-samples 2")
        done = niwaki_(*shlex.split(text))
        assert done.code == 0, (line, done.err)
    assert (tmp_path / "small" / "packed.json").exists()


@pytest.mark.slow
def test_readme_commands_run(niwaki_: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row of its table, of a third of the embedded model and with little text."""
    monkeypatch.chdir(tmp_path)
    text = ["--calibration", "demo", "--samples", "2", "--length", "32", "--text-samples", "4"]
    niwaki_("shrink", "demo", "MODEL", "--blocks", "4", *text)
    niwaki_("prune", "MODEL", "PRUNED", "--sparsity", "0.5", "--effort", "fast", *text)
    for number, do in enumerate(_table(ROOT / "README.md").values()):
        for command in re.findall(r"`niwaki ([^`]+)`", do):
            words = command.replace("OUT", f"out{number}").replace("2h", "5s").split()
            if words[0] == "push":
                words = ["push", "PRUNED", *words[2:], "--dry-run", "--base-model", "none"]
            elif words[0] == "compare":
                words += [*text, "--text", "demo-held", "--solvers", "wanda"]
            elif words[0] == "heal":
                words += ["--calibration", "demo", "--length", "32", "--tokens", "1k", "--text-samples", "2"]
            elif words[0] != "report":
                words += text
            if "0.05" in words:
                words[words.index("0.05")] = "5"
            done = niwaki_(*words)
            assert done.code == 0, (words, done.err)
