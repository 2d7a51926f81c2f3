"""Whole runs with more effort than the layer-wise method: what is written, and that nothing else makes a difference."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import niwaki
from niwaki.effort import (
    DEFAULT_EFFORT,
    EFFORTS,
    PLAIN_EFFORT,
    Effort,
    Fitting,
    Planning,
    describe,
    described,
    make_effort,
    usual_effort,
)
from niwaki.errors import UnknownNameError, UsageError
from niwaki.models.block import DecoderBlock
from niwaki.records.progress import Progress
from niwaki.records.record import Record
from support.models import (
    a_third_of_the_families,
    decoder_blocks,
    is_pruned,
    message,
    random_tokens,
    reference,
    save_model,
)
from support.runs import Diary, files, raw, run as run_small, stopped as stopped_small, tensors, zeros
from support.streams import error_by_places, save_starved

TOKENS = random_tokens(24, 24)
# Where every matrix has half of its weights; how zeros are shared out is for test_planning.
KNOWN = "allocation, importance, pilot, together, synthetic, epochs, rate, batch, uniform_epochs, healing"
FITTED = "fast:epochs=1:batch=48:rate=0.002"  # two samples in a step
USUAL: dict[str, Any] = {"effort": FITTED, "calibration": TOKENS}


def run(model: Path, out: Path, **changes: Any) -> Record:
    return run_small(model, out, **{**USUAL, **changes})


def stopped(model: Path, out: Path, matrices: int, **changes: Any) -> None:
    stopped_small(model, out, matrices, **{**USUAL, **changes})


# What is asked for


def test_efforts_by_name() -> None:
    assert make_effort("fast") == EFFORTS[PLAIN_EFFORT] == Effort()
    assert not Effort().plan.is_needed
    assert make_effort(DEFAULT_EFFORT).plan.is_needed
    assert make_effort("fast:importance=0.5").plan.is_needed
    changes = "allocation=error:importance=0.25:pilot=0.5:synthetic=2:epochs=8:rate=0.1:batch=7:healing=2"
    best = make_effort(f"best:{changes}")
    assert best == Effort(Planning("error", 0.25, 0.5, 1024), 2.0, Fitting(8, 0.1, 7), 2)


def test_what_is_done_of_an_effort() -> None:
    balanced = make_effort("balanced")
    assert balanced.settled(shares_zeros=True) == balanced
    assert balanced.settled(shares_zeros=False) == make_effort("balanced:epochs=0.6")
    images = balanced.settled(shares_zeros=True, predicts=False)
    assert images == make_effort("balanced:allocation=error:importance=0:together=0:synthetic=0")
    by_errors = make_effort("fast:allocation=error")
    assert by_errors.settled(shares_zeros=False, predicts=False) == by_errors


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bast", "no effort is called 'bast'; did you mean fast or best?"),
        ("", "no effort is called ''; known: fast, balanced, best, heal, none"),
        ("best:epoch=1", "no parameter of best is called 'epoch'; did you mean epochs or uniform_epochs?"),
        ("best:epochs", "best:epochs: parameters are written best:NAME=VALUE"),
        ("best:epochs=few", "epochs='few': best wants float here"),
        ("best:allocation=outliers", "allocation must be uniform, error or loss; got 'outliers'"),
        ("best:per=block", f"no parameter of best is called 'per'; known: {KNOWN}"),
        ("best:importance=2", "importance must be from 0 to 1; got 2.0"),
        ("best:pilot=0", "pilot must be above 0, to 1; got 0.0"),
        ("best:epochs=-1", "epochs must be 0 or more; got -1.0"),
        ("best:together=1", "together must be 0, or 2 to 4,096; got 1"),
        ("best:together=5000", "together must be 0, or 2 to 4,096; got 5000"),
        ("best:importance=nan", "importance must be from 0 to 1; got nan"),
        ("best:plan=loss", f"no parameter of best is called 'plan'; known: {KNOWN}"),
        ("best:rate=inf", "rate must be above 0; got inf"),
        ("best:batch=0", "batch must be 1 or more; got 0"),
        ("heal:healing=-1", "healing must be 0 or more; got -1.0"),
    ],
)
def test_efforts_that_are_none(tmp_path: Path, name: str, said: str) -> None:
    assert message(lambda: make_effort(name)) == said
    assert message(lambda: run(tmp_path, tmp_path / "out", effort=name)) == said
    with pytest.raises(UnknownNameError if "called" in said else UsageError):
        make_effort(name)


@pytest.mark.slow
def test_methods_that_are_named_are_plain(tmp_path: Path) -> None:
    assert usual_effort(None, None) == DEFAULT_EFFORT
    assert usual_effort("wanda", None) == usual_effort(None, "wanda") == PLAIN_EFFORT
    model = save_model(tmp_path / "model")
    record = run(model, tmp_path / "named", effort=None)
    assert record.effort == describe(Effort())
    record = run(model, tmp_path / "usual", effort=None, solver=None)
    assert record.effort == describe(make_effort(f"{DEFAULT_EFFORT}:together=0"))  # as nothing is rounded


# What comes of it


@a_third_of_the_families(0)
@pytest.mark.slow
def test_every_family(tmp_path: Path, case: str) -> None:
    """The right weights are pruned, and nothing besides is changed."""
    model = save_model(tmp_path / "model", case)
    record = run(model, tmp_path / "out")
    before, after, matrices = tensors(model), tensors(tmp_path / "out"), 0
    assert before.keys() == after.keys()
    for key, value in after.items():
        if not is_pruned(case, key):
            assert raw(value) == raw(before[key]), key
            continue
        for matrix in value if value.ndim == 3 else [value]:
            assert zeros(matrix) == matrix.numel() // 2, key
            matrices += 1
    assert matrices == len(record.matrices)
    assert record.sparsity == 0.5
    assert [fit.block for fit in record.fits] == list(range(len(decoder_blocks(reference(model)))))
    for fit in record.fits:
        assert 0 < fit.after <= fit.before
        assert (fit.epochs == 0) == (fit.after == fit.before)
        assert fit.seconds > 0
    assert record.effort == describe(make_effort(FITTED))
    assert Record.from_json((tmp_path / "out" / "niwaki.json").read_text()) == record


@torch.no_grad()
def block_errors(model: Path, out: Path, tokens: Tensor) -> list[float]:
    """Of the states behind each block the mean of the squared errors, relative to the dense model's in each place."""
    ends: list[list[Tensor]] = []
    for path in (model, out):
        whole = reference(path)
        found: list[Any] = []
        for block in decoder_blocks(whole):
            block.register_forward_hook(lambda _, __, y, found=found: found.append(y))
        whole(tokens)
        ends.append([y[0] if isinstance(y, tuple) else y for y in found])
    return [error_by_places(b, a) for a, b in zip(*ends, strict=True)]


