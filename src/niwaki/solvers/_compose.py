"""The mask of one solver with the weights of another."""

from __future__ import annotations

from dataclasses import dataclass

from niwaki.patterns import Fixed, Pattern
from niwaki.problem import LayerProblem, Monitor, Solution
from niwaki.solvers._base import Solver


@dataclass(frozen=True)
class MaskThenUpdate(Solver):
    """``mask`` chooses which weights stay, ``update`` starts again from the dense ones and fits them.

    This is the paper's table 2 (mask selection x weight update).

    Attributes:
        mask: The solver whose mask is used, and whose weights are not.
        update: The solver that is given the mask as a ``Fixed`` pattern.
    """

    mask: Solver
    update: Solver

    def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
        return self.update(problem, Fixed(self.mask(problem, pattern).mask), monitor)
