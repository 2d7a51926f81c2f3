"""Commands that are killed or stopped, once or several times, at any call that changes the disk or at any time."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

from campaign.runs import Run, Runs
from support import faults

_runs: Runs


def prepare(place: Path) -> None:
    global _runs
    _runs = Runs(place)


def case(chance: random.Random, place: Path) -> str:
    run = _runs.some(chance, place)
    how = chance.choice(("killed", "killed", "killed", "stopped", "interrupted"))
    for again in range(chance.choice((1, 1, 2, 3))):
        complete = run.is_complete  # killed after its last step
        ended = run(_end(chance, run, how))
        if ended.code == 0 or complete:
            break
        if how == "killed":
            assert ended.code == -signal.SIGKILL, f"{run.name}: {ended.code} {ended.err[-2000:]}"
        else:
            assert ended.code in (1, 130, 143), f"{run.name}: {ended.code} {ended.err[-2000:]}"
            assert "Traceback" not in ended.err, ended.err
            assert "error" not in ended.err, ended.err
            if not again:  # stopped while it looks at what an earlier one left, it says nothing of that
                _check_words(run, ended.err)
    return f"{run.name} {how}, {run.again()}"


def _end(chance: random.Random, run: Run, how: str) -> Callable[[], None]:
    """What a fork does first, to end later."""
    at, moment = chance.randint(1, run.calls), chance.uniform(0.001, 0.5)
    if how != "interrupted":
        return lambda: _runs.calls.arm(at, faults.KILL if how == "killed" else faults.STOP)

    def alarm() -> None:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, moment)

    return alarm


def _check_words(run: Run, err: str) -> None:
    """AssertionError where a stopped command says that something is kept and nothing is, or the other way round."""
    run.check_nothing_is_half()
    if run.name == "compare":
        return
    journals = [name for name in run.contents() if name.endswith(".partial.json")]
    if "are done and kept" in err:
        assert journals, f"{run.name}: {err}"
    elif "nothing was written" in err:
        assert not journals, f"{run.name}: {err}"
    elif run.name not in ("pack", "unpack", "export", "gguf"):
        assert not journals, f"{run.name}: {err} {[*run.contents()]}"
