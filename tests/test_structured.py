"""Inputs that are dropped in units, against regressions by lstsq over all choices, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from models import message
from niwaki import structured
from niwaki.problem import LayerProblem
from niwaki.structured import drop_units
from problems import DEAD, gram, inputs, normal, squared_error

ROWS, COLUMNS, RIDGE = 9, 12, 0.01

#: (columns in a unit, units to drop, parts)
SHAPES = ((1, 5, 1), (1, 6, 3), (2, 2, 1), (3, 2, 2), (4, 2, 1))


def case(kind: str = "correlated", columns: int = COLUMNS, seed: int = 1) -> tuple[Tensor, Tensor]:
    return inputs(kind, columns, seed), normal(ROWS, columns, seed=seed)


def without(X: Tensor, W: Tensor, units: Sequence[int], size: int) -> tuple[float, Tensor]:
    """(squared error with the ridge, weights) of the regression on the columns outside of ``units``."""
    rows = torch.cat([X / len(X) ** 0.5, RIDGE**0.5 * X.square().mean(dim=0).sqrt().diag()])
    kept = [column for column in range(W.shape[1]) if column // size not in units]
    V = torch.zeros_like(W)
    V[:, kept] = torch.linalg.lstsq(rows[:, kept], rows @ W.T).solution.T
    return float((rows @ (W - V).T).square().sum()), V


def one_by_one(X: Tensor, W: Tensor, size: int, count: int, parts: int) -> list[int]:
    """Units in ascending order: again and again the one without which the regression is best."""
    units = W.shape[1] // size
    gone: list[int] = []
    for _ in range(count):
        part_of = [unit * parts // units for unit in gone]
        full = [part for part in range(parts) if part_of.count(part) == count // parts]
        open_ = [u for u in range(units) if u not in gone and u * parts // units not in full]
        gone.append(min(open_, key=lambda u: without(X, W, [*gone, u], size)[0]))
    return sorted(gone)


@pytest.mark.parametrize(("size", "count", "parts"), SHAPES)
@pytest.mark.parametrize("kind", ["correlated", "rank-deficient", "few tokens"])
def test_the_rest_is_a_regression_with_a_ridge(kind: str, size: int, count: int, parts: int) -> None:
    X, W = case(kind)
    H = gram(X)
    found = drop_units(LayerProblem(W, H), size, count, parts)
    assert len(found.units) == count
    _, expected = without(X, W, found.units, size)
    torch.testing.assert_close(found.W, expected, rtol=1e-7, atol=1e-7)
    assert (found.W != 0).any(dim=0).view(-1, size).any(dim=1).logical_not().nonzero().flatten().tolist() == (
        found.units
    )
    assert not found.W.signbit()[found.W == 0].any()
    power = squared_error(W, torch.zeros_like(W), H)
    assert found.error == pytest.approx(squared_error(W, found.W, H) / power, rel=1e-9)
    alone = [without(X, W, [unit], size)[0] / power for unit in range(COLUMNS // size)]
    assert found.alone == pytest.approx(alone, rel=1e-6, abs=1e-12)
    assert found.damping == RIDGE


@pytest.mark.parametrize(("size", "count", "parts"), SHAPES)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("at_once", [128, 1])
def test_units_go_one_by_one(
    monkeypatch: pytest.MonkeyPatch, size: int, count: int, parts: int, seed: int, at_once: int
) -> None:
    monkeypatch.setattr(structured, "_AT_ONCE", at_once)
    X, W = case(seed=seed)
    found = drop_units(LayerProblem(W, gram(X)), size, count, parts)
    assert found.units == one_by_one(X, W, size, count, parts)


def test_the_choice_is_near_the_best_of_all() -> None:
    """The error of each choice is at least that of the best; of 9 problems most are solved exactly."""
    exact = 0
    for (size, count, parts), seed in itertools.product(((1, 4, 1), (2, 2, 1), (3, 2, 2)), range(3)):
        X, W = case(seed=seed)
        units = COLUMNS // size
        of_parts = [range(part * units // parts, (part + 1) * units // parts) for part in range(parts)]
        choices = itertools.product(*(itertools.combinations(part, count // parts) for part in of_parts))
        best = min(without(X, W, sum(choice, ()), size)[0] for choice in choices)
        found = without(X, W, drop_units(LayerProblem(W, gram(X)), size, count, parts).units, size)[0]
        assert best * (1 - 1e-9) <= found <= 1.25 * best
        exact += found <= best * (1 + 1e-9)
    assert exact >= 7


@pytest.mark.parametrize(("size", "count", "parts"), [(1, 40, 1), (1, 40, 4), (2, 20, 2), (4, 8, 1)])
def test_some_at_a_time_is_nearly_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, size: int, count: int, parts: int
) -> None:
    """With few candidates, so that many rounds are needed and a part may run out of them."""
    X, W = case(columns=64)
    problem = LayerProblem(W, gram(X))
    slow = drop_units(problem, size, count, parts)
    monkeypatch.setattr(structured, "_AT_ONCE", 4)
    monkeypatch.setattr(structured, "_CANDIDATES", 8)
    quick = drop_units(problem, size, count, parts)
    assert len(quick.units) == count
    units = 64 // size
    lost = [unit * parts // units for unit in quick.units]
    assert [lost.count(part) for part in range(parts)] == [count // parts] * parts
    assert quick.error <= 1.05 * slow.error
    torch.testing.assert_close(quick.W, without(X, W, quick.units, size)[1], rtol=1e-7, atol=1e-7)


def test_a_part_that_has_lost_enough_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though all of the cheapest are in it."""
    monkeypatch.setattr(structured, "_AT_ONCE", 2)
    monkeypatch.setattr(structured, "_CANDIDATES", 8)
    X, W = case(columns=64)
    W[:, :32] *= 1e-3
    found = drop_units(LayerProblem(W, gram(X)), 1, 20, parts=2)
    assert sum(unit < 32 for unit in found.units) == 10


