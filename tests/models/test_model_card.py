"""The end of a model card, which changes with the record's notes."""

from __future__ import annotations

from pathlib import Path

import pytest

from niwaki.models.model_card import notes, rewrite_notes, top
from niwaki.records.record import Record

RECORD = Record("", "m", "wanda", {"name": "wanda"}, "2:4", None, {}, "cpu", "float32")


def with_notes(*texts: str) -> Record:
    RECORD.notes = list(texts)
    return RECORD


def test_only_the_notes_change(tmp_path: Path) -> None:
    card, before = tmp_path / "README.md", "---\n---\n\n# A model\n\nMy own words about `old`."
    card.write_text(before + notes(with_notes("old", "other")))
    rewrite_notes(tmp_path, with_notes("new", "other"))
    assert card.read_text() == before + notes(with_notes("new", "other"))
    assert card.read_text().endswith("\n\nNotes:\n\n* new\n* other\n\n" + notes(with_notes()).strip() + "\n")


def test_a_card_without_notes_stays(tmp_path: Path) -> None:
    rewrite_notes(tmp_path, with_notes("new"))
    assert not list(tmp_path.iterdir())
    (tmp_path / "README.md").write_text("# A model\n")
    rewrite_notes(tmp_path, with_notes("new"))
    assert (tmp_path / "README.md").read_text() == "# A model\n"


def test_a_card_in_another_encoding(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_bytes(b"\xe9" + notes(with_notes("old")).encode())
    rewrite_notes(tmp_path, with_notes("new"))
    assert card.read_bytes() == b"\xe9" + notes(with_notes("new")).encode()


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
