"""What a report is made from: a pruned model's directory, or that of a comparison."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from niwaki.errors import CheckpointError, UsageError
from niwaki.files import given_path
from niwaki.records import data
from niwaki.records.comparison import Cell, Comparison
from niwaki.records.perplexity import Perplexity
from niwaki.records.record import SPEED_NAME, Record
from niwaki.records.speed import SpeedRecord


@dataclass(frozen=True)
class PrunedModel(Cell):
    """A pruned model: a cell of a comparison, with its record where that was kept."""

    full: Record | None = None

    @property
    def name(self) -> str:
        return f"{self.method}, {self.pattern}"

    @property
    def grouped(self) -> bool:
        """Whether its pattern is n:m, alone or with others."""
        return re.search(r"(?<!\w)\d+:\d+(?![.\d])", self.pattern) is not None


@dataclass(frozen=True)
class Material:
    """What a directory holds: a comparison, or one pruned model."""

    source: Comparison | Record
    runs: list[PrunedModel]
    dense: dict[str, Perplexity]  # of the dense model by text, where it was measured
    seconds: float  # in total
    json: str  # the text of the file that the report is about
    speed: SpeedRecord | None = None

    @property
    def record(self) -> Record | None:
        """The record of a single model; None for a comparison."""
        return self.source if isinstance(self.source, Record) else None

    @property
    def file(self) -> str:
        return "niwaki.json" if self.record else "compare.json"

    @property
    def name(self) -> str:
        """The name of the dense model, without its folders."""
        return Path(self.source.model).name or self.source.model

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(run.method for run in self.runs))

    @property
    def patterns(self) -> list[str]:
        return list(dict.fromkeys(run.pattern for run in self.runs))

    @property
    def texts(self) -> list[str]:
        return list(dict.fromkeys(text for run in self.runs for text in run.perplexity))

    @cached_property
    def errors(self) -> tuple[float, float] | None:
        """The range of the matrices' errors that colours stand for, the same over the page."""
        records = [run.full for run in self.runs if run.full is not None]
        errors = [matrix.error for record in records for matrix in record.matrices if matrix.error > 0]
        return (min(errors), max(errors)) if errors else None


class MaskPicture(NamedTuple):
    """A corner of a matrix: which weights are not zero."""

    block: int
    name: str
    shape: tuple[int, int]  # (out, in) of the whole matrix
    size: tuple[int, int]  # rows and columns of the corner
    zeros: float  # fraction in the corner
    png: bytes  # a pixel for each weight


@dataclass(frozen=True)
class Sample:
    """How the pruned and the dense model continue a prompt; ``dense`` is None where that model is not available."""

    prompt: str
    pruned: str
    dense: str | None

    @property
    def common(self) -> int:
        """Characters that both continuations have in common from the start, to the end of a word."""
        if self.dense is None:
            return 0
        shorter = min(len(self.pruned), len(self.dense))
        same = next((i for i in range(shorter) if self.pruned[i] != self.dense[i]), shorter)
        return same if self.pruned == self.dense else self.pruned.rfind(" ", 0, same + 1) + 1


class Extras(NamedTuple):
    """What is not in the record but in the model; ``niwaki.reports.from_model`` makes it."""

    masks: Sequence[MaskPicture] = ()
    samples: Sequence[Sample] = ()
    tokens: int = 0  # that were asked for after each prompt
    remarks: Sequence[str] = ()  # why something is missing


def load(directory: str | Path) -> Material:
    """What ``niwaki prune``, ``shrink`` or ``compare`` wrote; UsageError for nothing, CheckpointError if unreadable."""
    directory = given_path(directory)
    if (directory / "compare.json").is_file():
        return data.load(directory / "compare.json", lambda text: _compared(directory, text))
    if (directory / "niwaki.json").is_file():
        bench = directory / SPEED_NAME
        speed = SpeedRecord.load(bench) if bench.is_file() else None
        return data.load(directory / "niwaki.json", lambda text: _pruned(text, speed))
    what = "has neither niwaki.json nor compare.json" if directory.is_dir() else "is not a directory"
    raise UsageError(f"{directory} {what}; give one that `niwaki prune` or `niwaki compare` wrote")


def _pruned(text: str, speed: SpeedRecord | None) -> Material:
    record = Record.from_json(text)
    before, after = ({one.text: one} if (one := record.perplexity.get(when)) else {} for when in ("before", "after"))
    stages = dict(record.seconds)
    total = stages.pop("total", sum(stages.values()))
    run = PrunedModel(
        record.method, record.pattern, record.sparsity, after, total, record.mean_error, stages, full=record
    )
    return Material(record, [run], before, total, text, speed)


def _compared(directory: Path, text: str) -> Material:
    comparison = Comparison.from_json(text)
    if not comparison.cells:
        raise CheckpointError("it has no results")
    dense, *cells = comparison.cells
    runs = []
    for cell in cells:
        record = None
        if cell.record is not None:
            path = Path(os.path.realpath(directory / cell.record))
            if Path(os.path.realpath(directory)) not in path.parents:  # the page would show any file of the machine
                raise CheckpointError(f"it names a record outside of its directory: {cell.record}")
            record = Record.load(path)
            if not cell.is_of(record):
                raise CheckpointError(f"{cell.record} is not the record of {cell.method} at {cell.pattern}")
        runs.append(PrunedModel(**vars(cell), full=record))
    return Material(comparison, runs, dense.perplexity, comparison.seconds, text)
