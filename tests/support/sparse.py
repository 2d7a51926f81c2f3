"""Sparse matrices and dense vectors for the packed format."""

from __future__ import annotations

import torch
from torch import Tensor


def sparse(rows: int, columns: int, sparsity: float, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """(rows, columns) normal numbers, with so many zeros; the second row has none, the third nothing else."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(rows, columns, generator=generator)
    W[torch.rand(rows, columns, generator=generator) < sparsity] = 0
    if rows > 3:
        W[1] = torch.randn(columns, generator=generator)
        W[2] = 0
    return W.to(dtype)


def vectors(count: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(7)).to(dtype)
