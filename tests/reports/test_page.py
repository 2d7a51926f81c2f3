"""Reports: every number is the record's, nothing in a page runs or loads, and a real browser shows it all."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from pypdf import PdfReader

from niwaki.options import Calibration, Measurement

pytest.importorskip("altair", reason="needs the extra niwaki[report]")
pytest.importorskip("vl_convert", reason="needs the extra niwaki[report]")

import niwaki
from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import CheckpointError, OutputError, UsageError
from niwaki.models.tokens import load_tokenizer
from niwaki.records.comparison import Comparison
from niwaki.records.perplexity import Perplexity
from niwaki.records.record import FitRecord, HealingPoint, HealingRecord, MatrixRecord, Record, StructureRecord
from niwaki.records.speed import Speed, SpeedRecord
from niwaki.records.wording import printable
from niwaki.reports import charts, sections
from niwaki.reports.charts import Exhibit, Section
from niwaki.reports.from_model import extras, generate, mask_pictures, png
from niwaki.reports.material import Extras, MaskPicture, Material, Sample, load
from niwaki.reports.page import render, report
from support.command import Command
from support.covering import FULL, covered
from support.models import edit_json, message, reference, save_model_with_tokenizer
from support.pages import Page

EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)>"
DEMO = Calibration("demo", samples=4, length=32)
BLOCKS, NAMES = 3, ("self_attn.q_proj", "mlp.experts.0.up_proj", "mlp.experts.1.up_proj", "mlp.down_proj")


def once_each(draw: Callable[..., charts.Figure]) -> Callable[..., charts.Figure]:
    """``draw``, which draws the same charts in many of these tests, and which gives the same each time."""
    drawn: dict[str, charts.Figure] = {}

    @functools.wraps(draw)
    def figure(*args: Any, **named: Any) -> charts.Figure:
        asked = repr((args, named))
        if asked not in drawn:
            drawn[asked] = draw(*args, **named)
        return drawn[asked]

    return figure


DRAWN = {name: once_each(draw) for name, draw in vars(charts).items() if hasattr(draw, "__wrapped__")}


@pytest.fixture(autouse=True)
def _charts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, draw in DRAWN.items():
        monkeypatch.setattr(charts, name, draw)


def record(model: str = "some/model", method: str = "wanda", pattern: str = "unstructured:0.6", **more: Any) -> Record:
    """A record in which no two numbers are the same."""
    found = Record("niwaki prune ...", model, method, {"name": method}, pattern, None, {}, "cpu", "float32")
    found.calibration = {"source": "c4", "samples": 8, "sequence_length": 32, "tokens_sha256": "ab" * 32}
    found.versions = {"niwaki": "0.1.0", "torch": "2"}
    seed = sum(map(ord, method + pattern))
    for block in range(BLOCKS):
        for index, name in enumerate(NAMES):
            place = len(NAMES) * block + index
            error = 0.001 * 1.5**place * (1 + seed / 1000)
            found.matrices.append(
                MatrixRecord(block, name, (16, 8 + index), 0.5 + 0.01 * place, error, 0.25 + place, 256, {})
            )
    found.sparsity = 0.6
    found.seconds = {"capture": 2.5, "solve": 1.25, "check": 0.0, "total": 3.75}
    found.peak_memory = {"resident": 3 * 2**29}
    return dataclasses.replace(found, **more)


def perplexity(value: float, text: str = "wikitext2") -> dict[str, Any]:
    return dataclasses.asdict(Perplexity(value, value / 50, 1023 * 7, 1024, 7, text))


def model_directory(path: Path, **more: Any) -> Path:
    path.mkdir(parents=True)
    measured = {"before": perplexity(20.25), "after": perplexity(31.5)}
    (path / "niwaki.json").write_text(record(**{"perplexity": measured, **more}).to_json())
    return path


#: Perplexities by method and pattern; one is missing.
TABLE = {
    "wanda": {"50 %": 21.5, "60 %": 40.0, "2:4": 55.25},
    "admm-grad": {"50 %": 20.75, "60 %": 33.0, "2:4": 44.5},
    f"late{EVIL}": {"50 %": 30.0, "60 %": 1234.5},
}


def comparison(path: Path) -> Path:
    (path / "records").mkdir(parents=True)
    nothing = {"sparsity": 0.0, "seconds": 0.0, "error": 0.0, "stages": {}, "record": None}
    dense = {"method": "dense", "pattern": "", **nothing, "perplexity": {"wikitext2": perplexity(20.0)}}
    cells: list[dict[str, Any]] = [dense]
    for method, row in TABLE.items():
        for pattern, value in row.items():
            share = 0.5 if pattern == "2:4" else float(pattern.rstrip(" %")) / 100
            cell: dict[str, Any] = {"method": method, "pattern": pattern, "sparsity": share}
            done = record(**cell, notes=["damping was raised"] if pattern == "2:4" else [])
            name = f"records/{len(cells)}.json"
            (path / name).write_text(done.to_json())
            stages = {"capture": 2.0 + share, "solve": value / 10, "check": 0.0}
            measured = {"perplexity": {"wikitext2": perplexity(value)}, "error": done.mean_error}
            cells.append({**cell, **measured, "seconds": 9.0, "stages": stages, "record": name})
    named = {"model": f"m{EVIL}", "command": f"niwaki compare {EVIL}", "versions": {"niwaki": "0.1.0"}}
    values = {**named, "calibration": record().calibration, "texts": ["wikitext2"], "cells": cells, "seconds": 99.0}
    (path / "compare.json").write_text(json.dumps(values))
    return path


def material(path: Path, **more: Any) -> Material:
    """That of a record with these changes."""
    return load(model_directory(path / "m", **more))


def html_of(shown: Material, more: Extras | None = None) -> str:
    return render(shown, more, sections.sections(shown))


def exhibits(section: Section | None) -> Sequence[Exhibit]:
    assert section is not None
    return section.exhibits


def only(section: Section | None) -> Exhibit:
    (exhibit,) = exhibits(section)
    return exhibit


def rows(exhibit: Exhibit) -> list[list[str]]:
    """What its table says, without the head."""
    assert exhibit.table is not None
    return [[cell.text for cell in row] for row in exhibit.table.rows]


def number_of(role: str, svg: str) -> int:
    """How many marks of this kind there are."""
    return len(re.findall(f'aria-roledescription="{role}"', svg))


# Numbers


@pytest.mark.slow
def test_a_page_replaces_only_pages(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "m")
    for _ in range(2):
        assert report(directory, prompts=[]).read_text(encoding="utf-8").lstrip().startswith("<!doctype html>")
    (directory / "model.safetensors").write_text("x")
    (directory / "page.html").write_text("<!doctype html>\n<html></html>")
    for file in (directory / name for name in ("model.safetensors", "page.html", "niwaki.json")):
        before = file.read_bytes()
        said = message(lambda file=file: report(directory, file, prompts=[]))  # type: ignore[misc]
        assert said.startswith(f"{file} exists and is not a page that niwaki wrote")
        assert file.read_bytes() == before
    (tmp_path / "empty.html").touch()
    assert report(directory, tmp_path / "empty.html", prompts=[]).stat().st_size > 1000


def test_the_head_of_a_model(tmp_path: Path) -> None:
    shown = material(tmp_path)
    assert sections.tiles(shown) == [
        ("zeros", "60 %", "of 12 matrices, 0.001824 M weights"),
        ("perplexity dense", "20.25 ± 0.41", "7,161 tokens of wikitext2, context 1,024"),
        ("perplexity pruned", "31.50 ± 0.63", "+55.6 % against dense"),
        ("time", "4 s", "on cpu in float32"),
        ("peak memory", "1.50 GiB", "resident"),
    ]
    assert sections.frontier(shown) is None
    assert dict(sections.facts(shown))["±"].startswith("standard errors")


def test_the_head_of_other_models(tmp_path: Path) -> None:
    """With one of each; measured exactly; not measured, and resumed."""
    calibration = {"source": "c4", "samples": 1, "sequence_length": 32}
    one = material(tmp_path / "one", matrices=record().matrices[:1], calibration=calibration)
    assert dict(sections.facts(one))["calibration"] == "1 window of 32 tokens of c4"
    assert sections.tiles(one)[0][2].startswith("of 1 matrix, ")
    measured = {key: {**perplexity(9.0), "standard_error": None} for key in ("before", "after")}
    assert "±" not in dict(sections.facts(material(tmp_path / "exact", perplexity=measured)))
    unmeasured = material(tmp_path, perplexity={}, notes=["a note"], resumed=[2])
    assert ("perplexity", "?", "not measured") in sections.tiles(unmeasured)
    assert sections.frontier(unmeasured) is None
    assert sections.notes(unmeasured) == ["a note", "stopped and resumed after block 2"]


@pytest.mark.slow
def test_a_smaller_model(tmp_path: Path) -> None:
    """A record of ``niwaki shrink``: nothing of zeros and masks, which it has none of."""
    structure = StructureRecord({"before": 8000, "after": 5944}, 0.3125, [0.5, 0.1, 0.25, 0.2], [1, 3])
    pattern = "2 of 4 blocks, 50 % of the neurons of each block"
    smaller = {"sparsity": 0.0, "structure": structure, "pattern": pattern}
    shown = material(tmp_path, **smaller)
    assert sections.title(shown) == "model, 25.7 % smaller"
    tiles = sections.tiles(shown)
    assert tiles[0] == ("fewer parameters", "25.7 %", "5,944 of 8,000 stay")
    assert tiles[1][:2] == ("removed", "31.2 %")
    assert "2 of 4 blocks" in tiles[1][2]
    assert [tile[0] for tile in tiles[2:]] == ["perplexity dense", "perplexity pruned", "time", "peak memory"]
    facts = dict(sections.facts(shown))
    assert facts["blocks removed"] == "1, 3, counted from 0"
    assert "pattern" not in facts
    assert sections.allocation(shown) is None
    only(sections.errors(shown))
    text = Page(html_of(shown)).text().split("To make it again")[0]
    assert "sparse" not in text
    assert "zeros in" not in text.lower()
    blocks_only = material(tmp_path / "n", **smaller, matrices=[])
    assert sections.errors(blocks_only) is None
    assert "error" not in dict(sections.facts(blocks_only))


@pytest.mark.slow
def test_the_table_of_a_comparison(tmp_path: Path) -> None:
    shown, compared = load(comparison(tmp_path)), Comparison.load(tmp_path)
    frontier, gaps = exhibits(sections.frontier(shown))
    assert gaps.table == compared.gaps(shown.texts[0])
    assert frontier.table is not None
    assert frontier.table == compared.grid(shown.texts[0])
    assert frontier.table.head == ["method", "50 %", "60 %", "2:4", "seconds"]
    found = {row[0].text: row[1:] for row in frontier.table.rows}
    assert [cell.text for cell in found.pop("dense")] == ["20.00 ±0.40", "", "", ""]
    for method, row in found.items():
        for pattern, cell in zip(frontier.table.head[1:-1], row[:-1], strict=True):
            value = TABLE[method].get(pattern)
            if value is None:
                assert cell.text == ""
                continue
            assert float(cell.text.split(" ±")[0]) == pytest.approx(value, abs=0.501)
            assert cell.best == (method == "admm-grad")
    assert [tile[:2] for tile in sections.tiles(shown)[1:]] == [
        ("best at 50 %", "20.75 ± 0.41"),
        ("best at 60 %", "33.00 ± 0.66"),
        ("best at 2:4", "44.50 ± 0.89"),
    ]
    assert sections.notes(shown) == ["2 of 8 runs: damping was raised"]


def test_errors_and_zeros_of_matrices(tmp_path: Path) -> None:
    """Each cell is the mean of the matrices of its kind, and darker where the error is greater."""
    shown, done = material(tmp_path), record()
    errors, allocation = only(sections.errors(shown)), only(sections.allocation(shown))
    assert errors.table is not None
    assert errors.table.head == ["block", "q_proj", "up_proj", "down_proj"]
    for exhibit, what, form in ((errors, "error", "{:#.2g}"), (allocation, "sparsity", "{:.1%}")):
        for block, row in enumerate(rows(exhibit)):
            values = [getattr(matrix, what) for matrix in done.matrices if matrix.block == block]
            wanted = [values[0], (values[1] + values[2]) / 2, values[3]]
            assert row == [str(block), *(form.format(value) for value in wanted)]
    cells = [cell for row in errors.table.rows for cell in row[1:]]
    steps = [cell.step for cell in sorted(cells, key=lambda cell: float(cell.text))]
    assert steps == sorted(steps, key=lambda step: -1 if step is None else step)
    assert (steps[0], steps[-1]) == (0, 8)
    for svg in (errors.figures[0].wide, errors.figures[0].narrow):
        assert number_of("rect mark", svg) == BLOCKS * 3


@pytest.mark.parametrize(
    "errors", [(1e300, 5e-324), (0.1, math.nextafter(0.1, 1)), *([(0.0, 5e-324), (1e300, 1e300)] * FULL)]
)
@pytest.mark.slow
def test_extreme_numbers(tmp_path: Path, errors: tuple[float, float]) -> None:
    """All that can be in a record can be drawn."""
    matrices = [
        dataclasses.replace(record().matrices[0], block=2**53 * i, error=errors[i], seconds=1e12 * i) for i in (0, 1)
    ]
    fits = [FitRecord(2**53, *errors, 1e300, 1e12)]
    path = model_directory(tmp_path / "m", matrices=matrices, fits=fits, perplexity={})
    before = Perplexity(0.5, 1e305, 1, 1, 1, "t")
    after = Perplexity(1e305, 1e305, 2**53, 2**53, 2**53, "t")
    edit_json(path / "niwaki.json", perplexity={"before": vars(before), "after": vars(after)})
    page = Page(html_of(load(path)))
    assert not [name for _, names in page.elements for name in ("d", "transform") if "NaN" in (names.get(name) or "")]


@pytest.mark.slow
def test_time(tmp_path: Path) -> None:
    stages, solving = exhibits(sections.time(material(tmp_path)))
    assert [row[:2] for row in rows(stages)] == [["capture", "2.50"], ["solve", "1.25"]]
    seconds = {row[0]: row[2] for row in rows(solving)}
    places = [4 * block + index for block in range(BLOCKS) for index in (1, 2)]
    assert seconds["mlp.experts.*.up_proj"] == f"{sum(0.25 + place for place in places):.2f}"
    compared = {name: cells for name, *cells in rows(only(sections.time(load(comparison(tmp_path / "c")))))}
    assert compared["wanda"] == [f"{2 + (0.5 + 0.6 + 0.5) / 3:.2f}", f"{(2.15 + 4.0 + 5.525) / 3:.2f}"]


def test_stages_have_colours_of_their_own(tmp_path: Path) -> None:
    stages = ["prepare", "plan", "capture", "read", "solve", "fit", "advance", "write", "perplexity", "check"]
    exhibit, *_ = exhibits(sections.time(material(tmp_path, seconds=dict.fromkeys(stages, 1.0))))
    bars = re.findall(r'<path aria-label="[^"]*"[^>]*aria-roledescription="bar"[^>]*>', exhibit.figures[0].wide)
    colours = {found for bar in bars for found in re.findall(r'fill="(var\(--c\d+\))"', bar)}
    assert len(colours) == len(bars) == len(stages)
    style = (Path(niwaki.__file__).parent / "reports/templates/report.css").read_text()
    for scheme in style.split("@media screen and (prefers-color-scheme: dark)")[:2]:
        values = [re.findall(rf"{found[4:-1]}: (#\w+);", scheme) for found in colours]
        assert len({value for (value,) in values}) == len(stages)


@pytest.mark.slow
def test_what_each_stage_costs_is_drawn(tmp_path: Path) -> None:
    """From where the stage before it ended; a format, which is not measured, has no bar."""
    values = {"shrink": 30.0, "prune": 45.0, "heal": 36.0}
    measured = {**{name: perplexity(value) for name, value in values.items()}, "pack": None}
    done = [{"name": name, "asked": "", "seconds": 1.0, "perplexity": value} for name, value in measured.items()]
    (figure,) = only(sections.stages(material(tmp_path, stages=done))).figures
    for number, (name, value) in enumerate(values.items(), 1):
        assert re.search(rf"{name} : .*, {math.log(value / 20.25):.4f} in all", figure.wide)
        assert f"{number} {name}" in figure.wide
    assert "pack" not in figure.wide
    assert not only(sections.stages(material(tmp_path / "alone", stages=[done[0], done[-1]]))).figures


def test_speed(tmp_path: Path) -> None:
    """Forms of the model are columns: three and their names have room on a phone."""
    forms = (("dense", "bfloat16", 40.0), ("dense", "float32", 30.5), ("packed", "float32", 45.25))
    speeds = [
        Speed(
            name, dtype, 2**20, 2**21, 2**30, 0.5, 0.002, rate, 0.8 * rate, rate, 14, 10**9, (name == "packed") * 0.75
        )
        for name, dtype, rate in forms
    ]
    found = SpeedRecord("m", 8, 4, 2, "cpu", 1, "native", "", speeds, {})
    path = model_directory(tmp_path / "m")
    (path / "niwaki-bench.json").write_text(found.to_json())
    exhibit = only(sections.speed(load(path)))
    assert exhibit.table is not None
    assert exhibit.table.head == ["weights", "dense", "dense", "packed"]
    assert {name: cells for name, *cells in rows(exhibit)} == {
        "computed in": ["bfloat16", "float32", "float32"],
        "on disk": ["1.00 MiB"] * 3,
        "in memory": ["2.00 MiB"] * 3,
        "peak": ["1.00 GiB"] * 3,
        "loaded in": ["0.50 s"] * 3,
        "first token": ["2.0 ms"] * 3,
        "tokens/s": ["40.00", "30.50", "45.25"],
    }
    assert (
        "a prompt of 8 tokens, 4 written, the median of 2, tokens/s up to 25 % apart; 1 thread; packed weights: native"
        ", for 14 matrices one by one in blocks of transformers; weights are read at 40.0 (dense) and 30.5 (dense) and "
        "45.2 (packed) GB/s; native products are 75 % of a token&#39;s time" in html_of(load(path))
    )


def test_fits(tmp_path: Path) -> None:
    fits = [FitRecord(0, 0.5, 0.25, 3, 1.5), FitRecord(1, 0.125, 0.1, 0, 2.5)]
    shown = only(sections.fits(material(tmp_path, fits=fits)))
    assert rows(shown) == [["0", "0.5", "0.25", "3", "1.5"], ["1", "0.125", "0.1", "0", "2.5"]]
    assert number_of("point", shown.figures[0].wide) == 4


@pytest.mark.slow
def test_healing(tmp_path: Path) -> None:
    """With what was trained on, where that was measured."""
    for which, losses in (("full", (None, 0.5)), ("blocks", (None, None))):
        points = [HealingPoint(100 * i, i, 2.0 * i, 0.5 / (i + 1), loss) for i, loss in enumerate(losses)]
        healing = HealingRecord("dense", which, 100, None, 0.01, 64, 128, points=points, best=1)
        shown = only(sections.healing(material(tmp_path / f"{which} {losses}", healing=healing)))
        columns, drawn = (4, 3) if which == "full" else (3, 2)
        assert shown.table is not None
        assert len(shown.table.head) == columns
        assert rows(shown) == [["0", "0", "0.5", "-"][:columns], ["100", "2", "0.25", "0.5"][:columns]]
        assert number_of("point", shown.figures[0].wide) == drawn


def marks(svg: str) -> dict[str, float]:
    """What each point of a chart says, and its height in pixels."""
    found = re.findall(
        r'<path aria-label="([^"]*)" role="graphics-symbol" aria-roledescription="point" '
        r'transform="translate\(([-\d.e]+),([-\d.e]+)\)',
        svg,
    )
    return {label: float(y) for label, _, y in found}


@pytest.mark.slow
def test_points_are_where_their_values_are(tmp_path: Path) -> None:
    """The axis is logarithmic here; heights are those of the perplexities that the marks say."""
    plain, grouped = exhibits(sections.frontier(load(comparison(tmp_path))))[0].figures
    for svg in (plain.wide, plain.narrow):
        points = marks(svg)
        assert len(points) == 6
        assert len(marks(svg)) + len(marks(grouped.wide)) == 8
        named = {f"{m}, {p}": TABLE[m][p] for m in ("wanda", "admm-grad") for p in ("50 %", "60 %")}
        values = {label: named[start] for label in points if (start := label.split(": ")[0]) in named}
        assert len(values) == 4
        (low, y0), *_, (high, y1) = sorted((values[label], points[label]) for label in values)
        for label, value in values.items():
            along = math.log(value / low) / math.log(high / low)
            assert points[label] == pytest.approx(y0 + along * (y1 - y0), abs=0.01)
        # A line per method, a bar of standard error per point, and the dense model.
        assert "dense: 20.00 ± 0.40" in svg
        assert len(re.findall(r'<path[^>]* d="M[^"]*L[^"]*" stroke="var\(--c\d\)"', svg)) == 3


def test_each_figure_has_a_legend_and_its_own_axis(tmp_path: Path) -> None:
    """Also as a file of its own, beside another; and one sparsity does not stand on an axis of all."""
    shown = load(comparison(tmp_path))
    runs = [run for run in shown.runs if run.pattern in ("50 %", "2:4")]
    figures = exhibits(sections.frontier(dataclasses.replace(shown, runs=runs)))[0].figures
    for figure in figures:
        assert all(f">{method}<" in figure.wide for method in ("wanda", "admm-grad"))
    numbers = [int(number) for number in re.findall(r">(\d+)</text>", figures[0].wide)]
    assert 50 in numbers
    assert not {0, 100} & {*numbers}


@pytest.mark.parametrize("patterns", [["2:4", "4:8"], ["2:4", "neurons -25 %, 12:16", "heads -25 %, 2:4", "12:16"]])
@pytest.mark.slow
def test_names_of_patterns_are_not_over_each_other(patterns: list[str]) -> None:
    """Beside each other where there is room, otherwise turned, with a line's height between them."""
    points = [
        {"method": "wanda", "pattern": pattern, "sparsity": 50, "value": 20 + i, "label": "here"}
        for i, pattern in enumerate(patterns)
    ]
    figure = charts.frontier(points, ["wanda"], by_pattern=True, share=0.32)
    for svg in figure:
        place = r'transform="translate\(([-\d.]+),[-\d.]+\)(?: rotate\(([-\d.]+)\)[^"]*)?"'
        found = re.findall(rf"{place}[^>]*>([^<]*)</text>", svg)
        labels = [(float(x), float(angle or 0), name) for x, angle, name in found if name in patterns]
        assert [name for *_, name in labels] == patterns
        for (x, angle, name), (next_x, _, following) in itertools.pairwise(labels):
            assert angle in (0, 315)
            apart = next_x - x if angle == 0 else (next_x - x) / math.sqrt(2)
            assert apart > (7 * (len(name) + len(following)) / 2 if angle == 0 else 16)


