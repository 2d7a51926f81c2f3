"""Commands that write something, for attacks on how they write it: their results, and how many calls that takes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from campaign.home import HEALING, SMALL, furnish
from support import faults
from support.forks import Ended, command
from support.runs import contents_of

_PRUNE = ("prune", "model", "out", "--solver", "wanda", *SMALL)
_COMMANDS: dict[str, tuple[str, ...]] = {
    "fast": (*_PRUNE, "--sparsity", "0.5"),
    "balanced": (*_PRUNE, "--sparsity", "0.5", "--effort", "balanced"),
    "best": (*_PRUNE, "--sparsity", "0.5", "--effort", "best:epochs=1"),
    "int4": (*_PRUNE, "--sparsity", "0.5", "--quantize", "int4:16"),
    "int8": ("quantize", "model", "out", "int8", *SMALL),
    "2:4": (*_PRUNE, "--pattern", "2:4", "--record", "runs/record.json"),
    "a block": (*_PRUNE, "--sparsity", "0.5", "--blocks", "1:2", "--effort", "balanced"),
    "shrink": ("shrink", "model", "out", "--neurons", "0.25", "--blocks", "1", *SMALL),
    "heal": ("heal", "pruned", "out", "--teacher", "TEACHER", *HEALING),
    "stages": (
        *("run", "model", "out", "--stage", "shrink neurons=0.25", "--stage", "prune 2:4 solver=wanda"),
        *("--stage", "heal tokens=512 batch=64", *SMALL),
    ),
    "pack": ("pack", "pruned", "out"),
    "unpack": ("unpack", "packed", "out"),
    "export": ("export", "on grid", "out"),
    "gguf": ("export", "pruned", "model.gguf", "--format", "gguf-f16"),
    "compare": (
        *("compare", "model", "-o", "out", "--solvers", "wanda,magnitude", "--sparsity", "0.5"),
        *("--text", "demo-held", *SMALL),
    ),
    "report": ("report", "pruned", "-o", "report.html"),
    "eval": ("eval", "model", "--text", "demo-held", "--length", "32", "--text-samples", "2", "--record", "eval.json"),
}


@dataclass
class Runs:
    """The commands, in a directory that has what they read."""

    home: Path
    calls: faults.Calls = field(default_factory=faults.Calls)
    _results: dict[tuple[str, bool], Result] = field(default_factory=dict)

    def __post_init__(self) -> None:
        furnish(self.home)
        ended = command(("prune", "model", "on grid", *_COMMANDS["int4"][3:]), self.home)
        assert ended.code == 0, ended.err

    def some(self, chance: random.Random, place: Path) -> Run:
        """One of them."""
        name = chance.choice([*_COMMANDS])
        return Run(self, name, "out" in _COMMANDS[name] and chance.random() < 0.5, place)

    def result(self, name: str, there: bool) -> Result:
        """What comes of one of them that nothing happens to."""
        if (name, there) not in self._results:
            place = self.home / f"{name} {there}".replace(":", "-")
            place.mkdir()
            run = Run(self, name, there, place)
            ended = run(self.calls.arm)
            assert ended.code == 0, ended.err
            self._results[name, there] = Result(run.contents(), self.calls.count)
        return self._results[name, there]


class Result(NamedTuple):
    """What a command leaves, and how many calls that change the disk it takes."""

    contents: dict[str, str]
    calls: int


@dataclass(frozen=True)
class Run:
    """One of them, in an empty directory."""

    runs: Runs
    name: str
    there: bool  # whether its output is an empty directory before
    place: Path

    def __post_init__(self) -> None:
        if self.there:
            (self.place / "out").mkdir()

    def __call__(self, before: Callable[[], None] = lambda: None) -> Ended:
        arguments = [str(self.runs.home / "model") if each == "TEACHER" else each for each in _COMMANDS[self.name]]
        read = str(self.runs.home / arguments[1])
        return command([arguments[0], read, *arguments[2:]], self.place, before)

    @property
    def calls(self) -> int:
        """How many calls that change the disk it takes."""
        return self.runs.result(self.name, self.there).calls

    @property
    def expected(self) -> dict[str, str]:
        """What it leaves."""
        return self.runs.result(self.name, self.there).contents

    def contents(self) -> dict[str, str]:
        """All below its directory."""
        return contents_of(self.place, self.name == "compare")

    def check(self) -> None:
        """AssertionError unless all is there as it should be, and nothing else."""
        found = self.contents()
        names = [name for name in {**found, **self.expected} if found.get(name) != self.expected.get(name)]
        assert not names, f"{self.name} {self.there}: {names} differ: {[*found]} instead of {[*self.expected]}"

    @property
    def is_complete(self) -> bool:
        """Whether the output is there as it should be, and nothing of a run on its way."""
        names = {name for name in self.expected if name.partition("/")[0] in ("out", "report.html", "eval.json")}
        found = self.contents()
        return all(found.get(name) == self.expected[name] for name in names) and not any(".partial" in n for n in found)

    def check_nothing_is_half(self) -> None:
        """AssertionError where the output has something and is not complete, or one that will be."""
        if self.name == "compare" or self.is_complete:  # a comparison keeps the cells that are done
            return
        out = self.place / "out"
        mine = out.exists() and [path.name for path in out.iterdir() if not path.name.startswith(".partial")]
        journals = [*self.place.glob(".out.partial.json"), *out.glob(".partial.json")]
        assert not mine or journals, f"{self.name} {self.there}: half-written, {self.contents()}"
        assert not [name for name in self.contents() if name in ("report.html", "eval.json", "runs/record.json")]

    def again(self) -> str:
        """The same command once more, and what came of it."""
        was_complete = self.is_complete
        ended = self()
        if was_complete and "is not an empty directory" in ended.err:
            (self.place / "runs" / "record.json").unlink(missing_ok=True)  # which comes after it
            return "it was complete"
        assert ended.code == 0, f"{self.name} {self.there}: {ended.code} {ended.err[-3000:]} {[*self.contents()]}"
        self.check()
        return "resumed" if "resuming after" in ended.out + ended.err else "done"
