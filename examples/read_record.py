"""Reads a record, niwaki.json: which matrices lost most, and where the time went.

python examples/read_record.py [niwaki.json]
"""

import sys
import tempfile
from pathlib import Path

import niwaki

with tempfile.TemporaryDirectory() as scratch:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(scratch) / "out" / "niwaki.json"
    if len(sys.argv) == 1:
        calibration = niwaki.Calibration("demo", samples=8, length=64)
        niwaki.prune("demo", path.parent, 0.5, calibration=calibration, measurement=niwaki.Measurement(samples=0))
    record = niwaki.Record.load(path)

print(f"{record.model} by {record.solver['name']}, {record.pattern}: {100 * record.sparsity:.2f} % zeros")
for matrix in sorted(record.matrices, key=lambda matrix: -matrix.error)[:5]:
    print(
        f"block {matrix.block} {matrix.name}: error {matrix.error:.4f}, {100 * matrix.sparsity:.1f} % zeros, "
        f"{matrix.seconds:.2f} s"
    )
for stage, seconds in record.seconds.items():
    print(f"{stage}: {seconds:.1f} s")
# matrices are dataclasses: pandas.DataFrame(record.matrices) makes a table of them.
