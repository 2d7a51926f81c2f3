"""Weights on a grid that are trained elsewhere stay on it, and so do zeros."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import niwaki
from niwaki import Calibration, Measurement
from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import CheckpointError, UsageError
from niwaki.finetuning.grids import plain_name
from niwaki.layer.grid import parse_grid
from niwaki.models.formats import format_of
from niwaki.models.streamed import StreamedModel
from support.covering import FULL
from support.models import message

TEXT = Calibration("demo", samples=4, length=64)
NONE = Measurement(samples=0)


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pruned") / "model"
    niwaki.prune("demo", path, 0.5, effort="fast", quantize="int4:64", calibration=TEXT, measurement=NONE)
    return path


def train(model: nn.Module, rate: float = 1e-3, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=rate)
    for step in range(steps):
        tokens = torch.randint(0, 4096, (2, 32), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("stored", "frozen"),
    [(torch.bfloat16, False), *[(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)] * FULL],
)
def test_what_is_trained_is_on_it(
    pruned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, frozen: bool
) -> None:
    """In what is saved in the dtype it was trained in, and in another; also of what was frozen at first."""
    monkeypatch.chdir(pruned.parent)
    model: Any = AutoModelForCausalLM.from_pretrained(pruned.name, dtype=torch.float32)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    model.requires_grad_(not frozen)
    kept = niwaki.keep_zeros(model)
    model.requires_grad_(True)
    train(model, 1e-2)
    kept.check()
    monkeypatch.chdir(tmp_path)
    model.to(stored).save_pretrained(tmp_path / "trained")
    kept.check_saved(tmp_path / "trained")
    AutoTokenizer.from_pretrained(pruned).save_pretrained(tmp_path / "trained")
    checkpoint = Checkpoint(tmp_path / "trained")
    grid, changed = parse_grid("int4:64"), 0
    for matrix in StreamedModel(checkpoint, "cpu").matrices():
        (scales,) = format_of(checkpoint).read_parts(checkpoint, matrix)
        W = matrix.read(checkpoint)
        assert grid.has(W, scales)
        old = matrix.within(before[f"model.layers.{matrix.block}.{matrix.parameter}"])
        assert torch.equal(W == 0, old == 0)
        changed += int((W.float() != old).sum())
    assert changed > 1000
    packed = niwaki.pack(tmp_path / "trained", tmp_path / "packed")  # which refuses what is not on its grid
    assert packed.packed < packed.matrices


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_types_of_llama_cpp_stay_what_they_are(tmp_path: Path, stored: torch.dtype) -> None:
    """Their scales are in float16, whatever the weights are stored in."""
    source, out = tmp_path / "source", tmp_path / "trained"
    niwaki.quantize("demo", source, "q5_0", effort="none", measurement=NONE)
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    kept = niwaki.keep_zeros(model)
    train(model, 1e-2)
    model.to(stored).save_pretrained(out)
    kept.check_saved(out)
    AutoTokenizer.from_pretrained(source).save_pretrained(out)
    checkpoint, before = Checkpoint(out), Checkpoint(source)
    changed = 0
    for matrix in StreamedModel(checkpoint, "cpu").matrices():
        (scales,), (old,) = (format_of(each).read_parts(each, matrix) for each in (checkpoint, before))
        assert torch.equal(scales, old)
        assert parse_grid("q5_0").has(matrix.read(checkpoint), scales)
        changed += int((matrix.read(checkpoint).float() != matrix.read(before).float()).sum())
    assert changed > 1000


def test_small_steps_add_up(pruned: Path) -> None:
    """Those that are too small to reach the next number of the grid, one at a time; as by hand."""
    model: Any = AutoModelForCausalLM.from_pretrained(pruned, dtype=torch.float32)
    name = "model.layers.0.mlp.up_proj.weight"
    value = model.get_parameter(name)
    first, niwaki_keeps = value.detach().clone(), niwaki.keep_zeros(model)
    optimizer = torch.optim.SGD([value], lr=1.0)
    checkpoint = Checkpoint(pruned)
    matrix = next(m for m in StreamedModel(checkpoint, "cpu").matrices(0) if m.name == "mlp.up_proj")
    (scales,) = format_of(checkpoint).read_parts(checkpoint, matrix)
    step: Tensor = scales.float().repeat_interleave(64, 1)[:, : value.shape[1]] * -0.3
    exact = first.clone()
    for _ in range(4):
        value.grad = step.clone()
        optimizer.step()
        exact = torch.where(first != 0, exact - step, 0.0)
        expected = (exact / scales.float().repeat_interleave(64, 1)).round().clamp(-8, 7)
        expected = torch.where((first != 0) & (expected == 0), exact.sign(), expected)
        found = value.detach() / scales.float().repeat_interleave(64, 1)
        # What lies in the middle of two numbers may go to either.
        assert float(((found - expected).abs() > 0.1).float().mean()) < 0.01
    assert niwaki_keeps.zeros
    assert float((value.detach() != first)[first != 0].float().mean()) > 0.8


def test_adapters_leave_it(pruned: Path, tmp_path: Path) -> None:
    """So that the configuration does not say any more that weights are on it."""
    model: Any = AutoModelForCausalLM.from_pretrained(pruned, dtype=torch.float32)
    with pytest.warns(FutureWarning):
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    kept = niwaki.keep_zeros(adapted)
    train(adapted, 0.05)
    with pytest.warns(UserWarning, match="not on the grid int4:64"):
        merged: Any = niwaki.merge_lora(adapted)
    merged.save_pretrained(tmp_path)
    kept.check_saved(tmp_path)
    assert not (tmp_path / "quantization").exists()
    assert "quantization" not in json.loads((tmp_path / "config.json").read_text())["pruning_config"]


def test_refused(pruned: Path, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(pruned)
    model.config._name_or_path = str(tmp_path / "nowhere")
    assert "load it from the directory" in message(lambda: niwaki.keep_zeros(model), CheckpointError)
    given: dict[str, Any] = {"blocks": (0, 1), "calibration": TEXT, "measurement": NONE, "effort": "fast"}
    niwaki.prune("demo", tmp_path / "factors", 0.5, solver="double-sparse", **given)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "factors")
    assert "only niwaki heal trains" in message(lambda: niwaki.keep_zeros(model), UsageError)


def test_names() -> None:
    for name in ("module.a.weight", "_orig_mod.module.a.weight", "base_model.model.a.base_layer.weight", "a.weight"):
        assert plain_name(name) == "a.weight"
    assert plain_name("model.layers.0.a.weight") == "model.layers.0.a.weight"
