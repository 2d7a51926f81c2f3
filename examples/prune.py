"""Prunes a model, and reads what came of it.

python examples/prune.py [MODEL]
"""

import sys
import tempfile
from pathlib import Path

import niwaki

model = sys.argv[1] if len(sys.argv) > 1 else "demo"  # a directory, a hub id, or the model that ships with niwaki

with tempfile.TemporaryDirectory() as scratch:
    out = Path(scratch) / "pruned"
    record = niwaki.prune(
        model,
        out,
        0.6,
        calibration=niwaki.Calibration("demo", samples=8, length=64),
        measurement=niwaki.Measurement("demo-held", samples=8),
    )
    for when, perplexity in record.perplexity.items():
        print(f"perplexity {when} {perplexity.value:.2f} ± {perplexity.standard_error:.2f}")
    print(f"{100 * record.sparsity:.2f} % zeros, mean error {record.mean_error:.3g}")
    # The result is a model directory that transformers and others load like the original.
    print(niwaki.evaluate(out, niwaki.Measurement("demo-held", samples=8, length=64)))
