"""Pruned models that are trained towards the dense model, against whole models of transformers."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import niwaki
from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import CalibrationError, CheckpointError, NiwakiError, OutputError, UnsupportedModelError, UsageError
from niwaki.healing.heal import _drawn
from niwaki.healing.objective import CappedHead, Head, Logits, find_logits
from niwaki.healing.student import LowRankStudent, Student
from niwaki.healing.teacher import Lessons, teach
from niwaki.layer.grid import Grid
from niwaki.models.device import training_dtype
from niwaki.models.scales import FILE, read_scales
from niwaki.models.streamed import StreamedModel
from niwaki.models.tokens import load_tokenizer
from niwaki.options import HEALING_BATCH, HEALING_RATE, OWN_TEXT, Calibration, Compute, Measurement
from niwaki.records.progress import Progress
from niwaki.records.record import HealingPoint, HealingRecord, Record
from niwaki.runs.workplace import Journal
from niwaki.texts.texts import read_windows
from support.covering import FULL, covered, some
from support.healing import (
    LENGTH,
    TOKENS,
    curve,
    divergence,
    divergences,
    drawn,
    heal,
    healing_of,
    held,
    pruned_model,
    same_tensors,
    undrawn,
)
from support.models import (
    COMMON,
    a_third_of_the_families,
    edited,
    message,
    reference,
    save_model,
    save_model_with_tokenizer,
    some_families,
)
from support.runs import StopAt, files, tensors


def matrix_keys(path: Path) -> set[str]:
    return {matrix.key for matrix in StreamedModel(Checkpoint(path), "cpu").matrices()}


class Notes(Progress):
    """Keeps what is said, and stops at a point."""

    def __init__(self, stop_at: int = 0) -> None:
        self.notes: list[str] = []
        self.points: list[HealingPoint] = []
        self._stop_at = stop_at

    def note(self, text: str) -> None:
        self.notes.append(text)

    def healing(self, record: HealingRecord, share: float, seconds: float) -> None:
        self.points = record.points
        if len(record.points) == self._stop_at:
            raise KeyboardInterrupt


@a_third_of_the_families(1)
@pytest.mark.slow
def test_the_objective(tmp_path: Path, case: str) -> None:
    """What is said of the dense model gives the KL divergence and its gradient."""
    dense, pruned = save_model(tmp_path / "dense", case), save_model(tmp_path / "pruned", case, seed=1)
    teacher, model = (StreamedModel(Checkpoint(path), "cpu", "float32") for path in (dense, pruned))
    tokens = TOKENS[:4]
    student = Student(model, find_logits(model), tokens.shape[1])
    lessons = Lessons(tmp_path / "lessons", tokens, student.head)
    teach(teacher, student.head, lessons, range(4), Progress())
    lessons.keep(range(4))
    assert lessons.has(range(4))
    with torch.no_grad():
        states = student.states(tokens)
    losses, gradient = student.head.divergence(states, *lessons.of(torch.arange(4), torch.device("cpu"))[1:])
    assert float(losses.mean()) == pytest.approx(divergence(dense, pruned, tokens), rel=2e-3)

    with torch.no_grad():
        log_p = reference(dense)(tokens).logits.flatten(0, 1).double().log_softmax(-1)
    h, head = states.double().requires_grad_(), student.head
    assert isinstance(head, Head)
    bias = None if head.bias is None else head.bias.double()
    logits = nn.functional.linear(h, head.weight.double(), bias) * head.scale
    if isinstance(head, CappedHead):
        logits = head.cap * (logits / head.cap).tanh()
    log_q = logits.log_softmax(-1)
    exact = (log_p.exp() * (log_p - log_q)).sum(-1)
    torch.testing.assert_close(losses.double(), exact, rtol=1e-2, atol=2e-3 * float(exact.detach().mean()))
    (wanted,) = torch.autograd.grad(exact.sum(), h)
    torch.testing.assert_close(gradient.double(), wanted, rtol=1e-2, atol=2e-3 * float(wanted.abs().max()))


@a_third_of_the_families(2)
def test_attention_of_short_windows_in_half_precision(tmp_path: Path, case: str) -> None:
    """Is computed in another way, which is the same but for rounding."""
    path, tokens = save_model(tmp_path / "model", case), TOKENS[:2]
    stream = StreamedModel(Checkpoint(path), "cpu", "float32")
    Student(stream, Logits(1.0), tokens.shape[1], half=True)
    with torch.no_grad():
        logits, expected = stream.model(tokens, use_cache=False).logits, reference(path)(tokens).logits
    assert stream.model.get_decoder().config._attn_implementation == ("sdpa" if case.startswith("falcon") else "eager")
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


def test_a_head_with_a_bias_and_a_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(50, 8, generator=generator), torch.randn(50, generator=generator)
    dense, h = torch.randn(6, 50, generator=generator), torch.randn(6, 8, generator=generator)
    losses, _ = (head := Head(weight, bias, 0.25)).divergence(h, *head.targets(dense))
    q = (0.25 * (h @ weight.T + bias)).log_softmax(1)
    torch.testing.assert_close(
        losses, nn.functional.kl_div(q, dense.log_softmax(1), reduction="none", log_target=True).sum(1)
    )


def capped(cap: float, words: int, tokens: int) -> tuple[CappedHead, Tensor, Tensor, Tensor, Tensor]:
    """(a head, the dense model's logits, states; the divergences of all words in float64, their gradients)."""
    generator = torch.Generator().manual_seed(0)
    weight, h = torch.randn(words, 8, generator=generator), torch.randn(tokens, 8, generator=generator)
    dense = cap * (2 * (h + 0.5) @ weight.T / cap).tanh()
    states = h.double().requires_grad_()
    log_p, logits = dense.double().log_softmax(1), cap * (2 * states @ weight.double().T / cap).tanh()
    exact = (log_p.exp() * (log_p - logits.log_softmax(1))).sum(1)
    (gradient,) = torch.autograd.grad(exact.sum(), states)
    return CappedHead(weight, None, 2.0, cap), dense, h, exact.detach(), gradient


@pytest.mark.parametrize("cap", some([0.5, 3.0, 30.0], 2))
@pytest.mark.slow
def test_a_cap_that_makes_predictions_flat(cap: float) -> None:
    """Where most of the probability is in no likely word, the divergence is that of all of them too."""
    head, dense, h, exact, _ = capped(cap, 4000, 2000)
    rest = 1 - float(dense.softmax(1).topk(100).values.sum(1).mean())
    assert rest > 0.6 or cap > 10
    losses, _ = head.divergence(h, *(kept := head.targets(dense)))
    assert float(losses.mean()) == pytest.approx(float(exact.mean()), rel=0.03)
    assert all(map(torch.equal, kept, head.targets(dense)))  # asked again, it answers the same
    assert float(head.divergence(h + 0.5, *kept)[0].abs().max()) < 1e-4  # which are the dense model's states


def test_words_that_are_drawn_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The means of the divergence and its gradient over many draws are those of all words."""
    monkeypatch.setattr("niwaki.healing.objective._LIKELIEST", 10)
    monkeypatch.setattr("niwaki.healing.objective._DRAWN", 10)
    head, dense, h, exact, wanted = capped(2.0, 300, 1)
    kept = head.targets(dense.expand(20_000, -1))
    losses, gradient = head.divergence(h.expand(20_000, -1), *kept)
    assert float(losses.std()) > 0.01
    assert float(losses.mean()) == pytest.approx(float(exact), rel=5e-3)
    torch.testing.assert_close(gradient.mean(0).double(), wanted[0], rtol=0.01, atol=0.01 * float(wanted.abs().max()))


def test_logits_of_another_kind(tmp_path: Path) -> None:
    model = StreamedModel(Checkpoint(save_model(tmp_path / "model", "llama")), "cpu", "float32")

    def cubes(_module: nn.Module, _inputs: Any, output: Any) -> None:
        output.logits = output.logits**3

    model.model.register_forward_hook(cubes)
    assert "neither products of the head" in message(lambda: find_logits(model), UnsupportedModelError)


@pytest.mark.parametrize(("case", "dtype"), [*zip(COMMON, [torch.bfloat16, torch.float32] * 3, strict=False)], ids=str)
@pytest.mark.slow
def test_healed(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    """Nearer to the dense model by transformers' own account, with the same zeros and everything else as it was."""
    dense, pruned = pruned_model(tmp_path, case, dtype)
    record = heal(pruned, tmp_path / "out", dense, tokens=2000)
    points, best = curve(record)
    assert best.error == min(point.error for point in points) < 0.9 * points[0].error
    measured = divergences(dense, [pruned, tmp_path / "out"], held(record))
    assert [points[0].error, best.error] == pytest.approx(measured, rel=0.02)
    before, after, matrices = tensors(pruned), tensors(tmp_path / "out"), matrix_keys(pruned)
    assert before.keys() == after.keys()
    for key, value in after.items():
        assert value.dtype == before[key].dtype
        if key in matrices:
            assert torch.equal(value == 0, before[key] == 0)
            assert not torch.equal(value, before[key])
        elif value.ndim > 1:  # embeddings, routers, the head
            assert torch.equal(value, before[key])
    assert record.sparsity == 0.5
    assert json.loads((tmp_path / "out" / "niwaki.json").read_text()) == json.loads(record.to_json())
    assert (tmp_path / "out" / "niwaki.base.json").read_bytes() == (pruned / "niwaki.json").read_bytes()
    assert not list(tmp_path.glob(".*"))


def less() -> list[Any]:
    """Families with matrices of low rank, which train norms besides, and one of each kind with norms alone."""
    cases = [case.values[0] for case in some_families(0)]
    alone = cases if FULL else (*COMMON, "zamba2", "gemma4_text")
    return [(case, "lora", 0.01) for case in cases] + [(case, "norms", 0.005) for case in alone]


@pytest.mark.parametrize(("case", "method", "rate"), less())
@pytest.mark.slow
def test_less_is_trained(tmp_path: Path, case: str, method: str, rate: float) -> None:
    """What is measured while it trains is what the files say in the end; all else stays."""
    dense, pruned = pruned_model(tmp_path, case, torch.bfloat16)
    record = heal(pruned, tmp_path / "out", dense, tokens=500, method=method, rate=rate)
    points, best = curve(record)
    assert best.error < points[0].error
    measured = divergences(dense, [pruned, tmp_path / "out"], held(record))
    assert [points[0].error, best.error] == pytest.approx(measured, rel=0.05)
    before, after, matrices = tensors(pruned), tensors(tmp_path / "out"), matrix_keys(pruned)
    changed = {key for key, value in after.items() if not torch.equal(value, before[key])}
    assert all(torch.equal(after[key] == 0, before[key] == 0) for key in matrices)
    assert changed & matrices == (matrices if method == "lora" else set())
    assert all(after[key].ndim == 1 for key in changed - matrices)
    assert changed - matrices
    assert record.sparsity == 0.5


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.slow
def test_in_half_precision(tmp_path: Path, method: str) -> None:
    dense, pruned = pruned_model(tmp_path, "llama", torch.bfloat16)
    record = heal(pruned, tmp_path / "out", dense, tokens=3000, method=method, compute=Compute("cpu", "bfloat16"))
    assert record.dtype == "bfloat16"
    before, after = (divergence(dense, path, held(record)) for path in (pruned, tmp_path / "out"))
    assert after < 0.9 * before


@pytest.mark.parametrize(("unit", "has_units"), [("amx_bf16", True), ("avx512_bf16", True), ("avx512_f", False)])
def test_the_dtype_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: str, has_units: bool) -> None:
    """It is that of the files on processors with units for it."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {unit: True}, raising=False)
    for stored in (torch.float32, torch.bfloat16):
        checkpoint = Checkpoint(save_model(tmp_path / str(stored), "llama", dtype=stored))
        expected = "bfloat16" if has_units and stored == torch.bfloat16 else "auto"
        assert training_dtype("auto", "cpu", checkpoint) == expected
        assert training_dtype("float32", "cpu", checkpoint) == "float32"


@pytest.mark.parametrize("case", ["llama", "zamba2"])
@pytest.mark.slow
def test_lora_is_a_product_of_low_rank(tmp_path: Path, case: str) -> None:
    """And its gradient is that of a plain one, by float64; of matrices that blocks share it is the same in all.

    Vectors are in units of their numbers, of which some are far larger than others, as in Gemma.
    """
    _, pruned = pruned_model(tmp_path, case)
    with edited(pruned) as tensors:
        for value in tensors.values():
            if value.ndim == 1:
                value[0], value[1] = 2.5, 0.3
    stream = StreamedModel(Checkpoint(pruned), "cpu", "float32")
    student = LowRankStudent(stream, Logits(1.0), TOKENS.shape[1], rank=2)
    generator = torch.Generator().manual_seed(0)
    for value in student.parameters.values():
        value.data += 0.1 * torch.randn(value.shape, generator=generator)
    student.states(TOKENS[:2]).square().sum().backward()

    model = reference(pruned).double()
    plain = {name: value.detach().double().requires_grad_() for name, value in student.parameters.items()}
    changed: dict[str, Tensor] = {}
    for name, value in model.named_parameters():
        if f"{name}.up" in plain:
            changed[name] = value + (value != 0) * (plain[f"{name}.up"] @ plain[f"{name}.down"])
        elif name in plain:
            sizes = value.detach().double().abs()
            units = 2.0 ** sizes.maximum(0.1 * sizes.mean()).log2().floor()
            changed[name] = plain[name] * units
            assert len(units.unique()) > 2
    states = torch.func.functional_call(model, changed, (TOKENS[:2],), {"output_hidden_states": True}).hidden_states[-1]
    states.square().sum().backward()
    for name, trained in student.parameters.items():
        assert trained.grad is not None
        torch.testing.assert_close(trained.grad.double(), plain[name].grad, rtol=1e-3, atol=1e-4)
    merged = dict(student.tensors(student.stored()))
    assert merged.keys() == changed.keys()
    for key, result in merged.items():
        torch.testing.assert_close(result.double(), changed[key].detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_steps(tmp_path: Path) -> None:
    """The same as a plain loop over whole models of transformers."""
    dense, pruned = pruned_model(tmp_path, "llama")
    tokens, batch = 40 * LENGTH, 2
    record = heal(pruned, tmp_path / "out", dense, tokens=tokens, batch=batch * LENGTH, rate=0.002)
    teacher, model = reference(dense), reference(pruned)
    trained = dict(model.model.layers.named_parameters("model.layers"))
    trained["model.norm.weight"] = model.model.norm.weight
    masks = {name: value != 0 for name, value in trained.items()}
    groups = []
    for name, value in trained.items():
        value.requires_grad_(True)
        size = float(value.detach()[masks[name]].square().mean().sqrt())
        groups.append({"params": [value], "size": size})
    adam = torch.optim.Adam(groups, eps=1e-16)
    for value in trained.values():
        value.grad = torch.zeros_like(value)
    adam.step()
    rest, drawing = drawn(TOKENS)[: -len(held(record))], torch.Generator().manual_seed(0)
    before = {name: value.detach().clone() for name, value in trained.items()}
    steps = seen = 0
    while seen < tokens:
        for chosen in torch.randperm(len(rest), generator=drawing).split(batch):
            share = seen / tokens
            if share >= 1:
                break
            seen += len(chosen) * LENGTH
            log_p = teacher(rest[chosen]).logits.log_softmax(-1)
            log_q = model(rest[chosen]).logits.log_softmax(-1)
            loss = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
            adam.zero_grad()
            loss.backward()
            for name, value in trained.items():
                assert value.grad is not None
                value.grad.mul_(masks[name])
            for group in adam.param_groups:
                group["lr"] = 0.002 * min(1, (share + 1e-3) / 0.1) * (1 - share) * group["size"]
            adam.step()
            steps += 1
    points, best = curve(record)
    assert points[-1].steps == steps
    assert [point.loss is None for point in points[:2]] == [True, False]
    assert best is points[-1]
    found = tensors(tmp_path / "out")
    for name, value in trained.items():
        change, wanted = found[name] - before[name], value.detach() - before[name]
        assert float((change - wanted).norm()) < 0.05 * float(wanted.norm()), name


@pytest.mark.slow
def test_stopped_at_each_point(tmp_path: Path) -> None:
    """The same bytes as in one go."""
    dense, pruned = pruned_model(tmp_path, "llama", torch.bfloat16)
    whole = heal(pruned, tmp_path / "whole", dense, tokens=6000)
    for stop_at in (1, 2, 9, 16):
        with pytest.raises(KeyboardInterrupt):
            heal(pruned, tmp_path / "out", dense, progress=Notes(stop_at), tokens=6000)
        assert not (tmp_path / "out").exists()
    again = Notes()
    record = heal(pruned, tmp_path / "out", dense, progress=again, tokens=6000)
    assert record.resumed == sorted(record.resumed)
    assert len(record.resumed) == 4
    assert any("resuming after" in note for note in again.notes)
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    once, stopped = ([dataclasses.replace(p, seconds=0) for p in curve(each)[0]] for each in (whole, record))
    assert stopped == once
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_what_does_not_resume(tmp_path: Path) -> None:
    """Another request, and one whose point is damaged."""
    dense, pruned = pruned_model(tmp_path, "llama")
    with pytest.raises(KeyboardInterrupt):
        heal(pruned, tmp_path / "out", dense, progress=Notes(5))
    text = message(lambda: heal(pruned, tmp_path / "out", dense, rate=0.02))
    assert "tokens done) that differs in rate (0.01 there, 0.02 here)" in text
    assert Journal.read(tmp_path / ".out.partial.json").extent.endswith(" tokens")
    (point,) = (tmp_path / ".out.partial" / "scratch").glob("point-*")
    point.write_bytes(b"\0" + point.read_bytes()[1:])
    text = message(lambda: heal(pruned, tmp_path / "out", dense), OutputError)
    assert "is missing or damaged; start over with --restart" in text
    heal(pruned, tmp_path / "out", dense, rate=0.02, restart=True)


@pytest.mark.slow
def test_what_is_not_finite_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, pruned = pruned_model(tmp_path, "llama")
    own, calls = Head.divergence, 0

    def odd(self: Head, *given: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        losses, gradient = own(self, *given)
        return (losses * math.nan, gradient) if calls == 12 else (losses, gradient)

    monkeypatch.setattr(Head, "divergence", odd)
    notes = Notes()
    record = heal(pruned, tmp_path / "out", dense, progress=notes)
    assert healing_of(record).halved == 1
    assert any("with half the learning rate" in note for note in notes.notes)
    assert "healing became NaN or infinite, and its learning rate was halved, 1 time" in record.notes
    points, best = curve(record)
    assert best.error < points[0].error


def test_never_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with the best that there was."""
    dense, pruned = pruned_model(tmp_path, "llama")
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda _: torch.tensor(math.inf))
    notes = Notes()
    record = heal(pruned, tmp_path / "out", dense, progress=notes)
    assert any("it ends here; try a lower --rate" in note for note in notes.notes)
    assert "the weights are those of the pruned model: no step was made" in record.notes
    assert same_tensors(pruned, tmp_path / "out")


