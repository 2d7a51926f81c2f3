"""Solvers that only choose a mask, against slow references written from their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from niwaki.errors import PatternError, UsageError
from niwaki.layer.patterns import NM, Fixed, Pattern, PerRow, Unstructured
from niwaki.layer.problem import Gram, LayerProblem
from niwaki.layer.solvers import Wanda
from niwaki.layer.solvers.dsnot import DSnoT
from niwaki.layer.solvers.obs import OBSSaliency
from niwaki.layer.solvers.ria import RIA
from support.covering import covered
from support.problems import (
    DEAD,
    KINDS,
    gram,
    inputs,
    least_squares,
    lowest_go_in_matrix,
    make_problem,
    normal,
    squared_error,
)

ROWS, COLUMNS = 23, 32


class TestRIA:
    @pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
    @pytest.mark.parametrize("kind", KINDS)
    def test_scores(self, kind: str, power: float) -> None:
        X = inputs(kind, COLUMNS, seed=1)
        W = normal(ROWS, COLUMNS, seed=1)
        W[4] *= 0.01  # a row and a column that magnitude would lose as a whole
        W[:, 6] *= 0.01
        scores = torch.zeros_like(W)
        size, norms = W.abs().tolist(), X.norm(dim=0).tolist()
        for i in range(ROWS):
            for j in range(COLUMNS):
                in_row = size[i][j] / sum(size[i])
                in_column = size[i][j] / sum(row[j] for row in size)
                scores[i, j] = (in_row + in_column) * norms[j] ** power if norms[j] else 0.0
        solution = RIA(power)(LayerProblem(W, gram(X)), Unstructured(0.6))
        expected = lowest_go_in_matrix(scores, round(0.6 * W.numel()))
        assert torch.equal(solution.mask, expected)
        assert torch.equal(solution.W, W * expected + 0.0)

    def test_rows_and_columns_of_zeros(self) -> None:
        problem = make_problem()
        problem.W[2] = 0.0
        problem.W[:, 5] = 0.0
        mask = RIA()(problem, Unstructured(0.3)).mask
        assert not mask[2].any()
        assert not mask[:, 5].any()
        assert int((~mask).sum()) == round(0.3 * mask.numel())


class TestOBS:
    @pytest.mark.parametrize("damping", [0.0, 0.01, 1.0])
    def test_score_is_the_loss_after_refitting_the_others(self, damping: float) -> None:
        """The definition of Hassibi & Stork, by one regression for each weight of the matrix."""
        problem = make_problem(rows=5, columns=12, seed=2)
        W = problem.W
        H = problem.gram.H + damping * problem.gram.H.diagonal().diag()
        losses = torch.zeros_like(W)
        for j in range(12):
            others = torch.ones_like(W, dtype=torch.bool)
            others[:, j] = False
            best = least_squares(H, W, others)
            for i in range(5):
                losses[i, j] = squared_error(W[i : i + 1], best[i : i + 1], H)
        for sparsity in (0.2, 0.5, 0.8):
            solution = OBSSaliency(damping)(problem, Unstructured(sparsity))
            expected = lowest_go_in_matrix(losses, round(sparsity * W.numel()))
            assert torch.equal(solution.mask, expected)
            assert torch.equal(solution.W, W * expected + 0.0)
            assert solution.stats == {"damping": pytest.approx(damping, rel=1e-9, abs=1e-12), "damping_asked": damping}

    def test_scores_are_magnitudes(self) -> None:
        """sqrt(L), because a pattern keeps the greatest sum of the squares of its scores."""
        problem = make_problem()
        spy = Spy(0.5)
        OBSSaliency(0.1)(problem, spy)
        H = problem.gram.H
        norm = H.diagonal().sqrt()
        inverse = torch.linalg.inv(H / norm / norm[:, None] + 0.1 * torch.eye(COLUMNS).double())
        expected = problem.W.abs() * norm / inverse.diagonal().sqrt()
        assert torch.allclose(spy.seen[0], expected, rtol=1e-10)

    @pytest.mark.parametrize("damping", [0.0, 0.01])
    def test_dead_inputs_go_first_and_ask_for_no_damping(self, damping: float) -> None:
        problem = make_problem("dead input")
        problem.W[:, DEAD] *= 1000.0
        solution = OBSSaliency(damping)(problem, Unstructured(0.2))
        assert not solution.mask[:, DEAD].any()
        assert solution.stats["damping"] == damping
        # The score of the live weights is that of the problem without the dead inputs.
        live = [j for j in range(COLUMNS) if j not in DEAD]
        spies = Spy(0.2), Spy(0.2)
        OBSSaliency(damping)(problem, spies[0])
        H = problem.gram.H[live][:, live]
        OBSSaliency(damping)(LayerProblem(problem.W[:, live], H), spies[1])
        assert torch.allclose(spies[0].seen[0][:, live], spies[1].seen[0], rtol=1e-9)


class Spy(Unstructured):
    """Remembers the scores it was given."""

    def __init__(self, sparsity: float) -> None:
        super().__init__(sparsity)
        object.__setattr__(self, "seen", [])

    seen: list[Tensor]

    def mask(self, scores: Tensor) -> Tensor:
        self.seen.append(scores.clone())
        return super().mask(scores)


def off_centre(kind: str = "correlated", seed: int = 0, rows: int = ROWS) -> tuple[Tensor, LayerProblem]:
    """Inputs whose means are of the size of their spread, and a problem with them."""
    X = inputs(kind, COLUMNS, seed)
    X = X + X.std(dim=0) * normal(COLUMNS, seed=seed + 9)
    return X, LayerProblem(normal(rows, COLUMNS, seed=seed), Gram(gram(X), mean=X.mean(dim=0)))


def dsnot_row(
    w: Tensor,  # (in,)
    X: Tensor,  # (tokens, in)
    start: Tensor,  # (in,) bool
    width: int,
    cycles: int,
    threshold: float,
) -> Tensor:
    """One row of DSnoT, from the inputs themselves, candidate by candidate."""
    n, kept = len(w), start.tolist()
    shift = (X * w).mean(dim=0).tolist()
    growth = (w * X.mean(dim=0) / X.var(dim=0, unbiased=False)).tolist()
    importance = (w.abs() * X.square().mean(dim=0).sqrt()).tolist()
    scale = math.sqrt(sum(score**2 for score in importance))
    for _ in range(cycles):
        error = sum(shift[k] for k in range(n) if not kept[k])
        if abs(error) <= threshold * scale:
            break
        sign = 1 if error > 0 else -1
        pairs = []
        for i in range(n):
            group = range(i - i % width, i - i % width + width)
            leaving = [j for j in group if kept[j] and sign * shift[j] < 0]
            if not kept[i] and leaving and sign * growth[i] > 0:
                pairs.append((sign * growth[i], i, min(leaving, key=lambda j: importance[j])))
        if not pairs:
            break
        _, i, j = max(pairs)
        if abs(error - shift[i] + shift[j]) >= abs(error):
            break
        kept[i], kept[j] = True, False
    return torch.tensor(kept)


class TestDSnoT:
    @covered
    @pytest.mark.parametrize("solver", [DSnoT(), DSnoT(cycles=2), DSnoT(threshold=0.0), DSnoT(threshold=0.1)])
    @pytest.mark.parametrize("pattern", [PerRow(0.6), Unstructured(0.4), NM(2, 4), NM(4, 8)], ids=str)
    @pytest.mark.parametrize("kind", ["correlated", "dead input", "few tokens"])
    def test_is_the_loop(self, kind: str, pattern: Pattern, solver: DSnoT) -> None:
        X, problem = off_centre(kind)
        wanda = Wanda()(problem, pattern).mask
        width = pattern.m if isinstance(pattern, NM) else COLUMNS
        expected = torch.stack(
            [
                dsnot_row(w, X, start, width, solver.cycles, solver.threshold)
                for w, start in zip(problem.W, wanda, strict=True)
            ]
        )
        solution = solver(problem, pattern)
        assert not torch.equal(expected, wanda)
        assert torch.equal(solution.mask, expected)
        assert torch.equal(solution.W, problem.W * expected)
        # A weight that came back may have been exchanged again.
        assert int(solution.stats["exchanges"]) >= int((expected ^ wanda).sum()) / 2
        before, after = (((problem.W * ~mask) @ X.mean(dim=0)).norm() for mask in (wanda, expected))
        assert solution.stats["mean_error"] == pytest.approx(float(after / before), rel=1e-6)

    @pytest.mark.parametrize("size", [1, 0], ids=["a mean of zero", "a text that never reaches it"])
    def test_nothing_to_do(self, size: int) -> None:
        problem = make_problem()
        problem = LayerProblem(problem.W, Gram(problem.gram.H * size, mean=torch.zeros(COLUMNS).double()))
        solution = DSnoT()(problem, PerRow(0.5))
        assert torch.equal(solution.mask, Wanda()(problem, PerRow(0.5)).mask)
        assert solution.stats == {"exchanges": 0, "mean_error": 0.0}

    def test_nothing_to_grow_where_there_is_something_to_prune(self) -> None:
        """The second group could grow but not prune, the first could prune but not grow."""
        W = torch.tensor([[3.0, -0.5, -0.1, -0.2, 2.0, 2.0, 1.9, 1.8]])
        problem = LayerProblem(W, Gram(2 * torch.eye(8), mean=torch.ones(8)))
        start = torch.tensor([[True, True, False, False] * 2])
        solution = DSnoT()(problem, Fixed(start, within=NM(2, 4)))
        assert torch.equal(solution.mask, start)
        # With the whole row to choose from, the first cycle takes 1.9 for -0.5, which is the last.
        whole = DSnoT()(problem, Fixed(start, within=PerRow(0.5))).mask
        assert whole.tolist() == [[True, False, False, False, True, True, True, False]]

    def test_a_constant_input(self) -> None:
        """Its variance is zero or, from rounding, below: it grows first, and nothing is NaN."""
        X, _ = off_centre()
        X[:, 7] = 0.3
        H, mean = gram(X).float(), X.mean(dim=0).float()
        H[7, 7] = mean[7].square() * (1 - 1e-7)
        problem = LayerProblem(normal(ROWS, COLUMNS, seed=0).float(), Gram(H, mean=mean))
        problem.W[3, 7] = 0.0  # and here it has nothing to grow
        start = ~torch.zeros(ROWS, COLUMNS, dtype=torch.bool)
        start[:, 7:20] = False
        solution = DSnoT(cycles=1)(problem, Fixed(start, within=PerRow(13 / 32)))
        grown = solution.mask & ~start
        assert grown[:, 7].any()
        assert grown[3, 8:].any()
        error = ((~start) * problem.W.double()) @ X.mean(dim=0)
        right_sign = error * problem.W[:, 7] > 0
        assert not (grown & right_sign[:, None])[:, 8:].any()

    def test_needs_the_mean(self) -> None:
        with pytest.raises(UsageError, match=r"DSnoT needs the mean of the inputs.*Gram\(H, mean="):
            DSnoT()(LayerProblem(torch.ones(2, 2), torch.eye(2)), PerRow(0.5))

    def test_a_mask_without_freedom(self) -> None:
        _, problem = off_centre()
        fixed = Fixed(normal(ROWS, COLUMNS, seed=1) > 0)
        with pytest.raises(PatternError, match=r"leaves it none.*--pattern 2:4, or in Python Fixed\(mask, within="):
            DSnoT()(problem, fixed)
        with pytest.raises(PatternError, match="has shape"):
            DSnoT()(problem, Fixed(torch.ones(2, 2, dtype=torch.bool), within=PerRow(0.0)))
