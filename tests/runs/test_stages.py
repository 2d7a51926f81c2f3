"""Runs of several stages: the same as each by hand, whenever they are stopped; what cannot follow is refused first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import niwaki
from niwaki import Compute, Export, Heal, Measurement, Pack, Prune, Quantize, Recipe, Record, Shrink
from niwaki.errors import CalibrationError, OutputError
from niwaki.records.progress import Progress
from niwaki.runs.carried import MARGIN
from niwaki.runs.stage import Stage
from niwaki.runs.workplace import unfinished_size
from niwaki.stages import make_stage, stages_of
from support.command import Command, niwaki_  # noqa: F401 - a fixture
from support.covering import FULL, some
from support.healing import LENGTH, TOKENS, same_tensors
from support.models import edit_json, message, save_model, save_model_with_tokenizer
from support.runs import files, tensors

CPU = Compute("cpu", "float32")
HEAL = Heal(tokens=400, rate=0.01, batch=64, own_text=0.0)
NEURONS = Shrink(neurons=0.25)


def work(model: Path, out: Path, *stages: Stage | str, **changes: Any) -> Record:
    options: dict[str, Any] = {"calibration": TOKENS, "measurement": None, "compute": CPU, **changes}
    return niwaki.run(model, out, stages, **options)


class StopAfter(Progress):
    """Interrupts the run at a sign of life, by its number; ``count`` is how many there were."""

    def __init__(self, number: int = 1 << 60) -> None:
        self.number, self.count = number, 0
        self.notes: list[str] = []
        self.turns: list[str] = []
        self.told: list[tuple[int, int, str]] = []

    def _next(self) -> None:
        self.count += 1
        if self.count == self.number:
            raise KeyboardInterrupt

    def stage(self, block: int, name: str, steps: int) -> None:
        self._next()

    def step(self) -> None:
        self._next()

    def solved(self, matrix: Any) -> None:
        self._next()

    def healing(self, record: Any, share: float, seconds: float) -> None:
        self._next()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def turn(self, number: int, count: int, stage: str) -> None:
        self.turns.append(f"{number} of {count}: {stage}")

    def stopped(self, done: int, blocks: int, where: str = "") -> None:
        self.told.append((done, blocks, where))


@pytest.mark.slow
def test_the_same_as_by_hand(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama grouped")
    options: dict[str, Any] = {"calibration": TOKENS, "measurement": None, "compute": CPU}
    niwaki.shrink(model, tmp_path / "1", neurons=0.25, calibration=TOKENS, measurement=None, compute=Compute("cpu"))
    niwaki.prune(tmp_path / "1", tmp_path / "2", "2:4", effort="fast", **options)
    niwaki.prune(tmp_path / "2", tmp_path / "3", 0.0, effort="fast", quantize="int4:4", **options)
    niwaki.heal(tmp_path / "3", tmp_path / "4", model, tokens=400, rate=0.01, batch=64, own_text=0.0, **options)
    told = StopAfter()
    stages: list[Stage | str] = [NEURONS, Prune("2:4", effort="fast"), Quantize("int4:4", effort="fast"), HEAL]
    record = work(model, tmp_path / "out", *stages, progress=told)
    assert same_tensors(tmp_path / "out", tmp_path / "4")
    after = tensors(tmp_path / "out")
    assert not any(after[name][value == 0].any() for name, value in tensors(tmp_path / "2").items())
    for name in ("quantization/scales.safetensors", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "4" / name).read_bytes()
    assert told.turns == [
        "1 of 4: shrink, neurons 0.25",
        "2 of 4: prune, 2:4, effort fast",
        "3 of 4: quantize, int4:4, effort fast",
        "4 of 4: heal, tokens 400, rate 0.01",
    ]
    work(model, tmp_path / "packed", *stages, "pack")
    niwaki.pack(tmp_path / "out", tmp_path / "by hand")
    packed, by_hand = (
        {name: value for name, value in files(tmp_path / each).items() if name != "README.md"}
        for each in ("packed", "by hand")
    )
    # What is packed by hand was stored as usual before, and its record and card say so.
    assert {name for name in packed if packed[name] != by_hand.get(name)} == {"README.dense.md"}
    niwaki.unpack(tmp_path / "packed", tmp_path / "unpacked")
    assert same_tensors(tmp_path / "unpacked", tmp_path / "out")
    assert [stage.name for stage in record.stages] == ["shrink", "prune", "quantize", "heal"]
    assert record.model == str(model)
    assert record.method == "continuation"
    assert record.pattern == "2:4"
    assert record.quantization == "int4:4"
    assert record.structure
    said = "of the output's square (geometric mean over matrices of the stage quantize) |"
    assert said in (tmp_path / "out" / "README.md").read_text()
    assert [note for note in record.notes if "that was given" in note] == []  # the zeros are of the stage before
    assert record.healing
    pruned = json.loads((tmp_path / "out" / "config.json").read_text())["pruning_config"]
    assert (pruned["pattern"], pruned["quantization"]) == ("2:4", "int4:4")
    assert Record.load(tmp_path / "out" / "niwaki.json") == record
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_each_stage_is_compared_with_the_dense_model(tmp_path: Path) -> None:
    """Whatever stages come before it, and where a run resumes after the dense model was measured."""
    model, stages = save_model_with_tokenizer(tmp_path / "model"), ("prune 0.5 effort=fast", "embeddings int4:8")
    options: dict[str, Any] = {"measurement": Measurement("demo-held", length=16, samples=4), "calibration": TOKENS}
    counted = StopAfter()
    record = work(model, tmp_path / "out", *stages, progress=counted, **options)
    text = Measurement("demo-held", length=16, samples=4)
    wanted = niwaki.evaluate(tmp_path / "out", text, against=model, compute=CPU).divergence
    after, pruned = record.perplexity["after"].divergence, record.stages[0].perplexity
    assert wanted
    assert after
    assert pruned
    assert pruned.divergence
    assert 0 < pruned.divergence.mean < after.mean == pytest.approx(wanted.mean, rel=1e-5)
    assert f"| divergence after | KL from the dense model {after} |" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(KeyboardInterrupt):
        work(model, tmp_path / "again", *stages, progress=StopAfter(counted.count - 1), **options)
    resumed = work(model, tmp_path / "again", *stages, **options)
    assert resumed.resumed or resumed.stages
    assert resumed.perplexity["after"].divergence == after
    # Healing names another dense model, with which all are compared then, also where the run resumes.
    other = save_model_with_tokenizer(tmp_path / "other", seed=1)
    taught = "quantize int4:8 effort=fast", f"heal teacher={other} tokens=200 batch=64 own_text=0"
    healing = StopAfter()
    first = work(model, tmp_path / "taught", *taught, progress=healing, **options)
    with pytest.raises(KeyboardInterrupt):
        work(model, tmp_path / "once", *taught, progress=StopAfter(healing.count - 3), **options)
    second = work(model, tmp_path / "once", *taught, **options)
    last = niwaki.evaluate(tmp_path / "taught", text, against=other, compute=CPU).divergence
    assert last
    assert first.perplexity["after"].divergence == second.perplexity["after"].divergence
    assert first.perplexity["after"].divergence.mean == pytest.approx(last.mean, rel=1e-4)  # type: ignore[union-attr]
    # Of other tokens nothing is said, nor where the dense model is not measured.
    fewer = niwaki.shrink(model, tmp_path / "fewer", vocabulary=512, calibration="demo", measurement=text, compute=CPU)
    assert fewer.perplexity["after"].divergence is None
    options["measurement"] = Measurement("demo-held", length=16, samples=4, before=False)
    assert work(model, tmp_path / "alone", stages[0], **options).perplexity["after"].divergence is None


LISTS: dict[str, tuple[Any, ...]] = {
    "shrink, prune": (NEURONS, Prune("2:4", effort="best:synthetic=0:healing=0:epochs=0.5")),
    "shrink and fit, heal": (Shrink(neurons=0.25, effort="fast:epochs=0.5"), HEAL),
    "prune, heal, quantize": (Prune(0.5, solver="wanda"), HEAL, Quantize("int8", effort="fast")),
    "prune, quantize, heal by blocks, pack": (
        *(Prune(0.5, solver="wanda"), Quantize("int8", effort="fast")),
        *(Heal("blocks", 400, batch=64, own_text=0.0), Pack()),
    ),
    "quantize, export": (Quantize("int8", effort="fast"), Export("compressed-tensors")),
}


@pytest.mark.parametrize("stages", some(LISTS.values(), 3), ids=some(LISTS, 3))
@pytest.mark.slow
def test_stopped_anywhere(tmp_path: Path, stages: tuple[Any, ...]) -> None:
    """At moments of all stages, some of them twice: the bytes are those of a run that was not.

    The output is a new directory and an empty one in turns.
    """
    model, whole = save_model(tmp_path / "model", "llama grouped"), StopAfter()
    work(model, tmp_path / "whole", *stages, progress=whole)
    expected = files(tmp_path / "whole")
    for turn, number in enumerate(range(1, whole.count, max(1, whole.count // (9 if FULL else 3)))):
        if turn % 2:
            (tmp_path / "out").mkdir()
        for at in (number, number // 2 + 1):
            progress = StopAfter(at)
            try:
                work(model, tmp_path / "out", *stages, progress=progress)
            except KeyboardInterrupt:
                assert all(f" of {len(stages)}, " in where for _, _, where in progress.told)
            else:
                break
        if not (tmp_path / "out" / "niwaki.json").exists():
            work(model, tmp_path / "out", *stages)
        assert files(tmp_path / "out") == expected
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
        for path in sorted((tmp_path / "out").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (tmp_path / "out").rmdir()


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("llama grouped", {"blocks": 1, "heads": 0.5}),
        ("llama grouped", {"neurons": 0.25, "effort": "fast:epochs=1"}),
        ("mixtral", {"experts": 0.5, "heads": 0.5, "effort": "fast:epochs=1"}),
    ],
    ids=["blocks and heads", "neurons, fitted", "experts, fitted"],
)
@pytest.mark.slow
def test_shrinking_resumes(tmp_path: Path, case: str, options: dict[str, Any]) -> None:
    """After each block; what is done is not done again, and what is damaged is."""
    model = save_model(tmp_path / "model", case)

    def shrink(out: Path, progress: Progress | None = None) -> Record:
        measured = Measurement(TOKENS[:2])
        return niwaki.shrink(
            model, out, **options, calibration=TOKENS, measurement=measured, compute=Compute("cpu"), progress=progress
        )

    expected = shrink(tmp_path / "whole")
    for number in range(1, len(expected.matrices) + 1):

        class Solved(StopAfter):
            stage = step = lambda *_: None  # type: ignore[assignment]

        with pytest.raises(KeyboardInterrupt):
            shrink(tmp_path / "out", Solved(number))
        if number == len(expected.matrices):
            for file in (tmp_path / ".out.partial" / "scratch").glob("block-0*"):
                file.write_bytes(b"damaged")
        record = shrink(tmp_path / "out", again := Solved())
        assert files(tmp_path / "out") == files(tmp_path / "whole")
        assert [(m.block, m.name, m.error) for m in record.matrices] == [
            (m.block, m.name, m.error) for m in sorted(expected.matrices, key=lambda m: m.block)
        ]
        assert (record.structure, record.perplexity) == (expected.structure, expected.perplexity)
        assert any("damaged" in note for note in again.notes) == (number == len(expected.matrices))
        for path in (tmp_path / "out").iterdir():
            path.unlink()
        (tmp_path / "out").rmdir()


@pytest.mark.slow
def test_blocks_that_shrink_are_fitted(tmp_path: Path) -> None:
    """What is left comes nearer to the dense blocks, on text of which it has seen nothing too."""
    model = save_model(tmp_path / "model", "llama grouped")
    found = {}
    for effort in ("fast", "fast:epochs=20"):
        options: dict[str, Any] = {"calibration": TOKENS, "measurement": Measurement(TOKENS[:8])}
        record = niwaki.shrink(model, tmp_path / effort, neurons=0.5, effort=effort, compute=Compute("cpu"), **options)
        found[effort] = record
    assert found["fast"].fits == []
    assert [fit.block for fit in found["fast:epochs=20"].fits] == [0, 1, 2]
    assert all(fit.after <= fit.before for fit in found["fast:epochs=20"].fits)
    assert any(fit.after < fit.before for fit in found["fast:epochs=20"].fits)
    shapes = {name: value.shape for name, value in tensors(tmp_path / "fast").items()}
    assert {name: value.shape for name, value in tensors(tmp_path / "fast:epochs=20").items()} == shapes
    assert not same_tensors(tmp_path / "fast", tmp_path / "fast:epochs=20")


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([], "at least one stage"),
        ([Prune(0.5)] * 101, "a run has at most 100 stages; got 101"),
        ([HEAL], "there is nothing to heal yet"),
        ([Prune(0.5), NEURONS], "stage 2, shrink: shrink comes first, not after prune"),
        ([Shrink(blocks=1), Heal("blocks")], "leaves fewer of them"),
        ([Pack()], "pack comes after prune"),
        ([Prune(0.5), Pack(), HEAL], "stage 3, heal: nothing comes after pack"),
        ([Prune(0.5), Pack(), Pack()], "nothing comes after pack"),
        ([Quantize("int8"), Prune(0.5)], "prune first and quantize then"),
        ([Quantize("int8"), Quantize("int8")], "quantize once"),
        ([Prune(0.5, quantize="int8"), Prune(0.6)], "prune first and quantize then"),
        ([Prune(0.5, quantize="int8"), Quantize("int4:32")], "quantize once"),
        ([Prune], "give a stage with its parameters, as in Prune(...)"),
        ([" "], "no stage is called ''"),
        (["shrink 0.25"], "parameters are written NAME=VALUE, such as neurons=0.25"),
        (["prune 0.5", "heal times=2"], "stage 2, heal: no parameter of the stage heal is called 'times'"),
        (["prune 0.5", "prnue 0.5"], "stage 2: no stage is called 'prnue'; did you mean prune"),
        (["prune 0.5 sparsty=3"], "no parameter of the stage prune is called 'sparsty'"),
        (["prune 0.5", "heal tokens=many"], "stage 2, heal: "),
        (["prune 0.5", "heal tokens=-3"], "stage 2, heal: invalid number '-3'"),
        (["prune 0.5", "heal tokens=0x"], "stage 2, heal: tokens must be above 0"),
        ([Prune(0.5, effort="best"), Prune(0.6, effort="bst")], "stage 2, prune: no effort is called 'bst'"),
        ([Prune(0.5), Prune], "stage 2: give a stage with its parameters"),
        (["shrink 0.5"], "'0.5' of the stage 'shrink 0.5' has no name"),
        (["shrink neurons=0.5 neurons=0.2"], "gives neurons twice"),
        (["shrink"], "nothing to remove"),
        (["shrink blocks=two"], "blocks of the stage shrink cannot be 'two'"),
        (["prune 'a"], "is not a valid stage"),
        ([Prune("2:4"), Quantize("int4:7")], "stage 2, quantize: "),
        ([Prune(0.5, effort="best"), Prune("2:4", solver="nobody")], "stage 2, prune: no solver is called 'nobody'"),
        ([NEURONS, Prune("3:5:7")], "stage 2, prune: "),
        ([Prune("3:5:7")], "'3:5:7' "),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_at_the_start(tmp_path: Path, stages: list[Any], said: str) -> None:
    model = save_model(tmp_path / "model", "llama grouped")
    begun = StopAfter(1)
    found = message(lambda: work(model, tmp_path / "out", *stages, progress=begun))
    assert said in found
    assert found.startswith("stage ") == (1 < len(stages) < 100)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_texts_are_read_before_the_first_stage(tmp_path: Path) -> None:
    model, begun = save_model_with_tokenizer(tmp_path / "model"), StopAfter(1)
    text = tmp_path / "text.txt"
    text.write_text("a few words")
    said = message(
        lambda: work(model, tmp_path / "out", Prune(0.5), HEAL, calibration=str(text), progress=begun), CalibrationError
    )
    assert "too short" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "text.txt"]


@pytest.mark.slow
def test_another_recipe(tmp_path: Path) -> None:
    """A stage that has begun has to be the same; one that is still to come may be another."""
    model = save_model(tmp_path / "model", "llama grouped")
    stages = (NEURONS, Prune("2:4", effort="fast"), HEAL)
    told = StopAfter()
    work(model, tmp_path / "whole", *stages[:2], progress=told)
    with pytest.raises(KeyboardInterrupt):
        work(model, tmp_path / "out", *stages, progress=(stopped := StopAfter(told.count - 2)))
    assert stopped.told == [(2, 3, "stage 2 of 3, prune")]
    for other, said in (
        ((NEURONS, HEAL), "the stages (shrink, prune, heal there, shrink, heal here)"),
        ((Shrink(neurons=0.5), *stages[1:]), "shrink solver (neurons 0.25 there, 0.5 here)"),
        ((NEURONS, Prune(0.5, effort="fast"), HEAL), "prune pattern (2:4 there, "),
    ):
        found = message(lambda other=other: work(model, tmp_path / "out", *other))  # type: ignore[misc]
        assert said in found
        assert "1 of 3 stages and 2 blocks done" in found
        assert "--restart" in found
    record = work(model, tmp_path / "out", *stages[:2], Heal(tokens=200, own_text=0.0, batch=64))
    assert record.resumed == [2]
    assert record.healing
    assert record.healing.tokens == 200


@pytest.mark.slow
def test_a_stage_that_was_damaged(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama grouped")

    class Turned(StopAfter):
        def turn(self, number: int, count: int, stage: str) -> None:
            if number == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(model, tmp_path / "out", NEURONS, Prune(0.5, effort="fast"), progress=Turned())
    assert [path.name for path in (tmp_path / ".out.partial").iterdir()] in (["1", "2"], ["2", "1"])
    edit_json(tmp_path / ".out.partial" / "1" / "config.json", vocab_size=3)

    def again(**how: Any) -> Record:
        return work(model, tmp_path / "out", NEURONS, Prune(0.5, effort="fast"), **how)

    assert "is damaged; start over with --restart" in message(again, OutputError)
    again(restart=True)
    work(model, tmp_path / "whole", NEURONS, Prune(0.5, effort="fast"))
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.slow
def test_what_is_measured_on_is_new_to_all_stages(tmp_path: Path) -> None:
    """And the same for all: that after the windows that heal trains on."""
    model = save_model_with_tokenizer(tmp_path / "model")
    calibration = niwaki.Calibration("demo", samples=4, length=LENGTH)
    stages = (NEURONS, Prune(0.5, effort="fast"), Heal(tokens=20 * LENGTH, own_text=0.0))
    record = work(model, tmp_path / "out", *stages, calibration=calibration, measurement=Measurement(samples=3))
    assert record.perplexity.keys() == {"before", "pruned", "after"}
    assert record.perplexity["pruned"] == record.stages[1].perplexity
    assert record.perplexity["after"] == record.stages[2].perplexity
    alone = work(model, tmp_path / "one", *stages[:1], calibration=calibration, measurement=Measurement(samples=3))
    assert alone.stages == []
    assert alone.perplexity["before"].losses != record.perplexity["before"].losses
    costs = [cost.nats for _, cost in record.costs() if cost]
    total = record.perplexity["after"].above(record.perplexity["before"]).nats
    assert sum(costs) == pytest.approx(total)


RECIPE = """
[[stages]]
stage = "shrink"
neurons = 0.25

