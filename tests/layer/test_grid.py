"""Grids, and weights on a mask and a grid, against loops and brute force in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from niwaki.errors import NumericalError, UsageError
from niwaki.layer.grid import (
    AnyGrid,
    FloatGrid,
    Grid,
    fp4_codes,
    parse_grid,
    scale_dtype,
    scales_of_q4_0,
    shared_power,
)
from niwaki.layer.linalg import inverse_of_damped
from niwaki.layer.patterns import NM, Pattern, PerRow, Unstructured
from niwaki.layer.problem import Gram, LayerProblem, Solution
from niwaki.layer.rounding import onto_grid, to_nearest, unsolved
from niwaki.layer.solvers import Magnitude, Solver, make_solver
from support.contract import CONTRACT
from support.covering import covered
from support.models import message
from support.problems import KINDS, geometric_mean, gram, inputs, make_problem, normal, squared_error

F32, F64 = torch.float32, torch.float64
HALF = (torch.bfloat16, torch.float16)

each_half = pytest.mark.parametrize("dtype", HALF, ids=str)


# Grids


@pytest.mark.parametrize(
    ("text", "grid"),
    [
        ("int4:128", Grid(4, 128)),
        ("int8", Grid(8)),
        (" int2:1 ", Grid(2, 1)),
        ("int4", Grid(4)),
        ("nvfp4", FloatGrid()),
        ("mxfp4", FloatGrid(group=32)),
    ],
)
def test_grids_by_name(text: str, grid: Grid) -> None:
    assert parse_grid(text) == grid
    assert str(grid) == text.strip()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("int1", "a grid has 2 to 8 bits; got 1"),
        ("int16:8", "a grid has 2 to 8 bits; got 16"),
        ("int0.0:64", "matrices of mixed bits have a mean of 2 to 8 in such groups; got 0"),
        ("int4:0", "a scale is for 1 input or more; got groups of 0"),
        *(
            (
                text,
                f"{text!r} is not a valid grid; try int4:128, int8, or int5.5:64 for mixed bits; "
                "q4_k, or q4.25 for mixed types, are for llama.cpp, nvfp4 and mxfp4 for servers; FP8 and W8A8 are "
                "formats, as in 'niwaki export "
                "MODEL OUT --format fp8'",
            )
            for text in ("", "4", "fp4", "int", "int4:", "int4:-8", "int4:8:8", "int4.", "int٤")
        ),
    ],
)
def test_grids_that_are_none(text: str, said: str) -> None:
    assert message(lambda: parse_grid(text)) == said


def test_groups_that_do_not_divide_the_inputs() -> None:
    said = message(lambda: Grid(4, 128).check([128, 192, 512]))
    assert said.startswith("192 inputs cannot be divided into groups of 128 that share a scale; try int4:64,")
    assert said.endswith("or int4 for one scale for each row")
    assert "try int8:3," in message(lambda: Grid(8, 7).groups(9))
    assert "try int8:9," in message(lambda: Grid(8, 10).groups(9))
    assert (Grid(4, 3).groups(9), Grid(4).groups(9)) == (3, 1)
    Grid(4, 64).check([64, 192, 512])
    Grid(4).check([5, 7])


@pytest.mark.parametrize(("bits", "ends"), [(2, (-2, 1)), (4, (-8, 7)), (8, (-128, 127))])
def test_the_ends(bits: int, ends: tuple[int, int]) -> None:
    W = torch.tensor([[-1000.0, 1000.0, 0.2, -0.2]])
    assert Grid(bits).codes(W, torch.ones(1, 1)).tolist() == [[*ends, 0, 0]]


@each_half
def test_what_a_consumer_finds(dtype: torch.dtype) -> None:
    """Every code with scales of every mantissa, subnormal ones too: the product in that dtype; and codes come back."""
    mantissas = 2 ** (8 if dtype == torch.bfloat16 else 11)
    powers = (-135, -120, 0, 100) if dtype == torch.bfloat16 else (-24, -20, -10, 4)
    grid = Grid(8)
    codes = torch.arange(grid.lowest, grid.highest + 1).float().expand(mantissas // 2, -1)
    for power in powers:
        whole = torch.arange(mantissas // 2, mantissas).double() * 2.0 ** (power + 1) / mantissas
        scales = whole.to(dtype)
        scales = scales[scales > 0].unsqueeze(1)
        q = codes[: len(scales)]
        values = grid.values(q, scales.float(), dtype)
        assert torch.equal(values.to(dtype), q.to(dtype) * scales)
        assert torch.equal(values.to(dtype).float(), values)
        assert torch.equal(grid.codes(values, scales.float()), q)
        assert torch.equal(grid.project(values, scales.float(), dtype), values)


@pytest.mark.parametrize("same_zeros", [False, True])
def test_the_nearest_number(same_zeros: bool) -> None:
    """Where there are to be no more zeros, the nearest that is not 0 where a weight is not."""
    grid, W = Grid(3, 4), normal(5, 8, seed=0).masked_fill(normal(5, 8, seed=1) > 0.5, 0.0)
    scales = normal(5, 2, seed=2).abs() + 1.0
    found = grid.project(W, scales, F64, same_zeros=same_zeros)
    assert (int((found != grid.project(W, scales, F64)).sum()) > 10) == same_zeros
    for i, j in itertools.product(range(5), range(8)):
        w, s = float(W[i, j]), float(scales[i, j // 4])
        nearest = min((abs(q * s - w), q * s) for q in range(-4, 4) if q or not same_zeros or not w)
        assert float(found[i, j]) == nearest[1]


def test_zeros_stay_zeros() -> None:
    W = normal(6, 8, seed=0).masked_fill(normal(6, 8, seed=1) > 0, 0.0)
    W[:, :4] = 0
    scales = Grid(4, 4).scales(W, torch.ones(8, dtype=F64), torch.bfloat16)
    assert (scales[:, 0] == 1).all()
    assert not Grid(4, 4).project(W, scales, torch.bfloat16)[W == 0].any()


def of_the_best(W: Tensor, importance: Tensor, grid: Grid) -> float:
    """The error relative to the least one of some thousand scales of both signs for each group: a loop, in float64."""
    found, least = 0.0, 0.0
    scales = grid.scales(W, importance, F32)
    width = W.shape[1] // scales.shape[1]
    for i, k in itertools.product(range(len(W)), range(scales.shape[1])):
        w, h = W[i, width * k :][:width].double(), importance[width * k :][:width].double()
        tried = w.abs().max() / torch.linspace(0.7, 2.5, 2000, dtype=F64) / 2 ** (grid.bits - 1)
        tried = torch.cat([scales[i, k, None].double(), tried, -tried])[:, None]
        wrong = ((w / tried).round().clamp(-(2 ** (grid.bits - 1)), 2 ** (grid.bits - 1) - 1) * tried - w) ** 2 @ h
        found, least = found + float(wrong[0]), least + float(wrong[1:].min())
    return found / least


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("width", [32, 128])
def test_scales_are_nearly_the_best(bits: int, width: int) -> None:
    grid, W = Grid(bits, width), normal(16, 256, seed=bits).float()
    assert of_the_best(W, torch.ones(256), grid) < 1.02 + 0.03 * (bits == 8)
    assert of_the_best(W, normal(256, seed=4).exp().float(), grid) < 1.04 + 0.03 * (bits == 8)


@pytest.mark.parametrize(("bits", "kind", "better"), [(4, "Q4_0", 0.9), (5, "Q5_0", 0.9), (8, "Q8_0", 0.92)])
def test_rounding_beside_llama_cpp(bits: int, kind: str, better: float) -> None:
    """The squared error of weights rounded to the nearest, in the same bytes."""
    quants = pytest.importorskip("gguf.quants")
    W = normal(64, 256, seed=0).float()
    number = pytest.importorskip("gguf").GGMLQuantizationType[kind]
    theirs = torch.from_numpy(quants.dequantize(quants.quantize(W.numpy(), number), number))
    ours, _ = to_nearest(W, Grid(bits, 32), torch.float16)
    assert float((ours - W).square().sum()) < better * float((theirs - W).square().sum())


ON_GRID: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda q: q,
    "negative scale": lambda q: q,
    "sparse": lambda q: q * (normal(*q.shape, seed=5) > 1),
    "small": lambda q: q.clamp(-5, 5),
    "one": lambda q: q.where(torch.arange(q.shape[1]) % 32 == 7, 0),
    "one number": lambda q: torch.full_like(q, -5),
    "zeros": lambda q: q * 0,
}


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("dtype", [*HALF, F32], ids=str)
@pytest.mark.parametrize("kind", ON_GRID)
def test_weights_on_the_grid_stay(kind: str, dtype: torch.dtype, bits: int) -> None:
    """To the bit, whatever the inputs, and so do the scales when this is done again."""
    grid = Grid(bits, 32)
    q = (normal(40, 64, seed=bits) * 2 ** (bits - 2)).round().clamp(grid.lowest, grid.highest)
    s = (normal(40, 2, seed=1).abs() * 0.05 + 0.001).to(dtype).double() * (-1 if kind == "negative scale" else 1)
    W = grid.values(ON_GRID[kind](q).clamp(grid.lowest, grid.highest), s, dtype).float()
    problem = LayerProblem(W, gram(inputs("few tokens", 64, 0)).float())
    first, scales = to_nearest(W, grid, dtype)
    fitted, of_fitted = onto_grid(problem, unsolved(problem), grid, dtype)
    for found, of_found in ((first, scales), (fitted.W, of_fitted)):
        assert torch.equal(found, W)
        assert torch.equal(grid.project(W, of_found, dtype), W)
    assert torch.equal(scales, of_fitted)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("sparsity", [0.0, 0.8])
def test_done_again_it_changes_nothing(bits: int, sparsity: float) -> None:
    problem = make_problem(dtype=F32)
    before, grid = solved(problem, Unstructured(sparsity)), Grid(bits, 16)
    after, scales = onto_grid(problem, before, grid, torch.bfloat16)
    there = LayerProblem(after.W, problem.gram)
    again, of_again = onto_grid(there, unsolved(there), grid, torch.bfloat16)
    assert torch.equal(again.W, after.W)
    assert torch.equal(of_again, scales)
    nearest, of_nearest = to_nearest(after.W, grid, torch.bfloat16)
    assert torch.equal(nearest, after.W)
    assert torch.equal(of_nearest, scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_of_llama_cpp_are_seen_behind_their_rounding(dtype: torch.dtype, sign: int) -> None:
    """As in files of models that were trained with Q4_0: scales in float16, and products rounded to another dtype."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        q = torch.randint(-8, 8, (32, 16, 32), generator=generator).double()
        s = sign * (torch.rand(32, 16, 1, generator=generator) / 50 + 1e-3).half().double()
        W = (q * s).flatten(1).to(dtype)
        assert scales_of_q4_0(W.float(), dtype) is not None
        found = Grid(4, 32).exact(W.float(), dtype, torch.float16)
        assert torch.equal(found, found.half().float())
        again = Grid(4, 32).codes(W.float(), found).double().unflatten(1, (16, 32)) * found.double().unsqueeze(2)
        assert torch.equal(again.flatten(1).to(dtype), W)
    W[0, 0] *= 1.02
    assert scales_of_q4_0(W.float(), dtype) is None
    assert scales_of_q4_0(torch.randn(32, 64, generator=generator).to(dtype).float(), dtype) is None