def test_inputs_that_are_never_active_go_first() -> None:
    X, W = case("dead input", columns=32)
    found = drop_units(LayerProblem(W, gram(X)), 1, 2)
    assert found.units == list(DEAD)
    assert found.error == pytest.approx(0, abs=1e-25)
    live = [column for column in range(32) if column not in DEAD]
    torch.testing.assert_close(found.W[:, live], W[:, live], rtol=1e-12, atol=1e-12)
    # One that stays keeps its weights: the text says nothing of it.
    found = drop_units(LayerProblem(W, gram(X)), 1, 1)
    (gone,) = found.units
    (stays,) = set(DEAD) - {gone}
    assert torch.equal(found.W[:, stays], W[:, stays])


def test_float32_and_arguments_that_stay() -> None:
    X, W = case(columns=64)
    H = gram(X)
    single = LayerProblem(W.float(), H.float())
    copies = single.W.clone(), single.gram.H.clone()
    found = drop_units(single, 1, 20)
    expected = drop_units(LayerProblem(W, H), 1, 20)
    assert found.W.dtype == torch.float32
    assert found.units == expected.units
    torch.testing.assert_close(found.W.double(), expected.W, rtol=1e-3, atol=1e-3)
    assert found.error == pytest.approx(expected.error, rel=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(copies, (single.W, single.gram.H), strict=True))


def test_the_unit_of_an_input_makes_no_difference() -> None:
    X, W = case()
    unit = normal(COLUMNS, seed=5).exp()
    one, other = (
        drop_units(LayerProblem(weights, gram(tokens)), 1, 5)
        for weights, tokens in ((W, X), (W / unit, X * unit))
    )
    assert one.units == other.units
    torch.testing.assert_close(other.W * unit, one.W, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("size", "count", "parts", "said"),
    [
        (1, 0, 1, "1 to 11 can be dropped, not 0"),
        (1, 12, 1, "1 to 11 can be dropped, not 12"),
        (4, 3, 1, "1 to 2 can be dropped, not 3"),
        (5, 1, 1, "12 columns are not"),
        (2, 2, 4, "12 columns are not"),
        (2, 3, 2, "12 columns are not"),
    ],
)
def test_what_makes_no_sense(size: int, count: int, parts: int, said: str) -> None:
    X, W = case()
    assert said in message(lambda: drop_units(LayerProblem(W, gram(X)), size, count, parts))
