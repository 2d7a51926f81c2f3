"""Random models of every family whose blocks have LLaMA's parts, decoded natively and by transformers.

Both have to give the same, at positions up to 100,000: what is native is right, or it is left to transformers.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from support.decoding import FAMILIES, by_transformers, counting, decoded, packed_model

#: The families that are native, which are half of the cases, and what their configurations may have.
_USUAL = ("llama", "mistral", "qwen2", "qwen3", "granite", "smollm3", "ernie4_5")
#: Those that do not take positions, because theirs have axes, or bytes for tokens.
_BY_THEMSELVES = {kind for kind, options in FAMILIES.items() if "mrope_section" in str(options)} | {"blt"}
_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
)  # fmt: skip
#: How far two results in float32 may be apart, relative to the largest number.
_NOISE = 2e-5


def prepare(place: Path) -> None:
    """Nothing is shared."""


def case(chance: random.Random, place: Path) -> str:
    """One model, and a text of a few tokens."""
    usual = chance.random() < 0.5
    kind = chance.choice(_USUAL if usual else sorted(FAMILIES))
    model = packed_model(kind, seed=chance.randrange(1000), sparsity=chance.choice((0.0, 0.3, 0.5, 0.9)), **(
        _options(chance, kind) if usual else {}
    ))  # fmt: skip
    tokens = torch.tensor([[chance.randrange(64) for _ in range(chance.randrange(6, 14))]])
    given = chance.choice((1, 1, 2, 5))
    start = None if kind in _BY_THEMSELVES else chance.choice((None, 0, 1, 17, chance.randrange(100_000)))
    mask = None
    if usual and chance.random() < 0.3:
        mask = torch.ones_like(tokens)
        mask[:, 1 : chance.randrange(2, 5)] = 0
    with counting() as steps:
        found = decoded(model, tokens, given, start, mask)
    with by_transformers():
        right = decoded(model, tokens, given, start, mask)
    far = float((found - right).abs().max() / right.abs().max())
    assert far <= _NOISE, f"{kind}: {far:.1e} apart, {len(steps)} native steps, from {start}, {given} given"
    return "native" if steps else "left to transformers"


def _options(chance: random.Random, kind: str) -> dict[str, Any]:
    heads = chance.choice((2, 4, 8))
    options: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": chance.choice([pairs for pairs in (1, 2, 4) if heads % pairs == 0]),
        "head_dim": chance.choice((8, 16, 32)),
        "intermediate_size": chance.choice((32, 48, 96)),
        "rms_norm_eps": chance.choice((1e-6, 1e-5, 1e-2)),
        "hidden_act": chance.choice(("silu", "silu", "silu", "gelu")),
        "rope_parameters": {"rope_theta": chance.choice((1e4, 1e6)), **chance.choice(_ROPES)},
    }
    if kind in ("llama", "qwen3", "granite", "smollm3"):
        options["attention_bias"] = chance.random() < 0.3
    if kind in ("llama", "granite"):
        options["mlp_bias"] = chance.random() < 0.3
    if kind == "mistral":
        options["sliding_window"] = chance.choice((None, 4, 64))
    if kind == "granite":
        options["residual_multiplier"] = chance.choice((1.0, 0.98, 0.5))
        options["attention_multiplier"] = chance.choice((1.0, 0.25))
    if kind == "smollm3":
        options["no_rope_layers"] = [chance.randrange(2) for _ in range(3)]
    return options
