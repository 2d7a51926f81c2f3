"""The smallest model within a loss, or the largest that is fast enough: found by trying a few, each as a run."""

import contextlib
import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import psutil

from niwaki.checkpoints.reading import Checkpoint
from niwaki.choices import Runtime
from niwaki.compression.foresight import PartOf
from niwaki.compression.ways import Composition, PackedWays, Way
from niwaki.errors import UsageError
from niwaki.evaluation import llama_cpp
from niwaki.evaluation.bench import measured, positions_of
from niwaki.evaluation.evaluate import evaluate_both
from niwaki.files import free_space, locked, output_errors
from niwaki.layer.block_types import BlockGrid
from niwaki.models.device import find_device
from niwaki.models.locate import locate_model
from niwaki.models.streamed import StreamedModel
from niwaki.models.structure import read_config
from niwaki.options import Calibration, Compute, Measurement
from niwaki.pruning.embeddings import QuantizeEmbeddings
from niwaki.pruning.prune import Quantize
from niwaki.recipes import run
from niwaki.records.perplexity import FEWEST_WINDOWS, Perplexity
from niwaki.records.progress import Progress
from niwaki.records.recipe import RECIPE, Recipe
from niwaki.records.record import Record
from niwaki.records.wording import size as in_bytes
from niwaki.runs.card import begin_recipe, digests_of_texts, with_weights
from niwaki.runs.stage import current_session
from niwaki.runs.workplace import check_output, is_complete, new_directory, trials_place
from niwaki.stages import table_of

# How many tokens a second models of fewer bits write on this machine, before they are made.
#
# That does not depend on the values of the weights. So the smallest and the largest form are made by rounding to the
# nearest, which takes seconds, and timed, as is the dense model. Between them the time for a token grows nearly in a
# straight line with bytes (benchmarks/results/compress_speed.json).

#: Tokens of the prompt, tokens that are written after it, and how often.
_TOKENS = 16, 24, 3
#: The same of a result; of models with fewer positions as many as there are.
_OF_RESULTS = 128, 32, 3
#: Of free memory and space on disk, what may be used.
_SHARE = 0.8


@dataclass(frozen=True)
class Throughput:
    """Tokens a second of one sequence on this machine, measured; those of models of fewer bits by their bytes.

    Attributes:
        dense: Tokens a second of the model as it is, in transformers.
        smallest: Bytes of a packed form or a file for llama.cpp of the fewest bits that all rows can have, and its
            tokens a second.
        largest: The same of the most bits.
    """

    dense: float
    smallest: tuple[int, float]
    largest: tuple[int, float]

    def of(self, size: int) -> float:
        """What is foreseen of models of that size in bytes."""
        (low, fast), (high, slow) = self.smallest, self.largest
        part = min(1.0, (size - low) / max(1, high - low))
        seconds = part / slow + (1 - part) / fast
        # Below the smallest, where some rows have fewer bits, it falls at most in proportion to the bytes.
        return 1 / (max(seconds, size / low / fast) if size < low else seconds)


def check_memory(checkpoint: Checkpoint, device: str) -> None:
    """UsageError where the dense model, whose speed others are compared with, does not fit in the first's memory."""
    world, before = current_session().world, checkpoint.size
    free = world.received(psutil.virtual_memory().available if world.first else 0)
    if before > _SHARE * free and find_device(device).type == "cpu":
        raise UsageError(f"{in_bytes(before)} of weights do not fit in the {in_bytes(free)} of memory that are free")


