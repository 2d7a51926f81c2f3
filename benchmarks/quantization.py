"""Perplexity of models that are pruned and put on a grid, together or one after the other.

    python benchmarks/quantization.py --text demo-held --text wikitext2.test.txt

256 windows of 256 tokens to calibrate on and 200 to measure on. A row is what this does:

    niwaki prune demo OUT --sparsity SPARSITY --effort EFFORT [--quantize GRID]
        --calibration demo --samples 256 --length 256 --text TEXT --text-samples 200

"nearest" rounds the weights of the model without a grid afterwards, with nothing of niwaki's: scales put the largest
weight of a group at the end of the grid.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from pathlib import Path

import common  # noqa: F401 - first: it sets what OpenMP reads when torch is loaded
import torch
from safetensors.torch import load_file, save_file

from niwaki import prune
from niwaki.evaluation.evaluate import evaluate
from niwaki.options import Calibration, Measurement

#: Sparsity, effort and grids.
RUNS = (
    (0.0, "fast", ("int4:64", "int3:64")),
    (0.5, "fast", ("int4:64",)),
    (0.5, "balanced:epochs=0", ("int4:64",)),
    (0.5, "best:synthetic=0:epochs=4:batch=2048:rate=0.03", ("int4:64",)),
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
    """Runs all and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--text", action="append")
    texts = parser.parse_args().text or ["demo-held"]

    def measured(model: str | Path, *what: str) -> None:
        values = ", ".join(f"{evaluate(model, Measurement(text, length=256, samples=200)).value:.2f}" for text in texts)
        print(f"{' '.join(what)}: {values}", flush=True)

    measured("demo", "dense")
    for sparsity, effort, grids in RUNS:
        with tempfile.TemporaryDirectory(prefix="niwaki-") as scratch:
            for grid in ("", *grids):
                out = Path(scratch) / (grid or "plain")
                prune(
                    "demo",
                    out,
                    sparsity,
                    effort=effort,
                    quantize=grid or None,
                    calibration=Calibration("demo", samples=256, length=256),
                    measurement=Measurement(samples=0),
                )
                measured(out, str(sparsity), effort, grid and f"{grid} together")
            for grid in grids:
                bits, group = re.findall(r"\d+", grid)
                rounded = Path(scratch) / f"{grid} nearest"
                nearest(Path(scratch) / "plain", rounded, int(bits), int(group))
                measured(rounded, str(sparsity), effort, grid, "nearest")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
