"""Matrices without their zeros: what comes back, and products, against torch in float64."""

from __future__ import annotations

import dataclasses
import gc
import mmap
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad

from niwaki.packed import kernels
from niwaki.packed.kernels import Path as Instructions
from niwaki.packed.linear import SparseLinear
from niwaki.packed.load import in_large_pages
from niwaki.packed.matrix import PackedMatrix, pack, unpacked, with_bytes
from support.covering import covered
from support.sparse import dense_of, is_product, on_grid, sparse, vectors, with_threads

#: What Linux says of the parts of memory.
SMAPS = Path("/proc/self/smaps")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: What this machine can do, from the plainest on; none without a library.
PATHS = kernels.paths()
#: Of the mask: none, some, most and all of the weights; and rows of both extremes.
SPARSITIES = (0.0, 0.5, 0.8, 1.0)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """-0.0 is not 0.0 here."""
    kind = {2: torch.int16, 4: torch.int32}[a.itemsize]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def test_the_native_library_is_built() -> None:
    """Where there is a compiler it has to be: everything below would pass without it."""
    if shutil.which("c++") or shutil.which("g++"):
        assert kernels.best_path() is not None
        assert kernels.describe().startswith("native")


def test_layout() -> None:
    """The format by hand: bits from the lowest, rows of whole words, values in order, -0.0 kept."""
    W = torch.tensor([[0.0, 1.0, 0.0, -0.0, 2.0, 0, 0, 0, 0, 3.0], [0] * 10, [0] * 9 + [4.0]])
    found = pack(W)
    assert found.mask is not None
    assert found.starts is not None
    assert found.mask.tolist() == [[0b00011010, 0b10, *[0] * 6], [0] * 8, [0, 0b10, *[0] * 6]]
    assert found.values[:5].tolist() == [1.0, 0.0, 2.0, 3.0, 4.0]
    assert found.values[1].signbit()
    assert found.values.shape == (5 + 64,)
    assert not found.values[5:].any()
    assert found.starts.tolist() == [0, 4, 4, 5]
    assert found.shape == (3, 10)
    assert found.nbytes == 3 * 8 + 69 * 4 + 4 * 8


def test_bytes_of_scales_count() -> None:
    for bits in (4, 8):
        W, codes, scales = on_grid(20, 192, 3, bits)
        packed = pack(W, codes, scales, bits)
        ones = (codes != 0).view(20, 3, 64).sum(dim=2)
        values = int(((ones + 1) // 2 if bits == 4 else ones).sum()) + 64
        assert packed.nbytes == 20 * 24 + values + 21 * 8 + 20 * 3 * 4


@covered
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 7, 8, 63, 64, 65, 200])
@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_comes_back_bit_for_bit(dtype: torch.dtype, columns: int, sparsity: float) -> None:
    W = sparse(9, columns, sparsity, dtype)
    W[0, 0] = -0.0
    packed = pack(W)
    for path in PATHS:
        assert same_bits(kernels.expand(packed, path=path), W)
        assert same_bits(kernels.expand(packed, 2, 7, path=path), W[2:7])
    assert same_bits(kernels._unpacked(packed, slice(0, 9)), W)
    assert same_bits(kernels._unpacked(packed, slice(2, 7)), W[2:7])
    again = unpacked(packed.mask, packed.values, columns, dtype)
    assert again.starts is not None
    assert packed.starts is not None
    assert torch.equal(again.starts, packed.starts)


@given(st.integers(1, 12), st.integers(1, 150), st.floats(0, 1), st.sampled_from(DTYPES), st.integers(0, 99))
@pytest.mark.slow
def test_any_shape_comes_back(rows: int, columns: int, sparsity: float, dtype: torch.dtype, seed: int) -> None:
    W = sparse(rows, columns, sparsity, dtype, seed)
    assert same_bits(kernels.expand(pack(W)), W)


