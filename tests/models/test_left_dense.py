"""What is not pruned is accounted for: routers stay, and a run that would leave much of a model dense says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, __version__

import niwaki
from niwaki.errors import UnsupportedModelError
from niwaki.evaluation.inspect import opened
from niwaki.models.layout import Matrix
from niwaki.models.streamed import coverage, left_dense
from niwaki.models.structure import Parts, Stack
from niwaki.records.record import Record
from support.models import SIZES, message, random_tokens, save_model
from support.runs import tensors

SMALL = {**SIZES, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
QUICK: dict[str, Any] = {"calibration": random_tokens(8, 16), "measurement": None, "compute": "cpu"}


def save(directory: Path, kind: str, **values: Any) -> Path:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values)).save_pretrained(directory)
    return directory


def prune(model: Path, out: Path, **changes: Any) -> Record:
    return niwaki.prune(model, out, 0.5, solver="magnitude", **QUICK, **changes)


@pytest.mark.parametrize(
    ("kind", "values", "reasons"),
    [
        (
            "jetmoe",
            {**SMALL, "kv_channels": 16, "num_local_experts": 4},
            {"mlp.router.layer": "router", "self_attention.experts.router.layer": "router"},
        ),
        (
            "hunyuan_v1_moe",
            {**SMALL, "num_experts": 4, "moe_topk": 2, "head_dim": 16, "rope_parameters": {"rope_theta": 1e4}},
            {"mlp.gate.wg": "router"},
        ),
        (
            "deepseek_v32",
            {**SMALL, "num_key_value_heads": 2, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8}
            | {"qk_nope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
            | {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
            | {"index_topk": 8, "index_head_dim": 8, "index_n_heads": 2},
            {f"self_attn.indexer.{name}": "indexer" for name in ("wq_b", "wk", "weights_proj")}
            | {"mlp.gate": "router"},
        ),
    ],
    ids=["jetmoe", "hunyuan", "deepseek"],
)
@pytest.mark.slow
def test_what_chooses_stays(tmp_path: Path, kind: str, values: dict[str, Any], reasons: dict[str, str]) -> None:
    model = save(tmp_path / "model", kind, **values)
    record = prune(model, tmp_path / "out")
    assert {each.name: each.reason for each in record.left_dense} == reasons
    assert Record.load(tmp_path / "out" / "niwaki.json").left_dense == record.left_dense == opened(model).left_dense
    before, after = tensors(model), tensors(tmp_path / "out")
    large = {key for key, value in before.items() if value.ndim > 1 and "embed" not in key and "lm_head" not in key}
    stay = {key for key in large if torch.equal(after[key], before[key])}
    assert stay == {key for key in large if any(f".{name}." in key for name in reasons)} != set()
    assert all(name in (tmp_path / "out" / "README.md").read_text() for name in reasons)


@pytest.mark.skipif(Version(__version__) < Version("5.23"), reason="DBRX of this size does not run there")
def test_experts_that_are_no_matrices(tmp_path: Path) -> None:
    """Of DBRX all experts of a block are one matrix: an error, unless those that can be pruned are asked for."""
    experts = {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}
    attention = {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}
    size = {"vocab_size": 64, "d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 64}
    model = save(tmp_path / "model", "dbrx", **size, attn_config=attention, ffn_config=experts)
    text = message(lambda: prune(model, tmp_path / "out"), UnsupportedModelError)
    assert "only 18 % of the decoder's weights" in text
    assert "say so with --blocks 0:2" in text
    assert "ffn.experts.mlp.w1 (no matrix of a known kind, 27 %)" in text
    assert not list(tmp_path.glob("*out*"))
    record = prune(model, tmp_path / "out", blocks="0:2")
    assert "ffn.router.layer (router, 0.56 %)" in record.stays
    assert {matrix.name for matrix in record.matrices} == {"norm_attn_norm.attn.Wqkv", "norm_attn_norm.attn.out_proj"}


class Decoder(nn.Module):
    """Blocks of a matrix, a router and a convolution; other blocks, and what makes states of images."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(8, 8), "gate": nn.Linear(8, 2), "conv": nn.Conv1d(4, 4, 1)})
            for _ in range(2)
        )
        self.patcher = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))
        self.vision_model = nn.ModuleList([nn.Linear(8, 100)])

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> None:
        return None


def test_reasons_and_shares() -> None:
    decoder = Decoder()
    matrices = [Matrix(i, "up", f"layers.{i}.up.weight", (8, 8), "up.weight") for i in range(2)]
    parts: Any = Parts(decoder, (Stack("layers", decoder.layers),), decoder, "")  # type: ignore[arg-type]
    left = left_dense(parts, SimpleNamespace(ties={}), matrices)  # type: ignore[arg-type]
    assert [(each.name, each.size, each.reason) for each in left] == [
        ("vision_model", 800, "not of the language model"),
        ("patcher", 64, "outside of the blocks"),
        ("gate", 32, "router"),
        ("conv", 32, "convolution"),
    ]
    assert [each.share for each in left] == pytest.approx([size / 1056 for size in (800, 64, 32, 32)])
    assert coverage(left) == pytest.approx(128 / 256)
    assert coverage([]) == 1


def test_nothing_stays(tmp_path: Path) -> None:
    record = prune(save_model(tmp_path / "model", "llama"), tmp_path / "out")
    assert (record.left_dense, record.stays) == ([], "")
