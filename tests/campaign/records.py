"""JSON files of models and comparisons with something odd in them, read by all commands that read them."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from campaign.home import SMALL, contents, furnish
from niwaki.records.wording import printable
from support.forks import Ended, command, refused
from support.pages import Page

_home = Path()

_EVIL = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'{{ 7 * 7 }} %s %d javascript:alert(1)"
#: What is put where something else was.
_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 2**31, 2**53, 2**64, 10**400, 0.5, -0.5, 1.0, 1e-300, 5e-324, 1e300, 1e308),
    -1e308,
    *(float("nan"), float("inf"), float("-inf"), "", " ", "a", "0", "nan", "1e999", "2:4", "60 %", "-5 %", "x %"),
    "dense",
    *(_EVIL, "a" * 20_000, "a" * 4_999, "\0", "\x1b[2J", "\ud800", "\udfff\ud800", "\u202e", "\ufffe", "\r\n", "|"),
    "`*_",
    *("/etc/passwd", "../../x", "records/../../x", "~nosuch/x", "0.1", "...", "*", "٣", [], {}, [[]], [None]),
    *([1, 2, 3], {"": {}}, {"name": 1}, {"name": "x", "mask": {}, "update": 5}, {"mask": {"name": "a"}, "update": {}}),
    "Wanda(a='\\d')",
)
_WHAT: dict[str, tuple[str, ...]] = {
    "pruned": ("report", "report", "report", "report", "inspect", "pack", "mask"),
    "gridded": ("report", "report", "export", "pack"),
    "smaller": ("report",),
    "compared": ("report", "report", "compare"),
}
_COMPARE = ("-o", "compared", "--solvers", "wanda,magnitude", "--sparsity", "0.5,2:4", "--text", "demo-held", *SMALL)
_FILES = {"compared": ("compare.json", "compare.json", "records/wanda_50.json")}


def prepare(place: Path) -> None:
    global _home
    _home = place
    furnish(place)
    for arguments in (
        ("prune", "model", "gridded", "--sparsity", "0.5", "--solver", "wanda", "--quantize", "int4:16", *SMALL),
        ("shrink", "model", "smaller", "--neurons", "0.25", *SMALL),
        ("compare", "model", *_COMPARE),
        ("export", "gridded", "exported"),
    ):
        ended = command(arguments, place)
        assert ended.code == 0, ended.err
    speed: dict[str, Any] = {"weights": "dense", "dtype": "float32", "disk": 1, "resident": 2, "peak": 3, "load": 0.5}
    speed |= {"first_token": 0.1, "tokens_per_second": 3.0, "slowest": 2.0, "fastest": 4.0}
    bench: dict[str, Any] = {"model": "m", "prompt": 8, "tokens": 4, "repeats": 2, "device": "cpu", "threads": 1}
    bench |= {"kernels": "", "command": ""}
    (place / "pruned" / "niwaki-bench.json").write_text(json.dumps({**bench, "speeds": [speed, speed], "versions": {}}))


def case(chance: random.Random, place: Path) -> str:
    name = chance.choice([*_WHAT])
    what = chance.choice(_WHAT[name])
    shutil.copytree(_home / name, place / name)
    usual = ("niwaki.json", "niwaki.json", *(["niwaki-bench.json"] if name == "pruned" else []))
    file = place / name / chance.choice(_FILES.get(name, usual))
    spoil(chance, file)
    before = contents(place)
    ended = command(_commands(what, name, chance), place)
    if ended.code:
        line = refused(ended)
        assert contents(place) == before, f"{what} left something: {line}"
        return f"{what} refused"
    if what in _CHECKS:
        _CHECKS[what](place, name)
    return f"{what} done"


def _commands(what: str, name: str, chance: random.Random) -> tuple[object, ...]:
    if what == "report":
        samples = [] if chance.random() < 0.1 else ["--no-samples"]
        return ("report", name, *samples)
    if what == "mask":
        return ("prune", _home / "model", "out", "--solver", "magnitude", "--mask-from", name, *SMALL)
    if what == "compare":
        return ("compare", _home / "model", *_COMPARE)
    return (what, name, *([] if what == "inspect" else ["out"]))


def spoil(chance: random.Random, file: Path) -> None:
    """Changes something in a JSON file."""
    text = file.read_text()
    how = chance.choice(("value",) * 12 + ("truncate", "bytes", "double", "deep", "empty", "bom"))
    if how == "value":
        values = json.loads(text)
        for _ in range(chance.choice((1, 1, 1, 2, 5))):
            holder, key = _place(chance, values)
            if holder is None:
                break
            if chance.random() < 0.15:
                del holder[key]
            elif chance.random() < 0.1 and isinstance(holder, list):
                holder.insert(0, holder[key])
            elif isinstance(holder, dict) and chance.random() < 0.1:
                holder[chance.choice([each for each in _ODD if isinstance(each, str)])] = holder.pop(key)
            else:
                # Mostly of the same type, so that what reads it has to look at what it is.
                same = [each for each in _ODD if type(each) is type(holder[key])]
                holder[key] = chance.choice(same if same and chance.random() < 0.7 else _ODD)
        text = json.dumps(values)
    elif how == "truncate":
        text = text[: chance.randrange(len(text))]
    elif how == "double":
        text = text.replace("{", '{"model": 5, "blocks": [0], "sparsity": 2, ', 1)
    elif how == "deep":
        text = text.replace('"solver": {', '"solver": {"deep": ' + "[" * 500 + "]" * 500 + ", ", 1)
    elif how == "empty":
        text = chance.choice(("", "null", "[]", "{}", "0", '"x"', "[" * 100_000))
    elif how == "bom":
        text = "\ufeff" + text
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    if how == "bytes":
        for _ in range(chance.choice((1, 3, 30))):
            data[chance.randrange(len(data))] = chance.randrange(256)
    file.write_bytes(bytes(data))


def _place(chance: random.Random, values: Any) -> tuple[Any, Any]:
    """Some list or object in ``values``, and an index or a key of it."""
    places: list[tuple[Any, Any]] = []

    def visit(value: Any) -> None:
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            places.append((value, key))
            if isinstance(each, dict | list):
                visit(each)

    if isinstance(values, dict | list):
        visit(values)
    # Most places are in long lists: half of the time it is one of the first level.
    top = [(holder, key) for holder, key in places if holder is values]
    return chance.choice(top if top and chance.random() < 0.5 else places) if places else (None, None)


def check_page(html: str) -> Page:
    """The page, in which nothing runs or loads but our own script, and no mark is at a place that is no number."""
    page = Page(html)
    template = files("niwaki.reports") / "templates"
    ours = {kind: (template / f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js")}
    tags = [tag for tag, _ in page.elements]
    assert (tags.count("script"), tags.count("style")) == (1, 1)
    assert "".join(said for tag, said in page.said if tag == "script").strip().startswith(ours["js"].strip())
    assert not {"link", "iframe", "object", "embed", "base", "form"} & set(tags)
    (policy,) = (a["content"] for tag, a in page.elements if a.get("http-equiv"))
    digest = base64.b64encode(hashlib.sha256(ours["js"].encode()).digest()).decode()
    assert policy
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, attributes)
            assert name != "style", (tag, attributes)
            if name in ("src", "href", "xlink:href", "action", "srcset"):
                assert (value or "").startswith("data:"), (tag, attributes)
            if name in ("d", "transform", "x", "y", "x1", "x2", "y1", "y2", "width", "height"):
                assert not any(odd in (value or "") for odd in ("NaN", "Inf", "undefined")), (tag, attributes)
    assert all(character.isprintable() or character in "\n\t\u200b\u2028\u2029\u200f\u200e" or ord(character) > 159
               for character in html), "control characters"  # fmt: skip
    return page


def _check_report(place: Path, name: str) -> None:
    directory = place / name
    page = check_page((directory / "report.html").read_text(encoding="utf-8"))
    file = directory / ("compare.json" if name == "compared" else "niwaki.json")
    text = "".join(said for tag, said in page.said if tag not in ("script", "style"))
    values = json.loads(file.read_text())
    assert printable(file.read_text()) in text, "the record is not in the page"
    for cell in values["cells"] if name == "compared" else [values]:
        perplexities = cell.get("perplexity", {})
        texts = {measured["text"] for measured in perplexities.values()}
        if name != "compared" and len(texts) > 1:  # that of another text than the result's is not shown beside it
            perplexities.pop("before", None)
        for measured in perplexities.values():
            value = measured["value"]
            shown = f"{value:.3g}" if value >= 1e6 else f"{value:.2f}" if value < 1000 else f"{value:,.0f}"
            assert shown in text, f"{shown} is not in the page"
    if name in ("pruned", "gridded") and not values.get("structure"):
        assert f"{100 * values['sparsity']:.4g} % sparse" in text
        for matrix in values["matrices"]:
            assert f"{matrix['sparsity']:.1%}" in text or "experts" in str(values["matrices"])


def _check_mask(place: Path, name: str) -> None:
    ours, theirs = (load_file(directory / "model.safetensors") for directory in (place / "out", _home / name))
    assert all((ours[key] == 0).equal(theirs[key] == 0) for key in theirs), "another mask"


def _check_export(place: Path, name: str) -> None:
    ours, whole = (load_file(directory / "model.safetensors") for directory in (place / "out", _home / "exported"))
    assert ours.keys() == whole.keys()
    assert all(ours[key].equal(whole[key]) for key in whole), "another export"


def _check_pack(place: Path, name: str) -> None:
    ended: Ended = command(("unpack", "out", "again"), place)
    assert ended.code == 0, ended.err
    for file in (place / name).rglob("*"):
        if file.is_file() and file.name not in ("niwaki-bench.json", "report.html"):
            assert (place / "again" / file.relative_to(place / name)).read_bytes() == file.read_bytes(), file


def _check_compare(place: Path, name: str) -> None:
    cells = json.loads((place / name / "compare.json").read_text())["cells"]
    whole = {(c["method"], c["pattern"]): c for c in json.loads((_home / name / "compare.json").read_text())["cells"]}
    assert whole.keys() <= {(cell["method"], cell["pattern"]) for cell in cells}
    for cell in cells:
        if (made := whole.get((cell["method"], cell["pattern"]))) and cell["method"] != "dense":
            kept = json.loads((place / name / "records" / Path(made["record"]).name).read_text())
            assert cell["sparsity"] == kept["sparsity"], "a record of another cell"


_CHECKS: dict[str, Callable[[Path, str], None]] = {
    "report": _check_report,
    "mask": _check_mask,
    "export": _check_export,
    "pack": _check_pack,
    "compare": _check_compare,
}
