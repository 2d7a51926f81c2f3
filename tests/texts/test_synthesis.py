"""Text of the dense model's own, against the probabilities of the whole model of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from niwaki.checkpoints.reading import Checkpoint
from niwaki.effort import make_effort
from niwaki.errors import UnsupportedModelError, UsageError
from niwaki.models.generation import continued, for_writing
from niwaki.models.processes import World
from niwaki.models.streamed import StreamedModel
from niwaki.recipes import prune
from niwaki.records.progress import Progress
from niwaki.texts.own import synthesize
from support.arguments import arguments
from support.healing import same_tensors
from support.models import a_third_of_the_families, edit_json, message, random_tokens, reference, save_model
from support.runs import StopAt, files
from support.streams import assert_clean, stream_of
from support.threads import in_threads

TOKENS = random_tokens(6, 24)
EFFORT = "fast:synthetic=0.5"


class Watch(Progress):
    """Counts the steps of each stage: its name, the steps that it is to have, and those that it had."""

    def __init__(self) -> None:
        self.stages: list[Any] = []

    def stage(self, block: int, name: str, steps: int) -> None:
        self.stages.append([name, steps, 0])

    def step(self) -> None:
        self.stages[-1][2] += 1


def write(
    model: StreamedModel,
    count: int,
    length: int = 24,
    budget: int | None = None,
    world: World | None = None,
    progress: Progress | None = None,
) -> Tensor:
    return synthesize(model, count, length, budget, world or World(), progress or Progress())


def beginnings(count: int, known: int) -> Tensor:
    """The first token of each text."""
    return torch.randint(known, (count,), generator=torch.Generator().manual_seed(0))


def run(model: Path, out: Path, effort: str = EFFORT, **changes: Any) -> Any:
    options = {"sparsity": 0.5, "calibration": TOKENS, "measure": "none", "device": "cpu", "solver": "sparsegpt"}
    return prune(model, out, **arguments(effort=effort, **{**options, **changes}))


@a_third_of_the_families(3)
@pytest.mark.slow
def test_every_family(tmp_path: Path, case: str) -> None:
    if case == "llama4" and transformers.__version__ == "5.24.0":
        pytest.skip("transformers 5.24.0 fails in each forward of this class")
    model = stream_of(save_model(tmp_path / "model", case))
    state, watch = torch.get_rng_state(), Watch()
    found = write(model, 8, progress=watch)
    assert found.shape == (8, 24)
    assert found.dtype == torch.int64
    assert found.min() >= 0
    assert found.max() < model.config.vocab_size
    assert torch.equal(found, write(model, 8))
    assert torch.equal(found[:, 0], beginnings(8, model.config.vocab_size))
    assert torch.equal(torch.get_rng_state(), state)
    assert watch.stages == [["synthesis", 23, 23]]
    assert_clean(model)


def test_the_head_is_not_copied_for_each_text(tmp_path: Path) -> None:
    """Which torch does for the last states of prompts of several tokens, where they are a view of all."""
    model = stream_of(save_model(tmp_path / "model", "gemma3"))
    seen = list[bool]()
    with model.whole() as whole:
        head = whole.get_output_embeddings()
        multiply = head.forward

        def looked_at(states: Tensor) -> Tensor:
            seen.append(states.is_contiguous())
            return multiply(states)  # type: ignore[no-any-return]

        head.forward = looked_at
        continued(whole, random_tokens(3, 4), 8, lambda: None)
    assert len(seen) >= 4
    assert all(seen)


@pytest.mark.slow
def test_tokens_have_the_probabilities_of_the_model(tmp_path: Path) -> None:
    """Also where the model's own settings are others."""
    directory = save_model(tmp_path / "model")
    settings = {"do_sample": True, "temperature": 0.1, "top_k": 2, "top_p": 0.5, "eos_token_id": 5}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    edit_json(directory / "config.json", eos_token_id=5, bos_token_id=0)
    count = 4000
    found = write(stream_of(directory), count, 3)
    whole = reference(directory, torch.float64)
    with torch.no_grad():
        probabilities = whole(torch.arange(64).unsqueeze(1)).logits[:, -1].softmax(-1)
    expected = found[:, 0].bincount(minlength=64).unsqueeze(1) * probabilities
    counts = (64 * found[:, 0] + found[:, 1]).bincount(minlength=64 * 64).view(64, 64)
    chi2 = float(((counts - expected).square() / expected).sum())
    assert chi2 < 64**2 + 5 * (2 * 64**2) ** 0.5
    after = found[(found[:, 1] == 5), 2]
    assert len(after.unique()) > 5  # the text goes on behind its end


def test_memory(tmp_path: Path) -> None:
    """Fewer sequences at a time, or none."""
    model = stream_of(save_model(tmp_path / "model"))
    program, sequence = 2**29, 2 * (2 * 2 * 2) * 8 * 24 * 4
    assert model.config.hidden_size // model.config.num_attention_heads == 8
    logits = 3 * 4 * model.config.vocab_size
    budget = program + model.size + 2 * 2 * (sequence + logits)
    watch = Watch()
    write(model, 5, budget=budget, progress=watch)
    assert watch.stages == [["synthesis", 3 * 23, 3 * 23]]
    said = message(lambda: write(model, 5, budget=program + model.size, progress=watch), UnsupportedModelError)
    assert said == "its 0.0 GiB do not fit in memory"
    assert len(watch.stages) == 1


