"""Which of transformers' types of language models niwaki prunes: a tiny random model of each is built and pruned.

    python scripts/model_types.py RECORD                      # all types, minutes; add --effort balanced
    python scripts/model_types.py RECORD --kinds llama bert   # only these; the others stay as they are in the record

docs/models.md has a table of benchmarks/results/model_types.json.

What comes out is checked with transformers and safetensors alone: what changed has the zeros that were asked for, and
the language model's losses are those of the whole model before and after.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import logging
import signal
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

import niwaki
from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import NiwakiError
from niwaki.models import streamed
from niwaki.models.streamed import StreamedModel
from niwaki.models.structure import auto_class
from niwaki.records.record import versions

#: What configurations call their sizes, and what is given for them where they have them.
SIZES = {
    **dict.fromkeys(["vocab_size", "vocab_size_per_layer_input"], 64),
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "embed_dim", "embedding_size", "out_hidden_size"], 32),
    **dict.fromkeys(["attention_hidden_size", "lru_width", "projection_dim", "text_hidden_size"], 32),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "n_inner", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim"], 48),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth"], 2),
    **dict.fromkeys(["encoder_layers", "decoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 4),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "index_n_heads", "linear_num_key_heads"], 2),
    **dict.fromkeys(["head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim"], 8),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"], 8),
    **dict.fromkeys(["linear_num_heads"], 4),
    "hidden_size_per_layer_input": 8,
    **dict.fromkeys(["max_position_embeddings", "n_positions", "max_seq_len"], 64),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k"], 2),
    **dict.fromkeys(["n_shared_experts", "num_shared_experts", "n_group", "topk_group", "first_k_dense_replace"], 1),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 16),
    **dict.fromkeys(["moe_shared_expert_intermediate_size", "image_size", "q_lora_rank", "kv_lora_rank"], 16),
    **dict.fromkeys(["sliding_window", "attention_window", "index_topk", "chunk_size", "mamba_chunk_size"], 8),
    **dict.fromkeys(["mamba_d_state", "state_size", "patch_size"], 8),
    **dict.fromkeys(["mamba_d_conv", "conv_kernel", "mamba_n_heads", "linear_num_value_heads", "rotary_dim"], 4),
    **dict.fromkeys(["mamba_expand", "spatial_merge_size", "eos_token_id"], 2),
    **dict.fromkeys(["mamba_n_groups", "bos_token_id"], 1),
    **dict.fromkeys(["input_embedding_size", "output_embedding_size"], 32),
    **dict.fromkeys(["router_hidden_size", "dim_head", "pronunciation_embed_dim", "shape_embed_dim"], 8),
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "dim_ff": 48,
    "rescale_every": 1,
    "pad_token_id": 0,
}
#: Rotary positions of images and text, in halves of a head of 8.
_SECTIONS = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 1.0,
    }
}
_WITH_SECTIONS = (
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "paddleocr_vl_text",
    "glm4v_text",
    "glm46v_text",
    "glm4v_moe_text",
    "qwen2_5_omni_text",
)
#: Blocks of which some share a transformer.
_SHARING = ["mamba", "hybrid", "hybrid", "mamba", "hybrid", "hybrid"]
#: Of blocks with a full and a sliding window.
_BY_WINDOW = {
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
    }
}
#: What some types need in addition, or instead.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys((*_WITH_SECTIONS, "glm_ocr_text", "glmga_text"), _SECTIONS),
    "chameleon": {"vocabulary_map": {"<image>": 1}},
    "cohere_compass_text": _BY_WINDOW,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [16, 16], "moe_num_experts": 4},
    "falcon": {"head_dim": None},
    # The second block uses the keys and values of the first.
    "gemma3n_text": {
        "altup_num_inputs": 2,
        "intermediate_size": 128,
        "laurel_rank": 4,
        "layer_types": ["full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
    },
    "gemma4_text": {"layer_types": ["full_attention", "full_attention"], "num_kv_shared_layers": 1},
    "granite4_vision": {"deepstack_layer_map": []},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"head_dim": 16, "n_groups": 1},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "xlnet": {"max_position_embeddings": None},
    "xlstm": {"v_head_dim": None},
    "zamba": {
        "layer_types": _SHARING,
        "num_hidden_layers": len(_SHARING),
        "attention_hidden_size": None,
        "mamba_d_state": 2,
        "mamba_dt_rank": 1,
    },
    "zamba2": {
        "layers_block_type": _SHARING,
        "num_hidden_layers": len(_SHARING),
        **dict.fromkeys(("attention_hidden_size", "head_dim", "num_key_value_heads")),
        "num_mem_blocks": 2,
        "adapter_rank": 1,
        "use_shared_attention_adapter": True,
    },
    "zaya": {"num_experts_per_tok": 1},
}
TOKENS = torch.randint(3, 60, (8, 16), generator=torch.Generator().manual_seed(0))
#: In two batches, because what blocks get beside hidden states must not depend on the tokens.
streamed.TOKENS_PER_BATCH = TOKENS.numel() // 2
#: Weights of a model that is not tiny, and seconds for one that is.
LARGEST, PATIENCE = 2 * 10**8, 120


def kinds() -> list[str]:
    """All types that transformers has of language models, with and without images or sound."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES})


