"""Continuation: ADMM on the pattern itself, with a penalty that grows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from niwaki.linalg import inverse_of_damped, masked_conjugate_gradients
from niwaki.patterns import Pattern
from niwaki.problem import LayerProblem, Monitor, Normalised, Solution
from niwaki.solvers._base import Solver, product


@dataclass(frozen=True)
class Continuation(Solver):
    """ADMM whose Z-step projects onto the pattern, from soft penalties to hard ones, then a refit.

    In coordinates where H has unit diagonal, with W0 the weights and V = W + U, for k steps:

        M = the pattern's mask of |V|,   Z = M * V,   U = V - Z
        U = U rho / rho',   rho = rho'                       where the penalty goes up
        W = (H + (lambda + rho) I)^-1 ((H + lambda I) W0 + rho (Z - U))

    and at the end conjugate gradients on the weights of the last mask, for the objective with
    H + lambda I in the place of H. With a small penalty the mask is
    free to move while W is still near W0; as rho grows the weights settle on it. The penalty rises
    geometrically from ``rho_start`` to ``rho_end`` in ``levels`` levels. The multiplier y = rho U is what
    has a meaning across levels, so U is rescaled to keep it.

    Differences from the paper: there is none. ADMM with the L0 constraint and one fixed penalty is what
    Boza 2024 (section 3.4) warns may cycle; the growing penalty and the refit are what mends it. ALPS
    (arXiv 2406.07831) is the nearest published method; it adapts rho by the change of the support and
    needs many more steps.

    1. One Cholesky inverse for each level, rather than one eigendecomposition for all and a product for
       each penalty: 8 levels give the error of 40 within 0.3 % (docs/log.md), and 8 inverses cost less
       than an eigendecomposition and 8 products.

    Cost: ``levels`` times in^3 and 2 out in^2 for each of ``iterations + finish`` steps, with a selection
    among the weights in each iteration; memory of R and four copies of W, and of ``levels`` matrices R
    where several matrices share an input.

    Reference: the notation is that of Boza 2024, arXiv 2401.02938, eqs. 5-7.

    Attributes:
        iterations: ADMM steps.
        levels: Different penalties, at most one a step.
        rho_start: The first penalty, relative to the unit diagonal of H.
        rho_end: The last one.
        damping: lambda, likewise.
        finish: Steps of conjugate gradients on the final mask.
    """

    iterations: int = 40
    levels: int = 8
    rho_start: float = 0.1
    rho_end: float = 1.0
    damping: float = 0.01
    finish: int = 10

    def __post_init__(self) -> None:
        self._require("iterations", self.iterations >= 1, "1 or more")
        self._require("levels", 1 <= self.levels <= self.iterations, f"1 to iterations ({self.iterations})")
        self._require("rho_start", self.rho_start > 0, "above 0")
        self._require("rho_end", self.rho_end >= self.rho_start, f"at least rho_start ({self.rho_start:g})")
        self._require("damping", self.damping >= 0, "0 or more")
        self._require("finish", self.finish >= 0, "0 or more")

    def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
        scaled = Normalised(problem)
        W0 = scaled.W
        V = W0.clone()
        steps = self.iterations + self.finish
        level, rho = 0, self.rho_start
        R, used = self._resolvent(scaled, rho)
        for step in range(self.iterations):
            mask = pattern.mask(V.abs())
            U = V.masked_fill(mask, 0.0)
            Y = V.sub_(U)  # Z
            if level != (level := step * self.levels // self.iterations):
                before, rho = rho, self._rho(level)
                U.mul_(before / rho)
                R, used = self._resolvent(scaled, rho)
            V = W0.addmm(Y.sub_(U).sub_(W0), R).add_(U)
            scaled.report(monitor, step + 1, steps, V, mask)
        mask = pattern.mask(V.abs())
        H = scaled.H.clone()
        H.diagonal().add_(used)
        Z = masked_conjugate_gradients(H, W0, V.masked_fill_(~mask, 0.0), mask, self.finish)
        if self.finish:
            scaled.report(monitor, steps, steps, Z, mask)
        return problem.solution(scaled.restore(Z), mask, damping=used, damping_asked=self.damping)

    def flops(self, rows: int, columns: int) -> float:
        products = self.iterations + self.finish + 3
        return self.levels * columns**3 + products * product(rows, columns)

    def _rho(self, level: int) -> float:
        ratio: float = (self.rho_end / self.rho_start) ** (level / max(1, self.levels - 1))
        return self.rho_start * ratio

    def _resolvent(self, scaled: Normalised, rho: float) -> tuple[Tensor, float]:
        """R = rho (H + (lambda + rho) I)^-1 and the lambda that was used."""

        def compute() -> tuple[Tensor, float]:
            inverse, used = inverse_of_damped(scaled.H, self.damping + rho)
            return inverse.mul_(rho), max(0.0, used - rho)

        return scaled.gram.derived(("continuation", self.damping, rho), compute)