@pytest.mark.slow
def test_a_rate_that_is_too_high(tmp_path: Path) -> None:
    """From the best point, and not from one that it has destroyed."""
    dense, pruned = pruned_model(tmp_path, "llama")
    record = heal(pruned, tmp_path / "out", dense, rate=1e14)
    points, best = curve(record)
    assert healing_of(record).halved > 1
    assert best.error <= points[0].error


@pytest.mark.slow
def test_lessons_that_are_lost_or_damaged(tmp_path: Path) -> None:
    """The dense model is asked again."""
    dense, pruned = pruned_model(tmp_path, "llama")
    heal(pruned, tmp_path / "whole", dense)
    for damage in ("c", "s", ""):
        with pytest.raises(KeyboardInterrupt):
            heal(pruned, tmp_path / "out", dense, progress=Notes(4))
        scratch = tmp_path / ".out.partial" / "scratch"
        if damage:
            (scratch / damage).unlink()
        else:
            content = bytearray((scratch / "c").read_bytes())
            content[5000] ^= 64
            (scratch / "c").write_bytes(content)
        heal(pruned, tmp_path / "out", dense)
        assert files(tmp_path / "out") == files(tmp_path / "whole")
        shutil.rmtree(tmp_path / "out")


@pytest.mark.slow
def test_healed_twice(tmp_path: Path) -> None:
    """The record of how it was pruned stays."""
    dense, pruned = pruned_model(tmp_path, "llama")
    first = heal(pruned, tmp_path / "once", dense)
    second = heal(tmp_path / "once", tmp_path / "twice", dense)
    assert first.pattern == second.pattern == "unstructured:0.5"
    assert (tmp_path / "twice" / "niwaki.base.json").read_bytes() == (pruned / "niwaki.json").read_bytes()
    assert "stopped" not in second.to_json()


