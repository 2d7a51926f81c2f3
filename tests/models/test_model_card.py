"""The end of a model card, which changes with the record's notes."""

from __future__ import annotations

from pathlib import Path

from niwaki.models.model_card import notes, replace_note
from niwaki.records.record import Record

RECORD = Record("", "m", "wanda", {"name": "wanda"}, "2:4", None, {}, "cpu", "float32")


def with_notes(*texts: str) -> Record:
    RECORD.notes = list(texts)
    return RECORD


def test_only_the_note_changes(tmp_path: Path) -> None:
    """Also where somebody has written after the notes, or between them, and in no encoding at all."""
    card, own = tmp_path / "README.md", b"\r\n\xff My own words about `old`.\r\n"
    card.write_bytes(b"# A model" + notes(with_notes("old", "other")).encode() + own)
    replace_note(tmp_path, "old", "new")
    assert card.read_bytes() == b"# A model" + notes(with_notes("new", "other")).encode() + own


def test_a_card_without_the_note_stays(tmp_path: Path) -> None:
    replace_note(tmp_path, "old", "new")
    assert not list(tmp_path.iterdir())
    (tmp_path / "README.md").write_bytes(b"# A model, old\r\n")
    replace_note(tmp_path, "old", "new")
    assert (tmp_path / "README.md").read_bytes() == b"# A model, old\r\n"
