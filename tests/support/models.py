"""Tiny random models of every family in the table, and what transformers itself makes of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from niwaki.errors import NiwakiError, UsageError
from support.covering import FULL
from support.made import made_once

#: The model that ships with niwaki, and its tokenizer's size.
EMBEDDED = Path(str(files("niwaki"))) / "data" / "model"
EMBEDDED_VOCABULARY = 4096
#: What is left of it where nothing hangs on the words: readers of GGUF files take a second for all of them.
FEW_TOKENS = 512

#: Of most tiny models.
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1}


def _case(kind: str, blocks: int = 2, heads: int = 2, **others: Any) -> PreTrainedConfig:
    sizes = {**SIZES, "num_hidden_layers": blocks, "num_key_value_heads": heads, **others}
    config: PreTrainedConfig = AutoConfig.for_model(kind, **sizes)
    return config


def _pictures(kind: str, text: dict[str, Any], **others: Any) -> PreTrainedConfig:
    """A model that also sees."""
    seeing: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    seeing |= {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    if kind == "llama4":
        seeing |= dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 16)
    both = {"text_config": {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2, **text}, "vision_config": seeing}
    config: PreTrainedConfig = AutoConfig.for_model(kind, **both, **others)
    return config


_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "tie_word_embeddings": False}
_EXPERTS |= {"num_experts": 4, "num_local_experts": 4}
_LATENT: dict[str, Any] = {"q_lora_rank": 16, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
_LATENT |= dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 8)
_LATENT |= dict.fromkeys(("qk_rope_head_dim", "head_dim"), 4)
_GPT2: dict[str, Any] = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, "n_inner": 48}
_LLAMA4: dict[str, Any] = {"head_dim": 8, "intermediate_size": 24, "intermediate_size_mlp": 40, "num_local_experts": 4}
#: Dense, experts, dense; the last one sees the whole text, the others chunks of 8 tokens.
_LLAMA4 |= {"num_hidden_layers": 3, "interleave_moe_layer_step": 2, "attention_chunk_size": 8}
_LLAMA4 |= {"layer_types": [*["chunked_attention"] * 2, "full_attention"], "no_rope_layers": [1, 1, 0]}
_FIRST_SEES_ALL: dict[str, Any] = {"layer_types": ["full_attention", "sliding_attention"]}
_LAST_SEES_ALL: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}

_FOUR_WINDOWS: dict[str, Any] = {"layer_types": 2 * _LAST_SEES_ALL["layer_types"], "sliding_window": 6}
_FOUR_WINDOWS |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
_GEMMA3N: dict[str, Any] = {"intermediate_size": [128] * 4, "head_dim": 8, "laurel_rank": 6, "altup_num_inputs": 3}
_GEMMA3N |= {"activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], **_FOUR_WINDOWS}
_GEMMA4: dict[str, Any] = {"intermediate_size": 64, "head_dim": 8, "global_head_dim": 16, **_FOUR_WINDOWS}

#: One transformer in four blocks; and two, in two each.
_ZAMBA: dict[str, Any] = {"layer_types": ["hybrid", "mamba", "hybrid", "hybrid", "hybrid"]}
_ZAMBA |= {"mamba_d_state": 2, "n_mamba_heads": 2, "mamba_dt_rank": 1}
_ZAMBA2: dict[str, Any] = {"layers_block_type": ["mamba", "hybrid", "hybrid", "hybrid", "mamba", "hybrid"]}
_ZAMBA2 |= {"num_mem_blocks": 2, "adapter_rank": 3, "use_shared_attention_adapter": True, "use_mem_rope": True}
_ZAMBA2 |= {"mamba_d_state": 8, "n_mamba_heads": 4, "chunk_size": 8}

#: By name; the first word is the model_type.
CASES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: _case("llama", heads=4, tie_word_embeddings=False),
    "llama grouped": lambda: _case("llama", 3, tie_word_embeddings=False),
    "llama tied": lambda: _case("llama", tie_word_embeddings=True),
    "llama biases": lambda: _case("llama", heads=1, attention_bias=True, mlp_bias=True),
    "llama4_text": lambda: _case("llama4_text", **_LLAMA4),
    "llama4_text twice": lambda: _case("llama4_text", **_LLAMA4, num_experts_per_tok=2),
    "llama4": lambda: _pictures("llama4", _LLAMA4, tie_word_embeddings=False),
    "mistral": lambda: _case("mistral", sliding_window=None),
    "mistral window": lambda: _case("mistral", sliding_window=6),
    "mixtral": lambda: _case("mixtral", **_EXPERTS),
    "mixtral window": lambda: _case("mixtral", sliding_window=6, **_EXPERTS),
    "qwen2": lambda: _case("qwen2", tie_word_embeddings=True),
    # The first block sees everything, the others a window: masks differ between blocks.
    "qwen2 window": lambda: _case("qwen2", 3, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen2_moe": lambda: _case("qwen2_moe", shared_expert_intermediate_size=20, **_EXPERTS),
    "qwen2_moe dense": lambda: _case("qwen2_moe", shared_expert_intermediate_size=20, mlp_only_layers=[0], **_EXPERTS),
    # Heads are wider than hidden_size / heads, so o_proj is not square.
    "qwen3": lambda: _case("qwen3", head_dim=16),
    # Some get fewer tokens than they have inputs, and 10 comes behind 9.
    "qwen3_moe many": lambda: _case(
        "qwen3_moe", head_dim=8, **{**_EXPERTS, "num_experts": 12, "num_local_experts": 12}
    ),
    "qwen3_moe": lambda: _case("qwen3_moe", head_dim=8, norm_topk_prob=True, **_EXPERTS),
    "gemma2": lambda: _case("gemma2", head_dim=8, sliding_window=6, **_LAST_SEES_ALL),
    "gemma3_text": lambda: _case("gemma3_text", head_dim=16, sliding_window=6, **_FIRST_SEES_ALL),
    "gemma3": lambda: _pictures(
        "gemma3", {"head_dim": 8, "sliding_window": 6, **_LAST_SEES_ALL}, mm_tokens_per_image=4
    ),
    # The last two blocks use the keys and values of the first two, or of none.
    "gemma3n_text": lambda: _case("gemma3n_text", 4, num_kv_shared_layers=2, **_GEMMA3N),
    "gemma3n_text unshared": lambda: _case("gemma3n_text", 4, num_kv_shared_layers=0, **_GEMMA3N),
    "gemma4_text": lambda: _case("gemma4_text", 4, num_kv_shared_layers=2, **_GEMMA4),
    "gemma4_text unshared": lambda: _case("gemma4_text", 4, **_GEMMA4),
    "gemma4_text wide": lambda: _case("gemma4_text", 4, num_kv_shared_layers=2, use_double_wide_mlp=True, **_GEMMA4),
    "phi3": lambda: _case("phi3", pad_token_id=2),
    "phi3 partial": lambda: _case("phi3", pad_token_id=2, partial_rotary_factor=0.5),
    "opt": lambda: _case("opt", ffn_dim=48, word_embed_proj_dim=32),
    # As OPT-350m: narrow embeddings, norms behind and not before.
    "opt 350m": lambda: _case("opt", ffn_dim=48, word_embed_proj_dim=16, do_layer_norm_before=False),
    "gpt2": lambda: _case("gpt2", **_GPT2, tie_word_embeddings=True),
    "gpt2 untied": lambda: _case("gpt2", **_GPT2, tie_word_embeddings=False),
    "gpt_neox": lambda: _case("gpt_neox", use_parallel_residual=True, rotary_pct=0.25),
    "gpt_neox serial": lambda: _case("gpt_neox", use_parallel_residual=False, tie_word_embeddings=True),
    "bloom": lambda: _case("bloom", n_head=4, n_layer=2),
    "falcon": lambda: _case("falcon", multi_query=True, new_decoder_architecture=False, bias=False),
    "falcon new": lambda: _case("falcon", new_decoder_architecture=True, num_kv_heads=2, bias=False),
    "falcon alibi": lambda: _case(
        "falcon", multi_query=False, alibi=True, new_decoder_architecture=False, parallel_attn=False, bias=True
    ),
    "cohere2": lambda: _case("cohere2", sliding_window=6, **_LAST_SEES_ALL),
    "olmo2": lambda: _case("olmo2"),
    "olmoe": lambda: _case("olmoe", **_EXPERTS),
    "gpt_oss": lambda: _case("gpt_oss", head_dim=8, sliding_window=6, **_LAST_SEES_ALL, **_EXPERTS),
    "deepseek_v2": lambda: _case("deepseek_v2", heads=4, **_EXPERTS, **_LATENT),
    "deepseek_v2 lite": lambda: _case("deepseek_v2", heads=4, **_EXPERTS, **{**_LATENT, "q_lora_rank": None}),
    "deepseek_v3": lambda: _case("deepseek_v3", heads=4, n_group=2, topk_group=1, **_EXPERTS, **_LATENT),
    "zamba": lambda: _case("zamba", 5, heads=4, **_ZAMBA),
    "zamba2": lambda: _case("zamba2", 6, heads=4, **_ZAMBA2),
}

_SOME_SEE_ALL = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
_WINDOWS: dict[str, Any] = {"sliding_window": 6, "layer_types": _SOME_SEE_ALL}
_GEMMA_HEADS: dict[str, Any] = {"head_dim": 16, "pad_token_id": 2}
_GRANITE: dict[str, Any] = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0}
_GRANITE |= {"logits_scaling": 0.5, "residual_multiplier": 0.7}
_LONG: dict[str, Any] = {"max_position_embeddings": 512, "original_max_position_embeddings": 256}
_LONG["rope_parameters"] = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 256}
_LONG["rope_parameters"] |= {"long_factor": [1.0, 2.0, 4.0, 8.0], "short_factor": [1.0, 1.1, 1.3, 1.5]}
_PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 500.0}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "original_max_position_embeddings": 16, "factor": 8.0}
_LINEAR_HEADS: dict[str, Any] = {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6}
_LINEAR_HEADS |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
_LINEAR_HEADS["rope_parameters"] = {**_PLAIN, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
_SCALED_YARN = {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
_LFM2: dict[str, Any] = {"block_auto_adjust_ff_dim": True, "block_multiple_of": 16}
_LFM2["layer_types"] = ["conv", "full_attention", "conv"]
#: More of them, which llama.cpp runs: with more blocks and widths of their own, so that nothing fits by chance.
FOR_LLAMA_CPP: dict[str, Callable[[], PreTrainedConfig]] = {
    **{case: CASES[case] for case in ("llama grouped", "llama biases", "llama tied", "mistral", "mixtral", "phi3")},
    **{case: CASES[case] for case in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "olmo2")},
    "gemma": lambda: _case("gemma", heads=1, **_GEMMA_HEADS),
    "gemma2": lambda: _case("gemma2", 5, sliding_window=6, query_pre_attn_scalar=16, **_GEMMA_HEADS),
    "gemma2 pattern": lambda: _case("gemma2", 5, query_pre_attn_scalar=16, **_GEMMA_HEADS, **_WINDOWS),
    "gemma3_text": lambda: _case("gemma3_text", 7, sliding_window=6, query_pre_attn_scalar=16, **_GEMMA_HEADS),
    "gemma3_text pattern": lambda: _case("gemma3_text", 5, query_pre_attn_scalar=16, **_GEMMA_HEADS, **_WINDOWS),
    "gemma3 pictures": lambda: _pictures(
        "gemma3",
        {"vocab_size": FEW_TOKENS, "sliding_window": 6, "query_pre_attn_scalar": 16, **_GEMMA_HEADS, **_LAST_SEES_ALL},
        mm_tokens_per_image=4,
        image_token_index=FEW_TOKENS - 1,
    ),
    "smollm3": lambda: _case("smollm3", 5, pad_token_id=2),
    "phi3 long": lambda: _case("phi3", pad_token_id=2, **_LONG),
    "phi3 partial": lambda: _case("phi3", pad_token_id=2, head_dim=8, partial_rotary_factor=0.5),
    "olmo3": lambda: _case(
        "olmo3", 5, rope_parameters={"full_attention": _YARN, "sliding_attention": _PLAIN}, **_WINDOWS
    ),
    "granite": lambda: _case("granite", 3, **_GRANITE),
    "granitemoe": lambda: _case("granitemoe", num_local_experts=4, num_experts_per_tok=2, **_GRANITE),
    "glm4": lambda: _case("glm4", head_dim=8, pad_token_id=2, partial_rotary_factor=0.5),
    "lfm2": lambda: _case("lfm2", 3, pad_token_id=2, **_LFM2),
    "gpt_oss": lambda: _case("gpt_oss", 5, head_dim=8, **_WINDOWS, **_EXPERTS),
    "ministral3": lambda: _case("ministral3", head_dim=8, pad_token_id=2, rope_parameters=_SCALED_YARN),
    "starcoder2": lambda: _case("starcoder2", pad_token_id=2),
    "cohere2": lambda: _case("cohere2", 5, pad_token_id=2, **_WINDOWS),
    "qwen3_5_text": lambda: _case("qwen3_5_text", 5, **_LINEAR_HEADS),
    "qwen3_5 pictures": lambda: _pictures(
        "qwen3_5", {"vocab_size": FEW_TOKENS, **_LINEAR_HEADS, "layer_types": ["linear_attention", "full_attention"]}
    ),
}

#: One of each kind: matrices on their own and joined, transposed ones, experts one by one and in one tensor.
COMMON = ("llama grouped", "phi3", "gpt2", "mixtral", "gpt_oss")
#: Blocks get keys and values from others, which no other kind of model tries.
HANDED_ON = ("gemma3n_text", "gemma4_text")
#: All, of which ``make quick`` runs the common ones.
EACH_CASE = [pytest.param(case, marks=() if case in COMMON else pytest.mark.slow) for case in CASES]
each_case = pytest.mark.parametrize("case", EACH_CASE)


def some_of_each_family(turn: int) -> list[Any]:
    """A case of every family, another one at the next turn, and those like no other: for what takes long."""
    families = [list(cases) for _, cases in itertools.groupby(CASES, key=lambda case: case.split()[0])]
    chosen = {cases[turn % len(cases)] for cases in families} | {*COMMON, *HANDED_ON}
    return [param for param in EACH_CASE if FULL or param.values[0] in chosen]


def some_families(turn: int) -> list[Any]:
    """Cases of a third of the families, of others at the next turn, and those like no other."""
    params = some_of_each_family(turn)
    kept = {*COMMON, *HANDED_ON}
    return [each for i, each in enumerate(params) if FULL or i % 3 == turn % 3 or each.values[0] in kept]


def each_family(turn: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", some_of_each_family(turn))


def a_third_of_the_families(turn: int) -> pytest.MarkDecorator:
    """For what depends on the layout of a family only through what all of them are tested with."""
    return pytest.mark.parametrize("case", some_families(turn))


def some_families_and(turn: int, names: tuple[str, ...], values: Sequence[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Cases of some families with one of ``values``, in turns."""
    parameters = [
        pytest.param(case, *value, marks=each.marks, id="-".join(map(str, (case, *value))))
        for i, each in enumerate(some_families(turn))
        for case in each.values
        for value in (values if FULL else [values[i % len(values)]])
    ]
    return pytest.mark.parametrize(("case", *names), parameters)


