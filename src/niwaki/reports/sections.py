"""The sections of a report, a function each: what there is to see, charts, and their numbers as tables."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from importlib.resources import files
from typing import Any

from niwaki.records.record import Perplexity, Record
from niwaki.records.wording import counted, kind, number, short_text
from niwaki.reports import charts
from niwaki.reports.charts import STEPS
from niwaki.reports.head import SPREAD, structure_of
from niwaki.reports.material import Material, Run
from niwaki.reports.tables import Cell, Exhibit, Heat, Section, Table, labels_of, with_error

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
    "write": "writing",
    "perplexity": "measuring perplexity",
    "check": "reading back what was written",
}


def sections(material: Material, reference: bool = False) -> list[Section]:
    """All that there is something to show in; with published results if ``reference``."""
    made = [
        frontier(material),
        published(material) if reference else None,
        errors(material),
        allocation(material),
        fits(material),
        time(material),
        speed(material),
    ]
    return [section for section in made if section is not None]


# Perplexity against sparsity


def frontier(material: Material) -> Section | None:
    """Of a comparison, for each text perplexity against sparsity, beside it patterns that are no percentages."""
    if not material.compared or not material.texts:
        return None
    dashed = " The dashed line is the dense model." if material.dense else ""
    return Section(
        "frontier",
        "Perplexity against sparsity",
        f"Lower is better. Bars are {SPREAD}.{dashed}",
        [_frontier_of(material, text) for text in material.texts],
    )


def _frontier_of(material: Material, text: str) -> Exhibit:
    runs = [run for run in material.runs if text in run.perplexity]
    points = [point_of(run, run.perplexity[text]) for run in runs]
    dense = material.dense.get(text)
    line = None
    if dense is not None:
        label = f"dense: {with_error(dense)}"
        line = {**_interval(dense), "text": f"dense {number(dense.value)}", "label": label}
    grouped = [point for point, run in zip(points, runs, strict=True) if run.grouped]
    plain = [point for point, run in zip(points, runs, strict=True) if not run.grouped]
    shared: dict[str, Any] = {"dense": line, "span": charts.value_span([*points, *([line] if line else [])])}
    both = bool(plain and grouped)
    figures = []
    if plain:
        share = 0.66 if both else 1.0
        figures.append(charts.frontier(plain, material.methods, "perplexity", share=share, **shared))
    if grouped:
        share = 0.32 if both else 1.0
        figures.append(
            charts.frontier(
                grouped, material.methods, "perplexity", by="pattern", share=share, legend=not both, **shared
            )
        )
    measured = runs[0].perplexity[text]
    title = f"{measured.tokens:,} tokens of {short_text(text)}, context {measured.context:,}"
    return Exhibit(figures, _perplexities(material, text), title, "perplexity against sparsity", open=True)


def _perplexities(material: Material, text: str) -> Table:
    """A row for each method, a column for each pattern, the best marked."""
    values = {(run.method, run.pattern): run.perplexity[text] for run in material.runs if text in run.perplexity}
    rows = []
    if dense := material.dense.get(text):
        rows.append([Cell("dense"), Cell(with_error(dense)), *(Cell("") for _ in material.patterns[1:])])
    for method in material.methods:
        row = [Cell(method)]
        for pattern in material.patterns:
            column = [value.value for (_, other), value in values.items() if other == pattern]
            if (value := values.get((method, pattern))) is None:
                row.append(Cell(""))
            else:
                row.append(Cell(with_error(value), best=len(column) > 1 and value.value == min(column)))
        rows.append(row)
    return Table(["method", *material.patterns], rows)


def _interval(perplexity: Perplexity) -> charts.Row:
    value, error = perplexity.value, perplexity.standard_error
    if error is None:
        return {"value": value, "low": None, "high": None}
    # A logarithmic axis has no place for what an error above its value would make of it.
    return {"value": value, "low": max(value - error, value / 10), "high": value + error}


def point_of(run: Run, perplexity: Perplexity) -> charts.Row:
    """A point of a chart."""
    return {
        "method": run.method,
        "pattern": run.pattern,
        "sparsity": 100 * run.sparsity,
        "published": False,
        **_interval(perplexity),
        "label": f"{run.name}: {with_error(perplexity)}, {100 * run.sparsity:.2f} % zeros",
    }


# Published results


def published(material: Material) -> Section:
    """Published results next to these, a chart for each model and context that was published.

    Perplexities of other models, texts and contexts do not compare, so no published one is drawn into the chart of
    what was measured here. What is drawn is the ratio to the dense model's perplexity, which says how much of a
    model is lost, and one chart for each published model: models differ in how much they lose, too.
    """
    results = json.loads((files("niwaki.reports") / "published.json").read_text(encoding="utf-8"))
    own = ratios(material)
    # The same colours in all charts.
    methods = list(dict.fromkeys([*material.methods, *(item["method"] for item in results["series"])]))
    exhibits = []
    for model, context in dict.fromkeys((item["model"], item["context"]) for item in results["series"]):
        series = [item for item in results["series"] if (item["model"], item["context"]) == (model, context)]
        where = f"{model} on {series[0]['text']}, context {context:,}"
        sources = "; ".join(dict.fromkeys(results["sources"][item["source"]] for item in series))
        points, rows = [], []
        for item in series:
            for pattern, value in item["perplexity"].items():
                ratio = value / item["dense"]
                rows.append([item["method"], pattern, f"{value:g}", f"{item['dense']:g}", f"{ratio:.3g}"])
                if pattern.endswith("%"):
                    points.append(_published_point(item, where, pattern, value))
        figure = charts.frontier([*points, *own], methods, "perplexity / dense perplexity", share=0.48)
        table = Table.of(["method", "pattern", "perplexity", "dense", "ratio"], rows)
        title = f"{where} ({sources})"
        exhibits.append(Exhibit([figure], table, title, f"published, not measured: {title}"))
    here = "the runs above" if material.compared else "this model"
    return Section(
        "published",
        "Beside published results",
        "Hollow marks on dashed lines are published, not measured here"
        + (f"; filled marks are {here}" if own else "")
        + ". All are ratios to the dense model's own perplexity. Other models, texts and contexts lose differently, so "
        "filled and hollow marks compare only roughly; hollow ones of one chart are on the same terms.",
        exhibits,
        beside=True,
    )


def _published_point(item: dict[str, Any], where: str, pattern: str, value: float) -> charts.Row:
    ratio = value / item["dense"]
    return {
        "method": item["method"],
        "sparsity": float(pattern.rstrip(" %")),
        "value": ratio,
        "low": None,
        "high": None,
        "published": True,
        "label": f"published, not measured: {item['method']} at {pattern}, {where}: {value:g}, {ratio:.3g} times the "
        f"dense {item['dense']:g}",
    }


def ratios(material: Material) -> list[charts.Row]:
    """What was measured here on the first text, as a ratio to the dense model; none where no zeros were made."""
    text = material.texts[0] if material.texts else ""
    dense = material.dense.get(text)
    points: list[charts.Row] = []
    if dense is None:
        return points
    for run in material.runs:
        if text in run.perplexity and not run.grouped and not structure_of(run):
            point = point_of(run, run.perplexity[text])
            for key in ("value", "low", "high"):
                point[key] = None if point[key] is None else point[key] / dense.value
            point["label"] = f"measured: {point['label']}, {point['value']:.3g} times the dense {material.name}"
            points.append(point)
    return points


# Errors and sparsities of matrices


def errors(material: Material) -> Section | None:
    """Errors of blocks and matrices, of a comparison for each run of one pattern."""
    compared = material.compared
    pattern = heat_pattern(material)
    exhibits = []
    for run in material.runs:
        if run.full is None or not run.full.matrices or run.pattern != pattern:
            continue
        heat = errors_of(material, run.full, "error {:.4g}")
        drawn = [{**cell, "label": f"{run.method}, {cell['label']}"} for cell in heat.cells]
        figure = charts.heat_map(drawn, heat.rows, heat.blocks, 0.5 if compared else 1.0)
        label = f"error by block and matrix, {run.method}"
        # Those of a comparison are below, with each run.
        exhibits.append(Exhibit([figure], None if compared else heat.table(), run.method if compared else "", label))
    if not exhibits:
        return None
    at, same = (f"; at {pattern}", ", the same for all runs") if compared else ("", "")
    return Section(
        "errors",
        "Error of each matrix",
        f"Squared error of its outputs on the calibration text, relative to the squared outputs{at}. Colours are on a "
        f"logarithmic scale{same}.",
        exhibits,
        key=(f"{material.errors[0]:.3g}", f"{material.errors[1]:.3g}") if material.errors else None,
        beside=True,
        after="The numbers are below, with each run." if compared else "",
    )


def heat_pattern(material: Material) -> str:
    """The pattern whose heat maps are shown for all methods: the middle one of those most methods have."""
    counts = {
        pattern: sum(run.pattern == pattern and run.full is not None for run in material.runs)
        for pattern in material.patterns
    }
    most = [pattern for pattern, count in counts.items() if count == max(counts.values(), default=0) and count]
    return most[(len(most) - 1) // 2] if most else ""


def errors_of(material: Material, record: Record, form: str = "{:.4g}") -> Heat:
    """The errors of each block's matrices; colours are equal steps on a logarithmic scale, the same over the page."""

    def step(error: float) -> int:
        if material.errors is None or error <= 0 or material.errors[0] == material.errors[1]:
            return 0
        low, high = map(math.log, material.errors)
        return min(STEPS - 1, int(STEPS * (math.log(error) - low) / (high - low)))

    return Heat.of(record, lambda matrix: matrix.error, form, step)


