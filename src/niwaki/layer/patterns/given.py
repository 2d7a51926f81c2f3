"""Masks that are given: a mask itself, and the places of weights among which a pattern chooses."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from niwaki.arguments import check_fields
from niwaki.layer.patterns._base import ByRows, Choice, Pattern, Slices, check_places, check_shape, runs
from niwaki.layer.patterns.rows import Rows


@dataclass(frozen=True, eq=False)
class Fixed(ByRows):
    """A given mask, such as that of another program: ``values`` (out, in) bool, True for kept weights.

    Raises:
        PatternError: ``values`` is not (out, in) bool.
    """

    values: Tensor

    def __post_init__(self) -> None:
        check_fields(self)
        check_places("a mask is", self.values)

    def __str__(self) -> str:
        return f"fixed:{self.sparsity:.4g}"

    @property
    def sparsity(self) -> float:
        return 1 - self.rows.total(int(self.values.count_nonzero())) / self.weights(self.values)

    def for_rows(self, rows: Rows) -> Pattern | None:
        return replace(self, values=rows.own(self.values), rows=rows)

    def check(self, shape: Sequence[int]) -> None:
        check_shape("mask has", self.values, shape)

    def reordered(self, columns: Tensor) -> Pattern:
        return replace(self, values=self.values[:, columns.to(self.values.device)])

    def mask(self, scores: Tensor) -> Tensor:
        self.check(scores.shape)
        return self.values.to(scores.device)

    def partial(self, fraction: float) -> Pattern:
        return self

    def slices(self, shape: Sequence[int], width: int, places: Tensor | None = None) -> Slices:
        self.check(shape)
        for start, stop in runs(shape[1], width):
            yield start, stop, Fixed(self.values[:, start:stop]).mask


@dataclass(frozen=True, eq=False)
class Among(Pattern):
    """The mask of ``pattern`` among the weights at ``places`` (out, in) bool; all others are zero, and count as such.

    Of the masks that ``pattern`` allows it is the best one for the scores at ``places``, and of that what is there.
    Zeros that were there are the first to go: a number of zeros is reached to the weight, or is that of the old ones
    where these are more, in the matrix or in a row, and of n:m's groups none has more than n weights.
    """

    pattern: Pattern
    places: Tensor

    def __post_init__(self) -> None:
        check_fields(self)
        check_places("places are", self.places)

    def __str__(self) -> str:
        return str(self.pattern)

    @property
    def sparsity(self) -> float:
        there = self.rows.total(int(self.places.count_nonzero()))
        return max(self.pattern.sparsity, 1 - there / self.weights(self.places))

    @property
    def group(self) -> int:
        return self.pattern.group

    @property
    def rows(self) -> Rows:
        return self.pattern.rows

    def check(self, shape: Sequence[int]) -> None:
        self.pattern.check(shape)
        check_shape("places have", self.places, shape)

    def mask(self, scores: Tensor) -> Tensor:
        self.check(scores.shape)
        return self._best(self.pattern.mask, self.places, scores)

    def threshold(self, scores: Tensor) -> Tensor | None:
        theta = self.pattern.threshold(self._lowered(scores, self.places))
        return None if theta is None else torch.where(self.places.to(theta.device), theta, math.inf)

    def partial(self, fraction: float) -> Pattern:
        return replace(self, pattern=self.pattern.partial(fraction))

    def at(self, sparsity: float) -> Pattern | None:
        return self._with(self.pattern.at(sparsity), self.places)

    def for_rows(self, rows: Rows) -> Pattern | None:
        return self._with(self.pattern.for_rows(rows), rows.own(self.places))

    def reordered(self, columns: Tensor) -> Pattern:
        places = self.places[:, columns.to(self.places.device)]
        return replace(self, pattern=self.pattern.reordered(columns), places=places)

    def split(self, scores: Sequence[Tensor]) -> list[Pattern] | None:
        runs = self.places.split([run.shape[1] for run in scores], dim=1)
        patterns = self.pattern.split([self._lowered(*each) for each in zip(scores, runs, strict=True)])
        if patterns is None:
            return None
        return [replace(self, pattern=pattern, places=run) for pattern, run in zip(patterns, runs, strict=True)]

    def slices(self, shape: Sequence[int], width: int, places: Tensor | None = None) -> Slices:
        self.check(shape)
        places = self.places if places is None else self.places & places
        for start, stop, choose in self.pattern.slices(shape, width, places):
            yield start, stop, functools.partial(self._best, choose, places[:, start:stop])

    def _best(self, choose: Choice, places: Tensor, scores: Tensor) -> Tensor:
        return choose(self._lowered(scores, places)) & places.to(scores.device)

    def _lowered(self, scores: Tensor, places: Tensor) -> Tensor:
        """``scores`` that are the lowest but at ``places``: below a kept weight's 0."""
        return scores.masked_fill(~places.to(scores.device), -math.inf)

    def _with(self, pattern: Pattern | None, places: Tensor) -> Pattern | None:
        return None if pattern is None else replace(self, pattern=pattern, places=places)
