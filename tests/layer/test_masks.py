"""Solvers that only choose a mask, against slow references written from their formulas."""

from __future__ import annotations

import pytest
import torch

from niwaki.layer.patterns import Unstructured
from niwaki.layer.problem import LayerProblem
from niwaki.layer.solvers.ria import RIA
from support.problems import (
    KINDS,
    gram,
    inputs,
    lowest_go_in_matrix,
    make_problem,
    normal,
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
