"""Two sparse factors against the solver's docstring, written out slowly: one linear system for each step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from niwaki.errors import PatternError
from niwaki.layer.grid import Grid
from niwaki.layer.patterns import NM, TwoFactors, Unstructured, factors as pattern_module, make_pattern
from niwaki.layer.problem import Gram, LayerProblem
from niwaki.layer.rounding import factors_onto_grid
from niwaki.layer.solvers import SOLVERS, Continuation, DoubleSparse, MaskThenUpdate, Wanda, make_solver
from niwaki.models.locate import locate_model
from support.models import reference
from support.problems import DEAD, KINDS, generator, make_problem, squared_error

SHAPES = [(24, 32), (32, 32), (40, 32)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of these tests are smaller than those of models."""
    monkeypatch.setattr(pattern_module, "_LEAST", 4)


def highest(scores: Tensor, count: int) -> Tensor:
    mask = torch.zeros(scores.numel(), dtype=torch.bool)
    mask[scores.flatten().argsort(descending=True)[:count]] = True
    return mask.view(scores.shape)


def step(V: Tensor, count: int, hardness: float | None) -> Tensor:
    S = V.abs()
    if hardness is None:
        return V * highest(S, count)
    theta = S.flatten().sort(descending=True).values[count]  # the highest score that is not kept
    return V / (1 + (theta / S) ** hardness)


def or_one(units: Tensor) -> Tensor:
    """A column without weights has no unit."""
    return torch.where(units > 0, units, 1.0)


def refitted(system: Tensor, right: Tensor, mask: Tensor) -> Tensor:
    """The solution of ``system`` x = ``right`` with x = 0 off the mask, for vectors that are flat matrices."""
    found, places = torch.zeros_like(right).flatten(), mask.flatten()
    found[places] = torch.linalg.lstsq(
        system[places][:, places], right.flatten()[places, None], driver="gelsd"
    ).solution[:, 0]
    return found.view(right.shape)


