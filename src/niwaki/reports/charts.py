"""The report's charts, as SVG text; nothing here knows of records.

They are drawn when the report is made and not in the browser: so the page needs no library of 1 to 5 MB, prints as it
looks, and has charts where scripts are off. Colours are CSS variables, so that charts turn dark with the page. What a
reader sees by pointing at a mark is its ``aria-label``, as in screen readers. Each chart is drawn twice, for wide and
for narrow windows: on a phone, text that shrinks with its picture cannot be read.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec

import altair as alt
import vl_convert

from niwaki.records.perplexity import Perplexity
from niwaki.records.record import MatrixRecord, Record
from niwaki.records.wording import Table, TableCell, kind, printable, short, short_text

#: Of methods and stages: that many CSS variables ``--c0`` ... are in report.css.
COLOURS = 10
#: Steps of the heat map's colours, ``--h0`` ...
STEPS = 9
_SHAPES = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-right", "triangle-left"]
_WIDE, _NARROW = 800, 340  # pixels, with everything around the axes
#: Text is measured at this size and shown at 12 pixels: the reader's font may be wider than the one measured.
_TEXT = 14
#: About how wide a character of it is.
_CHARACTER = 8

Row = dict[str, Any]
P = ParamSpec("P")


class Figure(NamedTuple):
    """A chart as SVG: for wide windows and paper, and for phones."""

    wide: str
    narrow: str


def _drawn_twice(draw: Callable[Concatenate[int, P], Any]) -> Callable[P, Figure]:
    """Makes a function of a width in pixels, and more, that returns a chart, one of the rest that returns both."""

    @functools.wraps(draw)
    def figure(*args: P.args, **kwargs: P.kwargs) -> Figure:
        return Figure(*(_svg(draw(width, *args, **kwargs)) for width in (_WIDE, _NARROW)))

    return figure


def colour(index: int) -> str:
    """The colour of the method or stage with this number."""
    return f"var(--c{index % COLOURS})"


@_drawn_twice
def frontier(
    width: int,
    points: Sequence[Row],
    methods: Sequence[str],
    *,
    by_pattern: bool = False,
    dense: Row | None = None,
    share: float = 1.0,
    others: Sequence[Row] = (),
) -> Any:
    """Perplexity against sparsity, a line for each method; ``by_pattern``, methods beside each other at each pattern.

    Rows of ``points`` have "method", "sparsity" in percent or "pattern", "value", where it has an error "low" and
    "high", and "label"; ``dense`` has a "text", and no method. A colour is the place in ``methods``, ``share`` is of
    the width of a wide window, and the axis has room for ``others`` too.
    """
    width = int(width * share) if width == _WIDE else width
    shown = {method: i for i, method in enumerate(methods) if any(point["method"] == method for point in points)}
    names = list(shown)
    colours = alt.Scale(domain=names, range=[colour(i) for i in shown.values()])
    shapes = alt.Scale(domain=names, range=[_SHAPES[i % len(_SHAPES)] for i in shown.values()])
    scale, axis = _value_axis([*points, *others, *([dense] if dense else [])])
    key = _legend(width - 60, names)  # each is a file of its own too
    layers = _dense_layers(dense, scale) if dense else []
    base = _chart(points).encode(
        y=alt.Y("value:Q", title="perplexity", scale=scale, axis=axis),
        color=alt.Color("method:N", scale=colours, sort=names, legend=key),
        **(_by_pattern(points, names, width) if by_pattern else _by_sparsity(points)),
    )
    if not by_pattern:
        layers.append(base.mark_line(strokeWidth=1.6, opacity=0.75, aria=False))
    bars = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=1.6, aria=False)
    layers.append(bars.encode(y=alt.Y("low:Q", scale=scale), y2="high:Q"))
    shape = alt.Shape("method:N", scale=shapes, sort=names, legend=key)
    marks = base.mark_point(filled=True, size=60, opacity=1)
    layers.append(marks.encode(shape=shape, description="label:N"))
    return alt.layer(*layers).properties(width=width, height=320 if len(points) > 1 else 200)


def _by_sparsity(points: Sequence[Row]) -> Row:
    low, high = min(point["sparsity"] for point in points), max(point["sparsity"] for point in points)
    margin = 3 if high - low >= 5 else 5
    domain = [max(low - margin, 0), min(high + margin, 100)]
    scale = alt.Scale(domain=domain, nice=False)
    return {"x": alt.X("sparsity:Q", title="zeros, %", scale=scale, axis=alt.Axis(grid=False, tickCount=6))}


def _by_pattern(points: Sequence[Row], methods: Sequence[str], width: int) -> Row:
    names = list(dict.fromkeys(point["pattern"] for point in points))
    fit = _CHARACTER * max(map(len, names)) < (width - 60) / len(names)
    x = alt.X("pattern:N", title=None, sort=names, axis=alt.Axis(labelAngle=0 if fit else -45, grid=False))
    return {"x": x, "xOffset": alt.XOffset("method:N", sort=methods)}


def _value_axis(points: Sequence[Row]) -> tuple[alt.Scale, alt.Axis]:
    low, high = _span(points)
    log = high / low > 2  # within that a logarithmic axis has hardly a number on it
    margin = 0.05 * (high - low)
    domain = [low / 1.05, high * 1.05] if log else [low - margin, high + margin]
    scale = alt.Scale(type="log" if log else "linear", domain=domain, nice=False, zero=False, clamp=True)
    return scale, alt.Axis(values=_ticks(*domain), format=",~g") if log else alt.Axis(tickCount=6)


def _dense_layers(dense: Row, scale: alt.Scale) -> list[Any]:
    """A dashed line with its standard error, and what it is."""
    base, value = _chart([dense]), alt.Y("value:Q", scale=scale)
    layers = []
    if "low" in dense:
        band = base.mark_rect(color="var(--soft)", opacity=0.14, aria=False)
        layers.append(band.encode(y=alt.Y("low:Q", scale=scale), y2="high:Q"))
    rule = base.mark_rule(color="var(--soft)", strokeDash=[5, 4], strokeWidth=1.5)
    layers.append(rule.encode(y=value, description="label:N"))
    words = base.mark_text(align="right", dx=-4, dy=-8, color="var(--soft)", aria=False)
    return [*layers, words.encode(x=alt.value("width"), y=value, text="text:N")]


@_drawn_twice
def heat_map(width: int, cells: Sequence[Row], share: float = 1.0) -> Any:
    """A rectangle for each of ``cells``: "block", "row" (its kind), "step" (of ``STEPS`` colours) and "label"."""
    wide = width == _WIDE
    rows, blocks = rows_and_blocks(cells)
    ramp = alt.Scale(domain=list(range(STEPS)), range=[f"var(--h{step})" for step in range(STEPS)])
    place = {"labelAngle": 0} if wide else {"labelAngle": -45, "orient": "top"}
    numbers = alt.Axis(labelAngle=0, labelOverlap=True, ticks=False, domain=False)
    kinds = alt.Axis(labelLimit=220, ticks=False, domain=False, **place)
    block: Row = {"shorthand": "block:O", "title": "block", "sort": blocks, "axis": numbers}
    row: Row = {"shorthand": "row:N", "title": None, "sort": rows, "axis": kinds}
    across, down = (block, row) if wide else (row, block)
    height = 30 * len(rows) if wide else max(12, min(30, 600 // len(blocks))) * len(blocks)
    return (
        _chart(cells, width=int(width * share) if wide else width, height=height)
        .mark_rect(stroke="var(--card)", strokeWidth=1 if len(blocks) < 60 else 0.4, cornerRadius=2)
        .encode(alt.X(**across), alt.Y(**down), alt.Color("step:O", scale=ramp, legend=None), description="label:N")
    )


def rows_and_blocks(cells: Sequence[Row]) -> tuple[list[str], list[int]]:
    """The axes of a heat map: kinds of matrices, from the top, and blocks."""
    return list(dict.fromkeys(cell["row"] for cell in cells)), sorted({cell["block"] for cell in cells})


@_drawn_twice
def stacked(width: int, bars: Sequence[Row], names: Sequence[str], parts: Sequence[str], x: str) -> Any:
    """Horizontal bars of several parts: each row of ``bars`` has "name", "part", "value", "order" and "label"."""
    colours = alt.Scale(domain=list(parts), range=[colour(i) for i in range(len(parts))])
    part = alt.Color("part:N", scale=colours, sort=list(parts), legend=_legend(width - 140, parts))
    chart = _horizontal(bars, names, x, width, max(40, 30 * len(names)))
    return chart.mark_bar(stroke="var(--card)", strokeWidth=0.5).encode(color=part, order="order:Q")


@_drawn_twice
def bars(width: int, values: Sequence[Row], names: Sequence[str], x: str) -> Any:
    """Horizontal bars: each row of ``values`` has "name", "value" and "label"."""
    chart = _horizontal(values, names, x, width, 24 * len(names))
    return chart.mark_bar(color=colour(0), cornerRadiusEnd=2)


@_drawn_twice
def waterfall(width: int, steps: Sequence[Row], names: Sequence[str], x: str) -> Any:
    """Horizontal bars, each of which begins where the one before it ended: rows of "name", "from", "value", "label".

    What lowers the sum has another colour.
    """
    chart = _horizontal(steps, names, x, width, 24 * len(names))
    falls = alt.condition("datum.value < datum.from", alt.value("var(--h3)"), alt.value(colour(0)))
    return chart.mark_bar(cornerRadius=2).encode(x2="from:Q", color=falls)


def _horizontal(rows: Sequence[Row], names: Sequence[str], x: str, width: int, height: int) -> Any:
    """Values with their names beside them, shorter on phones; no name for a bar that is alone."""
    axis = alt.Axis(labelLimit=220 if width == _WIDE else 130, ticks=False)
    if not any(names):
        axis = alt.Axis(labels=False, ticks=False, domain=False)
    return _chart(rows, width=width, height=height).encode(
        alt.X("value:Q", title=x, axis=alt.Axis(tickCount=5)),
        alt.Y("name:N", title=None, sort=list(names), axis=axis),
        description="label:N",
    )


@_drawn_twice
def shares(width: int, blocks: Sequence[Row], matrices: Sequence[Row]) -> Any:
    """Sparsity: a bar for each block and in it a tick for each matrix; rows have "block", "value" (%), "label"."""
    order = sorted({row["block"] for row in [*blocks, *matrices]})
    place = (_blocks(order), alt.Y("value:Q", title="zeros, %", scale=alt.Scale(domain=[0, 100])))
    columns = _chart(blocks).mark_bar(color="var(--h3)")
    # The band is as wide as a bar; a tick that is wider than it would be in two blocks.
    length = max(2, min(64, int(0.7 * (width - 60) / len(order))))
    ticks = _chart(matrices).mark_tick(color="var(--ink)", thickness=1.5, opacity=0.75, size=length)
    layers = alt.layer(*(marks.encode(*place, description="label:N") for marks in (columns, ticks)))
    return layers.properties(width=width, height=220)


@_drawn_twice
def pairs(width: int, rows: Sequence[Row], y: str) -> Any:
    """For each block a value before and one after: rows have "block", "when", "value" and "label"."""
    order = sorted({row["block"] for row in rows})
    whens = list(dict.fromkeys(row["when"] for row in rows))
    low, high = _span(rows)
    domain = [low / 1.2, high * 1.2]
    scale = alt.Scale(type="log", domain=domain, nice=False)
    axis = alt.Axis(values=_ticks(*domain), format="~g")
    fill = alt.Scale(domain=whens, range=["var(--card)", colour(0)])
    base = _chart(rows).encode(_blocks(order), alt.Y("value:Q", title=y, scale=scale, axis=axis))
    line = base.mark_line(color="var(--soft)", strokeWidth=1.5, aria=False).encode(detail="block:O")
    dots = base.mark_point(size=70, stroke=colour(0), strokeWidth=2, opacity=1).encode(
        fill=alt.Fill("when:N", scale=fill, sort=whens, legend=_legend(width, whens)), description="label:N"
    )
    return (line + dots).properties(width=width, height=240)


@_drawn_twice
def curves(width: int, rows: Sequence[Row], x: str, y: str) -> Any:
    """A line for each "name" of rows with "x", "value" and "label"; the last of these names in the front."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    low, high = _span(rows)
    scale = alt.Scale(domain=[low - 0.05 * (high - low), high + 0.05 * (high - low)], nice=False, zero=False)
    colours = alt.Scale(domain=names, range=[colour(index) for index in range(len(names))])
    base = _chart(rows).encode(
        alt.X("x:Q", title=x, axis=alt.Axis(format="~s", labelOverlap=True, grid=False)),
        alt.Y("value:Q", title=y, scale=scale),
        alt.Color("name:N", scale=colours, sort=names, legend=_legend(width, names)),
    )
    dots = base.mark_point(size=40, filled=True, opacity=1).encode(description="label:N")
    return (base.mark_line(strokeWidth=2, aria=False) + dots).properties(width=width, height=240)


