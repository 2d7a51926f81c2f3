"""Walking through a model a block at a time gives what transformers computes with the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models import (
    CASES,
    edit_json,
    last_norm,
    linear_inputs,
    random_model,
    random_tokens,
    reference,
    save_model,
    weight,
)
from niwaki import blocks
from niwaki.blocks import FAMILIES, States, StreamedModel
from niwaki.checkpoint import Checkpoint
from niwaki.errors import CheckpointError, NiwakiError, NumericalError, UnsupportedModelError, UsageError

SAMPLES, LENGTH = 5, 20
#: What reads the same activations, in the order of computation.
SHARED_INPUTS = [
    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    ["self_attn.o_proj"],
    ["mlp.gate_proj", "mlp.up_proj"],
    ["mlp.down_proj"],
]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of two samples, so that the last of five is smaller."""
    monkeypatch.setattr(blocks, "TOKENS_PER_BATCH", 2 * LENGTH + 1)


@pytest.fixture(params=CASES)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", request.param)


@pytest.fixture
def tokens() -> Tensor:
    return random_tokens(SAMPLES, LENGTH)


def stream_of(directory: Path) -> StreamedModel:
    return StreamedModel(Checkpoint(directory), "cpu", "float32")


def materialised(module: nn.Module) -> list[str]:
    """The parameters that are in memory."""
    named = module.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if not parameter.is_meta]


def assert_clean(model: StreamedModel) -> None:
    """No hooks, no replaced forward passes, no weights."""
    for module in model.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)
    assert materialised(model.model) == []


def full_hidden_states(model: PreTrainedModel, tokens: Tensor) -> list[Tensor]:
    """What goes into each block, and what the last norm makes of the last block's output."""
    with torch.no_grad():
        batches = [model(batch, output_hidden_states=True).hidden_states for batch in tokens.split(2)]
    return [torch.cat(states) for states in zip(*batches, strict=True)]


def test_there_is_a_model_of_every_family() -> None:
    assert {case.split()[0] for case in CASES} == set(FAMILIES)


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
    names = [name for case in CASES for name, _ in random_model(case).named_parameters()]
    assert any(name.endswith("q_proj.bias") for name in names)
    assert any(name.endswith("down_proj.bias") for name in names)
    assert any(name.endswith("k_norm.weight") for name in names)


def test_hidden_states_are_those_of_the_whole_model(directory: Path, tokens: Tensor) -> None:
    whole = reference(directory)
    expected = full_hidden_states(whole, tokens)
    model = stream_of(directory)
    states = model.embed(tokens)
    assert [len(batch) for batch in states.tokens] == [2, 2, 1]
    assert torch.equal(torch.cat(states.tokens), tokens)
    seen = 0
    for block in model.stream():
        assert block.index == seen
        torch.testing.assert_close(torch.cat(states.hidden), expected[seen], rtol=1e-5, atol=1e-5)
        block.advance(states)
        seen += 1
    assert seen == whole.config.num_hidden_layers
    last = last_norm(whole, torch.cat(states.hidden))
    torch.testing.assert_close(last, expected[seen], rtol=1e-5, atol=1e-5)
    # The blocks do something, or the comparison above would hold for any order of them.
    assert (expected[0] - expected[1]).abs().mean() > 0.1