def as_described(problem: LayerProblem, pattern: TwoFactors, solver: DoubleSparse) -> Tensor:
    """The product of the factors that the docstring's steps give, with exact refits at the end."""
    H, W = problem.gram.H, problem.W
    h = H.diagonal()
    H = H + solver.damping * torch.diag((h * h.log().mean().exp()).sqrt())
    norm = H.diagonal().sqrt()
    H, W0 = H / torch.outer(norm, norm), W * norm
    rows, columns = W.shape
    counts = pattern.kept_in_factors(W.shape)
    square = torch.eye(min(rows, columns), dtype=W.dtype)
    left_is_square = rows < columns
    rest = W0 * highest(W0.abs(), counts[left_is_square])
    A, B = (square, rest) if left_is_square else (rest, square)
    UA, UB = torch.zeros_like(A), torch.zeros_like(B)

    def left(rho: float, hardness: float | None) -> None:
        nonlocal A, UA
        units = or_one((B @ H @ B.T).diagonal().sqrt())
        scaled = B / units[:, None]
        G, Z = scaled @ H @ scaled.T, A * units
        X = torch.linalg.solve(G + rho * torch.eye(len(G), dtype=G.dtype), (W0 @ H @ scaled.T + rho * (Z - UA)).T).T
        V = 2 * X - Z + UA
        new = step(V, counts[0], hardness)
        A, UA = new / units, V - new

    def right(rho: float, hardness: float | None) -> None:
        nonlocal B, UB
        units = or_one(A.norm(dim=0))
        scaled, Z = A / units, B * units[:, None]
        system = torch.kron(scaled.T @ scaled, H) + rho * torch.eye(B.numel(), dtype=B.dtype)
        X = torch.linalg.solve(system, (scaled.T @ W0 @ H + rho * (Z - UB)).flatten()).view(B.shape)
        V = 2 * X - Z + UB
        new = step(V, counts[1], hardness)
        B, UB = new / units[:, None], V - new

    for t in range(solver.rounds):
        x = t / max(1, solver.rounds - 1)
        rho = solver.penalty_start ** (1 - x) * solver.penalty_end**x
        hardness = solver.hardness_start ** (1 - x) * solver.hardness_end**x if t + 1 < solver.rounds else None
        if left_is_square:
            left(rho / 2, hardness)
            right(rho, hardness)
        else:
            right(rho / 2, hardness)
            left(rho, hardness)
    for part in ("A", "B") if left_is_square else ("B", "A"):
        if part == "A":
            of_rows = torch.kron(torch.eye(rows, dtype=A.dtype), B @ H @ B.T)
            A = refitted(of_rows, W0 @ H @ B.T, A != 0)
        else:
            B = refitted(torch.kron(A.T @ A, H), A.T @ W0 @ H, B != 0)
    return A @ B / norm


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rounds", [1, 4])
def test_it_is_what_it_says(shape: tuple[int, int], rounds: int, small: None) -> None:
    problem, pattern = make_problem(rows=shape[0], columns=shape[1]), TwoFactors(0.5)
    solver = DoubleSparse(rounds=rounds, steps=200, finish=3000, penalty_start=0.3, penalty_end=0.7, damping=0.05)
    solution = solver(problem, pattern)
    expected = as_described(problem, pattern, solver)
    assert torch.allclose(solution.W, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_it_gives(shape: tuple[int, int], kind: str, dtype: torch.dtype, small: None) -> None:
    problem = make_problem(kind, rows=shape[0], columns=shape[1], dtype=dtype)
    W, H, pattern = problem.W.clone(), problem.gram.H.clone(), TwoFactors(0.6)
    solution = DoubleSparse()(problem, pattern)
    again = DoubleSparse()(make_problem(kind, rows=shape[0], columns=shape[1], dtype=dtype), pattern)
    assert solution.factors
    assert again.factors
    A, B = solution.factors
    inner = min(shape)
    assert (A.shape, B.shape) == ((shape[0], inner), (inner, shape[1]))
    assert A.dtype == B.dtype == solution.W.dtype == dtype
    kept = [int(factor.count_nonzero()) for factor in (A, B)]
    assert all(count <= most for count, most in zip(kept, pattern.kept_in_factors(shape), strict=True))
    if kind == "correlated":
        assert tuple(kept) == pattern.kept_in_factors(shape)
    assert [solution.stats[f"kept_{side}"] for side in ("left", "right")] == kept
    assert torch.equal(solution.W, A @ B)
    assert solution.mask.all()
    assert solution.mask.shape == W.shape
    for factor, same in zip((A, B), again.factors, strict=True):
        assert torch.equal(factor, same)
        assert not ((factor == 0) & factor.signbit()).any()
    assert torch.equal(problem.W, W)
    assert torch.equal(problem.gram.H, H)
    power = squared_error(W, torch.zeros_like(W), H)
    assert solution.error == pytest.approx(squared_error(W, solution.W, H) / power, rel=1e-3)
    if kind == "dead input":
        assert not B[:, DEAD].any()


def test_fewer_zeros_and_more_rounds_are_better() -> None:
    problem = make_problem(rows=96, columns=64)

    def error(sparsity: float, **settings: int) -> float:
        return DoubleSparse(**settings)(problem, TwoFactors(sparsity)).error

    assert error(0.5) < error(0.6) < error(0.8)
    assert error(0.5) < 0.9 * error(0.5, rounds=6)


@pytest.fixture(scope="module")
def demo() -> PreTrainedModel:
    return reference(locate_model("demo"))


@pytest.fixture(params=["q_proj", "k_proj", "up_proj", "down_proj"])
def real(demo: PreTrainedModel, request: pytest.FixtureRequest) -> LayerProblem:
    """A matrix and inputs of a real model; there is nothing to factorize in random ones."""
    layer = next(module for path, module in demo.named_modules() if ".2." in path and path.endswith(request.param))
    seen: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].flatten(0, -2)))
    with torch.no_grad():
        demo(torch.randint(0, 4096, (8, 256), generator=generator(1)))
    hook.remove()
    (X,) = seen
    return LayerProblem(layer.weight.detach().float(), Gram(X.T @ X / len(X), tokens=len(X)))


def test_it_is_better_than_one_matrix_of_the_same_bytes(real: LayerProblem) -> None:
    two, one = DoubleSparse()(real, TwoFactors(0.5)), Continuation()(real, Unstructured(0.5))
    assert two.factors
    bits = sum(16 * int(factor.count_nonzero()) + factor.numel() for factor in two.factors)
    assert bits <= 16 * int(one.W.count_nonzero()) + one.W.numel()
    assert two.error < 0.75 * one.error


def test_rounding_adds_little_to_the_error(real: LayerProblem) -> None:
    """And less than both factors rounded to the nearest."""
    grid, dtype = Grid(8), torch.bfloat16
    before = DoubleSparse()(real, TwoFactors(0.5, grid))
    assert before.factors
    (A, B), _ = factors_onto_grid(real, before.factors, grid, dtype, float(before.stats["damping"]))
    nearest = [
        grid.project(factor, grid.scales(factor, torch.ones(factor.shape[1]), dtype), dtype)
        for factor in before.factors
    ]
    assert real.error(A @ B) < 1.03 * before.error
    assert real.error(A @ B) < real.error(nearest[0] @ nearest[1])


@pytest.mark.parametrize("exponent", [-100, 90])
def test_weights_of_any_size(exponent: int, small: None) -> None:
    problem, scale = make_problem(), 2.0**exponent
    usual = DoubleSparse()(problem, TwoFactors(0.5))
    other = DoubleSparse()(LayerProblem(problem.W * scale, problem.gram), TwoFactors(0.5))
    assert usual.factors
    assert other.factors
    assert other.error == pytest.approx(usual.error, rel=1e-3)
    assert torch.allclose(other.factors[0] @ other.factors[1] / scale, usual.W, rtol=0, atol=1e-9)


