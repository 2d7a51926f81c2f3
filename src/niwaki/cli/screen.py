"""A sign of life: at once what is being done, and at least every 30 seconds how far it is."""

import contextlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import ClassVar, Self

from rich import progress as bars
from rich.console import Console
from rich.status import Status
from rich.text import Text

from niwaki.cli.common import Terminal, out
from niwaki.cli.tables import perplexity_tables, summary
from niwaki.effort import described
from niwaki.records.comparison import Cell, Comparison, listed
from niwaki.records.progress import Paced
from niwaki.records.record import FitRecord, HealingPoint, HealingRecord, MatrixRecord, Record
from niwaki.records.wording import counted, duration, kind, short, text_in_words, two_digits

#: Seconds without a line after which a log gets one.
INTERVAL = 30.0

#: What is said after an interruption, by what :func:`niwaki.runs.workplace.kept` finds.
_KEPT = {
    "": "stopped: nothing was written; repeat the command to start over",
    "part": "stopped: what is done is kept; repeat the command to resume",
    "output": "stopped, but the result was already written",
}


class Screen(Paced):
    """Says on standard error what is being done, such as "pruning demo": a spinner on a terminal, lines in a log.

    It is there before torch and transformers are imported, which takes seconds. Results go to ``console``. Where a
    command is stopped, the ``output`` tells what is kept; without one it says ``stopped``.
    """

    #: That of the command that runs.
    current: "ClassVar[Screen | None]" = None

    def __init__(
        self,
        what: str,
        console: Console = out,
        *,
        output: str = "",
        stopped: str = "stopped before the result: nothing was written",
    ) -> None:
        super().__init__()
        self._doing, self._console, self._output, self._when_stopped = what, console, output, stopped
        self._has_ended = False
        self._errors = Terminal(stderr=True)
        self._spinner: Status | None = None
        self._ended = threading.Event()
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        if os.environ.get("RANK", "0") != "0":  # of several processes the first one speaks
            return self
        Screen.current = self
        if self._errors.is_terminal:
            self._spinner = self._errors.status(Text(self._doing))
            self._spinner.start()
        else:
            self._say(self.describe())
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.stop_spinner()

    def status(self, what: str, done: int = 0, count: int = 0) -> None:
        self._doing = f"{what} {done}/{count}" if count else what
        self.show()

    def describe(self) -> str:
        """A line that says what is being done."""
        return self._doing

    def show(self) -> None:
        if self._spinner is not None:
            self._spinner.update(Text(self.describe()))

    def stop_spinner(self) -> None:
        """Removes the spinner, for other things to be drawn."""
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None

    @contextlib.contextmanager
    def above(self) -> Iterator[None]:
        """Takes the spinner away for as long as lines are printed."""
        if self._spinner is not None:
            self._spinner.stop()
        try:
            yield
        finally:
            if self._spinner is not None:
                self._spinner.start()
            self.said()

    def line(self, text: str, style: str | None = None) -> None:
        """Prints a line as it is: no markup, which paths could hold, and no wrapping, which logs do not want."""
        with self.above():
            self._console.print(text, style=style, highlight=False, soft_wrap=True, markup=False)

    def last_words(self, text: str) -> None:
        """Ends the display, and says what stays."""
        self.__exit__()
        self._has_ended = True
        self._say(text)

    def lost(self) -> None:
        self.last_words(_KEPT[""])

    def interrupted(self) -> None:
        """Says what stays after an interruption, unless that has been said."""
        if not self._has_ended:
            from niwaki.runs.workplace import kept

            self.last_words(_KEPT[kept(self._output)] if self._output else self._when_stopped)

    def said(self) -> None:
        """Notes that a line was printed: a log gets no other soon."""
        self._last_line = time.monotonic()

    def _say(self, text: str) -> None:
        self._errors.print(text, soft_wrap=True, markup=False)
        self.said()

    def _beat(self) -> None:
        while not self._ended.wait(max(0.0, self._last_line + INTERVAL - time.monotonic())):
            if time.monotonic() >= self._last_line + INTERVAL:
                self._say(self.describe())


# How a run looks on the screen; imports no torch.

_DETAILS = {
    "sensitivity": "which outputs matter",
    "allocation": "what zeros cost",
    "sharing": "what blocks share",
    "synthesis": "text of its own",
    "influence": "which blocks matter",
    "perplexity": "perplexity",
    "rounding": "embeddings",
    "capture": "inputs",
    "fit": "fitting the block",
    "advance": "outputs",
}


