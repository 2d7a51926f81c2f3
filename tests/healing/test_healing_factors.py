"""Products of two sparse factors that are trained towards the dense model, each factor on its mask."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import niwaki
from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import NiwakiError, UnsupportedModelError, UsageError
from niwaki.healing.objective import find_logits
from niwaki.healing.run import choose
from niwaki.healing.student import FactoredStudent
from niwaki.layer.grid import Grid
from niwaki.layer.patterns import factors as pattern_module
from niwaki.models.formats import FACTORS_FILE
from niwaki.models.streamed import StreamedModel
from niwaki.options import Compute
from niwaki.records.progress import Progress
from niwaki.records.record import FitRecord, HealingRecord
from support.covering import covered, in_turns
from support.healing import LENGTH, TOKENS, curve, divergences, heal, healing_of, held, same_tensors
from support.models import is_pruned, message, reference, save_model
from support.runs import files, run as run_small, tensors


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of these tests are smaller than those of models."""
    monkeypatch.setattr(pattern_module, "_LEAST", 4)


def factored(tmp_path: Path, case: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> list[Path]:
    """A dense model, and the same of two factors."""
    dense, pruned = save_model(tmp_path / "dense", case, dtype=dtype), tmp_path / "pruned"
    run_small(dense, pruned, solver="double-sparse:rounds=4", **changes)
    return [dense, pruned]


class Stop(Progress):
    """Stops after so many points, or blocks."""

    def __init__(self, after: int) -> None:
        self._left = after

    def healing(self, record: HealingRecord, share: float, seconds: float) -> None:
        self._count(not record.by_block)

    def fitted(self, fit: FitRecord) -> None:
        self._count(True)

    def _count(self, counts: bool) -> None:
        self._left -= counts
        if counts and self._left == 0:
            raise KeyboardInterrupt


def check_products(out: Path, case: str = "llama") -> None:
    """Matrices are the products of the factors beside them."""
    found, parts = tensors(out), load_file(out / FACTORS_FILE)
    keys = {key.rpartition("_")[0] for key in parts if key.endswith(("_left", "_right"))}
    assert keys == {key for key, W in found.items() if is_pruned(case, key) and W.ndim == 2}
    for key in keys:
        W = found[key].mT if case == "gpt2" else found[key]
        product = (parts[f"{key}_left"].double() @ parts[f"{key}_right"].double()).float()
        assert torch.allclose(W.float(), product, rtol=torch.finfo(W.dtype).eps, atol=1e-6)


@covered
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("method", ["full", "blocks"])
@pytest.mark.parametrize(
    ("case", "dtype"), [("llama", torch.bfloat16), ("gpt2", torch.bfloat16), ("mixtral", torch.float32)], ids=str
)
def test_healed(tmp_path: Path, case: str, dtype: torch.dtype, method: str, quantize: str | None) -> None:
    """Nearer to the dense model by transformers' own account, with the same masks, scales and embeddings."""
    dense, pruned = factored(tmp_path, case, dtype, quantize=quantize)
    rate = 0.01 if method == "full" else None
    record = heal(pruned, tmp_path / "out", dense, tokens=2000, method=method, rate=rate)
    points, best = curve(record)
    measured = divergences(dense, [pruned, tmp_path / "out"], held(record))
    assert measured[1] < 0.95 * measured[0]
    assert [points[0].error, best.error] == pytest.approx(measured, rel=0.02)
    check_products(tmp_path / "out", case)
    old, new = load_file(pruned / FACTORS_FILE), load_file(tmp_path / "out" / FACTORS_FILE)
    assert old.keys() == new.keys()
    for key, part in new.items():
        assert part.dtype == old[key].dtype
        if key.endswith("_scale"):
            assert torch.equal(part, old[key])
            continue
        assert torch.equal(part != 0, old[key] != 0)
        assert not torch.equal(part, old[key])
        if quantize:
            assert Grid(8).has(part, new[f"{key}_scale"])
    for key, value in tensors(tmp_path / "out").items():
        if not is_pruned(case, key) and value.ndim > 1:
            assert torch.equal(value, tensors(pruned)[key])
    assert record.sparsity == pytest.approx(json.loads((pruned / "niwaki.json").read_text())["sparsity"])
    told, was = (
        json.loads((path / "config.json").read_text())["pruning_config"] for path in (tmp_path / "out", pruned)
    )
    assert all(told.get(name) == was.get(name) for name in ("pattern", "quantization"))
    assert not any("not carried over" in note for note in record.notes)
    niwaki.pack(tmp_path / "out", tmp_path / "packed")
    loaded, whole = niwaki.load(tmp_path / "packed", "cpu"), reference(tmp_path / "out", dtype)
    with torch.no_grad():
        logits, expected = (each(TOKENS[:2]).logits.float() for each in (loaded, whole))
    assert (logits - expected).abs().max() <= (1e-5 if dtype == torch.float32 else 0.05) * expected.abs().max()


@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral"])
def test_gradients(tmp_path: Path, case: str) -> None:
    """Of factors, against torch's own through products that it computes."""
    _, pruned = factored(tmp_path, case)
    stream = StreamedModel(Checkpoint(pruned), "cpu", "float32")
    student = FactoredStudent(stream, find_logits(stream), LENGTH)
    parts = load_file(pruned / FACTORS_FILE)
    assert parts.keys() <= student.parameters.keys()
    assert all(torch.equal(student.masks[key], factor != 0) for key, factor in parts.items())
    with student.computing():
        student.states(TOKENS[:4]).square().sum().backward()
    leaves = {key: part.clone().requires_grad_() for key, part in parts.items()}
    layout = {matrix.key: matrix for matrix in stream.matrices()}
    grouped: dict[str, Tensor] = {}
    model = reference(pruned)
    for key, matrix in layout.items():
        name = stream.places[matrix.block] + matrix.parameter
        whole = grouped.setdefault(name, torch.zeros_like(model.get_parameter(name)))
        slot = torch.zeros_like(whole)
        grouped[name] = whole + _placed(slot, matrix, leaves[f"{key}_left"] @ leaves[f"{key}_right"])
    asked = {"input_ids": TOKENS[:4], "output_hidden_states": True}
    states = torch.func.functional_call(model, grouped, kwargs=asked)
    last = student.states(TOKENS[:4]).unflatten(0, TOKENS[:4].shape)
    assert torch.allclose(states.hidden_states[-1], last, rtol=1e-3, atol=1e-4)
    expected = torch.autograd.grad(states.hidden_states[-1].square().sum(), [*leaves.values()])
    for key, gradient in zip(leaves, expected, strict=True):
        found = student.parameters[key].grad
        assert found is not None
        assert torch.allclose(found, gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))


