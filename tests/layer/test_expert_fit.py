"""Matrices whose outputs are summed, against one least-squares problem for all of them, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from niwaki.errors import NumericalError
from niwaki.layer.unit_removal import fit_sum

OUT, IN, ROWS = 5, 6, 80


def problem(parts: int, seed: int = 0) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor], Tensor]:
    """(rows and inputs of each part, old weights, targets), where each row has two parts."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(ROWS, parts, generator=generator).argsort(dim=1)[:, :2]
    inputs = []
    for part in range(parts):
        rows = (chosen == part).any(dim=1).nonzero().squeeze(1)
        inputs.append((rows, torch.randn(len(rows), IN, generator=generator)))
    old = [torch.randn(OUT, IN, generator=generator) for _ in range(parts)]
    return inputs, old, torch.randn(ROWS, OUT, generator=generator)


def ridge(X: Tensor) -> float:
    return 0.01 + 10 * X.shape[1] / len(X)


def residual(inputs: list[tuple[Tensor, Tensor]], W: list[Tensor], Y: Tensor) -> Tensor:
    left = Y.double().clone()
    for (rows, X), weights in zip(inputs, W, strict=True):
        left[rows] -= X.double() @ weights.double().T
    return left


def objective(inputs: list[tuple[Tensor, Tensor]], W: list[Tensor], old: list[Tensor], Y: Tensor) -> float:
    value = residual(inputs, W, Y).square().sum()
    for (_, X), new, before in zip(inputs, W, old, strict=True):
        value = value + ridge(X) * ((new.double() - before) * X.double().norm(dim=0)).square().sum()
    return float(value)


def solution(inputs: list[tuple[Tensor, Tensor]], old: list[Tensor], Y: Tensor) -> list[Tensor]:
    """All weights at once, from one system with a row for each target and each weight."""
    parts = len(old)
    A = torch.zeros(ROWS, parts * IN, dtype=torch.float64)
    for part, (rows, X) in enumerate(inputs):
        A[rows, part * IN : (part + 1) * IN] = X.double()
    strengths = torch.tensor([ridge(X) for _, X in inputs], dtype=torch.float64).repeat_interleave(IN)
    penalty = (strengths.sqrt() * A.norm(dim=0)).diag()
    start = torch.cat([W.double() for W in old], dim=1).T
    joint = torch.linalg.lstsq(torch.cat([A, penalty]), torch.cat([Y.double(), penalty @ start])).solution
    return list(joint.T.split(IN, dim=1))


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_it_comes_close_to_the_joint_solution(parts: int) -> None:
    inputs, old, Y = problem(parts)
    left = residual(inputs, old, Y).float()
    fit = fit_sum(lambda e: old[e], lambda e: inputs[e], parts, left)
    best, before = (objective(inputs, W, old, Y) for W in (solution(inputs, old, Y), old))
    found = objective(inputs, fit.W, old, Y)
    assert best <= found * (1 + 1e-6)
    assert found - best < 0.01 * (before - best)
    assert fit.before == pytest.approx(float(residual(inputs, old, Y).square().sum()))
    assert fit.after == pytest.approx(float(residual(inputs, fit.W, Y).square().sum()), rel=1e-4)
    assert fit.after < fit.before
    assert 1 < fit.sweeps <= 10


def test_one_part_is_solved_in_one_sweep() -> None:
    inputs, old, Y = problem(2)
    left = residual(inputs[:1], old[:1], Y).float()
    fit = fit_sum(lambda e: old[e], lambda e: inputs[e], 1, left)
    torch.testing.assert_close(fit.W[0].double(), solution(inputs[:1], old[:1], Y)[0], rtol=1e-4, atol=1e-5)
    assert fit.sweeps == 2  # the second gains nothing


def test_what_has_no_inputs_keeps_its_weights() -> None:
    inputs, old, Y = problem(3)
    inputs[1] = torch.empty(0, dtype=torch.int64), torch.empty(0, IN)
    inputs[2][1][:, 4] = 0.0
    fit = fit_sum(lambda e: old[e], lambda e: inputs[e], 3, residual(inputs, old, Y).float())
    assert torch.equal(fit.W[1], old[1])
    torch.testing.assert_close(fit.W[2][:, 4], old[2][:, 4])
    assert not torch.equal(fit.W[2][:, 3], old[2][:, 3])


def test_infinite_targets() -> None:
    inputs, old, Y = problem(2)
    Y[3, 2] = torch.inf
    with pytest.raises(NumericalError, match="not finite"):
        fit_sum(lambda e: old[e], lambda e: inputs[e], 2, residual(inputs, old, Y).float())