def prune_and_heal(model: Path, out: Path, **changes: Any) -> Record:
    effort = "heal:allocation=uniform:importance=0:synthetic=0:epochs=0.5:healing=1.5"
    given: dict[str, Any] = {"effort": effort, "calibration": Calibration(TOKENS, samples=40), "measurement": None}
    return niwaki.prune(model, out, 0.5, **{**given, "compute": Compute("cpu", "float32"), **changes})


@pytest.mark.slow
def test_pruned_and_healed_in_one(tmp_path: Path) -> None:
    """What comes out is what pruning and then healing give."""
    dense = save_model(tmp_path / "dense")
    record = prune_and_heal(dense, tmp_path / "out")
    healing = healing_of(record)
    assert healing.tokens == 1.5 * TOKENS.numel()
    assert (record.model, healing.teacher) == (str(dense), str(dense))
    assert record == Record.load(tmp_path / "out" / "niwaki.json")
    assert not (tmp_path / "out" / "niwaki.base.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "out"]
    effort = "best:allocation=uniform:importance=0:synthetic=0:epochs=0.5:healing=0"
    before = prune_and_heal(dense, tmp_path / "pruned", effort=effort)
    assert (before.sparsity, record.sparsity) == (0.5, 0.5)
    same = [dataclasses.replace(matrix, seconds=0) for matrix in before.matrices]
    assert [dataclasses.replace(matrix, seconds=0) for matrix in record.matrices] == same
    assert {**before.effort, "healing": 1.5} == record.effort
    assert record.seconds.keys() >= {"solve", "heal", "teach"}
    usual = {"rate": HEALING_RATE, "batch": HEALING_BATCH, "own_text": OWN_TEXT, "tokens": healing.tokens}
    heal(tmp_path / "pruned", tmp_path / "healed", dense, **usual)
    assert same_tensors(tmp_path / "out", tmp_path / "healed")


@pytest.mark.parametrize("seen", [0, 200, 900, 1000, 2000])
def test_text_that_was_not_pruned_on_comes_first(seen: int) -> None:
    """And what is held out is not of it either, as far as there is other text."""
    order = _drawn(torch.arange(1000), seen, 150, 0)
    assert order.sort().values.tolist() == list(range(1000))
    new, old = order >= seen, order < seen
    count = max(0, 1000 - seen)
    assert bool(new[: max(0, count - 150)].all())
    assert bool(old[max(0, count - 150) : 1000 - min(150, count)].all())
    assert bool(new[1000 - min(150, count) :].all())


def test_of_all_kinds_of_text_from_the_beginning() -> None:
    """Of three kinds one after the other all are in each part and in what is held out, in their shares, by the seed."""
    kinds = torch.tensor([0] * 600 + [1] * 300 + [2] * 100)
    order = _drawn(torch.arange(1000), 0, 100, 7)
    assert torch.equal(order, _drawn(torch.arange(1000), 0, 50, 7))
    assert not torch.equal(order, _drawn(torch.arange(1000), 0, 100, 8))
    for part in (order[:64], order[:250], order[-100:]):
        for kind, share in enumerate((0.6, 0.3, 0.1)):
            assert abs(float((kinds[part] == kind).float().mean()) - share) < 3 * math.sqrt(share / len(part))
        assert len(part[kinds[part] == 0].div(200, rounding_mode="floor").unique()) == 3  # from all of its text


@pytest.mark.parametrize("method", ["full", "blocks"])
@pytest.mark.slow
def test_a_prefix_of_all_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """With tokens for an eighth of it, it is trained on both ends of a long text and on a second, short one."""
    dense, pruned = pruned_model(tmp_path, "llama")
    texts = [torch.full((200, LENGTH), 3), torch.full((40, LENGTH), 5)]
    texts[0][100:] = 4
    seen: list[Tensor] = []
    own = StreamedModel.embed

    def embed(self: StreamedModel, samples: Tensor, *others: Any, **more: Any) -> Any:
        seen.append(samples[:, 0])
        return own(self, samples, *others, **more)

    monkeypatch.setattr(StreamedModel, "embed", embed)
    monkeypatch.setattr("niwaki.healing.whole._ROUND", 30 * LENGTH)
    heal(pruned, tmp_path / "out", dense, method=method, calibration=Calibration(texts), tokens=30 * LENGTH)
    for part in seen:
        if len(part) == 30:  # not those that are held out
            counts = [int((part == token).sum()) for token in (3, 4, 5)]
            assert sum(counts) == 30
            assert min(counts[:2]) >= 6
            assert counts[2] >= 2
    assert any(len(part) == 30 for part in seen)


@pytest.mark.slow
def test_windows_are_from_all_of_a_file(tmp_path: Path) -> None:
    """Unless it is asked otherwise, and in the same order where the run is resumed."""
    dense, pruned = save_model_with_tokenizer(tmp_path / "dense"), tmp_path / "pruned"
    few = Calibration("demo", samples=2, length=LENGTH)
    niwaki.prune(dense, pruned, 0.5, solver="magnitude", calibration=few, measurement=None, compute="cpu")
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the number {n} of many things. " for n in range(4000)))
    found = []
    for order in (None, "first"):
        calibration = Calibration(str(text), length=LENGTH, order=order)
        record = heal(pruned, tmp_path / f"out {order}", dense, calibration=calibration, tokens=20 * LENGTH)
        found.append(record.calibration["order"])
        if order is None:
            with pytest.raises(KeyboardInterrupt):
                heal(pruned, tmp_path / "b", dense, calibration=calibration, tokens=20 * LENGTH, progress=Notes(2))
            assert len(heal(pruned, tmp_path / "b", dense, calibration=calibration, tokens=20 * LENGTH).resumed) == 1
            assert files(tmp_path / "b") == files(tmp_path / f"out {order}")
    assert found == ["random", "first"]


@pytest.mark.slow
def test_it_is_healed_on_text_that_was_not_pruned_on(tmp_path: Path) -> None:
    """The same as by hand, with what follows the calibration text."""
    dense = save_model_with_tokenizer(tmp_path / "dense")
    options: dict[str, Any] = {"calibration": Calibration("demo", samples=8, length=LENGTH), "measurement": None}
    niwaki.prune(dense, tmp_path / "out", 0.5, effort="fast:healing=16", compute="cpu", **options)
    niwaki.prune(dense, tmp_path / "pruned", 0.5, effort="fast", compute="cpu", **options)
    drawing, windows = torch.Generator().manual_seed(0), read_windows("demo", load_tokenizer(dense), LENGTH, 264).tokens
    old, new = (part[torch.randperm(len(part), generator=drawing)] for part in windows.split([8, 256]))
    options["calibration"] = undrawn(torch.cat([new[:-33], old, new[-33:]]))  # an eighth of it
    niwaki.heal(tmp_path / "pruned", tmp_path / "healed", dense, tokens=128 * LENGTH, compute="cpu", **options)
    assert same_tensors(tmp_path / "out", tmp_path / "healed")
    assert not same_tensors(tmp_path / "out", tmp_path / "pruned")


@pytest.mark.parametrize("there", some([False, True], 1))
@pytest.mark.slow
def test_stopped_while_the_pruned_copy_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """Wherever that is, the same call ends with the result and nothing else; a name of the user's is not in the way."""
    dense, effort = save_model(tmp_path / "dense"), "fast:healing=0.5"
    place = tmp_path / "place"
    (place / "out.pruned").mkdir(parents=True)
    (place / "out.pruned" / "mine").write_text("mine")
    expected = prune_and_heal(dense, tmp_path / "expected", effort=effort)

    def breaks(at: int) -> bool:
        """Whether it was stopped at removal or renaming number ``at`` of the last phase."""
        left = at

        def counted(function: Any) -> Any:
            def call(*given: Any, **more: Any) -> Any:
                nonlocal left
                left -= _is_last_phase(place)
                if left < 0:
                    raise KeyboardInterrupt
                return function(*given, **more)

            return call

        with monkeypatch.context() as patch:
            for name in ("unlink", "rmdir", "rename", "replace"):
                patch.setattr(os, name, counted(getattr(os, name)))
            try:
                prune_and_heal(dense, place / "out", effort=effort)
            except KeyboardInterrupt:
                return True
        return False

    at = 0
    while True:
        if there:
            (place / "out").mkdir()
        was_stopped = breaks(at)
        if not (place / "out" / "niwaki.json").exists() or [*place.rglob(".*partial*")]:
            assert prune_and_heal(dense, place / "out", effort=effort).sparsity == expected.sparsity
        assert same_tensors(tmp_path / "expected", place / "out")
        assert sorted(path.name for path in place.iterdir()) == ["out", "out.pruned"]
        assert not [*(place / "out").glob(".*")]
        if not was_stopped:
            break
        shutil.rmtree(place / "out")
        at += 9
    assert at > 9


def _is_last_phase(place: Path) -> bool:
    """Whether the last stage is complete."""
    return any(Journal.read(path).complete for path in place.rglob(".*partial.json"))


@pytest.mark.slow
def test_runs_with_and_without_healing_do_not_go_on_with_each_other(tmp_path: Path) -> None:
    """This is seen before pruning, and what is done is not lost without a word."""
    dense, alone = save_model(tmp_path / "dense"), {"effort": "best:synthetic=0:healing=0"}
    cases: list[Any] = [
        (alone, StopAt(9), {}, r"\(prune there, prune, h", alone, [1]),
        ({}, Notes(1), alone, r"\(prune, heal there", {**alone, "restart": True}, []),
    ]
    for first, progress, then, said, last, resumed in cases:
        with pytest.raises(KeyboardInterrupt):
            prune_and_heal(dense, tmp_path / "out", progress=progress, **first)
        there = sorted(path.name for path in tmp_path.iterdir())
        with pytest.raises(UsageError, match=rf"unfinished run .* that differs in the stages {said}"):
            prune_and_heal(dense, tmp_path / "out", **then)
        assert sorted(path.name for path in tmp_path.iterdir()) == there
        assert prune_and_heal(dense, tmp_path / "out", **last).resumed == resumed
        shutil.rmtree(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


@pytest.mark.parametrize("stop_at", [1, 2])
@pytest.mark.slow
def test_pruned_and_stopped(tmp_path: Path, stop_at: int) -> None:
    dense = save_model(tmp_path / "dense")
    prune_and_heal(dense, tmp_path / "expected")
    with pytest.raises(KeyboardInterrupt):
        prune_and_heal(dense, tmp_path / "out", progress=Notes(stop_at))
    with pytest.raises(UsageError, match="unfinished run"):
        prune_and_heal(dense, tmp_path / "out", calibration=Calibration(TOKENS[:30], samples=30))
    assert len(prune_and_heal(dense, tmp_path / "out").resumed) == 1
    assert same_tensors(tmp_path / "expected", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "expected", "out"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"compute": Compute("cpu", "float32", max_memory=1000)}, "of memory"),
        ({"blocks": "0:1"}, "only some blocks are pruned"),
        ({"calibration": Calibration(TOKENS[:1])}, "only one window"),
    ],
    ids=["memory", "blocks", "text"],
)
@pytest.mark.slow
def test_what_is_not_healed_is_pruned_alone(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    dense, said = save_model(tmp_path / "dense"), Notes()
    record = prune_and_heal(dense, tmp_path / "out", progress=said, **changes)
    assert record.healing is None
    assert any(note.startswith("skipping the effort's healing") and why in note for note in record.notes)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "out"]


