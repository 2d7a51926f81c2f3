"""SparseGPT: one sweep of optimal-brain-surgeon updates over the columns; arXiv 2301.00774."""

import math
from dataclasses import dataclass

import torch

from niwaki.layer.linalg import inverse_upper_cholesky
from niwaki.layer.patterns import Pattern
from niwaki.layer.problem import LayerProblem, Monitor, Solution
from niwaki.layer.solvers._base import Solver, at_least, product


@dataclass(frozen=True)
class SparseGPT(Solver):
    """Prunes one column after another and compensates for each in the columns to its right, in a single sweep.

    With U upper triangular, U^T U = (H + lambda mean(diag H) I)^-1, column j in turn:

        mask at the start of each group of columns: the pattern's of  |W_ij| / U_jj
        E_j = (W_j - M_j W_j) / U_jj,    W_k -= E_j U_jk  for k > j,    W_j = M_j W_j

    U_jj^2 is the j-th diagonal entry of the inverse of the Hessian of the columns from j on. Patterns square scores
    themselves, so the score is the root of the paper's.

    Differences from the paper:

    1. Counts are exact over the whole matrix; public code prunes one weight too many in each group.
    2. U comes from one Cholesky factorization of H in reverse order, which is cheaper and loses fewer digits.
    3. If H + damping is not positive definite, the damping grows tenfold until it is (``stats["damping"]``).
    4. Dead inputs keep their weights unless the mask removes them (score 0); public code zeroes them all.

    Cost: in^3 for U and 2 out in^2 / 2 for the updates, plus ``in`` small sequential steps; memory for H, U and two
    copies of W.
    Reference: Frantar & Alistarh 2023, arXiv 2301.00774, algorithm 1.

    ``block_size`` is both the number of columns whose mask is chosen together (the paper's B_s) and the number whose
    updates are applied together to the columns to the right (B), which does not change the result.
    """

    damping: float = at_least(0, 0.01)
    block_size: int = at_least(1, 128)

    separable_rows = True

    def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
        rows, columns = problem.W.shape
        H = problem.gram.H
        mean = H.diagonal().mean().item()
        # Where H is 0 any damping gives the same: no weight makes up for another.
        damping = self.damping * mean if mean else 1.0
        U, used = problem.gram.derived(("sparsegpt", self.damping), lambda: inverse_upper_cholesky(H, damping))
        # Groups of n:m must not be cut by the end of a block.
        width = math.ceil(self.block_size / pattern.group) * pattern.group
        runs = pattern.slices((rows, columns), width)
        start, stop, choose = next(runs)
        # (in, out): a column of W is then contiguous. Of one row, or one column, it would be W itself without a copy.
        W = problem.W.T.clone(memory_format=torch.contiguous_format)
        dead = problem.gram.norm == 0
        M = torch.empty_like(W, dtype=torch.bool)
        pruned = torch.empty_like(W[:width])  # of the block: 1 / U_jj where a weight goes, else 0
        for left in range(0, columns, width):
            right = min(left + width, columns)
            block, among = W[left:right], U[left:right, left:right]
            E = torch.empty_like(block)
            for j in range(right - left):
                if left + j == start:
                    scale = U.diagonal()[start:stop, None]
                    scores = (W[start:stop] / scale).abs_()
                    scores[dead[start:stop]] = 0.0
                    M[start:stop] = choose(scores.T).T
                    torch.div(~M[start:stop], scale, out=pruned[start - left : stop - left])
                    start, stop, choose = next(runs, (columns, columns, choose))
                torch.mul(block[j], pruned[j], out=E[j])
                block[j + 1 :].addr_(among[j, j + 1 :], E[j], alpha=-1)
            W[right:].addmm_(U[left:right, right:].T, E, alpha=-1)
        # Not a rounding error less than asked for.
        used = max(self.damping, used / mean) if mean else self.damping
        return problem.solution(W.T.contiguous(), M.T.contiguous(), damping=used, damping_asked=self.damping)

    def flops(self, rows: int, columns: int) -> float:
        return columns**3 + 2.5 * product(rows, columns)
