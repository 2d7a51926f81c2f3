"""Inputs of a matrix that go together, such as those of a head: which can be spared, and weights without them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from niwaki.errors import UsageError
from niwaki.linalg import damped_cholesky, inverse_of_damped
from niwaki.problem import LayerProblem, Normalised, relative

#: The usual ridge, relative to the unit diagonal of H.
DAMPING = 0.01
#: Columns that are dropped between two changes of all of the inverse, and those that they are chosen from.
_AT_ONCE = 128
_CANDIDATES = 256


@dataclass(frozen=True)
class Dropped:
    """What remains of a matrix.

    Attributes:
        W: (out, in) in the dtype of the problem's W, exactly +0.0 in the columns of dropped units.
        units: Numbers of the dropped units, in ascending order.
        error: tr((W - What) H (W - What)^T) / tr(W H W^T).
        alone: For each unit that error, with the ridge, if it alone were dropped.
        damping: The ridge that was used; more than asked for if that was not enough in floating point.
    """

    W: Tensor
    units: list[int]
    error: float
    alone: list[float]
    damping: float


def drop_units(
    problem: LayerProblem, size: int, count: int, parts: int = 1, damping: float = DAMPING
) -> Dropped:
    """Drops ``count`` units of ``size`` neighbouring columns each, and fits the other columns.

    In coordinates where H has unit diagonal, with R = H + damping I, S the columns that are dropped and K the
    others, the best weights without S and their error are

        minimise  tr((W - V) R (W - V)^T)  with V_S = 0:  V_K = W_K + W_S H_SK (R_KK)^-1,
        tr(W_S [(R^-1)_SS]^-1 W_S^T).

    Units go one after the other, each time the one that adds least to this error. With A = R^-1 what unit u adds is
    tr(V_u (A_uu)^-1 V_u^T), and behind it V becomes V - V_u (A_uu)^-1 A_u: and A becomes A - A_:u (A_uu)^-1 A_u:.
    So that the large matrices change by products, the next 128 columns are chosen among the cheapest 256 (or of wide
    units among four times as many as go at once), for which alone each step is followed. In the end V_K is solved
    for anew. Inputs that are 0 throughout cost nothing and go first; those that stay keep their weights.

    Cost: 2 in^3 for the inverse, 2 s in (in + out) for s dropped columns, and for the last solution
    (in - s)^3 / 3 + 2 out (in - s) in; memory of three matrices like H and three like W.

    Reference: ZipLM, arXiv 2302.04089, which has these formulas for structures and also takes one after the other;
    the ridge, the choice among the cheapest and the last solution are this file's.

    Args:
        problem: W (out, in) and H. Not changed.
        size: Columns in a unit: 1 for neurons, the width of a head for heads.
        count: Units to drop, fewer than there are.
        parts: The units fall into so many runs of the same length, each of which loses the same number.
        damping: The ridge, above 0, relative to the unit diagonal; it holds on to the old weights.

    Raises:
        UsageError: columns are no multiple of ``size``, units or ``count`` none of ``parts``, or nothing would stay.
        NumericalError: H is beyond repair, or the result is not finite.
    """
    columns = problem.W.shape[1]
    units = columns // size
    if columns % size or units % parts or count % parts:
        raise UsageError(
            f"{columns} columns are not {parts} runs of whole units of {size}, each of which loses as many of {count}"
        )
    if not 0 < count < units:
        raise UsageError(f"of {units} units 1 to {units - 1} can be dropped, not {count}")
    scaled = Normalised(problem)
    A, used = inverse_of_damped(problem.gram.live, damping)
    alone, gone = _choose(scaled.W.clone(), A, size, count, parts)
    del A
    kept = (~gone).repeat_interleave(size)
    V = scaled.W.masked_fill(~kept, 0.0)
    V[:, kept] += _refit(problem.gram.live(), scaled.W, kept, used)
    solution = problem.solution(scaled.restore(V), kept.expand_as(V))
    costs = [relative(cost, problem.power) for cost in alone]
    return Dropped(solution.W, gone.nonzero().squeeze(1).tolist(), solution.error, costs, used)


def _refit(H: Tensor, W: Tensor, kept: Tensor, damping: float) -> Tensor:
    """(out, kept): what the kept columns have to take over, W_S H_SK (H_KK + damping I)^-1."""
    L, _ = damped_cholesky(lambda: H[kept][:, kept], damping)
    return torch.cholesky_solve((W[:, ~kept] @ H[~kept][:, kept]).T, L).T


def _choose(V: Tensor, A: Tensor, size: int, count: int, parts: int) -> tuple[list[float], Tensor]:
    """(what each unit alone costs, (units,) bool of those to drop); V (out, in) and A (in, in) are changed."""
    units = len(A) // size
    part = torch.arange(units, device=A.device) // (units // parts)
    left = torch.full((parts,), count // parts, device=A.device)
    gone = torch.zeros(units, dtype=torch.bool, device=A.device)
    alone: list[float] = []
    while count:
        costs = _costs(_diagonal(A, size), V.T.reshape(units, size, -1))
        alone = alone or costs.tolist()
        open_ = ~gone & (left[part] > 0)
        step = min(count, max(1, _AT_ONCE // size))
        some = min(int(open_.sum()), max(4 * step, _CANDIDATES // size))
        candidates = costs.masked_fill(~open_, torch.inf).argsort(stable=True)[:some].sort().values
        chosen = _one_by_one(V, A, size, candidates, part[candidates], left, step)
        S = _columns(chosen, size)
        taken = torch.cholesky_solve(A[S], torch.linalg.cholesky(A[S][:, S]))  # (A_SS)^-1 A_S:
        V.addmm_(V[:, S], taken, alpha=-1)
        A.addmm_(A[:, S], taken, alpha=-1)
        _clear(A, S)
        V[:, S] = 0.0
        gone[chosen] = True
        count -= len(chosen)
    return alone, gone


def _one_by_one(
    V: Tensor, A: Tensor, size: int, candidates: Tensor, part: Tensor, left: Tensor, steps: int
) -> Tensor:
    """At most ``steps`` of ``candidates``, each the cheapest behind those before it; V and A stay as they are.

    ``part`` has the part of each candidate, ``left`` what each part may still lose, which is counted down.
    """
    C = _columns(candidates, size)
    Q = V[:, C].T @ V[:, C]
    A = A[C][:, C]
    chosen: list[int] = []
    closed = torch.zeros(len(candidates), dtype=torch.bool, device=A.device)
    while len(chosen) < steps:
        closed |= left[part] == 0
        if closed.all():  # what other parts have to lose is behind these candidates
            break
        # tr(V_u (A_uu)^-1 V_u^T) from V^T V
        solved = torch.cholesky_solve(_diagonal(Q, size), torch.linalg.cholesky(_diagonal(A, size)))
        costs = solved.diagonal(dim1=1, dim2=2).sum(dim=1)
        u = int(costs.masked_fill(closed, torch.inf).argmin())
        S = torch.arange(u * size, (u + 1) * size, device=A.device)
        taken = torch.cholesky_solve(A[S], torch.linalg.cholesky(A[S][:, S]))
        # V - V_u taken in V^T V; of the term with taken twice each product has one half.
        mixed = Q[S] - Q[S][:, S] @ taken / 2
        Q.addmm_(taken.T, mixed, alpha=-1).addmm_(mixed.T, taken, alpha=-1)
        A.addmm_(A[:, S], taken, alpha=-1)
        _clear(A, S)
        chosen.append(u)
        closed[u] = True
        left[part[u]] -= 1
    return candidates[chosen]


def _costs(blocks: Tensor, V: Tensor) -> Tensor:
    """(units,): tr(V_u^T B_u^-1 V_u) for B (units, size, size) and V (units, size, out)."""
    L = torch.linalg.cholesky(blocks)
    halves: Tensor = torch.linalg.solve_triangular(L, V, upper=False)
    return halves.square_().sum(dim=(1, 2))


def _diagonal(M: Tensor, size: int) -> Tensor:
    """(units, size, size): the blocks on the diagonal."""
    units = len(M) // size
    return M.view(units, size, units, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def _clear(A: Tensor, S: Tensor) -> None:
    """Takes S out of an inverse that knows of it no more; with 1 on the diagonal, so that it has factors."""
    A[S], A[:, S] = 0.0, 0.0
    A[S, S] = 1.0


def _columns(units: Tensor, size: int) -> Tensor:
    return (units[:, None] * size + torch.arange(size, device=units.device)).flatten()
