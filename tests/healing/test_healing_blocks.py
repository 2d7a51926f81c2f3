"""Pruned models that are healed a block at a time, against whole models of transformers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import niwaki
from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import UnsupportedModelError, UsageError
from niwaki.healing.blocks import BlockRun
from niwaki.healing.run import block_memory
from niwaki.models.formats import WeightFormat
from niwaki.models.streamed import StreamedModel
from niwaki.options import BLOCKS_RATE, Compute
from niwaki.records.progress import Progress
from niwaki.records.record import FitRecord, Record
from support.healing import (
    LENGTH,
    TOKENS,
    curve,
    divergences,
    drawn,
    heal as healed,
    healing_of,
    held,
    pruned_model,
    same_tensors,
)
from support.models import COMMON, decoder_blocks, message, reference, save_model
from support.runs import files, tensors
from support.streams import error_by_places

pytestmark = pytest.mark.slow
#: Tokens of a step, and the share of the steps' parts that a fit holds out.
BATCH, HELD = 64, 16


class Blocks(Progress):
    """Keeps what is said, and stops after a block."""

    def __init__(self, stop_after: int = -1) -> None:
        self.notes: list[str] = []
        self._stop_after = stop_after

    def note(self, text: str) -> None:
        self.notes.append(text)

    def fitted(self, fit: FitRecord) -> None:
        if fit.block == self._stop_after:
            raise KeyboardInterrupt


def heal(pruned: Path, out: Path, teacher: Path, **changes: Any) -> Record:
    return healed(pruned, out, teacher, **{"method": "blocks", "batch": BATCH, "tokens": 2000, **changes})


def outputs(path: Path, tokens: Tensor) -> list[Tensor]:
    """Those of each block, by transformers."""
    model, found = reference(path), list[Tensor]()
    for block in decoder_blocks(model):
        block.register_forward_hook(lambda _, __, output: found.append(output))
    with torch.no_grad():
        model(tokens)
    return found


@pytest.mark.parametrize(
    ("case", "dtype"), [*zip([*COMMON, "zamba2"], [torch.float32, torch.bfloat16] * 3, strict=True)], ids=str
)
def test_healed(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    """Nearer to the dense model by transformers' own account, with the same zeros and everything else as it was."""
    dense, pruned = pruned_model(tmp_path, case, dtype)
    record = heal(pruned, tmp_path / "out", dense)
    (before, after), best = curve(record)
    assert best is after
    assert after.error < 0.95 * before.error
    measured = divergences(dense, [pruned, tmp_path / "out"], held(record))
    assert [before.error, after.error] == pytest.approx(measured, rel=0.02)
    came, left = tensors(pruned), tensors(tmp_path / "out")
    matrices = StreamedModel(Checkpoint(pruned), "cpu").matrices()
    keys = {matrix.key for matrix in matrices if not matrix.blocks}  # what blocks share stays, which is said
    assert any("not fitted" in note for note in record.notes) == (len(keys) < len({matrix.key for matrix in matrices}))
    for key, value in left.items():
        assert value.dtype == came[key].dtype
        assert torch.equal(value == 0, came[key] == 0)
        assert torch.equal(value, came[key]) == (key not in keys)
    assert record.sparsity == 0.5
    assert (tmp_path / "out" / "niwaki.base.json").read_bytes() == (pruned / "niwaki.json").read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_each_block_is_healed_on_what_the_healed_ones_give(tmp_path: Path) -> None:
    """The errors of the fits are those between transformers' hidden states of the whole models; at the usual rate."""
    dense, pruned = pruned_model(tmp_path, "llama")
    record = heal(pruned, tmp_path / "out", dense, rate=None)
    assert healing_of(record).rate == BLOCKS_RATE
    parts = drawn(TOKENS)[: -len(held(record))].split(BATCH // LENGTH)[::HELD]
    wanted, found = (outputs(path, torch.cat(parts)) for path in (dense, tmp_path / "out"))
    fits = {fit.block: fit for fit in record.fits}
    assert len(fits) == len(wanted) > 1
    for block, (target, output) in enumerate(zip(wanted, found, strict=True)):
        assert fits[block].after == pytest.approx(error_by_places(output, target), rel=1e-3)
        assert fits[block].after < fits[block].before


def test_the_steps(tmp_path: Path) -> None:
    """As many as the tokens take, of what the fits do not hold out."""
    dense, pruned = pruned_model(tmp_path, "llama")
    record = heal(pruned, tmp_path / "out", dense, tokens=3000)
    points, _ = curve(record)
    there = (len(TOKENS) - len(held(record))) * LENGTH
    parts = math.ceil(there / BATCH)
    steps = round(3000 / there * (parts - math.ceil(parts / HELD)))
    assert [fit.steps for fit in record.fits] == [steps] * len(record.fits)
    assert (points[-1].steps, points[-1].tokens) == (steps * len(record.fits), steps * BATCH)
    assert f"the text has {there:,} tokens to train on, each of which is used {3000 / there:.3g} times" in record.notes


def test_stopped_after_each_block(tmp_path: Path) -> None:
    """The same bytes as in one go."""
    dense, pruned = pruned_model(tmp_path, "llama", torch.bfloat16)
    whole = heal(pruned, tmp_path / "whole", dense)
    for stop_after in range(1, len(whole.fits)):
        with pytest.raises(KeyboardInterrupt):
            heal(pruned, tmp_path / "out", dense, progress=Blocks(stop_after))
        assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match=r"unfinished run .* differs in rate"):
        heal(pruned, tmp_path / "out", dense, rate=0.5)
    again = Blocks()
    record = heal(pruned, tmp_path / "out", dense, progress=again)
    assert record.resumed == list(range(1, len(whole.fits)))
    assert any("resuming after the first" in note for note in again.notes)
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert [fit.after for fit in record.fits] == [fit.after for fit in whole.fits]
    assert not list(tmp_path.glob(".*"))


