"""Reconstruction error against time for one mask: the paper's figure 1.

    python benchmarks/error_time.py --record benchmarks/results/error_time.json
    python benchmarks/error_time.py --model MODEL --texts c4 wikitext2 --samples 128 1 --length 2048 --blocks 0
    python benchmarks/error_time.py --synthetic 2048x2048

The mask is Wanda's at 50 % (or --sparsity). Every point is a run of its own with that many steps, from W and H
to the new weights and their error, so that nothing that is measured on the way costs a method time; of
--repeat runs, in turns, the fastest counts. The error is relative to that of the optimal weights for the
mask; SparseGPT, which has no steps, is one point.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from typing import Any

from common import add_layer_arguments, layers, save

from niwaki.errors import NumericalError
from niwaki.layer.patterns import Fixed, PerRow
from niwaki.layer.solvers import make_solver

STEPS = (1, 2, 5, 10, 20, 50, 100)
METHODS = {
    "ADMM": "admm1:iterations={}",
    "ADMM, no damping": "admm1:damping=0:iterations={}",
    **{f"Adam {rate}": f"adam:learning_rate={rate}:iterations={{}}" for rate in (0.003, 0.01, 0.03, 0.1, 0.3)},
    **{f"SGD {rate}": f"sgd:learning_rate={rate}:iterations={{}}" for rate in (0.03, 0.1, 0.3, 1.0, 3.0)},
    "CG": "cg:damping=0:iterations={}",
    "SparseGPT": "sparsegpt",
}


def main() -> None:
    """Measures, prints, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_layer_arguments(parser, blocks=[1])
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    found = []
    for layer in layers(arguments):
        pattern = Fixed(make_solver("wanda")(layer.problem(), PerRow(arguments.sparsity)).mask)
        least = make_solver("exact:damping=0")(layer.problem(), pattern).error
        print(f"{layer.name}: error of the optimal weights {least:.3e}, others relative to it, and milliseconds")
        curves: dict[str, list[dict[str, Any]]] = {}
        for _ in range(arguments.repeat):
            for method, text in METHODS.items():
                points = curves.setdefault(method, [{"steps": k} for k in (STEPS if "{}" in text else (1,))])
                for point in points:
                    run = partial(make_solver(text.format(point["steps"])), layer.problem(), pattern)
                    began = time.perf_counter()
                    try:
                        point["error"] = run().error
                    except NumericalError:  # a learning rate at which it diverges: not a point of the plot
                        point["error"] = math.inf
                        continue
                    point["seconds"] = min(time.perf_counter() - began, point.get("seconds", math.inf))
        curves = {method: [p for p in points if math.isfinite(p["error"])] for method, points in curves.items()}
        for method, points in curves.items():
            line = (f"{p['steps']}: {p['error'] / least:.3g} {1e3 * p['seconds']:.3g} ms" for p in points)
            print(f"  {method:16s}", "   ".join(line), flush=True)
        found.append({"layer": layer.name, "shape": list(layer.W.shape), "optimal": least, "curves": curves})
    save(arguments.record, sparsity=arguments.sparsity, repeat=arguments.repeat, layers=found)


if __name__ == "__main__":
    main()
