"""OBC against greedy removal with explicit inverses, one row at a time, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from niwaki.errors import UsageError
from niwaki.layer.patterns import NM, Fixed, Pattern, PerRow, Unstructured
from niwaki.layer.problem import LayerProblem
from niwaki.layer.solvers.exact import Exact
from niwaki.layer.solvers.obc import OBC
from support.problems import DEAD, KINDS, generator, gram, least_squares, make_problem, normal, relative_error

ROWS, COLUMNS = 23, 32
FIXED = Fixed(normal(ROWS, COLUMNS, seed=77) > 0.3)
PATTERNS: list[Pattern] = [Unstructured(0.5), Unstructured(0.8), PerRow(0.6), NM(2, 4), NM(3, 8), FIXED]
each_pattern = pytest.mark.parametrize("pattern", PATTERNS, ids=str)


def saliencies(w: Tensor, H: Tensor, remaining: list[int]) -> Tensor:
    """(in,): what the error of the best fit on ``remaining`` grows by without each of them; else infinite."""
    C = torch.linalg.inv(H[remaining][:, remaining])
    fit = C @ (H[remaining] @ w)
    found = torch.full_like(w, torch.inf)
    found[remaining] = fit.square() / C.diagonal()
    return found


def trace(
    w: Tensor, H: Tensor, removals: int, free: Callable[[list[int]], list[int]] = lambda remaining: remaining
) -> list[tuple[float, int]]:
    """The greedy removals of one row: (saliency, column), of those that ``free`` says may go."""
    remaining = list(range(len(w)))
    found = []
    for _ in range(removals):
        s = saliencies(w, H, remaining)
        column = min(free(remaining), key=lambda i: float(s[i]))
        found.append((float(s[column]), column))
        remaining.remove(column)
    return found


def removed_by(traces: list[list[tuple[float, int]]]) -> Tensor:
    mask = torch.ones(len(traces), COLUMNS, dtype=torch.bool)
    for row, removals in enumerate(traces):
        mask[row, [column for _, column in removals]] = False
    return mask


def global_greedy(traces: list[list[tuple[float, int]]], zeros: int) -> Tensor:
    """Of complete traces: again and again the cheapest next removal of any row."""
    done = [0] * len(traces)
    for _ in range(zeros):
        nexts = [(t[i][0], row) for row, (t, i) in enumerate(zip(traces, done, strict=True)) if i < len(t)]
        done[min(nexts)[1]] += 1
    return removed_by([t[:i] for t, i in zip(traces, done, strict=True)])


def damped(problem: LayerProblem, damping: float) -> Tensor:
    """H with its diagonal times 1 + damping: damping relative to the unit diagonal."""
    H = problem.gram.H
    return H + damping * H.diagonal().diag()


@pytest.mark.parametrize("n_m", [NM(2, 4), NM(1, 4), NM(3, 8)], ids=str)
@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.slow
def test_n_m_is_the_greedy_choice_among_groups_that_are_not_full(n_m: NM, damping: float) -> None:
    problem = make_problem()

    def free(remaining: list[int]) -> list[int]:
        left = [sum(j // n_m.m == i // n_m.m for j in remaining) for i in remaining]
        return [i for i, count in zip(remaining, left, strict=True) if count > n_m.n]

    H = damped(problem, damping)
    removals = COLUMNS * (n_m.m - n_m.n) // n_m.m
    expected = removed_by([trace(w, H, removals, free) for w in problem.W])
    assert torch.equal(OBC(damping=damping)(problem, n_m).mask, expected)


@pytest.mark.parametrize("sparsity", [0.5, 0.6, 0.83])
@pytest.mark.slow
def test_per_row_is_the_greedy_choice_of_each_row(sparsity: float) -> None:
    problem = make_problem()
    each, extra = divmod(round(sparsity * ROWS * COLUMNS), ROWS)
    assert extra or sparsity == 0.5
    H = damped(problem, 0.01)
    traces = [trace(w, H, each + 1) for w in problem.W]
    more = sorted(range(ROWS), key=lambda row: traces[row][each][0])[:extra]
    expected = removed_by([t[: each + (row in more)] for row, t in enumerate(traces)])
    assert torch.equal(OBC()(problem, PerRow(sparsity)).mask, expected)


@pytest.mark.parametrize("sparsity", [0.3, 0.6, 0.8])
@pytest.mark.slow
def test_unstructured_is_the_global_greedy_choice_where_saliencies_grow(sparsity: float) -> None:
    # Weights of a row far apart and weak correlations, so that no removal makes the next one cheaper.
    X = normal(2000, COLUMNS, seed=0)
    sizes = normal(ROWS, COLUMNS, seed=1).argsort(dim=1) + 0.4 * torch.rand(ROWS, 1, generator=generator(2))
    W = 1.2 ** sizes.double() * normal(ROWS, COLUMNS, seed=3).sign()
    problem = LayerProblem(W, gram(X + 0.03 * X.roll(1, dims=1)))
    H = damped(problem, 0.01)
    traces = [trace(w, H, COLUMNS) for w in problem.W]
    assert all(t == sorted(t) for t in traces)
    expected = global_greedy(traces, round(sparsity * ROWS * COLUMNS))
    solution = OBC()(problem, Unstructured(sparsity))
    assert torch.equal(solution.mask, expected)
    # Weights are made up for: without that, other masks would come out.
    assert not torch.equal(expected, Unstructured(sparsity).mask(problem.W.square() / H.inverse().diagonal()))


@each_pattern
@pytest.mark.parametrize("kind", ["correlated", "rank-deficient", "dead input"])
@pytest.mark.slow
def test_all_rows_side_by_side(pattern: Pattern, kind: str) -> None:
    """As the docstring says, with explicit inverses and exact fits."""
    problem = make_problem(kind)
    W, H = problem.W, damped(problem, 0.1)
    H[DEAD, DEAD] += H[DEAD, DEAD] == 0  # any positive number
    W = W * (problem.gram.H.diagonal() > 0)
    remaining = torch.ones(ROWS, COLUMNS, dtype=torch.bool)
    while True:
        s = torch.stack([saliencies(w, H, r.nonzero()[:, 0].tolist()) for w, r in zip(W, remaining, strict=True)])
        mask = pattern.mask(s.masked_fill(~remaining, -1.0))
        candidates = s.masked_fill(mask | ~remaining, torch.inf)
        rows = (candidates < torch.inf).any(dim=1)
        if not rows.any():
            break
        remaining[rows, candidates.argmin(dim=1)[rows]] = False
    solution = OBC(damping=0.1)(problem, pattern)
    assert torch.equal(solution.mask, mask)
    assert torch.equal(solution.mask, remaining)


@each_pattern
@pytest.mark.parametrize("damping", [0.0, 0.01, 1.0])
def test_weights_are_the_exact_refit(pattern: Pattern, damping: float) -> None:
    problem = make_problem()
    solution = OBC(damping=damping)(problem, pattern)
    expected = least_squares(damped(problem, damping), problem.W, solution.mask)
    assert torch.allclose(solution.W, expected, rtol=0, atol=1e-9)
    assert solution.stats == {"damping": damping, "damping_asked": damping}


def test_a_given_mask_without_a_row() -> None:
    row_gone = Fixed(FIXED.values & (torch.arange(ROWS) != 3)[:, None])
    assert (OBC()(make_problem(), row_gone).W[3] == 0).all()


@each_pattern
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_single_precision_stays_exact(pattern: Pattern, kind: str) -> None:
    """Rounding errors of many removals do not add up to more than a refit has itself."""
    problem = make_problem(kind, dtype=torch.float32)
    solution = OBC()(problem, pattern)
    refit = Exact()(make_problem(kind), Fixed(solution.mask))
    assert relative_error(problem, solution.W) == pytest.approx(refit.error, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("kind", ["rank-deficient", "few tokens"])
def test_raised_damping_is_reported(kind: str) -> None:
    solution = OBC(damping=0.0)(make_problem(kind, dtype=torch.float32), NM(2, 4))
    assert solution.stats["damping_asked"] == 0.0
    assert 0 < float(solution.stats["damping"]) < 1e-3
    assert solution.error < 1e-5


def test_dead_inputs_need_no_damping() -> None:
    problem = make_problem("dead input")
    solution = OBC(damping=0.0)(problem, FIXED)
    assert solution.stats["damping"] == 0.0
    kept = FIXED.values[:, DEAD]
    assert torch.equal(solution.W[:, DEAD][kept], problem.W[:, DEAD][kept])


def test_more_steps_than_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem()
    expected = OBC()(problem, Unstructured(0.5))
    monkeypatch.setattr(OBC, "_allocate", lambda self, W, removals: W.new_empty(ROWS, 1, COLUMNS))
    solution = OBC()(problem, Unstructured(0.5))
    assert torch.equal(solution.W, expected.W)


def test_a_monitor_counts_removals() -> None:
    calls: list[tuple[int, int, float]] = []
    solution = OBC()(make_problem(), NM(2, 4), lambda *call: calls.append(call))
    assert calls[-1][:2] == (20, 20)
    assert len(calls) == 16  # of each row one weight a step
    errors = [error for _, _, error in calls]
    assert errors == sorted(errors)
    assert errors[-1] == pytest.approx(solution.error, rel=1e-9)


def test_memory() -> None:
    # 23 rows x 16 removals x 32 columns x 8 bytes
    needed = ROWS * 16 * COLUMNS * 8 / 2**30
    said = r"8\.77e-05 GiB for 23 x 32 weights.*is 8\.69e-05 GiB.*1\.9e\+05 operations.*try memory=0\.1,"
    with pytest.raises(UsageError, match=said):
        OBC(memory=0.99 * needed)(make_problem(), NM(2, 4))
    OBC(memory=1.01 * needed)(make_problem(), NM(2, 4))
