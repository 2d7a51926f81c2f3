"""Patterns and solvers that have some rows of a matrix answer, all together, what one that has all rows does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from niwaki.layer.patterns import NM, Among, Fixed, Pattern, PerRow, Unstructured
from niwaki.layer.patterns.rows import ALL, Rows
from niwaki.layer.problem import LayerProblem
from niwaki.layer.solvers import ADMM, SOLVERS, Continuation, MaskThenUpdate, Solver, SparseGPT, continuation
from niwaki.models.processes import World
from support.covering import covered
from support.problems import generator, lowest_go_in_matrix, make_problem, normal
from support.threads import in_threads

T = TypeVar("T")

ROWS, COLUMNS = 11, 24  # which 2, 3 and 4 processes share unevenly
PATTERNS: list[Pattern] = [
    *(Unstructured(s) for s in (0.0, 0.002, 0.5, 0.6, 0.999)),
    *(PerRow(s) for s in (0.0, 0.02, 0.5, 0.6)),
    *(NM(2, 4), NM(1, 3)),
    Fixed(normal(ROWS, COLUMNS, seed=5) > 0.3),
]
# Zeros that are there already, more in the first rows and columns.
PLACES = normal(ROWS, COLUMNS, seed=6) > torch.linspace(1, -1, ROWS)[:, None] + torch.linspace(0.5, -1, COLUMNS)
PATTERNS += [
    Among(pattern, PLACES)
    for pattern in (
        *(Unstructured(0.0), Unstructured(0.7), PerRow(0.6), NM(2, 4)),
        Fixed(normal(ROWS, COLUMNS, seed=5) > 0.3),
    )
]


def in_each(size: int, rows: int, work: Callable[[Rows], T]) -> list[T]:
    """What ``work`` gives for each one's share of so many rows."""
    return in_threads(size, lambda world: work(world.rows(rows)))


def among(pattern: Pattern, rows: Rows) -> Pattern:
    found = pattern.for_rows(rows)
    assert found is not None
    return found


def scores_of(kind: str, dtype: torch.dtype, rows: int = ROWS) -> Tensor:
    if kind == "tied":  # so that every threshold falls among equals, in all processes
        return torch.randint(4, (rows, COLUMNS), generator=generator(1)).to(dtype)
    if kind == "last rows":  # all that goes is in the last rows, but for ties with the first ones
        return torch.arange(rows * COLUMNS).flip(0).div(8, rounding_mode="floor").view(rows, -1).to(dtype)
    return normal(rows, COLUMNS, seed=2, dtype=dtype).abs()


# Patterns


def check_answers(pattern: Pattern, scores: Tensor, rows: Rows) -> None:
    share, own = among(pattern, rows), rows.own(scores)
    assert share.sparsity == pattern.sparsity
    assert share.weights(own) == scores.numel()
    assert torch.equal(share.mask(own), rows.own(pattern.mask(scores)))
    assert torch.equal(rows.joined(own), scores)
    theta, expected = share.threshold(own), pattern.threshold(scores)
    assert (theta is None) == (expected is None)
    if theta is not None and expected is not None:
        assert torch.equal(theta, rows.own(expected) if expected.shape[0] == ROWS else expected)


def check_half_way_there(pattern: Pattern, scores: Tensor, rows: Rows) -> None:
    for fraction in (0.0, 0.37, 1.0):
        share, whole = among(pattern, rows).partial(fraction), pattern.partial(fraction)
        assert share.sparsity == whole.sparsity
        assert torch.equal(share.mask(rows.own(scores)), rows.own(whole.mask(scores)))


def check_runs_of_columns(pattern: Pattern, scores: Tensor, rows: Rows) -> None:
    own, whole = rows.own(scores), pattern.slices((ROWS, COLUMNS), 5)
    share = among(pattern, rows).slices((len(own), COLUMNS), 5)
    for (start, stop, run), (start_, stop_, run_) in zip(share, whole, strict=True):
        assert (start, stop) == (start_, stop_)
        assert torch.equal(run(own[:, start:stop]), rows.own(run_(scores[:, start_:stop_])))


