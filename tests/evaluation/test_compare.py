"""Tables of methods at sparsities: the same as single runs, gone on with, added to, and refused."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import lzma
import math
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoTokenizer

import niwaki
from niwaki import Comparison
from niwaki.cli.screen import TableDisplay
from niwaki.errors import CheckpointError, OutputError
from niwaki.evaluation import compare as comparison
from niwaki.layer.patterns import Pattern
from niwaki.layer.problem import LayerProblem, Monitor, Solution
from niwaki.layer.solvers import Solver
from niwaki.models.hidden_states import MemoryBudget
from niwaki.options import Measurement
from niwaki.quantities import parse_time
from niwaki.records.comparison import Cell
from niwaki.records.perplexity import Perplexity
from niwaki.records.progress import Progress
from niwaki.records.record import Record
from niwaki.records.wording import latex
from niwaki.texts.sources import EXCERPTS
from niwaki.windows import Windows
from support.arguments import arguments
from support.covering import FULL
from support.forks import forked
from support.healing import same_tensors
from support.models import edit_json, message, save_model_with_tokenizer

PRUNING: dict[str, Any] = {"calibration": "demo", "samples": 4, "length": 32, "device": "cpu"}
SMALL: dict[str, Any] = {**PRUNING, "texts": ["demo-held"], "text_samples": 3}


@dataclass(frozen=True)
class Flipped(Solver):
    """Keeps the smallest weights."""

    power: float = 1.0

    def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
        return problem.solution(problem.W, pattern.mask(-(problem.W.abs() ** self.power)))

    def flops(self, rows: int, columns: int) -> float:
        return 0.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_with_tokenizer(tmp_path_factory.mktemp("made") / "model")


@pytest.fixture(scope="module")
def whole(model: Path) -> Comparison:
    """What comes of a comparison that is not stopped."""
    return run(model, None, ["wanda", "magnitude"], [0.5, 0.6])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directories that models are pruned to, in order."""
    found: list[str] = []

    def counted(source: str, out: Path, pattern: Any, **options: Any) -> Record:
        found.append(out.name)
        return niwaki.prune(source, out, pattern, **options)

    monkeypatch.setattr(comparison, "prune", counted)
    return found


def run(
    model: Path, out: Path | None, solvers: Any = ("wanda",), sparsities: Any = (0.5,), **changes: Any
) -> Comparison:
    return niwaki.compare(model, out, **arguments(**{**SMALL, "solvers": solvers, "sparsities": sparsities, **changes}))


def values(found: Comparison) -> dict[tuple[str, str], Any]:
    """All but times."""
    return {key: (cell.sparsity, cell.error, cell.perplexity) for key, cell in found.done().items()}


def keys(found: Comparison) -> list[tuple[str, str]]:
    return [(cell.method, cell.pattern) for cell in found.cells]


# What it gives


@pytest.mark.slow
def test_cells_are_those_of_single_runs(tmp_path: Path, model: Path) -> None:
    methods = {
        "wanda": ("wanda", "fast"),
        "magnitude+exact": ("magnitude+exact", "fast"),
        **({"continuation@balanced": ("continuation", "balanced")} if FULL else {}),
        "continuation@best": ("continuation", "best"),
    }
    found = run(model, tmp_path / "out", list(methods), ["60%", "2:4"], texts=["demo-held", "demo"], keep=True)
    expected: dict[tuple[str, str], tuple[Record | None, Path]] = {("dense", ""): (None, model)}
    for name, (solver, effort) in methods.items():
        asked: dict[str, Any]
        for pattern, asked in (("60 %", {"sparsity": 0.6}), ("2:4", {"pattern": "2:4"})):
            out = tmp_path / f"{name} {pattern}"
            asked |= {"solver": solver, "effort": effort, "measure": "none"}
            record = niwaki.prune(model, out, **arguments(**PRUNING, **asked))
            expected[name, pattern] = record, out
    assert keys(found) == [("dense", ""), *((name, pattern) for pattern in ("60 %", "2:4") for name in methods)]
    ids = AutoTokenizer.from_pretrained(model)(_excerpt("demo"))["input_ids"]
    for key, (made, out) in expected.items():
        cell = found.done()[key]
        measured = niwaki.evaluate(out, Measurement("demo-held", length=32, samples=3))
        assert cell.perplexity["demo-held"] == dataclasses.replace(measured, bytes=())
        behind = cell.perplexity["demo"]
        assert behind.text == "the text after the calibration windows of demo"
        assert behind.value == _perplexity(out, ids[4 * 32 : 7 * 32])
        if made:
            assert (cell.sparsity, cell.error) == (made.sparsity, made.mean_error)
            kept = Record.from_json((tmp_path / "out" / str(cell.record)).read_text())
            _same_but_times(kept, made)
            assert same_tensors(out, tmp_path / "out" / "models" / Path(str(cell.record)).stem)
            assert cell.seconds == kept.seconds["total"] == pytest.approx(sum(cell.stages.values()), rel=0.2)
    assert len(list((tmp_path / "out" / "records").iterdir())) == 2 * len(methods)


