"""From a model directory to one of a smaller model; transformers is the judge."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, MambaConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

import niwaki
from niwaki.cli import main as cli
from niwaki.cli.screen import Display
from niwaki.errors import CheckpointError, OutputError, UnsupportedModelError, UsageError
from niwaki.evaluation.evaluate import evaluate
from niwaki.options import Measurement
from niwaki.records.record import MatrixRecord, Record
from niwaki.runs.carried import MARGIN
from niwaki.runs.workplace import Workplace
from niwaki.shrinking import search, trial, walk as shrinking
from niwaki.shrinking.units import UnitParameter
from niwaki.shrinking.walk import Changes
from support.arguments import arguments
from support.command import without_sign_of_life
from support.covering import some
from support.models import (
    decoder_blocks,
    edit_json,
    is_pruned,
    linear_inputs,
    message,
    random_model,
    random_tokens,
    reference,
    save_model,
    save_model_with_tokenizer,
    save_random,
    sparse_model,
    weight,
)
from support.runs import SMALL, files, listing, tensors

RIDGE = 0.01
CALIBRATION, HELDOUT = random_tokens(8, 24), random_tokens(3, 24, seed=1)
#: Of a model of 2 blocks.
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def run(model: Path, out: Path, **changes: Any) -> Record:
    """``shrink`` with small inputs and without a tokenizer."""
    options: dict[str, Any] = {"calibration": CALIBRATION, "text": HELDOUT, "device": "cpu", "effort": "fast"}
    return niwaki.shrink(model, out, **arguments(**{**options, **changes}))


def save(path: Path, case: str, **changes: Any) -> Path:
    """A random model with another configuration than that of its case."""
    random_model(case, **changes).save_pretrained(path)
    return path


def config(directory: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return values


def _name(value: Any) -> str:
    """That of a case, of which the first value is enough."""
    return value if isinstance(value, str) else ""


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    found: Tensor = model(random_tokens(3, 20, seed=5), use_cache=False).logits
    return found


def generate(directory: Path) -> Tensor:
    """What the model says when it uses its cache, which counts blocks and heads."""
    model, tokens = reference(directory), random_tokens(2, 8)
    model.generation_config.eos_token_id = None
    found = model.generate(  # type: ignore[operator]
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    assert isinstance(found, Tensor)
    assert found.shape == (2, 14)
    with torch.no_grad():  # and without the cache
        assert torch.equal(model(found[:, :-1], use_cache=False).logits[:, 7:].argmax(-1), found[:, 8:])
    return found


def gone_of(record: Record, item: MatrixRecord) -> tuple[str, list[int]]:
    """(kind, units that went) of a matrix that was fitted."""
    assert record.structure is not None
    kind = "heads" if "attn" in item.name else "neurons"
    number = kept_blocks(record).index(item.block)
    return kind, getattr(record.structure, kind)[number]


def kept_blocks(record: Record) -> list[int]:
    structure = record.structure
    assert structure is not None
    depth = len({item.block for item in record.matrices}) or len(structure.influence) - len(structure.blocks)
    return [block for block in range(depth + len(structure.blocks)) if block not in structure.blocks]


def kept_columns(record: Record, item: MatrixRecord, columns: int) -> list[int]:
    _, gone = gone_of(record, item)
    size = (columns - item.shape[1]) // len(gone)
    return [column for column in range(columns) if column // size not in gone]


def twins(source: Path, out: Path, record: Record) -> Iterator[tuple[PreTrainedModel, MatrixRecord]]:
    """The dense model, with zeros for what went and the fitted weights of ``out``: before each of these steps."""
    twin, small = reference(source), reference(out)
    for item in record.matrices:
        yield twin, item
        new = matrix(small, kept_blocks(record).index(item.block), item.name)
        old = matrix(twin, item.block, item.name)
        assert new.shape == item.shape
        columns = kept_columns(record, item, old.shape[1])
        old.zero_()
        old[:, columns] = new
    yield twin, item


def matrix(model: PreTrainedModel, block: int, name: str) -> Tensor:
    """(out, in): a view of a weight of a block."""
    module = decoder_blocks(model)[block].get_submodule(name)
    assert isinstance(module.weight, Tensor)
    return module.weight.T if isinstance(module, Conv1D) else module.weight


def fitted(X: Tensor, W: Tensor, kept: list[int]) -> Tensor:
    """The regression with the ridge, in float64."""
    X, W = X.double(), W.double()
    rows = torch.cat([X / len(X) ** 0.5, RIDGE**0.5 * X.square().mean(dim=0).sqrt().diag()])
    solution: Tensor = torch.linalg.lstsq(rows[:, kept], rows @ W.T).solution
    return solution.T


# Neurons and heads

WIDE = {"num_attention_heads": 8, "num_key_value_heads": 2}
#: (case, changes of its configuration, options, what the configuration says then)
SMALLER: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("llama", {}, {"neurons": 0.3}, {"intermediate_size": 34}),
    ("llama", {}, {"heads": 0.5}, {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}),
    ("llama tied", {}, {"neurons": 0.5, "heads": 0.5}, {"intermediate_size": 24, "num_attention_heads": 2}),
    ("llama biases", {"num_key_value_heads": 4}, {"neurons": 0.25, "heads": 0.75},
     {"num_attention_heads": 1, "num_key_value_heads": 1}),
    ("mistral", {}, {"heads": 0.5, "neurons": 0.1}, {"num_attention_heads": 2, "num_key_value_heads": 1}),
    ("qwen2", WIDE, {"heads": 0.5}, {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 4}),
    ("mistral window", {"num_attention_heads": 8, "num_key_value_heads": 4}, {"heads": 0.25},
     {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}),
    ("qwen2 window", {}, {"neurons": 0.5}, {"intermediate_size": 24}),
    ("qwen3", {}, {"heads": 0.5, "neurons": 0.5}, {"num_attention_heads": 2, "head_dim": 16}),
    ("qwen3_moe", {}, {"heads": 0.5}, {"num_attention_heads": 2}),
    ("gemma2", {}, {"neurons": 0.5, "heads": 0.5}, {"intermediate_size": 24, "num_attention_heads": 2}),
    ("gemma3", {}, {"neurons": 0.5, "heads": 0.5}, {"intermediate_size": 24, "num_attention_heads": 2}),
    ("phi3", {}, {"neurons": 0.5}, {"intermediate_size": 24}),
    ("opt", {}, {"neurons": 0.5}, {"ffn_dim": 24}),
    ("gpt2", {}, {"neurons": 0.25}, {"n_inner": 36}),
    ("gpt_neox", {}, {"neurons": 0.25}, {"intermediate_size": 36}),
    ("olmo2", {}, {"neurons": 0.25}, {"intermediate_size": 36}),
    ("cohere2", {}, {"neurons": 0.25, "heads": 0.5}, {"intermediate_size": 36, "num_attention_heads": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("case", "changes", "options", "said"), some(SMALLER, 10), ids=_name)
@pytest.mark.slow
def test_a_smaller_model_is_the_dense_one_with_zeros(
    tmp_path: Path, case: str, changes: dict[str, Any], options: dict[str, Any], said: dict[str, Any]
) -> None:
    source, out = save(tmp_path / "model", case, **changes), tmp_path / "out"
    record = run(source, out, **options)
    text = config(out).get("text_config", config(out))
    assert {name: text[name] for name in said} == said
    # Transformers makes the same shapes of the configuration; a mistake here would be a tensor of random numbers.
    small, stored = reference(out), tensors(out)
    shapes, expected = ({key: value.shape for key, value in each.items()} for each in (small.state_dict(), stored))
    assert all(shapes[key] == expected[key] for key in shapes.keys() & expected.keys())
    *_, (twin, _) = twins(source, out, record)
    torch.testing.assert_close(logits(small), logits(twin), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(small), logits(reference(source)), rtol=0.01, atol=0.01)
    generate(out)
    assert len(record.matrices) == len(decoder_blocks(small)) * len(options)
    check_parameters(source, out, record)


#: (neurons, fraction, how many stay, what a note says of it)
ROUNDED = [
    (256, "0.3", 192, "192 of 256 neurons stay, a multiple of 32 as"),  # and not 179
    (256, 0.25, 192, None),
    (256, "90 %", 32, "87.5 % go instead of 90 %"),
    (128, 0.1, 115, "115 of 128 neurons stay, no multiple of 32"),  # the nearest one would leave all
    (128, 0.97, 4, "no multiple of 32"),  # and here none
    (96, 0.5, 48, "no multiple of 32"),  # which 32 or 64 are too far from
    (48, 0.3, 34, None),
    (2048, 0.2, 1664, "a multiple of 64 as"),  # as packed models want it, and not 1,632
]


@pytest.mark.parametrize(("width", "fraction", "stay", "said"), ROUNDED)
@pytest.mark.slow
def test_a_multiple_of_32_neurons_stays(
    tmp_path: Path, width: int, fraction: float | str, stay: int, said: str | None
) -> None:
    source, out = save(tmp_path / "model", "llama", intermediate_size=width, num_hidden_layers=1), tmp_path / "out"
    record = run(source, out, neurons=fraction, text_samples=0)
    assert config(out)["intermediate_size"] == stay
    assert record.pattern == f"{100 * (width - stay) / width:.3g} % of the neurons of each block"
    notes = [note for note in record.notes if "neurons stay" in note]
    assert len(notes) == (said is not None)
    assert all(str(said) in note for note in notes)


def check_parameters(source: Path, out: Path, record: Record) -> None:
    """What the record says of them, against the files and against the modules of transformers."""
    structure, in_blocks = record.structure, []
    assert structure is not None
    for when, directory in (("before", source), ("after", out)):
        assert structure.parameters[when] == sum(value.numel() for value in tensors(directory).values())
        in_blocks.append(sum(p.numel() for b in decoder_blocks(reference(directory)) for p in b.state_dict().values()))
    assert structure.removed == pytest.approx(1 - in_blocks[1] / in_blocks[0], rel=1e-9)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("llama grouped", {"neurons": 0.25, "heads": 0.5}),
        ("qwen3", {"neurons": 0.5}),
        ("llama biases", {"neurons": 0.25}),
    ],
)
@pytest.mark.slow
def test_what_stays_is_fitted_to_the_inputs_that_it_gets(tmp_path: Path, case: str, options: dict[str, Any]) -> None:
    """The inputs of each matrix are those in the model of transformers with all that was dropped before it."""
    source, out = save_model(tmp_path / "model", case), tmp_path / "out"
    record = run(source, out, **options)
    small, seen = reference(out), 0
    for twin, item in twins(source, out, record):
        if seen == len(record.matrices):
            break
        seen += 1
        X = linear_inputs(twin, item.block, CALIBRATION)[item.name]
        W = matrix(twin, item.block, item.name).clone()
        kept = kept_columns(record, item, W.shape[1])
        expected = fitted(X, W, kept)
        found = matrix(small, item.block, item.name).double()
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        Y = X.double() @ W.double().T
        error = (Y - X[:, kept].double() @ expected.T).square().sum() / Y.square().sum()
        assert item.error == pytest.approx(error.item(), rel=1e-3)
        assert item.tokens == CALIBRATION.numel()
    assert seen == 3 * 2 if case == "llama grouped" else seen >= 2


def test_what_is_dropped_is_what_costs_least(tmp_path: Path) -> None:
    """A head and neurons whose outputs are 0 go, and nothing is lost by it."""
    model = random_model("llama")
    with torch.no_grad():
        weight(model, "model.layers.1.self_attn.v_proj")[8:16] = 0
        weight(model, "model.layers.1.mlp.up_proj")[torch.tensor([3, 30, 40])] = 0
        weight(model, "model.layers.0.self_attn.v_proj")[16:32] = 0
    source, out = tmp_path / "model", tmp_path / "out"
    model.save_pretrained(source)
    record = run(source, out, heads=0.5, neurons=0.1)
    structure = record.structure
    assert structure is not None
    assert structure.heads[0] == [2, 3]
    assert record.matrices[0].error < 1e-12
    assert 1 in structure.heads[1]
    assert {3, 30, 40} <= set(structure.neurons[1])
    assert [len(gone) for gone in structure.neurons] == [5] * len(structure.heads)


# Blocks


@torch.no_grad()
def divergence(dense: PreTrainedModel, other: PreTrainedModel) -> float:
    """The KL divergence of ``other`` from ``dense`` on what blocks are compared on, or of what there is instead."""
    _, samples = search.parts(CALIBRATION, 1)
    p, q = (
        model(samples, use_cache=False).logits[:, :: trial.EVERY].double().log_softmax(-1) for model in (dense, other)
    )
    return float((p.exp() * (p - q)).sum(-1).mean())


def let_through(model: PreTrainedModel, dropped: list[int]) -> PreTrainedModel:
    """``model`` where these blocks answer their inputs."""

    def hook(_: Any, args: Any, kwargs: Any, answer: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, *answer[1:]) if isinstance(answer, tuple) else hidden

    for index in dropped:
        decoder_blocks(model)[index].register_forward_hook(hook, with_kwargs=True)
    return model


_FOUR = {"num_hidden_layers": 4, "sliding_window": 6}
_TYPES = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
BLOCKS: list[tuple[str, dict[str, Any], int]] = [
    ("llama grouped", {}, 2),
    ("llama tied", {}, 1),
    ("mistral window", {"num_hidden_layers": 4}, 2),
    ("mixtral", {}, 1),
    ("qwen2 window", {}, 1),
    ("qwen3", {}, 1),
    ("qwen2_moe dense", {}, 1),
    ("qwen3_moe", {"num_hidden_layers": 4, "mlp_only_layers": [1, 2]}, 2),
    ("gemma2", {**_FOUR, "layer_types": _TYPES}, 1),
    ("gemma3_text", {**_FOUR, "layer_types": _TYPES}, 2),
    ("gemma3", {}, 1),
    ("cohere2", {**_FOUR, "layer_types": _TYPES}, 2),
    ("gpt_oss", {**_FOUR, "layer_types": _TYPES}, 1),
    ("llama4_text", {}, 1),
    ("llama4", {}, 1),
    ("phi3", {}, 1),
    ("opt", {}, 1),
    ("gpt2", {}, 1),
    ("gpt_neox", {}, 1),
    ("bloom", {}, 1),
    ("falcon new", {}, 1),
    ("deepseek_v3", {}, 1),
]


@pytest.fixture
def the_first_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever that costs: then all others get another number, and nothing is before them that could be repaired."""
    monkeypatch.setattr(search, "cheapest", lambda costs, kinds, count: list(range(count)))


