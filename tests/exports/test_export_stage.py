"""Exports as the last stage of a run: what export makes of the model before, resumed, and refused at the start."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import niwaki
from niwaki import Export, Heal, Measurement, Pack, Prune, Quantize, QuantizeEmbeddings, Recipe, Record, Shrink
from niwaki.errors import CheckpointError, OutputError, UnsupportedModelError, UsageError
from niwaki.records.progress import Progress
from niwaki.runs.stage import Stage
from niwaki.stages import make_stage, stages_of
from support.command import Command, niwaki_  # noqa: F401 - a fixture
from support.covering import FULL
from support.healing import TOKENS
from support.llama_cpp import LLAMA_CPP, ask, distance
from support.models import (
    EMBEDDED_VOCABULARY,
    add_tokenizer,
    edit_json,
    message,
    random_model,
    random_tokens,
    save_model,
    sparse_model,
)
from support.runs import files

pytest.importorskip("gguf")

PRUNED: tuple[Stage, ...] = (Prune("2:4", effort="fast"),)
ROUNDED: tuple[Stage, ...] = (*PRUNED, Quantize("int8", effort="fast"))
SHRUNK: tuple[Stage, ...] = (Shrink(neurons=0.25), Quantize("int8", effort="fast"))
FORMATS: list[Any] = ["packed", "compressed-tensors", "gguf-f16", "gguf-q8_0", "gguf-q4_0"]
#: What a run says of itself and an export does not: in the record times, on the card the stages.
CARDS = {"README.md", "README.dense.md"}


def saved(path: Path, case: str = "llama grouped", **changes: Any) -> Path:
    random_model(case, vocab_size=EMBEDDED_VOCABULARY, **changes).save_pretrained(path)
    return add_tokenizer(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("exports") / "model")


def work(model: Path, out: Path, *stages: Stage | str, **more: Any) -> Record:
    options: dict[str, Any] = {"calibration": TOKENS, "measurement": None, "compute": "cpu", **more}
    return niwaki.run(model, out, stages, **options)


def left(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


class StopAt(Progress):
    """Interrupts the run in the middle of its last stage, and notes what it is told."""

    def __init__(self, what: str = "") -> None:
        self.what, self.notes, self.places = what, list[str](), list[str]()

    def status(self, what: str, done: int = 0, count: int = 0) -> None:
        if self.what and what == self.what and 2 * done > count:
            raise KeyboardInterrupt

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stopped(self, done: int, blocks: int, where: str = "") -> None:
        self.places.append(where)


@pytest.fixture(scope="module", params=[ROUNDED, SHRUNK], ids=["prune, quantize", "shrink, quantize"])
def before(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The stages before an export, and what they come to."""
    out = tmp_path_factory.mktemp("by hand") / "model"
    work(model, out, *request.param)
    return request.param, out


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.slow
def test_the_same_as_the_export_of_what_comes_before(tmp_path: Path, model: Path, form: Any, before: Any) -> None:
    told, (stages, dense) = StopAt(), before
    if not FULL and (FORMATS.index(form) + len(stages[0].name)) % 2:
        pytest.skip("after the other stages")
    record = work(model, tmp_path / "out", *stages, Export(form), progress=told)
    said = niwaki.export(dense, tmp_path / "exported", form)
    found, expected = (files(tmp_path / name, "recipe.toml") for name in ("out", "exported"))
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name] and name not in CARDS] == []
    assert set(said) <= set(told.notes)
    kept, by_hand = (Record.load(tmp_path / name / "niwaki.json") for name in ("out", "exported"))
    # The model that is exported by hand was stored as usual before, and the record says so.
    as_usual = [note for note in by_hand.notes if "stored as usual" in note]
    assert kept.notes == [note for note in by_hand.notes if note not in as_usual]
    assert kept.quantization == "int8"
    assert [stage.name for stage in record.stages] == [*(stage.name for stage in stages), "export"]
    assert record.stages[-1].asked == form
    assert record.stages[-1].perplexity is None  # what it rounds is not measured
    assert [stage.name for stage in kept.stages] == [stage.name for stage in stages]
    if form == "packed":
        work(model, tmp_path / "short", *stages, Pack())
        assert files(tmp_path / "short", "recipe.toml") == found
    if form.startswith("gguf"):
        assert {*found} == {f"model-{form[5:].upper()}.gguf", *CARDS}


