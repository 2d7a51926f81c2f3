# ruff: noqa: E402 - tests/support is found only now
"""What niwaki does with the families that people use most: each command is run on a tiny random model of each.

    python scripts/families_table.py benchmarks/results/families.json                      # all, minutes
    python scripts/families_table.py benchmarks/results/families.json --families "Gemma 2" # only these; others stay

`make results` writes docs/models.md's table from the record. A model's widths are multiples of 128, so that no format
refuses one for being tiny, and its files are in bfloat16, as those of most real ones.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import model_types
import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import niwaki
from niwaki.errors import NiwakiError
from niwaki.records.record import versions
from support.models import FEW_TOKENS, add_small_tokenizer
from support.small_tokenizers import write_pieces

#: In place of the smaller ones of ``model_types``.
SIZES: dict[str, Any] = {
    **dict.fromkeys(["vocab_size", "vocab_size_per_layer_input"], FEW_TOKENS),
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "embed_dim", "embedding_size", "out_hidden_size"], 128),
    **dict.fromkeys(["word_embed_proj_dim", "moe_intermediate_size", "shared_expert_intermediate_size"], 128),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "n_inner", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim"], 256),
    **dict.fromkeys(["shared_intermediate_size"], 256),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"], 4),
    **dict.fromkeys(["encoder_layers", "decoder_layers"], 4),
    **dict.fromkeys(["head_dim", "d_kv", "linear_key_head_dim", "linear_value_head_dim", "qk_nope_head_dim"], 32),
    **dict.fromkeys(["v_head_dim", "qk_rope_head_dim"], 32),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank", "hidden_size_per_layer_input"], 128),
    "mamba_d_head": 64,
    **dict.fromkeys(["max_position_embeddings", "n_positions"], 128),
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 4, 4]}}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
#: What parts of models need in addition, or instead, by their type.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl_text": _AXES,
    **dict.fromkeys(("gemma2", "gemma3_text"), _WINDOWS | {"query_pre_attn_scalar": 32}),
    **dict.fromkeys(("cohere2", "gpt_oss"), _WINDOWS),
    "qwen3_moe": {"norm_topk_prob": True},
    "gemma4": {"audio_config": None},
    "gemma4_vision": {"position_embedding_size": 16},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "gemma3n_text": {**_WINDOWS, "altup_num_inputs": 2, "laurel_rank": 64, "num_kv_shared_layers": 2},
    "gemma4_text": {**_WINDOWS, "global_head_dim": 64, "num_kv_shared_layers": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "attention", "attention"], "num_local_experts": 0},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
}
#: What shrinking takes away, and how much of it.
PARTS: dict[str, Any] = {"neurons": 0.5, "heads": 0.5, "experts": 0.5, "blocks": 1}
CELLS = ("prune", "quantize", "compress", "parameters", *PARTS, "gguf", "compressed-tensors")


@dataclass(frozen=True)
class Family:
    """A type of model, with what most files of the family have beside the defaults of their type."""

    kind: str
    #: Whether its tokenizer is of SentencePiece's kind, and not one of bytes.
    pieces: bool = False
    auto: Any = None
    config: dict[str, Any] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "Llama 3": Family("llama", config={"rope_parameters": _LLAMA3}),
    "Llama 2, TinyLlama": Family("llama", pieces=True),
    "Qwen 2, Qwen 2.5": Family("qwen2", config={"tie_word_embeddings": True}),
    "Qwen 3": Family("qwen3", config={"tie_word_embeddings": True}),
    "Qwen 3 with experts": Family("qwen3_moe"),
    "Qwen 3.5": Family("qwen3_5"),
    "Qwen 2.5 VL": Family("qwen2_5_vl"),
    "Gemma 2": Family("gemma2", pieces=True),
    "Gemma 3 270M, 1B": Family("gemma3_text", pieces=True),
    "Gemma 3 4B to 27B": Family("gemma3", pieces=True),
    "Gemma 3n, its language model": Family("gemma3n_text", pieces=True),
    "Gemma 4": Family("gemma4", pieces=True),
    "Mistral": Family("mistral", pieces=True, config={"sliding_window": None}),
    "Mistral Small 3": Family("mistral3"),
    "Ministral 8B": Family("ministral"),
    "Mixtral": Family("mixtral", pieces=True, config={"sliding_window": None}),
    "Phi 3, Phi 4": Family("phi3", pieces=True, config={"sliding_window": None}),
    "SmolLM, SmolLM2": Family("llama", config={"tie_word_embeddings": True}),
    "SmolLM3": Family("smollm3"),
    "OLMo 2": Family("olmo2"),
    "Granite 3": Family("granite"),
    "Granite 4 hybrid": Family("granitemoehybrid"),
    "LFM2": Family("lfm2"),
    "GLM 4": Family("glm4"),
    "gpt-oss": Family("gpt_oss"),
    "DeepSeek V2": Family("deepseek_v2"),
    "DeepSeek V3": Family("deepseek_v3"),
    "Falcon": Family("falcon", config={"multi_query": True, "bias": False, "num_kv_heads": 1}),
    "StarCoder2": Family("starcoder2"),
    "Command R7B": Family("cohere2"),
    "GPT-2": Family("gpt2"),
    "OPT": Family("opt"),
    "Pythia": Family("gpt_neox"),
    "Qwen 3 Embedding": Family("qwen3", auto=AutoModel),
    "EmbeddingGemma": Family("gemma3_text", True, AutoModel, {"use_bidirectional_attention": True}),
    "BERT, MiniLM": Family("bert", auto=AutoModel),
    "XLM-R, multilingual E5": Family("xlm-roberta", auto=AutoModel),
    "MPNet": Family("mpnet", auto=AutoModelForMaskedLM),
    "ModernBERT": Family("modernbert", auto=AutoModelForMaskedLM),
    "a reranker of BERT's type": Family("bert", auto=AutoModelForSequenceClassification, config={"num_labels": 1}),
    "T5, mT5": Family("t5"),
    "BART": Family("bart"),
    "Whisper": Family("whisper"),
}


def save(path: Path, family: Family) -> torch.Tensor:
    """A random model of the family; text for it."""
    usual = model_types.EXCEPTIONS
    changes = {family.kind: {**usual.get(family.kind, {}), **EXCEPTIONS.get(family.kind, {}), **family.config}}
    model_types.SIZES |= SIZES
    model_types.EXCEPTIONS = usual | EXCEPTIONS | changes
    try:
        torch.manual_seed(0)
        model: PreTrainedModel
        if family.auto:
            model = family.auto.from_config(model_types.tiny(CONFIG_MAPPING[family.kind]))
        else:
            model = model_types.built(family.kind)
    finally:
        model_types.EXCEPTIONS = usual
    text = model_types._text(model)
    model.to(torch.bfloat16).save_pretrained(path)  # type: ignore[arg-type]
    if family.kind == "qwen3" and family.auto:
        (path / "modules.json").write_text(json.dumps([{"idx": 0, "path": "1_Pooling", "type": "a.Pooling"}]))
    write_pieces(path) if family.pieces else add_small_tokenizer(path)
    return text


def command(cell: str, model: Path, out: Path, text: torch.Tensor) -> None:
    """Runs what a cell of the table is about."""
    how: dict[str, Any] = {"calibration": text, "measurement": None, "compute": "cpu"}
    match cell:
        case "prune":
            niwaki.prune(model, out, "2:4", solver="wanda", **how)
        case "quantize":
            niwaki.quantize(model, out, "int4:32", effort="none", **how)
        case "compress":
            niwaki.compress(model, out, 0.7, **how)
        case "parameters":
            niwaki.compress(model, out, parameters=0.8, **how)
        case "gguf":
            niwaki.export(model, out, "gguf-q8_0")
        case "compressed-tensors":
            niwaki.quantize(model, out / "whole", "int4:64", effort="none", **how)
            niwaki.export(out / "whole", out / "packed", "compressed-tensors")
        case _:
            niwaki.shrink(model, out, effort="fast", **{cell: PARTS[cell]}, **how)


def tried(family: Family, directory: Path) -> dict[str, str]:
    """By cell, "" for what works, or the error's line."""
    cells = {}
    text = save(directory / "model", family)
    for name in CELLS:
        out = directory / name
        try:
            command(name, directory / "model", out, text)
            if (out / "config.json").exists() and name != "compress":
                check(out)
            cells[name] = ""
        except NiwakiError as error:
            cells[name] = " ".join(str(error).split()).replace(f"{directory}/", "")
        except Exception as error:
            cells[name] = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())}"[:500]
    return cells


def check(out: Path) -> None:
    """ValueError unless transformers loads a result, with a place for every tensor."""
    config = json.loads((out / "config.json").read_text())
    found = getattr(transformers, config["architectures"][0]).from_pretrained(out, output_loading_info=True)[1]
    wrong = {
        kind: sorted(found[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if found[kind]
    }
    if wrong:
        raise ValueError(f"transformers does not load it: {wrong}")


def main() -> None:
    """Adds to the record, a family at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--families", nargs="+", default=[*FAMILIES], choices=[*FAMILIES], metavar="NAME")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    old = json.loads(arguments.record.read_text())["families"] if arguments.record.exists() else {}
    for name in arguments.families:
        with tempfile.TemporaryDirectory() as directory:
            old[name] = {"type": FAMILIES[name].kind, "cells": tried(FAMILIES[name], Path(directory))}
        families = {each: old[each] for each in FAMILIES if each in old}
        record = {"families": families, "versions": versions()}
        arguments.record.write_text(json.dumps(record, indent=1) + "\n")
        print(name, *(f"  {cell}: {line or 'yes'}" for cell, line in old[name]["cells"].items()), sep="\n", flush=True)


if __name__ == "__main__":
    main()
