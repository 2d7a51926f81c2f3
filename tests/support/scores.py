"""Scores to make masks from, and patterns of every kind."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from niwaki.layer.patterns import NM, Pattern, PerRow, Unstructured
from support.problems import generator, normal

Scores = Callable[[int, int], Tensor]


def random_scores(rows: int, columns: int, seed: int = 0) -> Tensor:
    return normal(rows, columns, seed=seed, dtype=torch.float32).abs()


def tied_scores(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Only four values, so that every threshold falls among equals."""
    return torch.randint(4, (rows, columns), generator=generator(seed)).float()


def zeros_of(mask: Tensor) -> int:
    return int((~mask).sum())


PATTERNS: tuple[Pattern, ...] = (
    *(Unstructured(0.5), Unstructured(0.8), PerRow(0.6), PerRow(0.83), NM(2, 4), NM(1, 3), NM(3, 8), NM(16, 32)),
)
