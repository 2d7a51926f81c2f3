"""Commands whose disk becomes full, or fails once, at any call that changes it."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

from campaign.runs import Runs
from support import faults
from support.forks import refused

_runs: Runs


def prepare(place: Path) -> None:
    global _runs
    _runs = Runs(place)


def case(chance: random.Random, place: Path) -> str:
    how = chance.choice(("full", "full", "failing", "failing", "small", "limited"))
    at, size = chance.random(), chance.randint(4, 700)
    with _small(place, size) if how == "small" else contextlib.nullcontext():
        run = _runs.some(chance, place)
        number = 1 + int(at * run.calls)

        def before() -> None:
            if how == "limited":
                resource.setrlimit(resource.RLIMIT_FSIZE, (size << 10, resource.RLIM_INFINITY))
            elif how != "small":
                _runs.calls.arm(number, faults.FULL if how == "full" else faults.IO)

        ended = run(before)
        if ended.code == 0:
            run.check()
            return f"{run.name} {how}, done"
        refused(ended)
        run.check_nothing_is_half()
        if how == "small":
            subprocess.run(["mount", "-o", "remount,size=50m", str(place)], check=True)
        return f"{run.name} {how}, {run.again()}"


@contextlib.contextmanager
def _small(place: Path, size: int) -> Iterator[None]:
    """A file system of ``size`` KiB at ``place``, where that is possible."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "none", str(place)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", str(place)], check=True)
