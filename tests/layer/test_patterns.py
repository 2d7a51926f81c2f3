"""Patterns: exact counts, ties by position, and the same masks as a naive sort or as brute force."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
    parse_pattern,
)
from niwaki.layer.patterns.selection import middle_of_each
from niwaki.layer.problem import LayerProblem
from niwaki.layer.solvers import SparseGPT, Wanda
from support.problems import generator, lowest_go, lowest_go_in_matrix, make_problem, normal

Scores = Callable[[int, int], Tensor]

SPARSITIES = (0.0, 0.1, 1 / 3, 0.5, 0.6, 0.8, 0.99)
NM_PATTERNS = (NM(2, 4), NM(4, 8), NM(1, 3), NM(16, 32), NM(1, 4), NM(3, 4), NM(4, 4), NM(1, 1))


def random_scores(rows: int, columns: int, seed: int = 0) -> Tensor:
    return normal(rows, columns, seed=seed, dtype=torch.float32).abs()


def tied_scores(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Only four values, so that every threshold falls among equals."""
    return torch.randint(4, (rows, columns), generator=generator(seed)).float()


def zeros_of(mask: Tensor) -> int:
    return int((~mask).sum())


# The references: what each pattern's docstring says, with Python's stable sort.


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


def naive_blocks(scores: Tensor, sparsity: float, shape: tuple[int, int]) -> Tensor:
    r, c = shape
    corners = list(itertools.product(range(0, scores.shape[0], r), range(0, scores.shape[1], c)))
    sums = [sum(x * x for x in scores[i : i + r, j : j + c].flatten().tolist()) for i, j in corners]
    mask = torch.ones(scores.shape, dtype=torch.bool)
    for (i, j), kept in zip(corners, lowest_go(sums, round(sparsity * len(corners))), strict=True):
        mask[i : i + r, j : j + c] = kept
    return mask


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
            mask = part.mask(random_scores(13, stop - start, seed=start))
            assert mask.reshape(-1, 4).sum(dim=1).max() <= 2
            assert stop - start <= max(width + 3, 4)
            assert abs(zeros_of(mask) - 0.6 * mask.numel()) <= 1
            of_each += (~mask).sum(dim=1)
            if isinstance(quota, PerRow):
                assert of_each.max() - of_each.min() <= runs + 1


class TestTransposableNM:
    @pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (3, 4), (4, 4), (1, 2), (2, 3), (1, 1)])
    @pytest.mark.parametrize("make", [random_scores, tied_scores])
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


def rows_for(pattern: Pattern) -> int:
    return 12 if pattern in TILED else 13


class TestPartial:
    """Gradual solvers rely on partial masks being on the way to the final one."""

    @pytest.mark.parametrize("pattern", [*PATTERNS, *TILED], ids=str)
    @pytest.mark.parametrize("make", [random_scores, tied_scores])
    def test_masks_are_nested(self, make: Scores, pattern: Pattern) -> None:
        scores = make(rows_for(pattern), 96)
        masks = [pattern.partial(fraction).mask(scores) for fraction in (0, 0.1, 0.37, 0.5, 0.9, 1)]
        for earlier, later in itertools.pairwise([*masks, pattern.mask(scores)]):
            assert (earlier | ~later).all()
        assert masks[0].all()
        assert torch.equal(masks[-1], pattern.mask(scores))

    @pytest.mark.parametrize("pattern", [*PATTERNS, *(p for p in TILED if not isinstance(p, Block))], ids=str)
    @pytest.mark.parametrize("fraction", [0.1, 0.37, 0.5, 0.9])
    def test_count(self, fraction: float, pattern: Pattern) -> None:
        scores = random_scores(rows_for(pattern), 96)
        partial = pattern.partial(fraction)
        assert zeros_of(partial.mask(scores)) == round(fraction * pattern.sparsity * scores.numel())
        assert partial.sparsity == pytest.approx(fraction * pattern.sparsity)

    def test_partial_block_is_whole_blocks(self) -> None:
        scores = random_scores(12, 96)
        assert Block(0.6).partial(0.5) == Block(0.3)
        assert zeros_of(Block(0.6).partial(0.5).mask(scores)) == 16 * round(0.3 * 72)

    def test_partial_of_a_partial(self) -> None:
        scores = random_scores(12, 96)
        for pattern in (NM(2, 4), TransposableNM(2, 4), Quota(NM(2, 4), PerRow(0.6))):
            twice = pattern.partial(0.5).partial(0.5)
            assert torch.equal(twice.mask(scores), pattern.partial(0.25).mask(scores))

    def test_partial_checks_the_shape(self) -> None:
        for pattern in (NM(2, 4), TransposableNM(2, 4), Quota(NM(2, 4), PerRow(0.6)), Block(0.5)):
            with pytest.raises(PatternError):
                pattern.partial(0.5).check((8, 42))

    def test_partial_nm_compares_the_unsafe_across_groups(self) -> None:
        # Safe are 3 4 and 7 8 (the two best of each four); of the others the lowest half goes.
        scores = torch.tensor([[3.0, 1.0, 4.0, 2.0, 5.0, 7.0, 8.0, 6.0]])
        assert NM(2, 4).partial(0.5).mask(scores).tolist() == [[True, False, True, False] + [True] * 4]


