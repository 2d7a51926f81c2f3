"""Wanda: keeps the weights with the largest |weight| x input norm, as they are; arXiv 2306.11695."""

from __future__ import annotations

from dataclasses import dataclass

from niwaki.layer.patterns import Pattern, PerRow
from niwaki.layer.problem import LayerProblem, Monitor, Normalised, Solution
from niwaki.layer.solvers._base import Solver, product


@dataclass(frozen=True)
class Wanda(Solver):
    """Keeps the weights with the largest |W_ij| |X_j| and leaves them as they are.

    M = the pattern's mask of |W_ij| |X_j|_2 (eq. 1), What = M * W, with |X_j|_2 the norm of input j
    over the calibration tokens, which is sqrt(H_jj) up to a factor.

    Differences from the paper:

    1. Counts are exact. Public code rounds the zeros of each row down; see :class:`PerRow`.

    Cost: one selection; memory of one matrix.

    Reference: Sun et al. 2023, arXiv 2306.11695, eq. 1. By default the same number of weights per
    output, as its section 3 recommends.
    """

    separable_rows = True

    def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
        return problem.solution(problem.W, pattern.mask(Normalised(problem).W.abs()))

    def flops(self, rows: int, columns: int) -> float:
        return 2 * product(rows, columns)

    def default_pattern(self, sparsity: float) -> Pattern:
        return PerRow(sparsity)
