"""Solvers that refit the weights of a mask step by step, against regressions and naive loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from niwaki.errors import NumericalError
from niwaki.layer.patterns import NM, Fixed, Pattern, Unstructured
from niwaki.layer.problem import LayerProblem
from niwaki.layer.solvers import Wanda
from niwaki.layer.solvers.conjugate import ConjugateGradients
from niwaki.layer.solvers.descent import Descent, Method
from niwaki.layer.solvers.exact import Exact
from support.covering import covered
from support.problems import gram, inputs, least_squares, make_problem, normal, relative_error

ROWS, COLUMNS = 23, 32
GIVEN = Fixed(normal(ROWS, COLUMNS, seed=77) > 0.3)
PATTERNS: list[Pattern] = [Unstructured(0.5), NM(2, 4), GIVEN]
each_pattern = pytest.mark.parametrize("pattern", PATTERNS, ids=str)


@each_pattern
@pytest.mark.parametrize(
    ("solver", "tolerance"),
    [
        (ConjugateGradients(iterations=150, damping=0.0), 1e-9),
        (Descent("sgd", learning_rate=1.0, iterations=4000), 1e-9),
        # Adam takes a wrong step now and then, when the gradients have been small for long.
        (Descent("adam", learning_rate=0.01, iterations=4000), 5e-3),
    ],
    ids=["cg", "sgd", "adam"],
)
@pytest.mark.slow
def test_goes_to_least_squares(solver: ConjugateGradients | Descent, tolerance: float, pattern: Pattern) -> None:
    problem = make_problem()
    mask = Wanda()(problem, pattern).mask
    solution = solver(problem, pattern)
    best = least_squares(problem.gram.H, problem.W, mask)
    assert torch.equal(solution.mask, mask)
    assert torch.allclose(solution.W, best, rtol=0, atol=tolerance)
    assert solution.error == pytest.approx(relative_error(problem, best), rel=tolerance)


def normalized(problem: LayerProblem) -> tuple[Tensor, Tensor, Tensor]:
    """The norms of the inputs, the weights times them, and H with unit diagonal."""
    H = problem.gram.H
    norm = H.diagonal().sqrt()
    return norm, problem.W * norm, H / norm / norm[:, None]


def residual(problem: LayerProblem, What: Tensor, mask: Tensor, damping: float) -> float:
    """The gradient on the mask at ``What``, relative to that at the start, row by row from the definition."""
    norm, W, H = normalized(problem)
    H = H + damping * torch.eye(len(H), dtype=torch.float64)
    squares = []
    for Z in (What * norm, W * mask):
        rows = [(H @ (z - w))[kept] for z, w, kept in zip(Z, W, mask, strict=True)]
        squares.append(sum(float(g @ g) for g in rows))
    return math.sqrt(squares[0] / squares[1])


class TestConjugateGradients:
    @each_pattern
    @pytest.mark.parametrize(("iterations", "damping"), [(1, 0.0), (2, 0.01), (5, 0.3)])
    def test_first_steps(self, iterations: int, damping: float, pattern: Pattern) -> None:
        """Hestenes and Stiefel's, row by row, on the rows and columns of H that are kept."""
        problem = make_problem(seed=1)
        norm, W, H = normalized(problem)
        H = H + damping * torch.eye(COLUMNS).double()
        mask = Wanda()(problem, pattern).mask
        expected = torch.zeros_like(W)
        for row, kept in enumerate(mask):
            A, b = H[kept][:, kept], H[kept] @ W[row]
            x = W[row, kept]
            r = p = b - A @ x
            for _ in range(iterations):
                alpha = (r @ r) / (p @ A @ p)
                x = x + alpha * p
                after = b - A @ x
                p = after + (after @ after) / (r @ r) * p
                r = after
            expected[row, kept] = x / norm[kept]
        solution = ConjugateGradients(iterations, damping)(problem, pattern)
        assert torch.allclose(solution.W, expected, rtol=0, atol=1e-11)
        assert solution.stats == {
            "damping": damping,
            "damping_asked": damping,
            "residual": pytest.approx(residual(problem, expected, mask, damping), rel=1e-9),
        }
        assert 0.001 < float(solution.stats["residual"]) < 1  # far from the end still

    def test_nothing_to_do_is_no_residual(self) -> None:
        problem = make_problem()
        everything = Fixed(torch.ones(ROWS, COLUMNS, dtype=torch.bool))
        for solver in (ConjugateGradients(), Exact()):
            assert solver(problem, everything).stats["residual"] == 0.0

    @pytest.mark.parametrize("kind", ["few tokens", "rank-deficient"])
    def test_without_damping_where_the_inputs_are_dependent(self, kind: str) -> None:
        """Many weights are best then; the error of all is the same."""
        X = inputs(kind, COLUMNS, seed=0)
        problem = LayerProblem(normal(ROWS, COLUMNS, seed=0), gram(X))
        least = torch.zeros(())
        for row, kept in enumerate(GIVEN.values):
            target = X @ problem.W[row]
            fit = torch.linalg.lstsq(X[:, kept], target[:, None], driver="gelsd").solution[:, 0]
            least = least + (target - X[:, kept] @ fit).square().sum()
        least = least / (X @ problem.W.T).square().sum()
        solution = ConjugateGradients(iterations=200, damping=0.0)(problem, GIVEN)
        # Where the least error is 0, what rounding leaves of it is up to the processor.
        assert solution.error == pytest.approx(float(least), rel=1e-6, abs=1e-9)


