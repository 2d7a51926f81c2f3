"""What config.json may say of how a model runs: nothing that chooses code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import niwaki
from niwaki.checkpoints.reading import SINGLE_NAME
from niwaki.evaluation import tasks
from niwaki.models.structure import read_config, structure
from support.models import edit_json, reference, save_model, save_model_with_tokenizer

#: Of code on the hub, of packages, and of kernels that transformers gets from the hub.
NAMED: list[dict[str, Any]] = [
    {"_attn_implementation": "someone/attention"},
    {"attn_implementation": "kernels-community/flash-attn2:forward"},
    {"_attn_implementation": "flash_attention_2"},
    {"_attn_implementation": {"": "someone/attention"}},
    {"_experts_implementation": "sonicmoe"},
    {"_attn_implementation": "someone/attention", "use_kernels": True, "auto_map": {"AutoConfig": "code.Config"}},
]


@pytest.mark.parametrize("named", NAMED, ids=lambda named: str(*list(named)[:1]))
def test_files_do_not_choose_code(tmp_path: Path, named: dict[str, Any]) -> None:
    path = save_model(tmp_path / "model", "qwen3_moe")
    (path / "code.py").write_text("raise AssertionError('this is run')")
    expected = structure(path, torch.float32).config
    edit_json(path / "config.json", **named)
    config = structure(path, torch.float32).config
    for name in ("_attn_implementation", "_experts_implementation"):
        assert getattr(config, name) == getattr(expected, name)


def test_nor_do_parts_of_them(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", "gemma3")
    values = json.loads((path / "config.json").read_text())
    for part in ("text_config", "vision_config"):
        values[part] |= {"_attn_implementation": "someone/attention", "_experts_implementation": "deepgemm"}
    (path / "config.json").write_text(json.dumps(values))
    config = read_config(path)
    parts: list[Any] = [config, config.text_config, config.vision_config]
    for part in parts:
        assert (part._attn_implementation, part._experts_implementation) == (None, None)


def test_all_ways_to_load_one(tmp_path: Path) -> None:
    path = save_model_with_tokenizer(tmp_path / "model")
    weights = load_file(path / SINGLE_NAME)
    weights["model.layers.0.mlp.up_proj.weight"][:, 1:] = 0  # or none would be packed
    save_file(weights, path / SINGLE_NAME, {"format": "pt"})
    tokens = torch.arange(8)[None]
    expected = reference(path, torch.float32)(tokens).logits
    edit_json(path / "config.json", _attn_implementation="someone/attention")
    niwaki.pack(path, tmp_path / "packed")
    for each in (path, tmp_path / "packed"):
        torch.testing.assert_close(niwaki.load(each, "cpu", "float32")(tokens).logits, expected, atol=1e-5, rtol=1e-5)
    pytest.importorskip("lm_eval")
    assert tasks._load(str(path), "cpu", "float32").model.config._attn_implementation in ("eager", "sdpa")
