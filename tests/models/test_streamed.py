"""Walking through a model a block at a time gives what transformers computes with the whole model."""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import CheckpointError, NiwakiError, NumericalError, UsageError
from niwaki.models import gram_capture as inputs, streamed as blocks
from niwaki.models.gram_capture import InputGram, InputGrams
from niwaki.models.hidden_states import HiddenStates, MemoryBudget, SpillList
from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.models.structure import FAMILIES, choice, structure
from support.covering import covered, some
from support.forks import Ended, forked
from support.models import (
    CASES,
    EACH_CASE,
    decoder_blocks,
    edit_json,
    linear_inputs,
    message,
    random_model,
    random_tokens,
    reference,
    save_model,
    some_of_each_family,
    weight,
)
from support.streams import assert_clean, losses_of, materialized, memory, save_starved, stream_of, walked, whole_losses

SAMPLES, LENGTH = 5, 20


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """SpillList of two samples, so that the last of five is smaller, and several strips of each Gram matrix."""
    monkeypatch.setattr(blocks, "TOKENS_PER_BATCH", 2 * LENGTH + 1)
    monkeypatch.setattr(inputs, "_STRIP", 7)


@pytest.fixture(scope="module", params=EACH_CASE)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("family") / request.param, request.param)


@pytest.fixture(scope="module", params=some_of_each_family(2))
def of_family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For what is much the same in all models of a family."""
    return save_model(tmp_path_factory.mktemp("family") / request.param, request.param)


@pytest.fixture(scope="module")
def whole(directory: Path) -> PreTrainedModel:
    return reference(directory)


@pytest.fixture
def tokens() -> Tensor:
    return random_tokens(SAMPLES, LENGTH)


def full_hidden_states(model: PreTrainedModel, tokens: Tensor) -> list[Tensor]:
    """What goes into each block, and what comes out of the last one."""
    ends: list[Tensor] = []

    def keep(_: nn.Module, __: object, out: Any) -> None:
        ends.append(out[0] if isinstance(out, tuple) else out)

    handle = decoder_blocks(model)[-1].register_forward_hook(keep)
    with torch.no_grad():
        batches = [model(batch, output_hidden_states=True).hidden_states[:-1] for batch in tokens.split(2)]
    handle.remove()
    return [*(_samples_first(states) for states in zip(*batches, strict=True)), _samples_first(ends)]


def _samples_first(states: Sequence[Tensor]) -> Tensor:
    """(samples, length, .., width) of batches, which Gemma 3n has as (streams, samples, length, width)."""
    return torch.cat([value.permute(1, 2, 0, 3) if value.ndim == 4 else value for value in states])


def test_there_is_a_model_of_every_family() -> None:
    assert {case.split()[0] for case in CASES} == set(FAMILIES)


@pytest.mark.slow
def test_the_models_tell_families_apart(tmp_path: Path) -> None:
    # The tests below prove nothing about masks, biases and norms that the tiny models do not have.
    window = reference(save_model(tmp_path / "a", "mistral window"))
    tokens = random_tokens(1, LENGTH)
    other = tokens.clone()
    other[0, 0] = (other[0, 0] + 1) % 64
    # Two blocks with windows of 6 see 10 tokens back; the first token must not matter behind that.
    assert torch.equal(window(tokens).logits[:, 11:], window(other).logits[:, 11:])
    full = reference(save_model(tmp_path / "b", "mistral"))
    assert not torch.equal(full(tokens).logits[:, 11:], full(other).logits[:, 11:])
    mixed = reference(save_model(tmp_path / "c", "qwen2 window"))
    assert mixed.config.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    names = [name for case in ("llama biases", "qwen3") for name, _ in random_model(case).named_parameters()]
    for end in ("q_proj.bias", "down_proj.bias", "k_norm.weight"):
        assert any(name.endswith(end) for name in names)


@pytest.mark.slow
def test_hidden_states_are_those_of_the_whole_model(directory: Path, whole: PreTrainedModel, tokens: Tensor) -> None:
    expected = full_hidden_states(whole, tokens)
    model = stream_of(directory)
    states = model.embed(tokens)
    assert [len(batch) for batch in states.tokens] == [2, 2, 1]
    assert torch.equal(torch.cat(states.tokens), tokens)
    seen = 0
    for block in model.stream():
        assert block.index == seen
        torch.testing.assert_close(torch.cat(list(states.hidden)), expected[seen], rtol=1e-5, atol=1e-5)
        block.advance(states)
        # The blocks do something, or the comparison would hold for any order of them.
        assert (expected[seen + 1] - expected[seen]).norm() > 0.1 * expected[seen].norm()
        seen += 1
    assert seen == len(decoder_blocks(whole)) == len(expected) - 1
    torch.testing.assert_close(torch.cat(list(states.hidden)), expected[seen], rtol=1e-5, atol=1e-5)
    assert model.notes == []


@pytest.mark.parametrize("logits", some([1, blocks.LOGITS_PER_BATCH], 1))  # a window at a time, a batch at a time
@pytest.mark.slow
def test_losses_are_cross_entropies_of_the_whole_model(
    directory: Path, whole: PreTrainedModel, tokens: Tensor, logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "LOGITS_PER_BATCH", logits)
    losses, expected = losses_of(stream_of(directory), tokens), whole_losses(whole, tokens)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.02  # not all the same


def test_gram_matrices_and_outputs_of_one_pass(directory: Path, tokens: Tensor) -> None:
    """States that advance while their Gram matrices are gathered are those that advance alone, in every block."""
    stream = stream_of(directory)
    both, apart = stream.embed(tokens), stream.embed(tokens)
    for block in stream.stream():
        expected = block.input_grams(apart)
        block.advance(apart)
        for gram, other in zip(block.input_grams(both, advance=True), expected, strict=True):
            assert gram.names == other.names
            assert torch.equal(gram.H, other.H)
        for batch, other_batch in zip(both.hidden, apart.hidden, strict=True):
            assert torch.equal(batch, other_batch)


@pytest.mark.slow
def test_gram_matrices_are_those_of_the_inputs(directory: Path, whole: PreTrainedModel, tokens: Tensor) -> None:
    compare_grams(directory, whole, tokens)


def compare_grams(directory: Path, whole: PreTrainedModel, tokens: Tensor) -> list[InputGram]:
    """All Gram matrices, after a comparison with those of the inputs that ``whole`` has."""
    model, case, found = stream_of(directory), directory.name, []
    states = model.embed(tokens)
    for block in model.stream():
        before = [hidden.clone() for hidden in states.hidden]
        steps: list[None] = []
        matrices = [*block.matrices, *block.shared]
        grams = block.input_grams(states, partial(steps.append, None), matrices=matrices)
        found += grams
        assert len(steps) == len(states.tokens)
        assert all(torch.equal(a, b) for a, b in zip(states.hidden, before, strict=True))
        inputs = {name: X for name, X in linear_inputs(whole, block.index, tokens).items() if not choice(name)}
        shared = defaultdict(set)
        for name, X in inputs.items():
            shared[X.data_ptr(), X.shape].add(name)
        experts = expert_inputs(whole, case, block.index, tokens)
        expected = [*shared.values(), *(set(names) for names, _, _ in experts)]
        # Each matrix once, and together those with the same input, in the order of computation.
        assert sorted(sorted(gram.names) for gram in grams) == sorted(map(sorted, expected))
        names = [name for gram in grams for name in gram.names]
        assert sorted(names) == sorted(matrix.name for matrix in matrices)
        wanted = {name: (gram_of(X), len(X)) for name, X in inputs.items()}
        for names, H, count in experts:
            wanted |= dict.fromkeys(names, (H, count))
        for gram in grams:
            assert gram.H.dtype == torch.float32
            for name in gram.names:
                H, count = wanted[name]
                assert gram.tokens == count, name
                size = float(H.diag().mean())
                torch.testing.assert_close(gram.H, H.float(), rtol=1e-4, atol=1e-4 * size)
        block.advance(states)
    return found


def gram_of(X: Tensor) -> Tensor:
    return X.double().T @ X.double() / len(X)


Experts = list[tuple[list[str], Tensor, int]]


@torch.no_grad()
def expert_inputs(whole: PreTrainedModel, case: str, block: int, tokens: Tensor) -> Experts:
    """(names, H, tokens) of the experts' matrices in a block, one token at a time, from the definition."""
    family, layer = case.split()[0], decoder_blocks(whole)[block]
    part, mlp = next(((n, m) for n, m in layer.named_children() if hasattr(m, "experts")), ("", None))
    if mlp is None:
        return []
    seen: dict[str, Any] = {}
    experts: Any = mlp.get_submodule("experts")
    handles = [
        mlp.register_forward_pre_hook(lambda _, args: seen.update(X=args[0].flatten(0, 1))),
        experts.register_forward_pre_hook(lambda _, args: seen.update(chosen=args[1:2])),
    ]
    whole(tokens)
    for handle in handles:
        handle.remove()
    gate_up = experts.gate_up_proj
    assert isinstance(gate_up, Tensor)
    routes: list[list[Tensor]] = [[] for _ in gate_up]
    for t, x in enumerate(seen["X"]):
        if family.startswith("llama4"):  # a token is weighted before the expert and not behind it
            scores = weight(whole, f"model.layers.{block}.{part}.router") @ x
            for e in scores.topk(whole.config.num_experts_per_tok).indices:
                routes[e].append(x * scores[e].sigmoid())
        else:
            for e in seen["chosen"][0][t]:
                routes[e].append(x)
    first: list[Tensor] = []
    second: list[Tensor] = []
    for e, rows in enumerate(routes):
        X = torch.stack(rows) if rows else torch.zeros(0, 32)
        first.append(X)
        if family == "gpt_oss":
            both = X @ gate_up[e] + experts.gate_up_proj_bias[e]
            gate, up = both[:, 0::2].clamp(max=7), both[:, 1::2].clamp(-7, 7)
            second.append((up + 1) * gate * torch.sigmoid(1.702 * gate))
        else:
            both = X @ (gate_up[e] if family.startswith("llama4") else gate_up[e].T)
            gate, up = both.chunk(2, dim=1)
            second.append(gate * torch.sigmoid(gate) * up)
    found: Experts = []
    for e in range(len(gate_up)):
        if family.startswith("llama4") or family == "gpt_oss":
            names = [[f"{part}.experts.gate_up_proj.{e}"], [f"{part}.experts.down_proj.{e}"]]
        elif family == "mixtral":
            stem = f"block_sparse_moe.experts.{e}."
            names = [[stem + "w1", stem + "w3"], [stem + "w2"]]
        else:
            stem = f"{part}.experts.{e}."
            names = [[stem + "gate_proj", stem + "up_proj"], [stem + "down_proj"]]
        found.append((names[0], with_loan(first, e), len(first[e])))
        found.append((names[1], with_loan(second, e), len(second[e])))
    return found


