"""Results of methods at patterns, as JSON, CSV and markdown."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from niwaki.arguments import checked
from niwaki.files import write_json
from niwaki.records.data import JsonFile
from niwaki.records.record import Perplexity
from niwaki.records.wording import text_in_words

#: The methods of Boza 2024, table 1, with niwaki's solver, alone and as it is by default; and its columns.
METHODS = ("magnitude", "wanda", "sparsegpt", "admm1", "admm-grad", "continuation", "continuation@balanced")
PATTERNS = ("50 %", "60 %", "70 %", "80 %", "2:4")


@dataclass(frozen=True)
class Cell:
    """One method at one pattern.

    Attributes:
        method: A solver, and after an @ the effort if it is not "fast", as in "continuation@best"; or "dense".
        pattern: Such as "50 %" or "2:4"; "" for the dense model.
        sparsity: Fraction of zeros that was measured in all pruned matrices together; 0 for the dense model.
        perplexity: Of the result, by the name of the text.
        seconds: That pruning took, from the model directory to the pruned one; ``stages`` has them by stage, and
            ``measuring`` those that the perplexities took.
        error: Geometric mean of the matrices' relative errors.
        record: The file with the whole record, relative to the comparison's directory, if there is one.
    """

    method: str
    pattern: str
    sparsity: float
    perplexity: dict[str, Perplexity]
    seconds: float = 0.0
    error: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    measuring: float = 0.0
    record: str | None = None

    def __str__(self) -> str:
        values = "; ".join(f"{shown(measured)} on {text}" for text, measured in self.perplexity.items())
        return f"{self.method} {self.pattern}".strip() + f": {values}"


class Entry(NamedTuple):
    """A cell of a table for people, and whether it is the best of its column."""

    text: str
    best: bool = False


@dataclass
class Comparison(JsonFile):
    """Methods at patterns, on one model with one calibration text: ``compare.json``.

    Attributes:
        calibration: Source, samples, sequence length, order, seed and SHA-256 of the tokens.
        cells: The dense model, and then methods at patterns in the order in which they were done.
        missing: (method, pattern) that were asked for and are not done yet.
        fingerprint: By name, the "identity" of all that has to be the same for cells to compare, and how it is "shown".
        command: The command line of the last call, or "" where it was called from Python.
        seconds: Of all calls together.
    """

    model: str
    calibration: dict[str, Any]
    texts: list[str]
    cells: list[Cell] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)
    fingerprint: dict[str, dict[str, str]] = field(default_factory=dict)
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def done(self) -> dict[tuple[str, str], Cell]:
        """The cells by method and pattern; ("dense", "") is one."""
        return {(cell.method, cell.pattern): cell for cell in self.cells}

    def rows(self) -> list[dict[str, Any]]:
        """A flat dictionary for each cell and text, the same keys in all: ``pandas.DataFrame(rows)`` takes them.

        Keys: model, method, pattern, sparsity, error, seconds, text, perplexity, standard_error (None for one window
        alone), tokens, context, windows.
        """
        rows = []
        for cell in self.cells:
            made = {key: getattr(cell, key) for key in ("method", "pattern", "sparsity", "error", "seconds")}
            for text, measured in cell.perplexity.items():
                how = {key: getattr(measured, key) for key in ("standard_error", "tokens", "context", "windows")}
                rows.append({"model": self.model, **made, "text": text, "perplexity": measured.value, **how})
        return rows

    def grid(self, text: str) -> tuple[list[str], list[list[Entry]]]:
        """The paper's table 1 for a text: headings, and a row for each method, the dense model first.

        A column for each pattern, sparsities in order and then others; nothing where a cell is missing. The last column
        has the seconds of pruning, the mean of the row.
        """
        methods: dict[str, dict[str, Cell]] = {}
        values: dict[str, list[float]] = {}
        for (method, pattern), cell in self.done().items():
            if text in cell.perplexity:
                methods.setdefault(method, {})[pattern] = cell
                values.setdefault(pattern, []).append(cell.perplexity[text].value)
        dense = methods.pop("dense")[""].perplexity[text]
        patterns = sorted((pattern for pattern in values if pattern), key=_column)
        rows = [[Entry("dense"), Entry(shown(dense)), *[Entry("")] * len(patterns)]]
        for method, cells in methods.items():
            row = [Entry(method)]
            for pattern in patterns:
                measured = cells[pattern].perplexity[text] if pattern in cells else None
                row.append(Entry(shown(measured), measured.value == min(values[pattern])) if measured else Entry(""))
            rows.append([*row, Entry(f"{fmean(cell.seconds for cell in cells.values()):.1f}")])
        return ["method", *patterns, "seconds"], rows

    def to_csv(self) -> str:
        """:meth:`rows` as CSV, with all digits."""
        rows, file = self.rows(), io.StringIO()
        writer = csv.DictWriter(file, rows[0] if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return file.getvalue()

    def to_markdown(self) -> str:
        """The table of each text, and what it takes to read them."""
        lines = []
        for text in self.texts:
            header, entries = self.grid(text)
            rows = [[f"**{entry.text}**" if entry.best else entry.text for entry in row] for row in entries]
            table = (f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))
            lines += [f"{self.heading(text)}:", "", *table, ""]
        lines.append(f"Model {self.model}, calibrated on {text_in_words(self.calibration)}. {CAPTION}")
        if self.missing:
            lines += ["", f"Not done yet: {listed(self.missing)}."]
        return "\n".join(lines) + "\n"

    def heading(self, text: str) -> str:
        """What a table shows."""
        dense = self.cells[0].perplexity[text]
        return f"Perplexity on {dense.tokens:,} tokens of {dense.text}, context {dense.context:,}"

    def save(self, directory: Path) -> None:
        """Writes ``compare.json``, ``.csv`` and ``.md``, each whole or not at all (OutputError)."""
        write_json(directory / "compare.json", self.to_json(), sync=True)
        write_json(directory / "compare.csv", self.to_csv())
        write_json(directory / "compare.md", self.to_markdown())

    @classmethod
    @checked
    def load(cls, path: str | os.PathLike[str]) -> Comparison:
        """From a directory that ``niwaki compare`` wrote, all done or not (if not, CheckpointError)."""
        return super().load(Path(path) / "compare.json")


#: Below each table.
CAPTION = (
    "±: standard error between texts of this size; between methods on the same text it is much less. "
    "Seconds: of pruning, the mean of the row."
)


def shown(measured: Perplexity) -> str:
    """A perplexity with its standard error."""
    value, error = measured.value, measured.standard_error
    text, digits = (f"{value:.2f}", ".2f") if value < 1e6 else (f"{value:.3g}", ".2g")
    return text if error is None else f"{text} ±{error:{digits}}"


def listed(cells: Iterable[tuple[str, str]]) -> str:
    """Cells by method: "wanda at 50 %, 2:4; admm1 at 50 %"."""
    by_method: dict[str, list[str]] = {}
    for method, pattern in cells:
        by_method.setdefault(method, []).append(pattern)
    return "; ".join(f"{method} at {', '.join(patterns)}" for method, patterns in by_method.items())


def _column(pattern: str) -> tuple[bool, float]:
    """Sparsities come first, in order; the others stay in theirs."""
    return (False, float(pattern[:-2])) if pattern.endswith(" %") else (True, 0.0)
