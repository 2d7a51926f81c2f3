"""Tensors that files have and transformers' model has not: draft layers, blocks too many, what is unknown."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

import niwaki
from niwaki.evaluation.inspect import opened
from niwaki.exports.export import export
from niwaki.models.outside import find_extra
from niwaki.packed.pack import pack, unpack
from niwaki.records.record import Record
from support.command import Command
from support.models import SIZES, edit_json, edited, random_tokens, save_model, save_model_with_tokenizer, save_random
from support.runs import raw, tensors

QUICK: dict[str, Any] = {"calibration": random_tokens(8, 16), "measurement": None, "compute": "cpu"}
SMALL: dict[str, Any] = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def add(model: Path, more: dict[str, Tensor]) -> dict[str, Tensor]:
    """Puts ``more`` into the file of a model's weights."""
    with edited(model) as values:
        values.update(more)
    return more


def block_after(model: Path) -> dict[str, Tensor]:
    """A third block like the second."""
    values = load_file(model / "model.safetensors")
    return {key.replace("layers.1.", "layers.2."): values[key].clone() for key in values if "layers.1." in key}


def layer_after(model: Path) -> dict[str, Tensor]:
    """A draft layer as GLM and DeepSeek have it: a block with the next number, and what joins it to the others."""
    more = {"eh_proj": torch.ones(32, 64), "enorm": torch.ones(32), "shared_head.head": torch.ones(64, 32)}
    return block_after(model) | {f"model.layers.2.{name}.weight": value for name, value in more.items()}


def mtp(prefix: str) -> dict[str, Tensor]:
    """A draft layer as Qwen has it: under a name of its own."""
    return {
        f"{prefix}.fc.weight": torch.ones(32, 64),
        f"{prefix}.norm.weight": torch.ones(32),
        f"{prefix}.layers.0.self_attn.q_proj.weight": torch.ones(32, 32),
    }


def deepseek(path: Path) -> dict[str, Tensor]:
    return add(save_model(path, "deepseek_v3"), layer_after(path))


def glm(path: Path) -> dict[str, Tensor]:
    save_random(path, AutoConfig.for_model("glm4_moe", first_k_dense_replace=1, **SMALL, **EXPERTS))
    values = json.loads((path / "config.json").read_text())
    values.pop("num_nextn_predict_layers", None)  # transformers says that there is one
    (path / "config.json").write_text(json.dumps(values))
    return add(path, layer_after(path))


def qwen(path: Path) -> dict[str, Tensor]:
    save_random(path, AutoConfig.for_model("qwen3_5_text", layer_types=["full_attention"] * 2, **SMALL))
    edit_json(path / "config.json", mtp_num_hidden_layers=1)
    return add(path, mtp("mtp"))


FAMILIES = {"deepseek_v3": deepseek, "glm4_moe": glm, "qwen3_5_text": qwen}
#: What is removed of each.
PARTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"blocks": 1},
    "glm4_moe": {"experts": 0.25},
    "qwen3_5_text": {"neurons": 0.5, "blocks": 1},
}
DRAFTS = "draft layer for several tokens"


