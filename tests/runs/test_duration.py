"""What is said before a run begins of how long it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import niwaki
from niwaki import Heal, Prune, Quantize, QuantizeEmbeddings, Shrink
from niwaki.checkpoints.reading import Checkpoint
from niwaki.models.device import find_device
from niwaki.models.streamed import StreamedModel
from niwaki.records.progress import Progress
from niwaki.runs import duration, execute
from niwaki.runs.stage import Stage
from support.models import random_tokens, save_model

SPEED = 1e9


class Listener(Progress):
    def __init__(self) -> None:
        self.said: list[float] = []

    def estimate(self, seconds: float) -> None:
        self.said.append(seconds)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(execute, "products_per_second", lambda device: SPEED)
    return save_model(tmp_path / "model")


def estimated(model: Path, *stages: Stage, windows: int = 4, **more: Any) -> list[float]:
    listener, out = Listener(), model.with_name(f"out-{len(list(model.parent.iterdir()))}")
    options: dict[str, Any] = {"measurement": niwaki.Measurement(samples=0), "compute": "cpu", **more}
    niwaki.run(model, out, stages, calibration=random_tokens(windows, 32), progress=listener, **options)
    return listener.said


def test_more_work_takes_longer(model: Path) -> None:
    (fast,) = estimated(model, Prune(0.5, effort="fast"))
    (more,) = estimated(model, Prune(0.5, effort="fast"), windows=8)
    (fitted,) = estimated(model, Prune(0.5, effort="fast:epochs=1"))
    (healed,) = estimated(model, Prune(0.5, effort="fast"), Heal(tokens=1000, batch=64))
    (rounded,) = estimated(model, Prune(0.5, effort="fast"), Quantize("int4", effort="fast"))
    (measured,) = estimated(model, Prune(0.5, effort="fast"), measurement=random_tokens(4, 32, seed=1))
    assert all(fast < other for other in (more, fitted, healed, rounded, measured))


def test_a_pass_takes_what_its_products_take(model: Path) -> None:
    """Of a text that is only measured on, twice: 2 operations for each weight and token, and what goes between."""
    streamed = StreamedModel(Checkpoint(model), "cpu")
    blocks = sum(value.numel() for block in streamed.blocks for value in block.parameters())
    head = streamed.config.vocab_size * streamed.config.hidden_size
    tokens = random_tokens(4, 32)
    (without,) = estimated(model, QuantizeEmbeddings("int8"))
    (measured,) = estimated(model, QuantizeEmbeddings("int8"), measurement=niwaki.Measurement(tokens, before=True))
    assert measured - without == pytest.approx(2 * 2 * 128 * ((1 + 280 / 32) * blocks + head) / SPEED)


def test_a_smaller_model_is_looked_for_and_fitted(model: Path) -> None:
    (neurons,) = estimated(model, Shrink(neurons=0.5, effort="fast"))
    (fitted,) = estimated(model, Shrink(neurons=0.5))
    (blocks,) = estimated(model, Shrink(neurons=0.5, blocks=1, effort="fast"))
    (sized,) = estimated(model, Shrink(parameters=0.75, effort="fast"))
    assert all(neurons < other for other in (fitted, blocks, sized))


def test_the_speed_of_products() -> None:
    assert 1e8 < duration.products_per_second(find_device("cpu")) < 1e14