def test_scales_that_are_too_small() -> None:
    assert Grid(4).usable(torch.tensor([1e-9, 1.0, 1e-30]), torch.float16).tolist() == [1.0, 1.0, 1.0]
    W = torch.full((2, 4), 1e-9)
    scales = Grid(4).scales(W, torch.ones(4), torch.float16)
    assert not Grid(4).project(W, scales, torch.float16).any()


def test_scales_have_the_dtype_of_the_weights_up_to_float32() -> None:
    assert [scale_dtype(d) for d in (*HALF, F32, F64)] == [*HALF, F32, F32]


# On a mask and a grid


def solved(problem: LayerProblem, pattern: Pattern, solver: str = "continuation") -> Solution:
    return make_solver(solver)(problem, pattern)


def damped(H: Tensor, damping: float = 0.02) -> Tensor:
    """What rows are chosen by: H with a ridge in proportion to the roots of its diagonal."""
    h = H.diagonal()
    return H + damping * (h * h[h > 0].double().log().mean().exp()).sqrt().diag()


def row_errors(problem: LayerProblem, What: Tensor) -> list[float]:
    H = damped(problem.gram.H) if problem.gram.H.any() else problem.gram.H
    return [squared_error(w[None], v[None], H) for w, v in zip(problem.W, What, strict=True)]