@pytest.mark.parametrize(("case", "changes", "count"), some(BLOCKS, 11), ids=_name)
@pytest.mark.usefixtures("the_first_go")
@pytest.mark.slow
def test_without_its_first_blocks(tmp_path: Path, case: str, changes: dict[str, Any], count: int) -> None:
    source, out = save(tmp_path / "model", case, **changes), tmp_path / "out"
    before, dense = tensors(source), reference(source)
    record = run(source, out, blocks=count)
    structure = record.structure
    assert structure is not None
    assert structure.influence[0] == pytest.approx(divergence(dense, let_through(reference(source), [0])), rel=1e-3)
    small = reference(out)
    assert len(decoder_blocks(small)) == len(structure.influence) - count
    expected = logits(let_through(dense, list(range(count))))
    torch.testing.assert_close(logits(small), expected, rtol=1e-4, atol=1e-4)
    generate(out)
    # No tensor is another than before, and none is left over.
    old = {value.numpy().tobytes() for value in before.values()}
    assert all(value.numpy().tobytes() in old for value in tensors(out).values())
    check_parameters(source, out, record)


_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_MIXED = ["mamba", "mamba", "attention", "mamba"]
_LINEAR = {f"linear_{each}_head_dim": 8 for each in ("key", "value")}
_LINEAR |= {f"linear_num_{each}_heads": 2 for each in ("key", "value")}
#: Models with several kinds of layers, and how many of them there are.
HYBRIDS: dict[str, tuple[dict[str, Any], int]] = {
    "granitemoehybrid": ({"layer_types": _MIXED, "num_local_experts": 0, **_MAMBA}, 2),
    "bamba": ({"attn_layer_indices": [2], **_MAMBA}, 2),
    "falcon_h1": ({"mamba_d_ssm": 64, **_MAMBA}, 1),
    "lfm2": ({"layer_types": ["conv", "full_attention", "conv", "conv"], "block_auto_adjust_ff_dim": False}, 2),
    "qwen3_5_text": ({"layer_types": [*["linear_attention"] * 3, "full_attention"], "head_dim": 8, **_LINEAR}, 2),
}


