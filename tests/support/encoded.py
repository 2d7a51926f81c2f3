"""Models whose files are in FP8 or MXFP4."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from niwaki.checkpoints.reading import INDEX_NAME, SINGLE_NAME
from support.models import FEW_TOKENS, add_small_tokenizer, edit_json, random_model

#: Rows and columns that share a scale; neither divides all matrices.
BLOCK = (16, 20)


def in_fp8(
    path: Path, block: tuple[int, int] | None = BLOCK, powers: bool = False, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Saves a random DeepSeek V3 with its matrices in FP8, and scales in ``dtype``, powers of two if ``powers``.

    Returns what they stand for, computed a number at a time.
    """
    files, meant = _in_fp8(block, powers, dtype)
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    torch.manual_seed(0)  # the same state whether they were made now or before
    return dict(meant)


@functools.cache
def _in_fp8(
    block: tuple[int, int] | None, powers: bool, dtype: torch.dtype
) -> tuple[dict[str, bytes], dict[str, Tensor]]:
    with tempfile.TemporaryDirectory() as directory:
        meant = _make_fp8(Path(directory), block, powers, dtype)
        return {path.name: path.read_bytes() for path in Path(directory).iterdir()}, meant


def _make_fp8(path: Path, block: tuple[int, int] | None, powers: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    model = random_model("deepseek_v3", n_routed_experts=8)
    nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(path)
    stored, meant = {}, {}
    for key, value in load_file(path / SINGLE_NAME).items():
        stored[key] = meant[key] = value
        if "proj" not in key or value.ndim != 2:
            continue
        rows, columns = value.shape
        high, wide = block or value.shape
        scales = (torch.rand(-(-rows // high), -(-columns // wide)) / 1000).clamp(min=1e-5).to(dtype).float()
        scales = scales.log2().round().exp2() if powers else scales
        codes = (value.float() / scales.max()).clamp(-448, 448).to(torch.float8_e4m3fn)
        numbers = [
            [codes[i, j].item() * scales[i // high, j // wide].item() for j in range(columns)] for i in range(rows)
        ]
        meant[key] = torch.tensor(numbers, dtype=torch.float64).float().bfloat16()
        scales = scales.to(dtype)
        stored |= {key: codes, f"{key}_scale_inv": scales if block else scales.reshape(())}
    save_file(stored, path / SINGLE_NAME, {"format": "pt"})
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block and list(block)}
    settings |= {"scale_fmt": "ue8m0"} if powers else {}
    edit_json(path / "config.json", quantization_config=settings)
    return meant


def in_mxfp4(path: Path, **changes: Any) -> dict[str, Tensor]:
    """Saves a random gpt-oss with its experts in MXFP4; what they are for transformers."""
    model = random_model("gpt_oss", hidden_size=64, intermediate_size=96, **changes)
    nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(path)
    stored, meant = {}, {}
    generator = torch.Generator().manual_seed(0)
    for key, value in load_file(path / SINGLE_NAME).items():
        stored[key] = meant[key] = value
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = value.shape
            codes = torch.randint(256, (experts, rows, columns // 32, 16), generator=generator).to(torch.uint8)
            scales = torch.randint(110, 124, codes.shape[:-1], generator=generator).to(torch.uint8)
            meant[key] = convert_moe_packed_tensors(codes, scales)
            del stored[key]
            stored |= {f"{key}_blocks": codes, f"{key}_scales": scales}
    save_file(stored, path / SINGLE_NAME, {"format": "pt"})
    edit_json(path / "config.json", quantization_config={"quant_method": "mxfp4"})
    return meant


def split(path: Path) -> None:
    """In two files, codes and scales not always in the same one."""
    stored = load_file(path / SINGLE_NAME)
    names = {key: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, key in enumerate(sorted(stored))}
    for name in set(names.values()):
        save_file({key: stored[key] for key in stored if names[key] == name}, path / name, {"format": "pt"})
    (path / SINGLE_NAME).unlink()
    (path / INDEX_NAME).write_text(json.dumps({"weight_map": names}))


def in_integers(
    path: Path, how: str, bits: int = 4, group: int = 32, symmetric: bool = True, order: bool = False
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Saves a random LLaMA as another program quantizes it: "gptq", "gptq_v2", "awq" or "compressed-tensors".

    Returns the whole numbers q (out, in), the scales (out, groups) and the zeros (out, groups) of each matrix. With
    ``order`` the inputs of a group are not beside each other.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": FEW_TOKENS}
    random_model("llama grouped", dtype=torch.float16, **sizes).save_pretrained(path)
    add_small_tokenizer(path)
    stored, meant = {}, {}
    generator = torch.Generator().manual_seed(0)
    for key, value in load_file(path / SINGLE_NAME).items():
        name = key.removesuffix(".weight")
        if not name.endswith("_proj"):
            stored[key] = value
            continue
        rows, columns = value.shape
        groups, top = columns // group, 1 << bits
        q = torch.randint(top, (rows, columns), generator=generator)
        z = torch.randint(1, top, (rows, groups), generator=generator) if not symmetric else None
        z = torch.full((rows, groups), top // 2) if z is None else z
        s = (torch.rand(rows, groups, generator=generator) / 100 + 0.001).half()
        index = torch.arange(columns) // group
        if order:
            index = index[torch.randperm(columns, generator=generator)]
        meant[key] = q, s, z
        stored |= _parts(how, name, q, s, z, index, bits, symmetric)
    save_file({key: value.contiguous() for key, value in stored.items()}, path / SINGLE_NAME, {"format": "pt"})
    method = how.removesuffix("_v2")
    settings: dict[str, Any] = {"quant_method": method, "bits": bits, "group_size": group, "sym": symmetric}
    if method == "gptq":
        settings |= {"checkpoint_format": how, "desc_act": order}
    if method == "compressed-tensors":
        weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
        groups_of_it = {"group_0": {"targets": ["Linear"], "weights": weights}}
        settings = {"quant_method": method, "format": "pack-quantized", "config_groups": groups_of_it}
        settings |= {"quantization_status": "compressed", "ignore": ["lm_head"]}
    edit_json(path / "config.json", quantization_config=settings)
    return meant


def dequantized(q: Tensor, s: Tensor, z: Tensor, index: Tensor | None = None) -> Tensor:
    """What they stand for, in float16."""
    index = torch.arange(q.shape[1]) // (q.shape[1] // s.shape[1]) if index is None else index
    return ((q - z[:, index]).double() * s[:, index].double()).half()


def _parts(
    how: str, name: str, q: Tensor, s: Tensor, z: Tensor, index: Tensor, bits: int, symmetric: bool
) -> dict[str, Tensor]:
    if how == "compressed-tensors":
        parts = {"weight_packed": in_words(q, bits), "weight_scale": s, "weight_shape": torch.tensor(q.shape)}
        if not symmetric:
            parts["weight_zero_point"] = in_words(z.T, bits).T
    elif how == "awq":
        places = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
        q, z = (each.T.unflatten(1, (-1, 8))[:, :, places].flatten(1) for each in (q, z))
        parts = {"qweight": in_words(q, bits), "scales": s.T, "qzeros": in_words(z, bits)}
    else:
        less = 1 if how == "gptq" else 0
        parts = {"qweight": in_words(q, bits).T, "scales": s.T, "qzeros": in_words(z.T - less, bits)}
        parts["g_idx"] = index.int()
    return {f"{name}.{part}": value for part, value in parts.items()}


def in_words(numbers: Tensor, bits: int) -> Tensor:
    """(rows, words) int32: whole numbers, bit after bit, by Python's own integers."""
    rows = []
    for row in numbers.tolist():
        whole = sum(number << (bits * i) for i, number in enumerate(row))
        count = -(-len(row) * bits // 32)
        rows.append([(whole >> (32 * i)) & 0xFFFFFFFF for i in range(count)])
    words = torch.tensor(rows)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).int()
