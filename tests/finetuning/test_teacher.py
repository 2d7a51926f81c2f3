"""The dense model's predictions as a loss for any trainer, without the dense model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import niwaki
from niwaki.errors import CalibrationError, OutputError, UsageError
from support.models import message, save_model

CASES = ("llama", "gemma2")  # plain logits and capped ones
DRAWING = torch.Generator().manual_seed(0)
ROWS = [torch.randint(1, 64, (length,), generator=DRAWING).tolist() for length in (9, 16, 5, 12)]


def pruned(path: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "layers" in name and value.ndim > 1:
                value.mul_(torch.rand(value.shape) > 0.5)
    return model


def batch() -> tuple[Tensor, Tensor]:
    """All rows, filled up on the right, and their masks."""
    longest = max(map(len, ROWS))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in ROWS])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ROWS])
    return tokens, mask


@pytest.mark.parametrize("case", CASES)
def test_the_divergence_and_its_gradient(tmp_path: Path, case: str) -> None:
    """By transformers and torch alone, in float64, on rows of several lengths with labels that leave some out."""
    path = save_model(tmp_path / "dense", case)
    teacher = niwaki.Teacher(path, tmp_path / "kept", compute="cpu")
    teacher.read(ROWS)
    model, reference = pruned(path), pruned(path).double()
    dense = AutoModelForCausalLM.from_pretrained(path).double()
    loss = teacher.loss(model)
    tokens, mask = batch()
    labels = torch.where(mask == 1, tokens, -100)
    labels[1, :7] = -100
    found = loss(model(input_ids=tokens, attention_mask=mask), labels)
    found.backward()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for i, row in enumerate(ROWS):
        ids = torch.tensor([row])
        with torch.no_grad():
            log_p = dense(input_ids=ids).logits[0, :-1].log_softmax(-1)
        log_q = reference(input_ids=ids).logits[0, :-1].log_softmax(-1)
        use = labels[i, 1 : len(row)] != -100
        total = total + (log_p.exp() * (log_p - log_q)).sum(-1)[use].sum()
        count += int(use.sum())
    (total / count).backward()
    assert float(found.detach()) == pytest.approx(float(total.detach() / count), rel=5e-3)
    head = reference.get_output_embeddings().weight
    compared = 0
    for (name, value), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        if other is head or not value.requires_grad:
            assert value.grad is None
            continue
        if other.grad is None:
            continue
        assert value.grad is not None, name
        difference = float((value.grad - other.grad).norm() / other.grad.norm().clamp(min=1e-12))
        assert difference < 0.02, name
        compared += 1
    assert compared > 5


def test_in_a_trainer(tmp_path: Path) -> None:
    """It comes nearer to the dense model, zeros stay, and what is kept is used again."""
    path = save_model(tmp_path / "dense", "llama")
    teacher = niwaki.Teacher(path, tmp_path / "kept", compute="cpu")
    teacher.read(ROWS)
    files = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "kept").iterdir()}
    again = niwaki.Teacher(path, tmp_path / "kept", compute="cpu")
    again.read(ROWS)
    assert all(file.stat().st_mtime_ns == files[file.name] for file in (tmp_path / "kept").iterdir())
    model = pruned(path)
    loss, (tokens, mask) = again.loss(model), batch()
    with torch.no_grad():
        before = float(loss(model(input_ids=tokens, attention_mask=mask), None))
    rows = [{"input_ids": row, "labels": row} for row in ROWS]

    def collated(some: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        longest = max(len(each["input_ids"]) for each in some)
        made = {
            name: torch.tensor([each[name] + [fill] * (longest - len(each[name])) for each in some])
            for name, fill in {"input_ids": 0, "labels": -100}.items()
        }
        made["attention_mask"] = (made["labels"] != -100).long()
        return made

    steps: dict[str, Any] = {"max_steps": 20, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    quiet: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    arguments = TrainingArguments(output_dir=str(tmp_path / "out"), learning_rate=1e-2, **steps, **quiet)
    given: dict[str, Any] = {"data_collator": collated, "compute_loss_func": loss, "callbacks": [niwaki.KeepZeros()]}
    Trainer(model=model, args=arguments, train_dataset=rows, **given).train()
    with torch.no_grad():
        after = float(loss(model(input_ids=tokens, attention_mask=mask), None))
    assert after < 0.7 * before


def test_refused(tmp_path: Path) -> None:
    path, other = save_model(tmp_path / "dense", "llama"), save_model(tmp_path / "other", "llama", seed=1)
    teacher = niwaki.Teacher(path, tmp_path / "kept", compute="cpu")
    model = pruned(path)
    assert "has read nothing yet" in message(lambda: teacher.loss(model), UsageError)
    assert "nothing to read" in message(lambda: teacher.read([[1]]), CalibrationError)
    teacher.read(ROWS)
    assert "another head" in message(lambda: teacher.loss(pruned(other)), UsageError)
    assert "predictions of another model" in message(lambda: teacher.read(ROWS[:2]), OutputError)
    loss = teacher.loss(model)
    tokens = torch.tensor([ROWS[0][:5]])
    assert "has not read a row of 5" in message(lambda: loss(model(input_ids=tokens), None), UsageError)
    assert "follows a pass" in message(lambda: loss(None, None), UsageError)
