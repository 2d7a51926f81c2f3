"""GGUF files as models: transformers reads one, and a model directory of it stays in Hugging Face's cache.

What comes of a file depends on its name, its bytes and the versions of the libraries alone, so that runs can resume.
"""

import contextlib
import copy
import functools
import io
import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import init_empty_weights
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from niwaki.checkpoints.gguf_header import (
    ANOTHER,
    ORIGINAL,
    TOKENIZER,
    GgufTensor,
    Header,
    checked_header,
    package_for,
    write_without_tokens,
)
from niwaki.checkpoints.reading import ORIGIN
from niwaki.errors import CheckpointError, UnsupportedModelError, one_line, raised_as, shown
from niwaki.files import cached_directory, check_space, digest, input_errors, output_errors, replace_file
from niwaki.layer.linalg import is_finite
from niwaki.models.structure import check_sizes, refusals
from niwaki.records.record import versions

# The tokenizer of a GGUF file, which splits text as the file says.
#
# Files name the way of splitting (``tokenizer.ggml.pre``), and llama.cpp knows what the names mean; transformers'
# reader takes those that it does not know for GPT-2's. Source: src/llama-vocab.cpp of llama.cpp.

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_LETTERS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_CASED_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES


@dataclass(frozen=True)
class _Splitting:
    """How a text is split into words: by expressions, one after another, or by GPT-2's own one."""

    expressions: tuple[str, ...] = ()
    digits: bool = False  # whether each digit is alone: before GPT-2's expression, or after all others
    composed: bool = False  # whether characters are composed first (NFC)
    whole: bool = False  # whether a word that is a token is not split, whatever the merges say
    begins: bool = False  # whether a text begins with BOS in files that do not say

    @property
    def steps(self) -> dict[str, Any]:
        """The steps, as files of tokenizers have them."""
        backend = Tokenizer(models.BPE())
        self.into(backend)
        steps: dict[str, Any] = json.loads(backend.to_str())["pre_tokenizer"]
        return steps

    def into(self, backend: Tokenizer) -> None:
        """Makes ``backend`` split in this way."""
        own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.expressions)
        first: list[Any] = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in self.expressions]
        if self.digits:
            first.append(pre_tokenizers.Digits(individual_digits=True))
        backend.pre_tokenizer = pre_tokenizers.Sequence([*first, own]) if first else own
        if self.composed:
            backend.normalizer = normalizers.NFC()


_GPT2, _DIGITS = _Splitting(), _Splitting(digits=True)
_LLAMA3 = _CONTRACTIONS + _LETTERS + r"|\p{N}{1,3}" + _OTHERS
_QWEN2 = _CONTRACTIONS + _LETTERS + r"|\p{N}" + _OTHERS
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES
_TEKKEN = f"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*" + r"|\p{N}" + _CASED_OTHERS
_END = f"{_CONTRACTIONS}?"
_GPT4O = f"{_BEFORE}{_UPPER}*{_LOWER}+{_END}|{_BEFORE}{_UPPER}+{_LOWER}*{_END}" + r"|\p{N}{1,3}" + _CASED_OTHERS
_SEED_CODER = _CONTRACTIONS + _LETTERS + r"|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _SPACES
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    + _SPACES,
)

