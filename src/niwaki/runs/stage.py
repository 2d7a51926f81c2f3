"""What a run is made of: stages, and what they share."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from niwaki.arguments import check_fields
from niwaki.checkpoints.reading import Checkpoint, PruningConfig
from niwaki.checkpoints.tensors import DTYPES
from niwaki.effort import Effort
from niwaki.errors import UnsupportedModelError
from niwaki.files import check_space
from niwaki.models.device import device_name
from niwaki.models.hidden_states import MemoryBudget
from niwaki.models.processes import World
from niwaki.models.streamed import Reference, StreamedModel
from niwaki.options import Calibration, Compute, Measurement
from niwaki.records.perplexity import Perplexity
from niwaki.records.progress import Progress
from niwaki.records.recipe import Recipe
from niwaki.records.record import CalibrationRecord, Record, versions
from niwaki.runs.carried import BASE, MARGIN, CarriedFiles, check_claims, claimed_files, find_carried
from niwaki.runs.similarity import Sentences
from niwaki.runs.workplace import Journal, Workplace, scratch_size, unfinished_size
from niwaki.texts.own import synthesize, with_answers
from niwaki.texts.texts import Texts
from niwaki.windows import Windows


class Clock:
    """A stopwatch for ``Record.seconds``: each lap counts as time of a stage."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self.seconds: dict[str, float] = defaultdict(float)

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] += now - self._last
        self._last = now

    def add(self, seconds: dict[str, float]) -> None:
        """Counts the time of an earlier run, or of earlier stages, also."""
        for stage, value in seconds.items():
            if stage != "total":
                self.seconds[stage] += value
                self._began -= value

    def total(self) -> float:
        return time.perf_counter() - self._began


#: Windows that perplexity is measured on, where nobody says how many.
USUAL_WINDOWS = 16


