"""The kernels for GPUs against float64; without a GPU in Triton's interpreter (see conftest.py)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from niwaki.packed import linear
from niwaki.packed.matrix import PackedMatrix, pack
from support.covering import FULL, covered
from support.sparse import dense_of

ROOT = Path(__file__).parents[2]
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32

HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton has no package for this platform")
TRITON = tuple(map(int, importlib.metadata.version("triton").split(".")[:2])) if HAS_TRITON else (0, 0)
if HAS_TRITON:
    from niwaki.packed import gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = ((1, 1), (17, 33), (33, 64), (5, 511), (2, 512), (3, 513), (2, 2048), (3, 4200))
#: Largest relative error of a number rounded to the dtype; the interpreter cuts bfloat16 off.
ROUNDING = {HALF: 2**-11, BRAIN: 2**-7, SINGLE: 2**-24}


def random(rows: int, columns: int, density: float, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rows + columns)
    W = torch.randn(rows, columns, generator=generator)
    kept = torch.rand(rows, columns, generator=generator) < density
    return torch.where(kept, W, 0.0).to(dtype)


def amid(value: Tensor, filler: float) -> Tensor:
    """The same tensor, on the device, in the midst of memory that holds something else."""
    room = torch.full((value.numel() + 256,), filler, dtype=value.dtype, device=DEVICE)
    inside = room[128:-128].view(value.shape)
    return inside.copy_(value)


def in_hostile_memory(W: PackedMatrix) -> PackedMatrix:
    """With ones, NaNs and far places before and behind its parts, and behind the last value."""
    assert W.mask is not None
    assert W.starts is not None
    whole = W.values.dtype == torch.int8
    values = W.values.clone()
    values[int(W.starts[-1]) :] = 99 if whole else torch.nan
    return replace(
        W,
        mask=amid(W.mask, 255),
        values=amid(values, 99 if whole else torch.nan),
        starts=amid(W.starts, 1),
        scales=None if W.scales is None else amid(W.scales, torch.nan),
    )


def check(packed: PackedMatrix, dense: Tensor, vectors: int, dtype: torch.dtype) -> None:
    """x W^T for random vectors against float64: one rounding, and sums in float32."""
    x = torch.randn(vectors, dense.shape[1], generator=torch.Generator().manual_seed(vectors)).to(dtype)
    y = gpu.multiply(in_hostile_memory(packed), amid(x, torch.nan)).cpu()
    assert (y.dtype, y.shape) == (dtype, (vectors, len(dense)))
    right = x.double() @ dense.double().T
    sums = x.double().abs() @ dense.double().abs().T
    least = 2.0**-24 if dtype == HALF else 0.0  # its smallest number
    assert ((y.double() - right).abs() <= ROUNDING[dtype] * right.abs() + 1e-6 * sums + least).all()


#: Rows, columns, density, dtype and vectors.
PRODUCTS = [
    *((3, 70, 0.5, dtype, vectors) for dtype in (HALF, BRAIN, SINGLE) for vectors in (1, 2, 3, 5, 16)),
    (3, 70, 0.5, HALF, 19),  # more vectors than it is meant for
    *((4, 600, density, HALF, vectors) for density in (0.0, 0.02, 0.98, 1.0) for vectors in (1, 4)),
    # Parts of a tile, whole ones, and several steps with and without a rest.
    *((rows, columns, 0.5, HALF, vectors) for rows, columns in SHAPES for vectors in (1, 2, 6)),
]


@pytest.mark.parametrize(("rows", "columns", "density", "dtype", "vectors"), PRODUCTS)
@pytest.mark.slow
def test_products(rows: int, columns: int, density: float, dtype: torch.dtype, vectors: int) -> None:
    W = random(rows, columns, density, dtype)
    check(pack(W), W, vectors, dtype)


@pytest.mark.parametrize(("weights", "inputs"), [(HALF, BRAIN), (BRAIN, HALF), (SINGLE, HALF), (BRAIN, SINGLE)])
@pytest.mark.slow
def test_dtypes_that_differ(weights: torch.dtype, inputs: torch.dtype) -> None:
    """Products are of W as it is, not rounded to the dtype of x."""
    W = random(12, 70, 0.5, weights)
    check(pack(W), W, 3, inputs)


@pytest.mark.parametrize("vectors", [1, 4])
@pytest.mark.slow
def test_rows_and_words_that_are_empty_or_full(vectors: int) -> None:
    W = random(19, 600, 0.5, HALF)
    W[0] = W[7] = W[18] = 0
    W[1] = W[17] = 1.5
    W[2:6, 32:96] = 0
    W[3:9, 512:576] = -2
    W[10, ::2] = W[11, 1::2] = 0
    check(pack(W), W, vectors, HALF)


def test_zeros_below_the_usual_are_values() -> None:
    """-0.0 and numbers next to 0 have bits, so they are in the mask."""
    W = random(2, 70, 0.5, SINGLE)
    W[0, 3], W[1, 5] = -0.0, 1e-42
    check(pack(W), W, 1, SINGLE)


@pytest.mark.parametrize("warps", [1, 2])
@pytest.mark.slow
def test_steps_of_large_matrices(warps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that matrices of thousands of rows are given, on a small one."""
    monkeypatch.setattr(gpu, "_warps", lambda _: warps)
    W = random(9, 2100, 0.5, HALF)
    for vectors in (1, 2):
        check(pack(W), W, vectors, HALF)


