"""OBC: greedy removal of one weight of each row after another, for small matrices; arXiv 2208.11580."""

from dataclasses import dataclass

import torch
from torch import Tensor

from niwaki.errors import NumericalError, UsageError
from niwaki.layer.linalg import inverse_of_damped
from niwaki.layer.patterns import Pattern
from niwaki.layer.problem import LayerProblem, Monitor, Normalized, Solution
from niwaki.layer.solvers._base import Solver, above_0, at_least, product

#: What a monitor counts: twentieths of the removals.
_STEPS = 20


@dataclass(frozen=True)
class OBC(Solver):
    """Removes one weight after another, always the cheapest, and compensates exactly for each; for small matrices.

    With unit diagonal, for a row w of W0, with C the inverse of H + lambda I over the weights that remain (eqs. 3, 4):

        p = argmin w_p^2 / C_pp,    w -= C_:p w_p / C_pp,    C -= C_:p C_p: / C_pp

    so w is always the exact solution for the weights that remain. In each step the pattern chooses a mask from sqrt(w^2
    / C_ii), with removed weights below all others, and each row removes the cheapest of its remaining weights that the
    mask prunes, until none of these are left. The result is, for

        n:m, per row     the paper's greedy choice: in each row the cheapest weight whose group, or row, is not full
        unstructured     near the global greedy choice over all rows (benchmarks/LOG.md); the same where removals
                         make the other weights of a row no cheaper
        a given mask     the exact refit on it, as Exact

    Differences from the paper:

    1. C is not stored. With g_t = C_:p / sqrt(C_pp) at step t, C = (H + lambda I)^-1 - sum_t g_t g_t^T, of which only
       the diagonal and one column per step are needed: half the traffic or less, and k/in of the memory for k removals.
    2. Without structure, the paper traces all rows to the end and picks among the traces. Here no more is removed than
       the pattern asks for, and all patterns are treated in the same way.
    3. The coordinates are normalized, so damping and ties do not depend on the sizes of the inputs.

    Cost: out in k^2 for k removals per row, at most out in^3, and in^3 for the inverse; memory of out k in, at most
    ``memory`` GiB (without structure, k is estimated from the first mask).
    Reference: Frantar & Alistarh 2022, arXiv 2208.11580, section 4; the code is github.com/IST-DASLab/OBC.
    """

    damping: float = at_least(0, 0.01)
    memory: float = above_0(4.0)

    def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
        scaled = Normalized(problem)
        key = ("obc", self.damping)
        inverse, used = scaled.gram.derived(key, lambda: inverse_of_damped(scaled.gram.live, self.damping))
        W = scaled.W.clone()
        diagonal = inverse.diagonal().expand_as(W).clone()
        removed = torch.zeros_like(W, dtype=torch.bool)
        mask = pattern.mask((W.square() / diagonal).sqrt_())
        zeros = (~mask).sum(dim=1)
        total, done, step = int(zeros.sum()), 0, 0
        G = self._allocate(W, int(zeros.max()))
        while done < total:
            saliency = W.square().div_(diagonal)
            mask = pattern.mask(saliency.sqrt().masked_fill_(removed, -1.0))
            cheapest, p = saliency.masked_fill_(mask | removed, torch.inf).min(dim=1, keepdim=True)
            active = cheapest < torch.inf  # (out, 1), as p
            if not active.any():
                raise NumericalError("obc met infinite scores: weights or inputs differ too much in size; scale them")
            if step == G.shape[1]:
                G = torch.cat([G, torch.empty_like(G[:, : 1 + step // 8])], dim=1)
            # C_:p / sqrt(C_pp), in rows that remove nothing zero
            past = G[:, :step]
            coefficients = past.gather(2, p.unsqueeze(2).expand(-1, step, 1)).mT
            g = inverse[p.squeeze(1)].sub_(torch.bmm(coefficients, past).squeeze(1))
            pivot = diagonal.gather(1, p).sqrt_()
            g.div_(pivot).masked_fill_(~active, 0.0)
            G[:, step] = g
            removed.scatter_(1, p, removed.gather(1, p) | active)
            W.addcmul_(g, W.gather(1, p).div_(pivot), value=-1).masked_fill_(removed, 0.0)
            # 1 / C_ii is at most the diagonal of H + lambda I; rounding must not take it beyond.
            diagonal.addcmul_(g, g, value=-1).clamp_(min=1 / (1 + used))
            step += 1
            before, done = done, done + int(active.count_nonzero())
            if _STEPS * before // total != _STEPS * done // total:
                scaled.report(monitor, _STEPS * done // total, _STEPS, W, ~removed)
        return problem.solution(scaled.restore(W), ~removed, damping=used, damping_asked=self.damping)

    def flops(self, rows: int, columns: int) -> float:
        """An upper bound, for the removal of all weights: at sparsity s, only s^2 of the first term is needed."""
        return rows * columns**3 + columns**3 + 2 * product(rows, columns)

    def _allocate(self, W: Tensor, removals: int) -> Tensor:
        """(out, removals, in), uninitialized."""
        rows, columns = W.shape
        needed = rows * removals * columns * W.element_size()
        if needed > self.memory * 2**30:
            raise UsageError(
                f"obc needs {needed / 2**30:.3g} GiB for {rows} x {columns} weights at this sparsity, and its memory "
                f"is {self.memory:.3g} GiB ({rows * removals**2 * columns:.1e} operations); try "
                f"memory={needed / 2**30 + 0.1:.1f}, or a solver that needs less, such as continuation"
            )
        return W.new_empty(rows, removals, columns)
