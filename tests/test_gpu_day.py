"""The script for a machine with a GPU: parts that fail, hang or are left out cost nothing but themselves."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "gpu_day.py"


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, whose table a test replaces."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("gpu_day", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_day", module)
    spec.loader.exec_module(module)
    return module


def ran(day: ModuleType, out: Path, parts: list[Any], *options: str) -> tuple[int, dict[str, Any]]:
    """The exit status, and the parts in the record."""
    day.PARTS[:] = parts
    status: int = day.main(["--device", "cpu", "--out", str(out), *options])
    found: dict[str, Any] = json.loads(out.read_text())["parts"]
    assert os.listdir(out.parent) == [out.name]
    return status, found


def gone(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    return True


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_part_that_fails_does_not_stop_the_others(
    day: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    parts = [
        day.Part("first", "one", 5, "echo wrong >&2; false; echo never"),
        day.Part("second", "two", 5, "echo '{{\"seconds\": 3}}' > {out}/times.json; echo '[' > {out}/half.json"),
        day.Part("third", "three", 5, "pwd; echo $PYTHONPATH; echo {device} $TMPDIR {out}; cat"),
    ]
    status, found = ran(day, tmp_path / "record.json", parts)
    assert status == 1
    assert list(found) == ["first", "second", "third"]
    first, second, third = found.values()
    assert (first["status"], first["exit"], first["tail"], first["limit"]) == ("failed", 1, "wrong\n", 5)
    assert (second["status"], second["shows"], second["records"]) == ("passed", "two", {"times": {"seconds": 3}})
    root, path, words = third["tail"].splitlines()[:3]
    device, *directories = words.split()
    assert (root, path, device) == (str(SCRIPT.parent.parent), f"{SCRIPT.parent.parent / 'src'}:/elsewhere", "cpu")
    assert directories[0] == directories[1]
    assert not Path(directories[0]).exists()
    printed = capsys.readouterr().out
    assert printed.startswith("first: failed 0.")
    assert "wrong" in printed
    assert ran(day, tmp_path / "record.json", parts[1:])[0] == 0
    assert list(ran(day, tmp_path / "record.json", parts, "--parts", "third,second")[1]) == ["second", "third"]


def test_a_part_over_its_limit_ends_with_all_that_it_began(day: ModuleType, tmp_path: Path) -> None:
    parts = [
        day.Part("slow", "", 0.5, "sh -c 'sleep 60 & echo $!; wait' & echo $!; wait"),
        day.Part("leaves something", "", 5, "sleep 60 & echo $!"),
    ]
    status, found = ran(day, tmp_path / "record.json", parts)
    assert status == 1
    assert [part["status"] for part in found.values()] == ["over its limit", "passed"]
    assert found["slow"]["seconds"] < 5
    pids = [int(pid) for part in found.values() for pid in part["tail"].split()]
    assert len(pids) == 3
    wait_for(lambda: all(map(gone, pids)))


def test_what_the_budget_has_no_room_for_is_left_out(day: ModuleType, tmp_path: Path) -> None:
    parts = [day.Part(name, "", limit, "true") for name, limit in (("a", 5), ("b", 90), ("c", 7))]
    status, found = ran(day, tmp_path / "record.json", parts, "--budget", "0.1")
    assert status == 0
    assert [part["status"] for part in found.values()] == ["passed", "left out", "passed"]
    assert "s of the budget were left" in found["b"]["why"]
    slow = [day.Part("a", "", 1, "sleep 60"), day.Part("b", "", 1, "true")]
    status, found = ran(day, tmp_path / "record.json", slow, "--budget", "0.01")
    assert [part["status"] for part in found.values()] == ["over its limit", "left out"]


def test_what_cannot_run_here_is_skipped(day: ModuleType, tmp_path: Path) -> None:
    parts = [
        day.Part("a", "", 5, "false", needs=("torch", "nowhere")),
        day.Part("b", "", 5, "false", gpu=True),
        day.Part("c", "", 5, "false", needs=("niwaki._no_kernels",)),
    ]
    status, found = ran(day, tmp_path / "record.json", parts)
    assert status == 0
    assert [part["status"] for part in found.values()] == ["skipped"] * 3
    whys = ["it needs nowhere, not installed here", "it needs a GPU"]
    assert [part["why"] for part in found.values()] == [*whys, "it needs niwaki._no_kernels, not installed here"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_killed_keeps_what_it_finished(number: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    code = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import gpu_day
commands = "echo done", "echo $$; exec sleep 20", "true"
gpu_day.PARTS[:] = [gpu_day.Part(name, "", 60, command) for name, command in zip("abc", commands)]
sys.exit(gpu_day.main(["--device", "cpu", "--out", {str(out)!r}]))
"""
    run = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)

    def parts() -> list[dict[str, Any]]:
        return list(json.loads(out.read_text())["parts"].values()) if out.exists() else []

    wait_for(lambda: [part["status"] for part in parts()] == ["passed", "running", "left out"])
    # Not a moment after the fork, when whoever starts it does not know it yet.
    wait_for(lambda: [each.name() for each in psutil.Process(run.pid).children()] == ["sleep"])
    (child,) = psutil.Process(run.pid).children()
    run.send_signal(number)
    said = run.communicate(timeout=20)[1]
    assert parts()[0]["tail"] == "done\n"
    if number == signal.SIGTERM:
        assert (run.returncode, said) == (130, "error: stopped in b\n")
        assert parts()[1]["status"] == "stopped"
        wait_for(lambda: gone(child.pid))
    else:
        assert parts()[1]["status"] == "running"
        child.kill()
    assert parts()[2]["status"] == "left out"


def test_nothing_runs_or_is_written(
    day: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    out = ["--out", str(tmp_path / "record.json")]
    assert day.main([*out, "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == [part.name for part in day.PARTS]

    def refused(*options: str) -> str:
        with pytest.raises(SystemExit) as caught:
            day.main([*out, *options])
        assert caught.value.code == 2
        return capsys.readouterr().err

    assert refused() == "error: torch finds no GPU with CUDA; --device cpu tries the parts without one\n"
    assert "there is no part 'nothing'; parts are machine, tests, " in refused("--parts", "tests,nothing")
    said = refused("--device", "cpu", "--out", str(tmp_path / "nowhere" / "record.json"))
    assert said == f"error: {tmp_path / 'nowhere' / 'record.json'} cannot be written: No such file or directory\n"
    monkeypatch.setattr(day, "REQUIRED", ("torch", "nowhere"))
    assert refused() == "error: niwaki needs nowhere; install that, or put it on PYTHONPATH\n"
    assert list(tmp_path.iterdir()) == []


def test_the_table(day: ModuleType) -> None:
    """Commands have all their words, and name scripts that are there."""
    assert len({part.name for part in day.PARTS}) == len(day.PARTS)
    assert set(day.SIZES["cpu"]) == set(day.SIZES["cuda"])
    for part in day.PARTS:
        for sizes in day.SIZES.values():
            words = part.command.format(
                python="python", out="out", device="cpu", versions="", served="", **sizes
            ).split()
            assert all(
                (SCRIPT.parent.parent / word).exists() for word in words if word.endswith(".py") and "*" not in word
            )
