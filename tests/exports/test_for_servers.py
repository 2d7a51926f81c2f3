"""Models in FP8, and in 8 bits for products with inputs of 8 bits: written, loaded by transformers, and read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import niwaki
from niwaki import Record
from niwaki.checkpoints.reading import SINGLE_NAME, Checkpoint
from niwaki.errors import CheckpointError, UnsupportedModelError, UsageError
from support.models import (
    FEW_TOKENS,
    add_small_tokenizer,
    edit_json,
    message,
    random_model,
    random_tokens,
    reference,
    save_model,
)

TOKENS = random_tokens(4, 24)
MIXTURES = ("mixtral", "deepseek_v3")
CASES = ("llama biases", "qwen3", "gemma3", *MIXTURES)


def scheme_of(path: Path) -> Any:
    """What its config.json says of matrices, as compressed-tensors understands it."""
    quantization: Any = pytest.importorskip("compressed_tensors.quantization")
    settings = json.loads((path / "config.json").read_text())["quantization_config"]
    (group,) = quantization.QuantizationConfig.model_validate(settings).config_groups.values()
    return group


def by_compressed_tensors(path: Path) -> dict[str, Tensor]:
    """All matrices, as its own code restores them."""
    compressors: Any = pytest.importorskip("compressed_tensors.compressors")
    settings = json.loads((path / "config.json").read_text())["quantization_config"]
    kinds = {"float-quantized": "Float", "int-quantized": "Int"}
    compressor = getattr(compressors, f"{kinds[settings['format']]}QuantizationCompressor")
    stored, scheme = load_file(path / SINGLE_NAME), scheme_of(path)
    return {
        key: compressor.decompress({"weight": stored[key], "weight_scale": stored[f"{key}_scale"]}, scheme)["weight"]
        for key in stored
        if f"{key}_scale" in stored
    }


@pytest.mark.parametrize("case", CASES)
def test_fp8(tmp_path: Path, case: str) -> None:
    """Each weight is the nearest number of its row's scale, which loses no more than that of the largest weight."""
    model = save_model(tmp_path / "model", case, dtype=torch.bfloat16)
    niwaki.export(model, tmp_path / "out", "fp8")
    dense, stored, restored = Checkpoint(model), load_file(tmp_path / "out" / SINGLE_NAME), {}
    restored = by_compressed_tensors(tmp_path / "out")
    assert restored
    better = 0
    for key, W in restored.items():
        right, scales = dense.read(key).double(), stored[f"{key}_scale"].double()
        assert stored[key].dtype == torch.float8_e4m3fn
        assert scales.shape == (len(right), 1)
        assert stored[f"{key}_scale"].dtype == torch.bfloat16
        nearest = (right / scales).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * scales
        found = stored[key].double() * scales
        assert (found - right).norm() <= (nearest - right).norm() * (1 + 1e-6)
        usual = (right.abs().amax(1, keepdim=True) / 448).bfloat16().double()
        usual = (right / usual).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * usual
        better += bool((found - right).norm() < (usual - right).norm())
        assert torch.allclose(W.double(), found, rtol=2**-7)
    assert better > 0.8 * len(restored)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    assert group["targets"] == ["Linear"]
    assert group["input_activations"] == {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True
    }  # fmt: skip
    assert "lm_head" in config["ignore"] or case == "gemma3"
    others = {key for key in stored if key not in restored and not key.endswith("_scale")}
    assert all(torch.equal(stored[key], dense.read(key)) for key in others)
    assert "vllm serve" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("case", "form"), [*((case, "fp8") for case in CASES), *((case, "w8a8") for case in CASES if case not in MIXTURES)]
)
@pytest.mark.slow
def test_transformers_loads_them(tmp_path: Path, case: str, form: Any) -> None:
    """Its inputs are rounded too, to 8 bits a token: that is near what all have in 16 bits."""
    pytest.importorskip("compressed_tensors")
    model = save_model(tmp_path / "model", case, dtype=torch.bfloat16)
    if form == "w8a8":
        niwaki.quantize(model, tmp_path / "int8", "int8", measurement=None)
        niwaki.export(tmp_path / "int8", tmp_path / "out", form)
    else:
        niwaki.export(model, tmp_path / "out", form)
    with torch.no_grad():
        right, found = (reference(path, torch.bfloat16)(TOKENS).logits.float() for path in (model, tmp_path / "out"))
    assert (found - right).norm() < 0.15 * right.norm()


