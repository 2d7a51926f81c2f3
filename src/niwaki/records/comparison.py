"""What methods came to at patterns, as dataclasses, JSON, CSV and markdown; imports no torch."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from niwaki.errors import OutputError
from niwaki.files import write_json
from niwaki.records.record import Perplexity

#: The methods of Boza 2024, table 1, and niwaki's solver, alone and as it is by default.
METHODS = ("magnitude", "wanda", "sparsegpt", "admm1", "admm-grad", "continuation", "continuation@balanced")
#: Its columns.
PATTERNS = ("50 %", "60 %", "70 %", "80 %", "2:4")


@dataclass(frozen=True)
class Cell:
    """One method at one pattern.

    Attributes:
        method: A solver, and behind an @ the effort if it is not "fast", as in "continuation@best"; or "dense".
        pattern: Such as "50 %" or "2:4"; "" for the dense model.
        sparsity: Fraction of zeros that was measured in all pruned matrices together; 0 for the dense model.
        perplexity: Of the result, by the name of the text.
        seconds: That pruning took, from the model directory to the pruned one.
        error: Geometric mean of the matrices' relative errors.
        stages: Seconds by stage.
        measuring: Seconds that the perplexities took.
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
        values = "; ".join(f"{shown(found)} on {text}" for text, found in self.perplexity.items())
        return f"{self.method} {self.pattern}".strip() + f": {values}"


@dataclass
class Comparison:
    """Methods at patterns, on one model with one calibration text: ``compare.json``.

    Attributes:
        model: Where the dense model came from.
        calibration: Source, samples, sequence length, order, seed and SHA-256 of the tokens.
        texts: What perplexities were measured on.
        cells: The dense model, and then methods at patterns in the order in which they were done.
        missing: (method, pattern) that were asked for and are not done yet.
        fingerprint: By name, the "identity" of all that has to be the same for cells to compare, and how it is "shown".
        command: The command line of the last call, or "" where it was called from Python.
        versions: Of niwaki, Python and the libraries that matter.
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

        Keys: model, method, pattern, sparsity, error, seconds, text, perplexity, standard_error (None where there
        is one window only), tokens, context, windows.
        """
        return [
            {
                "model": self.model,
                "method": cell.method,
                "pattern": cell.pattern,
                "sparsity": cell.sparsity,
                "error": cell.error,
                "seconds": cell.seconds,
                "text": text,
                "perplexity": found.value,
                "standard_error": found.standard_error,
                "tokens": found.tokens,
                "context": found.context,
                "windows": found.windows,
            }
            for cell in self.cells
            for text, found in cell.perplexity.items()
        ]

    def grid(self, text: str) -> tuple[list[str], list[list[str]]]:
        """The paper's table 1 for a text: headings, and a row for each method, the dense model first.

        A column for each pattern, sparsities in order and then others; the lowest perplexity of each between ``**``,
        nothing where a cell is missing. The last column has the seconds of pruning, the mean of the row.
        """
        done = {key: cell for key, cell in self.done().items() if text in cell.perplexity}
        dense = done.pop(("dense", ""))
        patterns = sorted(dict.fromkeys(pattern for _, pattern in done), key=_column)
        methods = dict.fromkeys(method for method, _ in done)
        best = {
            pattern: min(cell.perplexity[text].value for (_, p), cell in done.items() if p == pattern)
            for pattern in patterns
        }
        rows = [["dense", shown(dense.perplexity[text]), *[""] * len(patterns)][: len(patterns) + 2]]
        for method in methods:
            row = [method]
            for pattern in patterns:
                cell = done.get((method, pattern))
                value = shown(cell.perplexity[text]) if cell else ""
                row.append(f"**{value}**" if cell and cell.perplexity[text].value == best[pattern] else value)
            times = [cell.seconds for (m, _), cell in done.items() if m == method]
            rows.append([*row, f"{sum(times) / len(times):.1f}"])
        return ["method", *patterns, "seconds"], rows

    def to_json(self) -> str:
        """JSON text, indented."""
        return json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Comparison:
        """The inverse of :meth:`to_json`."""
        values = json.loads(text)
        cells = [
            Cell(**{**cell, "perplexity": {t: Perplexity(**p) for t, p in cell["perplexity"].items()}})
            for cell in values.pop("cells")
        ]
        missing = [(method, pattern) for method, pattern in values.pop("missing", [])]
        return cls(**values, cells=cells, missing=missing)

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
            header, rows = self.grid(text)
            lines += [
                f"{self.heading(text)}:",
                "",
                *(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)),
                "",
            ]
        calibration = self.calibration
        lines.append(
            f"Model {self.model}, calibrated on {calibration['samples']} x {calibration['sequence_length']} tokens of "
            f"{calibration['source']}. {CAPTION}"
        )
        if self.missing:
            lines += ["", f"Not done yet: {listed(self.missing)}."]
        return "\n".join(lines) + "\n"

    def heading(self, text: str) -> str:
        """What a table shows."""
        dense = self.cells[0].perplexity[text]
        return f"Perplexity on {dense.tokens:,} tokens of {dense.text}, context {dense.context:,}"

    def save(self, directory: Path) -> None:
        """Writes ``compare.json``, ``.csv`` and ``.md``, each whole or not at all.

        Raises:
            OutputError: they cannot be written.
        """
        write_json(directory / "compare.json", self.to_json(), sync=True)
        write_json(directory / "compare.csv", self.to_csv())
        write_json(directory / "compare.md", self.to_markdown())

    @classmethod
    def load(cls, directory: str | Path) -> Comparison:
        """From a directory that ``niwaki compare`` wrote, whether all is done or not.

        Raises:
            OutputError: it has no comparison that can be read.
        """
        path = Path(directory) / "compare.json"
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise OutputError(f"cannot read {path}: {error.strerror or error}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise OutputError(f"{path} is not readable as a comparison; use another directory") from error


#: Below each table.
CAPTION = (
    "±: standard error between texts of this size; between methods on the same text it is much less. "
    "Seconds: of pruning, the mean of the row."
)


def shown(measured: Perplexity) -> str:
    """A perplexity with its standard error."""
    value = f"{measured.value:.2f}" if measured.value < 1e6 else f"{measured.value:.3g}"
    if measured.standard_error is None:
        return value
    error = measured.standard_error
    return f"{value} ±{error:.2f}" if measured.value < 1e6 else f"{value} ±{error:.2g}"


def listed(cells: Iterable[tuple[str, str]]) -> str:
    """Cells by method: "wanda at 50 %, 2:4; admm1 at 50 %"."""
    patterns: dict[str, list[str]] = {}
    for method, pattern in cells:
        patterns.setdefault(method, []).append(pattern)
    return "; ".join(f"{method} at {', '.join(found)}" for method, found in patterns.items())


def _column(pattern: str) -> tuple[bool, float]:
    """Sparsities come first, in order; the others stay in theirs."""
    return (False, float(pattern[:-2])) if pattern.endswith(" %") else (True, 0.0)
