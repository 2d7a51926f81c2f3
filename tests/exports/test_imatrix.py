"""Importance matrices are those of transformers' own forward pass, by llama.cpp's names, and its tools read them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import niwaki
from niwaki.errors import CalibrationError, NumericalError, UnsupportedModelError
from support.command import Command, niwaki_  # noqa: F401 - a fixture
from support.models import (
    FEW_TOKENS,
    add_small_tokenizer,
    decoder_blocks,
    linear_inputs,
    message,
    random_model,
    random_tokens,
    reference,
    save_model_with_tokenizer,
    weight,
)

gguf: Any = pytest.importorskip("gguf")
TOKENS = random_tokens(6, 20)
TOOLS = Path(os.environ.get("NIWAKI_LLAMA_CPP", "nowhere")) / "tools" / "build" / "bin"


def saved(path: Path, case: str, **changes: Any) -> Path:
    random_model(case, vocab_size=FEW_TOKENS, **changes).save_pretrained(path)
    return add_small_tokenizer(path)


def written(model: Path, out: Path, tokens: Tensor = TOKENS) -> tuple[dict[str, np.ndarray[Any, Any]], list[str]]:
    notes = niwaki.importance_matrix(model, out, tokens, compute="cpu")
    return {each.name: each.data for each in gguf.GGUFReader(out).tensors}, notes


def squares(inputs: Tensor) -> np.ndarray[Any, Any]:
    return inputs.double().square().sum(dim=0).numpy()


@pytest.mark.parametrize(
    ("case", "block", "names"),
    [
        (
            "llama grouped",
            1,
            {"attn_k": "self_attn.k_proj", "attn_output": "self_attn.o_proj", "ffn_down": "mlp.down_proj"},
        ),
        ("phi3", 0, {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}),
        ("gemma3_text", 6, {"attn_q": "self_attn.q_proj", "ffn_gate": "mlp.gate_proj", "ffn_down": "mlp.down_proj"}),
    ],
)
def test_sums_are_those_of_transformers(tmp_path: Path, case: str, block: int, names: dict[str, str]) -> None:
    model = saved(tmp_path / "model", case)
    found, notes = written(model, tmp_path / "imatrix.gguf")
    assert notes == []
    inputs = linear_inputs(reference(model), block, TOKENS)
    for name, own in names.items():
        np.testing.assert_allclose(found[f"blk.{block}.{name}.weight.in_sum2"], [squares(inputs[own])], rtol=1e-4)
        assert found[f"blk.{block}.{name}.weight.counts"].tolist() == [[TOKENS.numel()]]
    assert {name.split(".")[0] for name in found} == {"blk"}
    blocks = {name.split(".")[1] for name in found}
    assert len(blocks) == len(decoder_blocks(reference(model)))


def test_columns_are_in_the_order_of_the_file(tmp_path: Path) -> None:
    """llama.cpp has the heads of values of Qwen 3.5 in another order, and so what comes out of them."""
    model = saved(tmp_path / "model", "qwen3_5_text")
    found, _ = written(model, tmp_path / "imatrix.gguf")
    dense = reference(model)
    own = squares(linear_inputs(dense, 0, TOKENS)["linear_attn.out_proj"])
    heads, keys = dense.config.linear_num_value_heads, dense.config.linear_num_key_heads
    assert heads > keys > 1
    in_turns = own.reshape(keys, heads // keys, -1).swapaxes(0, 1).flatten()
    np.testing.assert_allclose(found["blk.0.ssm_out.weight.in_sum2"], [in_turns], rtol=1e-4)


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe"])
def test_experts_have_their_own_tokens(tmp_path: Path, case: str) -> None:
    model = saved(tmp_path / "model", case)
    found, _ = written(model, tmp_path / "imatrix.gguf")
    dense, seen = reference(model), list[Tensor]()
    mixture = dense.get_submodule("model.layers.1.mlp")
    mixture.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1)))
    dense(TOKENS)
    (X,) = seen
    router = weight(dense, "model.layers.1.mlp.gate")
    chosen = (X @ router.T).topk(dense.config.num_experts_per_tok).indices
    sums, counts = (found[f"blk.1.ffn_gate_exps.weight.{what}"] for what in ("in_sum2", "counts"))
    for expert, (its, count) in enumerate(zip(sums, counts, strict=True)):
        own = X[(chosen == expert).any(dim=1)]
        assert count.tolist() == [len(own)]
        np.testing.assert_allclose(its, squares(own), rtol=1e-4)
    np.testing.assert_array_equal(found["blk.1.ffn_up_exps.weight.in_sum2"], sums)
    np.testing.assert_array_equal(found["blk.1.ffn_down_exps.weight.counts"], counts)


def test_experts_without_tokens_are_said(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", "mixtral")
    found, notes = written(model, tmp_path / "imatrix.gguf", random_tokens(1, 2))
    counts = [value for name, value in found.items() if "_exps" in name and name.endswith("counts")]
    idle = sum(int((count == 0).sum()) for count in counts)
    assert idle > 0
    (note,) = notes
    assert note.startswith(f"{idle} matrices of experts had no tokens on this text")


def test_without_a_network_the_text_is_one_that_ships_with_niwaki(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("niwaki.texts.sources._not_available", lambda _: "cannot be reached")
    model, out = save_model_with_tokenizer(tmp_path / "model"), tmp_path / "imatrix.gguf"
    niwaki.importance_matrix(model, out, niwaki.Calibration(samples=3, length=16), compute="cpu")
    assert gguf.GGUFReader(out).fields["imatrix.datasets"].contents() == ["demo"]


def test_what_the_file_says(tmp_path: Path, niwaki_: Command) -> None:  # noqa: F811
    model, out = save_model_with_tokenizer(tmp_path / "model"), tmp_path / "imatrix.gguf"
    options = ("--calibration", "demo", "--samples", 3, "--length", 16, "--device", "cpu")
    done = niwaki_("imatrix", model, out, *options)
    assert (done.code, done.out) == (0, f"written to {out}\n")
    fields = gguf.GGUFReader(out).fields
    said = {name: fields[name].contents() for name in fields if "." in name and "GGUF" not in name}
    assert said == {
        "general.type": "imatrix",
        "imatrix.datasets": ["demo"],
        "imatrix.chunk_count": 3,
        "imatrix.chunk_size": 16,
    }
    again = niwaki_("imatrix", model, out, *options)
    assert again.code == 2
    assert f"{out} exists; choose another name" in again.err
    niwaki_("imatrix", model, tmp_path / "again.gguf", *options)
    assert (tmp_path / "again.gguf").read_bytes() == out.read_bytes()


def test_what_is_refused(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", "llama grouped")
    (tmp_path / "there.gguf").write_text("mine")
    assert "exists; choose another" in message(lambda: niwaki.importance_matrix(model, tmp_path / "there.gguf", TOKENS))
    inside = model / "imatrix.gguf"
    assert "inside the model's own directory" in message(lambda: niwaki.importance_matrix(model, inside, TOKENS))
    other = saved(tmp_path / "other", "gpt2")
    out = tmp_path / "imatrix.gguf"
    refused = message(lambda: niwaki.importance_matrix(other, out, TOKENS), UnsupportedModelError)
    assert "cannot be exported to GGUF" in refused
    text = tmp_path / "no.txt"
    assert "no.txt" in message(lambda: niwaki.importance_matrix(model, out, str(text)), CalibrationError)
    dense = reference(model)
    weight(dense, "model.layers.0.mlp.up_proj").mul_(1e25)
    weight(dense, "model.layers.0.mlp.down_proj").mul_(1e25)
    dense.save_pretrained(model)
    assert "NaN or infinite" in message(lambda: niwaki.importance_matrix(model, out, TOKENS), NumericalError)
    assert not out.exists()


@pytest.mark.skipif(not (TOOLS / "llama-quantize").exists(), reason="needs make llama-cpp-tools, in $NIWAKI_LLAMA_CPP")
def test_llama_quantize_takes_it(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", "llama grouped", hidden_size=256, intermediate_size=512, head_dim=64)
    found, _ = written(model, tmp_path / "imatrix.gguf")
    niwaki.export(model, tmp_path / "dense.gguf", "gguf-f16")
    command = [str(TOOLS / "llama-quantize"), "--imatrix", "imatrix.gguf", "dense.gguf", "made.gguf", "Q3_K_M"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"loaded {len(found) // 2} importance matrix entries" in done.stdout
    missed = re.findall(r"did not find weights for (\S+)", done.stdout + done.stderr)
    assert {*missed} <= {"token_embd.weight", "output.weight"}  # as with llama-imatrix's own