def test_which_patterns_are_no_percentages(tmp_path: Path) -> None:
    grouped = ("2:4", "neurons -25 %, 2:4")
    for pattern in (*grouped, "60 %", "unstructured:0.6", "block-4x4:0.5", "per-row:0.6"):
        (run,) = material(tmp_path / pattern, pattern=pattern).runs
        assert run.grouped == (pattern in grouped), pattern


# The page


@pytest.mark.slow
def test_nothing_in_a_page_runs_or_loads(tmp_path: Path) -> None:
    picture = MaskPicture(0, f"q{EVIL}", (9, 9), (2, 3), 0.5, png(torch.tensor([[True, False, True], [False] * 3])))
    samples = [Sample(EVIL, f"pruned{EVIL}", f"dense{EVIL}"), Sample("p", "</pre></script>", None)]
    more = Extras([picture], samples, 4, [EVIL])
    codes = "\x1b[2J\0\ud800\uffff"  # which end the process that draws
    evil = {"seconds": {f"stage{codes}": 1.0}, "method": f"wanda{codes}", "notes": [EVIL, codes]}
    for shown in (material(tmp_path, model=EVIL, mask_from=EVIL, **evil), load(comparison(tmp_path / "c"))):
        html = html_of(shown, more)
        page = Page(html)
        assert EVIL not in html
        assert printable(html) == html
        assert page.text().count(EVIL) > 8
        tags = [tag for tag, _ in page.elements]
        assert (tags.count("script"), tags.count("style"), tags.count("img")) == (1, 1, 1)
        assert not {"link", "iframe", "object", "embed", "base", "form"} & set(tags)
        for tag, attributes in page.elements:
            assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
            for name in ("src", "href", "xlink:href", "action", "srcset"):
                assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
        (policy,) = (a["content"] for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
        assert policy is not None
        assert policy.startswith("default-src 'none';")
        for tag in ("script", "style"):
            (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}'" in policy


@pytest.mark.slow
def test_the_record_is_in_the_page(tmp_path: Path) -> None:
    page = Page(html_of(material(tmp_path)))
    text = (tmp_path / "m" / "niwaki.json").read_text()
    assert text in page.text()
    (link,) = (a for t, a in page.elements if t == "a" and a.get("download") == "niwaki.json")
    assert base64.b64decode((link["href"] or "").partition(",")[2]).decode() == text
    compared = Page(html_of(load(comparison(tmp_path / "c"))))
    links = [a["href"] or "" for t, a in compared.elements if t == "a" and a.get("download") != "compare.json"]
    records = [json.loads(base64.b64decode(link.partition(",")[2])) for link in links]
    kept = [json.loads(path.read_text()) for path in sorted((tmp_path / "c" / "records").iterdir())]
    assert records == kept


@pytest.mark.slow
def test_where_lines_break(tmp_path: Path) -> None:
    """In commands between words, in names of methods at the @."""
    file, asked = comparison(tmp_path) / "compare.json", "niwaki compare m --solvers wanda,<b> --out 'a b'"
    file.write_text(file.read_text().replace("admm-grad", "continuation@balanced"))
    edit_json(file, command=asked)
    html = html_of(load(tmp_path))
    assert '<th scope="row">continuation\u200b@balanced</th>' in html
    (command,) = re.findall(r'<pre class="command">(.*?)</pre>', html)
    assert "<span>--solvers</span> <span>wanda,<wbr>&lt;b&gt;</span> <span>--out</span> " in command
    assert "".join(data for _, data in Page(command).said) == asked


@pytest.mark.slow
def test_figures_for_papers(tmp_path: Path) -> None:
    """As two other programs read them: whole pictures, with no colours that only the page has."""
    path, figures = comparison(tmp_path / "c"), tmp_path / "figures"
    for _ in range(2):
        report(path, figures=figures)
    names = sorted(file.name for file in figures.iterdir())
    methods = ["admm-grad", "wanda"]
    assert [name for name in names if name.startswith("frontier")] == [
        f"frontier-{number}.{kind}" for number in (1, 2) for kind in ("pdf", "svg")
    ]
    assert "time.pdf" in names
    picture = ElementTree.parse(figures / "frontier-1.svg").getroot()
    words = {"".join(each.itertext()) for each in picture.iter() if each.tag.endswith("text")}
    assert {*methods, "perplexity", "zeros, %"} <= words
    for file in figures.glob("*.svg"):
        assert "var(" not in file.read_text()
        assert len(ElementTree.parse(file).getroot())
    for file in figures.glob("*.pdf"):
        (page,) = PdfReader(file).pages
        assert page.mediabox.width > 100
    drawn = PdfReader(figures / "frontier-1.pdf").pages[0].extract_text()
    assert all(method in drawn for method in methods)
    (figures / "notes.txt").touch()
    assert "notes.txt, which is no figure" in message(lambda: report(path, figures=figures), UsageError)
    assert "not a directory" in message(lambda: report(path, figures=path / "compare.json"), UsageError)


@pytest.mark.slow
def test_where_a_page_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = comparison(tmp_path / "c")
    assert report(path) == path / "report.html"
    page = (path / "report.html").read_text()
    assert report(path, tmp_path / "new" / "x.html").read_text() == page
    monkeypatch.setattr("niwaki.reports.page.render", lambda *_, **__: pytest.fail("drawn"))
    assert "it is a directory" in message(lambda: report(path, tmp_path), OutputError)
    assert "a list of text" in message(lambda: report(path, prompts="One"))


# What goes wrong


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        (None, "is not a directory"),
        ({}, "has neither niwaki.json nor compare.json"),
        ({"niwaki.json": b"{"}, "niwaki.json cannot be read as what niwaki writes there"),
        ({"niwaki.json": b"\xff"}, "cannot be read as"),
        ({"compare.json": ('"sparsity": 0.5', '"sparsity": "x"')}, "$.cells["),
        ({"compare.json": b"{}"}, "`model`"),
        ({"compare.json": ("records/1.json", "records/11.json")}, "11.json"),
        ({"compare.json": ("records/1.json", "../other.json")}, "outside of its directory"),
        ({"compare.json": ("records/1.json", "records/2.json")}, "2.json is not the record of wanda at"),
        ({"compare.json": ('"value"', '"valu"')}, "valu"),
    ],
)
def test_directories_that_cannot_be_read(tmp_path: Path, spoilt: dict[str, Any] | None, said: str) -> None:
    path = tmp_path / "dir"
    if spoilt is not None:
        path.mkdir()
    for name, content in (spoilt or {}).items():
        if isinstance(content, tuple):
            shutil.rmtree(path)
            text = (comparison(path) / name).read_text()
            assert content[0] in text
            content = text.replace(*content).encode()
            (tmp_path / "other.json").write_text(record().to_json())
        (path / name).write_bytes(content)
    found = message(lambda: load(path), CheckpointError if spoilt else UsageError)
    assert said in found
    assert str(path) in found


