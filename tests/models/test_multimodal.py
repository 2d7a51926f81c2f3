"""Models of text and images, or sound: the language model inside is pruned, everything else stays byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMultimodalLM,
    Gemma3nVisionConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.gemma3n import modeling_gemma3n

from niwaki.errors import CheckpointError, UnsupportedModelError
from niwaki.exports.export import export
from niwaki.options import Compute, Measurement
from niwaki.recipes import prune, quantize
from support.covering import some
from support.models import SIZES, edited, message, random_tokens, save_random
from support.runs import raw, tensors, zeros
from support.streams import losses_of, stream_of, whole_losses

TOKENS = random_tokens(4, 24)
TEXT = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8}
SIGHT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
EYES = {**SIGHT, "image_size": 16, "patch_size": 8}
QWEN_EYES = {"hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 4, "patch_size": 8}
QWEN_EYES |= {"out_hidden_size": 32}
_LLAMA = {"model_type": "llama", **TEXT}
_GEMMA = TEXT | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 6}
_GEMMA |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
_GEMMA |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
KINDS: dict[str, dict[str, Any]] = {
    "mistral3": {"text_config": {"model_type": "mistral", **TEXT}, "vision_config": {"model_type": "pixtral", **EYES}},
    "qwen2_5_vl": {
        "text_config": TEXT | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        "vision_config": QWEN_EYES,
    },
    "llava": {"text_config": _LLAMA, "vision_config": {"model_type": "clip_vision_model", **EYES}},
    "smolvlm": {"text_config": _LLAMA, "vision_config": EYES},
    "idefics3": {"text_config": _LLAMA, "vision_config": EYES},
    "qwen3_vl": {"text_config": TEXT, "vision_config": QWEN_EYES | {"deepstack_visual_indexes": [0]}},
    "qwen3_vl_moe": {  # experts are the other way around in the files
        "text_config": TEXT | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        "vision_config": QWEN_EYES | {"deepstack_visual_indexes": [0]},
    },
    "blip-2": {  # does not run without images: the language model is one of its own
        "text_config": {"model_type": "opt", **TEXT, "word_embed_proj_dim": 32, "ffn_dim": 48},
        "vision_config": EYES,
        "qformer_config": {**SIGHT, "vocab_size": 64, "encoder_hidden_size": 32},
    },
    "mllama": {  # the second block looks at images, and does not run without
        "text_config": TEXT
        | {"model_type": "mllama_text_model", "cross_attention_layers": [1], "pad_token_id": 0}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "vision_config": EYES
        | {"attention_heads": 4, "num_global_layers": 1, "intermediate_layers_indices": [0]}
        | {"vision_output_dim": 64, "max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]]},
    },
    "gemma4": {  # the last two blocks use the keys and values of the first two
        "text_config": _GEMMA | {"global_head_dim": 16},
        "vision_config": SIGHT | {"num_key_value_heads": 4, "head_dim": 8, "patch_size": 8},
    },
    "gemma3n": {
        "text_config": _GEMMA
        | {"intermediate_size": [128] * 4, "laurel_rank": 4, "altup_num_inputs": 2}
        | {"activation_sparsity_pattern": [0.0] * 4},
        "vision_config": {"hidden_size": 16, "vocab_offset": 64, "vocab_size": 8},
        "audio_config": {"hidden_size": 16, "vocab_offset": 72, "vocab_size": 8, "input_feat_size": 16}
        | {"conf_num_attention_heads": 2, "conf_num_hidden_layers": 1, "sscp_conv_channel_size": [8, 4]},
    },
    "voxtral": {
        "text_config": {"model_type": "llama", **TEXT},
        "audio_config": {**SIGHT, "num_mel_bins": 8, "max_source_positions": 16},
    },
}


class Eyes(PreTrainedModel):
    """Instead of those of Gemma 3n, which need timm."""

    config_class = Gemma3nVisionConfig

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.lens = nn.Linear(4, 4)
        self.post_init()  # type: ignore[no-untyped-call]


class WithEyes(AutoModel):
    """Makes parts of Gemma 3n."""

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
        if isinstance(config, Gemma3nVisionConfig):
            return Eyes(config)
        made: PreTrainedModel = AutoModel.from_config(config, **options)
        return made


@pytest.fixture(autouse=True)
def without_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_gemma3n, "AutoModel", WithEyes)


def save(path: Path, kind: str) -> Path:
    return save_random(path, AutoConfig.for_model(kind, **KINDS[kind]), AutoModelForMultimodalLM)


def expected(path: Path) -> Tensor:
    """The losses, by transformers."""
    model = AutoModelForMultimodalLM.from_pretrained(path, dtype=torch.float32).eval()
    return whole_losses(model.language_model if model.config.model_type == "blip-2" else model, TOKENS)


@pytest.mark.parametrize("kind", some(KINDS, 5))
@pytest.mark.slow
def test_the_language_model_inside_is_pruned(tmp_path: Path, kind: str) -> None:
    model = save(tmp_path / "model", kind)
    torch.testing.assert_close(losses_of(stream_of(model), TOKENS), expected(model))
    record = prune(model, tmp_path / "out", 0.5, solver="sparsegpt", calibration=TOKENS, compute=Compute("cpu"))
    # OPT has no gate; of a mixture, 4 experts have two matrices each, in two tensors of a block.
    # Of Gemma's four blocks two have no k and v, and all have two for embeddings, and two beside attention in 3n.
    special = {"blip-2": (12, 12), "qwen3_vl_moe": (24, 12), "mllama": (7, 7), "gemma4": (32, 32), "gemma3n": (40, 40)}
    matrices, changed = special.get(kind, (14, 14))
    assert len(record.matrices) == matrices
    outside = "outside of the blocks"
    left = {
        "qwen3_vl_moe": {"router"},
        "gemma4": {outside},
        "gemma3n": {outside, "weights of streams"},
        "mllama": {"cross-attention, which text alone does not reach"},
    }
    assert {each.reason for each in record.left_dense} == left.get(kind, set())
    before, after = tensors(model), tensors(tmp_path / "out")
    pruned = {key for key, value in after.items() if raw(value) != raw(before[key])}
    assert len(pruned) == changed
    # Files of Qwen2.5-VL have the language model under the names of one without images.
    inside = ("model.layers.",) if kind == "qwen2_5_vl" else ("language_model.", "text_model.")
    assert all(".layers." in key and "visual" not in key and any(name in key for name in inside) for key in pruned)
    assert all(zeros(after[key]) == after[key].numel() // 2 for key in pruned)
    torch.testing.assert_close(losses_of(stream_of(tmp_path / "out"), TOKENS), expected(tmp_path / "out"))


@pytest.mark.parametrize("kind", ["mistral3", "qwen2_5_vl", "llava", "gemma4"])
@pytest.mark.slow
def test_packed_integers_of_the_language_model_inside(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("compressed_tensors")
    quantize(save(tmp_path / "model", kind), tmp_path / "out", "int8", measurement=Measurement(samples=0))
    export(tmp_path / "out", tmp_path / "packed")
    assert torch.equal(expected(tmp_path / "packed"), expected(tmp_path / "out"))


def test_experts_that_files_have_twice(tmp_path: Path) -> None:
    model = save(tmp_path / "model", "qwen3_vl_moe")
    with edited(model) as values:
        key = next(key for key in values if key.endswith("layers.0.mlp.experts.down_proj"))
        values[key.replace("model.language_model.", "language_model.")] = values[key].clone()
    assert "twice" in message(lambda: stream_of(model), CheckpointError)


@pytest.mark.slow
def test_several_models_in_one(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen2_5_omni").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    said = message(lambda: stream_of(tmp_path / "model"), UnsupportedModelError)
    assert "several models in one (qwen2_5_omni)" in said
