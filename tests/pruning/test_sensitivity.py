"""Sensitivities of a streamed model, against a backward pass in float64 through the whole model of transformers."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import NumericalError, UnsupportedModelError
from niwaki.models import sensitivity, streamed as blocks
from niwaki.models.hidden_states import MemoryBudget
from niwaki.models.processes import World
from niwaki.models.sensitivity import Coupling, couplings, measured_couplings, sensitivities
from niwaki.models.streamed import StreamedModel, Weights
from niwaki.models.structure import choice
from niwaki.records.progress import Progress
from support.models import (
    a_third_of_the_families,
    decoder_blocks,
    message,
    random_model,
    random_tokens,
    reference,
    save_model,
    weight,
)
from support.streams import assert_clean, save_starved, stream_of
from support.threads import in_threads

Found = list[dict[str, Tensor]]

SAMPLES, LENGTH = 5, 20
TOKENS = random_tokens(SAMPLES, LENGTH)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of two samples, so that the last of five is smaller, and several pieces of gradients."""
    monkeypatch.setattr(blocks, "TOKENS_PER_BATCH", 2 * LENGTH + 1)
    monkeypatch.setattr(sensitivity, "_ROWS", 7)


# The whole model


def watch(sums: dict[str, Any], name: str, y: Tensor) -> Tensor:
    """``y`` itself; the squares of its gradients are added to those of ``name``."""

    def keep(gradient: Tensor) -> None:
        sums[name] = sums[name] + gradient.reshape(-1, gradient.shape[-1]).square().sum(dim=0)

    y.register_hook(keep)
    return y


def expected(directory: Path, tokens: Tensor = TOKENS) -> Found:
    """The same from hooks on each output in the whole model, in float64."""
    whole = reference(directory, torch.float64)
    whole.get_input_embeddings().weight.requires_grad_(True)  # so that all that follows has gradients
    found: list[dict[str, Any]] = [defaultdict(float) for _ in decoder_blocks(whole)]
    first: dict[Tensor, tuple[dict[str, Any], str]] = {}  # where a weight is used first counts for all
    for sums, layer in zip(found, decoder_blocks(whole), strict=True):
        for name, module in layer.named_modules():
            if choice(name):
                continue
            if isinstance(module, nn.Linear | Conv1D):
                at, own = first.setdefault(module.weight, (sums, name))
                module.register_forward_hook(lambda _, __, y, at=at, own=own: watch(at, own, y))
            if name.endswith(".experts"):
                a_token_at_a_time(module, whole.config.model_type, name, sums)
    logits = whole(tokens).logits
    draws = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0)).double()
    labels = (logits.softmax(-1).cumsum(-1) <= draws.unsqueeze(-1)).sum(-1)
    assert labels.unique().numel() > 10
    assert not tokens[:, 1:].numel() or not torch.equal(labels[:, :-1], tokens[:, 1:])
    nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    return [{name: value / tokens.numel() for name, value in sums.items()} for sums in found]


