"""Models in FP8 and MXFP4: read as bfloat16 a tensor at a time, by others' decoders to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import niwaki
from niwaki.checkpoints.reading import INDEX_NAME, SINGLE_NAME, Checkpoint
from niwaki.errors import CheckpointError, UnsupportedModelError
from support.encoded import in_fp8, in_mxfp4, split
from support.models import edit_json, message, random_tokens
from support.runs import tensors

CALIBRATION, HELDOUT = random_tokens(8, 24), random_tokens(3, 24, seed=1)


@pytest.mark.parametrize("make", [in_fp8, lambda path: in_fp8(path, None), in_mxfp4], ids=["fp8", "whole", "mxfp4"])
@pytest.mark.slow
def test_tensors_are_those_that_others_read(tmp_path: Path, make: Any) -> None:
    meant = make(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.is_encoded
    assert "quantization_config" not in checkpoint.config
    assert checkpoint.entries.keys() == meant.keys()
    for key, value in meant.items():
        assert torch.equal(checkpoint.read(key), value), key
        assert checkpoint.entries[key].shape == tuple(value.shape)
        if value.ndim == 3:
            assert torch.equal(checkpoint.read(key, 2), value[2])


def test_one_scale_in_a_list(tmp_path: Path) -> None:
    """It is that of the whole matrix."""
    meant = in_fp8(tmp_path, None)
    stored = load_file(tmp_path / SINGLE_NAME)
    stored |= {key: value.reshape(1) for key, value in stored.items() if key.endswith("_scale_inv")}
    save_file(stored, tmp_path / SINGLE_NAME, {"format": "pt"})
    checkpoint = Checkpoint(tmp_path)
    assert all(torch.equal(checkpoint.read(key), value) for key, value in meant.items())


@pytest.mark.parametrize(("make", "shards"), [(in_fp8, 1), (in_fp8, 2), (in_mxfp4, 2)])
@pytest.mark.slow
def test_a_pruned_model_is_in_bfloat16(tmp_path: Path, make: Any, shards: int) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    meant = make(source)
    if shards == 2:
        split(source)
    record = niwaki.prune(source, out, 0.5, effort="fast", calibration=CALIBRATION, measurement=HELDOUT)
    assert any("what is written is in bfloat16" in note for note in record.notes)
    written = tensors(out)
    assert len([*out.glob("model*.safetensors")]) == shards
    assert written.keys() == meant.keys()
    pruned = {key for key in meant if (written[key] == 0).sum() > (meant[key] == 0).sum()}
    assert pruned == {key for key in meant if "_proj" in key and "bias" not in key and meant[key].ndim > 1}
    for key in meant.keys() - pruned:
        assert torch.equal(written[key], meant[key]), key
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    with torch.no_grad():
        logits = model(HELDOUT).logits[:, :-1].flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, HELDOUT[:, 1:].flatten()).exp().item()
    assert record.perplexity["after"].value == pytest.approx(loss, rel=0.01)  # bfloat16


@pytest.mark.slow
def test_scales_in_a_file_of_their_own(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    meant = in_fp8(source)
    stored = load_file(source / SINGLE_NAME)
    names = {key: f"model-0000{1 + key.endswith('_scale_inv')}-of-00002.safetensors" for key in stored}
    for name in set(names.values()):
        save_file({key: stored[key] for key in stored if names[key] == name}, source / name, {"format": "pt"})
    (source / SINGLE_NAME).unlink()
    (source / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    record = niwaki.prune(source, out, 0.5, effort="fast", calibration=CALIBRATION, measurement=None)
    assert not any("not carried over" in note for note in record.notes)
    assert Checkpoint(out).entries.keys() == meant.keys()
    AutoModelForCausalLM.from_pretrained(out)


def test_other_blocks_are_another_model(tmp_path: Path) -> None:
    in_fp8(tmp_path)
    before = Checkpoint(tmp_path).fingerprint()
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "fp8", "weight_block_size": [17, 20]})
    assert Checkpoint(tmp_path).fingerprint() != before


def test_a_tensor_that_is_there_twice(tmp_path: Path) -> None:
    in_mxfp4(tmp_path)
    key = "model.layers.0.mlp.experts.down_proj"
    stored = load_file(tmp_path / SINGLE_NAME)
    save_file({**stored, key: torch.zeros(4, 96, 64)}, tmp_path / SINGLE_NAME, {"format": "pt"})
    assert "twice" in message(lambda: Checkpoint(tmp_path), CheckpointError)


@pytest.mark.slow
def test_experts_are_removed_from_fp8(tmp_path: Path) -> None:
    in_fp8(tmp_path / "source")
    niwaki.shrink(tmp_path / "source", tmp_path / "out", experts=0.25, calibration=CALIBRATION, measurement=HELDOUT)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.n_routed_experts == 6


def damaged(path: Path, key: str, **changes: Any) -> None:
    """Replaces, or with None takes out, a tensor of the only file."""
    ((suffix, value),) = changes.items()
    kept = {**load_file(path / SINGLE_NAME), f"{key}_{suffix}": value}
    save_file({name: each for name, each in kept.items() if each is not None}, path / SINGLE_NAME, {"format": "pt"})


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    key = "model.layers.0.mlp.down_proj.weight"
    in_fp8(tmp_path / "whole")
    cases = [
        (None, "without its scales"),
        (torch.ones(7, 7), r"scales would be \(2, 3\); they are F32 \(7, 7\)"),
        (torch.full((2, 3), 3e38), "NaN or infinite"),
    ]
    for number, (value, said) in enumerate(cases):
        path = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", path)
        damaged(path, key, scale_inv=value)
        with pytest.raises(CheckpointError, match=said):
            Checkpoint(path).read(key)
    edit_json(tmp_path / "whole" / "config.json", quantization_config={"quant_method": "fp8", "weight_block_size": 7})
    assert "two whole numbers" in message(lambda: Checkpoint(tmp_path / "whole"), CheckpointError)
    in_mxfp4(tmp_path / "mx")
    damaged(tmp_path / "mx", "model.layers.0.mlp.experts.down_proj", scales=None)
    assert "scales would be U8" in message(lambda: Checkpoint(tmp_path / "mx"), CheckpointError)


@pytest.mark.parametrize("what", ["a scale", "no scale", "a code", "the other code", "too large a power"])
@pytest.mark.slow
def test_what_is_no_number_is_seen_before_any_work(tmp_path: Path, what: str) -> None:
    in_mxfp4(tmp_path / "model") if what == "too large a power" else in_fp8(tmp_path / "model")
    Checkpoint(tmp_path / "model")
    stored = load_file(tmp_path / "model" / SINGLE_NAME)
    key = "model.layers.1.mlp.experts.down_proj"
    if what == "too large a power":
        stored[f"{key}_scales"][1, 2, 0] = 255
    else:
        key = "model.layers.0.mlp.down_proj.weight"
        scales, codes = stored[f"{key}_scale_inv"], stored[key].view(torch.uint8)
        numbers = {"a scale": (scales, torch.inf), "no scale": (scales, torch.nan)}
        where, value = {**numbers, "a code": (codes, 0x7F), "the other code": (codes, 0xFF)}[what]
        where[1, 2] = value
    save_file(stored, tmp_path / "model" / SINGLE_NAME, {"format": "pt"})
    said = message(lambda: Checkpoint(tmp_path / "model"), CheckpointError)
    assert key in said
    assert "NaN or infinite values" in said


def test_only_what_was_pruned_is_packed(tmp_path: Path) -> None:
    in_fp8(tmp_path / "source")
    said = message(lambda: niwaki.pack(tmp_path / "source", tmp_path / "out"), UnsupportedModelError)
    assert "prune or quantize it first" in said
    assert not (tmp_path / "out").exists()
