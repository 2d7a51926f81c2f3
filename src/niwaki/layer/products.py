"""How products of float32 matrices are computed: in TF32 on a GPU, by oneDNN on AMD's processors."""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

import torch

from niwaki.choices import TF32

_ONEDNN = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
#: Sizes of the products that show whether oneDNN rounds factors.
_SIZES = (16, 100, 512)


def has_tf32(device: torch.device) -> bool:
    """Whether ``device`` has it: NVIDIA GPUs from Ampere on, and some of AMD's."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_tf32_supported()


def gram_in_tf32(tf32: TF32, dtype: torch.dtype) -> bool:
    """Whether to use it for the Gram matrix of activations of ``dtype``.

    A bfloat16 or float16 number is a TF32 number too: no factor changes, and sums are in float32.
    """
    return tf32 == "always" or (tf32 == "auto" and dtype in (torch.bfloat16, torch.float16))


@contextlib.contextmanager
def products(tf32: bool) -> Iterator[None]:
    """Within it products of float32 matrices on GPUs use TF32, or do not, and those on processors the faster library.

    The settings are torch's own, for all threads. Its older one (``allow_tf32``) cannot be read within: torch refuses
    where the two differ.
    """
    with contextlib.ExitStack() as held:
        held.enter_context(_precision(torch.backends.cuda.matmul, "tf32" if tf32 else "ieee"))
        if onednn_is_faster():
            held.enter_context(_precision(_ONEDNN, "bf16"))
        yield


@functools.cache
def onednn_is_faster() -> bool:
    """Whether oneDNN multiplies float32 matrices faster than MKL, which torch asks otherwise, and as exactly.

    MKL uses half of what AMD's processors with AVX-512 can do. torch leaves products to oneDNN where it is allowed to
    round factors to bfloat16. oneDNN makes use of that on processors with units for bfloat16 matrices (AMX) only;
    products with an identity matrix, which change nothing unless factors are rounded, show that it does not here.
    """
    if not (torch.backends.mkldnn.is_available() and _vendor() == "AuthenticAMD"):
        return False
    generator = torch.Generator().manual_seed(0)
    with _precision(_ONEDNN, "bf16"):
        factors = [torch.rand(size, size, generator=generator) for size in _SIZES]
        return all(torch.equal(factor @ torch.eye(len(factor)), factor) for factor in factors)


def _vendor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "vendor_id":
                return value.strip()
    return ""


@contextlib.contextmanager
def _precision(backend: object, value: str) -> Iterator[None]:
    before = backend.fp32_precision  # type: ignore[attr-defined]
    backend.fp32_precision = value  # type: ignore[attr-defined]
    try:
        yield
    finally:
        backend.fp32_precision = before  # type: ignore[attr-defined]