def _hybrid(path: Path, kind: str) -> Path:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "shared_intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    return save_random(path, AutoConfig.for_model(kind, **{**sizes, **heads, **HYBRIDS[kind][0]}, pad_token_id=0))


@pytest.mark.parametrize("kind", HYBRIDS)
def test_one_layer_of_each_kind_stays(tmp_path: Path, kind: str) -> None:
    """Without attention, say, transformers cannot continue a text, though it can read one."""
    source, most = _hybrid(tmp_path / "model", kind), 4 - HYBRIDS[kind][1]
    record = run(source, tmp_path / "out", blocks=most)
    assert record.structure
    assert len(record.structure.blocks) == most
    prompt = torch.tensor([[3, 4, 5]])
    small: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert small.generate(prompt, max_new_tokens=4, min_new_tokens=4).shape == (1, 7)
    said = message(lambda: run(source, tmp_path / "more", blocks=most + 1), UsageError)
    assert f"from 0 to {most} can be removed" in said


def test_a_model_that_could_not_continue_a_text_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "cheapest", lambda costs, kinds, count: [2])
    source = _hybrid(tmp_path / "model", "granitemoehybrid")
    said = message(lambda: run(source, tmp_path / "out", blocks=1), UnsupportedModelError)
    assert "could not continue a text" in said
    assert not (tmp_path / "out").exists()


