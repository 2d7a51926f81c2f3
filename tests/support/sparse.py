"""Sparse matrices and dense vectors for the packed format, and models whose weights are on a grid."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from niwaki.models.scales import FILE as SCALES
from support.models import edit_json, is_pruned, random_model


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


@contextlib.contextmanager
def with_threads(count: int) -> Iterator[None]:
    """So many of them in torch, and in kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_product(y: Tensor, x: Tensor, W: Tensor) -> bool:
    """Whether ``y`` is x W^T, but for the rounding of sums in float32."""
    x, W = x.double(), W.double()
    return bool(((y - x @ W.T).abs() <= 1e-6 * (x.abs() @ W.abs().T) + 1e-30).all())


def in_whole_numbers(x: Tensor) -> Tensor:
    """Vectors as products of whole numbers take them, in float64: 64 at a time, to 32,767 parts of the largest."""
    wide = np.pad(x.float().numpy(), ((0, 0), (0, -x.shape[1] % 64))).reshape(len(x), -1, 64)
    largest = np.abs(wide).max(axis=2, keepdims=True)
    with np.errstate(all="ignore"):
        numbers = np.where(largest > 0, np.rint(wide * (np.float32(32639) / largest)), 0)
    found = numbers.astype(np.float64) * (largest / np.float32(32639))
    return torch.from_numpy(found.reshape(len(x), -1)[:, : x.shape[1]])


def model_on_a_grid(
    path: Path, case: str, dtype: torch.dtype, bits: int = 8, zeros: float = 0.6, size: int = 0, **changes: Any
) -> Path:
    """A model with weights of so many bits, and their scales beside it, as ``prune`` would leave it.

    Args:
        size: How many weights of a row have a scale, if it is not all.
    """
    random_model(case, dtype=dtype, **changes).save_pretrained(path)
    generator, most = torch.Generator().manual_seed(1), 1 << (bits - 1)
    scales = {}
    tensors = load_file(path / "model.safetensors")
    for key, value in tensors.items():
        if not is_pruned(case, key) or value.ndim < 2:
            continue
        transposed = case == "gpt_oss" and value.ndim > 2
        groups = (value.mT if transposed else value).unflatten(-1, (-1, size or value.shape[-2 if transposed else -1]))
        codes = torch.randint(-most, most, groups.shape, generator=generator)
        codes[torch.rand(codes.shape, generator=generator) < zeros] = 0
        own = ((torch.rand(*codes.shape[:-1], 1, generator=generator) + 0.5) * 0.2 / most).to(dtype)
        W = (codes.float() * own.float()).to(dtype).flatten(-2)
        tensors[key] = (W.mT if transposed else W).contiguous()
        scales[f"{key}_scale"] = own.squeeze(-1)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / SCALES).parent.mkdir()
    save_file(scales, path / SCALES)
    grid = f"int{bits}:{size}" if size else f"int{bits}"
    edit_json(path / "config.json", pruning_config={"library": "niwaki", "quantization": grid})
    return path
