"""Removes whole inputs of a matrix in units, such as those of an attention head, and fits what is left.

Two regressions fit what other removals leave: of one matrix by the moments of its inputs, where blocks are gone, and of
several matrices whose outputs are summed, where experts are.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from niwaki.errors import NumericalError, UsageError
from niwaki.layer.linalg import damped_cholesky, inverse_of_damped, with_unit_diagonal
from niwaki.layer.problem import LayerProblem, Normalized, Solution

#: The ridge, relative to the unit diagonal of H; it keeps weights near the old ones.
DAMPING = 0.01
#: The most steps: of many units several go at a time, which hardly changes the error.
_STEPS = 128


def remove_units(problem: LayerProblem, size: int, count: int, weights: Tensor | None = None) -> Solution:
    """Removes ``count`` units of ``size`` neighbouring columns each, and fits the other columns.

    In coordinates where H has unit diagonal, with R = H + 0.01 I, S the columns that are removed and K the others, the
    best weights without S and their error are

        minimize  tr((W - V) R (W - V)^T)  with V_S = 0:  V_K = W_K + W_S H_SK (R_KK)^-1,
        tr(W_S [(R^-1)_SS]^-1 W_S^T).

    Units go one after the other (in at most 128 steps), each time those that add least to this error. With A = R^-1
    unit u adds tr(V_u (A_uu)^-1 V_u^T), and then V becomes V - V_u (A_uu)^-1 A_u: and A becomes
    A - A_:u (A_uu)^-1 A_u:. In the end V_K is solved for anew, because each of these steps rounds. Inputs that are
    always 0 go first; those of them that stay keep their weights. The choice multiplies the rows of W by ``weights``
    (out,) if these are given: the errors of some outputs count for more. The last solution does not depend on that.

    UsageError if ``size`` does not divide the columns, or nothing would be removed or stay; NumericalError if H cannot
    be factorized, or the result is not finite.

    Cost: 2 in^3 for the inverse, 2 s in (in + out) for s removed columns and at most 128 out in size for what units
    add, and for the last solution (in - s)^3 / 3 + 2 out (in - s) in; memory of three matrices like H and three like W.
    Reference: ZipLM, arXiv 2302.04089, for these formulas, with one unit after the other, no ridge, no last solution.
    """
    return next(removals_of_units(problem, size, [count], weights))


def removals_of_units(
    problem: LayerProblem, size: int, counts: Sequence[int], weights: Tensor | None = None
) -> Iterator[Solution]:
    """:func:`remove_units` for each of ``counts``, in ascending order: the same choice goes on from one to the next.

    It takes the steps of the last one, so what others remove can differ a little from what they would alone.
    """
    columns = problem.W.shape[1]
    units = columns // size
    if columns % size:
        raise UsageError(f"{columns} columns are not a multiple of units of {size}")
    for count in counts:
        if not 0 < count < units:
            raise UsageError(f"of {units} units 1 to {units - 1} can be removed, not {count}")
    scaled = Normalized(problem)
    A, used = inverse_of_damped(problem.gram.live, DAMPING)
    V = scaled.W.clone() if weights is None else scaled.W * weights.to(scaled.W.device).unsqueeze(1)
    for units_kept in [*_greedy(V, A, size, counts)]:
        kept = units_kept.repeat_interleave(size)
        V = scaled.W.masked_fill(~kept, 0.0)
        V[:, kept] += _taken_over(problem.gram.live(), scaled.W, kept, used)
        yield problem.solution(scaled.restore(V), kept.expand_as(V), damping_asked=DAMPING, damping=used)


def flops(rows: int, columns: int, removed: int) -> float:
    """Floating-point operations of :func:`remove_units` for W (rows, columns), of which ``removed`` columns go."""
    kept = columns - removed
    inverse, choice = 2 * columns**3, 2 * removed * columns * (columns + rows)
    return float(inverse + choice + kept**3 / 3 + 2 * rows * kept * columns)


def _taken_over(H: Tensor, W: Tensor, kept: Tensor, damping: float) -> Tensor:
    """(out, kept): W_S H_SK (H_KK + damping I)^-1."""
    L, _ = damped_cholesky(lambda: H[kept][:, kept], damping)
    return torch.cholesky_solve((W[:, ~kept] @ H[~kept][:, kept]).T, L).T


def _greedy(V: Tensor, A: Tensor, size: int, counts: Sequence[int]) -> Iterator[Tensor]:
    """(units,) bool of those to keep, for each of ``counts`` in ascending order; V (out, in) and A (in, in) change."""
    units = len(A) // size
    kept = torch.ones(units, dtype=torch.bool, device=A.device)
    columns = torch.arange(len(A), device=A.device).view(units, size)
    step, removed = -(-counts[-1] // _STEPS), 0
    while removed < counts[-1]:
        blocks = A.view(units, size, units, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
        halves = torch.linalg.solve_triangular(torch.linalg.cholesky(blocks), V.T.reshape(units, size, -1), upper=False)
        costs = halves.square_().sum(dim=(1, 2)).masked_fill_(~kept, torch.inf)
        chosen = costs.argsort(stable=True)[: min(step, min(count for count in counts if count > removed) - removed)]
        S = columns[chosen].flatten()
        taken = torch.cholesky_solve(A[S], torch.linalg.cholesky(A[S][:, S]))  # (A_SS)^-1 A_S:
        V.addmm_(V[:, S], taken, alpha=-1)
        A.addmm_(A[:, S], taken, alpha=-1)
        # Their inverse is not used any more; with 1 on its diagonal it has factors.
        A[S], A[:, S], V[:, S] = 0.0, 0.0, 0.0
        A[S, S] = 1.0
        kept[chosen] = False
        removed += len(chosen)
        if removed in counts:
            yield kept.clone()


# Ridge regression by second moments.


class Ridge:
    """The changes of matrices, all with the same inputs, that bring their outputs nearer to what they should be.

    With inputs x and the residuals r that the outputs leave, of which H (in, in) and C (out, in) are the sums of x x^T
    and r x^T, the change D (out, in) minimizes sum |r - D x|^2 + damping tr(D S^2 D^T), where S^2 is the diagonal of H.
    Inputs that are always 0 change nothing. NumericalError if H is not finite.

    Cost: in^3 / 3 flops once, 2 out in^2 for each change; memory of a matrix like H, and of two more at first.
    """

    def __init__(self, H: Tensor, damping: float) -> None:
        unit, self._scale = with_unit_diagonal(H.clone())
        self._L, _ = damped_cholesky(unit.clone, damping)
        self._is_dead = H.diagonal() <= 0

    def change(self, C: Tensor) -> Tensor:
        """D, for residuals with these moments."""
        D = torch.cholesky_solve((C / self._scale).T, self._L).T.div_(self._scale)
        return D.masked_fill_(self._is_dead, 0.0)


# Fits several matrices whose outputs are summed, each with inputs for some of the rows only.

#: The ridge of experts, relative to the diagonal of each Gram matrix; it keeps weights near the old ones.
EXPERTS_DAMPING = 0.01
#: For n rows of in inputs the ridge is as much more as this times in / n: what few rows say is not true of other text.
EXPERTS_DAMPING_FOR_FEW = 10.0
#: A sweep that lowers the squared error by less than this fraction is the last one.
_LEAST_GAIN = 1e-3
_MOST_SWEEPS = 10


@dataclass(frozen=True)
class SumFit:
    """The matrices that :func:`fit_sum` found, and how well they fit."""

    W: list[Tensor]  # (out, in) float32 each
    before: float  # squared error with the old weights
    after: float
    sweeps: int


def fit_sum(
    old: Callable[[int], Tensor], inputs: Callable[[int], tuple[Tensor, Tensor]], parts: int, residual: Tensor
) -> SumFit:
    """Fits the matrices W_e of a sum: the least  |Y - sum_e S_e X_e W_e^T|^2 + ridge.

    X_e (n_e, in) are the inputs of part e, S_e puts its rows in their places among those of Y, and Y - sum_e S_e X_e
    W_e^T is ``residual`` (rows, out) float32 for the old weights, which is changed. ``old(e)`` are these weights (out,
    in), ``inputs(e)`` the places (n_e,) and X_e. The ridge of part e is (0.01 + 10 in / n_e) tr(D diag(X_e^T X_e) D^T)
    for what its weights change by, D. Parts without rows keep their weights.

    One part is solved for after the other, exactly, with the others as they are, in up to 10 sweeps over all, which
    end where one gains less than 0.1 %: block coordinate descent, whose limit is the least squares' solution, and which
    needs no Gram matrix between different parts. NumericalError where a result is not finite.

    Cost of a sweep and part: 2 n in (in + 2 out) + in^3 / 3 + 2 out in^2. Memory: all W_e, and one Gram matrix.
    """
    W = [old(part).clone() for part in range(parts)]
    errors = [float(residual.square().sum(dtype=torch.float64))]
    while len(errors) <= _MOST_SWEEPS:
        for part in range(parts):
            rows, X = inputs(part)
            if not len(rows):
                continue
            scales = X.norm(dim=0)
            scales[scales == 0] = 1.0  # inputs that are always 0 keep their weights
            X = X / scales
            ridge = EXPERTS_DAMPING + EXPERTS_DAMPING_FOR_FEW * X.shape[1] / len(X)
            L, damping = damped_cholesky(partial(torch.mm, X.T, X), ridge)
            C = residual[rows].T @ X - damping * (W[part] - old(part)) * scales
            step = torch.cholesky_solve(C.T, L).T
            W[part] += step / scales
            residual.index_add_(0, rows, X @ step.T, alpha=-1)
        errors.append(float(residual.square().sum(dtype=torch.float64)))
        if errors[-1] > (1 - _LEAST_GAIN) * errors[-2]:
            break
    if not errors[-1] < torch.inf:
        raise NumericalError("the fitted weights are not finite; try dtype float32")
    return SumFit(W, errors[0], errors[-1], len(errors) - 1)