def test_entries_for_each_block(tmp_path: Path) -> None:
    """What configurations say of blocks, whichever go; the block that goes here is the second of four."""
    kinds = ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]
    source = save(tmp_path / "model", "qwen2 window", num_hidden_layers=4, max_window_layers=2, layer_types=kinds)
    assert "layer_types" in config(source)
    edit_json(source / "config.json", layer_types=..., sliding_window_pattern=2)  # as in older files
    quiet(source, 1)
    record = run(source, tmp_path / "out", blocks=1)
    assert record.structure is not None
    assert record.structure.blocks == [1]
    found = config(tmp_path / "out")
    assert (found["num_hidden_layers"], found["layer_types"], found["max_window_layers"]) == (3, kinds[1:], 1)
    assert "sliding_window_pattern" not in found


def test_entries_of_some_blocks_by_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers saves Gemma 4, whose blocks that see everything have wider heads."""
    kinds = ["sliding_attention", "full_attention"] * 2
    changes = {"layer_types": kinds, "hidden_size_per_layer_input": 0}
    source = save(tmp_path / "model", "gemma4_text unshared", **changes)
    edit_json(source / "config.json", per_layer_config={str(i): {"head_dim": 16} for i in (1, 3)})
    monkeypatch.setattr(search, "cheapest", lambda costs, kinds, count: [0])
    run(source, tmp_path / "out", blocks=1)
    found = config(tmp_path / "out")
    assert found["layer_types"] == kinds[1:]
    assert found["per_layer_config"] == {str(i): {"head_dim": 16} for i in (0, 2)}


def quiet(source: Path, block: int) -> None:
    """Lets a block of a LLaMA or Qwen add next to nothing, so that it is the first to go."""
    values = tensors(source)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        values[f"model.layers.{block}.{name}.weight"] *= 1e-3
    save_file(values, source / "model.safetensors", {"format": "pt"})


def test_what_the_model_has_no_use_for_goes_with_its_block(tmp_path: Path) -> None:
    """Old files have buffers that transformers computes now."""
    source, out = save_model(tmp_path / "model", "llama grouped"), tmp_path / "out"
    quiet(source, 1)
    values = tensors(source)
    for block in range(4):  # DeepSeek-V3 has a block more than its configuration says
        values[f"model.layers.{block}.self_attn.rotary_emb.inv_freq"] = torch.full((4,), float(block))
    values["something.else"] = torch.ones(2)
    save_file(values, source / "model.safetensors", {"format": "pt"})
    run(source, out, blocks=1)
    found = tensors(out)
    assert torch.equal(found["something.else"], torch.ones(2))
    buffers = {key: value[0].item() for key, value in found.items() if "inv_freq" in key}
    numbers = {0: 0, 1: 2, 3: 3}
    assert buffers == {f"model.layers.{new}.self_attn.rotary_emb.inv_freq": old for new, old in numbers.items()}


# All together


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
def test_all_three_from_shards(tmp_path: Path, dtype: torch.dtype) -> None:
    source, out = tmp_path / "model", tmp_path / "out"
    save_model(source, "llama grouped", dtype=dtype, shards=True)
    record = run(source, out, blocks=1, neurons=0.25, heads=0.5)
    assert all(value.dtype == dtype for value in tensors(out).values())
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors(out))
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors(out).values())
    for key, shard in index["weight_map"].items():
        assert key in load_file(out / shard)
        assert int.from_bytes((out / shard).read_bytes()[:8], "little") % 8 == 0  # so that numbers are aligned
    assert record.structure is not None
    dropped, kept = record.structure.blocks, kept_blocks(record)
    *_, (twin, _) = twins(source, out, record)
    torch.testing.assert_close(logits(reference(out)), logits(let_through(twin, dropped)), rtol=1e-4, atol=1e-4)
    names = ("self_attn.o_proj", "mlp.down_proj")
    assert [(item.block, item.name) for item in record.matrices] == [(block, name) for block in kept for name in names]
    generate(out)
    check_parameters(source, out, record)
    assert record == Record.from_json((out / "niwaki.json").read_text())
    said = config(out)["pruning_config"]
    assert said["method"] == "shrink"
    assert said["pattern"] == "1 of 3 blocks, 50 % of the heads of each block, 25 % of the neurons of each block"
    assert not [path for path in listing(tmp_path) if path.startswith(".")]


@pytest.mark.slow
def test_perplexity_and_files(tmp_path: Path) -> None:
    source, out = save_model_with_tokenizer(tmp_path / "model"), tmp_path / "out"
    (source / "README.md").write_text("---\nlicense: mit\n---\n# dense\n")
    options: dict[str, Any] = {"calibration": "demo", "samples": 4, "length": 32, "device": "cpu"}
    record = niwaki.shrink(source, out, **arguments(neurons=0.5, text="demo-held", text_samples=3, **options))
    for when, directory in (("before", source), ("after", out)):
        found = evaluate(directory, Measurement("demo-held", length=32, samples=3), compute="cpu")
        assert record.perplexity[when].value == pytest.approx(found.value, rel=1e-6)
    card = (out / "README.md").read_text()
    assert "license: mit" in card
    assert "50 % of the neurons of each block" in card
    assert "sparse" not in card
    assert f"{record.perplexity['after'].value:.2f}" in card
    assert (out / "README.base.md").read_text().endswith("# dense\n")
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    none = niwaki.shrink(source, tmp_path / "none", **arguments(neurons=0.5, text_samples=0, **options))
    assert none.perplexity == {}
    assert tensors(tmp_path / "none").keys() == tensors(out).keys()


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    source = save_model_with_tokenizer(tmp_path / "model", blocks=3)
    capfd.readouterr()
    told = ["--blocks", "1", "--neurons", "0.5", "--heads", "0.5"]
    monkeypatch.setattr(sys, "argv", ["niwaki", "shrink", str(source), str(tmp_path / "out"), *SMALL, *told])
    with contextlib.suppress(SystemExit):  # of typer, with 0
        cli.main()
    out, err = capfd.readouterr()
    assert err == f"shrinking {source}\n"
    assert "\x1b" not in out
    record = Record.from_json((tmp_path / "out/niwaki.json").read_text())
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    for block in kept_blocks(record):
        errors = [f"{item.error:.2g}" for item in record.matrices if item.block == block]
        assert len(errors) == 2
        assert rows[str(block)][1:] == errors
    (gone,) = set(range(3)) - set(kept_blocks(record))
    assert str(gone) not in rows
    said = "1 of 3 blocks, 50 % of the heads of each block, 50 % of the neurons of each block"
    assert " ".join(rows["removed"]) == said
    assert str(record.structure) in out
    assert f"perplexity after   {record.perplexity['after'].value:.2f}" in out
    assert out.rstrip().endswith(f"written to {tmp_path / 'out'}")
    assert record.command.startswith(f"niwaki shrink {source}")
    # And once more, over what is there.
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    out, err = capfd.readouterr()
    assert len(without_sign_of_life(err).splitlines()) == 1
    assert "is not an empty directory" in err


# What cannot be had

_STEP = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}


@pytest.mark.parametrize(
    ("case", "changes", "options", "said"),
    [
        ("mixtral", {}, {"neurons": 0.5}, "block 0 has experts"),
        ("deepseek_v3", {}, {"heads": 0.5}, "attention of block 0 is not made of q_proj"),
        ("llama biases", {}, {"heads": 0.5}, "none of its 1 groups of 4 heads that share keys and"),
        ("gpt2", {}, {"heads": 0.5}, "attention of block 0 is not made of q_proj"),
        ("phi3", {}, {"heads": 0.5}, "attention of block 0 is not made of q_proj"),
        ("bloom", {}, {"neurons": 0.5}, "no entry for their number, 128"),
        ("olmo2", {}, {"heads": 0.5}, "self_attn.q_norm.weight would be (16,) and should be (32,)"),
        ("gpt_oss", {}, {"heads": 0.5}, "self_attn.sinks would be (2,) and should be (4,)"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_layer": 3}, {"blocks": 1}, "attn.scaling would be"),
        ("qwen2_moe", {**_STEP, "decoder_sparse_step": 2}, {"blocks": 1}, "in block 1 as block 0 of 3, mlp"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("the_first_go")
@pytest.mark.slow
def test_models_that_are_refused(
    tmp_path: Path, case: str, changes: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    source = save(tmp_path / "model", case, **changes)
    before = listing(tmp_path)
    told = message(lambda: run(source, tmp_path / "out", **options), UnsupportedModelError)
    assert said in told
    assert f"({case.split()[0]})" in told
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "there is nothing to remove; give parameters, blocks, neurons, heads, experts or vocabulary"),
        ({"blocks": 3}, "blocks 3 of 3: from 0 to 2 can be removed"),
        ({"blocks": -1}, "blocks -1 of 3"),
        ({"neurons": 1.0}, "neurons is a fraction, from 0 to below 1; got 1"),
        ({"neurons": -0.1}, "neurons is a fraction"),
        ({"neurons": "25"}, "neurons is a fraction, from 0 to below 1; got 25; did you mean 0.25 (25 %)?"),
        ({"experts": 40}, "got 40; did you mean 0.4 (40 %)?"),
        ({"heads": "half"}, "heads is a fraction, such as 0.25 or 25%; got 'half'"),
        ({"heads": float("nan")}, "heads is a fraction"),
        ({"neurons": 0.995}, "neurons 0.995 of 48 would be 48; from 1 to 47 can be removed"),
        ({"neurons": 0.001}, "neurons 0.001 of 48 would be 0"),
        ({"heads": 0.2}, "heads 0.2 of 2 groups of 2 heads that share keys and values would be 0; its "
                         "configuration allows 0.5"),
        ({"heads": 0.95}, "would be 2; its configuration allows 0.5"),
        ({"neurons": 0.5, "samples": 0}, "samples must be 1 or more"),
        ({"neurons": 0.5, "calibration": random_tokens(2, 8, vocabulary=99)}, "tokens go from 0 to 63"),
    ],
)  # fmt: skip
def test_what_makes_no_sense(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    source = save_model(tmp_path / "model", "llama grouped")
    before = listing(tmp_path)
    assert said in message(lambda: run(source, tmp_path / "out", **options), UsageError)
    assert listing(tmp_path) == before


def test_numbers_of_heads_that_the_configuration_refuses(tmp_path: Path) -> None:
    """Transformers wants LLaMA's to divide the hidden size, here 32, and does not mind Mistral's."""
    source = save_model(tmp_path / "llama", "llama")
    assert message(lambda: run(source, tmp_path / "out", heads=0.25)).endswith("its configuration allows 0.5, 0.75")
    source = save(tmp_path / "mistral", "mistral", num_key_value_heads=4)
    run(source, tmp_path / "out", heads=0.25)
    assert config(tmp_path / "out")["num_attention_heads"] == 3
    generate(tmp_path / "out")


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("llama grouped", {"neurons": 0.25, "heads": 0.5, "blocks": 1}),
        ("llama grouped", {"neurons": 0.25, "effort": "fast:epochs=1"}),
        ("mixtral", {"experts": 0.25}),
        ("llama grouped", {"blocks": 1}),
    ],
)
def test_the_space_that_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, options: dict[str, Any]
) -> None:
    """The output, and until that is whole the matrices that change; what an earlier run kept of these counts."""
    source, scratch = save_model(tmp_path / "model", case), [0]
    save = Changes.save

    def saved(changes: Any, path: Path) -> str:
        digest: str = save(changes, path)
        scratch.append(sum(file.stat().st_size for file in path.parent.iterdir()))
        return digest

    monkeypatch.setattr(Changes, "save", saved)
    run(source, tmp_path / "first", **options)
    needed = MARGIN + sum(file.stat().st_size for file in (tmp_path / "first").iterdir()) + scratch[-1]
    headers = 1 << 15
    monkeypatch.setattr("niwaki.files.free_space", lambda _: needed + headers)
    run(source, tmp_path / "enough", **options)
    monkeypatch.setattr("niwaki.files.free_space", lambda _: needed - 2 * headers)
    assert "needs" in message(lambda: run(source, tmp_path / "less", **options), OutputError)


@pytest.mark.parametrize("options", [{"heads": 0.5}, {"neurons": 0.5}, {"blocks": 1}])
@pytest.mark.slow
def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any) -> None:
    source = save_model(tmp_path / "model", "llama grouped")
    before = listing(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("niwaki.checkpoints.writing.reserve", full)
        assert "no space left" in message(lambda: run(source, tmp_path / "out", **options), OutputError)
    assert listing(tmp_path) == before

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shrinking, "check_outputs", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "out", **options)
    monkeypatch.undo()
    assert run(source, tmp_path / "out", **options).resumed == [2 if "blocks" in options else 3]
    run(source, tmp_path / "whole", **options)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_an_empty_directory_will_do(tmp_path: Path) -> None:
    """Its files have the usual mode."""
    (out := tmp_path / "out").mkdir()
    run(save_model(tmp_path / "model"), out, neurons=0.5)
    assert {*SHARDS} <= {*listing(out)}
    (tmp_path / "usual").touch()
    assert len({path.stat().st_mode for path in (*out.iterdir(), tmp_path / "usual")}) == 1


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is written and checked, only the name is missing: the same command gives it that."""
    source, out, aside = save_model(tmp_path / "model"), tmp_path / "out", tmp_path / "aside"
    hidden = [tmp_path / ".out.partial", tmp_path / ".out.partial.json"]

    def kill(_: Workplace) -> None:
        aside.mkdir()
        for path in hidden:
            path.rename(aside / path.name)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Workplace, "move", kill)
        with pytest.raises(KeyboardInterrupt):
            run(source, out, neurons=0.5)
    for path in hidden:
        (aside / path.name).rename(path)
    monkeypatch.setattr(shrinking, "remove_units", None)
    for options in ({"neurons": 0.4}, {"neurons": 0.5, "heads": 0.5}):
        assert "unfinished run" in message(lambda options=options: run(source, out, **options))  # type: ignore[misc]
    record = run(source, out, neurons=0.5)
    assert not any(path.exists() for path in hidden)
    monkeypatch.undo()
    assert record.structure == run(source, tmp_path / "again", neurons=0.5).structure
    assert all((out / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in SHARDS)


@pytest.mark.slow
def test_a_model_that_answers_otherwise_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of other units have the right shapes."""
    without = UnitParameter.without

    def wrong(part: UnitParameter, value: Tensor, kept: Tensor) -> Tensor:
        return without(part, value, kept if part.dimension == 1 else kept.roll(1))

    monkeypatch.setattr(UnitParameter, "without", wrong)
    source = save_model(tmp_path / "model")
    for options in ({"heads": 0.5}, {"neurons": 0.5}):
        said = message(lambda options=options: run(source, tmp_path / "out", **options, restart=True), OutputError)  # type: ignore[misc]
        assert "hidden states differ" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("case", "options", "names"),
    [
        ("llama", {"neurons": 0.25}, ["mlp.down_proj"]),
        ("llama", {"heads": 0.5, "neurons": 0.25, "blocks": 1}, ["o_proj", "mlp.down_proj"]),
        ("mixtral", {"experts": 0.25}, ["down_proj", "w2"]),
        ("llama", {"neurons": 0.25, "effort": "fast:epochs=1:batch=24"}, [""]),
    ],
)
@pytest.mark.slow
def test_zeros_that_fits_lose(
    tmp_path: Path, case: str, options: dict[str, Any], names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Their number is in the record and on the screen; the others stay."""
    source = sparse_model(tmp_path / "model", case)
    with Display("shrinking") as display:
        record = run(source, tmp_path / "out", progress=display, **options)
    before, after = tensors(source), tensors(tmp_path / "out")
    (said,) = [note for note in record.notes if "not zero any more" in note]
    revived, zeros = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+", said)[:2])
    fitted = {key for key in after if is_pruned(case, key) and any(name in key for name in names)}
    left = {key: int((after[key] == 0).sum()) for key in after if is_pruned(case, key)}
    assert zeros - revived == sum(left[key] for key in fitted)
    share = sum(value.numel() for key, value in after.items() if key in fitted) * 0.7
    assert zeros == pytest.approx(share, rel=0.1)
    assert all(left[key] > 0.6 * after[key].numel() for key in left.keys() - fitted)
    assert "shrink before you prune" in said
    assert f"note: {said}" in capsys.readouterr().out
    assert said in Record.load(tmp_path / "out" / "niwaki.json").notes
    if [*options] == ["neurons"]:
        assert record.structure
        columns = [before[key].T for key in sorted(fitted)]
        gone = [column[numbers] for column, numbers in zip(columns, record.structure.neurons, strict=True)]
        assert zeros == sum(int((each == 0).sum()) for each in columns) - sum(int((each == 0).sum()) for each in gone)


def test_zeros_by_chance_are_not_worth_a_note(tmp_path: Path) -> None:
    source = save_model(tmp_path / "model")
    values = tensors(source)
    values["model.layers.0.mlp.down_proj.weight"][0, 0] = 0
    save_file(values, source / "model.safetensors", {"format": "pt"})
    assert not [note for note in run(source, tmp_path / "out", neurons=0.25).notes if "zero" in note]


def test_damaged_weights(tmp_path: Path) -> None:
    source = save_model(tmp_path / "model")
    values = tensors(source)
    values["model.layers.1.mlp.up_proj.weight"][3] = math.nan
    save_file(values, source / "model.safetensors", {"format": "pt"})
    before = listing(tmp_path)
    said = message(lambda: run(source, tmp_path / "out", neurons=0.5), CheckpointError)
    assert "'model.layers.1.mlp.up_proj.weight' has NaN" in said
    assert listing(tmp_path) == before


def test_fewer_blocks_of_mamba(tmp_path: Path) -> None:
    """Its configuration computes what kinds its blocks are of, and takes nothing for it."""
    torch.manual_seed(0)
    config = MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    run(tmp_path / "model", tmp_path / "out", blocks=1)
    smaller: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(smaller.backbone.layers) == 1


def test_a_configuration_that_cannot_be_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in no file that anybody has; what is at fault is the model that it would be of."""

    def refused(directory: Path, *_: object) -> None:
        raise CheckpointError(f"{directory / 'config.json'} is refused by transformers: no")

    save_model(tmp_path / "model")
    monkeypatch.setattr("niwaki.shrinking.configuration.structure", refused)
    with pytest.raises(UnsupportedModelError) as caught:
        niwaki.shrink(tmp_path / "model", tmp_path / "out", blocks=1, calibration=random_tokens(2, 16))
    assert "like this: the smaller model's config.json is refused by transformers: " in str(caught.value)
    assert str(tmp_path / "out") not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
