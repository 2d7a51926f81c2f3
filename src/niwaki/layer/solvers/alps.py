"""ALPS: ADMM on the number of weights, with a penalty that follows the support; arXiv 2406.07831."""

from dataclasses import dataclass

import torch

from niwaki.layer.linalg import eigenvectors, masked_conjugate_gradients
from niwaki.layer.patterns import Pattern
from niwaki.layer.problem import LayerProblem, Monitor, Normalized, Solution
from niwaki.layer.solvers._base import Solver, above_0, at_least, product

#: Steps between two looks at the support.
PERIOD = 3
#: (change of the support relative to the number of kept weights, factor of rho), greatest first.
FACTORS = ((0.1, 1.3), (0.005, 1.2), (0.0, 1.1))


@dataclass(frozen=True)
class ALPS(Solver):
    """ADMM with the pattern as a constraint until the support settles, followed by a refit.

    With unit diagonal, H' = H + lambda I, V = 0, and D initially P(W0), the projection of the weights onto the pattern:

        W = (H' + rho I)^-1 (H' W0 - V + rho D),   D = P(W + V / rho),   V = V + rho (W - D)

    Every 3 steps, with s the number of weights that have entered or left the support of D since, and k the number of
    kept weights,

        rho = 1.3 rho  if s >= 0.1 k,    1.2 rho  if s >= 0.005 k,    1.1 rho  if s >= 1

    and s = 0 ends the loop. What is the result of ``finish`` steps of conjugate gradients from D on its support
    (algorithm 2).

    Differences from the paper:

    1. W = W0 + (H' + rho I)^-1 (rho (D - W0) - V): the same value with one product per step, and none before the first.
    2. There are at most ``iterations`` steps; ``stats["converged"]`` says whether the support settled.
    3. The damping is the same fraction of each input's own H_jj; in the published code it is 1 % of the mean of the
       diagonal before scaling.
    4. The published code also starts over with rho / 5 while the first changes are small, and stops after step 30 if s
       < 0.0003 k. Its mask is that of W at the end; here it is the support of D.

    Cost: about 9 in^3 for the eigendecomposition, once for matrices with the same input, 2 in^3 for each new rho, and 2
    out in^2 and a selection per step; memory for the eigenvectors, for (H' + rho I)^-1, and six copies of W.
    Reference: Meng et al. 2024, arXiv 2406.07831, sections 3.2 and 3.3; the code is github.com/mazumder-lab/ALPS.
    """

    iterations: int = at_least(1, 300)
    rho: float = above_0(0.1)
    damping: float = at_least(0, 0.01)
    finish: int = at_least(0, 10)

    def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
        scaled = Normalized(problem)
        W0, rho, steps = scaled.W, self.rho, self.iterations + self.finish
        H = scaled.new_H(self.damping)
        L, Q = scaled.gram.derived("eigenvectors", lambda: eigenvectors(scaled.new_H))
        L = L + self.damping
        inverse = (Q / (L + rho)) @ Q.T
        mask = before = pattern.mask(W0.abs())
        kept, converged = int(mask.count_nonzero()), False
        D, V = W0.masked_fill(~mask, 0.0), torch.zeros_like(W0)
        for step in range(1, self.iterations + 1):
            W = torch.addmm(W0, (D - W0).mul_(rho).sub_(V), inverse)
            D = torch.add(W, V, alpha=1 / rho)
            mask = pattern.mask(D.abs())
            D.masked_fill_(~mask, 0.0)
            V.add_(W - D, alpha=rho)  # in this order, so that where W is D nothing is rounded
            scaled.report(monitor, step, steps, D, mask)
            if step % PERIOD == 0:
                change = int((mask ^ before).count_nonzero())
                if converged := change == 0:
                    break
                before = mask
                rho *= next(factor for least, factor in FACTORS if change >= least * kept)
                inverse = (Q / (L + rho)) @ Q.T
        residual = float((W - D).norm() / size) if (size := D.norm()) > 0 else 0.0
        Z, _ = masked_conjugate_gradients(H, W0, D, mask, self.finish)
        if self.finish or step < steps:
            scaled.report(monitor, steps, steps, Z, mask)
        progress = {"iterations": step, "converged": int(converged), "residual": residual}
        return problem.solution(scaled.restore(Z), mask, damping=self.damping, damping_asked=self.damping, **progress)

    def flops(self, rows: int, columns: int) -> float:
        inverses = 1 + self.iterations // PERIOD
        products = self.iterations + self.finish + 3
        return (9 + 2 * inverses) * columns**3 + products * product(rows, columns)
