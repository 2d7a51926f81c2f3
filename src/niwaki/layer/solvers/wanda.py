"""Wanda: keeps the weights with the largest |weight| x input norm, as they are; arXiv 2306.11695."""

from dataclasses import dataclass

from niwaki.layer.patterns import Pattern, PerRow
from niwaki.layer.problem import LayerProblem, Monitor, Normalized, Solution
from niwaki.layer.solvers._base import Solver


@dataclass(frozen=True)
class Wanda(Solver):
    """Keeps the weights with the largest |weight| x input norm, as they are: a fast baseline without factorizations.

    What = M * W0 with M the pattern's mask of |W_ij| |X_j|_2 (eq. 1). |X_j|_2, the norm of input j over the calibration
    tokens, is sqrt(H_jj) up to a factor. By default each row keeps the same number of weights, as section 3 of the
    paper recommends.

    Differences from the paper:

    1. Counts are exact. Public code rounds the zeros of each row down; benchmarks/LOG.md says what that is worth.

    Cost: one selection; memory for one matrix.
    Reference: Sun et al. 2023, arXiv 2306.11695, eq. 1.
    """

    separable_rows = True

    def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
        return problem.solution(problem.W, pattern.mask(Normalized(problem).W.abs()))

    def default_pattern(self, sparsity: float) -> Pattern:
        return PerRow(sparsity)
