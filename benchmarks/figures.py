"""Draws the figures of docs/results-quality.md and -speed.md from the records in benchmarks/results.

    python benchmarks/figures.py

It wants matplotlib (`pip install --group benchmarks`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import matplotlib.ticker
from matplotlib.axes import Axes
from results import ROOT, record
from tables import HELD

FIGURES = ROOT / "docs" / "figures"
mpl.use("svg")
# The same file from the same record; letters as letters, so that the page's own font shows them.
mpl.rcParams |= {"svg.hashsalt": "niwaki", "svg.fonttype": "none", "font.size": 9, "axes.grid": True}
mpl.rcParams |= {"grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False}
COLOURS = {"ADMM": "C3", "Adam": "C0", "SGD": "C2", "CG": "C1", "SparseGPT": "black", "wanda": "grey"}
COLOURS |= {"exact": "C5", "admm-grad": "C4", "continuation": "C6"}


def draw(axes: Axes, label: str, points: list[tuple[float, float]], shade: float = 1.0) -> None:
    """A line, or a star for a method without steps."""
    style = {"marker": "*", "markersize": 10, "linestyle": "none"} if len(points) == 1 else {"marker": "."}
    colour = COLOURS[family(label)]
    axes.plot(*zip(*points, strict=True), label=label, color=colour, alpha=shade, **style)


def family(label: str) -> str:
    """The method without its parameters."""
    return label.split(" ")[0].rstrip(",")


def shades(labels: list[str]) -> dict[str, float]:
    """Paler for the first of several of one method."""
    found = {}
    for label in labels:
        same = [other for other in labels if family(other) == family(label)]
        found[label] = 0.3 + 0.7 * (same.index(label) + 1) / len(same)
    return found


def figure1(content: Any) -> None:
    """Error against time for three layers."""
    layers = content["layers"]
    chosen = layers if len(layers) <= 3 else [layers[0], layers[3], layers[-1]]
    figure, panels = plt.subplots(1, len(chosen), figsize=(4 * len(chosen), 3.6), squeeze=False)
    for axes, layer in zip(panels[0], chosen, strict=True):
        tone = shades(list(layer["curves"]))
        for label, points in layer["curves"].items():
            line = [(1e3 * p["seconds"], p["error"] / layer["optimal"]) for p in points]
            draw(axes, label, line, tone[label])
        axes.set(title=layer["layer"], xlabel="milliseconds", xscale="log", yscale="log", ylim=(0.97, 5))
        axes.set_yticks([1, 1.5, 2, 3, 5], ["1", "1.5", "2", "3", "5"])
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    panels[0][0].set_ylabel("error / error of the optimal weights")
    panels[0][-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, "figure1")


def figure2(content: Any) -> None:
    """Perplexity against the time of solving."""
    cells = [cell for cell in content["cells"] if cell["pattern"]]
    patterns = list(dict.fromkeys(cell["pattern"] for cell in cells))
    figure, panels = plt.subplots(1, len(patterns), figsize=(4.4 * len(patterns), 3.6), squeeze=False)
    for axes, pattern in zip(panels[0], patterns, strict=True):
        lines: dict[str, list[tuple[float, float]]] = {}
        for cell in cells:
            if cell["pattern"] == pattern:
                point = (cell["stages"]["solve"], cell["perplexity"][HELD]["value"])
                lines.setdefault(label(cell["method"]), []).append(point)
        tone = shades(list(lines))
        for name, points in lines.items():
            draw(axes, name, points, tone[name])
        axes.set(title=pattern, xlabel="seconds of solving", xscale="log", yscale="log")
        axes.yaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_minor_formatter("{x:.0f}")
        axes.set_xticks([0.1, 0.2, 0.5, 1, 2, 5], ["0.1", "0.2", "0.5", "1", "2", "5"])
        axes.xaxis.set_minor_locator(mpl.ticker.NullLocator())
    panels[0][0].set_ylabel("perplexity")
    panels[0][-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, "figure2")


def label(method: str) -> str:
    """What the lines of figure 2 are called: the method without its number of steps."""
    name, *settings = method.removeprefix("wanda+").split(":")
    rate = [s.removeprefix("learning_rate=") for s in settings if s.startswith("learning_rate")]
    known = {"admm1": "ADMM", "adam": "Adam", "cg": "CG"}
    if method == "wanda+sparsegpt":
        return "SparseGPT update"
    if method == "sparsegpt":
        return "SparseGPT full"
    return " ".join([known.get(name, name), *rate])


def scaling(content: Any) -> None:
    """Share of the rate of plain products against size, for square matrices."""
    figure, axes = plt.subplots(figsize=(5, 3.4))
    lines: dict[str, list[tuple[float, float]]] = {}
    for entry in content["results"]:
        rows, columns = map(int, entry["size"].split("x"))
        if "share" in entry and rows == columns:
            lines.setdefault(entry["what"], []).append((columns, 100 * entry["share"]))
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker=".", label=name)
    axes.axhline(70, color="grey", linestyle=":")
    axes.set(xlabel="rows and columns", ylabel="% of the rate of plain products", xscale="log", ylim=(0, 100))
    axes.set_xticks([p[0] for p in points], [f"{p[0]:,}" for p in points])
    axes.minorticks_off()
    axes.legend(fontsize=7)
    save(figure, "scaling")


def save(figure: Any, name: str) -> None:
    """As SVG without a date."""
    FIGURES.mkdir(exist_ok=True)
    path: Path = FIGURES / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")


if __name__ == "__main__":
    figure1(record("error_time"))
    figure2(record("figure2"))
    scaling(record("layer_time"))
