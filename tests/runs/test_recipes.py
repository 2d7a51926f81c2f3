"""Recipes: each result says how it was made, and making it again by that gives the same bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import niwaki
from niwaki import (
    Calibration,
    Compute,
    Continuation,
    Effort,
    Fitting,
    Grid,
    Heal,
    Measurement,
    Prune,
    Quantize,
    Recipe,
    Record,
    Shrink,
    SparseGPT,
    Unstructured,
    Wanda,
)
from niwaki.errors import CalibrationError
from niwaki.layer.solvers import MaskThenUpdate
from niwaki.runs.stage import Stage
from niwaki.stages import stages_of, table_of
from support.command import Command, niwaki_  # noqa: F401 - a fixture
from support.healing import LENGTH, TOKENS
from support.models import message, save_model, save_model_with_tokenizer
from support.runs import StopAt, files

CPU = Compute("cpu", "float32")
FEW: dict[str, Any] = {"measurement": Measurement(samples=2), "compute": CPU}
HEAL = Heal(tokens=200, rate=0.01, batch=64, own_text=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_with_tokenizer(tmp_path_factory.mktemp("recipes") / "model")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("texts") / "text.txt"
    file.write_text("The old man went to the river. " * 800)
    return str(file)


def calibration(text: str) -> Calibration:
    return Calibration(text, samples=4, length=LENGTH, order="random", seed=3)


@pytest.fixture(scope="module")
def one(model: Path, text: str) -> Path:
    """A model that is pruned, with its recipe."""
    niwaki.prune(model, model.with_name("one"), 0.5, effort="fast", calibration=calibration(text), **FEW)
    return model.with_name("one")


@pytest.mark.parametrize(
    ("stage", "table"),
    [
        (Prune(0.5), {"stage": "prune", "pattern": 0.5}),
        (Prune("2:4", effort="best:epochs=3"), {"stage": "prune", "pattern": "2:4", "effort": "best:epochs=3"}),
        (Prune(Unstructured(0.6)), {"stage": "prune", "pattern": "unstructured:0.6"}),
        (
            Prune(0.5, solver=Continuation(sweeps=20), effort=Effort(fit=Fitting(epochs=2))),
            {"stage": "prune", "pattern": 0.5, "solver": "continuation:sweeps=20", "effort": "fast:epochs=2"},
        ),
        (
            Prune(0.5, solver=MaskThenUpdate(Wanda(), SparseGPT()), blocks=(0, 1)),
            {"stage": "prune", "pattern": 0.5, "solver": "wanda+sparsegpt", "blocks": [0, 1]},
        ),
        (Quantize(Grid(4, 32)), {"stage": "quantize", "grid": "int4:32"}),
        (Shrink(neurons=0.25, effort="fast"), {"stage": "shrink", "neurons": 0.25, "effort": "fast"}),
        (Heal(), {"stage": "heal"}),
    ],
)
def test_stages_as_tables_and_back(stage: Stage, table: dict[str, Any]) -> None:
    assert table_of(stage) == table
    (again,) = stages_of(Recipe([table]))
    assert table_of(again) == table


@pytest.mark.slow
def test_the_same_bytes_again(model: Path, text: str, tmp_path: Path) -> None:
    """All files are the same but for the notes that say so, and paths of the text, which a recipe does not tell."""
    stages: list[Stage] = [Prune("2:4", effort="fast"), HEAL]
    niwaki.run(model, tmp_path / "one", stages, calibration=calibration(text), **FEW)
    recipe = Recipe.read(tmp_path / "one")
    assert recipe.texts.keys() == {"text.txt"}
    assert str(tmp_path) not in (tmp_path / "one" / "recipe.toml").read_text()
    record = niwaki.run(model, tmp_path / "two", recipe, calibration=text)
    assert record.notes[-1].endswith("the bytes that the recipe names: it is the same model")
    mine, theirs = (files(tmp_path / name, "README.md") for name in ("one", "two"))
    assert mine == theirs


def test_an_own_text_is_looked_for_here(
    model: Path, text: str, one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe.read(one / "recipe.toml")
    with pytest.raises(CalibrationError, match=r"there is no file text\.txt"):
        niwaki.run(model, tmp_path / "two", recipe)
    monkeypatch.chdir(Path(text).parent)
    assert "same model" in niwaki.run(model, tmp_path / "two", recipe).notes[-1]


def test_what_differs_is_said(model: Path, one: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("No other text. " * 800)
    record = niwaki.run(model, tmp_path / "two", Recipe.read(one), calibration=str(other))
    (said,) = [note for note in record.notes if "recipe" in note]
    assert "not those that the recipe names: the text (other.txt, text.txt) have other bytes" in said
    another = save_model(tmp_path / "another", seed=5)
    record = niwaki.run(another, tmp_path / "three", Recipe.read(one), calibration=TOKENS)
    assert "the model (model.safetensors) has other bytes" in record.notes[-1]


def test_other_options_come_first(model: Path, text: str, one: Path, tmp_path: Path) -> None:
    record = niwaki.run(model, tmp_path / "two", Recipe.read(one), calibration=Calibration(text, samples=6))
    assert (record.calibration["samples"], record.calibration["sequence_length"]) == (6, LENGTH)
    assert record.perplexity["after"].windows == 2


@pytest.mark.slow
def test_options_of_the_command_line_come_first_whatever_they_are(
    model: Path,
    text: str,
    tmp_path: Path,
    niwaki_: Command,  # noqa: F811
) -> None:
    """Also where they are what they would be without a recipe."""
    recipe = tmp_path / "recipe.toml"
    stages = '[[stages]]\nstage = "prune"\npattern = 0.5\neffort = "fast"\n'
    recipe.write_text(
        f'{stages}[calibration]\nsamples = 4\nseed = 3\norder = "random"\nlength = 32\n[measurement]\nsamples=2'
    )
    common = ("run", model, "--recipe", recipe, "--calibration", text, "--device", "cpu", "--seed", 0)
    assert niwaki_(*common[:2], tmp_path / "out", *common[2:], "--text-samples", 16).code == 0
    record = Record.load(tmp_path / "out" / "niwaki.json")
    described = record.calibration
    assert (described["samples"], described["seed"], described["order"]) == (4, 0, "random")
    assert record.perplexity["after"].windows == 16


def test_after_another_command_both_are_there(text: str, one: Path, tmp_path: Path) -> None:
    stages = [Prune("2:4", effort="fast")]
    niwaki.run(one, tmp_path / "out", stages, calibration=calibration(text), **FEW)
    assert (tmp_path / "out" / "recipe.1.toml").read_bytes() == (one / "recipe.toml").read_bytes()
    recipe = Recipe.read(tmp_path / "out")
    assert recipe.model == {"name": "one"}
    assert recipe.weights == Recipe.read(one).result


def test_packed_and_unpacked(model: Path, text: str, one: Path, tmp_path: Path) -> None:
    niwaki.pack(one, tmp_path / "packed")
    recipe = Recipe.read(tmp_path / "packed")
    assert recipe.stages[-1] == {"stage": "pack"}
    niwaki.run(model, tmp_path / "again", recipe, calibration=text)
    assert Recipe.read(tmp_path / "again").result == recipe.result
    niwaki.unpack(tmp_path / "packed", tmp_path / "unpacked")
    assert files(tmp_path / "unpacked") == files(one)


@dataclass(frozen=True)
class _Own(Wanda):
    """A solver of somebody else's."""


