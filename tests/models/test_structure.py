"""What config.json may say of how a model runs: nothing that chooses code."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import niwaki
from niwaki.checkpoints import tensors
from niwaki.checkpoints.reading import SINGLE_NAME, Checkpoint
from niwaki.checkpoints.tensors import header_of, new_shard
from niwaki.errors import CheckpointError
from niwaki.evaluation import tasks
from niwaki.models import structure as structures
from niwaki.models.streamed import StreamedModel
from niwaki.models.structure import check_sizes, predicts_words, read_config, structure
from support.models import each_family, edit_json, message, reference, save_model, save_model_with_tokenizer
from support.real_configurations import CONFIGURATIONS

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


@each_family(0)
def test_a_model_that_was_built_before(tmp_path: Path, case: str) -> None:
    """Is made as the first one, and has nothing in common with it; of another dtype or configuration it is another."""
    paths = [save_model(tmp_path / name, case) for name in ("one", "other")]
    first, second = (structure(path, torch.float32) for path in paths)
    assert type(first) is type(second)
    assert repr(first) == repr(second)
    assert first.config.to_dict() == second.config.to_dict()
    assert first.config._attn_implementation == second.config._attn_implementation
    assert first.config._experts_implementation == second.config._experts_implementation == "eager"
    for (name, module), (_, other) in zip(first.named_modules(), second.named_modules(), strict=True):
        assert module is not other
        assert not other.training
        assert vars(module).keys() == vars(other).keys(), name
        its_own = [getattr(module, "config", None) is first.config, getattr(other, "config", None) is second.config]
        assert its_own[0] == its_own[1]
    parameters, others = (dict(model.named_parameters(remove_duplicate=False)) for model in (first, second))
    assert parameters.keys() == others.keys()
    for name, value in others.items():
        assert value.is_meta == parameters[name].is_meta
        assert not value.requires_grad
        assert (value.shape, value.dtype) == (parameters[name].shape, parameters[name].dtype)
    assert _ties(parameters) == _ties(others)
    buffers = dict(second.named_buffers())
    for name, buffer in first.named_buffers():
        assert torch.equal(buffer, buffers[name])
        buffer.fill_(1)
    for name, buffer in structure(paths[0], torch.float32).named_buffers():
        assert torch.equal(buffer, buffers[name])
    assert structure(paths[0], torch.bfloat16).dtype == torch.bfloat16
    edit_json(paths[0] / "config.json", pad_token_id=5)
    assert structure(paths[0], torch.float32).config.pad_token_id == 5


def _ties(parameters: dict[str, Any]) -> list[int]:
    """For each, where the same one comes first."""
    first: dict[int, int] = {}
    return [first.setdefault(id(value), i) for i, value in enumerate(parameters.values())]


def test_few_models_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, kept = save_model(tmp_path / "model", "llama"), dict[Any, bytes]()
    monkeypatch.setattr(structures, "_KEPT", kept)
    monkeypatch.setattr(structures, "_MOST_KEPT", 2)
    for token in (2, 3, 4, 2):
        edit_json(path / "config.json", pad_token_id=token)
        assert structure(path, torch.float32).config.pad_token_id == token
        assert len(kept) <= 2
    before, own = list(kept), structures._built

    def with_a_function(*given: Any) -> Any:
        model = own(*given)
        vars(model)["function"] = lambda: 0
        return model

    edit_json(path / "config.json", pad_token_id=6)
    with monkeypatch.context() as changed:  # which cannot be copied
        changed.setattr(structures, "_built", with_a_function)
        assert structure(path, torch.float32).config.pad_token_id == 6
    with monkeypatch.context() as changed:
        changed.setattr(structures, "_LARGEST_KEPT", 1000)
        assert structure(path, torch.float32).config.pad_token_id == 6
    edit_json(path / "config.json", configuration_files=["config.1.0.0.json"])
    (path / "config.1.0.0.json").write_text((path / "config.json").read_text().replace('_id": 6', '_id": 7'))
    assert structure(path, torch.float32).config.pad_token_id == 7
    assert list(kept) == before


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
    ends = (
        "TextModel",
        "BertModel",
        "RobertaModel",
        "ForMaskedLM",
        "ForSequenceClassification",
        "ForTokenClassification",
    )
    assert model.has_head != config["architectures"][0].endswith(ends)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(("num_hidden_layers", 10**9), ("num_experts", 10**9), ("n_routed_experts", 1 << 20), ("encoder_layers", 1e9)),
        *(("zero_expert_num", 10**9), ("num_local_experts", 10**9)),
    ],
)
def test_counts_that_building_would_not_end_with(name: str, count: float) -> None:
    assert f"asks for {name} " in message(
        lambda: check_sizes({"text_config": {name: count}}, Path("config.json")), CheckpointError
    )
