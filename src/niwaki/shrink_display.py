"""How structured pruning looks on the screen; imports no torch."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from niwaki.progress import Progress
from niwaki.record import Perplexity
from niwaki.shrink_record import ShrinkRecord

_STAGES = {"score": "influence", "advance": "outputs"}


class ShrinkDisplay(Progress):
    """A line that says where a run is, on a terminal; notes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("reading")
        self._stage, self._steps, self._done = "", 1, 0

    def __enter__(self) -> ShrinkDisplay:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def stage(self, block: int, name: str, steps: int) -> None:
        self._stage, self._steps, self._done = f"block {block + 1}: {_STAGES.get(name, name)}", steps, 0
        self._status.update(self._stage)

    def step(self) -> None:
        self._done += 1
        self._status.update(f"{self._stage} {100 * self._done // max(1, self._steps)} %")

    def note(self, text: str) -> None:
        self._console.print(f"note: {text}", style="yellow", highlight=False, soft_wrap=True, markup=False)


def tables(record: ShrinkRecord) -> list[Table]:
    """The influence of blocks and the errors of what was fitted, a row for each block, and what a run came to."""
    found = []
    if record.influence or record.dropped:
        found.append(_blocks(record))
    summary = Table(show_header=False, box=None, pad_edge=False)
    summary.add_column(style="bold")
    summary.add_column()
    for what, which in record.summary.items():
        summary.add_row(f"{what} dropped", which)
    before, after = record.parameters["before"], record.parameters["after"]
    summary.add_row("parameters", f"{after:,} of {before:,} ({100 * (1 - after / before):.1f} % fewer)")
    for when, measured in record.perplexity.items():
        summary.add_row(f"perplexity {when}", Text(str(Perplexity(**measured))))  # Text: no markup in paths
    parts = ", ".join(
        f"{name} {seconds:.1f}"
        for name, seconds in record.seconds.items()
        if name != "total" and seconds >= 0.05
    )
    summary.add_row("seconds", f"{record.seconds['total']:.1f} ({parts})")
    memory = ", ".join(f"{size / 2**20:,.0f} MiB {where}" for where, size in record.peak_memory.items())
    summary.add_row("peak memory", memory)
    return [*found, summary]


def _blocks(record: ShrinkRecord) -> Table:
    table = Table(title="blocks, counted from 0", box=None, title_justify="left")
    table.add_column("block", justify="right")
    if record.influence:
        table.add_column("influence", justify="right")
    names = list(dict.fromkeys(item.name for item in record.dropped))
    for name in names:
        table.add_column(f"error of {name.rpartition('.')[2]}", justify="right")
    errors = {(item.block, item.name): f"{item.error:.4f}" for item in record.dropped}
    for index in range(len(record.influence) or max(record.kept) + 1):
        cells = [f"{record.influence[index]:.4f}"] if record.influence else []
        cells += [errors.get((index, name), "") for name in names]
        table.add_row(str(index), *cells, "" if index in record.kept else "dropped")
    return table