@pytest.mark.parametrize("case", ["llama grouped", "mixtral"])
@pytest.mark.slow
def test_each_effort_is_worth_it(tmp_path: Path, case: str) -> None:
    """On the calibration text the outputs come nearer to the dense model's."""
    model, tokens = save_model(tmp_path / "model", case), random_tokens(64, 24)
    errors = []
    for number, effort in enumerate(("fast", "fast:epochs=3:batch=48")):
        out = tmp_path / str(number)
        run(model, out, effort=effort, calibration=tokens)
        errors.append(block_errors(model, out, tokens)[-1])
    fast, fitted = errors
    assert fitted < 0.9 * fast


@pytest.mark.slow
def test_the_fit_is_that_of_the_weights_that_are_written(tmp_path: Path) -> None:
    """Of one batch, all is held out: the error in the record is that of the model on the disk."""
    model = save_model(tmp_path / "model")
    record = run(model, tmp_path / "out", effort="fast:epochs=3:batch=576")
    errors = block_errors(model, tmp_path / "out", TOKENS)
    assert [fit.after for fit in record.fits] == pytest.approx(errors, rel=1e-3)


@pytest.mark.slow
def test_experts_without_tokens(tmp_path: Path) -> None:
    model = save_starved(tmp_path / "model")
    record = run(model, tmp_path / "out")
    assert record.sparsity == 0.5
    # In each block one note on both groups of experts' matrices.
    notes = [note for note in record.notes if "stands in for" in note]
    assert [note.split(":")[0] for note in notes] == ["block 0", "block 1"]
    for block, note in enumerate(notes):
        experts = [m for m in record.matrices if m.block == block and m.name.endswith(("w1", "w2"))]
        poor = [m for m in experts if m.tokens < m.shape[1]]
        assert f"{len(poor)} of 8 inputs" in note


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("computing", ["half", "float32"])
@pytest.mark.slow
def test_half_precision(tmp_path: Path, dtype: str, computing: str) -> None:
    model = save_model(tmp_path / "model", "mixtral", dtype=getattr(torch, dtype))
    record = run(model, tmp_path / "out", dtype=dtype if computing == "half" else computing)
    assert record.sparsity == 0.5
    assert all(fit.after < fit.before for fit in record.fits)
    for key, value in tensors(tmp_path / "out").items():
        if is_pruned("mixtral", key):
            assert zeros(value) == value.numel() // 2


