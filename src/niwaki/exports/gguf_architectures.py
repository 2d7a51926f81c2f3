"""What llama.cpp computes of each family: the tensors it takes, and what config.json has to say as it has no other way.

A key of config.json is written to the file, cannot change logits, or has the one value that llama.cpp computes. All
others that transformers knows must have their default there, so that what nobody thought of is refused.
"""

import dataclasses
import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import CheckpointError, UnsupportedModelError, shown
from niwaki.models.gguf import SHARES
from niwaki.models.layout import Matrix
from niwaki.models.streamed import StreamedModel
from niwaki.models.structure import refusals

#: By a parameter's name in the model (after its block's), its name in the file, and its shape in the names of
#: :func:`sizes`. A parameter of all experts can have several names, each of an equal part of its rows.
Rows = dict[str, tuple[str, tuple[str, ...]]]

_HEAD = "lm_head.weight"
_ENDS: Rows = {
    "embed_tokens.weight": ("token_embd.weight", ("vocabulary", "width")),
    _HEAD: ("output.weight", ("vocabulary", "width")),
}
_WHOLE: Rows = {**_ENDS, "norm.weight": ("output_norm.weight", ("width",))}
#: Of models that llama.cpp gives no head of its own.
_HEADLESS = {key: row for key, row in _WHOLE.items() if key != _HEAD}
_QKV: Rows = {
    "self_attn.q_proj.weight": ("attn_q.weight", ("queries", "width")),
    "self_attn.k_proj.weight": ("attn_k.weight", ("keys", "width")),
    "self_attn.v_proj.weight": ("attn_v.weight", ("keys", "width")),
}
_PROJECTIONS: Rows = {**_QKV, "self_attn.o_proj.weight": ("attn_output.weight", ("width", "queries"))}
_NORM: Rows = {"input_layernorm.weight": ("attn_norm.weight", ("width",))}
_NORMS: Rows = {**_NORM, "post_attention_layernorm.weight": ("ffn_norm.weight", ("width",))}
_ATTENTION: Rows = _NORMS | _PROJECTIONS
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
#: Norms of what attention and MLP give, as Gemma and OLMo have them.
_AFTER: Rows = {
    "post_attention_layernorm.weight": ("post_attention_norm.weight", ("width",)),
    "post_feedforward_layernorm.weight": ("post_ffw_norm.weight", ("width",)),
}
_AROUND: Rows = {**_NORM, **_AFTER, "pre_feedforward_layernorm.weight": ("ffn_norm.weight", ("width",))}
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
#: Where gate and up are one matrix, there too.
_JOINED_MLP: Rows = {
    "mlp.gate_up_proj.weight": ("ffn_up.weight", ("both", "width")),
    "mlp.down_proj.weight": ("ffn_down.weight", ("width", "neurons")),
}


def _experts(place: str, router: str) -> Rows:
    return {
        f"{place}.{router}.weight": ("ffn_gate_inp.weight", ("experts", "width")),
        f"{place}.experts.gate_up_proj": ("ffn_gate_exps.weight ffn_up_exps.weight", ("expert", "width")),
        f"{place}.experts.down_proj": ("ffn_down_exps.weight", ("width", "expert")),
    }