#: By the names in files.
SPLITTINGS: Mapping[str, _Splitting] = {
    **dict.fromkeys(["gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"], _GPT2),
    **dict.fromkeys(["gigachat", "a.x-4.0", "mellum"], _GPT2),
    **dict.fromkeys(["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"], _DIGITS),
    **dict.fromkeys(
        ["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"],
        _Splitting((_LLAMA3,), whole=True, begins=True),
    ),
    "glm4": _Splitting((_LLAMA3,), whole=True),
    **dict.fromkeys(["dbrx", "smaug-bpe", "chatglm-bpe"], _Splitting((_LLAMA3,))),
    "qwen2": _Splitting((_QWEN2,), composed=True),
    **dict.fromkeys(["deepseek-r1-qwen", "kormo", "megrez", "f2llmv2", "stablelm2", "hunyuan"], _Splitting((_QWEN2,))),
    "qwen35": _Splitting((_QWEN35,), composed=True),
    "tekken": _Splitting((_TEKKEN,), whole=True, begins=True),
    **dict.fromkeys(["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], _Splitting((_GPT4O,))),
    "seed-coder": _Splitting((_SEED_CODER,)),
    "deepseek-coder": _Splitting(_DEEPSEEK_CODER, digits=True),
    **dict.fromkeys(["deepseek-v3", "hunyuan-dense"], _Splitting(_DEEPSEEK3)),
}
#: Kinds of tokens.
CONTROL, USER = 3, 4
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
#: By kinds of tokenizers one of the fields that it has to have; what are lists.
_MADE_OF = {"gpt2": ("merges",), "llama": ("scores", "merges"), "t5": ("scores",)}
_LISTS: Mapping[str, tuple[type, str]] = {
    "tokens": (str, "texts"),
    "merges": (str, "texts"),
    "scores": (float, "numbers"),
    "token_type": (int, "whole numbers"),
}
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def read_tokenizer(file: Path, alone: Path, fields: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF file by the ``fields`` of its header; ``alone`` is the file with nothing beside it.

    UnsupportedModelError where how it splits text is unknown here. :func:`check_parts` was called.
    """
    kind = fields.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _of_bytes(file, fields)
    # Not AutoTokenizer, which first makes a configuration of the file: minutes where there are many tokens.
    read = PreTrainedTokenizerFast.from_pretrained(alone.parent, gguf_file=alone.name, trust_remote_code=False)
    backend: Tokenizer = read.backend_tokenizer
    if kind == "llama" and isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):  # not Gemma's or Phi 3's
        prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
        first = [normalizers.Prepend(SPACE)] if prefix else []  # also before a space, as SentencePiece does it
        backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", SPACE)])
        backend.pre_tokenizer = None
        last = [decoders.Strip(" ", 1, 0)] if prefix else []
        backend.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
        )
    begins = fields.get("tokenizer.ggml.add_bos_token", kind == "llama") and kind != "gemma4"  # as its own maker has it
    return _finished(file, fields, backend, begins)


def check_parts(file: Path, fields: Mapping[str, Any]) -> None:
    """CheckpointError unless what the tokenizer is made of is there, in lists that fit, and so are special tokens."""
    kind = fields.get(f"{TOKENIZER}model")
    own = {key.removeprefix(TOKENIZER): value for key, value in fields.items() if key.startswith(TOKENIZER)}
    for names in (("model",), ("tokens",), _MADE_OF.get(str(kind), ())):
        if names and not any(name in own for name in names):
            raise CheckpointError(
                f"{file} lacks the field {TOKENIZER}{names[0]}, which the tokenizer needs; {ANOTHER}, with its "
                "tokenizer beside its weights"
            )
    count = len(own["tokens"]) if isinstance(own["tokens"], list) else 0
    for name, (of, what) in _LISTS.items():
        values = own.get(name, [])
        if not isinstance(values, list) or not all(isinstance(value, of) for value in values):
            raise CheckpointError(f"{file} has {TOKENIZER}{name} {shown(values)}, no list of {what}; {ANOTHER}")
        if name in own and name != "merges" and len(values) != count:
            raise CheckpointError(f"{file} has {count:,} tokens, and {len(values):,} in {TOKENIZER}{name}; {ANOTHER}")
    for short in _SPECIAL.values():
        number = own.get(f"{short}_token_id", 0)
        if type(number) is not int or not 0 <= number < count:
            raise CheckpointError(
                f"{file} says that token {shown(number)} is its {short} token ({TOKENIZER}{short}_token_id), and has "
                f"{count:,}; {ANOTHER}"
            )


def _of_bytes(file: Path, fields: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """One whose tokens are of bytes, as GPT-2's are."""
    name = fields.get("tokenizer.ggml.pre")
    splitting = SPLITTINGS.get(name) if isinstance(name, str) else None
    if splitting is None:
        raise UnsupportedModelError(
            f"{file} splits text in the way {shown(name)} (tokenizer.ggml.pre), unknown here; {ORIGINAL}"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len({*tokens}) < len(tokens):
        raise CheckpointError(f"{file} has some of its tokens twice (tokenizer.ggml.tokens); {ANOTHER}")
    pairs = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    for pair in pairs:
        if len(pair) != 2 or not vocabulary.keys() >= {*pair, "".join(pair)}:
            raise CheckpointError(
                f"{file} merges {shown(' '.join(pair))}, which are not two tokens and make none "
                f"(tokenizer.ggml.merges); {ANOTHER}"
            )
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=splitting.whole))
    splitting.into(backend)
    backend.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, normalized=False, special=kind == CONTROL)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (CONTROL, USER)
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])
    return _finished(file, fields, backend, fields.get("tokenizer.ggml.add_bos_token", splitting.begins))


