"""What sections of a report are made of: charts, and tables with their numbers."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from niwaki.records.perplexity import Perplexity
from niwaki.records.record import MatrixRecord, Record
from niwaki.records.wording import is_cut, kind, number, short, short_text
from niwaki.reports import charts

#: How a number is written.
Form = Callable[[float], str]


class Cell(NamedTuple):
    """A cell of a table: its text, its colour if it is in a heat map, and whether it is the best of its column."""

    text: str
    step: int | None = None
    best: bool = False


class Table(NamedTuple):
    """A table whose first column names the rows."""

    head: list[str]
    rows: list[list[Cell]]

    @classmethod
    def of(cls, head: Sequence[str], rows: Iterable[Sequence[str]]) -> "Table":
        """From text alone."""
        return cls(list(head), [[Cell(text) for text in row] for row in rows])


class Exhibit(NamedTuple):
    """A part of a section: charts, and the same numbers as a table."""

    figures: list[charts.Figure]  # from left to right
    table: Table | None  # None where the numbers are elsewhere on the page
    title: str = ""  # a heading of its own
    label: str = ""  # what the charts show, for screen readers
    open: bool = False  # whether the table is shown at once, and not on a click
    words: bool = False  # whether its last column is of words


class Section(NamedTuple):
    """A section of the page."""

    id: str  # its anchor
    heading: str
    why: str  # what there is to see
    exhibits: list[Exhibit]
    key: tuple[str, str] | None = None  # the least and the greatest value that colours stand for
    beside: bool = False  # whether exhibits stand next to each other where the window is wide
    after: str = ""  # a last line


def with_error(perplexity: Perplexity) -> str:
    """``"44.87 ± 1.20"``, or without an error where there is none."""
    error = None if is_cut(perplexity.value) else perplexity.standard_error
    return number(perplexity.value) + (f" ± {number(error)}" if error is not None else "")


def measured_on(text: str, perplexity: Perplexity) -> str:
    """``"7,161 tokens of wikitext2, context 1,024"``."""
    return f"{perplexity.tokens:,} tokens of {short_text(text)}, context {perplexity.context:,}"


def labels_of(names: Iterable[str]) -> dict[str, str]:
    """Kinds of matrices by the last part of their name, where that tells them apart."""
    last = {name: short(name) for name in names}
    ends = list(last.values())
    return {name: end if ends.count(end) == 1 else name for name, end in last.items()}


def heat_of(
    record: Record, value: Callable[[MatrixRecord], float], form: Form, step: Callable[[float], int]
) -> list[charts.Row]:
    """The ``value`` of each block and kind of matrix, of experts the mean, as ``form`` writes it, in a colour."""
    groups: dict[tuple[int, str], list[float]] = defaultdict(list)
    for matrix in record.matrices:
        groups[matrix.block, kind(matrix.name)].append(value(matrix))
    labels = labels_of(name for _, name in groups)
    cells = []
    for (block, name), values in groups.items():
        mean = sum(values) / len(values)
        label = f"block {block} {name}: {form(mean)}"
        if len(values) > 1:
            low, high = form(min(values)), form(max(values))
            label = f"{label}, the mean of {len(values)} ({low} to {high})"
        cells.append({"block": block, "row": labels[name], "value": mean, "step": step(mean), "label": label})
    return cells


def heat_table(cells: Sequence[charts.Row], form: Form) -> Table:
    """The numbers of a heat map, a row for each block."""
    kinds, blocks = charts.rows_and_blocks(cells)
    shown = {(cell["block"], cell["row"]): Cell(form(cell["value"]), cell["step"]) for cell in cells}
    rows = [[Cell(str(block)), *(shown.get((block, kind), Cell("")) for kind in kinds)] for block in blocks]
    return Table(["block", *kinds], rows)