@pytest.fixture(params=FAMILIES)
def drafting(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A model, and its draft layers."""
    if request.param not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {request.param}")
    return tmp_path / "model", FAMILIES[request.param](tmp_path / "model")


def prune(model: Path, out: Path, **changes: Any) -> Record:
    return niwaki.prune(model, out, 0.5, solver="magnitude", **QUICK, **changes)


def shrink(model: Path, out: Path, **parts: Any) -> Record:
    return niwaki.shrink(model, out, **parts, **QUICK)


def kept(more: dict[str, Tensor], out: Path) -> bool:
    """Whether a model has them all, to the bit."""
    written = tensors(out)
    return all(raw(written[key]) == raw(value) for key, value in more.items())


@pytest.mark.slow
def test_draft_layers_are_named_and_stay(
    tmp_path: Path, drafting: tuple[Path, dict[str, Tensor]], niwaki_: Command
) -> None:
    model, more = drafting
    (found,) = find_extra(opened(model))
    assert (found.what, found.is_draft, set(found.keys)) == (DRAFTS, True, set(more))
    assert found.size == sum(value.nbytes for value in more.values())
    assert found.name in ("model.layers.2", "mtp")
    assert f"{found.name} " in niwaki_("inspect", model).out
    record = prune(model, tmp_path / "out")
    assert str(found) in record.notes[-1]
    assert DRAFTS in (tmp_path / "out" / "README.md").read_text()
    assert kept(more, tmp_path / "out")


@pytest.mark.slow
def test_smaller_models_have_no_draft_layers(tmp_path: Path, drafting: tuple[Path, dict[str, Tensor]]) -> None:
    model, more = drafting
    kind = json.loads((model / "config.json").read_text())["model_type"]
    record = shrink(model, tmp_path / "out", **PARTS[kind])
    assert tensors(tmp_path / "out").keys().isdisjoint(more)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    counts = {name: value for name, value in config.items() if re.search("nextn|mtp_num|num_mtp", name)}
    assert not any(counts.values())
    assert counts or kind == "glm4_moe"  # a transformers that does not know them does not say that there is one
    assert DRAFTS in record.notes[-1]
    assert record.structure is not None
    # They are no part of what the model was and is.
    before, after = tensors(model), AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    sizes = [{key: value.numel() for key, value in one.items() if key not in more} for one in (before, after)]
    assert record.structure.parameters == dict(zip(("before", "after"), (sum(s.values()) for s in sizes), strict=True))
    was, now = (sum(size for key, size in each.items() if ".layers." in key) for each in sizes)
    assert record.structure.removed == pytest.approx(1 - now / was)
    assert find_extra(opened(tmp_path / "out")) == []


@pytest.mark.parametrize("uses", [True, False, None])
@pytest.mark.slow
def test_smaller_models_do_not_generate_with_draft_layers(tmp_path: Path, uses: bool | None) -> None:
    """What is said of generating goes with the layers; all else of it stays, and so does all where none goes."""
    deepseek(tmp_path / "model")
    file = tmp_path / "model" / "generation_config.json"
    edit_json(file, top_k=7, **({} if uses is None else {"use_mtp": uses}))
    before = file.read_text()
    record = shrink(tmp_path / "model", tmp_path / "out", blocks=1)
    after = (tmp_path / "out" / "generation_config.json").read_text()
    said = "and generation_config.json not to use them (use_mtp false)"
    assert any(said in note for note in record.notes) == bool(uses)
    assert json.loads(after) == json.loads(before) | ({"use_mtp": False} if uses else {})
    assert uses or after == before
    prune(tmp_path / "model", tmp_path / "pruned")
    assert (tmp_path / "pruned" / "generation_config.json").read_text() == before


SINKS = {f"model.layers.{i}.self_attn.sinks": torch.ones(4) for i in range(2)}


@pytest.mark.parametrize(
    ("more", "name", "what"),
    [
        ({"v_head.summary.weight": torch.ones(1, 32)}, "v_head", "unknown to transformers"),
        (SINKS, "model.layers.*.self_attn.sinks", "unknown to transformers"),
        ({"vision_tower.layers.0.fc.weight": torch.ones(4, 4)}, "vision_tower", "not of the language"),
        (None, "model.layers.2", "beyond the model's 2 blocks"),
        (mtp("model.mtp_layers"), "model.mtp_layers", DRAFTS),
        *(({f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4)}, "", "") for i in (2, 1)),
    ],
)
@pytest.mark.slow
def test_what_else_files_have(tmp_path: Path, more: dict[str, Tensor] | None, name: str, what: str) -> None:
    model, out = save_model(tmp_path / "model", "llama"), tmp_path / "out"
    keys = add(model, more or block_after(model)).keys()
    found = find_extra(opened(model))
    assert [each.name for each in found] == ([name] if name else [])
    assert all(each.what.startswith(what) for each in found)
    record = prune(model, out)
    assert tensors(out).keys() >= keys
    assert bool(name) == any(name in note for note in record.notes if name)
    # What has the sizes of blocks goes where these change.
    record, there = shrink(model, tmp_path / "smaller", heads=0.5), tensors(tmp_path / "smaller").keys() & keys
    gone = "layers" in name and "vision" not in name
    assert there == (set() if gone else keys)
    assert bool(name) == any(name in note for note in record.notes if name)


def test_packing_keeps_them(tmp_path: Path) -> None:
    model, packed, back = (tmp_path / name for name in ("model", "packed", "back"))
    more = deepseek(model)
    prune(model, tmp_path / "out")
    pack(tmp_path / "out", packed)
    assert [each.what for each in find_extra(opened(packed))] == [DRAFTS]
    unpack(packed, back)
    assert (back / "model.safetensors").read_bytes() == (tmp_path / "out" / "model.safetensors").read_bytes()
    assert kept(more, back)


@pytest.mark.slow
def test_the_export_says_that_they_are_not_packed(tmp_path: Path) -> None:
    model, out = save_model(tmp_path / "model", "llama"), tmp_path / "exported"
    more = add(model, mtp("mtp"))
    prune(model, tmp_path / "out", quantize="int4:16")
    export(tmp_path / "out", out)
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert {"mtp.fc", "mtp.layers.0.self_attn.q_proj", "lm_head", "model.embed_tokens"} == set(settings["ignore"])
    assert kept(more, out)
    AutoModelForCausalLM.from_pretrained(out)  # it has no modules of these names, and does not mind


def test_files_for_llama_cpp_are_without_them(tmp_path: Path) -> None:
    """They are named as everywhere, and what transformers computes is not."""
    pytest.importorskip("gguf")
    model = save_model_with_tokenizer(tmp_path / "model")
    add(model, mtp("mtp") | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    (note,) = niwaki.export(model, tmp_path / "model.gguf", "gguf-f16")
    (found,) = find_extra(opened(model))
    assert note == f"left out, as not in transformers' model either: {found}"
    assert "inv_freq" not in note
    assert DRAFTS in note


def test_healing_keeps_them(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama")
    more = add(model, mtp("mtp"))
    prune(model, tmp_path / "pruned")
    record = niwaki.heal(tmp_path / "pruned", tmp_path / "out", model, tokens=64, **QUICK)
    assert any(DRAFTS in note for note in record.notes)
    assert kept(more, tmp_path / "out")
