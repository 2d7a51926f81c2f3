"""Removes whole inputs of a matrix in units, such as those of an attention head, and fits the others."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from niwaki.errors import UsageError
from niwaki.layer.linalg import damped_cholesky, inverse_of_damped
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
