"""ALPS against its formulas, with solves for inverses and regressions for conjugate gradients."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from niwaki.layer.patterns import NM, Fixed, Pattern, PerRow, Unstructured
from niwaki.layer.solvers.alps import ALPS
from support.problems import KINDS, least_squares, make_problem, normal

ROWS, COLUMNS = 23, 32
GIVEN = Fixed(normal(ROWS, COLUMNS, seed=77) > 0.3)
PATTERNS: list[Pattern] = [Unstructured(0.5), Unstructured(0.8), PerRow(0.6), NM(2, 4)]


def algorithm_1(
    W: Tensor,  # (out, in)
    H: Tensor,
    pattern: Pattern,
    iterations: int = 300,
    rho: float = 0.1,
    damping: float = 0.01,
) -> tuple[Tensor, list[float], float, bool]:
    """The paper's steps: (weights, the penalty of each step, |W - D| / |D|, whether the support stayed)."""
    identity = torch.eye(H.shape[0]).double()
    norm = H.diagonal().sqrt()
    H = H / norm / norm[:, None] + damping * identity
    What = W * norm

    def projected(Z: Tensor) -> Tensor:
        return Z * pattern.mask(Z.abs())

    D, V = projected(What), torch.zeros_like(W)
    support = D != 0
    rhos = []
    stayed = False
    for t in range(1, iterations + 1):
        rhos.append(rho)
        # Weights are rows here and columns in the paper.
        Z = torch.linalg.solve(H + rho * identity, What @ H - V + rho * D, left=False)
        D = projected(Z + V / rho)
        V = V + rho * (Z - D)
        if t % 3 == 0:
            s, k = int((support != (D != 0)).sum()), int((D != 0).sum())
            support = D != 0
            if s == 0:
                stayed = True
                break
            rho *= 1.3 if s >= 0.1 * k else 1.2 if s >= 0.005 * k else 1.1
    best = least_squares(H, What, D != 0)
    return best / norm, rhos, float((Z - D).norm() / D.norm()), stayed


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize(
    "changes",
    [{}, {"rho": 0.02, "damping": 0.1}, {"iterations": 11}, {"rho": 3.0}],
    ids=["default", "rho and damping", "11 steps", "large rho"],
)
@pytest.mark.slow
def test_is_algorithm_1(changes: dict[str, float], pattern: Pattern) -> None:
    problem = make_problem(rows=48, seed=1)
    expected, rhos, residual, stayed = algorithm_1(problem.W, problem.gram.H, pattern, **changes)  # type: ignore[arg-type]
    solver = replace(ALPS(finish=100), **changes)  # type: ignore[arg-type]
    solution = solver(problem, pattern)
    assert torch.equal(solution.mask, expected != 0)
    assert torch.allclose(solution.W, expected, rtol=0, atol=1e-9)
    assert solution.stats == {
        "damping": solver.damping,
        "damping_asked": solver.damping,
        "iterations": len(rhos),
        "converged": stayed,
        "residual": pytest.approx(residual, rel=1e-6),
    }


def test_all_cases_of_the_penalty_are_met() -> None:
    """So that the test above sees each: in a small matrix one weight is more than 0.005 k."""
    problem = make_problem(rows=48, seed=1)
    factors = set()
    for pattern in PATTERNS:
        _, rhos, _, stayed = algorithm_1(problem.W, problem.gram.H, pattern)
        assert stayed
        factors |= {round(b / a, 6) for a, b in itertools.pairwise(rhos)}
    assert factors == {1.0, 1.1, 1.2, 1.3}


def test_at_the_step_limit_it_says_that_it_has_not_converged() -> None:
    problem = make_problem()
    short = ALPS(iterations=4)(problem, Unstructured(0.5))
    assert (short.stats["iterations"], short.stats["converged"]) == (4, 0)
    whole = ALPS()(problem, Unstructured(0.5))
    assert whole.stats["converged"] == 1
    assert float(whole.stats["residual"]) < float(short.stats["residual"])
    assert whole.error < short.error


@pytest.mark.parametrize("kind", ["correlated", "dead input"])
def test_on_a_given_mask_it_is_least_squares(kind: str) -> None:
    problem = make_problem(kind)
    solution = ALPS(damping=0.0, finish=150)(problem, GIVEN)
    assert (solution.stats["iterations"], solution.stats["converged"]) == (3, True)
    live = problem.gram.norm > 0
    H = problem.gram.H[live][:, live]
    best = least_squares(H, problem.W[:, live], GIVEN.values[:, live])
    assert torch.allclose(solution.W[:, live], best, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_finish_lowers_the_error(kind: str) -> None:
    problem = make_problem(kind)
    errors = [ALPS(finish=finish)(problem, NM(2, 4)).error for finish in (0, 1, 10)]
    assert errors[2] < errors[0]


def test_monitor_ends_with_the_last_step() -> None:
    """Also where the support settles long before, and where there is no finish."""
    problem = make_problem()
    for solver in (ALPS(), ALPS(finish=0), ALPS(iterations=5), ALPS(iterations=5, finish=0)):
        calls: list[tuple[int, int, float]] = []
        solution = solver(problem, PerRow(0.5), lambda *call, calls=calls: calls.append(call))
        total = solver.iterations + solver.finish
        steps = [step for step, _, _ in calls]
        assert steps == sorted(set(steps))
        assert calls[-1][:2] == (total, total)
        assert calls[-1][2] == pytest.approx(solution.error, rel=1e-6)
