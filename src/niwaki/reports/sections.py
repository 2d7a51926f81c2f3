"""The sections of a report, a function each: what there is to see, charts, and their numbers as tables.

Those of perplexities are in :mod:`.perplexities`.
"""

import json
import math
import re
from collections import Counter, defaultdict
from functools import partial
from typing import Any

from niwaki.effort import described
from niwaki.records.perplexity import Perplexity
from niwaki.records.record import Record, calibration_of, facts as all_facts
from niwaki.records.wording import Table, TableCell, counted, duration, kind, short_text, size, two_digits
from niwaki.reports import charts
from niwaki.reports.charts import (
    STEPS,
    Exhibit,
    Section,
    heat_of,
    heat_table,
    labels_of,
    measured_on,
)
from niwaki.reports.material import Material, PrunedModel

# The head of a report: title, tiles, notes and facts.

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
    about: dict[str, list[PrunedModel]] = defaultdict(list)
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
    """The numbers that are said first."""
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
            shown.append(("perplexity dense", before.figure, measured_on(text, before)))
            if pruned := record.perplexity.get("pruned"):
                shown.append(("perplexity pruned", pruned.figure, "before healing"))
            shown.append((f"perplexity {'healed' if record.healing else 'pruned'}", after.figure, gain))
        else:
            shown.append(("perplexity", after.figure, where))
    if not material.texts:
        shown.append(("perplexity", "?", "not measured"))
    shown.append(("time", duration(material.seconds), f"on {record.device} in {record.dtype}"))
    return shown + [("peak memory", size(peak), where) for where, peak in record.peak_memory.items()]


def _best_tiles(material: Material) -> list[Tile]:
    """The tiles of a comparison: the dense model, and the best method at each pattern."""
    text = material.texts[0] if material.texts else ""
    shown = []
    if dense := material.dense.get(text):
        shown.append(("perplexity dense", dense.figure, measured_on(text, dense)))
    for pattern in material.patterns:
        runs = [run for run in material.runs if run.pattern == pattern and text in run.perplexity]
        if runs:
            best = min(runs, key=lambda run: run.perplexity[text].value)
            shown.append((f"best at {pattern}", best.perplexity[text].figure, best.method))
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


#: What the stages of a run are for.
STAGES = {
    "prepare": "reading texts and the model's structure",
    "influence": "looking for the blocks that matter least",
    "plan": "looking at the dense model: where zeros cost least",
    "capture": "running blocks for the inputs of their matrices",
    "read": "reading weights",
    "solve": "choosing and changing weights",
    "fit": "fitting blocks to the dense ones",
    "advance": "running pruned blocks for the next ones' inputs",
    "teach": "asking the dense model about the text",
    "heal": "training",
    "write": "writing",
    "perplexity": "measuring perplexity",
    "check": "reading back what was written",
}


def sections(material: Material) -> list[Section]:
    """The sections in which there is something to show."""
    made = [make(material) for make in (frontier, stages, healing, errors, allocation, fits, time, speed)]
    return [section for section in made if section is not None]


def stages(material: Material) -> Section | None:
    """What was done, one after the other, and what each cost, of a run of several stages."""
    if material.record is None or not material.record.stages:
        return None
    rows = []
    for stage, cost in material.record.costs():
        measured = stage.perplexity.figure if stage.perplexity else "not measured"
        rows.append([stage.name, stage.asked, duration(stage.seconds), measured, cost.words if cost else ""])
    table = Table.of(["stage", "asked for", "time", "perplexity after it", "cost"], rows)
    why = "What was done to the model, one after the other: by how much each stage raised the loss on the same text."
    return Section("stages", "Stages", why, [Exhibit(_waterfall(material.record), table, open=True)])


def _waterfall(record: Record) -> list[charts.Figure]:
    """From the dense model's loss to that of the result, stage by stage; none where fewer than two were measured."""
    steps, unit, total = list[dict[str, Any]](), "nats a token", 0.0
    for position, (stage, cost) in enumerate(record.costs(), 1):
        if cost:
            label = f"{stage.name} {stage.asked}: {cost.words}, {total + cost.nats:.4f} in all"
            name = f"{position} {stage.name}"
            steps.append({"name": name, "from": total, "value": total + cost.nats, "label": label})
            total, unit = total + cost.nats, cost.unit
    if len(steps) < 2:
        return []
    return [charts.waterfall(steps, [step["name"] for step in steps], f"{unit} above the dense model")]


