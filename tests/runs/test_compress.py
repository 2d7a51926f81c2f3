"""One number: the stages that bring a model to a size, and what is written."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import niwaki
from niwaki import Calibration, Compute, Measurement, NiwakiError, Record
from niwaki.checkpoints.reading import Checkpoint
from niwaki.choices import Runtime
from niwaki.compression.compress import Compression, plan_compression
from niwaki.compression.foresight import foresee
from niwaki.compression.trials import Throughput, last_that_holds
from niwaki.errors import UnsupportedModelError, UsageError
from niwaki.evaluation.bench import measure
from niwaki.files import locked
from niwaki.layer.grid import Grid
from niwaki.layer.rounding import to_nearest
from niwaki.pruning.mixed_bits import COARSE, Look, cost_of_bits, examined
from niwaki.records.progress import Progress
from niwaki.runs.workplace import Workplace
from niwaki.stages import make_stage
from support.command import Command
from support.covering import FULL, some
from support.llama_cpp import Llama
from support.models import CASES, FEW_TOKENS, add_small_tokenizer, message, random_model, random_tokens, save_random
from support.pairs import save_pair_model
from support.runs import StopAt, files

gguf: Any = pytest.importorskip("gguf")

CPU = Compute("cpu", "float32")
TEXT = random_tokens(16, 24)
LOOKED: dict[str, Any] = {"calibration": TEXT[:12], "compute": CPU}
GIVEN: dict[str, Any] = {"calibration": TEXT[:12], "measurement": Measurement(TEXT[12:]), "compute": CPU}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough for headers not to count for much: 200,000 weights in bfloat16."""
    path = tmp_path_factory.mktemp("compress") / "model"
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": FEW_TOKENS}
    random_model("llama", dtype=torch.bfloat16, **sizes).save_pretrained(path)
    return add_small_tokenizer(path)


def weights(directory: Path) -> int:
    names = ("packed-*.safetensors", "*.gguf", "model*.safetensors")
    return sum(file.stat().st_size for name in names for file in directory.glob(name))


def timed_by_bytes(model: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The bytes of the dense model; bench says that a trial is as many times as fast as it is smaller."""
    dense = weights(model)

    def measured(directory: Path, *_: Any) -> Any:
        return SimpleNamespace(tokens_per_second=dense / weights(directory))

    monkeypatch.setattr("niwaki.compression.trials.measured", measured)
    return dense


def stages(plan: Compression) -> list[str]:
    return [f"{stage.name} {stage}".strip() for stage in plan.way.stages]


@pytest.mark.parametrize("size", [0.8, 0.45, 0.3])
def test_what_is_done_for_a_size(model: Path, size: float) -> None:
    plan = plan_compression(model, size, **LOOKED)
    bits = "8:64" if size == 0.8 else ""
    starts = (f"quantize int{bits}", f"embeddings int{bits}", "pack")
    assert all(each.startswith(start) for each, start in zip(stages(plan), starts, strict=True)), stages(plan)
    assert plan.runtime == "niwaki"
    assert plan.way.size <= plan.asked < plan.before
    assert all(f"stage {i}" in str(plan) for i in (1, 2, 3))
    if size < 0.5:  # of all that reaches the size what is foreseen to lose least
        assert plan.way.nats is not None
        nats = [way.nats or 0.0 for way in (plan.way, *plan.others)]
        assert nats == sorted(nats)
        assert len({way.words for way in (plan.way, *plan.others)}) == 1 + len(plan.others) > 1
        assert all(way.size <= plan.asked for way in plan.others)
        assert "foreseen to lose more" in str(plan)


def test_what_is_lost_is_trained_back(model: Path) -> None:
    """Where it is foreseen to be worth it, unless it is not wanted or there is a time to heal in."""
    given: dict[str, Any] = {"size": 0.3, **LOOKED}
    trained, plain = (plan_compression(model, **given, training=training) for training in (True, False))
    limited = plan_compression(model, **given, max_time="5s")
    assert trained.way.nats is not None
    assert plain.way.nats is not None
    assert trained.way.nats < plain.way.nats
    assert stages(trained)[0].endswith(", effort balanced:healing=1")
    assert not any("healing" in each for each in stages(plain))
    assert [stage.name for stage in limited.way.stages] == ["quantize", "heal", "embeddings", "pack"]
    assert limited.way.stages[0] == plain.way.stages[0]
    assert plan_compression(model, 0.8, **LOOKED).way.stages == plan_compression(model, 0.8, training=False).way.stages


@pytest.mark.slow
def test_training_is_a_stage_of_the_run(model: Path, tmp_path: Path) -> None:
    """The grid keeps its whole numbers, and the plan's own stages make the same files."""
    text = Calibration("demo", samples=8, length=32)
    given: dict[str, Any] = {"calibration": text, "measurement": None, "compute": CPU}
    record = niwaki.compress(model, tmp_path / "out", 0.24, **given)
    assert [stage.name for stage in record.stages] == ["quantize", "heal", "embeddings", "pack"]
    assert record.healing is not None
    assert (record.healing.method, record.healing.tokens) == ("scales", 8 * 32)
    plan = plan_compression(model, 0.24, calibration=text, compute=CPU)
    niwaki.run(model, tmp_path / "by hand", plan.way.stages, **given)
    names = {path.name for path in (tmp_path / "out").glob("packed-*")}
    assert names
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "by hand" / name).read_bytes()
    niwaki.compress(model, tmp_path / "plain", 0.24, training=False, **given)
    assert not Record.load(tmp_path / "plain" / "niwaki.json").healing


