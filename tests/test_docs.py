"""What the documentation says of functions and options; its links are checked by mkdocs (scripts/check)."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
import typer.main

import niwaki
from niwaki.cli.app import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def code(page: Path) -> list[ast.Module]:
    """The Python blocks of a page."""
    blocks = re.findall(r"^( *)```python\n(.*?)^\1```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [ast.parse(inspect.cleandoc("\n" + block)) for _, block in blocks]


def test_the_reference_has_each_public_name() -> None:
    named = re.findall(r"^::: niwaki\.([\w]+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(set(named) - {"errors"}) == niwaki.__all__


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
