"""Targets from the dense model, against least squares with all the inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from niwaki.layer.dense_targets import dense_targets
from niwaki.layer.linalg import inverse_of_damped
from niwaki.layer.patterns import Fixed
from niwaki.layer.problem import Gram, LayerProblem
from niwaki.layer.solvers import Exact
from support.problems import DEAD, generator, gram, inputs, normal


def case(kind: str = "correlated", columns: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """(W, Xp, X): weights, and the inputs of the same tokens in the pruned model and in the dense one."""
    X = inputs(kind, columns, seed=1)
    Xp = 0.9 * X + 0.3 * X.std(dim=0) * normal(*X.shape, seed=2) @ normal(columns, columns, seed=3) / columns**0.5
    if kind == "dead input":
        Xp[:, DEAD] = 0.0
    return normal(17, columns, seed=4), Xp, X


def targets(W: Tensor, Xp: Tensor, X: Tensor, share: float = 1.0, ridge: float = 0.01) -> Tensor:
    return dense_targets(W, Gram(gram(Xp)), Xp.T @ X / len(X), share, ridge)


def by_least_squares(W: Tensor, Xp: Tensor, X: Tensor, ridge: float) -> Tensor:
    """argmin_V of |X W^T - Xp V^T|^2 / tokens + ridge |(V - W) D|^2, as the rows of one regression."""
    D = Xp.square().mean(dim=0).sqrt()
    left = torch.cat([Xp / len(X) ** 0.5, ridge**0.5 * D.diag()])
    right = torch.cat([X @ W.T / len(X) ** 0.5, ridge**0.5 * D[:, None] * W.T])
    found: Tensor = torch.linalg.lstsq(left, right).solution.T
    return found


@pytest.mark.parametrize("kind", ["correlated", "rank-deficient", "few tokens"])
@pytest.mark.parametrize("ridge", [0.001, 0.01, 1.0])
def test_they_are_a_regression_with_a_ridge(kind: str, ridge: float) -> None:
    W, Xp, X = case(kind)
    expected = by_least_squares(W, Xp, X, ridge)
    assert (expected - W).norm() > 0.05 * W.norm()
    torch.testing.assert_close(targets(W, Xp, X, ridge=ridge), expected, rtol=1e-6, atol=1e-6)
    halfway = targets(W, Xp, X, share=0.5, ridge=ridge)
    torch.testing.assert_close(halfway, (W + expected) / 2, rtol=1e-6, atol=1e-6)
    assert torch.equal(targets(W, Xp, X, share=0.0, ridge=ridge), W)


def test_inputs_that_are_never_active_keep_their_weights() -> None:
    W, Xp, X = case("dead input")
    found = targets(W, Xp, X)
    assert torch.equal(found[:, DEAD], W[:, DEAD])
    live = [i for i in range(32) if i not in DEAD]
    expected = by_least_squares(W[:, live], Xp[:, live], X[:, live], 0.01)
    torch.testing.assert_close(found[:, live], expected, rtol=1e-6, atol=1e-6)


def test_inputs_that_are_never_active_in_the_pruned_model_only() -> None:
    W, Xp, X = case()
    Xp[:, DEAD] = 0.0
    found = targets(W, Xp, X)
    assert torch.equal(found[:, DEAD], W[:, DEAD])
    live = [i for i in range(32) if i not in DEAD]
    D = Xp.square().mean(dim=0).sqrt()[live]
    left = torch.cat([Xp[:, live] / len(X) ** 0.5, 0.1 * D.diag()])
    right = torch.cat([X @ W.T / len(X) ** 0.5, 0.1 * D[:, None] * W[:, live].T])  # the dense model has them all
    expected = torch.linalg.lstsq(left, right).solution.T
    torch.testing.assert_close(found[:, live], expected, rtol=1e-6, atol=1e-6)


def test_where_the_models_do_not_differ_they_are_the_weights() -> None:
    W, _, X = case()
    torch.testing.assert_close(targets(W, X, X), W, rtol=1e-12, atol=1e-12)


def test_the_unit_of_an_input_makes_no_difference() -> None:
    W, Xp, X = case()
    unit = normal(32, seed=5).exp()
    found = targets(W / unit, Xp * unit, X * unit) * unit
    torch.testing.assert_close(found, targets(W, Xp, X), rtol=1e-9, atol=1e-9)


def test_float32_and_arguments_that_stay() -> None:
    W, Xp, X = case()
    H, cross = gram(Xp), Xp.T @ X / len(X)
    single = [value.float() for value in (W, H, cross)]
    copies = [value.clone() for value in single]
    found = dense_targets(single[0], Gram(single[1]), single[2], 1.0, 0.01)
    assert found.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(single, copies, strict=True))
    torch.testing.assert_close(found.double(), targets(W, Xp, X), rtol=1e-3, atol=1e-3)


def test_matrices_with_the_same_inputs_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []

    def counted(copy: Callable[[], Tensor], damping: float) -> tuple[Tensor, float]:
        calls.append(damping)
        return inverse_of_damped(copy, damping)

    monkeypatch.setattr("niwaki.layer.dense_targets.inverse_of_damped", counted)
    W, Xp, X = case()
    shared, cross = Gram(gram(Xp), shared=True), Xp.T @ X / len(X)
    for rows in (W, 2 * W, W[:5]):
        expected = by_least_squares(rows, Xp, X, 0.01)
        torch.testing.assert_close(dense_targets(rows, shared, cross, 1.0, 0.01), expected, rtol=1e-6, atol=1e-6)
    assert calls == [0.01]
    for ridge in (0.01, 0.1):  # and another ridge is other work
        expected = by_least_squares(W, Xp, X, ridge)
        torch.testing.assert_close(dense_targets(W, shared, cross, 1.0, ridge), expected, rtol=1e-6, atol=1e-6)
    assert calls == [0.01, 0.1]


def test_the_layer_problem_with_them_is_that_of_the_dense_outputs() -> None:
    """Of all weights on a mask those of the layer problem come nearest to the dense model's outputs."""
    W, Xp, X = case()
    mask = torch.rand(W.shape, generator=generator(6)) < 0.5
    problem = LayerProblem(targets(W, Xp, X, ridge=1e-9), Gram(gram(Xp)))
    found = Exact(damping=1e-12)(problem, Fixed(mask)).W
    expected = torch.zeros_like(W)
    for row, kept in enumerate(mask):
        solution = torch.linalg.lstsq(Xp[:, kept], (X @ W[row])[:, None]).solution
        expected[row, kept] = solution[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    # And not those that come nearest to what the original weights make of the pruned model's inputs.
    original = Exact(damping=1e-12)(LayerProblem(W, Gram(gram(Xp))), Fixed(mask)).W
    assert (original - expected).norm() > 0.05 * expected.norm()
