"""Tables for the screen; imports no torch."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from niwaki.records.comparison import CAPTION, Comparison
from niwaki.records.record import Record
from niwaki.records.speed import SpeedRecord
from niwaki.records.wording import counted, kind, short, size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from niwaki.evaluation.inspect import MatrixSummary


def summary(record: Record) -> Table:
    """What a run came to."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    sparsities = [100 * matrix.sparsity for matrix in record.matrices] or [0.0]
    low, high = min(sparsities), max(sparsities)
    between = f", {low:.1f} to {high:.1f} % in one" if high - low > 0.1 else ""
    if record.structure:
        table.add_row("removed", record.pattern)
        table.add_row("parameters", str(record.structure))
    else:
        number = counted(len(record.matrices), "matrix", "matrices")
        table.add_row("zeros", f"{100 * record.sparsity:.2f} % of {number}{between}")
    if record.matrices:
        table.add_row("error", f"{record.mean_error:.4g} of the output's square (geometric mean over matrices)")
    if record.quantization:
        table.add_row("grid", record.rounding)
    if record.own_text:
        table.add_row("own text", f"{record.own_text}, to calibrate on")
    if record.fits:
        before, after = (
            sum(getattr(fit, when) for fit in record.fits) / len(record.fits) for when in ("before", "after")
        )
        table.add_row("fit", f"error of blocks' outputs {before:.4g} to {after:.4g} (mean, on held-out samples)")
    for when, measured in record.perplexity.items():
        table.add_row(f"perplexity {when}", Text(str(measured)))  # Text: no markup in paths
    parts = ", ".join(
        f"{name} {seconds:.1f}" for name, seconds in record.seconds.items() if name != "total" and seconds >= 0.05
    )
    table.add_row("seconds", f"{record.seconds['total']:.1f} ({parts})")
    table.add_row("peak memory", ", ".join(f"{size(peak)} {where}" for where, peak in record.peak_memory.items()))
    return table


def speed_table(record: SpeedRecord) -> Table:
    """A row for each form of the model."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    head, *rows = record.table()
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index < 2 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def inspection_tables(matrices: Iterable[MatrixSummary]) -> list[Table]:
    """What would be pruned (a row for each kind of matrix), and sparsities (a row for each block)."""
    kinds: dict[tuple[str, tuple[int, int]], list[MatrixSummary]] = defaultdict(list)
    blocks: dict[int, dict[str, list[MatrixSummary]]] = defaultdict(lambda: defaultdict(list))
    for item in matrices:
        name = kind(item.matrix.name)
        kinds[name, item.matrix.shape].append(item)
        blocks[item.matrix.block][name].append(item)
    patterns = list(next(iter(kinds.values()))[0].fitting)
    by_kind = Table(
        title="what would be pruned (n:m: groups of m with at most n non-zero)",
        box=None,
        title_justify="left",
    )
    for heading in ("matrix", "shape", "number", "weights", "zeros", "in a row", *patterns):
        by_kind.add_column(heading, justify="left" if heading == "matrix" else "right")
    for (name, shape), items in kinds.items():
        weights = len(items) * shape[0] * shape[1]
        low = min(item.row_zeros[0] for item in items)
        high = max(item.row_zeros[1] for item in items)
        by_kind.add_row(
            short(name),
            f"{shape[0]}x{shape[1]}",
            str(len(items)),
            f"{weights:,}",
            f"{100 * sum(item.zeros for item in items) / weights:.2f} %",
            f"{low}-{high}",
            *(f"{100 * sum(item.fitting[p] for item in items) / len(items):.1f} %" for p in patterns),
        )
    by_block = Table(title="zeros, %", box=None, title_justify="left")
    by_block.add_column("block", justify="right")
    names = list(dict.fromkeys(name for name, _ in kinds))
    for name in names:
        by_block.add_column(short(name), justify="right")
    for block, row in blocks.items():
        means = {name: sum(item.sparsity for item in items) / len(items) for name, items in row.items()}
        by_block.add_row(str(block), *(f"{100 * means[name]:.2f}" if name in means else "" for name in names))
    return [by_kind, by_block]


def perplexity_table(comparison: Comparison, text: str) -> Table:
    """The paper's table 1: a row for each method, a column for each pattern, the best in bold."""
    header, rows = comparison.grid(text)
    table = Table(
        title=Text(comparison.heading(text)),
        caption=CAPTION,
        box=None,
        title_justify="left",
        caption_justify="left",
    )
    for name in header:
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=name == "method")
    for row in rows:
        table.add_row(*(Text(entry.text, "bold" if entry.best else "") for entry in row))
    return table
