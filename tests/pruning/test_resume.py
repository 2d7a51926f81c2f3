"""Runs that are stopped: what they leave, who may go on with it, and that the result is the same."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import niwaki
from niwaki.checkpoints.reading import Checkpoint
from niwaki.checkpoints.tensors import read_header
from niwaki.errors import OutputError
from niwaki.files import replace_file
from niwaki.layer.solvers import describe, make_solver
from niwaki.models.scales import FILE
from niwaki.records.record import MatrixRecord, Record
from niwaki.runs.carried import MARGIN
from niwaki.runs.workplace import Journal, Workplace, check_record, workplace
from support import faults
from support.covering import FULL
from support.models import message, random_tokens, save_model, sparse_model
from support.runs import StopAt, files, run, stopped

TESTS = Path(__file__).parent.parent


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", "llama grouped", shards=True)  # 3 blocks of 7 matrices


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def alone(*arguments: object) -> str:
    """What a program of the tests prints, with one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not (FULL and faults.POSSIBLE), reason="`make campaign` kills at some; takes Linux and a compiler")
def test_killed_at_every_change_of_the_disk(tmp_path: Path, model: Path) -> None:
    found = json.loads(alone(TESTS / "support" / "crashes.py", model, tmp_path / "runs"))
    assert found["kills"] >= 60
    assert found["resumed"] == [1, 2, 3]


@pytest.mark.parametrize("there", [False, True], ids=["new directory", "empty directory"])
@pytest.mark.parametrize("matrices", [7, 8, 21])
@pytest.mark.slow
def test_an_interrupted_run_goes_on(tmp_path: Path, model: Path, there: bool, matrices: int) -> None:
    """Interrupted before a block is done nothing stays, later all that is done."""
    run(model, tmp_path / "whole")
    out = tmp_path / "out"
    if there:
        out.mkdir()
    stopped(model, out, matrices)
    done = (matrices - 1) // 7
    where = out if there else tmp_path
    name = ".partial" if there else ".out.partial"
    assert [n for n in names(where) if n.startswith(".")] == ([name, f"{name}.json"] if done else [])
    assert out.exists() == there
    progress = StopAt(100)
    record = run(model, out, progress=progress)
    assert record.resumed == ([done] if done else [])
    assert progress.left == 100 - 21 + 7 * done  # no block is solved twice
    assert any(note.startswith(f"resuming after the first {done} of 3 blocks") for note in progress.notes) == bool(done)
    assert files(out) == files(tmp_path / "whole")
    assert [m.block for m in record.matrices] == [0] * 7 + [1] * 7 + [2] * 7
    assert not [n for n in names(where) if n.startswith(".")]


@pytest.mark.slow
def test_stopped_twice(tmp_path: Path, model: Path) -> None:
    run(model, tmp_path / "whole")
    stopped(model, tmp_path / "out", 9)
    stopped(model, tmp_path / "out", 10)
    assert run(model, tmp_path / "out").resumed == [1, 2]
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.slow
def test_both_perplexities(tmp_path: Path, model: Path) -> None:
    whole = run(model, tmp_path / "whole", measure="both")
    stopped(model, tmp_path / "out", measure="both")
    assert run(model, tmp_path / "out", measure="both").perplexity == whole.perplexity


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sparsity": 0.6}, "pattern (per-row:0.5 there, per-row:0.6 here)"),
        ({"solver": "magnitude"}, "solver (wanda there, magnitude here)"),
        ({"calibration": random_tokens(4, 24, seed=7)}, "differs in calibration; ask"),
        ({"text": random_tokens(2, 24, seed=7)}, "differs in text; ask"),
        ({"measure": "after"}, "measure (both there, after here)"),
        ({"dtype": "bfloat16"}, "dtype (float32 there, bfloat16 here)"),
        ({"mask_from": "magnitude"}, "mask_from (none there, magnitude here)"),
    ],
    ids=str,
)
@pytest.mark.slow
def test_another_run_is_refused(tmp_path: Path, model: Path, changes: dict[str, Any], said: str) -> None:
    stopped(model, tmp_path / "out")
    before = files(tmp_path)
    text = message(lambda: run(model, tmp_path / "out", **changes))
    assert said in text
    assert "1 blocks done" in text
    assert "--restart" in text
    assert files(tmp_path) == before
    # What is there is still good for the run that it belongs to.
    assert run(model, tmp_path / "out").resumed == [1]


