"""Files with other names than the model, and models that are not in the table."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig

from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import CheckpointError, UnsupportedModelError
from niwaki.models.gram_capture import InputGrams
from niwaki.models.hidden_states import same
from niwaki.models.processes import World
from niwaki.models.structure import FAMILIES
from niwaki.options import Compute
from niwaki.recipes import prune
from niwaki.records.record import Record
from support.models import (
    SIZES,
    edit_json,
    is_pruned,
    message,
    random_model,
    random_tokens,
    reference,
    save_model,
    save_random,
)
from support.runs import Untouched, raw, tensors, zeros
from support.scripts import run_script
from support.streams import losses_of, save_starved, stream_of, whole_losses

ROOT = Path(__file__).parents[2]
TOKENS = random_tokens(4, 24)


def run(model: Path, out: Path, solver: str = "sparsegpt") -> Record:
    return prune(model, out, 0.5, solver=solver, calibration=TOKENS, compute=Compute(device="cpu", dtype="float32"))


def compare_losses(directory: Path) -> Tensor:
    """The losses, which are transformers'."""
    losses = losses_of(stream_of(directory), TOKENS)
    torch.testing.assert_close(losses, whole_losses(reference(directory), TOKENS))
    return losses


def check(model: Path, out: Path, case: str) -> None:
    """Prunes; the right matrices become sparse, one by one, and nothing else is touched."""
    dense = compare_losses(model)
    record = run(model, out)
    before, after = tensors(model), tensors(out)
    assert set(before) == set(after)
    matrices = 0
    for key, old in before.items():
        if not is_pruned(case, key):
            assert raw(after[key]) == raw(old), key
            continue
        for matrix in after[key] if old.ndim == 3 else [after[key]]:
            assert zeros(matrix) == matrix.numel() // 2, key
            matrices += 1
    assert matrices == len(record.matrices) > 0
    assert record.sparsity == 0.5
    assert not torch.equal(compare_losses(out), dense)


# Names in files


@pytest.mark.parametrize("case", ["gpt2", "bloom", "opt", "opt 350m", "llama tied", "gemma2"])
@pytest.mark.slow
def test_files_saved_without_the_head(tmp_path: Path, case: str) -> None:
    model: Any = random_model(case)
    model.base_model.save_pretrained(tmp_path / "model")
    edit_json(tmp_path / "model" / "config.json", architectures=[type(model).__name__])
    keys = Checkpoint(tmp_path / "model").entries
    assert any(key.startswith(("h.0.", "layers.0.", "decoder.layers.0.")) for key in keys)
    assert not any("lm_head" in key for key in keys)
    check(tmp_path / "model", tmp_path / "out", case)


@pytest.mark.slow
def test_experts_in_many_shards(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "qwen3_moe many", shards=True)
    entries = Checkpoint(model).entries
    assert any(
        entries[f"model.layers.0.mlp.experts.{e}.up_proj.weight"].shard
        != entries[f"model.layers.0.mlp.experts.{e}.gate_proj.weight"].shard
        for e in range(12)
    )
    check(model, tmp_path / "out", "qwen3_moe")


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "deepseek_v3"])
@pytest.mark.slow
def test_experts_in_one_tensor(tmp_path: Path, case: str) -> None:
    model = save_model(tmp_path / "model", case)
    expected = compare_losses(model)
    save_file({k: v.contiguous() for k, v in random_model(case).state_dict().items()}, model / "model.safetensors")
    torch.testing.assert_close(compare_losses(model), expected)  # transformers reads both
    parts = [m for m in stream_of(model).matrices() if m.index is not None]
    assert len(parts) == 8 * (1 if case.startswith("deepseek") else 2)  # gate and up are one matrix here
    record = run(model, tmp_path / "out")
    before, after = tensors(model), tensors(tmp_path / "out")
    for key, old in before.items():
        if old.ndim == 3:
            for matrix in after[key]:
                assert zeros(matrix) == matrix.numel() // 2, key
        elif "gate.weight" in key or "norm" in key or "embed" in key:
            assert raw(after[key]) == raw(old)
    assert record.sparsity == 0.5
    run_untouched = prune(model, tmp_path / "same", 0.0, solver=Untouched(), calibration=TOKENS)
    assert run_untouched.sparsity == 0
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_one_expert_is_missing_or_of_another_shape(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "mixtral")
    values = tensors(model)
    expert = values.pop(key := "model.layers.1.block_sparse_moe.experts.2.w3.weight")
    for more, said in (
        ({}, r"has 3 tensors like .*w3.*which is made of 4"),
        ({key: expert[:-1].contiguous()}, r"experts\.2\..*has shape .* a part of \(4, 96, 32\)"),
    ):
        save_file({**values, **more}, model / "model.safetensors")
        with pytest.raises(CheckpointError, match=said):
            stream_of(model)