@pytest.mark.parametrize("logits", [1, blocks.LOGITS_PER_BATCH])  # a window at a time, a batch at a time
def test_losses_are_cross_entropies_of_the_whole_model(
    directory: Path, tokens: Tensor, logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "LOGITS_PER_BATCH", logits)
    model = stream_of(directory)
    states = model.embed(tokens)
    for block in model.stream():
        block.advance(states)
    losses = model.losses(states)
    with torch.no_grad():
        log_p = reference(directory)(tokens).logits.double().log_softmax(-1)
    expected = -log_p[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.5  # not all the same


def test_gram_matrices_are_those_of_the_inputs(directory: Path, tokens: Tensor) -> None:
    whole, model = reference(directory), stream_of(directory)
    states = model.embed(tokens)
    for block in model.stream():
        before = [hidden.clone() for hidden in states.hidden]
        steps: list[None] = []
        grams = block.input_grams(states, lambda steps=steps: steps.append(None))  # type: ignore[misc]
        assert len(steps) == 3
        assert all(torch.equal(a, b) for a, b in zip(states.hidden, before, strict=True))
        assert [gram.names for gram in grams] == SHARED_INPUTS
        inputs = linear_inputs(whole, block.index, tokens)
        assert set(inputs) == {name for names in SHARED_INPUTS for name in names}
        for gram in grams:
            assert gram.tokens == tokens.numel()
            assert gram.H.dtype == torch.float32
            for name in gram.names:
                X = inputs[name].double()
                torch.testing.assert_close(gram.H.double(), X.T @ X / len(X), rtol=1e-4, atol=1e-5)
        block.advance(states)


def test_only_one_block_is_in_memory(directory: Path, tokens: Tensor) -> None:
    model = stream_of(directory)
    assert_clean(model)
    states = model.embed(tokens)
    assert_clean(model)
    for block in model.stream():

        def check(index: int = block.index) -> None:
            loaded = materialised(model.model)
            assert loaded == [name for name in loaded if name.startswith(f"model.layers.{index}.")]
            assert len(loaded) == len(list(model.blocks[index].parameters()))

        check()
        block.input_grams(states, check)
        block.advance(states, check)
        check()
    assert_clean(model)
    model.losses(states)
    assert_clean(model)


def test_everything_is_let_go_of_when_the_consumer_raises(directory: Path, tokens: Tensor) -> None:
    class ConsumerError(Exception):
        pass

    def fail() -> None:
        raise ConsumerError

    model = stream_of(directory)
    states = model.embed(tokens)
    for step in ("body", "gram", "advance"):
        try:
            for block in model.stream():
                if block.index == 1:
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
    with pytest.raises(RuntimeError):
        model.losses(States([tokens], [torch.zeros(SAMPLES, LENGTH, 31)]))
    assert_clean(model)
    # All of it can be used again.
    again = model.embed(tokens)
    for block in model.stream():
        block.advance(again)
    assert torch.isfinite(model.losses(again)).all()


def test_a_stopped_stream_lets_go(tmp_path: Path) -> None:
    model = stream_of(save_model(tmp_path / "model"))
    for _ in model.stream():
        break
    assert_clean(model)


def test_replaced_weights_are_what_the_block_computes_with(tmp_path: Path, tokens: Tensor) -> None:
    directory = save_model(tmp_path / "model", dtype=torch.bfloat16)
    whole, model = reference(directory), stream_of(directory)
    name = "mlp.up_proj"
    generator = torch.Generator().manual_seed(1)
    W = torch.randn(48, 32, generator=generator)
    W[0] = 0.0
    W[1] = -0.0
    W[2] = -1e-45  # underflows to -0.0 in bfloat16
    W[3, 0] = 1 + 2**-10  # is no bfloat16
    states = model.embed(tokens)
    for block in model.stream():
        if block.index == 0:
            old = block.weight(name)
            assert old.dtype == torch.float32
            assert torch.equal(old, weight(whole, f"model.layers.0.{name}"))
            stored = block.replace(name, W.clone())
            assert stored.dtype == torch.bfloat16
            assert stored[3, 0] == 1
            assert not stored[:3].float().signbit().any()
            assert torch.equal(stored[4:], W[4:].bfloat16())
            # The solver is given the original, whatever happened to the block.
            assert torch.equal(block.weight(name), old)
        block.advance(states)
    changed = reference(directory)
    weight(changed, f"model.layers.0.{name}").copy_(W.bfloat16().float())
    with torch.no_grad():
        expected = changed(tokens).logits.log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2)
    torch.testing.assert_close(model.losses(states), -expected, rtol=1e-4, atol=1e-4)
    assert_clean(model)


def test_replacement_too_large_for_the_dtype(tmp_path: Path) -> None:
    model = stream_of(save_model(tmp_path / "model", dtype=torch.float16))
    block = next(model.stream())
    with pytest.raises(NumericalError, match=r"model\.layers\.0\.mlp\.up_proj.*too large for torch\.float16"):
        block.replace("mlp.up_proj", torch.full((48, 32), 1e5))


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

    with pytest.raises(
        NumericalError, match=r"inputs of model\.layers\.1\.mlp\.down_proj are NaN or infinite"
    ):
        walk()


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_files_and_dtypes_make_no_difference(
    tmp_path: Path, tokens: Tensor, shards: bool, stored: torch.dtype
) -> None:
    directory = save_model(tmp_path / "model", dtype=stored, shards=shards)
    model = stream_of(directory)
    states = model.embed(tokens)
    for block in model.stream():
        block.advance(states)
    whole = reference(directory)
    expected = full_hidden_states(whole, tokens)[-1]
    last = last_norm(whole, torch.cat(states.hidden))
    torch.testing.assert_close(last, expected, rtol=1e-5, atol=1e-5)


