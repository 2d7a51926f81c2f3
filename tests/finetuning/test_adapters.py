"""LoRA on a pruned model: trained and merged where weights are not zero."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from contextlib import nullcontext as nothing
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import niwaki
from niwaki.errors import OutputError, UnsupportedModelError, UsageError
from niwaki.finetuning.masked_lora import MaskedLinear
from support.models import message, random_model

#: PEFT's own, of a name that transformers will drop.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))


def pruned(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = random_model("llama")
    model = model.to(dtype)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "proj" in name:
                value.mul_(torch.rand(value.shape) > 0.5)
    return model


def with_lora(model: nn.Module, **options: Any) -> PeftModel:
    torch.manual_seed(1)
    options = {"r": 4, "target_modules": ["q_proj", "down_proj"], "lora_alpha": 16} | options
    return get_peft_model(model, LoraConfig(**options))  # type: ignore[arg-type]


def train(model: nn.Module, steps: int = 4) -> None:
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=0.05)
    for _ in range(steps):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def logits(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        values: Tensor = model(input_ids=TOKENS).logits
    return values


def trained(model: nn.Module, steps: int = 4, **options: Any) -> PeftModel:
    """A model with an adapter that was trained while zeros were kept."""
    adapted = with_lora(model, **options)
    niwaki.keep_zeros(adapted)
    train(adapted, steps)
    return adapted


def merged(model: PeftModel) -> Any:
    """The merged model, which computes what the one with the adapter does."""
    expected = logits(model)
    made = niwaki.merge_lora(model)
    torch.testing.assert_close(logits(made), expected, rtol=1e-4, atol=1e-5)
    return made


def zeros(model: nn.Module, *names: str) -> int:
    """Those of the parameters that have one of ``names`` in theirs."""
    values = [value for key, value in model.named_parameters() if any(name in key for name in names)]
    return sum(int((value == 0).sum()) for value in values)


@pytest.mark.parametrize("options", [{}, {"lora_dropout": 0.3}, {"use_rslora": True, "r": 3}])
def test_what_was_trained_is_what_is_merged(options: dict[str, Any]) -> None:
    plain = logits(pruned())
    model = with_lora(pruned(), **options)
    before = {name: value.detach() == 0 for name, value in model.get_base_model().named_parameters() if "base" in name}
    kept = niwaki.keep_zeros(model)
    torch.testing.assert_close(logits(model), plain)
    model.train()
    train(model)
    assert float((logits(model) - plain).abs().max()) > 0.1
    made = merged(model)
    for name, there in before.items():
        assert torch.equal(made.get_parameter(name.replace(".base_layer", "")) == 0, there)
    kept.check()


def test_the_gradient() -> None:
    """That of the change of the weights, masked, by the chain rule, in float64."""
    model = with_lora(pruned(torch.float64)).double()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.1)
    niwaki.keep_zeros(model)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    layer = model.get_submodule(name)
    found = layer.lora_B["default"].weight.grad  # type: ignore[index, union-attr]
    whole = pruned(torch.float64)
    lora = {at: module for at, module in model.named_modules() if hasattr(module, "lora_A")}
    with torch.no_grad():
        for at, module in lora.items():
            weight = whole.get_parameter(at.removeprefix("base_model.model.") + ".weight")
            A, B = (getattr(module, each)["default"].weight for each in ("lora_A", "lora_B"))
            weight.add_(4 * B @ A * (weight != 0))
    whole(input_ids=TOKENS, labels=TOKENS).loss.backward()
    weight = whole.get_parameter(name.removeprefix("base_model.model.") + ".weight")
    assert weight.grad is not None
    expected = 4 * (weight.grad * (weight != 0)) @ layer.lora_A["default"].weight.T  # type: ignore[index, union-attr]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_without_a_mask() -> None:
    """What the adapter made of zeros is lost, and the zeros are there."""
    model = with_lora(pruned())
    before = zeros(model, "base_layer")
    train(model)
    with pytest.warns(UserWarning, match="trained without keep_zeros"):
        made = niwaki.merge_lora(model)
    assert zeros(made, "q_proj", "down_proj") == before
    assert not any("lora" in name for name, _ in made.named_parameters())


def test_removed() -> None:
    """Then the adapter computes as PEFT's does."""
    model = with_lora(pruned())
    with niwaki.keep_zeros(model):
        train(model)
        masked = logits(model)
    assert float((logits(model) - masked).abs().max()) > 1e-3
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), logits(pruned()))


def test_after_it_was_merged() -> None:
    """Others can be trained, and the merged model too, whose zeros stay."""
    model = with_lora(pruned())
    kept = niwaki.keep_zeros(model)
    train(model)
    made = niwaki.merge_lora(model)
    train(with_lora(pruned()))
    made.requires_grad_(True)
    train(made)
    kept.check()


def test_copies_of_matrices() -> None:
    """Those of ``modules_to_save``, with the zeros kept and without."""
    for keeps in (True, False):
        model = with_lora(pruned(), target_modules=["q_proj"], modules_to_save=["down_proj"])
        before = zeros(pruned(), "proj")
        if keeps:
            assert niwaki.keep_zeros(model).zeros == before
        train(model)
        with nothing() if keeps else pytest.warns(UserWarning, match="trained without"):
            made = niwaki.merge_lora(model)
        assert zeros(made, "proj") == before


