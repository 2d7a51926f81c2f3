"""What people have and take for a model: an error says what it is and what to do, in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from niwaki.errors import CheckpointError, NiwakiError, UnsupportedModelError, UsageError
from niwaki.evaluation.inspect import inspect
from support.models import edit_json, message


def said(model: Path, kind: type[NiwakiError] = CheckpointError) -> str:
    return message(lambda: list(inspect(model)), kind)


def files(*names: str, config: bool = False) -> Callable[[Path], None]:
    """Only these; with ``config`` the model's config.json, too."""

    def make(model: Path) -> None:
        for path in model.iterdir():
            if not (config and path.name == "config.json"):
                path.unlink()
        for name in names:
            (model / name).parent.mkdir(parents=True, exist_ok=True)
            (model / name).write_text("{}")

    return make


def moved(*places: str) -> Callable[[Path], None]:
    """The model is in these folders of the directory instead."""

    def make(model: Path) -> None:
        inside = model.rename(model.with_name("inside"))
        for place in places:
            shutil.copytree(inside, model / place)

    return make


def adapter(model: Path) -> None:
    files("adapter_model.safetensors")(model)
    (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/base"}))


def diffusers(model: Path) -> None:
    moved("text_encoder")(model)
    (model / "model_index.json").write_text("{}")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (adapter, ["an adapter of some/base", "merge_and_unload"]),
        (files("adapter_config.json", "adapter_model.bin", config=True), ["an adapter", "merge_and_unload"]),
        (diffusers, ["Diffusers", "model/text_encoder"]),
        (moved("0_Transformer"), ["sentence-transformers", "model/0_Transformer"]),
        (moved("checkpoint-500", "checkpoint-1000", "checkpoint-70"), ["checkpoint-70, ", "checkpoint-1000"]),
        (moved("snapshots/0123abcd"), ["give ", "snapshots/0123abcd"]),
        (files("zero_to_fp32.py", "global_step5/x.pt"), ["DeepSpeed", "zero_to_fp32.py"]),
        (files("pytorch_model_fsdp_0/__0_0.distcp"), ["sharded training", "merge-weights"]),
        (files("consolidated.safetensors", "params.json"), ["its maker", "consolidated.safetensors"]),
        (files("consolidated.00.pth", config=True), ["consolidated.00.pth", "model.safetensors"]),
        (files("model.fp16.safetensors", config=True), ["variant", "model.fp16.safetensors"]),
        (files("model.safetensors.index.fp16.json", config=True), ["variant"]),
        (files("model-00001-of-00002.safetensors", config=True), ["index", "download"]),
        (files("tf_model.h5", config=True), ["TensorFlow", "from_tf"]),
        (files("flax_model.msgpack", config=True), ["Flax", "from_flax"]),
        (files("onnx/model.onnx", config=True), ["ONNX"]),
        (files("openvino_model.xml", "openvino_model.bin", config=True), ["OpenVINO"]),
        (files("model.nemo"), ["NeMo"]),
        (files("pytorch_model.bin", "onnx/model.bin", config=True), ["pickled", "pytorch_model.bin"]),
        (files("model.pt", config=True), ["model.pt", "safetensors"]),
        (files("training_args.bin", config=True), ["neither model.safetensors nor model.safetensors.index.json"]),
        (files("readme.txt"), ["no config.json"]),
    ],
)
def test_directories(model: Path, make: Callable[[Path], None], expected: list[str]) -> None:
    make(model)
    text = said(model)
    assert str(model) in text
    assert all(part in text for part in expected), text


def test_a_whole_model_beside_an_adapter(model: Path) -> None:
    (model / "adapter_config.json").write_text("{}")
    assert list(inspect(model))


def test_files(model: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        assert said(model / name, UsageError).endswith(f"give its directory, {model}")
    (tmp_path / "alone.safetensors").touch()
    assert "a model is a directory" in said(tmp_path / "alone.safetensors", UsageError)


def renamed(change: Callable[[str], str]) -> Callable[[Path], None]:
    """With other names of its tensors."""

    def make(model: Path) -> None:
        file = model / "model.safetensors"
        save_file({change(key): value for key, value in load_file(file).items()}, file, {"format": "pt"})

    return make


def with_more(name: str, **config: Any) -> Callable[[Path], None]:
    """With one more tensor, and more in config.json."""

    def make(model: Path) -> None:
        file = model / "model.safetensors"
        save_file({**load_file(file), name: torch.zeros(4, dtype=torch.uint32)}, file, {"format": "pt"})
        edit_json(model / "config.json", **config)

    return make


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (renamed(lambda key: f"_orig_mod.{key}"), ["torch.compile", "'_orig_mod'"]),
        (renamed(lambda key: key.replace("layers.1.", "layers.1._orig_mod.")), ["torch.compile", "'_orig_mod'"]),
        (renamed(lambda key: f"module.{key}"), ["DataParallel", "'module.'"]),
        (renamed(lambda key: f"base_model.model.{key}"), ["peft", "merge_and_unload"]),
        (renamed(lambda key: f"_fsdp_wrapped_module.{key}"), ["FSDP"]),
        (renamed(lambda key: key.replace("q_proj.", "q_proj.base_layer.")), ["peft, not merged"]),
        (with_more(f"{Q}._weight_mask"), ["Model-Optimizer", "modelopt.torch.sparsity.export"]),
        (with_more(f"{Q}.scales", quantization={"group_size": 64, "bits": 4}), ["MLX, 4 bits", "prune the original"]),
        (with_more(f"{Q}.qweight"), [f"quantized (as '{Q}.qweight' shows)", "prune the original"]),
        (with_more(f"{Q}.weight.absmax"), ["quantized", ".absmax"]),
        (with_more(f"{Q}.SCB"), ["quantized", ".SCB"]),
        (with_more(f"{Q}.weight_packed"), ["quantized", ".weight_packed"]),
        (with_more(f"{Q}.x", quantization_config={"quant_method": "awq"}), ["quantized (awq)", "prune the original"]),
        (with_more(f"{Q}.x", quantization_config={}), ["an empty quantization_config", "remove that"]),
    ],
)
def test_weights(model: Path, make: Callable[[Path], None], expected: list[str]) -> None:
    make(model)
    text = said(model, UnsupportedModelError)
    assert str(model) in text
    assert all(part in text for part in expected), text
