"""The section of a report about perplexity against sparsity."""

from functools import partial

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
    draw = partial(charts.frontier, methods=material.methods, dense=line)
    figures = []
    if plain:
        figures.append(draw(plain, others=grouped, share=0.66 if both else 1.0))
    if grouped:
        figures.append(draw(grouped, others=plain, by_pattern=True, share=0.32 if both else 1.0))
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
        **_interval(run.perplexity[text]),
        "label": f"{run.name}: {with_error(run.perplexity[text])}, {100 * run.sparsity:.2f} % zeros",
    }
