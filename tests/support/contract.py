"""All solvers, and what each promises."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from niwaki.layer.patterns import NM, Fixed, Pattern, PerRow, Unstructured
from niwaki.layer.problem import Solution
from niwaki.layer.solvers import (
    ADMM,
    ALPS,
    RIA,
    SOLVERS,
    ConjugateGradients,
    Continuation,
    Descent,
    Exact,
    Magnitude,
    MaskThenUpdate,
    Solver,
    SparseGPT,
    Wanda,
)
from support.problems import normal


@dataclass(frozen=True)
class Promises:
    """What a method promises beyond the contract.

    Attributes:
        moves: It changes the weights that stay, to less error than without.
        steps: It tells a monitor after each of so many steps.
        runs: It cuts the columns into so many runs, in each of which PerRow's rows differ by one.
        rounding: How far its weights may be from those of scaled inputs.
    """

    moves: bool = True
    steps: int = 0
    runs: int = 1
    rounding: float = 1e-9


#: All but that of two factors, whose masks are not those of a matrix: test_double_sparse.py.
OF_ONE_MATRIX = {name: solver for name, solver in SOLVERS.items() if name != "double-sparse"}
CONTRACT: list[tuple[Solver, Promises]] = [
    *((solver, Promises(moves=False)) for solver in (Magnitude(), Wanda(), RIA())),
    (SparseGPT(), Promises()),
    (SparseGPT(block_size=8), Promises(runs=4)),
    *((ADMM(schedule=each), Promises(steps=20)) for each in ("constant", "cubic", "printed")),
    (ADMM(sparsification_steps=1), Promises(steps=20)),
    (Continuation(), Promises(steps=15)),
    (ALPS(), Promises(steps=310)),
    (Descent(), Promises(steps=100)),
    (Descent("sgd", learning_rate=1.0), Promises(steps=100)),
    # Half-way to convergence the iterates amplify rounding errors of weights that hardly matter to the
    # error; measured 1.4e-9.
    (ConjugateGradients(), Promises(steps=10, rounding=1e-8)),
    (Exact(), Promises(steps=10)),
    (MaskThenUpdate(Wanda(), ADMM()), Promises(steps=20)),
    (MaskThenUpdate(MaskThenUpdate(Wanda(), RIA()), Exact()), Promises(steps=10)),
]


ROWS, COLUMNS = 23, 32


PATTERNS: list[Pattern] = [Unstructured(0.5), Unstructured(0.8), PerRow(0.6), NM(2, 4)]
PATTERNS.append(Fixed(normal(ROWS, COLUMNS, seed=77) > 0.3))


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Unlike torch.equal, tells -0.0 from +0.0."""
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def same_solution(a: Solution, b: Solution) -> bool:
    return same_bytes(a.W, b.W) and same_bytes(a.mask, b.mask) and a.error == b.error and a.stats == b.stats
