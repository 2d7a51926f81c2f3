"""What is being done is said at once, and again and again."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest

from niwaki.cli import screen
from niwaki.cli.screen import Screen

#: By the command what it says at once.
SAID = {
    "prune demo out --sparsity 0.5": "pruning demo",
    "shrink demo out --blocks 1": "shrinking demo",
    "heal demo out --teacher demo": "healing demo",
    "eval demo": "evaluating demo",
    "generate demo The": "loading demo",
    "compare demo -o out": "comparing methods on demo",
    "bench demo": "measuring demo",
    "pack demo out": "packing demo",
}
#: Runs each of its arguments as a command, in a fork that ends where torch or transformers is imported.
UNTIL_TORCH = """
import importlib.abc, os, sys
from niwaki.cli.main import main

class Guard(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers"):
            sys.stderr.write("torch is imported\\n")
            sys.stderr.flush()
            os._exit(7)

sys.meta_path.insert(0, Guard())
for command in sys.argv[1:]:
    process = os.fork()
    if not process:
        sys.argv = ["niwaki", *command.split()]
        main()
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 7
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="has no forks")
def test_it_comes_before_torch() -> None:
    run = subprocess.run([sys.executable, "-c", UNTIL_TORCH, *SAID], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stderr.splitlines() == [line for said in SAID.values() for line in (said, "torch is imported")]
    assert not run.stdout


def test_a_log_gets_lines_as_long_as_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(screen, "INTERVAL", 0.01)
    twice = threading.Semaphore(0)

    class Counting(Screen):
        def describe(self) -> str:
            twice.release()
            return super().describe()

    with Counting("working") as shown:
        assert twice.acquire(timeout=60)  # at once
        shown.status("block", 3, 7)
        while twice.acquire(blocking=False):  # what was said before, on a slow machine
            pass
        for _ in range(2):
            assert twice.acquire(timeout=60)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "working"
    assert "block 3/7" in lines[1:]


def test_no_line_soon_after_another(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that says enough itself is not interrupted."""
    waits: list[float] = []

    class Ended:
        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            return len(waits) == 3

    shown = Screen("working")
    monkeypatch.setattr(shown, "_ended", Ended())
    now = iter([0.0, 10.0, 29.0, 31.0, 31.0, 31.0])
    monkeypatch.setattr("niwaki.cli.screen.time.monotonic", lambda: next(now))
    monkeypatch.setattr(shown, "_last_line", 0.0)
    shown._beat()
    assert waits == [30.0, 1.0, 30.0]
    assert capsys.readouterr().err.splitlines() == ["working"]


def test_other_processes_are_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    with Screen("working"):
        pass
    assert capsys.readouterr().err == ""


def test_a_terminal_has_a_spinner_instead(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    started: list[Any] = []
    monkeypatch.setattr(threading, "Thread", lambda *given, **named: started.append(named))
    with Screen("working") as shown:
        spinner = shown._spinner
        assert spinner is not None
        shown.status("packing", 1, 2)
        assert str(spinner.status) == "packing 1/2"
        shown.stop_spinner()
        shown.status("anything")  # does no harm
        assert vars(shown)["_spinner"] is None
    assert not started
