"""The native kernels that this machine may not have instructions for, with these in plain C++."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import niwaki
import support
from niwaki.packed import kernels
from niwaki.packed.kernels import Path as Instructions
from niwaki.packed.matrix import pack
from support.covering import covered
from support.sparse import sparse, vectors

SOURCE = Path(niwaki.__file__).parents[1] / "native" / "kernels.cpp"
pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None or not SOURCE.exists(), reason="no C++ compiler, or no source"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels with emulated AVX-512."""
    path = tmp_path_factory.mktemp("native") / "kernels.so"
    header = Path(support.__file__).with_name("avx512.h")
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run(["c++", *flags, f'-DNIWAKI_EMULATE="{header}"', "-o", path, SOURCE], check=True)
    return path


@pytest.fixture(autouse=True)
def emulated(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernels.open_library(str(library))
    monkeypatch.setattr(kernels, "library", functools.cache(lambda: found))
    assert kernels.best_path() == Instructions.AVX512_BF16


@covered
@pytest.mark.parametrize("path", [Instructions.AVX512, Instructions.AVX512_BF16])
@pytest.mark.parametrize("columns", [8, 64, 100, 320])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product(path: Instructions, columns: int, batch: int, dtype: torch.dtype) -> None:
    for sparsity in (0.0, 0.5, 0.8, 1.0):
        W, x = sparse(37, columns, sparsity), vectors(batch, columns, dtype)
        y = kernels.multiply(pack(W), x, path)
        scale = x.abs().double() @ W.abs().double().T
        assert ((y - x.double() @ W.double().T).abs() <= 1e-6 * scale + 1e-30).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_take_another_way(dtype: torch.dtype) -> None:
    W, x = sparse(20, 100, 0.5, dtype), vectors(3, 100)
    assert torch.allclose(kernels.multiply(pack(W), x), x @ W.float().T, atol=1e-4)
    assert torch.equal(kernels.expand(pack(W)), W)
