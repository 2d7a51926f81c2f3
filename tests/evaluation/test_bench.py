"""What is measured and when, with a model and a clock that are made up."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

import niwaki
from niwaki.errors import WorkerError
from niwaki.evaluation import bench as measuring
from niwaki.options import Compute
from niwaki.records.progress import Progress
from niwaki.records.speed import Speed
from support.covering import FULL
from support.models import EMBEDDED, message, random_tokens, save_model
from support.scripts import run_script


class Clock:
    """Seconds pass when work is waited for, as on a GPU."""

    def __init__(self) -> None:
        self.now, self.work = 1000.0, 0.0

    def wait(self, _: object) -> float:
        self.now, self.work = self.now + self.work, 0.0
        return self.now


class Model(nn.Module):
    """Takes the first of ``prompts`` seconds for a prompt, then that of ``tokens`` for each token."""

    device, dtype = torch.device("cpu"), torch.bfloat16

    def __init__(self, clock: Clock, prompts: list[float], tokens: list[float]) -> None:
        super().__init__()
        self.clock, self.prompts, self.tokens = clock, prompts, tokens
        self.shared = nn.Parameter(torch.zeros(10))
        self.again = self.shared
        self.register_buffer("values", torch.zeros(7, dtype=torch.int8))
        self.lengths: list[int] = []
        text = SimpleNamespace(vocab_size=9, max_position_embeddings=12)
        self.config = SimpleNamespace(get_text_config=lambda: text)
        self.get_output_embeddings = SimpleNamespace  # none

    def forward(
        self, input_ids: Tensor, use_cache: bool, past_key_values: int = 0, logits_to_keep: int = 0
    ) -> SimpleNamespace:
        assert use_cache
        if past_key_values:
            assert input_ids.tolist() == [[past_key_values % 9]]  # what was most likely
        else:
            self.lengths.append(input_ids.shape[1])
        self.clock.work += (self.tokens if past_key_values else self.prompts)[len(self.lengths) - 1]
        length = past_key_values + input_ids.shape[1]
        logits = torch.zeros(1, 1, 9)
        logits[0, 0, length % 9] = 1
        return SimpleNamespace(logits=logits, past_key_values=length)


def test_times_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Medians, without the first time; each waited for."""
    clock = Clock()
    model = Model(clock, [100, 7, 5, 60], [50, 0.25, 0.5, 8])

    def load(*given: object) -> Model:
        assert given == (tmp_path, "cpu", "auto")
        clock.work += 3
        return model

    monkeypatch.setattr(measuring, "load", load)
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(measuring, "_now", clock.wait)
    monkeypatch.setattr(measuring, "peak_memory", lambda _: {"resident": 123})
    monkeypatch.setattr(measuring, "_read_for_a_token", lambda _: 40)
    for name, size in (("a.safetensors", 10), ("b.safetensors", 20), ("packed.json", 5), ("tokenizer.json", 7)):
        (tmp_path / name).write_bytes(bytes(size))
    found = measuring.measure(tmp_path, 8, 4, 3, Compute("cpu"))
    assert found == Speed(
        "packed", "bfloat16", 30, 47, 123, load=3, first_token=7, tokens_per_second=2, slowest=0.125, fastest=4, read=40
    )
    assert model.lengths == [8] * 4
    said = message(
        lambda: measuring.check_positions(measuring.positions_of(LlamaConfig(max_position_embeddings=12)), 9, 4)
    )
    assert said == "9 + 4 tokens are more than the 12 positions of the model"