def zeros_of(record: Record, form: str = "{:.2%}") -> Heat:
    """The sparsity of each block's matrices."""
    return Heat.of(record, lambda matrix: matrix.sparsity, form, lambda zeros: min(STEPS - 1, int(STEPS * zeros)))


def allocation(material: Material) -> Section | None:
    """Sparsity of blocks and matrices, of a single model with zeros."""
    record = material.record
    if record is None or not record.matrices or record.structure:
        return None
    weights: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for matrix in record.matrices:
        count = math.prod(matrix.shape)
        weights[matrix.block][0] += matrix.sparsity * count
        weights[matrix.block][1] += count
    percent = {block: 100 * zeros / count for block, (zeros, count) in weights.items()}
    blocks = [
        {"block": block, "value": value, "label": f"block {block}: {value:.2f} %"} for block, value in percent.items()
    ]
    heat = zeros_of(record, "{:.2%} zeros")
    ticks = [{"block": c["block"], "value": 100 * c["value"], "label": c["label"]} for c in heat.cells]
    sparsities = [matrix.sparsity for matrix in record.matrices]
    uniform = max(sparsities) - min(sparsities) < 0.001
    return Section(
        "sparsity",
        "Zeros in each block",
        "All matrices have the same sparsity."
        if uniform
        else "Bars are blocks, ticks the matrices in them: zeros are where the model misses them least.",
        [Exhibit([charts.shares(blocks, ticks)], heat.table("{:.1%}"), label="zeros by block")],
    )


