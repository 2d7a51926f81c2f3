"""What is lost at a size: zeros, whole numbers, and both, in one model.

    python scripts/smollm2.py MODEL
    python benchmarks/sizes.py MODEL CORPUS --record benchmarks/results/sizes.json

CORPUS has train.txt.xz (books), held.txt.xz (books by others) and wikitext2.test.txt. Each form is what

    niwaki prune MODEL OUT --sparsity SPARSITY [--quantize GRID] --calibration train.txt.xz
        --samples 48 --length 512

makes, at its default effort, so that all are fitted alike; then measured on 16 windows of each text and on Python's
standard library. Bits of a weight are those of the pruned matrices: what `niwaki pack` takes, or without zeros the
numbers and their scales. The record is written after each form, and the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import common  # first: it sets what OpenMP reads when torch is loaded
from real import Texts
from transformers.utils import logging

import niwaki
from niwaki.layer.grid import parse_grid
from niwaki.options import Calibration, Measurement

TEXTS = ("wikitext2", "books", "code")
#: Sparsity and grid, in the order of their worth.
FORMS = (
    (0.0, "int3:64"),
    (0.5, "int4:64"),
    (0.0, "int4:64"),
    (0.35, "int4:64"),
    (0.5, ""),
    (0.2, "int4:64"),
    (0.7, "int4:64"),
    (0.0, "int2:64"),
    (0.0, "int8:64"),
    (0.5, "int8:64"),
    (0.3, ""),
    (0.7, ""),
    (0.3, "int8:64"),
    (0.7, "int8:64"),
)


def bits_of(out: Path, sparsity: float, grid: str, scratch: Path) -> float:
    """What a weight of the matrices takes, with its part of the mask and of the scales."""
    if not sparsity:
        parsed = parse_grid(grid)
        return parsed.bits + 16 / (parsed.group or math.inf)
    sizes = niwaki.pack(out, scratch / "packed")
    return 16 * sizes.packed / sizes.matrices


def main() -> None:
    """Measures what is not measured yet, prints a line for each form and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--samples", type=int, default=48, help="windows to calibrate on")
    parser.add_argument("--text-samples", type=int, default=16, help="windows of each text to measure on")
    parser.add_argument("--length", type=int, default=512, help="tokens in a window")
    parser.add_argument("--record", type=Path, required=True, help="write JSON there, and go on from it")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    settings = {name: getattr(arguments, name) for name in ("samples", "text_samples", "length")}
    settings["model"] = Path(arguments.model).name
    cells: list[dict[str, Any]] = []
    if arguments.record.exists():
        made = json.loads(arguments.record.read_text())
        if {name: made.get(name) for name in settings} != settings:
            parser.error(f"{arguments.record} is of other settings")
        cells = made["cells"]
    with tempfile.TemporaryDirectory(prefix="niwaki-") as scratch:
        texts = Texts(Path(arguments.model), arguments.corpus, Path(scratch), arguments.samples, arguments.length)
        books = Calibration(texts.to_calibrate("books")[0], samples=arguments.samples, length=arguments.length)

        def keep(model: str | Path, sparsity: float, grid: str, bits: float, seconds: float) -> None:
            losses = {}
            for name in TEXTS:
                text = texts.to_measure(name, arguments.text_samples)
                where = Measurement(text, length=arguments.length, samples=arguments.text_samples)
                losses[name] = list(niwaki.evaluate(model, where).losses)
            cells.append({"sparsity": sparsity, "grid": grid, "bits": bits, "seconds": seconds, "losses": losses})
            means = ", ".join(f"{name} {sum(values) / len(values):.4f}" for name, values in losses.items())
            print(f"{sparsity:.0%} zeros, {grid or 'bfloat16'}, {bits:.2f} bits: {means} nats", flush=True)
            common.save(arguments.record, **settings, cells=cells)

        done = {(cell["sparsity"], cell["grid"]) for cell in cells}
        if (0.0, "") not in done:
            keep(arguments.model, 0.0, "", 16.0, 0.0)
        for sparsity, grid in FORMS:
            if (sparsity, grid) in done:
                continue
            with tempfile.TemporaryDirectory(prefix="niwaki-") as place:
                out = Path(place) / "out"
                record = niwaki.prune(
                    arguments.model,
                    out,
                    sparsity,
                    quantize=grid or None,
                    calibration=books,
                    measurement=Measurement(samples=0),
                )
                keep(out, sparsity, grid, bits_of(out, sparsity, grid, Path(place)), record.seconds["total"])


if __name__ == "__main__":
    main()