def test_what_has_no_name_has_no_recipe(model: Path, tmp_path: Path) -> None:
    niwaki.prune(model, tmp_path / "out", 0.5, solver=_Own(), calibration=TOKENS, measurement=None, compute=CPU)
    assert not (tmp_path / "out" / "recipe.toml").exists()
    assert "recipe.toml" not in (tmp_path / "out" / "README.md").read_text()


def test_two_texts_of_one_name_have_no_recipe(model: Path, text: str, tmp_path: Path) -> None:
    class Notes(niwaki.Progress):
        said = ""

        def note(self, text: str) -> None:
            self.said += text

    other, notes = tmp_path / "text.txt", Notes()
    other.write_text(Path(text).read_text())
    both = Calibration((text, str(other)), samples=4, length=LENGTH)
    niwaki.prune(model, tmp_path / "out", 0.5, effort="fast", calibration=both, **FEW, progress=notes)
    assert not (tmp_path / "out" / "recipe.toml").exists()
    assert "no recipe.toml: two texts are called text.txt" in notes.said


def test_tokens_from_python_are_no_text_of_a_recipe(model: Path, tmp_path: Path) -> None:
    niwaki.prune(model, tmp_path / "out", 0.5, effort="fast", calibration=TOKENS, measurement=None, compute=CPU)
    recipe = Recipe.read(tmp_path / "out")
    assert "tokens that were given in Python" in message(lambda: niwaki.run(model, tmp_path / "again", recipe))
    assert "same model" in niwaki.run(model, tmp_path / "again", recipe, calibration=TOKENS).notes[-1]


def test_healing_by_the_clock_is_said(model: Path, text: str, tmp_path: Path) -> None:
    stages: list[Stage] = [Prune(0.5, effort="fast"), Heal(tokens=200, max_time="5m", batch=64, own_text=0.0)]
    niwaki.run(model, tmp_path / "out", stages, calibration=calibration(text), **FEW)
    assert "limited by a time" in (tmp_path / "out" / "recipe.toml").read_text()


def test_names_do_not_leave_their_line(tmp_path: Path) -> None:
    recipe = Recipe([{"stage": "pack"}], model={"name": 'a\nstages = 3 "'}, texts={"b\nc": "0" * 64})
    (tmp_path / "recipe.toml").write_text(recipe.toml())
    assert Recipe.read(tmp_path) == recipe


def test_a_followed_run_is_interrupted_and_resumed(model: Path, text: str, one: Path, tmp_path: Path) -> None:
    recipe = Recipe.read(one)
    with pytest.raises(KeyboardInterrupt):
        niwaki.run(model, tmp_path / "two", recipe, calibration=text, progress=StopAt(10))
    record: Record = niwaki.run(model, tmp_path / "two", recipe, calibration=text)
    assert record.resumed
    assert "same model" in record.notes[-1]
