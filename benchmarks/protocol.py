"""The reference protocol: every method at every pattern on the embedded model, with its time.

    python benchmarks/protocol.py --record benchmarks/results/protocol.json
    python benchmarks/protocol.py --methods alps exact --record benchmarks/results/protocol.json --add
    python benchmarks/protocol.py --calibration train.txt --text held.txt --text wikitext2.test.txt

256 windows of 256 tokens to calibrate on and 200 to measure on; the model is converted to float32 before it
is pruned, and so is the result; the calibration and held-out excerpts that ship with niwaki are the
protocol's. The files of the last line stand for any others.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # see niwaki/cli.py

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from niwaki.checkpoint import locate_model
from niwaki.demo import METHODS, PATTERNS, Cell, table
from niwaki.display import perplexity_table
from niwaki.record import versions, write_json


def float32_copy(model: str, out: Path) -> str:
    """A float32 copy of a model directory, so that its pruned weights are not rounded to bfloat16."""
    source = locate_model(model)
    shutil.copytree(source, out)
    loaded = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    loaded.save_pretrained(out)
    return str(out)


def measure(
    arguments: argparse.Namespace, texts: list[str], model: str, done: Callable[[Cell], None]
) -> list[Cell]:
    """The table as the arguments want it."""
    return table(
        model,
        calibration=arguments.calibration,
        texts=texts,
        samples=arguments.samples,
        text_samples=arguments.text_samples,
        length=arguments.length,
        methods=arguments.methods,
        patterns=arguments.patterns,
        done=done,
    )


def main() -> None:
    """Runs the table, prints it for each text and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--calibration", default="demo")
    parser.add_argument("--text", action="append")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--text-samples", type=int, default=200)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--patterns", nargs="*", default=list(PATTERNS))
    parser.add_argument("--record", type=Path)
    parser.add_argument("--add", action="store_true", help="put the results into the record that is there")
    arguments = parser.parse_args()
    texts = arguments.text or ["demo-held"]
    logging.disable_progress_bar()
    console = Console(width=120, highlight=False, emoji=False)

    def done(cell: Cell) -> None:
        values = ", ".join(f"{p.value:.2f}" for p in cell.perplexity.values())
        stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in cell.stages.items())
        console.print(f"{cell.method} {cell.pattern}: {values}; {cell.seconds:.2f} s ({stages})")

    with tempfile.TemporaryDirectory(prefix="niwaki-") as scratch:
        cells = measure(arguments, texts, float32_copy(arguments.model, Path(scratch) / "float32"), done)
    for text in texts:
        console.print(perplexity_table(cells, text))
    if arguments.record:
        cells_ = [dataclasses.asdict(cell) for cell in cells]
        for cell in cells_:
            # Where a file lies on this machine is nobody else's business.
            cell["perplexity"] = {Path(text).name: value for text, value in cell["perplexity"].items()}
            for value in cell["perplexity"].values():
                value["text"] = Path(value["text"]).name
        if arguments.add:
            old = json.loads(arguments.record.read_text())["cells"]
            measured = {(cell["method"], cell["pattern"]): cell for cell in cells_}
            cells_ = [measured.pop((cell["method"], cell["pattern"]), cell) for cell in old]
            cells_ += measured.values()
        result = {
            "samples": arguments.samples,
            "text_samples": arguments.text_samples,
            "length": arguments.length,
            "versions": versions(),
            "cells": cells_,
        }
        write_json(arguments.record, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
