"""What sections of a report are made of: cells and tables, and numbers in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from niwaki.records.record import Perplexity, Record, StructureRecord
from niwaki.records.wording import counted, number, short
from niwaki.reports import charts
from niwaki.reports.material import Run, Sample


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: What it says.
        step: Its colour in a heat map, if it is in one.
        best: Whether it is the best of its column.
    """

    text: str
    step: int | None = None
    best: bool = False


@dataclass(frozen=True)
class Table:
    """A table whose first column names the rows.

    Attributes:
        head: Names of the columns.
        rows: Their cells.
    """

    head: list[str]
    rows: list[list[Cell]]

    @classmethod
    def of(cls, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
        """From text alone."""
        return cls(list(head), [[Cell(text) for text in row] for row in rows])


@dataclass(frozen=True)
class Shown:
    """Something with a heading of its own: a chart, and the same numbers as a table.

    Attributes:
        title: Its heading.
        figures: Charts, from left to right.
        table: Their numbers.
    """

    title: str
    figures: list[charts.Figure]
    table: Table


@dataclass(frozen=True)
class Detail:
    """All about one run of several: what the page says of a single model at the top, on small room.

    Attributes:
        name: Its method and pattern.
        facts: Names and values.
        notes: As in its record.
        error: Heat map of errors, as a table.
        sparsity: The same of sparsities.
        record: The record as compact JSON.
        file: A name for it.
    """

    name: str
    facts: list[tuple[str, str]]
    notes: list[str]
    error: Table
    sparsity: Table
    record: str
    file: str


def with_error(perplexity: Perplexity) -> str:
    """``"44.87 ± 1.20"``, or without an error where there is none."""
    error = perplexity.standard_error
    return number(perplexity.value) + (f" ± {number(error)}" if error is not None else "")


def _interval(perplexity: Perplexity) -> charts.Row:
    value, error = perplexity.value, perplexity.standard_error
    if error is None:
        return {"value": value, "low": None, "high": None}
    # A logarithmic axis has no place for what an error above its value would make of it.
    return {"value": value, "low": max(value - error, value / 10), "high": value + error}


def point_of(run: Run, perplexity: Perplexity) -> charts.Row:
    """A point of a chart."""
    zeros = f"{100 * run.sparsity:.2f} % zeros"
    return {
        "method": run.method,
        "pattern": run.pattern,
        "sparsity": 100 * run.sparsity,
        "published": False,
        **_interval(perplexity),
        "label": f"{run.name}: {with_error(perplexity)}, {zeros}",
    }


def dense_line(perplexity: Perplexity) -> charts.Row:
    """The dense model in a chart."""
    text = f"dense {number(perplexity.value)}"
    return {**_interval(perplexity), "text": text, "label": f"dense: {with_error(perplexity)}"}


def structure_of(run: Run) -> StructureRecord | None:
    """What structured pruning removed; None where weights became zeros."""
    return run.record.structure if run.record is not None else None


def heading(run: Run) -> str:
    """For the title: how much of it is gone."""
    if structure := structure_of(run):
        return f"{structure.share} smaller"
    part = f" in {run.record.part}" if run.record is not None and run.record.part else ""
    return f"{100 * run.sparsity:.4g} % sparse{part}"


def notes_of(record: Record | None) -> list[str]:
    """What a careful reader should know."""
    if record is None:
        return []
    resumed = ", ".join(map(str, record.resumed))
    return [*record.notes, *([f"stopped and gone on with behind block {resumed}"] if resumed else [])]


def removed_tiles(run: Run) -> list[tuple[str, str, str]]:
    """The first tiles."""
    if structure := structure_of(run):
        after, before = (structure.parameters[when] for when in ("after", "before"))
        return [
            ("fewer parameters", structure.share, f"{after:,} of {before:,} stay"),
            ("removed", f"{100 * structure.removed:.1f} %", f"of the blocks' parameters: {run.pattern}"),
        ]
    return [("zeros", f"{100 * run.sparsity:.4g} %", f"of {_matrices(run)}")]


def _matrices(run: Run) -> str:
    if run.record is None:
        return "the pruned matrices"
    part = f" in {run.record.part}" if run.record.part else ""
    weights = sum(math.prod(matrix.shape) for matrix in run.record.matrices)
    number = counted(len(run.record.matrices), "matrix", "matrices")
    return f"{number}{part}, {weights / 1e6:,.4g} M weights"


def device_of(record: Record | None) -> str:
    """Where it ran, in what."""
    return f"on {record.device} in {record.dtype}" if record is not None else ""


def facts_of(run: Run) -> list[tuple[str, str]]:
    """Names and values: how it was pruned."""
    record = run.record
    if record is None:
        return [("method", run.method), ("pattern", run.pattern)]
    found = [("method", run.method), ("solver", record.solver)]
    found += [("effort", record.effort)] if record.effort else []
    if record.structure is None:
        found += [("pattern", record.pattern)]
    elif record.structure.blocks:
        found += [("blocks removed", f"{', '.join(map(str, record.structure.blocks))}, counted from 0")]
    found += [("mask from", record.mask_from)] if record.mask_from else []
    found += [("grid", record.rounding)] if record.quantization else []
    found += [("own text", record.own_text)] if record.own_text else []
    if record.matrices:
        found += [("error", f"{record.mean_error:.4g} of the output's square, geometric mean over matrices")]
    return found


def labels_of(names: Iterable[str]) -> dict[str, str]:
    """Kinds of matrices by the last part of their name, where that tells them apart."""
    names = list(dict.fromkeys(names))
    last = [short(name) for name in names]
    return {name: end if last.count(end) == 1 else name for name, end in zip(names, last, strict=True)}


def heat_table(cells: Sequence[charts.Row], rows: Sequence[str], blocks: Sequence[int], shown: str = "{:.4f}") -> Table:
    """The numbers of a heat map, a row for each block."""
    found = {(cell["block"], cell["row"]): cell for cell in cells}
    lines = []
    for block in blocks:
        line = [Cell(str(block))]
        for row in rows:
            cell = found.get((block, row))
            line.append(Cell(shown.format(cell["value"]), cell["step"]) if cell else Cell(""))
        lines.append(line)
    return Table(["block", *rows], lines)


def same_start(sample: Sample) -> int:
    """Characters that both models have in common from the start, to the end of a word."""
    if sample.dense is None:
        return 0
    both = zip(sample.pruned, sample.dense, strict=False)
    common = next((place for place, (one, other) in enumerate(both) if one != other), None)
    if common is None:
        common = min(len(sample.pruned), len(sample.dense))
    if common == len(sample.pruned) == len(sample.dense):
        return common
    return sample.pruned.rfind(" ", 0, common + 1) + 1 if common else 0
