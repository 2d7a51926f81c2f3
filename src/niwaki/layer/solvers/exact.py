"""Exact: the best weights for a mask, one regression for each output."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from niwaki.errors import NumericalError
from niwaki.layer.linalg import NOT_DEFINITE
from niwaki.layer.patterns import Pattern
from niwaki.layer.problem import LayerProblem, Monitor, Normalized, Solution
from niwaki.layer.solvers._base import Solver, above_0, at_least, product

#: The smallest support of a batch relative to its largest: padding costs at most (8/7)^3 = 1.5 times the arithmetic.
_SMALLEST = 7 / 8
#: What a monitor counts: tenths of the rows.
_STEPS = 10


@dataclass(frozen=True)
class Exact(Solver):
    """Fits the weights to a mask exactly: solves a least-squares problem for each row, to which other updates converge.

    With unit diagonal, w0 a row of W0, S the columns that its mask keeps, P the others, and d the change of the kept
    weights:

        minimize  [d, -w0_P] (H + lambda I) [d, -w0_P]^T   gives   (H_SS + lambda I) d = H_SP w0_P,

    and w_S = w0_S + d: one Cholesky factorization of H_SS + lambda I per row. Rows with supports of about the same size
    are solved in batches, padded with the identity.

    If H_SS + lambda I is not positive definite in floating point, the damping of that row grows tenfold until it is,
    and ``stats["damping"]`` has the largest damping. Weights of dead inputs stay. ``stats["residual"]`` is the norm of
    the residuals of the equations above, with the damping that was used, relative to that of their right-hand sides.

    Differences from a paper: none known; this is least squares. It solves for the change because that has smaller
    numbers to round than the weights. Iterative refinement gains nothing (benchmarks/LOG.md).

    Cost: sum over rows of k^3 / 3 for support k, one product 2 out in^2, and up to as much for the residual; memory for
    two copies of W, one of H, and a batch: at most ``memory`` GiB, or one row.
    """

    damping: float = at_least(0, 0.01)
    memory: float = above_0(1.0)

    def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
        scaled = Normalized(problem)
        W = scaled.W
        mask = pattern.mask(W.abs())
        rows, columns = W.shape
        # One more column, of zeros: what the padding of short supports refers to.
        B = torch.nn.functional.pad(W.masked_fill(mask, 0.0) @ scaled.new_H(), (0, 1))  # (out, in + 1): w0_P H_P:
        H = torch.nn.functional.pad(problem.gram.live(), (0, 1, 0, 1))
        V = torch.nn.functional.pad(W, (0, 1))
        sizes, order = mask.sum(dim=1).sort(descending=True, stable=True)
        largest, reported = self.damping, 0
        missed, asked = W.new_zeros(2, dtype=torch.float64)
        for start, stop in self._batches(sizes.tolist(), columns, W.element_size()):
            batch = order[start:stop]
            size = int(sizes[start])
            # Where the kept columns come first, in their order; past a row's own support, the padding.
            support = mask[batch].byte().argsort(dim=1, descending=True, stable=True)[:, :size]
            padding = torch.arange(size, device=W.device) >= sizes[start:stop, None]
            support.masked_fill_(padding, columns)
            # Whole rows first, then columns: four times faster than indexing both at once.
            A = H.index_select(0, support.flatten()).view(*support.shape, columns + 1)
            A = A.gather(2, support.unsqueeze(1).expand(-1, size, -1))
            A.diagonal(dim1=1, dim2=2).add_(padding.to(W.dtype) + self.damping)
            b = B[batch].gather(1, support)
            change, used = self._solve(A, b, columns)
            missed += torch.bmm(A, change.unsqueeze(2)).squeeze(2).sub_(b).square().sum(dtype=torch.float64)
            asked += b.square().sum(dtype=torch.float64)
            V[batch] = V[batch].scatter_add_(1, support, change)
            largest = max(largest, used)
            if reported != (reported := _STEPS * stop // rows):
                scaled.report(monitor, reported, _STEPS, V[:, :columns], mask)
        residual = math.sqrt(float(missed / asked)) if asked > 0 else 0.0
        stats = {"damping": largest, "damping_asked": self.damping, "residual": residual}
        return problem.solution(scaled.restore(V[:, :columns]), mask, **stats)

    def flops(self, rows: int, columns: int) -> float:
        """An upper bound, for supports of all columns: at sparsity s, only (1 - s)^3 of the first term is needed."""
        return rows * columns**3 / 3 + 4 * product(rows, columns)

    def _batches(self, sizes: list[int], columns: int, itemsize: int) -> Iterator[tuple[int, int]]:
        """(start, stop) of runs of rows whose supports, in descending order, have about the same size."""
        start = 0
        while start < len(sizes):
            size = sizes[start]
            # The gathered rows of H, the matrix and its factor.
            of_row = max(1, size * (columns + 1 + 2 * size) * itemsize)
            most = start + max(1, int(min(len(sizes), self.memory * 2**30 / of_row)))
            stop = start + 1
            while stop < min(most, len(sizes)) and sizes[stop] >= _SMALLEST * size:
                stop += 1
            yield start, stop
            start = stop

    def _solve(self, A: Tensor, b: Tensor, columns: int) -> tuple[Tensor, float]:
        """(batch, k): A^-1 b, and the damping that it took, which ``A`` (batch, k, k) has at the end."""
        L, info = torch.linalg.cholesky_ex(A)
        used = self.damping
        # The steps of linalg.damped_cholesky, for the rows that fail.
        step = max(used, columns * torch.finfo(A.dtype).eps)
        while (failed := info.nonzero().squeeze(1)).numel():
            if step > columns:
                raise NumericalError(NOT_DEFINITE)
            step *= 10
            A[failed] += (step - used) * torch.eye(A.shape[1], dtype=A.dtype, device=A.device)
            used = step
            L[failed], info[failed] = torch.linalg.cholesky_ex(A[failed])
        return torch.cholesky_solve(b.unsqueeze(2), L).squeeze(2), used