@covered
@pytest.mark.parametrize("vectors", [1, 2, 7])
@pytest.mark.parametrize(("columns", "groups"), [(70, 1), (192, 3), (2304, 18)])
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.slow
def test_whole_numbers_with_scales(columns: int, groups: int, dtype: torch.dtype, vectors: int) -> None:
    """By lanes the numbers are not rounded; tensor cores take them in the dtype of W."""
    generator = torch.Generator().manual_seed(columns)
    codes = torch.randint(-127, 128, (3, columns), generator=generator).to(torch.int8)
    codes[torch.rand(codes.shape, generator=generator) < 0.5] = 0
    scales = torch.rand(3, groups, generator=generator) / 100
    exact = dense_of(codes, scales)
    W = exact.to(dtype)
    check(pack(W, codes, scales), W if vectors > 2 and dtype == HALF else exact, vectors, dtype)


def test_inputs_of_any_layout() -> None:
    W = random(3, 70, 0.5, HALF)
    x = torch.randn(70, 4, generator=torch.Generator().manual_seed(0)).to(HALF).to(DEVICE).T
    y = gpu.multiply(pack(W).to(DEVICE), x).cpu().double()
    assert torch.allclose(y, x.cpu().double() @ W.double().T, rtol=2**-10, atol=1e-3)


def test_what_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU few vectors go to these kernels, and many, or what they cannot do, to the path by tiles."""
    seen: list[int] = []

    def multiply(W: PackedMatrix, x: Tensor) -> Tensor:
        seen.append(len(x))
        return x @ torch.ones(x.shape[1], W.shape[0], dtype=x.dtype)

    monkeypatch.setattr(gpu, "multiply", multiply)
    W = pack(random(3, 70, 0.5, SINGLE))
    for vectors in (0, 1, 16, 17):
        assert linear._multiply(W, torch.ones(vectors, 70), "cuda").shape == (vectors, 3)
    assert seen == [1, 16]
    linear._multiply(W, torch.ones(1, 70), "cpu")
    linear._multiply(W, torch.ones(1, 70, requires_grad=True), "cuda")
    linear._multiply(W, torch.ones(1, 70, dtype=torch.float64), "cuda")
    monkeypatch.setattr(linear, "_has_triton", lambda: False)
    linear._multiply(W, torch.ones(1, 70), "cuda")
    assert seen == [1, 16]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_layer_on_a_gpu() -> None:
    W = random(300, 700, 0.5, HALF)
    layer = linear.SparseLinear(pack(W)).to(DEVICE)
    for vectors in (1, 2, 7, 16, 40):
        x = torch.randn(vectors, 700, generator=torch.Generator().manual_seed(0)).to(HALF)
        y, right = layer(x.to(DEVICE)).cpu().double(), x.double() @ W.double().T
        # torch, which multiplies more than 16, may add parts of a sum in half precision.
        assert torch.linalg.norm(y - right) < 1e-3 * torch.linalg.norm(right)


@pytest.mark.slow
@pytest.mark.skipif(TRITON < (3, 7), reason="versions of Triton before make more instructions of it")
def test_they_compile_for_a_gpu(tmp_path: Path) -> None:
    """What the interpreter lets pass, the compiler may not; and it can make much more of them than is in the source."""
    record = tmp_path / "record.json"
    vectors = (1, 8) if FULL else (8,)
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "instructions", "--kinds", "float16,int8"]
    command += ["--vectors", ",".join(map(str, vectors)), "--rows", "8192", "--architectures", "80"]
    command += ["--record", str(record)]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert not run.stderr
    most = {("float16", 1): (9, 1), ("float16", 8): (12, 2), ("int8", 1): (10, 1), ("int8", 8): (15, 2)}
    results = json.loads(record.read_text())["results"]
    assert {(case["kind"], case["vectors"]) for case in results} == {case for case in most if case[1] in vectors}
    for case in results:
        instructions, waits = most[case["kind"], case["vectors"]]
        assert case["instructions"] < instructions
        assert case["waits"] <= waits
