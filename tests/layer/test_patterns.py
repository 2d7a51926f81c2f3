"""Patterns: exact counts, ties by position, and the same masks as a naive sort or as brute force."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from niwaki.errors import PatternError
from niwaki.layer.patterns import NM, Fixed, Pattern, PerRow, Unstructured
from support.problems import lowest_go, lowest_go_in_matrix
from support.scores import PATTERNS, Scores, random_scores, tied_scores, zeros_of

SPARSITIES = (0.0, 0.1, 1 / 3, 0.5, 0.6, 0.8, 0.99)
NM_PATTERNS = (NM(2, 4), NM(4, 8), NM(1, 3), NM(16, 32), NM(1, 4), NM(3, 4), NM(4, 4), NM(1, 1))


def naive_per_row(scores: Tensor, sparsity: float) -> Tensor:
    rows, columns = scores.shape
    each, extra = divmod(round(sparsity * rows * columns), rows)
    sorted_rows = [sorted(range(columns), key=row.__getitem__) for row in scores.tolist()]
    mask = torch.ones(rows, columns, dtype=torch.bool)
    for i, order in enumerate(sorted_rows):
        mask[i, order[:each]] = False
    if extra:
        following = [float(scores[i, order[each]]) for i, order in enumerate(sorted_rows)]
        for i, kept in enumerate(lowest_go(following, extra)):
            mask[i, sorted_rows[i][each]] = kept
    return mask


def naive(pattern: Pattern, scores: Tensor) -> Tensor:
    match pattern:
        case Unstructured(sparsity):
            return lowest_go_in_matrix(scores, round(sparsity * scores.numel()))
        case PerRow(sparsity):
            return naive_per_row(scores, sparsity)
        case NM(n, m):
            groups = [lowest_go(group.tolist(), m - n) for group in scores.reshape(-1, m)]
            return torch.tensor(groups).reshape(scores.shape)
    raise AssertionError(pattern)


@pytest.mark.parametrize("pattern", [kind(s) for kind in (Unstructured, PerRow) for s in SPARSITIES], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (13, 17), (64, 48)])
@pytest.mark.parametrize("make", [random_scores, tied_scores])
def test_fractions_equal_a_sort(make: Scores, shape: tuple[int, int], pattern: Pattern) -> None:
    """Of equal scores the first go; a zero that is left over in the row with the lowest next score."""
    scores = make(*shape)
    mask = pattern.mask(scores)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, naive(pattern, scores))


@pytest.mark.parametrize("pattern", NM_PATTERNS, ids=str)
@pytest.mark.parametrize("make", [random_scores, tied_scores])
def test_groups_equal_a_sort(make: Scores, pattern: NM) -> None:
    """In both ways of ranking: comparisons up to m = 16, a sort beyond."""
    scores = make(5, 96)
    assert torch.equal(pattern.mask(scores), naive(pattern, scores))


@pytest.mark.parametrize("pattern", [NM(2, 4), NM(16, 32)], ids=str)
def test_columns_must_divide(pattern: NM) -> None:
    message = rf"{pattern} needs a number of columns that {pattern.m} divides; this matrix has 42"
    for check in (
        lambda: pattern.mask(random_scores(4, 42)),
        lambda: pattern.check((4, 42)),
        lambda: list(pattern.slices((4, 42), 128)),
    ):
        with pytest.raises(PatternError, match=message):
            check()
    pattern.check((42, 64))


def test_sparsity() -> None:
    fixed = Fixed(torch.tensor([[True, False, False, False]]))
    assert [pattern.sparsity for pattern in (NM(2, 4), NM(1, 4), fixed)] == [0.5, 0.75, 0.75]


class TestFixed:
    def test_gives_its_mask_whatever_the_scores(self) -> None:
        values = tied_scores(6, 9) > 1
        assert torch.equal(Fixed(values).mask(random_scores(6, 9)), values)
        assert torch.equal(Fixed(values).partial(0.3).mask(random_scores(6, 9)), values)

    def test_other_masks_are_other_patterns(self) -> None:
        assert Fixed(torch.ones(2, 4, dtype=torch.bool)) != Fixed(torch.zeros(2, 4, dtype=torch.bool))

    def test_shape_must_agree(self) -> None:
        with pytest.raises(PatternError, match=r"mask has shape \(6, 9\), the matrix \(9, 6\)"):
            Fixed(torch.ones(6, 9, dtype=torch.bool)).mask(random_scores(9, 6))


def every_ninth_is_high(rows: int, columns: int) -> Tensor:
    """A selection that looks at a regular sample first is misled."""
    scores = random_scores(rows, columns)
    scores.view(-1)[::9] += 100
    return scores


BIG_SCORES = {
    "random": random_scores(300, 400),
    "few values": tied_scores(300, 400),
    "constant": torch.full((300, 400), 0.25),
    "nearly constant": torch.full((300, 400), 0.25).index_fill(1, torch.tensor([7]), 0.125),
    "rising": torch.arange(120_000.0).reshape(300, 400),
    "falling": torch.arange(120_000.0).flip(0).reshape(300, 400),
    "columns of one size": torch.arange(256.0).repeat(512, 1),
    "rows of one size": torch.arange(512.0)[:, None].repeat(1, 256),
    "every ninth is high": every_ninth_is_high(512, 256),
    "transposed": random_scores(400, 300).T,
    "transposed, few values": tied_scores(400, 300).T,
    "every second column": tied_scores(300, 800)[:, ::2],
    "float64": random_scores(300, 400).double(),
}


class TestBigMatrices:
    """However the threshold is found among many weights, the masks must not show it."""

    @pytest.mark.parametrize("name", BIG_SCORES)
    def test_unstructured_equals_a_sort(self, name: str) -> None:
        scores = BIG_SCORES[name]
        order = scores.flatten().argsort(stable=True)
        for sparsity in (1e-5, 0.01, 0.3, 0.5, 0.8, 0.999, 0.99999):
            zeros = round(sparsity * scores.numel())
            expected = torch.ones(scores.numel(), dtype=torch.bool)
            expected[order[:zeros]] = False
            mask = Unstructured(sparsity).mask(scores)
            assert zeros_of(mask) == zeros
            assert torch.equal(mask, expected.reshape(scores.shape)), f"sparsity {sparsity}"

    @pytest.mark.parametrize("pattern", [PerRow(0.6), NM(2, 4), NM(16, 32)], ids=str)
    @pytest.mark.parametrize("name", ["random", "few values", "transposed, few values"])
    def test_layout_has_no_influence(self, name: str, pattern: Pattern) -> None:
        scores = BIG_SCORES[name][:, :288]
        assert torch.equal(pattern.mask(scores), pattern.mask(scores.contiguous()))
        assert torch.equal(pattern.mask(scores), pattern.mask(scores.T.contiguous().T))


def test_patterns_are_values() -> None:
    """They are dictionary keys and go into records: equal parameters, equal patterns."""
    different: list[Pattern] = [Unstructured(0.5), PerRow(0.5), Unstructured(0.6), NM(2, 4), NM(4, 8)]
    assert len({*different, Unstructured(0.5), NM(2, 4)}) == len(different)


def test_groups() -> None:
    """Columns whose mask is chosen together."""
    for pattern in PATTERNS:
        assert pattern.group == (pattern.m if isinstance(pattern, NM) else 1)
