"""TF32: where it is used, and the benchmark's way to do without a GPU what one does to factors; oneDNN."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from precision import Rounding, cut, rounded  # benchmarks/precision.py
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from niwaki.layer import linalg as module
from niwaki.layer.linalg import has_tf32, onednn_is_faster, products
from niwaki.records.record import Record
from support.models import save_model
from support.runs import run

MATMUL = torch.backends.cuda.matmul
ONEDNN = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    MATMUL.fp32_precision = ONEDNN.fp32_precision = "none"  # whatever tests before these have left
    before = MATMUL.fp32_precision, ONEDNN.fp32_precision
    yield
    assert (MATMUL.fp32_precision, ONEDNN.fp32_precision) == before


# Rounding


def half(X: Tensor) -> Tensor:
    """Rounded to float16 by numpy, which has ten bits behind the leading one too."""
    return torch.from_numpy(X.numpy().astype(np.float16).astype(np.float32))


def test_ten_bits_are_those_of_float16() -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(10_000, generator=generator) * torch.randint(-10, 13, (10_000,), generator=generator).exp2()
    X = X[(X.abs() >= 2.0**-14) & (X.abs() < 65_504)]  # where float16 has all its bits
    assert len(X) > 9_000
    assert torch.equal(rounded(X, 10), half(X))
    ties = torch.arange(4096.0, 8192.0, 2.0)  # every other one is half way between two numbers of ten bits
    assert torch.equal(rounded(ties, 10), half(ties))
    assert torch.equal(rounded(-ties, 10), half(-ties))
    assert torch.equal(rounded(X[:35].view(5, 7).T, 10), half(X[:35].view(5, 7)).T)


@given(patterns=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50))
def test_seven_bits_are_those_of_bfloat16(patterns: list[int]) -> None:
    """All float32 numbers: also those next to zero, too large for seven bits, infinite and NaN."""
    X = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    torch.testing.assert_close(rounded(X, 7), X.bfloat16().float(), rtol=0, atol=0, equal_nan=True)
    special = torch.tensor([0.0, -0.0, 3.4028235e38, -3.4028235e38, np.inf, 1e-45, 1.00390625, 1.01171875])
    assert torch.equal(rounded(special, 7).view(torch.int32), special.bfloat16().float().view(torch.int32))


def chopped(X: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Without the bits that float32 does not have, for numbers that are neither small nor large."""
    return (X.view(np.int64) & ~((1 << 29) - 1)).view(np.float64)


def test_cut_is_towards_zero() -> None:
    X = torch.randn(1_000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert torch.equal(cut(X).double(), torch.from_numpy(chopped(X.numpy())))
    exact = torch.tensor([0.0, 1.0, -3.5], dtype=torch.float64)
    assert torch.equal(cut(exact).double(), exact)


def factors(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


A, B, C = factors(6, 9, seed=3), factors(9, 4, seed=4), factors(6, 4, seed=5)
PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mm": lambda A, B, C: A @ B + C,
    "mm of transposes": lambda A, B, C: (B.T @ A.T).T + C,
    "mm out": lambda A, B, C: torch.mm(A, B, out=torch.empty_like(C)) + C,
    "addmm": lambda A, B, C: torch.addmm(C, A, B),
    "addmm, in place": lambda A, B, C: C.clone().addmm_(A, B),
    "addmm out": lambda A, B, C: torch.addmm(C, A, B, out=torch.empty_like(C)),
    "addmm of a multiple": lambda A, B, C: torch.addmm(C, A, B, alpha=-2.0).sub(C).mul(-0.5).add(C),
    "linear": lambda A, B, C: torch.nn.functional.linear(A, B.T) + C,
    "einsum": lambda A, B, C: torch.einsum("ij,jk->ik", A, B) + C,
    "bmm": lambda A, B, C: torch.bmm(A[None], B[None])[0] + C,
    "baddbmm": lambda A, B, C: torch.baddbmm(C[None], A[None], B[None])[0],
    "baddbmm, in place": lambda A, B, C: C[None].clone().baddbmm_(A[None], B[None])[0],
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_factors_of_every_kind_of_product_are_rounded(name: str) -> None:
    product = PRODUCTS[name]
    with Rounding(10) as mode:
        found = product(A, B, C)
    assert mode.count == 1
    wanted = half(A).double() @ half(B).double() + C
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)
    assert not torch.allclose(found, product(A, B, C), rtol=0, atol=1e-5)
    with Rounding(10):
        assert torch.equal(product(A.double(), B.double(), C.double()), product(A.double(), B.double(), C.double()))


def test_factorizations_are_not_rounded() -> None:
    H = A @ A.T + torch.eye(6)
    with Rounding(7) as mode:
        L = torch.linalg.cholesky(H)
        inverse = torch.cholesky_inverse(L)
    assert mode.count == 0
    assert torch.equal(L, torch.linalg.cholesky(H))
    assert torch.equal(inverse, torch.cholesky_inverse(L))


def test_gram_matrices_only() -> None:
    with Rounding(10, grams=True) as mode:
        gram, other = torch.zeros(9, 9).addmm_(A.T, A), A @ B
    assert mode.count == 1
    torch.testing.assert_close(gram, half(A).T @ half(A), rtol=0, atol=1e-5)
    assert torch.equal(other, A @ B)


def test_sums_that_are_cut_off() -> None:
    X = factors(98, 3, seed=6).bfloat16().float()
    C = torch.full((3, 3), 100.0)
    with Rounding(7, cut=True):
        found = C.clone().addmm_(X.T, X)
    total = np.zeros((3, 3))
    for rows in X.split(4):
        x = rows.double().numpy()
        total = chopped(total + x.T @ x)
    assert torch.equal(found, C + torch.from_numpy(total).float())


# Torch's setting


@pytest.fixture(params=["none", "ieee", "tf32"])
def outside(request: pytest.FixtureRequest) -> Iterator[str]:
    before = MATMUL.fp32_precision
    MATMUL.fp32_precision = request.param
    yield request.param
    MATMUL.fp32_precision = before


def test_the_setting_holds_within(outside: str) -> None:
    with products(tf32=True):
        assert MATMUL.fp32_precision == "tf32"
        with products(tf32=False):
            assert MATMUL.fp32_precision == "ieee"
        assert MATMUL.fp32_precision == "tf32"
    assert MATMUL.fp32_precision == outside
    with contextlib.suppress(KeyError), products(tf32=True):
        raise KeyError
    assert MATMUL.fp32_precision == outside


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("old", ["highest", "high"])
def test_the_older_setting_is_as_before_too(old: str, inside: bool) -> None:
    torch.set_float32_matmul_precision(old)
    try:
        with products(inside):
            pass
        assert torch.get_float32_matmul_precision() == old
        assert MATMUL.allow_tf32 == (old == "high")
    finally:
        torch.set_float32_matmul_precision("highest")
        MATMUL.fp32_precision = ONEDNN.fp32_precision = "none"


def test_which_devices_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def device(device: torch.device) -> contextlib.AbstractContextManager[None]:
        asked.append(device)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "device", device)
    for answer in (True, False):
        monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda answer=answer: answer)
        assert has_tf32(torch.device("cuda:1")) is answer
        assert not has_tf32(torch.device("cpu"))
        assert not has_tf32(torch.device("mps"))
    assert asked == [torch.device("cuda:1")] * 2