def check_parts_with_thresholds_of_their_own(pattern: Pattern, scores: Tensor, rows: Rows) -> None:
    parts = scores.mul(torch.arange(1, 3).repeat(COLUMNS // 2)).split([12, 12], dim=1)
    own = [rows.own(part) for part in parts]
    share, expected = among(pattern, rows).split(own), pattern.split(parts)
    assert (share is None) == (expected is None)
    for one, other, mine, part in zip(share or [], expected or [], own, parts, strict=False):
        assert one.sparsity == other.sparsity
        assert torch.equal(one.mask(mine), rows.own(other.mask(part)))


@covered
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["random", "tied", "last rows"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.slow
def test_answers_are_those_of_the_whole(pattern: Pattern, kind: str, size: int, dtype: torch.dtype) -> None:
    scores = scores_of(kind, dtype)

    def work(rows: Rows) -> None:
        check_answers(pattern, scores, rows)
        check_half_way_there(pattern, scores, rows)
        check_runs_of_columns(pattern, scores, rows)
        check_parts_with_thresholds_of_their_own(pattern, scores, rows)

    in_each(size, ROWS, work)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.slow
def test_against_a_sort(size: int) -> None:
    """Of equal scores the first go, also where the others of the same score are in other processes."""
    scores = scores_of("tied", torch.float32)
    for zeros in range(0, scores.numel(), 7):
        expected = lowest_go_in_matrix(scores, zeros)
        pattern = Unstructured(zeros / scores.numel())
        masks = in_each(size, ROWS, lambda rows, p=pattern: among(p, rows).mask(rows.own(scores)))  # type: ignore[misc]
        assert torch.equal(torch.cat(masks), expected)


def test_shares_of_rows() -> None:
    values = torch.arange(14).view(7, 2)
    for size in (1, 2, 3, 7):
        shares = [World(rank, size).rows(7).own(values) for rank in range(size)]
        assert torch.equal(torch.cat(shares), values)
        lengths = [len(share) for share in shares]
        assert min(lengths) >= 1
        assert max(lengths) - min(lengths) <= 1
        assert World(0, size).rows(7).of(lengths[0]) == 7


def test_all_rows_are_here() -> None:
    values = torch.arange(3.0)
    assert ALL.own(values) is values
    assert ALL.joined(values) is values
    assert (ALL.of(3), ALL.total(5), ALL.sum_after(5)) == (3, 5, 0)


# Solvers

APART: list[Solver] = [
    *(solver for solver in SOLVERS.values() if solver.separable_rows),
    *(ADMM(schedule="cubic"), ADMM(schedule="printed"), SparseGPT(block_size=8), Continuation(parts=3, sweeps=5)),
    *(MaskThenUpdate(SOLVERS["wanda"], SOLVERS["continuation"]), MaskThenUpdate(SparseGPT(), ADMM())),
]


def test_which_solvers_have_rows_that_stand_apart() -> None:
    """A new one has to be thought about."""
    apart = {name for name, solver in SOLVERS.items() if solver.separable_rows}
    assert apart == {"magnitude", "wanda", "sparsegpt", "admm-grad", "continuation", "admm1"}
    assert not MaskThenUpdate(SOLVERS["ria"], ADMM()).separable_rows
    assert not MaskThenUpdate(ADMM(), SOLVERS["exact"]).separable_rows


@pytest.mark.parametrize("solver", APART, ids=repr)
@pytest.mark.parametrize(
    "pattern",
    [
        *(Unstructured(0.5), Unstructured(0.9), PerRow(0.55), NM(2, 4)),
        Fixed(normal(23, 32, seed=9) > 0),
        *(Among(pattern, normal(23, 32, seed=10) > 0) for pattern in (Unstructured(0.6), NM(2, 4))),
    ],
    ids=str,
)
@pytest.mark.slow
def test_the_solution_is_that_of_the_whole(solver: Solver, pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    # The parts of the whole are large enough for thresholds of their own, those of a share are not.
    monkeypatch.setattr(continuation, "_OWN_CHOICE", 23 * 8)
    problem = make_problem(rows=23)
    expected = solver(problem, pattern)

    def work(rows: Rows) -> tuple[Tensor, Tensor]:
        solution = solver(LayerProblem(rows.own(problem.W), problem.gram.H), among(pattern, rows))
        assert solution.stats == expected.stats
        return rows.joined(solution.W), rows.joined(solution.mask)

    for W, mask in in_each(3, 23, work):
        assert torch.equal(mask, expected.mask)
        assert torch.allclose(W, expected.W, rtol=0, atol=1e-10)
