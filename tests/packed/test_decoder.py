"""All blocks of a decoder in one native call: numbers as block by block, and caches that stay what they are."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel

from niwaki.packed import block, decoding, kernels
from support.caches import CACHE
from support.decoding import block_by_block, by_transformers, decoded, packed_model
from support.models import random_tokens

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no native library")

#: Without windows, which these families have or not.
KINDS: dict[str, dict[str, Any]] = {"llama": {}, "mistral": {}, "qwen2": {"use_sliding_window": False}, "qwen3": {}}
TOKENS = 12


def model_of(kind: str = "llama", dtype: torch.dtype = torch.float32, **others: Any) -> PreTrainedModel:
    return packed_model(kind, dtype, sliding_window=None, **KINDS[kind], **others)


def native(model: nn.Module) -> decoding.NativeDecoder:
    """The forward of its decoder."""
    forwards = (vars(each).get("forward") for each in model.modules())
    (found,) = (each for each in forwards if isinstance(each, decoding.NativeDecoder))
    return found


def chains(model: nn.Module) -> list[bool]:
    """For each way in which the decoder was called, whether that is one call."""
    return [chain is not None for chain in native(model)._chains.values()]


@torch.no_grad()
def continued(model: PreTrainedModel, cache: Any, tokens: Tensor) -> Tensor:
    """The logits behind each of ``tokens`` (1, n), one at a time."""
    run: Any = model
    return torch.cat([run(input_ids=token.view(1, 1), **{CACHE: cache}).logits[:, -1] for token in tokens[0]])


@torch.no_grad()
def begun(model: PreTrainedModel, tokens: Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(input_ids=tokens, **{CACHE: cache})
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_numbers_as_block_by_block(kind: str, dtype: torch.dtype) -> None:
    model, tokens = model_of(kind, dtype), random_tokens(1, TOKENS)
    for given in (1, 5):
        found = decoded(model, tokens, given)
        assert decoding.one_by_one(model) == 0
        with block_by_block():
            assert torch.equal(found, decoded(model, tokens, given))
    assert chains(model) == [True]
    model(tokens)
    assert decoding.one_by_one(model) == 7 * model.config.num_hidden_layers


@pytest.mark.parametrize("given", [1, TOKENS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_time_in_products(dtype: torch.dtype, given: int) -> None:
    """It is counted within, in tokens and in prompts, and not before or behind."""
    model, tokens = model_of(dtype=dtype), random_tokens(1, TOKENS)
    cache = begun(model, tokens)

    def work() -> None:
        if given == 1:
            continued(model, cache, tokens[:, :1])
        else:
            begun(model, tokens)

    work()
    assert kernels.time_in_products(counts=True) == 0
    began = time.perf_counter()
    work()
    took, passed = kernels.time_in_products(counts=False), time.perf_counter() - began
    assert 0 < took < passed * torch.get_num_threads()
    work()
    assert kernels.time_in_products(counts=False) == 0


def test_every_path_and_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = model_of(dtype=torch.bfloat16), random_tokens(1, TOKENS)
    before = torch.get_num_threads()
    for path in kernels.paths():
        monkeypatch.setattr(kernels, "best_path", lambda path=path: path)
        try:
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                ours = copy.deepcopy(model)
                found = decoded(ours, tokens, 3)
                with block_by_block():
                    assert torch.equal(found, decoded(ours, tokens, 3))
                assert chains(ours) == [True]
        finally:
            torch.set_num_threads(before)


def test_generated_text_and_a_cache_with_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where room has to be made again and again."""
    monkeypatch.setattr(decoding, "_LEAST_MORE", 1)
    prompt = random_tokens(1, 5)
    model: Any = model_of()
    options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    options["attention_mask"] = torch.ones_like(prompt)
    found: Any = model.generate(prompt, **options)
    assert found.shape == (1, 35)
    assert True in chains(model)
    with by_transformers():
        assert torch.equal(found, model.generate(prompt, **options))
    cache = begun(model, prompt)
    usual = copy.deepcopy(cache)
    continued(model, cache, found[:, 5:])
    with block_by_block():
        continued(model, usual, found[:, 5:])
    assert cache.get_seq_length() == usual.get_seq_length() == 35
    layers: list[tuple[Any, Any]] = [*zip(cache.layers, usual.layers, strict=True)]
    assert all(torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in layers)