class Display(Screen):
    """Draws a pruning run: a line for each block as it is done, and on a terminal a bar with the time left.

    The time left comes from how long the parts of the last block took, and before the first block is done from the
    estimate for all of the run.
    """

    def __init__(self, what: str, console: Console = out, *, output: str = "") -> None:
        super().__init__(what, console, output=output)
        self.wants_steps = console.is_terminal
        columns = "{task.description}", bars.BarColumn(), "{task.percentage:>3.0f} %", "{task.fields[left]}"
        detail = bars.TextColumn("{task.fields[detail]}", style="dim")
        self._bar = bars.Progress(*columns, detail, console=console, refresh_per_second=4, transient=True)
        self._share, self._detail = 0.0, ""
        self._solved: list[MatrixRecord] = []
        self._names: list[str] = []
        self._healed: HealingPoint | None = None  # the last one

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._bar.live.stop()

    def turn(self, number: int, count: int, stage: str) -> None:
        self.end_block()
        super().turn(number, count, stage)
        self._names, self._detail = [], ""
        self.line(f"stage {number} of {count}: {stage}", style="bold")
        self.status(stage)

    def status(self, what: str, done: int = 0, count: int = 0) -> None:
        self._share = done / count if count else 0.0
        super().status(what, done, count)

    def begin(self, record: Record, blocks: int, matrices: int) -> None:
        self.end_block()  # of an earlier part
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        name = record.quantization or record.kept_format
        grid = f", {name}" if name and not record.has_factors else ""  # whose pattern says it
        size = counted(blocks, "block") + (f" with {counted(matrices, 'matrix', 'matrices')}" if matrices else "")
        pattern = f"without {record.pattern}" if record.of_shrinking else record.pattern
        what = (name or f"embeddings, {record.embeddings}") if record.only_quantizes else f"{pattern}{grid}"
        self.line(f"{record.model}: {size}, {what}")
        self.line(record.solved_by)
        if record.effort:
            self.line(f"effort: {described(record.effort)}")
        text = f"calibration: {text_in_words(record.calibration)}" if record.calibration else "no calibration text"
        self.line(f"{text}, on {record.device} in {record.dtype}")
        super().begin(record, blocks, matrices)
        if self._console.is_terminal:
            self.stop_spinner()
            self._task = self._bar.add_task("starting", total=1.0, left="", detail="")
            self._bar.start()

    def stage(self, block: int, name: str, steps: int) -> None:
        self._detail = _DETAILS.get(name, "")
        super().stage(block, name, steps)

    def solving(self, matrix: str, step: int, steps: int, error: float) -> None:
        self._detail = f"{matrix} {step}/{steps} error {error:.3g}"
        self.show()

    def solved(self, matrix: MatrixRecord) -> None:
        self._detail = f"{matrix.name} error {two_digits(matrix.error)}"
        self._solved.append(matrix)

    def fitted(self, fit: FitRecord) -> None:
        if not self._names:
            self._names = ["before", "after"]
            self.line("relative error of each block's outputs, before and after:")
            self.line("block  seconds  before   after")
        self.line(f"{fit.block:5}  {fit.seconds:7.1f}  {fit.before:#6.3g}  {fit.after:#6.3g}")

    def healing(self, record: HealingRecord, share: float, seconds: float) -> None:
        point = record.points[-1]
        if self._healed is None:
            states = "distance of states from the dense model's, relative to their squares:"
            self.line(states if record.of_states else "KL from the dense model, in nats a token:")
            self.line("   tokens  minutes  held out" + ("" if record.by_block else "  trained on"))
        if self._healed != point:
            self._healed = point
            values = (point.error,) if record.by_block else (point.error, point.loss)
            # Rounding leaves negative zeros.
            kl = "    ".join("       -" if value is None else f"{round(value, 4) + 0.0:8.4f}" for value in values)
            self.line(f"{point.tokens:9,}  {point.seconds / 60:7.1f}  {kl}")
        self._detail = f"KL {point.error:.4f}, of {record.points[0].error:.4f}"
        super().healing(record, share, seconds)

    def stopped(self, done: int, blocks: int, where: str = "") -> None:
        if blocks:
            kept = f"{done} of {blocks} blocks are done and kept"
        elif self._healed:
            kept = f"{self._healed.tokens:,} tokens are done and kept"
        else:
            kept = "the stages before it are done and kept"
        self.last_words(f"{': '.join(filter(None, (where, kept)))}; repeat the command to resume after them")

    def end(self, record: Record) -> None:
        self.end_block()
        self.__exit__()
        self._console.print(summary(record))

    def end_block(self) -> None:
        self.end_part()
        solved, self._solved = self._solved, []
        # In blocks that an earlier run did, that stay as they are, or whose weights are only rounded, in no time.
        is_like_others = any(matrix.tokens for matrix in solved)
        total = self.seconds_of_block(is_like_others)
        if not is_like_others:
            return
        kinds: dict[str, list[float]] = defaultdict(list)
        for matrix in solved:
            kinds[kind(matrix.name)].append(matrix.error)
        names = [f"{short(name):>7}" for name in kinds]  # as wide as an error
        if not self._names:
            self.line("relative error of each matrix (of experts the mean):")
        if names != self._names:
            self.line("  ".join(["block", "seconds", *names]))
            self._names = names
        errors = [f"{two_digits(fmean(kinds[each])):>{len(name)}}" for each, name in zip(kinds, names, strict=True)]
        self.line("  ".join([f"{self._block:5}", f"{total:7.1f}", *errors]))

    def describe(self) -> str:
        if not self._blocks:
            return super().describe()
        where, fraction, left = self.where()
        return ", ".join(filter(None, [where, f"{100 * fraction:.0f} %", left, self._detail]))

    def show(self) -> None:
        super().show()
        if self._bar.live.is_started:  # where no blocks are to come, it is that of the stage before
            where, fraction, left = self.where() if self._blocks else (self._doing, self._share, "")
            self._bar.update(self._task, completed=fraction, description=where, left=left, detail=self._detail)


