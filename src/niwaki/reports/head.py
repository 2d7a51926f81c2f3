"""The head of a report: title, tiles, notes and facts."""

import math
from collections import defaultdict

from niwaki.effort import described
from niwaki.records.facts import calibration_of, facts as all_facts
from niwaki.records.record import Record
from niwaki.records.wording import counted, duration, size
from niwaki.reports.material import Material, Run
from niwaki.reports.tables import measured_on, with_error

#: What is after each ±, and what the bars of charts are.
SPREAD = "standard errors: how another text of this kind would differ; models on the same text compare more tightly"

#: Facts that are numbers in large.
_TILES = {"removed", "parameters", "fewer weights", "zeros"}

#: A number in large: what it is, the number, and what belongs to it.
Tile = tuple[str, str, str]


def title(material: Material) -> str:
    """The model, and how much of it is gone."""
    if (record := material.record) is None:
        return f"{material.name}, {counted(len(material.methods), 'method')} compared"
    return f"{material.name}, {'healed' if record.only_heals and not record.structure else record.outcome}"


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
    what = "step" if record.only_heals else "block or step" if record.healing else "block"
    return [*record.notes, f"stopped and resumed after {what} {', '.join(map(str, record.resumed))}"]


def tiles(material: Material) -> list[Tile]:
    """What is said first."""
    if (record := material.record) is None:
        return _best_tiles(material)
    shown = _removed_tiles(record)
    for text, after in material.runs[0].perplexity.items():
        where = measured_on(text, after)
        if before := material.dense.get(text):
            gain = f"{100 * (after.value / before.value - 1):+.1f} % against dense"
            if after.counts != before.counts and before.bits and after.bits:  # perplexities do not compare
                gain = "of other tokens, which does not compare with the dense model's"
                change = f"{100 * (after.bits / before.bits - 1):+.2f} % against dense, {before.bits:.4f}"
                shown.append(("bits a byte", f"{after.bits:.4f}", change))
            shown.append(("perplexity dense", with_error(before), measured_on(text, before)))
            if pruned := record.perplexity.get("pruned"):
                shown.append(("perplexity pruned", with_error(pruned), "before healing"))
            shown.append((f"perplexity {'healed' if record.healing else 'pruned'}", with_error(after), gain))
        else:
            shown.append(("perplexity", with_error(after), where))
    if not material.texts:
        shown.append(("perplexity", "?", "not measured"))
    shown.append(("time", duration(material.seconds), f"on {record.device} in {record.dtype}"))
    return shown + [("peak memory", size(peak), where) for where, peak in record.peak_memory.items()]


def _best_tiles(material: Material) -> list[Tile]:
    """Of a comparison: the dense model, and the best method at each pattern."""
    text = material.texts[0] if material.texts else ""
    shown = []
    if dense := material.dense.get(text):
        shown.append(("perplexity dense", with_error(dense), measured_on(text, dense)))
    for pattern in material.patterns:
        runs = [run for run in material.runs if run.pattern == pattern and text in run.perplexity]
        if runs:
            best = min(runs, key=lambda run: run.perplexity[text].value)
            shown.append((f"best at {pattern}", with_error(best.perplexity[text]), best.method))
    return shown


def _removed_tiles(record: Record) -> list[Tile]:
    shown = list[Tile]()
    if structure := record.structure:
        stay = "{after:,} of {before:,} stay".format(**structure.parameters)
        if words := structure.vocabulary:
            shown.append(("fewer tokens", f"{words['after']:,}", f"of {words['before']:,} stay"))
        what = f": {record.pattern}" if record.only_shrinks else ""
        shown.append(("fewer parameters", structure.share, stay))
        shown.append(("removed", f"{100 * structure.removed:.1f} %", f"of the blocks' parameters{what}"))
    weights = sum(math.prod(matrix.shape) for matrix in record.matrices)
    of = f"of {counted(len(record.matrices), 'matrix', 'matrices')}{record.where}, {weights / 1e6:,.4g} M weights"
    if record.only_quantizes:
        where = of if record.quantization else "of the embeddings and the head"
        shown.append(("grid", str(record.quantization or record.embeddings), where))
    elif not record.only_shrinks:
        what = "fewer weights" if record.has_factors else "zeros"
        shown.append((what, f"{100 * record.sparsity:.4g} %", "as before" if record.only_heals else of))
    if (healing := record.healing) and healing.points:
        first, best = healing.points[0].error, healing.points[healing.best].error
        gain = f"of {first:.4g} before healing, in nats a token on {healing.held:,} held-out tokens"
        shown.append(("KL from the dense model", f"{best:.4g}", gain))
    return shown


def facts(material: Material) -> list[tuple[str, str]]:
    """Names and values below the tiles."""
    shown = [("model", material.source.model)]
    if (record := material.record) is None:
        shown.append(("runs", f"{len(material.runs)}, in {duration(material.seconds)} with measuring"))
    else:
        shown += facts_of(record)
    if calibration := material.source.calibration:
        shown.append(("calibration", calibration_of(calibration)))
    if record is not None and any("±" in value for _, value, _ in tiles(material)):
        shown.append(("±", SPREAD))
    return shown


def facts_of(record: Record) -> list[tuple[str, str]]:
    """Names and values: how it was pruned; those that are empty, or are tiles, are left out."""
    removed = ", ".join(map(str, record.structure.blocks)) if record.structure else ""
    shown = {
        "method": record.solved_by,
        "effort": described(record.effort) if record.effort else "",
        **all_facts(record),
        "blocks removed": f"{removed}, counted from 0" if removed else "",
    }
    return [(name, value) for name, value in shown.items() if value and name not in _TILES]
