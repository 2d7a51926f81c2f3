"""What differs between model families, as data; all else is found by looking at the model."""

from torch import nn

#: Parts of the names of matrices that choose between experts, tokens to attend to, or streams. They are small,
#: everything after them depends on them, no gradient says how, and they are never pruned. Adapters of matrices that
#: several blocks share are as small: they choose what such a matrix is in each of them.
_CHOICES = {
    **dict.fromkeys(("gate", "router", "shared_expert_gate"), "router"),
    "indexer": "indexer",
    "altup": "weights of streams",
    **dict.fromkeys((*(f"linear_{each}_adapter_list" for each in "qkv"), "gate_up_proj_adapter_list"), "adapter"),
}

#: Parts of the names of attention to what another model has made of images, sound or another text.
_CROSS_ATTENTION = ("encoder_attn", "crossattention", "cross_attn")

#: Beginnings of the names of modules that make states of images and sound, beside or within a language model.
_TOWERS = ("vision", "visual", "image", "img", "audio", "speech", "vqmodel")

#: Beginnings of the names of layers that draft several tokens at once, which files have beside the model's blocks; and
#: parts of the names of matrices and norms that such a layer has, and no block.
_DRAFTS = ("mtp", "nextn", "multi_token", "eagle", "medusa", "draft")
_OF_DRAFTS = frozenset({"eh_proj", "enorm", "hnorm", "shared_head"})

#: Where the matrices of experts are (experts, in, out) in the model, and transformers does not say so itself.
EXPERTS_TRANSPOSED = frozenset({"llama4", "llama4_text", "recurrent_gemma"})

#: Parameters of three dimensions that are not the matrices of experts: those of the heads of Zamba's Mamba.
OF_HEADS = frozenset({"A_log", "x_proj_weight", "dt_proj_weight"})

_FUSED_ATTENTION = "q, k and v are one matrix, with one threshold"
_EXPERTS = "each expert's matrices from the tokens that are routed to it"

_SHARED = "a transformer that several blocks share is pruned once, on its inputs in all of them"

#: The families that the tests cover, by the ``model_type`` of config.json, with remarks for the documentation.
FAMILIES = {
    "llama": "LLaMA 1 to 3",
    "llama4": _EXPERTS + "; gate and up are one matrix",
    "llama4_text": _EXPERTS + "; gate and up are one matrix",
    "mistral": "",
    "mixtral": _EXPERTS,
    "qwen2": "",
    "qwen2_moe": _EXPERTS + "; shared experts as any MLP",
    "qwen3": "",
    "qwen3_moe": _EXPERTS,
    "gemma2": "",
    "gemma3": "the language model; the vision tower stays",
    "gemma3_text": "",
    "gemma3n_text": "embeddings for each block, and keys and values of earlier ones; what mixes the streams stays",
    "gemma4_text": "the small ones too, with embeddings for each block and keys and values of earlier ones",
    "phi3": "q, k, v are one matrix, gate and up another, each with one threshold",
    "opt": "",
    "gpt2": _FUSED_ATTENTION,
    "gpt_neox": "Pythia; " + _FUSED_ATTENTION,
    "bloom": _FUSED_ATTENTION,
    "falcon": _FUSED_ATTENTION,
    "cohere2": "",
    "olmo2": "",
    "olmoe": _EXPERTS,
    "gpt_oss": _EXPERTS + "; gate and up are one matrix; files in MXFP4 too",
    "deepseek_v2": _EXPERTS + "; shared experts as any MLP",
    "deepseek_v3": _EXPERTS + "; shared experts as any MLP; files in FP8 too",
    "zamba": _SHARED,
    "zamba2": _SHARED + "; adapters stay",
}

#: Likewise those of an encoder with a decoder, which are calibrated on pairs.
ENCODER_DECODERS = {
    "t5": "also Flan-T5 and ByT5; mT5 and UMT5 are built alike",
    "switch_transformers": _EXPERTS,
    "bart": "also mBART, Pegasus, BlenderBot and others that are built alike",
    "marian": "OPUS-MT",
    "whisper": "sources are files of sound; convolutions stay",
}


def choice(name: str) -> str | None:
    """What a module or parameter belongs to that chooses, such as "router", if to any."""
    return next((_CHOICES[part] for part in name.split(".") if part in _CHOICES), None)


def is_cross_attention(name: str) -> bool:
    """Whether a module or parameter belongs to attention that a text alone does not reach."""
    return any(part in _CROSS_ATTENTION for part in name.split("."))


def is_reached(block: nn.Module) -> bool:
    """Whether a text alone runs a decoder block: it has other attention than that, or none."""
    parts = {name: part for name, part in block.named_children() if "att" in name}
    attention = [name for name, part in parts.items() if any(value.ndim > 1 for value in part.parameters())]
    return not attention or not all(map(is_cross_attention, attention))


def is_draft(name: str) -> bool:
    """Whether a tensor of the files belongs to a layer that drafts several tokens."""
    return any(part.startswith(_DRAFTS) or part in _OF_DRAFTS for part in name.split("."))


def is_in_tower(name: str) -> bool:
    """Whether a module or parameter belongs to what makes states of images or sound."""
    return any(part.startswith(_TOWERS) for part in name.split("."))