class TableDisplay(Screen):
    """Draws a comparison: a line for each run as it is done, on a terminal one for the run on its way, and the tables.

    The time left is that of like runs: those of the same method if there are any.
    """

    def __init__(self, what: str, console: Console = out) -> None:
        super().__init__(what, console)
        self._run = self._stopped = ""
        self._run_began = time.monotonic()
        self._expected: Sequence[float] = ()
        self._measuring = 0.0  # seconds of the dense model's measurement, as long as that of a pruned one

    def table(self, comparison: Comparison, runs: int) -> None:
        there = f", {len(comparison.cells) - 1} there already" if comparison.cells else ""
        text = text_in_words(comparison.calibration)
        self._measuring = comparison.cells[0].measuring if comparison.cells else 0.0
        self.line(f"{comparison.model}: {counted(runs, 'run')}{there}; calibration: {text}")

    def run(self, method: str, pattern: str, done: int, runs: int, expected: Sequence[float]) -> None:
        number = f"run {done + 1} of {runs}: " if pattern else ""
        self._run, self._doing, self._expected = f"{number}{method} {pattern}".strip(), "", expected
        self._run_began = time.monotonic()
        self.restart()
        self.show()

    def estimate(self, seconds: float) -> None:
        """Takes the estimate of one run for all those whose time is not known from earlier ones."""
        if self._expected and not self._expected[0]:
            self._expected = [each or seconds + self._measuring for each in self._expected]
            super().estimate(sum(self._expected))

    def stage(self, block: int, name: str, steps: int) -> None:
        super().stage(block, name, steps)
        self.status(self.where()[0])

    def done(self, cell: Cell) -> None:
        if not cell.pattern:
            self._measuring = cell.measuring
        self.line(f"{cell}; {cell.seconds:.1f} s" if cell.pattern else str(cell))

    def stopped(self, done: int, blocks: int, where: str = "") -> None:
        self._stopped = f", and {done} of {blocks} blocks of the current one"

    def lost(self) -> None:
        """Says nothing: this is one run of several, and ``paused`` says what stays."""

    def paused(self, done: int, missing: int) -> None:
        runs = f"{done} of {done + missing} runs are done and kept"
        self.last_words(f"{runs}{self._stopped}; repeat the command to do the rest")

    def finished(self, comparison: Comparison, left_out: Sequence[tuple[str, str]]) -> None:
        self.__exit__()
        for text in comparison.texts:
            for table in perplexity_tables(comparison, text):
                self._console.print()
                self._console.print(table)
        if left_out:
            which = f"left out, because of the time limit: {listed(left_out)}"
            self.line(f"{which}; repeat the command without --max-time to do them", style="yellow")

    def describe(self) -> str:
        left = ""
        if self._expected and self._expected[0] > 0:
            now = max(0.0, self._expected[0] - (time.monotonic() - self._run_began))
            left = f"about {duration(now + sum(self._expected[1:]))} left"
        return ", ".join(filter(None, (self._run, self._doing, left)))
