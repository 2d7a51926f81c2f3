"""A pruned model trained further with TRL, with its zeros kept and without: what a step takes, and what comes out.

python scripts/real_models.py . smollm2
python benchmarks/finetune.py MODEL CORPUS WORK --record benchmarks/results/finetune.json
"""

import json
import math
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import common  # first: it sets what OpenMP reads when torch is loaded
import torch
from common import NOTHING, Corpus, Model, Sheet, Work, names
from corpus import Texts
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer
from typer import Option

import niwaki
from niwaki import Calibration

#: Learning rates, of all weights and of adapters.
FULL, LORA = 5e-5, 1e-3
RANK = 16
#: Windows and tokens of a step that is timed, and how often.
TURN, ROUNDS = (4, 512), 4
WAYS = ("plain", "kept", "lora", "lora kept")
MEASURED = ("wikitext2", "books")


def finetune(
    model: Model,
    corpus: Corpus,
    work: Work,
    record: common.Record = None,
    patterns: Annotated[str, Option(help="Of niwaki prune.")] = "50 %",
    ways: Annotated[str, Option(help="How it is trained.")] = ",".join(WAYS),
    steps: Annotated[int, Option(help="Of training.")] = 100,
    length: Annotated[int, Option(help="Tokens in each of two windows of a step.")] = 256,
    samples: Annotated[int, Option(help="Windows to calibrate on, and to give zeros back.")] = 48,
    text_samples: Annotated[int, Option(help="Windows of 512 tokens to measure on.")] = 16,
) -> None:
    """Pruned on books, then trained by TRL's SFTTrainer on WikiText-2's validation text, the task.

    "plain" fills the zeros, "kept" keeps them; adapters alone ("lora") are merged by PEFT, by niwaki.merge_lora, and by
    PEFT with the zeros given back by niwaki prune; "lora kept" is trained where weights are not zero.
    """
    texts = Texts(model, corpus, work, samples, 512)
    settings = {"model": model.name, "steps": steps, "length": length, "text_samples": text_samples}
    sheet = Sheet(record, {**settings, "samples": samples})
    held = {name: texts.to_measure(name, text_samples) for name in MEASURED}
    (task,) = texts.to_calibrate("wikitext2")

    def add(made: Path, zeros: int, **cell: Any) -> None:
        lost = {name: list(each.losses) for name, each in common.measured(made, held, text_samples, 512).items()}
        print(cell, zeros, common.means(lost), flush=True)
        sheet.add(**cell, zeros=zeros, losses=lost)

    for pattern in names(patterns):
        pruned = work / f"pruned-{pattern}".replace(" ", "")
        if not pruned.exists():
            books = Calibration(texts.to_calibrate("books"), samples=samples, length=512)
            niwaki.prune(model, pruned, pattern, effort="fast", calibration=books, measurement=NOTHING)
        if not sheet.has(pattern=pattern, way=""):
            add(pruned, zeros_of(AutoModelForCausalLM.from_pretrained(pruned)), pattern=pattern, way="", seconds=0.0)
        for way in names(ways):
            if sheet.has(pattern=pattern, way=way):
                continue
            out = work / "trained"
            trainer, seconds = trained(pruned, task, way, steps, length, work)
            if "lora" not in way:
                add(
                    saved(trainer.model, pruned, out),
                    zeros_of(trainer.model),
                    pattern=pattern,
                    way=way,
                    seconds=seconds,
                )
                continue
            adapter = work / "adapter"
            trainer.model.save_pretrained(adapter)
            model_made: Any = niwaki.merge_lora(trainer.model)
            merged = {"pattern": pattern, "seconds": seconds}
            add(saved(model_made, pruned, out), zeros_of(model_made), way=way, **merged)
            if way == "lora":
                model_made = whole(pruned, adapter)
                add(saved(model_made, pruned, out), zeros_of(model_made), way="lora, filled", **merged)
                again = work / "again"
                shutil.rmtree(again, ignore_errors=True)
                own = Calibration(task, samples=samples, length=512)
                began = time.monotonic()
                niwaki.prune(out, again, solver="exact", mask_from=pruned, calibration=own, measurement=NOTHING)
                merged["seconds"] = time.monotonic() - began
                add(again, zeros_of(AutoModelForCausalLM.from_pretrained(again)), way="lora, given back", **merged)
        for lora in (False, True):
            if not sheet.has(pattern=pattern, lora=lora):
                ratios = in_turns(pruned, task, lora)
                print(pattern, "LoRA" if lora else "all weights", f"{statistics.median(ratios):.3f}", flush=True)
                sheet.add(pattern=pattern, way="in turns", lora=lora, ratios=ratios)


