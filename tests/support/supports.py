"""All supports that patterns allow on 4 x 4 weights: few enough to try each."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from niwaki.layer.patterns import NM, Pattern, PerRow, Unstructured

SMALL: tuple[Pattern, ...] = (
    *(Unstructured(0.5), Unstructured(0.8), PerRow(0.5), PerRow(0.6), PerRow(0.9), NM(2, 4), NM(1, 2), NM(3, 4)),
    NM(1, 1),
)


def every(conditions: Tensor) -> Tensor:
    """(number, ...) -> (number,): whether all hold."""
    return torch.all(conditions.flatten(1), dim=1)


def allowed(pattern: Pattern, masks: Tensor) -> Tensor:
    """Which of the masks (number, 4, 4) the pattern allows, from its definition."""
    zeros = (~masks).sum(dim=(1, 2))
    match pattern:
        case Unstructured(sparsity):
            return zeros == round(sparsity * 16)
        case PerRow(sparsity):
            of_row = masks.sum(dim=2)
            return every(of_row[:, None] - of_row[:, :, None] <= 1) & (zeros == round(sparsity * 16))
        case NM(n, m):
            return every(masks.unflatten(2, (-1, m)).sum(dim=3) == n)
    raise AssertionError(pattern)


@functools.cache
def supports(pattern: Pattern) -> Tensor:
    """(number, 16) float64: all masks of 4 x 4 weights that the pattern allows."""
    bits = torch.arange(2**16)[:, None] >> torch.arange(16) & 1
    return bits[allowed(pattern, bits.bool().reshape(-1, 4, 4))].double()