def a_token_at_a_time(experts: Any, family: str, name: str, sums: dict[str, Any]) -> None:
    """Experts as the definition has them, each matrix times the inputs of one token, with gradients into ``sums``."""
    fused = family.startswith("llama4") or family == "gpt_oss"  # gate and up are one matrix
    inner, outer = experts.down_proj.shape[1:] if fused else reversed(experts.down_proj.shape[1:])
    if family == "mixtral":
        name, parts = "block_sparse_moe.experts", ("w1", "w3", "w2")
    else:
        parts = ("gate_proj", "up_proj", "down_proj")

    def outputs(e: int) -> dict[str, int]:
        """The matrices of an expert, and how many outputs they have."""
        if fused:
            return {f"{name}.gate_up_proj.{e}": 2 * inner, f"{name}.down_proj.{e}": outer}
        return dict(zip([f"{name}.{e}.{part}" for part in parts], (inner, inner, outer), strict=True))

    for e in range(len(experts.gate_up_proj)):  # also one that no token goes to
        sums.update({matrix: torch.zeros(size).double() for matrix, size in outputs(e).items()})

    def one(e: int, x: Tensor) -> Any:
        first, *second, last = outputs(e)
        W, down = experts.gate_up_proj[e], experts.down_proj[e]
        if not fused:
            W1, W3 = W.chunk(2)
            gate, up = watch(sums, first, W1 @ x), watch(sums, second[0], W3 @ x)
            return watch(sums, last, down @ (nn.functional.silu(gate) * up))
        both = watch(sums, first, x @ W)
        if family == "gpt_oss":
            both = both + experts.gate_up_proj_bias[e]
            gate, up = both[0::2].clamp(max=7), both[1::2].clamp(-7, 7)
            y = watch(sums, last, ((up + 1) * gate * torch.sigmoid(1.702 * gate)) @ down)
            return y + experts.down_proj_bias[e]
        gate, up = both.chunk(2)
        return watch(sums, last, (nn.functional.silu(gate) * up) @ down)

    def chosen(X: Tensor, which: Tensor, scores: Tensor) -> Tensor:
        rows = [
            sum((s * one(int(e), x) for e, s in zip(es, ss, strict=True)), torch.zeros(()).double())
            for x, es, ss in zip(X, which, scores, strict=True)
        ]
        return torch.stack(rows)

    def routed(X: Tensor) -> Tensor:
        """LLaMA 4: all tokens for each expert, weighted with 0 if they are not its own."""
        tokens = len(X) // len(experts.gate_up_proj)
        rows = [one(i // tokens, x) if x.any() else torch.zeros_like(x) for i, x in enumerate(X)]
        return torch.stack(rows)

    experts.forward = routed if family.startswith("llama4") else chosen


def compare(found: Found, wanted: Found, model: StreamedModel, tolerance: float = 1e-4) -> None:
    assert len(found) == len(wanted) == len(model.blocks)
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert list(one) == [matrix.name for matrix in model.matrices(index)]
        assert set(one) == set(other)
        for matrix in model.matrices(index):
            value, correct = one[matrix.name], other[matrix.name]
            assert (value.dtype, value.device.type, value.shape) == (torch.float32, "cpu", matrix.shape[:1])
            size = float(correct.mean())
            torch.testing.assert_close(
                value.double(),
                correct.double(),
                rtol=tolerance,
                atol=tolerance * size + 1e-12,  # where all are 0 but for rounding
                msg=f"{index} {matrix.name}: {{}}".format,
            )


@a_third_of_the_families(1)
@pytest.mark.slow
def test_sensitivities_are_those_of_the_whole_model(tmp_path: Path, case: str) -> None:
    directory = save_model(tmp_path / "model", case)
    model = stream_of(directory)
    found = sensitivities(model, TOKENS)
    compare(found, expected(directory), model)
    assert_clean(model)
    # Rows differ, or the comparison would hold for any order of them.
    for values in found:
        assert all(float(v.std()) > 0.1 * float(v.mean()) for v in values.values() if v.any())
        assert any(v.any() for v in values.values())


@pytest.mark.parametrize("case", ["llama grouped", "gpt2", "phi3", "mixtral", "zamba2"])
def test_gradients_of_outputs_together(tmp_path: Path, case: str) -> None:
    """Blocks of the Gram matrix of gradients in float64, in all matrices but those of experts and shared ones."""
    directory, width = save_model(tmp_path / "model", case), 7
    whole = reference(directory, torch.float32 if case == "mixtral" else torch.float64)  # as its experts are computed
    whole.get_input_embeddings().weight.requires_grad_(True)
    gradients: dict[tuple[int, str], Tensor] = {}
    for index, layer in enumerate(decoder_blocks(whole)):
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear | Conv1D):

                def keep(_: Any, __: Any, y: Tensor, place: tuple[int, str] = (index, name)) -> None:
                    y.register_hook(lambda gradient: gradients.update({place: gradient.flatten(0, -2)}))

                module.register_forward_hook(keep)
    logits = whole(TOKENS).logits
    draws = torch.rand(TOKENS.shape, generator=torch.Generator().manual_seed(0)).double()
    labels = (logits.softmax(-1).cumsum(-1) <= draws.unsqueeze(-1)).sum(-1)
    nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    model = stream_of(directory)
    found = couplings(model, TOKENS, width, World())
    assert_clean(model)
    for index in range(len(model.blocks)):
        wanted = [m for m in model.matrices(index) if m.expert is None and ".experts." not in m.name and not m.blocks]
        assert list(found[index]) == [matrix.name for matrix in wanted]
        counted = {}
        for matrix in wanted:
            own = gradients[index, matrix.parameter.removesuffix(".weight")].double()
            own = own[:, matrix.start : matrix.start + matrix.shape[0]]
            norms = own.norm(dim=1)
            counted[matrix.name] = norms.view(SAMPLES, LENGTH) / norms.mean()
            G = (own / norms.clamp(min=1e-300).unsqueeze(1)).T @ own  # 0 where a token has no choice
            value = found[index][matrix.name].outputs.double()
            assert value.shape == (matrix.shape[0], width)
            for start in range(0, len(G), width):
                block = G[start : start + width, start : start + width] / G.diagonal().mean()
                expected = nn.functional.pad(block, (0, width - len(block)))
                torch.testing.assert_close(value[start : start + width], expected, rtol=2e-3, atol=2e-4)
        for same in same_inputs(list(counted)):
            mean = torch.stack([counted[name] for name in same]).mean(dim=0)
            for name in same:
                torch.testing.assert_close(found[index][name].tokens.double(), mean, rtol=1e-3, atol=1e-6)


def same_inputs(names: list[str]) -> list[list[str]]:
    """The matrices that have the same inputs in the families above, by what they are called."""
    first = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
    groups: dict[object, list[str]] = {}
    for name in names:
        path, _, last = name.rpartition(".")
        groups.setdefault(next(((path, i) for i, each in enumerate(first) if last in each), name), []).append(name)
    return [*groups.values()]


def test_couplings_of_several_processes(tmp_path: Path) -> None:
    directory, tokens = save_model(tmp_path / "model"), TOKENS[:4]
    wanted = couplings(stream_of(directory), tokens, 8, World())
    models = [stream_of(directory) for _ in range(2)]

    def do(world: World) -> list[dict[str, Coupling]]:
        return couplings(models[world.rank], world.share(tokens), 8, world)

    for found in in_threads(2, do):
        for one, other in zip(found, wanted, strict=True):
            assert list(one) == list(other)
            for name, value in one.items():
                torch.testing.assert_close(value.outputs, other[name].outputs, rtol=2e-3, atol=1e-3)
                torch.testing.assert_close(value.tokens, other[name].tokens, rtol=2e-3, atol=1e-5)


def test_couplings_of_some_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every second window; tokens of the others count as those seen do at their place."""
    model = stream_of(save_model(tmp_path / "model"))
    whole = measured_couplings(model, TOKENS, 8, World(), Progress())
    assert_same_couplings(whole, couplings(model, TOKENS, 8, World()))
    monkeypatch.setattr(sensitivity, "_COUPLED", TOKENS.numel() // 2)
    some, wanted = measured_couplings(model, TOKENS, 8, World(), Progress()), couplings(model, TOKENS[::2], 8, World())
    for block, of_pilot in zip(some, wanted, strict=True):
        for name, found in block.items():
            assert torch.equal(found.outputs, of_pilot[name].outputs)
            assert torch.equal(found.tokens[::2], of_pilot[name].tokens)
            mean = of_pilot[name].tokens.double().mean(dim=0)
            for start, stop in ((1, 2), (2, 4), (4, 8), (8, 16), (16, LENGTH)):
                mean[start:stop] = mean[start:stop].mean()
            for other in found.tokens[1::2]:
                torch.testing.assert_close(other.double(), mean, rtol=1e-3, atol=1e-6)


def test_couplings_take_no_more_memory_than_they_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stream_of(save_model(tmp_path / "model"))
    monkeypatch.setattr(sensitivity, "_STRIP", 4)
    whole = measured_couplings(model, TOKENS, 32, World(), Progress())
    sizes = [value.outputs.nbytes for block in whole for value in block.values()]
    monkeypatch.setattr(sensitivity, "_BYTES", sum(sizes) - 1)
    found = measured_couplings(model, TOKENS, 32, World(), Progress())
    assert_same_couplings(found, couplings(model, TOKENS, 16, World()))


def assert_same_couplings(found: list[dict[str, Coupling]], wanted: list[dict[str, Coupling]]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert list(one) == list(other)
        for name, value in one.items():
            assert torch.equal(value.outputs, other[name].outputs)
            assert torch.equal(value.tokens, other[name].tokens)


@pytest.mark.parametrize(
    ("rows", "most", "size"), [(576, 1024, 576), (1536, 1024, 768), (2048, 1024, 1024), (8960, 1024, 1024), (50, 7, 7)]
)
def test_blocks_of_outputs_are_as_large_as_each_other(rows: int, most: int, size: int) -> None:
    assert sensitivity._even(rows, most) == size


def test_windows_of_one_token(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model", "mixtral")
    tokens = random_tokens(30, 1)
    model = stream_of(directory)
    compare(sensitivities(model, tokens), expected(directory, tokens), model)


def test_an_expert_that_no_token_goes_to(tmp_path: Path) -> None:
    directory = save_starved(tmp_path / "model")
    model = stream_of(directory)
    found = sensitivities(model, TOKENS)
    compare(found, expected(directory), model)
    of_last = [value for name, value in found[0].items() if ".experts.3." in name]
    assert len(of_last) == 3
    assert not any(value.any() for value in of_last)


def test_labels_have_the_probabilities_of_the_model() -> None:
    p = torch.tensor([0.0, 0.1, 0.0, 0.6, 0.3, 0.0])
    draws = (torch.arange(1000) + 0.5) / 1000
    labels = sensitivity._labels(p.expand(1000, 6), draws).squeeze(-1)
    assert torch.bincount(labels, minlength=6).tolist() == [0, 100, 0, 600, 300, 0]
    ends = torch.tensor([0.0, 1 - 2**-24])
    assert sensitivity._labels(p[:5].expand(2, 5), ends).flatten().tolist() == [1, 4]


# Batches, memory, processes


def assert_same(one: Found, other: Found) -> None:
    """To the last bit."""
    for a, b in zip(one, other, strict=True):
        assert list(a) == list(b)
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("case", ["llama", "mixtral", "gemma2"])
@pytest.mark.slow
def test_batches_make_no_difference(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stream_of(save_model(tmp_path / "model", case))
    wanted = sensitivities(model, TOKENS)
    # A sample at a time; all at once; logits of 7 positions at a time, and of one.
    for tokens, logits in ((1, 1 << 27), (10**6, 1 << 27), (10**6, 4 * 64 * 7), (2 * LENGTH, 1)):
        monkeypatch.setattr(blocks, "TOKENS_PER_BATCH", tokens)
        monkeypatch.setattr(blocks, "LOGITS_PER_BATCH", logits)
        compare(sensitivities(model, TOKENS), wanted, model)


def test_weights_that_are_read_ahead(tmp_path: Path) -> None:
    """As for a GPU."""
    directory = save_model(tmp_path / "model", "llama grouped")
    model = stream_of(directory)
    model._ahead = True
    assert_same(sensitivities(model, TOKENS), sensitivities(stream_of(directory), TOKENS))
    assert_clean(model)


#: Of the hidden states of two samples.
BATCH = 2 * LENGTH * 32 * 4


@pytest.mark.parametrize("size", [0, BATCH, 4 * BATCH, 2**30])
@pytest.mark.slow
def test_hidden_states_on_disk_make_no_difference(tmp_path: Path, size: int) -> None:
    directory = save_model(tmp_path / "model", "mixtral")
    wanted = sensitivities(stream_of(directory), TOKENS)
    budget = MemoryBudget(size)
    model = StreamedModel(Checkpoint(directory), "cpu", "float32", budget)
    before = open_files()
    seen: list[int] = []
    assert_same(sensitivities(model, TOKENS, done=lambda: seen.append(open_files() - before)), wanted)
    assert max(seen) == (size < 2**30)
    assert open_files() == before
    # The budget is as it was.
    assert budget.spilled == 0
    assert budget.take(size)
    assert not budget.take(1)


def open_files() -> int:
    """How many files of no name this process has open."""
    paths = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum("(deleted)" in os.readlink(path) for path in paths if path.is_symlink())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.slow
def test_processes_have_the_sums_of_all(tmp_path: Path, size: int) -> None:
    directory = save_starved(tmp_path / "model")
    tokens = torch.cat([TOKENS[:2].roll(1, 0), TOKENS[2:3].expand(3, -1)])
    model, *models = [stream_of(directory) for _ in range(size + 1)]
    wanted = sensitivities(model, tokens)

    def do(world: World) -> Found:
        return sensitivities(models[world.rank], world.share(tokens), world)

    found = in_threads(size, do)
    compare(found[0], wanted, model)
    for other in found[1:]:
        assert_same(other, found[0])


# What is left alone


def test_only_some_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save_model(tmp_path / "model", "llama4_text")
    wanted = sensitivities(stream_of(directory), TOKENS)
    model = stream_of(directory)
    model.limit(range(1, 2))
    model.embed(TOKENS)  # which reads the first block once
    reads: list[int | None] = []
    of_block, outside = Weights.of_block, Weights.outside

    def watched_block(self: Weights, index: int) -> Any:
        reads.append(index)
        return of_block(self, index)

    def watched_outside(self: Weights, *more: Any, **options: Any) -> Any:
        reads.append(None)
        return outside(self, *more, **options)

    monkeypatch.setattr(Weights, "of_block", watched_block)
    monkeypatch.setattr(Weights, "outside", watched_outside)
    steps: list[None] = []
    found = sensitivities(model, TOKENS, done=lambda: steps.append(None))
    assert found[0] == found[2] == {}
    assert_same([found[1]], [wanted[1]])
    assert reads == [None, 0, 1, 2, None, 2, 1]
    assert len(steps) == 3 * (3 + 2)


def test_the_model_is_as_before(tmp_path: Path) -> None:
    model = stream_of(save_model(tmp_path / "model"))
    states = model.embed(TOKENS)
    for block in model.stream():
        block.advance(states)
    losses = model.losses(states)
    sensitivities(model, TOKENS)
    assert_clean(model)
    states = model.embed(TOKENS)
    seen = []
    for block in model.stream():
        parameters = list(model.blocks[block.index].parameters())
        assert not any(value.requires_grad or value.grad is not None for value in parameters)
        block.advance(states)
        seen.append(block.index)
    assert seen == [0, 1]
    assert torch.equal(model.losses(states), losses)
    assert not any(value.requires_grad for value in model.model.parameters())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("call", [1, 5, 7])
def test_nothing_is_left_where_it_ends_early(tmp_path: Path, call: int) -> None:
    model = stream_of(save_model(tmp_path / "model"))
    before = open_files()
    steps: list[None] = []

    def end() -> None:
        steps.append(None)
        if len(steps) == call:
            raise KeyboardInterrupt

    model.budget = MemoryBudget(0)
    with pytest.raises(KeyboardInterrupt):
        sensitivities(model, TOKENS, done=end)
    assert_clean(model)
    assert open_files() == before


# Half precision


def save_changed(path: Path, change: Callable[[Any], object], dtype: torch.dtype = torch.bfloat16) -> Path:
    model = random_model("llama", dtype=dtype)
    with torch.no_grad():
        change(model)
    model.save_pretrained(path)
    return path


def total(values: dict[str, Tensor], name: str) -> float:
    return float(values[name].sum(dtype=torch.float64))


ENDS = [("lm_head", "model.norm", exponent) for exponent in (0, -7, -13)]


@pytest.mark.parametrize(
    ("dtype", "changed"),
    [*((dtype, ends) for dtype in ("bfloat16", "float16") for ends in ENDS), ("float16", ("model.embed_tokens", -12))],
)
@pytest.mark.slow
def test_half_precision(tmp_path: Path, dtype: str, changed: tuple[Any, ...]) -> None:
    """With a small head and a small norm before it gradients are below what float16 can have.

    Small hidden states are normalized at first, so gradients grow by as much from block to block.
    """
    *parts, exponent = changed
    directory = save_changed(
        tmp_path / "model", lambda model: [weight(model, part).mul_(2.0**exponent) for part in parts]
    )
    found, wanted = sensitivities(StreamedModel(Checkpoint(directory), "cpu", dtype), TOKENS), expected(directory)
    for one, other in zip(found, wanted, strict=True):
        for name in one:
            assert one[name].dtype == torch.float32
            # A few labels may be others.
            assert abs(total(one, name) / total(other, name) - 1) < 0.1, name
            difference = (one[name] - other[name]).norm() / other[name].norm()
            assert difference < 0.2, name


def test_the_normalization_is_exact() -> None:
    for largest, exponent in ((1.0, 1), (0.75, 0), (6e-8, -23), (2.0**-149, -148), (3e38, 128), (0.0, 0)):
        values = torch.tensor([largest, -largest / 2, 0.0])
        scaled, found = sensitivity._normalized(values, "here")
        assert found == exponent
        assert torch.equal(scaled.double(), values.double() / 2.0**exponent)
        assert torch.equal(values, torch.tensor([largest, -largest / 2, 0.0]))


# Errors


def test_gradients_that_are_not_finite(tmp_path: Path) -> None:
    model = stream_of(
        save_changed(tmp_path / "model", lambda model: weight(model, "model.norm").fill_(3e38), torch.float32)
    )
    text = message(lambda: sensitivities(model, TOKENS), NumericalError)
    assert text.startswith("the model's outputs: gradients are NaN or infinite on the calibration text; try")


def test_gradients_that_overflow_in_a_block(tmp_path: Path) -> None:
    def change(model: Any) -> None:  # outputs are small, but gradients between the two are large
        weight(model, "model.layers.1.self_attn.o_proj").fill_(60_000)
        weight(model, "model.layers.1.self_attn.v_proj").mul_(2.0**-20)

    model = StreamedModel(Checkpoint(save_changed(tmp_path / "model", change)), "cpu", "float16")
    text = message(lambda: sensitivities(model, TOKENS), NumericalError)
    assert text.endswith("gradients are NaN or infinite on the calibration text; try dtype float32, or another text")


def test_a_matrix_that_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stream_of(save_model(tmp_path / "model"))
    mlp = model.blocks[1].get_submodule("mlp")
    monkeypatch.setattr(mlp, "forward", lambda x: 2 * x)
    text = message(lambda: sensitivities(model, TOKENS), UnsupportedModelError)
    assert text == "mlp.gate_proj.weight is not used when its block runs; please report this model"


def test_a_matrix_of_which_a_part_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stream_of(save_model(tmp_path / "model"))
    up: Any = model.blocks[1].get_submodule("mlp.up_proj")
    monkeypatch.setattr(up, "forward", lambda x: torch.cat([x @ up.weight[:24].T, x @ up.weight[24:].T], -1))
    text = message(lambda: sensitivities(model, TOKENS), UnsupportedModelError)
    assert text == "mlp.up_proj.weight is used in parts when its block runs; please report this model"
