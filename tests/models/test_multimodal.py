"""Models of text and images, or sound: the language model inside is pruned, everything else stays byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedModel

from niwaki.errors import UnsupportedModelError
from niwaki.models.checkpoint.reading import Checkpoint
from niwaki.models.streamed import StreamedModel
from niwaki.options import Compute
from niwaki.pruning.prune import prune
from support.models import message, random_tokens
from support.runs import raw, tensors, zeros

TOKENS = random_tokens(4, 24)
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
SIGHT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
KINDS: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", **SIGHT, "image_size": 16, "patch_size": 8},
    },
    "smolvlm": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {**SIGHT, "image_size": 16, "patch_size": 8},
    },
    "idefics3": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {**SIGHT, "image_size": 16, "patch_size": 8},
    },
    "qwen3_vl": {
        "text_config": TEXT,
        "vision_config": {"hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 4, "patch_size": 8}
        | {"out_hidden_size": 32, "deepstack_visual_indexes": [0]},
    },
    "voxtral": {
        "text_config": {"model_type": "llama", **TEXT},
        "audio_config": {**SIGHT, "num_mel_bins": 8, "max_source_positions": 16},
    },
}


def save(path: Path, kind: str) -> Path:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForMultimodalLM.from_config(AutoConfig.for_model(kind, **KINDS[kind]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "norm" not in name:
                parameter.normal_(0, 0.15)
    model.save_pretrained(path)
    return path


@torch.no_grad()
def whole_losses(path: Path) -> Tensor:
    model = AutoModelForMultimodalLM.from_pretrained(path, dtype=torch.float32).eval()
    log_p: Tensor = model(input_ids=TOKENS).logits.log_softmax(-1)
    return -log_p[:, :-1].gather(2, TOKENS[:, 1:, None]).squeeze(2)


def losses(path: Path) -> Tensor:
    model = StreamedModel(Checkpoint(path), "cpu", "float32")
    states = model.embed(TOKENS)
    for block in model.stream():
        block.advance(states)
    return model.losses(states)


@pytest.mark.parametrize("kind", KINDS)
def test_the_language_model_inside_is_pruned(tmp_path: Path, kind: str) -> None:
    model = save(tmp_path / "model", kind)
    torch.testing.assert_close(losses(model), whole_losses(model))
    record = prune(model, tmp_path / "out", 0.5, solver="sparsegpt", calibration=TOKENS, compute=Compute("cpu"))
    assert len(record.matrices) == 14
    assert record.left_dense == []
    before, after = tensors(model), tensors(tmp_path / "out")
    pruned = {key for key, value in after.items() if raw(value) != raw(before[key])}
    assert len(pruned) == 14
    assert all(".layers." in key and ("language_model." in key or "text_model." in key) for key in pruned)
    assert all(zeros(after[key]) == after[key].numel() // 2 for key in pruned)
    torch.testing.assert_close(losses(tmp_path / "out"), whole_losses(tmp_path / "out"))


def test_several_models_in_one(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen2_5_omni").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    text = message(lambda: StreamedModel(Checkpoint(tmp_path / "model"), "cpu"), UnsupportedModelError)
    assert "several models in one (qwen2_5_omni)" in text
