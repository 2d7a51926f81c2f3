"""How sparse each matrix may be, so that all together have a given number of zeros and lose the least."""

import bisect
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: The highest sparsity of a matrix, unless more is asked for: see :func:`ceiling`.
MOST = 0.99
#: Points of a curve between 0 and 1, interpolated between the measured ones.
_STEPS = 256


@dataclass(frozen=True)
class Curve:
    """What sparsity costs a matrix."""

    weights: int  # their number
    points: tuple[tuple[float, float], ...]  # (sparsity, loss), both increasing, from the lowest to the highest allowed

    def at(self, sparsity: float) -> float:
        """The loss at a sparsity, on straight lines between the points."""
        i = min(max(1, bisect.bisect_left(self.points, (sparsity,))), len(self.points) - 1)
        (before, less), (after, more) = self.points[i - 1], self.points[i]
        return less + (more - less) * (sparsity - before) / (after - before)


def ceiling(weights: Sequence[int], zeros: int, whole: Callable[[float], int] = round) -> float:
    """The highest sparsity of matrices with so many ``weights``, of which ``zeros`` in total are to go.

    It leaves each matrix half of the mean density, or nothing where that is less than a weight. ``whole`` makes a
    number of zeros from the sparsity.
    """
    if zeros <= sum(whole(MOST * count) for count in weights):
        return MOST
    least = (1 - zeros / sum(weights)) / 2
    return 1 - least if least * min(weights) >= 1 else 1.0


def smooth(
    weights: int, measured: Sequence[tuple[float, float]], all_zero: float, least: float = 0.0, most: float = MOST
) -> Curve:
    """The curve of a matrix of which (sparsity, loss) was ``measured``, at increasing sparsities above 0.

    Logarithms of losses are interpolated; below the first point the loss goes to 0 as a power of the sparsity, and
    above the last one to ``all_zero``, the loss without any weights. Allowed are sparsities from ``least`` to ``most``,
    or ``least`` alone where that is not less.
    """
    points = [*measured, (1.0, all_zero)]
    sparsities = [sparsity for sparsity, _ in points]
    tiny = 1e-30  # of a matrix whose inputs are all 0
    losses = list(itertools.accumulate((max(loss, tiny) for _, loss in points), max))
    power = 1.0
    if len(measured) > 1:
        power = max(power, math.log(losses[1] / losses[0]) / math.log(sparsities[1] / sparsities[0]))

    def loss_at(sparsity: float) -> float:
        i = bisect.bisect_left(sparsities, sparsity)
        if i == 0:
            return losses[0] * math.pow(sparsity / sparsities[0], power)
        share = (sparsity - sparsities[i - 1]) / (sparsities[i] - sparsities[i - 1])
        return math.exp((1 - share) * math.log(losses[i - 1]) + share * math.log(losses[i]))

    steps = [step / _STEPS for step in range(_STEPS)]
    if most > MOST:  # where a step is too long
        steps = sorted({*steps, *sparsities})
    grid = [least, *(step for step in steps if least < step < most), *([most] if least < most else [])]
    return Curve(weights, tuple((sparsity, loss_at(sparsity)) for sparsity in grid))


class CostCurves:
    """The curves of several matrices, to share out any number of zeros among them where these cost least.

    For convex curves, as they nearly are, no other distribution costs less; of others the greatest convex curve below
    is used. Totals are exact as far as curves reach.
    """

    def __init__(self, curves: Sequence[Curve]) -> None:
        self._least = [round(curve.points[0][0] * curve.weights) for curve in curves]
        pieces = [
            ((after[1] - before[1]) / ((after[0] - before[0]) * curve.weights), i, after[0])
            for i, curve in enumerate(curves)
            for before, after in itertools.pairwise(_convex(curve.points))
        ]
        # Of one matrix in order, because the slopes of convex curves grow.
        self._steps = [(i, round(sparsity * curves[i].weights)) for _, i, sparsity in sorted(pieces)]
        self._totals, chosen, total = list[int](), list(self._least), sum(self._least)
        for i, count in self._steps:
            total += count - chosen[i]
            chosen[i] = count
            self._totals.append(total)

    def share_out(self, zeros: int) -> list[int]:
        """The number of zeros in each matrix, ``zeros`` in total."""
        if zeros <= sum(self._least):
            return list(self._least)
        whole = bisect.bisect_left(self._totals, zeros)
        last = dict(self._steps[:whole])
        chosen = [last.get(i, least) for i, least in enumerate(self._least)]
        if whole < len(self._steps):  # a part of that step
            chosen[self._steps[whole][0]] += zeros - sum(chosen)
        return chosen


def outlier_ratios(ratios: Sequence[float], weights: Sequence[int], zeros: int, least: float = 0.0) -> list[int]:
    """The number of zeros of each block by OWL, ``zeros`` in total, and of no block a share below ``least``.

    Densities differ from their mean in proportion to the ``ratios`` of outliers in each block, by 0.16 from the lowest
    to the highest one: Yin et al. 2024, arXiv 2310.05175, section 3.2, with lambda = 0.08.
    """
    low, high, most = min(ratios), max(ratios), ceiling(weights, zeros, math.ceil)
    spread = 2 * 0.08 / (high - low) if high - low > sys.float_info.min else 0.0  # of less it may be infinite
    wishes = [-spread * ratio for ratio in ratios]

    def of(shift: float) -> list[float]:
        return [min(most, max(least, wish + shift)) * count for wish, count in zip(wishes, weights, strict=True)]

    below, above = min(0.0, -max(wishes)), 1 - min(wishes)
    for _ in range(100):
        middle = (below + above) / 2
        below, above = (middle, above) if sum(of(middle)) < zeros else (below, middle)
    return rounded(of(above), zeros)


def rounded(values: Sequence[float], total: int) -> list[int]:
    """Whole numbers next to ``values`` with the sum ``total``; those with the largest remainders are rounded up."""
    floors = [math.floor(value) for value in values]
    order = sorted(range(len(values)), key=lambda i: (floors[i] - values[i], i))
    for i in order[: max(0, total - sum(floors))]:
        floors[i] += 1
    return floors


def _convex(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of the greatest convex function that is nowhere above the points."""
    hull: list[tuple[float, float]] = []
    for x, y in points:
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x1) < (y - y1) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return hull