@pytest.mark.parametrize("count", [1, None], ids=["few", "all"])
def test_copies_that_began_as_zero(count: int | None) -> None:
    """They are no zeros of pruning, and what they were trained to stays."""
    model: Any = pruned()
    with torch.no_grad():
        model.get_submodule("lm_head").weight[:count, : 2 * count if count else None] = 0
    made = merged(trained(model, modules_to_save=["lm_head"]))
    assert bool(made.get_submodule("lm_head").weight[0].all())


def test_an_adapter_of_a_matrix_of_zeros() -> None:
    model = pruned()
    name = "model.layers.0.self_attn.v_proj"
    with torch.no_grad():
        model.get_parameter(f"{name}.weight").zero_()
    adapted = trained(model, target_modules=["v_proj", "q_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = merged(adapted)
    assert bool(made.get_parameter(f"{name}.weight").any())


def tied() -> nn.Module:
    model = pruned()
    model.config.tie_word_embeddings = True  # type: ignore[union-attr]
    model.tie_weights()  # type: ignore[operator]
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight  # type: ignore[operator]
    return model


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (
            tied,
            {"target_modules": ["q_proj", "lm_head"]},
            "model.embed_tokens.weight and lm_head.weight are one matrix",
        ),
        (tied, {"target_modules": ["q_proj", "embed_tokens"]}, "are one matrix, and an adapter of one of them"),
        (pruned, {"layer_replication": [[0, 2], [1, 2]]}, "are one matrix, and an adapter of one of them"),
        (pruned, {"lora_bias": True, "bias": "none"}, "has a bias (lora_bias), and the layer has none"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_what_cannot_be_merged(model: Callable[[], nn.Module], options: dict[str, Any], said: str) -> None:
    adapted = with_lora(model(), **options)
    before = {name: value.clone() for name, value in adapted.named_parameters()}
    assert said in message(lambda: niwaki.merge_lora(adapted), UnsupportedModelError)
    assert all(torch.equal(value, before[name]) for name, value in adapted.named_parameters())


def test_layers_that_share_matrices_are_masked() -> None:
    """The adapters of all of them, which are trained and kept as adapters."""
    model = with_lora(pruned(), layer_replication=[[0, 2], [1, 2]])
    niwaki.keep_zeros(model)
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    assert [type(layer).__name__ for layer in layers] == ["MaskedLinear"] * 6


@pytest.mark.filterwarnings("ignore:.*tied:UserWarning")
def test_a_head_that_is_not_tied_any_more(tmp_path: Path) -> None:
    """Its configuration says so, and what is saved is what was trained."""
    model = trained(tied(), modules_to_save=["lm_head"])
    expected = logits(model)
    made: Any = niwaki.merge_lora(model)
    assert not made.config.tie_word_embeddings
    made.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), expected, rtol=1e-4, atol=1e-5)


def test_adapters_by_sequence() -> None:
    model = with_lora(pruned())
    niwaki.keep_zeros(model)
    model.eval()
    said = message(lambda: model(input_ids=TOKENS, adapter_names=["default", "__base__"]), UnsupportedModelError)
    assert said.endswith("no adapter_names")


def test_what_is_merged_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(pruned())
    monkeypatch.setattr(MaskedLinear, "merge", lambda self, safe_merge: None)
    assert "the merged model is not the trained one" in message(lambda: niwaki.merge_lora(model), OutputError)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_no_difference(dtype: torch.dtype) -> None:
    niwaki.merge_lora(trained(pruned(dtype), 2))


def test_copied_and_pickled() -> None:
    """A copy has adapters of its own."""
    model = trained(pruned())
    copied = copy.deepcopy(model)
    before = logits(copied)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.zero_()
    assert torch.equal(logits(copied), before)
    torch.save(copied.get_submodule("base_model.model.model.layers.0.self_attn.q_proj"), io.BytesIO())


def test_adapters_that_come_later() -> None:
    """Are noticed at the first step."""
    model = pruned()
    niwaki.keep_zeros(model)
    assert "after what changes them" in message(lambda: train(with_lora(model)), UsageError)


def test_refused() -> None:
    model = with_lora(pruned(), init_lora_weights="pissa")
    for call in (lambda: niwaki.keep_zeros(model), lambda: niwaki.merge_lora(model)):
        assert "changes the weights of the model" in message(call, UnsupportedModelError)
    assert "takes a model of PEFT" in message(lambda: niwaki.merge_lora("x"), UsageError)  # type: ignore[arg-type]
    model = with_lora(pruned(), use_dora=True)
    assert "not a plain LoRA" in message(lambda: niwaki.keep_zeros(model), UnsupportedModelError)
    with pytest.warns(UserWarning, match="lora_bias"):
        model = with_lora(pruned(), lora_bias=True)
    assert "(without lora_bias)" in message(lambda: niwaki.keep_zeros(model), UnsupportedModelError)
    model = with_lora(pruned())
    model.merge_adapter()
    assert "was merged already" in message(lambda: niwaki.merge_lora(model), UsageError)
    assert "no adapter to merge" in message(lambda: niwaki.merge_lora(pruned()), UsageError)  # type: ignore[arg-type]
