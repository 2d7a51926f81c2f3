"""Properties of every pattern on 4 x 4 weights: few enough to try all supports there are."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from niwaki.layer.patterns import NM, Fixed, Pattern, PerRow, Unstructured
from niwaki.layer.patterns.selection import middle_of_each
from support.scores import random_scores, zeros_of
from support.supports import SMALL, allowed, supports

small_patterns = pytest.mark.parametrize("pattern", SMALL, ids=str)
whole_numbers = st.lists(st.integers(0, 3), min_size=16, max_size=16)
any_numbers = st.lists(st.floats(0, 1e3, width=32), min_size=16, max_size=16)
distinct_numbers = st.lists(st.integers(1, 1000), min_size=16, max_size=16, unique=True)
dtypes = st.sampled_from([torch.float32, torch.float64])


def four_by_four(values: list[float] | list[int], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype).reshape(4, 4)


def test_supports_are_all_there() -> None:
    """Numbers that are known from elsewhere."""
    assert len(supports(Unstructured(0.5))) == 12870
    assert len(supports(NM(2, 4))) == 6**4
    assert len(supports(NM(1, 2))) == 2**8


few = settings(max_examples=20)  # of each property for each of so many patterns


@small_patterns
class TestProperties:
    @given(st.one_of(whole_numbers, any_numbers), dtypes)
    @few
    @pytest.mark.slow
    def test_the_mask_is_allowed_and_none_is_better(
        self, pattern: Pattern, values: list[float], dtype: torch.dtype
    ) -> None:
        scores = four_by_four(values, dtype)
        before = scores.clone()
        mask = pattern.mask(scores)
        assert torch.equal(scores, before)
        assert mask.dtype == torch.bool
        assert mask.shape == (4, 4)
        assert allowed(pattern, mask[None]).item()
        squares = scores.double().flatten().square()
        best = float((supports(pattern) @ squares).max())
        assert float(squares[mask.flatten()].sum()) == pytest.approx(best, rel=1e-14)

    @given(distinct_numbers, dtypes)
    @few
    @pytest.mark.slow
    def test_the_projection_is_its_own(self, pattern: Pattern, values: list[int], dtype: torch.dtype) -> None:
        scores = four_by_four(values, dtype)
        mask = pattern.mask(scores)
        assert torch.equal(pattern.mask(scores * mask), mask)

    @given(st.one_of(whole_numbers, any_numbers), st.floats(0, 1), st.floats(0, 1))
    @few
    @pytest.mark.slow
    def test_partial_masks_are_on_the_way(
        self, pattern: Pattern, values: list[float], one: float, other: float
    ) -> None:
        scores = four_by_four(values)
        before = scores.clone()
        masks = [pattern.partial(f).mask(scores) for f in (0, min(one, other), max(one, other), 1)]
        assert torch.equal(scores, before)
        for earlier, later in itertools.pairwise(masks):
            assert (earlier | ~later).all()
        assert masks[0].all()
        assert torch.equal(masks[-1], pattern.mask(scores))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 50), st.just(0.0) | st.floats(1e-15, 1, exclude_max=True))
def test_counts_add_up_at_any_sparsity(rows: int, columns: int, width: int, sparsity: float) -> None:
    scores = random_scores(rows, columns)
    for pattern in (Unstructured(sparsity), PerRow(sparsity)):
        parts = pattern.slices((rows, columns), width)
        cut = sum(zeros_of(part(scores[:, start:stop])) for start, stop, part in parts)
        assert cut == zeros_of(pattern.mask(scores)) == round(sparsity * (rows * columns))


@pytest.mark.parametrize(
    "pattern",
    [
        Unstructured(0.5),
        Unstructured(0.0),
        PerRow(0.5),
        PerRow(0.0),
        NM(2, 4),
        NM(1, 4),
        NM(4, 4),
        Fixed(torch.rand(8, 16, generator=torch.Generator().manual_seed(3)) > 0.4),
    ],
    ids=str,
)
def test_thresholds_tell_what_the_mask_keeps(pattern: Pattern) -> None:
    scores = torch.rand(8, 16, generator=torch.Generator().manual_seed(1))
    threshold = pattern.threshold(scores)
    if isinstance(pattern, Fixed) or pattern.sparsity == 0:
        assert threshold is None
        return
    assert threshold is not None
    assert torch.equal(scores > threshold, pattern.mask(scores))
    if isinstance(pattern, NM):  # in the middle of the second and the third highest
        ordered = scores.view(8, 4, 4).sort(dim=2, descending=True).values[:, :, pattern.n - 1 : pattern.n + 1]
        assert torch.allclose(threshold.view(8, 4, 4), ordered.mean(dim=2, keepdim=True))


def test_runs_of_columns_on_their_own() -> None:
    """Their patterns together keep of the scores that they are made from what the whole one keeps."""
    scores = torch.rand(8, 16, generator=torch.Generator().manual_seed(1))
    scores[:, 4:12] *= 5
    runs = scores.split([4, 8, 4], dim=1)
    for pattern in (Unstructured(0.5), Unstructured(0.9), Unstructured(0.0), NM(2, 4), NM(4, 4)):
        apart = pattern.split(runs)
        assert apart is not None
        masks = [own.mask(part) for own, part in zip(apart, runs, strict=True)]
        together, whole = torch.cat(masks, dim=1), pattern.mask(scores)
        if pattern == Unstructured(0.9):  # a run of which nothing would stay keeps one weight
            assert int((together != whole).sum()) <= 2
        else:
            assert torch.equal(together, whole)
    assert PerRow(0.5).split(runs) is None


@pytest.mark.parametrize(("n", "m"), [(1, 4), (3, 4), (4, 8), (2, 4)])
def test_middle_of_each(n: int, m: int) -> None:
    scores = torch.rand(6, 24, generator=torch.Generator().manual_seed(2)).double()
    scores[0] = 1.0  # ties
    middle = middle_of_each(scores, n, m)
    for row in range(6):
        for first in range(0, 24, m):
            ordered = sorted(scores[row, first : first + m].tolist(), reverse=True)
            expected = (ordered[n - 1] + ordered[n]) / 2
            assert middle[row, first : first + m].tolist() == pytest.approx([expected] * m)


def test_a_fixed_mask_goes_along_when_columns_are_reordered() -> None:
    values = torch.rand(8, 16, generator=torch.Generator().manual_seed(3)) > 0.4
    order = torch.arange(16).flip(0)
    moved = Fixed(values).reordered(order)
    assert isinstance(moved, Fixed)
    assert torch.equal(moved.values, values.flip(1))
    assert NM(2, 4).reordered(order) == NM(2, 4)
