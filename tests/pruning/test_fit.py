"""Blocks that are fitted to the dense block's outputs, against a plain loop over a layer of transformers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from niwaki.checkpoints.reading import Checkpoint
from niwaki.effort import Fitting
from niwaki.errors import NumericalError
from niwaki.models.block import DecoderBlock
from niwaki.models.hidden_states import HiddenStates
from niwaki.models.layout import Matrix
from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.models.training import Fit, trained_weights
from niwaki.records.record import FitRecord
from support.models import decoder_blocks, message, random_tokens, reference, save_model
from support.streams import error_by_places, prune, save_starved, stream_of

LENGTH = 12

streams: list[Generator[DecoderBlock]] = []  # a block is there as long as its stream


@pytest.fixture(autouse=True)
def _close(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("niwaki.models.streamed.TOKENS_PER_BATCH", 2 * LENGTH)
    yield
    while streams:
        streams.pop().close()


def begun(model: StreamedModel, targets: HiddenStates) -> DecoderBlock:
    """The first block with half of its weights; ``targets`` become the outputs of the dense block."""
    streams.append(model.stream())
    block = next(streams[-1])
    block.advance(targets)
    prune(block, block.matrices)
    return block


def prepared(model: StreamedModel, batches: int) -> tuple[DecoderBlock, HiddenStates, HiddenStates]:
    """The first block with half of its weights, its inputs in a pruned model, and the outputs of the dense block.

    Batches are of two samples.
    """
    tokens = random_tokens(2 * batches, LENGTH)
    states, targets = model.embed(tokens, LENGTH), model.embed(tokens, LENGTH)
    generator = torch.Generator().manual_seed(0)
    for i in range(batches):
        hidden = states.hidden[i]
        noise = torch.randn(hidden.shape, generator=generator).to(hidden.dtype)
        states.hidden[i] = hidden + 0.1 * hidden.std() * noise
    return begun(model, targets), states, targets


def fitted(block: DecoderBlock, states: HiddenStates, targets: HiddenStates, **effort: Any) -> FitRecord:
    return Fit(block, states, targets, Fitting(**effort), World(), lambda: None).run()


def weights(model: StreamedModel) -> dict[str, Tensor]:
    """Of the first block."""
    return {name: value.detach().clone() for name, value in model.blocks[0].named_parameters()}


@dataclass
class Loop:
    """What a plain loop comes to: weights and held-out errors before it and after each epoch."""

    weights: list[dict[str, Tensor]]
    errors: list[float]


def unrounded(W: Tensor) -> Tensor:
    return W


def loop(
    model: StreamedModel,
    directory: Path,
    states: HiddenStates,
    targets: HiddenStates,
    effort: Fitting,
    rounded: Callable[[Tensor], Tensor] = unrounded,
) -> Loop:
    """Over the first layer of the whole model as transformers has it, with the pruned weights in ``model``.

    It computes with ``rounded`` weights, as if the rounding had the gradient 1.
    """
    whole: Any = reference(directory)
    layer = copy.deepcopy(decoder_blocks(whole)[0])
    layer.load_state_dict(weights(model))
    inputs, outputs = list(states.hidden), list(targets.hidden)
    rotary = whole.model.rotary_emb(inputs[0], torch.arange(LENGTH)[None])
    parameters = {name: value for name, value in layer.named_parameters() if value.ndim == 2}
    masks = {name: value != 0 for name, value in parameters.items()}
    sizes = [value[masks[name]].double().square().mean().sqrt() for name, value in parameters.items()]
    for value in parameters.values():
        value.requires_grad_(True)
    adam = torch.optim.Adam([{"params": [value]} for value in parameters.values()], eps=1e-12)
    held = [i for i in range(len(inputs)) if i % 16 == 0]
    rest = [i for i in range(len(inputs)) if i % 16] or held

    def used() -> dict[str, Tensor]:
        return {name: value + (rounded(value) - value).detach() for name, value in parameters.items()}

    def output(i: int) -> Tensor:
        out: Tensor = torch.func.functional_call(layer, used(), (inputs[i],), {"position_embeddings": rotary})
        return out

    wanted = torch.cat([outputs[i] for i in held]).double()
    power = wanted.square().sum((0, 1))  # of each place of a state

    @torch.no_grad()
    def error() -> float:
        return error_by_places(torch.cat([output(i) for i in held]).double(), wanted)

    def now() -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in (dict(layer.named_parameters()) | used()).items()}

    found, order, step = Loop([now()], [error()]), torch.Generator().manual_seed(0), 0
    steps = round(effort.epochs * len(rest))
    while step < steps:
        for i in torch.randperm(len(rest), generator=order).tolist()[: steps - step]:
            adam.zero_grad()
            ((output(rest[i]) - outputs[rest[i]]).square() / power).sum().backward()
            for group, size in zip(adam.param_groups, sizes, strict=True):
                group["lr"] = effort.rate * float(size) * (1 - step / steps)
            adam.step()
            for name, value in parameters.items():
                value.data *= masks[name]
            step += 1
        found.weights.append(now())
        found.errors.append(error())
    return found


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Where gradients are near 0 Adam's steps hang on rounding: nearly all weights are the same, and none is far."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        away = (value - expected[name]).abs() / expected[name].square().mean().sqrt()
        assert away.max() < 0.05, name
        assert (away > 1e-3).double().mean() < 0.01, name
        assert torch.equal(value == 0, expected[name] == 0), name


@pytest.mark.parametrize(("batches", "held", "epochs"), [*((18, 2, each) for each in (1, 3, 0.5, 1.5)), (1, 0, 5)])
@pytest.mark.slow
def test_it_is_adam_over_the_layer(tmp_path: Path, batches: int, held: int, epochs: float) -> None:
    """A batch alone is held out, and fitted to."""
    directory = save_model(tmp_path / "model")
    model = stream_of(directory)
    block, states, targets = prepared(model, batches)
    before = weights(model)
    effort = Fitting(epochs=epochs, rate=0.02)
    expected = loop(model, directory, states, targets, effort)
    kept = [hidden.clone() for hidden in (*states.hidden, *targets.hidden)]
    steps: list[None] = []
    fit = Fit(block, states, targets, effort, World(), lambda: steps.append(None))
    found = fit.run()
    looks = max(1, held) * (1 + math.ceil(epochs))
    assert len(steps) == fit.batches == round((batches - held) * epochs) + looks
    assert (found.block, found.epochs) == (0, epochs)
    assert expected.errors[-1] == min(expected.errors) < 0.95 * expected.errors[0]
    assert found.before == pytest.approx(expected.errors[0], rel=1e-4)
    assert found.after == pytest.approx(expected.errors[-1], rel=1e-3)
    close(weights(model), expected.weights[-1])
    for name, value in weights(model).items():
        assert torch.equal(value, before[name]) == (value.ndim == 1), name
    assert all(torch.equal(a, b) for a, b in zip(kept, (*states.hidden, *targets.hidden), strict=True))


@pytest.mark.parametrize("room", [None, 0])
@pytest.mark.slow
def test_steps_of_parts_of_batches(tmp_path: Path, room: int | None) -> None:
    """As if batches had been that small, in memory or in a file."""
    directory, found = save_model(tmp_path / "model"), []
    for samples in (1, 3, 4):
        model = stream_of(directory)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("niwaki.models.streamed.TOKENS_PER_BATCH", samples * LENGTH)
            if room is not None and samples > 1:
                model.budget.left = room
            tokens = random_tokens(22, LENGTH)
            states, targets = model.embed(tokens, LENGTH), model.embed(tokens, LENGTH)
        assert (model.budget.spilled > 0) == (room == 0 and samples > 1)
        block = begun(model, targets)
        record = fitted(block, states, targets, epochs=2, batch=LENGTH)
        found.append((record.before, record.after, weights(model)))
        model.budget.close()
    for before, after, other in found[1:]:
        assert (before, after) == pytest.approx(found[0][:2], rel=1e-4)
        close(other, found[0][2])
    assert found[0][1] < 0.99 * found[0][0]


def test_fewer_targets(tmp_path: Path) -> None:
    """A pass over those that there are."""
    directory, found = save_model(tmp_path / "model"), []
    tokens = random_tokens(50, LENGTH)
    for given, epochs in ((19, 1.0), (50, 0.38)):
        model = stream_of(directory)
        states, targets = model.embed(tokens[:given], LENGTH), model.embed(tokens[:19], LENGTH)
        block = begun(model, targets)
        record = fitted(block, states, targets, epochs=epochs, batch=LENGTH)
        found.append((record.before, record.after, record.epochs, weights(model)))
    assert found[0][:3] == found[1][:3]
    assert found[0][2] == 1
    for name, value in found[0][3].items():
        assert torch.equal(value, found[1][3][name])


@pytest.mark.slow
def test_weights_on_a_grid(tmp_path: Path) -> None:
    """Gradients of rounded weights move weights that are not: some end at another number of the grid."""
    directory = save_model(tmp_path / "model")
    model = stream_of(directory)
    block, states, targets = prepared(model, 18)

    def rounded(W: Tensor) -> Tensor:
        steps = (W.abs() / 0.04).round().clamp(min=1)
        return torch.where(W == 0, 0.0, steps.copysign(W) * 0.04)

    for matrix in block.matrices:
        weights_of = matrix.within(model.blocks[0].get_parameter(matrix.parameter).data)
        weights_of.copy_(rounded(weights_of))
    before, effort = weights(model), Fitting(epochs=3)
    expected = loop(model, directory, states, targets, effort, rounded)
    called: list[str] = []

    def project(matrix: Matrix, W: Tensor) -> Tensor:
        called.append(matrix.name)
        return rounded(W)

    found = Fit(block, states, targets, effort, World(), lambda: None, project).run()
    assert set(called) == {matrix.name for matrix in block.matrices}
    assert found.before == pytest.approx(expected.errors[0], rel=1e-4)
    best = expected.errors.index(min(expected.errors))
    assert found.epochs == best > 0
    assert found.after == pytest.approx(expected.errors[best], rel=1e-2)
    assert found.after < 0.98 * found.before
    moved = 0.0
    for name, value in weights(model).items():
        if value.ndim == 2:
            assert torch.equal(value, rounded(value)), name
            assert torch.equal(value == 0, before[name] == 0), name
            differs = (value - expected.weights[best][name]).abs() > 1e-6
            assert differs.double().mean() < 0.01, name
            moved += float((value != before[name]).double().mean())
    assert moved > 0.1


@pytest.mark.slow
def test_the_best_epoch_stays(tmp_path: Path) -> None:
    """One batch to learn by heart, and one that sees it."""
    directory = save_model(tmp_path / "model")
    model = stream_of(directory)
    block, states, targets = prepared(model, 2)
    expected = loop(model, directory, states, targets, Fitting(epochs=30, rate=0.1))
    best = expected.errors.index(min(expected.errors))
    assert 0 < best < 30
    found = fitted(block, states, targets, epochs=30, rate=0.1)
    assert found.epochs == best
    assert found.after == pytest.approx(expected.errors[best], rel=1e-3)
    assert found.after < found.before
    close(weights(model), expected.weights[best])


def test_where_nothing_is_better_nothing_changes(tmp_path: Path) -> None:
    model = stream_of(save_model(tmp_path / "model"))
    block, states, targets = prepared(model, 4)
    before = weights(model)
    found = fitted(block, states, targets, epochs=2, rate=1.0)
    assert found.epochs == 0
    assert found.after == found.before
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral", "gpt_oss", "llama4_text"])
@pytest.mark.slow
def test_zeros_stay_and_are_no_more(tmp_path: Path, case: str, dtype: str) -> None:
    computing = getattr(torch, dtype)
    directory = save_model(tmp_path / "model", case, dtype=computing)
    model = StreamedModel(Checkpoint(directory), "cpu", dtype)
    block, states, targets = prepared(model, 5)
    before = weights(model)
    found = fitted(block, states, targets, epochs=2, rate=0.005)
    assert found.after < found.before
    assert found.epochs > 0
    changed = 0
    for matrix, stored in trained_weights(block):
        old = matrix.within(before[matrix.parameter])
        new = stored.T if matrix.transposed else stored
        assert new.dtype == computing
        assert torch.equal(new == 0, old == 0), matrix.name
        assert not (new.float().signbit() & (new == 0)).any()
        assert torch.equal(new, matrix.within(model.blocks[0].get_parameter(matrix.parameter)))
        changed += not torch.equal(new, old)
    assert changed == len(block.matrices)
    for name, value in weights(model).items():
        if name not in {m.parameter for m in block.matrices}:
            assert torch.equal(value, before[name])


@pytest.mark.parametrize("computing", ["float32", "float16"])
@pytest.mark.slow
def test_no_weight_becomes_zero_by_rounding(tmp_path: Path, computing: str) -> None:
    """Stored in float16, weights of 1e-7 are 0 when they become half as large."""
    whole = reference(save_model(tmp_path / "dense"))
    value: Any = decoder_blocks(whole)[0].get_parameter("mlp.up_proj.weight")
    with torch.no_grad():
        value.mul_(1e-6)
    whole.half().save_pretrained(tmp_path / "model")
    model = StreamedModel(Checkpoint(tmp_path / "model"), "cpu", computing)
    block, states, targets = prepared(model, 9)
    zeros = {m.name: int((m.within(weights(model)[m.parameter]) == 0).sum()) for m in block.matrices}
    found = fitted(block, states, targets, epochs=2, rate=0.1)
    assert found.epochs > 0
    for matrix, stored in trained_weights(block):
        assert stored.dtype == torch.float16
        assert int((stored == 0).sum()) == zeros[matrix.name]


def test_experts_without_tokens_stay_as_they_are(tmp_path: Path) -> None:
    model = stream_of(save_starved(tmp_path / "model"))
    block, states, targets = prepared(model, 6)
    before = weights(model)
    assert fitted(block, states, targets, epochs=1).epochs == 1
    for name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        same = [torch.equal(a, b) for a, b in zip(weights(model)[name], before[name], strict=True)]
        assert same == [False, False, False, True]


@pytest.mark.parametrize(("rate", "inputs"), [(1e15, 1.0), (0.01, math.nan)])
def test_outputs_that_are_not_finite(tmp_path: Path, rate: float, inputs: float) -> None:
    model = stream_of(save_model(tmp_path / "model"))
    block, states, targets = prepared(model, 4)
    states.hidden[0] = states.hidden[0] * inputs
    said = message(lambda: fitted(block, states, targets, epochs=1, rate=rate), NumericalError)
    assert said.startswith(
        f"block 0: fitting it arrived at NaN or infinite outputs; try a lower rate than rate={rate:g}"
    )
    assert not any(value.requires_grad for value in model.blocks[0].parameters())


@pytest.mark.parametrize(("dtype", "size"), [("float32", 1e6), ("float16", 1e4)])
def test_the_scale_of_the_outputs_makes_no_difference(tmp_path: Path, dtype: str, size: float) -> None:
    """A few huge activations, as large models have, make the other gradients of a relative error tiny."""
    directory = save_model(tmp_path / "model", dtype=getattr(torch, dtype))
    found = []
    for huge in (1.0, size):
        model = StreamedModel(Checkpoint(directory), "cpu", dtype)
        block, states, targets = prepared(model, 6)
        hidden = targets.hidden[0].clone()
        hidden[0, 0, 0] *= huge
        targets.hidden[0] = hidden  # held out, so that no step sees it
        before = weights(model)
        fitted(block, states, targets, epochs=1, rate=1e-3)
        away = [value.float() - before[name].float() for name, value in weights(model).items()]
        found.append(sum(float(each.square().sum()) for each in away))
    assert found[0] == pytest.approx(found[1], rel=0.1)