def errors(material: Material) -> Section | None:
    """Errors of blocks and matrices, of a comparison for each run of one pattern."""
    compared = material.record is None
    pattern = heat_pattern(material)
    exhibits = []
    for run in material.runs:
        if run.full is None or not run.full.matrices or run.pattern != pattern:
            continue
        cells = errors_of(material, run.full)
        drawn = [{**cell, "label": f"{run.method}, {cell['label']}"} for cell in cells]
        figure = charts.heat_map(drawn, 0.5 if compared else 1.0)
        # The tables of a comparison are below, with each run.
        table, heading = (None, run.method) if compared else (heat_table(cells, two_digits), "")
        exhibits.append(Exhibit([figure], table, heading, f"error by block and matrix, {run.method}"))
    if not exhibits:
        return None
    at, same = (f"; at {pattern}", ", the same for all runs") if compared else ("", "")
    why = (
        f"Squared error of its outputs on the calibration text, relative to the squared outputs{at}. Colours are on a "
        f"logarithmic scale{same}."
    )
    low, high = material.errors or (0.0, 0.0)
    key = (two_digits(low), two_digits(high)) if material.errors else None
    after = "The numbers are below, with each run." if compared else ""
    return Section("errors", "Error of each matrix", why, exhibits, key, beside=True, after=after)