# Experts without tokens


@pytest.mark.parametrize("solver", ["sparsegpt", "wanda", "continuation"])
@pytest.mark.slow
def test_experts_without_tokens_are_as_sparse_as_all(tmp_path: Path, solver: str) -> None:
    model = save_starved(tmp_path / "model")
    record = run(model, tmp_path / "out", solver)
    for key, value in tensors(tmp_path / "out").items():
        if is_pruned("mixtral", key):
            assert zeros(value) == value.numel() // 2
            assert torch.isfinite(value).all()
    starved = [m for m in record.matrices if m.tokens == 0]
    assert {m.name.split(".")[-2] for m in starved} == {"3"}
    assert len(starved) == 6
    assert any(0 < m.tokens < m.shape[1] for m in record.matrices)
    # One note for each block: with hundreds of experts there would be thousands.
    notes = [note for note in record.notes if "stands in for" in note]
    assert len(notes) == 2
    for block, note in enumerate(notes):
        experts = [m for m in record.matrices if m.block == block and m.name.endswith(("w1", "w2"))]
        poor = [m for m in experts if m.tokens < m.shape[1]]
        assert len(experts) == 8
        assert note == (
            f"block {block}: {len(poor)} of 8 inputs of experts had fewer tokens than inputs (fewest: "
            "block_sparse_moe.experts.3.w1, block_sparse_moe.experts.3.w3, 0 of 32); the mean of all experts stands "
            "in for what is missing"
        )


def test_experts_with_tokens_enough_are_not_noted(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "mixtral")
    tokens = random_tokens(16, 64)
    record = prune(model, tmp_path / "out", 0.5, solver="wanda", calibration=tokens, compute="cpu")
    assert all(m.tokens >= m.shape[1] for m in record.matrices)
    assert not any("stands in for" in note for note in record.notes)


def test_experts_that_are_never_used_at_all(tmp_path: Path) -> None:
    model = stream_of(save_model(tmp_path / "model", "mixtral"))
    block = next(stream := model.stream())
    grams = InputGrams(block.matrices, dict(model.blocks[0].named_parameters()))
    attention = model.blocks[0].get_submodule("self_attn")
    rotary = (torch.ones(1, 4, 8), torch.zeros(1, 4, 8))
    grams.watch(lambda: attention(torch.randn(1, 4, 32), rotary, None))
    with pytest.raises(UnsupportedModelError, match=r"experts\.gate_up_proj is not used"):
        grams.finish(World())
    stream.close()


@pytest.mark.parametrize("case", ["llama", "gpt2", "llama4_text", "mixtral"])
@pytest.mark.slow
def test_matrices_that_are_used_as_their_transposes(tmp_path: Path, case: str) -> None:
    model = stream_of(save_model(tmp_path / "model", case))
    states = model.embed(TOKENS)
    for block in model.stream():
        wrong = [dataclasses.replace(matrix, transposed=not matrix.transposed) for matrix in block.matrices]
        grams = InputGrams(wrong, dict(model.blocks[block.index].named_parameters()))
        with pytest.raises(UnsupportedModelError, match="as the transpose of what its module suggests"):
            grams.watch(lambda block=block: block.advance(states))  # type: ignore[misc]