def with_loan(inputs: list[Tensor], expert: int) -> Tensor:
    """H of an expert, to whose tokens as many average tokens of all experts come as it lacks."""
    X, everything = inputs[expert].double(), torch.cat(inputs).double()
    missing = max(0, X.shape[1] - len(X))
    H = X.T @ X
    if missing:
        H = H + missing * (everything.T @ everything) / len(everything)
    return H / (len(X) + missing)


def test_experts_that_get_too_few_tokens_borrow_from_all(tmp_path: Path, tokens: Tensor) -> None:
    directory = save_starved(tmp_path / "mixtral")
    grams = compare_grams(directory, reference(directory), tokens)
    of_experts = [gram for gram in grams if ".experts." in gram.names[0]]
    counts = {gram.tokens for gram in of_experts}
    assert 0 in counts
    assert counts & set(range(1, 24))
    assert max(counts) > 32
    for gram in of_experts:
        assert gram.borrowed == max(0, len(gram.H) - gram.tokens)
        if gram.tokens == 0:
            assert gram.H.diag().min() > 0
    assert not any(gram.borrowed for gram in grams if ".experts." not in gram.names[0])


def test_attention_with_few_tokens_borrows_nothing(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "llama")
    tokens = random_tokens(1, 3)
    for gram in compare_grams(directory, reference(directory), tokens):
        assert (gram.tokens, gram.borrowed) == (3, 0)