@dataclass
class Run:
    """What all stages of a run share, and where it is."""

    model: str  # as it was given
    source: Path  # where that is
    out: Path
    stages: tuple[Stage, ...]
    labels: tuple[str, ...]  # what errors call them
    calibration: Calibration
    measurement: Measurement
    compute: Compute
    world: World
    progress: Progress
    budget: MemoryBudget  # for hidden states
    recipe: Recipe | None = None  # what is asked for, if a recipe can say it
    follows: Recipe | None = None  # the one that is followed, if one is
    sentences: Sentences = field(default_factory=Sentences)  # of models that predict no words
    clock: Clock = field(default_factory=Clock)  # of the stage at work
    number: int = 0  # of the stage that is opened or at work, from 0
    reading: Path = field(init=False)  # the model that it reads
    earlier: Record | None = None  # of all stages before it
    journal: Journal = field(default_factory=lambda: Journal([{}]))
    place: Workplace | None = None  # of the first process
    #: The windows that a stage before has calibrated on, for one that would rather see new text.
    seen: CalibrationRecord | None = None
    #: What the stages that are opened will have changed in config.json, as far as later ones have to know.
    foreseen: dict[str, Any] = field(default_factory=dict)
    #: What the dense model predicts of the text that is measured on, as far as it is known.
    reference: Reference | None = None
    #: Whether it ends once all stages are opened and have read their texts.
    only_checks: bool = False

    def __post_init__(self) -> None:
        self.reading = self.sentences.dense = self.source

    @property
    def stage(self) -> Stage:
        """The stage that is opened or at work."""
        return self.stages[self.number]

    @property
    def is_first(self) -> bool:
        """Whether the stage reads the model that was given."""
        return self.number == 0

    @property
    def measured(self) -> Measurement:
        """What is measured: the dense model too, if that was asked for, in the first stage only."""
        return replace(self.measurement, before=self.measurement.before and self.is_first)

    def resumed(self, record: Record, blocks: int) -> Record:
        """``record``, or that of an earlier run which has done some of the ``blocks``, and says that this one resumes.

        What trains the model as a whole has points instead of blocks.
        """
        done = self.journal.blocks
        if not done:
            return record
        earlier = Record.from_json(self.journal.record)
        self.clock.add(earlier.seconds)
        extent, again = f"the first {done} of {blocks} blocks", "; these run again for their outputs"
        if earlier.healing and not earlier.healing.by_block:
            point = earlier.healing.points[-1]
            done, extent, again = point.steps, f"{point.tokens:,} tokens", ""
        self.progress.note(f"resuming after {extent}, where an earlier run stopped{again}")
        return replace(earlier, command=record.command, device=record.device, resumed=[*earlier.resumed, done])

    def note(self, record: Record, *notes: str) -> None:
        """Adds ``notes`` to ``record``, unless it has them from the run that this one resumes, and says them."""
        for note in notes:
            if note not in record.notes:
                record.notes.append(note)
            self.progress.note(note)

    def carried(
        self, checkpoint: Checkpoint, size: int = 0, keep: Collection[str] | None = None, scratch: int = 0
    ) -> CarriedFiles | None:
        """The files beside the weights, in the first process, which checks that there is space for all of the output.

        That is them, ``size`` bytes of weights, and the bytes of ``scratch`` that the stage keeps until it is done. Of
        what belongs to weights they have the files ``keep``, by default those that config.json still tells the truth
        about when the stage is done.
        Before the run begins a later stage takes the model for the one that it will read, which then is there too.
        Errors are those of :func:`niwaki.runs.carried.find_carried`.
        """
        if not self.world.first:
            return None
        matrices_stay = self.stage.keeps_matrices
        if keep is None:
            check_claims(checkpoint)
            keep = claimed_files(checkpoint.pruning, matrices_stay)
        carried = find_carried(checkpoint, self.out, size + max(0, scratch - scratch_size(self.out)), keep)
        if not matrices_stay:
            carried = carried.only(lambda name: str(name) != BASE)
        if not self.is_first and self.place is None:
            check_space(self.out, MARGIN + 2 * size - unfinished_size(self.out, with_source=True))
        return carried

    def written(self, model: StreamedModel, calibration: Calibration, fewer: bool = False) -> Calibration:
        """``calibration`` with the answers that ``model`` writes, if it is to write some, see :func:`.with_answers`."""
        where, how = (self.compute.budget, self.world, self.progress), {"usual": USUAL_WINDOWS, "fewer": fewer}
        others: dict[str, Any] = {"measurement": self.measurement, **how, "writes": not self.only_checks}
        return with_answers(model, calibration, *where, **others)

    def begin_output(self, carried: CarriedFiles, kept: Collection[str] = ()) -> Path:
        """The directory to write to, with the files that are ``carried`` over.

        Of what an earlier run left only the files ``kept`` stay, which have the blocks that it has done.
        """
        assert self.place
        self.place.clear(kept)
        carried.copy(self.place.directory)
        return self.place.directory

    def perplexity(self, model: StreamedModel, windows: Windows, shared: bool = False) -> Perplexity:
        """The perplexity of ``model`` on ``windows``; ``shared`` is whether every process measures, each on its own."""
        world = self.world if shared else World()
        measured = model.perplexity(windows, self.progress, world, self.reference_for(model, windows))
        self.clock.lap("perplexity")
        return measured

    def dense_perplexity(self, dense: StreamedModel, windows: Windows, shared: bool = False) -> Perplexity:
        """That of the dense model, with which others are compared from now on."""
        world = self.world if shared else World()
        measured, states = dense.perplexity_and_states(windows, self.progress, world)
        self.reference = Reference(dense, states)
        self.clock.lap("perplexity")
        return measured

    def reference_for(self, model: StreamedModel, windows: Windows) -> Reference | None:
        """The dense model's predictions for ``windows``; None where ``model`` has other tokens, or it is not measured.

        It is the teacher, where healing names another than the run was given. It runs again where an earlier run has
        measured it, on other windows, or in another dtype.
        """
        if not self.measurement.before:
            return None
        known, path, dtype = self.reference, self.sentences.dense, str(model.dtype).removeprefix("torch.")
        if known and (known.model.checkpoint.path, known.model.dtype) == (path, model.dtype) and known.is_of(windows):
            return known if known.model.config.vocab_size == model.config.vocab_size else None
        dense = StreamedModel(Checkpoint(path), self.compute.device, dtype, self.budget)
        if dense.config.vocab_size != model.config.vocab_size:
            return None
        self.reference = Reference.of(dense, windows, self.progress)
        return self.reference


