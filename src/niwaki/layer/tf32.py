"""TF32: products of float32 matrices on a GPU whose factors are first rounded to 10 of their 23 bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import get_args

import torch

from niwaki.errors import UsageError
from niwaki.options import TF32


def check_tf32(tf32: str) -> None:
    """Raises UsageError where ``tf32`` is none of its values."""
    if tf32 not in get_args(TF32):
        raise UsageError(f"tf32 is {', '.join(get_args(TF32)[:-1])} or {get_args(TF32)[-1]}; got {tf32!r}")


def has_tf32(device: torch.device) -> bool:
    """Whether ``device`` can do it: NVIDIA GPUs from Ampere on, and some of AMD's."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_tf32_supported()


def gram_in_tf32(tf32: TF32, dtype: torch.dtype) -> bool:
    """Whether to use it for the Gram matrix of activations of ``dtype``; see :data:`TF32`.

    A bfloat16 or float16 number is a TF32 number too: no factor changes, sums are in float32, only rounded
    in another order and way.
    """
    return tf32 == "always" or (tf32 == "auto" and dtype in (torch.bfloat16, torch.float16))


@contextlib.contextmanager
def products(tf32: bool) -> Iterator[None]:
    """Within it products of float32 matrices on GPUs use TF32, or do not, whatever holds outside.

    The setting is torch's own, for all threads. Its older one (``allow_tf32``) cannot be read within: torch
    refuses to where the two differ.
    """
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
