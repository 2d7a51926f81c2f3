"""What a run looks like: a faked one, on a faked clock."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from niwaki.cli import screen as module
from niwaki.cli.screen import Display, TableDisplay
from niwaki.cli.tables import summary
from niwaki.effort import EFFORTS, describe
from niwaki.records import progress
from niwaki.records.comparison import Cell
from niwaki.records.perplexity import Perplexity
from niwaki.records.record import FitRecord, HealingPoint, HealingRecord, MatrixRecord, Record
from niwaki.records.wording import duration, estimated, two_digits

NAMES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
SHARES = {"capture": 3.0, "solve": 5.0, "advance": 1.0}
BATCHES = 4


class Clock:
    """Seconds pass when it is told so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for each in (module, progress):
        monkeypatch.setattr(each, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def record(**changes: object) -> Record:
    values: dict[str, object] = {
        "command": "",
        "model": "models/tiny",
        "method": "wanda",
        "solver": {"name": "wanda"},
        "pattern": "2:4",
        "mask_from": None,
        "calibration": {"samples": 4, "sequence_length": 16, "source": "some.txt"},
        "device": "cpu (2 threads)",
        "dtype": "float32",
        "notes": ["noted before"],
        **changes,
    }
    return Record(**values)  # type: ignore[arg-type]


def console(terminal: bool, width: int = 100) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=terminal, width=width, color_system="standard" if terminal else None
    )


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


#: What a bar shows, again and again: how much is complete, of what, the time left, and details.
Shown = list[tuple[float, str, str, str]]


class Watched(Display):
    """Keeps what the bar shows after each event."""

    def __init__(self, console: Console) -> None:
        super().__init__("pruning", console)
        self.shown: Shown = []

    def show(self) -> None:
        super().show()
        if self._bar.tasks:
            task = self._bar.tasks[0]
            self.shown.append((task.completed, task.description, task.fields["left"], task.fields["detail"]))


def play(display: Display, clock: Clock, finished: Record, blocks: int = 3) -> None:
    """A run whose stages take as long as SHARES say, with a note in the second block."""
    display.begin(finished, blocks, len(NAMES))
    for block in range(blocks):
        for stage, seconds in SHARES.items():
            steps = len(NAMES) if stage == "solve" else BATCHES
            if stage == "advance" and block == blocks - 1:
                display.stage(block, stage, steps)
                continue
            display.stage(block, stage, steps)
            for step in range(steps):
                if stage == "solve":
                    for inner in (1, 2):
                        clock.now += seconds / steps / 3
                        display.solving(NAMES[step], inner, 2, 0.5 / inner)
                    solved = MatrixRecord(block, NAMES[step], (8, 8), 0.5, 0.01 * (block + 1), seconds / steps, 64, {})
                    display.solved(solved)
                    finished.matrices.append(solved)
                    clock.now += seconds / steps / 3
                else:
                    clock.now += seconds / steps
                display.step()
        if block == 1:
            display.note("damping raised from 0.1 to 0.2")
    finished.sparsity = 0.5
    finished.seconds = {"capture": 9.0, "solve": 15.0, "check": 0.01, "total": 26.0}
    finished.peak_memory = {"resident": 300 * 2**20}
    finished.perplexity["after"] = Perplexity(12.345, 0.678, 12345, 2048, 6, "some.txt")
    display.end(finished)


@pytest.fixture
def shown(clock: Clock) -> Shown:
    """What the bar shows of a run."""
    with Watched(console(True)) as display:
        play(display, clock, record())
    return display.shown


def test_the_bar_only_moves_forwards(shown: Shown) -> None:
    completed = [each[0] for each in shown]
    assert completed == sorted(completed)
    assert completed[0] < 0.05
    assert 0.8 < completed[-1] <= 1.0
    assert len(set(completed)) > 25
    # From the second block on it knows how the time is shared out: after 3 of 9 seconds a third of a block.
    at_capture = [s[0] for s in shown if s[1] == "block 2/3" and s[3] == "inputs"]
    assert at_capture[-1] == pytest.approx((1 + 3 / 9) / 3)


def test_the_time_left(shown: Shown) -> None:
    assert {left for _, description, left, _ in shown if description == "block 1/3"} == {""}  # nothing to go by yet
    later = [each for each in shown if each[1] in ("block 2/3", "block 3/3")]
    assert len(later) > 20
    for completed, _, left, _ in later:
        # Stages take the same time in each block here, so it can be right to a matrix, 1.7 seconds.
        assert int(left.removesuffix(" s left")) == pytest.approx(27 * (1 - completed), abs=2)
    # Two blocks of 9 seconds; and one, less the first batch of 0.75 s.
    assert later[0][2] == "18 s left"
    assert "8 s left" in [left for _, description, left, _ in later if description == "block 3/3"]


