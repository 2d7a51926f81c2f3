"""Zeros of the model that was given: they stay, they count, and what is not as before is said."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from niwaki.layer.patterns import Pattern
from niwaki.layer.solvers import Exact
from niwaki.pruning import solve
from niwaki.records.record import Record
from support.encoded import in_mxfp4
from support.models import is_pruned, message, save_model, sparse_model
from support.runs import files, run, stopped, tensors, zeros

BALANCED = "balanced:synthetic=0:batch=48"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """70 % zeros, half of which are -0.0, because every other weight has the other sign."""
    path = sparse_model(tmp_path / "model", sparsity=0.7)
    changed = pruned(path)
    for value in changed.values():
        value[:, ::2] *= -1.0
    save_file(tensors(path) | changed, path / "model.safetensors", {"format": "pt"})
    return path


def pruned(model: Path, case: str = "llama") -> dict[str, Tensor]:
    return {key: value for key, value in tensors(model).items() if is_pruned(case, key) and value.ndim > 1}


def counted(record: Record, what: str) -> int:
    """Of all matrices together."""
    return sum(int(matrix.stats.get(what, 0)) for matrix in record.matrices)


def revived(before: dict[str, Tensor], after: dict[str, Tensor]) -> int:
    return sum(int(after[key][before[key] == 0].count_nonzero()) for key in after)


def check(model: Path, out: Path, record: Record, case: str = "llama") -> None:
    """No zero is anything else, none is -0.0, and the record has the numbers."""
    before, after = pruned(model, case), pruned(out, case)
    for key, value in after.items():
        assert not value[before[key] == 0].any(), key
        assert not (value.float().signbit() & (value == 0)).any(), key
    count = sum(map(zeros, before.values()))
    assert counted(record, "zeros_before") == count
    assert all(matrix.stats["revived"] == 0 for matrix in record.matrices)
    size = sum(value.numel() for value in before.values())
    assert record.sparsity == pytest.approx(sum(map(zeros, after.values())) / size)
    said = f"{count:,} weights ({100 * count / size:.3g} %) were zero in the model"
    assert [note for note in record.notes if note.startswith(said)]
    assert "\\--revive" in (out / "README.md").read_text() or said in (out / "README.md").read_text()


@pytest.mark.parametrize(
    "options",
    [
        {"solver": None, "effort": BALANCED},
        {"solver": None, "effort": "fast:epochs=1:batch=48:importance=0.5"},
        {"solver": "sparsegpt"},
        {"solver": "wanda+exact"},
        {"solver": "admm1", "mask_from": "magnitude"},
        {"solver": None, "quantize": "int4:16", "effort": "fast:epochs=1:batch=48"},
    ],
    ids=str,
)
@pytest.mark.slow
def test_two_of_four_over_a_model_with_more_zeros(model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    record = run(model, tmp_path / "out", sparsity=None, pattern="2:4", measure="none", **options)
    check(model, tmp_path / "out", record)
    before = pruned(model)
    for key, value in pruned(tmp_path / "out").items():
        groups, old = ((each == 0).view(-1, 4).sum(dim=1) for each in (value, before[key]))
        assert (groups >= old.clamp(min=2)).all()
        if "quantize" not in options:
            assert torch.equal(groups, old.clamp(min=2))


@pytest.mark.parametrize("effort", ["fast", "fast:epochs=1:batch=48"])
@pytest.mark.slow
def test_a_grid_alone(model: Path, tmp_path: Path, effort: str) -> None:
    options: dict[str, Any] = {"solver": None, "quantize": "int4:16", "effort": effort, "measure": "none"}
    record = run(model, tmp_path / "out", sparsity=0, **options)
    check(model, tmp_path / "out", record)
    lost = counted(record, "rounded_to_zero")
    kept = sum(int(value.count_nonzero()) for value in pruned(model).values())
    assert lost > 0
    assert record.rounding.endswith(f"; {100 * lost / kept:.2g} % of the remaining weights became 0")


@pytest.mark.parametrize("effort", ["fast", "fast:allocation=loss", "fast:allocation=error"])
@pytest.mark.slow
def test_half_over_less(tmp_path: Path, effort: str) -> None:
    """In each matrix, or in all together where zeros are shared out, and then also where some matrix has more."""
    model = sparse_model(tmp_path / "model", sparsity=0.3)
    file = model / "model.safetensors"
    values = load_file(file)
    if effort != "fast":
        values["model.layers.0.mlp.up_proj.weight"][:40] = 0  # of 48
        values["model.layers.1.mlp.up_proj.weight"][:] = 0
        save_file(values, file, {"format": "pt"})
    record = run(model, tmp_path / "out", solver="continuation", sparsity=0.5, effort=effort, measure="none")
    check(model, tmp_path / "out", record)
    assert record.sparsity == 0.5
    if effort == "fast":
        assert {matrix.sparsity for matrix in record.matrices} == {0.5}
    assert all(
        matrix.sparsity >= int(matrix.stats["zeros_before"]) / math.prod(matrix.shape) for matrix in record.matrices
    )


@pytest.mark.parametrize("pattern", ["unstructured:0.5", "per-row:0.5"])
@pytest.mark.slow
def test_other_allocations(model: Path, tmp_path: Path, pattern: str) -> None:
    options: dict[str, Any] = {"sparsity": None, "pattern": pattern, "effort": "fast:allocation=error"}
    check(model, tmp_path / "out", run(model, tmp_path / "out", measure="none", **options))


@pytest.mark.parametrize("case", ["mixtral", "gpt2"])
@pytest.mark.slow
def test_other_layouts(tmp_path: Path, case: str) -> None:
    model = sparse_model(tmp_path / "model", case, sparsity=0.6, dtype=torch.bfloat16)
    record = run(model, tmp_path / "out", solver="admm1", sparsity=None, pattern="2:4", measure="none")
    check(model, tmp_path / "out", record, case)
    assert 0.6 < record.sparsity < 0.8


@pytest.mark.slow
def test_a_format_that_is_kept(tmp_path: Path) -> None:
    """Codes of zero, of which MXFP4 has many: in what came out of it there is no other number."""
    in_mxfp4(tmp_path / "model")
    first = run(tmp_path / "model", tmp_path / "first", keep_format=True, sparsity=0.6, measure="none")
    again = run(tmp_path / "first", tmp_path / "again", keep_format=True, sparsity=None, pattern="2:4", measure="none")
    some = [matrix for matrix in (*first.matrices, *again.matrices) if matrix.stats.get("zeros_before")]
    assert all(matrix.stats["revived"] == 0 for matrix in some)
    size = sum(math.prod(matrix.shape) for matrix in again.matrices)
    assert counted(again, "zeros_before") >= 0.59 * size
    assert again.sparsity > first.sparsity


@pytest.mark.slow
def test_zeros_may_be_revived(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they were none: what solvers get is the pattern itself."""
    options: dict[str, Any] = {"solver": "continuation", "sparsity": None, "pattern": "2:4", "measure": "none"}
    kept = run(model, tmp_path / "kept", **options)
    record = run(model, tmp_path / "revived", revive=True, **options)
    assert 0.5 <= record.sparsity < kept.sparsity
    before, after = pruned(model), pruned(tmp_path / "revived")
    count, back = sum(map(zeros, before.values())), revived(before, after)
    assert back > 0.1 * count
    assert (counted(record, "revived"), counted(record, "zeros_before")) == (back, count)
    said = (
        f"{back:,} of the {count:,} weights that were zero in the model no longer are ({100 * back / count:.3g} %), "
        "as --revive allows"
    )
    assert said in record.notes
    assert said in (tmp_path / "revived" / "README.md").read_text()

    def plain(pattern: Pattern, _: Tensor) -> Pattern:
        return pattern

    monkeypatch.setattr(solve, "Among", plain)
    unasked = run(model, tmp_path / "plain", **options)
    plain_, revived_ = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "revived"))
    assert plain_ == revived_
    assert said.removesuffix(", as --revive allows") in unasked.notes  # whoever did it