@pytest.mark.parametrize(("dtype", "device"), [("auto", "cpu"), ("float16", "cpu"), ("auto", "cuda")])
def test_forms(dtype: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First the dense model, then the packed one."""
    dense, seen = save_model(tmp_path / "dense"), []

    @contextlib.contextmanager
    def both(path: Path, prompt: int, tokens: int, compute: Compute, progress: Progress) -> Iterator[dict[str, Path]]:
        assert (prompt, tokens, compute) == (8, 4, Compute(device, dtype))
        yield {"dense": path, "packed": path.with_name("packed")}

    def measured(*given: Any) -> Speed:
        directory, *rest = given
        assert rest == [8, 4, 3, Compute(device, dtype)]
        seen.append(directory.name)
        return Speed(directory.name, dtype, 1, 1, 1, 1, 1, len(seen), 1, 1)

    monkeypatch.setattr(measuring, "_forms", both)
    monkeypatch.setattr(measuring, "measured", measured)
    found = measuring.bench(dense, prompt_tokens=8, tokens=4, repeats=3, compute=Compute(device, dtype))
    assert seen == ["dense", "packed"]
    assert [speed.tokens_per_second for speed in found.speeds] == [1, 2]
    assert (found.prompt, found.tokens, found.repeats, found.device) == (8, 4, 3, device)


class Notes(Progress):
    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize("kind", ["dense", "shrunk", "float64"])
@pytest.mark.slow
def test_a_model_of_which_nothing_can_be_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """It is measured as it is, no copy is made, and the reason is said."""
    model, notes = save_model(tmp_path / "dense", dtype=torch.float64 if kind == "float64" else torch.float32), Notes()
    if kind == "shrunk":
        tokens, dense = random_tokens(4, 16), model
        model = tmp_path / "shrunk"
        niwaki.shrink(dense, model, neurons=0.5, calibration=tokens, measurement=None)
    monkeypatch.setattr(measuring, "measured", measuring.measure)
    monkeypatch.setattr(measuring, "pack", None)
    found = measuring.bench(model, prompt_tokens=4, tokens=3, repeats=1, compute="cpu", progress=notes)
    (speed,) = found.speeds
    assert speed.weights == "dense"
    assert speed.disk == sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert speed.tokens_per_second > 0
    assert "packed" not in found.conditions()
    loaded: Any = niwaki.load(model, "cpu")
    apart = 0 if loaded.config.tie_word_embeddings else loaded.get_input_embeddings().weight.nbytes
    assert speed.read == speed.resident - apart
    assert found.conditions().endswith(f"read at {speed.read * speed.tokens_per_second / 1e9:.1f} (dense) GB/s")
    (note,) = notes.said
    assert "only the dense model is measured" in note
    assert ("F64" if kind == "float64" else f"no matrix of {model} would be smaller") in note


def test_why_a_gguf_file_is_not_measured_in_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its package, with one that lacks another, and with a dtype, which is niwaki's."""
    pytest.importorskip("gguf")
    niwaki.export(EMBEDDED, tmp_path / "model.gguf", "gguf-f16")
    (tmp_path / "llama_cpp.py").write_text("import nowhere_at_all")
    monkeypatch.setattr(measuring, "measured", measuring.measure)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)

    def said(dtype: str = "auto") -> str:
        notes, where = Notes(), Compute(device="cpu", dtype=dtype)
        measuring.bench(tmp_path / "model.gguf", prompt_tokens=4, tokens=3, repeats=1, compute=where, progress=notes)
        return notes.said[0]

    assert said().endswith("; pip install llama-cpp-python")
    monkeypatch.delitem(sys.modules, "llama_cpp")
    monkeypatch.syspath_prepend(tmp_path)
    assert said().endswith("llama-cpp-python fails: No module named 'nowhere_at_all'")
    monkeypatch.setitem(sys.modules, "llama_cpp", types.ModuleType("llama_cpp"))
    assert said(dtype="float32").endswith("without a dtype it is measured in llama.cpp")


@pytest.mark.parametrize("wrong", [{"prompt_tokens": 0}, {"tokens": 1}, {"repeats": 0}, {"tokens": 2.5}])
def test_numbers_out_of_range(wrong: dict[str, Any]) -> None:
    assert f"; got {next(iter(wrong.values()))}" in message(lambda: measuring.bench("./nowhere", **wrong))


class Deadly(type(Path())):  # type: ignore[misc]
    """A path at which a process ends that is sent it."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


@pytest.mark.slow
def test_a_process_that_dies(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = message(lambda: measuring.measured(Deadly("there"), 1, 2, 1, Compute("cpu")), WorkerError)
    assert said == "the process that measured there ended with status 3; is there enough memory?"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("before", "within"), [(None, "10000"), ("1000", "10000"), ("7", "7"), ("10000", "10000")])
def test_how_threads_wait_that_are_measured(before: str | None, within: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of ``niwaki generate``, whatever command they are measured for, or as the user says."""
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if before:
        monkeypatch.setenv("GOMP_SPINCOUNT", before)
    assert measuring._environment()["GOMP_SPINCOUNT"] == within


@pytest.mark.slow
def test_a_script_is_not_run_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As multiprocessing would run one again that does not ask whether it is the main one."""
    script = tmp_path / "script.py"
    model = save_model(tmp_path / "model")
    script.write_text(f"import niwaki\nprint(niwaki.bench({str(model)!r}, prompt_tokens=8, tokens=3).repeats)")
    capfd.readouterr()
    assert run_script(script) is None
    assert capfd.readouterr() == ("3\n", "")


@pytest.mark.slow
@pytest.mark.skipif(not FULL, reason="another process is seconds, and this is one line of the library's")
def test_what_nobody_foresaw_in_a_process(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TypeError):  # is this process's own
        measuring.measured(None, 1, 2, 1, Compute("cpu"))  # type: ignore[arg-type]
    assert capfd.readouterr().err == ""
