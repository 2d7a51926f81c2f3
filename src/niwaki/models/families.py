"""What differs between model families, as data; all else is found by looking at the model."""

#: Parts of the names of matrices that choose between experts. They are small, everything after them depends on them,
#: and they are never pruned.
ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})

#: Beginnings of the names of modules that make states of images and sound, beside or within a language model.
_TOWERS = ("vision", "visual", "image", "img", "audio", "speech")

#: Where the matrices of experts are (experts, in, out) in the model, and transformers does not say so itself.
EXPERTS_TRANSPOSED = frozenset({"llama4", "llama4_text"})

_FUSED_ATTENTION = "q, k and v are one matrix, with one threshold"
_EXPERTS = "each expert's matrices from the tokens that are routed to it"

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
    "phi3": "q, k, v are one matrix, gate and up another, each with one threshold",
    "opt": "",
    "gpt2": _FUSED_ATTENTION,
    "gpt_neox": "Pythia; " + _FUSED_ATTENTION,
    "bloom": _FUSED_ATTENTION,
    "falcon": _FUSED_ATTENTION,
    "cohere2": "",
    "olmo2": "",
    "olmoe": _EXPERTS,
    "gpt_oss": _EXPERTS + "; gate and up are one matrix; not the files in MXFP4",
    "deepseek_v2": _EXPERTS + "; shared experts as any MLP",
    "deepseek_v3": _EXPERTS + "; shared experts as any MLP; not the files in FP8",
}


def is_in_tower(name: str) -> bool:
    """Whether a module or parameter belongs to what makes states of images or sound."""
    return any(part.startswith(_TOWERS) for part in name.split("."))