@pytest.mark.parametrize("missing", ["altair", "jinja2", "vl_convert"])
def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    text = message(lambda: report(model_directory(tmp_path / "m")), OutputError)
    assert text == f"reports need {missing}: pip install altair jinja2 vl-convert-python"


# What is in the model


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pruned model whose dense one is beside it."""
    path = tmp_path_factory.mktemp("report")
    options: dict[str, Any] = {"solver": "wanda", "calibration": DEMO, "measurement": Measurement(samples=2)}
    niwaki.prune(save_model_with_tokenizer(path / "dense"), path / "out", "2:4", **options)
    return path / "out"


def unpacked(picture: bytes) -> list[list[int]]:
    """The bits of a PNG with a palette of two colours, row by row."""
    width, height = (int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))
    start = picture.index(b"IDAT")
    size = int.from_bytes(picture[start - 4 : start], "big")
    raw = zlib.decompress(picture[start + 4 : start + 4 + size])
    across = 1 + -(-width // 8)
    lines = [raw[row * across : (row + 1) * across] for row in range(height)]
    assert all(line[0] == 0 for line in lines)
    return [[line[1 + i // 8] >> (7 - i % 8) & 1 for i in range(width)] for line in lines]


@pytest.mark.parametrize("shape", [(1, 1), (3, 8), (5, 13)])
def test_pictures_are_the_masks(shape: tuple[int, int]) -> None:
    kept = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
    assert unpacked(png(kept)) == kept.int().tolist()


def test_masks_of_a_model(pruned: Path) -> None:
    checkpoint = Checkpoint(pruned)
    pictures = mask_pictures(checkpoint, Record.load(pruned / "niwaki.json"))
    assert len(pictures) == 7
    assert len({picture.name for picture in pictures}) == 7
    assert {picture.block for picture in pictures} == {0, 1}
    for picture in pictures:
        weight = checkpoint.read(f"model.layers.{picture.block}.{picture.name}.weight")
        assert picture.shape == tuple(weight.shape)
        assert unpacked(picture.png) == (weight != 0).int().tolist()
        assert picture.zeros == pytest.approx(0.5)


@pytest.mark.slow
def test_text_is_the_most_likely_one(pruned: Path) -> None:
    """A token at a time, by the whole model without a cache."""
    (text,) = generate(Checkpoint(pruned), ["It was a dark"])
    tokenizer, model = load_tokenizer(pruned), reference(pruned)
    given = tokenizer.encode("It was a dark")
    tokens = list(given)
    for _ in range(48):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert text == tokenizer.decode(tokens[len(given) :])


@pytest.mark.slow
def test_what_cannot_be_had_is_said(pruned: Path, tmp_path: Path) -> None:
    done = Record.load(pruned / "niwaki.json")
    found = extras(pruned, done, ["One"])
    assert found.remarks == []
    assert found.samples[0].dense is not None
    for dense, why in (
        (str(tmp_path / "gone"), f"there is no directory {tmp_path / 'gone'} here"),
        ("demo", "demo is not the model that was pruned"),
        ("nobody/nothing", "nobody/nothing is not on this machine"),
    ):
        gone = extras(pruned, dataclasses.replace(done, model=dense), ["One"])
        assert gone.samples == [dataclasses.replace(found.samples[0], dense=None)]
        assert gone.remarks == [f"text of the dense model: {why}"]
    assert not extras(pruned, done, []).samples
    (said,) = extras(pruned, done, [""]).remarks
    assert "no tokens" in said
    (said,) = extras(model_directory(tmp_path / "empty"), done).remarks
    assert said.startswith("masks and text: ")


@pytest.mark.slow
def test_text_of_a_smaller_model(pruned: Path, tmp_path: Path) -> None:
    """Its dense one is known by the number of parameters; there are no masks."""
    options: dict[str, Any] = {"calibration": DEMO, "measurement": None, "compute": "cpu"}
    done = niwaki.shrink(pruned.parent / "dense", tmp_path / "s", neurons=0.5, **options)
    found = extras(tmp_path / "s", done, ["One"])
    assert (found.remarks, list(found.masks)) == ([], [])
    assert found.samples[0].dense == generate(Checkpoint(pruned.parent / "dense"), ["One"])[0]
    (said,) = extras(tmp_path / "s", dataclasses.replace(done, model="demo"), ["One"]).remarks
    assert said == "text of the dense model: demo is not the model that was pruned"


@pytest.mark.slow
def test_command(pruned: Path, tmp_path: Path, niwaki_: Command) -> None:
    out = tmp_path / "out"
    shutil.copytree(pruned, out)
    ran = niwaki_("report", out, "--prompt", "One", "--prompt", "Two")
    assert ran.code == 0
    assert f"written to {out / 'report.html'}" in ran.out
    page = Page((out / "report.html").read_text())
    assert page.text().count("pruned") > 2
    assert len([tag for tag, _ in page.elements if tag == "img"]) == 7
    assert niwaki_("report", out, "--no-samples", "-o", tmp_path / "x.html").code == 0
    assert 'id="samples"' not in (tmp_path / "x.html").read_text()
    ran = niwaki_("report", tmp_path)
    assert ran.code == 2
    assert ran.err.splitlines()[-1].startswith("error: ")
    # The model stays one, and the report on it is not taken for one on what is made from it.
    niwaki.prune(out, tmp_path / "again", 0.6, solver="magnitude", calibration=DEMO, measurement=None)
    assert not (tmp_path / "again" / "report.html").exists()
    assert (tmp_path / "again" / "tokenizer.json").exists()


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("there is no chromium here; on Debian: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def pages(pruned: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report of each kind."""
    path = tmp_path_factory.mktemp("pages")
    found = extras(pruned, Record.load(pruned / "niwaki.json"), ["One"])
    html = {"model": html_of(load(pruned), found), "comparison": html_of(load(comparison(path / "c")))}
    for name, text in html.items():
        (path / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: path / f"{name}.html" for name in html}