def tiny(of: type[PreTrainedConfig], depth: int = 0) -> PreTrainedConfig:
    """A configuration with small sizes, also of the models within."""
    kind, alias = str(getattr(of, "model_type", "")), getattr(of, "attribute_map", {})
    names = {*inspect.signature(of.__init__).parameters, *getattr(of, "__dataclass_fields__", {}), *dir(of), *alias}
    values: dict[str, Any] = {name: size for name, size in SIZES.items() if name in names}
    values = {name: value for name, value in values.items() if alias.get(name) not in values}
    if "kv_lora_rank" in values:  # latent attention has as many heads of keys as of queries
        values["num_key_value_heads"] = values["num_attention_heads"]
    usual = None
    for name, within in (getattr(of, "sub_configs", None) or {}).items() if depth < 3 else ():
        with contextlib.suppress(Exception):  # what has no small sizes gets its own, or none
            if not isinstance(within, type) or within.__name__ == "AutoConfig":
                usual = usual or of()
                within = type(getattr(usual, name))
            values[name] = tiny(within, depth + 1).to_dict()
    for name, value in EXCEPTIONS.get(kind, {}).items():
        if value is None:
            values.pop(name, None)
        else:
            values[name] = value
    return of(**values)


def built(kind: str) -> PreTrainedModel:
    """A tiny model of this type; ValueError where it would not be tiny."""
    config = tiny(CONFIG_MAPPING[kind])
    with_more = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(kind)
    config.architectures = [with_more or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    with torch.device("meta"):
        sizes = {name: value.numel() for name, value in auto_class(config).from_config(config).named_parameters()}
    if sum(sizes.values()) > LARGEST:
        raise ValueError(f"{sum(sizes.values()):,} weights, most of them in {max(sizes, key=sizes.__getitem__)}")
    torch.manual_seed(0)
    model: PreTrainedModel = auto_class(config).from_config(config, dtype=torch.float32)
    return model


def outcome(kind: str, effort: str, directory: Path) -> dict[str, Any]:
    """What becomes of a type: "pruned", "refused", "wrong", "failed" (a traceback), or "not built"."""
    try:
        built(kind).save_pretrained(directory / "model")
    except Exception as error:
        return {"outcome": "not built", "reason": _line(error)}
    try:
        record = niwaki.prune(
            directory / "model",
            directory / "out",
            0.5,
            effort=effort,
            calibration=TOKENS,
            measurement=None,
            compute="cpu",
        )
    except NiwakiError as error:
        return {"outcome": "refused", "reason": _line(error).replace(f"{directory}/", "")}
    except Exception as error:
        return {"outcome": "failed", "reason": f"{_line(error)}; {traceback.extract_tb(error.__traceback__)[-1]}"}
    wrong = [] if record.effort["name"] != "fast" or _is_sparse(directory) else ["zeros"]
    wrong += [f"losses of the {name}" for name in ("model", "out") if not _is_the_same(directory / name)]
    return {"outcome": "wrong" if wrong else "pruned", "reason": ", ".join(wrong)}


def _tensors(directory: Path) -> dict[str, Tensor]:
    return {key: value for file in directory.glob("*.safetensors") for key, value in load_file(file).items()}


def _is_sparse(directory: Path) -> bool:
    """Whether all that has changed is half zeros."""
    before, after = _tensors(directory / "model"), _tensors(directory / "out")
    changed = [after[key] for key, value in before.items() if not torch.equal(value, after[key])]
    return bool(changed) and all(abs(float((value == 0).float().mean()) - 0.5) < 0.02 for value in changed)


@torch.no_grad()
def _is_the_same(directory: Path) -> bool:
    """Whether losses block by block are those of the whole model."""
    model = StreamedModel(Checkpoint(directory), "cpu", "float32")
    states = model.embed(TOKENS)
    for block in model.stream():
        block.advance(states)
    whole = auto_class(model.model.config).from_pretrained(directory, dtype=torch.float32).eval()
    head = whole.get_output_embeddings()
    models = [module for module in whole.modules() if isinstance(module, PreTrainedModel)]
    speaker = [module for module in models if module.get_output_embeddings() is head][-1]
    log_p = speaker(input_ids=TOKENS, use_cache=False).logits.log_softmax(-1)
    losses = -log_p[:, :-1].gather(2, TOKENS[:, 1:, None]).squeeze(2)
    return bool(torch.allclose(model.losses(states), losses, rtol=1e-4, atol=1e-4))


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


@contextlib.contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def over(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def main() -> None:
    """Adds to the record, a type at a time, and prints how many of each outcome there are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--kinds", nargs="+", default=kinds())
    parser.add_argument("--effort", default="fast")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    file = arguments.record
    results: dict[str, dict[str, Any]] = json.loads(file.read_text())["types"] if file.exists() else {}
    for kind in arguments.kinds:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                with _limit(PATIENCE):
                    result = outcome(kind, arguments.effort, Path(scratch))
            except Exception as error:
                result = {"outcome": "failed", "reason": _line(error)}
        results.setdefault(kind, {})[arguments.effort] = result
        record = {"types": results, "versions": versions()}
        file.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        print(f"{kind}: {result['outcome']} {result['reason']}", flush=True)
    print(Counter(result["outcome"] for each in results.values() for result in each.values()))


if __name__ == "__main__":
    main()
