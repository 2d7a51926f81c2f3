"""Relative errors of solvers on real layers, on calibration tokens and on held-out ones.

    python benchmarks/layer_error.py
    python benchmarks/layer_error.py --solvers admm-grad continuation,sweeps=40 --blocks 1 4

Dense inputs: each block sees the outputs of the dense blocks before it. Printed are geometric means over
the matrices of the chosen blocks, divided by the first solver's; in brackets those on the held-out text.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # see niwaki/cli.py

from torch import Tensor

from niwaki.blocks import StreamedModel
from niwaki.calibration import load_tokenizer, read_windows
from niwaki.checkpoint import Checkpoint, locate_model
from niwaki.patterns import NM, Pattern, Unstructured
from niwaki.problem import LayerProblem
from niwaki.record import versions, write_json
from niwaki.solvers import make_solver

PATTERNS: dict[str, Pattern] = {
    "50 %": Unstructured(0.5),
    "70 %": Unstructured(0.7),
    "80 %": Unstructured(0.8),
    "2:4": NM(2, 4),
}
DEFAULT = [
    "admm-grad",
    "admm-grad,schedule=cubic",
    "admm-grad,schedule=printed",
    "admm1",
    "sparsegpt",
    "alps",
    "exact",
    "continuation",
    "continuation,parts=1",
    "continuation,sweeps=14",
]


def layers(
    model: str, blocks: list[int], texts: list[str], samples: list[int]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(W, H on the first text, H on the second) for each matrix of ``blocks``, from dense inputs."""
    checkpoint = Checkpoint(locate_model(model))
    streamed, tokenizer = StreamedModel(checkpoint, dtype="float32"), load_tokenizer(checkpoint.path)
    states = [
        streamed.embed(read_windows(text, tokenizer, 256, count).tokens)
        for text, count in zip(texts, samples, strict=True)
    ]
    found = []
    for block in streamed.stream():
        if block.index in blocks:
            calibration, held = (block.input_grams(state) for state in states)
            for ours, theirs in zip(calibration, held, strict=True):
                found += [(block.weight(name), ours.H, theirs.H) for name in ours.names]
        for state in states:
            block.advance(state)
    return found


def main() -> None:
    """Measures, prints, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--texts", nargs=2, default=["demo", "demo-held"])
    parser.add_argument("--samples", nargs=2, type=int, default=[256, 200])
    parser.add_argument("--blocks", nargs="*", type=int, default=[1, 4])
    parser.add_argument(
        "--solvers",
        nargs="*",
        default=DEFAULT,
    )
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    matrices = layers(arguments.model, arguments.blocks, arguments.texts, arguments.samples)
    base: dict[str, tuple[float, float]] = {}
    results = []
    for text in arguments.solvers:
        name, *settings = text.split(",")
        solver = make_solver(name, dict(setting.split("=") for setting in settings))
        line = []
        for label, pattern in PATTERNS.items():
            errors, held, seconds = 0.0, 0.0, 0.0
            for W, H, H_held in matrices:
                problem = LayerProblem(W, H)
                began = time.perf_counter()
                solution = solver(problem, pattern)
                seconds += time.perf_counter() - began
                errors += math.log(solution.error) / len(matrices)
                held += math.log(LayerProblem(W, H_held).error(solution.W)) / len(matrices)
            first = base.setdefault(label, (errors, held))
            relative, relative_held = math.exp(errors - first[0]), math.exp(held - first[1])
            line.append(f"{label} {relative:.3f} ({relative_held:.3f}) {seconds:.2f} s")
            results.append(
                {
                    "solver": repr(solver),
                    "pattern": label,
                    "error": math.exp(errors),
                    "held_error": math.exp(held),
                    "relative_error": relative,
                    "relative_held_error": relative_held,
                    "seconds": seconds,
                }
            )
        print(f"{text:40s}", "   ".join(line), flush=True)
    if arguments.record:
        write_json(
            arguments.record, json.dumps({"results": results, "versions": versions()}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
