"""What a GGUF file says of its architecture, against the configuration that transformers' reader made of it.

The reader takes some keys and leaves out others, which may be what makes the model: each key is looked up here, and
the configuration has to say the same, is made to, or the file is refused. Sources: docs/gguf.md of ggml, and
src/llama-hparams.h and src/models of llama.cpp.
"""

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from niwaki.checkpoints.gguf_header import ANOTHER, ORIGINAL
from niwaki.errors import CheckpointError, UnsupportedModelError, shown

#: By key, the names that configurations have for it.
_SAME: Mapping[str, tuple[str, ...]] = {
    "attention.head_count": ("num_attention_heads", "n_head", "num_heads"),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head"),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_weights_norm": ("norm_topk_prob",),
    "shortconv.l_cache": ("conv_L_cache",),
    "full_attention_interval": ("full_attention_interval",),
    "ssm.conv_kernel": ("conv_kernel", "linear_conv_kernel_dim"),
    "ssm.state_size": ("state_size", "linear_key_head_dim"),
    "ssm.group_count": ("linear_num_key_heads",),
    "ssm.time_step_rank": ("time_step_rank", "linear_num_value_heads"),
    "use_parallel_residual": ("use_parallel_residual",),
}
#: The same, where the configuration can be made to say it: nothing else depends on it.
_GIVEN: Mapping[str, tuple[str, ...]] = {
    "attention.key_length": ("global_head_dim", "head_dim"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_scale": ("routed_scaling_factor",),
}
#: Sizes that weights would not fit otherwise, and words.
_FITTING = {
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "ssm.inner_size", "vocab_size"),
    "tensor_data_layout",
}
#: With these values a key says what is so without it.
_NEUTRAL: Mapping[str, tuple[float, ...]] = {
    **dict.fromkeys(["expert_weights_scale", "logit_scale", "residual_scale", "embedding_scale"], (0, 1)),
    **dict.fromkeys(["expert_group_count", "expert_group_used_count", "interleave_moe_layer_step"], (0, 1)),
    **dict.fromkeys(["attn_logit_softcapping", "final_logit_softcapping", "attention.scale"], (0,)),
    **dict.fromkeys(["expert_count", "expert_used_count", "expert_shared_count", "expert_weights_norm"], (0,)),
    **dict.fromkeys(["leading_dense_block_count", "moe_every_n_layers", "pooling_type", "ssm.dt_b_c_rms"], (0,)),
    **dict.fromkeys(["attention.clamp_kqv", "attention.max_alibi_bias", "attention.sliding_window"], (0,)),
    **dict.fromkeys(["attention.head_count", "attention.head_count_kv", "nextn_predict_layers"], (0,)),
    **dict.fromkeys(["attention.causal", "expert_gating_func", "rope.scaling.attn_factor"], (1,)),
}
#: Bases of rotary positions, and what norms add to a variance, which may be 0.
_BASES = ("rope.freq_base", "rope.freq_base_swa")
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
#: What every file has, each time one of these.
_ALWAYS = (
    *(("block_count",), ("context_length",), ("embedding_length",), ("attention.head_count",)),
    _EPSILONS,
    ("feed_forward_length", "expert_feed_forward_length"),
)
#: The base of rotary positions of files that have none.
_BASE = 10_000.0
#: What :func:`stretch` reads.
_STRETCHES = {
    *("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"),
    *("rope.scaling.original_context_length", "rope.scaling.finetuned"),
}
#: Model types all of whose layers look back through one window.
_WINDOWED = {"phi3", "starcoder2"}
#: Gemmas whose scores are divided by the square root of a head's share of the hidden size, by their number of blocks.
SHARES = {"gemma2": 46, "gemma3_text": 62}
#: Stretched positions of which files have nothing but the factors: those of LLaMA 3.1 and 3.2.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_STRETCHED = [{"rope_type": "llama3", "factor": factor, **_LLAMA3} for factor in (8.0, 32.0)]


def check_keys(file: Path, fields: Mapping[str, Any]) -> None:
    """CheckpointError for numbers that no model has, before any library computes with them."""
    architecture, own = _own(fields)

    def refuse(key: str, what: str) -> None:
        raise CheckpointError(f"{file} has {architecture}{key} {shown(own[key])}, {what}; {ANOTHER}")

    for key in (*_BASES, *_EPSILONS):
        number = own.get(key, 1.0)
        if type(number) is not float or not 0 <= number < math.inf or (number == 0 and key in _BASES):
            refuse(key, "no number above 0" if key in _BASES else "no number from 0 on")
    if (experts := own.get("expert_count", 0)) == 0:
        return
    if type(experts) is not int:
        refuse("expert_count", "no whole number")
    if "expert_used_count" not in own:
        raise CheckpointError(f"{file} lacks the field {architecture}expert_used_count; {ANOTHER}")
    if type(own["expert_used_count"]) is not int or not 0 < own["expert_used_count"] <= experts:
        refuse("expert_used_count", f"of {architecture}expert_count {experts}")


