"""Fixtures: the command line, by its function in this process; a model and a place for what is made of it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from niwaki.cli import main as cli, screen


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Command = Callable[..., Result]


def without_sign_of_life(err: str) -> str:
    """Without the first line, which says what is being done, and has tests of its own (test_screen.py)."""
    return re.sub(
        r"\A(comparing|drawing|evaluating|exporting|healing|loading|measuring|(un)?pack|prun|read|runn|shrink).*\n",
        "",
        err,
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny LLaMA without a tokenizer, unless a module of tests has one of its own."""
    from support.models import save_model  # not in the process that only starts the others

    return save_model(tmp_path / "model")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def niwaki_(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """``niwaki ARGUMENTS`` in this process."""

    monkeypatch.setattr(screen, "INTERVAL", 1e6)  # however slow the machine is

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["niwaki", *map(str, arguments)])
        capfd.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        captured = capfd.readouterr()
        return Result(code, captured.out, without_sign_of_life(captured.err))

    return run
