"""Sparse matrices and dense vectors for the packed format."""

from __future__ import annotations

import numpy as np
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


def on_grid(rows: int, columns: int, groups: int, bits: int = 8, zeros: float = 0.6) -> tuple[Tensor, Tensor, Tensor]:
    """(W in bfloat16, its numbers of so many bits (rows, columns), the scales (rows, groups)); all kinds of rows."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (rows, columns), generator=generator)
    codes[torch.rand(rows, columns, generator=generator) < zeros] = 0
    if rows > 3:
        codes[1], codes[2] = codes[1] | 1, 0
    scales = (torch.rand(rows, groups, generator=generator) + 0.5).bfloat16().float()
    scales *= torch.randn(rows, groups, generator=generator).sign()
    W = (codes.float().view(rows, groups, -1) * scales.unsqueeze(2)).view(rows, columns) + 0.0  # no -0.0
    return W.bfloat16(), codes.to(torch.int8), scales


def dense_of(codes: Tensor, scales: Tensor) -> Tensor:
    """Whole numbers (rows, columns) times their scales (rows, groups), in float64."""
    grouped = codes.double().view(len(codes), scales.shape[1], -1)
    return (grouped * scales.double().unsqueeze(2)).flatten(1)


def in_whole_numbers(x: Tensor) -> Tensor:
    """Vectors as products of whole numbers take them, in float64: 64 at a time, to 32,767 parts of the largest."""
    wide = np.pad(x.float().numpy(), ((0, 0), (0, -x.shape[1] % 64))).reshape(len(x), -1, 64)
    largest = np.abs(wide).max(axis=2, keepdims=True)
    with np.errstate(all="ignore"):
        numbers = np.where(largest > 0, np.rint(wide * (np.float32(32767) / largest)), 0)
    found = numbers.astype(np.float64) * (largest / np.float32(32767))
    return torch.from_numpy(found.reshape(len(x), -1)[:, : x.shape[1]])
