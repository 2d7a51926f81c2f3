"""Records as files: what was written is read again."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from niwaki.errors import CheckpointError, OutputError
from niwaki.layer.solvers import Magnitude, describe, make_solver
from niwaki.records.comparison import shown
from niwaki.records.data import plain
from niwaki.records.perplexity import Difference, Perplexity
from niwaki.records.record import FitRecord, MatrixRecord, Record, StructureRecord
from niwaki.records.speed import SpeedRecord
from niwaki.records.wording import in_words, markdown
from support.models import message

MATRIX = {
    "block": 0,
    "name": "up",
    "shape": [4, 8],
    "sparsity": 0.5,
    "error": 0.1,
    "seconds": 1,
    "tokens": 8,
    "stats": {},
}
PERPLEXITY = {"value": 9.5, "standard_error": None, "tokens": 31, "context": 32, "windows": 1, "text": "demo"}


def record(**changes: Any) -> Record:
    made = Record("niwaki prune m", "m", "wanda", {"name": "wanda"}, "2:4", None, {"samples": 8}, "cpu", "float32")
    made.matrices.append(MatrixRecord(0, "mlp.up_proj", (4, 8), 0.5, 0.1, 1.5, 64, {"damping": 0.1, "steps": 3}))
    made.fits.append(FitRecord(0, 0.5, 0.25, 0.4, 1.0))
    made.perplexity["after"] = Perplexity(9.5, None, 31, 32, 1, "demo")
    return replace(made, **changes)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    structure = StructureRecord({"before": 8, "after": 6}, 0.25, [0.5], [1], [[0, 2]], [[1]])
    for made in (record(), record(structure=structure, blocks=[0, 2], notes=["\ud800 ü"])):
        assert Record.from_json(made.to_json()) == made
        made.save(tmp_path / "new" / "niwaki.json")
        assert Record.load(tmp_path / "new" / "niwaki.json") == made
    assert json.loads(record().to_json())["format"] == 2
    assert message(lambda: record().save(tmp_path), OutputError).startswith(f"cannot write {tmp_path}")


def test_it_prints_as_a_few_lines() -> None:
    made = record(size={"before": 4 << 20, "after": 1 << 20}, notes=["one", "the other"])
    made.perplexity["before"] = replace(made.perplexity["after"], value=9.0)
    made.loss = 0.054
    lines = str(made).splitlines()
    assert len(lines) <= 10
    assert lines[0] == "m: 0 % sparse"
    assert lines[1].startswith("1.00 MiB, 0.25 of 4.00 MiB; 0.05")
    assert lines[1].endswith("nats a token lost")
    assert lines[-1] == "2 notes, such as: the other"
    assert Record.from_json(made.to_json()) == made
    assert str(record(perplexity={})).splitlines() == ["m: 0 % sparse", "by wanda"]


def test_perplexities_beyond_floats() -> None:
    """Are not 300 digits."""
    found = Perplexity.of(torch.full((2, 31), 800.0), "demo")
    assert str(found) == "over 1e+304 (62 tokens of demo, context 32)"
    assert shown(found) == found.figure == "over 1e+304"
    assert str(replace(found, value=1.25e9, standard_error=1e7)).startswith("1.25e+09 ± 1e+07 (")
    assert str(replace(found, value=44.875, standard_error=None)).startswith("44.88 (")
    assert Record.from_json(record(perplexity={"after": found}).to_json()).perplexity["after"] == found


def changed(**changes: Any) -> str:
    return json.dumps({**json.loads(record().to_json()), **changes})


@pytest.mark.parametrize("stats", [{}, {"error_before_rounding": "x", "rounded_to_zero": 1}, {"rounded_to_zero": 1}])
def test_a_grid_without_its_errors(stats: dict[str, Any]) -> None:
    made = json.loads(record(quantization="int4").to_json())
    made["matrices"][0]["stats"] = stats
    assert Record.from_json(json.dumps(made)).rounding == "int4"


def test_perplexities_without_bounds() -> None:
    """What a ruined model has can be written and read."""
    made = record(perplexity={"after": Perplexity.of(torch.tensor([[1e30, 2.0], [1e38, 2.0]]), "demo")})
    assert Record.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ({}, "?"),
        ({"mask": 5, "update": {"name": "exact"}}, "? (mask 5, update {'name': 'exact'})"),
        ({"mask": {"name": "a"}, "update": {}}, "a + ?"),
    ],
)
def test_odd_solvers_in_words(described: dict[str, Any], said: str) -> None:
    assert in_words(described) == said


def test_text_in_markdown() -> None:
    assert markdown("a|b\n[x](javascript:1) <b> `c` *d* \x1b") == (r"a\|b \[x\](javascript:1) \<b> \`c\` \*d\* \\x1b")


def test_words() -> None:
    assert in_words(describe(make_solver("wanda"))) == "wanda"
    assert in_words(describe(make_solver("magnitude+wanda+exact"))) == (
        "magnitude + wanda + exact (damping 0.01, memory 1)"
    )


def test_parameters_that_json_does_not_have() -> None:
    @dataclass(frozen=True)
    class Mine(Magnitude):
        path: Path = Path("x")
        limit: float = math.inf
        steps: tuple[int, ...] = (1, 2)

    described = plain(describe(Mine()))
    assert described == {"name": "mine", "path": repr(Path("x")), "limit": "Infinity", "steps": [1, 2]}
    made = record(solver=described)
    assert Record.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read as what niwaki writes there"),
        ("[]", "Expected `object`"),
        ("[" * 100_000, "cannot be read"),
        ("null", "Expected `object`"),
        ('{"format": 3}', "it has format 3, made by another niwaki; this one reads 2"),
        ('{"format": "x"}', "it has format x"),
        ("{}", "missing required field `command`"),
        (changed(solver=1), "$.solver"),
        (changed(matrices=[{"block": 0}]), "$.matrices[0]"),
        (changed(seconds={"total": "long"}), "$.seconds[...]"),
        (changed(tf32="perhaps"), "$.tf32"),
        (changed(sparsity=-0.1), "`float` >= 0.0 - at `$.sparsity`"),
        (changed(sparsity=math.nan), "$.sparsity"),
        (changed(matrices=[{**MATRIX, "error": -1e-9}]), "$.matrices[0].error"),
        (changed(matrices=[{**MATRIX, "error": math.inf}]), "$.matrices[0].error"),
        (changed(matrices=[{**MATRIX, "shape": [0, 4]}]), "$.matrices[0].shape[0]"),
        (changed(matrices=[{**MATRIX, "name": "a" * 9999}]), "$.matrices[0].name"),
        (
            changed(matrices=[{**MATRIX, "block": i, "name": f"m{'m' * i}"} for i in range(300)]),
            "300 kinds in 300 blocks",
        ),
        (changed(perplexity={"after": {**PERPLEXITY, "value": 0}}), "$.perplexity[...].value"),
        (changed(perplexity={"later": PERPLEXITY}), "matching regex"),
        (changed(seconds={"total": -1}), "$.seconds[...]"),
        (changed(blocks=[1]), "$.blocks"),
        (changed(blocks=[2, 2]), "blocks go from one to before another"),
        (changed(calibration={"samples": "many"}), "$.calibration.samples"),
        (changed(structure={"parameters": {"before": 1}, "removed": 0.5}), "parameters are those before and after"),
        (changed(solver={"name": "x", "a": math.inf}), "the solver has inf"),
        (changed(solver={"name": "x", "a": [[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]}), "nested more than 20 deep"),
    ],
)
def test_records_that_cannot_be_read(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "niwaki.json"
    path.write_text(text)
    told = message(lambda: Record.load(path), CheckpointError)
    assert str(path) in told
    assert said in told
    with pytest.raises(CheckpointError):
        Record.from_json(text)
    assert str(tmp_path) in message(lambda: Record.load(tmp_path), CheckpointError)
    with pytest.raises(CheckpointError):
        SpeedRecord.from_json(text)


@pytest.mark.parametrize(("windows", "quantile"), [(4, 3.182446), (8, 2.364624), (16, 2.131450), (128, 1.978820)])
def test_the_most_that_may_be_lost_is_by_students_distribution(windows: int, quantile: float) -> None:
    assert Difference(0.5, 0.1, windows=windows).most == pytest.approx(0.5 + 0.1 * quantile, rel=5e-4)


def test_few_windows_bound_nothing() -> None:
    assert Difference(0.5, 0.1, windows=3).most == Difference(0.5, None).most == math.inf
