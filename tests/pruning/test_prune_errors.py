"""What can go wrong in a run, and what it leaves then."""

from __future__ import annotations

import errno
import gc
import math
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from niwaki import compare, heal, inspect, shrink
from niwaki.errors import (
    CheckpointError,
    NiwakiError,
    NumericalError,
    OutputError,
    UnsupportedModelError,
)
from niwaki.layer.patterns import NM, Pattern
from niwaki.layer.problem import LayerProblem, Monitor, Solution
from niwaki.layer.solvers import Solver
from support.models import edit_json, message, random_tokens, reference, save_model_with_tokenizer, weight
from support.runs import Diary, listing, run_magnitude as run


def finished(directory: Path) -> list[str]:
    """What is there but for the blocks that a run has done before it failed."""
    return [name for name in listing(directory) if not name.startswith(".out.partial")]


@pytest.mark.parametrize("at", ["begin", "stage", "step", "solved", "solving"])
def test_an_interruption_leaves_nothing(tmp_path: Path, model: Path, at: str) -> None:
    before = listing(tmp_path)
    diary = Diary(at, wants_steps=True)
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "out", solver="admm1", progress=diary)
    assert diary.events[-1][0] == at
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ([("model.layers.0.mlp.up_proj", 1e38)], "block 0: the inputs of mlp.down_proj"),
        ([("model.layers.1.self_attn.v_proj", 1e38)], "block 1: the inputs of self_attn.o_proj"),
        (
            [("model.layers.0.mlp.up_proj", 1e4), ("model.layers.0.mlp.down_proj", 1e38)],
            "block 1: the inputs of self_attn.q_proj",
        ),
        # Behind the last matrix no Gram matrix sees it, and the perplexity does.
        ([("model.layers.1.mlp.up_proj", 1e4), ("model.layers.1.mlp.down_proj", 1e38)], ""),
    ],
)
def test_activations_that_are_not_finite(
    tmp_path: Path, model: Path, changes: list[tuple[str, float]], named: str
) -> None:
    dense, text = reference(model), random_tokens(3, 24, seed=1)
    for path, factor in changes:
        weight(dense, path).mul_(factor)
    dense.save_pretrained(model)
    before = listing(tmp_path)
    said = message(lambda: run(model, tmp_path / "out", solver="wanda", text=text), NumericalError)
    assert named in said
    assert finished(tmp_path) == before


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "path", ["model.layers.1.mlp.gate_proj", "model.layers.0.input_layernorm", "model.embed_tokens", "model.norm"]
)
@pytest.mark.slow
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
    message(lambda: run(model, file / "out"), NiwakiError)
    for out in (model / "out", model / "a" / "b", model / ".." / "model" / "out"):
        assert "inside the model's own directory" in message(lambda out=out: run(model, out))  # type: ignore[misc]
    message(lambda: run(model, model))
    assert listing(tmp_path) == before
    assert (full / "precious.txt").read_text() == file.read_text() == "keep me"


@pytest.mark.parametrize("inside", ["other", "other/new", "link/new", "."])
@pytest.mark.parametrize("what", ["mask", "mask of a plan", "teacher"])
def test_an_output_within_what_is_read(tmp_path: Path, model: Path, inside: str, what: str) -> None:
    shutil.copytree(model, tmp_path / "other")
    (tmp_path / "link").symlink_to("other")
    before, out, link = listing(tmp_path), tmp_path / inside, tmp_path / "link"
    effort = "best" if what == "mask of a plan" else "fast"
    text = message(
        lambda: heal(model, out, link) if what == "teacher" else run(model, out, mask_from=link, effort=effort)
    )
    assert ("which the run reads" in text) == inside.endswith("new")
    assert listing(tmp_path) == before


