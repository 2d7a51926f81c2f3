"""The pictures of README.md, for light and dark pages: perplexity against sparsity, and what is lost against size.

``benchmarks/results.py`` writes them, with the tables, from protocol.json and sizes.json of benchmarks/results. Nothing
is placed by the width of a text in a font, so that they come out the same whatever fonts a machine has; labels stay
text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import altair as alt
import vl_convert

WIDTH, HEIGHT = 520, 300
FONT = "-apple-system, BlinkMacSystemFont, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Theme:
    """Colours: of the page, of text, of axes, of the paper's methods, and of niwaki's."""

    page: str
    ink: str
    line: str
    others: str
    ours: str


THEMES = {
    "light": Theme("#ffffff", "#1f2328", "#d1d9e0", "#6e7781", "#1a7f4b"),
    "dark": Theme("#0d1117", "#e6edf3", "#30363d", "#8b949e", "#3fcf85"),
}
#: The axis of the second picture, in bits.
BITS = (2, 12)
#: Sizes of its labels, and about how wide a character is.
SMALL, CHARACTER = 11, 5.5
#: Where a label can be, beside its point: its alignment and how far it is moved, right and down. The first is usual.
SIDES: list[tuple[Literal["left", "right"], int, int]] = [
    ("left", 8, -8),
    ("right", -8, 9),
    ("left", 8, 9),
    ("right", -8, -8),
]
#: Lines, from methods of the record; those of niwaki stand out.
METHODS = {
    "magnitude": "magnitude",
    "wanda": "Wanda",
    "sparsegpt": "SparseGPT",
    "admm-grad": "ADMM-Grad",
    "continuation@balanced": "niwaki",
    "continuation@best": "niwaki --effort best",
}


@dataclass(frozen=True)
class Form:
    """A model on the second picture: its size and what is lost, and what it is."""

    bits: float
    nats: float
    values: str  # what its numbers are: 16 bits, 8 bits, 4 bits
    label: str


class Box(NamedTuple):
    """Where a label is, in pixels from the top left."""

    left: float
    right: float
    top: float
    bottom: float

    @classmethod
    def of_label(cls, text: str, x: float, y: float, align: str) -> Box:
        """That begins or, aligned "right", ends at ``x``, with its middle at ``y``."""
        width = CHARACTER * len(text)
        left = x - width if align == "right" else x
        return cls(left, left + width, y - SMALL / 2, y + SMALL / 2)

    def covers(self, x: float, y: float) -> bool:
        """Whether a point is in it."""
        return self.left < x < self.right and self.top < y < self.bottom

    def meets(self, other: Box) -> bool:
        """Whether both have a place in common."""
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


def pictures(protocol: Any, text: str, forms: list[Form], folder: Path) -> Iterator[tuple[Path, str]]:
    """Each file, and its SVG.

    Args:
        protocol: The record.
        text: On which of its texts.
        forms: Of the second picture.
        folder: Where files go.
    """
    for name, theme in THEMES.items():
        charts = {"zeros": _zeros(protocol["cells"], text, theme), "sizes": _sizes(forms, theme)}
        for file, chart in charts.items():
            yield folder / f"{file}-{name}.svg", vl_convert.vegalite_to_svg(chart.to_dict()) + "\n"


def _zeros(cells: list[dict[str, Any]], text: str, theme: Theme) -> Any:
    dense = cells[0]["perplexity"][text]["value"]
    points = []
    for cell in cells:
        percent = cell["pattern"].removesuffix(" %")
        if cell["method"] in METHODS and percent.isdigit():
            value = cell["perplexity"][text]["value"]
            name = METHODS[cell["method"]]
            said = f"{name}, {percent} % zeros: {value:.2f}"
            points.append({"name": name, "zeros": int(percent), "value": value, "said": said})
    right = max(point["zeros"] for point in points)
    ours = [name for name in METHODS.values() if name.startswith("niwaki")]
    colours = alt.Scale(
        domain=list(METHODS.values()),
        range=[theme.ours if name in ours else theme.others for name in METHODS.values()],
    )
    x = alt.X(
        "zeros:Q",
        title=None,
        scale=alt.Scale(domain=[49, right], nice=False),
        axis=alt.Axis(
            values=[50, 60, 70, 80],
            labelExpr="datum.value + ' % zeros'",
            labelFlush=False,
            grid=False,
            domain=False,
        ),
    )
    y = alt.Y(
        "value:Q",
        title=None,
        scale=alt.Scale(type="log", domain=[36, 400], nice=False),
        axis=alt.Axis(values=[50, 70, 100, 150, 200, 300, 400], ticks=False, domain=False),
    )
    colour = alt.Color("name:N", scale=colours, legend=None)
    base = alt.Chart(alt.Data(values=points)).encode(x, y, colour, description="said:N")
    mine = alt.FieldOneOfPredicate(field="name", oneOf=ours)
    lines = base.mark_line(strokeCap="round").encode(strokeWidth=alt.condition(mine, alt.value(3.5), alt.value(1.75)))
    dots = base.mark_point(filled=True, opacity=1).encode(size=alt.condition(mine, alt.value(60), alt.value(28)))
    names = (
        base.mark_text(align="left", dx=12, fontSize=13)
        .encode(text="name:N")
        .transform_filter(f"datum.zeros == {right}")
    )
    bold = names.mark_text(align="left", dx=12, fontSize=13, fontWeight=600).transform_filter(mine)
    names = names.transform_filter({"not": mine})
    floor = alt.Chart(alt.Data(values=[{"value": dense, "zeros": right, "said": f"dense: {dense:.2f}"}])).encode(
        y, description="said:N"
    )
    rule = floor.mark_rule(strokeDash=[5, 4], color=theme.ink, strokeWidth=1.25)
    dense_name = floor.mark_text(align="left", dx=12, fontSize=13, color=theme.ink).encode(x, text=alt.value("dense"))
    measured = cells[0]["perplexity"][text]
    return _page(
        alt.layer(rule, lines, dots, names, bold, dense_name),
        "Perplexity after pruning, lower is better",
        f"3.4 M parameter model that ships with niwaki, {measured['tokens']:,} tokens of books it never saw",
        theme,
    )


def _sizes(forms: list[Form], theme: Theme) -> Any:
    shown = [form for form in forms if form.nats <= 1]
    highest = 1.05 * max(form.nats for form in shown)
    points = [
        {**asdict(form), "side": side, "said": f"{form.label}: {form.bits:.2f} bits, {form.nats:.3f} nats"}
        for form, side in zip(shown, _sides(shown, highest), strict=True)
    ]
    kinds = list(dict.fromkeys(form.values for form in forms))
    standing_out = {"no zeros": theme.ink, "4 bits": theme.ours}
    x = alt.X(
        "bits:Q",
        title=None,
        scale=alt.Scale(domain=list(BITS), type="log", nice=False),
        axis=alt.Axis(values=[2, 3, 4, 6, 8, 12], labelExpr="datum.value + ' bits'", grid=False, domain=False),
    )
    y = alt.Y(
        "nats:Q",
        title=None,
        scale=alt.Scale(domain=[0, highest], nice=False),
        axis=alt.Axis(values=[i / 10 for i in range(11)], ticks=False, domain=False, format=".1f"),
    )
    colours = alt.Scale(domain=kinds, range=[standing_out.get(kind, theme.others) for kind in kinds])
    base = alt.Chart(alt.Data(values=points)).encode(
        x, y, alt.Color("values:N", scale=colours, legend=None), description="said:N"
    )
    lines = base.mark_line(strokeCap="round", strokeWidth=1.75)
    dots = base.mark_point(filled=True, opacity=1, size=50)
    names = [
        base.mark_text(align=align, dx=dx, dy=dy, fontSize=SMALL)
        .encode(text="label:N")
        .transform_filter(f"datum.side == {side}")
        for side, (align, dx, dy) in enumerate(SIDES)
    ]
    return _page(
        alt.layer(lines, dots, *names),
        "Nats a token lost, against bits a weight",
        "SmolLM2-135M, mean of Wikipedia, books and source code; all at niwaki's default effort",
        theme,
    )


def _sides(forms: list[Form], highest: float) -> list[int]:
    """Of ``SIDES``, for the label of each form the first with room: where no line, point or other label is."""
    spots = [
        (WIDTH * math.log(form.bits / BITS[0], BITS[1] / BITS[0]), HEIGHT * (1 - form.nats / highest)) for form in forms
    ]
    drawn = [(x + dx, y + dy) for x, y in spots for dx in (-4, 0, 4) for dy in (-4, 0, 4)]
    for kind in {form.values for form in forms}:
        line = [spot for form, spot in zip(forms, spots, strict=True) if form.values == kind]
        for (x, y), (to_x, to_y) in itertools.pairwise(line):
            drawn += [(x + i / 200 * (to_x - x), y + i / 200 * (to_y - y)) for i in range(201)]
    sides: dict[Form, int] = {}
    labels: list[Box] = []
    for form, (x, y) in sorted(zip(forms, spots, strict=True), key=lambda each: each[1][1]):  # from the top
        boxes = [Box.of_label(form.label, x + dx, y + dy, align) for align, dx, dy in SIDES]
        free = [not any(box.covers(*spot) for spot in drawn) and not any(map(box.meets, labels)) for box in boxes]
        sides[form] = free.index(True) if True in free else 0
        labels.append(boxes[sides[form]])
    return [sides[form] for form in forms]


def _page(layers: Any, heading: str, below: str, theme: Theme) -> Any:
    title = alt.TitleParams(heading, subtitle=below, anchor="start", frame="group", offset=18, dx=-34)
    return (
        layers.properties(
            width=WIDTH,
            height=HEIGHT,
            title=title,
            padding={"left": 46, "right": 170, "top": 64, "bottom": 34},
            autosize=alt.AutoSizeParams(type="none"),
        )
        .configure(background=theme.page, font=FONT)
        .configure_view(stroke=None)
        .configure_axis(labelColor=theme.ink, gridColor=theme.line, tickColor=theme.line, labelFontSize=12)
        .configure_title(color=theme.ink, subtitleColor=theme.ink, fontSize=16, subtitleFontSize=12, subtitlePadding=5)
    )
