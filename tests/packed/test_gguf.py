"""Files for llama.cpp; transformers' own reader of them is the judge, and the package gguf of its rounding."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import niwaki
from niwaki import Calibration, Measurement
from niwaki.errors import CheckpointError, NiwakiError, UnsupportedModelError, UsageError
from support.models import (
    EMBEDDED,
    EMBEDDED_VOCABULARY,
    add_tokenizer,
    edit_json,
    message,
    random_model,
    random_tokens,
    save_model,
    save_model_with_tokenizer,
)

gguf: Any = pytest.importorskip("gguf")

LLAMA_CPP = Path(os.environ.get("NIWAKI_LLAMA_CPP", "nowhere")) / "node_modules"

TEXT = "The old man sat by the river in 1984, and didn't say a word.\n\n"


def saved(path: Path, case: str, **changes: Any) -> Path:
    random_model(case, vocab_size=EMBEDDED_VOCABULARY, **changes).save_pretrained(path)
    return add_tokenizer(path)


def logits(path: Path, **options: Any) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    with torch.no_grad():
        values: Tensor = model(random_tokens(2, 20)).logits
    return values


@pytest.mark.parametrize("case", ["llama", "llama grouped", "llama tied", "mistral", "qwen2", "qwen3", "qwen3_moe"])
def test_transformers_reads_the_same_model(tmp_path: Path, case: str) -> None:
    source = saved(tmp_path / "source", case)
    niwaki.export_gguf(source, tmp_path / "model.gguf", "F16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "source"]
    # For Qwen3 this reader takes neither the heads' width nor that of the experts from the file.
    options = {"config": AutoConfig.from_pretrained(source)} if case.startswith("qwen3") else {}
    read = logits(tmp_path, gguf_file="model.gguf", **options)
    torch.testing.assert_close(read, logits(source), atol=0.02, rtol=0.01)  # weights in half precision
    if case.startswith("qwen"):  # for which this reader has a splitter of its own
        return
    ours, theirs = (
        AutoTokenizer.from_pretrained(path, **options)
        for path, options in [(source, {}), (tmp_path, {"gguf_file": "model.gguf"})]
    )
    assert ours(TEXT).input_ids == theirs(TEXT).input_ids


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_values_in_groups(tmp_path: Path, kind: Any) -> None:
    niwaki.export_gguf("demo", tmp_path / "model.gguf", kind)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    stored = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert stored["blk.0.ffn_down.weight"] == kind
    assert stored["token_embd.weight"] == "Q8_0"
    assert stored["blk.0.attn_norm.weight"] == "F32"
    down = AutoModelForCausalLM.from_pretrained(EMBEDDED).model.layers[0].mlp.down_proj.weight.detach().float().numpy()
    one = tensors["blk.0.ffn_down.weight"]
    expected = gguf.quants.dequantize(gguf.quants.quantize(down, one.tensor_type), one.tensor_type)
    assert (gguf.quants.dequantize(one.data, one.tensor_type) == expected).all()


def test_zeros_stay(tmp_path: Path) -> None:
    out = tmp_path / "pruned"
    niwaki.prune("demo", out, 0.5, effort="fast", solver="magnitude", calibration="demo", measurement=None)
    niwaki.export_gguf(out, tmp_path / "model.gguf", "Q8_0")
    pruned = AutoModelForCausalLM.from_pretrained(out).model.layers[3].mlp.up_proj.weight
    (one,) = [t for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors if t.name == "blk.3.ffn_up.weight"]
    read = torch.from_numpy(gguf.quants.dequantize(one.data, one.tensor_type))
    assert (read[pruned == 0] == 0).all()


def test_stretched_positions(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    source = saved(tmp_path / "source", "llama", rope_parameters=rope)
    niwaki.export_gguf(source, tmp_path / "model.gguf", "F16")
    (one,) = [t for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors if t.name == "rope_freqs.weight"]
    model = AutoModelForCausalLM.from_pretrained(source)
    plain = 10_000.0 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(plain / torch.from_numpy(one.data.copy()), model.model.rotary_emb.inv_freq)


def splitting(path: Path) -> None:
    edit_json(path / "tokenizer.json", pre_tokenizer={"type": "Whitespace"})


def too_large(path: Path) -> None:
    content = json.loads((path / "tokenizer.json").read_text())
    content["model"]["vocab"]["niwaki"] = EMBEDDED_VOCABULARY
    (path / "tokenizer.json").write_text(json.dumps(content))


def yarn(path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    edit_json(path / "config.json", rope_parameters=rope)


@pytest.mark.parametrize(
    ("change", "kind", "error", "said"),
    [
        (lambda path: None, "Q8_0", UsageError, "no multiple of 32; export it as F16"),
        (splitting, "F16", UnsupportedModelError, "splits text in a way"),
        (too_large, "F16", CheckpointError, "has the token 4096, of 4096"),
        (yarn, "F16", UnsupportedModelError, "rotary positions of the kind 'yarn'"),
        (lambda path: (path / "tokenizer.json").unlink(), "F16", CheckpointError, "tokenizer.json"),
        (lambda path: None, "Q5_0", UsageError, "kind"),
    ],
)
def test_what_cannot_be_exported(tmp_path: Path, change: Any, kind: Any, error: type[NiwakiError], said: str) -> None:
    source = save_model_with_tokenizer(tmp_path / "source")
    change(source)
    assert said in message(lambda: niwaki.export_gguf(source, tmp_path / "model.gguf", kind), error)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_other_families_and_places(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "gpt2")
    said = message(lambda: niwaki.export_gguf(source, tmp_path / "model.gguf"), UnsupportedModelError)
    assert "gpt2" in said
    assert "qwen3_moe" in said
    (tmp_path / "there.gguf").touch()
    assert "exists" in message(lambda: niwaki.export_gguf("demo", tmp_path / "there.gguf"))
    assert "no directory" in message(lambda: niwaki.export_gguf("demo", tmp_path / "none" / "model.gguf"))


@pytest.mark.slow
@pytest.mark.skipif(not LLAMA_CPP.exists(), reason="needs node-llama-cpp in $NIWAKI_LLAMA_CPP")
@pytest.mark.parametrize("made", ["pruned", "shrunk", "fewer experts"])
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_llama_cpp_writes_the_same(tmp_path: Path, made: str, kind: Any) -> None:
    """What it says to a text, the likeliest token each time; of a file that rounds, as transformers reads the file."""
    model, file = tmp_path / "model", tmp_path / "model.gguf"
    few: dict[str, Any] = {
        "calibration": Calibration("demo", samples=8, length=64),
        "measurement": Measurement(samples=0),
    }
    if made == "pruned":
        niwaki.prune("demo", model, 0.5, effort="fast", **few)
    elif made == "shrunk":
        niwaki.shrink("demo", model, neurons=0.25, **few)
    else:
        niwaki.shrink(saved(tmp_path / "source", "qwen3_moe", moe_intermediate_size=32), model, experts=0.5, **few)
    niwaki.export_gguf(model, file, kind)
    shutil.copy(Path(__file__).parents[1] / "support" / "llama_cpp.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(LLAMA_CPP)
    command = ["node", "llama_cpp.mjs", str(file), TEXT, "10"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said["given"] == AutoTokenizer.from_pretrained(model)(TEXT).input_ids
    source = {} if kind == "F16" else {"gguf_file": file.name, "config": AutoConfig.from_pretrained(model)}
    whole = AutoModelForCausalLM.from_pretrained(tmp_path if source else model, dtype=torch.float32, **source)
    with torch.no_grad():
        logits = whole(torch.tensor([said["given"] + said["written"]])).logits[0, len(said["given"]) - 1 : -1]
    # Products are rounded to 8 bits there, so that the likeliest may be another one that is as likely.
    chosen = logits.gather(1, torch.tensor(said["written"])[:, None])[:, 0]
    assert (logits.max(dim=1).values - chosen < 0.1 * logits.std(dim=1)).all()