def test_another_command_is_refused(tmp_path: Path, model: Path) -> None:
    """In a few words, which name no option that it has not."""
    stopped(model, tmp_path / "out")
    run(model, tmp_path / "sparse")
    said = message(lambda: niwaki.pack(tmp_path / "sparse", tmp_path / "out"))
    journal = tmp_path / ".out.partial.json"
    assert said == (
        f"{tmp_path / 'out'} has an unfinished run (1 blocks done) that differs in the command; choose another place, "
        f"or remove {journal}"
    )
    journal.write_text("{}")
    said = message(lambda: niwaki.pack(tmp_path / "sparse", tmp_path / "out"), OutputError)
    assert said == f"{journal} is not readable as the journal of a run; remove it"


def test_how_runs_differ() -> None:
    """Solvers and efforts only in what is not the same."""
    solver, effort = describe(make_solver("admm1")), {"name": "best", "a": 1, "b": [2, 3]}
    asked = {"solver": solver, "effort": effort, "model": "0" * 64, "versions": {}}
    for changes, said in (
        ({"solver": describe(make_solver("admm1:rho=2.5"))}, "solver (rho 1.0 there, 2.5 here)"),
        ({"solver": {"name": "Odd"}}, "solver (admm1 there, Odd here)"),
        ({"effort": {**effort, "b": None}}, "effort (b [2, 3] there, none here)"),
        ({"model": "1" * 64}, "model"),
        ({"versions": {"torch": "2"}}, "versions (torch none there, 2 here)"),
        ({"more": 1}, "the command"),
    ):
        there, here = ({"stage": "prune", **each} for each in (asked, {**asked, **changes}))
        assert Journal([there]).differences([here]) == [said]


