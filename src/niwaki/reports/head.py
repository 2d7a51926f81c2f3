"""The head of a report: title, tiles, notes and facts."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

from niwaki.pruning.effort import described
from niwaki.records.record import Record
from niwaki.records.wording import counted, duration, in_words, short_text, size
from niwaki.reports.material import Material, Run
from niwaki.reports.tables import measured_on, with_error

#: What is after each ±, and what the bars of charts are.
SPREAD = "standard errors: how another text of this kind would differ; models on the same text compare more tightly"


class Tile(NamedTuple):
    """A number in large: what it is, the number, and what belongs to it."""

    what: str
    value: str
    where: str = ""


def title(material: Material) -> str:
    """The model, and how much of it is gone."""
    if (record := material.record) is None:
        return f"{material.name}, {counted(len(material.methods), 'method')} compared"
    if record.structure:
        return f"{material.name}, {record.structure.share} smaller"
    return f"{material.name}, {100 * record.sparsity:.4g} % sparse{_part(record)}"


def _part(record: Record) -> str:
    return f" in {record.part}" if record.part else ""


def notes(material: Material) -> list[str]:
    """What a careful reader should know, of all runs, and which runs it is about if not all."""
    about: dict[str, list[Run]] = defaultdict(list)
    for run in material.runs:
        for note in notes_of(run.full) if run.full is not None else ():
            about[note].append(run)
    lines = []
    for note, runs in about.items():
        where = runs[0].name if len(runs) == 1 else f"{len(runs)} of {counted(len(material.runs), 'run')}"
        lines.append(note if len(runs) == len(material.runs) else f"{where}: {note}")
    return lines


def notes_of(record: Record) -> list[str]:
    """What a careful reader should know of a run."""
    if not record.resumed:
        return record.notes
    return [*record.notes, f"stopped and resumed after block {', '.join(map(str, record.resumed))}"]


def tiles(material: Material) -> list[Tile]:
    """What is said first."""
    if (record := material.record) is None:
        return _best_tiles(material)
    shown = _removed_tiles(record)
    for text, after in material.runs[0].perplexity.items():
        where = measured_on(text, after)
        if before := material.dense.get(text):
            gain = f"{100 * (after.value / before.value - 1):+.1f} % against dense"
            shown.append(Tile("perplexity dense", with_error(before), where))
            shown.append(Tile("perplexity pruned", with_error(after), gain))
        else:
            shown.append(Tile("perplexity", with_error(after), where))
    if not material.texts:
        shown.append(Tile("perplexity", "?", "not measured"))
    shown.append(Tile("time", duration(material.comparison.seconds), f"on {record.device} in {record.dtype}"))
    return shown + [Tile("peak memory", size(peak), where) for where, peak in record.peak_memory.items()]


def _best_tiles(material: Material) -> list[Tile]:
    """Of a comparison: the dense model, and the best method at each pattern."""
    text = material.texts[0] if material.texts else ""
    shown = []
    if dense := material.dense.get(text):
        shown.append(Tile("perplexity dense", with_error(dense), measured_on(text, dense)))
    for pattern in material.patterns:
        runs = [run for run in material.runs if run.pattern == pattern and text in run.perplexity]
        if runs:
            best = min(runs, key=lambda run: run.perplexity[text].value)
            shown.append(Tile(f"best at {pattern}", with_error(best.perplexity[text]), best.method))
    return shown


def _removed_tiles(record: Record) -> list[Tile]:
    if structure := record.structure:
        after, before = (structure.parameters[when] for when in ("after", "before"))
        return [
            Tile("fewer parameters", structure.share, f"{after:,} of {before:,} stay"),
            Tile("removed", f"{100 * structure.removed:.1f} %", f"of the blocks' parameters: {record.pattern}"),
        ]
    weights = sum(math.prod(matrix.shape) for matrix in record.matrices)
    of = f"of {counted(len(record.matrices), 'matrix', 'matrices')}{_part(record)}, {weights / 1e6:,.4g} M weights"
    return [Tile("zeros", f"{100 * record.sparsity:.4g} %", of)]


def facts(material: Material) -> list[tuple[str, str]]:
    """Names and values below the tiles."""
    shown = [("model", material.comparison.model)]
    if (record := material.record) is None:
        shown.append(("runs", f"{len(material.runs)}, in {duration(material.comparison.seconds)} with measuring"))
    else:
        shown += facts_of(record.method, record)
    if calibration := material.comparison.calibration:
        windows, tokens = (calibration.get(name, "?") for name in ("samples", "sequence_length"))
        source = short_text(str(calibration.get("source", "?")))
        shown.append(("calibration", f"{counted(windows, 'window')} of {counted(tokens, 'token')} of {source}"))
    if record is not None and any("±" in tile.value for tile in tiles(material)):
        shown.append(("±", SPREAD))
    return shown


def facts_of(method: str, record: Record) -> list[tuple[str, str]]:
    """Names and values: how it was pruned."""
    shown = [("method", method), ("solver", in_words(record.solver))]
    shown += [("effort", described(record.effort))] if record.effort else []
    if record.structure is None:
        shown += [("pattern", record.pattern)]
    elif record.structure.blocks:
        shown += [("blocks removed", f"{', '.join(map(str, record.structure.blocks))}, counted from 0")]
    shown += [("mask from", record.mask_from)] if record.mask_from else []
    shown += [("grid", record.rounding)] if record.quantization else []
    shown += [("own text", record.own_text)] if record.own_text else []
    if record.matrices:
        shown += [("error", f"{record.mean_error:.4g} of the output's square, geometric mean over matrices")]
    return shown
