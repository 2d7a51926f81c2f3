"""Every method at every sparsity for one model: the paper's table 1 for the user's own."""

import contextlib
import dataclasses
import hashlib
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from niwaki.arguments import checked
from niwaki.checkpoints.reading import Checkpoint
from niwaki.effort import PLAIN_EFFORT, describe as describe_effort, make_effort
from niwaki.errors import CheckpointError, UsageError, named
from niwaki.evaluation.evaluate import evaluate
from niwaki.files import given_path, locked, output_errors, replace_file
from niwaki.layer.patterns import Pattern, make_pattern, parse_pattern
from niwaki.layer.solvers import Solver, describe, make_solver
from niwaki.models.locate import locate_model
from niwaki.models.streamed import StreamedModel
from niwaki.options import USUAL_TEXT, Calibration, Compute, Measurement, Text
from niwaki.pruning.prune import Prune
from niwaki.pruning.request import patterns_of
from niwaki.quantities import fraction, parse_time
from niwaki.recipes import prune
from niwaki.records.comparison import METHODS, PATTERNS, Cell, Comparison, Identity
from niwaki.records.data import plain
from niwaki.records.perplexity import Perplexity
from niwaki.records.progress import Progress
from niwaki.records.record import Record, versions
from niwaki.records.wording import in_words
from niwaki.runs.carried import find_carried
from niwaki.runs.stage import current_session
from niwaki.runs.workplace import check_comparison
from niwaki.texts.conversations import has_images
from niwaki.texts.own import with_answers
from niwaki.texts.texts import Texts
from niwaki.windows import Windows

# The cells of a comparison that are asked for: solvers at patterns, by their names.


@dataclass(frozen=True)
class AskedCell:
    """A cell that was asked for."""

    key: tuple[str, str]  # method and pattern, as in the table
    stage: Prune
    effort: dict[str, Any] = field(default_factory=dict)  # as in records: what applies to the pattern and the model

    @property
    def name(self) -> str:
        """The name of its files."""
        name = "_".join(re.sub(r"[^\w.+=@-]+", "-", part).strip("-") for part in self.key)
        if len(name.encode()) < 150:
            return name
        return f"{name[:30]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"  # a file's name has 255 bytes

    @property
    def record(self) -> str:
        """The file of its record, in the directory of the comparison."""
        return f"records/{self.name}.json"

    def made(self, record: Record) -> bool:
        """Whether ``record`` is one of this cell, by what it says of the solver, the effort and the pattern."""
        asked = plain(describe(self.stage.solving)), self.effort, str(self.stage.pattern)
        return (record.solver, record.effort, record.pattern) == asked

    def __str__(self) -> str:
        return f"{in_words(describe(self.stage.solving))}, {in_words(self.effort)}, {self.stage.pattern}"


def asked_cells(
    solvers: Sequence[str | Solver], patterns: Sequence[str | float | Pattern], effort: str
) -> list[AskedCell]:
    """All cells, pattern by pattern; UsageError where names or patterns are not valid or solvers share a name."""
    cells: dict[tuple[str, str], AskedCell] = {}
    for column in patterns:
        for given in solvers:
            if isinstance(given, Solver):
                name, own, solver = type(given).__name__.lower(), "", given
            else:
                name, _, own = given.strip().partition("@")
                given, solver = name, make_solver(name)
            if name == "dense":
                raise UsageError("no solver can be called 'dense', as the model before it is; rename its class")
            used = own or effort
            key = (name if used == PLAIN_EFFORT else f"{name}@{used}", _column(column))
            stage = Prune(make_pattern(column, solver.default_pattern), given, make_effort(used))
            if cells.setdefault(key, cell := AskedCell(key, stage)) != cell:
                raise UsageError(f"two solvers are called {key[0]!r}: {cells[key].stage.solving} and {solver}")
    if not cells:
        raise UsageError("say which solvers and which patterns to compare, such as wanda and 0.5")
    return list(cells.values())


def _column(given: str | float | Pattern) -> str:
    """The name of a pattern's column, such as "60 %"."""
    if isinstance(given, Pattern):
        return str(given)
    share = fraction(given)
    return str(parse_pattern(str(given))) if share is None else f"{(100 * share).normalize():f} %"


#: The end of the name of a model, while its cell is saved and until it is removed.
_MEASURED = ".measured"