class TestSlices:
    @pytest.mark.parametrize("pattern", [*PATTERNS, *TILED, Fixed(tied_scores(13, 96) > 1)], ids=str)
    @pytest.mark.parametrize("width", [1, 5, 32, 96, 128])
    def test_cover_the_columns_in_order_and_counts_add_up(self, width: int, pattern: Pattern) -> None:
        rows = rows_for(pattern)
        scores = random_scores(rows, 96)
        end = total = 0
        for start, stop, part in pattern.slices((rows, 96), width):
            assert start == end
            assert stop > start
            mask = part.mask(scores[:, start:stop])
            assert mask.shape == (rows, stop - start)
            total += zeros_of(mask)
            end = stop
        assert end == 96
        assert total == zeros_of(pattern.mask(scores))

    @pytest.mark.parametrize("pattern", [*PATTERNS, *TILED], ids=str)
    @pytest.mark.parametrize("width", [1, 5, 10, 12, 32, 200])
    def test_runs_stay_inside_blocks(self, width: int, pattern: Pattern) -> None:
        walls = set(range(0, 97, width)) & set(range(0, 97, pattern.group))
        for start, stop, _ in pattern.slices((rows_for(pattern), 96), width):
            assert start % pattern.group == stop % pattern.group == 0
            assert not walls & set(range(start + 1, stop))

    @pytest.mark.parametrize("pattern", [Unstructured(0.1), PerRow(0.1)], ids=str)
    def test_the_order_of_products_has_no_influence(self, pattern: Pattern) -> None:
        """0.1 * 3 * 15 is above 4.5 and 0.1 * 45 is not."""
        parts = [part.mask(random_scores(3, b - a)) for a, b, part in pattern.slices((3, 15), 8)]
        assert zeros_of(torch.cat(parts, dim=1)) == zeros_of(pattern.mask(random_scores(3, 15))) == 4

    def test_per_row_gives_each_row_its_share_of_each_run(self) -> None:
        total = torch.zeros(13, dtype=torch.long)
        runs = 0
        for start, stop, part in PerRow(0.6).slices((13, 96), 20):
            of_each = (~part.mask(random_scores(13, stop - start, seed=start))).sum(dim=1)
            assert of_each.max() - of_each.min() <= 1
            total += of_each
            runs += 1
        assert total.sum() == round(0.6 * 13 * 96)
        assert total.max() - total.min() <= runs

    def test_blocks_are_cut_between(self) -> None:
        for start, stop, part in Block(0.5).slices((8, 96), 20):
            scores = random_scores(8, stop - start, seed=start)
            zeros = zeros_of(part.mask(scores))
            assert abs(zeros / 16 - 0.5 * scores.numel() / 16) <= 1
            assert torch.equal(part.mask(scores), naive_blocks(scores, zeros / scores.numel(), (4, 4)))

    def test_fixed_is_cut_like_the_matrix(self) -> None:
        values = tied_scores(6, 9) > 1
        parts = [part.mask(values[:, a:b].float()) for a, b, part in Fixed(values).slices((6, 9), 4)]
        assert torch.equal(torch.cat(parts, dim=1), values)