def test_inputs_that_change_or_give_way_to_others(tmp_path: Path) -> None:
    """The same memory is not the same input if something else is in it."""
    model = stream_of(save_model(tmp_path / "model"))
    block = next(stream := model.stream())
    parameters: dict[str, Tensor] = dict(model.blocks[0].named_parameters())
    q, k, v = (parameters[f"self_attn.{name}_proj.weight"] for name in "qkv")
    matrices = [m for m in block.matrices if m.name.split(".")[1] in ("q_proj", "k_proj", "v_proj")]
    grams = InputGrams(matrices, parameters)
    generator = torch.Generator().manual_seed(0)
    X, Y = torch.randn(2, 40, 32, generator=generator)

    def run() -> None:
        for _ in range(8):
            rows = X.clone()  # at the same place as before, unless something keeps what was there
            rows @ q.T
            del rows
        rows = Y.clone()
        rows @ k.T
        rows.add_(X)
        rows @ v.T

    grams.watch(run)
    found = {gram.names[0]: gram for gram in grams.finish(World())}
    assert [gram.tokens for gram in found.values()] == [320, 40, 40]
    for name, rows in (("q_proj", X), ("k_proj", Y), ("v_proj", X + Y)):
        torch.testing.assert_close(found[f"self_attn.{name}"].H, gram_of(rows).float())
    stream.close()