@checked
def compare(
    model: str | Path,
    out: str | Path | None = None,
    *,
    solvers: str | Solver | Sequence[str | Solver] = METHODS,
    patterns: str | float | Pattern | Sequence[str | float | Pattern] = PATTERNS,
    effort: str = PLAIN_EFFORT,
    calibration: Calibration | Text = Calibration(),
    measurement: Measurement | Text | Sequence[str] = USUAL_TEXT,
    compute: Compute | str = Compute(),
    keep: bool = False,
    max_time: float | str | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Prunes ``model`` with every method to every pattern and measures the perplexity of each result.

    After each cell of the table, ``out`` receives compare.json, .csv, .md and .tex, and ``records`` in it the record of
    the run. An interrupted comparison resumes when the call is repeated, even in the middle of a run; a call with other
    methods or patterns adds to the table. Each cell is what a single ``prune`` and ``evaluate`` give, bit for bit; only
    the peak memory in a record is that of the whole process so far.

    Args:
        model: A directory or hub id.
        out: Output directory: new, empty, or with a comparison of the same model, texts, device, dtype and versions. By
            default nothing is kept.
        solvers: One or several: names that ``make_solver`` accepts, such as "admm-grad" or "wanda+exact", with an
            effort after an @ if you like, as in "continuation@best:epochs=3"; or solvers, which go by the names of
            their classes.
        patterns: One or several, in the order of the table's columns: fractions of zeros such as 0.6, "0.6" or "60 %",
            for which each solver takes the kind of pattern of its paper; and patterns such as "2:4" or "per-row:0.6".
        effort: The effort for solvers that are given without one.
        calibration: As in :func:`niwaki.prune`.
        measurement: The texts to measure on, as names or a :class:`~niwaki.options.Measurement`; by default WikiText-2.
            If the calibration text is among them, it is measured after the calibration windows.
        compute: As in :func:`niwaki.prune`.
        keep: Keep the pruned models of the cells that this call computes, in ``out/models``.
        max_time: Time limit, in seconds or as text such as "2h". A cell is started only if it would end in time,
            assuming that it takes as long as the slowest one of its method, or of all methods if its own has none yet;
            the very first cell is always started. Cells that are left out are in ``missing``.
        progress: Receives the progress of the comparison.

    Returns:
        All cells in ``out``, including those of earlier calls; ``rows()`` is for pandas.

    Raises:
        UsageError: before anything is computed, if a name, a pattern or a number is not valid, a pattern does not fit
            the model's matrices, or ``out`` has other contents.
        NiwakiError: see :mod:`niwaki.errors`. Finished cells stay.
    """
    began, progress = time.monotonic(), progress or Progress()
    calibration, measurement, compute = Calibration.of(calibration), Measurement.of(measurement), Compute.of(compute)
    measurement.only("compare", "text", "samples", "length", "bos", "field")
    if measurement.text is None:
        measurement = dataclasses.replace(measurement, text=USUAL_TEXT)
    measurement.some()
    if not measurement.texts or not all(isinstance(text, str) for text in (*calibration.texts, *measurement.texts)):
        raise UsageError("a comparison calibrates and measures on texts by their names; give one or more of each")
    budget = parse_time(max_time) if isinstance(max_time, str) else max_time
    if budget is not None and not budget > 0:
        raise UsageError(f"max_time must be above 0; got {budget:g} seconds")
    if keep and out is None:
        raise UsageError("pruned models are kept in a directory; give one")
    solvers = [solvers] if isinstance(solvers, str | Solver) else solvers
    patterns = [patterns] if isinstance(patterns, str | float | int | Pattern) else patterns
    cells = asked_cells(solvers, patterns, effort)
    checkpoint = Checkpoint(locate_model(str(model)))
    streamed = StreamedModel(checkpoint, compute.device, compute.dtype)
    streamed.check_head()
    streamed.check_coverage()
    predicts, writes = not has_images(calibration), streamed.pairs is None
    for i, cell in enumerate(cells):
        with named(" at ".join(cell.key)):
            cell.stage.check()
            patterns_of(cell.stage.wanted, None, streamed)
        applied = cell.stage.applied_effort(predicts, writes)
        cells[i] = dataclasses.replace(cell, effort=describe_effort(applied, cell.stage.settled_effort))
    if out is not None:
        out = given_path(out).resolve()
        check_comparison(out, given_path(model), checkpoint.path)
    progress.status("reading texts")
    world = current_session().world
    written = with_answers(streamed, calibration, compute.budget, world, progress, measurement=measurement)
    texts = Texts.read(streamed, written, measurement)
    for note in texts.notes:
        progress.note(note)
    asked = Comparison(str(model), texts.described(calibration.seed), list(texts.heldout))
    asked.missing = [cell.key for cell in cells]
    asked.fingerprint = _fingerprint(str(model), streamed, texts, compute)
    asked.command, asked.versions = current_session().command, versions()
    with _place(out) as place:
        table = _joined(place, asked)
        work = _ComparisonRun(
            table, model, texts, calibration, compute, progress, place, out is not None, keep, began - table.seconds
        )
        return work.run(cells, math.inf if budget is None else began + budget)


@dataclass
class _ComparisonRun:
    """A comparison in its directory; see :func:`compare` for what all this is."""

    comparison: Comparison
    dense: str | Path
    texts: Texts
    calibration: Calibration
    compute: Compute
    progress: Progress
    place: Path
    lasting: bool  # whether the place is
    keep: bool
    began: float  # when it did, had all calls followed each other

    def run(self, asked: list[AskedCell], deadline: float) -> Comparison:
        """Does the cells that are not there, and writes the comparison after each."""
        cells, progress, models = self.comparison.cells, self.progress, self.place / "models"
        asked = [each for each in asked if not self.is_done(each)]
        self.tidy({each.name for each in asked})
        for each in asked:
            self.finished(each)
        if asked:
            checkpoint = Checkpoint(locate_model(str(self.dense)))
            find_carried(checkpoint, models, checkpoint.size)
        progress.table(self.comparison, len(asked))
        try:
            if cells:
                self.save()  # with what is asked for now
            else:
                progress.run("dense", "", 0, len(asked), [])
                perplexity, measuring = self.measured(locate_model(str(self.dense)))
                self.save(Cell("dense", "", 0.0, perplexity, measuring=measuring))
                progress.done(cells[0])
            left_out = self.add(asked, deadline)
        except BaseException:
            if cells and self.lasting:
                progress.paused(len(cells) - 1, len(self.comparison.missing))
            raise
        finally:
            with contextlib.suppress(OSError):
                models.rmdir()  # unless something is in it
        self.save()
        progress.finished(self.comparison, left_out)
        return self.comparison

    def add(self, asked: list[AskedCell], deadline: float) -> list[tuple[str, str]]:
        """Does all cells that will end before the ``deadline``, and returns the others."""
        left_out: list[tuple[str, str]] = []
        for i, each in enumerate(asked):
            expected = [_expected(other.key[0], self.comparison.cells) for other in asked[i:]]
            if time.monotonic() + expected[0] > deadline:
                left_out.append(each.key)
                continue
            self.progress.run(*each.key, i - len(left_out), len(asked) - len(left_out), expected)
            with named(f"{each.key[0]} at {each.key[1]}"):
                cell = self.cell(each)
            if not self.keep:
                with output_errors(self.place):
                    model = self.place / "models" / each.name
                    model.rename(model.with_name(f".{each.name}{_MEASURED}"))
            self.save(cell)
            self.tidy(set())
            self.progress.done(cell)
        return left_out

    def save(self, *new: Cell) -> None:
        comparison = self.comparison
        comparison.cells += new
        done = comparison.done()
        comparison.missing = [key for key in comparison.missing if key not in done]
        comparison.seconds = time.monotonic() - self.began
        comparison.save(self.place)

    def tidy(self, needed: set[str]) -> None:
        """Removes the models that are measured, but those ``needed``: a kill came before their cells were saved."""
        with output_errors(self.place):
            for model in (self.place / "models").glob(f".*{_MEASURED}"):
                name = model.name.removesuffix(_MEASURED)[1:]
                if name in needed:
                    model.rename(model.with_name(name))
                else:
                    shutil.rmtree(model)

    def cell(self, asked: AskedCell) -> Cell:
        """Prunes and measures; the record is written, and the model stays until somebody removes it."""
        pruned, read = self.place / "models" / asked.name, Calibration(self.texts.windows, seed=self.calibration.seed)
        record = self.finished(asked) or prune(
            self.dense,
            pruned,
            asked.stage.pattern,
            solver=asked.stage.solver,
            effort=asked.stage.effort,
            # What heals reads more of the text; for others it is read once, and answers are written once.
            calibration=self.calibration if asked.stage.settled_effort.healing else read,
            measurement=Measurement(samples=0),
            compute=self.compute,
            progress=self.progress,
        )
        perplexity, measuring = self.measured(pruned)
        replace_file(self.place / asked.record, record.to_json(), sync=True)
        stages = dict(record.seconds)
        total, kept = stages.pop("total", 0.0), asked.record if self.lasting else None
        return Cell(*asked.key, record.sparsity, perplexity, total, record.mean_error, stages, measuring, kept)

    def finished(self, asked: AskedCell) -> Record | None:
        """That of a model that an earlier call pruned and did not come to measure; UsageError for another model."""
        pruned = self.place / "models" / asked.name
        unfinished = any(pruned.parent.glob(f".{pruned.name}.partial*")) or (pruned / ".partial.json").exists()
        if unfinished or not os.path.lexists(pruned) or (pruned.is_dir() and not any(pruned.iterdir())):
            return None
        record = None if pruned.is_symlink() else _record(pruned / "niwaki.json")
        text = self.texts.windows.fingerprint()
        if record is None or not asked.made(record) or record.calibration.get("tokens_sha256") != text:
            raise UsageError(f"{pruned} is not of this comparison; remove it, or use another directory")
        return record

    def is_done(self, asked: AskedCell) -> bool:
        """Whether its cell is there; UsageError where another solver, or the same with other parameters, made it."""
        cell = self.comparison.done().get(asked.key)
        if cell is None:
            return False
        record = _record(self.place / asked.record)
        if record is None or cell.record != asked.record or not cell.is_of(record):
            self.comparison.cells.remove(cell)  # it is done again
            return False
        if not asked.made(record):
            made = f"{in_words(record.solver)}, {in_words(record.effort)}, {record.pattern}"
            has = f"{self.place} has {asked.key[0]} at {asked.key[1]} by {made}"
            raise UsageError(f"{has}, and asked for is {asked}; use another directory")
        return True

    def measured(self, path: Path) -> tuple[dict[str, Perplexity], float]:
        """Perplexities by text, and the seconds that they took."""
        began = time.monotonic()
        found = {
            text: evaluate(path, windows, compute=self.compute, progress=self.progress)
            for text, windows in self.texts.heldout.items()
        }
        return found, time.monotonic() - began


def _fingerprint(model: str, streamed: StreamedModel, texts: Texts, compute: Compute) -> dict[str, Identity]:
    """All that has to be the same for cells to compare."""

    def size(windows: Windows) -> str:
        return "{} x {:,} tokens".format(*windows.tokens.shape)

    windows, heldout = texts.windows, texts.heldout
    sizes = ", ".join(f"{size(each)} of {text}" for text, each in heldout.items())
    names = {"device": streamed.device.type, "dtype": str(streamed.dtype).removeprefix("torch.")}
    names |= {} if compute.tf32 == "auto" else {"tf32": compute.tf32}
    entries = {
        "model": (streamed.checkpoint.fingerprint(), model),
        "calibration": (windows.fingerprint(), f"{size(windows)} of {windows.source}"),
        "texts": ({text: each.fingerprint() for text, each in heldout.items()}, sizes),
        **{name: (value, value) for name, value in {**names, **versions()}.items()},
    }
    return {name: {"identity": str(identity), "shown": shown} for name, (identity, shown) in entries.items()}


@contextlib.contextmanager
def _place(out: Path | None) -> Iterator[Path]:
    """``out``, held against other processes, or a directory that goes at the end."""
    if out is None:
        with tempfile.TemporaryDirectory(prefix="niwaki-") as scratch:
            yield Path(scratch)
        return
    with output_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    try:
        with locked(out, out):
            yield out
    finally:
        with contextlib.suppress(OSError):
            out.rmdir()  # unless something is in it


def _joined(place: Path, asked: Comparison) -> Comparison:
    """What is there already, with what is asked for now; UsageError where their fingerprints differ."""
    if not (place / "compare.json").exists():
        return asked
    there = Comparison.load(place)
    nothing: Identity = {"identity": "", "shown": "nothing"}
    differing = []
    for name in {**asked.fingerprint, **there.fingerprint}:
        old, new = there.fingerprint.get(name, nothing), asked.fingerprint.get(name, nothing)
        if old["identity"] != new["identity"]:
            same = " (by name the same)" if old["shown"] == new["shown"] else ""
            differing.append(f"{name} ({old['shown']} there, {new['shown']} here{same})")
    if differing:
        raise UsageError(f"{place} has a comparison that differs in {'; '.join(differing)}; use another directory")
    missing = list(dict.fromkeys([*there.missing, *asked.missing]))
    return dataclasses.replace(asked, cells=there.cells, missing=missing, seconds=there.seconds)


def _expected(method: str, cells: list[Cell]) -> float:
    """Seconds that a cell will take: as the slowest of its method, or of all if it has none; 0 if there are none."""
    pruned = [cell for cell in cells if cell.pattern]
    like = [cell for cell in pruned if cell.method == method] or pruned
    return max((cell.seconds + cell.measuring for cell in like), default=0.0)


def _record(path: Path) -> Record | None:
    """The record in a file; None where there is none that can be read."""
    try:
        return Record.load(path)
    except CheckpointError:
        return None