def throughput(checkpoint: Checkpoint, runtime: Runtime, compute: Compute, progress: Progress) -> Throughput:
    """What is measured of a model; UsageError where there is no room for that, or no llama.cpp.

    ``compute`` says where it runs. Memory is needed for the whole dense model, and space for temporary files for the
    largest form.
    """
    if runtime == "llama.cpp":
        llama_cpp.package()
    check_memory(checkpoint, compute.device)
    model = StreamedModel(checkpoint, "cpu")
    ways = PackedWays(heal=(), parts=Composition.of(model, runtime), runtime=runtime)
    scratch, most = Path(tempfile.gettempdir()), ways.largest.size
    if 2 * most > _SHARE * (room := free_space(scratch)):  # with its parts while it is written
        raise UsageError(f"{scratch} has {in_bytes(room)} free, and a form of {in_bytes(most)} is made there")
    where, part = Compute(compute.device), PartOf(progress, "measuring speed")
    part.status("timing the dense model")
    dense = measured(checkpoint.path, *_TOKENS, where)
    found, (largest, *_, smallest) = [], ways.ends
    # What these rows can have, all can.
    width = max((matrix.shape[1] for matrix in model.matrices()), key=lambda each: ways.grid.choices(each)[0])
    low, *_, high = ways.grid.choices(width)
    for bits, ends in ((low, smallest), (high, largest)):
        part.status(f"timing {bits:g} bits")
        grid = ways.grid.of(bits)
        if isinstance(grid, BlockGrid):
            grid = BlockGrid(bits, grid.type_of(width).name)
        to_nearest = Quantize(grid, effort="none"), QuantizeEmbeddings(ends, effort="none")
        with tempfile.TemporaryDirectory(prefix="niwaki-") as place:
            out = Path(place) / "out"
            run(checkpoint.path, out, [*to_nearest, ways.stages[-1]], measurement=None, compute=where)
            speed = measured(llama_cpp.runnable(out, where) or out, *_TOKENS, where)
        found.append((speed.disk, speed.tokens_per_second))
    return Throughput(dense.tokens_per_second, *found)


#: The most ways that are tried.
_MOST = 7
#: A way that an earlier call has tried is taken for one so many steps from it: speeds are not foreseen the same twice.
_NEAR = 3
#: The least loss that counts where losses are compared by their logarithms.
_TINY = 1e-4
#: What all trials of a call have in their recipes.
_COMMON = ("calibration", "measurement", "compute", "weights", "texts")
#: Digests of the texts that losses are measured on, which recipes do not have.
_MEASURED = "measured.json"
#: What is in a folder of trials: that, their outputs, and where runs of theirs work and keep their journals.
_OURS = re.compile(rf"\d+-bytes|\.\d+-bytes\.partial.*|{_MEASURED}")


@dataclass(frozen=True)
class Trial:
    """A way that was tried: what came of it, and where it is."""

    way: Way
    record: Record
    directory: Path


def check_windows(count: int, on: str = "") -> None:
    """UsageError where so many windows of a text are too few to bound a loss by."""
    if count < FEWEST_WINDOWS:
        raise UsageError(
            f"a bound on the loss needs {FEWEST_WINDOWS} windows of text to measure on{on}, or more; got {count}"
        )


@dataclass(frozen=True)
class LossBound:
    """At most ``limit`` nats a token above the model, at the upper end of the 95 % interval of what is measured."""

    limit: float
    #: Texts on which it has to be kept besides that of the runs, and how they are measured.
    also: tuple[Measurement, ...] = ()
    dense: Path = Path()
    compute: Compute = Compute()
    #: Ways are tried from large to small: if one is within the bound, so are those before it.
    from_large: bool = True
    name: ClassVar[str] = "loss"
    _known: dict[str, Perplexity] = field(default_factory=dict, init=False)

    def measured(self, trial: Trial) -> tuple[float, str]:
        """The most that it may lose, and words for it; UsageError where nothing was measured."""
        measured = trial.record.perplexity
        if not {"before", "after"} <= measured.keys():
            raise UsageError("a bound on the loss needs text to measure it on, and there is none left; give more text")
        losses = {"": measured["after"].lost_from(measured["before"])}
        for each in self.also:
            after, before = evaluate_both(trial.directory, self.dense, each, self.compute, self._known)
            losses[f" on {each.text}"] = after.lost_from(before)
        for on, lost in losses.items():
            check_windows(lost.windows, on)
        most = max(lost.most for lost in losses.values())
        words = "; ".join(f"{lost.words}{on}, at most {lost.most:.4f}" for on, lost in losses.items())
        return most, words

    def within(self, value: float) -> bool:
        """Whether a way of that measured value is kept."""
        return value <= self.limit

    def expected(self, way: Way) -> float:
        """The value of a way, before any is tried; without foresight losses grow as powers of the size, say."""
        if way.nats is None:
            return 0.01 * (1e9 / way.size) ** 3
        return max(way.nats + (way.elsewhere if self.also else 0.0), _TINY)

    def told(self, way: Way) -> str:
        """What is foreseen of a way, in words."""
        return f"about {self.expected(way):.2g} nats a token"

    def refusal(self, told: str) -> str:
        """What to say where no way is within the bound."""
        return (
            f"a loss of {self.limit:g} cannot be kept: the largest form has {told}; measure on more text (--text, "
            "--text-samples) or allow more"
        )