@pytest.mark.parametrize(
    ("form", "there"),
    [
        *(("packed", False), ("compressed-tensors", True), ("gguf-q8_0", False)),
        *[("packed", True), ("compressed-tensors", False), ("gguf-q8_0", True)] * FULL,
    ],
)
def test_stopped_while_it_is_written(tmp_path: Path, model: Path, form: Any, there: bool) -> None:
    """Twice; and another format, which has not begun, is not held to the one before."""
    doing = "packing, tensor" if form == "packed" else "exporting, tensor"
    work(model, tmp_path / "whole", *ROUNDED, Export(form))
    if there:
        (tmp_path / "out").mkdir()
    for how in (Export(form), Export("gguf-f16"), Export(form)):
        what = "exporting, tensor" if how.format == "gguf-f16" else doing
        with pytest.raises(KeyboardInterrupt):
            work(model, tmp_path / "out", *ROUNDED, how, progress=(told := StopAt(what)))
        assert told.places == ["stage 3 of 3, export"]
    again = StopAt()
    work(model, tmp_path / "out", *ROUNDED, Export(form), progress=again)
    assert any("resuming after 2 of 3 stages" in note for note in again.notes)
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert left(tmp_path) == ["out", "whole"]


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([Export("gguf-f16")], "nothing to do before the export"),
        ([Heal(tokens=400), Export("gguf-f16")], "nothing to heal yet"),
        ([*PRUNED, Export("gguf-f16"), Heal(tokens=400)], "nothing comes after export"),
        ([*PRUNED, Export("packed"), Pack()], "nothing comes after export"),
        ([Shrink(neurons=0.25), Export("packed")], "export comes after prune or quantize"),
        ([Prune(0.5, keep_format=True), Export("packed")], "without keep_format"),
        ([*PRUNED, Export("compressed-tensors")], "has no weights on a grid"),
        (["prune 0.5", "export gguf-q5_0"], "format must be packed, compressed-tensors, w8a8, fp8, gguf, gguf-f16, "),
        (["prune 0.5", "export form=packed"], "no parameter of the stage export is called 'form'; did you mean format"),
    ],
    ids=str,
)
def test_what_cannot_be_exported_is_refused_at_the_start(
    tmp_path: Path, model: Path, stages: list[Any], said: str
) -> None:
    assert said in message(lambda: work(model, tmp_path / "out", *stages))
    assert left(tmp_path) == []


def test_what_llama_cpp_cannot_is_refused_at_the_start(tmp_path: Path) -> None:
    """It shows in the model that is given, and in what stages are to do to that."""
    lower, qwen, export = saved(tmp_path / "lower"), saved(tmp_path / "qwen", "qwen2"), Export("gguf-q8_0")
    edit_json(lower / "tokenizer.json", normalizer={"type": "Lowercase"})
    for source, stage, said in (
        (save_model(tmp_path / "gpt2", "gpt2"), PRUNED[0], "(gpt2) cannot be exported to GGUF"),
        (saved(tmp_path / "gelu", hidden_act="gelu"), PRUNED[0], "hidden_act is 'gelu'"),
        (saved(tmp_path / "eps", rms_norm_eps=0.0), PRUNED[0], "rms_norm_eps is 0.0"),
        (lower, PRUNED[0], "changes texts (Lowercase)"),
        (qwen, Shrink(heads=0.5), "2 heads of 8 are not as wide as the model (32)"),
    ):
        with pytest.raises(UnsupportedModelError, match=re.escape(said)):
            work(source, tmp_path / "out", stage, export)
    assert left(tmp_path) == ["eps", "gelu", "gpt2", "lower", "qwen"]
    work(qwen, tmp_path / "out", Shrink(neurons=0.25), export)


