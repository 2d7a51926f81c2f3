"""Options of the command line: made from groups, and the names that the help has from data."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
import typer
import typer.main
from typer.testing import CliRunner

import niwaki.layer.patterns as kinds
from niwaki.choices import MASK_NAMES, PATTERN_NAMES, SOLVER_NAMES, WEIGHT_NAMES
from niwaki.cli.app import app
from niwaki.cli.options import options
from niwaki.layer.patterns import Fixed, Pattern, parse_pattern
from niwaki.layer.patterns._base import Pattern as Base
from niwaki.layer.solvers import DEFAULT_SOLVER, SOLVERS


def _commands() -> dict[str, Any]:
    return typer.main.get_command(app).commands  # type: ignore[attr-defined, no-any-return]


# Names


def test_names_in_the_help_are_those_that_there_are() -> None:
    assert sorted((*SOLVER_NAMES, *MASK_NAMES, *WEIGHT_NAMES)) == sorted(SOLVERS)
    assert SOLVER_NAMES[0] == DEFAULT_SOLVER
    there = {kind for kind in vars(kinds).values() if isinstance(kind, type) and issubclass(kind, Base)}
    written = {type(parse_pattern(name)) for name in PATTERN_NAMES}
    assert all(str(parse_pattern(name)) == name for name in PATTERN_NAMES)
    assert there - written == {Pattern, Fixed, kinds.Among}  # these are given as objects, or made on the way


def test_every_option_has_help() -> None:
    for name, command in _commands().items():
        for option in command.params:
            assert option.help or name == "export", (name, option.name)
            assert "{" not in (option.help or "")
            assert "Options:" not in (command.help or "")


def test_options_do_not_leave_their_names_to_typer() -> None:
    """Versions 0.27 and 0.28 call an option as its value where the two are the same but for the case: --DEVICE."""

    @options()
    def command(model: Annotated[str, "MODEL"], device: Annotated[str, "DEVICE"] = "cpu", least: int = 1) -> None:
        """For the test."""

    made = {each.name: each.annotation.__metadata__[0] for each in inspect.signature(command).parameters.values()}
    names = {
        name: (info.default, *(info.param_decls or ())) for name, info in made.items()
    }  # typer takes the first for both
    assert "--device" in names["device"]
    assert "--least" in names["least"]
    assert "--model" not in names["model"]


# Groups


@dataclass(frozen=True)
class Inner:
    """For a test.

    Options:
        count: How many, {efforts}.
        order: Which. [default: up]
    """

    count: Annotated[int, "N"] = 3
    order: Literal["up", "down"] | None = None


@dataclass(frozen=True)
class Outer:
    """For a test.

    Options:
        quick: In a
            hurry.
    """

    inner: Inner = Inner()
    quick: bool = False
    safe: bool = True


def _made(*arguments: str) -> tuple[Any, ...]:
    given: list[Any] = []

    @options(without=("order",))
    def command(
        path: Annotated[str, "PATH"],
        names: Annotated[list[str] | None, "NAME", "--name"] = None,
        outer: Outer = Outer(inner=Inner(5, "down")),
    ) -> None:
        """Does it.

        Options:
            path: Where.
            safe: With care.
        """
        given.append((path, names, outer))

    one = typer.Typer()
    one.command()(command)
    ran = CliRunner().invoke(one, [*arguments])
    assert ran.exit_code == 0, ran.output
    return given[0] if given else (ran.output,)


def test_groups_are_made_from_their_options() -> None:
    assert _made("here") == ("here", None, Outer(Inner(5, "down")))
    made = _made("here", "--name", "a", "--name", "b", "--count", "7", "--quick", "--no-safe")
    assert made == ("here", ["a", "b"], Outer(Inner(7, "down"), True, False))


def test_the_help_is_of_the_docstrings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    said = re.sub(r"[\s│]+", " ", _made("--help")[0])
    for part in ("Does it.", "PATH", "Where.", "--count N How many, fast, balanced, best or heal. [default: 5]"):
        assert part in said
    assert "In a hurry." in said
    assert "--safe --no-safe With care. [default: safe]" in said
    assert "Options:" not in said
    assert "--order" not in said
