"""Numbers of 4 and 8 bits in tiles; torch's own float8, and tables and loops, are the judges."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from niwaki.layer.floats import E2M1, E4M3, TiledFloats
from niwaki.layer.problem import LayerProblem
from niwaki.layer.rounding import onto_floats

FP8 = TiledFloats(E4M3, (8, 12), torch.float32)
FP4 = TiledFloats(E2M1, (1, 8), None)
FORMATS = [FP8, replace(FP8, dtype=torch.bfloat16), replace(FP8, dtype=None), FP4, FP4.transposed]


def random(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Half zeros."""
    W = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return W * (torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed + 1)) < 0.5)


def scales_by_loop(numbers: TiledFloats, scales: Tensor, shape: tuple[int, int]) -> Tensor:
    down, across = numbers.tile
    return torch.tensor([[scales[i // down, j // across].item() for j in range(shape[1])] for i in range(shape[0])])


def test_the_numbers() -> None:
    assert torch.equal(E4M3.magnitudes, torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float())
    assert E2M1.magnitudes.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_codes_are_those_of_torch() -> None:
    halves = (E4M3.magnitudes[1:] + E4M3.magnitudes[:-1]) / 2  # as near to one number as to the next
    W = torch.cat(
        [random(30, 50) * torch.logspace(-5, 4, 50), halves[:100].view(2, 50), -E4M3.magnitudes[:50].view(1, 50)]
    )
    factors = torch.ones(W.shape)
    codes = FP8.codes(W, factors, W != 0)
    expected = W.clamp(-448, 448).to(torch.float8_e4m3fn)
    lost = (W != 0) & (expected.float() == 0)
    assert lost.any()
    assert torch.equal(codes.view(torch.float8_e4m3fn).float()[~lost], expected.float()[~lost])
    assert torch.equal(codes[lost] & 127, torch.ones_like(codes[lost]))
    assert (codes[W == 0] == 0).all()  # and so +0.0
    # A weight of just that half is as near to 0 as to the lowest number.
    assert FP8.raised(W, factors) == int(((W != 0) & (W.abs() <= 2.0**-10)).sum()) > 0


@pytest.mark.parametrize("numbers", FORMATS)
def test_the_nearest_number_by_trying_all(numbers: TiledFloats) -> None:
    W = random(10, 28)
    scales = numbers.scales(W, torch.ones(28), torch.zeros(numbers.tiles((10, 28))))
    factors = numbers.factors(scales, (10, 28))
    assert torch.equal(factors, scales_by_loop(numbers, scales, (10, 28)))
    rounded = numbers.project(W, factors, W != 0)
    known = torch.cat([numbers.numbers.magnitudes[1:], -numbers.numbers.magnitudes[1:]])
    for w, s, found in zip(W.flatten(), factors.flatten(), rounded.flatten(), strict=True):
        least = (known * s).sub(w).abs().min() if w else 0.0
        assert abs(found - w) <= least + 0.005 * abs(w)  # bfloat16
        assert (found == 0) == (w == 0)
    assert not (rounded.signbit() & (rounded == 0)).any()
    codes = numbers.codes(W, factors, W != 0).long()
    values = torch.cat([numbers.numbers.magnitudes, torch.zeros(numbers.numbers.sign - numbers.numbers.count)])
    assert torch.equal((torch.cat([values, -values])[codes] * factors).bfloat16().float(), rounded)


@pytest.mark.parametrize("numbers", FORMATS)
def test_scales_fit(numbers: TiledFloats) -> None:
    W, importance = random(20, 30), torch.rand(30, generator=torch.Generator().manual_seed(5)) + 0.1
    shape = numbers.tiles((20, 30))
    nothing = torch.zeros(shape)
    scales = numbers.scales(W, importance, nothing)
    assert scales.shape == shape
    assert scales.dtype == torch.float32
    if numbers.dtype is None:
        assert torch.equal(scales.log2(), scales.log2().round())
    else:
        assert torch.equal(scales, scales.to(numbers.dtype).float())

    def error(scales: Tensor) -> Tensor:
        rounded = numbers.project(W, numbers.factors(scales, (20, 30)), W != 0)
        each = (rounded - W).square() * importance
        down, across = numbers.tile
        return torch.stack(
            [
                torch.stack([each[i : i + down, j : j + across].sum() for j in range(0, 30, across)])
                for i in range(0, 20, down)
            ]
        )

    for ratio in (0.25, 4.0) if numbers.numbers is E2M1 else (0.25,):  # far from the best, each tile is worse
        assert (error(scales) <= error(scales * ratio)).all()
    # Weights that are in the format keep their scales, whatever they are.
    before = torch.full(shape, 2.0**-7)
    exact = numbers.project(W, numbers.factors(before, (20, 30)), W != 0)
    assert torch.equal(numbers.scales(exact, importance, before), before)


def test_tiny_weights_stay_above_0() -> None:
    W = torch.full((8, 12), 1e-44)
    W[0, 0] = -1e-44
    for numbers in (FP8, FP4):
        scales = numbers.scales(W, torch.ones(12), torch.zeros(numbers.tiles((8, 12))))
        rounded = numbers.project(W, numbers.factors(scales, (8, 12)), W != 0)
        assert (rounded.bfloat16() != 0).all()
        assert torch.equal(rounded.signbit(), W.signbit())


@pytest.mark.parametrize("numbers", FORMATS)
def test_weights_make_up_for_rounding(numbers: TiledFloats) -> None:
    generator = torch.Generator().manual_seed(3)
    X = torch.randn(400, 32, generator=generator) @ torch.randn(32, 32, generator=generator)
    X[:, 5] = 0  # a dead input
    problem = LayerProblem(torch.randn(24, 32, generator=generator), X.T @ X / 400)
    solved = random(24, 32)
    solution = problem.solution(solved, solved != 0, damping=0.1)
    found, scales = onto_floats(problem, solution, numbers, torch.zeros(numbers.tiles((24, 32))))
    factors = numbers.factors(scales, (24, 32))
    nearest = numbers.project(solved, factors, solved != 0)
    assert torch.equal(found.W, numbers.project(found.W, factors, found.W != 0))
    assert torch.equal(found.W == 0, solved == 0)
    assert found.stats["damping"] == 0.1
    assert torch.equal(found.W[:, 5], nearest[:, 5])

    def losses(W: Tensor) -> Tensor:
        return ((W - solved).double() @ problem.gram.H.double() * (W - solved)).sum(dim=1)

    assert (losses(found.W) <= losses(nearest) * (1 + 1e-5)).all()
    if numbers.numbers is E2M1:
        assert losses(found.W).sum() < 0.8 * losses(nearest).sum()
    else:
        assert torch.equal(found.W, nearest)
    again, same = onto_floats(problem, found, numbers, scales)  # what is in the format stays as it is
    assert torch.equal(again.W, found.W)
    assert torch.equal(same, scales)
