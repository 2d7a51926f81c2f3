"""Weights, or the two sparse factors of a matrix, on a grid or in a format: others make up for the rounding of each."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from niwaki.layer.floats import TiledFloats
from niwaki.layer.grid import AnyGrid, Grid, held
from niwaki.layer.linalg import STRIP, conjugate_gradients, has_bfloat16_units, resolvent, with_unit_diagonal
from niwaki.layer.problem import Gram, LayerProblem, Normalized, Solution, damping_for

_SWEEPS = 20
#: The damping for texts of other kinds.
_DAMPING = 0.02
#: The penalty of the choice of grid points in the first sweep.
_FIRST_PENALTY = 0.3
#: The penalty of that choice in the last sweep.
_LAST_PENALTY = 0.7
#: Rows that are rounded at a time, where later ones make up for their errors.
_ROWS = 64
#: What is added to the diagonal of what errors of outputs cost together, of its mean.
_ALONE = 1.0
#: The penalty of the weights themselves.
_RHO = math.sqrt(_FIRST_PENALTY * _LAST_PENALTY)


def unsolved(problem: LayerProblem) -> Solution:
    """All weights as they are: what is rounded where nothing is pruned."""
    return problem.solution(problem.W, torch.ones_like(problem.W, dtype=torch.bool))


def onto_grid(problem: LayerProblem, solution: Solution, grid: AnyGrid, dtype: torch.dtype) -> tuple[Solution, Tensor]:
    """``solution`` with weights on ``grid``, for the same mask and with the same ``stats``, and scales (out, groups).

    Both are in the dtype of W, with values that ``dtype`` has, in which weights are stored. UsageError if the grid does
    not fit W.

    Each row takes the best of its weights rounded to the nearest, the end of the sweeps below, and that with scales
    fitted to it. Rows of the solver's weights that are W's and on the grid already stay as they are, to the bit; of
    types of llama.cpp, whole matrices that :func:`.held` has scales for.

    Scales s are those of :meth:`Grid.scales` for the solver's weights and diag(H). With P(.) the nearest point of the
    grid on the mask M, R = rho (H + rho I)^-1 in coordinates where H has unit diagonal, Z the solver's weights, U = 0,

        X = W + (Z - U - W) R
        Z = P(X + (rho / gamma_t) U)
        U = U + X - Z

    for t = 1..20, where gamma_t rises from 0.3 to 0.7 geometrically and rho is their geometric mean: the penalty grows,
    as in ``continuation``. Then, with the codes q fixed, the scales of a row minimize (w - q s) H (w - q s)^T, with a
    ridge towards the old ones. H is damped as for the default solver, for text of other kinds
    (:func:`.damping_for`). A kept weight may be 0 on the grid; those of dead inputs are only rounded.

    Where the problem says what errors E of outputs cost ``together``, tr(G E H E^T), rows are rounded 64 at a time, and
    the later ones of each block of G make up for their errors: they are fitted to W - G_22^-1 G_21 E_1, which is the
    least of that sum over all that later rows could be. The mean of G's diagonal is added to it, because
    it is known from few tokens.

    Cost: a factorization and an inverse of (in, in), once for all matrices with the same inputs; 25 products of
    (out, in) with (in, in), 20 of them in bfloat16 on processors that have it; memory of two (in, in) matrices, a copy
    of W and some of 1,024 rows.
    References: ADMM on a grid, Leng et al. 2018, arXiv 1707.09870; with the layer's own Hessian in the step for X, Boza
    2024, arXiv 2401.02938, there for masks; errors of rows that others make up for, Tseng et al. 2025, arXiv
    2505.22988.
    """
    kept = solution.mask if grid.keeps_zeros else torch.ones_like(solution.mask)
    if torch.equal(solution.W, problem.W) and (scales := held(problem.W, grid, dtype)) is not None:
        return problem.solution(problem.W, kept, **solution.stats), scales
    gram, W = problem.gram.damped(damping_for(_DAMPING, problem.gram)), problem.W
    R, H = gram.derived("onto grid", lambda: (_resolvent(gram), gram.with_ridge()))
    importance, dead = gram.H.diagonal().clamp(min=0), gram.norm == 0
    weights, scales = torch.empty_like(W), W.new_empty(W.shape[0], grid.groups(W.shape[1]))
    for rows, change in _strips(W, weights, problem.together):
        target, mask, solved = W[rows], kept[rows], solution.W[rows]
        if change is not None:
            target, solved = target + change, solved + change * mask
        first = grid.scales(solved, importance, dtype)

        def nearest(V: Tensor, s: Tensor = first, mask: Tensor = mask) -> Tensor:
            return grid.project(V, s, dtype).masked_fill_(~mask, 0.0)

        rounded = nearest(solved)
        swept = _swept(target, solved, R, nearest)
        swept[:, dead] = rounded[:, dead]
        codes = grid.codes(swept, first)
        fitted = grid.refitted(target, codes, first, H, dtype)
        best, chosen, least = rounded, first, _losses(target, rounded, H)
        for candidate, s in ((swept, first), (grid.values(codes, fitted, dtype), fitted)):
            losses = _losses(target, candidate, H)
            better = (losses < least).unsqueeze(1)
            best, chosen = torch.where(better, candidate, best), torch.where(better, s, chosen)
            least = torch.minimum(losses, least)
        weights[rows], scales[rows] = best, grid.finest(best, chosen, dtype)
    return problem.solution(weights, kept, **solution.stats), scales


def _strips(W: Tensor, rounded: Tensor, together: Tensor | None) -> Iterator[tuple[slice | Tensor, Tensor | None]]:
    """Rows to round at a time, and what changes in W for them by the errors of those that are ``rounded`` before."""
    if together is None:
        yield from ((slice(start, start + STRIP), None) for start in range(0, len(W), STRIP))
        return
    for block in torch.arange(len(W), device=W.device).split(together.shape[1]):
        G = together[block, : len(block)].to(torch.float64, copy=True)
        G.diagonal().add_(_ALONE * G.diagonal().mean())
        if not bool((G.diagonal() > 0).all()):  # nothing depends on these outputs
            yield block, None
            continue
        # Those that cost most come first, when most others are free. The inverse of G is L L^T.
        order = G.diagonal().argsort(descending=True)
        L = torch.linalg.cholesky(torch.linalg.inv(G[order][:, order]))
        change = W.new_zeros(len(block), W.shape[1])
        for first in range(0, len(block), _ROWS):
            here, later = slice(first, first + _ROWS), slice(first + _ROWS, None)
            rows = block[order[here]]
            yield rows, change[here]
            factor = torch.linalg.solve_triangular(L[here, here], L[later, here], upper=False, left=False)
            change[later] += factor.to(W.dtype) @ (rounded[rows] - W[rows] - change[here])


def to_nearest(W: Tensor, grid: AnyGrid, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """W (out, in) rounded to the nearest numbers of ``grid``, and scales (out, groups), as if all inputs were alike.

    Both are in the dtype of W, with values that ``dtype`` has, in which weights are stored; scales are those of
    :meth:`Grid.scales` for inputs that count the same. Nothing makes up for what rounding changes, so no text is
    needed: with 8 bits it would gain next to nothing. UsageError if the grid does not fit W.

    Cost: W rounded about 40 times; memory of a copy of W and some of 1,024 rows.
    """
    if (lying := held(W, grid, dtype)) is not None:
        return W, lying
    weights, scales = torch.empty_like(W), W.new_empty(W.shape[0], grid.groups(W.shape[1]))
    alike = W.new_ones(W.shape[1])
    for start in range(0, W.shape[0], STRIP):
        rows = slice(start, start + STRIP)
        first = grid.scales(W[rows], alike, dtype)
        weights[rows] = grid.project(W[rows], first, dtype)
        scales[rows] = grid.finest(weights[rows], first, dtype)
    return weights, scales


def onto_floats(
    problem: LayerProblem, solution: Solution, numbers: TiledFloats, stored: Tensor
) -> tuple[Solution, Tensor]:
    """``solution`` with weights in the format ``numbers``, for the same zeros and with the same ``stats``; and scales.

    W is float32. ``stored`` are the scales that the matrix has in the file; those of the result are these, or fit
    better, as in :meth:`TiledFloats.scales`.

    Weights are rounded to the nearest number that is not 0. Where numbers are coarse, each row takes the better of that
    and of the sweeps of :func:`onto_grid`, with these numbers as the grid and the solver's weights as W: rounding is
    all that is made up for, and a row that needs none stays as it is. Zeros are those of ``solution``, also of kept
    weights that were 0. The stats also have "raised_from_zero", the number of weights that rounding to the nearest
    would have made 0.

    Cost: nine times W rounded; where numbers are coarse that of :func:`onto_grid`; and two copies of W in memory.
    """
    gram, W, kept = problem.gram, solution.W, solution.W != 0
    scales = numbers.scales(W, gram.H.diagonal().clamp(min=0), stored)
    factors = numbers.factors(scales, W.shape)
    weights = numbers.project(W, factors, kept)
    if numbers.numbers.is_coarse:
        R = gram.derived("onto grid", lambda: _resolvent(gram))
        dead = gram.norm == 0
        for start in range(0, W.shape[0], STRIP):
            rows = slice(start, start + STRIP)
            solved, rounded = W[rows], weights[rows]

            def nearest(V: Tensor, rows: slice = rows) -> Tensor:
                return numbers.project(V, factors[rows], kept[rows])

            swept = _swept(solved, solved, R, nearest)
            swept[:, dead] = rounded[:, dead]
            better = _losses(solved, swept, gram.H) < _losses(solved, rounded, gram.H)
            weights[rows] = torch.where(better.unsqueeze(1), swept, rounded)
    stats = {**solution.stats, "raised_from_zero": numbers.raised(W, factors)}
    return problem.solution(weights, solution.mask, **stats), scales


def flops(rows: int, columns: int) -> float:
    """Floating-point operations of :func:`onto_grid`, counted as those of solvers are."""
    return columns**3 + (_SWEEPS + 5) * 2.0 * rows * columns**2


def _resolvent(gram: Gram) -> Tensor:
    """(in, in): rho (H + rho I)^-1 of the H with unit diagonal, for weights that are not normalized.

    In bfloat16 where a processor has products of such: what the sweeps change is rounded, by 0.4 % at most, and not the
    weights.
    """
    R, _ = resolvent(gram.live, _RHO)
    norm = torch.where(gram.norm > 0, gram.norm, 1.0)
    R.mul_(norm.unsqueeze(1)).div_(norm)
    return R.bfloat16() if R.dtype == torch.float32 and R.device.type == "cpu" and has_bfloat16_units() else R


def _swept(W: Tensor, start: Tensor, R: Tensor, nearest: Callable[[Tensor], Tensor]) -> Tensor:
    """Z after the sweeps of :func:`onto_grid` for W from ``start``, with ``nearest`` in the place of P."""
    Z, U = start, torch.zeros_like(W)
    growth = _LAST_PENALTY / _FIRST_PENALTY
    for sweep in range(_SWEEPS):
        gamma = _FIRST_PENALTY * growth ** (sweep / (_SWEEPS - 1))
        change = (Z - U).sub_(W)
        X = torch.addmm(W, change, R) if R.dtype == W.dtype else W + change.to(R.dtype) @ R
        Z = nearest(torch.add(X, U, alpha=_RHO / gamma))
        U.add_(X).sub_(Z)
    return Z


def _losses(W: Tensor, Q: Tensor, H: Tensor) -> Tensor:
    """(out,), the squared error of each row's output; not below 0, where rounding can take it."""
    D = W - Q
    return (D @ H).mul_(D).sum(dim=1).clamp_(min=0)