@dataclass(frozen=True)
class SpeedBound:
    """At least ``limit`` times as many tokens a second as the dense model, measured on this machine."""

    limit: float
    before: int  # bytes of the dense model's weights
    dense: Path
    compute: Compute
    throughput: Throughput | None = None  # as foreseen
    from_large: bool = False
    name: ClassVar[str] = "speed"

    def measured(self, trial: Trial) -> tuple[float, str]:
        """The ratio, and words for it."""
        ratio = self._speed(trial.directory) / self._speed(self.dense)
        return ratio, f"{ratio:.2f} times the tokens a second of the dense model"

    def _speed(self, directory: Path) -> float:
        """Tokens a second of a model in the program that runs it, as it does without being asked for anything."""
        prompt, tokens, repeats = _OF_RESULTS
        half, where = positions_of(read_config(self.dense)) // 2, Compute(self.compute.device)
        numbers = int(min(prompt, half)), int(min(tokens, half)), repeats
        return measured(llama_cpp.runnable(directory, where) or directory, *numbers, where).tokens_per_second

    def within(self, value: float) -> bool:
        """Whether a way of that ratio is kept."""
        return value >= self.limit

    def expected(self, way: Way) -> float:
        """The ratio as foreseen; where that is not known, as if time were proportional to bytes."""
        if self.throughput is None:
            return self.before / way.size
        return self.throughput.of(way.size) / self.throughput.dense

    def told(self, way: Way) -> str:
        """What is foreseen of a way, in words."""
        return f"about {self.expected(way):.2g} times"

    def refusal(self, told: str) -> str:
        """What to say where no way is fast enough."""
        return f"{self.limit:g} times the speed cannot be reached here: the smallest form has {told}"


def _foreseen(ways: Sequence[Way], known: Mapping[int, float], number: int, expected: Callable[[Way], float]) -> float:
    """The value of a way from what is ``known`` of others.

    That is between two of them, or else as far above or below what was ``expected`` as the nearest.
    """
    below, above = (
        max((i for i in known if i <= number), default=None),
        min((i for i in known if i >= number), default=None),
    )
    if below is not None and above is not None and below != above:
        first, last, here = (math.log(ways[i].size) for i in (below, above, number))
        part = (here - first) / (last - first)
        return float(known[below] ** (1 - part) * known[above] ** part)
    nearest = below if below is not None else above
    factor = 1.0 if nearest is None else known[nearest] / expected(ways[nearest])
    return factor * expected(ways[number])


def last_that_holds(count: int, holds: Callable[[int], bool], guess: Callable[[], int]) -> tuple[int, bool]:
    """The last of ``count`` that ``holds``, where each before one that does holds too, and whether it is certain.

    -1 where none does. ``guess`` says which to try next; every third time it is the one in the middle.
    """
    last, first_not, tried = -1, count, 0
    while first_not - last > 1 and tried < _MOST:
        wished = (last + first_not) // 2 if tried % 3 == 2 else guess()
        number = min(max(wished, last + 1), first_not - 1)
        if holds(number):
            last = number
        else:
            first_not = number
        tried += 1
    return last, first_not - last == 1


