"""Solvers on problems that are hard for floating point: nothing not finite, no wrong count, no harm."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from niwaki.layer.patterns import NM, Fixed, Pattern, PerRow, Unstructured
from niwaki.layer.problem import Gram, LayerProblem
from niwaki.layer.solvers import SOLVERS, Solver
from support.contract import OF_ONE_MATRIX
from support.covering import FULL
from support.problems import gram, normal

#: Those that leave the weights as they are: what they lose is in the hands of the weights that stay.
MASKS_ONLY = {"magnitude", "wanda", "ria"}
#: Nothing to its right makes up for the last weight that it prunes, so it can lose more than zeros do.
ONE_SWEEP = {"sparsegpt"}
#: Those that go on until they have converged, or a limit is reached, and what they say about it.
SAYS = {
    "alps": ("converged", "residual"),
    "adam": ("residual",),
    "sgd": ("residual",),
    "cg": ("residual",),
    "exact": ("residual",),
}


@dataclass(frozen=True)
class Case:
    """Weights and inputs in float64, of which the solver sees float32."""

    shape: tuple[int, int, int, int]  # rows, columns, tokens, rank
    seed: int
    inputs: str
    pattern: Pattern
    W: Tensor = field(repr=False)  # (out, in)
    X: Tensor = field(repr=False)  # (tokens, in)

    def problem(self) -> LayerProblem:
        return LayerProblem(self.W.float(), Gram(gram(self.X).float(), shared=False))


@st.composite
def cases(draw: st.DrawFn, half: bool = False) -> Case:
    """Problems with all kinds of trouble at once; with ``half`` the inputs are float16 numbers."""
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 16))
    tokens, rank = draw(st.integers(1, 40)), draw(st.integers(1, columns))
    seed, offset = draw(st.integers(0, 2**20)), draw(st.sampled_from([0.0, 0.3, 10.0]))
    column = st.integers(0, columns - 1)
    same = draw(st.lists(st.tuples(column, column), max_size=3))
    exponents = draw(st.lists(st.integers(-6, 6), min_size=columns, max_size=columns) | st.just([0] * columns))
    outliers = draw(st.lists(st.tuples(column, st.sampled_from([1e3, 1e4, 6e4])), max_size=2))
    dead = draw(st.lists(column, max_size=2))

    X = (normal(tokens, rank, seed=seed) + offset) @ normal(rank, columns, seed=seed + 1) / rank**0.5
    for j, k in same:
        X[:, j] = X[:, k]
    if not half:
        X *= 10.0 ** torch.tensor(exponents, dtype=torch.float64)
    for j, size in outliers:
        X[:, j] *= size
    X[:, dead] = 0.0
    if half:
        X = X.clamp(-6e4, 6e4).half().double()

    sparsity = draw(st.sampled_from([0.0, 0.3, 0.5, 0.8, 0.95]))
    given = normal(rows, columns, seed=seed + 2) > draw(st.sampled_from([-0.5, 0.5]))
    patterns: list[Pattern] = [Unstructured(sparsity), PerRow(sparsity), Fixed(given)]
    if columns % 4 == 0:
        patterns.append(NM(2, 4))
    return Case(
        shape=(rows, columns, tokens, rank),
        seed=seed,
        inputs=f"{offset=}, {same=}, {exponents=}, {outliers=}, {dead=}",
        pattern=draw(st.sampled_from(patterns)),
        W=normal(rows, columns, seed=seed + 3),
        X=X,
    )


def check(name: str, solver: Solver, case: Case) -> None:
    problem = case.problem()
    solution = solver(problem, case.pattern)
    What, mask, stats = solution.W, solution.mask, solution.stats

    assert torch.isfinite(What).all()
    assert int((~mask).sum()) == round(case.pattern.sparsity * mask.numel())
    assert (What[~mask] == 0).all()
    assert not torch.signbit(What[~mask]).any()
    if isinstance(case.pattern, NM):
        assert (mask.reshape(-1, 4).sum(dim=1) == 2).all()

    if "damping" in stats:
        assert float(stats["damping"]) >= float(stats["damping_asked"])
    assert set(SAYS.get(name, ())) <= set(stats)

    def lost(W: Tensor) -> Tensor:
        return (case.X @ (case.W - W.double()).T).square().sum() / len(case.X)

    sizes = (case.W.square() * case.X.square().mean(dim=0)).sum()
    if name in MASKS_ONLY:
        assert torch.equal(What[mask], problem.W[mask])
    elif name not in ONE_SWEEP:
        # What damping charges for zeros: it lets a solver lose more than they do, where outputs are small
        # because large weights cancel. Steps that end before convergence do so likewise.
        charge = max(float(stats.get("damping", 0.0)), 0.01) * sizes
        assert lost(What) <= 1.001 * lost(torch.zeros_like(What)) + charge


@pytest.mark.parametrize("name", OF_ONE_MATRIX)
@given(case=cases() | cases(half=True))
@settings(max_examples=100 if FULL else 45)
@pytest.mark.slow
def test_hard_problems(name: str, case: Case) -> None:
    check(name, SOLVERS[name], case)


@pytest.mark.parametrize("name", [name for name in OF_ONE_MATRIX if hasattr(SOLVERS[name], "damping")])
@given(case=cases())
@settings(max_examples=40)
@pytest.mark.slow
def test_hard_problems_without_damping(name: str, case: Case) -> None:
    check(name, replace(SOLVERS[name], damping=0.0), case)  # type: ignore[call-arg]
