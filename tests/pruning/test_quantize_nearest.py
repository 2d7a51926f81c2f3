"""``niwaki quantize``: weights rounded to the nearest numbers of a grid, without a text."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import niwaki
from niwaki.cli.tables import summary
from niwaki.errors import UsageError
from niwaki.layer.grid import Grid
from niwaki.layer.rounding import to_nearest
from niwaki.models.scales import FILE
from niwaki.records.record import Record
from support.models import (
    a_third_of_the_families,
    edit_json,
    is_pruned,
    random_tokens,
    reference,
    save_model,
    save_model_with_tokenizer,
)
from support.runs import StopAt, files, raw, tensors

TEXT = random_tokens(2, 24, seed=1)


def nearest(W: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """W on the grid in float64: a loop over weights and numbers."""
    size, result = W.shape[1] // scales.shape[1], np.zeros_like(W)
    for row, column in np.ndindex(*W.shape):
        values = np.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)) * scales[row, column // size]
        result[row, column] = values[np.abs(values - W[row, column]).argmin()]
    return result


@pytest.mark.parametrize(("bits", "group"), [(8, None), (8, 4), (4, 8), (2, None)])
def test_it_is_the_nearest(bits: int, group: int | None) -> None:
    W = torch.randn(30, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    W[3] = 0
    rounded, scales = to_nearest(W, Grid(bits, group), torch.float64)
    np.testing.assert_allclose(rounded.numpy(), nearest(W.numpy(), scales.numpy(), bits), rtol=1e-12)
    widest = W.unflatten(1, (-1, group or 24)).abs().amax(2).div(2 ** (bits - 1) - 0.5).clamp(min=1e-9)
    for ratio in np.arange(0.5, 1.05, 0.05):
        other = nearest(W.numpy(), (widest * ratio).numpy(), bits)
        assert ((rounded.numpy() - W.numpy()) ** 2).sum() < ((other - W.numpy()) ** 2).sum()


@pytest.mark.parametrize(
    ("grid", "effort", "embeddings"),
    [("int8:8", None, "int8:8"), ("int2:8", "none", None), ("int4:8", "fast", "int4:8"), ("int3:8", None, None)],
)
def test_what_is_quantized_again_stays(
    tmp_path: Path, model: Path, grid: str, effort: str | None, embeddings: str | None
) -> None:
    """The same bytes, of weights and of scales."""
    options: dict[str, Any] = {"calibration": random_tokens(8, 24, seed=1), "effort": effort}
    niwaki.quantize(model, tmp_path / "once", grid, **options, embeddings=embeddings)
    shutil.copytree(tmp_path / "once", tmp_path / "other", ignore=shutil.ignore_patterns("niwaki*", "*.md", "quant*"))
    edit_json(tmp_path / "other" / "config.json", pruning_config=...)
    niwaki.quantize(tmp_path / "other", tmp_path / "twice", grid, **options, embeddings=embeddings)
    found, before = files(tmp_path / "twice"), files(tmp_path / "once")
    weights = [name for name in before if str(name).endswith(".safetensors")]
    assert len(weights) == 2 + bool(embeddings)
    assert all(found[name] == before[name] for name in weights)


@a_third_of_the_families(1)
@pytest.mark.slow
def test_every_family(tmp_path: Path, case: str) -> None:
    model = save_model(tmp_path / "model", case)
    record = niwaki.quantize(model, tmp_path / "out", "int8")
    before, after, scales = tensors(model), tensors(tmp_path / "out"), load_file(tmp_path / "out" / FILE)
    for key in before:
        assert is_pruned(case, key) == (f"{key}_scale" in scales)
        if not is_pruned(case, key):
            assert raw(after[key]) == raw(before[key])
        else:
            assert (after[key] - before[key]).abs().max() <= 1.5 * scales[f"{key}_scale"].abs().max()
            assert not torch.equal(after[key], before[key])
    assert record.quantization == "int8"
    assert len(record.matrices) == record.to_json().count('"rounded_to_zero"')
    reference(tmp_path / "out")


def test_no_text_is_read(tmp_path: Path, model: Path) -> None:
    """Neither the usual one, which is on the hub, nor one to measure on."""
    record = niwaki.quantize(model, tmp_path / "out", "int8:8")
    assert record.calibration == {}
    assert record.perplexity == {}
    assert "no text was given to measure perplexity on; --text names one" in record.notes
    assert Record.load(tmp_path / "out" / "niwaki.json") == record
    card = (tmp_path / "out" / "README.md").read_text()
    assert all(part in card for part in ("# model, int8:8\n", "- quantized", "rounding to the nearest"))
    assert not any(part in card for part in ("sparse", "pruned_", "| calibration |"))
    assert summary(record).row_count
    niwaki.report(tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert all(part in page for part in ("model, int8:8", "rounding to the nearest"))


def test_perplexity_is_that_of_what_is_written(tmp_path: Path, model: Path) -> None:
    record = niwaki.quantize(model, tmp_path / "out", "int4:8", effort="none", measurement=TEXT)
    assert record.notes == [note for note in record.notes if "perplexity" not in note]
    for when, place in (("before", model), ("after", tmp_path / "out")):
        measured = niwaki.evaluate(place, measurement=TEXT)
        assert record.perplexity[when].value == pytest.approx(measured.value, rel=1e-6)
    assert record.perplexity["before"].value != record.perplexity["after"].value


def test_a_calibration_text_is_measured_on(tmp_path: Path) -> None:
    model = save_model_with_tokenizer(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("The old man went to the river. " * 400)
    record = niwaki.quantize(model, tmp_path / "out", "int8", calibration=niwaki.Calibration(str(text), length=16))
    assert record.perplexity["after"].text == str(text)
    assert record.perplexity["after"].context == 16


@pytest.mark.parametrize("effort", [None, "none"])
def test_prune_without_zeros_is_the_same(tmp_path: Path, model: Path, effort: str | None) -> None:
    niwaki.quantize(model, tmp_path / "one", "int8", effort=effort)
    niwaki.prune(model, tmp_path / "two", 0, quantize="int8", effort=effort)
    assert files(tmp_path / "one", "recipe.toml") == files(tmp_path / "two", "recipe.toml")


def test_fewer_bits_are_fitted(tmp_path: Path, model: Path) -> None:
    record = niwaki.quantize(model, tmp_path / "out", "int4", calibration=random_tokens(8, 24), measurement=TEXT)
    assert record.effort["epochs"] > 0
    assert (record.method, record.pattern) == ("least squares", "no zeros")
    assert record.solved_by == "weights fitted to the grid on the calibration text"
    assert record.outcome == "int4"
    assert record.calibration["samples"] == 8


def test_the_effort_none_is_for_quantizing_alone(tmp_path: Path, model: Path) -> None:
    for options in ({"quantize": "int8", "solver": "wanda"}, {"quantize": "int8", "pattern": 0.5}, {"pattern": 0.5}):
        given: dict[str, Any] = {"pattern": 0, **options}
        with pytest.raises(UsageError, match="the effort none only rounds weights to a grid"):
            niwaki.prune(model, tmp_path / "out", effort="none", calibration=random_tokens(8, 24), **given)
    assert not (tmp_path / "out").exists()


def test_zeros_stay(tmp_path: Path, model: Path) -> None:
    calibration = random_tokens(8, 24)
    niwaki.prune(model, tmp_path / "half", 0.5, solver="wanda", calibration=calibration, measurement=TEXT)
    record = niwaki.quantize(tmp_path / "half", tmp_path / "out", "int8")
    before, after = tensors(tmp_path / "half"), tensors(tmp_path / "out")
    assert all(bool((after[key][before[key] == 0] == 0).all()) for key in before)
    assert record.sparsity >= 0.5
    assert "% sparse, int8" in record.outcome


def test_behind_other_stages_and_before_them(tmp_path: Path) -> None:
    """It measures on the text of the others, and reads what the one before it wrote."""
    model, tokens = save_model(tmp_path / "model"), random_tokens(8, 24)
    stages = ["shrink neurons=0.25 effort=fast", "quantize int8", "heal tokens=200 own_text=0", "pack"]
    record = niwaki.run(model, tmp_path / "out", stages, calibration=tokens, measurement=TEXT)
    assert [stage.perplexity is not None for stage in record.stages] == [True, True, True, False]
    assert not any("perplexity" in note for note in record.notes)
    record = niwaki.run(model, tmp_path / "zeros", ["prune 2:4 solver=wanda", "quantize int8"], calibration=tokens)
    assert (record.method, record.pattern, record.error_of) == ("wanda", "2:4", "weights'")
    assert record.rounding.startswith("int8: 0")
    record = niwaki.run(model, tmp_path / "first", ["quantize int8", "pack"])
    assert record.calibration == {}
    assert (tmp_path / "first" / "packed.json").exists()


def test_a_stopped_run_resumes(tmp_path: Path, model: Path) -> None:
    niwaki.quantize(model, tmp_path / "whole", "int8", measurement=TEXT)
    with pytest.raises(KeyboardInterrupt):
        niwaki.quantize(model, tmp_path / "out", "int8", measurement=TEXT, progress=StopAt(10))
    assert niwaki.quantize(model, tmp_path / "out", "int8", measurement=TEXT).resumed == [1]
    assert files(tmp_path / "out") == files(tmp_path / "whole")