@covered
@pytest.mark.parametrize("case", ["llama", "mixtral"])
@pytest.mark.parametrize("method", ["full", "lora", "norms", "blocks"])
@pytest.mark.parametrize("is_better", [True, False], ids=["better", "not better"])
@pytest.mark.slow
def test_zeros_with_a_sign(tmp_path: Path, case: str, method: str, is_better: bool) -> None:
    """As ``W * mask`` has them: they are zeros as any other, and the result has none with a sign."""
    dense = save_model(tmp_path / "dense", case)
    whole, generator = reference(dense), torch.Generator().manual_seed(0)
    for value in whole.model.layers.parameters():
        if value.ndim > 1:
            value.data *= torch.rand(value.shape, generator=generator) < 0.5
    whole.save_pretrained(tmp_path / "pruned")
    before = tensors(tmp_path / "pruned")
    matrices = matrix_keys(tmp_path / "pruned")
    assert all(bool(((before[key] == 0) & before[key].signbit()).any()) for key in matrices)
    rate = 0.01 if is_better else 1e12 if method == "lora" else 1e3
    record = heal(tmp_path / "pruned", tmp_path / "out", dense, method=method, rate=rate, tokens=320)
    assert (healing_of(record).best > 0) == is_better
    assert any("the weights are those of the pruned model" in note for note in record.notes) != is_better
    assert record.sparsity == pytest.approx(0.5, abs=0.02)
    for key, value in tensors(tmp_path / "out").items():
        if key in matrices:
            assert torch.equal(value == 0, before[key] == 0)
            assert not bool(((value == 0) & value.signbit()).any())
        if not is_better:
            assert torch.equal(value, before[key])