def heat_pattern(material: Material) -> str:
    """The pattern whose heat maps are shown for all methods: the middle one of those that most methods have."""
    counts = Counter(run.pattern for run in material.runs if run.full is not None)
    most = [pattern for pattern in material.patterns if counts[pattern] == max(counts.values(), default=0)]
    return most[(len(most) - 1) // 2] if most else ""


def errors_of(material: Material, record: Record) -> list[charts.Row]:
    """The errors of each block's matrices; colours are equal steps on a logarithmic scale, the same over the page."""

    def step(error: float) -> int:
        low, high = map(math.log, material.errors or (1, 1))
        if error <= 0 or low == high:
            return 0
        return min(STEPS - 1, int(STEPS * (math.log(error) - low) / (high - low)))

    return heat_of(record, lambda matrix: matrix.error, lambda error: f"error {two_digits(error)}", step)


def zeros_of(record: Record) -> list[charts.Row]:
    """The sparsity of each block's matrices."""
    form, step = "{:.2%} zeros".format, lambda zeros: min(STEPS - 1, int(STEPS * zeros))
    return heat_of(record, lambda matrix: matrix.sparsity, form, step)


def allocation(material: Material) -> Section | None:
    """Sparsity of blocks and matrices, of a single model with zeros."""
    record = material.record
    if record is None or not record.matrices or record.only_shrinks:
        return None
    zeros: dict[int, float] = defaultdict(float)
    weights: dict[int, int] = defaultdict(int)
    for matrix in record.matrices:
        zeros[matrix.block] += matrix.sparsity * math.prod(matrix.shape)
        weights[matrix.block] += math.prod(matrix.shape)
    percent = {block: 100 * count / weights[block] for block, count in zeros.items()}
    bars = [{"block": key, "value": value, "label": f"block {key}: {value:.2f} %"} for key, value in percent.items()]
    cells = zeros_of(record)
    ticks = [{**cell, "value": 100 * cell["value"]} for cell in cells]
    sparsities = [matrix.sparsity for matrix in record.matrices]
    why = "Bars are blocks, ticks the matrices in them: zeros are where the model misses them least."
    if max(sparsities) - min(sparsities) < 0.001:
        why = "All matrices have the same sparsity."
    exhibit = Exhibit([charts.shares(bars, ticks)], heat_table(cells, "{:.1%}".format), label="zeros by block")
    return Section("sparsity", "Zeros in each block", why, [exhibit])


def fits(material: Material) -> Section | None:
    """Errors of blocks before and after they were fitted, of a single model."""
    if material.record is None or not material.record.fits:
        return None
    points, rows = [], []
    for fit in material.record.fits:
        rows.append([str(fit.block), f"{fit.before:.4g}", f"{fit.after:.4g}", f"{fit.epochs:g}", f"{fit.seconds:.1f}"])
        for when, value in (("before", fit.before), ("after", fit.after)):
            if value > 0:
                label = f"block {fit.block} {when} fitting: error {value:.4g}"
                points.append({"block": fit.block, "when": when, "value": value, "label": label})
    table = Table.of(["block", "error before", "error after", "epochs", "seconds"], rows)
    figures = [charts.pairs(points, "relative error of outputs")] if points else []
    why = (
        "Squared error of each block's outputs on samples that were held out, in each place of the hidden states "
        "relative to the dense block's squared outputs there, before and after its remaining weights were fitted."
    )
    exhibit = Exhibit(figures, table, label="errors of blocks before and after fitting")
    return Section("fits", "Fitting blocks to the dense ones", why, [exhibit])


def healing(material: Material) -> Section | None:
    """The errors of a model while it was trained."""
    if material.record is None or not (record := material.record.healing) or not record.points:
        return None
    points, rows = [], []
    for i, point in enumerate(record.points):
        error = TableCell(f"{point.error:.4g}", best=i == record.best)
        loss = point.loss
        row = [TableCell(f"{point.tokens:,}"), TableCell(f"{point.seconds:.0f}"), error]
        rows.append(row if record.by_block else [*row, TableCell("-" if loss is None else f"{loss:.4g}")])
        for name, value in (("trained on", loss), ("held out", point.error)):
            if value is not None:
                label = f"{name}, after {point.tokens:,} tokens: {value:.4g} nats"
                points.append({"name": name, "x": point.tokens, "value": value, "label": label})
    figures = [charts.curves(points, "tokens", "nats a token")] if len(record.points) > 1 else []
    trained = "" if record.by_block else " and on text that was trained on since the point before"
    why = (
        f"The KL divergence of the dense model's predictions from this one's, on text that was held out{trained}. The "
        "result has the weights of the point with the lowest value on what was held out."
    )
    header = ["tokens", "seconds", "held out", *([] if record.by_block else ["trained on"])]
    exhibit = Exhibit(figures, Table(header, rows), label="KL while healing")
    return Section("healing", "Healing", why, [exhibit])


def time(material: Material) -> Section | None:
    """Seconds by stage: of a model, or of each method the mean over its runs."""
    by_method: dict[str, list[PrunedModel]] = defaultdict(list)
    for run in material.runs:
        if any(run.stages.values()):
            by_method[run.method].append(run)
    if not by_method:
        return None
    known = dict.fromkeys(name for run in material.runs for name, seconds in run.stages.items() if seconds > 0)
    stages = sorted(known, key=[*STAGES, *known].index)
    mean = {
        (method, stage): sum(run.stages.get(stage, 0.0) for run in runs) / len(runs)
        for method, runs in by_method.items()
        for stage in stages
    }
    compared = material.record is None
    drawn = []
    for (method, stage), seconds in mean.items():
        if seconds > 0:
            label = f"{method}, {stage}: {seconds:.2f} s" + (f" ({STAGES[stage]})" if stage in STAGES else "")
            place = {"name": method if compared else "", "part": stage, "order": stages.index(stage)}
            drawn.append({**place, "value": seconds, "label": label})
    if compared:
        rows = [[method, *(f"{mean[method, stage]:.2f}" for stage in stages)] for method in by_method]
        table = Table.of(["method", *stages], rows)
    else:
        rows = [[stage, f"{seconds:.2f}", STAGES.get(stage, "")] for (_, stage), seconds in mean.items()]
        table = Table.of(["stage", "seconds", "for"], rows)
    figure = charts.stacked(drawn, list(by_method) if compared else [""], stages, "seconds")
    exhibits = [Exhibit([figure], table, label="seconds by stage", words=not compared)]
    why = "Seconds of a run, the mean over patterns." if compared else "Seconds of the whole run by stage."
    if by_kind := solving(material):
        exhibits.append(by_kind)
        why = "Seconds of the whole run by stage, and of the solver by kind of matrix."
    return Section("time", "Where time went", why, exhibits)


def solving(material: Material) -> Exhibit | None:
    """The solver's seconds for a single model, by kind of matrix."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for matrix in material.record.matrices if material.record else []:
        seconds[kind(matrix.name)].append(matrix.seconds)
    if not any(map(any, seconds.values())):
        return None
    labels = labels_of(seconds)
    drawn, rows = [], []
    for name, each in seconds.items():
        label = f"{name}: {sum(each):.2f} s in {counted(len(each), 'matrix', 'matrices')}"
        drawn.append({"name": labels[name], "value": sum(each), "label": label})
        rows.append([name, str(len(each)), f"{sum(each):.2f}"])
    figure = charts.bars(drawn, list(labels.values()), "seconds of the solver")
    return Exhibit([figure], Table.of(["matrix", "number", "seconds"], rows), label="seconds of the solver")


def speed(material: Material) -> Section | None:
    """What ``niwaki bench`` measured, a column for each form of the model: there are few, and phones are narrow."""
    if material.speed is None:
        return None
    head, *rows = zip(*material.speed.table(), strict=True)
    forms = {form.weights for form in material.speed.speeds}
    why = "The model as transformers runs it, in a process of its own: "
    if "packed" in forms:
        why = "The pruned model with its zeros (dense) and without them (packed), each in a process of its own: "
    exhibit = Exhibit([], Table.of(head, rows), open=True)
    return Section("speed", "Speed and size", f"{why}{material.speed.conditions()}.", [exhibit])


def details(material: Material) -> list[dict[str, Any]]:
    """What the page says at the top about a single model, in little room, for each run that has a record."""
    return [] if material.record else [_detail(material, run, run.full) for run in material.runs if run.full]


def _detail(material: Material, run: PrunedModel, record: Record) -> dict[str, Any]:
    facts = [(f"perplexity, {short_text(text)}", value.figure) for text, value in run.perplexity.items()]
    facts.append(("error of the matrices, geometric mean", two_digits(run.error)))
    return {
        "name": run.name,
        "facts": [*facts, ("time", f"{run.seconds:.1f} s"), *facts_of(record)],
        "notes": notes_of(record),
        "error": heat_table(errors_of(material, record), two_digits),
        "sparsity": heat_table(zeros_of(record), "{:.1%}".format),
        "record": json.dumps(json.loads(record.to_json()), separators=(",", ":")),
        "file": f"{re.sub(r'[^a-z0-9]+', '-', run.name.lower()).strip('-')}.json",
    }


# The section of a report about perplexity against sparsity.


def frontier(material: Material) -> Section | None:
    """Perplexity against sparsity, for each text of a comparison; beside it patterns that are no percentages."""
    if isinstance(material.source, Record) or not material.texts:
        return None
    dashed = " The dashed line is the dense model." if material.dense else ""
    why = f"Lower is better. Bars are {SPREAD}.{dashed}"
    exhibits = []
    for text in material.texts:
        title = f"nats a token above the dense model, {short_text(text)}"
        exhibits += [
            _frontier_of(material, text, material.source.grid(text)),
            Exhibit([], material.source.gaps(text), title, open=True),
        ]
    after = (
        "In the tables of nats ± is the standard error of the difference to the dense model, window by window, and "
        "bold are all that are less than two such errors above the best."
    )
    return Section("frontier", "Perplexity against sparsity", why, exhibits, after=after)


def _frontier_of(material: Material, text: str, table: Table) -> Exhibit:
    runs = [run for run in material.runs if text in run.perplexity]
    plain, grouped = ([point_of(run, text) for run in runs if run.grouped is wanted] for wanted in (False, True))
    line = None
    if dense := material.dense.get(text):
        value = dense.figure.partition(" ±")[0]
        line = {**_interval(dense), "text": f"dense {value}", "label": f"dense: {dense.figure}"}
    both = bool(plain and grouped)
    draw = partial(charts.frontier, methods=material.methods, dense=line)
    figures = []
    if plain:
        figures.append(draw(plain, others=grouped, share=0.66 if both else 1.0))
    if grouped:
        figures.append(draw(grouped, others=plain, by_pattern=True, share=0.32 if both else 1.0))
    title = measured_on(text, runs[0].perplexity[text])
    return Exhibit(figures, table, title, "perplexity against sparsity", open=True)


def _interval(perplexity: Perplexity) -> charts.Row:
    value, error = perplexity.value, perplexity.standard_error
    if error is None:
        return {"value": value}
    # A logarithmic axis has no place for what an error above its value would make of it.
    return {"value": value, "low": max(value - error, value / 10), "high": value + error}


def point_of(run: PrunedModel, text: str) -> charts.Row:
    """The point of a run in the chart."""
    return {
        "method": run.method,
        "pattern": run.pattern,
        "sparsity": 100 * run.sparsity,
        **_interval(run.perplexity[text]),
        "label": f"{run.name}: {run.perplexity[text].figure}, {100 * run.sparsity:.2f} % zeros",
    }
