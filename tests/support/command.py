"""The command line: the real command, and its function in this process."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from niwaki.cli import main as cli


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Command = Callable[..., Result]


@pytest.fixture
def niwaki_(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """``niwaki ARGUMENTS`` in this process."""

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["niwaki", *map(str, arguments)])
        capfd.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        captured = capfd.readouterr()
        # What is being done, which is said at once, has a test of its own.
        said = re.sub(
            r"\A(comparing|drawing|evaluating|exporting|loading|measuring|(un)?pack|prun|read|shrink).*\n",
            "",
            captured.err,
        )
        return Result(code, captured.out, said)

    return run
