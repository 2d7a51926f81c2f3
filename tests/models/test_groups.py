"""Groups of matrices with the same inputs, and blocks whose weights change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from niwaki.checkpoints.reading import Checkpoint
from niwaki.models import streamed as blocks
from niwaki.models.block import DecoderBlock
from niwaki.models.gram_capture import InputGrams
from niwaki.models.hidden_states import HiddenStates, MemoryBudget
from niwaki.models.layout import Matrix
from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.models.structure import choice
from niwaki.models.training import trainable
from support.models import linear_inputs, random_tokens, reference, save_model, some_families
from support.streams import assert_clean, materialized, prune, save_starved, stream_of, whole_losses

SAMPLES, LENGTH = 5, 20


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples each, so that the last of five is smaller."""
    monkeypatch.setattr(blocks, "TOKENS_PER_BATCH", 2 * LENGTH + 1)


@pytest.fixture
def tokens() -> Tensor:
    return random_tokens(SAMPLES, LENGTH)


def limited(directory: Path) -> StreamedModel:
    return StreamedModel(Checkpoint(directory), "cpu", "float32", MemoryBudget(1 << 30))


@torch.no_grad()
def groups_of(block: DecoderBlock, states: HiddenStates) -> list[list[Matrix]]:
    """The matrices with the same inputs together, in the order of computation; those of all experts by parameter."""
    grams = InputGrams(block.matrices, dict(block.module.named_parameters()))
    grams.watch(lambda: block.forward(states.hidden[0], states, 0))
    first = {name: names[0] for names in grams.names for name in names}
    order = list(first)
    groups: dict[str, list[Matrix]] = {}
    for matrix in block.matrices:
        group = first.get(matrix.name, matrix.name) if matrix.expert is None else matrix.parameter
        groups.setdefault(group, []).append(matrix)
    places = {
        name: min((order.index(m.name) for m in group if m.name in first), default=len(order))
        for name, group in groups.items()
    }
    return [groups[name] for name in sorted(groups, key=lambda name: places[name])]


# Inputs


@pytest.mark.parametrize(
    ("case", "room"),
    [
        *(pytest.param(*case.values, False, marks=case.marks) for case in some_families(3)),
        *((case, True) for case in ("llama", "mixtral", "gpt2")),
    ],
)
@pytest.mark.slow
def test_inputs_in_a_pruned_model(tmp_path: Path, tokens: Tensor, case: str, room: bool) -> None:
    """Against hooks on a whole pruned model; the first group of each block is pruned before."""
    directory = save_model(tmp_path / "model", case)
    pruned = reference(directory)
    model = limited(directory) if room else stream_of(directory)
    states = model.embed(tokens)
    for block in model.stream():
        for matrix in block.shared:
            weights = pruned.get_parameter(model.places[block.index] + matrix.parameter)
            block.put(matrix, block.stored(matrix, matrix.within(weights)))
        first, *others = groups_of(block, states)
        left = [matrix for group in others for matrix in group]
        for group in (first, left, first):  # the last time with weights that were put
            X = linear_inputs(pruned, block.index, tokens)
            grams = block.input_grams(states, matrices=group)
            assert sorted(n for gram in grams for n in gram.names) == sorted(m.name for m in group)
            named = {matrix.name: matrix for matrix in group}
            for gram in grams:
                for A in (X[name].double() for name in gram.names if named[name].expert is None):
                    H, size = (A.T @ A / len(A)).float(), float(A.square().mean())
                    torch.testing.assert_close(gram.H, H, rtol=1e-4, atol=1e-3 * size)
            prune(block, group, pruned)
        block.advance(states)
    assert_clean(model)
    torch.testing.assert_close(model.losses(states), whole_losses(pruned, tokens), rtol=1e-4, atol=1e-4)


def calls(block: nn.Module, run: Callable[[], object]) -> list[str]:
    """The linear modules that ``run`` calls, in this order."""
    found: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda *_, name=name: found.append(name))
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and not choice(name)
    ]
    run()
    for handle in handles:
        handle.remove()
    return [name.rpartition(".")[2] for name in found]


def test_passes_end_where_nothing_is_left_to_see(tmp_path: Path, tokens: Tensor) -> None:
    model = stream_of(save_model(tmp_path / "model"))
    states = model.embed(tokens)
    for block in model.stream():
        module = model.blocks[block.index]
        full = {name: gram for gram in block.input_grams(states) for name in gram.names}
        whole = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        for group, end in zip(groups_of(block, states), (3, 4, 6, 7), strict=True):
            found = []
            seen = calls(module, lambda: found.extend(block.input_grams(states, matrices=group)))  # noqa: B023
            assert seen == whole + 2 * whole[:end]  # three batches
            for gram in found:
                assert gram.tokens == SAMPLES * LENGTH
                for name in gram.names:
                    assert torch.equal(gram.H, full[name].H)
        block.advance(states)


