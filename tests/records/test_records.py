"""Records as files: what was written is read again."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, replace
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

MATRIX = asdict(MatrixRecord(0, "up", (4, 8), 0.5, 0.1, 1, 8, {}))
KINDS = [{**MATRIX, "block": i, "name": "m" * (i + 1)} for i in range(300)]
PERPLEXITY = {"value": 9.5, "standard_error": None, "tokens": 31, "context": 32, "windows": 1, "text": "demo"}


def record(**changes: Any) -> Record:
    made = Record("niwaki prune m", "m", "wanda", {"name": "wanda"}, "2:4", None, {"samples": 8}, "cpu", "float32")
    made.matrices.append(MatrixRecord(0, "mlp.up_proj", (4, 8), 0.5, 0.1, 1.5, 64, {"damping": 0.1, "steps": 3}))
    made.fits.append(FitRecord(0, 0.5, 0.25, 0.4, 1.0))
    made.perplexity["after"] = Perplexity(9.5, None, 31, 32, 1, "demo")
    return replace(made, **changes)


def changed(**changes: Any) -> str:
    return json.dumps({**json.loads(record().to_json()), **changes})


def assert_read_again(made: Record) -> None:
    assert Record.from_json(made.to_json()) == made


def test_what_was_written_is_read(tmp_path: Path) -> None:
    structure = StructureRecord({"before": 8, "after": 6}, 0.25, [0.5], [1], [[0, 2]], [[1]])
    for made in (record(), record(structure=structure, blocks=[0, 2], notes=["\ud800 ü"])):
        assert_read_again(made)
        made.save(tmp_path / "new" / "niwaki.json")
        assert Record.load(tmp_path / "new" / "niwaki.json") == made
    assert json.loads(record().to_json())["format"] == 2
    assert message(lambda: record().save(tmp_path), OutputError).startswith(f"cannot write {tmp_path}")


def test_it_prints_as_a_few_lines() -> None:
    made = record(size={"before": 4 << 20, "after": 1 << 20}, notes=["one", "the other"])
    made.perplexity["before"] = replace(made.perplexity["after"], value=9.0)
    made.loss = 0.054
    first, second, *others = str(made).splitlines()
    assert first == "m: 0 % sparse"
    assert re.fullmatch(r"1\.00 MiB, 0\.25 of 4\.00 MiB; 0\.05.*nats a token lost", second)
    assert others[-1] == "2 notes, such as: the other"
    assert len(others) <= 8
    assert_read_again(made)
    assert str(record(perplexity={})).splitlines() == ["m: 0 % sparse", "by wanda"]


def test_perplexities_beyond_floats() -> None:
    """Are not 300 digits; what a ruined model has, without bounds, can be written and read."""
    found = Perplexity.of(torch.full((2, 31), 800.0), "demo")
    assert str(found) == "over 1e+304 (62 tokens of demo, context 32)"
    assert shown(found) == found.figure == "over 1e+304"
    assert str(replace(found, value=1.25e9, standard_error=1e7)).startswith("1.25e+09 ± 1e+07 (")
    assert str(replace(found, value=44.875, standard_error=None)).startswith("44.88 (")
    assert_read_again(record(perplexity={"after": found}))
    ruined = Perplexity.of(torch.tensor([[1e30, 2.0], [1e38, 2.0]]), "demo")
    assert_read_again(record(perplexity={"after": ruined}))


@pytest.mark.parametrize("stats", [{}, {"error_before_rounding": "x", "rounded_to_zero": 1}, {"rounded_to_zero": 1}])
def test_a_grid_without_its_errors(stats: dict[str, Any]) -> None:
    text = changed(quantization="int4", matrices=[{**MATRIX, "stats": stats}])
    assert Record.from_json(text).rounding == "int4"


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ({}, "?"),
        ({"mask": 5, "update": {"name": "exact"}}, "? (mask 5, update {'name': 'exact'})"),
        ({"mask": {"name": "a"}, "update": {}}, "a + ?"),
        (describe(make_solver("wanda")), "wanda"),
        (describe(make_solver("magnitude+wanda+exact")), "magnitude + wanda + exact (damping 0.01, memory 1)"),
    ],
)
def test_solvers_in_words(described: dict[str, Any], said: str) -> None:
    assert in_words(described) == said


def test_text_in_markdown() -> None:
    assert markdown("a|b\n[x](javascript:1) <b> `c` *d* \x1b") == (r"a\|b \[x\](javascript:1) \<b> \`c\` \*d\* \\x1b")


def test_parameters_that_json_does_not_have() -> None:
    @dataclass(frozen=True)
    class Mine(Magnitude):
        path: Path = Path("x")
        limit: float = math.inf
        steps: tuple[int, ...] = (1, 2)

    described = plain(describe(Mine()))
    assert described == {"name": "mine", "path": repr(Path("x")), "limit": "Infinity", "steps": [1, 2]}
    assert_read_again(record(solver=described))


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
        (changed(matrices=KINDS), "300 kinds in 300 blocks"),
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
    for kind in (Record, SpeedRecord):
        message(lambda kind=kind: kind.from_json(text), CheckpointError)  # type: ignore[misc]
    assert str(tmp_path) in message(lambda: Record.load(tmp_path), CheckpointError)


@pytest.mark.parametrize(("windows", "quantile"), [(4, 3.182446), (8, 2.364624), (16, 2.131450), (128, 1.978820)])
def test_the_most_that_may_be_lost_is_by_students_distribution(windows: int, quantile: float) -> None:
    assert Difference(0.5, 0.1, windows=windows).most == pytest.approx(0.5 + 0.1 * quantile, rel=5e-4)


def test_few_windows_bound_nothing() -> None:
    assert Difference(0.5, 0.1, windows=3).most == Difference(0.5, None).most == math.inf
