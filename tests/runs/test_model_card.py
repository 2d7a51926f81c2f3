"""The end of a model card, which changes with the record's notes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import niwaki
from niwaki import Calibration, Measurement
from niwaki.records.record import Record
from niwaki.runs.card import restate, top
from support.models import save_model_with_tokenizer

RECORD = Record("", "m", "wanda", {"name": "wanda"}, "2:4", None, {}, "cpu", "float32")


def with_notes(*texts: str) -> Record:
    RECORD.notes = list(texts)
    return RECORD


def test_only_the_note_changes(tmp_path: Path) -> None:
    restate(tmp_path, "old", "new")
    assert not list(tmp_path.iterdir())
    file = tmp_path / "niwaki.json"
    for old in ("old", "another"):
        with_notes(old, "other").save(file)
        restate(tmp_path, old, "new")
        assert Record.load(file).notes == ["other", "new"]


MERGED = "".join(
    f"{new}: &{new}\n  <<: [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\ufeff---\r\nlicense: mit\r\n---\r\ntext", {"license": "mit", "tags": []}),
        ("\n---\nlicense: é\ntags: [a, 1]\n---", {"license": "é", "tags": ["a"]}),
        (f"---\na: &a {{x: 1}}\n{MERGED}---\n", {}),  # stands for 9 to the power of 8
        ("---\na: &a [*a]\n---\n", {}),
        ("---\na: !!int ''\n---\n", {}),
        ("---\na: !!bool x\n---\n", {}),
        ("---\na: !!timestamp x\n---\n", {}),
        ("---\na: 2020-99-99\n---\n", {}),
        ("---\n" + "a: b\n" * 10**6 + "---\n", {}),
        ("---\nlicense: mit\n---\n" + "text\n" * 10**6, {"license": "mit", "tags": []}),
        ("---\nlicense: mit\n---x\n", {}),
    ],
    ids=range(11),
)
def test_the_top_of_a_card(tmp_path: Path, text: str, expected: dict[str, object]) -> None:
    (tmp_path / "README.md").write_text(text, encoding="utf-8", newline="")
    assert top(tmp_path / "README.md") == expected


def test_no_card_tells_where_files_were(tmp_path: Path) -> None:
    """Neither README.md nor config.json names a folder: of the model, the mask, the teacher or the texts."""
    model, mask, pruned = (save_model_with_tokenizer(tmp_path / "folder" / "dense"), *map(tmp_path.joinpath, "mp"))
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    chats, held = tmp_path / "folder" / "chats.jsonl", tmp_path / "folder" / "held"
    said = [{"role": role, "content": "the cat sat on the mat " * 9} for role in ("user", "assistant")]
    chats.write_text("".join(json.dumps({"messages": said}) + "\n" for _ in range(40)))
    held.write_text("the dog lay down beside it " * 200)
    given: Any = {
        "calibration": Calibration(str(chats), samples=4, length=16),
        "measurement": Measurement(str(held), samples=2),
    }
    niwaki.prune(model, mask, 0.5, solver="magnitude", **given)
    niwaki.prune(model, pruned, None, mask_from=str(mask), effort="fast", **given)
    given["calibration"] = Calibration(str(chats), length=16)
    niwaki.heal(pruned, tmp_path / "healed", teacher=str(mask), tokens=200, **given)
    for directory in (mask, pruned, tmp_path / "healed"):
        for name in ("README.md", "config.json"):
            assert str(tmp_path) not in (directory / name).read_text(), (directory.name, name)
    card = (pruned / "README.md").read_text()
    assert "the mask of m" in card
    assert "chats.jsonl" in card
