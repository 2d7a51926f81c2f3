"""The contract that all solvers keep."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from niwaki.errors import PatternError
from niwaki.layer.patterns import NM, Fixed, Pattern, PerRow, Unstructured
from niwaki.layer.problem import Gram, LayerProblem
from niwaki.layer.solvers import Magnitude, Solver
from support.contract import COLUMNS, CONTRACT, OF_ONE_MATRIX, PATTERNS, ROWS, Promises, same_bytes, same_solution
from support.covering import covering
from support.problems import DEAD, KINDS, make_problem, normal, relative_error

#: Of no zeros at all.
ALL_KEPT: list[Pattern] = [
    *(Unstructured(0.0), PerRow(0.0), NM(4, 4)),
    Fixed(torch.ones(ROWS, COLUMNS, dtype=torch.bool)),
]
DTYPES = (torch.float32, torch.float64)

each_solver = pytest.mark.parametrize(("solver", "promises"), CONTRACT, ids=[repr(s) for s, _ in CONTRACT])


def each_solver_with(patterns: list[Pattern], **others: Sequence[Any]) -> pytest.MarkDecorator:
    """Solvers with patterns, and with the values of other parameters."""
    cases = covering(CONTRACT, patterns, *others.values())
    parameters = [pytest.param(*case, *rest, id="-".join(map(str, (case[0], *rest)))) for case, *rest in cases]
    return pytest.mark.parametrize(("solver", "promises", "pattern", *others), parameters)


each_solver_and_pattern = each_solver_with(PATTERNS)


def test_every_method_is_under_contract() -> None:
    assert set(OF_ONE_MATRIX.values()) <= {solver for solver, _ in CONTRACT}


def check_counts(mask: Tensor, pattern: Pattern, runs: int) -> None:
    zeros = ~mask
    if isinstance(pattern, Fixed):
        assert torch.equal(mask, pattern.values)
    assert int(zeros.sum()) == round(pattern.sparsity * mask.numel())
    if isinstance(pattern, NM):
        assert (zeros.reshape(-1, pattern.m).sum(dim=1) == pattern.m - pattern.n).all()
    if isinstance(pattern, PerRow):
        of_each = zeros.sum(dim=1)
        assert of_each.max() - of_each.min() <= runs


def rescaled(problem: LayerProblem, factor: float) -> LayerProblem:
    """The problem with its inputs times the root of ``factor``."""
    return LayerProblem(problem.W, Gram(problem.gram.H * factor, shared=False))


def check_solution(solver: Solver, promises: Promises, problem: LayerProblem, pattern: Pattern) -> None:
    W, H = problem.W.clone(), problem.gram.H.clone()
    solution = solver(problem, pattern)

    assert same_bytes(problem.W, W)
    assert same_bytes(problem.gram.H, H)

    mask = solution.mask
    assert mask.dtype == torch.bool
    assert mask.shape == W.shape
    check_counts(mask, pattern, promises.runs)
    assert all(type(value) in (int, float, str) for value in solution.stats.values())  # as records have them

    What = solution.W
    assert What.dtype == W.dtype
    assert What.shape == W.shape
    assert What.device == W.device
    assert torch.isfinite(What).all()
    # The problem's weights are not zero anywhere, so those that stay are not either.
    assert torch.equal(What != 0, mask)
    # +0.0: sparse kernels have read -0.0 as a value.
    assert not torch.signbit(What[~mask]).any()

    # Relative to the output, which is 1: single precision adds a few digits of (W - What) H that
    # cancel where H is singular.
    rel, abs_ = (1e-5, 3e-8) if W.dtype == torch.float32 else (1e-10, 1e-16)
    assert solution.error == pytest.approx(relative_error(problem, What), rel=rel, abs=abs_)
    if promises.moves:
        assert solution.error < relative_error(problem, W * mask)
    else:
        assert torch.equal(What[mask], W[mask])


class TestContract:
    @each_solver_with(PATTERNS, kind=KINDS, dtype=DTYPES)
    def test_solution(
        self, solver: Solver, promises: Promises, pattern: Pattern, kind: str, dtype: torch.dtype
    ) -> None:
        check_solution(solver, promises, make_problem(kind, dtype=dtype), pattern)

    @each_solver_and_pattern
    def test_dead_inputs_keep_their_weights(self, solver: Solver, promises: Promises, pattern: Pattern) -> None:
        """Where the mask leaves them any: the text says nothing on them."""
        problem = make_problem("dead input")
        problem.W[:, DEAD] *= 1000.0  # however large they are
        solution = solver(problem, pattern)
        dead = torch.zeros_like(solution.mask)
        dead[:, DEAD] = True
        kept = solution.mask & dead
        assert torch.equal(solution.W[kept], problem.W[kept])
        if isinstance(pattern, Unstructured) and not isinstance(solver, Magnitude):
            assert not kept.any()  # they are the first to go

    @each_solver_with(PATTERNS, kind=("correlated", "few tokens"))
    def test_scaling_the_inputs_by_a_power_of_two_changes_no_bit(
        self, solver: Solver, promises: Promises, pattern: Pattern, kind: str
    ) -> None:
        # Inputs times 2^k are H times 4^k; with other powers of two the square roots round differently.
        problem = make_problem(kind, dtype=torch.float32)
        solution = solver(problem, pattern)
        for factor in (4.0**9, 4.0**-9):
            assert same_solution(solution, solver(rescaled(problem, factor), pattern))

    @each_solver_with(PATTERNS, factor=(3.7e4, 2e-5))
    def test_scaling_by_any_factor_changes_little(
        self, solver: Solver, promises: Promises, pattern: Pattern, factor: float
    ) -> None:
        problem = make_problem()
        solution = solver(problem, pattern)
        scaled = solver(rescaled(problem, factor), pattern)
        assert torch.equal(scaled.mask, solution.mask)
        assert torch.allclose(scaled.W, solution.W, rtol=0, atol=promises.rounding)

    @each_solver_with(ALL_KEPT, kind=KINDS)
    def test_sparsity_zero_changes_nothing(
        self, solver: Solver, promises: Promises, pattern: Pattern, kind: str
    ) -> None:
        problem = make_problem(kind, dtype=torch.float32)
        solution = solver(problem, pattern)
        assert solution.mask.all()
        # Times the norm of its input and back: two roundings, of 6e-8 each.
        assert torch.allclose(solution.W, problem.W, rtol=2e-7, atol=0)
        assert solution.error < 1e-12

    @each_solver_and_pattern
    def test_two_runs_give_the_same_bytes(self, solver: Solver, promises: Promises, pattern: Pattern) -> None:
        first, second = (solver(make_problem(dtype=torch.float32), pattern) for _ in range(2))
        assert same_solution(first, second)

    @pytest.mark.parametrize("rows", [ROWS, 96])
    @each_solver
    def test_monitor(self, solver: Solver, promises: Promises, rows: int) -> None:
        calls: list[tuple[int, int, float]] = []
        problem = make_problem(rows=rows)
        quiet = solver(problem, Unstructured(0.5))
        watched = solver(problem, Unstructured(0.5), monitor=lambda *call: calls.append(call))
        assert same_solution(quiet, watched)
        steps = [step for step, _, _ in calls]
        assert all(a < b for a, b in itertools.pairwise(steps))
        assert {total for _, total, _ in calls} <= {promises.steps}
        if promises.steps:
            assert steps[-1] == promises.steps
            # Up to some 32 rows all are measured, of more a sample.
            tolerance = 1e-6 if rows == ROWS else 0.3
            assert calls[-1][2] == pytest.approx(watched.error, rel=tolerance)

    @each_solver
    def test_a_layer_that_the_text_never_reaches(self, solver: Solver, promises: Promises) -> None:
        W = normal(ROWS, COLUMNS, seed=0)
        H = torch.zeros(COLUMNS, COLUMNS).double()
        solution = solver(LayerProblem(W, H), PerRow(0.6))
        check_counts(solution.mask, PerRow(0.6), promises.runs)
        assert torch.equal(solution.W[solution.mask], W[solution.mask])
        assert solution.error == 0

    @each_solver
    def test_pattern_must_fit(self, solver: Solver, promises: Promises) -> None:
        for pattern in (NM(2, 4), PATTERNS[-1]):
            with pytest.raises(PatternError):
                solver(make_problem(columns=30), pattern)

    @pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 8), (8, 1)])
    @each_solver
    def test_tiny_matrices(self, solver: Solver, promises: Promises, rows: int, columns: int) -> None:
        problem = make_problem(rows=rows, columns=columns)
        mask = solver(problem, Unstructured(0.5)).mask
        assert int((~mask).sum()) == round(0.5 * rows * columns)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
    @each_solver
    def test_on_a_gpu(self, solver: Solver, promises: Promises) -> None:
        problem = make_problem(dtype=torch.float32)
        H = Gram(problem.gram.H.cuda())
        for pattern in PATTERNS:
            solution = solver(LayerProblem(problem.W.cuda(), H), pattern)
            assert solution.W.is_cuda
            assert solution.mask.is_cuda
            check_counts(solution.mask.cpu(), pattern, promises.runs)
            assert not torch.signbit(solution.W[~solution.mask]).any()
