"""Solvers on single matrices: their errors, errors against time, and time against the size of a matrix.

    python benchmarks/layer.py error --record benchmarks/results/layer_error.json
    python benchmarks/layer.py error --solvers admm-grad,continuation:sweeps=40 --blocks 1,4
    python benchmarks/layer.py curves --record benchmarks/results/error_time.json
    python benchmarks/layer.py curves --synthetic 2048x2048
    python benchmarks/layer.py time --record benchmarks/results/layer_time.json

The matrices are those of a model's blocks with dense inputs: each block sees the outputs of the dense blocks before it.
"""

import math
import statistics
import time as clock
from functools import partial
from typing import Annotated, Any

import common  # first: it sets what OpenMP reads when torch is loaded
import torch
from common import Blocks, Call, Layer, Layers, Length, Record, Rounds, Sizes, Solvers, integers, names
from torch import Tensor
from typer import Option

from niwaki.errors import NumericalError
from niwaki.layer.grid import Grid
from niwaki.layer.linalg import inverse_of_damped
from niwaki.layer.patterns import NM, Fixed, Pattern, PerRow, TwoFactors, Unstructured, parse_pattern
from niwaki.layer.problem import Gram, LayerProblem, Solution
from niwaki.layer.rounding import factors_onto_grid, onto_grid
from niwaki.layer.solvers import Solver, make_solver
from niwaki.quantities import parse_bits

Texts = Annotated[tuple[str, str], Option(help="The calibration and the held-out text.")]
TwoSamples = Annotated[tuple[int, int], Option("--samples", help="Windows of each of the two texts.")]
Synthetic = Annotated[str, Option(metavar="ROWSxCOLUMNS", help="Matrices of these sizes instead of a model's.")]

PATTERNS: dict[str, Pattern] = {
    "50 %": Unstructured(0.5),
    "70 %": Unstructured(0.7),
    "80 %": Unstructured(0.8),
    "2:4": NM(2, 4),
}
SOLVERS = (
    "admm-grad,admm-grad:schedule=cubic,admm-grad:schedule=printed,admm1,sparsegpt,alps,exact,continuation,"
    "continuation:parts=1,continuation:softness=0,continuation:sweeps=26"
)
#: Of the curves.
STEPS = (1, 2, 5, 10, 20, 50, 100)
UPDATES = {
    "ADMM": "admm1:iterations={}",
    "ADMM, no damping": "admm1:damping=0:iterations={}",
    **{f"Adam {rate}": f"adam:learning_rate={rate}:iterations={{}}" for rate in (0.003, 0.01, 0.03, 0.1, 0.3)},
    **{f"SGD {rate}": f"sgd:learning_rate={rate}:iterations={{}}" for rate in (0.03, 0.1, 0.3, 1.0, 3.0)},
    "CG": "cg:damping=0:iterations={}",
    "SparseGPT": "sparsegpt",
}
#: With which times are compared.
PRODUCTS = 20
#: Matrices with more columns are not run once more to warm up.
SMALL = 2048


