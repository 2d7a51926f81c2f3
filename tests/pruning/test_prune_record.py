"""What a run says of itself: the card, and the record."""

from __future__ import annotations

import dataclasses
import json
import math
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import metadata_load
from torch import Tensor
from transformers import AutoTokenizer

import niwaki
from niwaki.errors import CalibrationError, NiwakiError, OutputError
from niwaki.files import replace_file
from niwaki.layer.solvers import MaskThenUpdate
from niwaki.recipes import prune
from niwaki.records.progress import Progress
from niwaki.records.record import Record
from niwaki.runs.stage import session
from niwaki.runs.workplace import check_record
from support.models import (
    message,
    random_tokens,
    reference,
    save_model,
    save_model_with_tokenizer,
)
from support.runs import Untouched, files, listing, run_magnitude as run


def strict_json(text: str) -> Any:
    """JSON as other languages read it, without NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


CARD = """---
license: other
license_name: tiny-community
license_link: https://example.com/LICENSE
language:
- en
- ja
tags:
- text-generation
- tiny
pipeline_tag: text-generation
---
# Tiny

It is *very* small.
"""


def front_matter(directory: Path) -> dict[str, Any]:
    """The YAML at the top of the card."""
    return metadata_load(directory / "README.md") or {}


# The card


def test_the_card(model: Path, out: Path) -> None:
    (model / "README.md").write_text(CARD)
    text = random_tokens(3, 24, seed=1)
    record = run(model, out, solver="admm-grad", sparsity=0.6, text=text)
    assert (out / "README.base.md").read_text() == CARD
    data, written = front_matter(out), (out / "README.md").read_text()
    # The hub refuses a card that says "other" and no more.
    expected = {
        "license": "other",
        "license_name": "tiny-community",
        "license_link": "https://example.com/LICENSE",
        "language": ["en", "ja"],
        "base_model": "model",
        "library_name": "transformers",
    }
    assert expected.items() <= data.items()
    assert {"niwaki", "pruned", "sparse", "text-generation", "tiny"} <= set(data["tags"])
    for part in ("admm-grad (iterations 20", "unstructured:0.6", "60.", "8 windows of 24 tokens", "context 24"):
        assert part in written
    for name in ("before", "after"):
        assert f"| perplexity {name} | {record.perplexity[name].value:.2f} ± " in written


@pytest.mark.parametrize(
    "base",
    [
        b"",
        b"# No front matter\n",
        b"---\nlicense: mit\ntags:\n---\n",
        b"---\nlicense: mit\ntags: one\n---\n",
        b"---\nlicense: mit\ntags: [1, null, two]\n---\n",
        b"---\n- a\n- list\n---\n",
        b"---\nlicense: [unclosed\n---\n",
        b"---\nlicense: a: b: c\n\t- x\n---\n",
        b"---\nlicense: mit\n",
        b"\xff\xfe no UTF-8",
    ],
    ids=str,
)
@pytest.mark.slow
def test_whatever_the_base_card_is_like(model: Path, out: Path, base: bytes) -> None:
    """After hours of work is no time to stumble over somebody's YAML."""
    (model / "README.md").write_bytes(base)
    run(model, out)
    assert (out / "README.base.md").read_bytes() == base
    data = front_matter(out)
    if b"license: mit\ntags" in base:
        assert data["license"] == "mit"
    assert "niwaki" in data["tags"]


