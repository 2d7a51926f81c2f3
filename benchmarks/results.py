"""Writes the tables of README.md and docs/methods.md from benchmarks/results/protocol.json.

python benchmarks/results.py           # after benchmarks/protocol.py --record ...
python benchmarks/results.py --check   # fails if they differ
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "results" / "protocol.json"
HELD = "demo-held"


def table(cells: list[dict[str, Any]], text: str, seconds: bool) -> list[str]:
    """Rows of a markdown table: a method a row, a pattern a column, the lowest perplexity in bold."""
    found = {(cell["method"], cell["pattern"]): cell for cell in cells}
    methods = list(dict.fromkeys(method for method, _ in found if method != "dense"))
    patterns = list(dict.fromkeys(pattern for _, pattern in found if pattern))

    def value(method: str, pattern: str) -> float:
        return float(found[method, pattern]["perplexity"][text]["value"])

    rows = [
        "| method | " + " | ".join(patterns) + (" | seconds a run |" if seconds else " |"),
        "|---|" + "---|" * (len(patterns) + seconds),
        f"| dense | {value('dense', ''):.2f} |" + " |" * (len(patterns) - 1 + seconds),
    ]
    for method in methods:
        row = []
        for pattern in patterns:
            best = min(value(other, pattern) for other in methods)
            shown = f"{value(method, pattern):.2f}"
            row.append(f"**{shown}**" if value(method, pattern) == best else shown)
        if seconds:
            total = sum(found[method, pattern]["seconds"] for pattern in patterns)
            row.append(f"{total / len(patterns):.1f}")
        rows.append(f"| {method} | " + " | ".join(row) + " |")
    return rows


def render() -> dict[Path, str]:
    """The text of each file with its tables as the record has them."""
    record = json.loads(RECORD.read_text())
    cells = record["cells"]
    measured = cells[0]["perplexity"][HELD]
    held = table(cells, HELD, seconds=True)
    spread = 100 * measured["standard_error"] / measured["value"]
    readme = [
        *held,
        "",
        f"Perplexity of the embedded 3.4 M parameter model on {measured['tokens']:,} tokens of books it never saw, at "
        f"context {measured['context']}; calibrated on {record['samples']} x {record['length']} tokens, two CPU cores. "
        f"± {spread:.1f} % between texts of this size, much less between methods on the same text. "
        "`python benchmarks/protocol.py --record benchmarks/results/protocol.json` measures it again, "
        "`make demo` a smaller one.",
    ]
    methods = []
    for text in cells[0]["perplexity"]:
        methods += [f"On {text}:", "", *table(cells, text, seconds=text == HELD), ""]
    return {
        ROOT / "README.md": _between((ROOT / "README.md").read_text(), readme),
        ROOT / "docs" / "methods.md": _between((ROOT / "docs" / "methods.md").read_text(), methods[:-1]),
    }


def _between(text: str, lines: list[str]) -> str:
    body = "\n".join(["<!-- results -->", "", *lines, "", "<!-- end of results -->"])
    return re.sub(r"<!-- results -->.*<!-- end of results -->", lambda _: body, text, flags=re.DOTALL)


def main() -> None:
    """Writes, or with --check compares."""
    stale = [path for path, text in render().items() if path.read_text() != text]
    if "--check" in sys.argv:
        sys.exit(f"not as in {RECORD.name}: {', '.join(p.name for p in stale)}" if stale else 0)
    for path, text in render().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
