"""Which weights may be non-zero.

A pattern is a value with one operation that matters: ``pattern.mask(scores)``, the mask of the best
weights that the pattern allows. For scores ``|w|`` that is the Euclidean projection of ``w`` onto the
matrices of the pattern::

    argmin_Z  |Z - W|^2   subject to   the support of Z being allowed   =   W * pattern.mask(|W|)

Counts are exact, ties are broken by position, and True means that a weight is kept.
"""

from __future__ import annotations

import abc
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from niwaki.errors import PatternError


class Pattern(abc.ABC):
    """A set of allowed supports for a matrix of shape (out, in)."""

    if TYPE_CHECKING:  # at run time a dataclass field would take the property for its default

        @property
        def sparsity(self) -> float:
            """The fraction of zeros that is asked for, in [0, 1)."""

    @abc.abstractmethod
    def mask(self, scores: Tensor) -> Tensor:
        """The allowed mask with the greatest sum of scores.

        Args:
            scores: (out, in), floating point, finite; the weight with the lower score goes first.

        Returns:
            (out, in) bool, True where a weight is kept.

        Raises:
            PatternError: the pattern does not fit the shape.
        """

    @abc.abstractmethod
    def partial(self, fraction: float) -> Pattern:
        """The pattern on the way to this one that has ``fraction`` (in [0, 1]) of its zeros.

        What this pattern would keep of some scores, the partial one keeps too. A mask that is given
        (``Fixed``) has no way to it and is all there from the start.
        """

    @abc.abstractmethod
    def slices(self, shape: tuple[int, int], width: int) -> Iterator[tuple[int, int, Pattern]]:
        """Cuts a matrix of ``shape`` into runs of columns, for solvers that go from left to right.

        Yields:
            (start, stop, pattern of columns start..stop), in order; the counts of the parts add up
            to the count of the whole. Runs are about ``width`` wide, or the pattern's own group, and
            never cross a multiple of ``width`` that is a multiple of ``group``.
        """

    @property
    def group(self) -> int:
        """The number of columns that stand or fall together: m for n:m, otherwise 1."""
        return 1

    def exchange(self, columns: int) -> int:
        """Within how many consecutive ``columns`` of a row a kept and a pruned weight may change places.

        Runs start at multiples of the number. 0: nowhere, because weights of several rows or columns
        stand or fall together.
        """
        return columns

    def check(self, shape: tuple[int, int]) -> None:  # noqa: B027 - most patterns fit every shape
        """Raises PatternError where the pattern does not fit a matrix of ``shape``."""


@dataclass(frozen=True)
class Unstructured(Pattern):
    """The lowest ``round(sparsity * out * in)`` scores of the whole matrix are zero."""

    sparsity: float

    def __post_init__(self) -> None:
        _check_sparsity(self.sparsity)

    def __str__(self) -> str:
        return f"unstructured:{self.sparsity:g}"

    def mask(self, scores: Tensor) -> Tensor:
        return _keep_highest(scores, round(self.sparsity * scores.numel()))

    def partial(self, fraction: float) -> Pattern:
        return Unstructured(self.sparsity * fraction)

    def slices(self, shape: tuple[int, int], width: int) -> Iterator[tuple[int, int, Pattern]]:
        rows, _ = shape
        for start, stop in _runs(shape[1], width):
            before, after = (round(self.sparsity * rows * end) for end in (start, stop))
            yield start, stop, _Count(after - before)


@dataclass(frozen=True)
class PerRow(Pattern):
    """Every row (output) has the same number of zeros, to within one.

    Where ``sparsity * in`` is not a whole number, each row has the next lower number of zeros and the
    rows whose next weight has the lowest score have one more, so that the total is exactly
    ``round(sparsity * out * in)``. (Solvers that choose masks for one block of columns after another
    keep to that within each block.) Rounding every row down instead, as public code does, leaves 59.9 %
    where 60 % were asked for.
    """

    sparsity: float

    def __post_init__(self) -> None:
        _check_sparsity(self.sparsity)

    def __str__(self) -> str:
        return f"per-row:{self.sparsity:g}"

    def mask(self, scores: Tensor) -> Tensor:
        return _keep_highest_per_row(scores, round(self.sparsity * scores.numel()))

    def partial(self, fraction: float) -> Pattern:
        return PerRow(self.sparsity * fraction)

    def slices(self, shape: tuple[int, int], width: int) -> Iterator[tuple[int, int, Pattern]]:
        # Each run has to give every row its share, so the rows' remainders are settled at the end of
        # each run: a row is then never more than one zero per run away from its fair share.
        rows, _ = shape
        for start, stop in _runs(shape[1], width):
            before, after = (round(self.sparsity * rows * end) for end in (start, stop))
            yield start, stop, _Count(after - before, per_row=True)