@covered
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1100, 390])
@pytest.mark.parametrize("what", ["model", "comparison"])
def test_in_a_browser(browser: Any, pages: dict[str, Path], what: str, width: int, scheme: str) -> None:
    """No errors, all marks visible where their data are, legible colours, and nothing wider than the window."""
    file = pages[what]
    page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme, has_touch=width < 500)
    errors: list[str] = []
    requests: list[str] = []
    page.on("console", lambda said: errors.append(said.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(file.as_uri())
    assert [url for url in requests if not url.startswith("data:")] == [file.as_uri()]

    def count(selector: str) -> int:
        script = "all => all.filter(mark => mark.checkVisibility()).length"
        return int(page.locator(selector).evaluate_all(script))

    if what == "model":
        assert count("#errors [aria-roledescription='rect mark']") == 2 * 7
        assert count("#sparsity [aria-roledescription='tick']") == 2 * 7
        assert count("#frontier") == 0
        assert count("#masks img") == 7
        assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
        before = page.locator(".mask img").first.bounding_box()
        page.locator("#zoom").fill("4")
        zoomed = page.locator(".mask img").first.bounding_box()
        assert (zoomed["width"], zoomed["height"]) == (4 * before["width"], 4 * before["height"])
        page.locator(".mask .frame").first.click()
        assert page.locator("#zoom").input_value() == "5"
    else:
        assert count("#frontier [aria-roledescription='point']") == 8
        assert count("#errors [aria-roledescription='rect mark']") == 3 * BLOCKS * 3
        assert count("#time [aria-roledescription='bar']") == 3 * 2
        page.locator("details.run summary").first.click()
        assert count("details.run td.h8") + count("details.run td.h4") > 0
    # Colours follow the scheme: what is drawn stands out from the card.
    section, drawn = ("#time", "bar") if what == "model" else ("#frontier", "point")
    colours = page.evaluate(
        """drawn => ['section', 'body'].map(name => getComputedStyle(document.querySelector(name)).backgroundColor)
           .concat(getComputedStyle(document.body).color,
                   [...document.querySelectorAll(drawn)].map(mark => getComputedStyle(mark).fill))""",
        f"{section} [aria-roledescription={drawn}]",
    )
    card, _, ink, *filled = [
        sum(map(int, re.findall(r"\d+", value)[:3])) / 3 for value in colours if "none" not in value
    ]
    assert (card > 200 and ink < 60) if scheme == "light" else (card < 60 and ink > 200)
    assert filled
    assert all(abs(card - mark) > 60 for mark in filled)
    # Pointing at a mark says what it is.
    mark = page.locator(f"{section} [aria-roledescription={drawn}]:visible").last  # on top of all others
    (mark.tap if width < 500 else mark.hover)(force=True)
    assert page.locator("#tip").inner_text() == mark.get_attribute("aria-label")
    page.evaluate("document.querySelectorAll('details').forEach(detail => { detail.open = true })")
    across, window = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert across <= window == width
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.querySelector('section')).backgroundColor") == "rgb(255, 255, 255)"
    assert count(f"{section} .wide") >= 1
    assert count(f"{section} .narrow") == 0
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.close()
    assert errors == []
