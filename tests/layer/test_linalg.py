"""Linear algebra against float64 references."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

from niwaki.errors import NumericalError
from niwaki.layer import linalg
from niwaki.layer.linalg import (
    STRIP,
    damped_cholesky,
    inverse_diagonal,
    inverse_of_damped,
    inverse_upper_cholesky,
    is_finite,
    masked_conjugate_gradients,
)
from support.problems import gram, inputs, least_squares, normal, squared_error

#: In units of the result: n = 32 sums of rounding errors, times a condition number below 1,000.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-11}
DTYPES = (torch.float32, torch.float64)


def damped(H: Tensor, damping: float) -> Tensor:
    return H.double() + damping * torch.eye(H.shape[0], dtype=torch.float64)


def relative_difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@functools.cache
def correlated_gram(n: int) -> Tensor:
    """Which takes longer than what is done with it."""
    return gram(inputs("correlated", n, seed=0))


def check_factorizations(H: Tensor, damping: float) -> None:
    """Of a Gram matrix that is positive definite, so that the damping is what was asked for."""
    before, reference, tolerance = H.clone(), torch.linalg.inv(damped(H, damping)), TOLERANCE[H.dtype]
    L, used = damped_cholesky(H.clone, damping)
    U, used_for_U = inverse_upper_cholesky(H, damping)
    inverse, used_for_inverse = inverse_of_damped(H.clone, damping)
    diagonal, used_for_diagonal = inverse_diagonal(H.clone, damping)
    assert {used, used_for_U, used_for_inverse, used_for_diagonal} == {damping}
    assert torch.equal(H, before)
    assert L.dtype == U.dtype == H.dtype
    assert torch.equal(L, L.tril())
    assert torch.equal(U, U.triu())
    assert (U.diagonal() > 0).all()
    assert relative_difference(L @ L.T, damped(H, damping)) < tolerance
    for found, expected in ((U.T @ U, reference), (inverse, reference), (diagonal, reference.diagonal())):
        assert relative_difference(found, expected) < tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("damping", [0.0, 0.1, 3.0])
def test_factorizations(damping: float, dtype: torch.dtype) -> None:
    check_factorizations(correlated_gram(32).to(dtype), damping)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lapack", [True, False], ids=["lapack", "parts"])
class TestLargeFactorizations:
    """Of matrices that are factorized in parts, which some processors do with everything."""

    @pytest.fixture(autouse=True)
    def _library(self, monkeypatch: pytest.MonkeyPatch, lapack: bool) -> None:
        monkeypatch.setattr(linalg, "onednn_is_faster", lambda: not lapack)
        monkeypatch.setattr(linalg, "_SMALL", 0)

    @pytest.mark.parametrize("n", [193, 448, 1100])
    @pytest.mark.slow
    def test_against_float64(self, n: int, dtype: torch.dtype) -> None:
        check_factorizations(correlated_gram(n).to(dtype), 0.1)

    @pytest.mark.parametrize("at", [0, 300, 499])
    def test_one_negative_eigenvalue_wherever_it_is(self, at: int, dtype: torch.dtype) -> None:
        H = torch.eye(500, dtype=dtype)
        H[at, at] = -0.1
        L, used = damped_cholesky(H.clone, 0.0)
        assert 0.1 < used < 1.5
        assert relative_difference(L @ L.T, damped(H, used)) < TOLERANCE[dtype]


#: Rounding makes the small eigenvalues of a Gram matrix negative; here one is, by much.
INDEFINITE = torch.diag(torch.tensor([3.1, 1.0, -0.1]))


class TestMoreDamping:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("n", [2, 8, 64])
    def test_a_singular_matrix_is_reported(self, n: int, dtype: torch.dtype) -> None:
        # All ones: the second pivot is exactly 1 - 1 = 0, so no rounding can hide the singularity.
        H = torch.ones(n, n, dtype=dtype)
        L, used = damped_cholesky(H.clone, 0.0)
        assert 0 < used < 1e-3
        assert relative_difference(L @ L.T, damped(H, used)) < TOLERANCE[dtype]

    def test_an_indefinite_matrix_gets_what_it_needs(self) -> None:
        """And what is found is of the damping that is reported."""
        expected = damped(INDEFINITE, 0.2)  # tenfold steps from what was asked for
        L, used = damped_cholesky(INDEFINITE.clone, 0.02)
        inverse, used_for_inverse = inverse_of_damped(INDEFINITE.clone, 0.02)
        U, used_for_U = inverse_upper_cholesky(INDEFINITE, 0.02)
        assert [used, used_for_inverse, used_for_U] == pytest.approx([0.2] * 3)
        assert relative_difference(L @ L.T, expected) < 1e-6
        assert relative_difference(inverse, torch.linalg.inv(expected)) < 1e-6
        assert relative_difference(U.T @ U, torch.linalg.inv(expected)) < 1e-6

    @pytest.mark.timeout(5)  # a loop without end is how this fails
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("place", [(0, 0), (2, 2), (2, 1)])
    def test_not_finite(self, place: tuple[int, int], value: float) -> None:
        H = torch.eye(4)
        H[place] = H[place[::-1]] = value
        with pytest.raises(NumericalError, match="NaN, infinite or huge activations"):
            damped_cholesky(H.clone, 0.1)

    def test_negative_definite_is_beyond_repair(self) -> None:
        with pytest.raises(NumericalError):
            damped_cholesky((-torch.eye(4)).clone, 0.1)

    @pytest.mark.timeout(5)
    @pytest.mark.parametrize("damping", [0.0, 0.1])
    def test_zero_matrix_ends(self, damping: float) -> None:
        """A layer that the text never reaches. Without damping there is nothing to scale it by."""
        H = torch.zeros(4, 4)
        if damping:
            L, used = damped_cholesky(H.clone, damping)
            assert used == damping
            assert relative_difference(L @ L.T, damped(H, damping)) < 1e-6
        else:
            with pytest.raises(NumericalError):
                damped_cholesky(H.clone, damping)


def unit_problem(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """H with unit diagonal, as callers pass it; targets; and a mask with rows of all sizes."""
    H = gram(inputs("correlated", 24, seed=seed))
    norm = H.diagonal().sqrt()
    mask = normal(12, 24, seed=seed + 1) > torch.linspace(-4, 4, 12)[:, None]
    mask[0], mask[-1] = True, False
    return (H / norm / norm[:, None]).to(dtype), normal(12, 24, seed=seed + 2).to(dtype), mask


def masked(target: Tensor, mask: Tensor) -> Tensor:
    return target.masked_fill(~mask, 0.0)


class TestMaskedConjugateGradients:
    @pytest.mark.parametrize("seed", range(3))
    def test_converges_to_the_regression_on_the_support(self, seed: int) -> None:
        """From any start on the mask."""
        H, target, mask = unit_problem(seed)
        for start in (target, normal(12, 24, seed=9)):
            # 24 unknowns: exact after 24 steps but for rounding, which a few more steps clean up.
            Z, _ = masked_conjugate_gradients(H, target, masked(start, mask), mask, steps=60)
            assert (Z[~mask] == 0).all()
            assert torch.allclose(Z, least_squares(H, target, mask), rtol=0, atol=1e-10)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_each_row_gets_better_with_each_step(self, dtype: torch.dtype) -> None:
        H, target, mask = unit_problem(1, dtype)
        start = masked(target, mask)
        before = start
        for steps in range(30):
            Z, _ = masked_conjugate_gradients(H, target, start, mask, steps)
            for row in range(12):
                now = squared_error(target[None, row], Z[None, row], H)
                then = squared_error(target[None, row], before[None, row], H)
                assert now <= then * (1 + 100 * torch.finfo(dtype).eps) + torch.finfo(dtype).eps ** 2
            before = Z
        assert squared_error(target, before, H) < 0.9 * squared_error(target, start, H)

    def test_after_one_step_each_row_is_at_the_minimum_along_its_gradient(self) -> None:
        H, target, mask = unit_problem(2)
        start = masked(target, mask)
        G = masked((target - start) @ H, mask)
        expected = start.clone()
        for row in range(11):  # the last row has no weights
            g = G[row]
            if g.any():
                expected[row] += (g @ g) / (g @ H @ g) * g
        Z, _ = masked_conjugate_gradients(H, target, start, mask, steps=1)
        assert torch.allclose(Z, expected, rtol=0, atol=1e-12)

    def test_no_steps_and_no_need_for_any(self) -> None:
        H, target, mask = unit_problem(0)
        start = masked(target, mask)
        assert torch.equal(masked_conjugate_gradients(H, target, start, mask, steps=0)[0], start)
        everything = torch.ones_like(mask)
        assert torch.equal(masked_conjugate_gradients(H, target, target, everything, steps=5)[0], target)

    def test_many_steps_do_not_spoil_a_converged_float32_result(self) -> None:
        H, target, mask = unit_problem(0, torch.float32)
        start = masked(target, mask)
        best = squared_error(target, least_squares(H, target, mask).float(), H)
        Z, _ = masked_conjugate_gradients(H, target, start, mask, steps=2000)
        assert torch.isfinite(Z).all()
        assert squared_error(target, Z, H) == pytest.approx(best, rel=1e-4)

    def test_arguments_are_not_changed(self) -> None:
        H, target, mask = unit_problem(0)
        start = masked(target, mask)
        copies = [x.clone() for x in (H, target, start, mask)]
        masked_conjugate_gradients(H, target, start, mask, steps=3)
        assert all(map(torch.equal, (H, target, start, mask), copies))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(5,), (3, 2), (STRIP + 1, 2)])
def test_whether_all_is_finite(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    largest = torch.finfo(dtype).max
    assert is_finite(torch.full(shape, largest, dtype=torch.float64).to(dtype))  # whose sum is not
    assert is_finite(torch.zeros(0, *shape[1:], dtype=torch.float64).to(dtype))
    for values in ([math.nan], [math.inf], [-math.inf], [math.inf, -math.inf]):
        A = torch.zeros(math.prod(shape), dtype=torch.float64)
        A[-len(values) :] = torch.tensor(values, dtype=torch.float64)
        assert not is_finite(A.view(shape).to(dtype))
