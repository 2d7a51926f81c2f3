"""Structured pruning beside zeros anywhere, at the same fraction of the blocks' parameters removed.

    python benchmarks/structured.py --text demo-held --text wt2.txt --record benchmarks/results/structured.json

The embedded model has 6 blocks with 6 heads and 512 neurons each, the heads of a LLaMA have to divide its width, and a
multiple of 32 neurons stays: not every fraction is possible. Calibrated on 256 windows of 256 tokens, measured on 200,
as in protocol.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import common  # first: it sets what OpenMP reads when torch is loaded
from protocol import float32_copy
from transformers.utils import logging

import niwaki
from niwaki.options import Calibration, Measurement

SIZES = [Fraction(1, 12), Fraction(1, 6), Fraction(1, 4), Fraction(1, 3), Fraction(1, 2)]
LENGTH, SAMPLES, TEXT_SAMPLES = 256, 256, 200
CALIBRATION = Calibration("demo", samples=SAMPLES, length=LENGTH)
NOTHING = Measurement(samples=0)


def options(method: str, size: Fraction) -> dict[str, Any] | None:
    """Those of ``shrink`` or ``prune`` for the embedded model, whose MLPs have 2/3 of a block's parameters."""
    if method == "zeros anywhere":
        return {"effort": "fast", "pattern": float(size)}
    if method == "blocks":
        return {"blocks": int(6 * size)} if (6 * size).denominator == 1 else None
    if method == "neurons":
        return {"neurons": float(size * 3 / 2)}
    heads = Fraction(1, 2)
    neurons = (size - heads / 3) * 3 / 2
    return {"heads": float(heads), "neurons": float(neurons)} if neurons > 0 else None


def main() -> None:
    """Runs all, prints a line for each and writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--text", action="append")
    parser.add_argument("--record", type=Path, help="write JSON there; what is there already is not run again")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    cells: list[dict[str, Any]] = []
    if arguments.record and arguments.record.exists():
        cells = json.loads(arguments.record.read_text())["cells"]
    done = {(cell["method"], cell["size"]) for cell in cells}

    def measure(method: str, size: Fraction, directory: str | Path, removed: float, seconds: float) -> None:
        perplexities = {
            # Where a file lies on this machine is nobody else's business.
            Path(text).name: {**dataclasses.asdict(perplexity), "text": Path(text).name}
            for text in arguments.text or ["demo-held"]
            for perplexity in [niwaki.evaluate(directory, Measurement(text, length=LENGTH, samples=TEXT_SAMPLES))]
        }
        cell = {
            "method": method,
            "size": float(size),
            "removed": removed,
            "perplexity": perplexities,
            "seconds": seconds,
        }
        cells.append(cell)
        values = ", ".join(f"{value['value']:.2f}" for value in perplexities.values())
        content = {"samples": SAMPLES, "text_samples": TEXT_SAMPLES, "length": LENGTH, "cells": cells}
        common.save(arguments.record, **content)  # each time: what is measured stays
        print(f"{method} {float(size):.3f} ({removed:.4f}): {values}; {seconds:.1f} s", flush=True)

    with tempfile.TemporaryDirectory(prefix="niwaki-") as scratch:
        model = float32_copy("demo", Path(scratch) / "float32")
        if ("dense", 0.0) not in done:
            measure("dense", Fraction(0), model, 0.0, 0.0)
        for size in SIZES:
            for method in ("blocks", "neurons", "heads and neurons", "zeros anywhere"):
                out = Path(scratch) / f"{method} {size.denominator}"
                chosen = options(method, size)
                if chosen is None or (method, float(size)) in done:
                    continue
                run = niwaki.prune if method == "zeros anywhere" else niwaki.shrink
                record = run(model, out, calibration=CALIBRATION, measurement=NOTHING, **chosen)
                removed = record.structure.removed if record.structure else record.sparsity
                measure(method, size, out, removed, record.seconds["total"])


if __name__ == "__main__":
    main()