# Two sparse factors on a grid: the left one makes up for the rounding of both.

#: Steps of conjugate gradients that refit the left factor. 4 leave a fifth more of what rounding adds to the error, and
#: 40 take off a twentieth.
_STEPS = 8


def factors_onto_grid(
    problem: LayerProblem, factors: tuple[Tensor, Tensor], grid: Grid, dtype: torch.dtype, damping: float = 0.0
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The ``factors`` A (out, n) and B (n, in) of W on ``grid``, each on its own mask; and their scales, of each row.

    All are in the dtype of W, with values that ``dtype`` has. UsageError if the grid does not fit n or in.

    H is damped as for the solver that made the factors. B is rounded to the nearest, with the scales of
    :meth:`Grid.scales` for diag(H). Then A is refitted on its mask: with B as it is now, its rows are problems of their
    own with the Gram matrix G = B H B^T, which some steps of conjugate gradients go down. Last, A is put on the grid by
    :func:`~niwaki.layer.rounding.onto_grid` with G, as if it was the matrix to come near to: where it is the best on
    its mask, an error e of a row adds e G e^T to that of W, whatever is left of W.

    Cost: that of :func:`~niwaki.layer.rounding.onto_grid` for A, four products out x in x n and 8 of out x n^2.
    """
    A, B = factors
    damped = problem.gram.damped(damping)
    scaled = Normalized(LayerProblem(problem.W, damped))
    scales_right = grid.scales(B, problem.gram.H.diagonal().clamp(min=0), dtype)
    # Adding +0.0 makes +0.0 of -0.0, which small numbers may round to.
    B = grid.project(B, scales_right, dtype).add_(0.0)
    V = B * damped.norm
    VH = V @ scaled.new_H()
    gram = Gram(VH @ V.T, shared=False, trusted=True)
    A = _refitted(A, gram.H, scaled.W @ VH.T)
    rounded, scales_left = onto_grid(LayerProblem(A, gram), Solution(A, A != 0, error=0.0), grid, dtype)
    return (rounded.W, B), (scales_left, scales_right)


def factor_flops(rows: int, columns: int) -> float:
    """Floating-point operations of :func:`factors_onto_grid`, counted as those of solvers are."""
    least = min(rows, columns)
    products = 2.0 * least * (columns**2 + 2 * rows * columns + _STEPS * rows * least)
    return products + flops(rows, least)


def _refitted(A: Tensor, G: Tensor, target: Tensor) -> Tensor:
    """A on its mask, nearer to the least of tr(A G A^T) - 2 tr(A target^T), each row by itself."""
    mask = A != 0
    G, units = with_unit_diagonal(G.clone())
    Z = A * units
    residual = (target / units).sub_(Z @ G).mul_(mask)
    return conjugate_gradients(lambda D: (D @ G).mul_(mask), residual, Z, _STEPS, dim=1).div_(units)