def test_what_the_solver_says(shown: Shown) -> None:
    details = [each[3] for each in shown]
    assert "self_attn.q_proj 1/2 error 0.5" in details
    assert "mlp.down_proj 2/2 error 0.25" in details
    assert any(re.fullmatch(r"self_attn\.o_proj error 0\.020", detail) for detail in details)


def test_a_look_at_the_dense_model_before(clock: Clock) -> None:
    """It has a bar of its own, and is no part of the time that blocks are expected to take."""
    display = Watched(console(True))
    finished = record()
    begin = display.begin

    def planned(*given: Any) -> None:
        begin(*given)
        for block, stage in ((0, "sensitivity"), (0, "allocation"), (1, "allocation")):
            display.stage(block, stage, 10)
            for _ in range(10):
                clock.now += 7.0
                display.step()

    display.begin = planned  # type: ignore[method-assign, assignment]
    with display:
        play(display, clock, finished, blocks=2)
    planning = [shown for shown in display.shown if shown[1] == "planning"]
    assert {shown[3] for shown in planning} == {"which outputs matter", "what zeros cost"}
    assert {shown[2] for shown in planning} == {""}
    first, second = ([s[0] for s in planning if s[3] == d] for d in ("which outputs matter", "what zeros cost"))
    assert sorted(set(first)) == pytest.approx([step / 10 for step in range(11)])
    assert sorted(set(second)) == pytest.approx([step / 20 for step in range(21)])
    assert (first, second) == (sorted(first), sorted(second))
    # Blocks are as if nothing had been before them.
    alone = Watched(console(True))
    with alone:
        play(alone, clock, record(), blocks=2)
    blocks, expected = ([s for s in d.shown if s[1].startswith("block")] for d in (display, alone))
    assert blocks == expected


@pytest.mark.parametrize(("part", "what"), [("perplexity", "measuring"), ("rounding", "rounding")])
def test_what_comes_after_the_last_block_is_counted(clock: Clock, part: str, what: str) -> None:
    """The bar does not stand, and the time left falls, while the head or the embeddings are at work for minutes."""
    display = Watched(console(True))
    with display:
        display.begin(record(), 3, 0)
        for block in range(3):
            display.stage(block, "advance", 1)
            clock.now += 1.0
            display.step()
        display.stage(0, part, 10)
        for _ in range(10):
            clock.now += 60.0
            display.step()
    last = [shown for shown in display.shown if shown[1] == what]
    assert [shown[0] for shown in last] == pytest.approx([step / 10 for step in range(11)])
    assert [shown[2] for shown in last][1:10] == [*(f"{10 - step} min left" for step in range(1, 9)), "60 s left"]


def test_a_stage_without_blocks_has_the_bar_too(clock: Clock) -> None:
    display = Watched(console(True))
    with display:
        display.turn(1, 3, "heal")
        display.begin(record(), 3, 0)
        healing = HealingRecord("dense", "full", 1000, None, 0.01, 64, 128, points=[HealingPoint(0, 0, 0.0, 1.0, None)])
        display.healing(healing, 0.96, 96.0)
        assert display.describe().startswith("healing, 96 %")
        display.stage(0, "perplexity", 10)
        assert display.describe().startswith("measuring, 0 %")
        display.turn(2, 3, "pack")
        assert display.describe() == "pack"
        display.status("packing, tensor", 3, 9)
        assert display.describe() == "packing, tensor 3/9"
        (task,) = display._bar.tasks
        assert task.description == "packing, tensor 3/9"
        assert task.completed == pytest.approx(1 / 3)