def test_a_hub_name_is_the_base_model(model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("niwaki.recipes.locate_model", lambda name: model)
    record = prune("someone/tiny", out, 0.5, solver="magnitude", calibration=random_tokens(2, 8))
    assert record.model == "someone/tiny"
    assert front_matter(out)["base_model"] == "someone/tiny"


def test_a_name_is_shown_as_it_is(tmp_path: Path, out: Path) -> None:
    """No link, no HTML, no column of the table."""
    record = run(save_model(tmp_path / "[a](b)|<c>`d`\n# e"), out)
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "\n# \\[a\\](b)\\|\\<c>\\`d\\` # e, 50 % sparse\n" in card
    assert front_matter(out)["base_model"] == Path(record.model).name
    assert Record.load(out / "niwaki.json") == record


# The record


def test_the_record(model: Path, out: Path, tmp_path: Path) -> None:
    text = random_tokens(3, 24, seed=1)
    to = tmp_path / "records" / "run.json"
    with session("niwaki prune x"):
        record = run(model, out, solver="sparsegpt", text=text, seed=5)
    record.save(to)
    written = (out / "niwaki.json").read_text()
    assert to.read_text() == written == Record.from_json(written).to_json()
    assert Record.from_json(written) == record
    values = strict_json(written)
    assert (values["command"], values["method"], values["solver"]["name"]) == ("niwaki prune x", *2 * ["sparsegpt"])
    assert {"samples": 8, "sequence_length": 24, "seed": 5}.items() <= values["calibration"].items()
    assert values["flops"] == record.flops > 0
    assert set(values["versions"]) >= {"python", "niwaki", "torch", "transformers"}
    assert values["versions"]["niwaki"] == niwaki.__version__
    assert torch.__version__.startswith(values["versions"]["torch"])
    assert {"capture", "solve", "advance", "total"} <= set(values["seconds"])
    parts = sum(seconds for name, seconds in values["seconds"].items() if name != "total")
    assert parts == pytest.approx(values["seconds"]["total"], rel=0.05)
    assert values["peak_memory"]["resident"] > 2**20
    assert len(values["matrices"]) == 14
    for matrix in values["matrices"]:
        assert matrix["tokens"] == 8 * 24
        assert matrix["seconds"] > 0
        assert matrix["stats"]["damping"] == pytest.approx(0.01, rel=0.1)
    assert record.mean_error == pytest.approx(math.prod(matrix["error"] for matrix in values["matrices"]) ** (1 / 14))


def test_the_record_of_one_window_is_json_too(model: Path, out: Path) -> None:
    run(model, out, text=random_tokens(1, 24, seed=1))
    values = strict_json((out / "niwaki.json").read_text())
    assert values["perplexity"]["after"]["windows"] == 1
    assert "nan" not in (out / "README.md").read_text()


@pytest.mark.slow
def test_which_perplexities(model: Path, out: Path) -> None:
    text = random_tokens(5, 24, seed=1)
    both, after, none = (
        run(model, out / measure, text=text, measure=measure).perplexity for measure in ("both", "after", "none")
    )
    assert list(both) == ["before", "after"]
    assert {(each.tokens, each.context, each.windows) for each in both.values()} == {(5 * 23, 24, 5)}
    assert after == {"after": dataclasses.replace(both["after"], divergence=None)}  # no dense model to compare with
    assert none == {}
    assert "| perplexity | not measured |" in (out / "none" / "README.md").read_text()
    silent = run(model, out / "no text")
    assert silent.perplexity == {}
    assert any("perplexity was not measured" in note for note in silent.notes)


@pytest.mark.slow
def test_texts(tmp_path: Path, out: Path) -> None:
    source = save_model_with_tokenizer(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"The {n} walked on and on, to town." for n in range(400)))
    tokenizer = AutoTokenizer.from_pretrained(source, model_max_length=10**9)
    ids = torch.tensor(tokenizer(text.read_text(), add_special_tokens=False)["input_ids"])
    windows = ids[: 9 * 32].view(9, 32)
    dense = reference(source)

    def perplexity(tokens: Tensor) -> float:
        return float(dense(tokens, labels=tokens).loss.exp())

    # By default what comes behind the calibration windows.
    record = run(source, out / "1", calibration=str(text), samples=5, length=32, text_samples=4)
    same = run(source, out / "2", calibration=windows[:5], text=windows[5:])
    assert record.calibration["tokens_sha256"] == same.calibration["tokens_sha256"]
    assert record.perplexity["before"].value == pytest.approx(perplexity(windows[5:]), rel=1e-4)
    assert record.perplexity["after"].value == same.perplexity["after"].value
    weights = [(out / name / "model.safetensors").read_bytes() for name in "12"]
    assert weights[0] == weights[1]
    # Another text.
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[2000:])
    start = torch.tensor(tokenizer(other.read_text(), add_special_tokens=False)["input_ids"])[:96]
    record = run(source, out / "3", calibration=str(text), samples=5, length=32, text=str(other), text_samples=3)
    assert record.perplexity["before"].value == pytest.approx(perplexity(start.view(3, 32)), rel=1e-4)
    # None that is long enough for both.
    short = run(source, out / "4", calibration=str(text), samples=len(ids) // 32, length=32)
    assert short.perplexity == {}
    assert any("has no more of it" in note for note in short.notes)
    # The sequence length, when nobody says, is noted; it is the model's where that is short.
    silent = run(source, out / "5", calibration=str(text), samples=2)
    assert silent.calibration["sequence_length"] == 128
    assert any("128 tokens, because no length was given" in note for note in silent.notes)
    said = message(lambda: run(source, out / "6", calibration=str(text), samples=10**4, length=32), CalibrationError)
    assert f"{10**4 * 32 - len(ids)} are missing" in said
    assert sorted(path.name for path in out.iterdir()) == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("solver", ["wanda", "continuation"])
@pytest.mark.slow
def test_two_runs_give_the_same_bytes(model: Path, out: Path, solver: str) -> None:
    (model / "README.md").write_text(CARD)
    text = random_tokens(3, 24, seed=1)
    for name in ("a", "b"):
        run(model, out / name, solver=solver, text=text)
    assert files(out / "a") == files(out / "b")
    first, second = (Record.load(out / name / "niwaki.json") for name in "ab")
    for record in (first, second):
        record.seconds.clear()
        record.peak_memory.clear()
        record.matrices = [dataclasses.replace(matrix, seconds=0.0) for matrix in record.matrices]
    assert first == second


def test_a_record_from_before_operations_were_counted(model: Path, out: Path) -> None:
    values = json.loads(run(model, out).to_json())
    del values["flops"]
    assert Record.from_json(json.dumps(values)).flops == 0.0


def test_operations_are_counted_before_anything_is_solved(model: Path, out: Path) -> None:
    @dataclass(frozen=True)
    class Counting(Untouched):
        factor: float = 1.0

        def flops(self, rows: int, columns: int) -> float:
            return self.factor * (1000 * rows + columns)

    class AtTheStart(Progress):
        def begin(self, record: Record, blocks: int, matrices: int) -> None:
            found.append(record.flops)
            assert not record.matrices

    found: list[float] = []
    shapes = 2 * [*4 * [(32, 32)], (48, 32), (48, 32), (32, 48)]
    once = sum(1000 * rows + columns for rows, columns in shapes)
    for name, solver in (("1", Counting()), ("2", MaskThenUpdate(Counting(), Counting(3.0)))):
        assert run(model, out / name, solver=solver, progress=AtTheStart()).flops == found[-1]
    assert found == [once, 4 * once]


# The record's file


def test_a_record_that_cannot_be_written(tmp_path: Path, model: Path) -> None:
    (tmp_path / "records").mkdir()
    (tmp_path / "file").write_text("keep me")
    before = listing(tmp_path)
    # That has to show before the work, and not leave bits of it.
    for to in (tmp_path / "records", tmp_path / "file" / "x.json"):
        message(lambda to=to: check_record(to), NiwakiError)  # type: ignore[misc]
        assert listing(tmp_path) == before


def test_writing_json_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    replace_file(path, "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for text in ("x" * 5000, "x" * 500_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        try:
            assert "a.json" in message(lambda text=text: replace_file(path, text), OutputError)  # type: ignore[misc]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert listing(tmp_path) == ["a.json"]
        assert path.read_text() == "old"
    replace_file(path, "日本")
    assert path.read_bytes() == "日本".encode()