class TestParse:
    @pytest.mark.parametrize(
        ("text", "pattern"),
        [
            ("2:4", NM(2, 4)),
            (" 16:32 ", NM(16, 32)),
            ("unstructured:0.6", Unstructured(0.6)),
            ("unstructured:0", Unstructured(0.0)),
            ("per-row:.25", PerRow(0.25)),
            ("transposable-2:4", TransposableNM(2, 4)),
            ("block-4x4:0.5", Block(0.5)),
            (" block-16x1:.5 ", Block(0.5, (16, 1))),
            ("2:4+per-row:0.6", Quota(NM(2, 4), PerRow(0.6))),
            ("2:4+unstructured:0.6", Quota(NM(2, 4), Unstructured(0.6))),
            (" 1:4 + unstructured:0.8", Quota(NM(1, 4), Unstructured(0.8))),
        ],
    )
    def test_good(self, text: str, pattern: Pattern) -> None:
        assert parse_pattern(text) == pattern

    @pytest.mark.parametrize("pattern", [*PATTERNS, *TILED], ids=str)
    def test_reads_what_it_writes(self, pattern: Pattern) -> None:
        assert parse_pattern(str(pattern)) == pattern

    @given(st.floats(0, 1, exclude_max=True), st.integers(1, 9), st.integers(1, 9))
    def test_reads_what_it_writes_to_the_last_digit(self, sparsity: float, r: int, c: int) -> None:
        patterns: list[Pattern] = [Unstructured(sparsity), PerRow(sparsity), Block(sparsity, (r, c))]
        if sparsity >= 0.5:
            patterns += [Quota(NM(2, 4), PerRow(sparsity)), Quota(NM(c, c), Unstructured(sparsity))]
        for pattern in patterns:
            assert parse_pattern(str(pattern)) == pattern

    @pytest.mark.parametrize(
        ("pattern", "text"),
        [
            (Unstructured(0.5), "unstructured:0.5"),
            (PerRow(0.0), "per-row:0"),
            (Block(0.25, (2, 8)), "block-2x8:0.25"),
            (TransposableNM(1, 4), "transposable-1:4"),
            (Quota(NM(2, 4), PerRow(0.6)), "2:4+per-row:0.6"),
        ],
    )
    def test_writes(self, pattern: Pattern, text: str) -> None:
        assert str(pattern) == text

    @pytest.mark.parametrize(
        "text",
        [
            *[
                "",
                "0.5",
                "2:",
                ":4",
                "2:4:8",
                "-2:4",
                "unstructured",
                "unstructured:",
                "per-row:x",
                "magic:0.5",
            ],
            *[
                "transposable-2",
                "transposable-0.5",
                "block-4:0.5",
                "block-4x4",
                "block-4x4:x",
                "block-x4:0.5",
            ],
            *["2:4+", "+per-row:0.6", "2:4+2:4", "per-row:0.6+2:4", "2:4+block-4x4:0.6", "2:4+per-row:x"],
            *["transposable-2:4+per-row:0.6", "2:4+per-row:0.6+per-row:0.7"],
        ],
    )
    def test_no_pattern(self, text: str) -> None:
        examples = (
            r"unstructured:0\.6 or per-row:0\.6, or transposable-2:4, mixed-2:4, block-4x4:0\.5 "
            r"or 2:4\+per-row:0\.6"
        )
        with pytest.raises(PatternError, match=f"is no pattern; try 2:4, {examples}"):
            parse_pattern(text)

    def test_good_form_with_bad_numbers(self) -> None:
        with pytest.raises(PatternError, match="raise the first to that or more"):
            parse_pattern("2:4+per-row:0.4")
        with pytest.raises(PatternError, match="use m up to 4"):
            parse_pattern("transposable-4:8")
        with pytest.raises(PatternError, match="at least 1 row"):
            parse_pattern("block-0x4:0.5")

    @pytest.mark.parametrize("sparsity", ["1", "1.5", "-0.1", "60", "nan", "inf"])
    @pytest.mark.parametrize("kind", ["unstructured", "per-row", "block-2x2", "2:4+per-row"])
    def test_sparsity_out_of_range(self, kind: str, sparsity: str) -> None:
        with pytest.raises(PatternError, match="sparsity is the fraction of zeros, from 0 to below 1; got"):
            parse_pattern(f"{kind}:{sparsity}")

    @pytest.mark.parametrize("text", ["5:4", "0:4", "0:0"])
    def test_n_out_of_range(self, text: str) -> None:
        with pytest.raises(PatternError, match=f"{text} keeps n of every m weights; n must be 1 to m"):
            parse_pattern(text)


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


