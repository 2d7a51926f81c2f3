"""Random models of every family whose blocks have LLaMA's parts, decoded natively and by transformers.

Both have to give the same, at positions up to 100,000: what is native is right, or it is left to transformers. In
bfloat16 both have to be as far from float32.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from support.decoding import BY_THEMSELVES, FAMILIES, all_experts, both, by_transformers, decoded, packed_model

#: The families that are native, which are half of the cases, and what their configurations may have.
_USUAL = ("llama", "mistral", "qwen2", "qwen3", "granite", "smollm3", "ernie4_5")
_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 64},
)
#: How far two results in float32 may be apart, relative to the largest number.
_NOISE = 2e-5
#: In bfloat16, how much larger one's error may be than the other's over this many tokens: in the mean over tokens, and
#: all in all, where few tokens decide. Both are rounding alone: of 181 native models, 0.77 to 1.17 and 0.66 to 1.38.
_APART, _ALL_APART, _TOKENS = 1.4, 2.0, 48


def prepare(place: Path) -> None:
    """Nothing is shared."""


def case(chance: random.Random, place: Path) -> str:
    """One model, and a text of which a few tokens, or some hundreds, are given at once."""
    usual, rounded, long = chance.random() < 0.5, chance.random() < 0.5, chance.random() < 0.2
    kind = chance.choice(_USUAL if usual else sorted(FAMILIES))
    options = {
        "seed": chance.randrange(1000),
        "sparsity": chance.choice((0.0, 0.3, 0.5, 0.9)),
        **(_options(chance, kind) if usual else {}),
        **(all_experts(kind) if rounded else {}),
    }
    model = packed_model(kind, torch.bfloat16 if rounded else torch.float32, **options)
    given = chance.randrange(200, 500) if long else chance.choice((1, 1, 2, 5))
    behind = _TOKENS if rounded else chance.randrange(5, 13)
    tokens = torch.tensor([[chance.randrange(64) for _ in range(given + behind)]])
    start = None if kind in BY_THEMSELVES else chance.choice((None, 0, 1, 17, chance.randrange(100_000)))
    mask = None
    if usual and chance.random() < 0.3:
        mask = torch.ones_like(tokens)
        mask[:, 1 : chance.randrange(2, 5)] = 0
    found, theirs, steps = both(model, tokens, given, start, mask)
    about = f"{kind}: {steps} native steps, from {start}, {given} given"
    if rounded:
        with by_transformers():
            right = decoded(packed_model(kind, **options), tokens, given, start, mask)
        errors, their_errors = ((each - right).norm(dim=1) for each in (found, theirs))
        apart = float((errors / their_errors).log().mean().exp())
        all_apart = float(errors.norm() / their_errors.norm())
        assert 1 / _APART <= apart <= _APART, f"{about}: errors {apart:.2f} times transformers'"
        assert 1 / _ALL_APART <= all_apart <= _ALL_APART, f"{about}: errors {all_apart:.2f} times transformers' in all"
    else:
        far = float((found - theirs).abs().max() / theirs.abs().max())
        assert far <= _NOISE, f"{about}: {far:.1e} apart"
    cache = "long" if long else "short"
    return f"{'native' if steps else 'left to transformers'} in {model.dtype} behind a {cache} cache"


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
        multipliers = {"residual_multiplier": (1.0, 0.98, 0.5), "attention_multiplier": (1.0, 0.25)}
        options |= {name: chance.choice(values) for name, values in multipliers.items()}
    if kind == "smollm3":
        options["no_rope_layers"] = [chance.randrange(2) for _ in range(3)]
    return options
