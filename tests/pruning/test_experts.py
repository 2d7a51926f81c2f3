"""Whole experts removed: which ones, what stays as it is, and that transformers runs what is written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import niwaki
from niwaki.errors import UnsupportedModelError, UsageError
from niwaki.models.block import DecoderBlock
from niwaki.records.record import Record
from niwaki.shrinking.walk import BlockTensors
from support.covering import some
from support.healing import same_tensors
from support.models import decoder_blocks, edit_json, message, random_model, random_tokens

CALIBRATION, HELDOUT = random_tokens(8, 24), random_tokens(3, 24, seed=1)
#: By family, the names of the number of experts in its configuration.
MIXTURES = {
    "qwen3_moe": "num_experts",
    "qwen3_moe many": "num_experts",
    "qwen2_moe": "num_experts",
    "qwen2_moe dense": "num_experts",
    "mixtral": "num_local_experts",
    "olmoe": "num_experts",
    "gpt_oss": "num_local_experts",
    "deepseek_v2": "n_routed_experts",
    "deepseek_v3": "n_routed_experts",
}


def saved(path: Path, case: str) -> Path:
    changes: dict[str, Any] = {"n_routed_experts": 12, "n_group": 3, "topk_group": 2} if case == "deepseek_v3" else {}
    random_model(case, **changes).save_pretrained(path)
    return path


def shrunk(source: Path, out: Path, fraction: float = 0.5) -> Record:
    return niwaki.shrink(source, out, experts=fraction, calibration=CALIBRATION, measurement=HELDOUT)


def tensors(path: Path) -> dict[str, Tensor]:
    return {key: value for file in path.glob("*.safetensors") for key, value in load_file(file).items()}


def perplexity(path: Path) -> float:
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(path)(HELDOUT).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), HELDOUT[:, 1:].flatten()).exp().item()


@pytest.mark.parametrize("case", MIXTURES)
@pytest.mark.slow
def test_what_is_written_is_what_was_measured(tmp_path: Path, case: str) -> None:
    source, out = saved(tmp_path / "source", case), tmp_path / "out"
    name = MIXTURES[case]
    before = getattr(AutoConfig.from_pretrained(source), name)
    record = shrunk(source, out)
    assert getattr(AutoConfig.from_pretrained(out), name) == before // 2
    assert record.structure is not None
    assert record.structure.experts
    assert all(len(gone) == before // 2 for gone in record.structure.experts)
    assert record.perplexity["after"].value == pytest.approx(perplexity(out), rel=1e-5)
    for each in record.matrices:
        assert each.error < float(each.stats["error_before_fit"])


@pytest.mark.parametrize("case", some(["mixtral", "qwen2_moe", "gpt_oss", "olmoe", "llama4_text", "deepseek_v3"], 3))
@pytest.mark.slow
def test_models_that_give_the_outputs_of_routers(tmp_path: Path, case: str) -> None:
    """For a loss that balances experts while they are trained: niwaki has losses of its own, and the file stays."""
    for name, router_logits in (("a", False), ("b", True)):
        source = saved(tmp_path / name, case)
        edit_json(source / "config.json", output_router_logits=router_logits)
        effort = None if case == "mixtral" else "fast:epochs=1:batch=48"  # what the outputs of all are trained by
        niwaki.prune(
            source, tmp_path / f"{name}-pruned", 0.5, effort=effort, calibration=CALIBRATION, measurement=HELDOUT
        )
    assert same_tensors(tmp_path / "a-pruned", tmp_path / "b-pruned")
    assert json.loads((tmp_path / "b-pruned" / "config.json").read_text())["output_router_logits"] is True
    options: dict[str, Any] = {"tokens": 96, "batch": 24, "own_text": 0, "compute": "cpu", "measurement": HELDOUT}
    methods: tuple[Any, ...] = ("full", "blocks")
    for method in methods if case == "mixtral" else ():
        for name in "ab":
            healed = tmp_path / f"{name}-{method}"
            pruned = tmp_path / f"{name}-pruned"
            niwaki.heal(pruned, healed, tmp_path / name, method=method, calibration=CALIBRATION, **options)
        assert same_tensors(tmp_path / f"a-{method}", tmp_path / f"b-{method}")


def test_all_but_the_last_matrices_stays_as_it_was(tmp_path: Path) -> None:
    source, out = saved(tmp_path / "source", "qwen3_moe"), tmp_path / "out"
    record = shrunk(source, out)
    old, new = tensors(source), tensors(out)
    assert record.structure is not None
    seen = set()
    for block, gone in enumerate(record.structure.experts):
        kept = [expert for expert in range(4) if expert not in gone]
        router = f"model.layers.{block}.mlp.gate.weight"
        assert torch.equal(new[router], old[router][kept])
        seen.add(router)
        for number, expert in enumerate(kept):
            for matrix in ("gate_proj", "up_proj", "down_proj"):
                names = [f"model.layers.{block}.mlp.experts.{n}.{matrix}.weight" for n in (number, expert)]
                assert torch.equal(new[names[0]], old[names[1]]) == (matrix != "down_proj")
                seen.add(names[0])
    assert all(torch.equal(new[key], old[key]) for key in new.keys() - seen)
    assert {re.sub(r"experts\.\d+", "experts", key) for key in new} == {
        re.sub(r"experts\.\d+", "experts", key) for key in old
    }


def scores(source: Path, block: int) -> Tensor:
    """REAP's, from transformers' own experts, a token and an expert at a time."""
    model = AutoModelForCausalLM.from_pretrained(source, experts_implementation="eager")
    experts: Any = decoder_blocks(model)[block].get_submodule("mlp.experts")
    totals, counts = torch.zeros(experts.num_experts), torch.zeros(experts.num_experts)

    def hook(_: Any, given: tuple[Tensor, Tensor, Tensor], __: Any) -> None:
        for x, chosen, gates in zip(*given, strict=True):
            for expert, gate in zip(chosen.tolist(), gates, strict=True):
                up = experts.gate_up_proj[expert] @ x
                inner = nn.functional.silu(up[: len(up) // 2]) * up[len(up) // 2 :]
                totals[expert] += gate * (experts.down_proj[expert] @ inner).norm()
                counts[expert] += 1

    experts.register_forward_hook(hook)
    with torch.no_grad():
        model(CALIBRATION)
    return totals / counts


@pytest.mark.slow
def test_the_experts_with_the_lowest_scores_go(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", "qwen3_moe many")
    record = shrunk(source, tmp_path / "out", 0.25)
    assert record.structure is not None
    lowest = scores(source, 0).argsort()[:3]  # of 12; later blocks have other inputs than in the dense model
    assert record.structure.experts[0] == sorted(lowest.tolist())


@pytest.mark.slow
def test_as_many_of_each_group(tmp_path: Path) -> None:
    record = shrunk(saved(tmp_path / "source", "deepseek_v3"), tmp_path / "out")
    assert record.structure is not None
    for gone in record.structure.experts:
        assert [sum(expert // 4 == group for expert in gone) for group in range(3)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("case", "fraction", "kind", "said"),
    [
        ("llama", 0.5, UsageError, "there are no experts to remove, because the model has no experts; give neurons"),
        ("llama4_text", 0.5, UnsupportedModelError, "run in a way that niwaki does not follow"),
        ("qwen3_moe", 0.75, UsageError, "would be 3; its routing allows 1 to 2"),
        ("qwen3_moe", 0.1, UsageError, "would be 0"),
        ("qwen3_moe", 1.0, UsageError, "from 0 to below 1"),
        (
            "deepseek_v3",
            0.6,
            UsageError,
            "in 3 groups, 2 for each token, would be 7; its routing allows 3 to 6, in steps of 3",
        ),
    ],
)
def test_what_cannot_be_removed(tmp_path: Path, case: str, fraction: float, kind: Any, said: str) -> None:
    source = saved(tmp_path / "source", case)
    assert said in message(lambda: shrunk(source, tmp_path / "out", fraction), kind)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_heads_and_experts_at_once(tmp_path: Path) -> None:
    source, out = saved(tmp_path / "source", "mixtral"), tmp_path / "out"
    record = niwaki.shrink(source, out, blocks=1, heads=0.5, experts=0.5, calibration=CALIBRATION, measurement=HELDOUT)
    assert record.structure is not None
    assert len(record.structure.experts) == 1
    assert record.perplexity["after"].value == pytest.approx(perplexity(out), rel=1e-5)


@pytest.mark.slow
def test_what_goes_is_freed_before_the_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    move = BlockTensors.move

    def moved(tensors: BlockTensors, block: DecoderBlock, smaller: nn.Module, *which: Any) -> DecoderBlock:
        left = move(tensors, block, smaller, *which)
        assert all(value.is_meta for value in block.module.parameters())
        stacks = [value for value in left.module.parameters() if value.ndim == 3]
        assert {len(value) for value in stacks} == {9}
        assert all(value.untyped_storage().nbytes() == value.nbytes for value in stacks)
        return left

    monkeypatch.setattr(BlockTensors, "move", moved)
    shrunk(saved(tmp_path / "source", "qwen3_moe many"), tmp_path / "out", 0.25)
