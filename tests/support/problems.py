"""Problems to prune, and slow references for them: float64, written from the definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from niwaki.layer.problem import Gram, LayerProblem

#: What the inputs of a layer can be like.
KINDS = ("correlated", "rank-deficient", "dead input", "few tokens")
DEAD = (3, 20)  # columns of "dead input" that are never active


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers: for each seed the same values in either dtype, up to rounding."""
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def inputs(kind: str, columns: int, seed: int, tokens: int | None = None) -> Tensor:
    """(tokens, in) float64: correlated inputs of different sizes, as in a transformer."""
    rank = columns // 2 if kind == "rank-deficient" else columns
    if tokens is None:
        tokens = columns // 4 if kind == "few tokens" else 8 * columns
    spectrum = torch.arange(1, rank + 1, dtype=torch.float64).pow(-0.5)
    mixing = normal(rank, columns, seed=seed + 1000) * spectrum[:, None]
    sizes = normal(columns, seed=seed + 2000).mul(0.5).exp()
    X = normal(tokens, rank, seed=seed + 3000) @ mixing * sizes
    if kind == "dead input":
        X[:, DEAD] = 0.0
    return X


def gram(X: Tensor) -> Tensor:
    return X.T @ X / X.shape[0]


def make_problem(
    kind: str = "correlated",
    rows: int = 23,
    columns: int = 32,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    tokens: int | None = None,
) -> LayerProblem:
    """23 rows, because no sparsity of the tests gives a whole number of zeros for them."""
    X = inputs(kind, columns, seed, tokens)
    H = Gram(gram(X).to(dtype), shared=False)
    return LayerProblem(normal(rows, columns, seed=seed).to(dtype), H)


def squared_error(W: Tensor, What: Tensor, H: Tensor) -> float:
    """tr((W - What) H (W - What)^T) in float64."""
    D = W.double() - What.double()
    return float(torch.einsum("ij,jk,ik->", D, H.double(), D))


def relative_error(problem: LayerProblem, What: Tensor) -> float:
    zero = torch.zeros_like(problem.W)
    H = problem.gram.H
    return squared_error(problem.W, What, H) / squared_error(problem.W, zero, H)


def least_squares(H: Tensor, W: Tensor, mask: Tensor) -> Tensor:
    """The best weights on the mask: for each row of W a regression on the columns that it keeps."""
    X = torch.linalg.cholesky(H.double()).T  # X^T X = H
    best = torch.zeros_like(W, dtype=torch.float64)
    for row, kept in enumerate(mask):
        target = X @ W[row].double()
        best[row, kept] = torch.linalg.lstsq(X[:, kept], target[:, None]).solution[:, 0]
    return best


def lowest_go(scores: Sequence[float], zeros: int) -> list[bool]:
    """False for the ``zeros`` lowest; Python's sort is stable, so of equal scores the first go."""
    gone = set(sorted(range(len(scores)), key=lambda i: scores[i])[:zeros])
    return [i not in gone for i in range(len(scores))]


def lowest_go_in_matrix(scores: Tensor, zeros: int) -> Tensor:
    return torch.tensor(lowest_go(scores.flatten().tolist(), zeros)).reshape(scores.shape)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