def check(problem: LayerProblem, before: Solution, grid: Grid, dtype: torch.dtype) -> tuple[Solution, Tensor]:
    """What holds for whatever came before."""
    W, H, given = problem.W.clone(), problem.gram.H.clone(), before.W.clone()
    after, scales = onto_grid(problem, before, grid, dtype)
    for changed, original in ((problem.W, W), (problem.gram.H, H), (before.W, given)):
        assert torch.equal(changed, original)
    assert torch.equal(after.mask, before.mask)
    assert not after.W[~after.mask].any()
    assert not (after.W.signbit() & (after.W == 0)).any()
    assert after.W.dtype == scales.dtype == W.dtype
    assert scales.shape == (len(W), 1 if grid.group is None else W.shape[1] // grid.group)
    assert (scales != 0).all()
    assert torch.equal(scales.to(dtype).to(W.dtype), scales)
    full = scales.repeat_interleave(W.shape[1] // scales.shape[1], dim=1)
    q = after.W / full
    whole = q.round()
    assert (whole - q).abs().max() < 0.5
    assert whole.min() >= -(2 ** (grid.bits - 1))
    assert whole.max() < 2 ** (grid.bits - 1)
    assert torch.equal((whole * full).to(dtype).to(W.dtype), after.W)
    assert after.error == pytest.approx(problem.error(after.W), rel=1e-9, abs=1e-15)
    assert after.stats == before.stats
    # No row is worse than its weights rounded to the nearest.
    first = grid.scales(before.W, H.diagonal(), dtype)
    rounded = grid.project(before.W, first, dtype) * before.mask
    for found, nearest in zip(row_errors(problem, after.W), row_errors(problem, rounded), strict=True):
        assert found <= nearest * (1 + 1e-5) + 1e-12
    return after, scales


@pytest.mark.parametrize("pattern", [Unstructured(0.5), PerRow(0.6), NM(2, 4)], ids=str)
@pytest.mark.parametrize("solver", [solver for solver, _ in CONTRACT], ids=repr)
@pytest.mark.slow
def test_behind_every_solver(solver: Solver, pattern: Pattern) -> None:
    problem = make_problem(dtype=F32)
    before = solver(problem, pattern)
    after, _ = check(problem, before, Grid(4, 8), torch.bfloat16)
    zeros = int((after.W == 0).sum())
    assert zeros >= int((~before.mask).sum()) == round(pattern.sparsity * after.W.numel())


@covered
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grid", [Grid(2, 4), Grid(4), Grid(8, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, F32], ids=str)
@pytest.mark.slow
def test_whatever_the_inputs_are(kind: str, grid: Grid, dtype: torch.dtype) -> None:
    problem = make_problem(kind, dtype=F32)
    for sparsity in (0.0, 0.7):
        check(problem, solved(problem, Unstructured(sparsity)), grid, dtype)


@pytest.mark.parametrize("what", ["weights", "inputs"])
def test_nothing_there(what: str) -> None:
    problem = make_problem(dtype=F64)
    W, H = problem.W, problem.gram.H
    problem = LayerProblem(W * 0, H) if what == "weights" else LayerProblem(W, H * 0)
    before = Magnitude()(problem, Unstructured(0.5))
    after, scales = onto_grid(problem, before, Grid(4, 8), F64)
    assert torch.equal(after.W, Grid(4, 8).project(before.W, scales, F64))


def test_dead_inputs_are_rounded_to_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first scales: those that are fitted later have the same whole numbers."""
    monkeypatch.setattr(Grid, "finest", lambda self, W, scales, dtype: scales)
    problem = make_problem("dead input", dtype=F64)
    before, grid = solved(problem, Unstructured(0.3), "magnitude"), Grid(4, 8)  # others prune them first
    after, scales = check(problem, before, grid, F64)
    dead = problem.gram.norm == 0
    assert dead.any()
    first = grid.scales(before.W, problem.gram.H.diagonal(), F64)
    nearest = (before.W / first.repeat_interleave(8, dim=1)).round().clamp(-8, 7) * before.mask
    found = (after.W / scales.repeat_interleave(8, dim=1)).round()
    assert nearest[:, dead].count_nonzero() > 10
    assert torch.equal(found[:, dead], nearest[:, dead])


def test_the_fewer_tokens_the_more_rounding_is_damped() -> None:
    problem, grid = make_problem("few tokens", rows=40, columns=64, dtype=F64), Grid(3, 16)
    H, losses = problem.gram.H, {}
    for tokens in (10**9, 64):
        of_these = LayerProblem(problem.W, Gram(H, tokens=tokens))
        losses[tokens] = problem.W - onto_grid(of_these, unsolved(of_these), grid, F64)[0].W
    more, less = (0.0 * H + damped(H, 0.02 + min(0.28, 13 * 64 / tokens)) for tokens in (64, 10**9))
    for H_, best, other in ((more, losses[64], losses[10**9]), (less, losses[10**9], losses[64])):
        assert float(((best @ H_) * best).sum()) < float(((other @ H_) * other).sum())


def coupled(rows: int, width: int) -> tuple[Tensor, Tensor]:
    """What errors of ``rows`` outputs cost together: the whole matrix, 0 outside of its blocks, and these as given."""
    gradients = normal(50, 5, seed=3) @ normal(5, rows, seed=4) + 0.3 * normal(50, rows, seed=5)
    G = gradients.T @ gradients / 50
    G *= (torch.arange(rows) // width).unsqueeze(1) == torch.arange(rows) // width
    blocks = torch.zeros(rows, width, dtype=F64)
    for start in range(0, rows, width):
        stop = min(start + width, rows)
        blocks[start:stop, : stop - start] = G[start:stop, start:stop]
    return G, blocks


@pytest.mark.parametrize("width", [23, 10, 64])
def test_later_rows_make_up_for_the_errors_of_earlier_ones(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Each row is the best for what is left when all later ones are free: by the equations of that, a row at a time."""
    monkeypatch.setattr("niwaki.layer.rounding._ROWS", 1)
    problem, grid = make_problem(rows=23, dtype=F64), Grid(3, 8)
    G, blocks = coupled(23, width)
    found, scales = onto_grid(LayerProblem(problem.W, problem.gram, blocks), unsolved(problem), grid, F64)
    for start in range(0, 23, width):
        of_block = G[start : start + width, start : start + width]
        own = of_block.diagonal().argsort(descending=True)
        of_block = (of_block + of_block.diagonal().mean() * torch.eye(len(own), dtype=F64))[own][:, own]
        own = own + start
        errors = found.W[own] - problem.W[own]
        for row in range(len(own)):
            free = torch.linalg.solve(of_block[row:, row:], -of_block[row:, :row] @ errors[:row])
            alone = LayerProblem(problem.W[own][row : row + 1] + free[:1], problem.gram)
            expected, of_row = onto_grid(alone, unsolved(alone), grid, F64)
            torch.testing.assert_close(found.W[own][row : row + 1], expected.W)
            torch.testing.assert_close(scales[own][row : row + 1], of_row)


@pytest.mark.parametrize("grid", [Grid(3, 16), Grid(4), parse_grid("q4_0"), parse_grid("q4_1")], ids=str)
def test_errors_cost_less_together(grid: AnyGrid) -> None:
    problem = make_problem(rows=150, columns=64, dtype=F64)
    G, blocks = coupled(150, 128)
    costs = []
    for together in (None, blocks.half()):
        given = LayerProblem(problem.W, problem.gram, together)
        E = onto_grid(given, unsolved(problem), grid, torch.float16)[0].W - problem.W
        costs.append(float(((G @ E) * (E @ problem.gram.H)).sum()))
    assert costs[1] < 0.8 * costs[0]


@pytest.mark.parametrize(("shape", "value"), [((22, 4), 1.0), ((23,), 1.0), ((23, 0), 1.0), ((23, 4), math.nan)])
def test_what_cannot_be_the_cost_of_errors_together(shape: tuple[int, ...], value: float) -> None:
    problem = make_problem(rows=23, dtype=F64)
    with pytest.raises(NumericalError if math.isnan(value) else UsageError, match="together"):
        LayerProblem(problem.W, problem.gram, torch.full(shape, value))


def test_what_rows_that_count_together_leave_alone() -> None:
    """Zeros, weights that are on the grid, and all rows of outputs that nothing depends on."""
    problem, grid = make_problem(rows=100, dtype=F64), Grid(4, 8)
    _, blocks = coupled(100, 100)
    before = solved(problem, Unstructured(0.5))
    after, _ = onto_grid(LayerProblem(problem.W, problem.gram, blocks), before, grid, F64)
    assert not after.W[~before.mask].any()
    there = LayerProblem(after.W, problem.gram, blocks)
    assert torch.equal(onto_grid(there, unsolved(there), grid, F64)[0].W, after.W)
    idle = LayerProblem(problem.W, problem.gram, torch.zeros(100, 40, dtype=F64))
    alone, _ = onto_grid(problem, unsolved(problem), grid, F64)
    torch.testing.assert_close(onto_grid(idle, unsolved(problem), grid, F64)[0].W, alone.W)


def test_what_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rows, the scale of the inputs, and how many rows there are at a time."""
    problem, grid, dtype = make_problem(dtype=F64), Grid(4, 8), torch.bfloat16
    before = solved(problem, Unstructured(0.5))
    whole, scales = onto_grid(problem, before, grid, dtype)
    for rows in (slice(0, 7), slice(7, 23)):
        given = Solution(before.W[rows], before.mask[rows], 0.0)
        found, of_these = onto_grid(LayerProblem(problem.W[rows], problem.H), given, grid, dtype)
        assert torch.equal(found.W, whole.W[rows])
        assert torch.equal(of_these, scales[rows])
    for size in (2.0**40, 2.0**-40):
        found, _ = onto_grid(LayerProblem(problem.W, problem.gram.H * size), before, grid, dtype)
        assert torch.equal(found.W, whole.W)
    monkeypatch.setattr("niwaki.layer.rounding.STRIP", 5)
    found, in_strips = onto_grid(problem, before, grid, dtype)
    assert torch.equal(found.W, whole.W)
    assert torch.equal(in_strips, scales)


@pytest.mark.parametrize("grid", [Grid(2, 32), Grid(3, 32), Grid(4, 64), parse_grid("iq4_nl")], ids=str)
def test_sweeps_in_bfloat16_come_as_near(monkeypatch: pytest.MonkeyPatch, grid: AnyGrid) -> None:
    """Beside the same in float64."""
    monkeypatch.setattr("niwaki.layer.rounding.has_bfloat16_units", lambda: True)
    ratios = []
    for seed in range(6):
        problem = make_problem(rows=32, columns=128, seed=seed)
        single = LayerProblem(problem.W.float(), problem.gram.H.float())
        exact, _ = onto_grid(problem, unsolved(problem), grid, torch.float16)
        found, _ = onto_grid(single, unsolved(single), grid, torch.float16)
        ratios.append(problem.error(found.W.double()) / exact.error)
    assert geometric_mean(ratios) < 1.01


def best_codes(w: Tensor, H: Tensor, kept: list[int], scales: Tensor, bits: int) -> float:
    """The least error of a row, of all ways to choose its codes."""
    codes = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1), dtype=F64)
    choices = torch.cartesian_prod(*[codes] * len(kept))
    D = w.expand(len(choices), -1).clone()
    D[:, kept] -= choices * scales[kept]
    return float((D @ H).mul_(D).sum(dim=1).min())


@pytest.mark.slow
def test_it_comes_near_the_best_codes() -> None:
    """Brute force over all codes of 6 kept weights of each row, with the scales that were found."""
    grid, ratios, nearest = Grid(3, 4), [], []
    for seed in range(3):
        W, H = normal(8, 12, seed=seed), gram(inputs("correlated", 12, seed))
        problem = LayerProblem(W, H)
        before = solved(problem, PerRow(0.5), "sparsegpt")
        after, scales = check(problem, before, grid, F64)
        full = scales.repeat_interleave(4, dim=1)
        rounded = grid.project(before.W, scales, F64)
        for i, error in enumerate(row_errors(problem, after.W)):
            kept = after.mask[i].nonzero().squeeze(1).tolist()
            floor = best_codes(W[i], damped(H), kept, full[i], 3)
            assert error >= floor * (1 - 1e-9)
            ratios.append(error / floor)
            nearest.append(row_errors(problem, rounded)[i] / floor)
    assert geometric_mean(ratios) < 1.05 < 1.15 < geometric_mean(nearest)


def gptq(W: Tensor, H: Tensor, mask: Tensor, grid: Grid, scales: Tensor, damping: float = 0.01) -> Tensor:
    """Columns from left to right, each error made up for by the columns to its right: in float64, without factors."""
    full = scales.repeat_interleave(W.shape[1] // scales.shape[1], dim=1)
    damped = H + damping * H.diagonal().mean() * torch.eye(len(H), dtype=F64)
    V, Q = W.clone(), torch.zeros_like(W)
    for j in range(W.shape[1]):
        q = (V[:, j] / full[:, j]).round().clamp(grid.lowest, grid.highest) * full[:, j]
        Q[:, j] = q.to(torch.bfloat16).double() * mask[:, j]
        inverse = torch.linalg.inv(damped[j:, j:])
        V[:, j:] -= ((V[:, j] - Q[:, j]) / inverse[0, 0])[:, None] * inverse[0]
    return Q


@pytest.mark.parametrize(("sparsity", "better"), [(0.0, 0.85), (0.5, 0.97)])
def test_it_is_better_than_one_pass_over_the_columns(sparsity: float, better: float) -> None:
    against_gptq, against_nearest = [], []
    for seed in range(4):
        problem = make_problem(rows=16, columns=64, seed=seed)
        before = solved(problem, Unstructured(sparsity))
        grid = Grid(3, 32)
        after, _ = onto_grid(problem, before, grid, torch.bfloat16)
        first = grid.scales(before.W, problem.gram.H.diagonal(), torch.bfloat16)
        one_pass = gptq(before.W, problem.gram.H, before.mask, grid, first)
        nearest = grid.project(before.W, first, torch.bfloat16)
        against_gptq.append(after.error / problem.error(one_pass))
        against_nearest.append(after.error / problem.error(nearest))
    assert geometric_mean(against_gptq) < better
    assert geometric_mean(against_nearest) < better


@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_fitted_scales_are_least_squares(monkeypatch: pytest.MonkeyPatch, ridge: float) -> None:
    monkeypatch.setattr("niwaki.layer.linalg._SCALE_RIDGE", ridge)
    W, X = normal(5, 12, seed=0), inputs("correlated", 12, 0)
    codes = Grid(3).codes(W, torch.full((5, 1), 0.5, dtype=F64))
    codes[2, 4:8] = 0  # a group that is not seen
    old = torch.full((5, 3), 0.5, dtype=F64)
    found = Grid(4, 4).refitted(W, codes, old, gram(X), F64)
    for i in range(5):
        columns = [X[:, 4 * k : 4 * k + 4] @ codes[i, 4 * k : 4 * k + 4] for k in range(3)]
        A = torch.stack(columns, dim=1) / len(X) ** 0.5
        pull = torch.diag(ridge**0.5 * A.norm(dim=0))
        target = torch.cat([X @ W[i] / len(X) ** 0.5, pull @ old[i]])
        best = torch.linalg.lstsq(torch.cat([A, pull]), target[:, None], driver="gelsd").solution[:, 0]
        assert (best > 0).sum() >= 2
        for k in range(3):
            expected = 0.5 if (i, k) == (2, 1) else float(best[k])
            assert float(found[i, k]) == pytest.approx(expected, rel=1e-9)


def test_scales_that_would_be_negative_stay() -> None:
    W = torch.tensor([[1.0, 1.0, -1.0, -1.0]], dtype=F64)
    codes = torch.tensor([[1.0, 1.0, 1.0, 1.0]], dtype=F64)
    found = Grid(4, 2).refitted(W, codes, torch.full((1, 2), 0.25, dtype=F64), torch.eye(4, dtype=F64), F64)
    assert float(found[0, 0]) == pytest.approx(1.0, rel=1e-2)
    assert float(found[0, 1]) == 0.25


def test_matrices_with_the_same_inputs_share_a_factorization(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def counted(copy: Callable[[], Tensor], damping: float) -> tuple[Tensor, float]:
        nonlocal calls
        calls += 1
        return inverse_of_damped(copy, damping)

    monkeypatch.setattr("niwaki.layer.linalg.inverse_of_damped", counted)
    shared = Gram(gram(inputs("correlated", 16, 0)))
    for seed in range(3):
        problem = LayerProblem(normal(4, 16, seed=seed), shared)
        onto_grid(problem, Magnitude()(problem, PerRow(0.5)), Grid(4), F64)
    assert calls == 1


def test_the_group_has_to_fit() -> None:
    problem = make_problem()
    before = Magnitude()(problem, PerRow(0.5))
    with pytest.raises(UsageError, match="32 inputs cannot be divided into groups of 12"):
        onto_grid(problem, before, Grid(4, 12), F64)


# Floating-point numbers of four bits

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FLOATS = pytest.mark.parametrize("grid", [FloatGrid(), FloatGrid(group=32)], ids=str)


def of_scales(grid: FloatGrid, low: int, high: int) -> Tensor:
    """All scales of so many powers of two, ascending."""
    mantissas = (1.0,) if grid.group == 32 else tuple(1 + i / 8 for i in range(8))
    return torch.tensor([m * 2.0**e for e in range(low, high) for m in mantissas], dtype=F64)


@FLOATS
def test_floats_next_to_weights(grid: FloatGrid) -> None:
    W, groups = normal(8, 64, seed=0).float(), grid.groups(64)
    scales = of_scales(grid, -3, 1)[torch.arange(8 * groups) % 4].view(8, -1).float()
    levels = torch.tensor([sign * 2 * level for level in E2M1 for sign in (1, -1)], dtype=F64)
    numbers = scales.double().repeat_interleave(64 // groups, 1).unsqueeze(2) * levels
    right = numbers.gather(2, (numbers - W.double().unsqueeze(2)).abs().argmin(2, keepdim=True)).squeeze(2)
    assert torch.equal(grid.project(W, scales, torch.bfloat16).double(), right)
    assert grid.has(grid.project(W, scales, torch.bfloat16), scales.bfloat16())


@FLOATS
@each_half
def test_scales_of_floats(grid: FloatGrid, dtype: torch.dtype) -> None:
    """They are numbers that files have, and lose little more than the best of all such; never more than the usual."""
    W, importance = normal(16, 128, seed=0).float() / 50, normal(128, seed=1).square().float()
    W[0] = 0
    found = grid.scales(W, importance, dtype)
    assert grid.are_scales(found.to(dtype))
    assert not grid.are_scales(found.to(dtype) * (1.5 if grid.group == 32 else 1.0625))

    def losses(scales: Tensor) -> Tensor:
        errors = (grid.project(W, scales.float(), dtype) - W).double().square() * importance
        return errors.view(16, grid.groups(128), -1).sum(2)

    shape, every = found.shape, of_scales(grid, -16, 1)
    best = torch.stack([losses(s.expand(shape)) for s in every]).amin(0)
    largest = W.view(16, grid.groups(128), -1).abs().amax(2)
    usual = losses(grid.usable(largest / 12, dtype))
    assert bool((losses(found) <= usual * (1 + 1e-6)).all())
    assert float(losses(found).sum()) <= 1.02 * float(best.sum())
    assert found[0].unique().numel() == 1


@FLOATS
def test_floats_that_make_up_for_others(grid: FloatGrid) -> None:
    problem = make_problem(rows=32, columns=64)
    solution, scales = onto_grid(problem, unsolved(problem), grid, torch.bfloat16)
    rounded, _ = to_nearest(problem.W, grid, torch.bfloat16)
    assert grid.are_scales(scales.bfloat16())
    assert torch.equal(grid.project(solution.W, scales, torch.bfloat16), solution.W)
    assert solution.error < problem.error(rounded)


@FLOATS
@each_half
def test_floats_that_are_on_the_grid_stay(grid: FloatGrid, dtype: torch.dtype) -> None:
    W = normal(8, 128, seed=0).float() / 50
    W[1] /= 20  # groups without large numbers
    once, _ = to_nearest(W, grid, dtype)
    again, scales = to_nearest(once, grid, dtype)
    assert torch.equal(again, once)
    assert grid.are_scales(scales.to(dtype))


@pytest.mark.parametrize("rows", [slice(0, 1), slice(None)])
def test_scales_that_share_a_power(rows: slice) -> None:
    """Also those of groups of zeros, or of weights that are next to nothing."""
    W = normal(8, 128, seed=0).float() / 500
    W[rows, 16:32], W[rows, 32:48] = 0, W[rows, 32:48] * 2.0**-30
    scales = [to_nearest(each, FloatGrid(), torch.bfloat16)[1].flatten() for each in (W, torch.zeros_like(W))]
    assert shared_power(torch.cat(scales)) is not None


def test_bytes_of_floats() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    values = torch.tensor([sign * level for level in E2M1 for sign in (1, -1)])
    pairs = torch.cartesian_prod(values, values).view(16, -1) + 0.0
    assert torch.equal(fp4_codes(2 * pairs), helpers.pack_fp4_to_uint8(pairs))


def test_what_scales_are_multiples_of() -> None:
    """A power of two, of which the largest is at most 448 times."""
    assert shared_power(torch.tensor([448.0, 1.0])) == 0
    assert shared_power(torch.tensor([480.0, 1.0])) == 1
    assert shared_power(torch.tensor([0.875, 2.0**-14])) == -9
    assert shared_power(torch.tensor([1.0, 2.0**-17 * 1.125])) is None
