"""From a model directory to a pruned one; transformers and the safetensors library are the judges."""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import math
import os
import resource
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import metadata_load
from torch import Tensor
from transformers import AutoTokenizer

import niwaki
from niwaki.errors import (
    CalibrationError,
    CheckpointError,
    NiwakiError,
    NumericalError,
    OutputError,
    PatternError,
    UnknownNameError,
    UnsupportedModelError,
)
from niwaki.evaluation.evaluate import evaluate
from niwaki.evaluation.inspect import inspect
from niwaki.files import write_json
from niwaki.layer.patterns import NM, Pattern, PerRow
from niwaki.layer.problem import LayerProblem, Monitor, Solution
from niwaki.layer.solvers import SOLVERS, DSnoT, MaskThenUpdate, Solver, SparseGPT, Swaps
from niwaki.models.output import check_record
from niwaki.pruning.effort import Effort
from niwaki.pruning.prune import prune
from niwaki.pruning.session import session
from niwaki.records.progress import Progress
from niwaki.records.record import MatrixRecord, Record
from support.arguments import arguments
from support.models import (
    CASES,
    edit_json,
    is_pruned,
    linear_inputs,
    message,
    random_tokens,
    reference,
    save_model,
    save_model_with_tokenizer,
    weight,
)
from support.runs import Untouched, raw, tensors, zeros

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def run(model: Path, out: Path, **changes: Any) -> Record:
    """``prune`` with small inputs and without a tokenizer."""
    options: dict[str, Any] = {
        "solver": "magnitude",
        "calibration": random_tokens(8, 24),
        "device": "cpu",
        "dtype": "float32",
    }
    if "pattern" not in changes and "sparsity" not in changes and "mask_from" not in changes:
        options["sparsity"] = 0.5
    return prune(model, out, **arguments(**{**options, **changes}))


