"""Runs ``prune`` again and again in forked processes that are killed; prints what came of it as JSON.

    python crashes.py MODEL ROOT points    from what a kill leaves at each step that writes or renames something
    python crashes.py MODEL ROOT random N  killed N times at random moments

A process of its own, with one thread, because a process with OpenMP threads cannot be forked.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from niwaki import prune
from niwaki.models.checkpoint.writing import CheckpointWriter

TOKENS = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(0))


def run(model: Path, out: Path) -> None:
    prune(model, out, 0.5, solver="wanda", grid="int4:16", calibration=TOKENS, measurement=TOKENS[:2], compute="cpu")


def child(work: Callable[[], None]) -> int:
    """The process id of a fork that does ``work``."""
    process = os.fork()
    if process:
        return process
    try:
        work()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def finished(process: int) -> bool:
    """Whether it ended well; False if it was killed."""
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0, "a run failed"
    return True


def keep_states(place: Path, states: Path) -> None:
    """Makes this process copy ``place`` at each step that changes the disk: what would be left if it were killed there.

    The copies are ``states``/1 and so on; a step that leaves what the one before left has none. What no step has
    written yet is in no copy either.
    """
    steps = [0]
    last: list[dict[Path, bytes | None]] = [{}]

    def step() -> None:
        steps[0] += 1
        state = {path.relative_to(place): path.read_bytes() if path.is_file() else None for path in place.rglob("*")}
        if state != last[0]:
            last[0] = state
            shutil.copytree(place, states / str(steps[0]))

    def wrapped(real: Callable[..., Any], before: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if before:
                step()
            done = real(*args, **kwargs)
            step()
            return done

        return call

    def half(self: CheckpointWriter, key: str, tensor: torch.Tensor, index: int | None = None) -> None:
        entry = self._entries[key]
        file = self._files[entry.shard]
        file.seek(entry.offset)
        file.write(b"x" * (entry.size // 2))
        file.flush()
        step()
        write(self, key, tensor, index)

    write = CheckpointWriter.write
    CheckpointWriter.write = half  # type: ignore[method-assign]
    os.fsync = wrapped(os.fsync, before=True)
    for name in ("mkdir", "rename", "replace", "unlink"):
        setattr(Path, name, wrapped(getattr(Path, name), before=name != "unlink"))


def contents(out: Path) -> dict[str, str]:
    """Digests of all files; of the record without times."""
    found = {}
    for path in sorted(out.rglob("*")):
        if path.name == "niwaki.json":
            record = json.loads(path.read_text())
            for name in ("seconds", "peak_memory", "resumed"):
                del record[name]
            for matrix in record["matrices"]:
                del matrix["seconds"]
            found["niwaki.json"] = json.dumps(record)
        elif path.is_file():
            found[str(path.relative_to(out))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def journal(out: Path) -> Path:
    return out.parent / f".{out.name}.partial.json"


def main() -> None:
    model, root, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    root.mkdir()
    began = time.perf_counter()
    assert finished(child(lambda: run(model, root / "whole")))
    took = time.perf_counter() - began
    expected = contents(root / "whole")
    kills, resumed = 0, set()
    chance = random.Random(0)

    def check(out: Path) -> None:
        assert contents(out) == expected, f"{out} differs"
        resumed.update(json.loads((out / "niwaki.json").read_text())["resumed"])

    if mode == "points":
        place, states = root / "run", root / "states"
        place.mkdir()
        states.mkdir()

        def work() -> None:
            keep_states(place, states)
            run(model, place / "out")

        assert finished(child(work))
        check(place / "out")
        for state in states.iterdir():
            kills += 1
            out = state / "out"
            if not out.exists() or journal(out).exists():
                assert finished(child(lambda out=out: run(model, out)))  # type: ignore[misc]
            check(out)
            assert not [path.name for path in state.iterdir() if path.name.startswith(".")]
    else:
        out = root / "0"
        while kills < int(sys.argv[4]):
            process = child(lambda out=out: run(model, out))  # type: ignore[misc]
            time.sleep(chance.uniform(0, took))
            os.kill(process, signal.SIGKILL)
            if finished(process):
                pass
            elif out.exists() and not journal(out).exists():
                kills += 1  # when it was done and had only to end
            else:
                kills += 1
                continue
            check(out)
            out = root / f"{int(out.name) + 1}"
        if journal(out).exists() or not out.exists():
            assert finished(child(lambda out=out: run(model, out)))  # type: ignore[misc]
            check(out)
    left = [path.name for path in root.iterdir() if path.name.startswith(".")]
    assert not left, left
    print(json.dumps({"kills": kills, "resumed": sorted(resumed)}))


if __name__ == "__main__":
    main()
