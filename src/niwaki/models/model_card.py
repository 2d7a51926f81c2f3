"""The model card of a directory: its README.md."""

from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import metadata_load

from niwaki.files import output_errors
from niwaki.records.record import Record

_NOTES = "\n\nNotes:\n\n"


def top(readme: Path) -> dict[str, Any]:
    """What stands between the lines ``---`` of a card, with a list of texts as its tags; empty if that is not valid."""
    try:
        values = (metadata_load(readme) if readme.is_file() else None) or {}
    except (ValueError, yaml.YAMLError, RecursionError):  # no YAML at the top, or none that makes sense
        return {}
    tags = values.get("tags")
    tags = tags if isinstance(tags, list) else [tags]
    return {**values, "tags": [tag for tag in tags if isinstance(tag, str)]}


def notes(record: Record) -> str:
    """The end of a pruned model's card."""
    listed = "\n".join(f"* {note}" for note in record.notes)
    full = "`niwaki.json` has the full record: versions, command, and every matrix."
    return f"{_NOTES if listed else ''}{listed}\n\n{full}\n"


def replace_note(directory: Path, old: str, new: str) -> None:
    """Writes ``new`` for the note ``old`` on the card in ``directory``; all else stays, to the byte."""
    readme = directory / "README.md"
    with output_errors(directory):
        if readme.is_file():
            readme.write_bytes(readme.read_bytes().replace(f"* {old}".encode(), f"* {new}".encode()))