def listing(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def finished(directory: Path) -> list[str]:
    """What is there but for the blocks that a run has done before it failed."""
    return [name for name in listing(directory) if not name.startswith(".out.partial")]


def strict_json(text: str) -> Any:
    """JSON as other languages read it, without NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


# What is written


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "shards"), [(torch.float32, False), (torch.bfloat16, True)])
def test_a_solver_that_does_nothing_changes_nothing(
    tmp_path: Path, out: Path, case: str, dtype: torch.dtype, shards: bool
) -> None:
    source = save_model(tmp_path / "model", case, dtype=dtype, shards=shards)
    record = run(source, out, solver=Untouched(), sparsity=0.0, text=random_tokens(3, 24, seed=1))
    for path in source.glob("*.safetensors*"):
        assert (out / path.name).read_bytes() == path.read_bytes()
    tokens = random_tokens(2, 24, seed=2)
    for computing in (dtype, torch.float32):
        before, after = (reference(path, computing)(tokens).logits for path in (source, out))
        assert torch.equal(before, after)
    assert record.sparsity == 0
    assert record.perplexity["before"] == record.perplexity["after"]
    assert [matrix.error for matrix in record.matrices] == [0.0] * len(record.matrices)
    sizes = [math.prod(matrix.shape) for matrix in record.matrices]
    assert sum(sizes) == sum(t.numel() for key, t in tensors(source).items() if is_pruned(case, key))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    ("case", "options", "dtype"),
    [
        ("llama grouped", {"sparsity": 0.6}, torch.bfloat16),
        ("qwen2 window", {"pattern": "2:4"}, torch.float32),
        ("qwen3", {"pattern": PerRow(0.7)}, torch.float32),
    ],
    ids=["60 %", "2:4", "per row"],
)
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


@pytest.mark.parametrize("case", CASES)
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
    tokens = random_tokens(2, 24, seed=2)
    assert not torch.equal(reference(source)(tokens).logits, reference(out)(tokens).logits)
    assert record.dtype == "float32"
    # What the run measured in memory is what the files hold.
    for name, path in (("before", source), ("after", out)):
        logits = reference(path)(text).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        assert record.perplexity[name]["value"] == pytest.approx(math.exp(float(loss)), rel=1e-4)


def test_negative_zeros_of_the_source_are_gone(tmp_path: Path, out: Path) -> None:
    source = save_model(tmp_path / "model", dtype=torch.bfloat16)
    dense = reference(source, torch.bfloat16)
    for block in range(2):
        weight(dense, f"model.layers.{block}.mlp.up_proj")[0, :5] = -0.0
        weight(dense, f"model.layers.{block}.mlp.down_proj").neg_().clamp_(max=0.0)
    dense.save_pretrained(source)
    assert any(((t == 0) & t.float().signbit()).any() for t in tensors(source).values())
    for number, solver in enumerate([*SOLVERS, Untouched()]):
        run(source, out / str(number), solver=solver, sparsity=0.5 if isinstance(solver, str) else 0.0)
        for key, value in tensors(out / str(number)).items():
            assert not (is_pruned("llama", key) and ((value == 0) & value.float().signbit()).any()), (
                solver,
                key,
            )


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
    assert {p for p in listing(out) if (out / p).is_file()} == {*expected, "README.md", "niwaki.json"}
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
        "solver": "Wanda()",
        "effort": repr(Effort()),
        "mask_from": None,
        "pattern": "per-row:0.6",
        "sparsity": round(record.sparsity, 6),
    }
    assert "quantization_config" not in after
    # Saving it again from transformers keeps it.
    loaded = reference(out)
    loaded.save_pretrained(out.parent / "again")
    assert json.loads((out.parent / "again" / "config.json").read_text())["pruning_config"] == added


# The card


CARD = """---
license: other
license_name: tiny-community
license_link: https://example.com/LICENSE
language:
- en
- ja
tags:
- text-generation
- tiny
pipeline_tag: text-generation
---
# Tiny

It is *very* small.
"""


def front_matter(directory: Path) -> dict[str, Any]:
    """The YAML at the top of the card."""
    data = metadata_load(directory / "README.md")
    assert data is not None
    return data


def test_the_card(model: Path, out: Path) -> None:
    (model / "README.md").write_text(CARD)
    text = random_tokens(3, 24, seed=1)
    record = run(model, out, solver="admm-grad", sparsity=0.6, text=text)
    assert (out / "README.base.md").read_text() == CARD
    written = (out / "README.md").read_text()
    data = front_matter(out)
    assert data["license"] == "other"
    assert data["language"] == ["en", "ja"]
    assert {"niwaki", "pruned", "sparse", "text-generation", "tiny"} <= set(data["tags"])
    assert data["base_model"] == "model"
    assert data["library_name"] == "transformers"
    for part in ("ADMM(iterations=20", "unstructured:0.6", "60.", "8 windows of 24 tokens"):
        assert part in written
    for name in ("before", "after"):
        value = record.perplexity[name]["value"]
        assert f"| perplexity {name} | {value:.2f} ± " in written
    assert "context 24" in written
    # The hub refuses a card that says "other" and no more.
    assert (data.get("license_name"), data.get("license_link")) == (
        "tiny-community",
        "https://example.com/LICENSE",
    )


@pytest.mark.parametrize(
    "base",
    [
        b"",
        b"# No front matter\n",
        b"---\nlicense: mit\ntags:\n---\n",
        b"---\nlicense: mit\ntags: one\n---\n",
        b"---\nlicense: mit\ntags: [1, null, two]\n---\n",
        b"---\n- a\n- list\n---\n",
        b"---\nlicense: [unclosed\n---\n",
        b"---\nlicense: a: b: c\n\t- x\n---\n",
        b"---\nlicense: mit\n",
        b"\xff\xfe no UTF-8",
    ],
    ids=str,
)
def test_whatever_the_base_card_is_like(model: Path, out: Path, base: bytes) -> None:
    # After hours of work is no time to stumble over somebody's YAML.
    (model / "README.md").write_bytes(base)
    run(model, out)
    assert (out / "README.base.md").read_bytes() == base
    data = front_matter(out)
    if b"license: mit\ntags" in base:
        assert data["license"] == "mit"
    assert "niwaki" in data["tags"]


def test_a_hub_name_is_the_base_model(model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["niwaki.pruning.prune"]
    monkeypatch.setattr(module, "locate_model", lambda name: model)
    record = prune("someone/tiny", out, 0.5, solver="magnitude", calibration=random_tokens(2, 8))
    assert record.model == "someone/tiny"
    assert front_matter(out)["base_model"] == "someone/tiny"


# The record


def test_the_record(model: Path, out: Path, tmp_path: Path) -> None:
    text = random_tokens(3, 24, seed=1)
    to = tmp_path / "records" / "run.json"
    with session("niwaki prune x"):
        record = run(model, out, solver="sparsegpt", text=text, seed=5)
    record.save(to)
    written = (out / "niwaki.json").read_text()
    assert to.read_text() == written
    again = Record.from_json(written)
    assert again == record
    assert again.to_json() == written
    values = strict_json(written)
    assert values["command"] == "niwaki prune x"
    assert values["method"] == "sparsegpt"
    assert values["solver"].startswith("SparseGPT(")
    assert values["flops"] == record.flops > 0
    assert values["calibration"]["samples"] == 8
    assert values["calibration"]["sequence_length"] == 24
    assert values["calibration"]["seed"] == 5
    assert set(values["versions"]) >= {"python", "niwaki", "torch", "transformers"}
    assert values["versions"]["niwaki"] == niwaki.__version__
    assert values["versions"]["torch"] == torch.__version__
    assert {"capture", "solve", "advance", "total"} <= set(values["seconds"])
    parts = sum(seconds for name, seconds in values["seconds"].items() if name != "total")
    assert parts == pytest.approx(values["seconds"]["total"], rel=0.05)
    assert values["peak_memory"]["resident"] > 2**20
    assert len(values["matrices"]) == 14
    for matrix in values["matrices"]:
        assert matrix["tokens"] == 8 * 24
        assert matrix["seconds"] > 0
        assert matrix["stats"]["damping"] == pytest.approx(0.01, rel=0.1)
    assert record.mean_error == pytest.approx(math.prod(matrix["error"] for matrix in values["matrices"]) ** (1 / 14))


def test_the_record_of_one_window_is_json_too(model: Path, out: Path) -> None:
    run(model, out, text=random_tokens(1, 24, seed=1))
    values = strict_json((out / "niwaki.json").read_text())
    assert values["perplexity"]["after"]["windows"] == 1
    assert "nan" not in (out / "README.md").read_text()


@pytest.mark.parametrize("solver", ["magnitude", "wanda", "sparsegpt", "continuation"])
def test_errors_are_those_of_an_independent_computation(tmp_path: Path, out: Path, solver: str) -> None:
    source = save_model(tmp_path / "model", "llama grouped")
    tokens = random_tokens(8, 24)
    record = run(source, out, solver=solver, calibration=tokens, sparsity=0.6)
    dense, pruned, walking = reference(source), reference(out), reference(source)
    for block in range(3):
        # What the block is given comes from the pruned blocks before it, and its own weights are dense.
        inputs = linear_inputs(walking, block, tokens)
        for name in inputs:
            path = f"model.layers.{block}.{name}"
            W, What, X = (t.double() for t in (weight(dense, path), weight(pruned, path), inputs[name]))
            expected = (X @ (W - What).T).square().sum() / (X @ W.T).square().sum()
            found = next(m for m in record.matrices if (m.block, m.name) == (block, name))
            assert found.error == pytest.approx(expected.item(), rel=1e-3)
            weight(walking, path).copy_(weight(pruned, path))
    assert len(record.matrices) == 21


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_perplexities_are_those_of_transformers(tmp_path: Path, out: Path, dtype: torch.dtype) -> None:
    source = save_model(tmp_path / "model", "qwen2", dtype=dtype)
    text = random_tokens(5, 24, seed=1)
    record = run(source, out, text=text, sparsity=0.7)
    for name, path in (("before", source), ("after", out)):
        whole = reference(path)
        losses = torch.stack([whole(row[None], labels=row[None]).loss for row in text]).double()
        found = record.perplexity[name]
        assert found["value"] == pytest.approx(losses.mean().exp().item(), rel=1e-4)
        error = losses.mean().exp() * losses.std() / math.sqrt(5)
        assert found["standard_error"] == pytest.approx(error.item(), rel=1e-2)
        assert (found["tokens"], found["context"], found["windows"]) == (5 * 23, 24, 5)
    assert record.perplexity["before"]["value"] != pytest.approx(record.perplexity["after"]["value"], rel=1e-2)


def test_which_perplexities(model: Path, out: Path) -> None:
    text = random_tokens(5, 24, seed=1)
    both = run(model, out / "both", text=text).perplexity
    after = run(model, out / "after", text=text, measure="after").perplexity
    none = run(model, out / "none", text=text, measure="none")
    assert list(both) == ["before", "after"]
    assert after == {"after": both["after"]}
    assert none.perplexity == {}
    assert "| perplexity | not measured |" in (out / "none" / "README.md").read_text()
    silent = run(model, out / "no text")
    assert silent.perplexity == {}
    assert any("perplexity was not measured" in note for note in silent.notes)


def test_texts(tmp_path: Path, out: Path) -> None:
    source = save_model_with_tokenizer(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"The {n} walked on and on, to town." for n in range(400)))
    tokenizer = AutoTokenizer.from_pretrained(source, model_max_length=10**9)
    ids = torch.tensor(tokenizer(text.read_text(), add_special_tokens=False)["input_ids"])
    windows = ids[: 9 * 32].view(9, 32)
    dense = reference(source)

    def perplexity(tokens: Tensor) -> float:
        return float(dense(tokens, labels=tokens).loss.exp())

    # By default what comes behind the calibration windows.
    record = run(source, out / "1", calibration=str(text), samples=5, length=32, text_samples=4)
    same = run(source, out / "2", calibration=windows[:5], text=windows[5:])
    assert record.calibration["tokens_sha256"] == same.calibration["tokens_sha256"]
    assert record.perplexity["before"]["value"] == pytest.approx(perplexity(windows[5:]), rel=1e-4)
    assert record.perplexity["after"]["value"] == same.perplexity["after"]["value"]
    assert tensors(out / "1").keys() == tensors(out / "2").keys()
    for key, value in tensors(out / "1").items():
        assert torch.equal(value, tensors(out / "2")[key])
    # Another text.
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[2000:])
    start = torch.tensor(tokenizer(other.read_text(), add_special_tokens=False)["input_ids"])[:96]
    record = run(source, out / "3", calibration=str(text), samples=5, length=32, text=str(other), text_samples=3)
    assert record.perplexity["before"]["value"] == pytest.approx(perplexity(start.view(3, 32)), rel=1e-4)
    # None that is long enough for both.
    short = run(source, out / "4", calibration=str(text), samples=len(ids) // 32, length=32)
    assert short.perplexity == {}
    assert any("has no more of it" in note for note in short.notes)
    # The sequence length, when nobody says, is noted; it is the model's where that is short.
    silent = run(source, out / "5", calibration=str(text), samples=2)
    assert silent.calibration["sequence_length"] == 128
    assert any("128, because none was asked for" in note for note in silent.notes)
    said = message(
        lambda: run(source, out / "6", calibration=str(text), samples=10**4, length=32),
        CalibrationError,
    )
    assert f"{10**4 * 32 - len(ids)} are missing" in said
    assert sorted(path.name for path in out.iterdir()) == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("solver", ["wanda", "continuation"])
def test_two_runs_give_the_same_bytes(model: Path, out: Path, solver: str) -> None:
    (model / "README.md").write_text(CARD)
    text = random_tokens(3, 24, seed=1)
    for name in ("a", "b"):
        run(model, out / name, solver=solver, text=text)
    assert listing(out / "a") == listing(out / "b")
    for path in (out / "a").iterdir():
        if path.name != "niwaki.json":
            assert path.read_bytes() == (out / "b" / path.name).read_bytes(), path.name
    first, second = (Record.from_json((out / name / "niwaki.json").read_text()) for name in ("a", "b"))
    for record in (first, second):
        record.seconds.clear()
        record.peak_memory.clear()
        record.matrices = [dataclasses.replace(matrix, seconds=0.0) for matrix in record.matrices]
    assert first == second


def test_a_record_from_before_operations_were_counted(model: Path, out: Path) -> None:
    values = json.loads(run(model, out).to_json())
    del values["flops"]
    assert Record.from_json(json.dumps(values)).flops == 0.0


def test_operations_are_counted_before_anything_is_solved(model: Path, out: Path) -> None:
    @dataclass(frozen=True)
    class Counting(Untouched):
        factor: float = 1.0

        def flops(self, rows: int, columns: int) -> float:
            return self.factor * (1000 * rows + columns)

    class AtTheStart(Progress):
        def begin(self, record: Record, blocks: int, matrices: int) -> None:
            found.append(record.flops)
            assert not record.matrices

    found: list[float] = []
    shapes = 2 * [*4 * [(32, 32)], (48, 32), (48, 32), (32, 48)]
    once = sum(1000 * rows + columns for rows, columns in shapes)
    record = run(model, out / "1", solver=Counting(), progress=AtTheStart())
    both = MaskThenUpdate(Counting(), Counting(3.0))
    run(model, out / "2", solver=both, progress=AtTheStart())
    assert found == [once, 4 * once]
    assert record.flops == once


# Masks from elsewhere


def kept(directory: Path) -> dict[str, Tensor]:
    return {key: value != 0 for key, value in tensors(directory).items() if is_pruned("llama", key)}


@pytest.mark.parametrize("update", ["admm1", "sparsegpt", "continuation"])
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
    assert config["mask_from"] == "magnitude"
    assert config["method"] == update
    assert "| mask from | magnitude |" in (out / "both" / "README.md").read_text()
    # Updating the weights is better than leaving them, and choosing the mask as well is better still.
    plain = Record.from_json((out / "magnitude" / "niwaki.json").read_text())
    assert own.mean_error < record.mean_error < plain.mean_error


def test_a_mask_that_depends_on_the_inputs(model: Path, out: Path) -> None:
    run(model, out / "wanda", solver="wanda", sparsity=0.6)
    run(model, out / "both", solver="admm1", mask_from="wanda", pattern="per-row:0.6")
    for key, mask in kept(out / "both").items():
        if key.startswith("model.layers.0."):  # later blocks have other inputs by now
            assert torch.equal(mask, kept(out / "wanda")[key])


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


@pytest.mark.parametrize("solver", ["swaps", "dsnot"])
@pytest.mark.parametrize(
    "options",
    [{"pattern": "2:4"}, {"pattern": PerRow(0.6)}, {"sparsity": 0.5}, {"pattern": "2:4+per-row:0.6"}],
    ids=str,
)
def test_the_mask_of_a_pruned_model_is_refined_within_a_pattern(
    model: Path, out: Path, solver: str, options: dict[str, Any]
) -> None:
    pattern = options.get("pattern", "per-row:0.5" if solver == "dsnot" else "unstructured:0.5")
    run(model, out / "a", solver="magnitude", pattern=pattern)
    limit = {"swaps": Swaps(iterations=1), "dsnot": DSnoT(cycles=1)}[solver]
    record = run(model, out / "b", solver=limit, mask_from=str(out / "a"), **options)
    assert record.pattern == f"the mask of {out / 'a'}, within {pattern}"
    own = run(model, out / "own", solver=limit, pattern=pattern)
    assert own.pattern == str(pattern)
    before, after, others = kept(out / "a"), kept(out / "b"), kept(out / "own")
    moved = 0
    for key, mask in after.items():
        assert mask.sum() == before[key].sum()
        assert torch.equal(mask.sum(dim=1), before[key].sum(dim=1))
        if "2:4" in str(pattern):
            assert (mask.view(-1, 4).sum(dim=1) <= 2).all()
        # One exchange in a row at most, from that mask and not from Wanda's.
        assert ((mask ^ before[key]).sum(dim=1) <= 2).all()
        moved += int((mask ^ before[key]).sum())
        assert not torch.equal(mask, others[key])
    assert moved > 100


def test_solvers_that_do_not_refine_keep_the_mask_of_a_pruned_model(model: Path, out: Path) -> None:
    run(model, out / "a", solver="magnitude", pattern="2:4")
    masks = kept(out / "a")
    for solver in ("wanda", "admm1", "sparsegpt", "obc"):
        record = run(model, out / solver, solver=solver, mask_from=str(out / "a"), pattern="2:4")
        assert record.sparsity == 0.5
        for key, mask in kept(out / solver).items():
            assert torch.equal(mask, masks[key])
    # An update after the exchanges, which then are those of the pattern too.
    run(model, out / "b", solver="swaps", mask_from=str(out / "a"), pattern="2:4")
    run(model, out / "c", solver="swaps+exact", mask_from=str(out / "a"), pattern="2:4")
    q_proj = "model.layers.0.self_attn.q_proj.weight"  # later ones have other inputs
    assert torch.equal(kept(out / "b")[q_proj], kept(out / "c")[q_proj])
    assert not torch.equal(tensors(out / "b")[q_proj], tensors(out / "c")[q_proj])


def test_masks_that_a_pattern_does_not_allow(model: Path, out: Path) -> None:
    for name, pattern in {"nm": "2:4", "unstructured": "unstructured:0.5", "rows": "per-row:0.5"}.items():
        run(model, out / name, solver="magnitude", pattern=pattern)
    q_proj = "model.layers.0.self_attn.q_proj.weight"

    def said(name: str, pattern: str) -> str:
        diary = Diary()
        options = {"mask_from": str(out / name), "pattern": pattern, "progress": diary}
        text = message(lambda: run(model, out / "x", solver="swaps", **options), PatternError)
        assert diary.events == []  # before anything is solved
        assert not (out / "x").exists()
        return text.replace(str(out / name), "DIR")

    asked = "try the pattern that it was made for, or none, which keeps the mask as it is"
    assert said("nm", "per-row:0.6") == (
        f"{q_proj}: the mask of DIR has 512 zeros of 1024 (50 %), and per-row:0.6 asks for 614; {asked}"
    )
    assert "has 512 zeros of 1024 (50 %), and 3:4 asks for 256" in said("nm", "3:4")
    row, column = _first_group_without_two(kept(out / "rows")[q_proj])
    assert said("rows", "2:4") == (
        f"{q_proj}: the mask of DIR has as many zeros as 2:4 asks for, but in other places, first in "
        f"row {row}, columns {column} to {column + 3}; try the pattern that it was made for, or unstructured:0.5, "
        "or none, which keeps the mask as it is"
    )
    row = next(i for i, kept_ in enumerate(kept(out / "unstructured")[q_proj].sum(dim=1)) if kept_ != 16)
    assert f"in other places, first in row {row}; " in said("unstructured", "per-row:0.5")
    # What is more special is allowed by what is less.
    for name, pattern in (("nm", "per-row:0.5"), ("nm", "unstructured:0.5"), ("rows", "unstructured:0.5")):
        run(model, out / "x", solver="swaps", mask_from=str(out / name), pattern=pattern)
        shutil.rmtree(out / "x")
    # In the last block only
    shutil.copytree(out / "nm", out / "spoilt")
    spoilt = reference(out / "nm")
    matrix = weight(spoilt, "model.layers.1.mlp.down_proj")
    group = matrix[5, 8:12]
    group[(group == 0).nonzero()[0]] = 1.0
    spoilt.save_pretrained(out / "spoilt")
    assert said("spoilt", "2:4").startswith(
        "model.layers.1.mlp.down_proj.weight: the mask of DIR has 767 zeros of 1536 (49.93 %), and 2:4 asks for 768"
    )
    # The other way round: the pattern does not fit the matrices.
    assert said("nm", "2:5").startswith(f"{q_proj}: the pattern 2:5 needs")


def _first_group_without_two(mask: Tensor) -> tuple[int, int]:
    for row, values in enumerate(mask.tolist()):
        for column in range(0, len(values), 4):
            if sum(values[column : column + 4]) != 2:
                return row, column
    raise AssertionError("all have two")


@pytest.mark.parametrize("solver", ["swaps", "dsnot", "swaps+exact"])
def test_solvers_that_refine_ask_for_a_pattern(model: Path, out: Path, solver: str) -> None:
    run(model, out / "a", solver="magnitude", pattern="2:4")
    text = message(lambda: run(model, out / "x", solver=solver, mask_from=str(out / "a")), PatternError)
    assert "q_proj.weight: " in text
    assert "--pattern 2:4, or in Python Fixed(mask, within=NM(2, 4))" in text


# How it goes about it


class Diary(Progress):
    """Writes down what it is told, and raises where it is asked to."""

    def __init__(self, fail_at: str = "", wants_steps: bool = False) -> None:
        self.fail_at = fail_at
        self.wants_steps = wants_steps
        self.events: list[tuple[Any, ...]] = []

    def _note(self, *event: Any) -> None:
        self.events.append(event)
        if event[0] == self.fail_at:
            raise KeyboardInterrupt

    def begin(self, record: Record, blocks: int, matrices: int) -> None:
        self._note("begin", blocks, matrices)

    def stage(self, block: int, name: str, steps: int) -> None:
        self._note("stage", block, name, steps)

    def step(self) -> None:
        self._note("step")

    def solving(self, matrix: str, step: int, steps: int, error: float) -> None:
        self._note("solving", matrix, step, steps, error)

    def solved(self, matrix: MatrixRecord) -> None:
        self._note("solved", matrix.block, matrix.name)

    def note(self, text: str) -> None:
        self._note("note", text)

    def end(self, record: Record) -> None:
        self._note("end")


def test_progress_is_told_everything(model: Path, out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    diary = Diary(wants_steps=True)
    run(model, out, solver="admm1", progress=diary)
    assert diary.events[0] == ("begin", 2, 14)
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
def test_each_distinct_input_is_factorised_once(
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
    assert [event[1] for event in diary.events if event[0] == "note"] == notes
    assert notes[0] in (out / "README.md").read_text()


# Some blocks only


def in_blocks(*chosen: int) -> Callable[[str], bool]:
    """Whether a key is that of a matrix to prune in one of these blocks."""
    parts = tuple(f"model.layers.{block}." for block in chosen)
    return lambda key: key.startswith(parts) and is_pruned("llama", key)


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("blocks", [(0, 1), (1, 2), (2, 3), (0, 2), (1, 3), (0, 3)], ids=str)
def test_some_blocks_only(tmp_path: Path, out: Path, blocks: tuple[int, int], held: bool) -> None:
    source = save_model(tmp_path / "model", "llama grouped", shards=True)
    text = random_tokens(3, 24, seed=1)
    diary = Diary()
    record = run(source, out, solver="wanda", blocks=blocks, text=text if held else None, progress=diary)
    is_chosen, every = in_blocks(*range(*blocks)), blocks == (0, 3)
    before, after = tensors(source), tensors(out)
    assert before.keys() == after.keys()
    total = nulls = 0
    for key, old in before.items():
        if is_chosen(key):
            assert zeros(after[key]) == old.numel() // 2
            total, nulls = total + old.numel(), nulls + zeros(after[key])
        else:
            assert raw(after[key]) == raw(old), key
    assert [m.block for m in record.matrices] == [block for block in range(*blocks) for _ in range(7)]
    assert record.sparsity == nulls / total == 0.5
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
    begin, *others = diary.events
    assert begin == ("begin", 3 if held else blocks[1], 7 * len(range(*blocks)))
    assert max(event[1] for event in others if event[0] == "stage") == begin[1] - 1
    assert {event[1] for event in others if event[:1] == ("solved",)} == set(range(*blocks))
    if held:
        for name, path in (("before", source), ("after", out)):
            logits = reference(path)(text).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            assert record.perplexity[name]["value"] == pytest.approx(math.exp(float(loss)), rel=1e-4)
    # What it says of itself
    assert record == Record.from_json((out / "niwaki.json").read_text())
    assert record.blocks == (None if every else [*blocks])
    part = {
        (0, 1): "block 0",
        (1, 2): "block 1",
        (2, 3): "block 2",
        (0, 2): "blocks 0 to 1",
        (1, 3): "blocks 1 to 2",
    }.get(blocks, "")
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


def test_some_blocks_only_of_a_run_that_is_stopped(tmp_path: Path, out: Path) -> None:
    source = save_model(tmp_path / "model", "llama grouped", shards=True)
    options = {"blocks": (1, 3), "solver": "wanda", "text": random_tokens(3, 24, seed=1)}
    whole = run(source, tmp_path / "whole", **options)

    class Stop(Diary):
        def solved(self, matrix: MatrixRecord) -> None:
            super().solved(matrix)
            if matrix.block == 2:
                raise KeyboardInterrupt

        def stopped(self, done: int, blocks: int) -> None:
            self._note("stopped", done, blocks)

    diary = Stop()
    with pytest.raises(KeyboardInterrupt):
        run(source, out, progress=diary, **options)
    assert diary.events[-1] == ("stopped", 1, 2)
    for blocks in (None, (0, 3), (1, 2)):
        said = message(lambda blocks=blocks: run(source, out, **{**options, "blocks": blocks}))  # type: ignore[misc]
        assert f"blocks ([1, 3] there, {[*(blocks or (0, 3))]} here)" in said
    record = run(source, out, **options)
    assert record.resumed == [2]
    assert record.blocks == [1, 3]
    assert record.perplexity == whole.perplexity
    assert (out / "README.md").read_text() == (tmp_path / "whole" / "README.md").read_text()
    for path in source.glob("*.safetensors"):
        assert (out / path.name).read_bytes() == (tmp_path / "whole" / path.name).read_bytes()


def test_some_blocks_only_with_the_mask_of_a_model(tmp_path: Path, out: Path) -> None:
    source = save_model(tmp_path / "model", "llama grouped")
    run(source, out / "a", blocks=(1, 2), pattern="2:4")
    # The masks of the others are all there is: they would not do for the pattern.
    run(source, out / "b", blocks=(1, 2), mask_from=str(out / "a"), pattern="2:4", solver="admm1")
    for key, value in tensors(out / "b").items():
        assert torch.equal(value != 0, tensors(out / "a")[key] != 0)
        assert torch.equal(value, tensors(source)[key]) != in_blocks(1)(key)
    assert "asks for 512" in message(
        lambda: run(source, out / "c", mask_from=str(out / "a"), pattern="2:4"), PatternError
    )


@pytest.mark.parametrize("blocks", [(0, 0), (1, 1), (2, 1), (0, 3), (2, 3), (-1, 1), (5, 9)], ids=str)
def test_blocks_that_are_none(tmp_path: Path, model: Path, blocks: tuple[int, int]) -> None:
    before = listing(tmp_path)
    text = message(lambda: run(model, tmp_path / "out", blocks=blocks))
    assert text == f"{blocks[0]}:{blocks[1]} is no range of blocks here; the model's are 0:2"
    assert listing(tmp_path) == before


# What can go wrong


@pytest.mark.parametrize("at", ["begin", "stage", "step", "solved", "solving"])
def test_an_interruption_leaves_nothing(tmp_path: Path, model: Path, at: str) -> None:
    before = listing(tmp_path)
    diary = Diary(at, wants_steps=True)
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "out", solver="admm1", progress=diary)
    assert diary.events[-1][0] == at
    assert listing(tmp_path) == before


def enlarge(model: Path, *changes: tuple[str, float]) -> None:
    dense = reference(model)
    for path, factor in changes:
        weight(dense, path).mul_(factor)
    dense.save_pretrained(model)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ([("model.layers.0.mlp.up_proj", 1e38)], "block 0: the inputs of mlp.down_proj"),
        ([("model.layers.1.self_attn.v_proj", 1e38)], "block 1: the inputs of self_attn.o_proj"),
        (
            [("model.layers.0.mlp.up_proj", 1e4), ("model.layers.0.mlp.down_proj", 1e38)],
            "model.layers.0.mlp.down_proj.weight: the error of its outputs is",
        ),
    ],
)
def test_activations_that_are_not_finite(
    tmp_path: Path, model: Path, changes: list[tuple[str, float]], named: str
) -> None:
    enlarge(model, *changes)
    before = listing(tmp_path)
    said = message(lambda: run(model, tmp_path / "out", solver="wanda"), NumericalError)
    assert named in said
    assert finished(tmp_path) == before


def test_perplexities_that_are_not_finite(tmp_path: Path, model: Path) -> None:
    # Behind the last matrix no Gram matrix sees it.
    enlarge(model, ("model.layers.1.mlp.up_proj", 1e4), ("model.layers.1.mlp.down_proj", 1e38))
    before = listing(tmp_path)
    text = random_tokens(3, 24, seed=1)
    assert not torch.isfinite(reference(model)(text).logits).any()
    message(lambda: run(model, tmp_path / "out", solver="wanda", text=text), NumericalError)
    assert finished(tmp_path) == before


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "path",
    ["model.layers.1.mlp.gate_proj", "model.layers.0.input_layernorm", "model.embed_tokens", "model.norm"],
)
def test_weights_that_are_not_finite(tmp_path: Path, model: Path, path: str, bad: float) -> None:
    dense = reference(model)
    weight(dense, path).view(-1)[7] = bad
    dense.save_pretrained(model)
    before = listing(tmp_path)
    said = message(lambda: run(model, tmp_path / "out"), CheckpointError)
    assert path in said
    assert finished(tmp_path) == before


def test_a_solver_that_fails_is_named_with_its_matrix(tmp_path: Path, model: Path) -> None:
    @dataclass(frozen=True)
    class Broken(Solver):
        def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
            if problem.W.shape == (48, 32):
                return problem.solution(problem.W * math.nan, pattern.mask(problem.W))
            return problem.solution(problem.W, pattern.mask(problem.W))

        def flops(self, rows: int, columns: int) -> float:
            return 0.0

    before = listing(tmp_path)
    said = message(lambda: run(model, tmp_path / "out", solver=Broken()), NumericalError)
    assert said.startswith("model.layers.0.mlp.gate_proj.weight: ")
    assert listing(tmp_path) == before


def test_outputs_that_are_taken(tmp_path: Path, model: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious.txt").write_text("keep me")
    file = tmp_path / "file"
    file.write_text("keep me")
    before = listing(tmp_path)
    for out in (full, file, full / "precious.txt"):
        said = message(lambda out=out: run(model, out))  # type: ignore[misc]
        assert str(out) in said
        assert "not an empty directory" in said
    for out in (model / "out", model / "a" / "b", model / ".." / "model" / "out"):
        assert "inside the model's own directory" in message(lambda out=out: run(model, out))  # type: ignore[misc]
    message(lambda: run(model, model))
    assert listing(tmp_path) == before
    assert (full / "precious.txt").read_text() == file.read_text() == "keep me"


def test_below_a_file_there_is_no_output(tmp_path: Path, model: Path) -> None:
    (tmp_path / "file").write_text("keep me")
    before = listing(tmp_path)
    message(lambda: run(model, tmp_path / "file" / "out"), NiwakiError)
    assert listing(tmp_path) == before


def test_outputs_that_will_do(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    run(model, empty)
    assert (empty / "config.json").exists()
    run(model, tmp_path / "deep" / "er" / "out")
    assert (tmp_path / "deep" / "er" / "out" / "config.json").exists()
    assert listing(tmp_path / "deep" / "er")[0] == "out"  # nothing temporary beside it
    monkeypatch.chdir(tmp_path)
    run(Path("model"), Path("relative"))
    assert (tmp_path / "relative" / "config.json").exists()


def test_an_empty_directory_to_stand_in(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run(model, Path())
    assert (tmp_path / "here" / "config.json").exists()
    # Who stands in it still sees it: another directory in its place would not do.
    assert Path("config.json").exists()


def test_a_link_to_an_empty_directory(tmp_path: Path, model: Path) -> None:
    (tmp_path / "big disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "big disk")
    run(model, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()
    assert (tmp_path / "big disk" / "config.json").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["big disk", "model", "out"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sparsity": 1.0}, "from 0 to below 1; got 1"),
        ({"sparsity": 60}, "from 0 to below 1; got 60"),
        ({"sparsity": -0.1}, "got -0.1"),
        ({"sparsity": math.nan}, "got nan"),
        ({"pattern": "4:2"}, "4:2"),
        ({"pattern": "0:4"}, "0:4"),
        ({"pattern": "2:0"}, "2:0"),
        ({"pattern": "half"}, "'half' is no pattern"),
        ({"pattern": ""}, "is no pattern"),
        ({"pattern": "per-row:1"}, "got 1"),
        ({"pattern": "unstructured:x"}, "is no pattern"),
        ({"pattern": "2:5"}, "model.layers.0.self_attn.q_proj.weight: the pattern 2:5 needs"),
        ({"pattern": NM(1, 32)}, "model.layers.0.mlp.down_proj.weight: the pattern 1:32 needs"),
        ({"pattern": None}, "say how sparse"),
        ({"sparsity": 0.5, "pattern": "2:4"}, "not both"),
        ({"sparsity": "2:4"}, "a sparsity is a number such as 0.6; for '2:4' say pattern='2:4'"),
        ({"solver": "sparse-gpt"}, "no solver is called 'sparse-gpt'; did you mean sparsegpt"),
        ({"samples": 0}, "got 0"),
        ({"text_samples": 0}, "got 0"),
        ({"calibration": "demo", "length": 129}, "129"),
        ({"calibration": "demo", "length": 1}, "at least 2 tokens"),
        ({"calibration": "demo", "length": -1}, "at least 2 tokens"),
        ({"device": "quantum"}, "'quantum'"),
        ({"dtype": "int4"}, "int4"),
        ({"tf32": "sometimes"}, "tf32 is auto, always or never; got 'sometimes'"),
    ],
    ids=str,
)
def test_what_makes_no_sense(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    source = save_model_with_tokenizer(tmp_path / "model")
    before = listing(tmp_path)
    text = message(lambda: run(source, tmp_path / "out", **options))
    assert said in text
    assert listing(tmp_path) == before


def test_kinds_of_errors(model: Path, out: Path) -> None:
    message(lambda: run(model, out, sparsity=1.5), PatternError)
    message(lambda: run(model, out, pattern="2:5"), PatternError)
    message(lambda: run(model, out, solver="wonda"), UnknownNameError)
    with pytest.raises(ValueError, match="below 1"):
        run(model, out, sparsity=2.0)


@pytest.mark.parametrize(
    "tokens",
    [
        torch.tensor([[0, 64]]),
        torch.tensor([[-1, 0]]),
        torch.zeros(8, dtype=torch.int64),
        torch.zeros(2, 8),
        torch.zeros(2, 129, dtype=torch.int64),
        torch.zeros(0, 8, dtype=torch.int64),
    ],
    ids=["beyond the vocabulary", "negative", "one dimension", "no integers", "too long", "empty"],
)
@pytest.mark.parametrize("name", ["calibration", "text"])
def test_tokens_that_make_no_sense(tmp_path: Path, model: Path, name: str, tokens: Tensor) -> None:
    before = listing(tmp_path)
    message(lambda: run(model, tmp_path / "out", **{name: tokens}), NiwakiError)
    assert listing(tmp_path) == before


def test_models_that_cannot_be_pruned(tmp_path: Path, model: Path) -> None:
    config = (model / "config.json").read_text()
    for changes, parts in (
        ({"is_encoder_decoder": True}, ("encoder with a decoder", "llama")),
        ({"quantization_config": {"quant_method": "fp8"}}, ("quantised",)),
    ):
        edit_json(model / "config.json", **changes)
        before = listing(tmp_path)
        said = message(lambda: run(model, tmp_path / "out"), UnsupportedModelError)
        assert all(part in said for part in parts)
        assert listing(tmp_path) == before
        (model / "config.json").write_text(config)
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "pickled weights" in message(lambda: run(model, tmp_path / "out"), CheckpointError)
    assert "no directory" in message(lambda: run(tmp_path / "nowhere", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_no_space_left(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = listing(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    assert "no space left on disk" in message(lambda: run(model, tmp_path / "out"), OutputError)
    assert listing(tmp_path) == before
    gc.collect()  # a file that was left open is an error here


def test_what_was_written_is_checked(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from niwaki.models.checkpoint import CheckpointWriter

    real = CheckpointWriter.write

    def bad_disk(self: CheckpointWriter, key: str, tensor: Tensor, part: int | None = None) -> None:
        if "layers.1.mlp.up" in key:
            tensor = tensor.clone()
            tensor[tensor == 0] = 1e-8
        real(self, key, tensor, part)

    monkeypatch.setattr(CheckpointWriter, "write", bad_disk)
    before = listing(tmp_path)
    said = message(lambda: run(model, tmp_path / "out"), OutputError)
    assert "model.layers.1.mlp.up_proj.weight" in said
    assert finished(tmp_path) == before


# The record's file


def test_a_record_that_cannot_be_written(tmp_path: Path, model: Path) -> None:
    (tmp_path / "records").mkdir()
    (tmp_path / "file").write_text("keep me")
    before = listing(tmp_path)
    # That has to show before the work, and not leave bits of it.
    for to in (tmp_path / "records", tmp_path / "file" / "x.json"):
        message(lambda to=to: check_record(to), NiwakiError)  # type: ignore[misc]
        assert listing(tmp_path) == before


def test_writing_json_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for text in ("x" * 5000, "x" * 500_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        try:
            with pytest.raises(OutputError) as caught:
                write_json(path, text)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "a.json" in str(caught.value)
        assert listing(tmp_path) == ["a.json"]
        assert path.read_text() == "old"
    write_json(path, "日本")
    assert path.read_bytes() == "日本".encode()


# From Python


def test_the_package_offers_it() -> None:
    # Twice, because modules of these names are imported on the way and could take the functions' places.
    for _ in range(2):
        assert niwaki.prune is prune
        assert niwaki.evaluate is evaluate
    assert niwaki.make_solver("admm-grad") == SOLVERS["admm-grad"]
    with pytest.raises(AttributeError, match="prun"):
        _ = niwaki.prun
    for name in niwaki.__all__:
        assert getattr(niwaki, name).__doc__


def test_people_with_their_own_tensors() -> None:
    generator = torch.Generator().manual_seed(0)
    W, X = torch.randn(8, 16, generator=generator), torch.randn(64, 16, generator=generator)
    solution = niwaki.make_solver("wanda")(niwaki.LayerProblem(W, X.T @ X / 64), NM(2, 4))
    assert isinstance(solution, niwaki.Solution)
    assert zeros(solution.W) == 64
