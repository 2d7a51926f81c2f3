"""The native kernels that this machine may not have instructions for, with these in plain C++."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import niwaki
import support
from niwaki.packed import kernels
from niwaki.packed.kernels import Path as Instructions
from niwaki.packed.matrix import in_strips, pack
from support.caches import CACHE
from support.covering import covered
from support.models import random_tokens, reference, sparse_model
from support.sparse import dense_of, in_whole_numbers, is_product, on_grid, sparse, vectors

SOURCES = sorted((Path(niwaki.__file__).parents[1] / "native").glob("*.cpp"))
EMULATED = [Instructions.AVX512BW, Instructions.AVX512, Instructions.AVX512_BF16]
pytestmark = [
    pytest.mark.slow,  # to compile them takes seconds
    pytest.mark.skipif(shutil.which("c++") is None or not SOURCES, reason="no C++ compiler, or no source"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels with emulated AVX-512."""
    path = tmp_path_factory.mktemp("native") / "kernels.so"
    header = Path(support.__file__).with_name("avx512.h")
    flags = ["-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run(["c++", *flags, f'-DNIWAKI_EMULATE="{header}"', "-o", path, *SOURCES], check=True)
    return path


@pytest.fixture(autouse=True)
def emulated(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernels.open_library(str(library))
    monkeypatch.setattr(kernels, "library", functools.cache(lambda: found))
    assert kernels.best_path() == Instructions.AVX512_BF16


@covered
@pytest.mark.parametrize("path", EMULATED)
@pytest.mark.parametrize("columns", [8, 64, 100, 320])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product(path: Instructions, columns: int, batch: int, dtype: torch.dtype) -> None:
    for sparsity in (0.0, 0.5, 0.8, 1.0):
        W, x = sparse(37, columns, sparsity), vectors(batch, columns, dtype)
        assert is_product(kernels.multiply(pack(W), x, path), x, W)


@pytest.mark.parametrize("path", EMULATED)
@pytest.mark.parametrize(("columns", "groups"), [(192, 1), (192, 3), (100, 1)])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_with_whole_numbers(
    path: Instructions, columns: int, groups: int, bits: int, dtype: torch.dtype
) -> None:
    W, codes, scales = on_grid(37, columns, groups, bits)
    for batch in (1, 2, 3, 5):
        x = vectors(batch, columns, dtype)
        assert is_product(kernels.multiply(pack(W, codes, scales, bits), x, path), x, dense_of(codes, scales))


@pytest.mark.parametrize("path", EMULATED)
@pytest.mark.parametrize(("columns", "groups"), [(192, 1), (192, 3), (100, 1)])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("rounded", [False, True])
def test_product_without_a_mask(path: Instructions, columns: int, groups: int, bits: int, rounded: bool) -> None:
    W, codes, scales = on_grid(37, columns, groups, bits, zeros=0.1)
    packed, exact = pack(W, codes, scales, bits, whole=True), dense_of(codes, scales)
    for form in (packed, in_strips(packed)):
        assert torch.equal(kernels.expand(form, path=path), W)
        for batch in (1, 2, 3, 4, 5, 9, 14):
            x = vectors(batch, columns)
            y = kernels.multiply(form, x, path, rounded)
            assert is_product(y, in_whole_numbers(x) if rounded else x, exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5])
def test_product_with_other_dtypes(dtype: torch.dtype, batch: int) -> None:
    for sparsity in (0.0, 0.5, 1.0):
        W, x = sparse(37, 100, sparsity, dtype), vectors(batch, 100)
        assert is_product(kernels.multiply(pack(W), x), x, W)
        assert torch.equal(kernels.expand(pack(W)), W)


def test_extremes_of_float16() -> None:
    """The largest number, one without a leading 1, infinity."""
    for value in (65504.0, -6e-8, torch.inf):
        W = torch.full((4, 1), value, dtype=torch.float16)
        assert torch.equal(kernels.multiply(pack(W), torch.ones(1, 1)), W.float().T)


def test_single_tokens(tmp_path: Path) -> None:
    """Blocks and heads, with the pairs of bfloat16 and with float32."""
    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        model = sparse_model(tmp_path / str(dtype), "qwen3", dtype=dtype)
        niwaki.pack(model, tmp_path / f"{dtype}-packed")
        tokens, found = random_tokens(1, 8), []
        for whole in (niwaki.load(tmp_path / f"{dtype}-packed", "cpu"), reference(model)):
            run: Any = whole
            with torch.no_grad():
                cache = run(tokens[:, :7], use_cache=True)[CACHE]
                found.append(run(tokens[:, 7:], **{CACHE: cache}).logits.float())
        assert (found[0] - found[1]).norm() < most * found[1].norm()