def test_a_model_is_looked_at_once(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same call finds what an earlier one kept; another text is looked at."""
    looked: list[int] = []

    def look(*given: Any) -> Any:
        looked.append(1)
        return examined(*given)

    monkeypatch.setattr("niwaki.compression.foresight.examined", look)
    text = random_tokens(6, 24, seed=5)
    first, second = (plan_compression(model, 0.3, calibration=text, compute=CPU) for _ in range(2))
    assert first == second
    assert len(looked) == 1
    plan_compression(model, 0.3, calibration=text.view(9, 16), compute=CPU)  # other windows of the same tokens
    assert len(looked) == 2
    monkeypatch.setattr("niwaki.pruning.mixed_bits.examined", look)  # by which the run itself would look again
    niwaki.compress(model, tmp_path / "out", 0.36, calibration=text[1:], compute=CPU, measurement=None)
    assert len(looked) == 3


def test_what_was_looked_at_is_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is stopped goes on with the matrix at which it was stopped, without looking at what it knows."""
    text = random_tokens(6, 24, seed=6)
    count = [0]

    def at_matrix(grid: Grid, looked: Any) -> Any:
        count[0] += 1
        if count[0] == 9:
            raise KeyboardInterrupt
        return cost_of_bits(grid, looked)

    monkeypatch.setattr("niwaki.compression.foresight.cost_of_bits", at_matrix)
    with pytest.raises(KeyboardInterrupt):
        plan_compression(model, 0.3, calibration=text, compute=CPU)
    monkeypatch.setattr("niwaki.pruning.mixed_bits.measured", None)  # sensitivities are known
    plan = plan_compression(model, 0.3, calibration=text, compute=CPU)
    assert count[0] == 9 + 7  # those of the second of two blocks
    monkeypatch.undo()
    monkeypatch.setattr("niwaki.compression.foresight._place_of", lambda *_: None)  # nothing is kept
    assert plan == plan_compression(model, 0.3, calibration=text, compute=CPU)


def test_a_coarse_plan(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its losses are of the same order, nothing is fitted for it, and the run does not use it."""
    text = random_tokens(6, 24, seed=7)
    close = plan_compression(model, 0.35, calibration=text, compute=CPU)
    monkeypatch.setattr("niwaki.pruning.mixed_bits.onto_grid", None)
    coarse = plan_compression(model, 0.35, calibration=text, compute=CPU, coarse=True)
    assert coarse.way.nats
    assert close.way.nats
    assert close.way.nats / 4 < coarse.way.nats < close.way.nats * 4
    assert (coarse.coarse, close.coarse) == (True, False)


def test_one_of_several_processes_says_what_is_planned(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: dict[str, Any] = {**LOOKED, "measurement": None}
    for number, first in enumerate((True, False)):
        session = SimpleNamespace(world=SimpleNamespace(first=first, received=lambda told: told))
        monkeypatch.setattr("niwaki.compression.compress.current_session", lambda session=session: session)
        progress = StopAt(0)
        niwaki.compress(model, tmp_path / str(number), 0.8, **given, progress=progress)
        assert any("plan for" in note for note in progress.notes) == first


def test_what_rounding_the_head_and_embeddings_costs(model: Path) -> None:
    """Of 8 bits, which are not fitted: the divergence with one of the two rounded, and with the other, as a whole."""
    tokens = random_tokens(1, 24, seed=3)
    given = (Calibration(tokens.repeat(4, 1)), CPU, Progress())
    found = foresee(Checkpoint(model), Grid(8, 64, 8.0), ("int8:64", "int4:64"), *given)
    expected = []
    for rounded in ("", "model.embed_tokens.weight", "lm_head.weight"):
        whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        assert not whole.config.tie_word_embeddings
        if rounded:
            weight = whole.get_parameter(rounded)
            weight.data = to_nearest(weight.data, Grid(8, 64), torch.bfloat16)[0]
        with torch.inference_mode():
            expected.append(whole(tokens).logits[0].double().log_softmax(-1))
    dense, *others = expected
    costs = [(dense.exp() * (dense - other)).sum(-1).mean().item() for other in others]
    assert min(costs) > 0
    assert found.ends["int8:64"] == pytest.approx(sum(costs), rel=0.02)
    assert found.ends["int4:64"] > 10 * found.ends["int8:64"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runtime", "size"),
    [
        (runtime, size)
        for i, size in enumerate(some((0.6, 0.5, 0.42, 0.36, 0.31, 0.27), 4))
        for runtime in ("niwaki", "llama.cpp")
        if FULL or runtime == ("niwaki" if size < 0.35 else ("niwaki", "llama.cpp")[i % 2])
    ],
)
def test_a_size_is_never_exceeded(model: Path, runtime: Any, size: float, tmp_path: Path) -> None:
    if runtime == "llama.cpp" and size < 0.35:
        pytest.skip("this is below the types of rows of 128, which is refused below")
    plan = plan_compression(model, size, runtime=runtime, **LOOKED)
    record = niwaki.compress(model, tmp_path / "out", size, runtime=runtime, **GIVEN)
    if plan.way.nats is not None and runtime == "niwaki":
        assert record.notes[-1].startswith(f"foreseen to lose about {plan.way.nats:.2g} nats a token; measured: ")
        assert json.loads((tmp_path / "out" / "niwaki.json").read_text())["notes"] == record.notes
    before = weights(model)
    assert record.size == {"before": before, "after": weights(tmp_path / "out")}
    assert record.loss == record.perplexity["after"].nats - record.perplexity["before"].nats
    kept = Record.load(tmp_path / "out" / "niwaki.json")
    assert (kept.size, kept.loss) == (record.size, record.loss)
    assert "magnitude" not in record.method
    assert record.pattern != "unstructured:0"
    assert not any("stored as usual" in note for note in (*record.notes, *kept.notes))
    assert weights(tmp_path / "out") <= size * before
    assert weights(tmp_path / "out") >= (min(size, 0.53) - 0.12) * before
    assert weights(tmp_path / "out") <= plan.way.size


def test_a_file_of_8_bits_has_embeddings_of_fewer(tmp_path: Path) -> None:
    """Where embeddings are most of a model and cannot have 8 bits, but all matrices can."""
    sizes = {"hidden_size": 128, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": FEW_TOKENS}
    random_model("llama tied", dtype=torch.bfloat16, **sizes).save_pretrained(tmp_path / "model")
    model = add_small_tokenizer(tmp_path / "model")
    found: dict[float, Compression] = {}
    for percent in range(70, 40, -1):
        with contextlib.suppress(UsageError):
            found[percent / 100] = plan_compression(model, percent / 100, runtime="llama.cpp", **LOOKED)
    asked = {"quantize q8_0", "export gguf"}
    size = next(
        size for size, plan in found.items() if asked <= {*stages(plan)} and "embeddings q8_0" not in stages(plan)
    )
    niwaki.compress(model, tmp_path / "out", size, runtime="llama.cpp", **GIVEN)
    assert weights(tmp_path / "out") <= size * weights(model)


def test_below_its_smallest_types_llama_cpp_is_refused(model: Path) -> None:
    """With the smallest size, which is given, and the reason why no tokens were removed."""
    least = min(plan_compression(model, 0.5, runtime="llama.cpp", **LOOKED).reach, key=lambda way: way.size)
    assert [stage.name for stage in least.stages] == ["quantize", "embeddings", "export"]
    assert plan_compression(model, least.size, runtime="llama.cpp", **LOOKED).way.stages == least.stages
    with pytest.raises(
        UsageError, match=r"4.13 bits a weight.* and fewer tokens were not considered: .*; give at least"
    ):
        plan_compression(model, least.size - 1000, runtime="llama.cpp", **LOOKED)


def test_fewer_parameters_for_transformers(model: Path, tmp_path: Path) -> None:
    plan = plan_compression(model, parameters=0.8, max_time="5s", **LOOKED)
    assert stages(plan) == ["shrink parameters 0.8", "heal tokens 1M, max_time 5s"] or plan.way.stages[1].name == "heal"
    record = niwaki.compress(model, tmp_path / "out", parameters=0.8, **GIVEN)
    assert record.structure
    assert record.structure.parameters["after"] <= 0.8 * record.structure.parameters["before"]


@pytest.mark.slow
def test_the_same_call_resumes(model: Path, tmp_path: Path) -> None:
    niwaki.compress(model, tmp_path / "whole", 0.45, **GIVEN)
    with pytest.raises(KeyboardInterrupt):
        niwaki.compress(model, tmp_path / "out", 0.45, **GIVEN, progress=StopAt(9))
    niwaki.compress(model, tmp_path / "out", 0.45, **GIVEN)
    assert files(tmp_path / "out", "recipe.toml") == files(tmp_path / "whole", "recipe.toml")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "say how small"),
        ({"size": 0.4, "parameters": 0.5}, "one of these"),
        ({"size": 1.0}, "not more than"),
        ({"size": "1GB"}, "not more than"),
        ({"size": 0.01}, "cannot be reached"),
        ({"size": 0.4, "runtime": "transformers"}, "parameters"),
        ({"parameters": 0.5, "runtime": "niwaki"}, "parameters are for transformers"),
        ({"size": "much"}, "much"),
        ({"size": 40}, "did you mean 0.4"),
        ({"size": "120%"}, "got '120%'"),
        ({"size": 0.4, "loss": 0.1}, "one of these"),
        ({"loss": 0.1, "speed": 2}, "one of these"),
        ({"size": 0.4, "also": ["demo"]}, "are for a loss"),
        ({"loss": "little"}, "loss is a number"),
        ({"loss": 0}, "loss is a number"),
        ({"loss": "nan"}, "loss is a number"),
        ({"size": "nan"}, "nan"),
        ({"speed": float("inf")}, "speed is a number"),
        ({"parameters": 1e12}, "not more than"),
        ({"loss": 0.1, "max_time": "5s", "measurement": None}, "name another text"),
        ({"loss": 0.1, "measurement": Measurement(samples=3)}, "4 windows"),
        ({"speed": "50%"}, "speed is a number"),
        ({"speed": 2.0, "runtime": "vllm"}, "not measured here"),
        ({"speed": 2.0, "runtime": "llama.cpp"}, "pip install llama-cpp-python"),
        ({"size": 0.5, "runtime": "llama.cpp", "out": "out.gguf"}, "directory, with the file"),
        ({"loss": 0.1, "runtime": "llama.cpp", "out": "out.gguf"}, "directory, with the file"),
    ],
)
def test_refusals(
    model: Path, arguments: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(NiwakiError, match=said):
        niwaki.compress(model, **{"out": tmp_path / "out", **GIVEN, **arguments})
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("size", [0.25, 0.2])
def test_a_size_is_not_exceeded_in_float32(model: Path, size: float, tmp_path: Path) -> None:
    """Whose scales, and all that is not rounded, have 4 bytes."""
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).save_pretrained(tmp_path / "model")
    add_small_tokenizer(tmp_path / "model")
    record = niwaki.compress(tmp_path / "model", tmp_path / "out", size, **{**GIVEN, "measurement": None})
    found, before = weights(tmp_path / "out"), weights(tmp_path / "model")
    assert 0.9 * size * before < found <= size * before
    assert f"{found / before:.2f} of " in record.notes[-2]


# A loss, a speed


@given(st.integers(1, 40).flatmap(lambda count: st.tuples(st.just(count), st.integers(-1, count - 1))), st.randoms())
def test_the_last_that_holds_is_found(asked: tuple[int, int], drawing: Random) -> None:
    """Whatever is guessed; and where too few can be tried, what is found holds."""
    count, right = asked
    tried: list[int] = []

    def holds(number: int) -> bool:
        tried.append(number)
        return number <= right

    found, certain = last_that_holds(count, holds, lambda: drawing.randrange(count))
    assert found <= right
    assert found == right or not certain
    assert len(tried) == len(set(tried)) <= 7
    assert found == -1 or found in tried


def test_good_guesses_need_few_trials() -> None:
    tried: list[int] = []

    def holds(number: int) -> bool:
        tried.append(number)
        return number <= 12

    assert last_that_holds(30, holds, lambda: 12) == (12, True)
    assert tried == [12, 13]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    """With a name, by which a run that is repeated knows it."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("The cat sat on the mat, and the dog lay down beside it. " * 80)
    return Calibration(str(file), samples=8, length=24)


#: What is tried for it is several ways.
LOSS = 0.02


@pytest.fixture(scope="module")
def within(model: Path, text: Calibration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest model within ``LOSS``."""
    out = tmp_path_factory.mktemp("within") / "out"
    niwaki.compress(model, out, loss=LOSS, calibration=text, compute=CPU)
    return out


@pytest.mark.slow
def test_the_smallest_within_a_loss(model: Path, text: Calibration, within: Path, tmp_path: Path) -> None:
    """It is what the same way makes by itself, and the one after it was tried and is not within."""
    record = niwaki.Record.load(within / "niwaki.json")
    lost = record.perplexity["after"].above(record.perplexity["before"])
    assert lost.standard_error is not None
    assert lost.nats + 1.96 * lost.standard_error <= LOSS
    assert any(note.startswith("tried") for note in record.notes)
    assert record.notes[-1].startswith("the smallest within the bound is")
    assert not (within.parent / ".out.trials").exists()
    stages = niwaki.Recipe.read(within).stages
    niwaki.run(model, tmp_path / "same", niwaki.Recipe(stages), calibration=text, compute=CPU)
    assert files(tmp_path / "same", "recipe.toml", "README.md") == files(within, "recipe.toml", "README.md")


@pytest.mark.slow
def test_a_loss_that_is_kept_on_several_texts(model: Path, text: Calibration, tmp_path: Path) -> None:
    """The worst of them counts: what is within the bound on one alone is not on both."""
    other = tmp_path / "other.txt"
    other.write_text("def f(x): return [x, x + 1, x * 2]\n" * 200)
    given: dict[str, Any] = {"loss": 0.03, "calibration": text, "compute": CPU}
    alone = niwaki.compress(model, tmp_path / "alone", **given)
    both = niwaki.compress(model, tmp_path / "both", also=[str(other)], **given)
    measurement = Measurement(str(other), samples=16, length=24)
    lost = []
    for name in ("alone", "both"):
        after = niwaki.evaluate(tmp_path / name, measurement, compute=CPU)
        difference = after.above(niwaki.evaluate(model, measurement, compute=CPU))
        assert difference.standard_error is not None
        lost.append(difference.nats + 1.96 * difference.standard_error)
    assert lost[1] <= 0.03
    assert weights(tmp_path / "both") >= weights(tmp_path / "alone")
    if lost[0] > 0.03:
        assert f"on {other}" in "".join(both.notes)
    assert alone.notes[-1].startswith("the smallest within the bound")


class StopAtTrial(Progress):
    def __init__(self, last: int) -> None:
        self.last, self.seen = last, set[str]()

    def status(self, what: str, done: int = 0, count: int = 0) -> None:
        if what.endswith(": solve"):
            self.seen.add(what.partition(",")[0])
        if what.startswith(f"trial {self.last},") and done:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_trials_that_are_there_are_not_repeated(model: Path, text: Calibration, within: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"loss": LOSS, "calibration": text, "compute": CPU}
    with pytest.raises(KeyboardInterrupt):
        niwaki.compress(model, tmp_path / "out", **given, progress=StopAtTrial(2))
    assert len([*(tmp_path / ".out.trials").glob("*-bytes")]) == 1
    again = StopAtTrial(99)
    record = niwaki.compress(model, tmp_path / "out", **given, progress=again)
    assert "trial 1" not in again.seen
    assert files(tmp_path / "out", "recipe.toml") == files(within, "recipe.toml")
    assert json.loads((tmp_path / "out" / "niwaki.json").read_text())["notes"] == record.notes


@pytest.mark.slow
def test_trials_that_were_measured_on_another_text_are(model: Path, text: Calibration, tmp_path: Path) -> None:
    """Repeated, although their recipes only have its name."""
    held = tmp_path / "held.txt"
    given: dict[str, Any] = {"loss": LOSS, "calibration": text, "measurement": str(held), "compute": CPU}
    held.write_text("The dog sat on the mat, and the cat lay down beside it. " * 80)
    with pytest.raises(KeyboardInterrupt):
        niwaki.compress(model, tmp_path / "out", **given, progress=StopAtTrial(2))
    held.write_text("The cat sat on the dog, and the mat lay down beside it. " * 80)
    again = StopAtTrial(99)
    niwaki.compress(model, tmp_path / "out", **given, progress=again)
    assert "trial 1" in again.seen


@pytest.mark.parametrize("where", ["niwaki.compression.trials._Folder.move", "niwaki.runs.workplace.Workplace.move"])
@pytest.mark.slow
def test_stopped_before_the_chosen_one_is_moved(
    model: Path, text: Calibration, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a directory that is there. The same call moves it, tries nothing, and says all of it once."""
    given: dict[str, Any] = {"loss": 5, "calibration": text, "compute": CPU}  # which the first way has
    out = tmp_path / "out"
    out.mkdir()

    def stopped(place: Any, *arguments: Any) -> None:
        if "_Folder" in where or place._out == out:  # trials are moved as outputs are, each to its own place
            raise KeyboardInterrupt
        moved(place)

    moved = Workplace.move
    with monkeypatch.context() as changed:
        changed.setattr(where, stopped)
        with pytest.raises(KeyboardInterrupt):
            niwaki.compress(model, out, **given)
    assert not (out / "niwaki.json").exists()
    again = StopAtTrial(99)
    record = niwaki.compress(model, out, **given, progress=again)
    assert not again.seen
    assert len(record.notes) == len(set(record.notes))
    assert record.notes == niwaki.Record.load(out / "niwaki.json").notes
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    niwaki.compress(model, tmp_path / "other", **given)
    assert files(out) == files(tmp_path / "other")


@pytest.mark.slow
def test_where_trials_are(model: Path, text: Calibration, tmp_path: Path) -> None:
    """Nothing that is not theirs is touched, and an empty directory that is there gets the files."""
    given: dict[str, Any] = {"loss": 5, "calibration": text, "compute": CPU}  # which the first way has
    folder = tmp_path / "a" / ".out.trials"
    folder.mkdir(parents=True)
    (folder / "mine").write_text("p")
    for restart in (False, True):
        with pytest.raises(UsageError, match="'mine', which is of no trial"):
            niwaki.compress(model, tmp_path / "a" / "out", **given, restart=restart)
    assert (folder / "mine").read_text() == "p"
    (folder / "mine").unlink()
    inside = shutil.copytree(model, folder / "model")
    with pytest.raises(UsageError, match="where trials are"):
        niwaki.compress(inside, tmp_path / "a" / "out", **given, restart=True)
    shutil.rmtree(inside)
    (tmp_path / "a" / ".out.partial").mkdir()
    for place in (folder, tmp_path / "a" / ".out.partial"):
        with locked(place, place), pytest.raises(UsageError, match="out is being written by another run"):
            niwaki.compress(model, tmp_path / "a" / "out", **given)
        with locked(place, place), pytest.raises(UsageError, match="out is being written by another run"):
            niwaki.prune(model, tmp_path / "a" / "out", 0.5, calibration=text, compute=CPU)
        place.rmdir()
    folder.write_text("")
    with pytest.raises(UsageError, match="in the way of trials"):
        niwaki.compress(model, tmp_path / "a" / "out", **given)
    folder.unlink()
    out = tmp_path / "a" / "out"
    out.mkdir()
    number = out.stat().st_ino
    niwaki.compress(model, out, **given)
    assert out.stat().st_ino == number
    assert (out / "packed.json").exists()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["out"]
    niwaki.compress(model, tmp_path / "b" / "c" / "out", **given)
    assert files(tmp_path / "b" / "c" / "out") == files(out)


@pytest.mark.slow
def test_losses_that_cannot_be_kept(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a loss of 1e-07 cannot be kept: the largest form has .* nats a token"):
        niwaki.compress(model, tmp_path / "out", loss=1e-7, **GIVEN)
    with pytest.raises(UsageError, match="of text to measure on"):
        niwaki.compress(model, tmp_path / "out", loss=0.1, calibration=TEXT, measurement=None, restart=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_largest_that_is_fast_enough(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what bench says: here time in proportion to bytes."""
    dense = timed_by_bytes(model, monkeypatch)
    monkeypatch.setattr("niwaki.compression.trials.free_space", lambda _: 0)  # for packed forms to be timed
    record = niwaki.compress(model, tmp_path / "out", speed=2.5, **GIVEN)
    assert 2.5 <= dense / weights(tmp_path / "out") <= 2.5 * 1.06
    assert "times the tokens a second" in record.notes[-1]
    with pytest.raises(UsageError, match="30 times the speed cannot be reached here: the smallest form has"):
        niwaki.compress(model, tmp_path / "out2", speed=30, **GIVEN)


@pytest.mark.slow
def test_a_speed_that_was_interrupted(
    model: Path, text: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was tried is used again, although other speeds are foreseen the second time."""
    dense = timed_by_bytes(model, monkeypatch)
    given: dict[str, Any] = {"speed": 2.5, "calibration": text, "measurement": None, "compute": CPU}
    for faster, last in ((1.0, 2), (1.06, 99)):
        speeds = Throughput(1, (dense // 8, 8 * faster), (dense // 2, 2 * faster))
        monkeypatch.setattr("niwaki.compression.compress.throughput", lambda *_, speeds=speeds: speeds)
        progress = StopAtTrial(last)
        with pytest.raises(KeyboardInterrupt) if last == 2 else contextlib.nullcontext():
            niwaki.compress(model, tmp_path / "out", **given, progress=progress)
    assert "trial 1" not in progress.seen
    assert 2.5 <= dense / weights(tmp_path / "out") <= 2.5 * 1.06


@pytest.mark.parametrize(("runtime", "size"), [("niwaki", 0.3), ("llama.cpp", 0.4)])
def test_tokens_a_second_of_a_plan(model: Path, runtime: Runtime, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the dense model and of packed forms or files, the time for a token between them by bytes."""
    monkeypatch.setattr("niwaki.compression.trials.measured", measure)  # in this process
    monkeypatch.setitem(
        sys.modules, "llama_cpp", SimpleNamespace(Llama=Llama, llama_supports_gpu_offload=lambda: False)
    )
    plan = plan_compression(model, size, runtime=runtime, **LOOKED, measure_speed=True)
    assert plan.speed
    (small, fast), (large, slow) = plan.speed.smallest, plan.speed.largest
    assert min(plan.speed.dense, fast, slow) > 0
    largest, smallest = plan.reach
    assert 0.95 * largest.size < large <= largest.size  # as large as the real ones
    if runtime == "niwaki":
        assert 0.95 * smallest.size < small <= smallest.size
    else:  # whose smallest has fewer bits for some rows
        assert smallest.size < small < large
    assert 1 / plan.speed.of((small + large) // 2) == pytest.approx((1 / fast + 1 / slow) / 2, rel=1e-3)
    told = str(plan).splitlines()
    assert "tokens/s now" in told[0]
    assert "tokens/s" in told[1]
    for way in plan.others:
        (line,) = (each for each in told if each.endswith(f": {way.words}"))
        assert "tokens/s" in line


def test_what_is_not_timed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {**LOOKED, "measure_speed": True}
    monkeypatch.setattr("niwaki.compression.trials.free_space", lambda _: weights(model) // 2)
    assert "tokens a second were not measured: " in (told := str(plan_compression(model, 0.8, **given)))
    assert "free, and a form of" in told
    with pytest.raises(UsageError, match="how fast smaller dense models are is not foreseen"):
        plan_compression(model, speed=2, runtime="transformers", **LOOKED)
    memory = SimpleNamespace(available=weights(model))
    monkeypatch.setattr("niwaki.compression.trials.psutil.virtual_memory", lambda: memory)
    with pytest.raises(UsageError, match=r"of weights do not fit in the .* of memory"):
        plan_compression(model, speed=2, **LOOKED)
    plan = plan_compression(model, parameters=0.9, **given)
    assert "tokens" not in str(plan).splitlines()[0]


def test_plans_for_a_loss_and_a_speed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest of the sizes that are tried that is foreseen to keep it, or the largest that is fast enough."""
    within, beyond = (plan_compression(model, loss=loss, **LOOKED) for loss in (0.05, 0.01))
    assert within.way.size < beyond.way.size
    assert (beyond.way.nats or 1) <= 0.01 < (within.way.nats or 0) <= 0.05
    other = plan_compression(model, loss=0.05, also=["demo-held"], **LOOKED)
    assert other.way.nats is not None
    assert other.way.size > within.way.size
    assert 0.03 < other.way.nats + other.way.elsewhere <= 0.05
    smaller = plan_compression(model, within.way.size * 0.95 / within.before, **LOOKED)
    assert (smaller.way.nats or 0) > 0.05
    assert "only foreseen" in str(within)
    assert "only foreseen" not in str(smaller)
    with pytest.raises(UsageError, match=r"1e-07 cannot be kept: the largest form has about .* nats a token"):
        plan_compression(model, loss=1e-7, **LOOKED)
    speeds = Throughput(100, (weights(model) // 10, 400), (weights(model) // 2, 200))
    monkeypatch.setattr("niwaki.compression.compress.throughput", lambda *_: speeds)
    plan = plan_compression(model, speed=2.5, **LOOKED)
    assert plan.speed == speeds
    assert 250 <= speeds.of(plan.way.size) < 260
    with pytest.raises(UsageError, match="5 times the speed cannot be reached here: the smallest form has about 3"):
        plan_compression(model, speed=5, **LOOKED)


def test_a_plan_says_how_to_make_it_by_hand(model: Path) -> None:
    """Its stages as text, which are read as the same."""
    for asked in ({"size": 0.3}, {"size": 0.2}, {"size": 0.5, "runtime": "llama.cpp"}, {"parameters": 0.9}):
        plan = plan_compression(model, **asked, max_time="9s", **LOOKED)
        words = shlex.split(str(plan).splitlines()[-1].partition("same options: ")[2])
        assert words[:4] == ["niwaki", "run", str(model), "OUT"]
        for stage, text in zip(plan.way.stages, words[5::2], strict=True):
            assert type(made := make_stage(text)) is type(stage)
            assert [str(value) for value in vars(made).values()] == [str(value) for value in vars(stage).values()]


@pytest.mark.slow
def test_healing_gets_what_is_left_of_the_time(model: Path, tmp_path: Path) -> None:
    record = niwaki.compress(model, tmp_path / "out", 0.45, max_time="6s", **GIVEN)
    assert record.healing
    assert record.healing.limit == pytest.approx(5.7 - record.stages[0].seconds, abs=0.01)
    assert sum(stage.seconds for stage in record.stages) < 8


@pytest.mark.parametrize("kind", ["gpt2", "bert", "gemma3n_text"])
def test_models_with_few_learned_positions(tmp_path: Path, kind: str) -> None:
    """Fewer than the tokens whose predictions are compared; and states in several streams."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 24}
    if kind == "gpt2":
        sizes = {"n_embd": 64, "n_inner": 64, "n_positions": 24, "tie_word_embeddings": False}
    elif kind == "gemma3n_text":
        sizes = {"hidden_size": 64, "intermediate_size": [64] * 4, "head_dim": 16, "laurel_rank": 64}
        sizes |= {"hidden_size_per_layer_input": 64}
    config = CASES[kind]() if kind in CASES else AutoConfig.for_model(kind, num_hidden_layers=2, num_attention_heads=2)
    config.update({**sizes, "vocab_size": FEW_TOKENS, "vocab_size_per_layer_input": FEW_TOKENS})
    save_random(tmp_path / "model", config)
    plan = plan_compression(tmp_path / "model", loss=0.5, calibration=random_tokens(40, 24), compute=CPU)
    assert plan.way.nats is not None
    assert 0 < plan.way.nats < 0.5


@pytest.fixture(scope="module")
def shrunk(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows are no multiple of 64 any more."""
    out = tmp_path_factory.mktemp("shrunk") / "out"
    niwaki.shrink(model, out, neurons=0.375, **GIVEN)
    return out


@pytest.mark.parametrize("size", [0.6, 0.3, 0.2])
def test_after_shrinking(shrunk: Path, size: float, tmp_path: Path) -> None:
    """Each of these rows has one scale."""
    record = niwaki.compress(shrunk, tmp_path / "out", size, **GIVEN)
    assert weights(tmp_path / "out") <= size * weights(shrunk)
    assert record.quantization
    assert ":" not in record.quantization
    assert measure(tmp_path / "out", 4, 4, 1, CPU).tokens_per_second > 0


def test_models_that_a_format_has_not(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="transformers"):
        plan_compression(save_pair_model(tmp_path / "t5", "t5"), 0.5)
    random_model("llama").save_pretrained(tmp_path / "narrow")
    random_model("gpt2", vocab_size=FEW_TOKENS, n_embd=64, n_inner=64, n_head=2).save_pretrained(tmp_path / "gpt2")
    for name, said in (("narrow", "groups of 32"), ("gpt2", "cannot be exported to GGUF")):
        with pytest.raises(UnsupportedModelError, match=said):
            plan_compression(add_small_tokenizer(tmp_path / name), 0.9, runtime="llama.cpp", **LOOKED)


@pytest.mark.slow
def test_for_vllm(model: Path, tmp_path: Path) -> None:
    """Packed integers, with what is not rounded as it is, and no more bytes than asked for."""
    record = niwaki.compress(model, tmp_path / "out", 0.6, runtime="vllm", **LOOKED)
    assert [stage.name for stage in record.stages] == ["quantize", "export"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    made = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert made <= 0.6 * Checkpoint(model).size
    before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    said = message(lambda: niwaki.compress(model, tmp_path / "again", speed=2, runtime="vllm"), UsageError)
    assert said == "the speed of vllm is not measured here; give a size or a loss"


@pytest.mark.slow
def test_the_command(model: Path, niwaki_: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("niwaki.compression.trials.measured", measure)  # in this process
    texts = ("--calibration", "demo", "--samples", 4, "--length", 32, "--text", "demo-held", "--text-samples", 2)
    said = niwaki_("compress", model, tmp_path / "out", "--size", "0.4", "--plan", *texts)
    assert said.code == 0, said.err
    assert "stage 1: quantize int" in said.out
    assert "losses are coarse, from a short look at the model; --closely looks as the run itself does" in said.out
    assert "foreseen to lose more, where other kinds of text count for 30 %:" in said.out
    assert not (tmp_path / "out").exists()
    done = niwaki_("compress", model, tmp_path / "out", "--size", "0.4", *texts)
    assert done.code == 0, done.err
    assert "stage 1: quantize int" in done.out + done.err
    *_, where, summary, then = done.out.splitlines()
    assert where == f"written to {tmp_path / 'out'}"
    assert summary == Record.load(tmp_path / "out" / "niwaki.json").summary
    assert re.fullmatch(r"[\d.]+ KiB, 0\.\d+ of [\d.]+ KiB; -?[\d.]+ ±[\d.]+ nats a token lost", summary)
    assert then == f'next: niwaki generate {tmp_path / "out"} "PROMPT"'
    record = json.loads((tmp_path / "out" / "niwaki.json").read_text())
    assert [stage["name"] for stage in record["stages"]] == ["quantize", "embeddings"]
    assert "pack" in (tmp_path / "out" / "recipe.toml").read_text()
    wrong = niwaki_("compress", "demo", tmp_path / "out2", "--size", "tiny")
    assert wrong.code == 2
    wrong = niwaki_("compress", "demo", tmp_path / "out2", "--size", "0.4", "--quick", "--plan", "--closely")
    assert (wrong.code, "--closely is for --plan without --quick" in wrong.err) == (2, True)
    planned = niwaki_("compress", model, tmp_path / "out2", "--loss", "3", "--plan", "--closely", *texts[:-4])
    assert "tokens/s now" in planned.out
    assert "this size is only foreseen" in planned.out
    assert not (tmp_path / "out2").exists()


@pytest.mark.parametrize("runtime", ["llama.cpp", "vllm"])
def test_the_size_of_a_quantized_model_is_that_of_its_files(model: Path, tmp_path: Path, runtime: Any) -> None:
    niwaki.compress(model, tmp_path / "small", 0.6, runtime=runtime, **{**GIVEN, "measurement": Measurement(samples=0)})
    source = tmp_path / "small" / "model.gguf" if runtime == "llama.cpp" else tmp_path / "small"
    if runtime == "vllm":  # as others make them
        config = json.loads((source / "config.json").read_text())
        del config["pruning_config"]
        (source / "config.json").write_text(json.dumps(config))
        (source / "README.dense.md").unlink()
    size = weights(tmp_path / "small")
    plan = plan_compression(source, 0.7, **LOOKED)
    assert plan.before == pytest.approx(size, rel=0.02)  # but for what is beside the tensors
    assert plan.way.size <= 0.7 * size
    record = niwaki.compress(source, tmp_path / "smaller", 0.7, **{**GIVEN, "measurement": Measurement(samples=0)})
    assert record.size == {"before": plan.before, "after": weights(tmp_path / "smaller")}
    with pytest.raises(UsageError, match="which is not more than the"):
        plan_compression(source, int(1.1 * size), **LOOKED)


def test_quick(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short look, which the stages go by too, and less work in them."""
    looks = []

    def looked(*given: Any, **more: Any) -> Any:
        looks.append(next(each for each in given if isinstance(each, Look)))
        return examined(*given, **more)

    monkeypatch.setattr("niwaki.compression.foresight.examined", looked)
    monkeypatch.setattr("niwaki.pruning.mixed_bits.examined", looked)
    plan = plan_compression(model, 0.3, quick=True, **LOOKED)
    assert stages(plan)[0].endswith("effort fast")
    assert not any("healing" in stage for stage in stages(plan))
    assert "from a short look at the model\n" in f"{plan}\n"
    record = niwaki.compress(model, tmp_path / "out", 0.3, quick=True, **GIVEN)
    assert looks == [COARSE]
    assert record.effort["name"] == "fast"
    assert record.size["after"] <= 0.3 * record.size["before"]
    planned = plan_compression(model, parameters=0.9, quick=True, **LOOKED)
    assert next(each for each in stages(planned) if each.startswith("shrink")).endswith("effort fast")
    for runtime in ("niwaki", "llama.cpp"):  # 8 bits take no fit, which would be slower
        (quick, usual) = (
            plan_compression(model, 0.7, runtime=runtime, quick=quick, **LOOKED) for quick in (True, False)
        )
        assert stages(quick) == stages(usual)


def test_a_speed_is_that_of_what_users_run(
    model: Path, text: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trial by itself, whatever the run computes in, beside the model that is given."""
    asked = []

    def measured(directory: Path, *numbers: Any) -> Any:
        asked.append((directory, *numbers))
        return SimpleNamespace(tokens_per_second=weights(model) / weights(directory))

    monkeypatch.setattr("niwaki.compression.trials.measured", measured)
    speeds = Throughput(1, (weights(model) // 8, 8), (weights(model) // 2, 2))
    monkeypatch.setattr("niwaki.compression.compress.throughput", lambda *_: speeds)
    compute = Compute("cpu", "float32", max_memory="1GiB", tf32="never")
    niwaki.compress(model, tmp_path / "out", speed=1.5, calibration=text, measurement=None, compute=compute, quick=True)
    assert {each[4:] for each in asked} == {(Compute("cpu"),)}
    assert [each[0] == model for each in asked] == [False, True] * (len(asked) // 2)


def test_speeds_between_and_below_those_that_were_measured() -> None:
    """Time is linear in bytes, and never less than in proportion to them."""
    speeds = Throughput(100.0, (1000, 400.0), (2000, 250.0))
    assert speeds.of(1500) == pytest.approx(1 / ((1 / 400 + 1 / 250) / 2))
    assert speeds.of(900) == pytest.approx(1 / (1 / 400 - (1 / 250 - 1 / 400) / 10))
    assert speeds.of(3000) == 250
    assert Throughput(100.0, (1000, 400.0), (2000, 50.0)).of(900) == pytest.approx(400 * 1000 / 900)