class Watch(TorchDispatchMode):
    """With which setting products of float32 matrices, and triangular solves, are computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.grams: set[str] = set()
        self.others: set[str] = set()
        self.triangular: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            left, right = args[-2:]
            if left.dtype == torch.float32:
                itself = left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
                (self.grams if itself else self.others).add(MATMUL.fp32_precision)
        elif name == "linalg_solve_triangular":
            self.triangular.add(MATMUL.fp32_precision)
        return func(*args, **(kwargs or {}))


def watched(tmp_path: Path, **options: Any) -> tuple[Watch, Record]:
    model = save_model(tmp_path / "model")
    # The product that tells how fast the machine is, is none of the run.
    with patch("niwaki.runs.execute.products_per_second", lambda device: 1e9), Watch() as watch:
        record = run(model, tmp_path / "out", solver="sparsegpt", measure="none", **options)
    assert watch.grams
    assert watch.others
    assert watch.triangular == {"ieee"}
    return watch, record


@pytest.mark.parametrize(
    ("dtype", "tf32", "grams", "others"),
    [
        ("bfloat16", None, "tf32", "ieee"),
        ("float16", "auto", "tf32", "ieee"),
        ("float32", "auto", "ieee", "ieee"),
        *((dtype, "always", "tf32", "tf32") for dtype in ("bfloat16", "float32")),
        *((dtype, "never", "ieee", "ieee") for dtype in ("bfloat16", "float32")),
    ],
)
@pytest.mark.slow
def test_what_a_run_computes_in_tf32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outside: str,
    dtype: str, tf32: str | None, grams: str, others: str,
) -> None:  # fmt: skip
    """Whatever torch is set to outside."""
    monkeypatch.setattr("niwaki.pruning.prune.has_tf32", lambda device: True)
    watch, record = watched(tmp_path, dtype=dtype, **({"tf32": tf32} if tf32 else {}))
    assert (watch.grams, watch.others) == ({grams}, {others})
    assert record.tf32 == (tf32 or "auto")
    assert Record.load(tmp_path / "out" / "niwaki.json").tf32 == record.tf32
    assert not any("tf32" in note for note in record.notes)
    assert MATMUL.fp32_precision == outside


@pytest.mark.parametrize("tf32", ["auto", "always", "never"])
@pytest.mark.slow
def test_a_device_that_has_none(tmp_path: Path, tf32: str) -> None:
    watch, record = watched(tmp_path, tf32=tf32, dtype="bfloat16")
    assert (watch.grams, watch.others) == ({"ieee"}, {"ieee"})
    assert record.tf32 == "never"
    note = "--tf32 always has no effect: cpu has no TF32, products are in float32"
    assert (note in record.notes) == (tf32 == "always")


# oneDNN


@pytest.fixture(params=["AuthenticAMD", "GenuineIntel", ""])
def vendor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(module, "_vendor", lambda: request.param)
    onednn_is_faster.cache_clear()
    yield request.param
    onednn_is_faster.cache_clear()


def test_onednn_only_where_it_is_faster(vendor: str) -> None:
    """And as exact, which it is on none of AMD's processors so far that rounds factors."""
    before = ONEDNN.fp32_precision
    with products(tf32=False):
        assert ONEDNN.fp32_precision == ("bf16" if onednn_is_faster() else before)
    if vendor != "AuthenticAMD":
        assert not onednn_is_faster()


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_in_float32(name: str) -> None:
    """By whatever library: no factor is rounded."""
    A, B, C = factors(70, 600, seed=7), factors(600, 33, seed=8), factors(70, 33, seed=9)
    with products(tf32=False):
        found = PRODUCTS[name](A, B, C)
    with Rounding(7):
        rounded = PRODUCTS[name](A, B, C)
    away = [(each.double() - (A.double() @ B.double() + C)).abs().max() for each in (found, rounded)]
    assert away[0] <= 1e-4 < away[1]


def test_a_library_that_rounds_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_vendor", lambda: "AuthenticAMD")
    onednn_is_faster.cache_clear()
    with Rounding(7):
        assert not onednn_is_faster()
    onednn_is_faster.cache_clear()
