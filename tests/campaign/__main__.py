"""Attacks niwaki for a while, and counts what came of it.

    python tests/campaign --minutes 30            all kinds of attack in turn, on all cores
    python tests/campaign --cases 100 --kind kills --seed 7
    python tests/campaign --case kills:0:1234     one case again, by its kind, seed and number

Each case has to end in the right result, or in one line that says what is wrong, with nothing half-written. Those that
do not are printed, and the exit code is 1. The same seed gives the same cases.
"""

from __future__ import annotations

import os

# Before torch: processes with OpenMP threads cannot be forked.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
# What results are compared with is loaded by transformers, whose threads for that failed once in many thousand forks.
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from support import faults

faults.preload()

import argparse
import json
import multiprocessing
import random
import shutil
import tempfile
import time
import traceback
from collections import Counter
from typing import Any

from campaign.kinds import KINDS
from support.forks import warm_up


def one(kind: str, seed: int, number: int, place: Path) -> str:
    """What came of a case: "as it should be" in some words of its kind; AssertionError where it is not."""
    directory = place / f"{kind}-{number}"
    directory.mkdir()
    try:
        return str(KINDS[kind].case(random.Random(f"{kind} {seed} {number}"), directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def work(number: int, options: argparse.Namespace, results: Any) -> None:
    """Every ``options.jobs``-th case from ``number`` on, of all kinds in turn, until there are enough or time is up."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="campaign-") as name:
        place = Path(name)
        for kind in options.kind:
            (place / kind).mkdir()
            KINDS[kind].prepare(place / kind)
        while options.cases is None or number < options.cases:
            for kind in options.kind:
                if options.minutes is not None and time.monotonic() - began > 60 * options.minutes:
                    return
                try:
                    results.put((kind, number, one(kind, options.seed, number, place), None))
                except BaseException:
                    results.put((kind, number, "WRONG", traceback.format_exc()))
            number += options.jobs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="how long")
    parser.add_argument("--cases", type=int, help="how many of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=[*KINDS], help="only this kind; can be given several times")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--case", help="KIND:SEED:NUMBER, one case")
    parser.add_argument("--record", type=Path, help="write the counts to this JSON file")
    options = parser.parse_args()
    if options.case:
        kind, seed, number = options.case.split(":")
        options.kind, options.seed = [kind], int(seed)
        warm_up()
        with tempfile.TemporaryDirectory(prefix="campaign-") as name:
            (place := Path(name) / kind).mkdir()
            KINDS[kind].prepare(place)
            print(one(kind, options.seed, int(number), Path(name)))
        return 0
    if options.minutes is None and options.cases is None:
        parser.error("say how long: --minutes 30 or --cases 100")
    options.kind = options.kind or [*KINDS]
    warm_up()
    results: Any = multiprocessing.get_context("fork").SimpleQueue()
    workers = [
        multiprocessing.get_context("fork").Process(target=work, args=(number, options, results))
        for number in range(options.jobs)
    ]
    for worker in workers:
        worker.start()
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in options.kind}
    wrong = 0
    while True:
        while not results.empty():
            kind, number, outcome, trace = results.get()
            counts[kind][outcome] += 1
            if trace:
                wrong += 1
                print(f"\n{kind}:{options.seed}:{number}\n{trace}", flush=True)
        if not any(worker.is_alive() for worker in workers) and results.empty():
            break
        time.sleep(0.05)
    for kind, counter in counts.items():
        print(f"{kind}: {counter.total():,} cases: " + ", ".join(f"{n:,} {what}" for what, n in counter.most_common()))
    print(f"{sum(map(Counter.total, counts.values())):,} cases, {wrong} wrong")
    failed = wrong or any(worker.exitcode for worker in workers)
    if options.record:
        options.record.write_text(
            json.dumps({"seed": options.seed, "minutes": options.minutes, "wrong": wrong, "kinds": counts}, indent=2)
            + "\n"
        )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
