"""Two factors on a grid: how many values they have, and their rounding, against float64 from the definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from niwaki.errors import PatternError, UsageError
from niwaki.layer import rounding
from niwaki.layer.grid import Grid
from niwaki.layer.patterns import TwoFactors, Unstructured, make_pattern
from niwaki.layer.problem import Gram, LayerProblem, Solution
from niwaki.layer.rounding import factor_flops, factors_onto_grid, onto_grid
from niwaki.packed.matrix import pack
from support.covering import covered
from support.models import message
from support.problems import DEAD, KINDS, generator, make_problem, normal, squared_error

F32, F64 = torch.float32, torch.float64
INT8 = Grid(8)


def sparse(*shape: int, seed: int, share: float = 0.5, dtype: torch.dtype = F64) -> Tensor:
    places = torch.rand(shape, generator=generator(seed + 100)) < share
    return normal(*shape, seed=seed, dtype=dtype) * places


# How many values they have


@pytest.mark.parametrize("grid", [INT8, Grid(8, 64)], ids=str)
@pytest.mark.parametrize(
    ("shape", "sparsity"), [((576, 576), 0.5), ((1536, 576), 0.7), ((192, 576), 0.123), ((576, 1536), 0.6)], ids=str
)
def test_the_bytes_of_one_matrix(shape: tuple[int, int], sparsity: float, grid: Grid) -> None:
    """On the same grid: values, masks and scales, as they are packed."""
    rows, columns = shape
    inner = min(shape)

    def size(rows: int, columns: int, kept: int) -> int:
        """Bytes that a matrix with so many values takes, without what is behind the last one."""
        W = torch.zeros(rows * columns, dtype=torch.bfloat16)
        W[torch.randperm(len(W), generator=generator(0))[:kept]] = 1
        W = W.view(rows, columns)
        packed = pack(W, W.to(torch.int8), torch.ones(rows, columns // (grid.group or columns)), whole=False)
        assert packed.mask is not None
        assert packed.scales is not None
        return packed.mask.nbytes + packed.values.nbytes - 64 + packed.scales.nbytes // 2  # they are in W's dtype

    left, right = TwoFactors(sparsity, grid).kept_in_factors(shape)
    two = size(rows, inner, left) + size(inner, columns, right)
    one = size(rows, columns, rows * columns - round(sparsity * rows * columns))
    assert one - 1 <= two <= one


def test_more_zeros_than_the_masks_leave() -> None:
    with pytest.raises(PatternError, match=r"two-factors:0\.8:int8 leaves a matrix of 64 x 64 fewer than 128 weights"):
        TwoFactors(0.8, INT8).check((64, 64))
    TwoFactors(0.8).check((64, 64))


@pytest.mark.parametrize("grid", [None, INT8], ids=str)
@pytest.mark.parametrize("shape", [(64, 64), (576, 576), (1536, 576), (64, 2048)], ids=str)
def test_the_highest_sparsity_can_be_had(shape: tuple[int, int], grid: Grid | None) -> None:
    most = TwoFactors(0.5, grid).highest_sparsity(shape)
    TwoFactors(most, grid).check(shape)
    with pytest.raises(PatternError):
        TwoFactors(most + 0.01, grid).check(shape)


def test_names() -> None:
    assert str(TwoFactors(0.5, Grid(8, 64))) == "two-factors:0.5:int8:64"
    for pattern in (TwoFactors(0.5, INT8), TwoFactors(0.25, Grid(8, 128))):
        assert make_pattern(str(pattern), Unstructured) == pattern
        assert pattern.at(0.6) == TwoFactors(0.6, pattern.grid)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("two-factors:0.5:int4", "the values of two factors have 8 bits on a grid, not 4"),
        ("two-factors:0.5:int8:32", "groups of a multiple of 64 inputs, not of 32; take int8, or int8:64"),
        ("two-factors:0.5:8", "'two-factors:0.5:8' is not a valid pattern"),
        ("two-factors:x:int8", "'two-factors:x:int8' is not a valid pattern"),
        ("unstructured:0.5:int8", "'unstructured:0.5:int8' is not a valid pattern"),
    ],
)
def test_patterns_that_are_none(text: str, said: str) -> None:
    assert said in message(lambda: make_pattern(text, Unstructured), UsageError)


# Their rounding


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(24, 32), (32, 32), (40, 32)], ids=str)
def test_it_is_what_it_says(shape: tuple[int, int], damping: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an exact refit of the left factor."""
    monkeypatch.setattr(rounding, "_STEPS", 400)
    dtype = torch.bfloat16
    problem, inner = make_problem(rows=shape[0], columns=shape[1]), min(shape)
    W, H = problem.W, problem.gram.H.clone()
    A, B = sparse(shape[0], inner, seed=1), sparse(inner, shape[1], seed=2)
    # Of an input that hardly counts the weights are the largest, and worth cutting off.
    H[0] *= 1e-4
    H[:, 0] *= 1e-4
    B[:, 0] = 3.2
    problem = LayerProblem(W, Gram(H, shared=False))
    (left, right), (of_left, of_right) = factors_onto_grid(problem, (A, B), INT8, dtype, damping)
    scales = INT8.scales(B, H.diagonal(), dtype)
    assert torch.equal(of_right, scales)
    assert torch.equal(right, ((B / scales).round().clamp(-128, 127) * scales).to(dtype).double())
    h = H.diagonal()
    damped = H + damping * torch.diag((h * h.log().mean().exp()).sqrt())
    G, target = right @ damped @ right.T, W @ damped @ right.T
    refitted = torch.zeros_like(A)
    for row, wanted, found in zip(A, target, refitted, strict=True):
        places = row != 0
        found[places] = torch.linalg.solve(G[places][:, places], wanted[places])
    near = Solution(refitted, A != 0, error=0.0)
    expected, of_expected = onto_grid(LayerProblem(refitted, Gram(G, shared=False)), near, INT8, dtype)
    assert torch.equal(of_left, of_expected)
    assert torch.equal(left, expected.W)


