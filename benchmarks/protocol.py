"""Perplexity and time of methods at patterns on the reference protocol, and the paper's experiments with it.

    python benchmarks/protocol.py --record benchmarks/results/protocol.json
    python benchmarks/protocol.py --experiment table2 --record benchmarks/results/table2.json
    python benchmarks/protocol.py --methods alps wanda+exact --patterns "60 %" 2:4
    python benchmarks/protocol.py --calibration train.txt --text held.txt --text wikitext2.test.txt
    python benchmarks/protocol.py --model MODEL --calibration c4 --text wikitext2 --length 2048 --samples 128

Experiments of Boza 2024:

    table1    every method at every pattern (the default)
    table2    mask x update at 60 %
    table3    total time of every method at 60 %; with --repeat 3, median of 3 rounds in turns
    figure2   perplexity against time for updates of 1 to 100 steps of Wanda's mask at 60 and 80 %

and of niwaki:

    ablation  each ingredient of --effort alone, and the efforts

256 windows of 256 tokens to calibrate on and 200 to measure on; the model is converted to float32 before it
is pruned, and so is the result; the calibration and held-out excerpts that ship with niwaki are the
protocol's. The files of the last line stand for any others.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import tempfile
from pathlib import Path

import common  # first: it sets what OpenMP reads when torch is loaded
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from niwaki.cli.tables import perplexity_tables
from niwaki.evaluation.compare import compare
from niwaki.models.locate import locate_model
from niwaki.options import Calibration, Measurement
from niwaki.records.comparison import METHODS, PATTERNS, Cell, Comparison
from niwaki.records.progress import Progress

STEPS = (1, 10, 20, 50, 100)
RATES = (0.01, 0.03, 0.1)
#: What is changed in the effort "fast", one at a time.
INGREDIENTS = (
    *("importance=0.5", "epochs=1", "epochs=1:synthetic=0.5"),
    *("allocation=owl", "allocation=error", "allocation=loss"),
)
#: Methods and patterns of each experiment. "A+magnitude" is the mask of A with the weights as they were.
EXPERIMENTS: dict[str, tuple[list[str], list[str]]] = {
    "table1": (list(METHODS), list(PATTERNS)),
    "table2": (
        [
            f"{mask}+{update}"
            for mask in ("wanda", "magnitude", "ria", "obs", "sparsegpt", "admm-grad", "alps", "continuation")
            for update in ("magnitude", "sparsegpt", "adam", "admm1", "cg", "exact")
        ],
        ["60 %"],
    ),
    "table3": (
        [
            *("magnitude", "wanda", "ria", "obs", "dsnot", "swaps", "sparsegpt", "alps", "admm-grad"),
            *("continuation", "continuation@balanced", "continuation@best"),
            *("admm1", "adam", "sgd", "cg", "exact"),
        ],
        ["60 %"],
    ),
    "figure2": (
        [
            "wanda",
            *(f"wanda+admm1:iterations={steps}" for steps in STEPS),
            *(f"wanda+adam:learning_rate={rate}:iterations={steps}" for rate in RATES for steps in STEPS),
            *(f"wanda+cg:iterations={steps}" for steps in STEPS),
            *("wanda+sparsegpt", "sparsegpt", "wanda+exact", "admm-grad", "continuation"),
        ],
        ["60 %", "80 %"],
    ),
    "ablation": (
        [
            *("admm-grad", "continuation"),
            *(f"continuation@fast:{change}" for change in INGREDIENTS),
            *("continuation@balanced", "continuation@best"),
        ],
        ["50 %", "60 %", "70 %", "80 %", "90 %", "2:4"],
    ),
}


def float32_copy(model: str, out: Path) -> str:
    """A float32 copy of a model directory, so that its pruned weights are not rounded to bfloat16."""
    source = locate_model(model)
    shutil.copytree(source, out)
    loaded = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, trust_remote_code=False)
    loaded.save_pretrained(out)
    return str(out)


class Lines(Progress):
    """A line for each cell."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def done(self, cell: Cell) -> None:
        if cell.perplexity or cell.stages:
            stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in cell.stages.items())
            self._console.print(f"{cell}; {cell.seconds:.2f} s ({stages})", soft_wrap=True)


def measure(arguments: argparse.Namespace, texts: list[str], model: str, progress: Lines) -> Comparison:
    """The table as the arguments want it: times are medians of its rounds, all else is of the first."""
    methods, patterns = EXPERIMENTS[arguments.experiment]
    rounds = [
        compare(
            model,
            solvers=arguments.methods or methods,
            progress=progress,
            patterns=arguments.patterns or patterns,
            calibration=Calibration(arguments.calibration, samples=arguments.samples, length=arguments.length),
            measurement=Measurement(texts if round_ == 0 else (), samples=arguments.text_samples),
        )
        for round_ in range(arguments.repeat)
    ]
    cells = [
        dataclasses.replace(
            cells[0],
            seconds=statistics.median(cell.seconds for cell in cells),
            stages={name: statistics.median(cell.stages[name] for cell in cells) for name in cells[0].stages},
        )
        for cells in zip(*(round_.cells for round_ in rounds), strict=True)
    ]
    return dataclasses.replace(rounds[0], cells=cells)


def main() -> None:
    """Runs the table, prints it for each text and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--calibration", default="demo")
    parser.add_argument("--text", action="append")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--text-samples", type=int, default=200)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--experiment", choices=EXPERIMENTS, default="table1")
    parser.add_argument("--methods", nargs="*", help="instead of the experiment's")
    parser.add_argument("--patterns", nargs="*", help="likewise")
    parser.add_argument("--repeat", type=int, default=1, help="rounds")
    parser.add_argument("--record", type=Path, help="write JSON there")
    parser.add_argument("--add", action="store_true", help="put the results into the record that is there")
    arguments = parser.parse_args()
    texts = arguments.text or ["demo-held"]
    logging.disable_progress_bar()
    console = Console(width=120, highlight=False, emoji=False)

    with tempfile.TemporaryDirectory(prefix="niwaki-") as scratch:
        model = float32_copy(arguments.model, Path(scratch) / "float32")
        comparison = measure(arguments, texts, model, Lines(console))
    for text in texts:
        for table in perplexity_tables(comparison, text):
            console.print(table)
    if arguments.record:
        cells_ = [dataclasses.asdict(cell) for cell in comparison.cells]
        for cell in cells_:
            # Where a file lies on this machine is nobody else's business.
            cell["perplexity"] = {Path(text).name: value for text, value in cell["perplexity"].items()}
            for value in cell["perplexity"].values():
                value["text"] = Path(value["text"]).name
                del value["losses"]  # of each window, which no table needs
        if arguments.add:
            old = json.loads(arguments.record.read_text())["cells"]
            measured = {(cell["method"], cell["pattern"]): cell for cell in cells_}
            cells_ = [measured.pop((cell["method"], cell["pattern"]), cell) for cell in old]
            cells_ += measured.values()
        common.save(
            arguments.record,
            experiment=arguments.experiment,
            samples=arguments.samples,
            text_samples=arguments.text_samples,
            length=arguments.length,
            cells=cells_,
        )


if __name__ == "__main__":
    main()
