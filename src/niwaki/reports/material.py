"""What a report is made from: a pruned model's directory, or that of a comparison."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from niwaki.errors import CheckpointError, UsageError
from niwaki.records.comparison import Comparison
from niwaki.records.record import SPEED_NAME, Perplexity, Record
from niwaki.records.speed import SpeedRecord


@dataclass(frozen=True)
class Run:
    """One pruned model.

    Attributes:
        method: What it was pruned by.
        pattern: Such as "60 %" or "2:4".
        sparsity: Fraction of zeros in the pruned matrices.
        perplexity: By the name of the text.
        seconds: That the run took.
        error: Geometric mean of the matrices' relative errors.
        stages: Seconds by stage.
        record: All of it, where it was kept.
    """

    method: str
    pattern: str
    sparsity: float
    perplexity: dict[str, Perplexity]
    seconds: float
    error: float
    stages: dict[str, float]
    record: Record | None

    @property
    def name(self) -> str:
        """Such as "wanda, 2:4"."""
        return f"{self.method}, {self.pattern}"

    @property
    def grouped(self) -> bool:
        """Whether its pattern is n:m, alone or with others; "block-4x4:0.5" is not."""
        return re.search(r"(?<!\w)\d+:\d+(?![.\d])", self.pattern) is not None


@dataclass(frozen=True)
class Material:
    """What a directory holds.

    Attributes:
        directory: Which.
        compared: Whether it is a comparison, and not one pruned model.
        model: Where the dense model came from.
        dense: Its perplexity by the name of the text, where it was measured.
        runs: One, or those that were compared.
        calibration: As in the record.
        command: The command line, or "".
        versions: Of what matters.
        seconds: Of everything.
        json: The file that says so.
        speed: What ``niwaki bench`` found, if it was asked.
    """

    directory: Path
    compared: bool
    model: str
    dense: dict[str, Perplexity]
    runs: list[Run]
    calibration: dict[str, Any]
    command: str
    versions: dict[str, str]
    seconds: float
    json: str
    speed: SpeedRecord | None = None


@dataclass(frozen=True)
class MaskPicture:
    """A piece of a matrix: which weights are not zero.

    Attributes:
        block: The matrix's block.
        name: Its path there.
        shape: (out, in) of the whole matrix.
        size: Rows and columns of the piece, which starts at the first ones.
        zeros: Fraction of zeros in the piece.
        png: A pixel for each weight.
    """

    block: int
    name: str
    shape: tuple[int, int]
    size: tuple[int, int]
    zeros: float
    png: bytes


@dataclass(frozen=True)
class Sample:
    """What follows a prompt.

    Attributes:
        prompt: What was given.
        pruned: How the pruned model goes on.
        dense: How the dense one does; None where that could not be asked.
    """

    prompt: str
    pruned: str
    dense: str | None


@dataclass(frozen=True)
class Extras:
    """What is not in the record but in the model; ``niwaki.reports.from_model`` makes it.

    Attributes:
        masks: Pieces of masks.
        samples: Generated text.
        tokens: How many were asked for after each prompt.
        remarks: Why something is not there.
    """

    masks: Sequence[MaskPicture] = ()
    samples: Sequence[Sample] = ()
    tokens: int = 0
    remarks: list[str] = field(default_factory=list)


def load(directory: str | Path) -> Material:
    """Reads what ``niwaki prune`` or ``niwaki compare`` wrote to ``directory``.

    Raises:
        UsageError: neither did.
        CheckpointError: their files cannot be read.
    """
    directory = Path(directory).expanduser()
    for name, read in (("compare.json", _comparison), ("niwaki.json", _model)):
        path = directory / name
        if path.is_file():
            try:
                return read(directory, path.read_bytes().decode("utf-8"))
            except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                reason = f"no {error}" if isinstance(error, KeyError) else error
                raise CheckpointError(f"{path} cannot be read as what niwaki writes there: {reason}") from error
    what = "has neither niwaki.json nor compare.json" if directory.is_dir() else "is no directory"
    raise UsageError(f"{directory} {what}; give one that `niwaki prune` or `niwaki compare` wrote")


def _model(directory: Path, text: str) -> Material:
    record = Record.from_json(text)
    before, after = (
        {found["text"]: Perplexity(**found)} if (found := record.perplexity.get(when)) else {}
        for when in ("before", "after")
    )
    stages = dict(record.seconds)
    total = stages.pop("total", sum(stages.values()))
    speed = directory / SPEED_NAME
    run = Run(record.method, record.pattern, record.sparsity, after, total, record.mean_error, stages, record)
    return Material(
        directory,
        False,
        record.model,
        before,
        [run],
        record.calibration,
        record.command,
        record.versions,
        total,
        text,
        SpeedRecord.from_json(speed.read_text(encoding="utf-8")) if speed.is_file() else None,
    )


def _comparison(directory: Path, text: str) -> Material:
    comparison = Comparison.from_json(text)
    dense, *cells = comparison.cells
    runs = []
    for cell in cells:
        record = None
        if cell.record is not None:
            path = (directory / cell.record).resolve()
            if directory.resolve() not in path.parents:  # the page would show any file of the machine
                raise ValueError(f"it names a record outside of its directory: {cell.record}")
            record = Record.from_json(path.read_text(encoding="utf-8"))
        found = (cell.perplexity, cell.seconds, cell.error, cell.stages)
        runs.append(Run(cell.method, cell.pattern, cell.sparsity, *found, record))
    return Material(
        directory,
        True,
        comparison.model,
        dense.perplexity,
        runs,
        comparison.calibration,
        comparison.command,
        comparison.versions,
        comparison.seconds,
        text,
    )


def _data_uri(content: bytes | str, kind: str) -> str:
    raw = content.encode("utf-8", "replace") if isinstance(content, str) else content
    return f"data:{kind};base64,{base64.b64encode(raw).decode('ascii')}"


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"
