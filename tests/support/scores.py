"""Scores to make masks from, and patterns of every kind."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from niwaki.layer.patterns import (
    NM,
    Block,
    Pattern,
    PerRow,
    Quota,
    TransposableNM,
    Unstructured,
)
from support.problems import generator, lowest_go, normal

Scores = Callable[[int, int], Tensor]


def random_scores(rows: int, columns: int, seed: int = 0) -> Tensor:
    return normal(rows, columns, seed=seed, dtype=torch.float32).abs()


def tied_scores(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Only four values, so that every threshold falls among equals."""
    return torch.randint(4, (rows, columns), generator=generator(seed)).float()


def zeros_of(mask: Tensor) -> int:
    return int((~mask).sum())


def naive_blocks(scores: Tensor, sparsity: float, shape: tuple[int, int]) -> Tensor:
    r, c = shape
    corners = list(itertools.product(range(0, scores.shape[0], r), range(0, scores.shape[1], c)))
    sums = [sum(x * x for x in scores[i : i + r, j : j + c].flatten().tolist()) for i, j in corners]
    mask = torch.ones(scores.shape, dtype=torch.bool)
    for (i, j), kept in zip(corners, lowest_go(sums, round(sparsity * len(corners))), strict=True):
        mask[i : i + r, j : j + c] = kept
    return mask


PATTERNS: tuple[Pattern, ...] = (
    Unstructured(0.5),
    Unstructured(0.8),
    PerRow(0.6),
    PerRow(0.83),
    NM(2, 4),
    NM(1, 3),
    NM(3, 8),
    NM(16, 32),
    Quota(NM(2, 4), PerRow(0.6)),
    Quota(NM(2, 4), Unstructured(0.6)),
    Quota(NM(1, 3), Unstructured(0.9)),
)


#: These need a number of rows that tiles divide.
TILED: tuple[Pattern, ...] = (
    Block(0.5),
    Block(0.7, (1, 8)),
    Block(0.3, (2, 3)),
    TransposableNM(2, 4),
    TransposableNM(1, 4),
    TransposableNM(2, 3),
)
