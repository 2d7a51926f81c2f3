"""SparseSwaps against all exchanges of all pairs, each with its loss from the definition, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import niwaki.layer.solvers.swaps as module
from niwaki.errors import PatternError
from niwaki.layer.patterns import NM, Fixed, Pattern, PerRow, Unstructured
from niwaki.layer.problem import LayerProblem
from niwaki.layer.solvers.swaps import Swaps
from niwaki.layer.solvers.wanda import Wanda
from support.covering import covered
from support.problems import KINDS, make_problem, normal

ROWS, COLUMNS = 7, 16
PATTERNS: list[Pattern] = [
    *(Unstructured(s) for s in (0.5, 0.8, 0.9, 0.3)),
    *(PerRow(0.6), NM(2, 4), NM(3, 8), NM(5, 16)),
]
each_pattern = pytest.mark.parametrize("pattern", PATTERNS, ids=str)


def losses(W: Tensor, H: Tensor, mask: Tensor) -> Tensor:
    """(out,): d^T H d of each row for d = w * (1 - m), in float64."""
    D = W.double() * ~mask
    return torch.einsum("ri,ij,rj->r", D, H.double(), D)


def exchanges(w: Tensor, H: Tensor, kept: Tensor, width: int) -> list[tuple[float, int, int]]:
    """(loss afterwards, kept column, pruned column) for each pair within a run, from the definition."""
    found = []
    for u in range(len(w)):
        for p in range(len(w)):
            if kept[u] and not kept[p] and u // width == p // width:
                new = kept.clone()
                new[u], new[p] = False, True
                found.append((float(losses(w[None], H, new[None])[0]), u, p))
    return found


def naive(problem: LayerProblem, mask: Tensor, width: int, iterations: int) -> tuple[Tensor, int]:
    """The mask after ``iterations`` best exchanges of each row, and how many there were."""
    W, H = problem.W, problem.gram.H
    mask, swaps = mask.clone(), 0
    for row in range(len(W)):
        for _ in range(iterations):
            loss = float(losses(W[row : row + 1], H, mask[row : row + 1])[0])
            best, u, p = min(exchanges(W[row], H, mask[row], width), default=(loss, 0, 0))
            if best > loss * (1 - 1e-12):
                break
            mask[row, u], mask[row, p] = False, True
            swaps += 1
    return mask, swaps


def small(kind: str = "correlated") -> LayerProblem:
    return make_problem(kind, ROWS, COLUMNS, seed=3)


@each_pattern
@pytest.mark.parametrize("iterations", [1, 3, 100])
@pytest.mark.slow
def test_best_exchanges_by_brute_force(pattern: Pattern, iterations: int) -> None:
    problem = small()
    start = Wanda()(problem, pattern).mask
    expected, swaps = naive(problem, start, pattern.exchange(COLUMNS), iterations)
    solution = Swaps(iterations=iterations)(problem, pattern)
    assert torch.equal(solution.mask, expected)
    assert solution.stats["swaps"] == swaps
    assert swaps > 0
    assert torch.equal(solution.W, problem.W * expected)


@each_pattern
@pytest.mark.parametrize("kind", ["correlated", "rank-deficient", "few tokens"])
@pytest.mark.slow
def test_the_end_is_a_local_optimum(pattern: Pattern, kind: str) -> None:
    problem = small(kind)
    solution = Swaps()(problem, pattern)
    assert solution.stats["converged"] == 1
    assert solution.stats["rows_at_limit"] == 0
    loss = losses(problem.W, problem.gram.H, solution.mask)
    for row in range(ROWS):
        for other, _, _ in exchanges(problem.W[row], problem.gram.H, solution.mask[row], pattern.exchange(COLUMNS)):
            assert other > loss[row] * (1 - 1e-10)


@covered
@each_pattern
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_the_loss_of_no_row_rises(pattern: Pattern, dtype: torch.dtype, kind: str) -> None:
    problem = make_problem(kind, rows=23, columns=32, dtype=dtype)
    before = losses(problem.W, problem.gram.H, Wanda()(problem, pattern).mask)
    swaps = 0
    for iterations in range(1, 200):
        solution = Swaps(iterations=iterations)(problem, pattern)
        after = losses(problem.W, problem.gram.H, solution.mask)
        moved = int(solution.stats["swaps"]) - swaps
        assert int((after < before).sum()) == moved
        assert (after <= before).all()
        before, swaps = after, swaps + moved
        if solution.stats["converged"]:
            break
    assert iterations < 199
    assert not moved  # the step in which no row found any more


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_exchanges_of_equals_come_to_an_end(dtype: torch.dtype) -> None:
    """Each input is there twice, with nearly equal weights: exchanging the two gains nothing but rounding."""
    half = make_problem(rows=96, columns=16, dtype=dtype)
    W = torch.cat([half.W, half.W * (1 + 4 * torch.finfo(dtype).eps)], dim=1)
    problem = LayerProblem(W, half.gram.H.repeat(2, 2))
    assert Swaps()(problem, PerRow(0.5)).stats["converged"] == 1


@pytest.mark.parametrize("pattern", [PerRow(0.6), NM(2, 4)], ids=str)
def test_a_given_mask_is_refined_within_its_pattern(pattern: Pattern) -> None:
    problem = small()
    start = pattern.mask(normal(ROWS, COLUMNS, seed=9).abs())
    given = start.clone()
    solution = Swaps()(problem, Fixed(given, within=pattern))
    assert torch.equal(given, start)
    expected, swaps = naive(problem, start, pattern.exchange(COLUMNS), 100)
    assert torch.equal(solution.mask, expected)
    assert solution.stats == {"swaps": swaps, "converged": 1, "rows_at_limit": 0}


def test_the_limit_is_reported() -> None:
    problem = small()
    stats = [Swaps(iterations=i)(problem, PerRow(0.5)).stats for i in range(1, 20)]
    at_limit = [int(s["rows_at_limit"]) for s in stats]
    assert at_limit == sorted(at_limit, reverse=True)
    assert at_limit[0] > at_limit[-1] == 0
    for s in stats:
        assert s["converged"] == (s["rows_at_limit"] == 0)
    # The rows that made a swap in the last step
    made = [int(s["swaps"]) for s in stats]
    assert made == [sum(at_limit[: i + 1]) for i in range(len(stats))]


@each_pattern
def test_chunks_do_not_change_the_result(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = small()
    whole = Swaps()(problem, pattern)
    for size in (1, 3 * COLUMNS * pattern.exchange(COLUMNS) * 8):  # one row, three rows
        monkeypatch.setattr(module, "_CHUNK", size)
        parts = Swaps()(problem, pattern)
        assert torch.equal(parts.mask, whole.mask)
        assert parts.stats == whole.stats


def test_a_monitor_sees_the_loss_fall_and_the_end() -> None:
    calls: list[tuple[int, int, float]] = []
    solution = Swaps(iterations=50)(small(), PerRow(0.5), lambda *call: calls.append(call))
    *before, last = [step for step, _, _ in calls]
    assert before == list(range(1, len(calls)))
    assert last == 50
    assert {steps for _, steps, _ in calls} == {50}
    errors = [error for _, _, error in calls]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == pytest.approx(solution.error, rel=1e-9)


@dataclass(frozen=True)
class Together(PerRow):
    def exchange(self, columns: int) -> int:
        return 0


def test_weights_that_do_not_change_places() -> None:
    problem = small()
    mask = PerRow(0.5).mask(problem.W.abs())
    for pattern in (Together(0.5), Fixed(mask), Fixed(mask, within=Together(0.5))):
        with pytest.raises(PatternError, match=r"single weights.*--pattern 2:4, or in Python Fixed\(mask, within="):
            Swaps()(problem, pattern)
