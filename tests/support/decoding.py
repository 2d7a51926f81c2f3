"""Tiny models of all families whose blocks have the parts of LLaMA's, with packed matrices, and tokens at any place."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from niwaki.packed import decoding
from niwaki.packed.linear import SparseLinear
from niwaki.packed.matrix import pack
from support.caches import CACHE
from support.models import SIZES as TINY

SIZES: dict[str, Any] = {**TINY, "hidden_size": 64, "head_dim": 16, "num_hidden_layers": 3, "num_key_value_heads": 2}
SIZES |= {"pad_token_id": 0, "sliding_window": 8}
#: Experts behind two blocks without.
_EXPERTS: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts"), 2),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "n_group", "topk_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 8),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index"), 2),
}
_EXPERTS |= {"mlp_only_layers": [0, 1], "mlp_layer_types": ["dense", "dense", "sparse"]}


def _by_axes(*sections: int) -> dict[str, Any]:
    """Positions of three axes, as pictures have them."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}}


_BYTES = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")}
_BYTES |= {"num_hidden_layers": 1, "num_key_value_heads": 2, "vocab_size": 300, "hidden_size_global": 64}
_BYTES |= {"cross_attn_k": 2, "encoder_hash_byte_group_size": [3], "encoder_hash_byte_group_vocab": 30}
_LATENT: dict[str, Any] = {  # queries, keys and values of few numbers
    **dict.fromkeys(("num_key_value_heads", "swa_num_attention_heads", "swa_num_key_value_heads"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **{f"swa_{name}": 8 for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")},
}
_LATENT |= {"swa_head_dim": 16, "index_head_dim": 16, "index_n_heads": 2, "shared_experts_intermediate_size": 8}
_CHAMELEON: dict[str, Any] = {"class": "ChameleonModel", "vocabulary_map": {"<image>": 3}}
_CHAMELEON["vq_config"] = {"base_channels": 32, "num_res_blocks": 1, "channel_multiplier": [1], "embed_dim": 8}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 16}
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"

#: By model_type, what shows how a family differs from LLaMA. Those ``by_states`` embed no tokens.
FAMILIES: dict[str, dict[str, Any]] = {
    "aria_text": _EXPERTS,
    "blt": {**_BYTES, **dict.fromkeys(("patcher_config", "encoder_config", "decoder_config", "global_config"), _BYTES)},
    "chameleon": _CHAMELEON,
    "chameleon with swin_norm": {**_CHAMELEON, "kind": "chameleon", "swin_norm": True},
    "csm": {"class": "CsmBackboneModel", "num_codebooks": 2, "by_states": True},
    "csm_depth_decoder_model": {"class": "CsmDepthDecoderModel", "backbone_hidden_size": 64, "by_states": True},
    "cwm": {"layer_types": [_SLIDING, _FULL, _SLIDING]},
    "deepseek_ocr2_text": {**_EXPERTS, "class": "DeepseekOcr2TextModel"},
    "dots1": {**_EXPERTS, "n_shared_experts": 1, "layer_types": [_SLIDING, _FULL, _FULL]},
    "dots3_note_text": {**_EXPERTS, **_LATENT, "layer_types": [_FULL, _SLIDING, _FULL]},
    "ernie4_5": {},
    "ernie4_5_moe": _EXPERTS,
    "ernie4_5_vl_moe_text": {**_EXPERTS, **_by_axes(3, 3, 2), "class": "Ernie4_5_VLMoeTextModel"}
    | {"moe_intermediate_size": [8, 8]},
    "exaone_moe": {**_EXPERTS, "layer_types": [_SLIDING, _FULL, _FULL]},
    "flint": {**_EXPERTS, "layer_types": [_SLIDING, _FULL, _FULL]},
    "gemma": {},
    "glm4_moe": {**_EXPERTS, "use_qk_norm": True},
    "glm4v_moe_text": {**_EXPERTS, **_by_axes(1, 1, 2)},
    "granite": {"residual_multiplier": 0.98},
    "granite4_vision_text": {"residual_multiplier": 0.98, "class": "Granite4VisionTextModel"},
    "granite_docling_text": {},
    "granite_swa": {"layer_types": [_SLIDING, _FULL, _FULL]},
    "helium": {},
    "hunyuan_vl_text": {**_by_axes(2, 3, 3), "class": "HunYuanVLTextModel"},
    "hy_v3": _EXPERTS,
    "internlm3": {},
    "iquestcoder": {},
    "lara_mini": {**_EXPERTS, "layer_types": [_FULL, _LINEAR, _SLIDING]},  # in transformers from 5.24 on
    "llama": {},
    "mimo_v2_flash": {**_EXPERTS, "layer_types": [_FULL, _SLIDING, _FULL], "v_head_dim": 16},
    "mellum": _EXPERTS,
    "ministral": {},
    "ministral3": {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}},
    "mistral": {},
    "mllama_text_model": {"class": "MllamaForCausalLM", "cross_attention_layers": []},
    "molmo2_text": {},
    "olmo": {"clip_qkv": 1.0},
    "olmoe": _EXPERTS,
    "paddleocr_vl_text": {**_by_axes(2, 3, 3), "class": "PaddleOCRTextModel"},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen2_5_vl_text": _by_axes(2, 3, 3),
    "qwen2_5_omni_text": {**_by_axes(2, 3, 3), "class": "Qwen2_5OmniThinkerTextModel"},
    "qwen2_moe": _EXPERTS,
    "qwen2_vl_text": _by_axes(2, 3, 3),
    "qwen3": {},
    "qwen3_5_text": {**_by_axes(1, 1, 0), "layer_types": [_FULL, _LINEAR, _FULL]},
    "qwen3_5_moe_text": {**_EXPERTS, **_by_axes(1, 1, 0), "layer_types": [_FULL, _LINEAR, _FULL]},
    "qwen3_moe": _EXPERTS,
    "qwen3_next": {**_EXPERTS, "layer_types": [_FULL, _LINEAR, _FULL]},
    "qwen3_omni_moe_talker_code_predictor": {"class": "Qwen3OmniMoeTalkerCodePredictorModel", "by_states": True},
    "qwen3_omni_moe_talker_text": {**_EXPERTS, **_by_axes(2, 3, 3), "class": "Qwen3OmniMoeTalkerModel"}
    | {"by_states": True},
    "qwen3_omni_moe_text": {**_EXPERTS, **_by_axes(2, 3, 3), "class": "Qwen3OmniMoeThinkerTextModel"},
    "qwen3_vl_moe_text": {**_EXPERTS, **_by_axes(2, 3, 3)},
    "qwen3_vl_text": _by_axes(2, 3, 3),
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "solar_open": _EXPERTS,
    "unlimited_ocr_text": {**_EXPERTS, "class": "UnlimitedOcrTextModel"},
}
FAMILIES = {kind: options for kind, options in FAMILIES.items() if options.get("kind", kind) in CONFIG_MAPPING}
#: Those whose positions are of bytes or of codebooks, which nobody else can say.
BY_THEMSELVES = {"blt", "csm_depth_decoder_model"}
#: By folder, blocks with the same names for their parts that never decode token by token, because each of their tokens
#: sees those behind it: encoders, and what removes the noise from several tokens at once.
NOT_TRIED = {
    "deepseek_ocr2": {"DeepseekOcr2VisionEncoderLayer"},
    "esmc": {"EsmcLayer"},
    "eurobert": {"EuroBertDecoderLayer"},
    "mllama": {"MllamaVisionEncoderLayer"},
    "moonshine_streaming": {"MoonshineStreamingEncoderLayer"},
    "muse_glimmer_assistant": {"MuseGlimmerAssistantDecoderLayer"},
    "pe_audio": {"PeAudioEncoderLayer"},
    "pe_audio_video": {"PeAudioVideoEncoderLayer"},
    "pe_video": {"PeVideoEncoderLayer"},
    "ultrabert": {"UltrabertDecoderLayer"},
}
PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


def config_of(kind: str, **others: Any) -> tuple[Any, Any]:
    """A configuration, and the class of its model."""
    options = {**SIZES, **FAMILIES[kind], **others}
    name, _ = options.pop("class", None), options.pop("by_states", None)
    config = AutoConfig.for_model(options.pop("kind", kind), **options)
    if name is not None:
        return config, getattr(transformers, name)._from_config
    auto: Any = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModel
    return config, auto.from_config


def all_experts(kind: str) -> dict[str, Any]:
    """Of two experts that are nearly as good, rounding decides; where all are asked, there is nothing to choose."""
    has_any = any("expert" in key for key in FAMILIES[kind])
    return dict.fromkeys(("num_experts_per_tok", "moe_k"), 2) if has_any else {}


def is_block(module: nn.Module) -> bool:
    return {name for name, _ in module.named_children()} == PARTS


def blocks_of(kind: str) -> set[type[nn.Module]]:
    """The classes of a model's blocks; nothing of it is filled with numbers."""
    config, build = config_of(kind)
    with torch.device("meta"):
        return {type(module) for module in build(config).modules() if is_block(module)}


def packed_model(
    kind: str, dtype: torch.dtype = torch.float32, seed: int = 0, sparsity: float = 0.5, **others: Any
) -> PreTrainedModel:
    """A random model, the matrices of its blocks packed, as ``niwaki.load`` gives one; without going through files.

    All parameters are the same in both dtypes.
    """
    config, build = config_of(kind, **others)
    model: PreTrainedModel = build(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    blocks = [module for module in model.modules() if is_block(module)]
    with torch.no_grad():
        for name, value in model.named_parameters():
            random = torch.randn(value.shape, generator=generator)
            value.copy_(1 + 0.3 * random if "norm" in name else (0.2 if value.ndim > 1 else 0.5) * random)
            value.data = value.to(torch.bfloat16).to(dtype)
        for block in blocks:
            for path, layer in [*block.named_modules()]:
                if type(layer) is nn.Linear:
                    kept = torch.rand(layer.weight.shape, generator=generator) >= sparsity
                    block.set_submodule(path, SparseLinear(pack(torch.where(kept, layer.weight, 0.0)), layer.bias))
    model.requires_grad_(False).eval()
    decoding.attach(model, blocks)
    return model


@torch.no_grad()
def decoded(
    model: PreTrainedModel, tokens: Tensor, given: int, start: int | None = None, mask: Tensor | None = None
) -> Tensor:
    """The logits, or the states of a model without a head, behind each of the tokens (1, n) after the first ``given``.

    The first is at the position ``start``; None leaves that to the model.
    """
    run: Any = model
    found, cache, count = [], DynamicCache(config=model.config), tokens.shape[1]
    inputs = _inputs(model, tokens)
    positions = None if start is None else _positions(model, start, count)
    for first, last in [(0, given), *((i, i + 1) for i in range(given, count))]:
        options: dict[str, Any] = {} if mask is None else {"attention_mask": mask[:, :last]}
        options |= {name: value[:, first:last] for name, value in inputs.items()}
        if positions is not None:
            options["position_ids"] = positions[..., first:last]
        out = run(use_cache=True, **options, **{CACHE: cache})
        cache = out[CACHE]
        found.append(out["logits" if "logits" in out else "last_hidden_state"][:, -1])
    return torch.cat(found[1:])


def _inputs(model: PreTrainedModel, tokens: Tensor) -> dict[str, Tensor]:
    """The tokens, or in their place states for a model that embeds none."""
    if not FAMILIES[model.config.model_type].get("by_states"):
        return {"input_ids": tokens}
    table = torch.randn(64, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    return {"inputs_embeds": table.to(torch.bfloat16).to(model.dtype)[tokens]}


def _positions(model: PreTrainedModel, start: int, count: int) -> Tensor:
    """(1, count), or (3, 1, count) where positions have axes, each of which goes on at its own pace."""
    positions = torch.arange(start, start + count).unsqueeze(0)
    if "mrope_section" not in str(FAMILIES[model.config.model_type]):
        return positions
    return torch.stack((positions, positions // 2, positions // 3))


@contextlib.contextmanager
def counting(prompts: bool = False) -> Iterator[list[decoding.NativeBlock]]:
    """The blocks that were computed natively in this context, each as often as it was: for a token, or for several."""
    found = list[decoding.NativeBlock]()
    alone, together, tried = (
        decoding.NativeBlock._prepared_for,
        decoding.NativeDecoder._chain_for,
        decoding.NativeDecoder._tried,
    )

    def counted(self: decoding.NativeBlock, *arguments: Any) -> Any:
        prepared = alone(self, *arguments)
        if prepared is not None and prompts == (arguments[0].shape[1] > 1):
            found.append(self)
        return prepared

    def counted_together(self: decoding.NativeDecoder, *arguments: Any) -> Any:
        chain = together(self, *arguments)
        if chain is not None and not prompts:
            found.extend(block.forward for block in self._decoder.layers)
        return chain

    def not_counted(self: decoding.NativeDecoder, *arguments: Any) -> Any:
        before = len(found)
        chain = tried(self, *arguments)
        del found[before:]
        return chain

    with (
        patch.object(decoding.NativeBlock, "_prepared_for", counted),
        patch.object(decoding.NativeDecoder, "_chain_for", counted_together),
        patch.object(decoding.NativeDecoder, "_tried", not_counted),
    ):
        yield found


@contextlib.contextmanager
def by_transformers() -> Iterator[None]:
    """Leaves all blocks to transformers."""
    with (
        patch.object(decoding.NativeBlock, "_prepared_for", lambda *_: None),
        patch.object(decoding.NativeDecoder, "_chain_for", lambda *_: None),
    ):
        yield


@contextlib.contextmanager
def block_by_block() -> Iterator[None]:
    """Leaves nothing to the library but blocks, each by itself."""
    with patch.object(decoding.NativeDecoder, "_chain_for", lambda *_: None):
        yield


def both(
    model: PreTrainedModel, tokens: Tensor, given: int, start: int | None = None, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, int]:
    """What is decoded, what transformers alone decodes, and how many native steps there were."""
    with counting() as steps:
        found = decoded(model, tokens, given, start, mask)
    with by_transformers():
        return found, decoded(model, tokens, given, start, mask), len(steps)


def classes_with_the_parts() -> dict[str, set[str]]:
    """By folder of transformers' models, its classes that by their text are blocks with the parts of LLaMA's.

    Parameters of their own, and what they compute, are not seen.
    """
    attention, mlp = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    made = re.compile(r"^ +self\.(\w+)(?:: [^=]+)? = \(?\s*(?:torch\.)?(?:nn\.(?!Parameter))?[A-Z]\w*[\[(]", re.M)
    found = {}
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        text = file.read_text(encoding="utf-8")
        if "gate_proj" not in text or "o_proj" not in text:
            continue
        parts = {
            re.split(r"\W", each, maxsplit=1)[0]: set(made.findall(each))
            for each in re.split(r"^class ", text, flags=re.M)[1:]
        }
        has_attention = any(attention <= each <= {*attention, "q_norm", "k_norm"} for each in parts.values())
        if has_attention and any(mlp <= each <= {*mlp, "act_fn"} for each in parts.values()):
            found[file.parent.name] = {name for name, each in parts.items() if each - {"linear_attn"} == PARTS}
    return {folder: classes for folder, classes in found.items() if classes}