class TestDescent:
    @covered
    @each_pattern
    @pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
    @pytest.mark.parametrize(("method", "rate"), [("sgd", 0.7), ("adam", 0.05)])
    def test_steps_are_those_of_torch(self, method: Method, rate: float, momentum: float, pattern: Pattern) -> None:
        """torch's optimizers on the loss over the tokens, with the gradients by autograd."""
        X = inputs("correlated", COLUMNS, seed=2)
        problem = LayerProblem(normal(ROWS, COLUMNS, seed=2), gram(X))
        norm, W, H = normalized(problem)
        X = X / norm
        mask = Wanda()(problem, pattern).mask
        Z = torch.nn.Parameter(W * mask)
        optimizer: torch.optim.Optimizer
        if method == "adam":
            size = float(W.square().mean().sqrt())
            optimizer = torch.optim.Adam([Z], lr=rate * size, betas=(momentum, 0.999), eps=1e-8 * size)
        else:
            largest = float(torch.linalg.eigvalsh(H)[-1])
            optimizer = torch.optim.SGD([Z], lr=rate / largest, momentum=momentum)
        for _ in range(12):
            optimizer.zero_grad()
            loss = (X @ W.T - X @ (mask * Z).T).square().sum() / (2 * len(X))
            loss.backward()
            optimizer.step()
        solution = Descent(method, rate, 12, momentum)(problem, pattern)
        # The largest eigenvalue is an estimate by 30 steps of the power method.
        assert torch.allclose(solution.W, Z.detach() / norm * mask, rtol=0, atol=1e-6)
        gradients = [(mask * ((V - W) @ H)).norm() for V in (Z.detach(), W * mask)]
        assert solution.stats["residual"] == pytest.approx(float(gradients[0] / gradients[1]), rel=1e-5)

    @pytest.mark.parametrize("method", ["adam", "sgd"])
    def test_learning_rate_has_no_unit(self, method: Method) -> None:
        problem = make_problem()
        scaled = LayerProblem(problem.W * 1e-6, problem.gram.H * 3.7e4)
        first, second = (Descent(method, 0.1, 20)(p, GIVEN) for p in (problem, scaled))
        assert torch.allclose(first.W, second.W * 1e6, rtol=0, atol=1e-9)

    def test_sgd_is_stable_up_to_2_1_plus_beta(self) -> None:
        """With no momentum and inputs that are all kept but one: just below the limit, and just above."""
        problem = make_problem()
        mask = torch.ones(ROWS, COLUMNS, dtype=torch.bool)
        mask[:, 3] = False
        largest = torch.linalg.eigvalsh(normalized(problem)[2])[-1]
        kept = [j for j in range(COLUMNS) if j != 3]
        of_kept = torch.linalg.eigvalsh(normalized(problem)[2][kept][:, kept])[-1]
        limit = float(2 * largest / of_kept)
        below, above = (
            Descent("sgd", limit * factor, 2000, momentum=0.0)(problem, Fixed(mask)) for factor in (0.98, 1.02)
        )
        assert float(below.stats["residual"]) < 0.01
        assert float(above.stats["residual"]) > 1e6

    def test_divergence_is_an_error(self) -> None:
        with pytest.raises(NumericalError, match=r"sgd diverged.*lower its learning rate \(50\)"):
            Descent("sgd", 50.0, 1000)(make_problem(), GIVEN)

    def test_each_step_is_reported(self) -> None:
        problem = make_problem()
        calls: list[tuple[int, int, float]] = []
        Descent("sgd", 0.5, 30, momentum=0.0)(problem, GIVEN, lambda *call: calls.append(call))
        assert [call[:2] for call in calls] == [(step, 30) for step in range(1, 31)]
        errors = [error for _, _, error in calls]
        assert errors == sorted(errors, reverse=True)
        for step in (1, 7, 30):
            alone = Descent("sgd", 0.5, step, momentum=0.0)(problem, GIVEN).error
            assert errors[step - 1] == pytest.approx(alone, rel=1e-9)


class TestResidualOfExact:
    @covered
    @each_pattern
    @pytest.mark.parametrize("memory", [1.0, 1e-9], ids=["few batches", "row by row"])
    @pytest.mark.parametrize("damping", [0.0, 0.1])
    def test_is_that_of_the_normal_equations(
        self, damping: float, memory: float, pattern: Pattern, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With solutions that are wrong, by more in some rows of a batch than in others."""
        plain = torch.cholesky_solve

        def wrong(b: Tensor, L: Tensor) -> Tensor:
            factors = 1 - 0.1 * normal(b.shape[1], seed=b.shape[1]).abs()
            return plain(b, L) * factors[:, None]

        problem = make_problem()
        right = Exact(damping, memory)(problem, pattern)
        assert float(right.stats["residual"]) < 1e-13
        monkeypatch.setattr(torch, "cholesky_solve", wrong)
        solution = Exact(damping, memory)(problem, pattern)
        expected = residual(problem, solution.W, solution.mask, damping)
        assert expected > 0.01
        assert solution.stats["residual"] == pytest.approx(expected, rel=1e-9)
