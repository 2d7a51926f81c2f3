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
from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.models.training import Fit, trainable, trained_weights
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


def embedded(model: StreamedModel, batches: int) -> tuple[HiddenStates, HiddenStates]:
    """(inputs in the pruned model, inputs in the dense one): batches of two samples."""
    tokens = random_tokens(2 * batches, LENGTH)
    states, origin = model.embed(tokens, LENGTH), model.embed(tokens, LENGTH)
    generator = torch.Generator().manual_seed(0)
    for i in range(batches):
        hidden = states.hidden[i]
        noise = torch.randn(hidden.shape, generator=generator).to(hidden.dtype)
        states.hidden[i] = hidden + 0.1 * hidden.std() * noise
    return states, origin


def prepared(model: StreamedModel, batches: int) -> tuple[DecoderBlock, HiddenStates, HiddenStates]:
    """The first block with half of its weights, its inputs, and the outputs of the dense block."""
    states, targets = embedded(model, batches)
    streams.append(model.stream())
    block = next(streams[-1])
    block.advance(targets)
    prune(block, block.matrices)
    return block, states, targets


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
    rates = {
        name: effort.rate * float(value[masks[name]].double().square().mean().sqrt())
        for name, value in parameters.items()
    }
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
        return {name: value.detach().clone() for name, value in layer.named_parameters()} | {
            name: value.detach().clone() for name, value in used().items()
        }

    found, order, step = Loop([now()], [error()]), torch.Generator().manual_seed(0), 0
    steps = round(effort.epochs * len(rest))
    while step < steps:
        for i in torch.randperm(len(rest), generator=order).tolist()[: steps - step]:
            adam.zero_grad()
            ((output(rest[i]) - outputs[rest[i]]).square() / power).sum().backward()
            for group, rate in zip(adam.param_groups, rates.values(), strict=True):
                group["lr"] = rate * (1 - step / steps)
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


@pytest.mark.parametrize("epochs", [1, 3, 0.5, 1.5])
@pytest.mark.slow
def test_it_is_adam_over_the_layer(tmp_path: Path, epochs: float) -> None:
    directory = save_model(tmp_path / "model")
    model = stream_of(directory)
    block, states, targets = prepared(model, 18)  # of which two are held out
    before = weights(model)
    effort = Fitting(epochs=epochs, rate=0.02)
    expected = loop(model, directory, states, targets, effort)
    kept = [hidden.clone() for hidden in (*states.hidden, *targets.hidden)]
    steps: list[None] = []
    fit = Fit(block, states, targets, effort, World(), lambda: steps.append(None))
    found = fit.run()
    assert len(steps) == fit.batches == round(16 * epochs) + 2 * (1 + math.ceil(epochs))
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
        streams.append(model.stream())
        block = next(streams[-1])
        block.advance(targets)
        prune(block, block.matrices)
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
        streams.append(model.stream())
        block = next(streams[-1])
        block.advance(targets)
        prune(block, block.matrices)
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
    found = Fit(
        block,
        states,
        targets,
        effort,
        World(),
        lambda: None,
        lambda matrix, W: called.append(matrix.name) or rounded(W),  # type: ignore[func-returns-value]
    ).run()
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
    effort = Fitting(epochs=30, rate=0.1)
    expected = loop(model, directory, states, targets, effort)
    best = expected.errors.index(min(expected.errors))
    assert 0 < best < 30
    found = Fit(block, states, targets, effort, World(), lambda: None).run()
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


def test_one_batch_is_held_out_and_fitted_to(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model")
    model = stream_of(directory)
    block, states, targets = prepared(model, 1)
    expected = loop(model, directory, states, targets, Fitting(epochs=5, rate=0.02))
    found = fitted(block, states, targets, epochs=5, rate=0.02)
    assert found.after == pytest.approx(expected.errors[-1], rel=1e-3)
    assert found.after < 0.9 * found.before


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


def test_a_rate_that_is_too_high(tmp_path: Path) -> None:
    model = stream_of(save_model(tmp_path / "model"))
    block, states, targets = prepared(model, 4)
    said = message(lambda: fitted(block, states, targets, epochs=1, rate=1e15), NumericalError)
    assert said.startswith("block 0: fitting it arrived at NaN or infinite outputs; try a lower rate than rate=1e+15")
    assert not any(value.requires_grad for value in model.blocks[0].parameters())


def test_inputs_that_are_not_finite(tmp_path: Path) -> None:
    model = stream_of(save_model(tmp_path / "model"))
    block, states, targets = prepared(model, 4)
    states.hidden[0] = states.hidden[0] * float("nan")
    assert "NaN or infinite outputs" in message(lambda: fitted(block, states, targets, epochs=1), NumericalError)


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
        with trainable(block) as parameters:
            dense = [value.detach().clone() for value in parameters]
        fitted(block, states, targets, epochs=1, rate=1e-3)
        found.append(sum(float((a - b).square().sum()) for a, b in zip(block_weights(block), dense, strict=True)))
    assert found[0] == pytest.approx(found[1], rel=0.1)


def block_weights(block: DecoderBlock) -> list[Tensor]:
    with trainable(block) as parameters:
        return [value.detach().clone() for value in parameters]