@pytest.mark.parametrize("out", ["empty", "deep/er/out", "link", ".", "../relative"])
def test_outputs_that_will_do(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    """An empty directory, also one to stand in or behind a link; a new one, with nothing temporary beside it."""
    for name in ("here", "empty", "big disk"):
        (tmp_path / name).mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "big disk")
    monkeypatch.chdir(tmp_path / ("empty" if out == "." else "here"))
    given = tmp_path / out if out == "empty" else Path(out)
    run(Path("..", "model"), given)
    # Who stands in it still sees it: another directory in its place would not do.
    assert (given / "config.json").exists()
    assert (tmp_path / "big disk" / "config.json").exists() == (out == "link")
    assert not [name for name in listing(tmp_path) if ".partial" in name]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sparsity": 1.0}, "from 0 to below 1; got 1"),
        ({"sparsity": 60}, "from 0 to below 1; got 60; did you mean 0.6 (60 %)?"),
        ({"sparsity": -0.1}, "got -0.1"),
        ({"sparsity": math.nan}, "got nan"),
        ({"pattern": "4:2"}, "4:2"),
        ({"pattern": "0:4"}, "0:4"),
        ({"pattern": "2:0"}, "2:0"),
        ({"pattern": "half"}, "'half' is not a valid pattern"),
        ({"pattern": ""}, "is not a valid pattern"),
        ({"pattern": "per-row:1"}, "got 1"),
        ({"pattern": "unstructured:x"}, "is not a valid pattern"),
        ({"pattern": "2:5"}, "model.layers.0.self_attn.q_proj.weight: the pattern 2:5 needs"),
        ({"pattern": NM(1, 32)}, "model.layers.0.mlp.down_proj.weight: the pattern 1:32 needs"),
        ({"pattern": None}, "say how sparse"),
        ({"solver": "sparse-gpt"}, "no solver is called 'sparse-gpt'; did you mean sparsegpt"),
        ({"samples": 0}, "got 0"),
        ({"text_samples": -1}, "got -1"),
        ({"calibration": "demo", "length": 129}, "129"),
        ({"calibration": "demo", "length": 1}, "2 or more; got 1"),
        ({"calibration": "demo", "length": -1}, "2 or more; got -1"),
        ({"device": "quantum"}, "'quantum'"),
        ({"dtype": "int4"}, "int4"),
        ({"tf32": "sometimes"}, "tf32 must be auto, always or never; got 'sometimes'"),
    ],
    ids=str,
)
def test_what_makes_no_sense(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    source = save_model_with_tokenizer(tmp_path / "model")
    before = listing(tmp_path)
    text = message(lambda: run(source, tmp_path / "out", **options))
    assert said in text
    assert listing(tmp_path) == before


@pytest.mark.parametrize("name", ["calibration", "text"])
def test_tokens_that_make_no_sense(tmp_path: Path, model: Path, name: str) -> None:
    before = listing(tmp_path)
    for tokens in (
        torch.tensor([[0, 64]]),  # beyond the vocabulary
        torch.tensor([[-1, 0]]),
        torch.zeros(8, dtype=torch.int64),
        torch.zeros(2, 8),
        torch.zeros(2, 129, dtype=torch.int64),  # too long
        torch.zeros(0, 8, dtype=torch.int64),
    ):
        message(lambda tokens=tokens: run(model, tmp_path / "out", **{name: tokens}), NiwakiError)  # type: ignore[misc]
        assert listing(tmp_path) == before


def test_models_that_cannot_be_pruned(tmp_path: Path, model: Path) -> None:
    before = listing(tmp_path)
    for changes, said in (
        ({"is_encoder_decoder": True}, "llama.*encoder with a decoder|encoder with a decoder.*llama"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
    ):
        edit_json(model / "config.json", **changes)
        assert re.search(said, message(lambda: run(model, tmp_path / "out"), UnsupportedModelError))
        assert listing(tmp_path) == before
        edit_json(model / "config.json", **dict.fromkeys(changes, ...))
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "pickled weights" in message(lambda: run(model, tmp_path / "out"), CheckpointError)
    assert "no directory" in message(lambda: run(tmp_path / "nowhere", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_dtypes_that_cannot_be_pruned(tmp_path: Path, model: Path) -> None:
    """Before the work, and only where one of these matrices is to be written."""
    file, key = model / "model.safetensors", "model.layers.1.self_attn.o_proj.weight"
    save_file({**load_file(file), key: load_file(file)[key].to(torch.float8_e4m3fn)}, file, {"format": "pt"})
    before = listing(tmp_path)
    for work in (
        lambda: run(model, tmp_path / "out"),
        lambda: shrink(model, tmp_path / "out", heads=0.5, calibration=random_tokens(2, 16)),
        lambda: compare(model, tmp_path / "out", patterns="0.5"),
    ):
        said = message(work, UnsupportedModelError)
        assert f"{key!r} is F8_E4M3, which cannot be pruned" in said
        assert listing(tmp_path) == before
    assert len(list(inspect(model))) == 14
    run(model, tmp_path / "out", blocks=(0, 1))


@pytest.mark.slow
def test_no_space_left(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = listing(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    assert "no space left on disk" in message(lambda: run(model, tmp_path / "out"), OutputError)
    assert listing(tmp_path) == before
    gc.collect()  # a file that was left open is an error here


def test_what_was_written_is_checked(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from niwaki.checkpoints.writing import CheckpointWriter

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
