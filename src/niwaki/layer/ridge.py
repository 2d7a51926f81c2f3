"""Ridge regression by second moments."""

import torch
from torch import Tensor

from niwaki.layer.linalg import damped_cholesky, with_unit_diagonal


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
