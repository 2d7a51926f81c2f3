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


def naive_nm(scores: Tensor, n: int, m: int) -> Tensor:
    groups = [lowest_go(group.tolist(), m - n) for group in scores.reshape(-1, m)]
    return torch.tensor(groups).reshape(scores.shape)


class TestUnstructured:
    @pytest.mark.parametrize("sparsity", SPARSITIES)
    @pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (13, 17), (64, 48)])
    def test_count_is_exact(self, shape: tuple[int, int], sparsity: float) -> None:
        mask = Unstructured(sparsity).mask(random_scores(*shape))
        assert mask.shape == shape
        assert mask.dtype == torch.bool
        assert zeros_of(mask) == round(sparsity * shape[0] * shape[1])

    @pytest.mark.parametrize("sparsity", SPARSITIES)
    @pytest.mark.parametrize("make", [random_scores, tied_scores])
    def test_equals_a_sort(self, make: Scores, sparsity: float) -> None:
        scores = make(13, 17)
        expected = lowest_go_in_matrix(scores, round(sparsity * scores.numel()))
        assert torch.equal(Unstructured(sparsity).mask(scores), expected)

    def test_of_equal_scores_the_first_go(self) -> None:
        assert Unstructured(0.5).mask(torch.ones(2, 3)).tolist() == [[False] * 3, [True] * 3]
        scores = torch.tensor([[5.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
        assert Unstructured(0.5).mask(scores).tolist() == [[True, False, False], [False, True, True]]

    def test_compares_across_rows(self) -> None:
        scores = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        assert Unstructured(0.5).mask(scores).tolist() == [[False, False], [True, True]]


class TestPerRow:
    @pytest.mark.parametrize("sparsity", SPARSITIES)
    @pytest.mark.parametrize("shape", [(1, 7), (7, 1), (13, 17), (64, 48)])
    def test_total_is_exact_and_rows_differ_by_at_most_one(self, shape: tuple[int, int], sparsity: float) -> None:
        mask = PerRow(sparsity).mask(random_scores(*shape))
        assert zeros_of(mask) == round(sparsity * shape[0] * shape[1])
        of_each = (~mask).sum(dim=1)
        assert of_each.max() - of_each.min() <= 1

    @pytest.mark.parametrize("sparsity", SPARSITIES)
    @pytest.mark.parametrize("make", [random_scores, tied_scores])
    def test_equals_a_sort(self, make: Scores, sparsity: float) -> None:
        scores = make(13, 17)
        assert torch.equal(PerRow(sparsity).mask(scores), naive_per_row(scores, sparsity))

    def test_the_extra_zero_goes_to_the_row_with_the_lowest_next_score(self) -> None:
        # 3 zeros in 2 rows: one each, and one more where the second lowest is lower.
        scores = torch.tensor([[0.0, 5.0, 9.0], [1.0, 2.0, 9.0]])
        assert PerRow(0.5).mask(scores).tolist() == [[False, True, True], [False, False, True]]

    def test_of_equal_scores_the_first_go(self) -> None:
        mask = PerRow(0.5).mask(torch.ones(2, 3))
        assert mask.tolist() == [[False, False, True], [False, True, True]]


class TestNM:
    @pytest.mark.parametrize("pattern", NM_PATTERNS, ids=str)
    def test_each_group_keeps_exactly_n(self, pattern: NM) -> None:
        mask = pattern.mask(random_scores(5, 96))
        assert (mask.reshape(-1, pattern.m).sum(dim=1) == pattern.n).all()

    @pytest.mark.parametrize("pattern", NM_PATTERNS, ids=str)
    @pytest.mark.parametrize("make", [random_scores, tied_scores])
    def test_equals_a_sort(self, make: Scores, pattern: NM) -> None:
        scores = make(5, 96)
        assert torch.equal(pattern.mask(scores), naive_nm(scores, pattern.n, pattern.m))

    def test_of_equal_scores_the_first_go(self) -> None:
        # Both ways of ranking: comparisons up to m = 16, a sort beyond.
        assert NM(2, 4).mask(torch.ones(1, 4)).tolist() == [[False, False, True, True]]
        assert NM(16, 32).mask(torch.ones(1, 32)).tolist() == [[False] * 16 + [True] * 16]

    @pytest.mark.parametrize("pattern", [NM(2, 4), NM(16, 32)], ids=str)
    def test_columns_must_divide(self, pattern: NM) -> None:
        message = rf"{pattern} needs a number of columns that {pattern.m} divides; this matrix has 42"
        with pytest.raises(PatternError, match=message):
            pattern.mask(random_scores(4, 42))
        with pytest.raises(PatternError, match=message):
            pattern.check((4, 42))
        with pytest.raises(PatternError, match=message):
            list(pattern.slices((4, 42), 128))
        pattern.check((42, 64))

    def test_sparsity(self) -> None:
        assert NM(2, 4).sparsity == 0.5
        assert NM(1, 4).sparsity == 0.75


class TestFixed:
    def test_gives_its_mask_whatever_the_scores(self) -> None:
        values = tied_scores(6, 9) > 1
        assert torch.equal(Fixed(values).mask(random_scores(6, 9)), values)
        assert torch.equal(Fixed(values).partial(0.3).mask(random_scores(6, 9)), values)

    def test_other_masks_are_other_patterns(self) -> None:
        assert Fixed(torch.ones(2, 4, dtype=torch.bool)) != Fixed(torch.zeros(2, 4, dtype=torch.bool))

    def test_sparsity_is_the_fraction_of_zeros(self) -> None:
        assert Fixed(torch.tensor([[True, False, False, False]])).sparsity == 0.75

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


@pytest.mark.parametrize("kind", [Unstructured, PerRow])
@pytest.mark.parametrize("sparsity", [1.0, -1e-9, 1.5, float("nan")])
def test_sparsity_is_checked_when_made(kind: type[Unstructured] | type[PerRow], sparsity: float) -> None:
    with pytest.raises(PatternError):
        kind(sparsity)


@pytest.mark.parametrize(("n", "m"), [(5, 4), (0, 4), (-1, 4), (0, 0)])
def test_nm_is_checked_when_made(n: int, m: int) -> None:
    with pytest.raises(PatternError):
        NM(n, m)


def test_patterns_are_values() -> None:
    """They are dictionary keys and go into records: equal parameters, equal patterns."""
    different: list[Pattern] = [Unstructured(0.5), PerRow(0.5), Unstructured(0.6), NM(2, 4), NM(4, 8)]
    assert len({*different, Unstructured(0.5), NM(2, 4)}) == len(different)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_group_and_exchange(pattern: Pattern) -> None:
    """Weights that may change places within a row, as DSnoT and swaps do it."""
    match pattern:
        case NM(_, m):
            assert (pattern.group, pattern.exchange(96)) == (m, m)
        case _:
            assert (pattern.group, pattern.exchange(96)) == (1, 96)