# Properties, of every pattern on 4 x 4 weights: few enough to try all supports there are.

SMALL: tuple[Pattern, ...] = (
    Unstructured(0.5),
    Unstructured(0.8),
    PerRow(0.5),
    PerRow(0.6),
    PerRow(0.9),
    NM(2, 4),
    NM(1, 2),
    NM(3, 4),
    NM(1, 1),
    Block(0.5, (2, 2)),
    Block(0.7, (1, 2)),
    Block(0.3, (4, 1)),
    Block(0.5, (4, 4)),
    Quota(NM(2, 4), PerRow(0.6)),
    Quota(NM(1, 2), PerRow(0.7)),
    Quota(NM(2, 4), Unstructured(0.6)),
    Quota(NM(1, 2), Unstructured(0.5)),
    Quota(NM(3, 4), Unstructured(0.7)),
    TransposableNM(2, 4),
    TransposableNM(1, 4),
    TransposableNM(3, 4),
    TransposableNM(1, 2),
    TransposableNM(2, 2),
)
small_patterns = pytest.mark.parametrize("pattern", SMALL, ids=str)

whole_numbers = st.lists(st.integers(0, 3), min_size=16, max_size=16)
any_numbers = st.lists(st.floats(0, 1e3, width=32), min_size=16, max_size=16)
distinct_numbers = st.lists(st.integers(1, 1000), min_size=16, max_size=16, unique=True)
dtypes = st.sampled_from([torch.float32, torch.float64])


def four_by_four(values: list[float] | list[int], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype).reshape(4, 4)


def every(conditions: Tensor) -> Tensor:
    """(number, ...) -> (number,): whether all hold."""
    return torch.all(conditions.flatten(1), dim=1)


def allowed(pattern: Pattern, masks: Tensor) -> Tensor:
    """Which of the masks (number, 4, 4) the pattern allows, from its definition."""
    zeros = (~masks).sum(dim=(1, 2))
    match pattern:
        case Unstructured(sparsity):
            return zeros == round(sparsity * 16)
        case PerRow(sparsity):
            of_row = masks.sum(dim=2)
            return every(of_row[:, None] - of_row[:, :, None] <= 1) & (zeros == round(sparsity * 16))
        case NM(n, m):
            return every(masks.unflatten(2, (-1, m)).sum(dim=3) == n)
        case Quota(NM(n, m), quota):
            return every(masks.unflatten(2, (-1, m)).sum(dim=3) <= n) & allowed(quota, masks)
        case Block(sparsity, (r, c)):
            kept = masks.unflatten(2, (-1, c)).unflatten(1, (-1, r)).sum(dim=(2, 4))  # of each block
            blocks = round(sparsity * 16 / (r * c))
            return every((kept == 0) | (kept == r * c)) & (zeros == blocks * r * c)
        case TransposableNM(n, m):
            return allowed(NM(n, m), masks) & allowed(NM(n, m), masks.transpose(1, 2))
    raise AssertionError(pattern)


@functools.cache
def supports(pattern: Pattern) -> Tensor:
    """(number, 16) float64: all masks of 4 x 4 weights that the pattern allows."""
    bits = torch.arange(2**16)[:, None] >> torch.arange(16) & 1
    return bits[allowed(pattern, bits.bool().reshape(-1, 4, 4))].double()


def test_supports_are_all_there() -> None:
    """Numbers that are known from elsewhere."""
    assert len(supports(Unstructured(0.5))) == 12870
    assert len(supports(NM(2, 4))) == 6**4
    assert len(supports(TransposableNM(2, 4))) == 90
    assert len(supports(TransposableNM(1, 4))) == len(supports(TransposableNM(3, 4))) == 24
    assert len(supports(TransposableNM(1, 2))) == 2**4
    assert len(supports(Block(0.5, (2, 2)))) == 6
    assert len(supports(Quota(NM(1, 2), Unstructured(0.5)))) == 2**8


