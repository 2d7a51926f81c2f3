"""Continuation against its docstring, written out slowly: no permutation, no parts kept, solves for inverses."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from niwaki.layer.patterns import NM, Fixed, Pattern, PerRow, Unstructured
from niwaki.layer.problem import Gram, LayerProblem
from niwaki.layer.solvers import ADMM, Continuation, continuation
from support.covering import covered
from support.problems import geometric_mean, least_squares, make_problem, normal, relative_error

ROWS, COLUMNS = 24, 32
PATTERNS: list[Pattern] = [
    Unstructured(0.5),
    Unstructured(0.8),
    PerRow(0.5),
    NM(2, 4),
    NM(1, 4),
    Fixed(normal(ROWS, COLUMNS, seed=77) > 0.3),
]


def choice(pattern: Pattern, scores: Tensor, here: Tensor, softness: float, first: Tensor | None) -> Tensor:
    """How far each weight is kept: by the scores of all columns, or of those ``here`` with their share of ``first``."""
    if isinstance(pattern, Unstructured):
        own = (scores if first is None else scores[:, here]).flatten().sort().values
        zeros = round(pattern.sparsity * scores.numel())
        if first is not None:
            lowest = first.flatten().sort().values[zeros - 1]
            zeros = min(int((first[:, here] <= lowest).sum()), len(own) - 1)  # one weight stays
            if zeros == 0:
                return torch.ones_like(scores)
        theta = own[zeros - 1]
    elif isinstance(pattern, PerRow):
        ordered = scores.sort(dim=1).values
        theta = ordered[:, round(pattern.sparsity * scores.shape[1]) - 1][:, None]
    elif isinstance(pattern, NM):
        ordered = scores.view(ROWS, -1, pattern.m).sort(dim=2, descending=True).values
        theta = ordered[:, :, pattern.n - 1 : pattern.n + 1].mean(dim=2).repeat_interleave(pattern.m, dim=1)
    else:
        return pattern.mask(scores).to(scores.dtype)
    if softness == 0:
        return (scores > theta).to(scores.dtype)
    return (0.5 + (scores / theta - 1) / (2 * softness)).clamp(0, 1)


def as_described(
    W: Tensor, H: Tensor, pattern: Pattern, solver: Continuation, alone: bool, tokens: int | None = None
) -> Tensor:
    """The weights that the docstring's steps give, with an exact refit at the end."""
    I = torch.eye(H.shape[0], dtype=H.dtype)  # noqa: E741
    h = H.diagonal()
    damping = solver.damping + (min(0.28, 13 * len(h) / tokens) if tokens else 0.0)
    H = H + damping * torch.diag((h * h.log().mean().exp()).sqrt())
    norm = H.diagonal().sqrt()
    H = H / norm / norm[:, None]
    c = 1 / torch.linalg.inv(H + 0.02 * I).diagonal()
    typical = math.exp(float(c.log().mean()))
    d = c ** (3 / 8) / math.exp(float((c ** (3 / 8)).log().mean()))
    W0 = W * norm * d
    H = H / torch.outer(d, d)
    unit = math.sqrt(typical) / (1 - pattern.sparsity) ** 0.25
    k = solver.sweeps
    ratio = solver.penalty_end / solver.penalty_start
    gammas = [unit * solver.penalty_start * ratio ** (t / max(1, k - 1)) for t in range(k)]
    part_of = torch.arange(COLUMNS) // pattern.group % solver.parts
    U, Z, new = torch.zeros_like(W0), W0.clone(), W0.clone()
    scores = W0.abs()
    first = scores.clone() if alone else None
    rho = 0.0
    for t, gamma in enumerate(gammas):
        if t in (0, math.ceil(0.6 * k)):
            before = rho
            rho = unit * (solver.penalty_start * ratio**0.25 if t == 0 else solver.penalty_end)
            U = U * before / rho
        softness = solver.softness * (1 - t / max(1, k - 1)) if t else 0.0
        for part in range(solver.parts):
            here = part_of == part
            if not here.any():
                continue
            if t:
                # The minimizer of the objective with rho / 2 |W - Z + U|^2.
                W_all = torch.linalg.solve(H + rho * I, W0 @ H + rho * (Z - U), left=False)
                new[:, here] = (W_all + (solver.relaxation - 1) * (W_all - Z))[:, here]
            scores[:, here] = (new + rho / gamma * U).abs()[:, here]
            P = choice(pattern, scores, here, softness, first)
            V = new + U
            Z[:, here] = (V * P)[:, here]
            U[:, here] = (V * (1 - P))[:, here]
    V = Z + U
    best: Tensor = least_squares(H, W0, pattern.mask(V.abs())) / norm / d
    return best