@pytest.mark.slow
def test_smaller(tmp_path: Path) -> None:
    """A model without a block and some neurons."""
    dense = save_model(tmp_path / "dense", "llama grouped")
    small = tmp_path / "small"
    niwaki.shrink(dense, small, blocks=1, neurons=0.25, calibration=TOKENS[:8], measurement=None, compute="cpu")
    record = heal(small, tmp_path / "out", dense, tokens=2000)
    points, best = curve(record)
    assert record.sparsity == 0
    assert best.error < 0.8 * points[0].error


@pytest.mark.parametrize("method", ["full", "blocks"])
@pytest.mark.slow
def test_perplexities(tmp_path: Path, method: str) -> None:
    dense, pruned = pruned_model(tmp_path, "llama")
    record = heal(pruned, tmp_path / "out", dense, method=method, measurement=TOKENS[:8])
    for when, directory in {"before": dense, "pruned": pruned, "after": tmp_path / "out"}.items():
        measured = niwaki.evaluate(directory, TOKENS[:8], compute="cpu")
        assert record.perplexity[when].value == pytest.approx(measured.value, rel=1e-5)


@pytest.mark.slow
def test_a_time(tmp_path: Path) -> None:
    """It ends, whatever the tokens."""
    dense, pruned = pruned_model(tmp_path, "llama")
    record = heal(pruned, tmp_path / "out", dense, tokens="1M", max_time="2s")
    assert healing_of(record).limit == 2
    assert healing_of(record).points[-1].tokens < 1_000_000