_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_GEMMA = ("per_layer_input_gate", "per_layer_projection")
_NEOX = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
_MAMBA = ("linear", "in_proj", "out_proj")
_MLA = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", *_LLAMA[3:])
#: Where families have their blocks in the model, and what the files call the matrices to prune, if it is
#: not as in LLaMA.
BLOCKS = {
    **dict.fromkeys(("gpt2", "bloom", "falcon"), "transformer.h"),
    "opt": "model.decoder.layers",
    "gpt_neox": "gpt_neox.layers",
    "gemma3": "model.language_model.layers",
}
PRUNED = {
    **dict.fromkeys(("gpt_neox", "bloom", "falcon"), _NEOX),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _MLA),
    **dict.fromkeys(("llama4", "llama4_text", "gpt_oss"), (*_LLAMA, "gate_up_proj")),
    "mixtral": (*_LLAMA[:4], "w1", "w2", "w3"),
    "gemma3n_text": (*_LLAMA, *_GEMMA, "linear_left", "linear_right"),
    "gemma4_text": (*_LLAMA, *_GEMMA),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "opt": (*_LLAMA[:3], "out_proj", "fc1", "fc2"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "zamba": (*_LLAMA, *_MAMBA),
    "zamba2": (*_LLAMA, *_MAMBA, "gate_up_proj"),
}