def _cropped(cache: Any) -> Any:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[..., :-2, :], layer.values[..., :-2, :]
    return cache


def _shared(cache: Any) -> Any:
    """Another cache of the same tensors."""
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    return other


def _changed(cache: Any) -> Any:
    cache.layers[1].values.mul_(2)
    return cache


def _exchanged(cache: Any) -> Any:
    cache.layers[0].keys = 2 * cache.layers[0].keys
    return cache


def _repeated(cache: Any) -> Any:
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([1]))
    return cache


@pytest.mark.parametrize("change", [_cropped, _shared, _changed, _exchanged, _repeated, copy.deepcopy])
def test_caches_that_somebody_else_changes(change: Callable[[Any], Any]) -> None:
    model, tokens = model_of(), random_tokens(1, TOKENS)
    cache = begun(model, tokens[:, :4])
    continued(model, cache, tokens[:, 4:8])
    usual = begun(model, tokens[:, :4])
    with block_by_block():
        continued(model, usual, tokens[:, 4:8])
        right = continued(model, change(usual), tokens[:, 8:])
        alone = continued(model, usual, tokens[:, :2]) if change in (_shared, copy.deepcopy) else None
    other = change(cache)
    assert torch.equal(continued(model, other, tokens[:, 8:]), right)
    if alone is not None:  # the first cache has nothing of what the second one was given
        assert torch.equal(continued(model, cache, tokens[:, :2]), alone)
        assert not torch.equal(continued(model, other, tokens[:, :2]), alone)


def test_two_caches_in_turns() -> None:
    model, tokens = model_of(), random_tokens(2, TOKENS)
    rows = [row.view(1, -1) for row in tokens]
    together, found = [begun(model, row[:, :4]) for row in rows], [list[Tensor](), list[Tensor]()]
    for i in range(4, TOKENS):
        for cache, row, those in zip(together, rows, found, strict=True):
            those.append(continued(model, cache, row[:, i : i + 1]))
    for row, those in zip(rows, found, strict=True):
        assert torch.equal(torch.cat(those), continued(model, begun(model, row[:, :4]), row[:, 4:]))
    assert len(native(model)._rooms) == 2
    del together, cache
    assert len(native(model)._rooms) == 0


def test_a_cache_that_is_saved_has_no_more_than_its_room() -> None:
    model, tokens = model_of(), random_tokens(1, TOKENS)
    cache = begun(model, tokens[:, :4])
    continued(model, cache, tokens[:, 4:8])
    there: list[Any] = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]  # type: ignore[union-attr]
    assert len({tensor.untyped_storage().data_ptr() for tensor in there}) == len(there)
    assert all(tensor.untyped_storage().nbytes() == 4 * 2 * (4 + 256) * 16 for tensor in there)
    assert all(tensor._base[:, :, 8:].eq(0).all() for tensor in there)


def test_room_is_given_back_when_several_tokens_come() -> None:
    model, tokens = model_of(), random_tokens(1, TOKENS)
    cache = begun(model, tokens[:, :4])
    continued(model, cache, tokens[:, 4:8])
    assert len(native(model)._rooms) == 1
    with torch.no_grad():
        model(input_ids=tokens[:, 8:10], **{CACHE: cache})
    assert not native(model)._rooms


def test_copies_of_the_model() -> None:
    model, tokens = model_of(), random_tokens(1, TOKENS)
    usual = decoded(model, tokens, 3)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(decoded(other, tokens, 3), usual)
        assert chains(other) == [True]
        layer: Any = other.get_submodule("model.layers.1.mlp.down_proj")
        layer.values.mul_(1.5)
        other.get_submodule("model.layers.0.input_layernorm").weight.data = torch.full((64,), 0.3)
        found = decoded(other, tokens, 3)
        assert not torch.equal(found, usual)
        with block_by_block():
            assert torch.equal(decoded(other, tokens, 3), found)
    assert torch.equal(decoded(model, tokens, 3), usual)


_LONG = {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 10_000.0},
    "linear": {"rope_theta": 10_000.0, "factor": 4.0},
    "llama3": {**_LONG, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": _LONG,
    "dynamic": {"rope_theta": 10_000.0, "factor": 4.0},
}