class Stage(ABC):
    """Something that is done to a model: a value, which knows nothing of directories, journals or processes."""

    name: ClassVar[str]
    #: Whether it only writes what there is in another form: then the model before it has the card and the record.
    is_format: ClassVar[bool] = False
    #: Whether matrices that servers compute as one are to have the same number of bits.
    fuses_layers: bool = False
    #: Whether it makes weights zero; what a grid rounds to zero does not count.
    makes_zeros: ClassVar[bool] = False
    #: Whether it can follow a stage that makes two sparse factors of each matrix, and leaves them such.
    keeps_factors: ClassVar[bool] = False
    #: Whether matrices keep the zeros, the grid and the factors that config.json says they have.
    keeps_matrices: ClassVar[bool] = False
    #: Whether nothing that changes weights can follow.
    only_formats_follow: ClassVar[bool] = False
    #: Whether stages after it read other tokens than those before.
    changes_tokens: ClassVar[bool] = False
    #: Whether it reads more text than the other stages, so that the usual one is not replaced by a shorter one.
    reads_on: ClassVar[bool] = False
    #: Whether what it writes stays in FP8 or MXFP4.
    keep_format: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def reads(self) -> tuple[str | Path, ...]:
        """The models that it reads beside the one that it changes."""
        return ()

    @property
    def grid(self) -> object:
        """The grid that it puts weights on; None for no grid."""
        return None

    @property
    def rounds_to_nearest(self) -> bool:
        """Whether it only rounds weights to the nearest numbers of a grid, so that no text is read."""
        return False

    @property
    def makes_factors(self) -> bool:
        """Whether matrices become products of two sparse factors."""
        return False

    @property
    def removes_blocks(self) -> bool:
        """Whether it is asked to remove blocks."""
        return False

    @property
    def settled_effort(self) -> Effort:
        """The effort, also where none was given."""
        return Effort()

    @property
    def not_healed(self) -> str:
        """Why what it leaves is not to be healed, whatever the model; "" where it may be."""
        return ""

    @abstractmethod
    def check_order(self, before: tuple[Stage, ...]) -> None:
        """UsageError where it cannot follow these stages."""

    @abstractmethod
    def open(self, run: Run) -> Task:
        """Checks all that names, options and configurations say. NiwakiError where it cannot work.

        No text is read here and no weights, so that what is wrong with any stage of a run is said at once. Where it is
        not the first stage, ``run.reading`` is not yet the model that it will read, but the one that was given.
        """


# A class among the stages that are given is refused by `make_stages`, in a sentence that says what it lacks.
Stage.register(type)


def label(number: int, count: int, name: str) -> str:
    """What errors call the stage with this ``number``, from 0, of ``count``; "" where there is no other."""
    return ", ".join(filter(None, [f"stage {number + 1}", name])) if count > 1 else ""


class Task(ABC):
    """A stage that was opened for a run."""

    #: What it calibrates and measures on.
    texts: Texts | None = None
    #: In the first process the files that its output has from the model that it reads.
    carried: CarriedFiles | None = None
    #: What its record is to say of how it works on the model, after what there is to say of that.
    notes: tuple[str, ...] = ()

    def measure_on(self, heldout: dict[str, Windows]) -> None:
        """From now on it measures on these texts, by their names, and no others."""
        assert self.texts
        self.texts = replace(self.texts, heldout=heldout)

    def heldout_after(self) -> dict[str, Windows] | None:
        """The text that it measures on as the tokens that are left, by name; None where all are left.

        Where some are gone the tasks after it are opened again, to read their texts as such.
        """
        return None

    def read(self, run: Run) -> None:  # noqa: B027 - a format has none
        """Reads its texts, once all stages of the run are opened; nothing is written. NiwakiError where that fails.

        All that is computed before the run begins, such as answers of the model, comes last here.
        """

    @abstractmethod
    def asked(self) -> dict[str, Any]:
        """All that has to be the same for a run to resume, or for processes to share one, by name.

        What it says of the "model" counts for the first stage only: that of others is what stages before it wrote.
        """

    @abstractmethod
    def work(self, run: Run) -> Record:
        """Writes the model to ``run.place.directory``, checks it, and returns the record of all stages so far.

        Resumes after the blocks that ``run.journal`` says are done.
        """

    @abstractmethod
    def expected(self, speed: float) -> float | None:
        """About how many seconds it takes; None where nobody knows.

        Products of matrices make ``speed`` floating-point operations a second, in all processes together.
        """

    def extent(self, run: Run) -> tuple[int, int]:
        """How many blocks are done and kept, of how many; 0 of 0 where that is not counted in blocks."""
        return 0, 0

    def begin_record(self, run: Run, model: StreamedModel, read: Checkpoint | None = None, **others: Any) -> Record:
        """The record, with the fields that need nothing else than that it works on ``model``, and ``others``.

        What config.json says of the model that is ``read``, by default ``model``, is kept as far as the stage leaves it
        true; what is not kept, and not among ``others``, is dropped with a note.
        """
        texts, made = self.texts or Texts(None, {}), (read or model.checkpoint).pruning
        notes = [*model.notes, *self.notes]
        kept: dict[str, Any] = {"embeddings": made.embeddings}  # which only a stage of their own changes
        if run.stage.keeps_matrices:
            blocks = made.blocks and [*made.blocks]
            kept |= {"quantization": made.quantization, "blocks": blocks, "sparsity": made.sparsity}
        else:
            notes += _dropped(made, others)
        if model.checkpoint.is_encoded and not others.get("kept_format"):
            how, dtypes = model.checkpoint.encoded_as, {each.dtype for each in model.checkpoint.encoded.values()}
            dense = " and ".join(sorted(str(DTYPES[dtype]).removeprefix("torch.") for dtype in dtypes))
            notes.append(f"the model's files are in {how}; what is written is in {dense}")
        return Record(
            command=current_session().command,
            model=run.model,
            calibration=texts.described(run.calibration.seed),
            device=device_name(model.device, run.world),
            dtype=str(model.dtype).removeprefix("torch."),
            versions=versions(),
            notes=[*notes, *texts.notes],
            left_dense=model.left_dense,
            **{**kept, **others},
        )


