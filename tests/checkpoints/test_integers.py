"""Models that other programs have quantized: read as what they are, and their whole numbers kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import niwaki
from niwaki.checkpoints.reading import SINGLE_NAME, Checkpoint
from niwaki.errors import CheckpointError, UnsupportedModelError
from niwaki.models.scales import FILE
from support.encoded import dequantized, in_integers
from support.models import edit_json, message, random_tokens

CALIBRATION = random_tokens(8, 24)
HOW = ("gptq", "gptq_v2", "awq", "compressed-tensors")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 3, 8])
def test_they_are_read_as_what_they_stand_for(tmp_path: Path, how: str, symmetric: bool, bits: int) -> None:
    bits = 4 if how == "awq" else bits
    meant = in_integers(tmp_path, how, bits, symmetric=symmetric)
    checkpoint = Checkpoint(tmp_path)
    assert "quantization_config" not in checkpoint.config
    for key, parts in meant.items():
        assert torch.equal(checkpoint.read(key), dequantized(*parts)), key
    assert not [key for key in checkpoint.entries if not key.endswith("weight")]


def test_groups_in_another_order(tmp_path: Path) -> None:
    meant = in_integers(tmp_path, "gptq", order=True)
    indices = load_file(tmp_path / SINGLE_NAME)
    for key, parts in meant.items():
        index = indices[key.replace("weight", "g_idx")].long()
        assert torch.equal(Checkpoint(tmp_path).read(key), dequantized(*parts, index))


@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_reads_the_same(tmp_path: Path, symmetric: bool) -> None:
    compressors: Any = pytest.importorskip("compressed_tensors.compressors")
    quantization: Any = pytest.importorskip("compressed_tensors.quantization")
    meant = in_integers(tmp_path, "compressed-tensors", symmetric=symmetric)
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    scheme = quantization.QuantizationConfig.model_validate(settings).config_groups["group_0"]
    stored = load_file(tmp_path / SINGLE_NAME)
    for key in meant:
        parts = {name.split(".")[-1]: value for name, value in stored.items() if name.startswith(key + "_")}
        assert torch.equal(
            Checkpoint(tmp_path).read(key), compressors.PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
        )


@pytest.mark.parametrize(
    ("how", "kind", "symmetric", "bits", "stored"),
    [
        *((how, "gguf", True, 4, "Q4_0") for how in HOW),
        ("gptq", "gguf-q4_0", True, 4, "Q4_0"),
        ("gptq", "gguf-q8_0", True, 8, "Q8_0"),
        ("gptq_v2", "gguf", True, 3, "Q4_0"),
        *((how, "gguf", False, 4, "Q4_1") for how in HOW),
        ("compressed-tensors", "gguf", False, 5, "Q5_1"),
    ],
)
def test_no_whole_number_changes_on_the_way_to_llama_cpp(
    tmp_path: Path, how: str, kind: Any, symmetric: bool, bits: int, stored: str
) -> None:
    gguf = pytest.importorskip("gguf")
    meant = in_integers(tmp_path / "model", how, bits, symmetric=symmetric)
    notes = niwaki.export(tmp_path / "model", tmp_path / "out.gguf", kind)
    assert not any("rounded to the nearest" in note for note in notes)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    names = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down", "v_proj": "attn_v"}
    for key, (q, s, z) in meant.items():
        *_, block, _, name, _ = key.split(".")
        if name not in names:  # whose rows have another order there
            continue
        tensor = tensors[f"blk.{block}.{names[name]}.weight"]
        assert tensor.tensor_type.name == stored
        found = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
        index = torch.arange(q.shape[1]) // 32
        scales = s.float()[:, index]
        assert torch.equal((found / scales + z[:, index]).round().long(), q)
        if symmetric:
            assert torch.equal(found, (q - z[:, index]).float() * scales)
        else:
            assert torch.allclose(found, (q - z[:, index]).float() * scales, atol=2e-4)


@pytest.mark.parametrize("how", HOW)
def test_the_same_grid_without_a_text(tmp_path: Path, how: str) -> None:
    meant = in_integers(tmp_path / "model", how)
    niwaki.quantize(tmp_path / "model", tmp_path / "out", "int4:32", effort="none", measurement=None)
    scales = load_file(tmp_path / "out" / FILE)
    made = Checkpoint(tmp_path / "out")
    for key, (q, s, z) in meant.items():
        assert torch.equal(made.read(key), dequantized(q, s, z))
        found = scales[f"{key}_scale"].float().repeat_interleave(32, dim=1)
        assert torch.equal((made.read(key).float() / found).round().abs().long(), (q - z[:, :1]).abs())


def test_a_text_leaves_them_as_well(tmp_path: Path) -> None:
    meant = in_integers(tmp_path / "model", "gptq")
    record = niwaki.quantize(
        tmp_path / "model", tmp_path / "out", "int4:32", effort="fast", calibration=CALIBRATION, measurement=None
    )
    assert any("GPTQ, 4 bits; what is written is in float16" in note for note in record.notes)
    for key, parts in meant.items():
        assert torch.equal(Checkpoint(tmp_path / "out").read(key), dequantized(*parts))


def edited(path: Path, name: str, value: torch.Tensor | None) -> None:
    kept = load_file(path / SINGLE_NAME)
    kept.pop(name, None)
    save_file(kept | ({} if value is None else {name: value}), path / SINGLE_NAME, {"format": "pt"})


def test_what_does_not_fit(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj"
    cases = {
        "qzeros": (None, f"'{name}.qzeros', which belongs to it, is missing"),
        "scales": (torch.ones(3, 7).half(), "its tensors do not fit each other: .qweight I32"),
        "g_idx": (torch.full((64,), 99).int(), "inputs of groups that are not there"),
        "weight": (torch.ones(2, 2), "appears twice"),
    }
    for part, (value, said) in cases.items():
        in_integers(tmp_path / part, "gptq")
        edited(tmp_path / part, f"{name}.{part}", value)
        with pytest.raises(CheckpointError, match=said):
            Checkpoint(tmp_path / part).read(f"{name}.weight")
    in_integers(tmp_path / "shape", "compressed-tensors")
    for shape in ([7, 7, 7], [128.0, 64.0]):
        edited(tmp_path / "shape", f"{name}.weight_shape", torch.tensor(shape))
        assert "do not fit each other" in message(lambda: Checkpoint(tmp_path / "shape"), CheckpointError)
    in_integers(tmp_path / "infinite", "awq")
    stored = load_file(tmp_path / "infinite" / SINGLE_NAME)[f"{name}.scales"]
    edited(tmp_path / "infinite", f"{name}.scales", torch.full_like(stored, 6e4))
    assert "NaN or infinite" in message(lambda: Checkpoint(tmp_path / "infinite"), CheckpointError)


def test_a_layout_that_is_not_said_is_the_usual_one(tmp_path: Path) -> None:
    meant = in_integers(tmp_path / "model", "gptq")
    settings = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    edit_json(tmp_path / "model" / "config.json", quantization_config=settings | {"checkpoint_format": None})
    found = Checkpoint(tmp_path / "model")
    assert all(torch.equal(found.read(key), dequantized(*parts)) for key, parts in meant.items())


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "gptq", "checkpoint_format": "marlin"},
        {"quant_method": "gptq", "checkpoint_format": ["gptq"]},
        {"quant_method": "awq", "version": "gemv"},
        {"quant_method": "auto-round", "packing_format": "mlx"},
        {"quant_method": "bitsandbytes"},
    ],
)
def test_layouts_that_are_not_known(tmp_path: Path, settings: dict[str, Any]) -> None:
    in_integers(tmp_path / "model", "gptq")
    edit_json(tmp_path / "model" / "config.json", quantization_config=settings)
    said = message(lambda: niwaki.export(tmp_path / "model", tmp_path / "out", "gguf"), UnsupportedModelError)
    assert settings["quant_method"] in said or "cannot be exported" in said
