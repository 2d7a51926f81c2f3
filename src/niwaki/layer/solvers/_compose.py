"""The mask of one solver with the weights of another."""

from __future__ import annotations

from dataclasses import dataclass

from niwaki.layer.patterns import Fixed, Pattern
from niwaki.layer.problem import LayerProblem, Monitor, Solution
from niwaki.layer.solvers._base import Solver


@dataclass(frozen=True)
class MaskThenUpdate(Solver):
    """``mask`` chooses which weights stay, ``update`` starts again from the dense ones and fits them.

    Where ``update`` refines masks itself (DSnoT, swaps), the pattern's freedom is still there for it as
    ``Fixed.within``. On the command line it is written ``mask+update``, for more than two from left to right:
    ``wanda+swaps+exact``.
    """

    mask: Solver
    update: Solver

    def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
        mask = self.mask(problem, pattern).mask
        return self.update(problem, Fixed(mask, within=pattern, rows=pattern.rows), monitor)

    @property
    def separable_rows(self) -> bool:
        return self.mask.separable_rows and self.update.separable_rows

    def flops(self, rows: int, columns: int) -> float:
        return self.mask.flops(rows, columns) + self.update.flops(rows, columns)

    def default_pattern(self, sparsity: float) -> Pattern:
        return self.mask.default_pattern(sparsity)
