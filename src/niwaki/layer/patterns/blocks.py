"""Zeros in rectangles."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from niwaki.errors import PatternError
from niwaki.layer.patterns._base import Pattern, Run, Tiled, check_sparsity, runs, short_number, zeros_of
from niwaki.layer.patterns.selection import keep_highest_blocks


@dataclass(frozen=True)
class Block(Tiled):
    """Blocks of r x c weights are kept or dropped together: the lowest ``round(sparsity * blocks)`` are zero.

    A block's score is the sum of its squared scores, which makes the mask the Euclidean projection.

    Args:
        sparsity: The fraction of blocks that are zero.
        shape: (r, c), the rows and columns of a block.
    """

    sparsity: float
    shape: tuple[int, int] = (4, 4)

    def __post_init__(self) -> None:
        check_sparsity(self.sparsity)
        if min(self.shape) < 1:
            raise PatternError(f"a block has at least 1 row and 1 column; got {self.shape[0]}x{self.shape[1]}")

    def __str__(self) -> str:
        return f"block-{self.shape[0]}x{self.shape[1]}:{short_number(self.sparsity)}"

    @property
    def group(self) -> int:
        return self.shape[1]

    @property
    def tile(self) -> tuple[int, int]:
        return self.shape

    def mask(self, scores: Tensor) -> Tensor:
        self.check((scores.shape[0], scores.shape[1]))
        return keep_highest_blocks(scores, self.shape, self._zeros(scores.numel()))

    def at(self, sparsity: float) -> Pattern | None:
        return replace(self, sparsity=sparsity)

    def partial(self, fraction: float) -> Pattern:
        return replace(self, sparsity=self.sparsity * fraction)

    def slices(self, shape: tuple[int, int], width: int) -> Iterator[tuple[int, int, Run]]:
        self.check(shape)
        for start, stop in runs(shape[1], width, self.group):
            zeros = self._zeros(shape[0] * stop) - self._zeros(shape[0] * start)
            yield start, stop, Run(functools.partial(keep_highest_blocks, shape=self.shape, zeros=zeros))

    def _zeros(self, weights: int) -> int:
        """The number of blocks of zeros among so many weights."""
        return zeros_of(self.sparsity, weights // math.prod(self.shape))
