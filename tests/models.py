"""Tiny random models of every supported family, and what transformers itself makes of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

#: The model that ships with niwaki, and its tokenizer's size.
EMBEDDED = Path(str(files("niwaki"))) / "data" / "model"
EMBEDDED_VOCABULARY = 4096

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def _case(kind: type[PreTrainedConfig], blocks: int, heads: int, **others: Any) -> PreTrainedConfig:
    return kind(**{**_SIZES, "num_hidden_layers": blocks, "num_key_value_heads": heads, **others})


#: By name; the first word is the model_type.
CASES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: _case(LlamaConfig, 2, 4, tie_word_embeddings=False),
    "llama grouped": lambda: _case(LlamaConfig, 3, 2, tie_word_embeddings=False),
    "llama tied": lambda: _case(LlamaConfig, 2, 2, tie_word_embeddings=True),
    "llama biases": lambda: _case(LlamaConfig, 2, 1, attention_bias=True, mlp_bias=True),
    "mistral": lambda: _case(MistralConfig, 2, 2, sliding_window=None),
    "mistral window": lambda: _case(MistralConfig, 2, 2, sliding_window=6),
    "qwen2": lambda: _case(Qwen2Config, 2, 2, tie_word_embeddings=True),
    # The first block sees everything, the others a window: masks differ between blocks.
    "qwen2 window": lambda: _case(
        Qwen2Config, 3, 2, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    # Heads are wider than hidden_size / heads, so o_proj is not square.
    "qwen3": lambda: _case(Qwen3Config, 2, 2, head_dim=16),
}


def random_model(case: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A model with every parameter random, also those that transformers starts at 0 or 1."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CASES[case](), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.ndim == 1:
                parameter.normal_(0, 0.3)
            else:
                parameter.normal_(0, 0.15)
    nn.Module.to(model, dtype=dtype)
    model.eval()
    return model


def save_model(
    path: Path,
    case: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    shards: bool = False,
    seed: int = 0,
) -> Path:
    """Writes ``random_model(...)`` to the directory ``path``, without a tokenizer."""
    model = random_model(case, dtype=dtype, seed=seed)
    model.save_pretrained(path, max_shard_size="20KB" if shards else "1GB")
    assert (path / "model.safetensors.index.json").exists() == shards
    return path


def save_model_with_tokenizer(path: Path, *, blocks: int = 2, seed: int = 0) -> Path:
    """A tiny LLaMA with the embedded model's tokenizer, so that it can be given text."""
    torch.manual_seed(seed)
    config = _case(LlamaConfig, blocks, 4, vocab_size=EMBEDDED_VOCABULARY, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(EMBEDDED / name, path / name)
    return path


def reference(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The whole model as transformers loads it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model.requires_grad_(False)
    model.eval()
    return model


def weight(model: PreTrainedModel, path: str) -> Tensor:
    """The weight of the module at ``path``."""
    value = model.get_submodule(path).weight
    assert isinstance(value, Tensor)
    return value


def last_norm(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """What the model's head would be given."""
    normed = model.get_submodule("model.norm")(hidden)
    assert isinstance(normed, Tensor)
    return normed


def random_tokens(samples: int, length: int, *, vocabulary: int = 64, seed: int = 0) -> Tensor:
    """(samples, length) int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (samples, length), generator=generator)


@torch.no_grad()
def linear_inputs(model: PreTrainedModel, block: int, tokens: Tensor) -> dict[str, Tensor]:
    """For each linear module of a block its inputs (tokens, in), from a pass through the whole model."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...], __: Tensor) -> None:
            found[name] = args[0].flatten(0, 1).clone()

        return hook

    layer = model.get_submodule(f"model.layers.{block}")
    handles = [
        module.register_forward_hook(keep(name))
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    ]
    model(tokens)
    for handle in handles:
        handle.remove()
    return found


def edit_json(path: Path, **changes: Any) -> None:
    """Changes keys of a JSON file; a key of value ``...`` is removed."""
    values = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ...:
            del values[key]
        else:
            values[key] = value
    path.write_text(json.dumps(values))
