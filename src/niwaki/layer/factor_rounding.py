"""Two sparse factors on a grid: the left one makes up for the rounding of both."""

import torch
from torch import Tensor

from niwaki.layer.grid import Grid
from niwaki.layer.linalg import conjugate_gradients, with_unit_diagonal
from niwaki.layer.problem import Gram, LayerProblem, Normalized, Solution
from niwaki.layer.rounding import flops as flops_of_one, onto_grid

#: Of conjugate gradients that refit the left factor. 4 leave a fifth more of what rounding adds to the error, and 40
#: take off a twentieth.
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


def flops(rows: int, columns: int) -> float:
    """Floating-point operations of :func:`factors_onto_grid`, counted as those of solvers are."""
    least = min(rows, columns)
    products = 2.0 * least * (columns**2 + 2 * rows * columns + _STEPS * rows * least)
    return products + flops_of_one(rows, least)


def _refitted(A: Tensor, G: Tensor, target: Tensor) -> Tensor:
    """A on its mask, nearer to the least of tr(A G A^T) - 2 tr(A target^T), each row by itself."""
    mask = A != 0
    G, units = with_unit_diagonal(G.clone())
    Z = A * units
    residual = (target / units).sub_(Z @ G).mul_(mask)
    return conjugate_gradients(lambda D: (D @ G).mul_(mask), residual, Z, _STEPS, dim=1).div_(units)
