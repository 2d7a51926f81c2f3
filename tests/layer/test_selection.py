"""Selections that only a GPU and several processes use, on the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from niwaki.layer.patterns.selection import _kth_by_counting
from support.covering import covered


@covered
@pytest.mark.parametrize("count", [1, 2, 1000, 100_003])
@pytest.mark.parametrize("kind", ["normal", "signs", "ties", "zeros", "wide", "close"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_counting_finds_what_sorting_finds(count: int, kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(count)
    values = {
        "normal": torch.randn(count, generator=generator).abs(),
        "signs": torch.randn(count, generator=generator),
        "ties": torch.randint(0, 3, (count,), generator=generator).float(),
        "zeros": torch.zeros(count),
        "wide": torch.randn(count, generator=generator).mul(60).exp(),  # denormal numbers to infinity
        "close": 1 + torch.randint(0, 200, (count,), generator=generator) * torch.finfo(torch.float32).eps,
    }[kind].to(dtype)
    values[::7] *= -0.0 if kind == "zeros" else 1.0
    if kind == "signs":  # patterns put below all others what is gone already
        values[::5], values[1::50] = -math.inf, math.inf
    ordered = values.sort().values
    for k in {1, 2, count // 3, count - 1, count} & set(range(1, count + 1)):
        assert torch.equal(_kth_by_counting(values, k), ordered[k - 1 : k])