_EXPERTS = _experts("mlp", "gate")
_SHARED_EXPERT: Rows = {
    "mlp.shared_expert.gate_proj.weight": ("ffn_gate_shexp.weight", ("shared", "width")),
    "mlp.shared_expert.up_proj.weight": ("ffn_up_shexp.weight", ("shared", "width")),
    "mlp.shared_expert.down_proj.weight": ("ffn_down_shexp.weight", ("width", "shared")),
    "mlp.shared_expert_gate.weight": ("ffn_gate_inp_shexp.weight", ("one", "width")),
}
_GPT_OSS: Rows = {
    **_NORM,
    "post_attention_layernorm.weight": ("post_attention_norm.weight", ("width",)),
    **_PROJECTIONS,
    **_BIASES,
    **_LAST_BIAS,
    "self_attn.sinks": ("attn_sinks.weight", ("heads",)),
    **_experts("mlp", "router"),
    "mlp.router.bias": ("ffn_gate_inp.bias", ("experts",)),
    "mlp.experts.gate_up_proj_bias": ("ffn_gate_exps.bias ffn_up_exps.bias", ("expert",)),
    "mlp.experts.down_proj_bias": ("ffn_down_exps.bias", ("width",)),
}
_LFM2: Rows = {
    "operator_norm.weight": ("attn_norm.weight", ("width",)),
    "ffn_norm.weight": ("ffn_norm.weight", ("width",)),
    "feed_forward.w1.weight": ("ffn_gate.weight", ("neurons", "width")),
    "feed_forward.w3.weight": ("ffn_up.weight", ("neurons", "width")),
    "feed_forward.w2.weight": ("ffn_down.weight", ("width", "neurons")),
}
_LFM2_ATTENTION: Rows = {
    **_QKV,
    "self_attn.out_proj.weight": ("attn_output.weight", ("width", "queries")),
    "self_attn.q_layernorm.weight": ("attn_q_norm.weight", ("head",)),
    "self_attn.k_layernorm.weight": ("attn_k_norm.weight", ("head",)),
}
_LFM2_CONVOLUTION: Rows = {
    "conv.conv.weight": ("shortconv.conv.weight", ("width", "cache")),
    "conv.in_proj.weight": ("shortconv.in_proj.weight", ("triple", "width")),
    "conv.out_proj.weight": ("shortconv.out_proj.weight", ("width", "width")),
}
_STARCODER2: Rows = {
    **_ATTENTION,
    **_BIASES,
    **_LAST_BIAS,
    "input_layernorm.bias": ("attn_norm.bias", ("width",)),
    "post_attention_layernorm.bias": ("ffn_norm.bias", ("width",)),
    "mlp.c_fc.weight": ("ffn_up.weight", ("neurons", "width")),
    "mlp.c_fc.bias": ("ffn_up.bias", ("neurons",)),
    "mlp.c_proj.weight": ("ffn_down.weight", ("width", "neurons")),
    "mlp.c_proj.bias": ("ffn_down.bias", ("width",)),
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
    #: More tensors of a block, by its kind in ``layer_types``, where kinds differ in that. Without attention there are
    #: no keys.
    kinds: dict[str, Rows] = field(default_factory=dict)
    whole: Rows = field(default_factory=_WHOLE.copy)
    #: By the method of a ``GGUFWriter`` that takes it, the key of config.json of a number.
    numbers: dict[str, str] = field(default_factory=lambda: {"add_layer_norm_rms_eps": "rms_norm_eps"})
    #: Kinds of stretched rotary positions that it has.
    stretches: tuple[str, ...] = ("linear", "yarn")
    #: Whether rotary positions turn neighbours there, where transformers turns halves of a head.
    neighbours: bool = False
    #: Of how many channels of a head rotary positions can be a share.
    partial: bool = False
    #: Each so many-th block sees all where others see a window, if no key says otherwise; 0 where it has no windows, so
    #: that the context is no longer than that.
    period: int = 0
    #: Whether positions can have another base where a window is seen.
    two_bases: bool = False
    #: Whether files have to say what the window is, or that there is none (0), although llama.cpp leaves it out now.
    says_window: bool = False
    #: Each so many-th block has no positions.
    no_positions: int = 0
    #: What norms add to their weights, which are stored without it.
    added: float = 0.0
    #: Whether the parts of experts' parameters are in turns, row by row.
    in_turns: bool = False
    #: Whether all heads together have to be as wide as the hidden states.
    square: bool = False

    @property
    def is_mixture(self) -> bool:
        """Whether its blocks have experts."""
        return any(".experts." in key for key in self.block)


#: SiLU, by both of its names.
_SILU = {"hidden_act": ("silu", "swish")}
_NO_BIAS = {**_SILU, "attention_bias": (False,)}
_UNTIED = {"tie_word_embeddings": (False,)}
_FACTORS = ("linear", "yarn", "llama3")
_GEMMA = {"use_bidirectional_attention": (None, False), "tie_word_embeddings": (True,)}
_RMS = {"add_layer_norm_rms_eps": "rms_norm_eps"}
_GRANITE = {
    **_RMS,
    "add_attention_scale": "attention_multiplier",
    "add_embedding_scale": "embedding_multiplier",
    "add_residual_scale": "residual_multiplier",
    "add_logit_scale": "logits_scaling",
}
_FINAL_CAP = {"add_final_logit_softcapping": "final_logit_softcapping"}
ARCHITECTURES = {
    "llama": Architecture(
        "LLAMA",
        _ATTENTION | _MLP,
        {"attention_bias": _BIASES | _LAST_BIAS, "mlp_bias": _MLP_BIASES},
        _SILU,
        stretches=_FACTORS,
        neighbours=True,
    ),
    "mistral": Architecture("LLAMA", _ATTENTION | _MLP, fixed=_SILU, stretches=_FACTORS, neighbours=True),
    "ministral3": Architecture("MISTRAL3", _ATTENTION | _MLP, fixed=_SILU, stretches=("yarn",), neighbours=True),
    "mixtral": Architecture("LLAMA", _ATTENTION | _EXPERTS, fixed=_SILU, stretches=_FACTORS, neighbours=True),
    "smollm3": Architecture("SMOLLM3", _ATTENTION | _MLP, fixed=_SILU, neighbours=True, no_positions=4),
    "granite": Architecture(
        "GRANITE",
        _ATTENTION | _MLP,
        {"attention_bias": _BIASES | _LAST_BIAS, "mlp_bias": _MLP_BIASES},
        _SILU,
        numbers=_GRANITE,
        stretches=_FACTORS,
        neighbours=True,
    ),
    "granitemoe": Architecture(
        "GRANITE_MOE",
        _ATTENTION | _experts("block_sparse_moe", "router"),
        fixed=_SILU,
        numbers=_GRANITE,
        stretches=_FACTORS,
        neighbours=True,
    ),
    "qwen2": Architecture("QWEN2", _ATTENTION | _BIASES | _MLP, fixed=_SILU, square=True),
    "qwen2_moe": Architecture(
        "QWEN2MOE",
        _ATTENTION | _BIASES | _EXPERTS | _SHARED_EXPERT,
        fixed={**_SILU, **_UNTIED, "mlp_only_layers": ([], None)},
        square=True,
    ),
    "qwen3": Architecture("QWEN3", _ATTENTION | _HEAD_NORMS | _MLP, fixed=_NO_BIAS),
    "qwen3_moe": Architecture(
        "QWEN3MOE",
        _ATTENTION | _HEAD_NORMS | _EXPERTS,
        fixed={**_NO_BIAS, "norm_topk_prob": (True,), "decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
    ),
    "gemma": Architecture("GEMMA", _ATTENTION | _MLP, fixed=_GEMMA, whole=_HEADLESS, added=1),
    "gemma2": Architecture(
        "GEMMA2",
        _AROUND | _PROJECTIONS | _MLP,
        fixed=_GEMMA,
        whole=_HEADLESS,
        numbers={**_RMS, **_FINAL_CAP, "add_attn_logit_softcapping": "attn_logit_softcapping"},
        stretches=("linear",),
        period=2,
        added=1,
    ),
    "gemma3_text": Architecture(
        "GEMMA3",
        _AROUND | _PROJECTIONS | _HEAD_NORMS | _MLP,
        fixed={"use_bidirectional_attention": (None, False)},
        numbers=_RMS | _FINAL_CAP,
        stretches=("linear",),
        period=6,
        two_bases=True,
        added=1,
    ),
    "phi3": Architecture(
        "PHI3",
        {
            **_NORMS,
            "self_attn.qkv_proj.weight": ("attn_qkv.weight", ("joined", "width")),
            "self_attn.o_proj.weight": ("attn_output.weight", ("width", "queries")),
            **_JOINED_MLP,
        },
        fixed=_SILU,
        stretches=("longrope",),
        says_window=True,
        partial=True,
        square=True,
    ),
    "olmo2": Architecture(
        "OLMO2",
        {
            **_AFTER,
            **_PROJECTIONS,
            "self_attn.q_norm.weight": ("attn_q_norm.weight", ("queries",)),
            "self_attn.k_norm.weight": ("attn_k_norm.weight", ("keys",)),
            **_MLP,
        },
        fixed=_NO_BIAS | _UNTIED,
        square=True,
    ),
    "glm4": Architecture(
        "GLM4",
        {
            **_ATTENTION,
            "post_self_attn_layernorm.weight": ("post_attention_norm.weight", ("width",)),
            "post_mlp_layernorm.weight": ("post_ffw_norm.weight", ("width",)),
            **_JOINED_MLP,
        },
        {"attention_bias": _BIASES},
        _SILU,
        partial=True,
    ),
    "gpt_oss": Architecture("GPT_OSS", _GPT_OSS, fixed=_SILU | _UNTIED, period=2, in_turns=True),
    "lfm2": Architecture(
        "LFM2",
        _LFM2,
        kinds={"conv": _LFM2_CONVOLUTION, "full_attention": _LFM2_ATTENTION},
        whole={**_ENDS, "embedding_norm.weight": ("token_embd_norm.weight", ("width",))},
        numbers={"add_layer_norm_rms_eps": "norm_eps", "add_shortconv_l_cache": "conv_L_cache"},
        square=True,
    ),
    "starcoder2": Architecture(
        "STARCODER2",
        _STARCODER2,
        whole={**_WHOLE, "norm.bias": ("output_norm.bias", ("width",))},
        numbers={"add_layer_norm_eps": "norm_epsilon"},
        square=True,
    ),
    "cohere2": Architecture(
        "COHERE2",
        _NORM | _PROJECTIONS | _MLP,
        fixed={**_NO_BIAS, "tie_word_embeddings": (True,)},
        whole=_HEADLESS,
        numbers={"add_layer_norm_eps": "layer_norm_eps", "add_logit_scale": "logit_scale"},
        stretches=(),
        period=4,
        square=True,
    ),
}
ARCHITECTURES["olmo3"] = dataclasses.replace(ARCHITECTURES["olmo2"], period=4)

#: Keys that this module reads or writes, or the tokenizer's does.
_READ = {
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "num_experts", "num_local_experts", "num_experts_per_tok"),
    *("shared_expert_intermediate_size", "conv_L_cache", "query_pre_attn_scalar", "no_rope_layers"),
    *("max_position_embeddings", "original_max_position_embeddings", "rope_parameters", "tie_word_embeddings"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    *("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}
#: Keys that change no logits, or none any more.
_HARMLESS = {
    *("architectures", "dtype", "transformers_version", "id2label", "label2id", "problem_type", "initializer_range"),
    *("attention_dropout", "router_aux_loss_coef", "output_router_logits", "output_hidden_states", "return_dict"),
    *("resid_pdrop", "embd_pdrop", "residual_dropout", "embedding_dropout", "router_jitter_noise"),
    *("use_cache", "pretraining_tp", "chunk_size_feed_forward", "no_rope_layer_interval", "full_attn_idxs"),
}
#: What transformers asks every configuration for, whether its class has it or not.
_ASKED = {"is_causal": True, "attention_chunk_size": None, "kv_sharing_modes": None}
_MOST = 512  # layers, and experts, that llama.cpp has room for
#: The turns within the original context below and above which yarn changes frequencies, which llama.cpp does not read.
_YARN = (32, 1)


@dataclass(frozen=True)
class Source:
    """A tensor of the model, or those of its ``rows`` that are meant."""

    key: str
    index: int | None = None  # in the tensor, if that has all experts
    transposed: bool = False
    rows: slice = field(default_factory=lambda: slice(None))

    @property
    def entry(self) -> tuple[str, int | None]:
        """What it is in the checkpoint."""
        return self.key, self.index

    def read(self, checkpoint: Checkpoint) -> torch.Tensor:
        """The whole tensor, (out, in), in float32."""
        value = checkpoint.read(self.key, self.index).float()
        return value.T if self.transposed else value


@dataclass
class ExportedTensor:
    """A tensor of the file, made of one of the model, or of one for each expert."""

    name: str
    sources: list[Source]
    shape: tuple[int, ...]  # of each of them
    kind: str = "F32"
    heads: int = 0  # whose rows change places; 0 where none do
    added: float = 0.0

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """That of the tensor in the file."""
        return (len(self.sources), *self.shape) if "_exps." in self.name else self.shape


def check_configuration(config: PreTrainedConfig, architecture: Architecture, path: Path) -> None:
    """UnsupportedModelError where llama.cpp would compute something else than transformers."""
    if getattr(config, "is_heterogeneous", False):  # then asking for what differs raises
        layers = config.to_dict().get("per_layer_config")
        raise _unsupported(path, f"per_layer_config is {shown(layers)}", "llama.cpp computes all layers alike")
    usual = type(config)()
    taken = _READ | _HARMLESS | architecture.optional.keys() | {*architecture.numbers.values()}
    for key, default in {**{one.name: getattr(usual, one.name) for one in dataclasses.fields(usual)}, **_ASKED}.items():
        value = getattr(config, key, default)
        known = architecture.fixed.get(key, (default,))
        if (key in architecture.fixed or key not in taken) and value not in known:
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
    if layers := SHARES.get(config.model_type):
        share = config.hidden_size // heads if config.num_hidden_layers == layers else size["head"]
        if config.query_pre_attn_scalar != share:
            what = f"query_pre_attn_scalar is {config.query_pre_attn_scalar}"
            raise _unsupported(path, what, f"llama.cpp computes {config.num_hidden_layers} layers as with {share}")
    _check_layers(config, architecture, path)


def _check_layers(config: PreTrainedConfig, architecture: Architecture, path: Path) -> None:
    """UnsupportedModelError for kinds of blocks that llama.cpp does not have, or not there."""
    types = getattr(config, "layer_types", None) or []
    known = architecture.kinds.keys() or {"full_attention", "sliding_attention"}
    if {*types} - known or ("sliding_attention" in types and getattr(config, "sliding_window", None) is None):
        raise _unsupported(path, f"layer_types are {sorted({*types})}", f"llama.cpp has {' and '.join(sorted(known))}")
    if every := architecture.no_positions:
        wanted = [int((i + 1) % every != 0) for i in range(config.num_hidden_layers)]
        if config.no_rope_layers != wanted:
            what = f"no_rope_layers is {shown(config.no_rope_layers)}"
            raise _unsupported(path, what, f"llama.cpp leaves out the positions of each {every}th block")


def _check_numbers(config: PreTrainedConfig, architecture: Architecture, path: Path) -> None:
    """UnsupportedModelError for numbers that transformers has not looked at, or that llama.cpp has no room for."""
    experts = ["num_experts"] if architecture.is_mixture else []
    for key in ("head_dim", "sliding_window", *experts):
        value = _expert_count(config) if key == "num_experts" else getattr(config, key, None)
        if type(value) is not int and (value is not None or key in experts):
            name = config.attribute_map.get(key, key)
            raise _unsupported(path, f"{name} is {shown(value)}", "it must be a whole number")
    counts = {"num_hidden_layers": config.num_hidden_layers, **{key: _expert_count(config) for key in experts}}
    for key, count in counts.items():
        if count > _MOST:
            raise _unsupported(path, f"{key} is {count}", f"llama.cpp takes no more than {_MOST}")
    if experts and config.num_experts_per_tok > counts["num_experts"]:
        what = f"num_experts_per_tok is {config.num_experts_per_tok}"
        raise _unsupported(path, what, f"num_experts is {counts['num_experts']}, and no token can have more")


def _expert_count(config: PreTrainedConfig) -> Any:
    """How many experts config.json says that there are, whatever it is."""
    names = {one.name for one in dataclasses.fields(config)} | config.attribute_map.keys()
    return getattr(config, "num_experts" if "num_experts" in names else "num_local_experts")


def sizes(config: PreTrainedConfig, architecture: Architecture) -> dict[str, int]:
    """The sizes that shapes are made of."""
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    neurons, own = config.intermediate_size, {one.name: getattr(config, one.name) for one in dataclasses.fields(config)}
    if getattr(config, "block_auto_adjust_ff_dim", False):
        neurons = int(config.block_ffn_dim_multiplier * int(2 * neurons / 3))
        neurons = config.block_multiple_of * math.ceil(neurons / config.block_multiple_of)
    return {
        "one": 1,
        "vocabulary": config.vocab_size,
        "width": config.hidden_size,
        "triple": 3 * config.hidden_size,
        "head": head,
        "heads": heads,
        "queries": heads * head,
        "keys": keys * head,
        "joined": (heads + 2 * keys) * head,
        "neurons": neurons,
        "both": 2 * neurons,
        "experts": _expert_count(config) if architecture.is_mixture else 0,
        "expert": own.get("moe_intermediate_size", neurons) if architecture.is_mixture else 0,
        "shared": own.get("shared_expert_intermediate_size", 0),
        "cache": own.get("conv_L_cache", 0),
    }


def find_tensors(model: StreamedModel, config: PreTrainedConfig, architecture: Architecture) -> list[ExportedTensor]:
    """What the file has.

    CheckpointError where a tensor is missing or has another shape than config.json says; UnsupportedModelError where
    llama.cpp would not take it.
    """
    size, found, layout = sizes(config, architecture), list[ExportedTensor](), model.layout
    above = model.places[0].removesuffix("layers.0.")
    own_head = bool(layout.keys(_HEAD)) and _HEAD not in layout.ties
    if own_head and _HEAD not in architecture.whole:
        raise _unsupported(model.checkpoint.path, f"its files have {_HEAD!r}", "llama.cpp takes the embeddings for it")
    for key, row in architecture.whole.items():
        if key != _HEAD or own_head:
            found += _tensors(model, key if key == _HEAD else above + key, row, architecture, size, {})
    for layer, place in enumerate(model.places):
        rows = dict(architecture.block)
        for key, more in architecture.optional.items():
            rows |= more if getattr(config, key) else {}
        rows |= architecture.kinds[config.layer_types[layer]] if architecture.kinds else {}
        experts = defaultdict[tuple[str, int | None], list[Matrix]](list)
        for matrix in model.matrices(layer):
            experts[place + matrix.parameter, matrix.expert].append(matrix)
        for key, (names, shape) in rows.items():
            row = " ".join(f"blk.{layer}.{name}" for name in names.split()), shape
            found += _tensors(model, place + key, row, architecture, size, experts)
    return found


def _tensors(
    model: StreamedModel,
    name: str,
    row: tuple[str, tuple[str, ...]],
    architecture: Architecture,
    size: dict[str, int],
    experts: dict[tuple[str, int | None], list[Matrix]],
) -> list[ExportedTensor]:
    """Those of the file that the parameter ``name`` is, by its ``row``."""
    names, shape = row[0].split(), tuple(size[one] for one in row[1])
    keys, parts, found = model.layout.keys(name), len(names), list[ExportedTensor]()
    if not keys:
        raise CheckpointError(f"{model.checkpoint.path} lacks the tensor {name!r}; transformers would make one up")
    for part, stored in enumerate(names):
        rows = slice(part, None, parts) if architecture.in_turns else slice(part * shape[0], (part + 1) * shape[0])
        if ".experts." not in name:
            sources = [Source(key) for key in keys]
        elif len(shape) == 1:
            sources = [Source(keys[0], expert, rows=rows) for expert in range(size["experts"])]
        else:
            sources = []
            for expert in range(size["experts"]):
                its = sorted(experts[name, expert], key=lambda matrix: matrix.start)
                one, own = (its[part], slice(None)) if len(its) == parts else (its[0], rows)
                sources.append(Source(one.key, one.index, one.is_stored_transposed, own))
        for source in sources:
            _check_shape(model.checkpoint, source, shape)
        tensor = ExportedTensor(stored, sources, shape)
        if architecture.neighbours and row[1][0] in ("queries", "keys") and ".attn_v." not in stored:
            tensor.heads = shape[0] // size["head"]
        if stored.endswith("norm.weight"):
            tensor.added = architecture.added
        found.append(tensor)
    return found


def _check_shape(checkpoint: Checkpoint, source: Source, shape: tuple[int, ...]) -> None:
    """CheckpointError where a tensor has not the ``shape`` that config.json says, but for dimensions of 1."""
    there = checkpoint.entries[source.key].shape[0 if source.index is None else 1 :]
    there = there[::-1] if source.transposed else there
    rows = len(range(*source.rows.indices(there[0])))
    if [n for n in (rows, *there[1:]) if n != 1] != [n for n in shape if n != 1]:
        raise CheckpointError(f"{checkpoint.path}: {source.key!r} has the shape {there}, by config.json it is {shape}")


def _is_sliding(config: PreTrainedConfig) -> list[bool]:
    """Of each block, whether it sees a window only."""
    types = getattr(config, "layer_types", None)
    if types is None:
        return [getattr(config, "sliding_window", None) is not None] * config.num_hidden_layers
    return [each == "sliding_attention" for each in types]


def context_length(config: PreTrainedConfig, architecture: Architecture) -> tuple[int, str]:
    """(tokens up to which llama.cpp computes the same, what there is to say of that, if anything)."""
    length, window = config.max_position_embeddings, getattr(config, "sliding_window", None)
    if window is not None and window < length and not architecture.period and any(_is_sliding(config)):
        return window, (
            f"the context in the file is {window:,} tokens, the model's sliding window, of {length:,}: with more "
            "llama.cpp would see all of them"
        )
    rope = _rope(config)
    short = rope.get("original_max_position_embeddings", length)
    if rope["rope_type"] == "longrope" and short < length:
        return short, (
            f"the context in the file is {short:,} tokens of {length:,}: with more llama.cpp would stretch the "
            "positions of all texts, and not only of longer ones"
        )
    return length, ""


def numbers(config: PreTrainedConfig, architecture: Architecture, path: Path) -> dict[str, Any]:
    """What config.json says, by the method of a ``GGUFWriter`` that takes it.

    UnsupportedModelError for numbers that the format cannot hold.
    """
    size, theta = sizes(config, architecture), _rope(config)["rope_theta"]
    found = {
        "add_context_length": context_length(config, architecture)[0],
        "add_embedding_length": config.hidden_size,
        "add_block_count": config.num_hidden_layers,
        "add_feed_forward_length": size["neurons"],
        "add_head_count": config.num_attention_heads,
        "add_head_count_kv": config.num_key_value_heads,
        "add_key_length": size["head"],
        "add_value_length": size["head"],
        "add_rope_dimension_count": _rotary(config, architecture),
        "add_vocab_size": config.vocab_size,
        "add_rope_freq_base": theta if type(theta) is not int else float(theta),
    }
    if architecture.is_mixture:
        found["add_expert_count"] = size["experts"]
        found["add_expert_used_count"] = config.num_experts_per_tok
        found["add_expert_feed_forward_length"] = size["expert"]
    if size["shared"]:
        found["add_expert_shared_feed_forward_length"] = size["shared"]
    if local := config.rope_parameters.get("sliding_attention"):
        found["add_rope_freq_base_swa"] = local["rope_theta"]
    usual = type(config)()
    for add, key in architecture.numbers.items():
        if getattr(config, key) is not None or getattr(usual, key) is not None:
            found[add] = getattr(config, key)
    for add, number in found.items():
        key = architecture.numbers.get(add, "rope_theta" if "rope_freq" in add else "the size")
        if type(number) is int and 0 < number < 2**31:
            continue
        if type(number) is int:
            raise _unsupported(path, f"{key} is {number}", "the format holds numbers from 1 to 2,147,483,647")
        if not isinstance(number, float) or not 1e-30 < number < 1e30:
            raise _unsupported(path, f"{key} is {number}", "llama.cpp has it as a number of 32 bits")
    if architecture.kinds:
        has_keys = ("self_attn.k_proj.weight" in architecture.kinds[kind] for kind in config.layer_types)
        found["add_head_count_kv"] = [config.num_key_value_heads * there for there in has_keys]
    if every := architecture.period:
        sliding = _is_sliding(config)
        found["add_sliding_window"] = getattr(config, "sliding_window", None) or config.max_position_embeddings
        if sliding != [(i + 1) % every != 0 for i in range(len(sliding))]:
            found["add_sliding_window_pattern"] = sliding
    elif architecture.says_window:
        found["add_sliding_window"] = config.sliding_window or 0
    return found


@dataclass
class Positions:
    """How rotary positions are stretched in the file: by ``numbers``, as of :func:`numbers`, and ``tensors``.

    ``stretch`` is a name in gguf.RopeScalingType, or "".
    """

    stretch: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    note: str = ""


def stretched(config: PreTrainedConfig, architecture: Architecture, path: Path) -> Positions:
    """Those of a model; UnsupportedModelError where llama.cpp has them otherwise."""
    rope, local = _rope(config), config.rope_parameters.get("sliding_attention", {})
    kind, found = rope.get("rope_type"), Positions()
    same = {"rope_type": "default"} | ({} if architecture.two_bases else {"rope_theta": rope["rope_theta"]})
    for key, value in same.items():
        if local.get(key, value) != value:
            what = f"{key} is {local[key]!r} where a window is seen"
            raise _unsupported(path, what, f"llama.cpp computes it as with {value!r}")
    if kind == "default" and "llama_4_scaling_beta" not in rope:
        return found
    known = ", ".join((*architecture.stretches, "plain"))
    unknown = _unsupported(
        path, f"its rotary positions are of the kind {kind!r}", f"niwaki can tell llama.cpp of {known} ones only"
    )
    if kind not in architecture.stretches:
        raise unknown
    width, factor = _rotary(config, architecture), rope.get("factor")
    scaled: torch.Tensor
    with refusals(path / "config.json"):
        own = {"layer_type": "full_attention"} if "full_attention" in config.rope_parameters else {}
        scaled, attention = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **own)
        shares = {
            each: np.array(rope[f"{each}_factor"], np.float32) for each in ("long", "short") if kind == "longrope"
        }
        if kind in ("longrope", "yarn"):
            found.numbers["add_rope_scaling_orig_ctx_len"] = int(rope["original_max_position_embeddings"])
    if any(2 * count != width for count in (len(scaled), *map(len, shares.values()))):
        raise unknown
    plain = rope["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    ours = scaled.double()
    found.tensors = {f"rope_factors_{each}.weight": values for each, values in shares.items()}
    if kind == "llama3":
        found.tensors["rope_freqs.weight"] = (plain / ours).float().numpy()
    elif kind != "longrope":
        if not isinstance(factor, int | float) or factor <= 0:
            raise unknown
        found.stretch, ours = kind, plain / factor
        found.numbers["add_rope_scaling_factor"] = float(factor)
    if kind == "yarn":
        ours = _yarn(plain, ours, rope)
        attention /= 1 + 0.1 * math.log(max(1.0, found.numbers["add_rope_scaling_factor"]))
    if not math.isclose(attention, 1):
        found.numbers["add_rope_scaling_attn_factors"] = attention
    if beta := rope.get("llama_4_scaling_beta"):
        found.numbers["add_attn_temperature_scale"] = beta
    if not torch.allclose(ours, scaled.double(), rtol=1e-4):
        if rope.get("truncate", True):
            raise unknown
        found.note = (
            "llama.cpp rounds the bounds between which yarn changes frequencies to whole numbers, and this model does "
            "not: logits differ, the more the longer a text is"
        )
    return found


def _yarn(plain: torch.Tensor, stretched: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """The frequencies that llama.cpp computes: ``plain`` for what turns often within the original context."""
    width, original = 2 * len(plain), rope["original_max_position_embeddings"]
    low, high = (
        width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"])) for turns in _YARN
    )
    low, high = max(0, math.floor(low)), min(width - 1, math.ceil(high))
    share = ((torch.arange(len(plain), dtype=torch.float64) - low) / max(0.001, high - low)).clamp(0, 1)
    return stretched * share + plain * (1 - share)


def _rope(config: PreTrainedConfig) -> dict[str, Any]:
    """The rotary positions of blocks that see all, or of all blocks."""
    rope: dict[str, Any] = config.rope_parameters.get("full_attention", config.rope_parameters)
    return rope


def _rotary(config: PreTrainedConfig, architecture: Architecture) -> int:
    """How many channels of a head positions turn."""
    share = _rope(config).get("partial_rotary_factor", 1.0) if architecture.partial else 1
    return int(sizes(config, architecture)["head"] * share)


def _unsupported(path: Path, what: str, instead: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{path / 'config.json'}: {what}, which cannot be exported to GGUF: {instead}")
