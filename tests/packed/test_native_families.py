"""Which blocks are computed natively, and that nothing else comes of it: by family, deviation, and as models change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

from niwaki.packed import decoding, kernels
from support.caches import CACHE
from support.covering import FULL, some
from support.decoding import (
    BY_THEMSELVES,
    FAMILIES,
    NOT_TRIED,
    all_experts,
    blocks_of,
    both,
    by_transformers,
    classes_with_the_parts,
    counting,
    decoded,
    packed_model,
)
from support.models import random_tokens

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no native library")

NATIVE = ("llama", "mistral", "qwen2", "qwen3")
#: Layers without rotary positions, neighbours that are turned, queries scaled by position, a multiplier, a limit.
DEVIATE = ("smollm3", "exaone_moe", "helium", "ernie4_5", "ministral3", "granite", "olmo")
EACH = [kind for kind in FAMILIES if FULL or kind in NATIVE + DEVIATE]  # the campaign has all of them too


def native_tokens(tokens: int, given: int) -> int:
    """How many of them come alone, of which the first ``given`` come together."""
    return tokens - (given if given > 1 else 0)


@pytest.mark.parametrize("kind", EACH)
@pytest.mark.slow
def test_as_transformers(kind: str) -> None:
    """Also right after a first token, and beyond all limits of positions and windows."""
    model, tokens = packed_model(kind), random_tokens(1, 12)
    for start in (None,) if kind in BY_THEMSELVES else (None, 40, 99_990):
        for given in (1, 5):
            found, right, steps = both(model, tokens, given, start)
            assert (found - right).abs().max() <= 1e-5 * right.abs().max()
            if kind in NATIVE:
                assert steps == model.config.num_hidden_layers * native_tokens(12, given)


@pytest.mark.parametrize("kind", some(EACH, 5))
@pytest.mark.slow
def test_in_bfloat16(kind: str) -> None:
    """As far from float32 as transformers is, in both directions."""
    model, exact = (packed_model(kind, dtype, **all_experts(kind)) for dtype in (torch.bfloat16, torch.float32))
    tokens, start = random_tokens(1, 24), None if kind in BY_THEMSELVES else 40
    found, theirs, steps = both(model, tokens, 1, start)
    with by_transformers():
        right = decoded(exact, tokens, 1, start)
    assert 0.75 <= (found - right).norm() / (theirs - right).norm() <= 1.25
    if kind in NATIVE:
        assert steps == model.config.num_hidden_layers * 24


@pytest.mark.slow
def test_the_sizes_of_smollm2() -> None:
    sizes: dict[str, Any] = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "head_dim": 64}
    sizes |= {"num_key_value_heads": 3, "num_hidden_layers": 2}
    sizes |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}
    for dtype in (torch.float32, torch.bfloat16):
        _, _, steps = both(packed_model("llama", dtype, **sizes), random_tokens(1, 5), 1)
        assert steps == 2 * 5


def test_layers_of_both_kinds() -> None:
    """The layers of SmolLM3 with rotary positions are native, the one without is not."""
    model = packed_model("smollm3")
    with counting() as steps:
        decoded(model, random_tokens(1, 4), 1)
    layers = model.get_submodule("model.layers")
    native = [vars(layer)["forward"] in steps for layer in layers.children()]
    assert native == [True, False, True]
    assert decoding.one_by_one(model) == 7


@pytest.mark.parametrize(("kind", "matrices"), [("llama", 0), ("granite", 3 * 7)])
def test_what_is_said_to_be_native(kind: str, matrices: int) -> None:
    """That of which the last token was computed so."""
    model = packed_model(kind)
    decoded(model, random_tokens(1, 4), 1)
    assert decoding.one_by_one(model) == matrices


@pytest.mark.slow
def test_every_family_is_tried() -> None:
    """What transformers has of this structure, by the text of its modules."""
    tried: dict[str, set[str]] = {}
    for kind in FAMILIES:
        for block in blocks_of(kind):
            tried.setdefault(block.__module__.split(".")[2], set()).add(block.__name__)
    there = classes_with_the_parts()
    assert there.keys() >= {*NATIVE, *DEVIATE}
    missing = {
        folder: left
        for folder, classes in there.items()
        if (left := classes - tried.get(folder, set()) - NOT_TRIED.get(folder, set()))
    }
    assert not missing


def _scaled(factor: Callable[[Any, Tensor, dict[str, Any]], float]) -> type[nn.Module]:
    """A layer that scales what it adds: by what ``factor`` gives for it, its inputs and its arguments by name."""

    class Scaled(LlamaDecoderLayer):
        def forward(self, hidden_states: Tensor, **named: Any) -> Any:  # type: ignore[override]
            out: Any = super().forward(hidden_states, **named)
            return hidden_states + factor(self, hidden_states, named) * (out - hidden_states)

    return Scaled


class _Limited(LlamaAttention):
    def forward(self, hidden_states: Tensor, *args: Any, **named: Any) -> Any:
        values: Any = self.v_proj
        vars(self)["v_proj"] = lambda x: values(x).clamp(-8, 8)
        try:
            return super().forward(hidden_states, *args, **named)
        finally:
            del vars(self)["v_proj"]


class _LimitedMLP(LlamaMLP):
    def forward(self, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=7)) * self.up_proj(x))


class _OneMore(LlamaRMSNorm):
    def forward(self, hidden_states: Any) -> Any:
        return super().forward(hidden_states) * (1 + self.weight) / self.weight


class _OtherEpsilon(LlamaRMSNorm):
    def forward(self, hidden_states: Any) -> Any:
        x = hidden_states.float()
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon / 2)
        return self.weight * (x * scale).to(hidden_states.dtype)


class _OtherCache(LlamaAttention):
    def forward(self, hidden_states: Tensor, *args: Any, **named: Any) -> Any:
        return super().forward(hidden_states, *args, **{**named, CACHE: None})


DEVIATIONS: dict[str, tuple[str, type[nn.Module]]] = {
    "sums are scaled": ("", _scaled(lambda *_: 0.98)),
    "scaled in bfloat16 alone": ("", _scaled(lambda _, x, __: 0.98 if x.dtype == torch.bfloat16 else 1)),
    "scaled far away": ("", _scaled(lambda _, __, named: 0.98 if int(named["position_ids"]) > 1_000_000 else 1)),
    "by the number of the layer": ("", _scaled(lambda layer, *_: 0.98 if layer.self_attn.layer_idx % 2 else 1)),
    "values have limits": ("self_attn", _Limited),
    "gates have limits": ("mlp", _LimitedMLP),
    "norms add one": ("input_layernorm", _OneMore),
    "another epsilon": ("post_attention_layernorm", _OtherEpsilon),
    "no cache": ("self_attn", _OtherCache),
}


@pytest.mark.parametrize("deviation", DEVIATIONS)
@pytest.mark.slow
def test_what_a_class_does_otherwise(deviation: str) -> None:
    path, other = DEVIATIONS[deviation]
    model = packed_model("llama", torch.bfloat16)
    layers = model.get_submodule("model.layers")
    changed: Any = layers.get_submodule("1")
    (changed.get_submodule(path) if path else changed).__class__ = other
    with counting() as steps:
        decoded(model, random_tokens(1, 6), 1)
    assert {vars(layer)["forward"] for layer in layers.children()} - set(steps) == {vars(changed)["forward"]}


class _Adapter(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.added = base, nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + self.added(x)


def _wrapped(block: Any) -> None:
    block.self_attn.q_proj = _Adapter(block.self_attn.q_proj).eval().requires_grad_(False)


def _patched(block: Any) -> None:
    right = block.mlp.forward
    block.mlp.forward = lambda x: 2 * right(x)


def _hook(block: Any) -> None:
    block.self_attn.o_proj.register_forward_hook(lambda *given: 2 * given[2])


def _dropout(block: Any) -> None:
    block.self_attn.attention_dropout = 0.5
    block.self_attn.train()


def _eager(block: Any) -> None:
    block.self_attn.config._attn_implementation = "eager"


def _norm(block: Any) -> None:
    block.post_attention_layernorm = nn.LayerNorm(64).eval().requires_grad_(False)


@pytest.mark.parametrize("change", [_wrapped, _patched, _hook, _dropout, _eager, _norm])
@pytest.mark.slow
def test_changes_that_the_library_does_not_follow(change: Callable[[Any], None]) -> None:
    model, tokens = packed_model("llama"), random_tokens(1, 8)
    before, _, steps = both(model, tokens, 2)
    assert steps
    block: Any = model.get_submodule("model.layers.1")
    change(block)
    torch.manual_seed(0)
    with counting() as left:
        found = decoded(model, tokens, 2)
    torch.manual_seed(0)
    with by_transformers():
        right = decoded(model, tokens, 2)
    assert vars(block)["forward"] not in left
    assert (found - right).abs().max() <= 1e-5 * right.abs().max()
    assert change is _eager or (found - before).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("input_layernorm", "variance_epsilon", 0.5),
        ("self_attn", "scaling", 1.5),
        ("post_attention_layernorm", "weight", nn.Parameter(torch.full((64,), 0.3), requires_grad=False)),
    ],
)
@pytest.mark.slow
def test_changes_that_the_library_follows(part: str, name: str, value: Any) -> None:
    model, tokens = packed_model("llama"), random_tokens(1, 8)
    before, _, steps = both(model, tokens, 2)
    setattr(model.get_submodule(f"model.layers.1.{part}"), name, value)
    found, right, after = both(model, tokens, 2)
    assert steps == after > 0
    assert (found - right).abs().max() <= 1e-5 * right.abs().max()
    assert (found - before).abs().max() > 1e-3


def test_training_and_back() -> None:
    model, tokens = packed_model("llama"), random_tokens(1, 8)
    usual = both(model, tokens, 2)[2]
    assert both(model.train(), tokens, 2)[2] == 0
    assert both(model.eval(), tokens, 2)[2] == usual > 0
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert both(model, tokens, 2)[2] == 0
    assert both(copy.deepcopy(model), tokens, 2)[2] == usual


def test_another_way_of_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function within the module, which no attribute shows, as long as nothing has been decoded."""
    monkeypatch.setattr("niwaki.packed.replica._found", {})
    monkeypatch.setattr(
        modeling_llama, "rotate_half", lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    )
    assert both(packed_model("llama"), random_tokens(1, 6), 1)[2] == 0


def test_arguments_that_are_not_known() -> None:
    model = packed_model("llama")
    block: Any = model.get_submodule("model.layers.0")
    x, angles = torch.randn(1, 1, 64), (torch.ones(1, 1, 16), torch.zeros(1, 1, 16))
    for others in ({"something": torch.ones(1)}, {"output_attentions": True}):
        out = model(input_ids=random_tokens(1, 2), use_cache=True)
        with torch.no_grad(), counting() as steps:
            block(x, **{CACHE: out[CACHE]}, position_embeddings=angles, position_ids=torch.tensor([[2]]))
            block(x, **{CACHE: out[CACHE]}, position_embeddings=angles, position_ids=torch.tensor([[3]]), **others)
        assert steps == [vars(block)["forward"]]
    assert isinstance(vars(block)["forward"], decoding.NativeBlock)
