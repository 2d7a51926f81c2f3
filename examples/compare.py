"""Compares methods on a model; what is in DIR already is not done again.

python examples/compare.py [DIR]
"""

import sys
import tempfile

import niwaki

with tempfile.TemporaryDirectory() as scratch:
    comparison = niwaki.compare(
        "demo",
        sys.argv[1] if len(sys.argv) > 1 else scratch,
        solvers=["wanda", "admm-grad"],
        patterns=[0.5, "2:4"],
        calibration=niwaki.Calibration("demo", samples=8, length=64),
        measurement=niwaki.Measurement("demo-held", samples=8),
    )
print(comparison.to_markdown())

# One flat dictionary for each method, sparsity and text: pandas.DataFrame(rows) makes a table of them.
rows = comparison.rows()
best = min((row for row in rows if row["pattern"] == "2:4"), key=lambda row: row["perplexity"])
print(f"best at 2:4: {best['method']}, {best['perplexity']:.2f} ± {best['standard_error']:.2f}")
