"""Time of solvers against the size of a matrix, and the share of the machine's product rate that they reach.

    python benchmarks/layer_time.py --record benchmarks/results/layer_time.json
    python benchmarks/layer_time.py --sizes 4096x11008 --solvers admm-grad --repeat 1

The claims: ADMM-Grad's 20 steps take at most 1.5 times as long as 20 plain products of that size, and
ADMM-Grad and continuation reach 70 % of the rate of plain products from 2,048 on. Products and solvers
alternate and the medians of their times are compared, so that a machine that is slow for a while is slow
for both. The share is solver.flops (products and factorisations) over time, over the rate of the products
of the same round. The matrices are synthetic: heavy-tailed weights, correlated inputs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import common  # first: it sets what OpenMP reads when torch is loaded
import torch

from niwaki.layer.linalg import inverse_of_damped
from niwaki.layer.patterns import Pattern, parse_pattern
from niwaki.layer.solvers import make_solver

SIZES = ["256x256", "512x512", "1024x1024", "2048x2048", "4096x4096"]
SOLVERS = ["wanda", "sparsegpt", "admm1", "admm-grad", "continuation", "adam:iterations=20"]
PRODUCTS = 20


def parts(layer: common.Layer, pattern: Pattern) -> dict[str, Callable[[], object]]:
    """What ADMM-Grad's time is made of besides its products."""
    problem, A = layer.problem(), layer.W.clone()
    scores = A.abs()
    return {
        "one inverse": lambda: inverse_of_damped(layer.H.clone, 1.0),
        "one selection": lambda: pattern.mask(scores),
        "one error": lambda: problem.error(A),
    }


def main() -> None:
    """Measures, prints, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=SIZES, metavar="ROWSxCOLUMNS")
    parser.add_argument("--solvers", nargs="*", default=SOLVERS)
    parser.add_argument("--pattern", default="unstructured:0.6")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    pattern = parse_pattern(arguments.pattern)
    results = []
    for size in arguments.sizes:
        rows, columns = map(int, size.split("x"))
        layer = common.synthetic(rows, columns)
        A, B, C = layer.W.clone(), layer.H, torch.empty_like(layer.W)

        def products(A: torch.Tensor = A, B: torch.Tensor = B, C: torch.Tensor = C) -> None:
            for _ in range(PRODUCTS):
                torch.matmul(A, B, out=C)

        runs: dict[str, Callable[[], object]] = {f"{PRODUCTS} products": products}
        for name in arguments.solvers:
            runs[name] = partial(lambda solver, layer: solver(layer.problem(), pattern), make_solver(name), layer)
        runs |= parts(layer, pattern)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for round_ in range(arguments.repeat + (columns <= 2048)):
            for name, run in runs.items():
                took = common.seconds(run)
                if round_ or columns > 2048:  # the first of the small ones warms up
                    times[name].append(took)
        base = statistics.median(times[f"{PRODUCTS} products"])
        rate = PRODUCTS * 2 * rows * columns**2 / base
        print(f"{size}: {rate / 1e9:.0f} GFLOP/s in plain products", flush=True)
        for name in runs:
            took = statistics.median(times[name])
            spread = (max(times[name]) - min(times[name])) / took
            entry = {"size": size, "what": name, "seconds": took, "relative": took / base, "spread": spread}
            if name in arguments.solvers:
                entry["share"] = make_solver(name).flops(rows, columns) / took / rate
            results.append(entry)
            share = f"  {100 * entry['share']:3.0f} % of the rate" if "share" in entry else ""
            print(
                f"  {name:22s} {took:9.4f} s  {took / base:6.3f} of {PRODUCTS} products"
                f"  (spread {100 * spread:.0f} %){share}",
                flush=True,
            )
    common.save(arguments.record, pattern=str(pattern), repeat=arguments.repeat, results=results)


if __name__ == "__main__":
    main()
