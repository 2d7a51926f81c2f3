"""What config.json may say of how a model runs: nothing that chooses code."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import niwaki
from niwaki.checkpoints import tensors
from niwaki.checkpoints.reading import SINGLE_NAME, Checkpoint
from niwaki.checkpoints.tensors import header_of, new_shard
from niwaki.errors import CheckpointError
from niwaki.evaluation import tasks
from niwaki.models.streamed import StreamedModel
from niwaki.models.structure import check_sizes, predicts_words, read_config, structure
from support.models import edit_json, edited, message, reference, save_model, save_model_with_tokenizer
from support.real_configurations import CONFIGURATIONS

#: Of code on the hub, of packages, and of kernels that transformers gets from the hub.
ATTENTION = ("someone/attention", "flash_attention_2", {"": "someone/attention"})
NAMED: list[dict[str, Any]] = [
    *({"_attn_implementation": named} for named in ATTENTION),
    *({"attn_implementation": "kernels-community/flash-attn2:forward"}, {"_experts_implementation": "sonicmoe"}),
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
    with edited(path) as weights:
        weights["model.layers.0.mlp.up_proj.weight"][:, 1:] = 0  # or none would be packed
    tokens = torch.arange(8)[None]
    expected = reference(path, torch.float32)(tokens).logits
    edit_json(path / "config.json", _attn_implementation="someone/attention")
    niwaki.pack(path, tmp_path / "packed")
    for each in (path, tmp_path / "packed"):
        torch.testing.assert_close(niwaki.load(each, "cpu", "float32")(tokens).logits, expected, atol=1e-5, rtol=1e-5)
    pytest.importorskip("lm_eval")
    assert tasks._load(str(path), "cpu", "float32").model.config._attn_implementation in ("eager", "sdpa")


def hollow(path: Path, config: dict[str, Any]) -> Path:
    """A model of ``config`` in its full size, whose file has nothing but a header: the rest takes no space."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    model = structure(path, torch.bfloat16, predicts_words(path, ()))
    shapes = {name: (value.dtype, tuple(value.shape)) for name, value in model.named_parameters() if value.is_meta}
    entries = new_shard(SINGLE_NAME, shapes)
    (path / SINGLE_NAME).write_bytes(header_of(entries))
    os.truncate(path / SINGLE_NAME, max(entry.offset + entry.size for entry in entries.values()))
    return path


#: Those that guards have refused; the others take a second each.
_REFUSED = ("Qwen2-57B-A14B", "gemma-3n-E4B", "gemma-4-E2B", "Doge-20M", "all-mpnet-base-v2", "distilbert-sst-2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _REFUSED else pytest.mark.slow) for name in CONFIGURATIONS]
)
def test_real_configurations_pass_all_guards(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are no counts: 262,144 words in a layer, 20,480 neurons of an expert that is shared."""
    monkeypatch.setattr(tensors, "safe_open", lambda *_, **__: contextlib.nullcontext())  # maps all of a file
    config = CONFIGURATIONS[name]
    model = StreamedModel(Checkpoint(hollow(tmp_path / "model", config)), "cpu", "bfloat16")
    depths = [getattr(model.config, each, None) for each in ("num_hidden_layers", "num_layers", "encoder_layers")]
    assert len(model.blocks) / (1 + config.get("is_encoder_decoder", False)) in depths
    assert all(model.matrices(index) for index in range(len(model.blocks)))
    assert model.window_length(None) == min(2048, model.positions or 2048)
    model.check_coverage()
    ends = ("TextModel", "BertModel", "RobertaModel", "ForMaskedLM", "Classification")
    assert model.has_head != config["architectures"][0].endswith(ends)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(("num_hidden_layers", 10**9), ("num_experts", 10**9), ("n_routed_experts", 1 << 20), ("encoder_layers", 1e9)),
        *(("zero_expert_num", 10**9), ("num_local_experts", 10**9)),
    ],
)
def test_counts_that_building_would_not_end_with(name: str, count: float) -> None:
    config = {"text_config": {name: count}}
    assert f"asks for {name} " in message(lambda: check_sizes(config, Path("config.json")), CheckpointError)