def follow_keys(config: PreTrainedConfig, file: Path, fields: Mapping[str, Any]) -> None:
    """Makes ``config`` say all that ``fields`` say of the architecture.

    UnsupportedModelError, which names key and value, for what it cannot say, and for keys that are unknown here;
    CheckpointError where one is missing, which would have the value of some other model.
    """
    architecture, own = _own(fields)
    missing = [keys[0] for keys in _ALWAYS if not any(key in own for key in keys)]
    missing += [] if "rope.freq_base" in own or _rope(config).get("rope_theta", _BASE) == _BASE else ["rope.freq_base"]
    if missing:
        raise CheckpointError(f"{file} lacks the field {architecture}{missing[0]}; {ANOTHER}")
    for key, names in _GIVEN.items():
        name = _name(config, names)
        if key in own and name and own[key] not in _NEUTRAL.get(key, ()) and not _is(getattr(config, name), own[key]):
            setattr(config, name, own[key])
    if config.model_type in SHARES:
        is_share = config.num_hidden_layers == SHARES[config.model_type]
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if is_share else config.head_dim
    for key, value in own.items():
        if key not in _FITTING | _STRETCHES and not _says(config, key, value, own):
            raise UnsupportedModelError(
                f"{file} has {architecture}{key} {shown(value)}, which transformers' reader leaves out; {ORIGINAL}"
            )


def _own(fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(what fields of the architecture begin with, those fields without it)."""
    architecture = f"{fields['general.architecture']}."
    own = {key.removeprefix(architecture): value for key, value in fields.items() if key.startswith(architecture)}
    return architecture, own


def _says(config: PreTrainedConfig, key: str, value: Any, own: Mapping[str, Any]) -> bool:
    """Whether ``config`` says that ``key`` is ``value``, or can be made to, or it is so without being said."""
    if (name := _name(config, _SAME.get(key, _GIVEN.get(key, ())))) and _is(getattr(config, name), value):
        return True
    head = _head(config)
    full = _rope(config)
    if key == "attention.sliding_window" and value:
        if hasattr(config, "sliding_window") and config.model_type in _WINDOWED:
            config.sliding_window = value
        return bool(value == getattr(config, "sliding_window", None) or value >= own.get("context_length", math.inf))
    if key == "rope.freq_base" and "rope_theta" in full:
        full["rope_theta"] = float(value)
        return True
    others: dict[str, Any] = {
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.scale": (getattr(config, "query_pre_attn_scalar", None) or head or 1) ** -0.5,
        "rope.dimension_count": getattr(config, "rotary_dim", None)
        or (head or 0) * (full.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1),
        "rope.dimension_sections": [*full.get("mrope_section", ()), 0, 0, 0, 0][:4],
        "rope.freq_base_swa": _rope(config, "sliding_attention").get("rope_theta"),
    }
    return _is(others.get(key), value) or any(_is(neutral, value) for neutral in _NEUTRAL.get(key, ()))


def _rope(config: PreTrainedConfig, layers: str = "full_attention") -> dict[str, Any]:
    """The rotary positions of these layers, which some models have for all."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    own: dict[str, Any] = rope.get(layers, rope)
    return own


def _head(config: PreTrainedConfig) -> int | None:
    """Channels of a head."""
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "head_dim", None)
    return width or (config.hidden_size // heads if heads else None)


def _name(config: PreTrainedConfig, names: tuple[str, ...]) -> str | None:
    """The first of ``names`` that it has a value for, or else the first that it has."""
    there = [name for name in names if hasattr(config, name)]
    return next((name for name in there if getattr(config, name) is not None), there[0] if there else None)


def _is(said: Any, value: Any) -> bool:
    """Whether both are the same number, up to the precision of files; a list in a file has one for each block."""
    if isinstance(said, str):  # what the reader made of a number
        return bool({"softmax": 1, "sigmoid": 2}.get(said) == value)
    if isinstance(value, list) and not isinstance(said, list):
        return bool(value) and all(_is(said, each) or each == 0 for each in value)
    if isinstance(said, int | float) and isinstance(value, int | float):
        return math.isclose(said, value, rel_tol=1e-6)
    return bool(said == value)


def stretch(config: PreTrainedConfig, file: Path, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Gives ``config`` the stretched positions of ``file``, which the reader does not take from all files.

    ``tensors`` are those of factors. UnsupportedModelError where they are unknown here.
    """
    own = f"{fields['general.architecture']}.rope."
    kind = fields.get(f"{own}scaling.type")
    factor = fields.get(f"{own}scaling.factor", 0) or fields.get(f"{own}scale_linear", 0) or 1
    rope = config.rope_parameters if isinstance(getattr(config, "rope_parameters", None), dict) else {}
    is_linear = kind in (None, "linear") and factor != 1
    if (kind in (None, "none") and not (tensors or is_linear)) or rope.get("rope_type", "default") != "default":
        return
    factors = tensors.get("rope_freqs.weight", torch.zeros(1)).float()
    if is_linear and not tensors and "rope_theta" in rope and factor > 0:
        config.rope_parameters = {**rope, "rope_type": "linear", "factor": float(factor)}
        return
    for candidate in [{"rope_type": "linear", "factor": float(factors[0])}, *_STRETCHED] if factors.any() else []:
        if is_linear or "rope_theta" not in rope:  # one of another kind, or both
            break
        stretched = copy.deepcopy(config)
        stretched.rope_parameters = {**rope, **candidate}
        scaled, _ = ROPE_INIT_FUNCTIONS[str(candidate["rope_type"])](stretched, torch.device("cpu"))
        width = 2 * len(scaled)
        plain = rope["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
        if torch.allclose((plain / scaled.double()).float(), factors, rtol=1e-4):
            config.rope_parameters = stretched.rope_parameters
            return
    raise UnsupportedModelError(
        f"{file} has stretched rotary positions ({kind or ', '.join(tensors)}) that transformers' reader leaves out; "
        f"{ORIGINAL}"
    )
