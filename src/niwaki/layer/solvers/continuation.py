"""Continuation: ADMM on the pattern, with a choice of weights that hardens, then a refit; the default."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from niwaki.layer.linalg import inverse_diagonal, masked_conjugate_gradients, resolvent
from niwaki.layer.patterns import Pattern
from niwaki.layer.problem import LayerProblem, Monitor, Normalized, Solution, damping_for
from niwaki.layer.solvers._base import Solver, above_0, at_least, parameter, product

#: Of H + 0.02 I, relative to the unit diagonal: what one input leaves unexplained by the others.
_METRIC_DAMPING = 0.02
#: The part of the sweeps with the first of the two penalties of the weights.
_SWITCH = 0.6
#: From this number of weights on a part chooses among its own, which saves time.
_OWN_CHOICE = 4096


@dataclass(frozen=True)
class Continuation(Solver):
    """The default solver: ADMM with a soft choice of the mask and a growing penalty, part by part, followed by a refit.

    Damping: H stands for H + lambda diag(h_j g)^(1/2), where h is its diagonal and g the geometric mean of h; lambda is
    ``damping`` plus, if the number of tokens is known, min(0.28, 13 in / tokens). The second term accounts for what few
    tokens do not say about their own kind of text, ``damping`` for texts of other kinds.

    Coordinates: with H of unit diagonal and c_j = 1 / [(H + 0.02 I)^-1]_jj, the part of input j that the others cannot
    replace, W0 is the weights times d and H' = H / (d d^T), where d_j = c_j^(3/8) divided by its geometric mean. A
    weight that is easily replaced then looks small.

    Penalties: gamma_1 .. gamma_k, k = ``sweeps``, rise geometrically from ``penalty_start`` to ``penalty_end``, times
    c^(1/2) (1 - s)^(-1/4) with c the geometric mean of c_j and s the pattern's sparsity.

    Each of the ``parts`` consists of every ``parts``-th group of columns. From W = W0, U = 0, in sweep t = 1..k, with x
    = (t - 1) / (k - 1), for one part after the other:

        W = W0 + (Z - U - W0) R                     its columns, with the present Z and U of all parts
        W = W + (relaxation - 1) (W - Z)
        S = |W + (rho / gamma_t) U|,    theta = the pattern's threshold for S
        P = clamp(1/2 + (S / theta - 1) / (2 e_t), 0, 1),    e_t = softness (1 - x)
        V = W + U,    Z = P * V,    U = V - Z

    where R = rho (H' + rho I)^-1. The first sweep has no W-step. In that sweep, in the last one, and for patterns
    without a threshold, P is the mask. In the first 60 % of the sweeps rho is the gamma at a quarter of the way, in the
    others gamma_k; U is rescaled when rho changes, so that the multiplier rho U stays. At the end the mask is that of
    |Z + U|, and ``finish`` steps of conjugate gradients refit the weights with H' in place of H.

    theta comes from the most recent scores of all parts. From 4,096 weights on, a part has its own theta if groups are
    independent (n:m), and also for unstructured sparsity, with the fraction of its |W0| that the mask prunes.

    Differences from the paper: the method is not published elsewhere; ALPS (arXiv 2406.07831) is the nearest. Boza 2024
    (section 3.4) warns that ADMM with the L0 constraint and one fixed penalty may cycle. To avoid that, with figures in
    benchmarks/LOG.md:

    1. The penalty grows, so that everything settles: that of the choice in every step, at no cost, that of the weights
       once.
    2. Coordinates and penalties follow c_j, which is small where inputs can replace each other.
    3. Parts prevent two columns that can replace each other from both being dropped, or both kept, in the same step.
    4. The soft choice needs half as many sweeps for the same error.
    5. The damping allows for texts other than the one that is calibrated on.

    Cost: 3 in^3 for the inverses and 2 out in^2 for each of ``sweeps + finish`` products, with a selection among the
    weights in each sweep; memory for R and five copies of W, including the problem's.
    Reference: the notation is that of Boza 2024, arXiv 2401.02938, eqs. 5-7.
    """

    sweeps: int = at_least(1, 13)
    parts: int = at_least(1, 4)
    penalty_start: float = above_0(0.3)
    penalty_end: float = 1.0
    softness: float = parameter(0.4, "from 0 to 1", lambda value: 0 <= value <= 1)
    relaxation: float = parameter(1.6, "between 0 and 2", lambda value: 0 < value < 2)
    damping: float = at_least(0, 0.02)
    finish: int = at_least(0, 2)

    separable_rows = True

    def __post_init__(self) -> None:
        super().__post_init__()
        least = f"at least penalty_start ({self.penalty_start:g})"
        self._require("penalty_end", self.penalty_end >= self.penalty_start, least)

    def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
        pattern.check(problem.W.shape)
        damping = damping_for(self.damping, problem.gram)
        damped = LayerProblem(problem.W, problem.gram.damped(damping))
        unexplained, typical = damped.gram.derived("unexplained", lambda: _unexplained(damped))
        order, widths = _interleaved(problem.W.shape[1], pattern.group, self.parts)
        order = order.to(problem.W.device)
        pattern = pattern.reordered(order)
        scaled = Normalized(damped, unexplained.pow(0.375) / typical**0.375, order)
        V, raised = self._swept(scaled, pattern, widths, typical, monitor)
        mask = pattern.mask(V.abs())
        # Of large matrices every copy counts. Of (in, in) there is R or H' at a time, and the problem's H.
        H = scaled.new_H()
        H.diagonal().add_(raised)
        Z, _ = masked_conjugate_gradients(H, scaled.W, V.masked_fill_(~mask, 0.0), mask, self.finish)
        del H, V
        if self.finish:
            steps = self.sweeps + self.finish
            scaled.report(monitor, steps, steps, Z, mask)
        used = damping + raised
        return problem.solution(scaled.restore(Z), scaled.original(mask), damping=used, damping_asked=damping)

    def _swept(
        self, scaled: Normalized, pattern: Pattern, widths: list[int], typical: float, monitor: Monitor | None
    ) -> tuple[Tensor, float]:
        """Z + U after all sweeps, and what was added to the diagonal of H' for it to have factors."""
        W0 = scaled.W
        kept = max(1 - pattern.sparsity, 1 / pattern.weights(W0))  # a mask that is given may keep nothing
        start = self.penalty_start * typical**0.5 * kept**-0.25
        growth = self.penalty_end / self.penalty_start
        # Of (out, in) there are W0, U and Y = Z - U - W0, of which Z is made for a part at a time.
        W0s = W0.split(widths, dim=1)
        Us = [torch.zeros(part.shape, dtype=W0.dtype, device=W0.device) for part in W0s]
        scores = [part.abs() for part in W0s]
        Y = torch.zeros_like(W0)
        Ys = Y.split(widths, dim=1)
        own_choices = pattern.split(scores) if min(map(pattern.weights, scores)) >= _OWN_CHOICE else None
        Ws, Zs = _in_turns(Us), _in_turns(Us)
        if own_choices:
            scores = _in_turns(Us)
        Rs: Sequence[Tensor] = ()
        rho = raised = 0.0
        for sweep in range(self.sweeps):
            done = sweep / max(1, self.sweeps - 1)
            if sweep in (0, math.ceil(_SWITCH * self.sweeps)):
                before, rho = rho, start * growth ** (0.25 if sweep == 0 else 1.0)
                key = ("continuation", rho, pattern.group, self.parts)
                Rs = ()  # before there is another
                R, used = scaled.gram.derived(key, lambda rho=rho: resolvent(scaled.new_H, rho))  # type: ignore[misc]
                Rs, raised = R.split(widths, dim=1), max(raised, used)
                del R
                for U, part in zip(Us, Ys, strict=True):
                    part.add_(U, alpha=1 - before / rho)
                    U.mul_(before / rho)
            gamma = start * growth**done
            softness = self.softness * (1 - done) if sweep else 0.0
            for i, (W, U, Z) in enumerate(zip(Ws, Us, Zs, strict=True)):
                if sweep:
                    torch.add(Ys[i], U, out=Z).add_(W0s[i])
                    torch.addmm(W0s[i], Y, Rs[i], out=W)
                    W.add_(Z.sub_(W), alpha=1 - self.relaxation)
                else:
                    W.copy_(W0s[i])
                torch.add(W, U, alpha=rho / gamma, out=scores[i]).abs_()
                if own_choices:
                    P = _choice(own_choices[i], scores[i : i + 1], 0, softness)
                else:
                    P = _choice(pattern, scores, i, softness)
                V = W.add_(U)
                torch.mul(V, P, out=Z)
                torch.sub(V, Z, out=U)
                torch.sub(Z, U, out=Ys[i]).sub_(W0s[i])
            if monitor is not None:
                V = torch.add(Y, W0).add_(torch.cat(Us, dim=1), alpha=2)
                scaled.report(monitor, sweep + 1, self.sweeps + self.finish, V, pattern.mask(V.abs()))
        return Y.add_(W0).add_(torch.cat(Us, dim=1), alpha=2), raised

    def flops(self, rows: int, columns: int) -> float:
        return 3 * columns**3 + (self.sweeps + self.finish + 2) * product(rows, columns)


def _choice(pattern: Pattern, parts: list[Tensor], i: int, softness: float) -> Tensor:
    """Bool or from 0 to 1: how far each weight of part ``i`` is kept, by the scores of all parts."""
    own, widths = parts[i], [part.shape[1] for part in parts]
    scores = own if len(parts) == 1 else torch.cat(parts, dim=1)
    theta = pattern.threshold(scores)
    if theta is None:
        kept: Tensor = pattern.mask(scores).split(widths, dim=1)[i]
        return kept
    if theta.shape == scores.shape:
        theta = theta.split(widths, dim=1)[i]
    if softness == 0:
        return own > theta
    P: Tensor = own / theta.clamp(min=torch.finfo(own.dtype).tiny)
    return P.sub_(1 - softness).mul_(0.5 / softness).clamp_(0, 1)


def _unexplained(problem: LayerProblem) -> tuple[Tensor, float]:
    """((in,) c_j, their geometric mean); of dead inputs, which no other can explain, the mean."""
    gram = problem.gram
    diagonal, _ = inverse_diagonal(gram.unit, _METRIC_DAMPING)
    live = gram.norm > 0
    c = 1 / diagonal
    typical = float(c[live].log().mean().exp()) if bool(live.any()) else 1.0
    return torch.where(live, c, typical), typical


def _in_turns(parts: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the shapes of ``parts`` that share their memory, for what is only needed of one at a time."""
    memory = torch.empty_like(max(parts, key=Tensor.numel)).view(-1)
    return [memory[: part.numel()].view(part.shape) for part in parts]


def _interleaved(columns: int, group: int, parts: int) -> tuple[Tensor, list[int]]:
    """(order of the columns, widths of the parts): part i has groups i, i + parts, i + 2 parts ..."""
    groups = torch.arange(columns).split(group)
    taken = [torch.cat(groups[i::parts]) for i in range(min(parts, len(groups)))]
    return torch.cat(taken), [len(part) for part in taken]
