"""Matrices that several blocks share: pruned once, on their inputs in all of these blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

import niwaki
from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import UnsupportedModelError
from niwaki.layer.patterns import Pattern
from niwaki.layer.problem import LayerProblem, Monitor, Solution
from niwaki.layer.solvers import Solver
from niwaki.models import streamed
from niwaki.models.streamed import StreamedModel
from niwaki.records.record import Record
from support.covering import FULL
from support.models import is_pruned, linear_inputs, message, random_tokens, reference, save_model
from support.runs import Diary, StopAt, files, raw, run, stopped, tensors, zeros

CASES = ("zamba", "zamba2")
#: By case: for each shared transformer the blocks that use it, as the configurations in support.models say.
BLOCKS: dict[str, list[tuple[int, ...]]] = {"zamba": [(0, 2, 3, 4)], "zamba2": [(1, 3), (2, 5)]}
SAMPLES, LENGTH = 4, 24
TOKENS = random_tokens(SAMPLES, LENGTH)


@pytest.fixture(autouse=True)
def two_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "TOKENS_PER_BATCH", 2 * LENGTH)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(tmp_path: Path, case: str) -> Path:
    return save_model(tmp_path / "model", case)


def shared_keys(model: Path) -> set[str]:
    return {key for key in tensors(model) if "shared_transf" in key and is_pruned("zamba2", key)}


@torch.no_grad()
def whole_losses(whole: PreTrainedModel, tokens: Tensor = TOKENS) -> Tensor:
    log_p: Tensor = whole(tokens).logits.log_softmax(-1)
    return -log_p[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2)


def losses(directory: Path) -> Tensor:
    model = StreamedModel(Checkpoint(directory), "cpu", "float32")
    states = model.embed(TOKENS)
    for block in model.stream():
        block.advance(states)
    return model.losses(states)


def check(model: Path, out: Path, record: Record, case: str) -> None:
    """What transformers makes of the files, which differ in what was pruned, and a record that counts that once."""
    before, after = tensors(model), tensors(out)
    pruned = {key for key in before if is_pruned(case, key)}
    assert before.keys() == after.keys()
    assert all(raw(after[key]) == raw(before[key]) for key in before.keys() - pruned)
    assert not any(torch.equal(after[key], before[key]) for key in pruned)
    assert len(record.matrices) == len(pruned)
    assert record.sparsity == sum(zeros(after[key]) for key in pruned) / sum(after[key].numel() for key in pruned)
    torch.testing.assert_close(losses(out), whole_losses(reference(out)), rtol=1e-4, atol=1e-4)
    expected = float(whole_losses(reference(out), random_tokens(2, 24, seed=1)).double().mean().exp())
    assert record.perplexity["after"].value == pytest.approx(expected, rel=1e-5)
    for blocks in BLOCKS[case]:
        assert any(f"blocks {', '.join(map(str, blocks))} share" in note for note in record.notes)


EFFORTS = ("fast", "balanced", "fast:epochs=1", "balanced:allocation=error")
ALL_EFFORTS = [(case, effort) for case in CASES for effort in EFFORTS]
SOME_EFFORTS = [("zamba", "fast:epochs=1"), ("zamba2", "fast"), ("zamba2", "balanced:allocation=error")]


@pytest.mark.parametrize(("case", "effort"), ALL_EFFORTS if FULL else SOME_EFFORTS)
@pytest.mark.slow
def test_every_effort(tmp_path: Path, model: Path, case: str, effort: str) -> None:
    record = run(model, tmp_path / "out", solver="sparsegpt", effort=effort)
    check(model, tmp_path / "out", record, case)
    assert record.effort["name"] in effort
    is_fitted = bool(record.fits)
    assert is_fitted == (effort != "fast")
    assert any("not fitted" in note for note in record.notes) == is_fitted


@dataclass(frozen=True)
class Seen(Solver):
    """Prunes the smallest weights, and writes down its problems."""

    problems: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)

    def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
        self.problems.append((problem.W.clone(), problem.gram.H.clone(), problem.gram.tokens or 0))
        mask = pattern.mask(problem.W.abs())
        return problem.solution(problem.W * mask, mask)

    def flops(self, rows: int, columns: int) -> float:
        return 0.0


def problems(model: Path, out: Path, **options: Any) -> dict[tuple[int, str], tuple[Tensor, Tensor, int]]:
    """By matrix what a solver receives."""
    seen = Seen()
    record = run(model, out, solver=seen, **options)
    return dict(zip([(each.block, each.name) for each in record.matrices], seen.problems, strict=True))


def first_inputs(model: Path, out: Path, block: int) -> dict[str, Tensor]:
    """Inputs in a block that itself is dense, with all before it pruned."""
    whole, pruned = reference(model), reference(out)
    for index in range(block):
        for name, value in pruned.model.layers[index].named_parameters():
            path, _, own = name.rpartition(".")
            setattr(whole.model.layers[index].get_submodule(path), own, value)
    return linear_inputs(whole, block, TOKENS)


@pytest.mark.slow
def test_inputs_are_those_of_all_blocks(tmp_path: Path, model: Path, case: str) -> None:
    """Against hooks in whole models: pruned up to the first block that has a matrix, dense for all others."""
    found = problems(model, tmp_path / "out", effort="fast")
    dense = reference(model)
    for first, *others in BLOCKS[case]:
        here = first_inputs(model, tmp_path / "out", first)
        there = [linear_inputs(dense, block, TOKENS) for block in others]
        names = [name for block, name in found if block == first and "shared_transf" in name]
        assert len(names) == (6 if case == "zamba2" else 7)
        for name in names:
            X = torch.cat([inputs[name] for inputs in (here, *there)]).double()
            _, H, tokens = found[first, name]
            assert tokens == len(X) == SAMPLES * LENGTH * (1 + len(others))
            torch.testing.assert_close(H.double(), X.T @ X / len(X), rtol=1e-4, atol=1e-4 * float(X.square().mean()))
            if first:
                assert not torch.equal(here[name], linear_inputs(dense, first, TOKENS)[name])
        own = next(name for block, name in found if block == first and name.endswith("mamba.in_proj"))
        assert found[first, own][2] == SAMPLES * LENGTH


@pytest.mark.slow
def test_fits_leave_what_is_shared(tmp_path: Path) -> None:
    """The rate of fits changes all else in the first block, which has the transformer, and not that."""
    model, rates = save_model(tmp_path / "model", "zamba"), (0.001, 0.01)
    for rate in rates:
        run(model, tmp_path / str(rate), solver="sparsegpt", effort=f"balanced:allocation=uniform:rate={rate}")
    one, other = (tensors(tmp_path / str(rate)) for rate in rates)
    first = {key for key in one if ".layers.0." in key and is_pruned("zamba", key)}
    assert {key for key in first if raw(one[key]) == raw(other[key])} == shared_keys(model) < first


# Interruptions


@pytest.mark.slow
def test_resumed_runs_give_the_same_bytes(tmp_path: Path) -> None:
    """Before and after the first blocks that have what is shared are done."""
    model = save_model(tmp_path / "model", "zamba2")
    changes = {"solver": "sparsegpt", "effort": "balanced:epochs=1"}
    whole = run(model, tmp_path / "whole", **changes)
    for matrices in (1, 5, 14, 24) if FULL else (5, 24):
        out, diary = tmp_path / f"out {matrices}", Diary()
        stopped(model, out, matrices, **changes)
        record = run(model, out, progress=diary, **changes)
        assert files(out) == files(tmp_path / "whole"), matrices
        assert [(each.name, each.error) for each in record.matrices] == [(e.name, e.error) for e in whole.matrices]
        again = [event for event in diary.events if event[0] == "stage" and event[2] == "sharing"]
        assert bool(again) == (matrices < 20)


@pytest.mark.slow
def test_what_is_shared_is_damaged(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "zamba2")
    run(model, tmp_path / "whole")
    stopped(model, tmp_path / "out", 24)
    file = next((tmp_path / ".out.partial" / "1").glob("*.safetensors"))
    key = "model.layers.1.shared_transformer.self_attn.q_proj.weight"
    values = tensors(tmp_path / ".out.partial" / "1")
    at = file.read_bytes().index(raw(values[key]))
    with file.open("r+b") as stream:
        stream.seek(at)
        stream.write(bytes(64))
    progress = StopAt(1000)
    run(model, tmp_path / "out", progress=progress)
    assert any("block 1 of the earlier run is damaged" in note for note in progress.notes)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


# Some of the blocks


@pytest.mark.parametrize(("blocks", "shared", "stay"), [("0:2", {1}, 0), ("2:4", {2}, 1), ("3:6", set(), 2)])
@pytest.mark.slow
def test_only_some_blocks(tmp_path: Path, blocks: str, shared: set[int], stay: int) -> None:
    """What is shared is pruned with the first of its blocks, or stays, which is noted."""
    model = save_model(tmp_path / "model", "zamba2")
    record = run(model, tmp_path / "out", blocks=blocks, effort="balanced")
    count = stay * len(shared_keys(model)) // 2
    noted = [note for note in record.notes if "shared with blocks before these" in note]
    assert [note.split()[0] for note in noted] == ([str(count)] if stay else [])
    before, after = tensors(model), tensors(tmp_path / "out")
    changed = {key for key in shared_keys(model) if not torch.equal(before[key], after[key])}
    assert changed == {key for key in shared_keys(model) if int(key.split(".")[2]) in shared}
    expected = float(whole_losses(reference(tmp_path / "out"), random_tokens(2, 24, seed=1)).double().mean().exp())
    assert record.perplexity["after"].value == pytest.approx(expected, rel=1e-5)


# Files


@pytest.mark.slow
def test_files_may_name_any_of_the_blocks(tmp_path: Path) -> None:
    """As transformers reads them."""
    model = save_model(tmp_path / "model", "zamba")
    usual = run(model, tmp_path / "usual")
    values = {key.replace("layers.0.shared", "layers.3.shared"): value for key, value in tensors(model).items()}
    assert values.keys() != tensors(model).keys()
    save_file(values, model / "model.safetensors")
    torch.testing.assert_close(losses(model), whole_losses(reference(model)), rtol=1e-4, atol=1e-4)
    record = run(model, tmp_path / "out")
    assert [each.name for each in record.matrices] == [each.name for each in usual.matrices]
    after = {key.replace("layers.3.shared", "layers.0.shared"): v for key, v in tensors(tmp_path / "out").items()}
    expected = tensors(tmp_path / "usual")
    assert all(raw(after[key]) == raw(value) for key, value in expected.items())


@pytest.mark.slow
def test_files_with_a_copy_for_each_block(tmp_path: Path) -> None:
    """They are pruned on their own, and transformers reads them so."""
    model = save_model(tmp_path / "model", "zamba")
    values = tensors(model)
    for key in [key for key in values if "layers.0.shared" in key]:
        values |= {key.replace(".0.shared", f".{block}.shared"): values[key].clone() for block in (2, 3, 4)}
    save_file(values, model / "model.safetensors")
    record = run(model, tmp_path / "out", effort="fast")
    assert not any("share" in note for note in record.notes)
    after = tensors(tmp_path / "out")
    copies = [after[f"model.layers.{block}.shared_transf.self_attn.q_proj.weight"] for block in (0, 2, 3, 4)]
    assert all(zeros(copy) == copy.numel() // 2 for copy in copies)
    assert not torch.equal(copies[0] == 0, copies[1] == 0)
    torch.testing.assert_close(
        losses(tmp_path / "out"), whole_losses(reference(tmp_path / "out")), rtol=1e-4, atol=1e-4
    )


@torch.no_grad()
@pytest.mark.slow
def test_packed_models_share(tmp_path: Path, model: Path, case: str) -> None:
    run(model, tmp_path / "out", effort="fast")
    niwaki.pack(tmp_path / "out", tmp_path / "packed")
    loaded = niwaki.load(tmp_path / "packed", "cpu", "float32")
    torch.testing.assert_close(loaded(TOKENS).logits, reference(tmp_path / "out")(TOKENS).logits, rtol=1e-4, atol=1e-4)
    named: Any = loaded.named_modules()
    layers = [module for name, module in named if "shared" in name and name.endswith("o_proj")]
    assert len(layers) == 4
    assert len({layer.mask.data_ptr() for layer in layers}) == len(BLOCKS[case])  # and take no more memory


def _shrink(model: Path, out: Path) -> None:
    niwaki.shrink(model, out, blocks=1, calibration=TOKENS, measurement=None, compute="cpu")


def _export(model: Path, out: Path) -> None:
    run(model, pruned := out.with_name("pruned"), effort="fast", quantize="int8")
    niwaki.export(pruned, out)


@pytest.mark.parametrize(("call", "expected"), [(_shrink, "share weights"), (_export, "several blocks share it")])
@pytest.mark.slow
def test_what_sharing_does_not_allow(tmp_path: Path, call: Callable[[Path, Path], None], expected: str) -> None:
    model = save_model(tmp_path / "model", "zamba2")
    assert expected in message(lambda: call(model, tmp_path / "out"), UnsupportedModelError)
    assert not (tmp_path / "out").exists()
