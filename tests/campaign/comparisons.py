"""Comparisons that are killed, whose files are changed, and that are asked for again."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from campaign.home import SMALL, contents, furnish
from support.forks import Ended, command, refused

_home = Path()
_took = 0.0
_KEYS = [(method, pattern) for pattern in ("50 %", "2:4") for method in ("wanda", "magnitude")]
#: Of a comparison's directory; it gives the files that are to stay as they are.
Change = Callable[[random.Random, Path], dict[Path, bytes]]


def prepare(place: Path) -> None:
    global _home, _took
    _home = place
    furnish(place)
    began = time.monotonic()
    ended = _compare(place)
    command(("prune", "model", "other", "--sparsity", "0.6", "--solver", "magnitude", *SMALL), place)
    _took = time.monotonic() - began
    assert ended.code == 0, ended.err


def _compare(place: Path, *more: str, before: Callable[[], None] = lambda: None) -> Ended:
    asked = ("--solvers", "wanda,magnitude", "--sparsity", "0.5,2:4", "--text", "demo-held", *SMALL)
    return command(("compare", _home / "model", "-o", "out", *asked, *more), place, before)


def case(chance: random.Random, place: Path) -> str:
    out, kills, keep = place / "out", 0, chance.random() < 0.2
    more = ["--keep"] if keep else []
    for _ in range(chance.choice((0, 1, 1, 2, 3))):
        ended = _compare(place, *more, before=_killer(chance))
        assert ended.code in (0, -signal.SIGKILL, -signal.SIGALRM), ended.err
        kills += ended.code != 0
    if not (out / "compare.json").exists() and chance.random() < 0.5:
        shutil.copytree(_home / "out", out, dirs_exist_ok=True)
    changed = chance.choice([*_CHANGES]) if (out / "compare.json").exists() else "nothing"
    foreign = _CHANGES[changed](chance, out)
    before = contents(out) if out.exists() else {}
    ended = _compare(place, *more)
    words = f"{kills} kills, {changed} changed"
    for file, content in foreign.items():
        assert file.read_bytes() == content, f"{file} is not what it was"
    if ended.code:
        line = refused(ended)
        assert changed != "nothing", line
        after = contents(out)
        assert before.keys() <= after.keys(), f"something is gone: {line}"
        assert all(after[name] == before[name] for name in before if name in after), f"something changed: {line}"
        return f"{words}: refused"
    _check(out, keep, {file.relative_to(out).parts[0] for file in foreign}, changed)
    return f"{words}: done"


def _check(out: Path, keep: bool, foreign: set[str], changed: str) -> None:
    """The table is that of a comparison that nobody touched."""
    values, whole = (json.loads((place / "compare.json").read_text()) for place in (out, _home / "out"))
    assert next((cell["method"], cell["pattern"]) for cell in values["cells"]) == ("dense", "")
    cells, expected = ({(c["method"], c["pattern"]): c for c in each["cells"]} for each in (values, whole))
    assert len(cells) == len(values["cells"])
    # A method of another name stays as one that was not asked for, and so does what is missing of one.
    cells = {key: cell for key, cell in cells.items() if key[0] != "x" or changed != "names"}
    assert cells.keys() == expected.keys()
    assert not [key for key in values["missing"] if key != ["no", "such"]]
    for key, cell in cells.items():
        for name in ("sparsity", "perplexity", "error", "record"):
            assert cell[name] == expected[key][name], f"{key}: {name}"
    for key in _KEYS:
        records = [json.loads((place / cells[key]["record"]).read_text()) for place in (out, _home / "out")]
        for record in records:
            for name in ("seconds", "peak_memory", "resumed", "command"):
                del record[name]
            for matrix in record["matrices"]:
                del matrix["seconds"]
        assert records[0] == records[1], key
    with (out / "compare.csv").open(newline="") as file:
        rows = {(row["method"], row["pattern"]): float(row["perplexity"]) for row in csv.DictReader(file)}
    assert {key: value for key, value in rows.items() if key in expected} == {
        key: cell["perplexity"]["demo-held"]["value"] for key, cell in expected.items()
    }
    assert (out / "compare.md").read_text().count("\n| ") == 9 + 2 * (len(rows) > len(expected))
    strays = r"compare\.(json|csv|md)\.?\w{8,11}"  # what a kill leaves of a file that is being written
    names = {path.name for path in out.iterdir() if not re.fullmatch(strays, path.name)} - (foreign - {"records"})
    assert names - {"models"} == {"compare.json", "compare.csv", "compare.md", "compare.tex", "records"}, names
    if "models" in names:
        assert keep or not any(path.is_dir() for path in (out / "models").iterdir()), "a model is left"
        assert not list((out / "models").glob(".*")), "an unfinished model is left"


def _killer(chance: random.Random) -> Callable[[], None]:
    """Kills the process that calls it after a while, or before or after a step that changes the disk."""
    if chance.random() < 0.5:
        seconds = chance.uniform(0.01, 1.1 * _took)

        return lambda: signal.setitimer(signal.ITIMER_REAL, seconds) and None
    left = [chance.randrange(1, 300)]

    def step() -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            step()
            done = real(*arguments, **options)
            step()
            return done

        return call

    def steps() -> None:
        owned = ((os, "fsync rmdir"), (Path, "mkdir rename replace unlink"), (shutil, "rmtree"))
        for owner, names in owned:
            for name in names.split():
                setattr(owner, name, counted(getattr(owner, name)))

    return steps


def _edit(change: Callable[[random.Random, dict[str, Any]], None]) -> Change:
    """A change of what is in compare.json."""

    def changed(chance: random.Random, out: Path) -> dict[Path, bytes]:
        values = json.loads((out / "compare.json").read_text())
        change(chance, values)
        (out / "compare.json").write_text(json.dumps(values))
        return {}

    return changed


def _removed(chance: random.Random, out: Path) -> dict[Path, bytes]:
    files = [path for path in out.rglob("records/**/*") if path.is_file()]
    for file in chance.sample(files, min(len(files), chance.choice((1, 2)))):
        file.unlink()
    for name in ("compare.csv", "compare.md"):
        if chance.random() < 0.5:
            (out / name).unlink(missing_ok=True)
    return {}


def _swapped(chance: random.Random, out: Path) -> dict[Path, bytes]:
    files = sorted((out / "records").glob("*.json"))
    if len(files) > 1:
        one, two = chance.sample(files, 2)
        texts = one.read_bytes(), two.read_bytes()
        one.write_bytes(texts[1])
        if chance.random() < 0.5:
            two.write_bytes(texts[0])
    return {}


def _broken(chance: random.Random, out: Path) -> dict[Path, bytes]:
    files = sorted([*out.glob("records/*.json"), out / "compare.csv", out / "compare.md"])
    file = chance.choice([file for file in files if file.exists()] or [out / "compare.csv"])
    file.write_bytes(b"" if chance.random() < 0.5 else b"\xff{")
    return {}


def _foreign(chance: random.Random, out: Path) -> dict[Path, bytes]:
    name = chance.choice(("notes.txt", "compare.json.bak", "records/mine.json", "models/notes.txt", "models/wanda_50"))
    if name == "models/wanda_50":
        source = chance.choice(("other", "model"))
        shutil.rmtree(out / name, ignore_errors=True)
        shutil.copytree(_home / source, out / name)
        # Only where the cell is to be done is it in the way.
        (out / "records" / "wanda_50.json").unlink(missing_ok=True)
        return {file: file.read_bytes() for file in (out / name).rglob("*") if file.is_file()}
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("precious")
    return {out / name: b"precious"}


def _again(chance: random.Random, values: dict[str, Any]) -> None:
    values["cells"].insert(chance.randrange(len(values["cells"]) + 1), dict(chance.choice(values["cells"])))


def _fewer(chance: random.Random, values: dict[str, Any]) -> None:
    del values["cells"][chance.randrange(len(values["cells"])) :]


def _paths(chance: random.Random, values: dict[str, Any]) -> None:
    for cell in values["cells"]:
        cell["record"] = chance.choice(("records/../../x", "/etc/passwd", "records/magnitude_50.json", "", None, "\0"))


def _numbers(chance: random.Random, values: dict[str, Any]) -> None:
    cell = chance.choice(values["cells"])
    odd = chance.choice((float("nan"), -1.0, float("inf"), "x", None))
    if chance.random() < 0.5:
        cell[chance.choice(("sparsity", "error", "seconds"))] = odd
    else:
        cell["perplexity"]["demo-held"][chance.choice(("value", "tokens", "context"))] = odd


def _names(chance: random.Random, values: dict[str, Any]) -> None:
    chance.choice(values["cells"])["method"] = chance.choice(("x", "dense", ""))


def _missing(chance: random.Random, values: dict[str, Any]) -> None:
    values["missing"] = [["no", "such"], ["wanda", "50 %"]][: chance.choice((1, 2))]


_CHANGES: dict[str, Change] = {"nothing": lambda chance, out: {}, "files removed": _removed, "files broken": _broken}
_CHANGES |= {"records swapped": _swapped, "foreign files": _foreign, "a cell twice": _edit(_again)}
_CHANGES |= {"cells gone": _edit(_fewer), "paths of records": _edit(_paths), "numbers": _edit(_numbers)}
_CHANGES |= {"names": _edit(_names), "missing": _edit(_missing)}