@covered
@pytest.mark.parametrize("shape", [(24, 64), (64, 64), (128, 64)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grid", [INT8, Grid(8, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, F32], ids=str)
def test_what_it_gives(shape: tuple[int, int], kind: str, grid: Grid, dtype: torch.dtype) -> None:
    """Both are on their grid and their masks, what was given stays, and little is lost."""
    problem, inner = make_problem(kind, rows=shape[0], columns=shape[1], dtype=F32), min(shape)
    given = sparse(shape[0], inner, seed=1, dtype=F32), sparse(inner, shape[1], seed=2, dtype=F32)
    if kind == "dead input":
        given[1][:, DEAD] = 0
    given[1][5] = 0  # what the sixth column of the left one is multiplied with
    copies = [each.clone() for each in (*given, problem.W, problem.gram.H)]
    factors, scales = factors_onto_grid(problem, given, grid, dtype, 0.02)
    again, _ = factors_onto_grid(problem, given, grid, dtype, 0.02)
    for each, copy in zip((*given, problem.W, problem.gram.H), copies, strict=True):
        assert torch.equal(each, copy)
    for factor, same, before, of_rows in zip(factors, again, given, scales, strict=True):
        assert torch.equal(factor, same)
        assert factor.dtype == of_rows.dtype == F32
        assert of_rows.shape == (len(factor), factor.shape[1] // (grid.group or factor.shape[1]))
        assert (of_rows != 0).all()
        full = of_rows.repeat_interleave(factor.shape[1] // of_rows.shape[1], dim=1)
        assert torch.equal(full.to(dtype).float(), full)
        whole = (factor / full).round()
        assert -128 <= float(whole.min()) <= float(whole.max()) <= 127
        assert torch.equal((whole * full).to(dtype).float(), factor)
        assert not factor[before == 0].any()
        assert not ((factor == 0) & factor.signbit()).any()
    W, H = problem.W, problem.gram.H
    assert squared_error(W, factors[0] @ factors[1], H) < 1.01 * squared_error(W, given[0] @ given[1], H)


@pytest.mark.parametrize("what", ["weights", "inputs", "factors"])
def test_nothing_there(what: str) -> None:
    problem = make_problem(rows=32, columns=32)
    factors = sparse(32, 32, seed=1), sparse(32, 32, seed=2)
    W, H = problem.W, problem.gram.H
    if what == "factors":
        factors = torch.zeros_like(factors[0]), torch.zeros_like(factors[1])
    else:
        problem = LayerProblem(W * 0, H) if what == "weights" else LayerProblem(W, H * 0)
    found, scales = factors_onto_grid(problem, factors, INT8, torch.bfloat16, 0.02)
    for each in (*found, *scales):
        assert each.isfinite().all()
    for each, mask in zip(found, factors, strict=True):
        assert not each[mask == 0].any()


def test_flops_grow_with_the_matrix() -> None:
    assert 0 < factor_flops(64, 64) < factor_flops(128, 64) < factor_flops(128, 128)
    assert math.isclose(factor_flops(1280, 1280) / factor_flops(640, 640), 8, rel_tol=1e-6)


@pytest.mark.parametrize(("shape", "share"), [((576, 576), 0.4), ((1536, 576), 0.25), ((192, 576), 0.25)], ids=str)
def test_the_share_of_the_square_factor(shape: tuple[int, int], share: float) -> None:
    """Larger than beside values of 16 bits."""
    kept = TwoFactors(0.5, INT8).kept_in_factors(shape)
    square = kept[0] if shape[0] < shape[1] else kept[1]
    assert square / sum(kept) == pytest.approx(share, rel=1e-4)
    of_16_bits = TwoFactors(0.5).kept_in_factors(shape)
    assert (of_16_bits[0] if shape[0] < shape[1] else of_16_bits[1]) / sum(of_16_bits) < share
