"""Numbers of which some are made 0 by the bits of a mask, against a product with it."""

from __future__ import annotations

import pytest
import torch

from niwaki.packed import kernels

DTYPES = (torch.int8, torch.bfloat16, torch.float16, torch.float32, torch.float64)
PATHS = kernels.paths()


def packed(mask: torch.Tensor) -> torch.Tensor:
    """Eight of ``mask`` in a byte, the first in its lowest bit."""
    rows = torch.nn.functional.pad(mask, (0, -len(mask) % 8)).view(-1, 8)
    return (rows * torch.tensor([1 << i for i in range(8)])).sum(1).to(torch.uint8)


@pytest.mark.skipif(kernels.library() is None, reason="the native kernels are not built")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_has_no_bit_becomes_zero(dtype: torch.dtype, path: kernels.Path) -> None:
    drawing = torch.Generator().manual_seed(0)
    for count in (0, 1, 7, 8, 9, 65, 1 << 17 | 3):
        values = (20 * torch.randn(count, generator=drawing)).to(dtype)
        mask = torch.rand(count, generator=drawing) < 0.4
        if dtype.is_floating_point and count > 8:
            values[::3] = torch.nan
        expected = torch.where(mask, values, torch.zeros((), dtype=dtype))
        assert kernels.mask_(values, packed(mask), path)
        assert torch.equal(values.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert torch.equal(values.isnan(), expected.isnan())


def test_what_the_library_is_not_given() -> None:
    values, bits = torch.ones(4, 8), torch.zeros(4, dtype=torch.uint8)
    assert not kernels.mask_(values.t(), bits)
    assert not kernels.mask_(values.to("meta"), bits)
    assert bool((values == 1).all())
    if kernels.library() is not None:
        for few in (bits[:3], bits.float()):
            with pytest.raises(RuntimeError, match="are no mask of 32"):
                kernels.mask_(values, few)
