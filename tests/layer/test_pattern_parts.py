"""Parts of patterns: half-way masks, runs of columns, and what is written of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from niwaki.errors import PatternError
from niwaki.layer.patterns import NM, Fixed, Pattern, PerRow, Unstructured, parse_pattern
from support.scores import PATTERNS, Scores, random_scores, tied_scores, zeros_of

ROWS = 13


class TestPartial:
    """Gradual solvers rely on partial masks being on the way to the final one."""

    @pytest.mark.parametrize("pattern", PATTERNS, ids=str)
    @pytest.mark.parametrize("make", [random_scores, tied_scores])
    def test_masks_are_nested_and_have_their_count(self, make: Scores, pattern: Pattern) -> None:
        scores, before = make(ROWS, 96), torch.ones(ROWS, 96, dtype=torch.bool)
        for fraction in (0, 0.1, 0.37, 0.5, 0.9, 1):
            partial = pattern.partial(fraction)
            mask = partial.mask(scores)
            assert (before | ~mask).all()
            assert zeros_of(mask) == round(fraction * pattern.sparsity * scores.numel())
            assert partial.sparsity == pytest.approx(fraction * pattern.sparsity)
            before = mask
        assert torch.equal(mask, pattern.mask(scores))

    def test_partial_of_a_partial(self) -> None:
        scores = random_scores(12, 96)
        twice = NM(2, 4).partial(0.5).partial(0.5)
        assert torch.equal(twice.mask(scores), NM(2, 4).partial(0.25).mask(scores))

    def test_partial_checks_the_shape(self) -> None:
        with pytest.raises(PatternError):
            NM(2, 4).partial(0.5).check((8, 42))

    def test_partial_nm_compares_the_unsafe_across_groups(self) -> None:
        # Safe are 3 4 and 7 8 (the two best of each four); of the others the lowest half goes.
        scores = torch.tensor([[3.0, 1.0, 4.0, 2.0, 5.0, 7.0, 8.0, 6.0]])
        assert NM(2, 4).partial(0.5).mask(scores).tolist() == [[True, False, True, False] + [True] * 4]


class TestSlices:
    @pytest.mark.parametrize("pattern", [*PATTERNS, Fixed(tied_scores(13, 96) > 1)], ids=str)
    @pytest.mark.parametrize("width", [1, 5, 32, 96, 128])
    @pytest.mark.slow
    def test_cover_the_columns_in_order_and_counts_add_up(self, width: int, pattern: Pattern) -> None:
        rows = ROWS
        scores = random_scores(rows, 96)
        end = total = 0
        for start, stop, part in pattern.slices((rows, 96), width):
            assert start == end
            assert stop > start
            mask = part(scores[:, start:stop])
            assert mask.shape == (rows, stop - start)
            total += zeros_of(mask)
            end = stop
        assert end == 96
        assert total == zeros_of(pattern.mask(scores))

    @pytest.mark.parametrize("pattern", PATTERNS, ids=str)
    @pytest.mark.parametrize("width", [1, 5, 10, 12, 32, 200])
    @pytest.mark.slow
    def test_runs_stay_inside_blocks(self, width: int, pattern: Pattern) -> None:
        walls = set(range(0, 97, width)) & set(range(0, 97, pattern.group))
        for start, stop, _ in pattern.slices((ROWS, 96), width):
            assert start % pattern.group == stop % pattern.group == 0
            assert not walls & set(range(start + 1, stop))

    @pytest.mark.parametrize("pattern", [Unstructured(0.1), PerRow(0.1)], ids=str)
    def test_the_order_of_products_has_no_influence(self, pattern: Pattern) -> None:
        """0.1 * 3 * 15 is above 4.5 and 0.1 * 45 is not."""
        parts = [part(random_scores(3, b - a)) for a, b, part in pattern.slices((3, 15), 8)]
        assert zeros_of(torch.cat(parts, dim=1)) == zeros_of(pattern.mask(random_scores(3, 15))) == 4

    def test_per_row_gives_each_row_its_share_of_each_run(self) -> None:
        total = torch.zeros(13, dtype=torch.long)
        runs = 0
        for start, stop, part in PerRow(0.6).slices((13, 96), 20):
            of_each = (~part(random_scores(13, stop - start, seed=start))).sum(dim=1)
            assert of_each.max() - of_each.min() <= 1
            total += of_each
            runs += 1
        assert total.sum() == round(0.6 * 13 * 96)
        assert total.max() - total.min() <= runs

    def test_fixed_is_cut_like_the_matrix(self) -> None:
        values = tied_scores(6, 9) > 1
        parts = [part(values[:, a:b].float()) for a, b, part in Fixed(values).slices((6, 9), 4)]
        assert torch.equal(torch.cat(parts, dim=1), values)


class TestParse:
    @pytest.mark.parametrize(
        ("text", "pattern", "written"),
        [
            ("2:4", NM(2, 4), "2:4"),
            (" 16:32 ", NM(16, 32), "16:32"),
            ("unstructured:0.6", Unstructured(0.6), "unstructured:0.6"),
            ("unstructured:0", Unstructured(0.0), "unstructured:0"),
            ("per-row:.25", PerRow(0.25), "per-row:0.25"),
            ("per-row:60%", PerRow(0.6), "per-row:0.6"),
        ],
    )
    def test_reads_and_writes(self, text: str, pattern: Pattern, written: str) -> None:
        assert parse_pattern(text) == pattern
        assert str(pattern) == written

    @given(st.just(0.0) | st.floats(1e-15, 1, exclude_max=True))
    @pytest.mark.slow
    def test_reads_what_it_writes_to_the_last_digit(self, sparsity: float) -> None:
        for pattern in (Unstructured(sparsity), PerRow(sparsity)):
            assert parse_pattern(str(pattern)) == pattern

    @pytest.mark.parametrize(
        "text",
        [
            *["", "0.5", "2:", ":4", "2:4:8", "-2:4", "unstructured", "unstructured:", "per-row:x", "magic:0.5"],
            *["transposable-2", "transposable-0.5", "transposable-2:4", "block-4x4:0.5"],
            *["2:4+", "+per-row:0.6", "2:4+2:4", "2:4+per-row:0.6", "mixed-2:4", "\u00b2:4"],
        ],
    )
    def test_no_pattern(self, text: str) -> None:
        examples = r"unstructured:0\.6, per-row:0\.6 or two-factors:0\.5"
        with pytest.raises(PatternError, match=f"is not a valid pattern; try 2:4, {examples}"):
            parse_pattern(text)

    @pytest.mark.parametrize("kind", ["unstructured", "per-row"])
    def test_sparsity_out_of_range(self, kind: str) -> None:
        for sparsity in ("1", "1.5", "-0.1", "60", "nan", "inf"):
            with pytest.raises(PatternError, match="sparsity is the fraction of zeros, from 0 to below 1; got"):
                parse_pattern(f"{kind}:{sparsity}")

    def test_n_out_of_range(self) -> None:
        for n, m in ((5, 4), (0, 4), (0, 0), (-1, 4)):
            with pytest.raises(PatternError, match=f"{n}:{m} keeps n of every m weights; n must be 1 to m"):
                NM(n, m)
