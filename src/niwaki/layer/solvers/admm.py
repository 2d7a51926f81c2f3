"""ADMM for pruning: ADMM1 (mask first) and ADMM-Grad (mask grows while the weights adapt)."""

from dataclasses import dataclass
from typing import Literal

import torch

from niwaki.layer.linalg import resolvent
from niwaki.layer.patterns import Pattern
from niwaki.layer.problem import LayerProblem, Monitor, Normalized, Solution
from niwaki.layer.solvers._base import Solver, above_0, at_least, product

Schedule = Literal["constant", "cubic", "printed"]


@dataclass(frozen=True)
class ADMM(Solver):
    """The alternating direction method of multipliers (ADMM) on the layer problem; the mask is chosen on the way.

    Take it for results as in Boza 2024; :class:`Continuation` has lower errors in about the same time. With unit
    diagonal, V = W + U, and for step t = 1..k of k = ``iterations``, k_s = ``sparsification_steps``:

        M = the pattern's mask of |V| at sparsity s_t     (while t <= k_s; then M stays)
        Z = M * V
        U = V - Z
        W = (H + (lambda + rho) I)^-1 ((H + lambda I) W0 + rho (Z - U))                         (eq. 7)

    and What = M * (W + U) at the end (algorithm 1). ``schedule`` gives s_t, with s_f the pattern's sparsity:

        printed    s_f (t / k_s)^3              as printed in the paper
        cubic      s_f (1 - (1 - t / k_s)^3)    Zhu & Gupta 2017, which the paper cites
        constant   s_f                          as in the published code for patterns other than n:m

    The paper's ADMM1 is k_s = 1: the mask is that of |W0|, which is Wanda's score, and stays.

    Differences from the paper:

    1. W = W0 + (Z - U - W0) R with R = rho (H + (lambda + rho) I)^-1: the same value with one product per step, and
       only the change of the weights is rounded.
    2. The default schedule is ``constant`` for n:m too, where the published code is gradual; see docs/methods.md.
    3. Dead inputs keep their weights unless the mask removes them.

    Cost: in^3 for R, once for matrices with the same input, 2 out in^2 per step, and k_s selections; memory for R and
    four copies of W.
    Reference: Boza 2024, arXiv 2401.02938, algorithm 1 and eqs. 5-7.
    """

    iterations: int = at_least(1, 20)
    sparsification_steps: int = 15
    schedule: Schedule = "constant"
    rho: float = above_0(1.0)
    damping: float = at_least(0, 0.1)

    separable_rows = True

    def __post_init__(self) -> None:
        super().__post_init__()
        possible = 1 <= self.sparsification_steps <= self.iterations
        self._require("sparsification_steps", possible, f"1 to iterations ({self.iterations})")

    def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
        scaled = Normalized(problem)
        key = ("admm", self.damping, self.rho)
        R, used = problem.gram.derived(key, lambda: resolvent(scaled.new_H, self.rho, self.damping))
        W0 = scaled.W
        # Three buffers for all steps, because fresh memory of that size costs page faults each time.
        V, U, Y = W0.clone(), torch.empty_like(W0), torch.empty_like(W0)
        for step in range(1, self.iterations + 1):
            if step <= self.sparsification_steps:
                mask = pattern.partial(self._fraction(step)).mask(torch.abs(V, out=U))
                off = ~mask
            torch.mul(V, off, out=U)
            torch.sub(V, U, alpha=2, out=Y).sub_(W0)  # Z - U - W0
            torch.addmm(W0, Y, R, out=V).add_(U)
            scaled.report(monitor, step, self.iterations, V, mask)
        return problem.solution(scaled.restore(V), mask, damping=used, damping_asked=self.damping)

    def flops(self, rows: int, columns: int) -> float:
        return columns**3 + (self.iterations + 2) * product(rows, columns)

    def _fraction(self, step: int) -> float:
        """s_t / s_f."""
        t = step / self.sparsification_steps
        return {"constant": 1.0, "cubic": 1 - (1 - t) ** 3, "printed": t**3}[self.schedule]
