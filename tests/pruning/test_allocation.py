"""How zeros are shared out, against brute force."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings, strategies as st

from niwaki.pruning.plan import MOST, CostCurves, Curve, ceiling, smooth


def _loss(curve: Curve, zeros: int) -> float:
    """By linear interpolation."""
    sparsity = zeros / curve.weights
    for (x0, y0), (x1, y1) in itertools.pairwise(curve.points):
        if x0 <= sparsity <= x1:
            return y0 + (y1 - y0) * (sparsity - x0) / (x1 - x0)
    raise AssertionError(sparsity)


def test_no_other_distribution_costs_less() -> None:
    curves = [
        Curve(8, ((0.0, 0.0), (0.25, 0.1), (0.5, 0.5), (0.75, 2.0), (1.0, 9.0))),
        Curve(4, ((0.0, 0.0), (0.5, 0.3), (1.0, 1.5))),
        Curve(6, ((0.0, 0.0), (1 / 3, 1.0), (2 / 3, 2.5), (1.0, 5.0))),
    ]
    for zeros in range(19):
        found = CostCurves(curves).share_out(zeros)
        assert sum(found) == zeros
        best = min(
            sum(_loss(curve, count) for curve, count in zip(curves, counts, strict=True))
            for counts in itertools.product(*(range(curve.weights + 1) for curve in curves))
            if sum(counts) == zeros
        )
        assert sum(_loss(c, n) for c, n in zip(curves, found, strict=True)) == pytest.approx(best)


def test_limits_hold_where_the_total_is_out_of_reach() -> None:
    curves = [Curve(100, ((0.5, 0.1), (0.6, 1.0)))]
    assert CostCurves(curves).share_out(10) == [50]
    assert CostCurves(curves).share_out(90) == [60]


def test_a_curve_that_is_not_convex_is_taken_from_below() -> None:
    bumpy = Curve(10, ((0.0, 0.0), (0.4, 5.0), (0.5, 5.1), (1.0, 9.0)))
    straight = Curve(10, ((0.0, 0.0), (0.5, 4.0), (1.0, 12.0)))
    assert CostCurves([bumpy, straight]).share_out(10) == [5, 5]


def test_points_that_were_measured_are_on_the_curve() -> None:
    measured = [(0.25, 0.01), (0.5, 0.2), (0.75, 3.0)]
    curve = smooth(1000, measured, all_zero=40.0)
    points = dict(curve.points)
    assert [points[s] for s, _ in measured] == pytest.approx([loss for _, loss in measured])
    assert curve.points[0] == (0.0, 0.0)
    assert curve.points[-1][0] == MOST
    assert points[0.375] == pytest.approx(math.sqrt(0.01 * 0.2))
    assert points[0.875] == pytest.approx(math.sqrt(3.0 * 40.0))
    # A power law: 0.25 -> 0.01 with the exponent log2(20).
    assert points[0.125] == pytest.approx(0.01 / 20)


@given(
    st.lists(st.tuples(st.floats(0.01, 0.98), st.floats(0, 1e6)), min_size=1, max_size=5, unique_by=lambda p: p[0]),
    st.floats(0, 1e6),
    st.sampled_from([0.0, 0.25, 0.5]),
)
@settings(max_examples=100, deadline=None)
@pytest.mark.slow
def test_curves_increase_and_are_finite(measured: list[tuple[float, float]], all_zero: float, least: float) -> None:
    curve = smooth(100, sorted(measured), all_zero, least)
    sparsities, losses = zip(*curve.points, strict=True)
    assert sparsities[0] == least
    assert list(sparsities) == sorted(set(sparsities))
    assert all(math.isfinite(loss) for loss in losses)
    assert all(b >= a * (1 - 1e-9) for a, b in itertools.pairwise(losses))


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.floats(0.001, 100)), min_size=1, max_size=8),
    st.floats(0.5, 20),
    st.floats(0, 0.9) | st.floats(0.9, 1) | st.sampled_from([0.99, 0.995, 0.999, 1.0]),
)
@settings(max_examples=400, deadline=None)
@pytest.mark.slow
def test_the_total_is_exact(shapes: list[tuple[int, float]], power: float, sparsity: float) -> None:
    """However high it is."""
    weights = [n for n, _ in shapes]
    zeros = round(sparsity * sum(weights))
    most = ceiling(weights, zeros)
    points = [0.3, 0.6]
    if sparsity >= 0.9:
        points = [1 - density * (1 - min(sparsity, 0.9999)) for density in (2.2, 1.0, 0.35)]
    curves = [smooth(n, [(s, scale * s**power) for s in points], scale, most=most) for n, scale in shapes]
    found = CostCurves(curves).share_out(zeros)
    assert sum(found) == zeros
    assert all(0 <= count <= n for count, n in zip(found, weights, strict=True))


def test_the_ceiling_rises_with_what_is_asked_for() -> None:
    assert ceiling([1000, 3000], 3960) == MOST
    assert ceiling([1000, 3000], 3980) == pytest.approx(0.9975)
    assert ceiling([100, 3000], 3097) == 1.0  # half of the mean density is less than a weight of the first one