@dataclass(frozen=True)
class NM(Pattern):
    """At most ``n`` of every ``m`` consecutive weights of a row are non-zero, as in 2:4."""

    n: int
    m: int

    def __post_init__(self) -> None:
        if not 0 < self.n <= self.m:
            raise PatternError(f"the pattern {self.n}:{self.m} keeps n of every m weights; n must be 1 to m")

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    @property
    def sparsity(self) -> float:
        return 1 - self.n / self.m

    @property
    def group(self) -> int:
        return self.m

    def exchange(self, columns: int) -> int:
        return self.m

    def check(self, shape: tuple[int, int]) -> None:
        if shape[1] % self.m:
            raise PatternError(
                f"the pattern {self} needs a number of columns that {self.m} divides; this matrix has {shape[1]}"
            )

    def mask(self, scores: Tensor) -> Tensor:
        self.check((scores.shape[0], scores.shape[1]))
        zeros = self.m - self.n
        grouped = scores.reshape(-1, self.m)
        if self.m > 16:
            order = grouped.argsort(dim=1, stable=True)[:, :zeros]
            mask = torch.ones_like(grouped, dtype=torch.bool)
            return mask.scatter_(1, order, False).view(scores.shape)
        # Ranks by m (m - 1) / 2 comparisons: many times faster than sorting many short rows.
        place = grouped.T.contiguous()  # (m, groups)
        rank = torch.zeros(place.shape, dtype=torch.uint8, device=scores.device)
        for i in range(self.m):
            for j in range(i):
                later_wins = place[i] >= place[j]
                rank[i] += later_wins
                rank[j] += ~later_wins
        return (rank >= zeros).T.reshape(scores.shape)

    def partial(self, fraction: float) -> Pattern:
        return _PartialNM(self, fraction)

    def slices(self, shape: tuple[int, int], width: int) -> Iterator[tuple[int, int, Pattern]]:
        self.check(shape)
        for start, stop in _runs(shape[1], self.m):
            yield start, stop, self


@dataclass(frozen=True, eq=False)
class Fixed(Pattern):
    """A mask that comes from elsewhere: another solver, another model.

    Args:
        values: (out, in) bool, True where a weight is kept.
        within: The pattern that it was chosen from, which solvers that refine masks keep to.
    """

    values: Tensor
    within: Pattern | None = None

    def __str__(self) -> str:
        return f"fixed:{self.sparsity:.4g}"

    @property
    def sparsity(self) -> float:
        return 1 - int(self.values.count_nonzero()) / self.values.numel()

    def check(self, shape: tuple[int, int]) -> None:
        if tuple(self.values.shape) != tuple(shape):
            raise PatternError(
                f"the given mask has shape {tuple(self.values.shape)}, the matrix {tuple(shape)}"
            )

    def exchange(self, columns: int) -> int:
        return self.within.exchange(columns) if self.within else 0

    def mask(self, scores: Tensor) -> Tensor:
        self.check((scores.shape[0], scores.shape[1]))
        return self.values.to(scores.device)

    def partial(self, fraction: float) -> Pattern:
        return self

    def slices(self, shape: tuple[int, int], width: int) -> Iterator[tuple[int, int, Pattern]]:
        self.check(shape)
        for start, stop in _runs(shape[1], width):
            yield start, stop, Fixed(self.values[:, start:stop])