@pytest.mark.parametrize("solver", ["exact", "continuation", "wanda"])
@pytest.mark.slow
def test_kept_zeros_that_stay(tmp_path: Path, solver: str) -> None:
    """More zeros than the pattern asks for are in rows that lose nothing: their weights are the best ones already."""
    model = sparse_model(tmp_path / "model", sparsity=0.5)
    options: dict[str, Any] = {"sparsity": None, "pattern": "2:4", "measure": "none", "revive": True}
    record = run(model, tmp_path / "out", solver=solver, **options)
    before, after = pruned(model), pruned(tmp_path / "out")
    more = sum(zeros(value) - value.numel() // 2 for value in after.values())
    assert more == counted(record, "kept_at_zero") > 0
    for key, value in after.items():
        rows = (value == 0).sum(dim=1) > value.shape[1] // 2
        if solver != "wanda":  # which gives no weight another value
            torch.testing.assert_close(value[rows], before[key][rows], atol=1e-6, rtol=1e-6)
    (said,) = [note for note in record.notes if note.startswith(f"{more:,} weights that the pattern keeps were zero")]
    assert "nothing to make up for" in said
    assert said in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_a_grid_that_revives(model: Path, tmp_path: Path) -> None:
    """What is said of rounding is a share of the weights that there were, and never below 0."""
    options: dict[str, Any] = {"sparsity": 0, "quantize": "int4:16", "measure": "none"}
    record = run(model, tmp_path / "out", solver="continuation", revive=True, **options)
    assert counted(record, "revived") == counted(record, "revived_by_rounding") > 0
    lost = counted(record, "rounded_to_zero")
    kept = sum(int(value.count_nonzero()) for value in pruned(model).values())
    assert f"; {100 * lost / kept:.2g} % of the remaining weights became 0" in record.rounding
    older = [dataclasses.replace(matrix, stats={**matrix.stats, "rounded_to_zero": -5}) for matrix in record.matrices]
    assert "; 0 % of the remaining weights became 0" in dataclasses.replace(record, matrices=older).rounding


def test_few_zeros_are_not_worth_a_note(tmp_path: Path) -> None:
    model = sparse_model(tmp_path / "model", sparsity=0.005)
    record = run(model, tmp_path / "out", measure="none")
    assert counted(record, "zeros_before") > 0
    assert not any("zero in the model" in note for note in record.notes)
    dense = run(save_model(tmp_path / "dense"), tmp_path / "other", measure="none")
    assert not any("zeros_before" in matrix.stats for matrix in dense.matrices)


@pytest.mark.slow
def test_a_run_that_was_stopped(model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sparsity": None, "pattern": "2:4"}
    run(model, tmp_path / "whole", **options)
    stopped(model, tmp_path / "out", **options)
    assert "revive (False there, True here)" in message(lambda: run(model, tmp_path / "out", revive=True, **options))
    record = run(model, tmp_path / "out", **options)
    assert record.resumed == [1]
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    check(model, tmp_path / "out", record)


# Masks from elsewhere


@pytest.mark.parametrize(
    ("solver", "pattern"),
    [
        *(("continuation", "2:4"), ("exact", "2:4"), ("sparsegpt", "unstructured:0.6"), ("wanda", "per-row:0.6")),
    ],
)
@pytest.mark.slow
def test_masks_are_extended_to_a_pattern(tmp_path: Path, solver: str, pattern: str) -> None:
    """Their zeros are the first to go."""
    dense, lender = save_model(tmp_path / "dense"), sparse_model(tmp_path / "lender", sparsity=0.4)
    options: dict[str, Any] = {"sparsity": None, "pattern": pattern, "measure": "none", "blocks": (0, 1)}
    record = run(dense, tmp_path / "out", solver=solver, mask_from=str(lender), **options)
    mask = {key: value == 0 for key, value in pruned(lender).items() if ".layers.0." in key}
    added = sum(zeros(pruned(tmp_path / "out")[key]) - int(value.sum()) for key, value in mask.items())
    assert added > 0
    for key, value in mask.items():
        after = pruned(tmp_path / "out")[key] == 0
        assert (after | ~value).all()
        if pattern == "unstructured:0.6":
            assert int(after.sum()) == round(0.6 * after.numel())
        if pattern == "2:4":
            assert torch.equal(after.view(-1, 4).sum(dim=1), value.view(-1, 4).sum(dim=1).clamp(min=2))
    (said,) = [note for note in record.notes if note.startswith(f"the mask of {lender} has ")]
    assert f"{sum(int(value.sum()) for value in mask.values()):,} zeros" in said
    assert f"to satisfy it {added:,} weights more become zero" in said


@pytest.mark.slow
def test_masks_with_more_zeros_than_a_pattern_asks_for(tmp_path: Path) -> None:
    dense, lender = save_model(tmp_path / "dense"), tmp_path / "lender"
    run(dense, lender, solver="magnitude", sparsity=None, pattern="1:4", measure="none")
    for pattern, asked in (("2:4", "50 %"), ("unstructured:0.6", "60 %"), ("per-row:0.6", "60 %")):
        options: dict[str, Any] = {"sparsity": None, "pattern": pattern, "mask_from": str(lender), "measure": "none"}
        record = run(dense, tmp_path / pattern, solver="admm1", **options)
        assert record.sparsity == 0.75
        for key, value in pruned(tmp_path / pattern).items():
            assert torch.equal(value != 0, pruned(lender)[key] != 0)
        (said,) = [note for note in record.notes if note.startswith(f"the mask of {lender} has ")]
        assert f"({asked}): all of them stay" in said


@pytest.mark.parametrize("revive", [False, True])
@pytest.mark.slow
def test_masks_over_a_model_with_zeros(model: Path, tmp_path: Path, revive: bool) -> None:
    """Of its zeros none comes back by a mask alone, and what does is counted."""
    lender = tmp_path / "lender"
    usual: dict[str, Any] = {"sparsity": None, "measure": "none"}
    run(save_model(tmp_path / "dense", seed=4), lender, solver="magnitude", pattern="2:4", **usual)
    options = {"mask_from": str(lender), "revive": revive, **usual}
    for name, solver, pattern in (("kept", Exact(), None), ("extended", Exact(), "2:4")):
        record = run(model, tmp_path / name, solver=solver, pattern=pattern, **options)
        before, after, masks = (pruned(each) for each in (model, tmp_path / name, lender))
        back = revived(before, after)
        assert counted(record, "revived") == back
        assert (back > 0) == revive
        if revive:
            assert any(note.startswith(f"{back:,} of the ") for note in record.notes)
        else:
            check(model, tmp_path / name, record)
        if name == "kept":
            for key, value in after.items():
                there = masks[key] != 0
                assert torch.equal(value != 0, there if revive else there & (before[key] != 0))
