"""What llama.cpp computes of each family: the tensors it takes, and what config.json has to say as it has no other way.

A key of config.json is written to the file, cannot change logits, or has the one value that llama.cpp computes. All
others that transformers knows must have their default there, so that what nobody thought of is refused.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import UnsupportedModelError, shown
from niwaki.models.gguf import frequencies, head_width, rope_of, score_divisor
from niwaki.models.layout import Matrix
from niwaki.models.streamed import StreamedModel
from niwaki.models.structure import refusals

_HEAD = "lm_head.weight"
#: The tensors that files can have, in their order: outside of blocks, and in each block; without ".weight".
_ORDER = [
    *("token_embd", "output", "output_norm", "output_norm.bias", "token_embd_norm"),
    *("attn_norm", "post_attention_norm", "post_ffw_norm", "ffn_norm"),
    *("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output"),
    *("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias", "attn_sinks", "attn_q_norm", "attn_k_norm"),
    *("attn_norm.bias", "ffn_norm.bias", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
    *("ffn_gate_inp.bias", "ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.bias"),
    *("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "ffn_gate_inp_shexp"),
    *("ffn_gate", "ffn_up", "ffn_up.bias", "ffn_down", "ffn_down.bias"),
    *("attn_gate", "ssm_conv1d", "ssm_dt.bias", "ssm_a", "ssm_beta", "ssm_alpha", "ssm_norm", "ssm_out"),
]
#: What the package gguf knows by other names of transformers.
_KNOWN_AS = {
    "block_sparse_moe.router": "block_sparse_moe.gate",
    "attn.sinks": "attn.sinks.weight",
    "attn.dt_bias": "attn.dt_proj.bias",
}
#: Those of experts, by their parameters' names: each of several has an equal part of the rows.
_EXPERTS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}
_RMS = {"add_layer_norm_rms_eps": "rms_norm_eps"}


@dataclass(frozen=True)
class Architecture:
    """What llama.cpp takes for a ``model_type``."""

    name: str  # in gguf.MODEL_ARCH
    #: Keys of config.json that can have any value, beside those of all.
    free: tuple[str, ...] = ()
    #: Values of keys of config.json, of which one is what llama.cpp computes.
    fixed: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    #: What its blocks can be in ``layer_types``. Only those with "attention" have keys.
    kinds: tuple[str, ...] = ("full_attention", "sliding_attention")
    #: The last tensors of a block, where these are others than in ``_ORDER``.
    last: tuple[str, ...] = ()
    #: By the method of a ``GGUFWriter`` that takes it, the key of config.json of a number.
    numbers: dict[str, str] = field(default_factory=_RMS.copy)
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
    #: Whether its blocks have experts.
    is_mixture: bool = False
    #: Whether the parts of experts' parameters are in turns, row by row.
    in_turns: bool = False
    #: Whether all heads together have to be as wide as the hidden states.
    square: bool = False


_UNTIED = {"tie_word_embeddings": (False,)}
_TIED = {"tie_word_embeddings": (True,)}
_ONE_WAY = {"use_bidirectional_attention": (None, False)}
_GRANITE = {
    **_RMS,
    "add_attention_scale": "attention_multiplier",
    "add_embedding_scale": "embedding_multiplier",
    "add_residual_scale": "residual_multiplier",
    "add_logit_scale": "logits_scaling",
}
_FINAL_CAP = {"add_final_logit_softcapping": "final_logit_softcapping"}
_MISTRAL = Architecture("LLAMA", stretches=("linear", "yarn", "llama3"), neighbours=True)
_LLAMA = dataclasses.replace(
    _MISTRAL,
    free=("attention_bias", "mlp_bias"),
    last=(
        *("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias"),
        *("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"),
    ),
)
_OLMO2 = Architecture("OLMO2", fixed=_UNTIED, square=True)
ARCHITECTURES = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "ministral3": Architecture("MISTRAL3", stretches=("yarn",), neighbours=True),
    "mixtral": dataclasses.replace(_MISTRAL, is_mixture=True),
    "smollm3": Architecture("SMOLLM3", neighbours=True, no_positions=4),
    "granite": dataclasses.replace(_LLAMA, name="GRANITE", numbers=_GRANITE),
    "granitemoe": dataclasses.replace(_MISTRAL, name="GRANITE_MOE", numbers=_GRANITE, is_mixture=True),
    "qwen2": Architecture("QWEN2", square=True),
    "qwen2_moe": Architecture(
        "QWEN2MOE", fixed={**_UNTIED, "mlp_only_layers": ([], None)}, is_mixture=True, square=True
    ),
    "qwen3": Architecture("QWEN3"),
    "qwen3_moe": Architecture("QWEN3MOE", fixed={"norm_topk_prob": (True,), "mlp_only_layers": ([],)}, is_mixture=True),
    "gemma": Architecture("GEMMA", fixed=_ONE_WAY | _TIED, added=1),
    "gemma2": Architecture(
        "GEMMA2",
        fixed=_ONE_WAY | _TIED,
        numbers={**_RMS, **_FINAL_CAP, "add_attn_logit_softcapping": "attn_logit_softcapping"},
        stretches=("linear",),
        period=2,
        added=1,
    ),
    "gemma3_text": Architecture(
        "GEMMA3",
        fixed=_ONE_WAY,
        numbers=_RMS | _FINAL_CAP,
        stretches=("linear",),
        period=6,
        two_bases=True,
        added=1,
    ),
    "qwen3_5_text": Architecture(
        "QWEN35",
        free=("linear_value_head_dim",),
        fixed={"rms_norm_eps": (1e-6,)},  # which keys of linear attention have in transformers, whatever it is
        kinds=("linear_attention", "full_attention"),
        numbers={
            **_RMS,
            "add_ssm_conv_kernel": "linear_conv_kernel_dim",
            "add_ssm_state_size": "linear_key_head_dim",
            "add_ssm_group_count": "linear_num_key_heads",
            "add_ssm_time_step_rank": "linear_num_value_heads",
        },
        partial=True,
        added=1,
    ),
    "phi3": Architecture("PHI3", stretches=("longrope",), says_window=True, partial=True, square=True),
    "olmo2": _OLMO2,
    "glm4": Architecture(
        "GLM4",
        free=("attention_bias",),
        last=(
            *("post_attention_norm", "post_ffw_norm", "ffn_up", "ffn_down"),
            *("attn_q.bias", "attn_k.bias", "attn_v.bias"),
        ),
        partial=True,
    ),
    "gpt_oss": Architecture("GPT_OSS", fixed=_UNTIED, period=2, is_mixture=True, in_turns=True),
    "lfm2": Architecture(
        "LFM2",
        kinds=("conv", "full_attention"),
        last=(
            *("shortconv.conv", "shortconv.in_proj", "shortconv.out_proj"),
            *("attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm"),
        ),
        numbers={"add_layer_norm_rms_eps": "norm_eps", "add_shortconv_l_cache": "conv_L_cache"},
        square=True,
    ),
    "starcoder2": Architecture("STARCODER2", numbers={"add_layer_norm_eps": "norm_epsilon"}, square=True),
    "cohere2": Architecture(
        "COHERE2",
        fixed=_TIED,
        numbers={"add_layer_norm_eps": "layer_norm_eps", "add_logit_scale": "logit_scale"},
        stretches=(),
        period=4,
        square=True,
    ),
    "olmo3": dataclasses.replace(_OLMO2, period=4),
}

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
#: By both of its names.
_SILU = ("silu", "swish")
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
    #: Numbers of parts within parts of its rows, from ``start`` on, or of its columns: the last two change places.
    parts: tuple[int, ...] = ()
    start: int = 0
    across: bool = False
    added: float = 0.0

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the file."""
        return (len(self.sources), *self.shape) if "_exps." in self.name else self.shape

    @property
    def together(self) -> int:
        """How many numbers of a row stay beside each other."""
        return self.shape[-1] // (math.prod(self.parts) if self.across else 1)

    def ordered(self, stored: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Numbers or bytes of the model, in the order of the file."""
        rows = stored.T if self.across else stored
        if self.parts:
            last = rows[self.start :]
            last = last.reshape(*self.parts, -1).swapaxes(1, 2).reshape(last.shape)
            rows = np.concatenate([rows[: self.start], last])
        return np.ascontiguousarray(rows.T if self.across else rows)


def check_configuration(config: PreTrainedConfig, architecture: Architecture, path: Path) -> None:
    """UnsupportedModelError where llama.cpp would compute something else than transformers."""
    if getattr(config, "is_heterogeneous", False):  # then asking for what differs raises
        layers = config.to_dict().get("per_layer_config")
        raise _unsupported(path, f"per_layer_config is {shown(layers)}", "llama.cpp computes all layers alike")
    usual = type(config)()
    taken = _READ | _HARMLESS | {*architecture.free, *architecture.numbers.values()}
    for key, default in {**{one.name: getattr(usual, one.name) for one in dataclasses.fields(usual)}, **_ASKED}.items():
        value = getattr(config, key, default)
        known = architecture.fixed.get(key, _SILU if default == _SILU[0] else (default,))
        if (key in architecture.fixed or key not in taken) and value not in known:
            what = f"niwaki writes it for llama.cpp's {architecture.name}, which computes it as with {known[0]!r}"
            raise _unsupported(path, f"{key} is {value!r}", what)
    _check_numbers(config, architecture, path)
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    if heads < 1 or keys < 1 or heads % keys:
        raise _unsupported(path, f"it has {heads} heads, {keys} of keys", "each of keys has to serve as many")
    head = head_width(config)
    if head < 2 or head % 2:
        raise _unsupported(path, f"it has heads of {head}", "positions turn pairs")
    if architecture.square and heads * head != config.hidden_size:
        what = f"{heads} heads of {head} are not as wide as the model ({config.hidden_size})"
        raise _unsupported(path, what, f"llama.cpp takes no other {config.model_type}; keep all heads")
    if (divisor := score_divisor(config)) is not None and config.query_pre_attn_scalar != divisor:
        what = f"query_pre_attn_scalar is {config.query_pre_attn_scalar}"
        raise _unsupported(path, what, f"llama.cpp computes {config.num_hidden_layers} layers as with {divisor}")
    _check_layers(config, architecture, path)


def _check_layers(config: PreTrainedConfig, architecture: Architecture, path: Path) -> None:
    """UnsupportedModelError for kinds of blocks that llama.cpp does not have, or not there."""
    types = getattr(config, "layer_types", None) or []
    known = architecture.kinds
    if "linear_attention" in known:
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        width, own, thirds = config.linear_key_head_dim, config.linear_value_head_dim, _sections(config, architecture)
        if keys < 1 or values % keys or width != own:
            what = f"linear attention has {keys} heads of {width}, and {values} of {own} for values"
            raise _unsupported(path, what, "each has to serve as many for values, of its width")
        if (sections := rope_of(config).get("mrope_section", thirds)) != thirds:
            raise _unsupported(path, f"mrope_section is {shown(sections)}", f"llama.cpp computes it as with {thirds}")
    if {*types} - {*known} or ("sliding_attention" in types and getattr(config, "sliding_window", None) is None):
        raise _unsupported(path, f"layer_types are {sorted({*types})}", f"llama.cpp has {' and '.join(known)}")
    if every := architecture.no_positions:
        wanted = [int((i + 1) % every != 0) for i in range(config.num_hidden_layers)]
        if config.no_rope_layers != wanted:
            what = f"no_rope_layers is {shown(config.no_rope_layers)}"
            raise _unsupported(path, what, f"llama.cpp leaves out the positions of each {every}th block")


def _check_numbers(config: PreTrainedConfig, architecture: Architecture, path: Path) -> None:
    """UnsupportedModelError for numbers that transformers has not looked at, or that llama.cpp has no room for."""
    widths = {key: getattr(config, key, None) for key in ("head_dim", "sliding_window")}
    experts = {"num_experts": _expert_count(config)} if architecture.is_mixture else {}
    counts = {"num_hidden_layers": config.num_hidden_layers, **experts}
    for key, value in (widths | experts).items():
        if type(value) is not int and (value is not None or key in experts):
            name = config.attribute_map.get(key, key)
            raise _unsupported(path, f"{name} is {shown(value)}", "it must be a whole number")
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


def _own(config: PreTrainedConfig, key: str, without: int) -> int:
    """What config.json says of a ``key`` that the family's class has; ``without`` if it has none."""
    value: int = getattr(config, key) if key in {one.name for one in dataclasses.fields(config)} else without
    return value


def find_tensors(
    model: StreamedModel,
    config: PreTrainedConfig,
    architecture: Architecture,
    name_of: Callable[[str, tuple[str, ...]], str | None],
) -> list[ExportedTensor]:
    """What the file has; ``name_of`` is that of a map of names of the package gguf.

    UnsupportedModelError where llama.cpp would not take a tensor.
    """
    layout, path, found = model.layout, model.checkpoint.path, dict[tuple[int, int], ExportedTensor]()
    order = [*(stem for stem in _ORDER if stem not in architecture.last), *architecture.last]
    above = model.places[0].removesuffix("layers.0.")
    own_head = bool(layout.keys(_HEAD)) and _HEAD not in layout.ties
    experts = defaultdict[tuple[str, int | None], list[Matrix]](list)
    for matrix in model.matrices():
        experts[model.places[matrix.block] + matrix.parameter, matrix.expert].append(matrix)
    for name, value in model.model.named_parameters(remove_duplicate=False):
        if not (own_head if name == _HEAD else name.startswith(above)):
            continue
        keys, plain = layout.keys(name), name if name == _HEAD else f"model.{name.removeprefix(above)}"
        block = int(plain.split(".")[2]) if ".layers." in plain else -1
        if ".experts." in name:
            sources = [sorted(experts[name, i], key=lambda matrix: matrix.start) for i in range(_expert_count(config))]
            tensors = _of_experts(f"blk.{block}.", name.rpartition(".")[2], keys[0], sources, config, architecture)
        else:
            for ours, known in _KNOWN_AS.items():
                plain = plain.replace(ours, known)
            shape = tuple(value.squeeze(1).shape if value.dim() == 3 else value.shape)
            tensors = [ExportedTensor(name_of(plain, (".weight", ".bias")) or "", [Source(keys[0])], shape)]
        for tensor in tensors:
            stem = tensor.name.removeprefix(f"blk.{block}.").removesuffix(".weight")
            if stem not in order or not (len(keys) == 1 or ".experts." in name):
                why = "llama.cpp takes the embeddings for it" if name == _HEAD else "llama.cpp has no such tensor"
                raise _unsupported(path, f"its files have {keys[0]!r}", why)
            if architecture.neighbours and stem.removesuffix(".bias") in ("attn_q", "attn_k"):
                tensor.parts = (tensor.shape[0] // head_width(config), 2, head_width(config) // 2)
            if ".linear_attn." in name and stem != "ssm_norm":
                keys_of, values = config.linear_num_key_heads, config.linear_num_value_heads
                tensor.parts, tensor.across = (1, keys_of, values // keys_of), stem == "ssm_out"
                is_joined = stem in ("attn_qkv", "ssm_conv1d")
                tensor.start = 2 * keys_of * config.linear_key_head_dim if is_joined else 0
            if stem.endswith("norm") and stem != "ssm_norm":
                tensor.added = architecture.added
            found[block, order.index(stem)] = tensor
    return [found[place] for place in sorted(found)]


def _of_experts(
    place: str,
    parameter: str,
    key: str,
    experts: list[list[Matrix]],
    config: PreTrainedConfig,
    architecture: Architecture,
) -> list[ExportedTensor]:
    """The tensors of the file that a ``parameter`` of all ``experts`` is; a bias is one tensor, ``key``, in all."""
    stems, is_bias = _EXPERTS[parameter.removesuffix("_bias")], parameter.endswith("_bias")
    shape = (_own(config, "moe_intermediate_size", config.intermediate_size), config.hidden_size)
    shape = shape[::-1] if len(stems) == 1 else shape
    found = []
    for part, stem in enumerate(stems):
        rows = slice(part * shape[0], (part + 1) * shape[0])
        rows = slice(part, None, len(stems)) if architecture.in_turns else rows
        sources = []
        for expert, its in enumerate(experts):
            if is_bias:
                sources.append(Source(key, expert, rows=rows))
            elif len(its) == len(stems):
                sources.append(Source(its[part].key, its[part].index, its[part].is_stored_transposed))
            else:
                sources.append(Source(its[0].key, its[0].index, its[0].is_stored_transposed, rows))
        name = f"{place}{stem}.{'bias' if is_bias else 'weight'}"
        found.append(ExportedTensor(name, sources, shape[:1] if is_bias else shape))
    return found


def _is_sliding(config: PreTrainedConfig) -> list[bool]:
    """Whether each block sees a window only."""
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
    rope = rope_of(config)
    short = rope.get("original_max_position_embeddings", length)
    if rope["rope_type"] == "longrope" and short < length:
        return short, (
            f"the context in the file is {short:,} tokens of {length:,}: with more llama.cpp would stretch the "
            "positions of all texts, and not only of longer ones"
        )
    return length, ""


def numbers(config: PreTrainedConfig, architecture: Architecture, path: Path) -> dict[str, Any]:
    """What config.json says, by the method of a ``GGUFWriter`` that takes it, or by the key of a list.

    UnsupportedModelError for numbers that the format cannot hold.
    """
    head, theta, neurons = head_width(config), rope_of(config)["rope_theta"], config.intermediate_size
    if getattr(config, "block_auto_adjust_ff_dim", False):
        neurons = int(config.block_ffn_dim_multiplier * int(2 * neurons / 3))
        neurons = config.block_multiple_of * math.ceil(neurons / config.block_multiple_of)
    found = {
        "add_context_length": context_length(config, architecture)[0],
        "add_embedding_length": config.hidden_size,
        "add_block_count": config.num_hidden_layers,
        "add_feed_forward_length": neurons,
        "add_head_count": config.num_attention_heads,
        "add_head_count_kv": config.num_key_value_heads,
        "add_key_length": head,
        "add_value_length": head,
        "add_rope_dimension_count": _rotary(config, architecture),
        "add_vocab_size": config.vocab_size,
        "add_rope_freq_base": theta if type(theta) is not int else float(theta),
    }
    if architecture.is_mixture:
        found["add_expert_count"] = _expert_count(config)
        found["add_expert_used_count"] = config.num_experts_per_tok
        found["add_expert_feed_forward_length"] = _own(config, "moe_intermediate_size", config.intermediate_size)
    if has_linear := "linear_attention" in architecture.kinds:
        found["add_ssm_inner_size"] = config.linear_num_value_heads * config.linear_value_head_dim
    if shared := _own(config, "shared_expert_intermediate_size", 0):
        found["add_expert_shared_feed_forward_length"] = shared
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
    if has_linear:
        found["add_full_attention_interval"] = 4  # which the list is instead of, where it is known
        found["attention.recurrent_layers"] = [kind == "linear_attention" for kind in config.layer_types]
        found["add_rope_dimension_sections"] = [*_sections(config, architecture), 0]
    if "conv" in architecture.kinds:
        found["add_head_count_kv"] = [config.num_key_value_heads * ("attention" in kind) for kind in config.layer_types]
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
    """What the file says of a model's positions; UnsupportedModelError where llama.cpp computes them otherwise."""
    rope, local = rope_of(config), config.rope_parameters.get("sliding_attention", {})
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
    with refusals(path / "config.json"):
        layers = "full_attention" if "full_attention" in config.rope_parameters else None
        plain, scaled, attention = frequencies(config, layers)
        shares = {
            each: np.array(rope[f"{each}_factor"], np.float32) for each in ("long", "short") if kind == "longrope"
        }
        if kind in ("longrope", "yarn"):
            found.numbers["add_rope_scaling_orig_ctx_len"] = int(rope["original_max_position_embeddings"])
    if any(2 * count != width for count in (len(scaled), *map(len, shares.values()))):
        raise unknown
    ours = scaled
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
    if not torch.allclose(ours, scaled, rtol=1e-4):
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


def _rotary(config: PreTrainedConfig, architecture: Architecture) -> int:
    """How many channels of a head positions turn."""
    share = rope_of(config).get("partial_rotary_factor", 1.0) if architecture.partial else 1
    return int(head_width(config) * share)


def _sections(config: PreTrainedConfig, architecture: Architecture) -> list[int]:
    """How many of these, in pairs, are turned by positions in time, height and width, which in texts are the same."""
    return [(_rotary(config, architecture) // 2 + i) // 3 for i in (2, 1, 0)]


def _unsupported(path: Path, what: str, instead: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{path / 'config.json'}: {what}, which cannot be exported to GGUF: {instead}")
