"""Lists of two to five stages, drawn at random and killed at random moments: the bytes of a run that was not."""

from __future__ import annotations

import random
import signal
from pathlib import Path

from campaign.home import SMALL, furnish
from support import faults
from support.forks import command
from support.runs import contents_of

_home: Path
_calls: faults.Calls

_SHRINKS = (
    "shrink neurons=0.25",
    "shrink blocks=1",
    "shrink heads=0.5 effort=fast:epochs=0.5",
    "shrink neurons=0.25 blocks=1",
    "shrink parameters=0.96",
)
_PRUNES = (
    *("prune 0.5 solver=wanda", "prune 2:4 solver=magnitude", "prune 0.5 effort=fast:epochs=0.5"),
    *("prune 0.5 solver=sparsegpt effort=fast:allocation=error", "prune 0.5 solver=wanda quantize=int8"),
)
_HEALS = (
    "heal tokens=512 batch=64",
    "heal tokens=256 batch=64 method=blocks own_text=0",
    "heal tokens=256 batch=64 method=lora",
)
#: The last one is for weights on a grid.
_EXPORTS = ("pack", "export gguf-q8_0", "export gguf-f16", "export compressed-tensors")


def prepare(place: Path) -> None:
    global _home, _calls
    _home, _calls = place, faults.Calls()
    furnish(place)


def drawn(chance: random.Random) -> list[str]:
    """Two to five stages in an order that makes sense."""
    stages = [chance.choice(_SHRINKS)] if chance.random() < 0.5 else []
    stages.append(chance.choice(_PRUNES))
    is_rounded = "quantize" in stages[-1]
    if chance.random() < 0.6:
        may_lose_blocks = any(name in stages[0] for name in ("blocks=1", "parameters"))
        heal = chance.choice([each for each in _HEALS if "blocks" not in each or not may_lose_blocks])
        stages.append(heal.replace("lora", "norms") if is_rounded else heal)
    if not is_rounded and chance.random() < 0.4:
        stages.append("quantize int8 effort=fast")
        is_rounded = True
    if len(stages) < 2 or chance.random() < 0.5:
        stages.append(chance.choice(_EXPORTS if is_rounded else _EXPORTS[:-1]))
    return stages


def case(chance: random.Random, place: Path) -> str:
    stages, there = drawn(chance), chance.random() < 0.3
    options = [word for stage in stages for word in ("--stage", stage)]
    arguments = ["run", str(_home / "model"), "out", *options, *SMALL]
    for name in ("whole", "killed"):
        (place / name).mkdir()
        if there:
            (place / name / "out").mkdir()
    ended = command(arguments, place / "whole", _calls.arm)
    assert ended.code == 0, f"{stages}: {ended.err[-2000:]}"
    calls, expected, kills = _calls.count, contents_of(place / "whole"), 0
    for _ in range(chance.choice((1, 2, 3))):
        at = chance.randint(1, calls)
        ended = command(arguments, place / "killed", lambda at=at: _calls.arm(at, faults.KILL))  # type: ignore[misc]
        if ended.code == 0:
            break
        kills += 1
        if ended.code != -signal.SIGKILL:  # it was complete
            assert "is not an empty directory" in ended.err, f"{stages}: {ended.code} {ended.err[-2000:]}"
            break
    ended = command(arguments, place / "killed")
    assert ended.code == 0 or "is not an empty directory" in ended.err, f"{stages}: {ended.code} {ended.err[-2000:]}"
    found = contents_of(place / "killed")
    different = [name for name in {**found, **expected} if found.get(name) != expected.get(name)]
    assert not different, f"{stages}, killed {kills} times: {different}"
    return f"{len(stages)} stages, killed {kills} times"