[[stages]]
stage = "prune"
pattern = "2:4"
effort = "fast"

[[stages]]
stage = "heal"
tokens = 400
rate = 0.01
batch = 64
own_text = 0
"""


def test_recipes(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(RECIPE)
    assert stages_of(Recipe.read(file)) == [
        NEURONS,
        Prune("2:4", effort="fast"),
        Heal(tokens=400, rate=0.01, batch=64, own_text=0),
    ]
    assert make_stage("heal tokens=400 rate=0.01") == Heal(tokens="400", rate=0.01)
    for text, said in (
        ("[[stages", "is not a TOML file"),
        ("", "is not a recipe"),
        ("stages = 3", "is not a recipe"),
        ("[[stages]]\nneurons = 0.25", "table 1 of stages does not say which stage"),
        ("[[stages]]\nstage = 'prnue'", "no stage is called 'prnue'; did you mean prune"),
        ("[[stages]]\nstage = 'prune'\npatern = '2:4'", "is called 'patern'; did you mean pattern"),
        ("[[stages]]\nstage = 'shrink'\nblocks = 'two'", "blocks"),
        ("[[stages]]\nstage = 'prune'\n[[stages]]\nstage = 'heal'\ntokens = -3", "stage 2, heal: tokens must be"),
        ("calibation = 'x'\n[[stages]]\nstage = 'pack'", "has 'calibation', which recipes do not have"),
        ("calibration = 'x'\n[[stages]]\nstage = 'pack'", "Expected `object`, got `str` - at `$.calibration`"),
        ("[[stages]]\nstage = 'pack'\n[result]\nfile = 'digest'", "at `$.result[...]`"),
        (f"[[stages]]\nstage = 'prune'\npattern{'.a' * 20_000} = 1", "got a value of type dict too large to show"),
    ):
        file.write_text(text)
        assert said in message(lambda: stages_of(Recipe.read(file)))
    file.unlink()
    assert "cannot be read" in message(lambda: stages_of(Recipe.read(file)))


@pytest.mark.slow
def test_the_command(tmp_path: Path, niwaki_: Command) -> None:  # noqa: F811
    model = save_model_with_tokenizer(tmp_path / "model")
    file = tmp_path / "recipe.toml"
    file.write_text(RECIPE)
    options = ("--calibration", "demo", "--samples", 4, "--length", LENGTH, "--text-samples", 2, "--device", "cpu")
    by_file = niwaki_("run", model, tmp_path / "a", "--recipe", file, *options)
    assert (by_file.code, by_file.err) == (0, "")
    steps = ("shrink neurons=0.25", "prune 2:4 effort=fast", "heal tokens=400 rate=0.01 batch=64 own_text=0")
    by_option = niwaki_("run", model, tmp_path / "b", *(x for step in steps for x in ("--stage", step)), *options)
    assert by_option.code == 0
    assert files(tmp_path / "a", "recipe.toml") == files(tmp_path / "b", "recipe.toml")
    assert "stage 2 of 3: prune, 2:4, effort fast" in by_file.out
    assert sum("nats a token, " in line for line in by_file.out.splitlines()) == 3
    card = (tmp_path / "a" / "README.md").read_text()
    assert "| stage shrink | neurons 0.25, " in card
    assert "smaller, 50 % sparse, healed" in card
    for arguments in ((), ("--stage", "prune 0.5", "--recipe", file)):
        assert "say what to do" in niwaki_("run", model, tmp_path / "c", *arguments, *options).err


def test_experts_are_removed_by_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_model(tmp_path / "model", "mixtral")
    from niwaki.models.processes import World
    from niwaki.runs.stage import session

    monkeypatch.setattr(World, "collected", lambda self, value: [value] * self.size)
    with session(world=World(0, 2)):
        said = message(lambda: niwaki.shrink(model, tmp_path / "out", experts=0.5, calibration=TOKENS, compute="cpu"))
    assert "start niwaki without torchrun" in said


def test_parameters_of_stages() -> None:
    assert "nothing to remove" in message(lambda: Shrink())
    assert "tokens must be above 0" in message(lambda: Heal(tokens=0))
    assert "own_text" in message(lambda: Heal(own_text=2))


@pytest.mark.slow
def test_the_space_that_two_stages_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is read and one that is written; what is there of them already counts."""
    model = save_model(tmp_path / "model", "llama grouped")
    stages = (Prune(0.5, solver="wanda"), Quantize("int8", effort="fast"))
    size = sum(path.stat().st_size for path in model.iterdir())
    with pytest.raises(KeyboardInterrupt):
        work(model, tmp_path / "out", *stages, progress=StopAfter(60))
    free = MARGIN + int(1.5 * size)
    monkeypatch.setattr("niwaki.files.free_space", lambda _: free)
    assert "needs" in message(lambda: work(model, tmp_path / "other", *stages), OutputError)
    assert unfinished_size(tmp_path / "out", with_source=True) > unfinished_size(tmp_path / "out") > 0
    work(model, tmp_path / "out", *stages)
