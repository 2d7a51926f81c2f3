"""Token embeddings and the head on a grid, as a stage, and packed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import niwaki
from niwaki import QuantizeEmbeddings
from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import CheckpointError, UsageError
from niwaki.layer.grid import Grid
from niwaki.layer.rounding import to_nearest
from niwaki.models.outside import head_gram
from niwaki.models.scales import EMBEDDINGS
from niwaki.models.streamed import StreamedModel
from niwaki.packed.linear import SparseEmbedding, SparseLinear
from niwaki.records.record import Record, calibration_tokens
from support.models import random_model, random_tokens
from support.runs import Diary, files, raw, tensors

TEXT = random_tokens(2, 24, seed=1)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def wide(path: Path, tied: bool = False, case: str = "llama", **changes: int) -> Path:
    """A model with rows of 64, which packed groups are multiples of, in bfloat16."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "tie_word_embeddings": tied, **changes}
    random_model(case, dtype=torch.bfloat16, **sizes).save_pretrained(path)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return wide(tmp_path / "model")


@pytest.mark.parametrize("tied", [True, False])
def test_they_are_the_nearest_numbers(tmp_path: Path, tied: bool) -> None:
    model = wide(tmp_path / "model", tied)
    record = niwaki.quantize(model, tmp_path / "out", "int8", embeddings="int8:64", measurement=TEXT)
    before, after = tensors(model), tensors(tmp_path / "out")
    scales = load_file(tmp_path / "out" / EMBEDDINGS)
    keys = [EMBEDDING] if tied else [EMBEDDING, HEAD]
    assert scales.keys() == {f"{key}_scale" for key in keys}
    for key in keys:
        expected, of_it = to_nearest(before[key].float(), Grid(8, 64), torch.bfloat16)
        assert raw(after[key].float()) == raw(expected + 0.0)
        assert raw(scales[f"{key}_scale"].float()) == raw(of_it)
    assert record.embeddings == "int8:64"
    assert record.outcome == "int8, embeddings in int8:64"
    assert [stage.name for stage in record.stages] == ["quantize", "embeddings"]
    measured = niwaki.evaluate(tmp_path / "out", measurement=TEXT)
    assert record.perplexity["after"].value == pytest.approx(measured.value, rel=1e-6)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["pruning_config"]["embeddings"] == "int8:64"
    assert Record.load(tmp_path / "out" / "niwaki.json") == record
    assert "| embeddings and head | int8:64 |" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("tied", [True, False])
def test_with_few_bits_the_head_is_fitted_to_what_it_receives(tmp_path: Path, tied: bool) -> None:
    """The outputs of the head on the calibration text are nearer to the dense model's than those of the nearest."""
    model = wide(tmp_path / "model", tied)
    stages = [QuantizeEmbeddings("int4:64")]
    record = niwaki.run(model, tmp_path / "out", stages, calibration=TEXT, measurement=None, compute="cpu")
    niwaki.run(model, tmp_path / "nearest", [QuantizeEmbeddings("int4:64", "none")], measurement=None, compute="cpu")
    dense = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        X = dense.model(TEXT).last_hidden_state.flatten(0, 1).double()
    before, key = tensors(model), EMBEDDING if tied else HEAD
    errors = {}
    for name in ("out", "nearest"):
        change = tensors(tmp_path / name)[key].double() - before[key].double()
        errors[name] = (X @ change.T).square().sum(dim=0)
        scales = load_file(tmp_path / name / EMBEDDINGS)[f"{key}_scale"]
        assert Grid(4, 64).has(tensors(tmp_path / name)[key], scales)
    assert errors["out"].sum() < 0.7 * errors["nearest"].sum()
    if not tied:  # a table of its own meets no inputs
        assert torch.equal(tensors(tmp_path / "out")[EMBEDDING], tensors(tmp_path / "nearest")[EMBEDDING])
    assert record.method == "least squares"
    assert calibration_tokens(record.calibration) == TEXT.numel()
    assert Record.load(tmp_path / "nearest" / "niwaki.json").calibration == {}