def test_a_matrix_of_zeros(small: None) -> None:
    problem = make_problem()
    solution = DoubleSparse()(replace(problem, W=torch.zeros_like(problem.W)), TwoFactors(0.5))
    assert not solution.W.any()
    assert solution.error == 0


def test_its_steps_are_reported(small: None) -> None:
    seen: list[tuple[int, int, float]] = []
    solution = DoubleSparse(rounds=5)(make_problem(), TwoFactors(0.5), lambda *step: seen.append(step))
    assert [step[:2] for step in seen] == [(number, 6) for number in range(1, 7)]
    assert seen[-1][2] == pytest.approx(solution.error, rel=0.2)


@pytest.mark.parametrize(
    ("shape", "sparsity"), [((576, 576), 0.5), ((1536, 576), 0.7), ((192, 576), 0.123), ((64, 65), 0.0)], ids=str
)
def test_the_bytes_of_one_matrix(shape: tuple[int, int], sparsity: float) -> None:
    rows, columns = shape
    left, right = TwoFactors(sparsity).kept_in_factors(shape)
    inner = min(shape)
    two = 16 * (left + right) + rows * inner + inner * columns
    one = 16 * (rows * columns - round(sparsity * rows * columns)) + rows * columns
    assert one - 16 < two <= one
    assert (left < right) == (rows < columns)


def test_names() -> None:
    assert str(TwoFactors(0.5)) == "two-factors:0.5"
    assert make_pattern("two-factors:60%", Unstructured) == TwoFactors(0.6)
    assert make_solver("double-sparse:rounds=24") == DoubleSparse(rounds=24)
    assert SOLVERS["double-sparse"] == DoubleSparse()


@pytest.mark.parametrize("shape", [(63, 64), (512, 32)], ids=str)
def test_matrices_that_are_too_small(shape: tuple[int, int]) -> None:
    with pytest.raises(PatternError, match=rf"matrix of {shape[0]} x {shape[1]} is too small for two-factors:0\.5"):
        DoubleSparse()(make_problem(rows=shape[0], columns=shape[1]), TwoFactors(0.5))


def test_bytes_that_the_masks_take() -> None:
    with pytest.raises(PatternError, match="leaves a matrix of 64 x 64 fewer than 128 weights for its square factor"):
        TwoFactors(0.95).check((64, 64))


@pytest.mark.parametrize("name", sorted(set(SOLVERS) - {"double-sparse"}))
def test_other_solvers_make_no_factors(name: str) -> None:
    with pytest.raises(PatternError, match=r"only the solver double-sparse makes two-factors:0\.5"):
        SOLVERS[name](make_problem(), TwoFactors(0.5))


@pytest.mark.parametrize("solver", [DoubleSparse(), MaskThenUpdate(Wanda(), DoubleSparse())], ids=str)
def test_it_makes_nothing_else(solver: DoubleSparse | MaskThenUpdate) -> None:
    with pytest.raises(PatternError, match="makes two factors, and 2:4 is a pattern of one matrix"):
        solver(make_problem(), NM(2, 4))


def test_scores_are_chosen_by_degrees() -> None:
    """theta has half of its weight, and without a threshold all stay."""
    from niwaki.layer.solvers.double_sparse import _chosen

    V = torch.tensor([[1.0, -2.0, 4.0, 0.0]])
    expected = [1 / 2**5 / (1 + 1 / 2**5), -1.0, 4 * 32 / 33, 0.0]
    assert torch.allclose(_chosen(V.clone(), 1, 5.0), torch.tensor([expected]))
    assert torch.equal(_chosen(V.clone(), 4, 5.0), V)
    assert torch.equal(_chosen(V.clone(), 2, None), torch.tensor([[0.0, -2.0, 4.0, 0.0]]))
    assert math.isfinite(float(_chosen(torch.zeros(2, 3), 2, 5.0).sum()))


@pytest.mark.parametrize("shape", [(64, 1024), (1024, 64), (64, 2048)], ids=str)
def test_long_matrices(shape: tuple[int, int]) -> None:
    """A square factor has no more weights than places, and the other one gets what is left."""
    problem = make_problem(rows=shape[0], columns=shape[1], dtype=torch.float32, tokens=2 * shape[1])
    counts = TwoFactors(0.5).kept_in_factors(shape)
    assert min(counts) == 64 * 64
    solution = DoubleSparse(rounds=4)(problem, TwoFactors(0.5))
    assert solution.factors
    assert tuple(int(factor.count_nonzero()) for factor in solution.factors) == counts
    assert solution.error < 0.6


def test_weights_that_count_for_nothing_are_zero() -> None:
    """With few weights some columns of one factor have no row of the other: they may be of any size."""
    solution = DoubleSparse()(make_problem(rows=128, columns=128, dtype=torch.float32), TwoFactors(0.86))
    assert solution.factors
    left, right = solution.factors
    alone = (left.abs().sum(dim=0) > 0) != (right.abs().sum(dim=1) > 0)
    assert not alone.any()
    assert max(float(factor.abs().max()) for factor in solution.factors) < 1e3
