"""What sections of a report are made of: charts, and tables with their numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from niwaki.records.record import MatrixRecord, Perplexity, Record
from niwaki.records.wording import kind, number, short
from niwaki.reports import charts


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
class Exhibit:
    """A part of a section: charts, and the same numbers as a table.

    Attributes:
        figures: Charts, from left to right.
        table: Their numbers; None where they are elsewhere on the page.
        title: A heading of its own, if any.
        label: What the charts show, for screen readers.
        open: Whether the table is shown at once, and not on a click.
        words: Whether its last column is of words.
    """

    figures: list[charts.Figure]
    table: Table | None
    title: str = ""
    label: str = ""
    open: bool = False
    words: bool = False


@dataclass(frozen=True)
class Section:
    """A section of the page.

    Attributes:
        id: Its anchor.
        heading: Its heading.
        why: What there is to see.
        exhibits: Its charts and tables.
        key: The least and the greatest value that colours stand for, if they do.
        beside: Whether exhibits stand next to each other where the window is wide.
        after: A last line.
    """

    id: str
    heading: str
    why: str
    exhibits: list[Exhibit] = field(default_factory=list)
    key: tuple[str, str] | None = None
    beside: bool = False
    after: str = ""


def with_error(perplexity: Perplexity) -> str:
    """``"44.87 ± 1.20"``, or without an error where there is none."""
    error = perplexity.standard_error
    return number(perplexity.value) + (f" ± {number(error)}" if error is not None else "")


def labels_of(names: Iterable[str]) -> dict[str, str]:
    """Kinds of matrices by the last part of their name, where that tells them apart."""
    names = list(dict.fromkeys(names))
    last = [short(name) for name in names]
    return {name: end if last.count(end) == 1 else name for name, end in zip(names, last, strict=True)}


class Heat(NamedTuple):
    """A value for each block and kind of matrix; of experts the mean.

    Attributes:
        cells: With "block", "row", "value", "step" and "label".
        rows: The kinds of matrices.
        blocks: The numbers of the blocks.
    """

    cells: list[charts.Row]
    rows: list[str]
    blocks: list[int]

    @classmethod
    def of(
        cls, record: Record, value: Callable[[MatrixRecord], float], form: str, step: Callable[[float], int]
    ) -> Heat:
        """Of the matrices of a record: their ``value``, written by the format ``form``, in the colour ``step``."""
        groups: dict[tuple[int, str], list[float]] = defaultdict(list)
        for matrix in record.matrices:
            groups[matrix.block, kind(matrix.name)].append(value(matrix))
        labels = labels_of(name for _, name in groups)
        cells: list[charts.Row] = []
        for (block, name), values in groups.items():
            mean = sum(values) / len(values)
            label = f"block {block} {name}: {form.format(mean)}"
            if len(values) > 1:
                low, high = form.format(min(values)), form.format(max(values))
                label = f"{label}, the mean of {len(values)} ({low} to {high})"
            row = labels[name]
            cells.append({"block": block, "row": row, "value": mean, "step": step(mean), "label": label})
        return cls(cells, list(labels.values()), sorted({block for block, _ in groups}))

    def table(self, form: str = "{:.4f}") -> Table:
        """The numbers, a row for each block."""
        cells = {(cell["block"], cell["row"]): cell for cell in self.cells}
        lines = []
        for block in self.blocks:
            line = [Cell(str(block))]
            for row in self.rows:
                cell = cells.get((block, row))
                line.append(Cell(form.format(cell["value"]), cell["step"]) if cell else Cell(""))
            lines.append(line)
        return Table(["block", *self.rows], lines)