@pytest.mark.parametrize("terminal", [True, False])
def test_lines_that_stay(clock: Clock, terminal: bool) -> None:
    """A terminal gets a bar besides, which goes away; a file gets neither that nor colours."""
    where = console(terminal)
    with Display("pruning", where) as display:
        assert display.wants_steps == terminal
        play(display, clock, record(effort=describe(EFFORTS["balanced"])))
    assert [part in text(where) for part in ("\x1b", "\r", "━", "left")] == [terminal] * 4
    assert text(where).count("\x1b[?25l") == text(where).count("\x1b[?25h") == terminal  # the cursor is back
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text(where)).replace("\r", "\n").splitlines()
    for expected in (
        "models/tiny: 3 blocks with 3 matrices, 2:4",
        "wanda",
        "calibration: 4 x 16 tokens of some.txt, on cpu (2 threads) in float32",
        "effort: balanced (allocation loss, importance 0.5, together 1024, synthetic 0.25, epochs 0.3)",
        "note: noted before",
        "note: damping raised from 0.1 to 0.2",
    ):
        assert sum(line.strip() == expected for line in lines) == 1, expected
    blocks = [line.split() for line in lines if re.fullmatch(r" +\d+ +\d+\.\d( +0\.\d{3}){3}", line.rstrip())]
    assert blocks == [
        ["0", "9.0", "0.010", "0.010", "0.010"],
        ["1", "9.0", "0.020", "0.020", "0.020"],
        ["2", "8.0", "0.030", "0.030", "0.030"],
    ]
    assert any(line.split() == ["block", "seconds", "q_proj", "o_proj", "down_proj"] for line in lines)
    # The note comes with its block, not at the end.
    order = [i for i, line in enumerate(lines) if "damping raised" in line or "0.030" in line]
    assert "damping raised" in lines[order[0]]
    assert any("12.35 ± 0.68" in line for line in lines)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantization": "int8"}, "3 matrices, 2:4, int8"),
        ({"pattern": "two-factors:0.5:int8", "quantization": "int8"}, "3 matrices, two-factors:0.5:int8"),
    ],
)
def test_a_grid_is_named_once(changes: dict[str, str], said: str, clock: Clock) -> None:
    screen = console(False)
    with Display("pruning", screen) as display:
        display.begin(record(**changes), 3, 3)
    assert any(line.endswith(said) for line in text(screen).splitlines())


def test_an_interrupted_run_gives_the_terminal_back(clock: Clock) -> None:
    where = console(True)
    display = Display("pruning", where)

    def run() -> None:
        with display:
            display.begin(record(), 3, 3)
            display.stage(0, "capture", 4)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert text(where).count("\x1b[?25h") == 1
    display.__exit__()  # once is enough, twice does no harm