def _placed(slot: Tensor, matrix: Any, value: Tensor) -> Tensor:
    """``value`` where ``matrix`` is in its parameter, with its gradient."""
    places = torch.arange(slot.numel()).view_as(slot)
    return slot.flatten().index_add(0, matrix.within(places).flatten(), value.flatten()).view_as(slot)


@pytest.mark.parametrize(("quantize", "method"), in_turns([None, "int8"], ["full", "blocks"]))
def test_stopped(tmp_path: Path, method: str, quantize: str | None) -> None:
    """The same bytes as in one go."""
    dense, pruned = factored(tmp_path, "llama", torch.bfloat16, quantize=quantize)
    asked = {"method": method, "rate": 0.01 if method == "full" else None, "tokens": 1000}
    heal(pruned, tmp_path / "whole", dense, **asked)
    with pytest.raises(KeyboardInterrupt):
        heal(pruned, tmp_path / "out", dense, progress=Stop(2), **asked)
    assert not (tmp_path / "out").exists()
    record = heal(pruned, tmp_path / "out", dense, **asked)
    assert len(record.resumed) == 1
    assert not any("damaged" in note for note in record.notes)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.parametrize("method", ["full", "blocks"])
def test_never_worse(tmp_path: Path, method: str) -> None:
    dense, pruned = factored(tmp_path)
    assert healing_of(heal(pruned, tmp_path / "out", dense, rate=1e3, tokens=100, method=method)).best == 0
    assert same_tensors(pruned, tmp_path / "out")
    old, new = load_file(pruned / FACTORS_FILE), load_file(tmp_path / "out" / FACTORS_FILE)
    assert all(torch.equal(new[key], part) for key, part in old.items())


