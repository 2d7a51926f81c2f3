"""What llama.cpp computes of each family: the tensors it takes, and what config.json has to say as it has no other way.

A key of config.json is written to the file, cannot change logits, or has the one value that llama.cpp computes. All
others that transformers knows must have their default there, so that what nobody thought of is refused.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import CheckpointError, UnsupportedModelError, shown
from niwaki.models.structure import refusals

#: By a tensor's name in a model (after its block's), its name in the file, and its shape in the names of :func:`sizes`.
Rows = dict[str, tuple[str, tuple[str, ...]]]

_WHOLE: Rows = {
    "model.embed_tokens.weight": ("token_embd.weight", ("vocabulary", "width")),
    "model.norm.weight": ("output_norm.weight", ("width",)),
    "lm_head.weight": ("output.weight", ("vocabulary", "width")),
}
_ATTENTION: Rows = {
    "input_layernorm.weight": ("attn_norm.weight", ("width",)),
    "self_attn.q_proj.weight": ("attn_q.weight", ("queries", "width")),
    "self_attn.k_proj.weight": ("attn_k.weight", ("keys", "width")),
    "self_attn.v_proj.weight": ("attn_v.weight", ("keys", "width")),
    "self_attn.o_proj.weight": ("attn_output.weight", ("width", "queries")),
    "post_attention_layernorm.weight": ("ffn_norm.weight", ("width",)),
}
_BIASES: Rows = {
    "self_attn.q_proj.bias": ("attn_q.bias", ("queries",)),
    "self_attn.k_proj.bias": ("attn_k.bias", ("keys",)),
    "self_attn.v_proj.bias": ("attn_v.bias", ("keys",)),
}
_LAST_BIAS: Rows = {"self_attn.o_proj.bias": ("attn_output.bias", ("width",))}
_HEAD_NORMS: Rows = {
    "self_attn.q_norm.weight": ("attn_q_norm.weight", ("head",)),
    "self_attn.k_norm.weight": ("attn_k_norm.weight", ("head",)),
}
_MLP: Rows = {
    "mlp.gate_proj.weight": ("ffn_gate.weight", ("neurons", "width")),
    "mlp.up_proj.weight": ("ffn_up.weight", ("neurons", "width")),
    "mlp.down_proj.weight": ("ffn_down.weight", ("width", "neurons")),
}
_MLP_BIASES: Rows = {
    "mlp.gate_proj.bias": ("ffn_gate.bias", ("neurons",)),
    "mlp.up_proj.bias": ("ffn_up.bias", ("neurons",)),
    "mlp.down_proj.bias": ("ffn_down.bias", ("width",)),
}
#: With * for the number of the expert.
_EXPERTS: Rows = {
    "mlp.gate.weight": ("ffn_gate_inp.weight", ("experts", "width")),
    "mlp.experts.*.gate_proj.weight": ("ffn_gate_exps.weight", ("expert", "width")),
    "mlp.experts.*.up_proj.weight": ("ffn_up_exps.weight", ("expert", "width")),
    "mlp.experts.*.down_proj.weight": ("ffn_down_exps.weight", ("width", "expert")),
}


@dataclass(frozen=True)
class Architecture:
    """What llama.cpp takes for a ``model_type``."""

    name: str  # in gguf.MODEL_ARCH
    block: Rows
    #: More tensors of a block, by the key of config.json that says whether it has them.
    optional: dict[str, Rows] = field(default_factory=dict)
    #: Values of keys of config.json, of which one is what llama.cpp computes.
    fixed: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    #: Whether rotary positions turn neighbours there, where transformers turns halves of a head. Only then can the file
    #: say by what each frequency is divided.
    neighbours: bool = False
    #: Whether all heads together have to be as wide as the hidden states.
    square: bool = False

    @property
    def is_mixture(self) -> bool:
        """Whether its blocks have experts."""
        return any("*" in key for key in self.block)


#: SiLU, by both of its names.
_SILU = {"hidden_act": ("silu", "swish")}
ARCHITECTURES = {
    "llama": Architecture(
        "LLAMA",
        _ATTENTION | _MLP,
        {"attention_bias": _BIASES | _LAST_BIAS, "mlp_bias": _MLP_BIASES},
        _SILU,
        neighbours=True,
    ),
    "mistral": Architecture("LLAMA", _ATTENTION | _MLP, fixed=_SILU, neighbours=True),
    "qwen2": Architecture("QWEN2", _ATTENTION | _BIASES | _MLP, fixed=_SILU, square=True),
    "qwen3": Architecture("QWEN3", _ATTENTION | _HEAD_NORMS | _MLP, fixed={**_SILU, "attention_bias": (False,)}),
    "qwen3_moe": Architecture(
        "QWEN3MOE",
        _ATTENTION | _HEAD_NORMS | _EXPERTS,
        fixed={
            **_SILU,
            "attention_bias": (False,),
            "norm_topk_prob": (True,),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([],),
        },
    ),
}

#: Keys that this module reads or writes, or the tokenizer's does.
_READ = {
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "num_experts", "num_experts_per_tok", "rms_norm_eps"),
    *("max_position_embeddings", "rope_parameters", "tie_word_embeddings"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}
#: Keys that change no logits, or none any more.
_HARMLESS = {
    *("architectures", "dtype", "transformers_version", "id2label", "label2id", "problem_type", "initializer_range"),
    *("attention_dropout", "router_aux_loss_coef", "output_router_logits", "output_hidden_states", "return_dict"),
    *("use_cache", "pretraining_tp", "chunk_size_feed_forward"),
}
#: What transformers asks every configuration for, whether its class has it or not.
_ASKED = {"is_causal": True, "attention_chunk_size": None, "kv_sharing_modes": None}
_MOST = 512  # layers, and experts, that llama.cpp has room for


@dataclass
class ExportedTensor:
    """A tensor of the file, made of one of the model, or of one for each expert."""

    name: str
    keys: list[str]
    shape: tuple[int, ...]  # of each of them
    kind: str = "F32"
    heads: int = 0  # whose rows change places; 0 where none do

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """That of the tensor in the file."""
        return (len(self.keys), *self.shape) if "_exps." in self.name else self.shape


def check_configuration(config: PreTrainedConfig, architecture: Architecture, path: Path) -> None:
    """UnsupportedModelError where llama.cpp would compute something else than transformers."""
    if getattr(config, "is_heterogeneous", False):  # then asking for what differs raises
        layers = config.to_dict().get("per_layer_config")
        raise _unsupported(path, f"per_layer_config is {shown(layers)}", "llama.cpp computes all layers alike")
    usual = type(config)()
    for key, default in {**{one.name: getattr(usual, one.name) for one in dataclasses.fields(usual)}, **_ASKED}.items():
        value = getattr(config, key, default)
        known = architecture.fixed.get(key, (default,))
        if key not in (_READ | _HARMLESS | architecture.optional.keys()) and value not in known:
            raise _unsupported(path, f"{key} is {value!r}", f"llama.cpp computes it as with {known[0]!r}")
    _check_numbers(config, architecture, path)
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    if heads < 1 or keys < 1 or heads % keys:
        raise _unsupported(path, f"it has {heads} heads, {keys} of keys", "each of keys has to serve as many")
    size = sizes(config, architecture)
    if size["head"] < 2 or size["head"] % 2:
        raise _unsupported(path, f"it has heads of {size['head']}", "positions turn pairs")
    if architecture.square and size["queries"] != config.hidden_size:
        what = f"{heads} heads of {size['head']} are not as wide as the model ({config.hidden_size})"
        raise _unsupported(path, what, f"llama.cpp takes no other {config.model_type}; keep all heads")
    types = set(getattr(config, "layer_types", None) or [])
    if types - {"full_attention", "sliding_attention"} or (
        "sliding_attention" in types and getattr(config, "sliding_window", None) is None
    ):
        raise _unsupported(path, f"layer_types are {sorted(types)}", "llama.cpp has full attention only")


def _check_numbers(config: PreTrainedConfig, architecture: Architecture, path: Path) -> None:
    """UnsupportedModelError for numbers that transformers has not looked at, or that llama.cpp has no room for."""
    experts = ["num_experts"] if architecture.is_mixture else []
    for key in ("head_dim", "sliding_window", *experts):
        value = getattr(config, key, None)
        if type(value) is not int and (value is not None or key in experts):
            name = config.attribute_map.get(key, key)
            raise _unsupported(path, f"{name} is {shown(value)}", "it must be a whole number")
    for key in ("num_hidden_layers", *experts):
        if getattr(config, key) > _MOST:
            raise _unsupported(path, f"{key} is {getattr(config, key)}", f"llama.cpp takes no more than {_MOST}")
    if experts and config.num_experts_per_tok > config.num_experts:
        what = f"num_experts_per_tok is {config.num_experts_per_tok}"
        raise _unsupported(path, what, f"num_experts is {config.num_experts}, and no token can have more")


def sizes(config: PreTrainedConfig, architecture: Architecture) -> dict[str, int]:
    """The sizes that shapes are made of."""
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    return {
        "vocabulary": config.vocab_size,
        "width": config.hidden_size,
        "head": head,
        "queries": heads * head,
        "keys": keys * head,
        "neurons": config.intermediate_size,
        "experts": config.num_experts if architecture.is_mixture else 0,
        "expert": config.moe_intermediate_size if architecture.is_mixture else 0,
    }


def find_tensors(checkpoint: Checkpoint, config: PreTrainedConfig, architecture: Architecture) -> list[ExportedTensor]:
    """What the file has.

    CheckpointError where a tensor is missing or has another shape than config.json says.
    """
    size, found = sizes(config, architecture), list[ExportedTensor]()
    rows = dict(architecture.block)
    for key, more in architecture.optional.items():
        rows |= more if getattr(config, key) else {}
    tied = config.tie_word_embeddings and "lm_head.weight" not in checkpoint.entries
    for key, (name, shape) in _WHOLE.items():
        if name != "output.weight" or not tied:
            found.append(ExportedTensor(name, [key], tuple(size[one] for one in shape)))
    for layer in range(config.num_hidden_layers):
        for key, (name, shape) in rows.items():
            count = size["experts"] if "*" in key else 1
            keys = [f"model.layers.{layer}.{key}".replace("*", str(expert)) for expert in range(count)]
            stored = ExportedTensor(f"blk.{layer}.{name}", keys, tuple(size[one] for one in shape))
            if architecture.neighbours and shape[0] in ("queries", "keys") and ".attn_v." not in stored.name:
                stored.heads = stored.shape[0] // size["head"]
            found.append(stored)
    for stored in found:
        for key in stored.keys:
            if key not in checkpoint.entries:
                raise CheckpointError(f"{checkpoint.path} lacks the tensor {key!r}; transformers would make one up")
            if checkpoint.entries[key].shape != stored.shape:
                there = checkpoint.entries[key].shape
                raise CheckpointError(
                    f"{checkpoint.path}: {key!r} has the shape {there}, by config.json it is {stored.shape}"
                )
    return found


def context_length(config: PreTrainedConfig) -> tuple[int, str]:
    """(tokens up to which llama.cpp computes the same, what there is to say of that, if anything)."""
    length, window = config.max_position_embeddings, getattr(config, "sliding_window", None)
    fields = {one.name for one in dataclasses.fields(config)}
    if "layer_types" in fields and "sliding_attention" not in config.layer_types:
        window = None
    if window is None or window >= length:
        return length, ""
    return window, (
        f"the context in the file is {window:,} tokens, the model's sliding window, of {length:,}: with more llama.cpp "
        "would see all of them"
    )


def numbers(config: PreTrainedConfig, architecture: Architecture, path: Path) -> dict[str, int | float]:
    """What config.json says, by the method of a ``GGUFWriter`` that takes it.

    UnsupportedModelError for numbers that the format cannot hold.
    """
    size = sizes(config, architecture)
    whole = {
        "add_context_length": context_length(config)[0],
        "add_embedding_length": config.hidden_size,
        "add_block_count": config.num_hidden_layers,
        "add_feed_forward_length": config.intermediate_size,
        "add_head_count": config.num_attention_heads,
        "add_head_count_kv": config.num_key_value_heads,
        "add_key_length": size["head"],
        "add_value_length": size["head"],
        "add_rope_dimension_count": size["head"],
        "add_vocab_size": config.vocab_size,
    }
    if architecture.is_mixture:
        whole["add_expert_count"] = size["experts"]
        whole["add_expert_used_count"] = config.num_experts_per_tok
        whole["add_expert_feed_forward_length"] = size["expert"]
    for number in whole.values():
        if not 0 < number < 2**31:
            raise _unsupported(path, f"it has the size {number}", "the format holds numbers from 1 to 2,147,483,647")
    theta, epsilon = config.rope_parameters["rope_theta"], config.rms_norm_eps
    for number, what in ((theta, "rope_theta"), (epsilon, "rms_norm_eps")):
        if not isinstance(number, int | float) or not 1e-30 < number < 1e30:
            raise _unsupported(path, f"{what} is {number}", "llama.cpp has it as a number of 32 bits")
    real = {"add_rope_freq_base": float(theta), "add_layer_norm_rms_eps": float(epsilon)}
    return {**{add: int(number) for add, number in whole.items()}, **real}


def rope_factors(config: PreTrainedConfig, architecture: Architecture, path: Path) -> np.ndarray[Any, Any] | None:
    """(half a head,) by what each frequency of rotary positions is divided; None where by nothing."""
    parameters = config.rope_parameters
    kind = parameters.get("rope_type")
    if kind == "default":
        return None
    unknown = _unsupported(
        path,
        f"its rotary positions are of the kind {kind!r}",
        f"niwaki can tell llama.cpp of {'linear, llama3 and ' if architecture.neighbours else ''}plain ones only",
    )
    if kind not in ("linear", "llama3") or not architecture.neighbours:
        raise unknown
    with refusals(path / "config.json"):
        scaled, attention = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    width = sizes(config, architecture)["head"]
    if attention != 1 or 2 * len(scaled) != width:
        raise unknown
    plain = parameters["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    factors: np.ndarray[Any, Any] = (plain / scaled.double()).float().numpy()
    return factors


def _unsupported(path: Path, what: str, instead: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{path / 'config.json'}: {what}, which cannot be exported to GGUF: {instead}")