def test_half_of_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stream_of(save_model(tmp_path / "model"))
    for halves, fits in ((3, True), (1, False)):
        total = halves * (2**29 + model.size + 2**20)
        monkeypatch.setattr("psutil.virtual_memory", lambda total=total: SimpleNamespace(total=total))
        if fits:
            write(model, 1)
        else:
            assert "do not fit in memory" in message(lambda: write(model, 1), UnsupportedModelError)


def test_windows_of_several_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two and a half each; the last half of a text is left."""
    monkeypatch.setattr("niwaki.texts.own._LONGEST", 10)
    model, watch = stream_of(save_model(tmp_path / "model")), Watch()
    found = write(model, 3, 25, progress=watch)
    assert found.shape == (3, 25)
    assert torch.equal(found.flatten()[::10], beginnings(8, model.config.vocab_size))
    assert watch.stages == [["synthesis", 9, 9]]


def test_processes_have_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save_model(tmp_path / "model")
    # Threads share the generator of random numbers, which processes do not.
    monkeypatch.setattr("niwaki.texts.own.continued", lambda _, prompts, length, __: prompts[:, :1].expand(-1, length))
    seeds: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    models = [stream_of(directory) for _ in range(2)]
    sequence = 2 * (2 * 4) * 8 * 24 * 4 + 3 * 4 * 64
    budgets = [2**29 + models[0].size + 2 * sequence, None]  # for one at a time, and for all

    def do(world: World) -> Tensor:
        return write(models[world.rank], 5, budget=budgets[world.rank], world=world)

    for found in in_threads(2, do):
        assert torch.equal(found, beginnings(5, 64).unsqueeze(1).expand(-1, 24))
    assert len(seeds) == len(set(seeds)) == 5  # each draws its own, as many at a time as all have memory for


# In a run


@pytest.mark.slow
def test_it_is_as_if_it_had_been_given(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model")
    own = write(stream_of(directory), 3)
    record = run(directory, tmp_path / "out", progress=(watch := Watch()))
    assert watch.stages[0] == ["synthesis", 23, 23]
    assert record.calibration["synthetic"] == 3
    assert record.matrices[0].tokens == 9 * 24
    assert "| own text | 3 windows that the dense model wrote itself |" in (tmp_path / "out" / "README.md").read_text()
    run(directory, tmp_path / "given", "fast", calibration=torch.cat([TOKENS, own]))
    assert same_tensors(tmp_path / "out", tmp_path / "given")


@pytest.mark.slow
def test_a_run_that_was_stopped_keeps_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save_model(tmp_path / "model", shards=True)
    effort = f"{EFFORT}:allocation=loss"
    run(directory, tmp_path / "whole", effort)
    with pytest.raises(KeyboardInterrupt):
        run(directory, tmp_path / "out", effort, progress=StopAt(8))
    monkeypatch.setattr("niwaki.runs.stage.synthesize", None)  # it is not written again
    record = run(directory, tmp_path / "out", effort)
    assert record.resumed == [1]
    assert record.calibration["synthetic"] == 3
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_a_model_that_does_not_fit(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model")
    record = run(directory, tmp_path / "out", max_memory=1)
    assert record.calibration["synthetic"] == 0
    (said,) = [note for note in record.notes if "wrote no text" in note]
    assert "do not fit in memory" in said
    assert "more --samples" in said
    run(directory, tmp_path / "without", "fast")
    assert same_tensors(tmp_path / "out", tmp_path / "without")


def test_a_model_that_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no cache")

    monkeypatch.setattr("transformers.GenerationMixin.generate", fail)
    record = run(save_model(tmp_path / "model"), tmp_path / "out")
    assert record.calibration["synthetic"] == 0
    said = "the dense model wrote no text to calibrate on: transformers cannot generate text with this model (no cache)"
    assert any(note.startswith(said) for note in record.notes)


def test_values() -> None:
    assert make_effort("fast:synthetic=0.5").synthetic
    assert "synthetic must be 0 or more" in message(lambda: make_effort("fast:synthetic=-1"), UsageError)


@pytest.mark.parametrize("units", ["amx_bf16", "avx512_bf16", "avx512_f"])
@pytest.mark.slow
def test_the_dtype_of_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, units: str) -> None:
    """It is that of the files on processors with units for it, and what is written is the same text of that model."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {units: True}, raising=False)
    for stored in (torch.float32, torch.bfloat16):
        path = save_model(tmp_path / str(stored), "llama", dtype=stored)
        model, half = (StreamedModel(Checkpoint(path), "cpu", dtype) for dtype in ("float32", "bfloat16"))
        expected = torch.bfloat16 if units != "avx512_f" and stored == torch.bfloat16 else torch.float32
        assert for_writing(model).dtype == expected
        assert torch.equal(write(model, 2), write(half if expected == torch.bfloat16 else model, 2))
        assert for_writing(half) is half
