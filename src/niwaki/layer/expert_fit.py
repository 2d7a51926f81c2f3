"""Fits several matrices whose outputs are summed, each with inputs for some of the rows only."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from niwaki.errors import NumericalError
from niwaki.layer.linalg import damped_cholesky

#: The ridge, relative to the diagonal of each Gram matrix; it keeps weights near the old ones.
DAMPING = 0.01
#: And for n rows of in inputs as much more as this times in / n: what few rows say is not true of other text.
DAMPING_FOR_FEW = 10.0
#: A sweep that lowers the squared error by less than this fraction is the last one.
_LEAST_GAIN = 1e-3
_MOST_SWEEPS = 10


@dataclass(frozen=True)
class SumFit:
    """What :func:`fit_sum` found."""

    W: list[Tensor]  # (out, in) float32 each
    before: float  # squared error with the old weights
    after: float
    sweeps: int


def ridge(rows: int, columns: int) -> float:
    """The ridge for so many ``rows`` of inputs, relative to a diagonal of 1."""
    return DAMPING + DAMPING_FOR_FEW * columns / rows


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
            L, damping = damped_cholesky(partial(torch.mm, X.T, X), ridge(*X.shape))
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
