"""Where a solver's time goes on one matrix, against the plain matrix products that it needs.

    python benchmarks/layer_time.py --size 2048 --record benchmarks/results/layer_time.json

The claim: ADMM-Grad's 20 steps take at most 1.5 times as long as 20 products of (size, size) matrices.
Products and solver alternate, and the medians of their times are compared, so that a machine that is
slow for a while is slow for both. The matrix is synthetic: heavy-tailed weights, correlated inputs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # see niwaki/cli.py

import torch
from torch import Tensor

from niwaki.linalg import inverse_of_damped
from niwaki.patterns import NM, Pattern, Unstructured
from niwaki.problem import Gram, LayerProblem
from niwaki.record import versions, write_json
from niwaki.solvers import ADMM, SOLVERS


def problem(size: int) -> LayerProblem:
    """(size, size) weights of Student's t with 4 degrees of freedom; inputs with a few strong directions."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(size, size, generator=generator)
    chi = torch.randn(4, size, size, generator=generator).square_().mean(dim=0).sqrt_()
    X = torch.randn(2 * size, size, generator=generator)
    X += torch.randn(2 * size, 16, generator=generator) @ torch.randn(16, size, generator=generator)
    return LayerProblem(normal.div_(chi), Gram(X.T @ X / len(X), shared=False))


def seconds(run: Callable[[], object]) -> float:
    """Of one call."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    """Measures, prints, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    layer, size, admm = problem(arguments.size), arguments.size, ADMM()
    steps = admm.iterations
    A, B, C = layer.W.clone(), layer.gram.unit, torch.empty_like(layer.W)

    def products() -> None:
        for _ in range(steps):
            torch.matmul(A, B, out=C)

    def selections(pattern: Pattern) -> None:
        scores: Tensor = A.abs()
        for _ in range(admm.sparsification_steps):
            pattern.mask(scores)

    patterns: dict[str, Pattern] = {"60 %": Unstructured(0.6), "2:4": NM(2, 4)}
    runs: dict[str, Callable[[], object]] = {f"{steps} products": products}
    for name, pattern in patterns.items():
        runs[f"admm-grad {name}"] = lambda pattern=pattern: admm(layer, pattern)  # type: ignore[misc]
        runs[f"  of it: {admm.sparsification_steps} selections {name}"] = lambda pattern=pattern: selections(  # type: ignore[misc]
            pattern
        )
    runs["  of it: the inverse"] = lambda: inverse_of_damped(B, admm.damping + admm.rho)
    runs["  of it: the error, two products"] = lambda: (layer.error(A), layer.__dict__.pop("power"))
    for name in ("wanda", "sparsegpt", "continuation"):
        runs[f"{name} 60 %"] = lambda name=name: SOLVERS[name](layer, patterns["60 %"])  # type: ignore[misc]
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.repeat):
        for name, run in runs.items():
            times[name].append(seconds(run))
            layer.__dict__.pop("power", None)
    medians = {name: statistics.median(values) for name, values in times.items()}
    base = medians[f"{steps} products"]
    rate = steps * 2 * size**3 / base / 1e9
    print(f"{size} x {size}, {torch.get_num_threads()} threads, {rate:.0f} GFLOP/s in plain products")
    for name, value in medians.items():
        spread = (max(times[name]) - min(times[name])) / value
        print(
            f"{name:36s} {value:8.3f} s  {value / base:5.2f} of the products  (spread {100 * spread:.0f} %)"
        )
    if arguments.record:
        result = {"size": size, "seconds": medians, "relative": {k: v / base for k, v in medians.items()}}
        write_json(arguments.record, json.dumps({**result, "versions": versions()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