few = settings(max_examples=20)  # of each property for each of so many patterns


@small_patterns
class TestProperties:
    @given(st.one_of(whole_numbers, any_numbers), dtypes)
    @few
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
    def test_the_projection_is_its_own(self, pattern: Pattern, values: list[int], dtype: torch.dtype) -> None:
        scores = four_by_four(values, dtype)
        mask = pattern.mask(scores)
        assert torch.equal(pattern.mask(scores * mask), mask)

    @given(st.one_of(whole_numbers, any_numbers), st.floats(0, 1), st.floats(0, 1))
    @few
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

    @given(st.integers(1, 3), st.integers(1, 10), st.integers(1, 48), st.booleans(), st.integers(0, 2**32 - 1))
    @few
    def test_slices_cover_the_columns_and_counts_add_up(
        self, pattern: Pattern, tall: int, long: int, width: int, tied: bool, seed: int
    ) -> None:
        shape = (4 * tall, 4 * long)
        scores = (tied_scores if tied else random_scores)(*shape, seed=seed)
        before = scores.clone()
        end = total = 0
        for start, stop, part in pattern.slices(shape, width):
            assert start == end < stop
            total += zeros_of(part.mask(scores[:, start:stop]))
            end = stop
        assert end == shape[1]
        assert total == zeros_of(pattern.mask(scores))
        assert torch.equal(scores, before)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 50), st.floats(0, 1, exclude_max=True))
def test_counts_add_up_at_any_sparsity(rows: int, columns: int, width: int, sparsity: float) -> None:
    scores = random_scores(rows, columns)
    for pattern in (Unstructured(sparsity), PerRow(sparsity), Block(sparsity, (1, 1))):
        parts = pattern.slices((rows, columns), width)
        cut = sum(zeros_of(part.mask(scores[:, start:stop])) for start, stop, part in parts)
        assert cut == zeros_of(pattern.mask(scores)) == round(sparsity * (rows * columns))


@given(st.integers(1, 20), st.integers(1, 10), st.integers(1, 50), st.floats(0.5, 1, exclude_max=True))
def test_quotas_add_up_at_any_sparsity(rows: int, groups: int, width: int, sparsity: float) -> None:
    scores = random_scores(rows, 4 * groups)
    for pattern in (Quota(NM(2, 4), PerRow(sparsity)), Quota(NM(2, 4), Unstructured(sparsity))):
        zeros = 0
        for start, stop, part in pattern.slices((rows, 4 * groups), width):
            mask = part.mask(scores[:, start:stop])
            assert mask.reshape(-1, 4).sum(dim=1).max() <= 2
            zeros += zeros_of(mask)
        assert zeros == zeros_of(pattern.mask(scores)) == round(sparsity * (rows * 4 * groups))


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
        TransposableNM(2, 4),
        Block(0.5, (2, 4)),
        Quota(NM(2, 4), PerRow(0.75)),
        Fixed(torch.rand(8, 16, generator=torch.Generator().manual_seed(3)) > 0.4),
    ],
    ids=str,
)
def test_thresholds_tell_what_the_mask_keeps(pattern: Pattern) -> None:
    scores = torch.rand(8, 16, generator=torch.Generator().manual_seed(1))
    threshold = pattern.threshold(scores)
    if isinstance(pattern, TransposableNM | Block | Quota | Fixed) or pattern.sparsity == 0:
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
        apart = pattern.apart(runs)
        assert apart is not None
        masks = [own.mask(part) for own, part in zip(apart, runs, strict=True)]
        together, whole = torch.cat(masks, dim=1), pattern.mask(scores)
        if pattern == Unstructured(0.9):  # a run of which nothing would stay keeps one weight
            assert int((together != whole).sum()) <= 2
        else:
            assert torch.equal(together, whole)
    for other in (PerRow(0.5), TransposableNM(2, 4), Block(0.5, (4, 4)), Quota(NM(2, 4), PerRow(0.75))):
        assert other.apart(runs) is None


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
    within = NM(2, 4)
    moved = Fixed(values, within).reordered(order)
    assert isinstance(moved, Fixed)
    assert moved.within is within
    assert torch.equal(moved.values, values.flip(1))
    assert NM(2, 4).reordered(order) == NM(2, 4)
