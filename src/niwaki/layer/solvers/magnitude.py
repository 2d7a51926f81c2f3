"""Magnitude: keeps the largest weights and leaves them as they are; arXiv 1506.02626."""

from dataclasses import dataclass

from niwaki.layer.patterns import Pattern
from niwaki.layer.problem import LayerProblem, Monitor, Solution
from niwaki.layer.solvers._base import Solver


@dataclass(frozen=True)
class Magnitude(Solver):
    """Magnitude pruning, the simplest baseline: keeps the largest weights, as they are, and ignores the text.

    What = M * W0 with M the pattern's mask of |W0|.

    Differences from the paper: none known.

    Cost: one selection.
    Reference: Han et al. 2015, arXiv 1506.02626; Zhu & Gupta 2017, arXiv 1710.01878.
    """

    separable_rows = True

    def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
        return problem.solution(problem.W, pattern.mask(problem.W.abs()))