@pytest.mark.parametrize("kind", _ROPES)
def test_angles_are_those_of_each_position(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_AT_ONCE", 5)
    ropes = {"rope_type": kind, **_ROPES[kind]}
    model, tokens = model_of(rope_parameters=ropes, max_position_embeddings=16), random_tokens(1, 24)
    with block_by_block():
        usual = decoded(model, tokens, 3)
    assert torch.equal(decoded(model, tokens, 3), usual)
    assert chains(model) == [True]


def test_a_model_that_is_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model, tokens = model_of(), random_tokens(1, TOKENS)
        found = decoded(model, tokens, 3)
        assert chains(model) == [True]
        with block_by_block():
            assert torch.equal(decoded(model, tokens, 3), found)


class _Scaled(LlamaModel):
    """Its blocks get something else than what the one before made."""

    def forward(self, input_ids: Any = None, **named: Any) -> Any:
        x: Any = self.embed_tokens(input_ids)
        cache = named.pop(CACHE)
        positions = torch.arange(x.shape[1]).unsqueeze(0) + cache.get_seq_length()
        named["attention_mask"] = None
        named |= {CACHE: cache, "position_ids": positions, "position_embeddings": self.rotary_emb(x, positions)}
        for layer in self.layers:
            x = layer(self.between(x), **named)
        x = self.behind(self.norm(x))
        return BaseModelOutputWithPast(last_hidden_state=x, **{CACHE: cache})

    def between(self, x: Tensor) -> Tensor:
        return x

    def behind(self, x: Tensor) -> Tensor:
        return x


class _Between(_Scaled):
    def between(self, x: Tensor) -> Tensor:
        return x * 1.25


class _Behind(_Scaled):
    def behind(self, x: Tensor) -> Tensor:
        return x * 1.25


class _Fewer(LlamaModel):
    """Leaves out a block."""

    def forward(self, *given: Any, **named: Any) -> Any:
        layers, self.layers = self.layers, self.layers[:-1]
        try:
            return super().forward(*given, **named)
        finally:
            self.layers = layers


@pytest.mark.parametrize("other", [_Between, _Behind, _Fewer])
def test_decoders_that_do_more(other: type[nn.Module]) -> None:
    model, tokens = model_of(), random_tokens(1, TOKENS)
    usual = decoded(model, tokens, 3)
    assert chains(model) == [True]
    native(model)._decoder.__class__ = other
    native(model)._chains.clear()  # of another class: nobody changes that of a model that has written
    found = decoded(model, tokens, 3)
    assert chains(model) == [False]
    assert not torch.allclose(found, usual)
    with by_transformers():
        torch.testing.assert_close(found, decoded(model, tokens, 3))


def test_embeddings_that_are_scaled_where_the_first_token_has_none() -> None:
    model = packed_model("granite", residual_multiplier=1.0, embedding_multiplier=12.0, sliding_window=None)
    model.get_input_embeddings().weight.data[0] = 0  # type: ignore[operator]
    tokens = random_tokens(1, TOKENS)
    tokens[0, 5] = 0
    found = decoded(model, tokens, 5)
    assert True not in chains(model)
    with by_transformers():
        torch.testing.assert_close(found, decoded(model, tokens, 5), atol=1e-4, rtol=1e-4)


def _embeddings(decoder: Any) -> None:
    decoder.embed_tokens.register_forward_hook(lambda *given: 2 * given[2])


def _before(decoder: Any) -> None:
    decoder.layers[1].register_forward_pre_hook(lambda _, given: (2 * given[0], *given[1:]))


def _norm(decoder: Any) -> None:
    decoder.norm.weight.mul_(2)


def _left_out(decoder: Any) -> None:
    decoder.config.num_hidden_layers = 2


def _exchange(decoder: Any) -> None:
    decoder.layers[0], decoder.layers[1] = decoder.layers[1], decoder.layers[0]
    for number, layer in enumerate(decoder.layers):
        layer.self_attn.layer_idx = number


def _packed(decoder: Any) -> None:
    decoder.layers[2].mlp.up_proj = copy.deepcopy(decoder.layers[1].mlp.up_proj)


def _values(decoder: Any) -> None:
    decoder.layers[2].mlp.up_proj.values = decoder.layers[1].mlp.up_proj.values.clone()


def _turned(decoder: Any) -> None:
    decoder.rotary_emb.inv_freq.mul_(0.5)


def _patched(decoder: Any) -> None:
    right = decoder.layers[0].forward
    decoder.layers[0].forward = lambda *given, **named: 2 * right(*given, **named)


@pytest.mark.parametrize(
    "change", [_embeddings, _before, _norm, _left_out, _exchange, _packed, _values, _turned, _patched]
)
def test_changes_after_tokens_were_written(change: Callable[[Any], None]) -> None:
    model, tokens = model_of(), random_tokens(1, TOKENS)
    cache = begun(model, tokens[:, :4])
    usual = continued(model, copy.deepcopy(cache), tokens[:, 4:])
    continued(model, cache, tokens[:, 4:6])
    change(native(model)._decoder)
    with by_transformers():
        right = continued(model, copy.deepcopy(cache), tokens[:, 6:])
    found = continued(model, cache, tokens[:, 6:])
    torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found, usual[2:], atol=1e-2)


