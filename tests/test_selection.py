"""Selections that only a GPU uses, on the CPU."""

from __future__ import annotations

import pytest
import torch

from niwaki.selection import _kth_by_counting


@pytest.mark.parametrize("count", [1, 2, 1000, 100_003])
@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "wide", "close"])
def test_counting_finds_what_sorting_finds(count: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(count)
    values = {
        "normal": torch.randn(count, generator=generator).abs(),
        "ties": torch.randint(0, 3, (count,), generator=generator).float(),
        "zeros": torch.zeros(count),
        "wide": torch.randn(count, generator=generator).mul(60).exp(),  # denormal numbers to infinity
        "close": 1 + torch.randint(0, 200, (count,), generator=generator) * torch.finfo(torch.float32).eps,
    }[kind]
    values[::7] *= -0.0 if kind == "zeros" else 1.0
    ordered = values.abs().sort().values
    for k in {1, 2, count // 3, count - 1, count} & set(range(1, count + 1)):
        assert torch.equal(_kth_by_counting(values, k), ordered[k - 1 : k])
