"""The sections of a report about perplexities: against sparsity, and beside published results."""

import json
from collections import defaultdict
from functools import partial
from importlib.resources import files
from typing import Any

from niwaki.records.comparison import Comparison
from niwaki.records.perplexity import Perplexity
from niwaki.records.record import Record
from niwaki.records.wording import number, short_text
from niwaki.reports import charts
from niwaki.reports.head import SPREAD
from niwaki.reports.material import Material, Run
from niwaki.reports.tables import Cell, Exhibit, Section, Table, measured_on, with_error


def frontier(material: Material) -> Section | None:
    """Of a comparison, for each text perplexity against sparsity, beside it patterns that are no percentages."""
    if isinstance(material.source, Record) or not material.texts:
        return None
    dashed = " The dashed line is the dense model." if material.dense else ""
    why = f"Lower is better. Bars are {SPREAD}.{dashed}"
    exhibits = [
        each for text in material.texts for each in (_frontier_of(material, text), _gaps(material.source, text))
    ]
    after = (
        "In the tables of nats ± is the standard error of the difference to the dense model, window by window, and "
        "bold are all that are less than two such errors above the best."
    )
    return Section("frontier", "Perplexity against sparsity", why, exhibits, after=after)


def _gaps(comparison: Comparison, text: str) -> Exhibit:
    header, entries = comparison.gaps(text)
    rows = [[Cell(entry.text, best=entry.best) for entry in row] for row in entries]
    return Exhibit([], Table(header, rows), f"nats a token above the dense model, {short_text(text)}", open=True)


def _frontier_of(material: Material, text: str) -> Exhibit:
    runs = [run for run in material.runs if text in run.perplexity]
    plain, grouped = ([point_of(run, text) for run in runs if run.grouped is wanted] for wanted in (False, True))
    line = None
    if dense := material.dense.get(text):
        line = {**_interval(dense), "text": f"dense {number(dense.value)}", "label": f"dense: {with_error(dense)}"}
    both = bool(plain and grouped)
    draw = partial(charts.frontier, methods=material.methods, y="perplexity", dense=line)
    figures = []
    if plain:
        figures.append(draw(plain, others=grouped, share=0.66 if both else 1.0))
    if grouped:
        figures.append(draw(grouped, others=plain, by_pattern=True, share=0.32 if both else 1.0, legend=not both))
    title = measured_on(text, runs[0].perplexity[text])
    return Exhibit(figures, _perplexities(material, text), title, "perplexity against sparsity", open=True)


def _perplexities(material: Material, text: str) -> Table:
    """A row for each method, a column for each pattern, the best marked."""
    columns: dict[str, dict[str, Perplexity]] = {pattern: {} for pattern in material.patterns}
    for run in material.runs:
        if text in run.perplexity:
            columns[run.pattern][run.method] = run.perplexity[text]
    best = {name: min(one.value for one in column.values()) for name, column in columns.items() if len(column) > 1}
    rows = []
    if dense := material.dense.get(text):
        rows.append([Cell("dense"), Cell(with_error(dense)), *[Cell("")] * (len(columns) - 1)])
    for method in material.methods:
        row = ((column.get(method), best.get(pattern)) for pattern, column in columns.items())
        cells = (Cell(with_error(one), best=one.value == least) if one else Cell("") for one, least in row)
        rows.append([Cell(method), *cells])
    return Table(["method", *columns], rows)


def _interval(perplexity: Perplexity) -> charts.Row:
    value, error = perplexity.value, perplexity.standard_error
    if error is None:
        return {"value": value}
    # A logarithmic axis has no place for what an error above its value would make of it.
    return {"value": value, "low": max(value - error, value / 10), "high": value + error}


def point_of(run: Run, text: str) -> charts.Row:
    """A point of a chart."""
    return {
        "method": run.method,
        "pattern": run.pattern,
        "sparsity": 100 * run.sparsity,
        "published": False,
        **_interval(run.perplexity[text]),
        "label": f"{run.name}: {with_error(run.perplexity[text])}, {100 * run.sparsity:.2f} % zeros",
    }


def published(material: Material) -> Section:
    """Published results next to these, a chart for each model and context that was published.

    Perplexities of other models, texts and contexts do not compare, so all are ratios to that of the dense model.
    """
    results = json.loads((files("niwaki.reports") / "published.json").read_text(encoding="utf-8"))
    own = ratios(material)
    # The same colours in all charts.
    methods = list(dict.fromkeys([*material.methods, *(item["method"] for item in results["series"])]))
    by_model: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for item in results["series"]:
        by_model[f"{item['model']} on {item['text']}, context {item['context']:,}"].append(item)
    exhibits = []
    for where, series in by_model.items():
        points, rows = [], []
        for item in series:
            method, dense = item["method"], item["dense"]
            for pattern, value in item["perplexity"].items():
                ratio = value / dense
                rows.append([method, pattern, f"{value:g}", f"{dense:g}", f"{ratio:.3g}"])
                if pattern.endswith(" %"):
                    times = f"{value:g}, {ratio:.3g} times the dense {dense:g}"
                    label = f"published, not measured: {method} at {pattern}, {where}: {times}"
                    point = {"sparsity": float(pattern.removesuffix(" %")), "value": ratio, "label": label}
                    points.append({**point, "method": method, "published": True})
        figure = charts.frontier([*points, *own], methods, "perplexity / dense perplexity", share=0.48)
        table = Table.of(["method", "pattern", "perplexity", "dense", "ratio"], rows)
        title = f"{where} ({'; '.join(dict.fromkeys(results['sources'][item['source']] for item in series))})"
        exhibits.append(Exhibit([figure], table, title, f"published, not measured: {title}"))
    filled = f"; filled marks are {'this model' if material.record else 'the runs above'}" if own else ""
    why = (
        f"Hollow marks on dashed lines are published, not measured here{filled}. All are ratios to the dense model's "
        "own perplexity. Other models, texts and contexts lose differently, so filled and hollow marks compare only "
        "roughly; hollow ones of one chart are on the same terms."
    )
    return Section("published", "Beside published results", why, exhibits, beside=True)


def ratios(material: Material) -> list[charts.Row]:
    """What was measured here on the first text, as a ratio to the dense model; none where no zeros were made."""
    text = material.texts[0] if material.texts else ""
    dense = material.dense.get(text)
    if dense is None or (material.record and material.record.structure):
        return []
    points = [point_of(run, text) for run in material.runs if text in run.perplexity and not run.grouped]
    for point in points:
        point |= {key: point[key] / dense.value for key in ("value", "low", "high") if key in point}
        point["label"] = f"measured: {point['label']}, {point['value']:.3g} times the dense {material.name}"
    return points
