"""All runs of a comparison: what the page says of a single model at the top, in little room."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from niwaki.records.wording import short_text
from niwaki.reports.head import facts_of, notes_of
from niwaki.reports.material import Material
from niwaki.reports.sections import errors_of, zeros_of
from niwaki.reports.tables import Table, with_error


@dataclass(frozen=True)
class Detail:
    """All about one run of several.

    Attributes:
        name: Its method and pattern.
        facts: Names and values.
        notes: As in its record.
        error: Heat map of errors, as a table.
        sparsity: The same of sparsities.
        record: The record as compact JSON.
        file: A name for it.
    """

    name: str
    facts: list[tuple[str, str]]
    notes: list[str]
    error: Table
    sparsity: Table
    record: str
    file: str


def details(material: Material) -> list[Detail]:
    """All runs of a comparison that have a record."""
    shown = []
    for run in material.runs if material.compared else []:
        if (record := run.full) is None:
            continue
        facts = [(f"perplexity, {short_text(text)}", with_error(value)) for text, value in run.perplexity.items()]
        facts.append(("error of the matrices, geometric mean", f"{run.error:.4g}"))
        facts += [("time", f"{run.seconds:.1f} s"), *facts_of(run)]
        shown.append(
            Detail(
                run.name,
                facts,
                notes_of(record),
                errors_of(material, record).table(),
                zeros_of(record).table("{:.1%}"),
                json.dumps(json.loads(record.to_json()), separators=(",", ":")),
                f"{re.sub(r'[^a-z0-9]+', '-', run.name.lower()).strip('-')}.json",
            )
        )
    return shown