def parse_pattern(text: str) -> Pattern:
    """``"2:4"``, ``"unstructured:0.6"`` or ``"per-row:0.6"`` as a pattern.

    Raises:
        PatternError: it is none of these, or its numbers are out of range.
    """
    if match := re.fullmatch(r"(\d+):(\d+)", text.strip()):
        return NM(int(match[1]), int(match[2]))
    kinds: dict[str, type[Unstructured] | type[PerRow]] = {"unstructured": Unstructured, "per-row": PerRow}
    kind, _, number = text.strip().partition(":")
    if kind in kinds:
        try:
            return kinds[kind](float(number))
        except ValueError as error:
            if isinstance(error, PatternError):
                raise
    raise PatternError(f"{text!r} is no pattern; try 2:4, unstructured:0.6 or per-row:0.6")


@dataclass(frozen=True)
class _Count(Pattern):
    """A given number of zeros: what the column runs of a pattern are made of."""

    zeros: int
    per_row: bool = False

    @property
    def sparsity(self) -> float:
        raise NotImplementedError("a number of zeros is a sparsity only for a known shape")

    def mask(self, scores: Tensor) -> Tensor:
        return (_keep_highest_per_row if self.per_row else _keep_highest)(scores, self.zeros)

    def partial(self, fraction: float) -> Pattern:
        return _Count(round(self.zeros * fraction), self.per_row)

    def slices(self, shape: tuple[int, int], width: int) -> Iterator[tuple[int, int, Pattern]]:
        raise NotImplementedError("column runs are not cut again")


@dataclass(frozen=True)
class _PartialNM(Pattern):
    """n:m half way: the n best of each group are safe, the lowest of the others are zero.

    Boza 2024, section 3.2: "we always keep the two highest elements from each group of four and then
    prune 2 s_t weights from the remaining ones".
    """

    final: NM
    fraction: float

    @property
    def sparsity(self) -> float:
        return self.final.sparsity * self.fraction

    def mask(self, scores: Tensor) -> Tensor:
        safe = self.final.mask(scores)
        # The count comes from whole groups, so that fraction 1 is the final mask to the weight.
        zeros = round(self.fraction * (scores.numel() // self.final.m) * (self.final.m - self.final.n))
        return _keep_highest(scores.masked_fill(safe, math.inf), zeros)

    def partial(self, fraction: float) -> Pattern:
        return _PartialNM(self.final, self.fraction * fraction)

    def slices(self, shape: tuple[int, int], width: int) -> Iterator[tuple[int, int, Pattern]]:
        raise NotImplementedError("gradual solvers do not go column by column")


def _check_sparsity(sparsity: float) -> None:
    if not 0 <= sparsity < 1:
        raise PatternError(f"sparsity is the fraction of zeros, from 0 to below 1; got {sparsity:g}")


def _runs(columns: int, width: int) -> Iterator[tuple[int, int]]:
    for start in range(0, columns, width):
        yield start, min(start + width, columns)


def _keep_highest(scores: Tensor, zeros: int) -> Tensor:
    """True except at the ``zeros`` lowest scores; of equal scores the first go."""
    if zeros <= 0:
        return torch.ones_like(scores, dtype=torch.bool)
    flat = scores.reshape(-1)
    threshold = _kth_smallest(flat, zeros)
    mask = flat > threshold
    surplus = mask.numel() - int(mask.count_nonzero()) - zeros
    if surplus:  # more ties at the threshold than zeros wanted: the last ones stay
        ties = (flat == threshold).nonzero().squeeze(1)
        mask[ties[-surplus:]] = True
    return mask.view(scores.shape)


def _keep_highest_per_row(scores: Tensor, zeros: int) -> Tensor:
    rows, _ = scores.shape
    each, extra = divmod(zeros, rows)
    order = scores.argsort(dim=1, stable=True)
    mask = torch.ones_like(scores, dtype=torch.bool).scatter_(1, order[:, :each], False)
    if extra:
        next_index = order[:, each]
        next_score = scores.gather(1, next_index.unsqueeze(1)).squeeze(1)
        chosen = next_score.argsort(stable=True)[:extra]
        mask[chosen, next_index[chosen]] = False
    return mask


def _kth_smallest(values: Tensor, k: int) -> Tensor:
    """The k-th smallest (from 1) of a flat tensor, exactly.

    On a CPU by numpy, whose partition is 9 times faster than torch's kthvalue at 2,048 x 2,048: ADMM
    selects at every step, and kthvalue would take longer than the step's matrix product.
    """
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.partition(values.detach().numpy(), k - 1)[k - 1 : k].copy())
    return values.kthvalue(k).values
