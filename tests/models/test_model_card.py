"""The end of a model card, which changes with the record's notes."""

from __future__ import annotations

from pathlib import Path

from niwaki.models.model_card import notes, rewrite_notes
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
