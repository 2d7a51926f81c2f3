"""What differs between model families, as data; all else is found by looking at the model."""

from __future__ import annotations

from dataclasses import dataclass

#: Last part of the names of matrices that choose between experts. They are small, everything after them depends on
#: them, and they are never pruned.
ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})


@dataclass(frozen=True)
class Family:
    """One family that the tests cover.

    Attributes:
        experts_transposed: The matrices of experts are (experts, in, out) in the model, and transformers does not say
            so itself.
        remark: For the table in the documentation.
    """

    experts_transposed: bool = False
    remark: str = ""


_FUSED_ATTENTION = "q, k and v are one matrix, with one threshold"
_EXPERTS = "each expert's matrices from the tokens that are routed to it"

#: By the ``model_type`` of config.json.
FAMILIES: dict[str, Family] = {
    "llama": Family(remark="LLaMA 1 to 3"),
    "llama4": Family(experts_transposed=True, remark=_EXPERTS + "; gate and up are one matrix"),
    "llama4_text": Family(experts_transposed=True, remark=_EXPERTS + "; gate and up are one matrix"),
    "mistral": Family(),
    "mixtral": Family(remark=_EXPERTS),
    "qwen2": Family(),
    "qwen2_moe": Family(remark=_EXPERTS + "; shared experts as any MLP"),
    "qwen3": Family(),
    "qwen3_moe": Family(remark=_EXPERTS),
    "gemma2": Family(),
    "gemma3": Family(remark="the language model; the vision tower stays"),
    "gemma3_text": Family(),
    "phi3": Family(remark="q, k, v are one matrix, gate and up another, each with one threshold"),
    "opt": Family(),
    "gpt2": Family(remark=_FUSED_ATTENTION),
    "gpt_neox": Family(remark="Pythia; " + _FUSED_ATTENTION),
    "bloom": Family(remark=_FUSED_ATTENTION),
    "falcon": Family(remark=_FUSED_ATTENTION),
    "cohere2": Family(),
    "olmo2": Family(),
    "olmoe": Family(remark=_EXPERTS),
    "gpt_oss": Family(remark=_EXPERTS + "; gate and up are one matrix; not the files in MXFP4"),
    "deepseek_v2": Family(remark=_EXPERTS + "; shared experts as any MLP"),
    "deepseek_v3": Family(remark=_EXPERTS + "; shared experts as any MLP; not the files in FP8"),
}
