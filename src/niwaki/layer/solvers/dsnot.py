"""DSnoT: exchanges pruned and kept weights until the mean of the output is right; arXiv 2310.08915."""

import math
from dataclasses import dataclass

import torch

from niwaki.errors import UsageError
from niwaki.layer.patterns import Pattern, PerRow
from niwaki.layer.problem import LayerProblem, Monitor, Normalized, Solution
from niwaki.layer.solvers._base import Solver, at_least, exchange_width


@dataclass(frozen=True)
class DSnoT(Solver):
    """Dynamic sparse no training: refines a mask by exchanges within rows and leaves the weights as they are.

    For each row r, with A_k the activations of input k and e_r the mean error of the output,

        e_r = E[(W - M * W) A]_r = sum over pruned k of W_rk E[A_k]

    a cycle grows weight i and prunes weight j. For e_r > 0 (the other sign mirrors both)

        i = argmax over pruned k of  W_rk E[A_k] / Var[A_k]                                      (growing)
        j = argmin over kept k with W_rk E[A_k] < 0 of  |W_rk| |A_k|_2                           (pruning)

    so that both lessen e_r. It begins with Wanda's mask or a given one (``sparsegpt+dsnot``) and needs ``Gram.mean``.

    Differences from the paper, with figures in benchmarks/LOG.md:

    1. A row stops before an exchange that would not reduce |e_r|; otherwise weights would move to and fro around 0. The
       published code continues, but takes no weight twice.
    2. The threshold is relative; the published code's 0.1 is for activations summed over a sequence.
    3. In n:m, i and j are in the same group, and i is the best of the groups that have a j. The published code prunes
       the lowest weight of i's group whatever its sign, and stops when e_r would change its own.
    4. The variance is over all tokens; the published code takes the mean of the variances within the sequences.
    5. All matrices are refined; by default the published code leaves those of the MLP as they are.

    Cost: elementwise work on the rows that have not stopped, some ten passes per cycle; memory for four copies of W.
    Reference: Zhang et al. 2023, arXiv 2310.08915, growing and pruning criteria; the code is github.com/zyxxmu/DSnoT.

    ``cycles`` (the paper's T) is the largest number of exchanges in a row. A row is done when |e_r| is below
    ``threshold`` times the root of sum_k W_rk^2 E[A_k^2].
    """

    cycles: int = at_least(1, 50)
    threshold: float = at_least(0, 0.01)

    def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
        mean = problem.gram.mean
        if mean is None:
            raise UsageError("DSnoT needs the mean of the inputs; make the problem's H a Gram(H, mean=...)")
        scaled = Normalized(problem)
        importance = scaled.W.abs()
        mask, places = pattern.mask(importance).clone(), pattern.exchangeable
        width = exchange_width("DSnoT", pattern, mask.shape[1])
        power = problem.gram.H.diagonal()
        # At least what rounding leaves of E[A^2] - E[A]^2 for an input that is constant.
        variance = torch.maximum(power - mean.square(), power * torch.finfo(power.dtype).eps)
        rate = torch.where(power > 0, mean / torch.where(power > 0, variance, 1.0), 0.0)
        shift = problem.W * mean  # (out, in), what pruning a weight adds to the mean error of its row
        error = shift.masked_fill(mask, 0.0).sum(dim=1)
        first, exchanges = float(error.norm()), 0
        enough = self.threshold * importance.square().sum(dim=1).sqrt_()
        rows = torch.arange(len(error), device=error.device)
        for cycle in range(1, self.cycles + 1):
            rows = rows[error[rows].abs() > enough[rows]]
            if not len(rows):
                break
            kept, sign = mask[rows], error[rows].sign().unsqueeze(1)
            wrong = shift[rows] * sign < 0
            costs = importance[rows].masked_fill_(~(kept & wrong), math.inf)
            lowest, place = costs.view(len(rows), -1, width).min(dim=2)
            closed = lowest.isinf().repeat_interleave(width, dim=1)
            if places is not None:
                closed |= ~places[rows]
            growth = (problem.W[rows] * rate).mul_(sign).masked_fill_(kept | closed, 0.0)
            gain, grown = growth.max(dim=1)
            group = grown // width
            pruned = group * width + place.gather(1, group.unsqueeze(1)).squeeze(1)
            after = error[rows] - shift[rows, grown] + shift[rows, pruned]
            better = (gain > 0) & (after.abs() < error[rows].abs())
            rows, grown, pruned = rows[better], grown[better], pruned[better]
            mask[rows, grown], mask[rows, pruned] = True, False
            error[rows] = after[better]
            exchanges += len(rows)
            scaled.report(monitor, cycle, self.cycles + 1, scaled.W, mask)
        scaled.report(monitor, self.cycles + 1, self.cycles + 1, scaled.W, mask)
        mean_error = float(error.norm()) / first if first else 0.0
        return problem.solution(problem.W, mask, exchanges=exchanges, mean_error=mean_error)

    def default_pattern(self, sparsity: float) -> Pattern:
        return PerRow(sparsity)