@pytest.mark.parametrize(("columns", "groups"), [(192, 1), (192, 3), (100, 1), (7, 1)])
@pytest.mark.parametrize("bits", [4, 8])
def test_whole_numbers_come_back_bit_for_bit(columns: int, groups: int, bits: int) -> None:
    W, codes, scales = on_grid(20, columns, groups, bits)
    packed = pack(W, codes, scales, bits)
    assert packed.values.dtype == (torch.int8 if bits == 8 else torch.uint8)
    for path in PATHS:
        assert same_bits(kernels.expand(packed, path=path), W)
        assert same_bits(kernels.expand(packed, 3, 11, path=path), W[3:11])
    assert torch.equal(kernels._unpacked(packed, slice(0, 20)), codes)
    assert torch.equal(kernels._unpacked(packed, slice(3, 11)), codes[3:11])
    again = unpacked(packed.mask, packed.values, columns, W.dtype, scales.bfloat16())
    assert again.starts is not None
    assert packed.starts is not None
    assert torch.equal(again.starts, packed.starts)
    assert again.scales is not None
    assert torch.equal(again.scales, scales)
    wide = with_bytes(packed)
    assert wide.values.dtype == torch.int8
    assert same_bits(kernels.expand(wide), W)


def test_numbers_of_four_bits_lie_in_halves_of_bytes() -> None:
    """The first one in the lower half; each 64 columns begin with a byte."""
    codes = torch.zeros(2, 128, dtype=torch.int8)
    codes[0, [0, 5, 63]] = torch.tensor([1, -1, 7], dtype=torch.int8)
    codes[0, 64] = -8
    codes[1, 127] = 2
    packed = pack(codes.float(), codes, torch.ones(2, 1), 4)
    assert packed.values[:5].tolist() == [0xF1, 0x07, 0x08, 0x02, 0]
    assert packed.values.shape == (4 + 64,)
    assert packed.starts is not None
    assert packed.starts.tolist() == [0, 3, 4]


@covered
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [8, 64, 100, 320])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 9])
def test_product(path: Instructions, dtype: torch.dtype, columns: int, batch: int) -> None:
    for sparsity in SPARSITIES:
        W, x = sparse(37, columns, sparsity, dtype), vectors(batch, columns)
        y = kernels.multiply(pack(W), x, path)
        assert y.dtype == torch.float32
        assert is_product(y, x, W)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("columns", "groups"), [(192, 1), (192, 3), (100, 1)])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_with_whole_numbers(
    path: Instructions, columns: int, groups: int, bits: int, dtype: torch.dtype
) -> None:
    W, codes, scales = on_grid(37, columns, groups, bits)
    for batch in (1, 2, 5):
        x = vectors(batch, columns, dtype)
        assert is_product(kernels.multiply(pack(W, codes, scales, bits), x, path), x, dense_of(codes, scales))


@pytest.mark.parametrize("value", [65504.0, 6e-8, -6.1e-5, 1.0])
def test_all_of_float16(value: float) -> None:
    """The largest number, the smallest one, and those without a leading 1."""
    W = torch.full((4, 8), value, dtype=torch.float16)
    for path in PATHS:
        assert torch.equal(kernels.multiply(pack(W), torch.eye(8), path), W.float().T)


def test_infinite_float16() -> None:
    for value in (torch.inf, -torch.inf, torch.nan):
        W = torch.eye(8, dtype=torch.float16)
        W[W != 0] = value
        for path in PATHS:
            y = kernels.multiply(pack(W), torch.ones(1, 8), path)
            assert torch.equal(y, torch.full((1, 8), value)) or (value != value and y.isnan().all())


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_give_the_same_bytes(threads: int) -> None:
    W, x = sparse(1_501, 256, 0.5), vectors(3, 256)
    packed = pack(W)
    expected = kernels.multiply(packed, x)
    with with_threads(threads):
        assert torch.equal(kernels.multiply(packed, x), expected)
        assert torch.equal(kernels.multiply(packed, x[:1]), expected[:1])
        assert torch.equal(kernels.expand(packed), W)


