"""Small models that are healed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import niwaki
from niwaki.options import Compute
from niwaki.records.record import HealingPoint, HealingRecord, Record
from support.made import made_once
from support.models import random_tokens, reference, save_model
from support.runs import tensors

LENGTH = 16
TOKENS = random_tokens(40, LENGTH)


def drawn(tokens: Tensor) -> Tensor:
    """Windows in the order in which they are trained on, of which the last are held out."""
    return tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))]


def undrawn(tokens: Tensor) -> Tensor:
    """Windows that are trained on in the order of ``tokens``."""
    return tokens[drawn(torch.arange(len(tokens))).argsort()]


def pruned_model(tmp_path: Path, case: str, dtype: torch.dtype = torch.float32) -> tuple[Path, Path]:
    """(a dense model, the same with every other weight of its matrices zero)."""

    def make(place: Path) -> None:
        dense = save_model(place / "dense", case, dtype=dtype)
        given: dict[str, Any] = {"calibration": TOKENS[:4], "measurement": None, "compute": "cpu"}
        niwaki.prune(dense, place / "pruned", 0.5, solver="magnitude", **given)

    made_once(tmp_path, f"pruned {case} {dtype}", make)
    return tmp_path / "dense", tmp_path / "pruned"


def heal(pruned: Path, out: Path, teacher: Path, **changes: Any) -> Record:
    options: dict[str, Any] = {"tokens": 1000, "rate": 0.01, "batch": 64, "own_text": 0.0, "calibration": TOKENS}
    options |= {"measurement": None, "compute": Compute("cpu", "float32")}
    return niwaki.heal(pruned, out, teacher, **{**options, **changes})


def healing_of(record: Record) -> HealingRecord:
    assert record.healing
    return record.healing


def curve(record: Record) -> tuple[list[HealingPoint], HealingPoint]:
    """What was measured while it was trained, and that of the weights that were written."""
    healing = healing_of(record)
    return healing.points, healing.points[healing.best]


def divergence(dense: Path, other: Path, tokens: Tensor) -> float:
    """KL in nats a token, by transformers in float64."""
    return divergences(dense, [other], tokens)[0]


@torch.no_grad()
def divergences(dense: Path, others: list[Path], tokens: Tensor) -> list[float]:
    """That of each."""
    p, *found = (reference(path)(tokens).logits.double().log_softmax(-1) for path in (dense, *others))
    return [float((p.exp() * (p - q)).sum(-1).mean()) for q in found]


def held(record: Record, tokens: Tensor = TOKENS) -> Tensor:
    return drawn(tokens)[-(healing_of(record).held // LENGTH) :]


def same_tensors(one: Path, other: Path) -> bool:
    before, after = tensors(one), tensors(other)
    return all(torch.equal(value, after[key]) for key, value in before.items())
