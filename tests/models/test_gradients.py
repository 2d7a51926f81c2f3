"""Gradients that come out the same each time."""

import warnings

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from niwaki.cli.common import quiet_libraries
from niwaki.models.training import gradients


@pytest.mark.parametrize("before", [False, True])
def test_only_on_a_gpu_are_algorithms_chosen_and_only_within(before: bool) -> None:
    torch.use_deterministic_algorithms(before)
    try:
        with torch.no_grad(), gradients(torch.device("cpu")):
            assert torch.is_grad_enabled()
            assert torch.are_deterministic_algorithms_enabled() == before
        with gradients(torch.device("cuda")):
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.are_deterministic_algorithms_enabled() == before
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_words_on_cublas_stay_away_and_others_come() -> None:
    with warnings.catch_warnings():
        quiet_libraries()
        warnings.warn("Attempting to run cuBLAS, but there was no current CUDA context!", UserWarning, stacklevel=1)
        with pytest.warns(UserWarning, match="an operation without"):
            warnings.warn("an operation without a deterministic implementation", UserWarning, stacklevel=1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_attention_on_a_gpu_has_the_same_gradients_each_time() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(2, 8, 1024, 64, generator=generator).bfloat16().cuda() for _ in range(4))
    found = []
    for _ in range(5):
        q, k, v = (value.detach().requires_grad_() for value in (q, k, v))
        with gradients(q.device):
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
            found.append(torch.autograd.grad(out, [q, k, v], g))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
