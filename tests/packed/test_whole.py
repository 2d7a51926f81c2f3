"""Matrices of whole numbers without a mask: what comes back, and products, against numpy and torch in float64."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import niwaki
from niwaki.errors import CheckpointError, UsageError
from niwaki.packed import kernels, linear
from niwaki.packed.format import Index
from niwaki.packed.kernels import Path as Instructions
from niwaki.packed.linear import SparseEmbedding, SparseLinear
from niwaki.packed.load import in_large_pages
from niwaki.packed.matrix import PADDING, PackedMatrix, all_numbers, in_rows, in_strips, pack, unpacked, with_bytes
from support.caches import CACHE
from support.covering import covered, in_turns
from support.decoding import counting
from support.models import message, random_tokens, reference
from support.packed import Raw, decode, forged, read_file, scaled
from support.sparse import (
    dense_of,
    in_whole_numbers,
    is_product,
    model_on_a_grid,
    on_grid,
    sparse,
    vectors,
    with_threads,
)

#: What this machine can do, from the plainest on; none without a library.
PATHS = kernels.paths()
BITS = (2, 3, 4, 5, 6, 8)
each_number_of_bits = pytest.mark.parametrize("bits", BITS)
SHAPES = [(7, 1), (64, 1), (100, 1), (192, 1), (192, 3), (640, 5)]


def whole(rows: int, columns: int, groups: int, bits: int) -> tuple[PackedMatrix, Tensor, Tensor]:
    """A matrix without a mask, W in bfloat16, and what products take, in float64."""
    W, codes, scales = on_grid(rows, columns, groups, bits, zeros=0.1)
    return pack(W, codes, scales, bits, whole=True), W, dense_of(codes, scales)


@each_number_of_bits
def test_the_form_of_fewer_bytes_is_chosen(bits: int) -> None:
    chosen = []
    for zeros in (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5):
        W, codes, scales = on_grid(40, 640, 10, bits, zeros)
        forms = {form: pack(W, codes, scales, bits, whole=form) for form in (False, True)}
        found = pack(W, codes, scales, bits)
        assert (forms[True].mask, forms[True].starts) == (None, None)
        assert forms[False].mask is not None
        sizes = [form.values.nbytes + (0 if form.mask is None else form.mask.nbytes) for form in forms.values()]
        assert found.values.nbytes + (0 if found.mask is None else found.mask.nbytes) == min(sizes)
        chosen.append(found.mask is None)
    assert chosen[0]
    assert chosen[-1] == (bits == 2)  # whose numbers with a mask would have 4
    assert pack(sparse(9, 640, 0.0)).mask is not None  # of what are no whole numbers


def words_of(packed: PackedMatrix) -> dict[tuple[int, int], int]:
    """The bytes of four words that are not 0, by their places; the padding has none."""
    size = 8 * packed.bits
    assert packed.values.shape == (4 * size + PADDING,)
    assert not packed.values[4 * size :].any()
    words = packed.values[: 4 * size].view(4, size)
    return {(i, j): int(words[i, j]) for i, j in words.nonzero().tolist()}


def test_layout() -> None:
    """Rows of whole words; of 4 bits columns i and i + 32 share a byte, the first one in the lower half."""
    codes = torch.zeros(2, 70, dtype=torch.int8)
    codes[0, [0, 1, 32, 64, 69]] = torch.tensor([1, -1, 7, -8, 3], dtype=torch.int8)
    codes[1, 63] = -2
    scales = torch.ones(2, 1)
    eight, four, five, six = (pack(codes.float(), codes, scales, bits, whole=True) for bits in (8, 4, 5, 6))
    assert eight.values.dtype == torch.int8
    assert eight.values.shape == (2 * 128 + PADDING,)
    assert torch.equal(eight.values[:256].view(2, 128)[:, :70], codes)
    assert eight.values.count_nonzero() == 6
    assert four.values.dtype == torch.uint8
    nibbles = {(0, 0): 0x71, (0, 1): 0x0F, (1, 0): 0x08, (1, 5): 0x03, (2, 31): 0xE0}
    assert words_of(four) == nibbles
    # The sign of columns 1 and 64 + 0 in the first row, and of 63 in the second, is all that is left.
    assert words_of(five) == nibbles | {(0, 32): 2, (1, 32): 1, (2, 39): 0x80}
    assert words_of(six) == nibbles | {(0, 33): 3, (1, 32): 3, (2, 47): 0xC0}
    low = torch.zeros(2, 70, dtype=torch.int8)
    low[0, [0, 1, 16, 32, 48, 64]] = torch.tensor([1, -1, 1, -2, -1, -2], dtype=torch.int8)
    low[1, 63] = -2
    two, three = (pack(low.float(), low, scales, bits, whole=True) for bits in (2, 3))
    pairs = {(0, 0): 0b11_10_01_01, (0, 1): 0b00_00_00_11, (1, 0): 0b00_00_00_10, (2, 15): 0b10_00_00_00}
    assert words_of(two) == pairs
    # The signs of columns 1, 32 and 48; of 64 + 0; and of 63.
    assert words_of(three) == pairs | {(0, 16): 2, (0, 20): 1, (0, 22): 1, (1, 16): 1, (2, 23): 0x80}
    assert [each.bits for each in (two, three, four, five, six, eight)] == [2, 3, 4, 5, 6, 8]
    assert four.shape == (2, 70)
    assert four.nbytes == 128 + PADDING + 8
    assert (four.count, four.kept) == (128, 140)


@each_number_of_bits
@pytest.mark.parametrize("rows", [7, 16, 37])
def test_layout_of_strips(rows: int, bits: int) -> None:
    """Of 16 rows the first four bytes, the next four, and so on; and the scales of a group; then what is left."""
    packed, _, _ = whole(rows, 320, 5, bits)
    strips, all_rows = in_strips(packed), packed.values[:-PADDING].view(rows, -1).numpy()
    assert strips.scales is not None
    assert packed.scales is not None
    assert strips.in_strips == rows // 16 * 16
    expected, scales = [], []
    for first in range(0, strips.in_strips, 16):
        for four in range(0, all_rows.shape[1], 4):
            expected += [all_rows[row, four : four + 4].tobytes() for row in range(first, first + 16)]
        scales += [packed.scales[row, group] for group in range(5) for row in range(first, first + 16)]
    expected += [all_rows[strips.in_strips :].tobytes(), bytes(PADDING)]
    scales += packed.scales[strips.in_strips :].flatten().tolist()
    assert strips.values.numpy().tobytes() == b"".join(expected)
    assert torch.equal(strips.scales.flatten(), torch.tensor(scales))
    again = in_rows(strips)
    assert not again.strips
    assert torch.equal(again.values, packed.values)
    assert again.scales is not None
    assert torch.equal(again.scales, packed.scales)
    assert (strips.shape, strips.bits, strips.nbytes) == (packed.shape, packed.bits, packed.nbytes)


def test_strips_of_a_file() -> None:
    """Whose numbers need not begin where four bytes do; those of a matrix with a mask stay as they are."""
    packed, W, _ = whole(37, 100, 1, 4)
    moved = torch.cat([packed.values[:2], packed.values])[2:]
    assert torch.equal(kernels.expand(in_strips(dataclasses.replace(packed, values=moved))), W)
    masked = pack(sparse(37, 100, 0.5))
    assert in_strips(masked) is masked


def both(packed: PackedMatrix) -> tuple[PackedMatrix, PackedMatrix]:
    """Rows one after the other, and in strips."""
    return packed, in_strips(packed)


@pytest.mark.parametrize(("columns", "groups"), SHAPES)
@each_number_of_bits
def test_comes_back_bit_for_bit(columns: int, groups: int, bits: int) -> None:
    packed, W, _ = whole(20, columns, groups, bits)
    _, codes, scales = on_grid(20, columns, groups, bits, zeros=0.1)
    some = torch.tensor([19, 3, 3, 0, 16, 15])
    for form in both(packed):
        for path in PATHS:
            assert torch.equal(kernels.expand(form, path=path), W)
            assert torch.equal(kernels.expand(form, 3, 18, path=path), W[3:18])
        assert torch.equal(kernels.expand_rows(form, some), W[some])
        assert torch.equal(all_numbers(form), codes)
        assert torch.equal(kernels._unpacked(form, slice(3, 18)), codes[3:18])
    again = unpacked(None, packed.values, columns, W.dtype, scales.bfloat16())
    assert again.scales is not None
    assert torch.equal(again.scales, scales)
    assert torch.equal(kernels.expand(again), W)
    masked = with_bytes(packed)
    assert masked.mask is not None
    assert masked.values.dtype == torch.int8
    assert torch.equal(kernels.expand(masked), W)


def test_small_scales_lose_no_digits() -> None:
    for scale, bits in itertools.product((1e-44, 3e-39, 1e-30, 4e37), BITS):
        codes = torch.tensor([[-8, -1, 3, 7] * 16], dtype=torch.int8).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        scales = torch.full((1, 1), scale)
        packed = pack(codes * scales, codes, scales, bits, whole=True)
        for path in PATHS:
            assert torch.equal(kernels.expand(packed, path=path), codes * scales)


@covered
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [*SHAPES, (1216, 19)])  # of the last one a panel has two parts
@each_number_of_bits
@pytest.mark.parametrize("rounded", [False, True])
def test_product(path: Instructions, shape: tuple[int, int], bits: int, rounded: bool) -> None:
    """Of the vectors as they are; or rounded, where all paths have the same whole numbers."""
    for rows in (1, 4, 37):
        packed, _, W = whole(rows, *shape, bits)
        for batch, form in itertools.product((1, 2, 3, 4, 5, 9, 32), both(packed)):
            x = vectors(batch, shape[0], torch.bfloat16 if batch == 2 else torch.float32)
            y = kernels.multiply(form, x, path, rounded)
            assert y.dtype == torch.float32
            assert is_product(y, in_whole_numbers(x) if rounded else x, W)
            # Up to here nobody sees how many vectors there are; more are added up in another order.
            if not rounded or batch < 8:
                assert torch.equal(kernels.multiply(form, x[:1], path, rounded), y[:1])


@pytest.mark.parametrize("path", PATHS)
@each_number_of_bits
def test_the_largest_sums(path: Instructions, bits: int) -> None:
    """Of the largest numbers of both, of either sign."""
    most = 1 << (bits - 1)
    for code in (-most, most - 1):
        codes = torch.full((21, 64), code, dtype=torch.int8)
        packed = pack(codes.float(), codes, torch.ones(21, 1), bits, whole=True)
        for sign, form in itertools.product((1.0, -1.0), both(packed)):
            y = kernels.multiply(form, torch.full((1, 64), 32639 * sign), path, rounded=True)
            assert torch.equal(y, torch.full((1, 21), 64 * 32639 * sign * code))


@pytest.mark.parametrize("path", PATHS)
@each_number_of_bits
def test_odd_vectors(path: Instructions, bits: int) -> None:
    """Zeros and what is next to zero give zeros, and what is not finite nothing that is."""
    packed, _, W = whole(25, 192, 3, bits)
    for form in both(packed):
        for value in (0.0, 1e-44, 1e-38):
            y = kernels.multiply(form, torch.full((1, 192), value), path, rounded=True)
            assert torch.equal(y, torch.zeros(1, 25))
        large = torch.full((1, 192), 1e33)
        assert is_product(kernels.multiply(form, large, path, rounded=True), large, W)
        for value in (torch.inf, -torch.inf, torch.nan):
            x = vectors(2, 192)
            x[0, 100] = value
            y = kernels.multiply(form, x, path, rounded=True)
            assert y[0].isnan().all()
            assert torch.equal(y[1:], kernels.multiply(form, x[1:], path, rounded=True))


@pytest.mark.parametrize("path", PATHS)
@each_number_of_bits
@pytest.mark.parametrize("rounded", [False, True])
def test_threads_give_the_same_bytes(path: Instructions, bits: int, rounded: bool) -> None:
    packed, W, _ = whole(1_501, 256, 4, bits)
    x = vectors(3, 256)
    for form in both(packed):
        with with_threads(1):
            expected = kernels.multiply(form, x, path, rounded)
        for threads in (2, 3):
            with with_threads(threads):
                assert torch.equal(kernels.multiply(form, x, path, rounded), expected)
                assert torch.equal(kernels.multiply(form, x[:1], path, rounded), expected[:1])
                assert torch.equal(kernels.expand(form, path=path), W)


class TestParts:
    """Parts that contradict each other are errors, before a kernel reads them."""

    def refused(self, bits: int = 4, **changes: object) -> str:
        good, _, _ = whole(5, 70, 1, bits)
        parts = {"mask": None, "values": good.values, "columns": 70, "dtype": torch.bfloat16, "scales": good.scales}
        unpacked(**parts)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r".") as caught:
            unpacked(**{**parts, **changes})  # type: ignore[arg-type]
        return str(caught.value)

    def values(self, bits: int, at: int, value: int) -> Tensor:
        values = whole(5, 70, 1, bits)[0].values.clone()
        values[at] = value
        return values

    @each_number_of_bits
    @pytest.mark.parametrize("more", [-64, -1, 1, 64])
    def test_size(self, bits: int, more: int) -> None:
        values = whole(5, 70, 1, bits)[0].values
        changed = values[-more:] if more < 0 else torch.cat([values, values.new_zeros(more)])
        assert "bytes of numbers and 64 zeros" in self.refused(bits, values=changed)

    @each_number_of_bits
    def test_padding_that_is_not_zero(self, bits: int) -> None:
        for at in (-1, -64):
            assert "64 zeros" in self.refused(bits, values=self.values(bits, at, 1))

    def test_a_number_behind_the_last_column(self) -> None:
        """The first and the last one there are, of the first and the last row."""
        for at in (70, 127, 4 * 128 + 70, 4 * 128 + 127):
            assert "after column 70" in self.refused(8, values=self.values(8, at, 1))
        # Column 70 is number 6 of the second word, in the lower half of its byte; column 96 is in an upper one.
        for at, value in ((32 + 6, 1), (32, 0x10), (63, 0x10), (4 * 64 + 32 + 31, 1), (4 * 64 + 63, 0xF0)):
            assert "after column 70" in self.refused(4, values=self.values(4, at, value))

    @pytest.mark.parametrize("scale", [0.0, torch.nan])
    def test_a_scale_that_is_0(self, scale: float) -> None:
        assert "is 0 or not a number" in self.refused(scales=torch.tensor([[1.0]] * 4 + [[scale]]))

    def test_what_is_no_whole_numbers(self) -> None:
        assert "needs whole numbers and scales" in self.refused(scales=None)
        assert "needs whole numbers and scales" in self.refused(values=torch.zeros(5 * 128 + 64))

    def test_products_look_too(self) -> None:
        good, _, _ = whole(64, 64, 1, 8)
        masked = with_bytes(good)
        assert good.scales is not None
        of_good: list[dict[str, Any]] = [
            *({"scales": each} for each in (None, torch.ones(64, 2), good.scales.half())),
            *({"values": each} for each in (good.values[1:], good.values.view(torch.uint8))),
            *({"columns": 65}, {"starts": masked.starts}),
        ]
        of_masked: list[dict[str, Any]] = [{"columns": 65}, {"mask": None}, {"starts": None}]
        for packed, changes in ((good, of_good), (masked, of_masked)):
            for change in changes:
                for use in (lambda W: kernels.multiply(W, vectors(1, 64)), kernels.native_matrix):
                    with pytest.raises((RuntimeError, AssertionError)):
                        use(dataclasses.replace(packed, **change))


class TestLayer:
    def layers(self, bits: int = 4) -> tuple[Tensor, SparseLinear]:
        packed, W, _ = whole(40, 100, 1, bits)
        return W, SparseLinear(packed)

    @each_number_of_bits
    @pytest.mark.parametrize("count", [1, 5, kernels.FEW + 1])
    def test_as_the_dense_layer(self, bits: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """In float32 as ever; in bfloat16 few vectors are rounded."""
        monkeypatch.setattr(kernels, "TILE", 700)  # 7 of 40 rows
        _, layer = self.layers(bits)
        _, _, W = whole(40, 100, 1, bits)
        x = vectors(count, 100)
        size = x.abs().double() @ W.abs().T
        with torch.no_grad():
            # Tiles are rounded to the dtype of the weights.
            most = 1e-6 if count <= kernels.FEW else 4e-3
            assert ((layer(x) - x.double() @ W.T).abs() <= most * size).all()
            found = layer(x.bfloat16())
            assert found.dtype == torch.bfloat16
            assert ((found - x.bfloat16().double() @ W.T).abs() <= 0.02 * size).all()

    @pytest.mark.skipif(not kernels.rounds(torch.bfloat16), reason="vectors are not rounded here")
    def test_prompts_read_the_matrix_as_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where vectors are rounded; those of float32 are not, and unpack it."""
        _, layer = self.layers()
        _, _, W = whole(40, 100, 1, 4)
        tiles, right = list[int](), kernels.multiply_by_tiles

        def counted(W: PackedMatrix, x: Tensor) -> Tensor:
            tiles.append(len(x))
            return right(W, x)

        monkeypatch.setattr(kernels, "multiply_by_tiles", counted)
        x = vectors(kernels.MANY, 100)
        with torch.no_grad():
            found = layer(x.bfloat16())
            assert tiles == []
            layer(x)
            assert tiles == [kernels.MANY]
        assert ((found - x.bfloat16().double() @ W.T).abs() <= 0.01 * (x.abs().double() @ W.abs().T)).all()
        monkeypatch.setattr(kernels, "best_path", lambda: Instructions.AVX512_BF16)
        assert kernels.most_vectors(layer.packed, torch.bfloat16) == kernels.MANY
        monkeypatch.setattr(kernels, "best_path", lambda: Instructions.AVX2)
        assert kernels.most_vectors(layer.packed, torch.bfloat16) == math.inf

    def test_its_state_is_that_of_the_dense_layer(self) -> None:
        W, layer = self.layers()
        assert torch.equal(layer.state_dict()["weight"], W)
        assert torch.equal(layer.weight, W)
        layer.load_state_dict({"weight": W})
        assert "sparsity=0.000" in repr(layer)

    def test_moves(self) -> None:
        _, layer = self.layers()
        layer.to(torch.float64).to(torch.float32).to("meta")
        assert layer.mask is None
        with pytest.raises(RuntimeError, match="packed weights on meta"):
            layer(vectors(1, 100))

    def test_strips_are_for_rounded_vectors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What computes with others, or elsewhere, gets rows again, of both factors."""
        wanted = ("cpu", torch.bfloat16)
        monkeypatch.setattr(kernels, "reads_strips", lambda device, dtype: (device.type, dtype) == wanted)
        left, W, _ = whole(40, 100, 1, 4)
        right, X, _ = whole(100, 70, 1, 4)
        layer = SparseLinear(in_strips(left), right=in_strips(right)).bfloat16()
        product = (W.float() @ X.float()).bfloat16()
        assert layer.packed.strips
        assert torch.equal(layer.weight, product)
        assert torch.equal(copy.deepcopy(layer).bfloat16().packed.values, layer.packed.values)
        wide, elsewhere = copy.deepcopy(layer).float(), copy.deepcopy(layer).to("meta")
        for moved in (wide, elsewhere):
            assert not moved.packed.strips
            assert moved.right is not None
            assert not moved.right.strips
        assert torch.equal(wide.packed.values, left.values)
        assert wide.right is not None
        assert torch.equal(wide.right.values, right.values)
        assert torch.equal(wide.state_dict()["weight"], product)

    @pytest.mark.parametrize("strips", [False, True])
    def test_embeddings(self, strips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        packed, W, _ = whole(40, 128, 2, 4)
        embeddings = SparseEmbedding(in_strips(packed) if strips else packed, torch.float32)
        for library in (kernels.library(), None):
            monkeypatch.setattr(kernels, "library", lambda library=library: library)
            for tokens in (torch.tensor([[3, 39], [0, 31]]), torch.zeros(1, 0, dtype=torch.int64)):
                for numbers in (tokens, tokens.int(), tokens.T):
                    assert torch.equal(embeddings(numbers), W[numbers].float())
            for dtype in (torch.float32, torch.uint8, torch.bool):
                with pytest.raises(RuntimeError, match=f"{dtype} on cpu are no numbers of rows on cpu"):
                    embeddings(torch.tensor([0, 1]).to(dtype))
            for wrong in (-1, 40):
                with pytest.raises(IndexError, match=rf"40 rows has no rows {min(wrong, 0)} to {max(wrong, 0)}"):
                    embeddings(torch.tensor([0, wrong]))

    def test_without_the_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x = vectors(3, 100)
        W, layer = self.layers()
        monkeypatch.setattr(kernels, "library", lambda: None)
        assert torch.allclose(layer(x), x @ W.float().T, atol=1e-3)

    def test_on_a_gpu_by_tiles(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Triton's kernels read masks; a model that is loaded there has them."""
        monkeypatch.setattr(linear, "_has_triton", lambda: True)
        packed, _, _ = whole(40, 100, 1, 4)
        x = vectors(1, 100)
        assert torch.equal(linear._multiply(packed, x, "cuda"), kernels.multiply_by_tiles(packed, x))

    def test_large_pages(self) -> None:
        packed, W, _ = whole(2_048, 4_096, 1, 4)
        moved = in_large_pages(packed)
        assert moved.values is not packed.values
        assert torch.equal(kernels.expand(moved), W)


