"""Results of methods at patterns, as JSON, CSV, markdown and LaTeX."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, TypedDict

import msgspec

from niwaki.arguments import checked
from niwaki.errors import UsageError
from niwaki.files import replace_file
from niwaki.records.data import Amount, Fraction, JsonFile, Name, Seconds, Stages
from niwaki.records.perplexity import Perplexity
from niwaki.records.record import LARGEST_TABLE, CalibrationRecord, Record
from niwaki.records.wording import Table, TableCell, latex, markdown, text_in_words

#: The methods of Boza 2024, table 1, with niwaki's solver, alone and as it is by default; and its columns.
METHODS = ("magnitude", "wanda", "sparsegpt", "admm1", "admm-grad", "continuation", "continuation@balanced")
PATTERNS = ("50 %", "60 %", "70 %", "80 %", "2:4")


@dataclass(frozen=True)
class Cell:
    """The result of one method at one pattern.

    Attributes:
        method: A solver, followed by an @ and the effort unless that is "fast", as in "continuation@best"; or "dense".
        pattern: Such as "50 %" or "2:4"; "" for the dense model.
        sparsity: Measured fraction of zeros in all pruned matrices together; 0 for the dense model.
        perplexity: Perplexity of the result, by the name of the text.
        seconds: Duration of pruning, from the model directory to the pruned one; ``stages`` has it by stage, and
            ``measuring`` the time that the perplexities took.
        error: Geometric mean of the matrices' relative errors.
        record: The file with the whole record, relative to the comparison's directory, if there is one.
    """

    method: Name
    pattern: Name
    sparsity: Fraction
    perplexity: dict[Name, Perplexity]
    seconds: Seconds = 0.0
    error: Amount = 0.0
    stages: Stages = field(default_factory=dict)
    measuring: Seconds = 0.0
    record: Name | None = None

    def __post_init__(self) -> None:
        if self.pattern.endswith(" %") and not 0 <= float(self.pattern[:-2]) < 100:
            raise UsageError(f"a pattern in percent is from 0 % to below 100 %; got {self.pattern!r}")

    def is_of(self, record: Record) -> bool:
        """Whether ``record`` is the one of this cell's run, judging by the figures of both."""
        return self.sparsity == record.sparsity and math.isclose(self.error, record.mean_error)

    def __str__(self) -> str:
        values = "; ".join(f"{shown(measured)} on {text}" for text, measured in self.perplexity.items())
        return f"{self.method} {self.pattern}".strip() + f": {values}"


class Identity(TypedDict):
    """Something that must be the same for cells to be comparable, and how it is shown."""

    identity: str
    shown: str