def _blocks(order: list[int]) -> alt.X:
    return alt.X("block:O", title="block", sort=order, axis=alt.Axis(labelAngle=0, labelOverlap=True, grid=False))


def _span(points: Sequence[Row]) -> tuple[float, float]:
    """The least and the greatest value, with standard errors."""
    values = [point[key] for point in points for key in ("value", "low", "high") if key in point]
    low, high = min(values), max(values)
    return (low, high) if high > low else (0.9 * low, 1.1 * high)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers of a logarithmic axis, few enough for all to have a label."""
    steps = (1, 1.5, 2, 3, 4, 5, 6, 8) if high / low < 20 else (1, 2, 5) if high / low < 300 else (1, 3)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    powers = powers[:: max(1, len(powers) // 8)]  # not all of hundreds of powers of ten
    return [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]


def _legend(width: float, names: Sequence[str]) -> alt.Legend:
    columns = max(1, int(width // (_CHARACTER * min(max(map(len, names), default=0), 20) + 44)))
    style: Row = {"labelLimit": 170, "symbolSize": 80, "symbolStrokeWidth": 1.5, "symbolOpacity": 1}
    return alt.Legend(title=None, orient="bottom", columns=columns, **style)


def _chart(rows: Sequence[Row], **size: Any) -> alt.Chart:
    return alt.Chart(alt.Data(values=list(rows)), **size)


def _svg(chart: Any) -> str:
    ink, soft, line = "var(--ink)", "var(--soft)", "var(--line)"
    fit = alt.AutoSizeParams(type="fit-x", contains="padding")
    axis = {"labelColor": ink, "labelFontSize": _TEXT, "labelFlush": False}
    axis |= {"titleColor": soft, "titleFontSize": _TEXT, "titleFontWeight": "normal"}
    axis |= {"domainColor": line, "tickColor": line, "gridColor": line}
    chart = (
        chart.configure(background="transparent", font="sans-serif", padding=2, autosize=fit)
        .configure_view(stroke=None)
        .configure_axis(**axis)
        .configure_legend(labelColor=ink, labelFontSize=_TEXT, columnPadding=16)
    )
    # The version that altair knows; vl-convert has several.
    version = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    svg: str = vl_convert.vegalite_to_svg(_shown(chart.to_dict()), vl_version=version)
    return svg


def _shown(value: Any) -> Any:
    """``value`` with control codes shown in all of its text: a picture has none, and the drawing ends the process."""
    if isinstance(value, dict):
        return {key: _shown(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shown(each) for each in value]
    return printable(value) if isinstance(value, str) else value


# What sections of a report are made of: charts, and tables with their numbers.

#: How a number is written.
Form = Callable[[float], str]


class Exhibit(NamedTuple):
    """A part of a section: charts, and the same numbers as a table."""

    figures: list[Figure]  # from left to right
    table: Table | None  # None where the numbers are elsewhere on the page
    title: str = ""  # a heading of its own
    label: str = ""  # what the charts show, for screen readers
    open: bool = False  # whether the table is shown at once, and not on a click
    words: bool = False  # whether its last column is of words


class Section(NamedTuple):
    """A section of the page."""

    id: str  # its anchor
    heading: str
    why: str  # what there is to see
    exhibits: list[Exhibit]
    key: tuple[str, str] | None = None  # the least and the greatest value that colours stand for
    beside: bool = False  # whether exhibits stand next to each other where the window is wide
    after: str = ""  # a last line


def measured_on(text: str, perplexity: Perplexity) -> str:
    """``"7,161 tokens of wikitext2, context 1,024"``."""
    return f"{perplexity.tokens:,} tokens of {short_text(text)}, context {perplexity.context:,}"


def labels_of(names: Iterable[str]) -> dict[str, str]:
    """Kinds of matrices by the last part of their name, where that tells them apart."""
    last = {name: short(name) for name in names}
    ends = list(last.values())
    return {name: end if ends.count(end) == 1 else name for name, end in last.items()}


def heat_of(
    record: Record, value: Callable[[MatrixRecord], float], form: Form, step: Callable[[float], int]
) -> list[Row]:
    """The ``value`` of each block and kind of matrix, of experts the mean, as ``form`` writes it, in a colour."""
    groups: dict[tuple[int, str], list[float]] = defaultdict(list)
    for matrix in record.matrices:
        groups[matrix.block, kind(matrix.name)].append(value(matrix))
    labels = labels_of(name for _, name in groups)
    cells = []
    for (block, name), values in groups.items():
        mean = sum(values) / len(values)
        label = f"block {block} {name}: {form(mean)}"
        if len(values) > 1:
            low, high = form(min(values)), form(max(values))
            label = f"{label}, the mean of {len(values)} ({low} to {high})"
        cells.append({"block": block, "row": labels[name], "value": mean, "step": step(mean), "label": label})
    return cells


def heat_table(cells: Sequence[Row], form: Form) -> Table:
    """The numbers of a heat map, a row for each block."""
    kinds, blocks = rows_and_blocks(cells)
    shown = {(cell["block"], cell["row"]): TableCell(form(cell["value"]), step=cell["step"]) for cell in cells}
    rows = [[TableCell(str(block)), *(shown.get((block, kind), TableCell("")) for kind in kinds)] for block in blocks]
    return Table(["block", *kinds], rows)
