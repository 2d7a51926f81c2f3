"""Text of the dense model's own among what healing trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from niwaki.checkpoints.reading import Checkpoint
from niwaki.healing import run
from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.options import Compute
from niwaki.records.progress import Progress
from niwaki.records.record import FitRecord, HealingRecord
from support.healing import LENGTH, TOKENS, drawn, heal, healing_of, pruned_model, same_tensors, undrawn
from support.models import random_tokens, save_model
from support.runs import files

SHARE = 0.25


class Stopped(Progress):
    """Stops where something is kept that is not the beginning: after two blocks, or at the third point."""

    def fitted(self, fit: FitRecord) -> None:
        if fit.block == 1:
            raise KeyboardInterrupt

    def healing(self, record: HealingRecord, share: float, seconds: float) -> None:
        if len(record.points) == 3:
            raise KeyboardInterrupt


def by_turns(real: Tensor, own: Tensor) -> Tensor:
    """Three windows of real text for each of own text, which is third, until that ends."""
    windows, rest = list[Tensor](), list(real)
    for window in own:
        windows += [*rest[:2], window, *rest[2:3]]
        rest = rest[3:]
    return torch.stack([*windows, *rest])


@pytest.mark.parametrize("method", ["full", "blocks"])
@pytest.mark.slow
def test_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """The same model as from windows that are mixed by hand; what is held out was written last."""
    dense, pruned = pruned_model(tmp_path, "llama")
    own = random_tokens(200, LENGTH)[100:]
    monkeypatch.setattr(run, "synthesize", lambda _, count, *__, **___: own[:count])
    tokens = 35 * LENGTH
    record = heal(pruned, tmp_path / "out", dense, method=method, own_text=SHARE, tokens=tokens)
    last = 9 + healing_of(record).held // LENGTH
    assert record.calibration["synthetic"] == last
    assert f"{last} windows" in record.own_text
    given = undrawn(torch.cat([by_turns(drawn(TOKENS)[:26], own[:9]), own[9:last]]))
    heal(pruned, tmp_path / "given", dense, method=method, tokens=tokens, calibration=given)
    assert same_tensors(tmp_path / "out", tmp_path / "given")
    heal(pruned, tmp_path / "none", dense, method=method, tokens=tokens)
    assert not same_tensors(tmp_path / "out", tmp_path / "none")


@pytest.mark.parametrize("method", ["full", "blocks"])
@pytest.mark.slow
def test_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """The text is kept: the same bytes as in one go."""
    dense, pruned = pruned_model(tmp_path, "llama")
    asked: dict[str, Any] = {"method": method, "own_text": SHARE}
    heal(pruned, tmp_path / "whole", dense, **asked)
    with pytest.raises(KeyboardInterrupt):
        heal(pruned, tmp_path / "out", dense, progress=Stopped(), **asked)
    monkeypatch.setattr(run, "synthesize", None)
    record = heal(pruned, tmp_path / "out", dense, **asked)
    assert len(record.resumed) == 1
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.slow
def test_where_the_dense_model_cannot_write(tmp_path: Path) -> None:
    """It is said, and real text is all that is trained on."""
    dense, pruned = pruned_model(tmp_path, "llama")
    heal(pruned, tmp_path / "without", dense, method="blocks")
    few = Compute("cpu", "float32", max_memory=2**20)
    record = heal(pruned, tmp_path / "out", dense, method="blocks", own_text=SHARE, compute=few)
    assert any("wrote no text to train on: its 0.0 GiB do not fit in memory" in note for note in record.notes)
    assert record.calibration["synthetic"] == 0
    assert same_tensors(tmp_path / "without", tmp_path / "out")


@pytest.mark.slow
def test_where_there_is_no_time_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Likewise: what was written would all be held out."""
    dense, pruned = pruned_model(tmp_path, "llama")
    heal(pruned, tmp_path / "without", dense)
    monkeypatch.setattr(run, "written_text", lambda *_: random_tokens(1, LENGTH))
    record = heal(pruned, tmp_path / "out", dense, own_text=SHARE)
    note = "there was no time for the dense model to write text to train on; give more --max-time"
    assert record.notes.count(note) == 1
    assert record.calibration["synthetic"] == 0
    assert same_tensors(tmp_path / "without", tmp_path / "out")
    monkeypatch.undo()
    assert note not in heal(pruned, tmp_path / "little", dense, own_text=0.001).notes  # none was wanted


def test_where_writing_would_take_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends after some tokens of the first text, not when that is whole."""
    dense, pruned = pruned_model(tmp_path, "llama")
    monkeypatch.setattr("niwaki.healing.run._WRITING_TIME", 1e-6)
    written: list[int] = []

    class Steps(Progress):
        def stage(self, block: int, name: str, steps: int) -> None:
            written.extend([0] if name == "synthesis" else [])

        def step(self) -> None:
            if written:
                written[-1] += 1

    asked: dict[str, Any] = {"own_text": SHARE, "tokens": 64, "max_time": "1h", "progress": Steps()}
    record = heal(pruned, tmp_path / "out", dense, **asked)
    (note,) = (note for note in record.notes if "wrote no text" in note)
    assert note.startswith("the dense model wrote no text to train on: it would take ")
    assert note.endswith(" of 60 min; give more --max-time")
    assert written == [8]
    assert record.calibration["synthetic"] == 0
    assert healing_of(record).points[-1].tokens >= 64


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.8])
def test_the_share_of_what_comes_first(share: float) -> None:
    """It is that of all, to within one window."""
    real, own = run.own_text_windows(100 * LENGTH, LENGTH, 1000, share)
    assert (real, own) == (round(100 * (1 - share)), round(100 * share))
    found = run.mixed_texts(torch.zeros(real, 1), torch.ones(own, 1), share).flatten()
    assert len(found) == 100
    for count in range(1, 101):
        assert abs(float(found[:count].sum()) - share * count) <= 1
    fewer = run.mixed_texts(torch.zeros(real, 1), torch.ones(own // 2, 1), share).flatten()
    assert torch.equal(fewer[: real // 4], found[: real // 4])


def test_as_much_as_there_is_time_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Part for part, each another text."""
    monkeypatch.setattr(run, "_FIRST", 2 * LENGTH)
    model = StreamedModel(Checkpoint(save_model(tmp_path / "model", "llama")), "cpu", "float32")

    def written(count: int, is_enough: bool) -> Tensor:
        return run.written_text(model, count, LENGTH, None, World(), Progress(), lambda: is_enough)

    whole = written(10, False)
    assert whole.shape == (10, LENGTH)
    assert len(torch.unique(whole, dim=0)) == 10
    assert torch.equal(written(10, True), whole[:2])
    assert written(0, False).shape == (0, LENGTH)