@dataclass
class Comparison(JsonFile):
    """The results of several methods at several patterns, for one model and one calibration text: ``compare.json``.

    Attributes:
        model: Name of the model, as it was given.
        calibration: Source, samples, sequence length, order, seed and SHA-256 of the tokens.
        texts: Names of the texts that perplexity was measured on.
        cells: The dense model, then the methods at the patterns, in the order in which they were computed.
        missing: The (method, pattern) pairs that were requested and are not done yet.
        fingerprint: By name, everything that must be the same for cells to be comparable.
        command: The last command line; "" for a call from Python.
        versions: Versions of niwaki, Python and the libraries, by name.
        seconds: Duration of all calls together.
    """

    model: Name
    calibration: CalibrationRecord
    texts: Annotated[list[Name], msgspec.Meta(max_length=100)]
    cells: list[Cell] = field(default_factory=list)
    missing: list[tuple[Name, Name]] = field(default_factory=list)
    fingerprint: dict[str, Identity] = field(default_factory=dict)
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    seconds: Seconds = 0.0

    def __post_init__(self) -> None:
        done, dense = self.done(), ("dense", "")
        if self.cells and (dense != next(iter(done)) or len(done) < len(self.cells)):
            raise UsageError("cells are the dense model, and after it each method at each pattern once")
        if self.cells and self.cells[0].record is not None:
            raise UsageError("the dense model has no record")
        for key, cell in done.items():
            if set(cell.perplexity) != set(self.texts) or (key != dense and (key[0] == "dense" or not all(key))):
                raise UsageError(f"the cell of {key[0]} at {key[1]} is not one of this comparison of {self.texts}")
        if len({method for method, _ in done}) * len({pattern for _, pattern in done}) > LARGEST_TABLE:
            raise UsageError(f"{len(done):,} cells are too many methods and patterns to show")

    def done(self) -> dict[tuple[str, str], Cell]:
        """The finished cells by method and pattern; ("dense", "") is one of them."""
        return {(cell.method, cell.pattern): cell for cell in self.cells}

    def rows(self) -> list[dict[str, Any]]:
        """A flat dictionary for each cell and text, all with the same keys, as ``pandas.DataFrame(rows)`` takes them.

        Keys: model, method, pattern, sparsity, error, seconds, text, perplexity, standard_error (None if there is only
        one window), tokens, context, windows, above_dense and above_dense_error (in nats a token, on the same windows).
        """
        rows = []
        for cell in self.cells:
            made = {key: getattr(cell, key) for key in ("method", "pattern", "sparsity", "error", "seconds")}
            for text, measured in cell.perplexity.items():
                how = {key: getattr(measured, key) for key in ("standard_error", "tokens", "context", "windows")}
                gap = measured.above(self.cells[0].perplexity[text])
                how |= {"above_dense": gap.nats, "above_dense_error": gap.standard_error}
                rows.append({"model": self.model, **made, "text": text, "perplexity": measured.value, **how})
        return rows

    def grid(self, text: str) -> Table:
        """The perplexities on a text as in the paper's table 1: headings, then a row for each method, dense first.

        There is a column for each pattern: sparsities in ascending order, then other patterns. Missing cells are empty.
        The last column is the mean duration of pruning in seconds.
        """
        lowest = self._lowest(text)

        def entry(cell: Cell) -> TableCell:
            measured = cell.perplexity[text]
            return TableCell(shown(measured), measured.value == lowest[cell.pattern].value)

        patterns, rows = self._rows(entry)
        for row in rows:
            seconds = fmean(cell.seconds for cell in self.cells if cell.method == row[0].text)
            row.append(TableCell(f"{seconds:.1f}"))
        dense = ["dense", shown(self.cells[0].perplexity[text]), *[""] * len(patterns)]
        return Table(["method", *patterns, "seconds"], [list(map(TableCell, dense)), *rows])

    def gaps(self, text: str) -> Table:
        """How far each method's loss is above the dense model's, with the paired error; laid out like :meth:`grid`.

        The best of a column are all that are not clearly above the lowest, see
        :class:`~niwaki.records.perplexity.Difference`.
        """
        dense, lowest = self.cells[0].perplexity[text], self._lowest(text)

        def entry(cell: Cell) -> TableCell:
            measured = cell.perplexity[text]
            return TableCell(str(measured.above(dense)), not measured.above(lowest[cell.pattern]).clear)

        patterns, rows = self._rows(entry)
        return Table(["method", *patterns], rows)

    def _lowest(self, text: str) -> dict[str, Perplexity]:
        """The lowest perplexity of each pattern."""
        lowest: dict[str, Perplexity] = {}
        for cell in self.cells[1:]:
            measured = cell.perplexity[text]
            lowest[cell.pattern] = min(measured, lowest.get(cell.pattern, measured), key=lambda each: each.value)
        return lowest

    def _rows(self, entry: Callable[[Cell], TableCell]) -> tuple[list[str], list[list[TableCell]]]:
        """All patterns, and for each method a row with its name and the ``entry`` of each of its cells."""
        done = self.done()
        done.pop(("dense", ""), None)
        patterns = sorted(dict.fromkeys(pattern for _, pattern in done), key=_column)
        rows = []
        for method in dict.fromkeys(method for method, _ in done):
            cells = (done.get((method, pattern)) for pattern in patterns)
            rows.append([TableCell(method), *(entry(cell) if cell else TableCell("") for cell in cells)])
        return patterns, rows

    def to_csv(self) -> str:
        """The result of :meth:`rows` as CSV, with all digits."""
        rows, file = self.rows(), io.StringIO()
        writer = csv.DictWriter(file, rows[0] if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return file.getvalue()

    def to_markdown(self) -> str:
        """The tables of all texts in Markdown, with what is needed to read them."""
        lines = []
        for text in self.texts:
            for title, table in self.tables(text).items():
                lines += [f"{markdown(title)}:", "", *table.markdown(), ""]
        where = markdown(f"Model {self.model}, calibrated on {text_in_words(self.calibration)}")
        lines.append(f"{where}. {CAPTION}")
        if self.missing:
            lines += ["", f"Not done yet: {markdown(listed(self.missing))}."]
        return "\n".join(lines) + "\n"

    def to_latex(self) -> str:
        """The tables of all texts in LaTeX: each a ``tabular`` with the rules of the package booktabs."""
        lines = [r"% needs \usepackage{booktabs}"]
        lines += [f"% {latex(self.model)}, calibrated on {latex(text_in_words(self.calibration))}"]
        for text in self.texts:
            for title, table in self.tables(text).items():
                lines += ["", f"% {latex(title)}", *table.latex()]
        return "\n".join(lines) + "\n"

    def tables(self, text: str) -> dict[str, Table]:
        """The tables for a text by heading: :meth:`grid` and, once something is pruned, :meth:`gaps`."""
        dense = self.cells[0].perplexity[text]
        where = f"on {dense.tokens:,} tokens of {dense.text}, context {dense.context:,}"
        tables = {f"Perplexity {where}": self.grid(text)}
        if len(self.cells) > 1:
            tables[f"Nats a token above the dense model {where}"] = self.gaps(text)
        return tables

    def save(self, directory: Path) -> None:
        """Writes ``compare.json``, ``.csv``, ``.md`` and ``.tex`` to ``directory``, each completely or not at all.

        Raises:
            OutputError: a file cannot be written.
        """
        replace_file(directory / "compare.json", self.to_json(), sync=True)
        replace_file(directory / "compare.csv", self.to_csv())
        replace_file(directory / "compare.md", self.to_markdown())
        replace_file(directory / "compare.tex", self.to_latex())

    @classmethod
    @checked
    def load(cls, path: str | os.PathLike[str]) -> Comparison:
        """Reads the comparison in a directory that ``niwaki compare`` wrote, finished or not.

        Raises:
            CheckpointError: there is no comparison, or it cannot be read.
        """
        return super().load(Path(path) / "compare.json")


#: Below the tables.
CAPTION = (
    "± is one standard error: of a perplexity, how much another text of this size would change it; of nats above the "
    "dense model, how certain the difference is on this text. Compare methods by the nats. Bold: the best; of nats all "
    "that are less than two standard errors of the difference above the best. Seconds: of pruning, the mean of the row."
)


def shown(measured: Perplexity) -> str:
    """A perplexity with its standard error, in the little room of a table."""
    return measured.figure.replace("± ", "±")


def listed(cells: Iterable[tuple[str, str]]) -> str:
    """Cells by method: "wanda at 50 %, 2:4; admm1 at 50 %"."""
    by_method: dict[str, list[str]] = {}
    for method, pattern in cells:
        by_method.setdefault(method, []).append(pattern)
    return "; ".join(f"{method} at {', '.join(patterns)}" for method, patterns in by_method.items())


def _column(pattern: str) -> tuple[bool, float]:
    """A key that sorts patterns: sparsities first, in ascending order, and others as they come."""
    return (False, float(pattern[:-2])) if pattern.endswith(" %") else (True, 0.0)