@covered
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize(
    "solver",
    [
        Continuation(sweeps=1, finish=200),
        Continuation(sweeps=6, finish=200),
        Continuation(sweeps=5, parts=1, relaxation=1.0, softness=0.0, finish=200),
        Continuation(sweeps=4, parts=2, penalty_start=0.05, penalty_end=2.0, damping=0.1, finish=200),
        Continuation(sweeps=3, parts=100, relaxation=0.7, finish=200),
    ],
    ids=repr,
)
@pytest.mark.parametrize("alone", [False, True], ids=["all", "alone"])
@pytest.mark.slow
def test_it_is_what_it_says(
    solver: Continuation, pattern: Pattern, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if alone:
        monkeypatch.setattr(continuation, "_OWN_CHOICE", 0)
    problem = make_problem(rows=ROWS)
    expected = as_described(problem.W, problem.gram.H, pattern, solver, alone)
    solution = solver(problem, pattern)
    assert torch.equal(solution.mask, expected != 0)
    assert torch.allclose(solution.W, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("pattern", [Unstructured(0.5), Unstructured(0.8), NM(2, 4)], ids=str)
@pytest.mark.slow
def test_what_each_part_of_it_is_worth(pattern: Pattern) -> None:
    """More sweeps, and parts one after the other, give lower errors; all beat ADMM-Grad by far."""
    problems = [make_problem(rows=48, columns=64, seed=seed) for seed in range(6)]

    def mean(solver: ADMM | Continuation) -> float:
        return geometric_mean([solver(problem, pattern).error for problem in problems])

    default = mean(Continuation())
    assert default < mean(Continuation(parts=1))
    assert default < mean(Continuation(sweeps=6))
    assert default < mean(Continuation(softness=0.0))
    assert default < 0.8 * mean(ADMM())


FEW = torch.tensor([3, 17, 40, 66, 91])
#: What makes the columns of one part of another scale than those of another, in W and X.
SCALED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "every fourth input": lambda W, X: X[:, ::4].mul_(10),
    "every fourth input is dead": lambda W, X: X[:, ::4].zero_(),
    "every fourth column is zero": lambda W, X: W[:, ::4].zero_(),
    "tiles": lambda W, X: X.mul_(normal(48, seed=5).exp().repeat(4)),
    "a few inputs": lambda W, X: X.index_copy_(1, FEW, 100 * X[:, FEW]),
    "every fourth row": lambda W, X: W[::4].mul_(10),
}


@pytest.mark.parametrize("case", SCALED)
@pytest.mark.parametrize("sparsity", [0.5, 0.9])
@pytest.mark.slow
def test_parts_of_other_scales(case: str, sparsity: float) -> None:
    """The same share of zeros in each part would be up to 44 times as bad as ADMM-Grad."""
    W, X = normal(128, 192, seed=1), normal(1024, 192, seed=2) + normal(1024, 8, seed=3) @ normal(8, 192, seed=4)
    SCALED[case](W, X)
    problem = LayerProblem(W, X.T @ X / len(X))
    assert W.numel() / Continuation().parts >= continuation._OWN_CHOICE
    solution = Continuation()(problem, Unstructured(sparsity))
    assert solution.error < 1.02 * ADMM()(problem, Unstructured(sparsity)).error


@pytest.mark.parametrize("tokens", [20, 3200, None])
def test_few_tokens_are_damped_more(tokens: int | None) -> None:
    problem, solver = make_problem(rows=ROWS), Continuation(finish=200)
    expected = as_described(problem.W, problem.gram.H, Unstructured(0.5), solver, False, tokens)
    gram = Gram(problem.gram.H, tokens=tokens)
    solution = solver(LayerProblem(problem.W, gram), Unstructured(0.5))
    assert torch.allclose(solution.W, expected, rtol=0, atol=1e-8)
    assert solution.stats["damping_asked"] == pytest.approx({20: 0.30, 3200: 0.15, None: 0.02}[tokens])
    assert solution.error == pytest.approx(relative_error(problem, solution.W))


def test_monitor_without_a_refit() -> None:
    steps = []
    solver = Continuation(sweeps=5, finish=0)
    problem = make_problem()
    solution = solver(problem, Unstructured(0.5), monitor=lambda step, total, error: steps.append((step, total)))
    assert steps == [(i, 5) for i in range(1, 6)]
    assert solution.error == pytest.approx(relative_error(problem, solution.W), rel=1e-9)


def test_a_mask_that_keeps_nothing() -> None:
    problem = make_problem(rows=ROWS)
    solution = Continuation()(problem, Fixed(torch.zeros(ROWS, COLUMNS, dtype=torch.bool)))
    assert solution.error == pytest.approx(1)
    assert not solution.W.any()