def error(
    solvers: Solvers = SOLVERS,
    model: str = "demo",
    texts: Texts = ("demo", "demo-held"),
    samples: TwoSamples = (256, 200),
    length: Length = 256,
    blocks: Blocks = "1,4",
    synthetic: Synthetic = "",
    known_tokens: Annotated[bool, Option(help="Damp for the number of tokens, as niwaki prune does.")] = False,
    grid: Annotated[str, Option(help="Put the weights that are left on it, such as int8.")] = "",
    record: Record = None,
) -> None:
    """Relative errors on calibration tokens, in brackets on held-out ones, and seconds.

    Geometric means over the matrices of the chosen blocks, and the sum of the seconds, divided by the first solver's.
    Two factors have the bytes of one matrix with the pattern's zeros, where that has a fraction of zeros, and on a grid
    with as many bits for a value.
    """
    on = Grid(*parse_bits(grid)) if grid else None
    matrices = list(Layers(model, texts, samples, length, integers(blocks), names(synthetic))())
    base: dict[str, tuple[float, float, float]] = {}
    results = []
    for name in names(solvers):
        line, solver = [], make_solver(name)
        makes_factors = solver.default_pattern(0.5).has_factors
        for label, pattern in PATTERNS.items():
            if makes_factors and pattern.group > 1:
                continue
            chosen = TwoFactors(pattern.sparsity, on) if makes_factors else pattern
            found, held, seconds = _errors(solver, chosen, matrices, known_tokens, on)
            first = base.setdefault(label, (found, held, seconds))
            relative = {"relative_error": found / first[0], "relative_held_error": held / first[1]}
            times = {"seconds": seconds, "relative_seconds": seconds / first[2]}
            results.append({"solver": name, "pattern": label, "error": found, "held_error": held, **relative, **times})
            line.append(f"{label} {found / first[0]:.3f} ({held / first[1]:.3f}) {seconds / first[2]:.2f}x")
        print(f"{name:30s}", "   ".join(line), flush=True)
    common.save(record, blocks=integers(blocks), grid=grid, results=results)


def _errors(
    solver: Solver, pattern: Pattern, matrices: list[Layer], known_tokens: bool, grid: Grid | None
) -> tuple[float, float, float]:
    """Geometric means over the matrices of the relative error, and of that on the held-out text; seconds."""
    errors, held, seconds = [], [], 0.0
    for layer in matrices:
        began = clock.perf_counter()
        gram = Gram(layer.H, shared=False, tokens=layer.tokens if known_tokens else None)
        problem = LayerProblem(layer.W, gram)
        solution = solver(problem, pattern)
        if grid:
            solution = _on_grid(problem, solution, grid)
        seconds += clock.perf_counter() - began
        errors.append(solution.error)
        # Synthetic layers have no held-out text.
        held.append(1.0 if layer.H_held is None else LayerProblem(layer.W, layer.H_held).error(solution.W))
    return statistics.geometric_mean(errors), statistics.geometric_mean(held), seconds


def _on_grid(problem: LayerProblem, solution: Solution, grid: Grid) -> Solution:
    """``solution`` with numbers of the grid, in bfloat16 as models have them."""
    if solution.factors is None:
        return onto_grid(problem, solution, grid, torch.bfloat16)[0]
    damping = float(solution.stats["damping"])
    (left, right), _ = factors_onto_grid(problem, solution.factors, grid, torch.bfloat16, damping)
    return problem.solution(left @ right, solution.mask)


def curves(
    sparsity: Annotated[float, Option(help="Of Wanda's mask.")] = 0.5,
    rounds: Rounds = 5,
    model: str = "demo",
    texts: Texts = ("demo", "demo-held"),
    samples: TwoSamples = (256, 200),
    length: Length = 256,
    blocks: Blocks = "1",
    synthetic: Synthetic = "",
    record: Record = None,
) -> None:
    """Reconstruction error against time for one mask: the paper's figure 1.

    Every point is a run of its own with that many steps, from W and H to the new weights and their error, so that
    nothing that is measured on the way costs a method time; of all rounds the fastest counts. The error is relative to
    that of the optimal weights for the mask; SparseGPT, which has no steps, is one point.
    """
    found = []
    for layer in Layers(model, texts, samples, length, integers(blocks), names(synthetic))():
        pattern = Fixed(make_solver("wanda")(layer.problem(), PerRow(sparsity)).mask)
        least = make_solver("exact:damping=0")(layer.problem(), pattern).error
        print(f"{layer.name}: error of the optimal weights {least:.3e}, others relative to it, and milliseconds")
        lines = {
            method: [{"steps": steps} for steps in (STEPS if "{}" in text else (1,))]
            for method, text in UPDATES.items()
        }
        for _ in range(rounds):
            for method, points in lines.items():
                for point in points:
                    _run(layer, UPDATES[method].format(point["steps"]), pattern, point)
        shown = {method: [p for p in points if math.isfinite(p["error"])] for method, points in lines.items()}
        for method, points in shown.items():
            line = (f"{p['steps']}: {p['error'] / least:.3g} {1e3 * p['seconds']:.3g} ms" for p in points)
            print(f"  {method:16s}", "   ".join(line), flush=True)
        found.append({"layer": layer.name, "shape": list(layer.W.shape), "optimal": least, "curves": shown})
    common.save(record, sparsity=sparsity, repeat=rounds, layers=found)


