"""Perplexity of models that are pruned and put on a grid, together or one after the other.

    python benchmarks/quantization.py --record benchmarks/results/quantization.json
    python benchmarks/quantization.py --text demo-held --text wikitext2.test.txt

256 windows of 256 tokens to calibrate on and 200 to measure on. A row is what this does, or with
--pattern 2:4:

    niwaki prune demo OUT --sparsity SPARSITY --effort EFFORT [--quantize GRID]
        --calibration demo --samples 256 --length 256 --text TEXT --text-samples 200

"nearest" rounds the weights of the model without a grid afterwards, with nothing of niwaki's: scales put the largest
weight of a group at the end of the grid.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shutil
import tempfile
from pathlib import Path

import common  # first: it sets what OpenMP reads when torch is loaded
import torch
from safetensors.torch import load_file, save_file

from niwaki import prune
from niwaki.perplexity import evaluate

#: Pattern, effort and grids.
RUNS = (
    ("0 %", "fast", ("int4:64", "int3:64")),
    ("50 %", "fast", ("int4:64",)),
    ("50 %", "balanced", ("int4:64",)),
    ("50 %", "best", ("int4:64",)),
    ("2:4", "fast", ("int4:64",)),
    ("2:4", "best", ("int4:64",)),
)


def nearest(model: Path, out: Path, bits: int, group: int) -> None:
    """Rounds the matrices of the blocks to the nearest whole number of ``bits``, times a scale for each group."""
    shutil.copytree(model, out)
    tensors = load_file(out / "model.safetensors")
    for name, weight in tensors.items():
        if re.search(r"\.layers\.\d+\..*proj\.weight$", name):
            W = weight.float().unflatten(1, (-1, group))
            scales = (W.abs().amax(dim=2, keepdim=True) / (2 ** (bits - 1) - 0.5)).to(weight.dtype).float()
            codes = (W / scales.where(scales > 0, 1)).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
            tensors[name] = (codes * scales).flatten(1).to(weight.dtype)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Runs all, prints the results and writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--text", action="append")
    parser.add_argument("--record", type=Path, help="write JSON there")
    arguments = parser.parse_args()
    texts = arguments.text or ["demo-held"]
    cells = []

    def measured(model: str | Path, pattern: str, effort: str, grid: str, how: str, seconds: float) -> None:
        found = {text: evaluate(model, text, length=256, samples=200) for text in texts}
        values = ", ".join(f"{value.value:.2f}" for value in found.values())
        print(f"{pattern} {effort} {grid} {how}: {values}; {seconds:.1f} s", flush=True)
        # Where a file lies on this machine is nobody else's business.
        perplexity = {
            Path(text).name: {**dataclasses.asdict(value), "text": Path(text).name}
            for text, value in found.items()
        }
        cells.append(
            {"pattern": pattern, "effort": effort, "grid": grid, "how": how, "seconds": seconds}
            | {"perplexity": perplexity}
        )

    measured("demo", "", "", "", "dense", 0.0)
    for pattern, effort, grids in RUNS:
        with tempfile.TemporaryDirectory(prefix="niwaki-") as scratch:
            for grid in ("", *grids):
                out = Path(scratch) / (grid or "plain")
                record = prune(
                    "demo",
                    out,
                    sparsity=float(pattern[:-2]) / 100 if pattern.endswith("%") else None,
                    pattern=None if pattern.endswith("%") else pattern,
                    effort=effort,
                    quantize=grid or None,
                    calibration="demo",
                    samples=256,
                    length=256,
                    measure="none",
                )
                seconds = record.seconds["total"]
                measured(out, pattern, effort, grid, "joint" if grid else "", seconds)
            for grid in grids:
                bits, group = re.findall(r"\d+", grid)
                rounded = Path(scratch) / f"{grid} nearest"
                nearest(Path(scratch) / "plain", rounded, int(bits), int(group))
                measured(rounded, pattern, effort, grid, "nearest", 0.0)
    if arguments.record:
        common.save(arguments.record, samples=256, text_samples=200, length=256, cells=cells)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
