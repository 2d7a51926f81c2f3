"""Gradient descent on the weights of a mask: Adam, or SGD with momentum."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from niwaki.errors import NumericalError
from niwaki.layer.patterns import Pattern
from niwaki.layer.problem import LayerProblem, Monitor, Normalized, Solution
from niwaki.layer.solvers._base import Solver, above_0, at_least, parameter, product

Method = Literal["adam", "sgd"]
BETA_2, EPSILON = 0.999, 1e-8  # Adam's own


@dataclass(frozen=True)
class Descent(Solver):
    """Fits the weights to a mask by gradient descent on the squared error, as AdaPrune does.

    With unit diagonal, from Z = M * W0:

        G = M * ((Z - W0) H)                       half the gradient of tr((Z - W0) H (Z - W0)^T)
        sgd     m = beta m + G,                            Z = Z - eta / lambda_max  m
        adam    m = beta m + (1 - beta) G,   v = 0.999 v + 0.001 G^2,
                Z = Z - eta rms(W0) (m / (1 - beta^t)) / (sqrt(v / (1 - 0.999^t)) + 1e-8 rms(W0))

    with lambda_max the largest eigenvalue of H and rms(W0) the root mean square of the weights, so that eta has no
    unit. ``stats["residual"]``, the norm of G at the end relative to the start, is above 1 if the descent has diverged,
    as SGD does from eta = 2 (1 + beta) on if no weight is pruned.

    Differences from the paper, with figures in benchmarks/LOG.md:

    1. Full gradients from the Gram matrix instead of those of batches of tokens: no noise, and no pass over the tokens.
    2. Coordinates of unit diagonal, in which SGD needs half as many steps, and a relative eta.

    Cost: 2 out in^2 for each of ``iterations + 1`` steps and no factorization; memory for H and four (sgd) or five
    (adam) copies of W.
    Reference: Hubara et al. 2021, arXiv 2102.08124 (AdaPrune); Kingma & Ba 2014, arXiv 1412.6980, algorithm 1.

    ``learning_rate`` is eta (the default 0.1 is for adam, sgd needs 1) and ``momentum`` is beta.
    """

    method: Method = "adam"
    learning_rate: float = above_0(0.1)
    iterations: int = at_least(1, 100)
    momentum: float = parameter(0.9, "0 to below 1", lambda value: 0 <= value < 1)

    def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
        scaled = Normalized(problem)
        W0, H, beta = scaled.W, scaled.new_H(), self.momentum
        mask = pattern.mask(W0.abs())
        Z = W0.masked_fill(~mask, 0.0)
        if self.method == "sgd":
            largest = scaled.gram.derived("largest eigenvalue", lambda: _largest_eigenvalue(H))
            rate = self.learning_rate / (largest or 1.0)
        else:
            size = float(W0.square().mean().sqrt())  # rms(W0)
            rate = self.learning_rate * size
        G = ((Z - W0) @ H).mul_(mask)
        first = float(G.norm())
        m, v = torch.zeros_like(Z), torch.zeros_like(Z)
        # Not torch.optim: its first step imports torch's compiler, 800 modules and two seconds.
        for step in range(1, self.iterations + 1):
            if self.method == "sgd":
                Z.sub_(m.mul_(beta).add_(G), alpha=rate)
            else:
                m.lerp_(G, 1 - beta)
                v.lerp_(G.square_(), 1 - BETA_2)
                root = v.div(1 - BETA_2**step).sqrt_().add_(EPSILON * size or 1.0)
                Z.addcdiv_(m, root, value=-rate / (1 - beta**step))
            G = ((Z - W0) @ H).mul_(mask)
            scaled.report(monitor, step, self.iterations, Z, mask)
        residual = float(G.norm()) / first if first else 0.0
        if not math.isfinite(residual):
            eta = self.learning_rate
            raise NumericalError(f"{self.method} diverged to infinite weights; lower its learning rate ({eta:g})")
        return problem.solution(scaled.restore(Z), mask, residual=residual)

    def flops(self, rows: int, columns: int) -> float:
        return (self.iterations + 3) * product(rows, columns)


def _largest_eigenvalue(H: Tensor, steps: int = 30) -> float:
    """An estimate from below by the power method, from the longest column of H, which it is never under."""
    x = H[:, H.square().sum(dim=0).argmax()]
    for _ in range(steps):
        x = H @ (x / x.norm().clamp(min=torch.finfo(H.dtype).tiny))
    return float(x.norm())
