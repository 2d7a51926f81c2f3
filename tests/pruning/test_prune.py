"""From a model directory to a pruned one; transformers and the safetensors library are the judges."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

import niwaki
from niwaki.effort import Effort, describe as describe_effort
from niwaki.evaluation.evaluate import evaluate
from niwaki.layer.patterns import NM, PerRow
from niwaki.layer.solvers import SOLVERS, SparseGPT
from niwaki.recipes import prune
from support.contract import OF_ONE_MATRIX
from support.covering import FULL
from support.models import (
    each_case,
    edit_json,
    is_pruned,
    random_tokens,
    reference,
    save_model,
    save_model_with_tokenizer,
    some_families_and,
    weight,
)
from support.runs import Diary, Untouched, listing, raw, run_magnitude as run, tensors, zeros

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


# What is written


@some_families_and(1, ("dtype", "shards"), [(torch.float32, False), (torch.bfloat16, True)])
@pytest.mark.slow
def test_a_solver_that_does_nothing_changes_nothing(
    tmp_path: Path, out: Path, case: str, dtype: torch.dtype, shards: bool
) -> None:
    source = save_model(tmp_path / "model", case, dtype=dtype, shards=shards)
    record = run(source, out, solver=Untouched(), sparsity=0.0, text=random_tokens(3, 24, seed=1))
    for path in source.glob("*.safetensors*"):
        assert (out / path.name).read_bytes() == path.read_bytes()
    tokens = random_tokens(2, 24, seed=2)
    for computing in {dtype, torch.float32}:
        before, after = (reference(path, computing)(tokens).logits for path in (source, out))
        assert torch.equal(before, after)
    assert record.sparsity == 0
    measured = record.perplexity["after"]
    assert record.perplexity["before"] == dataclasses.replace(measured, divergence=None)
    assert measured.divergence
    assert (measured.divergence.largest, measured.divergence.same_first) == (0.0, 1.0)
    assert [matrix.error for matrix in record.matrices] == [0.0] * len(record.matrices)
    sizes = [math.prod(matrix.shape) for matrix in record.matrices]
    assert sum(sizes) == sum(t.numel() for key, t in tensors(source).items() if is_pruned(case, key))


EVERYWHERE: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "60 %": ("llama grouped", {"sparsity": 0.6}, torch.bfloat16),
    "2:4": ("qwen2 window", {"pattern": "2:4"}, torch.float32),
    "per row": ("qwen3", {"pattern": PerRow(0.7)}, torch.float32),
}


@pytest.mark.parametrize(
    ("solver", "case", "options", "dtype"),
    [
        pytest.param(solver, *EVERYWHERE[name], id=f"{name}-{solver}")
        for i, solver in enumerate(OF_ONE_MATRIX)
        for j, name in enumerate(EVERYWHERE)
        if FULL or i % 3 == j
    ],
)
@pytest.mark.slow
def test_every_solver(
    tmp_path: Path, out: Path, solver: str, case: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    source = save_model(tmp_path / "model", case, dtype=dtype, shards=True)
    record = run(source, out, solver=solver, **options)
    before, after = tensors(source), tensors(out)
    assert set(before) == set(after)
    pruned = 0
    for key, old in before.items():
        new = after[key]
        assert new.dtype == old.dtype == dtype
        assert new.shape == old.shape
        if not is_pruned(case, key):
            assert raw(new) == raw(old), key
            continue
        pruned += 1
        sparsity = 0.6 if "sparsity" in options else 0.5 if options["pattern"] == "2:4" else 0.7
        assert zeros(new) == round(sparsity * new.numel()), key
        if options.get("pattern") == "2:4":
            assert ((new.view(-1, 4) == 0).sum(dim=1) == 2).all()
        if "per row" in str(options) or solver == "wanda":
            per_row = (new == 0).sum(dim=1)
            assert per_row.max() - per_row.min() <= 1
        assert torch.isfinite(new.float()).all()
        assert not ((new == 0) & new.float().signbit()).any()
        assert not torch.equal(new, old)
    assert pruned == len(record.matrices) == 7 * reference(source).config.num_hidden_layers
    assert {matrix.sparsity for matrix in record.matrices} == {
        zeros(tensor) / tensor.numel() for key, tensor in after.items() if is_pruned(case, key)
    }
    loaded = reference(out)
    for key, value in after.items():
        assert torch.equal(loaded.state_dict()[key], value.float())
    assert torch.isfinite(loaded(random_tokens(1, 24)).logits).all()
    assert loaded.config.pruning_config["method"] == solver
    assert all(0 < matrix.error < 1 for matrix in record.matrices)


@each_case
@pytest.mark.slow
def test_every_family(tmp_path: Path, out: Path, case: str) -> None:
    source = save_model(tmp_path / "model", case, dtype=torch.bfloat16, shards=True)
    text = random_tokens(3, 24, seed=1)
    record = run(source, out, solver="sparsegpt", sparsity=0.5, text=text)
    before, after = tensors(source), tensors(out)
    assert set(after) == set(before)
    for key, old in before.items():
        assert after[key].dtype == old.dtype
        if is_pruned(case, key):
            for matrix in after[key] if old.ndim == 3 else [after[key]]:  # experts one by one
                assert zeros(matrix) == matrix.numel() // 2, key
        else:
            assert raw(after[key]) == raw(old), key
    assert any("embed" in key or "wte" in key for key in before if not is_pruned(case, key))
    assert record.dtype == "float32"
    # What the run measured in memory is what the files hold.
    found = {name: reference(path)(text).logits[:, :-1] for name, path in (("before", source), ("after", out))}
    assert not torch.equal(found["before"], found["after"])
    for name, logits in found.items():
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        assert record.perplexity[name].value == pytest.approx(math.exp(float(loss)), rel=1e-4)


@pytest.mark.slow
def test_negative_zeros_of_the_source_are_gone(tmp_path: Path, out: Path) -> None:
    source = save_model(tmp_path / "model", dtype=torch.bfloat16)
    dense = reference(source, torch.bfloat16)
    for block in range(2):
        weight(dense, f"model.layers.{block}.mlp.up_proj")[0, :5] = -0.0
        weight(dense, f"model.layers.{block}.mlp.down_proj").neg_().clamp_(max=0.0)
    dense.save_pretrained(source)
    assert any(((t == 0) & t.float().signbit()).any() for t in tensors(source).values())
    for number, solver in enumerate([*OF_ONE_MATRIX, Untouched()]):
        run(source, out / str(number), solver=solver, sparsity=0.5 if isinstance(solver, str) else 0.0)
        for key, value in tensors(out / str(number)).items():
            assert not (is_pruned("llama", key) and ((value == 0) & value.float().signbit()).any()), (solver, key)


def test_other_files_come_along(tmp_path: Path, out: Path) -> None:
    source = save_model_with_tokenizer(tmp_path / "hub" / "snapshots" / "abc")
    blobs = tmp_path / "hub" / "blobs"
    blobs.mkdir()
    (source / "notes.txt").write_bytes(b"\x00anything")
    (source / "more" / "still").mkdir(parents=True)
    (source / "more" / "still" / "vocab.txt").write_text("a b")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    (source / "more" / "model.onnx").write_bytes(b"onnx")
    expected = {str(path.relative_to(source)): path.read_bytes() for path in source.rglob("*") if path.is_file()}
    # As the hub's cache has it: every file is a link.
    for number, name in enumerate(expected):
        (source / name).rename(blobs / str(number))
        (source / name).symlink_to(blobs / str(number))
    record = run(source, out)
    for name in ("pytorch_model.bin", "more/model.onnx"):
        del expected[name]
        assert any(name in note for note in record.notes)
        assert name in (out / "README.md").read_text()
    changed = {"config.json", "model.safetensors"}
    assert {p for p in listing(out) if (out / p).is_file()} == {*expected, "README.md", "niwaki.json", "recipe.toml"}
    for name, content in expected.items():
        assert not (out / name).is_symlink()
        assert ((out / name).read_bytes() == content) == (name not in changed), name
    assert "generation_config.json" in expected
    ids = AutoTokenizer.from_pretrained(out)("Shall I compare thee")["input_ids"]
    assert ids == AutoTokenizer.from_pretrained(source)("Shall I compare thee")["input_ids"]
    assert len(ids) > 2


def test_the_output_is_as_readable_as_any_new_directory(tmp_path: Path, model: Path, out: Path) -> None:
    run(model, out)
    (tmp_path / "usual").mkdir()
    (tmp_path / "usual" / "file").touch()
    assert out.stat().st_mode == (tmp_path / "usual").stat().st_mode
    for path in out.iterdir():
        assert path.stat().st_mode == (tmp_path / "usual" / "file").stat().st_mode, path


def test_config_json_gains_one_key(model: Path, out: Path) -> None:
    edit_json(model / "config.json", unknown_key={"a": [1, None]}, dtype="float32")
    record = run(model, out, solver="wanda", sparsity=0.6)
    before, after = (json.loads((path / "config.json").read_text()) for path in (model, out))
    added = after.pop("pruning_config")
    assert after == before
    assert list(after) == list(before)  # the order as well
    assert added == {
        "library": "niwaki",
        "version": niwaki.__version__,
        "method": "wanda",
        "solver": {"name": "wanda"},
        "effort": describe_effort(Effort()),
        "mask_from": None,
        "pattern": "per-row:0.6",
        "sparsity": round(record.sparsity, 6),
    }
    assert "quantization_config" not in after
    # Saving it again from transformers keeps it.
    loaded = reference(out)
    loaded.save_pretrained(out.parent / "again")
    assert json.loads((out.parent / "again" / "config.json").read_text())["pruning_config"] == added


# How it goes about it


@pytest.mark.slow
def test_progress_is_told_everything(model: Path, out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    diary = Diary(wants_steps=True)
    run(model, out, solver="admm1", progress=diary)
    assert next(event for event in diary.events if event[0] != "note") == ("begin", 2, 14)
    assert diary.events[-1] == ("end",)
    stages = [event[1:] for event in diary.events if event[0] == "stage"]
    assert [(block, name) for block, name, _ in stages] == [
        (block, name) for block in range(2) for name in ("capture", "solve", "advance")
    ]
    assert [steps for _, name, steps in stages if name == "solve"] == [7, 7]
    steps: list[int] = []
    for event in diary.events:
        if event[0] == "stage":
            steps.append(0)
        elif event[0] == "step":
            steps[-1] += 1
    # The last block need not be run again.
    assert steps[:-1] == [steps for _, _, steps in stages][:-1]
    assert [event[1:] for event in diary.events if event[0] == "solved"] == [
        (block, f"{'mlp' if name in MATRICES[4:] else 'self_attn'}.{name}") for block in range(2) for name in MATRICES
    ]
    solving = [event for event in diary.events if event[0] == "solving"]
    assert [event[2] for event in solving] == list(range(1, 21)) * 14
    assert all(event[3] == 20 and 0 <= event[4] < 2 for event in solving)
    quiet = Diary()
    run(model, out / "quiet", solver="admm1", progress=quiet)
    assert not any(event[0] == "solving" for event in quiet.events)
    printed = capfd.readouterr()
    assert printed.out == ""


@pytest.mark.parametrize(("solver", "each"), [("sparsegpt", 1), ("admm1", 1), ("continuation", 3)])
@pytest.mark.slow
def test_each_distinct_input_is_factorized_once(
    model: Path, out: Path, monkeypatch: pytest.MonkeyPatch, solver: str, each: int
) -> None:
    sizes = []
    real = torch.linalg.cholesky_ex

    def count(H: Tensor, *args: Any, **others: Any) -> Any:
        sizes.append(len(H))
        return real(H, *args, **others)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", count)
    run(model, out, solver=solver)
    # Two blocks, in each: q k v; o; gate up; down.
    assert sizes == 2 * [*[32] * each, *[32] * each, *[32] * each, *[48] * each]


def test_raised_damping_is_noted(model: Path, out: Path) -> None:
    diary = Diary()
    record = run(model, out, solver=SparseGPT(damping=0.0), calibration=random_tokens(1, 8), progress=diary)
    notes = [note for note in record.notes if "damping raised from 0 to" in note]
    assert len(notes) == 14  # 8 tokens, 32 inputs
    assert notes[0].startswith("block 0 self_attn.q_proj")
    assert [event[1] for event in diary.events if event[0] == "note" and "damping" in event[1]] == notes
    assert notes[0] in (out / "README.md").read_text()


# From Python


def test_the_package_offers_it() -> None:
    # Twice, because modules of these names are imported on the way and could take the functions' places.
    for _ in range(2):
        assert niwaki.prune is prune
        assert niwaki.evaluate is evaluate
    assert niwaki.make_solver("admm-grad") == SOLVERS["admm-grad"]
    with pytest.raises(AttributeError, match="prun"):
        _ = niwaki.prun  # type: ignore[attr-defined]
    for name in niwaki.__all__:
        assert getattr(niwaki, name).__doc__


def test_people_with_their_own_tensors() -> None:
    generator = torch.Generator().manual_seed(0)
    W, X = torch.randn(8, 16, generator=generator), torch.randn(64, 16, generator=generator)
    solution = niwaki.make_solver("wanda")(niwaki.LayerProblem(W, X.T @ X / 64), NM(2, 4))
    assert isinstance(solution, niwaki.Solution)
    assert zeros(solution.W) == 64
