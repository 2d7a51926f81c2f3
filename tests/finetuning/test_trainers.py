"""Kept zeros in the trainers of transformers and TRL."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import niwaki
from niwaki import Calibration, Measurement
from support.covering import some

TEXT = "The pruned tree grows where it was not cut, and nowhere else. "
ARGUMENTS: dict[str, Any] = {
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
    "save_steps": 2,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "logging_steps": 100,
}


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that ships with niwaki, 2:4."""
    path = tmp_path_factory.mktemp("pruned") / "model"
    text = Calibration("demo", samples=4, length=64)
    niwaki.prune("demo", path, "2:4", effort="fast", calibration=text, measurement=Measurement(samples=0))
    return path


def zeros(path: Path) -> int:
    model = AutoModelForCausalLM.from_pretrained(path)
    return sum(int((value == 0).sum()) for value in model.parameters() if value.ndim > 1)


def test_trainer_of_transformers(pruned: Path, tmp_path: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(pruned), AutoModelForCausalLM.from_pretrained(pruned)
    before = [value.detach().clone() for value in model.parameters()]
    ids = tokenizer(TEXT * 4)["input_ids"][:32]
    rows = [{"input_ids": ids, "labels": ids}] * 16
    callback = niwaki.KeepZeros()
    arguments = TrainingArguments(output_dir=str(tmp_path), **ARGUMENTS)
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback]).train()
    assert callback.zeros
    for value, old in zip(model.parameters(), before, strict=True):
        if old.ndim > 1 and bool((old == 0).any()):
            assert torch.equal(value == 0, old == 0)
            assert not torch.equal(value, old)
    for step in (2, 4):
        assert zeros(tmp_path / f"checkpoint-{step}") == callback.zeros.zeros == zeros(pruned)
        config = json.loads((tmp_path / f"checkpoint-{step}" / "config.json").read_text())
        assert config["pruning_config"]["pattern"] == "2:4"


def test_a_checkpoint_without_them(pruned: Path, tmp_path: Path) -> None:
    """Is said, and its configuration does not say that it is pruned."""
    model = AutoModelForCausalLM.from_pretrained(pruned)
    callback = niwaki.KeepZeros()

    class State:
        global_step, is_world_process_zero = 3, True

    class Arguments:
        output_dir = str(tmp_path)

    callback.on_train_begin(Arguments, State, None, model=model)
    with torch.no_grad():
        model.get_parameter("model.layers.0.mlp.up_proj.weight").fill_(1)
    model.save_pretrained(tmp_path / "checkpoint-3")
    with pytest.warns(UserWarning, match="says no longer that it is pruned"):
        callback.on_save(Arguments, State, None)
    assert "pruning_config" not in json.loads((tmp_path / "checkpoint-3" / "config.json").read_text())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # TRL's own
@pytest.mark.parametrize("how", some(["sft", "sft lora", "dpo"], 2))
def test_trainers_of_trl(pruned: Path, tmp_path: Path, how: str) -> None:
    from peft import LoraConfig

    trl: Any = importlib.import_module("trl")
    arguments = {**ARGUMENTS, "output_dir": str(tmp_path), "max_length": 32, "bf16": False}
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if "lora" in how else None
    model, tokenizer = AutoModelForCausalLM.from_pretrained(pruned), AutoTokenizer.from_pretrained(pruned)
    if how == "dpo":
        row = {"prompt": "The tree ", "chosen": "grows.", "rejected": "is cut down."}
        kind, config = trl.DPOTrainer, trl.DPOConfig(**arguments)
    else:
        row, kind, config = {"text": TEXT * 2}, trl.SFTTrainer, trl.SFTConfig(**arguments)
    rows = Dataset.from_list([row] * 16)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    given = {"processing_class": tokenizer, "callbacks": [niwaki.KeepZeros()], "peft_config": lora}
    trainer = kind(model, args=config, train_dataset=rows, **given)
    trainer.train()
    trained: Any = niwaki.merge_lora(trainer.model) if lora else trainer.model
    trained.save_pretrained(tmp_path / "trained")
    assert zeros(tmp_path / "trained") == zeros(pruned)
    old = AutoModelForCausalLM.from_pretrained(pruned).state_dict()
    assert any(not torch.equal(value.cpu(), old[name]) for name, value in trained.state_dict().items())