def test_zeros_stay(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", dtype=torch.bfloat16)
    niwaki.prune(model, tmp_path / "pruned", "2:4", effort="fast", calibration=TOKENS, measurement=None)
    niwaki.export(tmp_path / "pruned", tmp_path / "out", "fp8")
    dense, found = Checkpoint(tmp_path / "pruned"), Checkpoint(tmp_path / "out")
    for key in dense.entries:
        assert torch.equal(dense.read(key) == 0, found.read(key) == 0), key


def test_w8a8(tmp_path: Path) -> None:
    """Numbers and scales are those that quantize made."""
    model = save_model(tmp_path / "model", dtype=torch.bfloat16)
    record = niwaki.run(model, tmp_path / "out", ["quantize int8", "export w8a8"], measurement=None)
    assert Record.load(tmp_path / "out" / "niwaki.json").size == record.size
    assert record.size["after"] == (tmp_path / "out" / SINGLE_NAME).stat().st_size < 0.8 * record.size["before"]
    niwaki.quantize(model, tmp_path / "int8", "int8", measurement=None)
    dense, restored = Checkpoint(tmp_path / "int8"), by_compressed_tensors(tmp_path / "out")
    assert len(restored) == 2 * 7
    for key, W in restored.items():
        assert torch.equal(W.bfloat16(), dense.read(key))
    assert load_file(tmp_path / "out" / SINGLE_NAME)["model.layers.0.mlp.up_proj.weight"].dtype == torch.int8
    assert scheme_of(tmp_path / "out").input_activations.strategy == "token"


def test_experts_that_transformers_does_not_load(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "mixtral", dtype=torch.bfloat16)
    niwaki.quantize(model, tmp_path / "int8", "int8", measurement=None)
    notes = niwaki.export(tmp_path / "int8", tmp_path / "out", "w8a8")
    assert any("no experts in this format" in note for note in notes)
    dense = Checkpoint(tmp_path / "int8")
    assert all(torch.equal(W.bfloat16(), dense.read(key)) for key, W in by_compressed_tensors(tmp_path / "out").items())


@pytest.mark.parametrize(
    ("grid", "form", "said"),
    [
        ("", "w8a8", "as in 'niwaki quantize MODEL OUT int8', or give the format fp8"),
        ("int4", "w8a8", "is on the grid int4, and w8a8 has integers of 8 bits and one scale for each row"),
        ("int8:16", "w8a8", "is on the grid int8:16, and w8a8 has"),
        ("int4", "fp8", "has weights on the grid int4, and FP8 would round them once more"),
    ],
)
def test_what_they_cannot_be_made_of(tmp_path: Path, grid: str, form: Any, said: str) -> None:
    model = save_model(tmp_path / "model", dtype=torch.bfloat16)
    if grid:
        niwaki.quantize(model, tmp_path / "grid", grid, effort="none", measurement=None)
        model = tmp_path / "grid"
    assert said in message(lambda: niwaki.export(model, tmp_path / "out", form), UsageError)
    assert not (tmp_path / "out").exists()


def of_floats(path: Path) -> dict[str, Tensor]:
    """All matrices in NVFP4 or MXFP4, as compressed-tensors restores them."""
    compressors: Any = pytest.importorskip("compressed_tensors.compressors")
    scheme, stored = scheme_of(path), load_file(path / SINGLE_NAME)
    kind = {16: "NVFP4", 32: "MXFP4"}[scheme.weights.group_size]
    restored = {}
    for key in (key.removesuffix("_packed") for key in stored if key.endswith("_packed")):
        parts = {name.replace(key, "weight"): value for name, value in stored.items() if name.startswith(f"{key}_")}
        restored[key] = getattr(compressors, f"{kind}PackedCompressor").decompress(parts, scheme)["weight"]
    return restored


def wide_model(path: Path, case: str) -> Path:
    """With rows that can be divided into groups of 32."""
    wide = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": FEW_TOKENS}
    random_model(case, dtype=torch.bfloat16, **wide).save_pretrained(path)
    return path


@pytest.mark.parametrize("case", ["llama biases", "qwen3", "mixtral"])
@pytest.mark.parametrize("grid", ["nvfp4", "mxfp4"])
def test_floats_of_four_bits(tmp_path: Path, grid: str, case: str) -> None:
    """Each number is what compressed-tensors has, and matrices that servers make one of share a scale."""
    model = wide_model(tmp_path / "model", case)
    effort: Any = {"effort": "fast", "calibration": TOKENS, "measurement": None}
    niwaki.quantize(model, tmp_path / "grid", grid, **effort)
    notes = niwaki.export(tmp_path / "grid", tmp_path / "out")
    assert any("no experts" in note for note in notes) == (case in MIXTURES and grid == "nvfp4")
    dense, stored = Checkpoint(tmp_path / "grid"), load_file(tmp_path / "out" / SINGLE_NAME)
    restored = of_floats(tmp_path / "out")
    assert len(restored) >= 14
    for key, W in restored.items():
        assert torch.equal(W.bfloat16(), dense.read(key)), key
        if grid == "nvfp4" and key.endswith(("gate_proj.weight", "w1.weight")):
            other = key.replace("gate_proj", "up_proj").replace("w1", "w3")
            assert torch.equal(stored[f"{key}_global_scale"], stored[f"{other}_global_scale"])
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["format"]
    assert said == f"{grid}-pack-quantized"
    assert (tmp_path / "out" / SINGLE_NAME).stat().st_size < 0.7 * (model / SINGLE_NAME).stat().st_size
    if case in MIXTURES:
        return
    with torch.no_grad():
        right, found = (reference(tmp_path / path, torch.bfloat16)(TOKENS).logits for path in ("grid", "out"))
    assert torch.equal(right, found)


def test_scales_that_servers_cannot_share(tmp_path: Path) -> None:
    model = wide_model(tmp_path / "model", "llama")
    weights = load_file(model / SINGLE_NAME)
    weights["model.layers.0.self_attn.k_proj.weight"] *= 2.0**-18
    save_file(weights, model / SINGLE_NAME, {"format": "pt"})
    for grid in ("nvfp4", "mxfp4"):
        niwaki.quantize(model, tmp_path / grid, grid, effort="none", measurement=None)
    said = message(lambda: niwaki.export(tmp_path / "nvfp4", tmp_path / "out"), UnsupportedModelError)
    assert "layers.0.self_attn.k_proj.weight" in said
    assert "differ by more than numbers in FP8 can; quantize to mxfp4 instead" in said
    assert not (tmp_path / "out").exists()
    niwaki.export(tmp_path / "mxfp4", tmp_path / "out")
    dense = Checkpoint(tmp_path / "mxfp4")
    assert all(torch.equal(W.bfloat16(), dense.read(key)) for key, W in of_floats(tmp_path / "out").items())


def test_where_floats_of_four_bits_do_not_go(tmp_path: Path) -> None:
    model, out = add_small_tokenizer(wide_model(tmp_path / "model", "llama")), tmp_path / "out"
    niwaki.quantize(model, tmp_path / "grid", "nvfp4", effort="none", measurement=None)
    for form, said in (
        ("packed", "has weights in nvfp4, which are for servers; 'niwaki export' writes the files for them"),
        ("gguf", "has weights in nvfp4, which a GGUF file would round once more"),
        ("fp8", "has weights on the grid nvfp4, and FP8 would round them once more"),
        ("w8a8", "has weights in nvfp4, which are for servers"),
    ):
        assert said in message(lambda form=form: niwaki.export(tmp_path / "grid", out, form))  # type: ignore[misc]
    for stages, said in (
        (["quantize nvfp4", "heal method=scales"], "the stages before it leave none that can be"),
        (["quantize int4:16", "embeddings nvfp4"], "no program has embeddings in nvfp4; take int8:64"),
        (["prune two-factors:0.5 quantize=nvfp4"], "two factors are whole numbers on a grid, and not in nvfp4"),
    ):
        asked = [*stages]
        assert said in message(lambda: niwaki.run(model, out, asked, calibration=TOKENS, measurement=None))  # noqa: B023
    assert not out.exists()


def test_experts_in_one_tensor_are_refused(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "gpt_oss", dtype=torch.bfloat16)
    said = message(lambda: niwaki.export(model, tmp_path / "out", "fp8"), UnsupportedModelError)
    assert "it is one tensor with the matrices of all experts" in said


def with_experts_in_one_tensor(path: Path, kind: str, width: int = 48) -> Path:
    """As the files of Qwen 3.5, Qwen3-VL and Gemma 4 have them; transformers saves those of the former one by one."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": width, "head_dim": 16}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": FEW_TOKENS}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "top_k_experts": 2, "enable_moe_block": True}
    sizes |= {"layer_types": ["full_attention"] * 2, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    torch.manual_seed(0)
    if seeing := kind == "qwen3_vl_moe":
        towers = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
        sizes = {"text_config": sizes, "vision_config": {**towers, "deepstack_visual_indexes": [0]}}
    config = AutoConfig.for_model(kind, **sizes)
    auto: Any = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    model.save_pretrained(path)
    stored = {key: value.contiguous() for key, value in model.state_dict().items()}
    if seeing:  # the files of which have inputs before outputs
        stored |= {key: value.mT.contiguous() for key, value in stored.items() if ".experts." in key}
    if config.tie_word_embeddings:
        stored.pop("lm_head.weight", None)
    save_file(stored, path / SINGLE_NAME, {"format": "pt"})
    return path


@pytest.mark.parametrize("kind", ["qwen3_5_moe_text", "qwen3_vl_moe", "gemma4_text"])
@pytest.mark.parametrize(
    ("grid", "form"),
    [*((grid, "compressed-tensors") for grid in ("int4:16", "nvfp4")), ("", "fp8")],
)
@torch.no_grad()
def test_experts_in_one_tensor_are_written_one_by_one(tmp_path: Path, kind: str, grid: str, form: Any) -> None:
    """Under the names that servers have for the linear layers of each."""
    model = with_experts_in_one_tensor(tmp_path / "model", kind)
    if grid:
        niwaki.quantize(model, tmp_path / "grid", grid, effort="none", measurement=None)
        model = tmp_path / "grid"
    notes = niwaki.export(model, tmp_path / "out", form)
    loads = kind == "qwen3_5_moe_text" and grid != "nvfp4"
    assert any("transformers unpacks experts" in note for note in notes) == loads
    assert any("transformers (up to 5.24) loads no experts" in note for note in notes) == (not loads)
    dense, stored = Checkpoint(model), load_file(tmp_path / "out" / SINGLE_NAME)
    if form == "fp8":
        restored, off = by_compressed_tensors(tmp_path / "out"), 0.05
    elif grid == "nvfp4":
        restored, off = of_floats(tmp_path / "out"), 0.0
    else:
        restored, off = {}, 0.0
        for key in (key.removesuffix("_packed") for key in stored if key.endswith("_packed")):
            q = ((stored[f"{key}_packed"].unsqueeze(2) >> torch.arange(0, 32, 4) & 15) - 8).flatten(1)
            assert stored[f"{key}_shape"].tolist() == list(q.shape)
            restored[key] = (
                (q.unflatten(1, (-1, 16)) * stored[f"{key}_scale"].float().unsqueeze(2)).flatten(1).bfloat16()
            )
    experts = [key for key in dense.entries if ".experts." in key]
    assert len(experts) == 4
    for key in experts:
        whole = dense.read(key).mT if kind == "qwen3_vl_moe" else dense.read(key)
        path, name = key.rsplit(".", 1)
        assert not any(other.startswith(key) for other in stored)
        for expert, W in enumerate(whole):
            layers = {"gate_proj": W[:48], "up_proj": W[48:]} if name == "gate_up_proj" else {name: W}
            for layer, of_it in layers.items():
                found = restored.pop(f"{path}.{expert}.{layer}.weight")
                assert found.shape == of_it.shape
                assert (found.float() - of_it.float()).norm() <= off * of_it.float().norm()
    assert all(key in dense.entries for key in restored)
    if loads and form == "compressed-tensors":
        right, found = (reference(path, torch.bfloat16)(TOKENS).logits for path in (model, tmp_path / "out"))
        assert torch.equal(right, found)


@pytest.mark.parametrize("grid", ["int4.5:32", "mxfp4"])
@torch.no_grad()
@pytest.mark.slow
def test_transformers_computes_the_same_with_experts_one_by_one(tmp_path: Path, grid: str) -> None:
    """Where experts of a tensor have different bits, all are stored with the most of them."""
    pytest.importorskip("compressed_tensors")
    model = with_experts_in_one_tensor(tmp_path / "model", "qwen3_5_moe_text", 32)
    stored = load_file(model / SINGLE_NAME)
    for W in (W for key, W in stored.items() if ".experts." in key):
        W[0] *= 4  # which then has more bits than the last one
        W[-1] /= 4
    save_file(stored, model / SINGLE_NAME, {"format": "pt"})
    how: dict[str, Any] = {"effort": "none"} if grid == "mxfp4" else {"effort": "fast", "calibration": TOKENS}
    niwaki.quantize(model, tmp_path / "grid", grid, measurement=None, **how)
    notes = niwaki.export(tmp_path / "grid", tmp_path / "out")
    assert any("transformers unpacks experts" in note for note in notes)
    assert any("of fewer bits take the space of more" in note for note in notes) == (grid != "mxfp4")
    right, found = (reference(path, torch.bfloat16)(TOKENS).logits for path in (tmp_path / "grid", tmp_path / "out"))
    assert torch.equal(right, found)


def test_experts_in_one_tensor_that_stay_dense_are_refused(tmp_path: Path) -> None:
    """Their block is no linear layer, which others would take for one on the grid."""
    model, sizes = tmp_path / "model", dict.fromkeys(("hidden_size", "intermediate_size", "intermediate_size_mlp"), 64)
    random_model("llama4_text", dtype=torch.bfloat16, **sizes).save_pretrained(model)
    given: dict[str, Any] = {"solver": "magnitude", "quantize": "int4:32", "calibration": TOKENS, "measurement": None}
    niwaki.prune(model, tmp_path / "grid", 0.3, blocks=(0, 1), **given)
    said = message(lambda: niwaki.export(tmp_path / "grid", tmp_path / "out"), UnsupportedModelError)
    assert "has experts in its blocks (0, 1) on a grid and others that are not" in said


def saved(path: Path, format_: str, weights: dict[str, Any], stored: dict[str, Tensor]) -> None:
    save_file(stored, path / SINGLE_NAME, {"format": "pt"})
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    edit_json(
        path / "config.json",
        quantization_config={"quant_method": "compressed-tensors", "format": format_, "config_groups": groups},
    )


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_fp8_of_others_is_a_model(tmp_path: Path, strategy: str) -> None:
    """Read as what it stands for, and pruned."""
    save_model(tmp_path / "model", dtype=torch.bfloat16)
    generator, stored, meant = torch.Generator().manual_seed(0), dict[str, Tensor](), dict[str, Tensor]()
    high, wide = {"tensor": (0, 0), "channel": (1, 0), "block": (16, 20)}[strategy]
    for key, value in load_file(tmp_path / "model" / SINGLE_NAME).items():
        stored[key] = value
        if "_proj" not in key:
            continue
        rows, columns = value.shape
        shape = (-(-rows // (high or rows)), -(-columns // (wide or columns)))
        scales = (torch.rand(shape, generator=generator) / 1000 + 1e-4).bfloat16()
        codes = (torch.randn(value.shape, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        down, across = torch.arange(rows) // (high or rows), torch.arange(columns) // (wide or columns)
        meant[key] = (codes.double() * scales.double()[down][:, across]).bfloat16()
        stored |= {key: codes, f"{key}_scale": scales.reshape(1) if strategy == "tensor" else scales}
    weights = {"num_bits": 8, "type": "float", "strategy": strategy}
    saved(
        tmp_path / "model", "float-quantized", {**weights, "block_structure": [high, wide]} if wide else weights, stored
    )
    found = Checkpoint(tmp_path / "model")
    said = {"tensor": "a scale for each matrix", "channel": "a scale for each row", "block": "blocks of 16 x 20"}
    assert found.encoded_as == f"FP8, {said[strategy]}"
    assert all(torch.equal(found.read(key), value) for key, value in meant.items())
    record = niwaki.prune(
        tmp_path / "model", tmp_path / "out", 0.5, solver="magnitude", calibration=TOKENS, measurement=None
    )
    assert abs(record.sparsity - 0.5) < 0.02
    key = next(iter(meant))
    broken = {**stored, f"{key}_scale": torch.ones(3, 7)}
    saved(tmp_path / "model", "float-quantized", weights, broken)
    assert "is FP8" in message(lambda: Checkpoint(tmp_path / "model"), CheckpointError)


def test_bytes_of_others_go_to_llama_cpp_as_they_are(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    model = tmp_path / "model"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": FEW_TOKENS}
    random_model("llama grouped", dtype=torch.float16, **sizes).save_pretrained(model)
    add_small_tokenizer(model)
    generator, stored, meant = torch.Generator().manual_seed(0), dict[str, Tensor](), dict[str, Any]()
    for key, value in load_file(model / SINGLE_NAME).items():
        stored[key] = value
        if "_proj" in key:
            codes = torch.randint(-127, 128, value.shape, generator=generator, dtype=torch.int8)
            scales = (torch.rand(len(value), 1, generator=generator) / 1000 + 1e-4).half()
            meant[key] = codes, scales
            stored |= {key: codes, f"{key}_scale": scales}
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    saved(model, "int-quantized", weights, stored)
    for key, (codes, scales) in meant.items():
        assert torch.equal(Checkpoint(model).read(key), (codes.double() * scales.double()).half())
    niwaki.export(model, tmp_path / "out.gguf", "gguf")
    (tensor,) = (each for each in gguf.GGUFReader(tmp_path / "out.gguf").tensors if each.name == "blk.1.ffn_up.weight")
    assert tensor.tensor_type.name == "Q8_0"
    codes, scales = meant["model.layers.1.mlp.up_proj.weight"]
    found = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
    assert torch.equal(found, codes.float() * scales.float())
    key = next(iter(meant))
    for wrong in (None, torch.ones(3, 1).half(), torch.ones(len(meant[key][0])).half()):
        broken = {name: value for name, value in stored.items() if name != f"{key}_scale"}
        saved(model, "int-quantized", weights, broken if wrong is None else {**broken, f"{key}_scale": wrong})
        assert "those with scales for each row are read" in message(lambda: Checkpoint(model), CheckpointError)


@pytest.mark.parametrize(
    "kind", ["BertForMaskedLM", "RobertaForMaskedLM", "DistilBertForMaskedLM", "FalconForCausalLM"]
)
def test_heads_that_are_in_no_file(tmp_path: Path, kind: str) -> None:
    """They share the weights of embeddings, and stay as they are; Falcon has nothing that looks for packed weights."""
    pytest.importorskip("compressed_tensors")
    sizes: dict[str, Any] = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "dim": 32}
    sizes |= {"hidden_size": 32, "intermediate_size": 48, "hidden_dim": 48, "n_heads": 4, "n_layers": 2}
    right = getattr(transformers, kind)(getattr(transformers, kind).config_class(**sizes)).to(torch.bfloat16).eval()
    right.save_pretrained(tmp_path / "model")
    niwaki.export(tmp_path / "model", tmp_path / "out", "fp8")
    found, loaded = getattr(transformers, kind).from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not loaded["missing_keys"]
    tokens = torch.randint(5, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        a, b = right(input_ids=tokens).logits.float(), found.eval()(input_ids=tokens).logits.float()
    assert (a - b).norm() < 0.1 * a.norm()


def mixed(path: Path) -> dict[str, Tensor]:
    """A model with its head and its first block in FP8 and the rest in bytes; what they stand for."""
    save_model(path, dtype=torch.bfloat16)
    stored, meant = dict[str, Tensor](), dict[str, Tensor]()
    for key, value in load_file(path / SINGLE_NAME).items():
        stored[key] = meant[key] = value
        if "_proj" in key or key == "lm_head.weight":
            number = "layers.1" in key
            scales = (value.float().abs().amax(1, keepdim=True) / (127 if number else 448)).bfloat16()
            codes = value.float() / scales.float()
            codes = codes.round().clamp(-127, 127).to(torch.int8) if number else codes.to(torch.float8_e4m3fn)
            meant[key] = (codes.double() * scales.double()).bfloat16()
            stored |= {key: codes, f"{key}_scale": scales}
    stored["model.layers.0.mlp.up_proj.input_scale"] = torch.ones(1)
    stored["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    saved(path, "mixed-precision", {"num_bits": 8, "type": "float"}, stored)
    return meant


def test_both_kinds_in_one_model(tmp_path: Path) -> None:
    """All are weights; scales of inputs and of caches are of no use to what is written."""
    meant = mixed(tmp_path / "model")
    found = Checkpoint(tmp_path / "model")
    assert found.entries.keys() == meant.keys()
    assert all(torch.equal(found.read(key), value) for key, value in meant.items())
    niwaki.prune(
        tmp_path / "model",
        tmp_path / "out",
        0.5,
        solver="magnitude",
        blocks=(1, 2),
        calibration=TOKENS,
        measurement=None,
    )
    made = load_file(tmp_path / "out" / SINGLE_NAME)
    assert made.keys() == meant.keys()
    assert {value.dtype for value in made.values()} == {torch.bfloat16}


def test_codes_that_nothing_says_the_scales_of(tmp_path: Path) -> None:
    mixed(tmp_path)
    key = "model.layers.0.mlp.up_proj.weight"
    stored = load_file(tmp_path / SINGLE_NAME)
    saved(tmp_path, "mixed-precision", {}, {**stored, key: stored[key].view(torch.float8_e5m2)})
    said = message(lambda: Checkpoint(tmp_path), CheckpointError)
    assert f"{key!r} is quantized (F8_E5M2), and not as other matrices" in said


@pytest.mark.parametrize("groups", [None, [], {"group_0": None}, {"FP8": ["Linear"]}, {"group_0": {"weights": "x"}}])
def test_settings_that_say_nothing(tmp_path: Path, groups: Any) -> None:
    meant = mixed(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    edit_json(tmp_path / "config.json", quantization_config={**settings, "config_groups": groups})
    assert all(torch.equal(Checkpoint(tmp_path).read(key), value) for key, value in meant.items())