@pytest.mark.slow
def test_passes_of_experts_are_as_long_as_they_have_to_be(tmp_path: Path, tokens: Tensor) -> None:
    """Wherever they end, group by group there are the same Gram matrices as all at once."""
    for directory in (save_model(tmp_path / "all", "mixtral"), save_starved(tmp_path / "starved")):
        model = stream_of(directory)
        states = model.embed(tokens)
        for block in model.stream():
            full = {name: gram for gram in block.input_grams(states) for name in gram.names}
            for group in groups_of(block, states):
                for gram in block.input_grams(states, matrices=group):
                    for name in gram.names:
                        assert torch.equal(gram.H, full[name].H)
                        assert (gram.tokens, gram.borrowed) == (full[name].tokens, full[name].borrowed)
            block.advance(states)


def test_a_matrix_that_is_used_twice(tmp_path: Path) -> None:
    """All its inputs count, and no pass ends early."""
    model = stream_of(save_model(tmp_path / "model"))
    block = next(stream := model.stream())
    parameters: dict[str, Tensor] = dict(model.blocks[0].named_parameters())
    q, k = (parameters[f"self_attn.{name}_proj.weight"] for name in "qk")
    matrices = [m for m in block.matrices if m.name.split(".")[1] in ("q_proj", "k_proj")]
    grams = InputGrams(matrices, parameters)
    X = torch.randn(3, 3, 40, 32, generator=torch.Generator().manual_seed(0))
    for batch in X:

        def run(batch: Tensor = batch) -> None:
            for rows, weight in zip(batch, (q, k, q), strict=True):
                rows @ weight.T

        grams.watch(run)
    found = {gram.names[0]: gram for gram in grams.finish(World())}
    for name, rows in (("q_proj", X[:, [0, 2]].reshape(-1, 32)), ("k_proj", X[:, 1].reshape(-1, 32))):
        gram = found[f"self_attn.{name}"]
        assert gram.tokens == len(rows)
        torch.testing.assert_close(gram.H, rows.T @ rows / len(rows))
    stream.close()


# Weights


@pytest.mark.parametrize("room", [False, True], ids=["memory", "limited memory"])
def test_nothing_stays_of_a_block_in_which_something_went_wrong(tmp_path: Path, tokens: Tensor, room: bool) -> None:
    directory = save_model(tmp_path / "model")
    model = limited(directory) if room else stream_of(directory)
    states = model.embed(tokens)

    def fail() -> None:
        stream = model.stream()
        block = next(stream)
        prune(block, block.matrices)
        try:
            with trainable(block):
                raise ZeroDivisionError
        finally:
            stream.close()

    with pytest.raises(ZeroDivisionError):
        fail()
    assert_clean(model)
    assert not any(value.requires_grad for value in model.model.parameters())
    for block in model.stream():  # and the model is as good as new
        block.advance(states)
    torch.testing.assert_close(model.losses(states), whole_losses(reference(directory), tokens), rtol=1e-4, atol=1e-4)


# Training


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", ["llama biases", "mixtral"])
@pytest.mark.slow
def test_training(tmp_path: Path, tokens: Tensor, dtype: str, case: str) -> None:
    computing = getattr(torch, dtype)
    model = StreamedModel(Checkpoint(save_model(tmp_path / "model", case, dtype=computing)), "cpu", dtype)
    states = model.embed(tokens)
    for block in model.stream():
        module = model.blocks[block.index]
        was = {name: value.data for name, value in module.named_parameters()}  # which does not change
        before = {name: value.clone() for name, value in was.items()}
        trained = {m.parameter for m in block.matrices}
        assert not any(value.requires_grad for value in module.parameters())
        with trainable(block) as parameters:
            inside = dict(module.named_parameters())
            assert {id(value) for value in parameters} == {id(inside[name]) for name in trained}
            for name, value in inside.items():
                assert value.requires_grad == (name in trained)
                assert value.dtype == torch.float32
                assert torch.equal(value, before[name].to(value.dtype))
            with torch.enable_grad():
                block.run(states.hidden[0], states, 0).float().square().mean().backward()
            assert all(value.grad is not None and value.grad.any() for value in parameters)
            for value in parameters:
                value.data.mul_(0.5)
        for name, value in module.named_parameters():
            assert not value.requires_grad
            assert value.grad is None
            assert value.dtype == computing
            factor = 0.5 if name in trained else 1.0
            torch.testing.assert_close(value, factor * before[name], rtol=1e-2, atol=1e-4)
            assert torch.equal(was[name], before[name])
        block.advance(states)
        assert states.hidden[0].dtype == computing
    assert materialized(model.model) == []
