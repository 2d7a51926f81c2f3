"""Single tokens of packed models by the native library, against the dense model of transformers."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

import niwaki
from niwaki.packed import decoding, kernels
from support.caches import CACHE
from support.decoding import by_transformers, counting
from support.models import random_tokens, reference, sparse_model
from support.sparse import with_threads

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no native library")

#: One of each structure: as many keys as queries and fewer, biases, norms of heads, a head of another width, windows.
CASES = ("llama", "llama grouped", "llama tied", "llama biases", "mistral window", "qwen2", "qwen2 window", "qwen3")
LENGTH = 12


class Counted:
    """The native library, and how often its functions for blocks of the model and for heads were called."""

    def __init__(self, library: Any, found: list[decoding.NativeBlock]) -> None:
        self.library, self.heads, self._found = library, 0, found

    def __getattr__(self, name: str) -> Any:
        self.heads += name == "niwaki_dense"
        return getattr(self.library, name)

    @property
    def blocks(self) -> int:
        return len(self._found)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    """The library that is used in this test."""
    with counting() as found:
        counted = Counted(kernels.library(), found)
        monkeypatch.setattr(kernels, "library", lambda: counted)
        yield counted


@pytest.fixture
def packed(tmp_path: Path) -> Any:
    """A small LLaMA, loaded."""
    niwaki.pack(sparse_model(tmp_path / "model"), tmp_path / "packed")
    return niwaki.load(tmp_path / "packed", "cpu")


@torch.no_grad()
def token_by_token(model: PreTrainedModel, tokens: Tensor, given: int = 3, **options: Any) -> Tensor:
    """The logits behind each of the tokens after the first ``given``."""
    run: Any = model
    out = run(input_ids=tokens[:, :given], use_cache=True, **options)
    found = []
    for i in range(given, tokens.shape[1]):
        out = run(input_ids=tokens[:, i : i + 1], **{CACHE: out[CACHE]}, use_cache=True)
        found.append(out.logits[:, -1])
    return torch.stack(found, dim=1)


def expected(model: PreTrainedModel, tokens: Tensor, given: int = 3) -> Tensor:
    """The same of all tokens at once, in float64."""
    with torch.no_grad():
        run: Any = model.double()
        logits: Tensor = run(input_ids=tokens).logits[:, given:]
    return logits


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_as_the_dense_model(case: str, tmp_path: Path, counted: Counted) -> None:
    model = sparse_model(tmp_path / "model", case)
    niwaki.pack(model, tmp_path / "packed")
    tokens = random_tokens(1, LENGTH)
    loaded = niwaki.load(tmp_path / "packed", "cpu")
    found = token_by_token(loaded, tokens)
    assert counted.blocks == loaded.config.num_hidden_layers * (LENGTH - 3)
    assert (found - expected(reference(model), tokens)).abs().max() < 2e-5


@pytest.mark.parametrize("case", ["llama biases", "llama grouped", "qwen3"])
def test_prompts(case: str, tmp_path: Path) -> None:
    """All tokens of a prompt at once, with what they leave in the cache; up to so many as a product is faster for."""
    model = sparse_model(tmp_path / "model", case)
    niwaki.pack(model, tmp_path / "packed")
    loaded: Any = niwaki.load(tmp_path / "packed", "cpu")
    for count in (2, 9, kernels.FEW, kernels.FEW + 1):
        tokens = random_tokens(1, count)
        with torch.no_grad(), counting(prompts=True) as found:
            out = loaded(input_ids=tokens[:, :-1], use_cache=True)
            behind = loaded(input_ids=tokens[:, -1:], **{CACHE: out[CACHE]}, use_cache=True).logits
        assert len(found) == loaded.config.num_hidden_layers * (2 < count <= kernels.FEW + 1)
        right = expected(reference(model), tokens, 0)
        assert (torch.cat([out.logits, behind], dim=1) - right).abs().max() < 2e-5
    with torch.no_grad(), counting(prompts=True) as found:
        loaded(input_ids=random_tokens(1, kernels.FEW + 1), use_cache=True)
        loaded(input_ids=random_tokens(1, 4), **{CACHE: out[CACHE]}, use_cache=True)  # behind another
        loaded(input_ids=random_tokens(1, 4), attention_mask=torch.tensor([[0, 1, 1, 1]]), use_cache=True)
        loaded(input_ids=random_tokens(1, 4), **{CACHE: StaticCache(config=loaded.config, max_cache_len=5)})
        loaded(input_ids=random_tokens(2, 4), use_cache=True)
        loaded(input_ids=random_tokens(1, 4), use_cache=False)
    assert not found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_in_bfloat16_as_near_as_transformers(case: str, tmp_path: Path, counted: Counted) -> None:
    model = sparse_model(tmp_path / "model", case, dtype=torch.bfloat16)
    niwaki.pack(model, tmp_path / "packed")
    tokens = random_tokens(1, 60)
    right = expected(reference(model), tokens)
    found = token_by_token(niwaki.load(tmp_path / "packed", "cpu"), tokens)
    theirs = token_by_token(reference(model, torch.bfloat16), tokens)
    assert counted.blocks
    assert counted.heads == 57
    assert found.dtype == torch.bfloat16
    assert (found - right).norm() < 1.2 * (theirs - right).norm()


@pytest.mark.slow
def test_every_path_and_number_of_threads(packed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for path in kernels.paths():
        monkeypatch.setattr(kernels, "best_path", lambda path=path: path)
        for threads in (1, 2, 5):
            with with_threads(threads):
                found.append(token_by_token(copy.deepcopy(packed), random_tokens(1, LENGTH)))
        assert torch.equal(found[-1], found[-2])
        assert torch.equal(found[-1], found[-3])
        assert (found[-1] - found[0]).abs().max() < 1e-5


def test_the_same_text_again(packed: Any, counted: Counted) -> None:
    options = {"max_new_tokens": 10, "do_sample": False}
    texts = [packed.generate(random_tokens(1, 5), **options).tolist() for _ in range(2)]
    assert texts[0] == texts[1]
    assert counted.blocks


def test_a_cache_that_does_not_grow(packed: Any, counted: Counted) -> None:
    """Its keys have room for tokens that are not there, which a mask says."""
    tokens = random_tokens(1, LENGTH)
    usual = token_by_token(packed, tokens)
    before = counted.blocks
    given: dict[str, Any] = {CACHE: StaticCache(config=packed.config, max_cache_len=32)}
    found = token_by_token(packed, tokens, **given)
    assert counted.blocks > before
    assert torch.allclose(found, usual, atol=1e-5)


def test_a_prompt_with_padding(packed: Any, counted: Counted) -> None:
    tokens = random_tokens(1, 6)
    options = {"max_new_tokens": 6, "do_sample": False}
    alone = packed.generate(tokens, **options)[0, 6:].tolist()
    before = counted.blocks
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])
    wide = torch.cat([torch.zeros(1, 3, dtype=tokens.dtype), tokens], dim=1)
    assert packed.generate(wide, attention_mask=mask, **options)[0, 9:].tolist() == alone
    assert counted.blocks > before


@pytest.mark.slow
def test_copies_and_other_dtypes(packed: Any, counted: Counted) -> None:
    """Nothing of the old tensors is used for new ones."""
    tokens = random_tokens(1, LENGTH)
    usual = token_by_token(packed, tokens)
    for other in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        block: Any = other.get_submodule("model.layers.0")
        with torch.no_grad():
            block.input_layernorm.weight.mul_(1.5)
        before = counted.blocks
        assert (token_by_token(other, tokens) - usual).abs().max() > 1e-2
        assert counted.blocks > before
    assert torch.equal(token_by_token(packed, tokens), usual)
    half = token_by_token(packed.to(torch.bfloat16), tokens)
    assert half.dtype == torch.bfloat16
    assert torch.allclose(half.float(), usual, atol=0.3)
    before = counted.blocks
    assert token_by_token(packed.to(torch.float64), tokens).dtype == torch.float64  # which it does not know
    assert counted.blocks == before


def test_what_is_left_to_transformers(packed: Any, counted: Counted) -> None:
    """Gradients, more than one sequence or token, no cache, and what is seen within blocks."""
    token, several = random_tokens(1, 1), random_tokens(3, LENGTH)
    token_by_token(packed, several)
    with torch.no_grad():
        packed(token, use_cache=False)
        packed(random_tokens(1, LENGTH))
    embedded = packed.get_input_embeddings()(token).detach().requires_grad_()
    packed(inputs_embeds=embedded, use_cache=True).logits.sum().backward()
    assert embedded.grad is not None
    assert (counted.blocks, counted.heads) == (0, 0)
    with torch.no_grad():
        out = packed(token, use_cache=True)
        before = counted.blocks
        assert before > 0
        asked = {"output_hidden_states": True, "output_attentions": True}
        packed.set_attn_implementation("eager")
        shown = packed(token, **{CACHE: out[CACHE]}, **asked)
        assert [state.shape for state in shown.hidden_states] == [(1, 1, 32)] * 3
        assert [scores.shape for scores in shown.attentions] == [(1, 4, 1, 2)] * 2
        assert counted.blocks == before


def test_values_that_are_not_finite_stay_so(packed: Any) -> None:
    with torch.no_grad():
        token_by_token(packed, random_tokens(1, 5))
        out = packed(random_tokens(1, 4), use_cache=True)
        for value in (torch.nan, torch.inf):
            cache = copy.deepcopy(out[CACHE])
            cache.layers[0].keys[0, :, 1, 2] = value
            assert packed(random_tokens(1, 1), **{CACHE: cache}).logits.isnan().all()


def test_a_head_in_bfloat16() -> None:
    torch.manual_seed(0)
    for rows, columns in ((1, 1), (7, 100), (500, 64)):
        head = torch.nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16)
        x = torch.randn(1, 1, columns).bfloat16()
        with torch.no_grad():
            right = x.double() @ head.weight.double().T
            found = decoding.NativeHead(head)(x)
        assert found.shape == (1, 1, rows)
        scale = x.abs().double() @ head.weight.abs().double().T
        assert ((found - right).abs() <= right.abs() / 256 + 1e-6 * scale).all()


def test_a_head_that_has_changed() -> None:
    head = torch.nn.Linear(64, 8, bias=False, dtype=torch.bfloat16)
    native = decoding.NativeHead(head)
    x = torch.randn(1, 1, 64).bfloat16()
    head.bias = torch.nn.Parameter(100 * torch.ones(8).bfloat16())
    with torch.no_grad():
        assert torch.equal(native(x), torch.nn.Linear.forward(head, x))


def test_a_token_that_sees_nothing(packed: Any, counted: Counted) -> None:
    """As in transformers: it has nothing from others."""
    token = random_tokens(1, 1)
    with torch.no_grad():
        outs = []
        for native in (True, False):
            out = packed(random_tokens(1, 4), use_cache=True)
            mask = torch.zeros(1, 1, 1, 5, dtype=torch.bool)
            with contextlib.nullcontext() if native else by_transformers():
                outs.append(packed(token, attention_mask=mask, **{CACHE: out[CACHE]}).logits)
    assert counted.blocks
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-5)


def test_cache_and_mask_that_do_not_fit(packed: Any) -> None:
    """The library reads only what was looked at."""

    class Wrong:
        def __init__(self, keys: Tensor) -> None:
            self.keys = keys

        def update(self, *_: Any) -> tuple[Tensor, Tensor]:
            return self.keys, self.keys

    block: Any = packed.get_submodule("model.layers.0")
    x = torch.randn(1, 1, 32)
    angles = (torch.ones(1, 1, 8), torch.zeros(1, 1, 8))
    for keys in (torch.zeros(1, 4, 5, 7), torch.zeros(1, 4, 5, 8).double(), torch.zeros(1, 4, 8, 5).transpose(2, 3)):
        with torch.no_grad(), pytest.raises(RuntimeError, match="a cache of keys and values has"):
            block(x, **{CACHE: Wrong(keys)}, position_embeddings=angles)
    mask = torch.ones(1, 1, 1, 4, dtype=torch.bool)
    right = Wrong(torch.zeros(1, 4, 5, 8))
    with torch.no_grad(), pytest.raises(RuntimeError, match="for 4 positions was given, and the cache has 5"):
        block(x, **{CACHE: right}, position_embeddings=angles, attention_mask=mask)