def test_what_is_not_one_call() -> None:
    """Padding, windows, states, several tokens, what blocks are not asked for, and gradients."""
    model, tokens = model_of(), random_tokens(1, TOKENS)
    decoder: Any = native(model)._decoder
    cache = begun(model, tokens[:, :5])
    given: dict[str, Any] = {"input_ids": tokens[:, :1], CACHE: cache}

    def is_one(**others: Any) -> bool:
        return native(model)._chain_for({**given, **others}) is not None

    with torch.no_grad():
        assert is_one()
        assert is_one(attention_mask=torch.ones(1, 6, dtype=torch.int64), position_ids=torch.tensor([[5]]))
        assert not is_one(attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]))
        assert not is_one(attention_mask=torch.ones(1, 7, dtype=torch.int64))
        assert not is_one(attention_mask=torch.ones(1, 1, 1, 6, dtype=torch.bool))
        assert not is_one(position_ids=torch.tensor([[[5]], [[5]], [[5]]]))
        assert not is_one(inputs_embeds=torch.zeros(1, 1, 64))
        assert not is_one(input_ids=tokens[:, :2])
        assert not is_one(**{CACHE: DynamicCache()})
        assert not is_one(cache_position=torch.tensor([7]))
        assert not is_one(output_hidden_states=True)
        assert not is_one(output_attentions=True)
        decoder.config.sliding_window = 6
        assert is_one()
        decoder.config.sliding_window = 5  # the cache knows of none
        assert not is_one()
        decoder.config.sliding_window = None
        hook = decoder.norm.register_forward_hook(lambda *_: None)
        assert not is_one()
        hook.remove()
        assert is_one()
        layer: Any = cache.layers[1]
        layer.keys = layer.keys.double()
        room = native(model)._room_of(cache, block.Chain([_prepared(model)] * 3), torch.float32)
        assert room is None
    assert not is_one()  # with gradients


def _prepared(model: nn.Module) -> block.Prepared:
    seen = decoding._Seen(model.get_submodule("model.layers.0")).prepared()
    assert seen is not None
    return seen


def test_shapes_that_do_not_fit() -> None:
    """The library reads and writes only what was looked at."""
    first, wider = _prepared(model_of()), _prepared(model_of(hidden_size=128))
    with pytest.raises(ValueError, match="blocks of several shapes"):
        block.Chain([first, wider])
    chain = block.Chain([first, first])
    x, angles = torch.randn(1, 1, 64), (torch.ones(1, 1, 16), torch.zeros(1, 1, 16))
    right = [torch.zeros(1, 2, 7, 16) for _ in range(4)]
    assert chain.run(x, angles, right, 7).isfinite().all()
    for each in right:
        assert each[..., :6, :].eq(0).all()
        assert each[..., 6, :].ne(0).any()
    for wrong, length in (
        (right, 8),
        (right, 0),
        (right[:2], 3),
        ([*right[:3], right[3][:, :1]], 3),
        ([*right[:3], right[3].bfloat16()], 3),
        ([*right[:3], torch.zeros(1, 2, 16, 7).mT], 3),
    ):
        with pytest.raises(RuntimeError, match="have no room for position"):
            chain.run(x, angles, wrong, length)