def finished(directory: Path) -> Record:
    """The record of the run whose output is there."""
    return Record.load(directory / "niwaki.json")


def with_notes(record: Record, notes: Iterable[str], directory: Path) -> Record:
    """``record`` with more notes, but for those that it has, which that in the output ``directory`` gets too."""
    notes = [note for note in notes if note not in record.notes]
    record.notes += notes
    if current_session().world.first and (directory / "niwaki.json").exists():
        written = finished(directory)
        written.notes += notes
        written.save(directory / "niwaki.json")
    return record


class _Folder:
    """Where trials are until one of them becomes ``out``: a hidden directory beside it, which has nothing else."""

    def __init__(self, out: Path) -> None:
        self._out, self.path = out, trials_place(out)

    @contextlib.contextmanager
    def opened(self, source: Path, restart: bool, measured: Mapping[str, str]) -> Iterator[None]:
        """Makes the directory, for this process alone; UsageError where it has something else, or the model ``source``.

        Trials of an earlier call are removed where ``measured``, the digests of texts, is not what it was.
        """
        if source.is_relative_to(self.path):
            raise UsageError(f"{source} is in {self.path}, where trials are; choose another place for the result")
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_dir()):
            raise UsageError(f"{self.path} is in the way of trials; remove it")
        with output_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            with locked(self.path, self._out):
                others = [path.name for path in self.path.iterdir() if not _OURS.fullmatch(path.name)]
                if others:
                    raise UsageError(f"{self.path} has {others[0]!r}, which is of no trial; move it elsewhere")
                said, file = json.dumps(dict(measured)), self.path / _MEASURED
                if restart or (file.exists() and file.read_text() != said):
                    self.clear()
                file.write_text(said)
                try:
                    yield
                finally:
                    if [*self.path.glob("*")] == [file]:  # no trial was begun
                        self._remove()

    def numbers(self, ways: Sequence[Way]) -> list[int]:
        """The numbers of ``ways`` that an earlier call has tried, and after them that which it was trying."""
        begun = {path.name.removeprefix(".").partition(".")[0] for path in self.path.iterdir()}
        found = [i for i, way in enumerate(ways) if self.of(way).name in begun]
        return sorted(found, key=lambda i: not self.of(ways[i]).exists())

    def of(self, way: Way) -> Path:
        """Where the trial of a way is."""
        return self.path / f"{way.size}-bytes"

    def clear(self) -> None:
        """Removes all trials."""
        for path in self.path.iterdir():
            if _OURS.fullmatch(path.name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def move(self, directory: Path | None, asked: dict[str, Any], restart: bool = False) -> None:
        """Makes one of the trials the output, and removes the others.

        Where that is interrupted the output :func:`is_complete`, and a call that is ``asked`` for the same goes on with
        it, and has no ``directory``.
        """
        with new_directory(self._out, asked, restart) as place:
            if place and directory:
                place.rmdir()
                shutil.move(directory, place)
        self._remove()

    def _remove(self) -> None:
        self.clear()
        self.path.rmdir()


@dataclass
class Trials:
    """Tries ways, as runs whose outputs are in a directory beside ``out`` until one of them becomes that.

    The same call goes on with those that are there, where its texts have names.
    """

    model: str | Path
    out: str | Path
    calibration: Calibration
    measurement: Measurement
    compute: Compute
    restart: bool
    progress: Progress

    @cached_property
    def _source(self) -> Path:
        """The directory of the model."""
        return locate_model(str(self.model))

    @cached_property
    def _recipe(self) -> Recipe:
        """What all trials have in their recipes; the files are read once for it."""
        asked = begin_recipe([], str(self.model), self.calibration, self.measurement, self.compute)
        return with_weights(asked, self._source)

    def best(self, ways: Sequence[Way], bound: LossBound | SpeedBound) -> Record:
        """Writes the smallest within the bound, or of those that are fast enough the largest."""
        world = current_session().world
        out = world.received(check_output(self._source, self.out) if world.first else Path())
        folder = _Folder(out)
        text = self.measurement.text
        measured = digests_of_texts(Calibration(text)) if isinstance(text, str) else {}
        with folder.opened(self._source, self.restart, measured) if world.first else contextlib.nullcontext():
            if world.received(is_complete(out) and not self.restart if world.first else False):
                if world.first:
                    folder.move(None, self._asked(bound))
                record = world.received(finished(out) if world.first else None)
                assert record
                self.progress.end(record)
                return record
            return self._best(ways, bound, folder)

    def _best(self, ways: Sequence[Way], bound: LossBound | SpeedBound, folder: _Folder) -> Record:
        world = current_session().world
        ordered = list(ways) if bound.from_large else list(ways)[::-1]
        there = world.received(folder.numbers(ordered) if world.first else [])
        tried: dict[int, tuple[Trial, float, str]] = {}

        def holds(number: int) -> bool:
            way = ordered[number]
            directory = folder.of(way)
            trial = Trial(way, self._done(way, directory, len(tried) + 1), directory)
            value, words = world.received(bound.measured(trial) if world.first else (0.0, ""))
            kept = bound.within(value)
            if way.nats is not None:
                words += f" (foreseen: {way.nats:.2g} nats)"
            tried[number] = trial, value, words
            said = f"{in_bytes(way.size)}, {way.words}: {words}: {'within the limit' if kept else 'exceeds the limit'}"
            self.progress.note(f"trial {len(tried)}: {said}")
            return kept

        def guess() -> int:
            known = {number: max(value, _TINY) for number, (_, value, _) in tried.items()}
            fit = [i for i in range(len(ordered)) if bound.within(_foreseen(ordered, known, i, bound.expected))]
            best = fit[-1] if fit else 0
            return next((i for i in there if i not in tried and abs(i - best) <= _NEAR), best)

        chosen, certain = last_that_holds(len(ordered), holds, guess)
        if chosen < 0:
            kept = f"what was tried is in {folder.path}, and is used again"
            raise UsageError(f"{bound.refusal(tried[min(tried)][2])} ({kept})")
        trial, _, words = tried[chosen]
        made = [(each.way, said) for _, (each, _, said) in sorted(tried.items())]
        told = [f"tried: {in_bytes(way.size)}, {way.words}: {said}" for way, said in made]
        note = f"the {'smallest' if bound.from_large else 'largest'} within the bound is {trial.way.words}: {words}"
        told.append(note if certain else f"{note}; there may be a better one, {_MOST} were tried")
        with_notes(trial.record, told, trial.directory)
        if world.first:
            folder.move(trial.directory, self._asked(bound), self.restart)
        self.progress.note(trial.record.notes[-1])
        self.progress.end(trial.record)
        return trial.record

    def _done(self, way: Way, directory: Path, number: int) -> Record:
        """The record of that way, which may be there already."""
        world = current_session().world
        there = world.received(self._earlier(way, directory) if world.first else None)
        if there:
            return there
        return run(
            self.model,
            directory,
            way.stages,
            calibration=self.calibration,
            measurement=self.measurement,
            compute=self.compute,
            progress=PartOf(self.progress, f"trial {number}"),
        )

    def _asked(self, bound: LossBound | SpeedBound) -> dict[str, Any]:
        """What has to be the same for a call to go on with the move of the output that an earlier one chose."""
        return {bound.name: bound.limit, **{name: getattr(self._recipe, name) for name in _COMMON}}

    def _earlier(self, way: Way, directory: Path) -> Record | None:
        """The record of an earlier run of that way, with the same texts; removes what is of another one."""
        if not (directory / RECIPE).exists():
            return None
        wanted = replace(self._recipe, stages=[table_of(stage) for stage in way.stages])
        found = Recipe.read(directory / RECIPE)
        texts = *self.calibration.texts, self.measurement.text or ""
        has_names = all(isinstance(text, str) for text in texts)
        if has_names and all(getattr(found, name) == getattr(wanted, name) for name in ("stages", *_COMMON)):
            return finished(directory)
        shutil.rmtree(directory)
        return None