def is_pruned(case: str, key: str) -> bool:
    """Whether the tensor ``key`` of a checkpoint is to be pruned, going by what people call it."""
    if not re.search(r"(^|\.)(layers|h)\.\d+\.", key) or "vision" in key:
        return False
    *_, last = key.removesuffix(".weight").split(".")
    return last in PRUNED.get(case.split()[0], _LLAMA)


def decoder_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """The blocks of a whole model."""
    found = model.get_submodule(BLOCKS.get(model.config.model_type, "model.layers"))
    assert isinstance(found, nn.ModuleList)
    return found


def random_model(case: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model with every parameter random, also those that transformers starts at 0 or 1."""
    torch.manual_seed(seed)
    config = (CASES | FOR_LLAMA_CPP)[case]()
    config.update(changes)
    auto: Any = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.ndim == 1:
                parameter.normal_(0, 0.3)
            else:
                parameter.normal_(0, 0.15)
            parameter.data = parameter.to(dtype)  # and not the buffers, which can be complex
    model.eval()
    return model


def save_model(
    path: Path, case: str = "llama", *, dtype: torch.dtype = torch.float32, shards: bool = False, seed: int = 0
) -> Path:
    """Writes ``random_model(...)`` to the directory ``path``, without a tokenizer."""

    def make(place: Path) -> None:
        random_model(case, dtype=dtype, seed=seed).save_pretrained(place, max_shard_size="20KB" if shards else "1GB")
        assert (place / "model.safetensors.index.json").exists() == shards

    made_once(path, f"{case} {dtype} {shards} {seed}", make)
    torch.manual_seed(seed)  # the same state whether the files were made now or before
    return path


def sparse_model(path: Path, case: str = "llama", sparsity: float = 0.7, **options: Any) -> Path:
    """A random model whose matrices to prune have so many zeros."""
    return with_zeros(save_model(path, case, **options), case, sparsity)


def with_zeros(path: Path, case: str, sparsity: float) -> Path:
    """Makes so many weights of a model's matrices to prune 0."""
    generator = torch.Generator().manual_seed(1)
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        for key, value in tensors.items():
            if is_pruned(case, key) and value.ndim > 1:
                value[torch.rand(value.shape, generator=generator) < sparsity] = 0
        save_file(tensors, file, {"format": "pt"})
    return path


@contextlib.contextmanager
def edited(model: Path) -> Iterator[dict[str, Tensor]]:
    """The tensors of a model in one file, which is written again with what is made of them."""
    file = model / "model.safetensors"
    yield (tensors := load_file(file))
    save_file(tensors, file, {"format": "pt"})


def save_model_with_tokenizer(path: Path, *, blocks: int = 2, seed: int = 0) -> Path:
    """A tiny LLaMA with the embedded model's tokenizer, so that it can be given text."""
    return add_tokenizer(_save_with_vocabulary(path, blocks, seed, EMBEDDED_VOCABULARY))


def save_model_with_few_tokens(path: Path, *, blocks: int = 2, seed: int = 0) -> Path:
    """The same with an eighth of the tokens, for what is written by it: each token of it is drawn from all."""
    return add_small_tokenizer(_save_with_vocabulary(path, blocks, seed, FEW_TOKENS))


def _save_with_vocabulary(path: Path, blocks: int, seed: int, vocabulary: int) -> Path:
    def make(place: Path) -> None:
        torch.manual_seed(seed)
        config = _case("llama", blocks, 4, vocab_size=vocabulary, tie_word_embeddings=True)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(place)

    made_once(path, f"{vocabulary} tokens {blocks} {seed}", make)
    torch.manual_seed(seed)
    return path


def save_some_of_the_embedded(path: Path, blocks: int = 2) -> Path:
    """The first blocks of the embedded model, for what hangs on no words: in a directory ``demo`` it is used."""
    shutil.copytree(EMBEDDED, path)
    with edited(path) as tensors:
        for key in [*tensors]:
            if (number := re.search(r"layers\.(\d+)\.", key)) and int(number[1]) >= blocks:
                del tensors[key]
    edit_json(path / "config.json", num_hidden_layers=blocks)
    return path


def format_of(kind: str) -> Any:
    """What ``export`` calls a GGUF file with its matrices in ``kind``, such as Q8_0."""
    return f"gguf-{kind.lower()}"


def add_tokenizer(path: Path) -> Path:
    """Gives a model with its vocabulary the embedded model's tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(EMBEDDED / name, path / name)
    return path


def add_small_tokenizer(path: Path) -> Path:
    """Gives a model the first of the embedded model's tokens: single bytes, and what they are joined to first."""
    add_tokenizer(path)
    model = json.loads((path / "tokenizer.json").read_text())["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < FEW_TOKENS}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    edit_json(path / "tokenizer.json", model=model)
    return path


def text_template(template: str) -> dict[str, Any]:
    """What a tokenizer's file has for what ``template`` says around each text, of ``<s>`` (0) and ``</s>`` (1)."""
    special = {token: {"id": token, "ids": [i], "tokens": [token]} for i, token in enumerate(("<s>", "</s>"))}
    parts: list[dict[str, Any]] = [
        {"Sequence": {"id": "A", "type_id": 0}} if part == "$A" else {"SpecialToken": {"id": part, "type_id": 0}}
        for part in template.split()
    ]
    return {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": special}


def begin_texts(path: Path, template: str = "<s> $A") -> Path:
    """Makes its tokenizer put what ``template`` says around each text."""
    edit_json(path / "tokenizer.json", post_processor=text_template(template))
    return path


def save_random(path: Path, config: PreTrainedConfig, auto: Any = AutoModelForCausalLM) -> Path:
    """A model of ``config`` with random weights that are large enough to matter."""
    torch.manual_seed(0)
    model: PreTrainedModel = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "norm" not in name:
                parameter.normal_(0, 0.15)
    model.save_pretrained(path)
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


def random_tokens(samples: int, length: int, *, vocabulary: int = 64, seed: int = 0) -> Tensor:
    """(samples, length) int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (samples, length), generator=generator)


@torch.no_grad()
def linear_inputs(model: PreTrainedModel, block: int, tokens: Tensor) -> dict[str, Tensor]:
    """For each linear module of a block its inputs (tokens, in), from a pass through the whole model."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            found[name] = args[0].flatten(0, -2)  # kept alive: its address tells who shares it

        return hook

    handles = [
        module.register_forward_pre_hook(keep(name))
        for name, module in decoder_blocks(model)[block].named_modules()
        if isinstance(module, nn.Linear | Conv1D)
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


def message(call: Callable[[], object], kind: type[NiwakiError] = UsageError) -> str:
    """What the error that ``call`` raises says, in one line."""
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    return text
