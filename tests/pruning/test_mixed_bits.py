"""Grids on which matrices have 2 to 8 bits: which ones, what is written, and who reads it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import niwaki
from niwaki import Compute, Measurement
from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import UsageError
from niwaki.layer.grid import Grid, parse_grid
from niwaki.layer.problem import Gram, LayerProblem
from niwaki.layer.rounding import onto_grid, to_nearest
from niwaki.models.formats import format_of
from niwaki.models.processes import World
from niwaki.models.scales import FILE
from niwaki.models.sensitivity import sensitivities
from niwaki.packed.format import Index
from niwaki.pruning.mixed_bits import BitCosts, choose_bits, costs_of_bits, foreseen
from niwaki.records.progress import Progress
from support.models import linear_inputs, random_model, random_tokens, reference, weight
from support.runs import StopAt, files, tensors
from support.streams import stream_of

CPU = Compute("cpu", "float32")
TEXT = random_tokens(16, 24)
GIVEN: dict[str, Any] = {"calibration": TEXT[:12], "measurement": Measurement(TEXT[12:]), "compute": CPU}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with rows of 64, which packed groups are multiples of."""
    random_model("llama", hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def codes(directory: Path, group: int) -> dict[str, Tensor]:
    """The whole numbers of each matrix, from its weights and scales alone."""
    weights, found = tensors(directory), {}
    for name, scales in load_file(directory / FILE).items():
        W = weights[name.removesuffix("_scale")].double()
        found[name.removesuffix("_scale")] = (W.unflatten(1, (-1, group)) / scales.double().unsqueeze(2)).flatten(1)
    return found


def bits_of(numbers: Tensor) -> int:
    """The fewest of those that a packed matrix can have."""
    low, high = float(numbers.round().min()), float(numbers.round().max())
    return next(bits for bits in (2, 3, 4, 5, 6, 8) if -(2 ** (bits - 1)) <= low and high <= 2 ** (bits - 1) - 1)


def test_names() -> None:
    grid = parse_grid("int5.5:64")
    assert grid == Grid(8, 64, 5.5)
    assert str(grid) == "int5.5:64"
    assert str(parse_grid("int5.0")) == "int5.0"
    assert grid.choices() == (2, 3, 4, 5, 6, 8)
    assert Grid(8, 32, 5.5).choices() == (4, 5, 8)  # of GGUF
    assert Grid(6).choices() == (6,)
    for values, bits in (([-2, 1], 2), ([-3, 0], 3), ([-8, 7], 4), ([-9, 0], 5), ([8], 5), ([-128, 127], 8)):
        assert grid.fewest(torch.tensor(values)) == bits
    for text in ("int1.5:64", "int3.5:32", "int8.5", "int4.", "int.5", "int1e1"):
        with pytest.raises(UsageError):
            parse_grid(text)


@pytest.mark.parametrize("average", [4.0, 4.7, 5.2, 6.0, 7.1, 8.0])
@pytest.mark.parametrize("seed", range(5))
def test_several_numbers_of_bits(average: float, seed: int) -> None:
    """As good as the best that has a bit of a matrix less to share out, and never more bits than there are."""
    drawing = torch.Generator().manual_seed(seed)
    costs = {}
    for i in range(5):
        here, fall = (torch.rand(2, generator=drawing) + 0.1).tolist()
        nats = {bits: here * 4 ** (-(bits - 4) * fall) for bits in (4.0, 5.0, 6.0, 8.0)}
        nats[5] *= 1.0 if i % 2 else 1.3  # and may lie above the line between its neighbours
        costs[i, "a"] = BitCosts(100, nats)
    chosen = choose_bits(costs, average)
    assert sum(chosen.values()) <= average * 5 + 1e-9

    def best(bits: float) -> float:
        every = (dict(zip(costs, each, strict=True)) for each in itertools.product((4.0, 5.0, 6.0, 8.0), repeat=5))
        return min(foreseen(costs, each) for each in every if sum(each.values()) <= bits)

    found = foreseen(costs, chosen)
    assert best(average * 5) <= found + 1e-12
    if average * 5 - 2 >= 20:
        assert found <= best(average * 5 - 2) + 1e-12


@pytest.mark.parametrize("average", [4.0, 4.7, 6.0, 7.9, 8.0])
@pytest.mark.parametrize("seed", range(5))
def test_bits_go_where_they_gain_most(average: float, seed: int) -> None:
    drawing = torch.Generator().manual_seed(seed)
    draws = torch.rand(8, generator=drawing).tolist()
    costs = {(i, "a"): BitCosts(100, {4: draw, 8: draw / 256}) for i, draw in enumerate(draws)}
    chosen = choose_bits(costs, average)
    bits = [*chosen.values()]
    assert sum(bits) <= average * 8
    # All as large: then the best choice is the one that takes the dearest first.
    most = int((average - 4) / 4 * 8 + 1e-9)
    every = (
        dict(zip(costs, (8.0 if i in more else 4.0 for i in range(8)), strict=True))
        for more in itertools.combinations(range(8), most)
    )
    assert foreseen(costs, chosen) == pytest.approx(min(foreseen(costs, each) for each in every))


def test_costs_are_those_of_errors_by_sensitivity_and_inputs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("niwaki.layer.rounding.has_bfloat16_units", lambda: False)  # which would end elsewhere
    stream, text = stream_of(model), TEXT[:12]
    found = costs_of_bits(stream, Grid(8, 64, 5.0), text, "auto", World(), Progress())
    whole, sensitive, halves = reference(model), sensitivities(stream, text[::2]), (text[::2], text[1::2])
    for block, name in found:
        inputs, other = (linear_inputs(whole, block, half)[name].double() for half in halves)
        W = weight(whole, f"model.layers.{block}.{name}").float()
        problem = LayerProblem(W, Gram((inputs.T @ inputs / len(inputs)).float(), tokens=len(inputs)))
        dense = problem.solution(W, torch.ones_like(W, dtype=torch.bool))

        def cost(numbers: Tensor, W: Tensor = W, other: Tensor = other, g: Tensor = sensitive[block][name]) -> float:
            errors = (other @ (numbers - W).double().T).square().mean(0)
            return float((errors * g.double()).sum()) / 2

        grids = [Grid(8, 64).of(bits) for bits in (2, 3, 4, 5, 6, 8)]
        nearest = [cost(to_nearest(W, grid, torch.float32)[0]) for grid in grids]
        fitted = [cost(onto_grid(problem, dense, grid, torch.float32)[0].W) for grid in grids]
        nats = [*found[block, name].nats.values()]
        for tried in (0, 3, 5):
            assert nats[tried] == pytest.approx(fitted[tried], rel=0.02)
        two, five, eight = (fitted[tried] / nearest[tried] for tried in (0, 3, 5))
        shares = (2 * two + five) / 3, (two + 2 * five) / 3, (2 * five + eight) / 3
        for at, share in zip((1, 2, 4), shares, strict=True):
            assert nats[at] == pytest.approx(share * nearest[at], rel=0.02)
    assert len(found) == 14


def test_what_is_written(tmp_path: Path, model: Path) -> None:
    record = niwaki.quantize(model, tmp_path / "out", "int5.5:64", effort="fast", **GIVEN)
    found = codes(tmp_path / "out", 64)
    bits = {key: bits_of(value) for key, value in found.items()}
    for value in found.values():
        torch.testing.assert_close(value, value.round(), rtol=0, atol=1e-3)
    sizes = {key: value.numel() for key, value in found.items()}
    mean = sum(bits[key] * sizes[key] for key in bits) / sum(sizes.values())
    assert 5 < mean <= 5.5
    assert len({*bits.values()}) > 2
    assert record.quantization == "int5.5:64"
    said = ", ".join(f"{[*bits.values()].count(each)} of {each} bits" for each in sorted({*bits.values()}))
    assert any(said in note for note in record.notes)
    assert any("'niwaki pack' and 'niwaki export' make them small" in note for note in record.notes)
    # What reads it finds the same bits.
    checkpoint = Checkpoint(tmp_path / "out")
    form = format_of(checkpoint)
    for matrix in stream_of(tmp_path / "out").matrices():
        W = matrix.read(checkpoint)
        projected = form.project(matrix, W * 3, form.read_parts(checkpoint, matrix))
        (scales,) = form.read_parts(checkpoint, matrix)
        assert Grid(8, 64).fewest(Grid(8, 64).codes(projected, scales)) <= 8
        highest = float(Grid(8, 64).codes(projected, scales).max())
        assert highest <= 2 ** (bits[matrix.key] - 1) - 1


def test_a_stopped_run_comes_to_the_same_bytes(tmp_path: Path, model: Path) -> None:
    niwaki.quantize(model, tmp_path / "whole", "int5.5:64", effort="fast", **GIVEN)
    with pytest.raises(KeyboardInterrupt):
        niwaki.quantize(model, tmp_path / "out", "int5.5:64", effort="fast", **GIVEN, progress=StopAt(9))
    niwaki.quantize(model, tmp_path / "out", "int5.5:64", effort="fast", **GIVEN)
    assert files(tmp_path / "out", "recipe.toml") == files(tmp_path / "whole", "recipe.toml")


def test_packed_matrices_have_their_own_bits(tmp_path: Path, model: Path) -> None:
    sizes = {}
    for grid in ("int4:64", "int5.5:64", "int8:64"):
        niwaki.quantize(model, tmp_path / grid, grid, effort="fast", **GIVEN)
        niwaki.pack(tmp_path / grid, tmp_path / f"{grid} packed")
        sizes[grid] = sum(file.stat().st_size for file in (tmp_path / f"{grid} packed").glob("packed-*"))
    assert sizes["int4:64"] < sizes["int5.5:64"] < sizes["int8:64"]
    found = codes(tmp_path / "int5.5:64", 64)
    packed = Index.read(tmp_path / "int5.5:64 packed")
    for key, value in found.items():
        assert packed.tensors[key].bits == bits_of(value)
    niwaki.unpack(tmp_path / "int5.5:64 packed", tmp_path / "back")
    before, after = tensors(tmp_path / "int5.5:64"), tensors(tmp_path / "back")
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_healing_keeps_the_bits(tmp_path: Path, model: Path) -> None:
    niwaki.prune(model, tmp_path / "out", 0.6, quantize="int5.5:64", effort="fast", **GIVEN)
    niwaki.heal(tmp_path / "out", tmp_path / "healed", teacher=model, method="full", tokens=6000, rate=3e-3, **GIVEN)
    before, after = codes(tmp_path / "out", 64), codes(tmp_path / "healed", 64)
    changed = 0
    for key, value in before.items():
        assert bits_of(after[key]) <= bits_of(value)
        changed += int((after[key].round() != value.round()).sum())
    assert changed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"grid": "int5.5:64", "effort": "none"}, "without a text"),
        ({"grid": "int8", "embeddings": "int5.5:64"}, "one number of bits"),
        ({"grid": "int3.5:32"}, "mean of 4 to 8"),
    ],
)
def test_refusals(arguments: dict[str, Any], said: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        niwaki.quantize(model, tmp_path / "out", **arguments, **GIVEN)
    with pytest.raises(UsageError, match="two factors"):
        niwaki.prune(model, tmp_path / "out", "two-factors:0.5", quantize="int5.5:16", **GIVEN)