@pytest.mark.slow
def test_threads_where_torch_has_no_openmp() -> None:
    """The library starts threads of its own then; in a process in which torch's cannot be found."""
    if kernels.library() is None:
        pytest.skip("no native library")
    code = """
import os
os.environ["NIWAKI_NO_OPENMP"] = "1"
import torch
from niwaki.packed import kernels
from niwaki.packed.matrix import pack
torch.set_num_threads(3)
W = torch.randn(300, 64)
assert torch.allclose(kernels.multiply(pack(W), torch.eye(64)), W.T)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("path", "computed"),
    [(Instructions.AVX2, torch.float32), (Instructions.AVX512_BF16, torch.bfloat16), (None, torch.float32)],
)
def test_what_tiles_are_multiplied_in(
    path: Instructions | None, computed: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 where the processor has instructions for that."""
    W, x = sparse(8, 64, 0.5), vectors(40, 64, torch.bfloat16)
    seen = []

    def linear(x: Tensor, tile: Tensor) -> Tensor:
        seen.append((x.dtype, tile.dtype))
        return x @ tile.T

    monkeypatch.setattr(kernels, "linear", linear)
    monkeypatch.setattr(kernels, "best_path", lambda: path)
    y = kernels.multiply_by_tiles(pack(W), x)
    assert seen == [(computed, computed)]
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.double(), x.double() @ W.double().T, rtol=0.02, atol=0.05)


@pytest.fixture(scope="module")
def large() -> tuple[Tensor, PackedMatrix]:
    W = sparse(1_024, 4_096, 0.4)
    return W, pack(W)


class TestLargePages:
    """2 MiB each, for matrices of at least two of them."""

    def test_is_the_same_matrix(self, large: tuple[Tensor, PackedMatrix]) -> None:
        W, packed = large
        values = (moved := in_large_pages(packed)).values
        gc.collect()
        assert same_bits(kernels.expand(moved), W)
        assert values.data_ptr() % 2**21 == 0
        assert values.equal(packed.values)
        if SMAPS.exists():  # only Linux says what the kernel was asked for
            assert "hg" in flags_at(values.data_ptr())
            # A large page for the last few bytes would take 2 MiB.
            assert "hg" not in flags_at(values.data_ptr() + values.nbytes - 1)

    def test_small_ones_stay_where_they_are(self) -> None:
        packed = pack(sparse(64, 64, 0.5))
        moved = in_large_pages(packed)
        assert (moved.values is packed.values, moved.mask is packed.mask) == (True, True)

    def test_systems_without_them(self, large: tuple[Tensor, PackedMatrix], monkeypatch: pytest.MonkeyPatch) -> None:
        _, packed = large
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1, raising=False)  # it refuses
        assert in_large_pages(packed).values is packed.values
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
        assert in_large_pages(packed).values is packed.values


def flags_at(address: int) -> list[str]:
    """What smaps says of the part of memory that has the address."""
    parts = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?VmFlags:([^\n]*)", SMAPS.read_text(), re.S | re.M)
    return next(flags.split() for first, end, flags in parts if int(first, 16) <= address < int(end, 16))