def _excerpt(name: str) -> str:
    path = Path(niwaki.__file__).parent / "data" / EXCERPTS[name]
    return lzma.open(path, "rt", encoding="utf-8").read()[:20_000]


def _perplexity(path: Path, ids: list[int]) -> float:
    return niwaki.evaluate(path, Windows(torch.tensor(ids).view(-1, 32), "these")).value


def _same_but_times(a: Record, b: Record) -> None:
    first, second = dataclasses.asdict(a), dataclasses.asdict(b)
    for values_ in (first, second):
        for name in ("seconds", "peak_memory", "stages"):
            del values_[name]
        healed = values_["healing"]["points"] if values_["healing"] else []
        for part in (*values_["matrices"], *values_["fits"], *healed):
            del part["seconds"]
    assert first == second


@pytest.mark.slow
def test_files_agree(tmp_path: Path, model: Path) -> None:
    found = run(model, tmp_path / "out", ["wanda", "magnitude"], [0.5, "2:4"])
    there = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert Comparison.load(tmp_path / "out") == found
    assert (there["calibration"]["source"], there["texts"], there["missing"]) == ("demo", ["demo-held"], [])
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out" / "compare.csv").read_text())))
    assert len(rows) == len(there["cells"]) == 5
    markdown = (tmp_path / "out" / "compare.md").read_text()
    table = {
        cells[0]: cells[1:]
        for cells in ([part.strip() for part in line.strip("|").split("|")] for line in markdown.splitlines())
        if len(cells) == 4
    }
    assert table["method"] == ["50 %", "2:4", "seconds"]
    for row, cell in zip(rows, there["cells"], strict=True):
        measured = cell["perplexity"]["demo-held"]
        assert (row["method"], row["pattern"], row["text"]) == (cell["method"], cell["pattern"], "demo-held")
        for name in ("sparsity", "error", "seconds"):
            assert float(row[name]) == cell[name]
        assert float(row["perplexity"]) == measured["value"]
        assert float(row["standard_error"]) == measured["standard_error"]
        assert (int(row["tokens"]), int(row["context"]), int(row["windows"])) == (93, 32, 3)
        column = ["50 %", "2:4"].index(cell["pattern"]) if cell["pattern"] else 0
        shown = table[cell["method"]][column].strip("*")
        assert shown == f"{measured['value']:.2f} ±{measured['standard_error']:.2f}"
    assert len({tuple(row) for row in found.rows()}) == 1  # the same keys


