"""Exact: regressions by lstsq, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from niwaki.errors import NumericalError
from niwaki.layer.patterns import NM, Fixed, Pattern, PerRow, Unstructured
from niwaki.layer.problem import Gram, LayerProblem
from niwaki.layer.solvers.exact import Exact
from niwaki.layer.solvers.wanda import Wanda
from support.problems import DEAD, gram, inputs, least_squares, make_problem, normal, relative_error

ROWS, COLUMNS = 23, 32


def uneven() -> Tensor:
    """A mask whose rows keep from none to all of their weights."""
    share = torch.linspace(-0.1, 1.1, ROWS, dtype=torch.float64)[:, None]
    mask = torch.rand(ROWS, COLUMNS, generator=torch.Generator().manual_seed(5), dtype=torch.float64) < share
    assert not mask[0].any()
    assert mask[-1].all()
    return mask[torch.randperm(ROWS, generator=torch.Generator().manual_seed(6))]


PATTERNS: list[Pattern] = [Unstructured(0.5), Unstructured(0.8), PerRow(0.6), NM(2, 4), Fixed(uneven())]
each_pattern = pytest.mark.parametrize("pattern", PATTERNS, ids=str)


def best_on_tokens(X: Tensor, W: Tensor, mask: Tensor) -> Tensor:
    """As least_squares, from the tokens and by singular values, for supports that are singular too."""
    best = torch.zeros_like(W)
    for row, kept in enumerate(mask):
        target = (X @ W[row])[:, None]
        best[row, kept] = torch.linalg.lstsq(X[:, kept], target, driver="gelsd").solution[:, 0]
    return best


@each_pattern
@pytest.mark.parametrize("damping", [0.0, 0.01, 3.0])
def test_it_is_least_squares(pattern: Pattern, damping: float) -> None:
    problem = make_problem()
    H = problem.gram.H
    solution = Exact(damping=damping)(problem, pattern)
    mask = pattern.values if isinstance(pattern, Fixed) else Wanda()(problem, pattern).mask
    assert torch.equal(solution.mask, mask)
    expected = least_squares(H + damping * H.diagonal().diag(), problem.W, mask)
    assert torch.allclose(solution.W, expected, rtol=0, atol=1e-10 if damping else 1e-8)
    residual = pytest.approx(0, abs=1e-13)
    assert solution.stats == {"damping": damping, "damping_asked": damping, "residual": residual}


def test_single_precision_is_enough() -> None:
    problem = make_problem()
    single = Exact()(make_problem(dtype=torch.float32), Unstructured(0.5))
    double = Exact()(problem, Unstructured(0.5))
    assert torch.equal(single.mask, double.mask)
    assert relative_error(problem, single.W) == pytest.approx(double.error, rel=1e-6)


def test_batches_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    plain = torch.linalg.cholesky_ex

    def watched(A: Tensor) -> tuple[Tensor, Tensor]:
        shapes.append(tuple(A.shape))
        L, info = plain(A)
        return L, info

    problem, pattern = make_problem(), PATTERNS[-1]
    monkeypatch.setattr(torch.linalg, "cholesky_ex", watched)
    wide = Exact()(problem, pattern)
    sizes = [size for _, size, _ in shapes]
    assert sum(rows for rows, _, _ in shapes) == ROWS
    assert sizes == sorted(sizes, reverse=True)
    assert len(shapes) < ROWS
    shapes.clear()
    alone = Exact(memory=1e-9)(problem, pattern)
    assert [rows for rows, _, _ in shapes] == [1] * ROWS
    assert torch.allclose(wide.W, alone.W, rtol=0, atol=1e-12)

    # Of 16 weights each: for five rows at a time, with their rows of H and the factors.
    shapes.clear()
    even = Fixed(torch.arange(COLUMNS).expand(ROWS, -1) % 2 == 0)
    Exact(memory=5.5 * 16 * (COLUMNS + 1 + 2 * 16) * 8 / 2**30)(problem, even)
    assert shapes == [(5, 16, 16)] * 4 + [(3, 16, 16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_singular_support_raises_its_own_damping_only(dtype: torch.dtype) -> None:
    X = inputs("few tokens", COLUMNS, seed=0)  # 8 tokens
    W = normal(ROWS, COLUMNS, seed=0)
    mask = torch.arange(COLUMNS) < torch.where(torch.arange(ROWS) % 2 == 0, 5, 24)[:, None]
    problem = LayerProblem(W.to(dtype), gram(X).to(dtype))
    solution = Exact(damping=0.0)(problem, Fixed(mask))
    assert solution.stats["damping_asked"] == 0.0
    # The first step of linalg.damped_cholesky, 10 n eps, or the next
    eps = torch.finfo(dtype).eps
    assert 9 * COLUMNS * eps < float(solution.stats["damping"]) < 101 * COLUMNS * eps
    regular = slice(0, None, 2)
    expected = best_on_tokens(X, W, mask)
    tolerance = 1e-3 if dtype == torch.float32 else 1e-8
    assert torch.allclose(solution.W[regular].double(), expected[regular], rtol=0, atol=tolerance)
    # 24 weights reproduce the outputs of 8 tokens.
    error = (X @ (solution.W.double() - W)[1::2].T).square().sum() / (X @ W[1::2].T).square().sum()
    assert error < (1e-6 if dtype == torch.float32 else 1e-12)


def test_dead_inputs_need_no_damping() -> None:
    X = inputs("dead input", COLUMNS, seed=0)
    problem = make_problem("dead input")
    mask = uneven()
    solution = Exact(damping=0.0)(problem, Fixed(mask))
    assert solution.stats["damping"] == 0.0
    expected = best_on_tokens(X, problem.W, mask)
    expected[:, DEAD] = problem.W[:, DEAD] * mask[:, DEAD]
    assert torch.allclose(solution.W, expected, rtol=0, atol=1e-8)


def test_damping_that_is_not_enough_grows_from_what_was_asked() -> None:
    H = torch.tensor([[1.0, 1.05, 0.2], [1.05, 1.0, 0.2], [0.2, 0.2, 1.0]], dtype=torch.float64)
    problem = LayerProblem(normal(3, 3, seed=0), Gram(H, trusted=True))
    kept = torch.tensor([[True, True, False], [True, False, True], [True, True, False]])
    solution = Exact(damping=0.01)(problem, Fixed(kept))
    assert solution.stats["damping"] == pytest.approx(0.1)
    assert float(solution.stats["residual"]) < 1e-13
    damped = H[:2, :2] + 0.1 * torch.eye(2, dtype=torch.float64)
    change = problem.W[::2, 2:] * (torch.linalg.inv(damped) @ H[:2, 2])
    assert torch.allclose(solution.W[::2, :2], problem.W[::2, :2] + change, rtol=0, atol=1e-12)


def test_beyond_repair() -> None:
    H = torch.tensor([[1.0, 1e3], [1e3, 1.0]], dtype=torch.float64)
    problem = LayerProblem(normal(3, 2, seed=0), Gram(H, trusted=True))
    with pytest.raises(NumericalError, match="not positive definite even when heavily damped"):
        Exact()(problem, Fixed(torch.ones(3, 2, dtype=torch.bool)))


def test_a_monitor_sees_the_error_fall() -> None:
    calls: list[tuple[int, int, float]] = []
    solution = Exact(memory=1e-9)(make_problem(), PerRow(0.6), lambda *call: calls.append(call))
    assert [call[:2] for call in calls] == [(step, 10) for step in range(1, 11)]
    errors = [error for _, _, error in calls]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == pytest.approx(solution.error, rel=1e-9)