@pytest.mark.slow
def test_tf32_is_part_of_what_was_asked_where_there_is_any(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(model, tmp_path / "without", tf32="auto")
    assert run(model, tmp_path / "without", tf32="always").resumed == [1]
    monkeypatch.setattr("niwaki.pruning.prune.has_tf32", lambda device: True)
    stopped(model, tmp_path / "with", tf32="auto")
    said = message(lambda: run(model, tmp_path / "with", tf32="always"))
    assert "tf32 (auto there, always here)" in said


def test_another_model_is_refused(tmp_path: Path, model: Path) -> None:
    stopped(model, tmp_path / "out")
    shutil.rmtree(model)
    save_model(model, "llama grouped", shards=True, seed=1)
    assert "differs in model; ask" in message(lambda: run(model, tmp_path / "out"))


def test_other_versions_are_refused(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(model, tmp_path / "out")
    monkeypatch.setattr("niwaki.runs.stage.versions", lambda: {"niwaki": "9.9"})
    said = message(lambda: run(model, tmp_path / "out"))
    assert "differs in versions (python " in said
    assert f"niwaki {metadata.version('niwaki')} there, 9.9 here" in said


@pytest.mark.slow
def test_restart(tmp_path: Path, model: Path) -> None:
    stopped(model, tmp_path / "out")
    record = run(model, tmp_path / "out", restart=True, solver="magnitude")
    assert record.resumed == []
    run(model, tmp_path / "whole", solver="magnitude")
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert names(tmp_path) == ["model", "out", "whole"]


def forged(journal: Path, **changes: Any) -> str:
    """A journal with these changes, and a digest that fits."""
    values = {**json.loads(journal.read_text()), **changes}
    del values["sha256"]
    digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    return json.dumps({**values, "sha256": digest})


@pytest.mark.slow
def test_a_journal_that_is_broken(tmp_path: Path, model: Path) -> None:
    stopped(model, tmp_path / "out")
    journal = tmp_path / ".out.partial.json"
    good = journal.read_text()
    texts = ["", "{", "[]", "\0", '{"blocks": 3}', "[" * 100_000, good.replace('"files": {}', '"files": {"a": "b"}')]
    texts += [forged(journal, **change) for change in ({"digests": 3}, {"zeros": {"a": "b"}}, {"record": "{}"})]
    for text in texts:
        journal.write_text(text)
        assert "--restart" in message(lambda: run(model, tmp_path / "out"), OutputError)
    journal.write_text(good)
    journal.write_text(forged(journal, digests=["0" * 64] * 5))  # as if it had more blocks
    run(model, tmp_path / "out")
    run(model, tmp_path / "whole")
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    stopped(model, tmp_path / "again")
    (tmp_path / ".again.partial.json").write_text("{")
    run(model, tmp_path / "again", restart=True)
    assert names(tmp_path) == ["again", "model", "out", "whole"]


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


ON_GRID = {"effort": "best:epochs=1:synthetic=0:healing=0", "quantize": "int4:16"}
UP = "model.layers.0.mlp.up_proj.weight"


def damage(partial: Path, model: Path, what: str) -> None:
    """Of what an unfinished run has kept in ``partial``, in the first block but for the plan."""
    entry, scale = Checkpoint(model).entries[UP], read_header(partial / "1" / FILE)[f"{UP}_scale"]
    shard, plan = partial / "1" / entry.shard, partial / "plan.safetensors"
    match what:
        case "weight":
            flip(shard, entry.offset)
        case "header":
            flip(shard, 9)
        case "scale":
            flip(partial / "1" / FILE, scale.offset)
        case "cut":
            os.truncate(shard, entry.offset + 1)
        case "folder":
            shard.unlink()
            shard.mkdir()
        case "all":
            shutil.rmtree(partial / "1")
        case "plan":
            flip(plan, -1)
        case "no plan":
            plan.unlink()
        case _:
            shard.unlink()


@pytest.mark.slow
def test_what_is_damaged_is_done_again(tmp_path: Path, model: Path) -> None:
    whole = run(model, tmp_path / "whole", **ON_GRID)
    out, partial, journal = tmp_path / "out", tmp_path / ".out.partial", tmp_path / ".out.partial.json"
    stopped(model, out, 15, **ON_GRID)
    shutil.copytree(partial, tmp_path / "kept")
    shutil.copyfile(journal, tmp_path / "kept.json")
    for what in ("weight", "header", "scale", "cut", "gone", "folder", "all", "plan", "no plan"):
        if not partial.exists():
            shutil.copytree(tmp_path / "kept", partial)
            shutil.copyfile(tmp_path / "kept.json", journal)
        damage(partial, model, what)
        progress = StopAt(100)
        record = run(model, out, progress=progress, **ON_GRID)
        assert files(out) == files(tmp_path / "whole"), what
        again = {note.split()[1] for note in progress.notes if "done again" in note}
        expected = {"header": set(), "plan": set(), "no plan": set(), "all": {"0", "1"}}.get(what, {"0"})
        assert again == expected if what in ("weight", "scale", "header", "all") else again >= expected
        assert any("plan" in note for note in progress.notes) == ("plan" in what)
        found, meant = ([(m.block, m.name, m.error) for m in each.matrices] for each in (record, whole))
        assert found == meant
        assert [fit.after for fit in record.fits] == [fit.after for fit in whole.fits]
        assert record.notes == whole.notes
        assert names(tmp_path) == ["kept", "kept.json", "model", "out", "whole"]
        shutil.rmtree(out)


@pytest.mark.slow
def test_a_shard_may_be_called_as_the_plan(tmp_path: Path, model: Path) -> None:
    shard = sorted(model.glob("*.safetensors"))[1]
    shard.rename(model / "plan.safetensors")
    index = model / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(shard.name, "plan.safetensors"))
    run(model, tmp_path / "whole", effort="balanced")
    stopped(model, tmp_path / "out", effort="balanced")
    run(model, tmp_path / "out", effort="balanced")
    assert "plan.safetensors" in files(tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.fixture
def unmoved(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Does a run that ends when only the move into place is missing."""

    def end(place: Workplace) -> None:
        raise KeyboardInterrupt

    def run_until(out: Path) -> None:
        with monkeypatch.context() as changed:
            changed.setattr(Workplace, "move", end)
            with pytest.raises(KeyboardInterrupt):
                run(model, out)

    return run_until


@pytest.mark.parametrize("there", [False, True], ids=["new directory", "empty directory"])
@pytest.mark.parametrize("damage", ["", "weight", "record", "card"])
@pytest.mark.slow
def test_only_the_move_was_missing(
    tmp_path: Path, model: Path, unmoved: Callable[[Path], None], there: bool, damage: str
) -> None:
    out = tmp_path / "out"
    if there:
        out.mkdir()
    unmoved(out)
    partial = (out / ".partial" if there else tmp_path / ".out.partial") / "1"
    if there:  # it had begun
        (partial / "config.json").rename(out / "config.json")
    if damage:
        entry = Checkpoint(model).entries[UP]
        file, place = {"weight": (entry.shard, entry.offset), "record": ("niwaki.json", 9), "card": ("README.md", 9)}[
            damage
        ]
        flip(partial / file, place)
    progress = StopAt(100)
    record = run(model, out, progress=progress)
    assert progress.left == 100 - 7 * (damage == "weight")
    assert record == Record.load(out / "niwaki.json")
    whole = run(model, tmp_path / "whole")
    assert files(out) == files(tmp_path / "whole")
    assert record.notes == whole.notes
    assert names(tmp_path) == ["model", "out", "whole"]


@pytest.mark.parametrize("there", [False, True], ids=["new directory", "empty directory"])
@pytest.mark.slow
def test_another_run_where_only_the_move_was_missing(
    tmp_path: Path, model: Path, unmoved: Callable[[Path], None], there: bool
) -> None:
    """Nothing of the earlier one stays in the output."""
    out, other = tmp_path / "out", save_model(tmp_path / "other", "llama grouped")
    sparse = sparse_model(tmp_path / "sparse")
    if there:
        out.mkdir()
    unmoved(out)
    if there:
        for path in (out / ".partial" / "1").glob("model-*"):
            path.rename(out / path.name)
    assert "unfinished run" in message(lambda: run(other, out))
    assert "unfinished run" in message(lambda: niwaki.pack(sparse, out))
    run(other, out, restart=True)
    run(other, tmp_path / "whole")
    assert files(out) == files(tmp_path / "whole")


@pytest.mark.slow
def test_only_the_journal_was_left(tmp_path: Path, model: Path, unmoved: Callable[[Path], None]) -> None:
    """Moved, but for the last step; another run for the same place changes nothing."""
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    unmoved(out)
    (partial / "1").rename(out)
    before = files(out)
    shutil.copyfile(tmp_path / ".out.partial.json", tmp_path / "left")
    run(model, out, progress=(progress := StopAt(100)))
    assert progress.left == 100
    for restart in (False, True):
        shutil.copyfile(tmp_path / "left", tmp_path / ".out.partial.json")
        said = message(lambda restart=restart: run(model, out, solver="magnitude", restart=restart))  # type: ignore[misc]
        assert "is not an empty directory" in said
        assert files(out) == before
        assert names(tmp_path) == ["left", "model", "out"]
    shutil.copyfile(tmp_path / "left", tmp_path / ".out.partial.json")
    shutil.rmtree(out)
    run(model, out)
    assert files(out) == before


def test_what_came_into_the_output_meanwhile_stays(
    tmp_path: Path, model: Path, unmoved: Callable[[Path], None]
) -> None:
    out = tmp_path / "out"
    out.mkdir()

    class Neighbour(StopAt):
        def solved(self, matrix: MatrixRecord) -> None:
            (out / "README.md").write_text("keep me")
            super().solved(matrix)

    said = message(lambda: run(model, out, progress=Neighbour(100)), OutputError)
    assert "no longer empty" in said
    assert (out / "README.md").read_text() == "keep me"
    (out / "README.md").unlink()
    run(model, out)
    assert names(out)[0] != ".partial"


def test_a_name_that_is_too_long(tmp_path: Path, model: Path) -> None:
    """Before the work, and not with the first journal after it."""
    out = tmp_path / ("a" * 235)
    progress = StopAt(100)
    assert "too long" in message(lambda: run(model, out, progress=progress))
    assert progress.left == 100
    assert names(tmp_path) == ["model"]


def test_two_at_a_time(tmp_path: Path, model: Path) -> None:
    with workplace(tmp_path / "out", [{}]) as place:
        assert "another run" in message(lambda: run(model, tmp_path / "out"))
        assert place.directory.exists()
    assert (tmp_path / ".out.partial").exists() is False or run(model, tmp_path / "out")


def test_what_others_put_beside_it_meanwhile_stays(tmp_path: Path, model: Path) -> None:
    class Neighbour(StopAt):
        def solved(self, matrix: MatrixRecord) -> None:
            (tmp_path / "runs" / "of" / "others.txt").write_text("keep me")
            super().solved(matrix)

    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "runs" / "of" / "mine" / "out", progress=Neighbour(2))
    assert names(tmp_path / "runs" / "of") == ["others.txt"]
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "new" / "er" / "out", progress=StopAt(2))
    assert not (tmp_path / "new").exists()


def test_an_output_that_was_made_meanwhile(tmp_path: Path, model: Path) -> None:
    stopped(model, tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("keep me")
    assert "not an empty directory" in message(lambda: run(model, tmp_path / "out"))
    assert (tmp_path / "out" / "precious.txt").read_text() == "keep me"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with 300 KiB more than the room that is asked for besides the model."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={(MARGIN >> 10) + 300}k", "none", str(path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting a file system takes root")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path, model: Path, small_disk: Path) -> None:
    """Too small from the start; full on the way; and room again."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 250_000)
    assert "the output needs" in message(lambda: run(model, small_disk / "out"), OutputError)
    assert names(small_disk) == ["ballast"]
    ballast.unlink()
    out = small_disk / "out"
    stopped(model, out)
    free = shutil.disk_usage(small_disk).free
    ballast.write_bytes(b"x" * (free - free % 4096))
    assert "no space left" in message(lambda: run(model, out), OutputError).lower()
    ballast.unlink()
    assert run(model, out).resumed == [1]
    run(model, tmp_path / "whole")
    assert files(out) == files(tmp_path / "whole")


@pytest.mark.parametrize("block", [0, 1])
@pytest.mark.slow
def test_a_journal_that_cannot_be_written(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """What it could not say is done is not."""

    class Told(StopAt):
        def stopped(self, done: int, blocks: int, where: str = "") -> None:
            told.append((done, blocks))

    def full(path: Path, text: str, sync: bool = False) -> None:
        left.pop()
        if not left:
            raise OutputError("no space left on disk")
        replace_file(path, text, sync)

    told: list[tuple[int, int]] = []
    left = [None] * (block + 1)
    with monkeypatch.context() as changed:
        changed.setattr("niwaki.runs.workplace.replace_file", full)
        message(lambda: run(model, tmp_path / "out", progress=Told(100)), OutputError)
    assert told == ([(1, 3)] if block else [])
    assert names(tmp_path) == [*([".out.partial", ".out.partial.json"] if block else []), "model"]
    assert run(model, tmp_path / "out").resumed == ([1] if block else [])
    run(model, tmp_path / "whole")
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_the_fingerprint_sees_other_weights(tmp_path: Path) -> None:
    first = Checkpoint(save_model(tmp_path / "a")).fingerprint()
    assert Checkpoint(save_model(tmp_path / "b")).fingerprint() == first
    assert Checkpoint(save_model(tmp_path / "c", seed=1)).fingerprint() != first
    assert Checkpoint(save_model(tmp_path / "d", dtype=torch.bfloat16)).fingerprint() != first


def test_a_record_where_nothing_can_be_written(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows before the work: the tests may run as root, whom nothing is forbidden."""
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: "closed" not in str(path))
    said = message(lambda: check_record(tmp_path / "closed" / "new" / "a.json"))
    assert str(tmp_path / "closed") in said
    assert names(tmp_path) == ["closed", "model"]
