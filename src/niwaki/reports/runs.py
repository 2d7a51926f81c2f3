"""All runs of a comparison: what the page says of a single model at the top, in little room."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from niwaki.records.wording import short_text
from niwaki.reports.head import facts_of, notes_of
from niwaki.reports.material import Material
from niwaki.reports.sections import errors_of, zeros_of
from niwaki.reports.tables import Table, with_error


class Detail(NamedTuple):
    """All about one run of several; ``record`` is its JSON, compact, and ``file`` a name for it."""

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
        facts += [("time", f"{run.seconds:.1f} s"), *facts_of(run.method, record)]
        error, sparsity = errors_of(material, record).table(), zeros_of(record).table("{:.1%}")
        compact = json.dumps(json.loads(record.to_json()), separators=(",", ":"))
        file = f"{re.sub(r'[^a-z0-9]+', '-', run.name.lower()).strip('-')}.json"
        shown.append(Detail(run.name, facts, notes_of(record), error, sparsity, compact, file))
    return shown
