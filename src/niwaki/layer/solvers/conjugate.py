"""Conjugate gradients: fits the weights to a mask, all rows side by side, by conjugate gradients."""

from dataclasses import dataclass

from niwaki.layer.linalg import masked_conjugate_gradients
from niwaki.layer.patterns import Pattern
from niwaki.layer.problem import LayerProblem, Monitor, Normalized, Solution
from niwaki.layer.solvers._base import Solver, at_least, product


@dataclass(frozen=True)
class ConjugateGradients(Solver):
    """Fits the weights to a mask by conjugate gradients, for all rows at once: near the exact fit at less cost.

    With unit diagonal, it takes k = ``iterations`` steps from M * W0 on

        minimize  tr((Z - W0) (H + lambda I) (Z - W0)^T)   over Z = M * Z

    where each row is a quadratic problem of its own with its own step lengths:

        R = M * ((W0 - Z) (H + lambda I)),   P = R + beta P,   Z = Z + alpha P

    ``stats["residual"]`` is the norm of R at the end relative to the start. 20 steps are as good
    as 200 (benchmarks/LOG.md).

    Differences from the paper:

    1. The mask restricts the paper's method to the rows and columns of H for the weights that a row keeps, without a
       copy.
    2. The unit diagonal of H has the effect of Jacobi's preconditioner; ALPS (algorithm 2) ends with the same steps.

    Cost: 2 out in^2 for each of k + 1 steps and no factorization; memory for H + lambda I and six copies of W.
    Reference: Hestenes & Stiefel 1952, "Methods of conjugate gradients for solving linear systems".
    """

    iterations: int = at_least(1, 10)
    damping: float = at_least(0, 0.01)

    def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
        scaled = Normalized(problem)
        W0, H = scaled.W, scaled.new_H(self.damping)
        mask = pattern.mask(W0.abs())
        Z, residual = masked_conjugate_gradients(H, W0, W0.masked_fill(~mask, 0.0), mask, self.iterations)
        scaled.report(monitor, self.iterations, self.iterations, Z, mask)
        stats = {"damping": self.damping, "damping_asked": self.damping, "residual": residual}
        return problem.solution(scaled.restore(Z), mask, **stats)

    def flops(self, rows: int, columns: int) -> float:
        return (self.iterations + 3) * product(rows, columns)