def test_the_gram_matrix_of_the_head(tmp_path: Path, model: Path) -> None:
    """Against all states in float64."""
    streamed = StreamedModel(Checkpoint(model), "cpu", "float32")
    states = streamed.embed(TEXT)
    for block in streamed.stream():
        block.advance(states)
    gram = head_gram(streamed, states)
    with torch.no_grad():
        X = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).model(TEXT).last_hidden_state
    X = X.flatten(0, 1).double()
    torch.testing.assert_close(gram.H.double(), X.T @ X / len(X), rtol=1e-4, atol=1e-5)
    assert gram.tokens == TEXT.numel()


def test_fewer_bits_need_a_text_unless_told_otherwise(tmp_path: Path, model: Path) -> None:
    options: dict[str, Any] = {"embeddings": "int4:64", "measurement": None}
    assert niwaki.quantize(model, tmp_path / "none", "int4:64", effort="none", **options).calibration == {}
    record = niwaki.quantize(model, tmp_path / "fast", "int4:64", effort="fast", calibration=TEXT, **options)
    assert calibration_tokens(record.calibration) == TEXT.numel()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("grid", ["int8:64", "int4:64", "int8"])
def test_packed_it_is_the_same_model(tmp_path: Path, tied: bool, grid: str) -> None:
    model = wide(tmp_path / "model", tied)
    niwaki.quantize(model, tmp_path / "out", "int4:64", effort="none", embeddings=grid)
    sizes = niwaki.pack(tmp_path / "out", tmp_path / "packed")
    index = json.loads((tmp_path / "packed" / "packed.json").read_text())
    assert index["tensors"][EMBEDDING]["whole"]
    niwaki.unpack(tmp_path / "packed", tmp_path / "back")
    assert files(tmp_path / "back") == files(tmp_path / "out")
    dense, packed = niwaki.load(tmp_path / "out", "cpu", "float32"), niwaki.load(tmp_path / "packed", "cpu", "float32")
    ends = packed.get_input_embeddings(), packed.get_output_embeddings()
    assert [type(end) for end in ends] == [SparseEmbedding, SparseLinear]
    assert (ends[0].values.data_ptr() == ends[1].values.data_ptr()) == tied  # type: ignore[operator]
    tokens = torch.tensor([[0, 5, 7], [3, 3, 1]])
    assert torch.equal(ends[0](tokens), dense.get_input_embeddings()(tokens))
    assert ends[0](tokens[:, :0]).shape == (2, 0, 64)
    for shape in ((1, 3), (3, 40)):
        asked = torch.randint(dense.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
        wanted = dense(asked).logits
        assert (packed(asked).logits - wanted).norm() <= 0.02 * wanted.norm()  # inputs may be rounded
    written = sum(path.stat().st_size for path in (tmp_path / "packed").glob("*.safetensors"))
    assert sizes.total <= written < sizes.dense / 1.5
    state = packed.state_dict()
    assert torch.equal(state[EMBEDDING].float(), dense.state_dict()[EMBEDDING])
    packed.save_pretrained(tmp_path / "saved")
    assert {**load_file(tmp_path / "saved" / "model.safetensors")}.keys() == tensors(tmp_path / "out").keys()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert torch.equal(again(tokens).logits, dense(tokens).logits)


def test_a_table_that_is_scaled_is_unpacked(tmp_path: Path) -> None:
    """Gemma's class multiplies its rows; the head is the same tensor, and stays with it."""
    model = wide(tmp_path / "model", True, "gemma3_text")
    niwaki.quantize(model, tmp_path / "out", "int8", embeddings="int8:64")
    niwaki.pack(tmp_path / "out", tmp_path / "packed")
    dense, packed = niwaki.load(tmp_path / "out", "cpu", "float32"), niwaki.load(tmp_path / "packed", "cpu", "float32")
    tokens = torch.tensor([[0, 5, 7]])
    assert isinstance(packed.get_input_embeddings(), nn.Embedding)
    wanted = dense(tokens).logits
    assert (packed(tokens).logits - wanted).norm() <= 0.02 * wanted.norm()


def test_all_that_takes_long_has_steps(tmp_path: Path) -> None:
    """Also what comes after the last block: the head of a large vocabulary, and its rounding."""
    model, diary = wide(tmp_path / "model", vocab_size=5000), Diary()
    options: dict[str, Any] = {"calibration": TEXT, "measurement": TEXT, "progress": diary}
    niwaki.run(model, tmp_path / "out", [QuantizeEmbeddings("int4:32")], **options)
    parts = [(name, steps) for _, name, steps, done in diary.stages() if done == steps]
    assert len(parts) == len(diary.stages())
    (rounding,) = (steps for name, steps in parts if name == "rounding")
    assert rounding > 2
    measured = [steps for name, steps in parts if name == "perplexity"]
    blocks = [steps for name, steps in parts if name == "advance"]
    assert len(measured) == 2
    assert min(measured) > sum(blocks) + 2


def test_alone_and_at_the_end_of_a_list(tmp_path: Path, model: Path) -> None:
    record = niwaki.run(model, tmp_path / "alone", ["embeddings int8:64"], measurement=TEXT)
    assert (record.outcome, record.quantization) == ("embeddings in int8:64", None)
    assert record.perplexity["before"].value != record.perplexity["after"].value
    niwaki.pack(tmp_path / "alone", tmp_path / "packed")
    stages = ["prune 0.5 solver=wanda quantize=int8:64", "heal tokens=100 own_text=0", "embeddings", "pack"]
    niwaki.run(model, tmp_path / "out", stages, calibration=random_tokens(8, 24), measurement=TEXT)
    stored = json.loads((tmp_path / "out" / "packed.json").read_text())["tensors"]
    assert {stored[key]["whole"] for key in (EMBEDDING, HEAD)} == {True}


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (["embeddings int8", "heal"], "stage 2, heal: only formats follow embeddings"),
        (["embeddings int8", "embeddings int8"], "stage 2, embeddings: only formats follow embeddings"),
        (["embeddings int9"], "a grid has 2 to 8 bits; got 9"),
        (["embeddings int4:64 effort=quick"], "no effort is called 'quick'"),
        (["embeddings int8:48"], "64 inputs cannot be divided into groups of 48 that share a scale; try int8:32"),
    ],
)
def test_bad_lists(tmp_path: Path, model: Path, stages: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        niwaki.run(model, tmp_path / "out", stages)
    assert not (tmp_path / "out").exists()


def test_a_model_of_an_earlier_run_is_refused(tmp_path: Path, model: Path) -> None:
    niwaki.quantize(model, tmp_path / "out", "int8")
    with pytest.raises(UsageError, match="was made by niwaki, and its record would be lost"):
        niwaki.run(tmp_path / "out", tmp_path / "two", ["embeddings"])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("scale", "0 or not finite"),
        ("shape", "should be BF16"),
        ("weight", "is not on its grid int8:64 any more"),
        ("none", f"on a grid, and {EMBEDDINGS} is not there"),
    ],
)
def test_damaged_scales(tmp_path: Path, damage: str, said: str) -> None:
    niwaki.quantize(wide(tmp_path / "model", True), tmp_path / "out", "int8", embeddings="int8:64")
    file, key = tmp_path / "out" / EMBEDDINGS, f"{EMBEDDING}_scale"
    scales = load_file(file)[key]
    if damage == "scale":
        scales[0] = 0
    elif damage == "shape":
        scales = scales[:-1]
    elif damage == "weight":
        scales *= 1.5
    save_file({key: scales}, file)
    if damage == "none":
        file.unlink()
    with pytest.raises(CheckpointError, match=said):
        niwaki.pack(tmp_path / "out", tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_groups_that_cannot_be_packed(tmp_path: Path) -> None:
    niwaki.run(wide(tmp_path / "model"), tmp_path / "out", ["embeddings int4:32 effort=none"])
    with pytest.raises(UsageError, match="on int4:32 would hardly be smaller packed"):
        niwaki.pack(tmp_path / "out", tmp_path / "packed")
    niwaki.quantize(tmp_path / "model", tmp_path / "both", "int8:64", embeddings="int8:32")
    niwaki.pack(tmp_path / "both", tmp_path / "packed")
    assert not json.loads((tmp_path / "packed" / "packed.json").read_text())["tensors"][EMBEDDING]["packed"]


def test_no_token_below_0(tmp_path: Path) -> None:
    niwaki.quantize(wide(tmp_path / "model"), tmp_path / "out", "int8:64", embeddings="int8:64")
    niwaki.pack(tmp_path / "out", tmp_path / "packed")
    table = niwaki.load(tmp_path / "packed", "cpu").get_input_embeddings()
    for token in (-1, 64):
        with pytest.raises(IndexError):
            table(torch.tensor([token]))