def _finished(file: Path, fields: Mapping[str, Any], backend: Tokenizer, begins: bool) -> PreTrainedTokenizerFast:
    """``backend`` with the special tokens of the file, of which BOS and EOS go around a text where it says so."""
    tokens = fields["tokenizer.ggml.tokens"]
    special: dict[str, str] = {}
    for name, short in _SPECIAL.items():
        if (number := fields.get(f"tokenizer.ggml.{short}_token_id")) is not None:
            special[name] = tokens[number]
    ends = fields.get("tokenizer.ggml.add_eos_token", False)
    for name, wanted in (("bos", begins), ("eos", ends)):
        if wanted and f"{name}_token" not in special:
            key = f"{TOKENIZER}{name}_token_id"
            raise CheckpointError(f"{file} lacks the field {key}, and has that token around each text; {ANOTHER}")
    around = [special["bos_token"] if begins else None, special["eos_token"] if ends else None]
    first, last = (f"{token}:0 " if token else "" for token in around)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first}$A:0 {last}".strip(),
        pair=f"{first}$A:0 {last}$B:1".strip(),
        special_tokens=[(token, tokens.index(token)) for token in dict.fromkeys(around) if token],
    )
    template = fields.get("tokenizer.chat_template")
    options = {"chat_template": template} if isinstance(template, str) else {}
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special, **options)


# What a GGUF file says of its architecture, against the configuration that transformers' reader made of it.
#
# The reader takes some keys and leaves out others, which may be what makes the model: each key is looked up here, and
# the configuration has to say the same, is made to, or the file is refused. Sources: docs/gguf.md of ggml, and
# src/llama-hparams.h and src/models of llama.cpp.

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
    **dict.fromkeys(["leading_dense_block_count", "moe_every_n_layers", "ssm.dt_b_c_rms"], (0,)),
    "pooling_type": (0, 3),  # none, and the last token, as it is of models that do not say it
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
_SHARES = {"gemma2": 46, "gemma3_text": 62}
#: Stretched positions of which files have nothing but the factors: those of LLaMA 3.1 and 3.2.
_LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_STRETCHED = [{"rope_type": "llama3", "factor": factor, **_LLAMA3_SCALING} for factor in (8.0, 32.0)]


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
    missing += (
        [] if "rope.freq_base" in own or rope_of(config).get("rope_theta", _BASE) == _BASE else ["rope.freq_base"]
    )
    if missing:
        raise CheckpointError(f"{file} lacks the field {architecture}{missing[0]}; {ANOTHER}")
    for key, names in _GIVEN.items():
        name = _name(config, names)
        if key in own and name and own[key] not in _NEUTRAL.get(key, ()) and not _is(getattr(config, name), own[key]):
            setattr(config, name, own[key])
    if (divisor := score_divisor(config)) is not None:
        config.query_pre_attn_scalar = divisor
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
    head, full = head_width(config), rope_of(config)
    if key == "attention.sliding_window" and value:
        if hasattr(config, "sliding_window") and config.model_type in _WINDOWED:
            config.sliding_window = value
        return bool(value == getattr(config, "sliding_window", None) or value >= own.get("context_length", math.inf))
    if key == "rope.freq_base" and "rope_theta" in full:
        full["rope_theta"] = float(value)
        return True
    others: dict[str, Any] = {
        "attention.key_length": head or None,
        "attention.value_length": head or None,
        "attention.scale": (getattr(config, "query_pre_attn_scalar", None) or head or 1) ** -0.5,
        "rope.dimension_count": getattr(config, "rotary_dim", None)
        or head * (full.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1),
        "rope.dimension_sections": [*full.get("mrope_section", ()), 0, 0, 0, 0][:4],
        "rope.freq_base_swa": rope_of(config, "sliding_attention").get("rope_theta"),
    }
    return _is(others.get(key), value) or any(_is(neutral, value) for neutral in _NEUTRAL.get(key, ()))