# What runs have from the call that they belong to, such as the command line, and not from their arguments.

T = TypeVar("T")


class Session(NamedTuple):
    """What all runs of a call share.

    Attributes:
        command: The command line, for records; "" where niwaki was called from Python.
        world: The processes that share the work.
        memory: What was found out about models, for the next run of the same call; None where there is one run alone.
    """

    command: str = ""
    world: World = World()
    memory: dict[Hashable, object] | None = None


_session: ContextVar[Session] = ContextVar("session")


def current_session() -> Session:
    """The session that this call belongs to."""
    return _session.get(None) or Session()


@contextlib.contextmanager
def session(command: str = "", world: World | None = None) -> Iterator[None]:
    """A session for all calls within."""
    token = _session.set(Session(command, world or World()))
    try:
        yield
    finally:
        _session.reset(token)


@contextlib.contextmanager
def remembering() -> Iterator[None]:
    """A session whose runs do not find out twice what they would find the same: see :func:`remembered`."""
    now = current_session()
    token = _session.set(now if now.memory is not None else now._replace(memory={}))
    try:
        yield
    finally:
        _session.reset(token)


def remembered(what: str, checkpoint: Checkpoint, arguments: Hashable, find: Callable[[], T]) -> T:
    """What ``find`` finds out of a model and ``arguments``, or an earlier run of this call found out of the same files.

    It has to be the same each time, and is not to be changed.
    """
    memory = current_session().memory
    if memory is None:
        return find()
    files = ((name, (checkpoint.path / name).stat()) for name in checkpoint.shards)
    stamps = tuple((name, found.st_ino, found.st_mtime_ns, found.st_size) for name, found in files)
    key = (what, str(checkpoint.path), stamps, arguments)
    if key not in memory:
        memory[key] = find()
    return memory[key]  # type: ignore[return-value]


# The record of a stage, as far as it is known before the work.


def usually_asked(model: StreamedModel, texts: Texts) -> dict[str, Any]:
    """What nearly every stage on ``model`` has to share with a run that it resumes, see :meth:`.stage.Task.asked`."""
    return {
        "model": model.checkpoint.fingerprint(),
        "calibration": texts.calibration and texts.calibration.fingerprint(),
        "text": texts.only and texts.only.fingerprint(),
        "device": model.device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "versions": versions(),
    }


def _dropped(made: PruningConfig, others: dict[str, Any]) -> list[str]:
    """Notes on what config.json said of matrices, and what is written does not say any more."""
    notes = []
    if made.quantization:
        notes.append(
            f"the weights that were read are on the grid {made.quantization}, of which no account is taken: their "
            "scales are not carried over"
        )
    if made.sparsity and others.get("blocks"):
        notes.append(
            f"config.json of the model that was read says that {100 * made.sparsity:.4g} % of its weights are zero; "
            "what is written says that only of the blocks that are pruned now"
        )
    return notes


# Text that the dense model writes for a stage to calibrate on, beside the text that was given.


def written(
    run: Run, model: StreamedModel, record: Record, share: float, samples: Tensor, bos: int | None
) -> Tensor | None:
    """(count, length) int64, the same in all processes: a ``share`` of as many windows as ``samples`` of all of them.

    Each window begins with ``bos`` if there is one. None where the model cannot write, and ``record`` has a note
    that says so; see :func:`niwaki.texts.own.synthesize`.
    """
    world = run.world
    count = max(world.size, round(share * sum(world.collected(len(samples)))))
    record.calibration["synthetic"] = count
    length, compute = samples.shape[1], run.compute

    def write() -> Tensor:
        return synthesize(model, count, length, compute.budget, world, run.progress, bos=bos)

    try:
        return remembered("own text", model.checkpoint, (count, length, bos, compute), write)
    except UnsupportedModelError as error:
        record.calibration["synthetic"] = 0
        reason = f"the dense model wrote no text to calibrate on: {error}; more --samples of real text do as well"
        run.note(record, reason)
        return None


def joined(run: Run, samples: Tensor, own: Tensor | None) -> Tensor:
    """The process's ``samples``, and its share of the ``own`` text of all, if there is any."""
    return samples if own is None else torch.cat([samples, run.world.share(own)])
