"""llama.cpp's types as grids, against brute force and least squares in float64."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from niwaki.choices import BLOCK_TYPE_BITS
from niwaki.errors import NumericalError, UsageError
from niwaki.layer.block_types import BLOCK_TYPES, BlockGrid, BlockType, in_half, stored_type
from niwaki.layer.grid import Grid, parse_grid
from niwaki.layer.rounding import onto_grid, to_nearest, unsolved
from support.models import message
from support.problems import gram, inputs, make_problem, normal, squared_error

F32, F64 = torch.float32, torch.float64
each_type = pytest.mark.parametrize("name", BLOCK_TYPES)


def grid_of(name: str) -> BlockGrid:
    found = parse_grid(name.lower())
    assert isinstance(found, BlockGrid)
    return found


def odd_weights(columns: int = 512) -> Tensor:
    """Rows that are 0, of one sign, far from 0, of one number, tiny, large, or have parts of their own size."""
    W = normal(9, columns, seed=1)
    W[1], W[2], W[3], W[4] = 0.0, W[2].abs(), -W[3].abs() - 3, 0.7
    W[5, : columns // 2 + 8] = 0.0
    W[6] *= 1e-5
    W[7] *= 300
    W[8] *= torch.logspace(-3, 1, columns, dtype=F64)
    return W


def numbers_of(kind: BlockType, scales: Tensor, column: int) -> list[float]:
    """All numbers that the weight of the first row in this column can be."""
    d, k, e, whole = scales[0, 1 + 4 * (column // 16) :][:4].tolist()
    return [d * k * level - e * whole for level in kind.levels]


@each_type
def test_each_weight_is_the_nearest_number_of_its_group(name: str) -> None:
    grid, W = grid_of(name), odd_weights()
    scales = grid.scales(W, torch.ones(512, dtype=F64), F64)
    assert torch.equal(scales, scales.half().double())  # as they are stored
    for row, column in itertools.product(range(len(W)), (0, 15, 16, 255, 256, 300, 511)):
        near = min(numbers_of(stored_type(scales), scales[row:], column), key=lambda x: abs(x - float(W[row, column])))
        got = float(grid.project(W, scales, F64)[row, column])
        assert abs(got - float(W[row, column])) == pytest.approx(abs(near - float(W[row, column])), rel=1e-9, abs=1e-12)


@each_type
@pytest.mark.parametrize("part", ["k", "l"])
def test_whole_numbers_of_groups_are_in_the_range_that_the_file_has(name: str, part: str) -> None:
    kind, scales = BLOCK_TYPES[name], grid_of(name).scales(odd_weights(), torch.ones(512, dtype=F64), F64)
    each = scales[:, 1:].unflatten(1, (-1, 4))[..., 1 if part == "k" else 3]
    low, high = kind.steps if part == "k" else kind.minimum or (0, 0)
    assert torch.equal(each, each.round())
    assert low <= float(each.min()) <= float(each.max()) <= high


@pytest.mark.parametrize("name", [name for name, kind in BLOCK_TYPES.items() if kind.is_plain and not kind.minimum])
def test_a_scale_is_as_good_as_the_best_of_many(name: str) -> None:
    kind, W, importance = BLOCK_TYPES[name], normal(12, 32, seed=2), normal(32, seed=3).exp()
    levels, tried = torch.tensor(kind.levels, dtype=F64), torch.linspace(-1.6, 1.6, 3001, dtype=F64)
    ends = W.abs().amax(1) / max(map(abs, kind.levels))
    scales = grid_of(name).scales(W, importance, F64)
    found = ((grid_of(name).project(W, scales, F64) - W).square() * importance).sum(1)
    for row in range(len(W)):
        numbers = (tried * ends[row]).unsqueeze(1) * levels  # (tried, levels)
        off = (W[row].view(1, -1, 1) - numbers.unsqueeze(1)).square().amin(2)
        # With 8 bits there are many scales that happen to suit the one group.
        assert float(found[row]) <= (1.7 if name == "Q8_0" else 1.04) * float((off * importance).sum(1).min())


@each_type
def test_better_than_scales_by_the_largest_weight(name: str) -> None:
    """As a program without any search has them: of whole blocks, and with the minimum of each group."""
    W, grid, kind = normal(64, 512, seed=4), grid_of(name), BLOCK_TYPES[name]
    groups = W.unflatten(1, (-1, kind.group))
    low = groups.amin(2, keepdim=True) if kind.minimum else -groups.abs().amax(2, keepdim=True)
    step = (groups.amax(2, keepdim=True) - low if kind.minimum else -2 * low) / (max(kind.levels) - min(kind.levels))
    levels = torch.tensor(kind.levels, dtype=F64) - min(kind.levels)
    plain = low + step * levels[((groups - low) / step).unsqueeze(3).sub(levels).abs().argmin(3)]
    found = grid.project(W, grid.scales(W, torch.ones(512, dtype=F64), F64), F64)
    assert float((found - W).square().sum()) < float((plain.flatten(1) - W).square().sum())


@each_type
def test_refitted_scales_lose_less_and_are_least_squares_where_they_are_free(name: str) -> None:
    grid, kind, W = grid_of(name), BLOCK_TYPES[name], normal(6, 256, seed=5)
    X = inputs("correlated", 256, seed=6)
    H, scales = gram(X), grid.scales(W, torch.ones(256, dtype=F64), F64)
    codes = grid.codes(W, scales)
    better = grid.refitted(W, codes, scales, H, F64)
    before, after = (squared_error(W, grid.values(codes, each, F64), H) for each in (scales, better))
    assert after < before
    _, k, _, whole = better[:, 1:].unflatten(1, (-1, 4)).unbind(2)
    for row in range(len(W)):  # with k and l as they are, d and e of blocks are what numpy finds, to within the ridge
        parts = [k[row].repeat_interleave(16) * codes[row]] + (
            [-whole[row].repeat_interleave(16)] if kind.minimum else []
        )
        columns = [
            X[:, s : s + kind.block] @ each[s : s + kind.block] for s in range(0, 256, kind.block) for each in parts
        ]
        A = torch.stack(columns, dim=1).numpy() / math.sqrt(len(X))
        target = (X @ W[row]).numpy() / math.sqrt(len(X))
        least = float(np.linalg.lstsq(A, target, rcond=None)[1][0])
        D = W[row] - grid.values(codes, better, F64)[row]
        assert least <= float(D @ H @ D) <= 1.02 * least


@each_type
def test_the_system_of_scales_is_that_of_the_squared_errors(name: str) -> None:
    """For any scales and minima x: they leave x A x^T - 2 b x^T + w H w^T."""
    kind, W, H = BLOCK_TYPES[name], normal(5, 512, seed=9), gram(inputs("correlated", 512, seed=10))
    codes = (3 * normal(5, 512, seed=11)).round()
    A, b = kind._system(W, codes, H)
    x = normal(5, A.shape[1], seed=12)
    s, m = x.split(512 // kind.group, dim=1) if kind.minimum else (x, torch.zeros_like(x))
    D = W - codes * s.repeat_interleave(kind.group, dim=1) + m.repeat_interleave(kind.group, dim=1)
    left = torch.einsum("ri,rij,rj->r", x, A, x) - 2 * (b * x).sum(1) + torch.einsum("ri,ij,rj->r", W, H, W)
    torch.testing.assert_close(left, torch.einsum("ri,ij,rj->r", D, H, D))


@pytest.mark.parametrize("name", [name for name, kind in BLOCK_TYPES.items() if not kind.is_plain])
def test_no_whole_number_of_a_group_alone_would_do_much_better(name: str) -> None:
    grid, kind, W, H = grid_of(name), BLOCK_TYPES[name], normal(3, 256, seed=7), gram(inputs("correlated", 256, seed=8))
    codes = grid.codes(W, scales := grid.scales(W, torch.ones(256, dtype=F64), F64))
    better = grid.refitted(W, codes, scales, H, F64)
    loss = squared_error(W, grid.values(codes, better, F64), H)
    for group, at, change in itertools.product(range(256 // kind.group), (1, 3), (-1, 1)):
        other = better.clone()
        each = other[:, 1:].unflatten(1, (-1, kind.group // 16, 4))[:, group, :, at]
        low, high = kind.steps if at == 1 else kind.minimum or (0, 0)
        each.add_(change).clamp_(low, high)
        assert squared_error(W, grid.values(codes, other, F64), H) > 0.99 * loss


@each_type
@pytest.mark.parametrize("kind", ["correlated", "dead input", "few tokens"])
def test_fitting_loses_much_less_than_the_nearest_numbers(name: str, kind: str) -> None:
    problem = make_problem(kind, rows=16, columns=256, dtype=F32)
    grid = grid_of(name)
    solution, scales = onto_grid(problem, unsolved(problem), grid, torch.float16)
    nearest = to_nearest(problem.W, grid, torch.float16)[0]
    assert torch.equal(grid.project(solution.W, scales, F32), solution.W)
    assert problem.loss(solution.W) < 0.7 * problem.loss(nearest)


def test_weights_in_bfloat16_say_which_numbers_they_stand_for() -> None:
    for name in BLOCK_TYPES:
        grid, W = grid_of(name), normal(8, 512, seed=9).float()
        scales = grid.scales(W, torch.ones(512), F32).half()
        numbers = grid.project(W, scales.float(), F32)
        assert grid.has(numbers.bfloat16(), scales)
        assert torch.equal(grid.project(numbers.bfloat16().float(), scales.float(), F32), numbers)
        moved, near = numbers.bfloat16(), sorted(numbers_of(stored_type(scales), scales[3:].float(), 7), key=abs)
        moved[3, 7] = (near[0] + near[1]) / 2
        assert not grid.has(moved, scales)


@each_type
def test_zeros_stay_the_same_where_that_is_asked_for(name: str) -> None:
    """As while weights are trained, which are masked: but for groups that have no other number than 0."""
    grid, W = grid_of(name), odd_weights()
    scales = grid.scales(W, torch.ones(512, dtype=F64), F64)
    numbers = grid.project(W, scales, F64)
    trained = torch.where(numbers == 0, 0.0, normal(9, 512, seed=2) * numbers.abs().mean(1, keepdim=True) / 30)
    scale, minimum = scales[:, 1::4] * scales[:, 2::4], scales[:, 3::4] * scales[:, 4::4]
    free = ((scale != 0) | (minimum != 0)).repeat_interleave(16, dim=1)
    again = grid.project(trained, scales, F64, same_zeros=True)
    assert torch.equal((again == 0) & free, (numbers == 0) & free)
    assert torch.equal(again == 0, (numbers == 0) | ~free)


def test_scales_are_told_from_other_numbers() -> None:
    grid = grid_of("q4_k")
    scales = grid.scales(normal(4, 256, seed=1), torch.ones(256, dtype=F64), F64)
    assert grid.are_scales(scales)
    for row, value in ((0, 99.0), (2, 14.0), (1, math.inf), (1, math.nan)):
        other = scales.clone()
        other[row, 0] = value
        assert not grid.are_scales(other)


def test_large_and_tiny_numbers_stay_in_float16() -> None:
    given = torch.tensor([1e9, -1e9, 1e-12, 0.5], dtype=F64)
    assert in_half(given).tolist() == [65504.0, -65504.0, 0.0, 0.5]


@each_type
@pytest.mark.parametrize("size", [1e9, 1e-9])
def test_weights_that_float16_cannot_scale(name: str, size: float) -> None:
    weights = normal(4, 256, seed=1) * size
    said = f"its weights are too small or too large for {name}, whose scales are in float16"
    assert message(lambda: grid_of(name).scales(weights, torch.ones(256, dtype=F64), F64), NumericalError) == said


# Names


def test_types_by_name() -> None:
    assert [*BLOCK_TYPE_BITS] == [name.lower() for name in BLOCK_TYPES]
    for name, bits in BLOCK_TYPE_BITS.items():
        grid = parse_grid(f" {name.upper()} ")
        assert isinstance(grid, BlockGrid)
        assert (str(grid), grid.bits, grid.is_mixed) == (name, bits, False)
    mixed = parse_grid("q4.25")
    assert (str(mixed), mixed.is_mixed, mixed.average) == ("q4.25", True, 4.25)
    assert mixed.choices(896) == (4.5, 5.5, 6.0, 8.5)
    assert mixed.choices(256) == (2.625, 3.4375, 4.25, 4.5, 5.5, 6.5625, 8.5)
    types = [mixed.of(4.5).type_of(columns).name for columns in (96, 512)]  # type: ignore[union-attr]
    assert types == ["IQ4_NL", "Q4_K"]
    assert isinstance(parse_grid("int4:32"), Grid)


@pytest.mark.parametrize(
    ("name", "columns", "said"),
    [
        (
            "q4_k",
            96,
            "96 inputs cannot be divided into the blocks of 256 that q4_k has; iq4_nl, q5_0, q5_1 and q8_0 have ",
        ),
        ("q8_0", 48, "48 inputs cannot be divided into the blocks of 32 that q8_0 has"),
        ("q3.5", 100, "100 inputs cannot be divided into the blocks of 32 that q3.5 has"),
    ],
)
def test_rows_that_a_type_does_not_divide(name: str, columns: int, said: str) -> None:
    assert message(lambda: parse_grid(name).check([256, columns])).startswith(said)


@pytest.mark.parametrize("text", ["q1.5", "q9.0", "q0.0"])
def test_a_mean_that_no_types_have(text: str) -> None:
    with pytest.raises(UsageError, match=r"have 2.625 to 8.5 bits a weight; got"):
        parse_grid(text)
