"""Writes a checkpoint with the shapes of a large model and random weights, a tensor at a time.

    python scripts/random_checkpoint.py OUT --like llama-2-7b
    python scripts/random_checkpoint.py OUT --like llama-2-70b --blocks 1
    python scripts/random_checkpoint.py OUT --like qwen3-30b-a3b --blocks 3

To measure time and memory without the model. The tokenizer is that of the model that ships with niwaki.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from niwaki.checkpoints.reading import INDEX_NAME
from niwaki.models.locate import locate_model

SHAPES: dict[str, dict[str, Any]] = {
    "llama-2-7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "llama-2-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
}


def main() -> None:
    """One shard for each block, and one for the rest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--like", choices=SHAPES, default="llama-2-7b")
    parser.add_argument("--blocks", type=int, help="so many instead of all")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    shape = {"model_type": "llama", **SHAPES[arguments.like]}
    if arguments.blocks:
        shape["num_hidden_layers"] = arguments.blocks
    config = AutoConfig.for_model(**shape, vocab_size=32000, max_position_embeddings=4096, dtype="bfloat16")
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    arguments.out.mkdir(parents=True)
    config.save_pretrained(arguments.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(locate_model("demo") / name, arguments.out / name)
    generator = torch.Generator().manual_seed(arguments.seed)
    shards: dict[str, dict[str, Any]] = {}
    for name, value in revert_weight_conversion(model, model.state_dict()).items():
        block = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        shards.setdefault(f"model-{block}.safetensors", {})[name] = value
    for shard, values in shards.items():
        tensors = {
            name: torch.ones(value.shape, dtype=value.dtype)
            if value.ndim == 1
            else torch.randn(value.shape, generator=generator, dtype=torch.float32).mul_(0.02).to(value.dtype)
            for name, value in values.items()
        }
        save_file(tensors, arguments.out / shard, metadata={"format": "pt"})
        print(shard, flush=True)
    weight_map = {name: shard for shard, values in shards.items() for name in values}
    (arguments.out / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2))


if __name__ == "__main__":
    main()