def _run(layer: Layer, name: str, pattern: Pattern, point: dict[str, Any]) -> None:
    """Puts a run's error into a point of a curve, and its time if no earlier one took less."""
    solver, problem = make_solver(name), layer.problem()

    def run() -> None:
        point["error"] = solver(problem, pattern).error

    try:
        point["seconds"] = min(common.seconds(run), point.get("seconds", math.inf))
    except NumericalError:  # a learning rate at which it diverges: not a point of the plot
        point["error"] = math.inf


def time(
    sizes: Sizes = "256x256,512x512,1024x1024,2048x2048,4096x4096",
    solvers: Solvers = "wanda,sparsegpt,admm1,admm-grad,continuation,adam:iterations=20",
    pattern: str = "unstructured:0.6",
    rounds: Rounds = 3,
    record: Record = None,
) -> None:
    """Time against the size of a matrix, and the share of the machine's product rate that solvers reach.

    The claims: ADMM-Grad's 20 steps take at most 1.5 times as long as 20 plain products of that size, and ADMM-Grad and
    continuation reach 70 % of the rate of plain products from 2,048 on. Products and solvers alternate, and the medians
    of their times are compared. The share is solver.flops (products and factorizations) over time, over the rate of the
    products of the same round. The matrices are synthetic: heavy-tailed weights, correlated inputs.
    """
    parsed, results = parse_pattern(pattern), []
    for size in names(sizes):
        rows, columns = common.shape_of(size)
        calls = _timed(common.synthetic(rows, columns), names(solvers), parsed)
        times = common.in_turns({name: [call] for name, call in calls.items()}, rounds, warm_up=columns <= SMALL)
        base = statistics.median(times[f"{PRODUCTS} products"])
        rate = PRODUCTS * 2 * rows * columns**2 / base
        print(f"{size}: {rate / 1e9:.0f} GFLOP/s in plain products", flush=True)
        for name, those in times.items():
            took = statistics.median(those)
            spread = (max(those) - min(those)) / took
            entry = {"size": size, "what": name, "seconds": took, "relative": took / base, "spread": spread}
            line = f"  {name:22s} {took:9.4f} s  {took / base:6.3f} of {PRODUCTS} products  (spread {spread:.0%})"
            if name in names(solvers):
                entry["share"] = make_solver(name).flops(rows, columns) / took / rate
                line += f"  {entry['share']:4.0%} of the rate"
            results.append(entry)
            print(line, flush=True)
    common.save(record, pattern=str(parsed), repeat=rounds, results=results)


def _timed(layer: Layer, solvers: list[str], pattern: Pattern) -> dict[str, Call]:
    """Products, solvers, and what ADMM-Grad's time is made of besides its products."""
    problem, A, C = layer.problem(), layer.W.clone(), torch.empty_like(layer.W)
    scores = A.abs()

    def products(A: Tensor, B: Tensor) -> None:
        for _ in range(PRODUCTS):
            torch.matmul(A, B, out=C)

    return {
        f"{PRODUCTS} products": partial(products, A, layer.H),
        **{name: partial(lambda solver: solver(layer.problem(), pattern), make_solver(name)) for name in solvers},
        "one inverse": lambda: inverse_of_damped(layer.H.clone, 1.0),
        "one selection": lambda: pattern.mask(scores),
        "one error": lambda: problem.error(A),
    }


if __name__ == "__main__":
    common.main(error, curves, time, about=__doc__)