class TestParts:
    """Parts that contradict each other are errors."""

    def packed(self) -> PackedMatrix:
        return pack(sparse(5, 70, 0.5))

    def mask(self) -> Tensor:
        mask = self.packed().mask
        assert mask is not None
        return mask.clone()

    def refused(self, **changes: object) -> str:
        good = self.packed()
        parts: dict[str, Any] = {"mask": good.mask, "values": good.values, "columns": 70, "dtype": torch.bfloat16}
        with pytest.raises(ValueError, match=r".") as caught:
            unpacked(**{**parts, "scales": None, **changes})
        return str(caught.value)

    def test_a_bit_too_many(self) -> None:
        mask = self.mask()
        mask[0, 0] ^= 1
        assert "values" in self.refused(mask=mask)

    @pytest.mark.parametrize("column", [70, 71, 127])
    def test_a_bit_behind_the_last_column(self, column: int) -> None:
        good = self.packed()
        mask = self.mask()
        mask[4, column // 8] |= 1 << column % 8
        values = torch.cat([good.values, good.values.new_zeros(1)])
        assert "after column 70" in self.refused(mask=mask, values=values)

    def test_padding_that_is_not_zero(self) -> None:
        values = self.packed().values.clone()
        values[-1] = 1
        assert "64 zeros" in self.refused(values=values)

    @pytest.mark.parametrize("scale", [0.0, torch.nan])
    def test_a_scale_that_is_0(self, scale: float) -> None:
        scales = torch.tensor([[1.0]] * 4 + [[scale]])
        assert "is 0 or not a number" in self.refused(values=self.packed().values.to(torch.int8), scales=scales)


class TestSparseLinear:
    def layers(self, bias: bool = True, dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, SparseLinear]:
        W = sparse(40, 100, 0.5, dtype)
        dense = nn.Linear(100, 40, bias, dtype=dtype)
        dense.weight.data = W
        return dense, SparseLinear(pack(W), dense.bias)

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("shape", [(100,), (1, 100), (2, 3, 100), (32, 100), (33, 100), (0, 100)])
    def test_as_the_dense_layer(self, bias: bool, shape: tuple[int, ...]) -> None:
        dense, layer = self.layers(bias)
        x = vectors(1, 4000).flatten()[: int(np.prod(shape))].view(shape)
        with torch.no_grad():
            expected, found = dense(x), layer(x)
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, atol=1e-5)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("count", [1, 20])
    def test_half_precision(self, dtype: torch.dtype, count: int) -> None:
        dense, layer = self.layers(dtype=dtype)
        x = vectors(count, 100, dtype)
        with torch.no_grad():
            found = layer(x)
        assert found.dtype == dtype
        exact = x.double() @ dense.weight.double().T + dense.bias.double()
        assert torch.allclose(found.double(), exact, atol=0.1, rtol=0.02)

    @pytest.mark.parametrize("transposed", [False, True])
    def test_its_weight_is_the_dense_one(self, transposed: bool) -> None:
        """In the dtype of the model, which it follows."""
        W = sparse(40, 100, 0.5, torch.bfloat16)
        layer = SparseLinear(pack(W), None, transposed, torch.float32)
        assert torch.equal(layer.weight, (W.T if transposed else W).float())
        layer.half()
        assert torch.equal(layer.weight, (W.T if transposed else W).half())
        assert layer.values.dtype == torch.bfloat16
        assert SparseLinear(pack(W)).weight.dtype == torch.bfloat16

    @pytest.mark.parametrize("count", [1, 40])
    def test_inputs_are_not_rounded_to_the_dtype_of_weights(self, count: int) -> None:
        """As loaded on a CPU: weights in bfloat16, everything else in float32."""
        W, x = sparse(40, 100, 0.5), vectors(count, 100)
        assert torch.allclose(SparseLinear(pack(W))(x).double(), x.double() @ W.double().T, atol=1e-4)

    def test_tiles(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernels, "TILE", 700)  # 7 of 40 rows
        dense, layer = self.layers()
        x = vectors(kernels.FEW + 1, 100)
        assert torch.allclose(layer(x), dense(x), atol=1e-5)

    def test_gradients_flow_to_the_inputs(self) -> None:
        dense, layer = self.layers()
        x = vectors(2, 100).requires_grad_()
        found, expected = (torch.autograd.grad(of(x).square().sum(), x)[0] for of in (layer, dense))
        assert torch.allclose(found, expected, atol=1e-4)

    def test_other_dtypes_leave_the_values_alone(self) -> None:
        _, layer = self.layers(dtype=torch.bfloat16)
        before = layer.values
        layer.to(torch.float64).to(torch.float32)
        assert layer.values.dtype == torch.bfloat16
        assert torch.equal(layer.values, before)
        assert layer.bias is not None
        assert layer.bias.dtype == torch.float32

    @pytest.mark.parametrize("transposed", [False, True])
    def test_its_state_is_that_of_the_dense_layer(self, transposed: bool) -> None:
        W = sparse(40, 100, 0.5)
        state = SparseLinear(pack(W), nn.Parameter(torch.ones(40)), transposed).state_dict()
        assert list(state) == ["bias", "weight"]
        assert same_bits(state["weight"], W.T if transposed else W)

    @pytest.mark.filterwarnings("ignore")  # of torch, about its own tools
    @pytest.mark.slow
    def test_compiled(self) -> None:
        """Compilers do not look into it: they let go of what the library still reads."""
        _, layer = self.layers(dtype=torch.bfloat16)
        x = vectors(3, 100, torch.bfloat16)
        with torch.no_grad():
            assert torch.equal(torch.compile(layer, backend="eager")(x), layer(x))

    @pytest.mark.filterwarnings("ignore")
    def test_not_traced(self) -> None:
        _, layer = self.layers()
        with pytest.raises(RuntimeError, match="cannot be traced"):
            torch.jit.trace(layer, (vectors(1, 100),))

    @pytest.mark.filterwarnings("ignore")  # of torch, about its own tools
    def test_forward_mode_derivatives(self) -> None:
        dense, layer = self.layers()
        x, direction = vectors(2, 100), vectors(3, 100)[1:]
        with forward_ad.dual_level():
            made = forward_ad.make_dual(x, direction)
            found, expected = (forward_ad.unpack_dual(of(made)).tangent for of in (layer, dense))
        assert found is not None
        assert expected is not None
        assert torch.allclose(found, expected, atol=1e-5)

    def test_never_reads_what_is_not_there(self) -> None:
        """Modules can be moved and changed as a whole, and weights have no say in that."""
        dense, layer = self.layers()
        x = vectors(2, 100)
        layer.type(torch.float64).float()
        assert torch.allclose(layer(x), dense(x), atol=1e-5)
        layer.to_empty(device="cpu")
        assert layer.mask is not None
        assert layer.mask.any()
        layer.to("meta")
        with pytest.raises(RuntimeError, match="packed weights on meta"):
            layer(x)
        with pytest.raises(RuntimeError, match="int64"):
            self.layers()[1](x.long())
        W = pack(*on_grid(64, 64, 1))
        assert W.mask is not None
        assert W.starts is not None
        assert W.scales is not None
        changes: list[dict[str, Any]] = [
            *({"scales": W.scales.half()}, {"mask": W.mask.T.contiguous().T}, {"mask": W.mask.float()}),
            *({"starts": W.starts.int()}, {"values": W.values.double()}, {"scales": None}),
        ]
        for change in changes:
            broken = dataclasses.replace(W, **change)
            for use in (lambda broken: kernels.multiply(broken, vectors(1, 64)), kernels.expand):
                with pytest.raises(RuntimeError, match="load the model again"):
                    use(broken)
        for wrong in (vectors(2, 63), vectors(2, 65), vectors(2, 64)[0], vectors(2, 64).long()):
            with pytest.raises(RuntimeError, match="64 columns cannot be multiplied"):
                kernels.multiply(W, wrong)

    def test_autocast(self) -> None:
        dense, layer = self.layers()
        with torch.autocast("cpu", torch.bfloat16):
            for count in (2, 40):
                x = vectors(count, 100)
                assert layer(x).dtype == dense(x).dtype == torch.bfloat16

    def test_double_precision(self) -> None:
        dense, layer = self.layers()
        x = vectors(2, 100).double()
        assert torch.allclose(layer(x), dense.double()(x), atol=1e-12)

    def test_says_what_it_is(self) -> None:
        _, layer = self.layers(dtype=torch.bfloat16)
        assert "in_features=100, out_features=40, bias=True, sparsity=0.4" in repr(layer)
        assert "values=bfloat16" in repr(layer)

    def test_without_the_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernels, "library", lambda: None)
        dense, layer = self.layers()
        for count in (1, 30):
            x = vectors(count, 100)
            assert torch.allclose(layer(x), dense(x), atol=1e-5)
        assert kernels.best_path() is None
        assert "install a C++ compiler" in kernels.describe()
        with pytest.raises(RuntimeError, match="not built"):
            kernels.multiply(layer.packed, vectors(1, 100))


@pytest.mark.parametrize("rows", [(-1, 2), (2, 1), (0, 10)])
def test_rows_that_a_matrix_does_not_have(rows: tuple[int, int]) -> None:
    """The native library would read whatever lies there."""
    with pytest.raises(RuntimeError, match=f"has no rows {rows[0]} to {rows[1]}"):
        kernels.expand(pack(sparse(9, 70, 0.5)), *rows)