@pytest.mark.slow
def test_memory_changes_nothing(model: Path, whole: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, real = list[int](), MemoryBudget.spill

    def spill(budget: MemoryBudget, tensor: Tensor) -> Any:
        sizes.append(tensor.nbytes)
        return real(budget, tensor)

    monkeypatch.setattr(MemoryBudget, "spill", spill)
    assert values(run(model, None, ["wanda"], max_memory=1)).items() <= values(whole).items()
    # All hidden states, 32 numbers of 4 bytes: of the dense model, of the calibration text, of the pruned model.
    assert sum(sizes) == (3 + 4 + 3) * 32 * (32 * 4)


@pytest.mark.slow
def test_one_sparsity_in_several_spellings(tmp_path: Path, model: Path, calls: list[str]) -> None:
    run(model, tmp_path / "out", ["magnitude", "magnitude@fast"], [0.333, "33.3 %", "0.3330", "33.3%"])
    assert calls == ["magnitude_33.3"]
    record = Record.from_json((tmp_path / "out" / "records" / "magnitude_33.3.json").read_text())
    assert record.pattern == "unstructured:0.333"


# Going on


@pytest.mark.slow
def test_what_is_done_is_not_done_again(tmp_path: Path, model: Path, calls: list[str]) -> None:
    out = tmp_path / "out"
    first = run(model, out, ["wanda", "magnitude"])
    assert calls == ["wanda_50", "magnitude_50"]
    files = {path: path.read_bytes() for path in (out / "records").iterdir()}
    assert run(model, out, ["wanda", "magnitude"]).cells == first.cells
    assert len(calls) == 2
    more = run(model, out, ["magnitude", "ria"], [0.5, "2:4"])
    assert calls[2:] == ["ria_50", "magnitude_2-4", "ria_2-4"]
    assert more.cells[:3] == first.cells
    assert files.items() <= {path: path.read_bytes() for path in (out / "records").iterdir()}.items()
    assert more.seconds > first.seconds
    (out / "records" / "ria_50.json").unlink()
    run(model, out, ["ria"])
    assert calls[5:] == ["ria_50"]


@pytest.mark.parametrize("pattern", ["60%", "2:4"])
def test_an_effort_that_does_not_apply_in_full_is_not_done_again(
    tmp_path: Path, model: Path, calls: list[str], pattern: str
) -> None:
    """Records have what of it applied to the pattern."""
    solvers = ["wanda@balanced:synthetic=0:batch=64"]
    first = run(model, tmp_path / "out", solvers, [pattern])
    assert run(model, tmp_path / "out", solvers, [pattern]).cells == first.cells
    assert len(calls) == 1


class StopAt(Progress):
    """Interrupts when it has been told of so many things of a kind."""

    def __init__(self, kind: str, count: int) -> None:
        self.kind, self.left = kind, count
        self.told: list[tuple[int, int]] = []

    def _count(self, kind: str) -> None:
        self.left -= kind == self.kind
        if self.left == 0:
            raise KeyboardInterrupt

    def done(self, cell: Cell) -> None:
        self._count("cells")

    def status(self, what: str, done: int = 0, count: int = 0) -> None:
        if what.startswith("measuring"):
            self._count("blocks measured")

    def stage(self, block: int, name: str, steps: int) -> None:
        if name == "capture":
            self._count("blocks pruned")

    def paused(self, done: int, missing: int) -> None:
        self.told.append((done, missing))


@pytest.mark.parametrize(
    ("kind", "count", "done", "left"),
    [
        ("blocks measured", 1, -1, ["wanda_50", "magnitude_50", "wanda_60"]),  # of the dense model
        ("cells", 1, 0, ["wanda_50", "magnitude_50", "wanda_60", "magnitude_60"]),
        ("cells", 3, 2, ["wanda_60", "magnitude_60"]),
        ("blocks pruned", 4, 1, ["magnitude_50", "wanda_60", "magnitude_60"]),  # the second of magnitude_50
        ("blocks measured", 35, 1, ["wanda_60", "magnitude_60"]),  # likewise, which is pruned
    ],
)
@pytest.mark.slow
def test_stopped(
    tmp_path: Path, model: Path, whole: Comparison, calls: list[str], kind: str, count: int, done: int, left: list[str]
) -> None:
    out, asked = tmp_path / "out", (["wanda", "magnitude"], [0.5, 0.6])
    stop = StopAt(kind, count)
    with pytest.raises(KeyboardInterrupt):
        run(model, out, *asked, progress=stop)
    if done < 0:
        assert not out.exists()
        return
    assert stop.told == [(done, 4 - done)]
    assert len(Comparison.load(out).missing) == 4 - done
    assert len(list(csv.DictReader(io.StringIO((out / "compare.csv").read_text())))) == done + 1
    calls.clear()
    found = run(model, out, *asked)
    assert calls == left
    assert values(found) == values(whole)
    assert found.missing == []
    record = Record.from_json((out / "records" / "magnitude_50.json").read_text())
    assert record.resumed == ([1] if kind == "blocks pruned" else [])
    names = ["compare.csv", "compare.json", "compare.md", "compare.tex", "records"]
    assert sorted(path.name for path in out.iterdir()) == names


@pytest.mark.slow
def test_killed(tmp_path: Path, model: Path, whole: Comparison) -> None:
    class Kill(Progress):
        def done(self, cell: Cell) -> None:
            if cell.method == "magnitude":
                os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        run(model, tmp_path / "out", ["magnitude", "wanda"], progress=Kill())

    ended = forked(work)
    assert ended.code == -signal.SIGKILL, ended.err
    assert keys(Comparison.load(tmp_path / "out")) == [("dense", ""), ("magnitude", "50 %")]
    assert values(run(model, tmp_path / "out", ["magnitude", "wanda"])).items() <= values(whole).items()


@pytest.mark.slow
def test_a_run_that_fails_is_named_and_the_others_stay(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Flipped):
        def __call__(self, *_: Any) -> Solution:
            raise OutputError("no")

    said = message(lambda: run(model, tmp_path / "out", ["wanda", Broken()]), OutputError)
    assert said.startswith("broken at 50 %: ")
    assert keys(Comparison.load(tmp_path / "out")) == [("dense", ""), ("wanda", "50 %")]


# A budget


@pytest.mark.slow
def test_budget(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs take the time that their records say."""
    seconds = {"magnitude": 100.0, "wanda": 1000.0, "ria": 100.0}
    now = [0.0]

    def pruned(source: str, out: Path, pattern: Any, **options: Any) -> Record:
        record = niwaki.prune(source, out, pattern, **options)
        record.seconds = {"total": seconds[record.method]}
        now[0] += seconds[record.method]
        return record

    class Told(Progress):
        expected: list[list[float]] = []  # noqa: RUF012
        left_out: list[tuple[str, str]] = []  # noqa: RUF012

        def run(self, method: str, pattern: str, done: int, runs: int, expected: Any) -> None:
            self.expected.append(list(expected))

        def finished(self, comparison: Comparison, left_out: Any) -> None:
            self.left_out[:] = left_out

    monkeypatch.setattr(comparison, "prune", pruned)
    monkeypatch.setattr("niwaki.evaluation.compare.time.monotonic", lambda: now[0])
    out, asked = tmp_path / "out", (["magnitude", "wanda"], [0.5, 0.6, 0.7])
    found = run(model, out, *asked, max_time=2150.0, progress=Told())
    # magnitude 100, wanda 1100, magnitude 1200; wanda would end at 2200; magnitude 1300; and again.
    assert keys(found)[1:] == [("magnitude", "50 %"), ("wanda", "50 %"), ("magnitude", "60 %"), ("magnitude", "70 %")]
    assert Told.left_out == found.missing == [("wanda", "60 %"), ("wanda", "70 %")]
    assert Told.expected == [[], [0.0] * 6, [100.0] * 5, [100.0, 1000.0, 100.0, 1000.0], [100.0, 1000.0]]
    assert Comparison.load(out).missing == found.missing
    assert "Not done yet: wanda at 60 %, 70 %." in (out / "compare.md").read_text()
    # Of ria nothing is known: it may be as slow as the slowest.
    assert keys(run(model, out, ["ria"], max_time=999.0)) == keys(found)
    assert keys(run(model, out, ["ria"], max_time=1001.0))[5:] == [("ria", "50 %")]
    whole = run(model, out, *asked)
    assert keys(whole)[6:] == [("wanda", "60 %"), ("wanda", "70 %")]
    assert whole.missing == []
    assert found.seconds == 1300.0
    assert whole.seconds == 3400.0


@pytest.mark.parametrize(
    ("text", "seconds"), [("2h", 7200), ("90m", 5400), ("90 min", 5400), ("1h30m", 5400), ("1.5H", 5400), ("45s", 45)]
)  # fmt: skip
def test_times(text: str, seconds: float) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "2", "0h", "h", "30m1h", "2d", "-1h", "1.h2"])
def test_no_times(text: str) -> None:
    assert repr(text) in message(lambda: parse_time(text))


@pytest.mark.parametrize(
    ("solver", "sparsities", "key"),
    [("wanda", "2:4", ("wanda", "2:4")), ("wanda", 0.5, ("wanda", "50 %")), (Flipped(), 0, ("flipped", "0 %"))],
    ids=str,
)
@pytest.mark.slow
def test_one_alone_is_a_list_of_one(
    model: Path, solver: str | Solver, sparsities: str | float, key: tuple[str, str]
) -> None:
    found = run(model, None, solvers=solver, sparsities=sparsities, texts="demo-held")
    assert keys(found) == [("dense", ""), key]
    assert found.texts == ["demo-held"]
    assert found.cells[1].record is None


# What is refused


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"solvers": ["wanda", "wnada"]}, "did you mean wanda"),
        ({"solvers": ["exact:a=1"]}, "a"),
        ({"effort": "slow"}, "slow"),
        ({"sparsities": [0.5, 1.5]}, "1.5"),
        ({"sparsities": ["nan"]}, "nan"),
        ({"sparsities": ["50"]}, "50"),
        ({"sparsities": ["3:7"]}, "7"),
        ({"solvers": [Flipped(), Flipped(2.0)]}, "two solvers are called 'flipped'"),
        ({"samples": 0}, "got 0"),
        ({"text_samples": 0}, "got 0"),
        ({"max_time": 0.0}, "above 0"),
        ({"solvers": [type("Dense", (Flipped,), {})()]}, "'dense'"),
        ({"measure": "after"}, "compare does not use before"),
        ({"length": 100_000}, "100,000"),
    ],
    ids=str,
)
def test_bad_names_fail_before_anything_is_computed(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str
) -> None:
    for name in ("prune", "evaluate"):
        monkeypatch.setattr(comparison, name, lambda *_, **__: pytest.fail("computed"))
    assert said in message(lambda: run(model, tmp_path / "out", **changes))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"samples": 5}, "calibration (4 x 32 tokens of demo there, 5 x 32 tokens of demo here)"),
        ({"calibration": "demo-held", "texts": ["demo"]}, "tokens of demo there, 4 x 32 tokens of demo-held here"),
        ({"texts": ["demo-held", "demo"]}, "texts (3 x 32 tokens of demo-held there, 3 x 32 tokens of demo-held, 3 x"),
        ({"text_samples": 2}, "texts (3 x 32 tokens of demo-held there, 2 x 32 tokens of demo-held here)"),
        ({"dtype": "bfloat16"}, "dtype (float32 there, bfloat16 here)"),
        ({"solvers": [Flipped(2.0)]}, "flipped at 50 % by flipped (power 1)"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.slow
def test_another_comparison_is_refused(tmp_path: Path, model: Path, changes: dict[str, Any], said: str) -> None:
    out = tmp_path / "out"
    run(model, out, [Flipped()])
    before = {path: path.read_bytes() for path in out.rglob("*.*")}
    text = message(lambda: run(model, out, **{"solvers": [Flipped()], **changes}))
    assert said in text
    assert "use another directory" in text
    assert {path: path.read_bytes() for path in out.rglob("*.*")} == before


@pytest.mark.slow
def test_another_model_or_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = save_model_with_tokenizer(tmp_path / "model"), tmp_path / "out"
    run(model, out, ["wanda"])
    model.rename(tmp_path / "moved")
    run(tmp_path / "moved", out, ["wanda"])  # the same
    with monkeypatch.context() as changed:
        changed.setattr(comparison, "versions", lambda: {"niwaki": "9.9"})
        assert f"niwaki ({niwaki.__version__} there, 9.9 here)" in message(lambda: run(tmp_path / "moved", out))
    edit_json(tmp_path / "moved" / "config.json", rms_norm_eps=0.1)
    said = message(lambda: run(tmp_path / "moved", out, ["wanda"]))
    assert "differs in model (" in said
    assert "by name the same" in said


def test_directories_that_are_no_place(tmp_path: Path, model: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious.txt").write_text("keep me")
    assert "no comparison" in message(lambda: run(model, other))
    assert "no comparison" in message(lambda: run(model, other / "precious.txt"))
    assert "own directory" in message(lambda: run(model, model / "out"))
    assert "give one" in message(lambda: run(model, None, keep=True))
    (other / "compare.json").write_text("{")
    assert "cannot be read as what niwaki writes" in message(lambda: run(model, other), CheckpointError)
    assert "cannot read" in message(lambda: Comparison.load(model), CheckpointError)
    run(model, tmp_path / "out")
    (tmp_path / "out" / "models").write_text("keep me")
    assert "in the way" in message(lambda: run(model, tmp_path / "out", ["ria"]))


def test_what_a_kill_leaves_of_the_first_file(tmp_path: Path, model: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "compare.jsonabcdefgh").touch()
    assert keys(run(model, tmp_path / "out")) == [("dense", ""), ("wanda", "50 %")]


@pytest.mark.parametrize("other", [{"solver": "magnitude"}, {"sparsity": 0.6}, {"samples": 3}, None], ids=str)
@pytest.mark.slow
def test_a_model_that_another_run_made(tmp_path: Path, model: Path, other: dict[str, Any] | None) -> None:
    """It is not taken for the one of the cell, and stays; this is seen before anything is computed."""
    out, left = tmp_path / "out", tmp_path / "out" / "models" / "wanda_50"
    run(model, out, ["magnitude"])
    if other is None:
        save_model_with_tokenizer(left)
    else:
        asked = {"solver": "wanda", "sparsity": 0.5, "measure": "none", **PRUNING, **other}
        niwaki.prune(model, left, **arguments(**asked))
    files = {path: path.read_bytes() for path in out.rglob("*.*")}
    assert "is not of this comparison" in message(lambda: run(model, out, ["ria", "wanda"]))
    assert {path: path.read_bytes() for path in out.rglob("*.*")} == files


@pytest.mark.slow
def test_the_record_of_another_cell(tmp_path: Path, model: Path, whole: Comparison, calls: list[str]) -> None:
    """A cell whose record is not its own is done again, with the same result."""
    out = tmp_path / "out"
    run(model, out, ["wanda", "magnitude"])
    records = out / "records"
    (records / "wanda_50.json").write_bytes((records / "magnitude_50.json").read_bytes())
    values_ = json.loads((out / "compare.json").read_text())
    values_["cells"][2]["record"] = "records/../../x"
    (out / "compare.json").write_text(json.dumps(values_))
    calls.clear()
    found = run(model, out, ["wanda", "magnitude"])
    assert calls == ["wanda_50", "magnitude_50"]
    assert values(found).items() <= values(whole).items()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda cells: cells.append(cells[1]), "each method at each pattern once"),
        (lambda cells: cells.pop(0), "cells are the dense model"),
        (lambda cells: cells[1].update(pattern=""), "is not one of this comparison"),
        (lambda cells: cells[1].update(method=""), "is not one of this comparison"),
        (lambda cells: cells[1].update(pattern="nan %"), "a pattern in percent"),
        (lambda cells: cells[1].update(perplexity={}), "is not one of this comparison"),
        (lambda cells: cells[1].update(error=math.nan), "$.cells[1].error"),
    ],
    ids=range(7),
)
@pytest.mark.slow
def test_tables_that_were_changed(tmp_path: Path, model: Path, whole: Comparison, change: Any, said: str) -> None:
    written = json.loads(whole.to_json())
    change(written["cells"])
    (tmp_path / "compare.json").write_text(json.dumps(written))
    assert said in message(lambda: run(model, tmp_path), CheckpointError)


def test_long_names(tmp_path: Path, model: Path) -> None:
    run(model, tmp_path / "out", ["magnitude"], ["1e-15"])
    (record,) = (tmp_path / "out" / "records").iterdir()
    assert record.name.startswith("magnitude_0.0000")


@pytest.mark.slow
def test_two_at_a_time(tmp_path: Path, model: Path) -> None:
    class Second(Progress):
        said = ""

        def done(self, cell: Cell) -> None:
            if not self.said:
                self.said = message(lambda: run(model, tmp_path / "out"))

    progress = Second()
    run(model, tmp_path / "out", progress=progress)
    assert "another run" in progress.said


def test_nothing_behind_the_calibration_windows(tmp_path: Path, model: Path) -> None:
    (tmp_path / "text.txt").write_text("Call me Ishmael. " * 40)
    text = str(tmp_path / "text.txt")
    ids = AutoTokenizer.from_pretrained(model)(Path(text).read_text())["input_ids"]
    changes = {"calibration": text, "texts": [text], "samples": len(ids) // 32, "text_samples": None}
    assert "nothing after" in message(lambda: run(model, tmp_path / "out", **changes))


# How it looks


def cell(method: str, pattern: str, value: float, seconds: float = 1.0) -> Cell:
    return Cell(method, pattern, 0.5, {"t": Perplexity(value, value / 100, 93, 32, 3, "t")}, seconds)


def table(*cells: Cell, **changes: Any) -> Comparison:
    calibration: Any = {"samples": 4, "sequence_length": 32, "source": "demo"}
    return Comparison("a", calibration, ["t"], [cell("dense", "", 3.0), *cells], **changes)


def test_a_table_with_holes() -> None:
    found = table(
        *(cell("wanda", "2:4", 5.0, 2.0), cell("wanda", "80 %", 9.0, 4.0), cell("admm1", "5 %", 4.0)),
        *(cell("admm1", "2:4", 1e30), cell("x", "80 %", 9.0)),
    )
    header, rows = found.grid("t")
    assert header == ["method", "5 %", "80 %", "2:4", "seconds"]
    assert [[entry.text for entry in row] for row in rows] == [
        ["dense", "3.00 ±0.03", "", "", ""],
        ["wanda", "", "9.00 ±0.09", "5.00 ±0.05", "3.0"],
        ["admm1", "4.00 ±0.04", "", "1e+30 ±1e+28", "1.0"],
        ["x", "", "9.00 ±0.09", "", "1.0"],
    ]
    best = {(row[0].text, name) for row in rows for name, entry in zip(header, row, strict=True) if entry.best}
    assert best == {("wanda", "80 %"), ("wanda", "2:4"), ("admm1", "5 %"), ("x", "80 %")}
    assert "| wanda |  | **9.00 ±0.09** | **5.00 ±0.05** | 3.0 |" in found.to_markdown()
    assert r"wanda &  & \textbf{9.00 $\pm$0.09} & \textbf{5.00 $\pm$0.05} & 3.0 \\" in found.to_latex()
    assert found.to_latex().startswith("% needs \\usepackage{booktabs}\n")
    assert Comparison.from_json(found.to_json()) == found
    above = "Nats a token above the dense model on 93 tokens of t, context 32"
    assert [*found.tables("t")] == ["Perplexity on 93 tokens of t, context 32", above]
    assert [*table().tables("t")] == ["Perplexity on 93 tokens of t, context 32"]
    assert table().grid("t") == (["method", "seconds"], [[("dense", False, None), ("3.00 ±0.03", False, None)]])


def measured(*losses: float) -> Perplexity:
    return Perplexity.of(torch.tensor(losses, dtype=torch.float64)[:, None].expand(-1, 31), "t")


def test_nats_above_the_dense_model() -> None:
    """Methods whose losses rise and fall together are told apart, though each varies much more between windows."""
    dense, hard = (1.0, 2.0, 3.0, 4.0), (1.3, 2.3, 3.3, 4.3)
    models = {
        ("dense", ""): measured(*dense),
        ("best", "2:4"): measured(1.1, 2.1, 3.1, 4.1),
        ("as good", "2:4"): measured(1.2, 2.05, 3.05, 4.15),
        ("worse", "2:4"): measured(*hard),
        ("alone", "50 %"): measured(*hard),
    }
    cells = [Cell(*key, 0.5 if key[1] else 0.0, {"t": each}) for key, each in models.items()]
    found = dataclasses.replace(table(), cells=cells)
    header, rows = found.gaps("t")
    assert header == ["method", "50 %", "2:4"]
    differences = np.subtract([1.2, 2.05, 3.05, 4.15], dense)
    error = differences.std(ddof=1) / math.sqrt(4)
    assert [[cell[:2] for cell in row] for row in rows] == [
        [("best", False), ("", False), ("0.1000 ±0.0000", True)],
        [("as good", False), ("", False), (f"{differences.mean():.4f} ±{error:.4f}", True)],
        [("worse", False), ("", False), ("0.3000 ±0.0000", False)],
        [("alone", False), ("0.3000 ±0.0000", True), ("", False)],
    ]
    assert "| as good |  | **0.1125 ±0.0375** |" in found.to_markdown()
    flat = {(row["method"], row["pattern"]): row for row in found.rows()}
    assert flat["as good", "2:4"]["above_dense"] == pytest.approx(differences.mean())
    assert flat["as good", "2:4"]["above_dense_error"] == pytest.approx(error)
    assert Comparison.from_json(found.to_json()) == found


def test_differences_without_windows() -> None:
    """In records of earlier versions, and of one window."""
    old = dataclasses.replace(measured(1.0, 2.0), losses=())
    for difference in (measured(2.0, 2.0).above(old), measured(2.0).above(measured(1.5))):
        assert difference.nats == pytest.approx(0.5)
        assert difference.standard_error is None
    assert str(measured(2.0).above(measured(1.5))) == "0.5000"


def test_display() -> None:
    def shown(width: int, terminal: bool = False) -> str:
        file = io.StringIO()
        console = Console(file=file, width=width, force_terminal=terminal, highlight=False, emoji=False)
        with TableDisplay("comparing", console) as display:
            found = table(cell("wanda", "2:4", 5.0))
            display.table(found, 2)
            display.run("wanda", "2:4", 0, 2, [0.0, 0.0])
            for _ in range(2):
                display.note("[once]")
            display.done(found.cells[1])
            display.run("admm1", "2:4", 1, 2, [600.0, 7200.0])
            display.status("measuring", 1, 6)
            assert display.describe() == "run 2 of 2: admm1 2:4, measuring 1/6, about 2 h 10 min left"
            display.finished(found, [("admm1", "2:4")])
        return file.getvalue()

    text = shown(100)
    assert "\x1b" not in text
    for part in ("a: 2 runs, 1 there already; calibration: 4 x 32 tokens of demo", "note: [once]"):
        assert text.count(part) == 1
    assert "wanda 2:4: 5.00 ±0.05 on t; 1.0 s" in text
    assert re.search(r"wanda +5\.00 ±0\.05 +1\.0", text)
    assert "left out, because of the time limit: admm1 at 2:4" in text
    assert "wanda 2:4: 5.00 ±0.05 on t; 1.0 s" in shown(100, terminal=True)


def test_latex_has_no_commands_of_others() -> None:
    """Names of models and texts are shown as they are."""
    assert latex(r"a_b & 50 % #1 {x} \input{y} ~^$ ±") == (
        r"a\_b \& 50 \% \#1 \{x\} \textbackslash{}input\{y\} \textasciitilde{}\textasciicircum{}\$ $\pm$"
    )
