"""Ridge regression by second moments."""

import torch
from torch import Tensor

from niwaki.layer.linalg import damped_cholesky, with_unit_diagonal


def ridge(H: Tensor, C: Tensor, damping: float) -> Tensor:
    """(out, in): the change D of a matrix that brings its outputs nearer to what they should be.

    With inputs x and the residuals r that the outputs leave, of which H (in, in) and C (out, in) are the sums of x x^T
    and r x^T, D minimises sum |r - D x|^2 + damping tr(D S^2 D^T), where S^2 is the diagonal of H. Inputs that are
    always 0 change nothing. NumericalError if H is not finite.

    Cost: in^3 / 3 + 2 out in^2 flops; memory of two matrices like H.
    """
    unit, scale = with_unit_diagonal(H.clone())
    L, _ = damped_cholesky(unit.clone, damping)
    D = torch.cholesky_solve((C / scale).T, L).T.div_(scale)
    return D.masked_fill_(H.diagonal() <= 0, 0.0)
