"""The model card of a smaller model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from niwaki import card
from niwaki.shrink_record import ShrinkRecord


def write(directory: Path, record: ShrinkRecord) -> None:
    """Writes README.md, as :func:`niwaki.card.write` does."""
    card.replace(directory, lambda inherited: _text(record, inherited))


def _text(record: ShrinkRecord, inherited: dict[str, Any]) -> str:
    name = Path(record.model).name or record.model
    before, after = record.parameters["before"], record.parameters["after"]
    lines = [
        "---",
        card.metadata(record.model, inherited),
        "---",
        "",
        f"# {name}, {100 * (1 - after / before):.1f} % smaller",
        "",
        f"`{name}` without some of its parts, which niwaki dropped after training. It is dense and loads as any "
        "other model of its kind.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {what} dropped | {which} |" for what, which in record.summary.items()),
        f"| parameters | {after:,} of {before:,} |",
        f"| calibration | {record.calibration['samples']} windows of "
        f"{record.calibration['sequence_length']} tokens of {Path(record.calibration['source']).name} |",
        *card.perplexity_rows(record.perplexity),
    ]
    if record.notes:
        lines += ["", "Notes:", "", *(f"* {note}" for note in record.notes)]
    lines += ["", "`niwaki.json` has the full record: versions, command, scores, and what was dropped.", ""]
    return "\n".join(lines)