# Models that are not in the table


UNKNOWN: dict[str, dict[str, Any]] = {
    "gptj": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, "rotary_dim": 4},
    "stablelm": {},
    "gemma": {"head_dim": 8},
    "openai-gpt": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128},  # blocks answer with lists
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},  # filters are no experts
    "bert": {},  # an encoder with a tied bias
    "modernbert-decoder": {},  # what it calls its decoder is its head
    # Filters that are three tensors in the files.
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]}
    | dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2)
    | dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    # Blocks answer with two values.
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}
    | dict.fromkeys(("mamba_d_state", "mamba_chunk_size"), 8),
}


def save_unknown(path: Path, kind: str) -> Path:
    sizes = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2, "pad_token_id": 2, **UNKNOWN[kind]}
    return save_random(path, AutoConfig.for_model(kind, **sizes))


@pytest.mark.parametrize("kind", UNKNOWN)
@pytest.mark.slow
def test_models_that_are_understood_by_their_structure(tmp_path: Path, kind: str) -> None:
    assert kind not in FAMILIES
    model = save_unknown(tmp_path / "model", kind)
    compare_losses(model)
    record = run(model, tmp_path / "out")
    (note,) = (note for note in record.notes if "no list of what to prune" in note)
    assert f"'{kind}'" in note
    assert "2 blocks with " in note
    assert any("is an encoder" in note for note in record.notes) == (kind == "bert")
    before, after = tensors(model), tensors(tmp_path / "out")
    linear = {
        name
        for name, module in reference(model).named_modules()
        if hasattr(module, "weight") and module.weight.ndim == 2 and not isinstance(module, nn.Embedding)
    }
    for key, old in before.items():
        name = key.removesuffix(".weight")
        if not linear.isdisjoint([name, f"transformer.{name}"]) and re.search(r"\.\d+\.", name):
            assert zeros(after[key]) == old.numel() // 2, key
        else:
            assert raw(after[key]) == raw(old), key
    assert stream_of(save_model(tmp_path / "known")).notes == []


def test_a_model_without_a_list_of_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_model(tmp_path / "model")
    monkeypatch.setattr(nn.ModuleList, "__len__", lambda self: 7)
    with pytest.raises(UnsupportedModelError, match=r"no list of 2 decoder blocks .* of type 'llama'"):
        stream_of(model)


def test_quantized_models(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    edit_json(model / "config.json", quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(UnsupportedModelError, match=r"is quantized .*; prune the original"):
        stream_of(model)


@pytest.mark.parametrize("kind", ["no-such-model", None])
@pytest.mark.slow
def test_configurations_that_transformers_refuses(tmp_path: Path, kind: str | None) -> None:
    model = save_model(tmp_path / "model")
    edit_json(model / "config.json", model_type=kind or ..., architectures=...)
    said = message(lambda: stream_of(model), CheckpointError)
    assert "config.json is refused by transformers: " in said
    assert len(said) < 1000


def test_what_counts_as_the_same_argument() -> None:
    mask = torch.ones(2, 3)
    assert same((mask, [mask], {"a": (mask, None)}), (mask.clone(), [mask], {"a": (mask.clone(), None)}))
    other = mask.clone()
    other[1, 2] = 0
    thing = object()
    for a, b in (
        *((mask, other), (mask, mask[:1]), (mask, None), (None, mask), ([mask], [mask, mask])),
        *(([mask, mask], [mask, other]), ({"a": mask}, {"b": mask}), ({"a": mask}, {"a": other}), (1, 2), (1, True)),
        *(("full", "sliding"), (object(), thing)),
    ):
        assert not same(a, b)
        assert not same({"deep": ((a,),)}, {"deep": ((b,),)})
    assert same(thing, thing)


# The table


@pytest.mark.slow
def test_the_table_in_the_documentation_is_the_one_of_the_code() -> None:
    assert not run_script(ROOT / "scripts" / "models_table.py", "--check")