def fits(material: Material) -> Section | None:
    """Errors of blocks before and after they were fitted, of a single model."""
    if material.record is None or not material.record.fits:
        return None
    points, rows = [], []
    for fit in material.record.fits:
        errors = {"before": fit.before, "after": fit.after}
        rows.append([str(fit.block), f"{fit.before:.4g}", f"{fit.after:.4g}", f"{fit.epochs:g}", f"{fit.seconds:.1f}"])
        for when, value in errors.items():
            if value > 0:
                label = f"block {fit.block} {when} fitting: error {value:.4g}"
                points.append({"block": fit.block, "when": when, "value": value, "label": label})
    table = Table.of(["block", "error before", "error after", "epochs", "seconds"], rows)
    figures = [charts.pairs(points, "relative error of outputs")] if points else []
    return Section(
        "fits",
        "Fitting blocks to the dense ones",
        "Squared error of each block's outputs on samples that were held out, relative to the dense block's squared "
        "outputs, before and after its remaining weights were fitted.",
        [Exhibit(figures, table, label="errors of blocks before and after fitting")],
    )


# Time


def time(material: Material) -> Section | None:
    """Seconds by stage: of a model, or of each method the mean over its runs."""
    by_method: dict[str, list[Run]] = defaultdict(list)
    for run in material.runs:
        if any(run.stages.values()):
            by_method[run.method].append(run)
    if not by_method:
        return None
    compared = material.compared
    known = dict.fromkeys(name for run in material.runs for name, seconds in run.stages.items() if seconds > 0)
    stages = [*(name for name in STAGES if name in known), *(name for name in known if name not in STAGES)]
    mean = {
        (method, stage): sum(run.stages.get(stage, 0.0) for run in runs) / len(runs)
        for method, runs in by_method.items()
        for stage in stages
    }
    drawn = [
        {
            "name": method if compared else "",
            "part": stage,
            "value": seconds,
            "order": stages.index(stage),
            "label": f"{method}, {stage}: {seconds:.2f} s" + (f" ({STAGES[stage]})" if stage in STAGES else ""),
        }
        for (method, stage), seconds in mean.items()
        if seconds > 0
    ]
    if compared:
        rows = [[method, *(f"{mean[method, stage]:.2f}" for stage in stages)] for method in by_method]
        table = Table.of(["method", *stages], rows)
    else:
        (method,) = by_method
        rows = [[stage, f"{mean[method, stage]:.2f}", STAGES.get(stage, "")] for stage in stages]
        table = Table.of(["stage", "seconds", "for"], rows)
    figure = charts.stacked(drawn, list(by_method) if compared else [""], stages, "seconds")
    by_kind = solving(material)
    of_solver = ", and of the solver by kind of matrix" if by_kind else ""
    why = "Seconds of a run, the mean over patterns." if compared else f"Seconds of the whole run by stage{of_solver}."
    whole = Exhibit([figure], table, label="seconds by stage", words=not compared)
    return Section("time", "Where time went", why, [whole, *([by_kind] if by_kind else [])])