def test_healed_blocks(clock: Clock) -> None:
    """A line for each, and the divergences in the end."""
    where = console(False)
    healing = HealingRecord("dense", "blocks", 1000, None, 0.01, 64, 128)
    with Display("", where) as display:
        display.begin(record(healing=healing), 2, 6)
        for fit in (FitRecord(0, 0.5, 0.25, 1, 3.0, 8), FitRecord(1, 0.125, 0.0625, 1, 4.5, 8)):
            display.stage(fit.block, "fit", 4)
            display.fitted(fit)
        for tokens, error in ((0, 0.5), (960, 0.25)):
            healing.points.append(HealingPoint(tokens, tokens // 64, tokens / 16, error, None))
            display.healing(healing, 1.0, 60.0)
    lines = [re.split(" {2,}", line.strip()) for line in text(where).splitlines()]
    assert lines[lines.index(["block", "seconds", "before", "after"]) :] == [
        ["block", "seconds", "before", "after"],
        ["0", "3.0", "0.500", "0.250"],
        ["1", "4.5", "0.125", "0.0625"],
        ["KL from the dense model, in nats a token:"],
        ["tokens", "minutes", "held out"],
        ["0", "0.0", "0.5000"],
        ["960", "1.0", "0.2500"],
    ]


def test_nothing_was_trained_on_before_the_first_step(clock: Clock) -> None:
    where = console(False)
    healing = HealingRecord("dense", "full", 1000, None, 0.01, 64, 128)
    with Display("", where) as display:
        for point in (HealingPoint(0, 0, 0.0, 0.2954, None), HealingPoint(960, 15, 60.0, 0.25, 0.044)):
            healing.points.append(point)
            display.healing(healing, 0.5, 60.0)
    lines = [re.split(" {2,}", line.strip()) for line in text(where).splitlines()]
    assert lines[-3:] == [
        ["tokens", "minutes", "held out", "trained on"],
        ["0", "0.0", "0.2954", "-"],
        ["960", "1.0", "0.2500", "0.0440"],
    ]


def test_blocks_without_anything_to_solve_have_no_line(clock: Clock) -> None:
    """They were done by an earlier run, or stay as they are."""
    where, run = console(False), record()
    with Display("pruning", where) as display:
        display.begin(run, 4, 2)
        for block in range(4):
            for stage, seconds in SHARES.items():
                display.stage(block, stage, 1)
                clock.now += seconds
                if stage == "solve" and block in (1, 2):
                    display.solved(MatrixRecord(block, NAMES[0], (8, 8), 0.5, 0.01 * block, 5.0, 64, {}))
                display.step()
        run.seconds = {"total": 36.0}
        display.end(run)
    lines = [line.split() for line in text(where).splitlines()]
    start = lines.index(["block", "seconds", "q_proj"])
    assert lines[start - 1][0] == "relative"
    assert lines[start + 1 : start + 3] == [["1", "9.0", "0.010"], ["2", "9.0", "0.020"]]
    assert lines[start + 3][0] == "zeros"
    assert sum(line[:1] == ["block"] for line in lines) == 1


@pytest.mark.parametrize("terminal", [True, False])
def test_what_stays_of_a_run_that_ends_early(clock: Clock, terminal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    where = console(terminal)
    with Display("pruning", where) as display:
        display.begin(record(), 32, 3)
        display.stage(0, "capture", 4)
        before = text(where).replace("\x1b", "")
        display.stopped(7, 32)
        if not terminal:
            assert text(where) == before
    assert capsys.readouterr().err == (
        "pruning\n7 of 32 blocks are done and kept; repeat the command to resume after them\n"
    )
    assert text(where).count("\x1b[?25h") == terminal  # the bar is gone, and the cursor back


@pytest.mark.parametrize("odd", ["[/red] x [bold]", ":m: :smile:", "[link=x]y", "100 %"])
@pytest.mark.parametrize("terminal", [True, False])
def test_names_are_shown_as_they_are(clock: Clock, odd: str, terminal: bool) -> None:
    where = Console(file=io.StringIO(), force_terminal=terminal, width=200, color_system=None, emoji=False)
    run = record(
        model=odd,
        calibration={"samples": 4, "sequence_length": 16, "source": odd},
        notes=[odd],
        pattern=f"the mask of {odd}",
    )
    with Display("pruning", where) as display:
        display.begin(run, 1, 1)
        display.stage(0, "solve", 1)
        display.solving(NAMES[0], 1, 1, 0.5)
        run.perplexity["before"] = Perplexity(2.0, 0.1, 10, 8, 2, odd)
        run.seconds = {"total": 1.0}
        display.end(run)
    assert text(where).count(odd) == 5


def test_long_lines_of_a_log_are_not_broken(clock: Clock) -> None:
    where = console(False, width=40)
    with Display("pruning", where) as display:
        display.begin(record(model="a very long name of a model " * 5), 1, 1)
        display.note("word " * 50)
    assert max(map(len, text(where).splitlines())) > 200


def test_a_run_without_perplexity_or_error(clock: Clock) -> None:
    run = record()
    run.matrices = [MatrixRecord(0, "mlp.up_proj", (8, 8), 0.5, 0.0, 1.0, 64, {})]
    run.seconds = {"total": 1.0}
    where = console(False)
    where.print(summary(run))
    assert "perplexity" not in text(where)
    assert re.search(r"^error +0 of", text(where), re.M)


@pytest.mark.parametrize(
    ("word", "value", "shown"),
    [
        *((duration, 0, "0 s"), (duration, 0.4, "0 s"), (duration, 45.2, "45 s"), (duration, 89.4, "89 s")),
        *((duration, 90, "2 min"), (duration, 12 * 60, "12 min"), (duration, 89 * 60, "89 min")),
        *((duration, 90 * 60, "1 h 30 min"), (duration, 3 * 3600 + 5 * 60, "3 h 05 min")),
        *((duration, 3 * 3600 - 1, "3 h 00 min"), (duration, 100 * 3600, "100 h 00 min")),
        # Estimates have few digits.
        *((estimated, 16, "20 s"), (estimated, 88, "2 min"), (estimated, 95, "2 min"), (estimated, 560, "9 min")),
        *((estimated, 700, "10 min"), (estimated, 1100, "20 min"), (estimated, 5350, "1 h 30 min")),
        *((estimated, 5500, "1 h 30 min"), (estimated, 12000, "3 h 30 min"), (estimated, 36000, "10 h 00 min")),
        # Errors have two.
        *((two_digits, 0.0, "0"), (two_digits, 0.1, "0.10"), (two_digits, 0.0996, "0.10"), (two_digits, 1.0, "1.0")),
        *((two_digits, 0.00812, "0.0081"), (two_digits, 1.234e-5, "1.2e-05"), (two_digits, 17.3, "17")),
    ],
)
def test_numbers_in_words(word: Callable[[float], str], value: float, shown: str) -> None:
    assert word(value) == shown


def test_what_rounds_is_said_as_such() -> None:
    """Also where the matrices are so well rounded that four digits after the point would all be 0."""
    matrices = [MatrixRecord(0, "mlp.up_proj", (8, 8), 0.0, 0.0000123, 1.0, 64, {})]
    of = {"method": "magnitude", "solver": {"name": "magnitude"}, "pattern": "unstructured:0", "quantization": "int8:4"}
    run = record(**of, matrices=matrices)
    where = console(False)
    with Display("quantizing", where) as display:
        display.begin(run, 1, 1)
        display.stage(0, "solve", 1)
        display.solved(run.matrices[0])
        display.stage(1, "solve", 1)
    assert "magnitude" not in text(where)
    assert "weights fitted to the grid on the calibration text" in text(where)
    assert text(where).splitlines()[-1].split()[2:] == ["1.2e-05"]


def test_the_summary() -> None:
    run = record()
    run.sparsity = 0.6
    run.matrices = [MatrixRecord(0, "mlp.up_proj", (8, 8), 0.6, e, 1.0, 64, {}) for e in (0.01, 0.04)]
    run.seconds = {"prepare": 0.01, "solve": 1.25, "total": 1.5}
    run.peak_memory = {"resident": 300 * 2**20, "device": 5 * 2**30}
    for when, value in (("before", 10.0), ("after", 11.5)):
        run.perplexity[when] = Perplexity(value, 0.25, 1234567, 2048, 6, "held")
    where = console(False, width=160)
    where.print(summary(run))
    rows = [re.split(" {2,}", line.strip()) for line in text(where).splitlines()]
    assert rows == [
        ["zeros", "60.00 % of 2 matrices"],
        ["error", "0.020 of the output's square (geometric mean over matrices)"],
        ["perplexity before", "10.00 ± 0.25 (1,234,567 tokens of held, context 2,048)"],
        ["perplexity after", "11.50 ± 0.25 (1,234,567 tokens of held, context 2,048)"],
        ["above before", "0.1398 nats a token"],
        ["seconds", "1.5 (solve 1.2)"],
        ["peak memory", "300 MiB resident, 5.00 GiB device"],
    ]


def test_the_summary_of_more_effort() -> None:
    finished = record(seconds={"total": 1.0})
    for name, sparsity in (("q_proj", 0.25), ("k_proj", 0.75)):
        finished.matrices.append(MatrixRecord(0, name, (8, 8), sparsity, 0.01, 1.0, 64, {}))
    for before, after in ((0.25, 0.125), (0.75, 0.375)):
        finished.fits.append(FitRecord(0, before, after, 2, 1.0))
    finished.sparsity = 0.5
    shown = console(False)
    shown.print(summary(finished))
    assert "50.00 % of 2 matrices, 25.0 to 75.0 % in one" in text(shown)
    assert "error of blocks' outputs 0.5 to 0.25 (mean, on held-out samples)" in text(shown)


# About how long it takes


def test_the_first_line_says_about_how_long_it_takes(clock: Clock) -> None:
    where = console(False)
    display = Display("pruning", where)
    display.estimate(14)
    assert text(where) == ""
    display.estimate(700)
    assert text(where).splitlines() == ["this takes about 10 min"]
    display.begin(record(), 2, 6)
    display.stage(0, "sensitivity", 4)
    clock.now += 400
    assert "about 5 min left" in display.describe()
    display.stage(0, "capture", 4)
    assert "about 5 min left" in display.describe()
    clock.now += 400  # later than that it says nothing
    assert "left" not in display.describe()


def test_a_comparison_that_knows_nothing_yet_takes_the_estimate_of_its_first_run(clock: Clock) -> None:
    where = console(False)
    display = TableDisplay("comparing", where)
    display.run("wanda", "50 %", 0, 3, [0.0, 0.0, 0.0])
    display.estimate(100)
    display.estimate(1)  # of the next part of the same run
    assert text(where).splitlines() == ["this takes about 5 min"]
    display.run("alps", "50 %", 1, 3, [20.0, 20.0])
    display.estimate(1000)
    assert display.describe().endswith("about 40 s left")


def test_the_estimate_of_a_comparison_has_the_time_to_measure(clock: Clock) -> None:
    where = console(False)
    display = TableDisplay("comparing", where)
    display.done(Cell("dense", "", 0.0, {}, measuring=200.0))
    display.run("wanda", "50 %", 0, 3, [0.0, 0.0, 0.0])
    display.estimate(100)
    assert text(where).splitlines()[1:] == ["this takes about 15 min"]
