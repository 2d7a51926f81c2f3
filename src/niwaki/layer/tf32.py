"""TF32: products of float32 matrices on a GPU whose factors are first rounded to 10 of their 23 bits."""

import contextlib
from collections.abc import Iterator

import torch

from niwaki.options import TF32


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
    """Within it products of float32 matrices on GPUs use TF32, or do not; the setting is torch's own, for all threads.

    Its older one (``allow_tf32``) cannot be read within: torch refuses where the two differ.
    """
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
