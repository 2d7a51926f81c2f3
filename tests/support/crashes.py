"""Kills ``prune`` at each call that changes the disk, and does it again; prints how often, and what resumed, as JSON.

    python crashes.py MODEL ROOT

A process of its own, with one thread, because a process with OpenMP threads cannot be forked.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from support import faults

faults.preload()

import torch

from niwaki import prune
from support.forks import forked
from support.runs import contents_of

TOKENS = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(0))
#: Of the calls in the end, from the last block on: for an output that is an empty directory only these.
LAST = 25


def run(model: Path, out: Path) -> None:
    prune(
        model, out, 0.5, solver="wanda", quantize="int4:16", calibration=TOKENS, measurement=TOKENS[:2], compute="cpu"
    )


def main() -> None:
    model, root = Path(sys.argv[1]), Path(sys.argv[2])
    root.mkdir()
    calls, out = faults.Calls(), root / "out"

    def ended(at: int, mode: int) -> int:
        def work() -> None:
            calls.arm(at, mode)
            run(model, out)

        return forked(work).code

    assert ended(0, faults.COUNT) == 0
    count, expected = calls.count, contents_of(out)
    shutil.rmtree(out)
    kills, resumed = 0, set()
    for there, first in ((False, 1), (True, count - LAST)):
        for at in range(first, count + 1):
            if there:
                out.mkdir()
            assert ended(at, faults.KILL) == -signal.SIGKILL, at
            kills += 1
            complete = contents_of(out) == expected and not list(root.glob("*/.partial.json"))
            assert (complete and not list(root.glob(".*.json"))) or ended(0, faults.COUNT) == 0, (there, at)
            assert contents_of(out) == expected, (there, at)
            assert [path.name for path in root.iterdir()] == ["out"], (there, at)
            resumed.update(json.loads((out / "niwaki.json").read_text())["resumed"])
            shutil.rmtree(out)
    print(json.dumps({"kills": kills, "resumed": sorted(resumed)}))


if __name__ == "__main__":
    main()
