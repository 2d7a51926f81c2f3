"""Masks from elsewhere, and runs of some blocks only."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from niwaki.errors import PatternError
from niwaki.evaluation.inspect import inspect
from niwaki.records.record import Record
from support.models import is_pruned, linear_inputs, message, random_tokens, reference, save_model, weight
from support.runs import Diary, StopAt, files, listing, raw, run_magnitude as run, tensors, zeros


def kept(directory: Path) -> dict[str, Tensor]:
    return {key: value != 0 for key, value in tensors(directory).items() if is_pruned("llama", key)}


# Masks from elsewhere


@pytest.mark.parametrize("update", ["admm1", "sparsegpt", "continuation"])
@pytest.mark.slow
def test_the_mask_of_another_solver(model: Path, out: Path, update: str) -> None:
    run(model, out / "magnitude", solver="magnitude", sparsity=0.6)
    record = run(model, out / "both", solver=update, mask_from="magnitude", sparsity=0.6)
    own = run(model, out / "own", solver=update, sparsity=0.6)
    masks = kept(out / "magnitude")
    assert len(masks) == 14
    for key, mask in kept(out / "both").items():
        assert torch.equal(mask, masks[key])
        assert not torch.equal(tensors(out / "both")[key], tensors(out / "magnitude")[key])
    assert any(not torch.equal(mask, masks[key]) for key, mask in kept(out / "own").items())
    assert record.mask_from == "magnitude"
    config = json.loads((out / "both" / "config.json").read_text())["pruning_config"]
    assert (config["mask_from"], config["method"]) == ("magnitude", update)
    assert "| mask from | magnitude |" in (out / "both" / "README.md").read_text()
    # Updating the weights is better than leaving them, and choosing the mask as well is better still.
    assert own.mean_error < record.mean_error < Record.load(out / "magnitude" / "niwaki.json").mean_error


def test_a_mask_that_depends_on_the_inputs(model: Path, out: Path) -> None:
    run(model, out / "wanda", solver="wanda", sparsity=0.6)
    run(model, out / "both", solver="admm1", mask_from="wanda", pattern="per-row:0.6")
    for key, mask in kept(out / "both").items():
        if key.startswith("model.layers.0."):  # later blocks have other inputs by now
            assert torch.equal(mask, kept(out / "wanda")[key])


@pytest.mark.slow
def test_the_mask_of_a_pruned_model(tmp_path: Path, model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(model, out / "2-4", solver="wanda", pattern="2:4")
    monkeypatch.chdir(out)
    for name in (str(out / "2-4"), "2-4"):
        record = run(model, out / "updated", solver="admm1", mask_from=name)
        assert record.sparsity == 0.5
        masks = kept(out / "2-4")
        for key, mask in kept(out / "updated").items():
            assert torch.equal(mask, masks[key])
        assert not torch.equal(*(tensors(out / n)[next(iter(masks))] for n in ("2-4", "updated")))
        config = json.loads((out / "updated" / "config.json").read_text())["pruning_config"]
        assert "2-4" in config["pattern"]
        shutil.rmtree(out / "updated")
    # With that of a dense model there is nothing to prune.
    record = run(model, out / "dense", solver="wanda", mask_from=str(model))
    assert record.sparsity == 0
    other = save_model(tmp_path / "other", "llama grouped")
    assert "k_proj.weight" in message(lambda: run(model, out / "x", mask_from=str(other)))
    said = message(lambda: run(model, out / "x", mask_from="magnitud", sparsity=0.5))
    assert "no directory magnitud" in said
    assert "no solver is called 'magnitud'" in said
    assert "how sparse" in message(lambda: run(model, out / "x", mask_from="magnitude"))
    assert not (out / "x").exists()


@pytest.mark.slow
def test_solvers_keep_the_mask_of_a_pruned_model(model: Path, out: Path) -> None:
    run(model, out / "a", solver="magnitude", pattern="2:4")
    masks = kept(out / "a")
    for solver in ("wanda", "admm1", "sparsegpt"):
        record = run(model, out / solver, solver=solver, mask_from=str(out / "a"), pattern="2:4")
        assert record.sparsity == 0.5
        for key, mask in kept(out / solver).items():
            assert torch.equal(mask, masks[key])


@pytest.mark.slow
def test_masks_that_a_pattern_asks_more_zeros_of(model: Path, out: Path) -> None:
    for name, pattern in {"nm": "2:4", "unstructured": "unstructured:0.5", "rows": "per-row:0.5"}.items():
        run(model, out / name, solver="magnitude", pattern=pattern)

    def lent(name: str, pattern: str, solver: str = "wanda") -> tuple[dict[str, Tensor], str]:
        """(What is kept with that mask, what is noted of it)."""
        shutil.rmtree(out / "x", ignore_errors=True)
        record = run(model, out / "x", solver=solver, mask_from=str(out / name), pattern=pattern)
        start = f"the mask of {out / name} "
        return kept(out / "x"), "; ".join(note.removeprefix(start) for note in record.notes if note.startswith(start))

    half = sum(mask.numel() for mask in kept(out / "nm").values()) // 2
    # What is more special is allowed by what is less.
    for name, pattern in (("nm", "per-row:0.5"), ("nm", "unstructured:0.5"), ("rows", "unstructured:0.5")):
        masks, note = lent(name, pattern)
        assert note == ""
        assert all(torch.equal(mask, kept(out / name)[key]) for key, mask in masks.items())
    masks, note = lent("nm", "3:4")
    assert note == f"has {half:,} zeros (50 %), and 3:4 asks for {half // 2:,} (25 %): all of them stay"
    for name, pattern in (("rows", "2:4"), ("unstructured", "per-row:0.5"), ("nm", "per-row:0.6")):
        masks, note = lent(name, pattern)
        more = sum(int((kept(out / name)[key] & ~mask).sum()) for key, mask in masks.items())
        assert not any((mask & ~kept(out / name)[key]).any() for key, mask in masks.items())
        assert more > 0
        assert f"to satisfy it {more:,} weights more become zero" in note
        for mask in masks.values():
            assert pattern != "2:4" or (mask.view(-1, 4).sum(dim=1) <= 2).all()
            assert pattern == "2:4" or ((~mask).sum(dim=1) >= int(float(pattern[-3:]) * mask.shape[1])).all()
    # The other way round: the pattern does not fit the matrices, which is known before anything is solved.
    diary = Diary()
    options: dict[str, Any] = {"mask_from": str(out / "nm"), "pattern": "2:5", "progress": diary}
    said = message(lambda: run(model, out / "y", solver="wanda", **options), PatternError)
    assert said.startswith("model.layers.0.self_attn.q_proj.weight: the pattern 2:5 needs")
    assert diary.events == []
    assert not (out / "y").exists()


def in_blocks(*chosen: int) -> Callable[[str], bool]:
    """Whether a key is that of a matrix to prune in one of these blocks."""
    parts = tuple(f"model.layers.{block}." for block in chosen)
    return lambda key: key.startswith(parts) and is_pruned("llama", key)


# Some blocks only


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("blocks", [(0, 1), (1, 2), (2, 3), (0, 2), (1, 3), (0, 3)], ids=str)
@pytest.mark.slow
def test_some_blocks_only(tmp_path: Path, out: Path, blocks: tuple[int, int], held: bool) -> None:
    source = save_model(tmp_path / "model", "llama grouped", shards=True)
    text = random_tokens(3, 24, seed=1)
    diary = Diary()
    record = run(source, out, solver="sparsegpt", blocks=blocks, text=text if held else None, progress=diary)
    is_chosen, every = in_blocks(*range(*blocks)), blocks == (0, 3)
    before, after = tensors(source), tensors(out)
    assert before.keys() == after.keys()
    for key, old in before.items():
        if is_chosen(key):
            assert zeros(after[key]) == old.numel() // 2
        else:
            assert raw(after[key]) == raw(old), key
    assert [m.block for m in record.matrices] == [block for block in range(*blocks) for _ in range(7)]
    assert record.sparsity == 0.5
    # Inputs come from the blocks before, whether these were pruned or not.
    walking, inputs = reference(source), {}
    for matrix in record.matrices:
        if matrix.name == "self_attn.q_proj":
            inputs = linear_inputs(walking, matrix.block, random_tokens(8, 24))
        module = f"model.layers.{matrix.block}.{matrix.name}"
        X = inputs[matrix.name].double()
        W, What = before[f"{module}.weight"].double(), after[f"{module}.weight"].double()
        expected = (X @ (W - What).T).square().sum() / (X @ W.T).square().sum()
        assert matrix.error == pytest.approx(expected.item(), rel=1e-3)
        weight(walking, module).copy_(What)
    # Nothing is walked through in vain.
    begin, *others = [event for event in diary.events if event[0] != "note"]
    assert begin == ("begin", 3 if held else blocks[1], 7 * len(range(*blocks)))
    assert max(event[1] for event in others if event[0] == "stage") == begin[1] - 1
    assert {event[1] for event in others if event[:1] == ("solved",)} == set(range(*blocks))
    if held:
        for name, path in (("before", source), ("after", out)):
            logits = reference(path)(text).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            assert record.perplexity[name].value == pytest.approx(math.exp(float(loss)), rel=1e-4)
    # What it says of itself
    assert record == Record.load(out / "niwaki.json")
    assert record.blocks == (None if every else [*blocks])
    first, end = blocks
    part = f"block {first}" if end == first + 1 else f"blocks {first} to {end - 1}"
    note = f"only {part} of 3, counted from 0: no other is pruned"
    assert (note in record.notes) != every
    config = json.loads((out / "config.json").read_text())["pruning_config"]
    assert config.get("blocks") == record.blocks
    card = (out / "README.md").read_text()
    assert (note in card) != every
    heading = "# model, 50 % sparse" + ("" if every else f" in {part}")
    assert heading in card.splitlines()
    sparsities = {item.matrix.key: item.sparsity for item in inspect(out)}
    assert sparsities == {key: 0.5 if is_chosen(key) else 0.0 for key in before if is_pruned("llama grouped", key)}


@pytest.mark.parametrize(("windows", "is_few"), [(2, True), (3, False)])
def test_text_of_fewer_tokens_than_a_matrix_has_inputs(tmp_path: Path, out: Path, windows: int, is_few: bool) -> None:
    record = run(save_model(tmp_path / "model"), out, calibration=random_tokens(windows, 16))
    assert max(matrix.shape[1] for matrix in record.matrices) == 48
    note = "calibrated on 32 tokens, and the widest matrix has 48 inputs; give more text"
    assert (note in record.notes) == is_few
    assert any("calibrated on" in each for each in record.notes) == is_few


@pytest.mark.slow
def test_some_blocks_only_of_a_run_that_is_stopped(tmp_path: Path, out: Path) -> None:
    source = save_model(tmp_path / "model", "llama grouped", shards=True)
    options = {"blocks": (1, 3), "solver": "wanda", "text": random_tokens(3, 24, seed=1)}
    whole = run(source, tmp_path / "whole", **options)

    class Stop(StopAt):
        def stopped(self, done: int, blocks: int, where: str = "") -> None:
            told.append((done, blocks))

    told: list[tuple[int, int]] = []
    with pytest.raises(KeyboardInterrupt):
        run(source, out, progress=Stop(8), **options)
    assert told == [(1, 2)]
    for blocks in (None, (0, 3), (1, 2)):
        said = message(lambda blocks=blocks: run(source, out, **{**options, "blocks": blocks}))  # type: ignore[misc]
        assert f"blocks ([1, 3] there, {[*(blocks or (0, 3))]} here)" in said
    record = run(source, out, **options)
    assert record.resumed == [2]
    assert record.blocks == [1, 3]
    assert record.perplexity == whole.perplexity
    assert files(out) == files(tmp_path / "whole")


@pytest.mark.slow
def test_some_blocks_only_with_the_mask_of_a_model(tmp_path: Path, out: Path) -> None:
    source = save_model(tmp_path / "model", "llama grouped")
    run(source, out / "a", blocks=(1, 2), pattern="2:4")
    # The masks of the others are all there is, and get the zeros that the pattern asks for.
    run(source, out / "b", blocks=(1, 2), mask_from=str(out / "a"), pattern="2:4", solver="admm1")
    for key, value in tensors(out / "b").items():
        assert torch.equal(value != 0, tensors(out / "a")[key] != 0)
        assert torch.equal(value, tensors(source)[key]) != in_blocks(1)(key)
    run(source, out / "c", mask_from=str(out / "a"), pattern="2:4")
    for key, mask in kept(out / "c").items():
        assert torch.equal(mask.view(-1, 4).sum(dim=1), torch.full((mask.numel() // 4,), 2))
        assert torch.equal(mask, kept(out / "a")[key]) == in_blocks(1)(key)


@pytest.mark.parametrize("blocks", [(0, 0), (1, 1), (2, 1), (0, 3), (2, 3), (-1, 1), (5, 9)], ids=str)
def test_blocks_that_are_none(tmp_path: Path, model: Path, blocks: tuple[int, int]) -> None:
    before = listing(tmp_path)
    text = message(lambda: run(model, tmp_path / "out", blocks=blocks))
    assert text == f"invalid range of blocks {blocks[0]}:{blocks[1]}; the model's are 0:2"
    assert listing(tmp_path) == before