def test_heads_that_llama_cpp_takes_without_the_others(tmp_path: Path) -> None:
    """Too wide together in the model that is given, and no more in what is exported."""
    model = saved(tmp_path / "m", "qwen2", head_dim=16)
    assert "keep all heads" in message(lambda: niwaki.export(model, tmp_path / "f", "gguf-f16"), UnsupportedModelError)
    work(model, tmp_path / "out", Shrink(heads=0.5), Export("gguf-f16"))
    assert (tmp_path / "out" / "model-F16.gguf").exists()


def test_without_the_package(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "need gguf" in message(lambda: work(model, tmp_path / "out", *PRUNED, Export("gguf-f16")), OutputError)
    assert left(tmp_path) == []


def test_weights_that_the_format_cannot_have(tmp_path: Path) -> None:
    """They show at the end, and what comes before is kept; another format can follow it."""
    source = saved(tmp_path / "model")
    with torch.no_grad():
        large = AutoModelForCausalLM.from_pretrained(source)
        large.model.embed_tokens.weight[3, 3] = 65_530.0
    large.save_pretrained(source)
    stages = (Quantize("int8", solver="magnitude", effort="fast"), Export("gguf-q8_0"))
    assert "a weight of 65530" in message(lambda: work(source, tmp_path / "out", *stages), UnsupportedModelError)
    assert left(tmp_path) == [".out.partial", ".out.partial.json", "model"]
    work(source, tmp_path / "out", stages[0], Export("compressed-tensors"), progress=(told := StopAt()))
    assert any("resuming after 1 of 2 stages" in note for note in told.notes)
    assert left(tmp_path) == ["model", "out"]


def test_a_directory_for_llama_cpp(tmp_path: Path, model: Path) -> None:
    """With what tells people of the model; niwaki and transformers read it."""
    source = shutil.copytree(model, tmp_path / "model")
    (source / "README.md").write_text("---\nlicense: mit\ntags: [a]\n---\n# Mine\n")
    (source / "LICENSE.txt").write_text("do as you like")
    (source / "notes.txt").write_text("notes")
    assert niwaki.export(source, tmp_path / "out", "gguf-f16") == []
    assert left(tmp_path / "out") == ["LICENSE.txt", "README.dense.md", "README.md", "model-F16.gguf"]
    card, top = (tmp_path / "out" / "README.md").read_text(), "license: mit\ntags:\n- a\n- gguf\n- niwaki\n"
    assert card.startswith(f"---\n{top}library_name: gguf\n---\n\n# model, for ll")
    assert "llama-cli -m model-F16.gguf" in card
    niwaki.export(source, tmp_path / "file.gguf", "gguf-f16")
    assert (tmp_path / "file.gguf").read_bytes() == (tmp_path / "out" / "model-F16.gguf").read_bytes()
    assert niwaki.load(tmp_path / "out", "cpu").num_parameters() > 0
    assert "not an empty directory" in message(lambda: niwaki.export(source, tmp_path / "out", "gguf-q8_0"))
    assert "inside the model's own" in message(lambda: niwaki.export(source, source / "in", "gguf-q8_0"))


def test_the_card_for_llama_cpp_says_what_the_model_is(tmp_path: Path, model: Path) -> None:
    stages: tuple[Stage, ...] = (Shrink(neurons=0.5), *PRUNED)
    work(model, tmp_path / "dense", *stages)
    work(model, tmp_path / "out", *stages, Export("gguf-f16"))
    title = next(line for line in (tmp_path / "dense" / "README.md").read_text().splitlines() if line.startswith("# "))
    assert " % smaller, 50 % sparse" in title
    assert f"\n{title}, for llama.cpp\n" in (tmp_path / "out" / "README.md").read_text()
    (tmp_path / "dense" / "niwaki.json").write_text("{}")
    niwaki.export(tmp_path / "dense", tmp_path / "again", "gguf-f16")
    assert "\n# dense, for llama.cpp\n" in (tmp_path / "again" / "README.md").read_text()


@pytest.mark.parametrize("rounded", [False, True])
def test_the_card_for_llama_cpp_has_what_was_measured_of_the_same_numbers(tmp_path: Path, rounded: bool) -> None:
    model = saved(tmp_path / "model", intermediate_size=64)
    ends = () if rounded else (QuantizeEmbeddings("int8:32"),)
    heldout = Measurement(random_tokens(4, 24, seed=1))
    stages = (Quantize("int8:32", effort="none"), *ends)
    work(model, tmp_path / "out", *stages, Export("gguf-q8_0"), measurement=heldout)
    card, before = (tmp_path / "out" / name for name in ("README.md", "README.dense.md"))
    assert "metrics:" in before.read_text()
    assert ("metrics:" in card.read_text()) is not rounded
    assert ("was so before rounding to Q8_0" in card.read_text()) is rounded


def test_packed_by_export(tmp_path: Path) -> None:
    source = sparse_model(tmp_path / "model")
    sizes = niwaki.pack(source, tmp_path / "packed")
    assert niwaki.export(source, tmp_path / "out", "packed") == sizes.described == [str(sizes)]
    assert files(tmp_path / "out", "recipe.toml") == files(tmp_path / "packed", "recipe.toml")
    said = message(lambda: niwaki.export(tmp_path / "packed", tmp_path / "again", "packed"), CheckpointError)
    assert "is packed; make it dense again" in said


def test_stages_by_name(tmp_path: Path) -> None:
    assert make_stage("export gguf-q8_0") == make_stage("export format=gguf-q8_0") == Export("gguf-q8_0")
    assert make_stage("export") == Export("compressed-tensors")
    assert make_stage("pack") == Pack()
    recipe = tmp_path / "recipe.toml"
    tables = ("stage = 'prune'\npattern = '2:4'", "stage = 'export'\nformat = 'gguf-f16'")
    recipe.write_text("".join(f"[[stages]]\n{table}\n" for table in tables))
    assert stages_of(Recipe.read(recipe)) == [Prune("2:4"), Export("gguf-f16")]
    with pytest.raises(UsageError):
        make_stage("pack gguf-f16")


@pytest.mark.slow
def test_the_command(tmp_path: Path, model: Path, niwaki_: Command) -> None:  # noqa: F811
    options = ("--calibration", "demo", "--samples", 4, "--length", 16, "--text-samples", 0, "--device", "cpu")
    stages = ("--stage", "prune 2:4 effort=fast", "--stage", "export gguf-q8_0")
    ran = niwaki_("run", model, tmp_path / "out", *stages, *options)
    assert (ran.code, ran.err) == (0, "")
    assert "stage 2 of 2: export, gguf-q8_0" in ran.out
    assert left(tmp_path / "out") == ["README.dense.md", "README.md", "model-Q8_0.gguf", "niwaki.json", "recipe.toml"]
    assert json.loads((tmp_path / "out" / "niwaki.json").read_text())["pattern"] == "2:4"
    ran = niwaki_("export", model, tmp_path / "model.gguf", "--format", "GGUF-F16")
    assert (ran.code, ran.out.split()) == (0, ["written", "to", str(tmp_path / "model.gguf")])


@pytest.mark.slow
@pytest.mark.skipif(not LLAMA_CPP.exists(), reason="needs node-llama-cpp in $NIWAKI_LLAMA_CPP")
def test_llama_cpp_opens_it(tmp_path: Path, model: Path) -> None:
    """After each list of stages: the logits of transformers, of the model before."""
    lists = {"pruned": PRUNED, "shrunk": (Shrink(neurons=0.25, blocks=1),), "on a grid": SHRUNK}
    tokens, text, questions = list(range(5, 17)), "The old man", []
    for name, stages in lists.items():
        work(model, tmp_path / name, *stages, Export("gguf-f16"))
        work(model, tmp_path / f"{name}, dense", *stages)
        questions.append((tmp_path / name / "model-F16.gguf", [text], tokens))
    for name, answer in zip(lists, ask(tmp_path, questions), strict=True):
        assert not answer.error, answer.error
        dense = tmp_path / f"{name}, dense"
        assert answer.split == [AutoTokenizer.from_pretrained(dense)(text).input_ids]
        with torch.no_grad():
            before = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
            expected = before(torch.tensor([tokens])).logits[0]
        assert distance(answer.logits, expected).max() < 0.01