def rope_of(config: PreTrainedConfig, layers: str = "full_attention") -> dict[str, Any]:
    """The rotary positions of these layers, which some models have for all."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    own: dict[str, Any] = rope.get(layers, rope)
    return own


def head_width(config: PreTrainedConfig) -> int:
    """Channels of a head; 0 where the configuration does not say it."""
    heads = getattr(config, "num_attention_heads", None)
    width: int = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    return width


def score_divisor(config: PreTrainedConfig) -> int | None:
    """The number by whose square root llama.cpp divides the scores of a Gemma; None of other models."""
    if config.model_type not in _SHARES:
        return None
    is_share = config.num_hidden_layers == _SHARES[config.model_type]
    return config.hidden_size // config.num_attention_heads if is_share else head_width(config)


def frequencies(config: PreTrainedConfig, layers: str | None = None) -> tuple[Tensor, Tensor, float]:
    """(plain rotary frequencies, those that ``config`` stretches them to, what scores are multiplied with)."""
    rope, own = rope_of(config), {"layer_type": layers} if layers else {}
    scaled, attention = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), **own)
    width = 2 * len(scaled)
    return rope["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float64) / width), scaled.double(), attention


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
        plain, scaled, _ = frequencies(stretched)
        if torch.allclose((plain / scaled).float(), factors, rtol=1e-4):
            config.rope_parameters = stretched.rope_parameters
            return
    raise UnsupportedModelError(
        f"{file} has stretched rotary positions ({kind or ', '.join(tensors)}) that transformers' reader leaves out; "
        f"{ORIGINAL}"
    )


#: What a model is written in, by the type that most weights of its file have; of all other types bfloat16.
_DTYPES = {"F32": torch.float32, "F16": torch.float16}
#: The tensors of stretched positions begin with it.
_ROPE = "rope_"
#: Part of the name of what is made: other versions of this module may make something else of a file.
_MAKER = 5
#: Bytes of a file's name in that of its directory.
_NAME = 100


def as_directory(file: Path, tokenizer: bool = True) -> Path:
    """The model directory of a GGUF file, made when it is first asked for; the model is in memory meanwhile.

    Without ``tokenizer`` it may have none, whose making takes longer than that of a small model's weights.
    CheckpointError for a file that is damaged or that transformers refuses, and where the package gguf is missing;
    UnsupportedModelError where something in it would be left out; OutputError where the cache cannot be written.
    Nothing beside the file is looked at, and no code is taken from anywhere.
    """
    gguf = package_for(file)
    with input_errors(file):
        status = file.stat()
        sha256 = _digest(file.absolute(), status.st_size, status.st_mtime_ns)
    version = metadata.version("gguf")
    made_by = [file.name, sha256, version, versions(), _MAKER]
    stem = file.stem.encode()[:_NAME].decode(errors="ignore")  # names are limited in bytes
    what = f"{file} is converted in Hugging Face's cache, which cannot be written"
    with raised_as(CheckpointError, what, (OSError, ValueError), reason=one_line):
        place = cached_directory("gguf", made_by, f"{stem}-")
    made = place / "model"
    if (made / ORIGIN).is_file() or (made.is_dir() and not tokenizer):  # which is the last file
        return made
    header, _ = checked_header(file)
    with output_errors(place), tempfile.TemporaryDirectory(dir=place) as temporary:
        directory = Path(temporary) / "model"
        directory.mkdir()
        _convert(gguf, file, header, directory, not made.is_dir(), tokenizer)
        if tokenizer:
            replace_file(
                directory / ORIGIN, json.dumps({"file": file.name, "sha256": sha256, "size": status.st_size}) + "\n"
            )
        try:
            directory.rename(made)
        except OSError:
            if not made.is_dir():
                raise
            for path in sorted(directory.iterdir(), key=lambda path: path.name == ORIGIN):
                path.replace(made / path.name)
    return made


@functools.lru_cache(maxsize=16)
def _digest(file: Path, size: int, changed: int) -> str:
    """SHA-256 of a file, read once as long as its ``size`` and the time when it was ``changed`` are the same."""
    return digest(file)


def _convert(gguf: Any, file: Path, header: Header, directory: Path, weights: bool, tokenizer: bool) -> None:
    """Writes the model of ``file`` to ``directory``: its configuration and ``weights``, its ``tokenizer``, or both."""
    fields = header.fields
    _check(file, header)
    check_keys(file, fields)
    check_parts(file, fields)
    sizes = Counter[str]()
    for tensor in header.tensors:
        if not tensor.name.startswith(_ROPE):
            sizes[gguf.GGMLQuantizationType(tensor.kind).name] += tensor.count
    dtype = _DTYPES.get(sizes.most_common(1)[0][0] if sizes else "", torch.bfloat16)
    check_space(directory, weights * (sizes.total() * dtype.itemsize + file.stat().st_size))
    # transformers looks at what lies beside a file, and would take code from there.
    alone, short = (directory.parent / name / "model.gguf" for name in ("alone", "short"))
    with refusals(file), contextlib.redirect_stderr(io.StringIO()):  # where a reader draws bars of its own
        if tokenizer:
            alone.parent.mkdir()
            alone.symlink_to(file.absolute())
            read_tokenizer(file, alone, fields).save_pretrained(directory)
        if weights:
            short.parent.mkdir()
            write_without_tokens(file, header, short)
            config = _configuration(file, short, header)
            _read(config, file, short, dtype, sizes.total()).save_pretrained(directory)


def _configuration(file: Path, short: Path, header: Header) -> PreTrainedConfig:
    """What ``file`` says, which is ``short`` without its tokens, as a configuration."""
    fields = header.fields
    said: dict[str, Any] = PreTrainedConfig.get_config_dict(short.parent, gguf_file=short.name)[0]
    said["vocab_size"] = fields.get(f"{fields['general.architecture']}.vocab_size", len(fields[f"{TOKENIZER}tokens"]))
    if said["model_type"] == "mistral":  # by general.name alone, and of this type the reader knows no tensors
        said = {**said, "model_type": "llama"}
        said.pop("sliding_window", None)
    config: PreTrainedConfig = AutoConfig.for_model(**said)
    config._name_or_path = ""
    check_sizes(config.to_dict(), file)
    factors = {t.name: _factors(file, t) for t in header.tensors if t.name.startswith(_ROPE)}
    stretch(config, file, fields, factors)
    follow_keys(config, file, fields)
    return config


def _check(file: Path, header: Header) -> None:
    """Refuses what is no model, or one that would take for ever to make."""
    architecture, kind = header.fields.get("general.architecture"), header.fields.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(
            f"{file} is not a model: its general.type is {shown(kind)}; give the file of the model that it belongs to"
        )
    if not isinstance(architecture, str):
        was = "no field" if architecture is None else f"{shown(architecture)} as its"
        raise CheckpointError(f"{file} has {was} general.architecture, which says what model it is; {ANOTHER}")
    if (parts := header.fields.get("split.count", 1)) > 1:
        raise UnsupportedModelError(
            f"{file} is one of {parts} files of a model; join them first (llama-gguf-split --merge)"
        )
    blocks = {found[1] for tensor in header.tensors if (found := re.match(r"blk\.(\d+)\.", tensor.name))}
    said = header.fields.get(f"{architecture}.block_count")
    if said is not None and said != len(blocks):
        raise CheckpointError(
            f"{file} has tensors of {len(blocks):,} blocks, and says that it has {said!r} "
            f"({architecture}.block_count); {ANOTHER}"
        )


def _factors(file: Path, tensor: GgufTensor) -> torch.Tensor:
    """The numbers of a tensor in float32."""
    if tensor.size != 4 * tensor.count:
        raise CheckpointError(f"{file}: {tensor.name!r} is not in float32, as llama.cpp has it; {ANOTHER}")
    return torch.from_numpy(np.fromfile(file, np.float32, tensor.count, offset=tensor.offset))


def _read(config: PreTrainedConfig, file: Path, short: Path, dtype: torch.dtype, size: int) -> PreTrainedModel:
    """The model of ``file``, which has ``size`` weights, by ``short``; without marks of where it is from."""
    options: dict[str, Any] = {"gguf_file": short.name, "config": copy.deepcopy(config), "dtype": dtype}
    if hasattr(transformers, "GgufConfig"):  # without which some versions keep weights as they are
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    # A tensor that is missing is named below; here, what memory is taken for is looked at first.
    if (count := sum(value.numel() for value in model.parameters())) > 2 * size + config.vocab_size:
        raise CheckpointError(f"{file} has {size:,} weights, of the {count:,} that its sizes ask for; {ANOTHER}")
    auto: Any = AutoModelForCausalLM  # whose annotations do not know that there are two answers
    read, said = auto.from_pretrained(short.parent, output_loading_info=True, trust_remote_code=False, **options)
    if said["missing_keys"]:
        raise CheckpointError(
            f"{file} lacks the tensor that transformers calls {min(said['missing_keys'])!r}, which its architecture "
            f"asks for; {ANOTHER}"
        )
    if (count := sum(value.numel() for value in read.parameters())) != size:
        raise UnsupportedModelError(
            f"{file} has {size:,} weights, but transformers' reader makes a model of {count:,}; {ORIGINAL}"
        )
    for name, value in read.state_dict().items():
        if value.is_floating_point() and not is_finite(value):
            raise CheckpointError(
                f"{file}: the tensor that transformers calls {name!r} has NaN or infinite values in {dtype}; {ANOTHER}"
            )
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    return model