@pytest.mark.slow
def test_a_given_mask_stays(tmp_path: Path, model: Path) -> None:
    run(model, tmp_path / "lender", solver="magnitude", effort="fast")
    record = run(model, tmp_path / "out", solver="cg", sparsity=None, mask_from=str(tmp_path / "lender"))
    assert record.fits[0].after < record.fits[0].before
    lent, found = tensors(tmp_path / "lender"), tensors(tmp_path / "out")
    for key, value in found.items():
        assert torch.equal(value == 0, lent[key] == 0), key
        assert torch.equal(value, lent[key]) != is_pruned("llama", key)


@pytest.mark.slow
def test_without_perplexity_the_weights_are_the_same(tmp_path: Path, model: Path) -> None:
    for measure in ("both", "after", "none"):
        run(model, tmp_path / measure, measure=measure)
    for measure in ("after", "none"):
        for key, value in tensors(tmp_path / measure).items():
            assert torch.equal(value, tensors(tmp_path / "both")[key])


@pytest.mark.parametrize("effort", ["fast", FITTED])
@pytest.mark.slow
def test_the_dense_model_runs_for_fits_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, effort: str) -> None:
    advanced: list[int] = []
    advance = DecoderBlock.advance

    def watched(self: DecoderBlock, *args: Any, **kwargs: Any) -> None:
        advanced.append(self.index)
        advance(self, *args, **kwargs)

    monkeypatch.setattr(DecoderBlock, "advance", watched)
    run(save_model(tmp_path / "model", "llama grouped"), tmp_path / "out", effort=effort, measure="none")
    assert advanced == ([0, 1] if effort == "fast" else [0, 0, 1, 1, 2])


@pytest.mark.parametrize("blocks", [(0, 1), (1, 2), (1, 3), (2, 3)])
@pytest.mark.slow
def test_some_blocks_only(tmp_path: Path, blocks: tuple[int, int]) -> None:
    """Like a run over all of a model in which the blocks before have nothing to prune."""
    model = save_model(tmp_path / "model", "llama grouped")
    record = run(model, tmp_path / "out", blocks=blocks, effort="fast:epochs=2:batch=576")
    assert [fit.block for fit in record.fits] == list(range(*blocks))
    before = tensors(model)
    for key, value in tensors(tmp_path / "out").items():
        inside = any(f".layers.{block}." in key for block in range(*blocks))
        assert torch.equal(value, before[key]) != (inside and is_pruned("llama", key)), key
    errors = block_errors(model, tmp_path / "out", TOKENS)
    assert [fit.after for fit in record.fits] == pytest.approx(errors[slice(*blocks)], rel=1e-3)
    assert errors[: blocks[0]] == [0.0] * blocks[0]


# The same bytes


@pytest.mark.parametrize(("case", "effort"), [("llama grouped", FITTED), ("mixtral", "fast")])
@pytest.mark.slow
def test_nothing_else_makes_a_difference(tmp_path: Path, case: str, effort: str) -> None:
    """Twice; with little memory; stopped behind each block, with and without little memory."""
    model = save_model(tmp_path / "model", case, shards=True)
    record = run(model, tmp_path / "whole", effort=effort)
    expected = files(tmp_path / "whole")
    run(model, tmp_path / "again", effort=effort)
    assert files(tmp_path / "again") == expected
    assert all(fit.epochs for fit in record.fits)  # or their weights would stay as they are
    little = run(model, tmp_path / "little", effort=effort, max_memory=1)
    assert any("spilled to disk" in note for note in little.notes)
    weights = {name: value for name, value in expected.items() if name.endswith(".safetensors")}
    found = files(tmp_path / "little")
    assert {name: found[name] for name in weights} == weights
    assert [m.error for m in little.matrices] == [m.error for m in record.matrices]
    per_block = len(record.matrices) // (record.matrices[-1].block + 1)
    for done in range(1, record.matrices[-1].block + 1):
        for memory in (None, 1):
            out = tmp_path / f"{done} {memory}"
            options: dict[str, Any] = {"effort": effort, "max_memory": memory}
            stopped(model, out, per_block * done + 1, **options)
            resumed = run(model, out, **options)
            assert resumed.resumed == [done]
            found = files(out)
            assert {name: found[name] for name in weights} == weights
            assert memory or found == expected
            assert [m.error for m in resumed.matrices] == [m.error for m in record.matrices]
            for one, other in zip(resumed.fits, record.fits, strict=True):
                assert dataclasses.replace(one, seconds=other.seconds) == other
            assert resumed.perplexity == record.perplexity


