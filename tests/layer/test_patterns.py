"""Patterns: exact counts, ties by position, and the same masks as a naive sort or as brute force."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor

from niwaki.errors import PatternError
from niwaki.layer.patterns import (
    NM,
    Block,
    Fixed,
    Pattern,
    PerRow,
    Quota,
    TransposableNM,
    Unstructured,
)
from niwaki.layer.problem import LayerProblem
from niwaki.layer.solvers import SparseGPT, Wanda
from support.covering import covered
from support.problems import lowest_go, lowest_go_in_matrix, make_problem
from support.scores import PATTERNS, TILED, Scores, naive_blocks, random_scores, tied_scores, zeros_of

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


@functools.cache
def naive_tiles(n: int, m: int) -> list[tuple[int, ...]]:
    """All masks of one tile, read as binary numbers in rising order."""
    tiles = []
    for bits in itertools.product((0, 1), repeat=m * m):
        rows = [sum(bits[i * m : i * m + m]) for i in range(m)]
        if rows == [sum(bits[i::m]) for i in range(m)] == [n] * m:
            tiles.append(bits)
    return tiles


def naive_tile(scores: Tensor, n: int) -> Tensor:
    """The first of the best."""
    m = scores.shape[0]
    squares = [x * x for x in scores.flatten().tolist()]
    best = max(  # the first one, says Python's documentation
        naive_tiles(n, m), key=lambda bits: sum(x for x, bit in zip(squares, bits, strict=True) if bit)
    )
    return torch.tensor(best, dtype=torch.bool).reshape(m, m)


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


class TestBlock:
    @covered
    @pytest.mark.parametrize("sparsity", SPARSITIES)
    @pytest.mark.parametrize("shape", [(4, 4), (1, 1), (1, 8), (2, 3), (12, 24), (12, 1)], ids=str)
    @pytest.mark.parametrize("make", [random_scores, tied_scores])
    def test_equals_a_sort_of_the_sums(self, make: Scores, shape: tuple[int, int], sparsity: float) -> None:
        scores = make(12, 24)
        assert torch.equal(Block(sparsity, shape).mask(scores), naive_blocks(scores, sparsity, shape))

    @pytest.mark.parametrize("rows", [2**7 + 2, 3 * 2**7])
    def test_more_rows_than_are_squared_at_once(self, rows: int) -> None:
        for shape in ((2, 4), (rows, 2)):
            scores = random_scores(rows, 8)
            assert torch.equal(Block(0.6, shape).mask(scores), naive_blocks(scores, 0.6, shape))

    def test_squares_are_added_up_not_magnitudes(self) -> None:
        scores = torch.tensor([[2.0, 2.0, 3.0, 0.0]])  # sums 4 and 3, of squares 8 and 9
        assert Block(0.5, (1, 2)).mask(scores).tolist() == [[False, False, True, True]]

    def test_of_equal_sums_the_first_go(self) -> None:
        scores = torch.tensor([[3.0, 4.0, 5.0, 0.0, 4.0, 3.0]])
        assert Block(1 / 3, (1, 2)).mask(scores).tolist() == [[False, False, True, True, True, True]]

    @pytest.mark.parametrize("shape", [(6, 8), (8, 6), (6, 6)])
    def test_blocks_must_divide(self, shape: tuple[int, int]) -> None:
        message = rf"block-4x4:0.5 .* tiles of 4 x 4, which must divide .* is {shape[0]} x {shape[1]}"
        for call in (Block(0.5).check, lambda shape: Block(0.5).mask(random_scores(*shape))):
            with pytest.raises(PatternError, match=message):
                call(shape)
        with pytest.raises(PatternError, match=message):
            list(Block(0.5).slices(shape, 4))

    @pytest.mark.parametrize("shape", [(0, 4), (4, 0), (-4, -4)])
    def test_shape_is_checked_when_made(self, shape: tuple[int, int]) -> None:
        with pytest.raises(PatternError, match="at least 1 row and 1 column"):
            Block(0.5, shape)


class TestQuota:
    @pytest.mark.parametrize("make", [random_scores, tied_scores])
    @pytest.mark.parametrize("sparsity", [0.5, 0.51, 0.6, 0.8, 0.99])
    def test_is_2_4_and_then_the_quota(self, make: Scores, sparsity: float) -> None:
        scores = make(13, 24)
        left = scores.masked_fill(~naive_nm(scores, 2, 4), -1.0)
        per_row = Quota(NM(2, 4), PerRow(sparsity)).mask(scores)
        assert torch.equal(per_row, naive_per_row(left, sparsity))
        unstructured = Quota(NM(2, 4), Unstructured(sparsity)).mask(scores)
        assert torch.equal(unstructured, lowest_go_in_matrix(left, round(sparsity * scores.numel())))

    @pytest.mark.parametrize("quota", [PerRow(0.75), Unstructured(0.75)], ids=str)
    def test_without_more_zeros_it_is_n_m(self, quota: PerRow | Unstructured) -> None:
        scores = random_scores(13, 24)
        assert torch.equal(Quota(NM(1, 4), quota).mask(scores), NM(1, 4).mask(scores))

    @pytest.mark.parametrize("quota", [PerRow(0.49), Unstructured(0.0)], ids=str)
    def test_fewer_zeros_than_n_m_is_an_error(self, quota: PerRow | Unstructured) -> None:
        with pytest.raises(PatternError, match=rf"2:4\+{quota} asks for .*, and 2:4 alone has 0.5"):
            Quota(NM(2, 4), quota)

    def test_columns_must_divide(self) -> None:
        pattern = Quota(NM(2, 4), PerRow(0.6))
        for call in (pattern.check, lambda shape: list(pattern.slices(shape, 4))):
            with pytest.raises(PatternError, match="2:4 needs a number of columns that 4 divides"):
                call((4, 42))

    @pytest.mark.parametrize("quota", [PerRow(0.6), Unstructured(0.6)], ids=str)
    @pytest.mark.parametrize("width", [1, 8, 10, 32])
    def test_runs_keep_to_both(self, width: int, quota: PerRow | Unstructured) -> None:
        of_each = torch.zeros(13, dtype=torch.long)
        for runs, (start, stop, part) in enumerate(Quota(NM(2, 4), quota).slices((13, 96), width)):
            mask = part(random_scores(13, stop - start, seed=start))
            assert mask.reshape(-1, 4).sum(dim=1).max() <= 2
            assert stop - start <= max(width + 3, 4)
            assert abs(zeros_of(mask) - 0.6 * mask.numel()) <= 1
            of_each += (~mask).sum(dim=1)
            if isinstance(quota, PerRow):
                assert of_each.max() - of_each.min() <= runs + 1


class TestTransposableNM:
    @pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (3, 4), (4, 4), (1, 2), (2, 3), (1, 1)])
    @pytest.mark.parametrize("make", [random_scores, tied_scores])
    @pytest.mark.slow
    def test_each_tile_is_the_first_of_the_best(self, make: Scores, n: int, m: int) -> None:
        scores = make(2 * m, 3 * m)
        mask = TransposableNM(n, m).mask(scores)
        for i, j in itertools.product(range(0, 2 * m, m), range(0, 3 * m, m)):
            assert torch.equal(mask[i : i + m, j : j + m], naive_tile(scores[i : i + m, j : j + m], n))

    def test_of_equal_choices_the_one_that_drops_the_earlier(self) -> None:
        T, F = True, False
        for score in (0.0, 0.1, 1.0):  # squares of 0.1 are rounded
            mask = TransposableNM(2, 4).mask(torch.full((4, 4), score))
            assert mask.tolist() == [[F, F, T, T], [F, F, T, T], [T, T, F, F], [T, T, F, F]]

    def test_the_transpose_of_w_is_n_m_too(self) -> None:
        mask = TransposableNM(1, 4).mask(random_scores(400, 1204))  # more than one strip
        for either in (mask, mask.T):
            assert (either.reshape(-1, 4).sum(dim=1) == 1).all()

    def test_tiles_do_not_know_of_each_other(self) -> None:
        scores = random_scores(400, 1204)
        mask = TransposableNM(2, 4).mask(scores)
        for i, j in ((0, 0), (52, 1200), (56, 0), (396, 1200)):
            here = (slice(i, i + 4), slice(j, j + 4))
            assert torch.equal(mask[here], TransposableNM(2, 4).mask(scores[here]))

    def test_one_huge_weight_does_not_hide_the_others(self) -> None:
        """In single precision 1e8 + 1 is 1e8, and such inputs are real."""
        scores = 1 + random_scores(4, 4)
        scores[1, 2] = 1e4
        assert torch.equal(TransposableNM(2, 4).mask(scores), naive_tile(scores, 2))

    @pytest.mark.parametrize("shape", [(6, 8), (8, 6)])
    def test_tiles_must_divide(self, shape: tuple[int, int]) -> None:
        pattern = TransposableNM(2, 4)
        with pytest.raises(PatternError, match=r"transposable-2:4 .* must divide its rows and columns"):
            pattern.mask(random_scores(*shape))
        with pytest.raises(PatternError, match=r"transposable-2:4 .* must divide its rows and columns"):
            list(pattern.slices(shape, 8))

    def test_large_tiles_are_refused(self) -> None:
        with pytest.raises(PatternError, match=r"transposable-4:8 .* use m up to 4, .* or plain 4:8"):
            TransposableNM(4, 8)

    @pytest.mark.parametrize(("n", "m"), [(5, 4), (0, 4), (-1, 4), (0, 0)])
    def test_n_is_checked_when_made(self, n: int, m: int) -> None:
        with pytest.raises(PatternError, match="n must be 1 to m"):
            TransposableNM(n, m)


@pytest.mark.parametrize("pattern", [Block(0.5), TransposableNM(2, 4)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "factor"),
    [
        (torch.float32, 2.0**126),
        (torch.float32, 2.0**-120),
        (torch.float64, 2.0**1021),
        (torch.float64, 2.0**-1000),
    ],
    ids=str,
)
def test_squares_neither_overflow_nor_vanish(pattern: Pattern, dtype: torch.dtype, factor: float) -> None:
    scores = random_scores(16, 16).to(dtype).clamp(max=2.0)
    assert torch.isfinite(scores * factor).all()
    assert torch.equal(pattern.mask(scores * factor), pattern.mask(scores))


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


@pytest.mark.parametrize("kind", [Unstructured, PerRow, Block])
@pytest.mark.parametrize("sparsity", [1.0, -1e-9, 1.5, float("nan")])
def test_sparsity_is_checked_when_made(kind: type[Unstructured] | type[PerRow] | type[Block], sparsity: float) -> None:
    with pytest.raises(PatternError):
        kind(sparsity)


@pytest.mark.parametrize(("n", "m"), [(5, 4), (0, 4), (-1, 4), (0, 0)])
def test_nm_is_checked_when_made(n: int, m: int) -> None:
    with pytest.raises(PatternError):
        NM(n, m)


def test_patterns_are_values() -> None:
    """They are dictionary keys and go into records: equal parameters, equal patterns."""
    different: list[Pattern] = [Unstructured(0.5), PerRow(0.5), Unstructured(0.6), NM(2, 4), NM(4, 8)]
    different += [*TILED, Quota(NM(2, 4), PerRow(0.5)), Quota(NM(2, 4), Unstructured(0.5))]
    assert len({*different, Unstructured(0.5), NM(2, 4)}) == len(different)


@pytest.mark.parametrize("pattern", [*PATTERNS, *TILED], ids=str)
def test_group_and_exchange(pattern: Pattern) -> None:
    """Weights that may change places within a row, as DSnoT and swaps do it."""
    match pattern:
        case NM(_, m) | Quota(NM(_, m), _):
            assert (pattern.group, pattern.exchange(96)) == (m, m)
        case TransposableNM(_, m) | Block(_, (_, m)):
            assert (pattern.group, pattern.exchange(96)) == (m, 0)
        case _:
            assert (pattern.group, pattern.exchange(96)) == (1, 96)


@pytest.mark.parametrize("pattern", TILED, ids=str)
def test_sparsegpt_scores_are_magnitudes_too(pattern: Pattern) -> None:
    """With inputs that are not correlated they are Wanda's; its paper's, which are squares, would be squared."""
    problem = make_problem(rows=24, columns=48)
    diagonal = LayerProblem(problem.W, problem.gram.H.diagonal().diag())
    mask = SparseGPT(damping=0, block_size=48)(diagonal, pattern).mask
    assert torch.equal(mask, Wanda()(diagonal, pattern).mask)