def test_half_of_the_time_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a model is slow for the time that it has, less is held out and measured; a resumed run keeps to it."""
    dense, pruned = pruned_model(tmp_path, "llama")
    monkeypatch.setattr("niwaki.healing.run.products_per_second", lambda _: 1e6)
    asked: dict[str, Any] = {"tokens": 960, "max_time": "1m", "measurement": TOKENS[:8]}
    whole = heal(pruned, tmp_path / "whole", dense, **(asked | {"max_time": "10h"}))
    with pytest.raises(KeyboardInterrupt):
        heal(pruned, tmp_path / "out", dense, progress=Notes(stop_at=3), **asked)
    monkeypatch.undo()  # as on a faster machine
    record = heal(pruned, tmp_path / "out", dense, **asked)
    assert record.resumed
    assert healing_of(record).held == LENGTH < healing_of(whole).held
    assert {name: each.windows for name, each in record.perplexity.items()} == {"before": 2, "pruned": 2, "after": 2}
    assert {each.windows for each in whole.perplexity.values()} == {8}
    assert "perplexity is of 2 of 8 windows; give more --max-time to measure on more" in record.notes
    assert not any("perplexity is of" in note for note in whole.notes)


def test_a_short_text_is_also_measured_on(tmp_path: Path) -> None:
    """Without more than it is asked to train on: a quarter of it is kept for that, up to 16 windows."""
    (tmp_path / "text.txt").write_text("The old man looked at the sea, and the sea looked at the old man. " * 60)
    asked: dict[str, Any] = {"calibration": Calibration(str(tmp_path / "text.txt"), length=16), "tokens": "1M"}
    dense, pruned = tmp_path / "dense", tmp_path / "pruned"
    save_model_with_tokenizer(dense)
    niwaki.prune(dense, pruned, 0.5, solver="magnitude", calibration=TOKENS[:4], measurement=None, compute="cpu")
    record = heal(pruned, tmp_path / "out", dense, **asked, max_time="3s", measurement=Measurement())
    windows = record.perplexity["after"].windows
    assert windows == (windows + record.calibration["samples"]) // 4 > 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": 0}, "tokens must be above 0 and below 2^50"),
        ({"batch": 1 << 63}, "batch must be less than 2^63"),
        ({"tokens": "many"}, "invalid number 'many'; try 2M or 500k"),
        ({"max_time": "soon"}, "invalid time 'soon'"),
        ({"rate": 0.0}, "rate must be above 0"),
        ({"batch": -1}, "batch must be above 0"),
        ({"calibration": Calibration(TOKENS, samples=3)}, "heal does not use samples"),
    ],
    ids=["tokens", "too many", "words", "time", "rate", "batch", "samples"],
)
@pytest.mark.slow
def test_options_that_make_no_sense(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    dense, pruned = pruned_model(tmp_path, "llama")
    assert reason in message(lambda: heal(pruned, tmp_path / "out", dense, **changes))
    assert not list(tmp_path.glob(".*"))


def test_refused(tmp_path: Path) -> None:
    dense, pruned = pruned_model(tmp_path, "llama")

    def said(kind: type[NiwakiError] = UsageError, healed: Path = pruned, by: Path = dense, **changes: Any) -> str:
        return message(lambda: heal(healed, tmp_path / "out", by, **changes), kind)

    assert "has a vocabulary of 4,096 tokens" in said(by=Path("demo"))
    itself = f"{pruned} cannot teach itself; --teacher is the dense model that it was pruned from"
    assert said(by=pruned) == itself
    assert "has no zeros and the shape of" in said(healed=dense, by=pruned)
    assert "1 window of 16 tokens" in said(CalibrationError, calibration=TOKENS[:1])
    assert "tokens 2x are for each that a stage before was calibrated on, and none was" in said(tokens="2x")
    for method in ("auto", "full", "norms"):
        few = said(UnsupportedModelError, method=method, compute=Compute("cpu", max_memory="1KB"))
        assert "of memory, and there are 0.98 KiB" in few
    shutil.copyfile(dense / "model.safetensors", pruned / "model.safetensors")
    assert "has 0.00 % zeros and its record says 50.00 %" in said()
    (pruned / "niwaki.json").write_text("{")
    assert "niwaki.json" in said(CheckpointError)


@pytest.mark.slow
def test_a_teacher_that_was_pruned_itself(tmp_path: Path) -> None:
    dense, pruned = pruned_model(tmp_path, "llama")
    shutil.copytree(pruned, tmp_path / "copy")
    said = []
    for teacher in (tmp_path / "copy", dense):
        record = heal(pruned, tmp_path / f"out {teacher.name}", teacher)
        said += [note for note in record.notes if "was pruned itself" in note]
    assert said == [
        f"{tmp_path / 'copy'} was pruned itself; the pruned model comes near it, and not the model before that"
    ]


@pytest.mark.slow
def test_a_teacher_that_is_worse(tmp_path: Path) -> None:
    _, pruned = pruned_model(tmp_path, "llama")
    other = save_model(tmp_path / "other", "llama", seed=3)
    for teacher, text in ((other, TOKENS[-4:]), (tmp_path / "dense", TOKENS[-8:-4])):
        record = heal(pruned, tmp_path / f"out {teacher.name}", teacher, measurement=text)
        before, came = (record.perplexity[when].value for when in ("before", "pruned"))
        assert any("is it the right one?" in note for note in record.notes) == (before > came)


#: Two of each, so that each kind of layout is there.
GRIDS = [
    *some([("llama", "norms"), ("gpt2", "full"), ("mixtral", "norms"), ("gpt_oss", "full")], 2),
    *some([(case, "blocks") for case in ("gpt2", "llama", "mixtral", "gpt_oss")], 2),
]


@pytest.mark.parametrize(("case", "method"), GRIDS)
@pytest.mark.slow
def test_a_grid(tmp_path: Path, case: str, method: str) -> None:
    """Weights stay on it, with its scales, and what is measured is what the files say."""
    dense, pruned = save_model(tmp_path / "dense", case), tmp_path / "pruned"
    niwaki.prune(
        dense, pruned, 0.5, solver="magnitude", quantize="int4:8", calibration=TOKENS, measurement=None, compute="cpu"
    )
    rate = 0.003 if method == "norms" else 0.01
    record = heal(pruned, tmp_path / "out", dense, method=method, tokens=2000, rate=rate)
    points, best = curve(record)
    assert best.error < (0.95 if method == "full" else 1) * points[0].error
    measured = divergences(dense, [pruned, tmp_path / "out"], held(record))
    assert [points[0].error, best.error] == pytest.approx(measured, rel=0.03)
    assert record.quantization == Record.load(pruned / "niwaki.json").quantization == "int4:8"
    assert (tmp_path / "out" / FILE).read_bytes() == (pruned / FILE).read_bytes()
    before, after = tensors(pruned), tensors(tmp_path / "out")
    checkpoint = Checkpoint(tmp_path / "out")
    for matrix in StreamedModel(checkpoint, "cpu").matrices():
        W, scales = matrix.read(checkpoint), read_scales(checkpoint, matrix, Grid(4, 8))
        codes = W.unflatten(1, (-1, 8)).double() / scales.double().unsqueeze(2)
        torch.testing.assert_close(codes, codes.round().clamp(-8, 7), rtol=0, atol=1e-5)
        assert torch.equal(after[matrix.key] == 0, before[matrix.key] == 0)
        if method != "blocks":  # of which one that would not gain by it stays as it was
            assert torch.equal(after[matrix.key], before[matrix.key]) == (method == "norms")


@pytest.mark.slow
def test_a_grid_without_zeros(tmp_path: Path) -> None:
    dense, rounded = save_model(tmp_path / "dense", "llama"), tmp_path / "rounded"
    niwaki.prune(dense, rounded, 0, quantize="int3:8", calibration=TOKENS, measurement=None, compute="cpu")
    text = message(lambda: heal(rounded, tmp_path / "out", dense, method="lora"), UnsupportedModelError)
    assert "on a grid, which products of low rank would leave; try the method full, scales or norms" in text
    record = heal(rounded, tmp_path / "out", dense, tokens=2000)
    points, best = curve(record)
    assert best.error < 0.97 * points[0].error
    before, after = tensors(rounded), tensors(tmp_path / "out")
    assert all(torch.equal(value == 0, before[key] == 0) for key, value in after.items())


@pytest.mark.slow
def test_memory_for_low_rank_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("niwaki.healing.run.RANK", 1)  # or that of such a small model takes more
    dense, pruned = pruned_model(tmp_path, "llama", torch.bfloat16)
    model = StreamedModel(Checkpoint(pruned), "cpu", "float32")
    enough = model.size + 16 * sum(matrix.size for matrix in model.matrices())
    record = heal(pruned, tmp_path / "out", dense, compute=Compute("cpu", max_memory=str(enough - 1)))
    assert healing_of(record).method == "lora"
    assert any("lora instead" in note for note in record.notes)