@pytest.mark.slow
def test_a_run_that_is_stopped_while_it_fits(tmp_path: Path) -> None:
    """The block counts as not done: it is solved again from the original weights."""
    model = save_model(tmp_path / "model", "llama grouped")
    run(model, tmp_path / "whole")

    class StopInFit(Progress):
        fitting = ""

        def stage(self, block: int, name: str, steps: int) -> None:
            self.fitting = name if block == 1 else ""

        def step(self) -> None:
            if self.fitting == "fit":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "out", progress=StopInFit())
    assert run(model, tmp_path / "out").resumed == [1]
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.slow
def test_another_effort_is_another_run(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama grouped")
    stopped(model, tmp_path / "out", 8)
    said = message(lambda: run(model, tmp_path / "out", effort="fast"))
    assert "effort (epochs 1.0 there, 0.0 here, rate 0.002 there, 0.01 here" in said
    assert run(model, tmp_path / "out", effort=make_effort(FITTED)).resumed == [1]


# What is told of it


@pytest.mark.slow
def test_stages_and_steps(tmp_path: Path) -> None:
    diary = Diary()
    run(save_model(tmp_path / "model"), tmp_path / "out", progress=diary)
    block = [("capture", 1, 1), ("solve", 7, 7), ("fit", 13, 13), ("advance", 1, 1)]
    told = [stage[1:] for stage in diary.stages()]
    assert told == [*block, *block[:-1], ("advance", 1, 0), *2 * [("perplexity", 1, 1)]]
    assert [event[1] for event in diary.events if event[0] == "solved"] == [0] * 7 + [1] * 7


def test_efforts_in_words() -> None:
    names = {name: described(describe(make_effort(name))) for name in EFFORTS}
    assert names == {
        "fast": "fast",
        "balanced": "balanced (allocation loss, importance 0.5, together 1024, synthetic 0.25, epochs 0.3)",
        "best": "best (allocation loss, importance 0.5, together 1024, synthetic 0.5, epochs 1, healing 1)",
        "heal": "heal (allocation loss, importance 0.5, together 1024, synthetic 0.5, epochs 1, healing 3)",
    }
    other = describe(make_effort("best:epochs=3"))
    assert (
        described(other) == "best (allocation loss, importance 0.5, together 1024, synthetic 0.5, epochs 3, healing 1)"
    )


@pytest.mark.parametrize(
    ("effort", "unstructured", "two_four"),
    [("balanced", 0.3, 0.6), ("balanced:epochs=2", 2, 2), ("balanced:epochs=0", 0, 0), ("best", 1, 1)],
)
@pytest.mark.slow
def test_more_epochs_where_zeros_cannot_be_shared_out(
    tmp_path: Path, model: Path, effort: str, unstructured: float, two_four: float
) -> None:
    for pattern, epochs in ((0.5, unstructured), ("2:4", two_four)):
        record = run(model, tmp_path / str(pattern), sparsity=pattern, effort=f"{effort}:synthetic=0")
        assert record.effort is not None
        assert (record.effort["name"], record.effort["epochs"]) == (effort.partition(":")[0], epochs)


def test_the_name_is_that_of_what_was_asked_for(tmp_path: Path, model: Path) -> None:
    """Also where less of an effort applies, so that another one would be nearer."""
    given: dict[str, Any] = {"calibration": TOKENS, "measurement": niwaki.Measurement(samples=0)}
    grid = niwaki.quantize(model, tmp_path / "grid", "int4", **given)
    less = niwaki.shrink(model, tmp_path / "less", blocks=1, **given)
    for record, synthetic in ((grid, 0.25), (less, 0.5)):
        assert record.effort is not None
        assert (record.effort["name"], record.effort["synthetic"]) == ("balanced", synthetic)


def test_the_files_say_it(tmp_path: Path, model: Path) -> None:
    run(model, tmp_path / "out", effort=FITTED)
    effort = describe(make_effort(FITTED))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["pruning_config"]["effort"] == effort
    assert f"| effort | {described(effort)} |" in (tmp_path / "out" / "README.md").read_text()
    values = json.loads((tmp_path / "out" / "niwaki.json").read_text())
    assert values["effort"] == effort
    del values["effort"], values["fits"]  # as before there were any
    old = Record.from_json(json.dumps(values))
    assert (old.effort, old.fits) == ({}, [])
