"""Weights on a grid keep their whole numbers and scales in a file for llama.cpp."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import niwaki
from niwaki import Measurement
from niwaki.choices import ExportFormat
from niwaki.errors import CheckpointError, UnsupportedModelError
from niwaki.exports.gguf_blocks import bytes_of, bytes_of_whole_numbers
from niwaki.layer.block_types import BLOCK_TYPES, BlockGrid
from support.healing import TOKENS
from support.models import FEW_TOKENS, add_small_tokenizer, format_of, message, random_model, random_tokens

gguf: Any = pytest.importorskip("gguf")


def saved(path: Path, case: str = "llama grouped", **changes: Any) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 16}
    random_model(case, dtype=torch.bfloat16, vocab_size=FEW_TOKENS, **sizes, **changes).save_pretrained(path)
    return add_small_tokenizer(path)


def on_grid(path: Path, grid: str, case: str = "llama grouped", **options: Any) -> Path:
    """A directory with a random model on ``grid``."""
    out = path / "on-grid"
    niwaki.quantize(saved(path / "dense", case), out, grid, effort="none", measurement=None, compute="cpu", **options)
    return out


def values(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    """By name, what the package gguf reads: float32."""
    tensors = gguf.GGUFReader(file).tensors
    return {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in tensors}


def in_bfloat16(file: Path) -> dict[str, Tensor]:
    """The same in the dtype of the models here: whole numbers times scales are in a file in full."""
    return {name: torch.from_numpy(value.copy()).bfloat16() for name, value in values(file).items()}


def kinds(file: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}


def nearest(W: Tensor) -> np.ndarray[Any, Any]:
    """As the package rounds it to Q4_0."""
    return gguf.quants.quantize(W.float().numpy(), gguf.GGMLQuantizationType.Q4_0)  # type: ignore[no-any-return]


def turned(W: Tensor, heads: int) -> Tensor:
    """The rows of queries or keys in the order that llama.cpp has for LLaMA: halves of a head become neighbours."""
    rows = [head * (len(W) // heads) + i for head in range(heads) for i in order(len(W) // heads)]
    return W[rows]


def order(width: int) -> list[int]:
    return [half * (width // 2) + i for i in range(width // 2) for half in (0, 1)]


def trained(
    path: Path, dtype: torch.dtype = torch.bfloat16, case: str = "llama grouped", which: str = "_proj.weight"
) -> tuple[Path, dict[str, Tensor]]:
    """A model whose matrices are numbers of Q4_0, in ``dtype``, which nothing says; and its tensors."""
    stored = {key: W.to(dtype) for key, W in load_file(saved(path, case) / "model.safetensors").items()}
    for key, W in stored.items():
        if which in key and W.ndim == 2:
            exact = gguf.quants.dequantize(nearest(W), gguf.GGMLQuantizationType.Q4_0)
            stored[key] = torch.from_numpy(exact).to(dtype)
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    return path, stored


@pytest.mark.parametrize(
    ("grid", "effort", "kind"),
    [
        ("q4_0", "none", "Q4_0"),
        *((grid, "fast", grid.upper()) for grid in ("q4_0", "q5_0", "q8_0")),
        ("q6.1", "fast", "Q4_0"),
    ],
)
def test_weights_that_were_trained_with_it_stay(tmp_path: Path, grid: str, effort: str, kind: str) -> None:
    """In each type that has all of its numbers, and where types are chosen."""
    path, stored = trained(tmp_path / "model")
    options: dict[str, Any] = {"calibration": TOKENS, "measurement": None, "compute": "cpu"}
    niwaki.quantize(path, tmp_path / "out", grid, effort=effort, **options)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[key], W) for key, W in stored.items())
    niwaki.export(tmp_path / "out", tmp_path / "out.gguf", "gguf")
    assert {each for name, each in kinds(tmp_path / "out.gguf").items() if "ffn_" in name and "norm" not in name} == {
        kind
    }
    written = in_bfloat16(tmp_path / "out.gguf")["blk.1.ffn_up.weight"]
    assert torch.equal(written, stored["model.layers.1.mlp.up_proj.weight"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_weights_that_were_trained_with_it_stay_in_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    """What is rounded to a narrower dtype than it is stored in is rounded again, as other weights are."""
    path, stored = trained(tmp_path / "model", dtype)
    options: dict[str, Any] = {"effort": "none", "measurement": None, "compute": "cpu"}
    niwaki.quantize(path, tmp_path / "out", "q4_0", **options)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[key], W) for key, W in stored.items())
    rounded = {key: W.bfloat16().to(dtype) for key, W in stored.items()}
    save_file(rounded, path / "model.safetensors", {"format": "pt"})
    niwaki.quantize(path, tmp_path / "again", "q4_0", **options)
    niwaki.export(tmp_path / "again", tmp_path / "out.gguf", "gguf")
    assert "Q4_0" in kinds(tmp_path / "out.gguf").values()


@pytest.mark.slow
def test_experts_of_which_some_were_trained_with_it_have_one_type(tmp_path: Path) -> None:
    path, _ = trained(tmp_path / "model", case="mixtral", which=".experts.2.")
    options: dict[str, Any] = {"calibration": TOKENS, "effort": "fast", "measurement": None, "compute": "cpu"}
    niwaki.quantize(path, tmp_path / "out", "q4.6", **options)
    notes = niwaki.export(tmp_path / "out", tmp_path / "out.gguf", "gguf")
    assert not any("rounded to the nearest" in note for note in notes)


def test_embeddings_that_were_trained_with_it_are_not_counted_among_matrices(tmp_path: Path) -> None:
    path, _ = trained(tmp_path / "model", which="weight")
    notes = niwaki.export(path, tmp_path / "out.gguf", "gguf-q4_0")
    assert any("21 matrices of 21 are numbers of Q4_0 already" in note for note in notes)


def test_weights_that_are_too_large_are_refused_on_it_too(tmp_path: Path) -> None:
    path, stored = trained(tmp_path / "model")
    stored["model.layers.0.mlp.up_proj.weight"] *= 2.0**19
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    for form in ("gguf-q4_0", "gguf-q8_0"):
        said = message(lambda form=form: niwaki.export(path, tmp_path / "out.gguf", form), UnsupportedModelError)  # type: ignore[misc]
        assert "mlp.up_proj.weight' has a weight of" in said


def test_weights_that_were_trained_with_it_keep_their_numbers(tmp_path: Path) -> None:
    """They are in bfloat16, and nothing says what they are."""
    path, stored = trained(tmp_path / "model")
    assert all(summary.is_q4_0 for summary in niwaki.inspect(path))
    notes = niwaki.export(path, tmp_path / "out.gguf", "gguf-q4_0")
    assert any("21 matrices of 21 are numbers of Q4_0 already" in note for note in notes)
    niwaki.export(path, tmp_path / "8.gguf", "gguf-q8_0")
    of_8 = in_bfloat16(tmp_path / "8.gguf")
    assert torch.equal(of_8["blk.1.ffn_up.weight"], stored["model.layers.1.mlp.up_proj.weight"])
    found = in_bfloat16(tmp_path / "out.gguf")
    for block in range(3):
        for name, theirs in {
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
            "self_attn.v_proj": "attn_v",
        }.items():
            assert torch.equal(found[f"blk.{block}.{theirs}.weight"], stored[f"model.layers.{block}.{name}.weight"])
    last = stored["model.layers.1.mlp.up_proj.weight"][-1]
    last[-1] = 0.57 * last[-32:].abs().max()
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    assert any("20 matrices of 21" in note for note in niwaki.export(path, tmp_path / "other.gguf", "gguf-q4_0"))


@pytest.mark.parametrize(("kind", "lowest", "highest"), [("Q8_0", -128, 127), ("Q5_0", -16, 15), ("Q4_0", -8, 7)])
@pytest.mark.parametrize("groups", [1, 3, 6])
def test_the_package_reads_the_same_numbers(kind: str, lowest: int, highest: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(groups)
    codes = torch.randint(lowest, highest + 1, (5, 192), generator=generator)
    scales = torch.rand(5, groups, generator=generator).half()
    read = gguf.quants.dequantize(bytes_of_whole_numbers(codes.float(), scales, kind), gguf.GGMLQuantizationType[kind])
    expected = codes.double().unflatten(1, (groups, -1)) * scales.double().unsqueeze(2)
    np.testing.assert_array_equal(read, expected.flatten(1).float().numpy())


@pytest.mark.parametrize(
    ("grid", "kind"),
    [("int4:32", "Q4_0"), ("int3:64", "Q4_0"), ("int8:32", "Q8_0"), ("int8", "Q8_0"), ("int4:64", "Q8_0")],
)
def test_files_have_the_weights_of_the_grid(tmp_path: Path, grid: str, kind: Any) -> None:
    source = on_grid(tmp_path, grid, embeddings="int8:64")
    assert niwaki.export(source, tmp_path / "model.gguf", format_of(kind)) == []
    read, weights = in_bfloat16(tmp_path / "model.gguf"), load_file(source / "model.safetensors")
    heads = {"blk.1.attn_q.weight": 4, "blk.1.attn_k.weight": 2}
    for name, key in {
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "blk.1.attn_q.weight": "model.layers.1.self_attn.q_proj.weight",
        "blk.1.attn_k.weight": "model.layers.1.self_attn.k_proj.weight",
        "blk.1.attn_v.weight": "model.layers.1.self_attn.v_proj.weight",
        "token_embd.weight": "model.embed_tokens.weight",
        "output.weight": "lm_head.weight",
    }.items():
        W = turned(weights[key], heads[name]) if name in heads else weights[key]
        assert torch.equal(read[name], W), name


@pytest.mark.parametrize(("grid", "kind"), [("int4:32", "Q4_0"), ("int8:64", "Q8_0")])
def test_heads_of_linear_attention_change_places_with_their_scales(tmp_path: Path, grid: str, kind: Any) -> None:
    """In rows and in columns, as they do in a file of numbers without groups."""
    wide = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    source, out = saved(tmp_path / "dense", "qwen3_5_text", **wide), tmp_path / "on-grid"
    niwaki.quantize(source, out, grid, effort="none", measurement=None, compute="cpu")
    niwaki.export(out, tmp_path / "plain.gguf", "gguf-f16")
    assert niwaki.export(out, tmp_path / "model.gguf", format_of(kind)) == []
    read, plain = in_bfloat16(tmp_path / "model.gguf"), in_bfloat16(tmp_path / "plain.gguf")
    for name in ("attn_qkv.weight", "attn_gate.weight", "ssm_alpha.weight", "ssm_out.weight"):
        assert torch.equal(read[f"blk.0.{name}"], plain[f"blk.0.{name}"]), name


def test_five_bits_stay_five(tmp_path: Path) -> None:
    source, heldout = on_grid(tmp_path, "int5:32", embeddings="int8:32"), random_tokens(4, 24, seed=1)
    (note,) = niwaki.export(source, tmp_path / "model.gguf", format_of("Q4_0"))
    assert note == "matrices with a type of their own: 21 in Q5_0"
    assert "Q4_0" not in kinds(tmp_path / "model.gguf").values()
    before, after = (niwaki.evaluate(path, Measurement(heldout)) for path in (source, tmp_path / "model.gguf"))
    assert after.above(before).nats == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("file", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize(
    ("grid", "kind"),
    [("int4:32", "Q4_0"), ("int5:32", "Q5_0"), ("int3:64", "Q4_0"), ("int6:32", "Q8_0"), ("int4:16", "Q8_0")],
)
def test_embeddings_and_head_have_the_bits_of_their_grid(tmp_path: Path, grid: str, kind: str, file: Any) -> None:
    source = on_grid(tmp_path, "int8:32" if file == "Q8_0" else "int4:32", embeddings=grid)
    notes = niwaki.export(source, tmp_path / "model.gguf", format_of(file))
    ends = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
    expected = [] if kind == "Q8_0" else [f"{name} is in {kind}" for name in sorted(ends)]
    if grid == "int4:16":  # smaller groups than those of the file
        (note,) = notes
        assert "the grid int4:16 are rounded to the nearest of Q8_0" in note
    else:
        assert sorted(notes) == expected
    stored = kinds(tmp_path / "model.gguf")
    read, weights = in_bfloat16(tmp_path / "model.gguf"), load_file(source / "model.safetensors")
    for name, key in ends.items():
        assert stored[name] == kind
        assert grid == "int4:16" or torch.equal(read[name], weights[key])


def test_five_bits_in_other_groups_are_rounded_to_five(tmp_path: Path) -> None:
    notes = niwaki.export(on_grid(tmp_path, "int5:16"), tmp_path / "model.gguf", format_of("Q4_0"))
    assert kinds(tmp_path / "model.gguf")["blk.0.ffn_down.weight"] == "Q5_0"
    assert any("weights on the grid int5:16 are rounded to the nearest of Q5_0" in note for note in notes)


def test_matrices_of_mixed_bits_have_theirs(tmp_path: Path) -> None:
    options: dict[str, Any] = {"calibration": TOKENS, "effort": "fast", "measurement": None, "compute": "cpu"}
    source = tmp_path / "on-grid"
    niwaki.quantize(saved(tmp_path / "dense"), source, "int5.5:32", embeddings="int8:32", **options)
    notes = niwaki.export(source, tmp_path / "model.gguf", format_of("Q4_0"))
    stored = kinds(tmp_path / "model.gguf")
    in_blocks = [kind for name, kind in stored.items() if "attn_" in name or "ffn_" in name if kind != "F32"]
    assert {*in_blocks} == {"Q4_0", "Q5_0", "Q8_0"}
    counts = {kind: in_blocks.count(kind) for kind in ("Q5_0", "Q8_0")}
    most = sorted(counts, key=lambda kind: -counts[kind])
    assert notes == ["matrices with a type of their own: " + ", ".join(f"{counts[kind]} in {kind}" for kind in most)]
    read, weights = in_bfloat16(tmp_path / "model.gguf"), load_file(source / "model.safetensors")
    for block in range(2):
        for name, key in {"ffn_down": "mlp.down_proj", "ffn_up": "mlp.up_proj", "attn_v": "self_attn.v_proj"}.items():
            assert torch.equal(read[f"blk.{block}.{name}.weight"], weights[f"model.layers.{block}.{key}.weight"])


@pytest.mark.parametrize(
    ("case", "expert"),
    [
        ("qwen3_moe", lambda weights, i: weights[f"mlp.experts.{i}.up_proj.weight"]),
        ("mixtral", lambda weights, i: weights[f"block_sparse_moe.experts.{i}.w3.weight"]),
        ("granitemoe", lambda weights, i: weights["block_sparse_moe.input_linear.weight"][i, 128:]),
        ("gpt_oss", lambda weights, i: weights["mlp.experts.gate_up_proj"][i].T[1::2]),
    ],
)
@pytest.mark.slow
def test_experts_have_theirs(tmp_path: Path, case: str, expert: Any) -> None:
    """One by one or in one tensor, in which gate and up are one after the other or in turns."""
    source = on_grid(tmp_path, "int4:32", case, calibration=TOKENS)
    niwaki.export(source, tmp_path / "model.gguf", "gguf-q4_0")
    read, weights = in_bfloat16(tmp_path / "model.gguf"), load_file(source / "model.safetensors")
    block = {key.removeprefix("model.layers.0."): value for key, value in weights.items()}
    for i, value in enumerate(read["blk.0.ffn_up_exps.weight"]):
        assert torch.equal(value, expert(block, i))


@pytest.mark.slow
def test_norms_of_gemma_are_those_of_llama_cpp(tmp_path: Path) -> None:
    source = on_grid(tmp_path, "int8:32", "gemma3_text")
    assert niwaki.export(source, tmp_path / "model.gguf", "gguf-q8_0") == []
    read, weights = values(tmp_path / "model.gguf"), load_file(source / "model.safetensors")
    rows = {"attn_k": "self_attn.k_proj", "attn_k_norm": "self_attn.k_norm", "ffn_norm": "pre_feedforward_layernorm"}
    for name, key in rows.items():
        W = weights[f"model.layers.1.{key}.weight"]
        written = torch.from_numpy(read[f"blk.1.{name}.weight"].copy())
        assert torch.equal(written - 1, W.float()) if "norm" in name else torch.equal(written.bfloat16(), W)


def test_what_is_rounded_is_said(tmp_path: Path) -> None:
    """Other grids, no grid, and weights that have left theirs."""
    source = on_grid(tmp_path, "int8:32")
    (said,) = niwaki.export(source, tmp_path / "8.gguf", "gguf-q4_0")
    assert said == (
        "weights on the grid int8:32 are rounded to the nearest of Q4_0, which does not have its numbers; quantize "
        "onto int4:32 for it"
    )
    (one,) = [each for each in gguf.GGUFReader(tmp_path / "8.gguf").tensors if each.name == "blk.0.ffn_up.weight"]
    weights = load_file(source / "model.safetensors")
    assert np.array_equal(one.data, nearest(weights["model.layers.0.mlp.up_proj.weight"]))
    (said,) = niwaki.export(tmp_path / "dense", tmp_path / "dense.gguf", "gguf-q4_0")
    assert said.startswith("weights are rounded to the nearest of Q4_0; the stage 'quantize int4:32' before")
    assert niwaki.export(tmp_path / "dense", tmp_path / "d8.gguf", "gguf-q8_0") == []
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.01
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    (said,) = niwaki.export(source, tmp_path / "left.gguf", "gguf-q8_0")
    assert said == (
        "1 tensor, such as 'model.layers.1.mlp.up_proj.weight', has weights that are not on their grid int8:32 any "
        "more; they are rounded to the nearest of Q8_0"
    )


@pytest.mark.parametrize("lost", ["file", "tensor", "shape", "values"])
def test_scales_that_cannot_be(tmp_path: Path, lost: str) -> None:
    source, key = on_grid(tmp_path, "int4:32"), "model.layers.0.mlp.up_proj.weight_scale"
    file = source / "quantization" / "scales.safetensors"
    scales = load_file(file)
    if lost == "file":
        file.unlink()
    else:
        scales[key] = {"shape": scales[key][:1].clone(), "values": 0 * scales[key]}.get(lost, scales[key])
        save_file({name: value for name, value in scales.items() if lost != "tensor" or name != key}, file)
    assert str(file) in message(lambda: niwaki.export(source, tmp_path / "model.gguf", "gguf-q4_0"), CheckpointError)
    assert not (tmp_path / "model.gguf").exists()
    niwaki.export(source, tmp_path / "model.gguf", "gguf-f16")  # which needs none


def test_some_blocks(tmp_path: Path) -> None:
    """Those that are on no grid are rounded."""
    out = tmp_path / "some"
    given: dict[str, Any] = {"calibration": TOKENS, "effort": "fast", "measurement": None, "compute": "cpu"}
    niwaki.prune(saved(tmp_path / "dense"), out, 0.0, quantize="int4:32", blocks=(1, 2), **given)
    (said,) = niwaki.export(out, tmp_path / "model.gguf", "gguf-q4_0")
    assert said == (
        "14 of 21 matrices, such as 'model.layers.0.self_attn.q_proj.weight', are on no grid, and are rounded to the "
        "nearest of Q4_0"
    )
    read, weights = values(tmp_path / "model.gguf"), load_file(out / "model.safetensors")
    W = [weights[f"model.layers.{block}.mlp.up_proj.weight"] for block in (0, 1)]
    assert torch.equal(torch.from_numpy(read["blk.1.ffn_up.weight"]).bfloat16(), W[1])
    rounded = gguf.quants.dequantize(nearest(W[0]), gguf.GGMLQuantizationType.Q4_0)
    assert np.array_equal(read["blk.0.ffn_up.weight"], rounded)


# llama.cpp's own types


def wide(path: Path) -> Path:
    """A model with rows of 256 and of 96."""
    sizes = {"hidden_size": 96, "intermediate_size": 256, "head_dim": 24}
    random_model("llama grouped", dtype=torch.bfloat16, vocab_size=FEW_TOKENS, **sizes).save_pretrained(path)
    return add_small_tokenizer(path)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_the_package_reads_the_numbers_of_each_type(name: str) -> None:
    grid, W = BlockGrid(BLOCK_TYPES[name].bits, name), torch.randn(6, 512, generator=torch.Generator().manual_seed(1))
    W[1], W[2], W[3] = 0.0, W[2].abs(), W[3] * 1e-4
    scales = grid.scales(W, torch.ones(512), torch.float32)
    stored = bytes_of(grid.codes(W, scales), scales.half())
    assert stored.shape == (6, int(512 * BLOCK_TYPES[name].bits / 8))
    read = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(read, grid.project(W, scales, torch.float32).numpy())


def test_each_matrix_is_written_in_its_type(tmp_path: Path) -> None:
    source = tmp_path / "out"
    options: Any = {"calibration": TOKENS, "measurement": None, "compute": "cpu"}
    record = niwaki.quantize(wide(tmp_path / "dense"), source, "q4.9", embeddings="q5_0", effort="fast", **options)
    assert any("bits a weight, by what rounding each matrix is foreseen to cost" in note for note in record.notes)
    notes = niwaki.export(source, tmp_path / "model.gguf", "gguf")
    found, read, weights = (
        kinds(tmp_path / "model.gguf"),
        values(tmp_path / "model.gguf"),
        load_file(source / "model.safetensors"),
    )
    matrices = {name: kind for name, kind in found.items() if name.startswith("blk.") and kind != "F32"}
    assert len({*matrices.values()}) > 2
    for kind in {*matrices.values()}:
        assert f"{[*matrices.values()].count(kind)} in {kind}" in next(note for note in notes if "of their own" in note)
    sizes = {name: read[name].size for name in matrices}
    assert sum(sizes[name] * BLOCK_TYPES[kind].bits for name, kind in matrices.items()) <= 4.9 * sum(sizes.values())
    assert (found["token_embd.weight"], found["output.weight"]) == ("Q5_0", "Q5_0")
    for name, key in {
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "blk.1.ffn_up.weight": "model.layers.1.mlp.up_proj.weight",
        "output.weight": "lm_head.weight",
    }.items():
        assert torch.equal(torch.from_numpy(read[name]).bfloat16(), weights[key]), name
    again = niwaki.quantize(tmp_path / "dense", tmp_path / "again", "q4.9", embeddings="q5_0", effort="fast", **options)
    assert again.quantization == "q4.9"
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss"])
def test_experts_of_a_block_have_the_same_type(tmp_path: Path, case: str) -> None:
    """Each a tensor, or all in one: the file has one tensor."""
    options: Any = {"calibration": TOKENS, "effort": "fast", "measurement": None, "compute": "cpu"}
    niwaki.quantize(saved(tmp_path / "dense", case), tmp_path / "out", "q5.3", **options)
    notes = niwaki.export(tmp_path / "out", tmp_path / "model.gguf", "gguf")
    assert not any("nearest" in note for note in notes)
    assert {kind for name, kind in kinds(tmp_path / "model.gguf").items() if "_exps.weight" in name} <= {*BLOCK_TYPES}


def test_zeros_of_a_model_become_numbers_of_its_types(tmp_path: Path) -> None:
    """Those of a table have no 0, so that nothing could keep them, also while blocks are fitted."""
    tensors = load_file(wide(tmp_path / "dense") / "model.safetensors")
    for key, W in tensors.items():
        if "proj" in key:
            W.view(-1)[::7] = 0.0
    save_file(tensors, tmp_path / "dense" / "model.safetensors", {"format": "pt"})
    options: Any = {"calibration": TOKENS, "effort": "fast:epochs=1", "measurement": None, "compute": "cpu"}
    record = niwaki.quantize(tmp_path / "dense", tmp_path / "out", "iq4_nl", **options)
    assert record.sparsity == 0
    assert niwaki.export(tmp_path / "out", tmp_path / "model.gguf", "gguf") == [
        "matrices with a type of their own: 21 in IQ4_NL"
    ]


def test_matrices_that_left_their_type_are_rounded_to_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    niwaki.quantize(
        wide(tmp_path / "dense"), out, "q4.5", calibration=TOKENS, effort="fast", measurement=None, compute="cpu"
    )
    tensors = load_file(out / "model.safetensors")
    key = "model.layers.1.mlp.down_proj.weight"
    tensors[key] *= 1.01
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    notes = niwaki.export(out, tmp_path / "model.gguf", "gguf")
    assert any(note.startswith(f"1 tensor, such as '{key}', has weights that are not on their grid") for note in notes)
    assert kinds(tmp_path / "model.gguf")["blk.1.ffn_down.weight"] in ("IQ4_XS", "Q4_K")
    read, W = torch.from_numpy(values(tmp_path / "model.gguf")["blk.1.ffn_down.weight"]), tensors[key].float()
    assert 0 < float((read - W).norm() / W.norm()) < 0.1


def test_what_has_a_type_is_for_llama_cpp_alone(tmp_path: Path) -> None:
    out, dense = tmp_path / "out", wide(tmp_path / "dense")
    options: Any = {"calibration": TOKENS, "effort": "fast", "measurement": None, "compute": "cpu"}
    niwaki.quantize(dense, out, "iq4_nl", **options)
    forms: tuple[ExportFormat, ...] = ("packed", "compressed-tensors")
    for form in forms:
        said = message(partial(niwaki.export, out, tmp_path / "other", form))
        assert said.endswith(
            "has weights in iq4_nl, a type of llama.cpp's; 'niwaki export --format gguf' writes the file for it"
        )
    assert message(lambda: niwaki.prune(dense, tmp_path / "p", 0.5, quantize="iq4_nl", **options)).startswith(
        "iq4_nl has no zeros to keep;"
    )
    assert message(
        lambda: niwaki.prune(dense, tmp_path / "p", "two-factors:0.5", quantize="q8_0", **options)
    ).startswith("two factors are whole numbers on a grid, and not in q8_0")
    assert message(lambda: niwaki.quantize(dense, tmp_path / "p", "q4_k", **options)).startswith(
        "96 inputs cannot be divided into the blocks of 256"
    )
    assert not (tmp_path / "p").exists()