def solving(material: Material) -> Exhibit | None:
    """Of a single model the solver's seconds by kind of matrix."""
    if material.record is None:
        return None
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for matrix in material.record.matrices:
        seconds[kind(matrix.name)] += matrix.seconds
        counts[kind(matrix.name)] += 1
    if not any(seconds.values()):
        return None
    labels = labels_of(seconds)
    drawn, rows = [], []
    for name, value in seconds.items():
        label = f"{name}: {value:.2f} s in {counted(counts[name], 'matrix', 'matrices')}"
        drawn.append({"name": labels[name], "value": value, "label": label})
        rows.append([name, str(counts[name]), f"{value:.2f}"])
    figure = charts.bars(drawn, list(labels.values()), "seconds of the solver")
    return Exhibit([figure], Table.of(["matrix", "number", "seconds"], rows), label="seconds of the solver")


def speed(material: Material) -> Section | None:
    """What ``niwaki bench`` measured, a column for each form of the model: there are few, and phones are narrow."""
    if material.speed is None:
        return None
    head, *rows = zip(*material.speed.table(), strict=True)
    return Section(
        "speed",
        "Speed and size",
        "The pruned model with its zeros (dense) and without them (packed), each in a process of its own: "
        f"{material.speed.conditions()}.",
        [Exhibit([], Table.of(head, rows), open=True)],
    )