@pytest.fixture
def fresh() -> Iterator[None]:
    """The environment is read once; here each time."""
    caches = (kernels.asked_path, kernels.asked_to_be_exact)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("fresh")
class TestEnvironment:
    @pytest.mark.parametrize("path", PATHS)
    def test_path(self, path: Instructions, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NIWAKI_KERNELS", path.name.lower())
        assert kernels.best_path() == path
        assert kernels.describe() == f"native, {kernels._NAMES[path]}"
        assert kernels.rounds(torch.bfloat16) == (path >= Instructions.AVX2)
        packed, _, _ = whole(37, 192, 3, 8)
        x = vectors(1, 192, torch.bfloat16)
        assert torch.equal(kernels.multiply(packed, x), kernels.multiply(packed, x, path, path >= Instructions.AVX2))

    def test_exact(self, monkeypatch: pytest.MonkeyPatch) -> None:
        packed, _, _ = whole(37, 192, 3, 8)
        x = vectors(1, 192, torch.bfloat16)
        monkeypatch.setenv("NIWAKI_EXACT", "1")
        assert not kernels.rounds(torch.bfloat16)
        assert torch.equal(kernels.multiply(packed, x), kernels.multiply(packed, x, rounded=False))
        if PATHS:
            assert kernels.describe().endswith(", exact")

    def test_float32_is_exact(self) -> None:
        packed, _, _ = whole(37, 192, 3, 8)
        x = vectors(1, 192)
        assert torch.equal(kernels.multiply(packed, x), kernels.multiply(packed, x, rounded=False))

    def test_values_that_mean_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patched:
            patched.setenv("NIWAKI_KERNELS", "AVX-3")
            said = message(kernels.best_path, UsageError)
            assert (
                "NIWAKI_KERNELS is 'AVX-3', and not one of portable, avx2, avx2_vnni, avx512bw, avx512, avx512_bf16"
                in said
            )
        monkeypatch.setenv("NIWAKI_EXACT", "yes")
        assert "NIWAKI_EXACT is 'yes', and not 0 or 1" in message(kernels.asked_to_be_exact, UsageError)


@pytest.mark.parametrize("path", PATHS)
def test_loaded_as_products_are_fastest(path: Instructions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "best_path", lambda: path)
    dense = save(tmp_path / "dense", 4, torch.bfloat16)
    niwaki.pack(dense, tmp_path / "packed")
    for dtype in (torch.bfloat16, torch.float32):
        loaded = niwaki.load(tmp_path / "packed", "cpu", dtype)
        layers = [module.packed for module in loaded.modules() if isinstance(module, SparseLinear)]
        has_vnni = path in (Instructions.AVX2_VNNI, Instructions.AVX512, Instructions.AVX512_BF16)
        wanted = has_vnni and dtype == torch.bfloat16
        assert {layer.strips for layer in layers} == {wanted}
        expected = load_file(dense / "model.safetensors")
        found = loaded.state_dict()
        assert all(torch.equal(found[key].to(value), value) for key, value in expected.items())


def save(path: Path, bits: int, dtype: torch.dtype, zeros: float = 0.0) -> Path:
    """A LLaMA with weights of so many bits; 120 inner columns."""
    sizes = {"hidden_size": 128, "intermediate_size": 120, "head_dim": 32}
    return model_on_a_grid(path, "llama", dtype, bits, zeros, **sizes)


@each_number_of_bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
def test_there_and_back(bits: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """As docs/format.md has it."""
    dense = save(tmp_path / "dense", bits, dtype)
    sizes = niwaki.pack(dense, tmp_path / "packed")
    assert sizes.negative_zeros == 0
    index = json.loads((tmp_path / "packed" / "packed.json").read_text())
    assert {stored["whole"] for stored in index["tensors"].values() if stored["packed"]} == {True}
    assert not any("mask" in name for file in (tmp_path / "packed").glob("*.safetensors") for name in read_file(file))
    expected, found = load_file(dense / "model.safetensors"), decode(tmp_path / "packed")
    for key, value in expected.items():
        assert found[key][2] == value.contiguous().view(torch.uint8).numpy().tobytes()
    niwaki.unpack(tmp_path / "packed", tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (dense / name).read_bytes()


@pytest.mark.slow
def test_with_many_zeros_all_has_masks(tmp_path: Path) -> None:
    niwaki.pack(save(tmp_path / "dense", 8, torch.bfloat16, 0.5), tmp_path / "packed")
    assert not any(stored.whole for stored in Index.read(tmp_path / "packed").tensors.values())


@pytest.mark.parametrize(("bits", "dtype"), in_turns(BITS, [torch.float32, torch.bfloat16]))
@pytest.mark.slow
def test_decoding(bits: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token through blocks by the library, on each path, and with rounded vectors or not."""
    if not PATHS:
        pytest.skip("no native library")
    dense = save(tmp_path / "dense", bits, dtype)
    niwaki.pack(dense, tmp_path / "packed")
    tokens, seen = random_tokens(1, 8), []

    def last(model: Any, exact: bool = True) -> Tensor:
        monkeypatch.setattr(kernels, "asked_to_be_exact", lambda: True)
        with torch.no_grad():
            cache = copy.deepcopy(model)(tokens[:, :7], use_cache=True)[CACHE]
            monkeypatch.setattr(kernels, "asked_to_be_exact", lambda: exact)
            run = copy.deepcopy(model)  # blocks are prepared once
            return torch.as_tensor(run(tokens[:, 7:], **{CACHE: cache}).logits.double())

    expected = last(reference(dense))
    for path in PATHS:
        monkeypatch.setattr(kernels, "best_path", lambda path=path: path)
        loaded = niwaki.load(tmp_path / "packed", "cpu")
        for exact in (True, False):
            found = []
            for threads in (1, 3):
                with with_threads(threads), counting() as steps:
                    found.append(last(loaded, exact))
                assert len(steps) == 2
            assert torch.equal(*found)
            most = 1e-5 if dtype == torch.float32 else 5e-2
            assert (found[0] - expected).norm() < most * expected.norm()
            seen.append((path >= Instructions.AVX2 and not exact, found[0]))
    if dtype == torch.bfloat16 and any(rounded for rounded, _ in seen):  # and it is not the same
        assert not torch.equal(seen[-1][1], seen[-2][1])


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    place = tmp_path_factory.mktemp("whole")
    for bits in BITS:
        niwaki.pack(save(place / f"dense{bits}", bits, torch.float32), place / f"packed{bits}")
    return {bits: place / f"packed{bits}" for bits in BITS}


class TestForged:
    def refused(
        self, packed: Path, place: Path, change: Callable[[dict[str, Any], dict[str, Raw], str], None], key: str
    ) -> str:
        """What is said of a copy with the right digests, whose index and tensors were changed."""
        directory = forged(packed, place / packed.name, change, key)
        for read in (lambda: niwaki.load(directory, "cpu"), lambda: niwaki.unpack(directory, place / "out")):
            said = message(read, CheckpointError)
        return said

    @each_number_of_bits
    @pytest.mark.parametrize("at", [-1, -64, 120, 121])
    def test_numbers_that_no_column_has(self, bits: int, at: int, packed: dict[int, Path], tmp_path: Path) -> None:
        """In the padding, and behind column 120 of 128; the highest bit of a number too."""

        def change(_: dict[str, Any], tensors: dict[str, Raw], key: str) -> None:
            dtype, shape, data = tensors[f"{key}.values"]
            changed = bytearray(data)
            if at < 0:
                changed[at] = 1
            elif bits == 8:
                changed[120] = 1
            else:
                size = 8 * bits  # of a word, of which the second has columns 64 to 127
                if at == 120:  # in the first field
                    byte, bit = (24, 0x10) if bits >= 4 else (8, 0x40)
                else:  # column 121, in the last one
                    byte, bit = {4: (25, 0x80), 3: (size - 1, 0x02), 5: (size - 1, 0x02)}.get(bits, (size - 7, 0x80))
                changed[size + byte] |= bit
            tensors[f"{key}.values"] = dtype, shape, bytes(changed)

        said = self.refused(packed[bits], tmp_path, change, "down_proj")
        assert ("64 zeros" if at < 0 else "after column 120") in said

    @each_number_of_bits
    @pytest.mark.parametrize("more", [-64, -1, 1, 64])
    @pytest.mark.parametrize("honest", [False, True])
    def test_size(self, bits: int, more: int, honest: bool, packed: dict[int, Path], tmp_path: Path) -> None:
        def change(index: dict[str, Any], tensors: dict[str, Raw], key: str) -> None:
            dtype, (size,), data = tensors[f"{key}.values"]
            tensors[f"{key}.values"] = dtype, (size + more,), (data + bytes(64))[: size + more]
            if honest:
                index["tensors"][key]["count"] += more

        said = self.refused(packed[bits], tmp_path, change, "q_proj")
        assert ("is not the number of bytes" if honest else "is damaged") in said

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            *(({"bits": 0, "groups": 0}, "can have no mask"), ({"inner": 4, "count_right": 5}, "can have no mask")),
            *(({"groups": 0}, "cannot have 0 scales"), ({"groups": 3}, "cannot have 3 scales")),
            *(({"whole": False}, "is damaged"), ({"whole": 1}, "bool"), ({"bits": 12}, "number of bytes")),
            *(({"bits": 6}, "number of bytes"), ({"bits": 7, "count": 14336}, ".")),
        ],
    )
    def test_index(self, changes: dict[str, Any], words: str, packed: dict[int, Path], tmp_path: Path) -> None:
        def change(index: dict[str, Any], _: dict[str, Raw], key: str) -> None:
            index["tensors"][key].update(changes)

        assert words in self.refused(packed[8], tmp_path, change, "q_proj")

    def test_what_is_not_packed(self, packed: dict[int, Path]) -> None:
        stored = next(each for each in Index.read(packed[8]).tensors.values() if each.whole)
        with pytest.raises(ValueError, match="cannot be whole numbers"):
            dataclasses.replace(stored, packed=False).check()

    @pytest.mark.parametrize("scale", [0.0, math.nan, math.inf, 3e38, -3e38])
    def test_scales(self, scale: float, packed: dict[int, Path], tmp_path: Path) -> None:
        said = self.refused(packed[8], tmp_path, scaled(scale), "q_proj")
        assert any(words in said for words in ("is 0 or not", "NaN or infinite", "infinite values"))

    def test_a_byte_that_changed(self, packed: dict[int, Path], tmp_path: Path) -> None:
        directory = shutil.copytree(packed[4], tmp_path / "copy")
        file = directory / "packed-00001-of-00001.safetensors"
        content = bytearray(file.read_bytes())
        tensors = read_file(file)
        name = next(name for name in tensors if name.endswith("q_proj.weight.values"))
        content[content.find(tensors[name][2])] ^= 1
        file.write_bytes(bytes(content))
        assert "is not what was written" in message(lambda: niwaki.load(directory, "cpu"), CheckpointError)