@covered
@pytest.mark.parametrize("case", ["llama", "mixtral", "gpt_oss", "llama4_text", "gpt2", "falcon"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("samples", "length"), [(3, 16), (1, 9), (1, 1)])
@pytest.mark.slow
def test_inputs_are_found_in_half_precision(tmp_path: Path, case: str, dtype: str, samples: int, length: int) -> None:
    directory = save_model(tmp_path / "model", case, dtype=torch.bfloat16)
    tokens = random_tokens(samples, length)
    found = []
    for computing in (dtype, "float32"):
        model = StreamedModel(Checkpoint(directory), "cpu", computing)
        states = model.embed(tokens)
        block = next(stream := model.stream())
        found.append((block, block.input_grams(states)))
        stream.close()
    (block, half), (_, full) = found
    assert [gram.names for gram in half] == [gram.names for gram in full]
    assert sorted(name for gram in half for name in gram.names) == sorted(m.name for m in block.matrices)
    for a, b in zip(half, full, strict=True):
        if ".experts." not in a.names[0]:  # rounding can send a token to another expert
            assert a.tokens == b.tokens == samples * length
        assert a.H.dtype == torch.float32
        if a.tokens == b.tokens:
            assert (a.H - b.H).norm() < 0.1 * b.H.norm()


def test_tokens_that_count_more(tmp_path: Path, tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the Gram matrices of matrices that have weights, and not in means of inputs."""
    monkeypatch.setattr("niwaki.models.streamed.TOKENS_PER_BATCH", 2 * LENGTH)
    directory, weights = save_model(tmp_path / "model"), torch.arange(SAMPLES * LENGTH).view(SAMPLES, LENGTH) / 2
    weighted = dict.fromkeys(("self_attn.q_proj", "mlp.down_proj"), weights)
    model = stream_of(directory)
    states = model.embed(tokens)
    block = next(stream := model.stream())
    inputs = linear_inputs(reference(directory), 0, tokens)
    for gram in block.input_grams(states, weights=weighted):
        X = inputs[gram.names[0]].double()
        of_rows = weights.double().view(-1, 1) if gram.names[0] in weighted else 1.0
        torch.testing.assert_close(gram.H.double(), X.T @ (of_rows * X) / len(X), rtol=1e-4, atol=1e-6)
        assert gram.tokens == len(X)
    stream.close()


def test_matrices_with_the_same_input_in_the_order_of_computation(tmp_path: Path, tokens: Tensor) -> None:
    model = stream_of(save_model(tmp_path / "model"))
    states = model.embed(tokens)
    block = next(stream := model.stream())
    assert [gram.names for gram in block.input_grams(states)] == [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"],
        ["mlp.down_proj"],
    ]
    stream.close()


def test_logits_are_computed_for_losses_only(of_family: Path, tokens: Tensor) -> None:
    model = stream_of(of_family)
    seen: list[Tensor] = []
    model.model.get_output_embeddings().register_forward_hook(lambda *_: seen.append(tokens))
    states = walked(model, tokens)
    assert not seen
    model.losses(states)
    assert len(seen) == 3


@pytest.mark.slow
def test_only_one_block_is_in_memory(of_family: Path, tokens: Tensor) -> None:
    model = stream_of(of_family)
    assert_clean(model)
    states = model.embed(tokens)
    assert_clean(model)
    for block in model.stream():

        def check(index: int = block.index) -> None:
            loaded = materialized(model.model)
            assert loaded == [name for name in loaded if name.startswith(model.places[index])]
            assert len(loaded) == len(list(model.blocks[index].parameters()))

        check()
        block.input_grams(states, check)
        block.advance(states, check)
        check()
    assert_clean(model)
    model.losses(states)
    assert_clean(model)


@pytest.mark.slow
def test_weights_that_are_released_while_they_are_pruned(of_family: Path, tokens: Tensor) -> None:
    kept, model = stream_of(of_family), StreamedModel(Checkpoint(of_family), "cpu", "float32", MemoryBudget(1 << 30))
    states, expected = model.embed(tokens), kept.embed(tokens)
    for block, whole in zip(model.stream(), kept.stream(), strict=True):
        before = memory(block)
        block.release(block.matrices)
        whole.release(whole.matrices)
        assert block.released
        assert not whole.released  # memory is not limited
        pruned = sum(4 * matrix.shape[0] * matrix.shape[1] for matrix in block.matrices)
        assert memory(block) <= before - pruned + 4 * len(block.matrices)
        for matrix in block.matrices:
            block.put(matrix, block.stored(matrix, block.weight(matrix)))
        assert memory(block) == before
        block.advance(states)
        whole.advance(expected)
    assert all(torch.equal(a, b) for a, b in zip(states.hidden, expected.hidden, strict=True))
    for block in model.stream():
        block.release(block.matrices)
        break
    assert_clean(model)


@pytest.mark.slow
def test_everything_is_let_go_of_when_the_consumer_raises(of_family: Path, tokens: Tensor) -> None:
    class ConsumerError(Exception):
        pass

    def fail() -> None:
        raise ConsumerError

    model = stream_of(of_family)
    states = model.embed(tokens)
    last = len(model.blocks) - 1
    for step in ("body", "gram", "advance"):
        try:
            for block in model.stream():
                if block.index < last:  # later ones may use what it hands on
                    block.advance(states)
                    continue
                if step == "gram":
                    block.input_grams(states, fail)
                if step == "advance":
                    block.advance(states, fail)
                fail()
        except ConsumerError:
            pass
        else:
            pytest.fail("the consumer's exception is lost")
        assert_clean(model)
    with pytest.raises(IndexError):
        model.embed(torch.tensor([[63, 64]]))  # the vocabulary is 64: fails inside the embedding
    assert_clean(model)
    too_narrow = SpillList(MemoryBudget())
    too_narrow.append(torch.zeros(SAMPLES, LENGTH, 31))
    with pytest.raises(RuntimeError):
        model.losses(HiddenStates([tokens], too_narrow))
    assert_clean(model)
    assert torch.isfinite(losses_of(model, tokens)).all()  # all of it can be used again


def test_replaced_weights_are_what_the_block_computes_with(tmp_path: Path, tokens: Tensor) -> None:
    directory = save_model(tmp_path / "model", dtype=torch.bfloat16)
    whole, model = reference(directory), stream_of(directory)
    W = torch.randn(48, 32, generator=torch.Generator().manual_seed(1))
    W[0], W[1], W[2] = 0.0, -0.0, -1e-45  # the last one underflows to -0.0 in bfloat16
    W[3, 0] = 1 + 2**-10  # is no bfloat16
    states = model.embed(tokens)
    for block in model.stream():
        if block.index == 0:
            matrix = next(m for m in block.matrices if m.name == "mlp.up_proj")
            old = block.weight(matrix)
            assert old.dtype == torch.float32
            assert torch.equal(old, weight(whole, "model.layers.0.mlp.up_proj"))
            stored = block.stored(matrix, W.clone())
            block.put(matrix, stored)
            assert stored.dtype == torch.bfloat16
            assert stored[3, 0] == 1
            assert not stored[:3].float().signbit().any()
            assert torch.equal(stored[4:], W[4:].bfloat16())
            # The solver is given the original, whatever happened to the block.
            assert torch.equal(block.weight(matrix), old)
        block.advance(states)
    weight(whole, "model.layers.0.mlp.up_proj").copy_(W.bfloat16().float())
    torch.testing.assert_close(model.losses(states), whole_losses(whole, tokens), rtol=1e-4, atol=1e-4)
    assert_clean(model)


def test_replacement_too_large_for_the_dtype(tmp_path: Path) -> None:
    model = stream_of(save_model(tmp_path / "model", dtype=torch.float16))
    block = next(model.stream())
    with pytest.raises(NumericalError, match=r"model\.layers\.0\.mlp\.up_proj.*too large for torch\.float16"):
        block.stored(block.matrices[5], torch.full((48, 32), 1e5))


def test_activations_that_are_not_finite(tmp_path: Path, tokens: Tensor) -> None:
    whole = reference(save_model(tmp_path / "dense"))
    weight(whole, "model.layers.1.mlp.up_proj").mul_(1e30)
    whole.save_pretrained(tmp_path / "model")
    model = stream_of(tmp_path / "model")
    states = model.embed(tokens)

    def walk() -> None:
        for block in model.stream():
            block.input_grams(states)
            block.advance(states)

    with pytest.raises(NumericalError, match=r"block 1: the inputs of mlp\.down_proj are NaN or infinite"):
        walk()


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_files_and_dtypes_make_no_difference(tmp_path: Path, tokens: Tensor, shards: bool, stored: torch.dtype) -> None:
    directory = save_model(tmp_path / "model", dtype=stored, shards=shards)
    expected = full_hidden_states(reference(directory), tokens)[-1]
    found = torch.cat(list(walked(stream_of(directory), tokens).hidden))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_blocks_can_run_in_half_precision(tmp_path: Path, tokens: Tensor) -> None:
    directory = save_model(tmp_path / "model", "qwen3", dtype=torch.bfloat16)
    model = StreamedModel(Checkpoint(directory), "cpu", "bfloat16")
    states = model.embed(tokens)
    expected = full_hidden_states(reference(directory, torch.bfloat16), tokens)
    for block in model.stream():
        assert states.hidden[0].dtype == torch.bfloat16
        torch.testing.assert_close(torch.cat(list(states.hidden)), expected[block.index])
        for gram in block.input_grams(states):
            assert gram.H.dtype == torch.float32
        block.advance(states)


def test_a_head_of_its_own_although_the_configuration_ties_it(tmp_path: Path, tokens: Tensor) -> None:
    # Some checkpoints hold a copy of the tied head; what transformers does with it is right.
    directory = save_model(tmp_path / "model", "llama")
    edit_json(directory / "config.json", tie_word_embeddings=True)
    expected = whole_losses(reference(directory), tokens)
    torch.testing.assert_close(losses_of(stream_of(directory), tokens), expected, rtol=1e-4, atol=1e-4)


def test_matrices_in_the_order_of_computation(tmp_path: Path) -> None:
    found = stream_of(save_model(tmp_path / "model", "qwen3")).matrices()
    shapes = {"q_proj": (64, 32), "k_proj": (32, 32), "v_proj": (32, 32), "o_proj": (32, 64)}
    shapes |= {"gate_proj": (48, 32), "up_proj": (48, 32), "down_proj": (32, 48)}
    assert [m.name.split(".")[-1] for m in found] == [*shapes, *shapes]
    assert [m.shape for m in found] == [*shapes.values(), *shapes.values()]
    assert [m.block for m in found] == [0] * 7 + [1] * 7
    assert found[8].key == "model.layers.1.self_attn.k_proj.weight"


def test_window_lengths(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model")
    assert stream_of(directory).window_length(128) == 128
    assert stream_of(directory).window_length(None) == 128
    with pytest.raises(UsageError, match="129 is more than the model's 128 positions"):
        stream_of(directory).window_length(129)
    edit_json(directory / "config.json", max_position_embeddings=131072)
    assert stream_of(directory).window_length(None) == blocks.DEFAULT_LENGTH == 2048


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("model_type", ["llama"]), ("hidden_size", "thirty-two"), ("num_attention_heads", 0)),
        *(("hidden_act", "sillu"), ("max_position_embeddings", None)),
    ],
)
def test_a_configuration_that_makes_no_sense(tmp_path: Path, key: str, value: object) -> None:
    directory = save_model(tmp_path / "model")
    edit_json(directory / "config.json", **{key: value})
    message(lambda: stream_of(directory).window_length(8), NiwakiError)


def test_a_structure_takes_no_memory(tmp_path: Path) -> None:
    """Not for a moment either: transformers makes Llama 4's experts out of zeros, 4 GiB of them here."""
    directory = save_model(tmp_path / "model", "llama4_text")
    edit_json(directory / "config.json", intermediate_size=1 << 22)

    def work() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        model = structure(directory, torch.float32)
        assert max(parameter.numel() for parameter in model.parameters()) >= 1 << 30
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20

    assert forked(work) == Ended(0, "", "")


def test_the_checkpoint_is_not_what_the_configuration_promises(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model")
    edit_json(directory / "config.json", num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"lacks 'model\.layers\.2\..*which its config\.json asks for"):
        stream_of(directory)
    edit_json(directory / "config.json", num_hidden_layers=2, vocab_size=65)
    with pytest.raises(CheckpointError, match=r"'model\.embed_tokens\.weight' has shape \(64, 32\).*\(65, 32\)"):
        stream_of(directory)


def test_devices_and_dtypes(tmp_path: Path) -> None:
    checkpoint = Checkpoint(save_model(tmp_path / "model", dtype=torch.bfloat16))
    assert StreamedModel(checkpoint, "cpu").dtype == torch.float32
    for device in ("quantum", "cuda:99"):
        with pytest.raises(UsageError, match=rf"the device '{device}' cannot be used"):
            StreamedModel(checkpoint, device)
    with pytest.raises(UsageError, match="dtype must be auto, float32, bfloat16 or float16; got int8"):
        StreamedModel(checkpoint, "cpu", "int8")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same(tmp_path: Path, tokens: Tensor) -> None:
    checkpoint = Checkpoint(save_model(tmp_path / "model", "qwen2 window"))
    losses = []
    for device in ("cpu", "cuda"):
        model = StreamedModel(checkpoint, device, "float32")
        states = model.embed(tokens)
        for block in model.stream():
            assert all(p.device.type == device for p in model.blocks[block.index].parameters())
            block.advance(states)
        losses.append(model.losses(states))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-3)


def test_blocks_that_are_read_ahead(tmp_path: Path, tokens: Tensor) -> None:
    """The same states, one block more in memory, and errors in the block that they belong to."""
    directory = save_model(tmp_path / "model", "llama grouped")

    def states(model: StreamedModel) -> list[Tensor]:
        moving, found = model.embed(tokens), []
        for block in model.stream():
            block.advance(moving)
            found.append(torch.cat(list(moving.hidden)))
        assert_clean(model)
        return found

    model = stream_of(directory)
    model._ahead = True
    for alone, ahead in zip(states(stream_of(directory)), states(model), strict=True):
        assert torch.equal(alone, ahead)
    stream = model.stream()
    next(stream)
    stream.close()
    assert_clean(model)
    stream = model.stream()
    path = directory / "model.safetensors"
    raw = bytearray(path.read_bytes())
    entry = model.checkpoint.entries["model.layers.1.mlp.up_proj.weight"]
    raw[entry.offset : entry.offset + 4] = b"\xff" * 4  # NaN
    path.write_bytes(raw)
    next(stream)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        next(stream)
    assert_clean(model)
