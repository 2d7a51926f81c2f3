"""Relative errors of solvers on real layers, on calibration tokens and on held-out ones.

    python benchmarks/layer_error.py --record benchmarks/results/layer_error.json
    python benchmarks/layer_error.py --solvers admm-grad continuation:sweeps=40 --blocks 1 4

Dense inputs: each block sees the outputs of the dense blocks before it. Printed are geometric means over
the matrices of the chosen blocks, divided by the first solver's; in brackets those on the held-out text.
"""

from __future__ import annotations

import argparse
from statistics import geometric_mean

from common import Layer, add_layer_arguments, layers, save

from niwaki.layer.patterns import NM, Pattern, Unstructured
from niwaki.layer.problem import LayerProblem
from niwaki.layer.solvers import Solver, make_solver

PATTERNS: dict[str, Pattern] = {
    "50 %": Unstructured(0.5),
    "70 %": Unstructured(0.7),
    "80 %": Unstructured(0.8),
    "2:4": NM(2, 4),
}
DEFAULT = [
    "admm-grad",
    "admm-grad:schedule=cubic",
    "admm-grad:schedule=printed",
    "admm1",
    "sparsegpt",
    "alps",
    "exact",
    "continuation",
    "continuation:parts=1",
    "continuation:softness=0",
    "continuation:sweeps=26",
]


def errors(solver: Solver, pattern: Pattern, matrices: list[Layer]) -> tuple[float, float]:
    """Geometric means over the matrices of the relative error, and of that on the held-out text."""
    errors, held = [], []
    for layer in matrices:
        solution = solver(LayerProblem(layer.W, layer.H), pattern)
        errors.append(solution.error)
        # Synthetic layers have no held-out text.
        held.append(1.0 if layer.H_held is None else LayerProblem(layer.W, layer.H_held).error(solution.W))
    return geometric_mean(errors), geometric_mean(held)


def main() -> None:
    """Measures, prints, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_layer_arguments(parser, blocks=[1, 4])
    parser.add_argument("--solvers", nargs="*", default=DEFAULT, help="the first is what others are divided by")
    arguments = parser.parse_args()
    matrices = list(layers(arguments))
    base: dict[str, tuple[float, float]] = {}
    results = []
    for name in arguments.solvers:
        line = []
        for label, pattern in PATTERNS.items():
            error, held = errors(make_solver(name), pattern, matrices)
            first = base.setdefault(label, (error, held))
            relative = {"relative_error": error / first[0], "relative_held_error": held / first[1]}
            results.append({"solver": name, "pattern": label, "error": error, "held_error": held, **relative})
            line.append(f"{label} {error / first[0]:.3f} ({held / first[1]:.3f})")
        print(f"{name:30s}", "   ".join(line), flush=True)
    save(arguments.record, blocks=arguments.blocks, results=results)


if __name__ == "__main__":
    main()
