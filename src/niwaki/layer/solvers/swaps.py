"""SparseSwaps: exchanges a kept and a pruned weight of a row while that helps; arXiv 2512.10922."""

from dataclasses import dataclass

import torch
from torch import Tensor

from niwaki.layer.patterns import Pattern
from niwaki.layer.problem import LayerProblem, Monitor, Normalized, Solution
from niwaki.layer.solvers._base import Solver, at_least, exchange_width, product

#: Bytes for the costs of the exchanges that are compared together.
_CHUNK = 2**25


@dataclass(frozen=True)
class Swaps(Solver):
    """SparseSwaps: improves a mask by the best exchange in each row, again and again; the weights stay as they are.

    For a row w with mask m, let d = w * (1 - m) be what is pruned, and c = H d. The loss is d^T H d, and an exchange
    that prunes u and keeps p changes it by

        a_u + a_p - 2 w_u w_p H_up,    a_u = 2 w_u c_u + w_u^2 H_uu,    a_p = -2 w_p c_p + w_p^2 H_pp.

    In each step every row makes its best exchange if the change is negative; then c += w_u H_:u - w_p H_:p. A row ends
    when no change is negative, or after ``iterations`` exchanges; ``stats["rows_at_limit"]`` is the number of rows that
    reach this limit, and ``stats["converged"]`` is 1 if there are none. Pairs are within a group for n:m, and otherwise
    within a row, which keeps its number of zeros. An update of the weights can follow: ``wanda+swaps+exact``.

    Differences from the paper:

    1. Without structure, rows keep the numbers of zeros that they begin with, which need not be equal.
    2. The coordinates are those in which H has unit diagonal, so that all costs of a row are of similar size.
    3. An exchange must gain more than 16 rounding errors of the row's first loss, so that the loss falls in floating
       point too.

    Cost: for each row and step a few operations per pair; the pairs are (pruned or kept weights, whichever are fewer) x
    in, or in x m for n:m; 2 out in^2 at the start. Memory for three copies of W and a chunk.
    Reference: Zimmer et al. 2025, arXiv 2512.10922.
    """

    iterations: int = at_least(1, 100)

    def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
        scaled = Normalized(problem)
        W, H = scaled.W, scaled.new_H()
        width = exchange_width("swaps", pattern, W.shape[1])
        mask, places = pattern.mask(W.abs()).clone(), pattern.exchangeable
        D = W.masked_fill(mask, 0.0)
        C = D @ H
        floor = (D * C).sum(dim=1) * (16 * torch.finfo(W.dtype).eps)
        # (in / width, width, width): H within each run
        blocks = torch.stack([H[i : i + width, i : i + width] for i in range(0, H.shape[0], width)])
        at_once = max(1, _CHUNK // (W.shape[1] * width * W.element_size()))
        active, swaps = torch.arange(W.shape[0], device=W.device), 0
        for step in range(1, self.iterations + 1):
            improved = []
            for rows in active.split(at_once):
                w, c, kept = W[rows], C[rows], mask[rows]
                signed = torch.where(kept, w, -w)
                A = (2 * signed).mul_(c).addcmul_(w.square(), H.diagonal())
                if places is not None:
                    A.masked_fill_(~places[rows], torch.inf)
                change, u, p = _best(w, A, kept, blocks)
                better = change < -floor[rows]
                rows, pair = rows[better], torch.stack([u, p], dim=1)[better]
                mask[rows[:, None], pair] = ~mask[rows[:, None], pair]
                C[rows] += (signed[better].gather(1, pair).unsqueeze(2) * H[pair]).sum(dim=1)
                improved.append(rows)
            active = torch.cat(improved)
            swaps += len(active)
            scaled.report(monitor, step if len(active) else self.iterations, self.iterations, W, mask)
            if not len(active):
                break
        at_limit = len(active)
        return problem.solution(problem.W, mask, swaps=swaps, converged=int(not at_limit), rows_at_limit=at_limit)

    def flops(self, rows: int, columns: int) -> float:
        """Three products; the search is elementwise and not counted, although it takes most of the time."""
        return 3 * product(rows, columns)


def _best(w: Tensor, A: Tensor, kept: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The best exchange of each row: (change, one column, the other), infinite without one.

    A (rows, in), as ``w``, is what pruning a kept weight or keeping a pruned one changes on its own.
    """
    runs, width, _ = blocks.shape
    rows = torch.arange(len(w), device=w.device)
    if runs == 1:
        # Of kept and pruned the fewer, with their rows of H gathered, against all columns.
        few = kept if 2 * int(kept.count_nonzero()) <= kept.numel() else ~kept
        size = max(1, int(few.sum(dim=1).max()))
        first = few.byte().argsort(dim=1, descending=True, stable=True)[:, :size]
        T = blocks[0].index_select(0, first.flatten()).view(len(w), size, width)
        T.mul_(w.gather(1, first).mul_(-2).unsqueeze(2))
        torch.addcmul(A.masked_fill(few, torch.inf).unsqueeze(1), T, w.unsqueeze(1), out=T)
        # The minimum with its index takes many times longer than without, so it is found in one row only.
        change, i = T.amin(dim=2).add_(A.masked_fill(~few, torch.inf).gather(1, first)).min(dim=1)
        return change, first[rows, i], T[rows, i].argmin(dim=1)
    of_run = (len(w), runs, width)
    T = blocks * w.view(of_run).mul(-2).unsqueeze(3)  # (rows, runs, width, width): kept x pruned
    torch.addcmul(A.masked_fill(kept, torch.inf).view(of_run).unsqueeze(2), T, w.view(of_run).unsqueeze(2), out=T)
    T.add_(A.masked_fill(~kept, torch.inf).view(of_run).unsqueeze(3))
    change, i = T.amin(dim=3).flatten(1).min(dim=1)
    return change, i, i // width * width + T.flatten(1, 2)[rows, i].argmin(dim=1)
