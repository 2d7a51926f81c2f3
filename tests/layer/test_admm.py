"""ADMM-Grad, as its paper says, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from niwaki.layer.patterns import NM, Pattern, Unstructured
from niwaki.layer.problem import LayerProblem
from niwaki.layer.solvers import ADMM
from niwaki.layer.solvers.admm import Schedule
from support.contract import COLUMNS, ROWS
from support.problems import gram, inputs, lowest_go, lowest_go_in_matrix, normal


def paper_schedule(schedule: Schedule, t: int, k_s: int) -> float:
    """s_t / s_f: as printed, as in Zhu & Gupta, and as in the published code."""
    if schedule == "printed":
        return (t / k_s) ** 3
    if schedule == "cubic":
        return 1 - (1 - t / k_s) ** 3
    return 1.0


def paper_unstructured(scores: Tensor, s_t: float) -> Tensor:
    """Mask the lowest s_t of all."""
    return lowest_go_in_matrix(scores, round(s_t * scores.numel()))


def paper_2_4(scores: Tensor, s_t: float) -> Tensor:
    """Section 3.2: keep the two highest of each group of four, prune 2 s_t of the remaining ones."""
    safe = torch.tensor([lowest_go(group.tolist(), 2) for group in scores.reshape(-1, 4)])
    remaining = scores.masked_fill(safe.reshape(scores.shape), torch.inf)
    return lowest_go_in_matrix(remaining, round(2 * s_t * (scores.numel() / 2)))


def algorithm_1(
    X: Tensor,  # (tokens, in)
    W: Tensor,  # (in, out), as in the paper
    s_f: float,
    lowest: Callable[[Tensor, float], Tensor],
    schedule: Schedule,
    k: int = 20,
    k_s: int = 15,
    lambda_: float = 0.1,
    rho: float = 1.0,
) -> Tensor:
    """The paper's algorithm 1, line by line; there is no epsilon because no input is dead."""
    I = torch.eye(X.shape[1], dtype=X.dtype)  # noqa: E741
    norm = X.norm(dim=0)
    W = W * norm[:, None]
    X = X / norm
    XX = X.T @ X + lambda_ * I
    XXW = XX @ W
    XX_inv = torch.linalg.inv(XX + rho * I)
    U = torch.zeros_like(W)
    for step in range(1, k + 1):
        if step <= k_s:
            s_i = s_f * paper_schedule(schedule, step, k_s)
            M = lowest((W + U).abs().T, s_i).T
        Z = (W + U) * M
        U = U + (W - Z)
        W = XX_inv @ (XXW + rho * (Z - U))
    What: Tensor = (W + U) * M / norm[:, None]
    return What


class TestADMM:
    @pytest.mark.parametrize("schedule", ["constant", "cubic", "printed"])
    @pytest.mark.parametrize(
        ("pattern", "lowest"),
        [(Unstructured(0.5), paper_unstructured), (Unstructured(0.8), paper_unstructured), (NM(2, 4), paper_2_4)],
        ids=["0.5", "0.8", "2:4"],
    )
    def test_is_algorithm_1(
        self, schedule: Schedule, pattern: Pattern, lowest: Callable[[Tensor, float], Tensor]
    ) -> None:
        X = inputs("correlated", COLUMNS, seed=4)
        W = normal(ROWS, COLUMNS, seed=4)
        expected = algorithm_1(X, W.T, pattern.sparsity, lowest, schedule).T
        solution = ADMM(schedule=schedule)(LayerProblem(W, gram(X)), pattern)
        assert torch.equal(solution.mask, expected != 0)
        assert torch.allclose(solution.W, expected, rtol=0, atol=1e-10)

    @pytest.mark.parametrize(
        ("changes", "symbols"),
        [
            ({"iterations": 7, "sparsification_steps": 3}, {"k": 7, "k_s": 3}),
            ({"sparsification_steps": 1}, {"k_s": 1}),
            ({"sparsification_steps": 20}, {"k_s": 20}),
            ({"rho": 0.3, "damping": 0.02}, {"rho": 0.3, "lambda_": 0.02}),
        ],
    )
    def test_parameters_mean_what_they_mean_in_the_paper(
        self, changes: dict[str, float], symbols: dict[str, float]
    ) -> None:
        X = inputs("correlated", COLUMNS, seed=5)
        W = normal(ROWS, COLUMNS, seed=5)
        expected = algorithm_1(X, W.T, 0.6, paper_unstructured, "cubic", **symbols).T  # type: ignore[arg-type]
        solver = replace(ADMM(schedule="cubic"), **changes)  # type: ignore[arg-type]
        solution = solver(LayerProblem(W, gram(X)), Unstructured(0.6))
        assert torch.equal(solution.mask, expected != 0)
        assert torch.allclose(solution.W, expected, rtol=0, atol=1e-10)