def test_blocks_can_run_in_half_precision(tmp_path: Path, tokens: Tensor) -> None:
    directory = save_model(tmp_path / "model", "qwen3", dtype=torch.bfloat16)
    model = StreamedModel(Checkpoint(directory), "cpu", "bfloat16")
    states = model.embed(tokens)
    expected = full_hidden_states(reference(directory, torch.bfloat16), tokens)
    for block in model.stream():
        assert states.hidden[0].dtype == torch.bfloat16
        torch.testing.assert_close(torch.cat(states.hidden), expected[block.index])
        for gram in block.input_grams(states):
            assert gram.H.dtype == torch.float32
        block.advance(states)


def test_a_head_of_its_own_although_the_configuration_ties_it(tmp_path: Path, tokens: Tensor) -> None:
    # Some checkpoints hold a copy of the tied head; what transformers does with it is right.
    whole = reference(save_model(tmp_path / "dense", "llama"))
    whole.save_pretrained(tmp_path / "model")
    edit_json(tmp_path / "model" / "config.json", tie_word_embeddings=True)
    model = stream_of(tmp_path / "model")
    states = model.embed(tokens)
    for block in model.stream():
        block.advance(states)
    with torch.no_grad():
        logits = reference(tmp_path / "model")(tokens).logits
    expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(model.losses(states).mean(), expected, rtol=1e-4, atol=1e-4)


def test_matrices_in_the_order_of_computation(tmp_path: Path) -> None:
    model = stream_of(save_model(tmp_path / "model", "qwen3"))
    found = model.matrices()
    shapes = {
        "q_proj": (64, 32),
        "k_proj": (32, 32),
        "v_proj": (32, 32),
        "o_proj": (32, 64),
        "gate_proj": (48, 32),
        "up_proj": (48, 32),
        "down_proj": (32, 48),
    }
    assert [m.name.split(".")[-1] for m in found] == [*shapes, *shapes]
    assert [m.shape for m in found] == [*shapes.values(), *shapes.values()]
    assert [m.block for m in found] == [0] * 7 + [1] * 7
    assert found[8].key == "model.layers.1.self_attn.k_proj.weight"


def test_window_lengths(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model")
    assert stream_of(directory).window_length(128) == (128, "")
    length, note = stream_of(directory).window_length(None)
    assert length == 128
    assert "128" in note
    with pytest.raises(UsageError, match="129 is more than the model's 128 positions"):
        stream_of(directory).window_length(129)
    edit_json(directory / "config.json", max_position_embeddings=131072)
    length, note = stream_of(directory).window_length(None)
    assert length == blocks.DEFAULT_LENGTH == 2048
    assert "2,048" in note


def test_unsupported_models(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model")
    edit_json(directory / "config.json", model_type="gpt2", architectures=["GPT2LMHeadModel"])
    with pytest.raises(UnsupportedModelError) as caught:
        stream_of(directory)
    for part in ("'gpt2'", "GPT2LMHeadModel", *FAMILIES):
        assert part in str(caught.value)
    edit_json(directory / "config.json", model_type=..., architectures=...)
    with pytest.raises(UnsupportedModelError, match=r"None \(unknown\); supported: llama"):
        stream_of(directory)
    edit_json(directory / "config.json", model_type="llama", quantization_config={"quant_method": "gptq"})
    with pytest.raises(UnsupportedModelError, match="is quantised; prune the original"):
        stream_of(directory)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": ["llama"]},
        {"hidden_size": "thirty-two"},
        {"num_attention_heads": 0},
        {"hidden_act": "sillu"},
        {"max_position_embeddings": None},
    ],
    ids=str,
)
def test_a_configuration_that_makes_no_sense(tmp_path: Path, changes: dict[str, object]) -> None:
    directory = save_model(tmp_path / "model")
    edit_json(directory / "config.json", **changes)
    with pytest.raises(NiwakiError) as caught:
        stream_of(directory).window_length(8)
    assert "\n" not in str(caught.value)


def test_the_checkpoint_is_not_what_the_configuration_promises(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model")
    edit_json(directory / "config.json", num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"lacks 'model\.layers\.2\..*which its config\.json asks for"):
        stream_of(directory)
    edit_json(directory / "config.json", num_hidden_layers=2, vocab_size=65)
    with pytest.raises(
        CheckpointError, match=r"'model\.embed_tokens\.weight' has shape \(64, 32\).*\(65, 32\)"
    ):
        stream_of(directory)


def test_devices_and_dtypes(tmp_path: Path) -> None:
    checkpoint = Checkpoint(save_model(tmp_path / "model", dtype=torch.bfloat16))
    assert StreamedModel(checkpoint, "cpu").dtype == torch.float32
    for device in ("quantum", "cuda:99"):
        with pytest.raises(UsageError, match=rf"the device '{device}' cannot be used"):
            StreamedModel(checkpoint, device)
    with pytest.raises(UsageError, match="--dtype must be auto, float32, bfloat16, float16; got int8"):
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