def test_a_block_that_is_damaged_is_healed_again(tmp_path: Path) -> None:
    dense, pruned = pruned_model(tmp_path, "llama")
    heal(pruned, tmp_path / "whole", dense)
    with pytest.raises(KeyboardInterrupt):
        heal(pruned, tmp_path / "out", dense, progress=Blocks(1))
    file = tmp_path / ".out.partial" / "1" / "model.safetensors"
    matrix = StreamedModel(Checkpoint(pruned), "cpu").matrices(0)[0]
    entry = Checkpoint(pruned).entries[matrix.key]
    content = bytearray(file.read_bytes())
    content[entry.offset] ^= 64
    file.write_bytes(content)
    notes = Blocks()
    heal(pruned, tmp_path / "out", dense, progress=notes)
    assert "block 0 of the earlier run is damaged on disk and done again" in notes.notes
    assert same_tensors(tmp_path / "out", tmp_path / "whole")


def test_where_memory_is_for_nothing_else(tmp_path: Path) -> None:
    """And hidden states on disk change nothing."""
    dense, pruned = pruned_model(tmp_path, "llama")
    model, other = (StreamedModel(Checkpoint(path), "cpu") for path in (pruned, dense))
    enough = block_memory(model, other, WeightFormat())
    record = heal(pruned, tmp_path / "out", dense, method="auto", compute=Compute("cpu", "float32", max_memory=enough))
    assert healing_of(record).method == "blocks"
    assert any("(lora), and there are" in note and "blocks instead" in note for note in record.notes)
    assert any("spilled to disk" in note for note in record.notes)
    heal(pruned, tmp_path / "spacious", dense)
    assert same_tensors(tmp_path / "out", tmp_path / "spacious")
    for method in ("auto", "blocks"):
        asked = {"method": method, "compute": Compute("cpu", "float32", max_memory=enough - 1)}
        text = message(lambda: heal(pruned, tmp_path / "none", dense, **asked), UnsupportedModelError)  # noqa: B023
        assert "(blocks) of memory, and there are" in text


def test_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends, and says how much there was time for; fits keep to it where that was wrong."""
    dense, pruned = pruned_model(tmp_path, "llama")
    record = heal(pruned, tmp_path / "out", dense, tokens="100M", max_time="2s")
    healing = healing_of(record)
    assert healing.limit == 2
    assert healing.tokens < 100_000_000
    assert any(f"the time is enough to train on {healing.tokens:,} tokens" in note for note in record.notes)
    assert record.seconds["total"] < 8
    monkeypatch.setattr(BlockRun, "_enough", lambda *_: 1 << 40)
    record = heal(pruned, tmp_path / "wrong", dense, tokens="100M", max_time="2s")
    assert record.seconds["total"] < 8
    assert all(0 < fit.epochs <= fit.steps for fit in record.fits if fit.after < fit.before)


def test_smaller(tmp_path: Path) -> None:
    """A model without some neurons has the same number of blocks, a model without a block has not."""
    dense = save_model(tmp_path / "dense", "llama grouped")
    shrinking: dict[str, Any] = {"calibration": TOKENS[:8], "measurement": None, "compute": "cpu"}
    niwaki.shrink(dense, tmp_path / "narrow", neurons=0.25, **shrinking)
    record = heal(tmp_path / "narrow", tmp_path / "out", dense, rate=0.001, tokens=4000)
    (before, after), _ = curve(record)
    assert after.error < before.error
    niwaki.shrink(dense, tmp_path / "short", blocks=1, **shrinking)
    text = message(lambda: heal(tmp_path / "short", tmp_path / "none", dense), UnsupportedModelError)
    assert "so that it can only be healed as a whole" in text
    assert not (tmp_path / "none").exists()
