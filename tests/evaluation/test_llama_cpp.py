"""GGUF files in llama.cpp: by a stand-in for its package, and by the package itself where it is installed."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import niwaki
from niwaki import Compute
from niwaki.errors import CheckpointError, UsageError
from niwaki.evaluation import bench as measuring
from niwaki.evaluation.llama_cpp import positions_of
from support.llama_cpp import Llama
from support.models import message, save_model_with_tokenizer

pytest.importorskip("gguf")


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> type[Llama]:
    fresh = type("Fresh", (Llama,), {"seen": [], "metadata": {}})
    package = SimpleNamespace(Llama=fresh, llama_supports_gpu_offload=lambda: False)
    monkeypatch.setitem(sys.modules, "llama_cpp", package)
    return fresh


@pytest.fixture
def file(tmp_path: Path) -> Path:
    niwaki.export(save_model_with_tokenizer(tmp_path / "model"), tmp_path / "out.gguf", "gguf-f16")
    return tmp_path / "out.gguf"


@pytest.mark.parametrize("alone", [False, True])
def test_text(file: Path, llama: type[Llama], alone: bool) -> None:
    """Of a file, or of a directory that has no more."""
    if alone:
        (file.parent / "alone").mkdir()
        file = file.rename(file.parent / "alone" / file.name)
    said: list[str] = []
    made = niwaki.generate(
        file.parent if alone else file, "The sun", tokens=9, temperature=0.5, seed=3, say=said.append
    )
    assert made == " of 7" == "".join(said)
    (name, opened), asked = llama.seen
    assert name == file.name
    assert opened["n_ctx"] >= len("The sun") + 9
    assert asked == {
        "max_tokens": 9,
        "temperature": 0.5,
        "seed": 3,
        "stream": True,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
    }
    llama.metadata["tokenizer.chat_template"] = "..."
    assert niwaki.generate(file, "The sun") == "The!sun!"
    assert niwaki.generate(file, "The sun", raw=True) == " of 7"


def test_positions(file: Path, llama: type[Llama], caplog: pytest.LogCaptureFixture) -> None:
    """No more than the model has: of a long prompt the end is read, and an answer has to leave room for one."""
    assert positions_of(file) == 128
    said = message(lambda: niwaki.generate(file, "The sun", tokens=128), UsageError)
    assert said == "128 tokens are more than the 128 positions of the model have room for"
    said = message(lambda: niwaki.bench(file, prompt_tokens=120, tokens=9), UsageError)
    assert said == "120 + 9 tokens are more than the 128 positions of the model"
    assert not llama.seen
    assert niwaki.generate(file, "word " * 30, tokens=28) == " of 100"
    assert llama.seen[0][1]["n_ctx"] == 128
    assert "of the 150 tokens of the prompt the last 100 are read" in caplog.text


def test_a_gpu_that_it_does_not_know(file: Path, llama: type[Llama]) -> None:
    on_gpu = Compute(device="cuda")
    for call in (partial(niwaki.generate, file, "The sun"), partial(niwaki.bench, file)):
        said = message(partial(call, compute=on_gpu), UsageError)
        assert said.startswith("this llama-cpp-python was built without a GPU")
    assert not llama.seen


def test_the_seed_that_llama_cpp_draws_another_one_for(file: Path, llama: type[Llama]) -> None:
    niwaki.generate(file, "The sun", temperature=1.0, seed=2**32 - 1)
    assert llama.seen[1]["seed"] == 0


def test_what_is_told_goes_wrong(file: Path, llama: type[Llama]) -> None:
    def say(text: str) -> None:
        raise RuntimeError(text)

    with pytest.raises(RuntimeError, match="of"):
        niwaki.generate(file, "The sun", say=say)


def test_where_niwaki_runs_it(file: Path, llama: type[Llama], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a dtype, which is one of its own; and without the package."""
    own = niwaki.generate(file, "The sun", tokens=4, compute=Compute(dtype="float32"))
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert niwaki.generate(file, "The sun", tokens=4) == own
    assert not llama.seen


def test_files_that_are_damaged_never_reach_it(file: Path, llama: type[Llama]) -> None:
    file.write_bytes(file.read_bytes()[:2000])
    assert "is the download complete?" in message(lambda: niwaki.generate(file, "The sun"), CheckpointError)
    assert not llama.seen


def test_what_it_does_not_take(file: Path, llama: type[Llama]) -> None:
    llama.fails = True
    said = message(lambda: niwaki.generate(file, "The sun"), CheckpointError)
    assert said.startswith(f"llama.cpp does not run {file}: Failed to load model")


def test_speed(file: Path, llama: type[Llama], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "measured", measuring.measure)
    record = niwaki.bench(file, prompt_tokens=6, tokens=3, repeats=2, compute=Compute(device="cpu"))
    (speed,) = record.speeds
    assert (speed.weights, speed.dtype, speed.disk) == ("gguf", "llama.cpp", file.stat().st_size)
    assert speed.slowest <= speed.tokens_per_second <= speed.fastest
    assert llama.seen[0][1]["n_ctx"] >= 9
    assert llama.seen[0][1]["n_gpu_layers"] == 0
    assert llama.seen[1:] == ["reset", 6, 1, 1] * 3


def test_the_package_itself(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The likeliest tokens are those that transformers finds."""
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if Path(each).name != "benchmarks"])  # with its own
    pytest.importorskip("llama_cpp")
    own = niwaki.generate(file, "The old man", tokens=8, compute=Compute(dtype="float32"))
    assert niwaki.generate(file, "The old man", tokens=8) == own
    assert niwaki.bench(file, prompt_tokens=8, tokens=4, repeats=1).speeds[0].weights == "gguf"