def in_turns(pruned: Path, task: str, lora: bool) -> list[float]:
    """Seconds of a step of TURN tokens with kept zeros, relative to one without, one after the other, without TRL."""
    ids = _tokens(pruned, task)[: math.prod(TURN)].view(TURN)

    def stepping(kept: bool) -> Callable[[], object]:
        model: Any = AutoModelForCausalLM.from_pretrained(pruned, dtype=torch.float32)
        model = get_peft_model(model, _lora()) if lora else model
        zeros = niwaki.keep_zeros(model) if kept else None
        optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=1e-5)

        def step() -> object:
            with torch.autocast("cpu", torch.bfloat16):
                model(input_ids=ids, labels=ids).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return zeros

        return step

    steps = {name: [stepping(name == "kept")] for name in ("plain", "kept")}
    taken = common.in_turns(steps, ROUNDS)
    return [kept / plain for kept, plain in zip(taken["kept"], taken["plain"], strict=True)]


def _tokens(pruned: Path, task: str) -> torch.Tensor:
    text = "".join(json.loads(line)["text"] for line in Path(task).read_text().splitlines())
    return torch.tensor(AutoTokenizer.from_pretrained(pruned)(text)["input_ids"])


def _lora() -> LoraConfig:
    return LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM")


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append(time.monotonic())


def trained(pruned: Path, task: str, way: str, steps: int, length: int, work: Path) -> tuple[Any, float]:
    """The trainer after training, and the median of a step's seconds."""
    lora, ids = _lora() if "lora" in way else None, _tokens(pruned, task)
    rows = ids[: len(ids) // length * length].view(-1, length)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[: 2 * steps]
    settings = SFTConfig(
        output_dir=str(work / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=LORA if lora else FULL,
        warmup_steps=max(1, steps // 20),
        max_length=length,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=True,
        gradient_checkpointing=False,
        logging_steps=max(1, steps // 4),
        seed=0,
    )
    clock = Clock()
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(pruned, dtype=torch.float32),
        args=settings,
        train_dataset=Dataset.from_dict({"input_ids": rows[order].tolist()}),
        processing_class=AutoTokenizer.from_pretrained(pruned),
        callbacks=[clock, *([niwaki.KeepZeros()] if "kept" in way else [])],
        peft_config=lora,
    )
    trainer.train()
    return trainer, statistics.median(b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False))


def whole(pruned: Path, adapter: Path) -> nn.Module:
    """The pruned model and the adapter, merged by PEFT."""
    made: nn.Module = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(pruned, dtype=torch.float32), adapter
    ).merge_and_unload()
    return made


def saved(model: Any, pruned: Path, out: Path) -> Path:
    """A directory with the model in bfloat16; its configuration does not say that it is pruned."""
    shutil.rmtree(out, ignore_errors=True)
    if hasattr(model.config, "pruning_config"):
        del model.config.pruning_config
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(pruned).save_pretrained(out)
    return out


def zeros_of(model: nn.Module) -> int:
    """In all matrices of the model."""
    return sum(int((value == 0).sum()) for value in model.parameters() if value.ndim > 1)


if __name__ == "__main__":
    common.main(finetune, about=__doc__)
