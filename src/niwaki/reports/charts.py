"""The report's charts, as SVG text; nothing here knows of records.

They are drawn when the report is made and not in the browser: the page needs no library then (which would be
1 to 5 MB in each report), prints as it looks, and shows its charts where scripts are off. Colours are names of the
page's CSS variables, so that charts turn dark with it. What a reader gets to see of a mark by pointing at it is its
``aria-label``, which is also what screen readers say.

Each chart is drawn twice, for wide and for narrow windows: on a phone, text that shrinks with its picture cannot be
read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import vl_convert

#: Of methods and stages: that many CSS variables ``--c0`` ... are in report.css.
COLOURS = 10
#: Steps of the heat map's colours, ``--h0`` ...
STEPS = 9
_SHAPES = (
    "circle",
    "square",
    "triangle-up",
    "diamond",
    "triangle-down",
    "cross",
    "triangle-right",
    "triangle-left",
)
_WIDE, _NARROW = 800, 340  # pixels, with everything around the axes
#: Text is measured at this size and shown at 12 pixels: the reader's font may be wider than the one measured.
_TEXT = 14

Row = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """A chart.

    Attributes:
        wide: SVG for wide windows and paper.
        narrow: SVG for phones.
    """

    wide: str
    narrow: str


def colour(index: int) -> str:
    """The colour of the method or stage with this number."""
    return f"var(--c{index % COLOURS})"


def frontier(
    points: Sequence[Row],
    methods: Sequence[str],
    y: str,
    *,
    dense: Row | None = None,
    share: float = 1.0,
    legend: bool = True,
    span: tuple[float, float] | None = None,
) -> Figure:
    """``y`` against sparsity, a line for each method.

    Args:
        points: Each with "method", "sparsity" in percent, "value", "low" and "high" (or None), "label", and
            "published" where it is not measured here.
        methods: All that have a colour, in their order.
        y: The title of the axis.
        dense: "value", "low" and "high" (or None) and "label" of the dense model.
        share: Of the width of a wide window.
        legend: Whether the chart says which method is which.
        span: The range of the axis, if it is to be that of another chart.
    """
    xs = sorted({point["sparsity"] for point in points})
    low, high = (min(xs) - 3, max(xs) + 3) if xs[-1] - xs[0] >= 5 else (0, 100)
    x = alt.X(
        "sparsity:Q",
        title="zeros, %",
        scale=alt.Scale(domain=[low, min(high, 100)], nice=False),
        axis=alt.Axis(grid=False, tickCount=6),
    )
    return _curves(points, methods, x, y, dense, share, legend, span, lines=True)


def groups(
    points: Sequence[Row],
    methods: Sequence[str],
    y: str,
    *,
    dense: Row | None = None,
    share: float = 1.0,
    legend: bool = True,
    span: tuple[float, float] | None = None,
) -> Figure:
    """``y`` for patterns that are no percentages ("pattern" of each point), beside each other; see ``frontier``."""
    names = list(dict.fromkeys(point["pattern"] for point in points))
    x = alt.X("pattern:N", title=None, sort=names, axis=alt.Axis(labelAngle=0, grid=False))
    return _curves(points, methods, x, y, dense, share, legend, span, lines=False)


def heat_map(cells: Sequence[Row], rows: Sequence[str], blocks: Sequence[int], share: float = 1.0) -> Figure:
    """A rectangle for each kind of matrix and block.

    Args:
        cells: Each with "block", "row", "step" (a colour from 0 to ``STEPS`` - 1) and "label".
        rows: The kinds of matrices, from the top.
        blocks: Numbers of the blocks.
        share: Of the width of a wide window.
    """

    def draw(width: int) -> Any:
        wide = width == _WIDE
        block: Row = {"title": "block", "sort": list(blocks)}
        row: Row = {"title": None, "sort": list(rows)}
        overlap = alt.Axis(labelAngle=0, labelOverlap=True, ticks=False, domain=False)
        plain = alt.Axis(labelLimit=220, ticks=False, domain=False, labelAngle=0 if wide else -45)
        if not wide:
            plain.orient = "top"
        x = alt.X("block:O", axis=overlap, **block) if wide else alt.X("row:N", axis=plain, **row)
        y = alt.Y("row:N", axis=plain, **row) if wide else alt.Y("block:O", axis=overlap, **block)
        across, down = (len(rows), 30) if wide else (len(blocks), max(12, min(30, 600 // len(blocks))))
        return (
            alt.Chart(
                alt.Data(values=list(cells)),
                width=int(width * share) if wide else width,
                height=down * across,
            )
            .mark_rect(stroke="var(--card)", strokeWidth=1 if len(blocks) < 60 else 0.4, cornerRadius=2)
            .encode(x, y, alt.Color("step:O", scale=_ramp(), legend=None), description="label:N")
        )

    return _figure(draw)


def stacked(bars: Sequence[Row], names: Sequence[str], parts: Sequence[str], x: str) -> Figure:
    """Horizontal bars of several parts: each row of ``bars`` has "name", "part", "value", "order" and "label"."""

    def draw(width: int) -> Any:
        colours = alt.Scale(domain=list(parts), range=[colour(i) for i in range(len(parts))])
        return (
            alt.Chart(alt.Data(values=list(bars)), width=width, height=max(40, 30 * len(names)))
            .mark_bar(stroke="var(--card)", strokeWidth=0.5)
            .encode(
                alt.X("value:Q", title=x, axis=alt.Axis(tickCount=5)),
                alt.Y("name:N", title=None, sort=list(names), axis=_names(width, names)),
                alt.Color("part:N", scale=colours, sort=list(parts), legend=_legend(width - 140, parts)),
                order="order:Q",
                description="label:N",
            )
        )

    return _figure(draw)


def bars(values: Sequence[Row], names: Sequence[str], x: str) -> Figure:
    """Horizontal bars: each row of ``values`` has "name", "value" and "label"."""

    def draw(width: int) -> Any:
        return (
            alt.Chart(alt.Data(values=list(values)), width=width, height=24 * len(names))
            .mark_bar(color=colour(0), cornerRadiusEnd=2)
            .encode(
                alt.X("value:Q", title=x, axis=alt.Axis(tickCount=5)),
                alt.Y("name:N", title=None, sort=list(names), axis=_names(width, names)),
                description="label:N",
            )
        )

    return _figure(draw)


def shares(blocks: Sequence[Row], matrices: Sequence[Row]) -> Figure:
    """Sparsity: a bar for each block and in it a tick for each matrix; rows have "block", "value" (%), "label"."""
    order = sorted({row["block"] for row in [*blocks, *matrices]})
    overlap = alt.Axis(labelAngle=0, labelOverlap=True, grid=False)

    def draw(width: int) -> Any:
        x = alt.X("block:O", title="block", sort=order, axis=overlap)
        y = alt.Y("value:Q", title="zeros, %", scale=alt.Scale(domain=[0, 100]))
        columns = alt.Chart(alt.Data(values=list(blocks))).mark_bar(color="var(--h3)")
        # The band is as wide as a bar; a tick that is wider than it would be in two blocks.
        length = max(2, min(64, int(0.7 * (width - 60) / len(order))))
        ticks = alt.Chart(alt.Data(values=list(matrices))).mark_tick(
            color="var(--ink)", thickness=1.5, opacity=0.75, size=length
        )
        layers = alt.layer(columns.encode(x, y, description="label:N"), ticks.encode(x, y, description="label:N"))
        return layers.properties(width=width, height=220)

    return _figure(draw)


def pairs(rows: Sequence[Row], y: str) -> Figure:
    """For each block a value before and one after: rows have "block", "when", "value" and "label"."""
    order = sorted({row["block"] for row in rows})
    whens = list(dict.fromkeys(row["when"] for row in rows))
    low, high = value_span(rows)
    domain = [low / 1.2, high * 1.2]
    scale = alt.Scale(type="log", domain=domain, nice=False)

    def draw(width: int) -> Any:
        base = alt.Chart(alt.Data(values=list(rows))).encode(
            alt.X(
                "block:O",
                title="block",
                sort=order,
                axis=alt.Axis(labelAngle=0, labelOverlap=True, grid=False),
            ),
            alt.Y("value:Q", title=y, scale=scale, axis=alt.Axis(values=_ticks(*domain), format="~g")),
        )
        fill = alt.Scale(domain=whens, range=["var(--card)", colour(0)])
        line = base.mark_line(color="var(--soft)", strokeWidth=1.5, aria=False).encode(detail="block:O")
        dots = base.mark_point(size=70, stroke=colour(0), strokeWidth=2, opacity=1).encode(
            fill=alt.Fill("when:N", scale=fill, sort=whens, legend=_legend(width, whens)),
            description="label:N",
        )
        return (line + dots).properties(width=width, height=240)

    return _figure(draw)


def _curves(
    points: Sequence[Row],
    methods: Sequence[str],
    x: alt.X,
    y: str,
    dense: Row | None,
    share: float,
    legend: bool,
    span: tuple[float, float] | None,
    *,
    lines: bool,
) -> Figure:
    low, high = span or value_span([*points, *([dense] if dense else [])])
    shown = [method for method in methods if any(point["method"] == method for point in points)]
    numbers = [list(methods).index(method) for method in shown]
    # Within a factor of 2 a logarithmic axis has hardly a number on it.
    log = high / low > 2
    padded = [low / 1.05, high * 1.05] if log else [low - 0.05 * (high - low), high + 0.05 * (high - low)]
    scale = alt.Scale(type="log" if log else "linear", domain=padded, nice=False, zero=False, clamp=True)
    axis = alt.Axis(values=_ticks(*padded), format=",~g") if log else alt.Axis(tickCount=6)
    colours = alt.Scale(domain=shown, range=[colour(i) for i in numbers])
    shapes = alt.Scale(domain=shown, range=[_SHAPES[i % len(_SHAPES)] for i in numbers])

    def draw(width: int) -> Any:
        key = _legend((width * share if width == _WIDE else width) - 60, shown) if legend else None
        by_method: dict[str, Any] = {
            "color": alt.Color("method:N", scale=colours, sort=shown, legend=key),
            "shape": alt.Shape("method:N", scale=shapes, sort=shown, legend=key),
        }
        if not lines:
            by_method["xOffset"] = alt.XOffset("method:N", sort=shown)
        base = alt.Chart(alt.Data(values=list(points))).encode(x=x, y=alt.Y("value:Q", title=y, scale=scale, axis=axis))
        layers: list[alt.Chart] = []
        if dense is not None:
            one = alt.Chart(alt.Data(values=[dense]))
            if dense.get("low") is not None:
                band = one.mark_rect(color="var(--soft)", opacity=0.14, aria=False)
                layers.append(band.encode(y=alt.Y("low:Q", scale=scale), y2="high:Q"))
            rule = one.mark_rule(color="var(--soft)", strokeDash=[5, 4], strokeWidth=1.5)
            layers.append(rule.encode(y=alt.Y("value:Q", scale=scale), description="label:N"))
            if legend:
                text = one.mark_text(align="right", dx=-4, dy=-8, color="var(--soft)", aria=False)
                layers.append(text.encode(x=alt.value("width"), y=alt.Y("value:Q", scale=scale), text="text:N"))
        drawn = {"color": by_method["color"], **({} if lines else {"xOffset": by_method["xOffset"]})}
        if lines:
            path = base.mark_line(strokeWidth=1.6, opacity=0.75, aria=False)
            dash = alt.StrokeDash(
                "published:N", scale=alt.Scale(domain=[False, True], range=[[1, 0], [4, 3]]), legend=None
            )
            layers.append(path.encode(strokeDash=dash, **drawn))
        bars = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=1.6, aria=False)
        layers.append(bars.encode(y=alt.Y("low:Q", scale=scale), y2="high:Q", **drawn))
        for hollow in (True, False):
            kept = base.transform_filter(f"datum.published === {str(hollow).lower()}")
            if any(point["published"] == hollow for point in points):
                marks = kept.mark_point(
                    filled=not hollow, fill="var(--card)" if hollow else alt.Undefined, size=60, opacity=1
                )
                layers.append(marks.encode(description="label:N", **by_method))
        return alt.layer(*layers).properties(
            width=int(width * share) if width == _WIDE else width, height=320 if len(points) > 1 else 200
        )

    return _figure(draw)


def value_span(points: Sequence[Row]) -> tuple[float, float]:
    """The least and the greatest value, with standard errors."""
    values = [point[key] for point in points for key in ("value", "low", "high") if point.get(key) is not None]
    low, high = min(values), max(values)
    return (low, high) if high > low else (0.9 * low, 1.1 * high)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers of a logarithmic axis, few enough for all to have a label."""
    steps = (1, 1.5, 2, 3, 4, 5, 6, 8) if high / low < 20 else (1, 2, 5) if high / low < 300 else (1, 3)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    # Not all of hundreds of powers of ten.
    powers = powers[:: max(1, len(powers) // 8)]
    return [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]


def _ramp() -> alt.Scale:
    return alt.Scale(domain=list(range(STEPS)), range=[f"var(--h{step})" for step in range(STEPS)])


def _names(width: int, names: Sequence[str]) -> alt.Axis:
    """Names beside bars, shorter on phones; none for a bar that is alone."""
    if not any(names):
        return alt.Axis(labels=False, ticks=False, domain=False)
    return alt.Axis(labelLimit=220 if width == _WIDE else 130, ticks=False)


def _legend(width: float, names: Sequence[str]) -> alt.Legend:
    longest = max(map(len, names), default=0)
    return alt.Legend(
        title=None,
        orient="bottom",
        columns=max(1, int(width // (8 * min(longest, 20) + 44))),
        labelLimit=170,
        symbolSize=80,
        symbolStrokeWidth=1.5,
        symbolOpacity=1,
    )


def _figure(draw: Callable[[int], Any]) -> Figure:
    return Figure(*(_svg(draw(width)) for width in (_WIDE, _NARROW)))


def _svg(chart: Any) -> str:
    quiet = {"domainColor": "var(--line)", "tickColor": "var(--line)", "gridColor": "var(--line)"}
    chart = (
        chart.configure(background="transparent", font="sans-serif", padding=2, autosize=_AUTOSIZE)
        .configure_view(stroke=None)
        .configure_axis(
            labelColor="var(--ink)",
            titleColor="var(--soft)",
            titleFontWeight="normal",
            labelFontSize=_TEXT,
            titleFontSize=_TEXT,
            labelFlush=False,
            **quiet,
        )
        .configure_legend(labelColor="var(--ink)", labelFontSize=_TEXT, columnPadding=16)
    )
    # The version that altair knows; vl-convert has several.
    version = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    svg: str = vl_convert.vegalite_to_svg(chart.to_dict(), vl_version=version)
    return svg


_AUTOSIZE = alt.AutoSizeParams(type="fit-x", contains="padding")
