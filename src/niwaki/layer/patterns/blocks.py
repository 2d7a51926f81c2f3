"""Zeros in rectangles."""

import math
from dataclasses import dataclass

from torch import Tensor

from niwaki.errors import PatternError
from niwaki.layer.patterns._base import BySparsity, Tiled, short_number
from niwaki.layer.patterns.selection import keep_highest_blocks


@dataclass(frozen=True)
class Block(Tiled, BySparsity):
    """Blocks of r x c weights are kept or dropped together: the lowest ``round(sparsity * blocks)`` are zero.

    With sums of squared scores for blocks the mask is the Euclidean projection. ``shape`` is (r, c).
    """

    shape: tuple[int, int] = (4, 4)

    def __post_init__(self) -> None:
        super().__post_init__()
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

    def units(self, weights: int) -> int:
        return weights // math.prod(self.shape)

    def room(self, places: Tensor) -> Tensor:
        height, width = self.shape
        blocks: Tensor = places.unflatten(1, (-1, width)).unflatten(0, (-1, height)).amax(dim=(1, 3))
        return blocks.sum(dim=0)

    def keep(self, scores: Tensor, zeros: int) -> Tensor:
        return keep_highest_blocks(scores, self.shape, zeros)
