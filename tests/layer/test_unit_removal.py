"""Inputs that are removed in units, against regressions by lstsq over all choices, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from niwaki.layer import unit_removal as structured
from niwaki.layer.problem import LayerProblem, Solution
from niwaki.layer.unit_removal import removals_of_units, remove_units
from support.models import message
from support.problems import DEAD, gram, inputs, normal, squared_error

ROWS, COLUMNS, RIDGE = 9, 12, 0.01

#: (columns in a unit, units to remove)
SHAPES = ((1, 5), (2, 2), (3, 2), (4, 2))


def case(kind: str = "correlated", columns: int = COLUMNS, seed: int = 1) -> tuple[Tensor, Tensor]:
    return inputs(kind, columns, seed), normal(ROWS, columns, seed=seed)


def without(X: Tensor, W: Tensor, units: Sequence[int], size: int) -> tuple[float, Tensor]:
    """(squared error with the ridge, weights) of the regression on the columns outside of ``units``."""
    rows = torch.cat([X / len(X) ** 0.5, RIDGE**0.5 * X.square().mean(dim=0).sqrt().diag()])
    kept = [column for column in range(W.shape[1]) if column // size not in units]
    V = torch.zeros_like(W)
    V[:, kept] = torch.linalg.lstsq(rows[:, kept], rows @ W.T).solution.T
    return float((rows @ (W - V).T).square().sum()), V


def one_by_one(X: Tensor, W: Tensor, size: int, count: int) -> list[int]:
    """Units in ascending order: again and again the one without which the regression is best."""
    gone: list[int] = []
    for _ in range(count):
        left = [unit for unit in range(W.shape[1] // size) if unit not in gone]
        gone.append(min(left, key=lambda u: without(X, W, [*gone, u], size)[0]))
    return sorted(gone)


def removed(found: Solution, size: int = 1) -> list[int]:
    return (~found.mask[0, ::size]).nonzero().flatten().tolist()


def test_several_numbers_in_one_choice() -> None:
    """Each goes on from the one before, and the last one is what it is alone."""
    X, W = case()
    problem = LayerProblem(W, gram(X))
    counts = [1, 2, 5]
    several = [*removals_of_units(problem, 1, counts)]
    for count, found in zip(counts, several, strict=True):
        assert removed(found) == one_by_one(X, W, 1, count)
        torch.testing.assert_close(found.W, without(X, W, removed(found), 1)[1], rtol=1e-7, atol=1e-7)
    assert torch.equal(several[-1].W, remove_units(problem, 1, counts[-1]).W)


@pytest.mark.parametrize(("size", "count"), SHAPES)
@pytest.mark.parametrize("kind", ["correlated", "rank-deficient", "few tokens"])
def test_the_rest_is_a_regression_with_a_ridge(kind: str, size: int, count: int) -> None:
    X, W = case(kind)
    H = gram(X)
    found = remove_units(LayerProblem(W, H), size, count)
    assert len(removed(found, size)) == count
    _, expected = without(X, W, removed(found, size), size)
    torch.testing.assert_close(found.W, expected, rtol=1e-7, atol=1e-7)
    assert torch.equal((found.W != 0).any(dim=0), found.mask[0])
    assert torch.equal(found.mask, found.mask[0, ::size].repeat_interleave(size).expand_as(W))
    assert not found.W.signbit()[found.W == 0].any()
    power = squared_error(W, torch.zeros_like(W), H)
    assert found.error == pytest.approx(squared_error(W, found.W, H) / power, rel=1e-9)
    assert found.stats == {"damping_asked": RIDGE, "damping": RIDGE}


@pytest.mark.parametrize(("size", "count"), SHAPES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_units_go_one_by_one(size: int, count: int, seed: int) -> None:
    X, W = case(seed=seed)
    found = remove_units(LayerProblem(W, gram(X)), size, count)
    assert removed(found, size) == one_by_one(X, W, size, count)


@pytest.mark.slow
def test_the_choice_is_near_the_best_of_all() -> None:
    """The error of each choice is at least that of the best; of 9 problems most are solved exactly."""
    exact = 0
    for (size, count), seed in itertools.product(((1, 4), (2, 2), (3, 2)), range(3)):
        X, W = case(seed=seed)
        choices = itertools.combinations(range(COLUMNS // size), count)
        best = min(without(X, W, choice, size)[0] for choice in choices)
        found = without(X, W, removed(remove_units(LayerProblem(W, gram(X)), size, count), size), size)[0]
        assert best * (1 - 1e-9) <= found <= 1.25 * best
        exact += found <= best * (1 + 1e-9)
    assert exact >= 7


@pytest.mark.parametrize(("size", "count", "steps"), [(1, 40, 6), (2, 20, 6), (4, 9, 2)])
def test_some_at_a_time_is_nearly_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, size: int, count: int, steps: int
) -> None:
    X, W = case(columns=64)
    problem = LayerProblem(W, gram(X))
    slow = remove_units(problem, size, count)
    monkeypatch.setattr(structured, "_STEPS", steps)  # no divisor of the count
    quick = remove_units(problem, size, count)
    assert len(removed(quick, size)) == count
    assert quick.error <= 1.1 * slow.error
    assert removed(quick, size) != removed(slow, size)
    torch.testing.assert_close(quick.W, without(X, W, removed(quick, size), size)[1], rtol=1e-7, atol=1e-7)


def test_inputs_that_are_never_active_go_first() -> None:
    X, W = case("dead input", columns=32)
    found = remove_units(LayerProblem(W, gram(X)), 1, 2)
    assert removed(found) == list(DEAD)
    assert found.error == pytest.approx(0, abs=1e-25)
    live = [column for column in range(32) if column not in DEAD]
    torch.testing.assert_close(found.W[:, live], W[:, live], rtol=1e-12, atol=1e-12)
    # One that stays keeps its weights: the text says nothing of it.
    found = remove_units(LayerProblem(W, gram(X)), 1, 1)
    (stays,) = set(DEAD) - set(removed(found))
    assert torch.equal(found.W[:, stays], W[:, stays])


def test_float32_and_arguments_that_stay() -> None:
    X, W = case(columns=64)
    H = gram(X)
    single = LayerProblem(W.float(), H.float())
    copies = single.W.clone(), single.gram.H.clone()
    found = remove_units(single, 1, 20)
    expected = remove_units(LayerProblem(W, H), 1, 20)
    assert found.W.dtype == torch.float32
    assert removed(found) == removed(expected)
    torch.testing.assert_close(found.W.double(), expected.W, rtol=1e-3, atol=1e-3)
    assert found.error == pytest.approx(expected.error, rel=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(copies, (single.W, single.gram.H), strict=True))


def test_the_unit_of_an_input_makes_no_difference() -> None:
    X, W = case()
    unit = normal(COLUMNS, seed=5).exp()
    one, other = (
        remove_units(LayerProblem(weights, gram(tokens)), 1, 5) for weights, tokens in ((W, X), (W / unit, X * unit))
    )
    assert removed(one) == removed(other)
    torch.testing.assert_close(other.W * unit, one.W, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("size", "count", "said"),
    [
        (1, 0, "1 to 11 can be removed, not 0"),
        (1, 12, "1 to 11 can be removed, not 12"),
        (4, 3, "1 to 2 can be removed, not 3"),
        (5, 1, "12 columns are not a multiple of units of 5"),
    ],
)
def test_what_makes_no_sense(size: int, count: int, said: str) -> None:
    X, W = case()
    assert said in message(lambda: remove_units(LayerProblem(W, gram(X)), size, count))
