"""Which of transformers' types of language models niwaki prunes: a tiny random model of each is built and pruned.

    python scripts/model_types.py RECORD                      # all types, minutes; add --effort balanced
    python scripts/model_types.py RECORD --kinds llama bert   # only these; the others stay as they are in the record

docs/models.md has a table of benchmarks/results/model_types.json.

What comes out is checked with transformers and safetensors alone: what changed has the zeros that were asked for, and
the losses are those of the whole model before and after, of an encoder with a decoder on its targets.
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
from functools import partial
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
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

import niwaki
from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import NiwakiError
from niwaki.models import streamed
from niwaki.models.pairs import SOURCES, parted, rows_of
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
    "prophetnet": {
        **dict.fromkeys(("num_hidden_layers", "num_attention_heads")),
        **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 2),
        **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    },
    "speecht5": {"conv_kernel": (4,), "conv_dim": (32,), "conv_stride": (4,), "num_feat_extract_layers": 1},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "xmod": {"default_language": "en_XX"},
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
#: Pairs for an encoder with a decoder: of a source and a target of other lengths each.
PAIRS = [(row[: 6 + i].tolist(), [1, *row[-5 - i :].tolist()]) for i, row in enumerate(TOKENS)]
#: By how transformers loads them, the types of models and the names of their classes.
_NAMES: tuple[dict[str, str], ...] = (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)
#: Weights of a model that is not tiny, and seconds for one that is.
LARGEST, PATIENCE = 2 * 10**8, 300


def kinds() -> list[str]:
    """All types that transformers has of language models, with and without images or sound."""
    return sorted({kind for names in _NAMES for kind in names})


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
    order = (2, 3, 1, 0) if config.is_encoder_decoder else (1, 0, 2, 3)
    config.architectures = [next(_NAMES[i][kind] for i in order if kind in _NAMES[i])]
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
        model = built(kind)
        model.save_pretrained(directory / "model")
    except Exception as error:
        return {"outcome": "not built", "reason": _line(error)}
    text = _text(model)
    try:
        record = niwaki.prune(
            directory / "model",
            directory / "out",
            0.5,
            effort=effort,
            calibration=text,
            measurement=None,
            compute="cpu",
        )
    except NiwakiError as error:
        return {"outcome": "refused", "reason": _line(error).replace(f"{directory}/", "")}
    except Exception as error:
        return {"outcome": "failed", "reason": f"{_line(error)}; {traceback.extract_tb(error.__traceback__)[-1]}"}
    wrong = [] if record.effort["name"] != "fast" or _is_sparse(directory) else ["zeros"]
    wrong += [f"losses of the {name}" for name in ("model", "out") if not _is_the_same(directory / name, text)]
    return {"outcome": "wrong" if wrong else "pruned", "reason": ", ".join(wrong)}


def _tensors(directory: Path) -> dict[str, Tensor]:
    return {key: value for file in directory.glob("*.safetensors") for key, value in load_file(file).items()}


def _is_sparse(directory: Path) -> bool:
    """Whether all that has changed is half zeros."""
    before, after = _tensors(directory / "model"), _tensors(directory / "out")
    changed = [after[key] for key, value in before.items() if not torch.equal(value, after[key])]
    return bool(changed) and all(abs(float((value == 0).float().mean()) - 0.5) < 0.02 for value in changed)


@torch.no_grad()
def _text(model: PreTrainedModel) -> Tensor:
    """Tokens, or pairs where ``model`` is an encoder with a decoder, of sounds where it hears."""
    if not model.config.is_encoder_decoder:
        return TOKENS
    if model.main_input_name == "input_ids":
        return rows_of(PAIRS)
    parts = [model.config, *(each for each in vars(model.config).values() if isinstance(each, PreTrainedConfig))]
    sizes = {name: value for part in parts for name, value in vars(part).items() if isinstance(value, int)}
    bins = next((sizes[name] for name in ("num_mel_bins", "input_feat_per_channel") if name in sizes), 32)
    shapes = [(bins, 2 * sizes.get("max_source_positions", 50)), (64, bins), (64, 128), (bins, 64), (4096,)]
    shapes += [(3, size, size) for size in (16, 32, 64, 224)] + [(12, width) for width in (770, 2 + 3 * 8 * 8, 34)]
    for shape in shapes:
        sounds = [{model.main_input_name: torch.rand(1, *shape)} for _ in PAIRS]
        with contextlib.suppress(Exception):
            model.eval()(**sounds[0], decoder_input_ids=torch.tensor([[1, 5]]))
            numbers = [SOURCES.number(f"{id(model)} {i}", partial(dict, each)) for i, each in enumerate(sounds)]
            return rows_of([([number], target) for number, (_, target) in zip(numbers, PAIRS, strict=True)])
    return rows_of(PAIRS)


@torch.no_grad()
def _is_the_same(directory: Path, text: Tensor) -> bool:
    """Whether losses block by block are those of the whole model."""
    model = StreamedModel(Checkpoint(directory), "cpu", "float32")
    states = model.embed(text)
    for block in model.stream():
        block.advance(states)
    whole = auto_class(model.model.config).from_pretrained(directory, dtype=torch.float32).eval()
    if model.pairs:
        for row, found in zip(text, model.losses(states), strict=True):
            source, target = parted(row)
            is_text = model.pairs.sources == "text"
            given = {"input_ids": source[None]} if is_text else dict(SOURCES[int(source)])
            if whole.config.model_type == "led":
                given["global_attention_mask"] = (torch.arange(len(source)) == 0).long()[None]
            said = whole(**given, decoder_input_ids=target[None, :-1], use_cache=False).logits.log_softmax(-1)
            losses = -said[0].gather(1, target[1:, None]).squeeze(1)
            if not torch.allclose(found[: len(losses)], losses, rtol=1e-4, atol=1e-4):
                return False
        return True
    if not model.has_head:
        with model.last_states() as last:
            ours = [last(hidden, tokens) for hidden, tokens in zip(states.hidden, states.tokens, strict=True)]
        theirs = whole.get_submodule(model._parts.decoder_path.rstrip("."))(input_ids=TOKENS).last_hidden_state
        return bool(torch.allclose(torch.cat(ours), theirs, rtol=1e-4, atol=1e-4))
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
    # In two batches, because what blocks get beside hidden states must not depend on the tokens.
    streamed.TOKENS_PER_BATCH = TOKENS.numel() // 2
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