def test_norms_leave_the_factors(tmp_path: Path) -> None:
    dense, pruned = factored(tmp_path)
    assert healing_of(heal(pruned, tmp_path / "out", dense, method="norms", rate=0.005, tokens=2000)).best
    assert (tmp_path / "out" / FACTORS_FILE).read_bytes() == (pruned / FACTORS_FILE).read_bytes()
    check_products(tmp_path / "out")


@pytest.mark.parametrize("method", ["full", "blocks"])
def test_some_blocks(tmp_path: Path, method: str) -> None:
    """The others are trained as they are."""
    dense, pruned = factored(tmp_path, "llama grouped", blocks="1:2")
    record = heal(pruned, tmp_path / "out", dense, method=method, rate=0.01 if method == "full" else None, tokens=2000)
    assert healing_of(record).best
    old, new = load_file(pruned / FACTORS_FILE), load_file(tmp_path / "out" / FACTORS_FILE)
    assert {key.split(".")[2] for key in new} == {"1"}
    assert not torch.equal(*(found[next(iter(old))] for found in (old, new)))
    key = "model.layers.0.mlp.up_proj.weight"
    is_same = torch.equal(tensors(tmp_path / "out")[key], tensors(dense)[key])
    assert is_same == (method == "blocks")  # whose first block is the dense one
    niwaki.pack(tmp_path / "out", tmp_path / "packed")


def test_in_one_run(tmp_path: Path) -> None:
    """The effort best heals, and a list of stages does."""
    dense = save_model(tmp_path / "dense")
    options: dict[str, Any] = {"calibration": TOKENS, "measurement": None, "compute": Compute("cpu", "float32")}
    record = niwaki.prune(
        dense, tmp_path / "best", 0.5, solver="double-sparse:rounds=4", effort="best:synthetic=0", **options
    )
    assert [stage.name for stage in record.stages] == ["prune", "heal"]
    assert record.pattern == "two-factors:0.5"
    check_products(tmp_path / "best")
    stages: list[Any] = [niwaki.Prune("two-factors:0.5"), niwaki.Heal(tokens=500, own_text=0.0), niwaki.Pack()]
    niwaki.run(dense, tmp_path / "packed", stages, **options)
    stored = json.loads((tmp_path / "packed" / "packed.json").read_text())["tensors"]
    assert any(tensor["inner"] for tensor in stored.values())


def test_without_a_record(tmp_path: Path) -> None:
    """The configuration says what the matrices are."""
    dense, pruned = factored(tmp_path)
    (pruned / "niwaki.json").unlink()
    assert heal(pruned, tmp_path / "out", dense).pattern == "two-factors:0.5"
    check_products(tmp_path / "out")


def test_what_would_make_dense_matrices_of_them(tmp_path: Path) -> None:
    dense, pruned = factored(tmp_path)
    said = message(lambda: heal(pruned, tmp_path / "out", dense, method="lora"), UnsupportedModelError)
    assert "products of two sparse factors, which products of low rank would leave; try the method full or" in said
    stages: list[Any] = [niwaki.Prune("two-factors:0.5"), niwaki.Heal(tokens=100, method="lora")]
    said = message(lambda: niwaki.run(dense, tmp_path / "out", stages, calibration=TOKENS), UsageError)
    assert said.startswith("stage 2, heal: products of low rank would make dense matrices of two sparse factors")
    assert not (tmp_path / "out").exists()


def test_factors_that_are_gone(tmp_path: Path) -> None:
    dense, pruned = factored(tmp_path)
    shutil.rmtree(pruned / "factors")
    said = message(lambda: heal(pruned, tmp_path / "out", dense), NiwakiError)
    assert f"matrices are products of two factors, and {FACTORS_FILE} is not there" in said
    assert not (tmp_path / "out").exists()


def test_memory(tmp_path: Path) -> None:
    """Two factors of a square matrix are more weights to train than the matrix has."""
    dense, pruned = factored(tmp_path)
    plain = tmp_path / "plain"
    run_small(dense, plain, solver="magnitude")
    needed = []
    for path in (pruned, plain):
        teacher = StreamedModel(Checkpoint(dense), "cpu", "float32")
        compute = Compute("cpu", "float32", max_memory=1)
        said = message(lambda: choose(Checkpoint(path), teacher, compute, "full"), UnsupportedModelError)  # noqa: B023
        needed.append(float(said.split(" takes ")[1].split()[0]))
    assert needed[0] > 1.3 * needed[1]
