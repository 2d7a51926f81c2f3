"""The stage that prunes: blocks x calibration x solver -> checkpoint."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from niwaki.arguments import INTERNAL, check_fields, checked_names
from niwaki.checkpoints.reading import Checkpoint
from niwaki.checkpoints.writing import CheckpointWriter
from niwaki.effort import Effort, describe as describe_effort, described, make_effort, usual_effort
from niwaki.errors import UsageError
from niwaki.layer.grid import Grid, parse_grid
from niwaki.layer.patterns import Pattern, make_pattern
from niwaki.layer.products import products
from niwaki.layer.solvers import DEFAULT_SOLVER, Solver, describe, make_solver
from niwaki.models.device import resident
from niwaki.models.fit import COPIES
from niwaki.models.kept_format import KeptFormat
from niwaki.models.scales import FILE
from niwaki.models.streamed import StreamedModel
from niwaki.models.weight_format import OnGrid, WeightFormat
from niwaki.pruning.request import PatternOf, Request, patterns_of, take_masks
from niwaki.pruning.walk import Walk
from niwaki.quantities import parse_range
from niwaki.records.record import Record
from niwaki.records.wording import in_words
from niwaki.runs.block_store import WeightStore
from niwaki.runs.card import pruning_config, write_config
from niwaki.runs.carried import CarriedFiles
from niwaki.runs.stage import USUAL_WINDOWS, Run, Stage
from niwaki.runs.workplace import Workplace
from niwaki.texts.answers import with_answers
from niwaki.texts.texts import Texts
from niwaki.windows import Windows


@checked_names
@dataclass(frozen=True)
class Prune:
    """Makes weights of the linear matrices zero, and updates the others: see :func:`niwaki.prune` for its arguments."""

    pattern: float | str | Pattern | None = None
    solver: str | Solver | None = None
    effort: str | Effort | None = None
    mask_from: str | Path | None = None
    quantize: str | Grid | None = None
    keep_format: bool = False
    revive: bool = False
    blocks: tuple[int, int] | str | None = None
    #: A note on what is not done of what was asked for.
    left_out: str = field(default="", metadata=INTERNAL)

    name: ClassVar[str] = "prune"
    is_format: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def settled_effort(self) -> Effort:
        """The effort, also where none was given; UsageError where it is not known."""
        given = usual_effort(self.solver, self.mask_from) if self.effort is None else self.effort
        return make_effort(given) if isinstance(given, str) else given

    def check_order(self, before: tuple[Stage, ...]) -> None:
        if any(_has_grid(stage) for stage in before):
            raise UsageError("prune first and quantize then: pruned again, weights would leave the grid")

    def open(self, run: Run) -> "Pruning":
        return Pruning(self._request(run), run)

    def _request(self, run: Run) -> Request:
        given = DEFAULT_SOLVER if self.solver is None else self.solver
        updating = make_solver(given) if isinstance(given, str) else given
        mask_from = None if self.mask_from is None else str(self.mask_from)
        masking, mask_model = take_masks(updating, mask_from)
        return Request(
            model=run.model,
            method=given if isinstance(given, str) else str(describe(given)["name"]),
            solver=masking,
            effort=self.settled_effort,
            pattern=None if self.pattern is None else make_pattern(self.pattern, updating.default_pattern),
            mask_from=mask_from,
            mask_model=mask_model,
            grid=parse_grid(self.quantize) if isinstance(self.quantize, str) else self.quantize,
            keep_format=self.keep_format,
            revive=self.revive,
            blocks=parse_range(self.blocks) if isinstance(self.blocks, str) else self.blocks,
            calibration=run.calibration,
            measurement=run.measurement,
            compute=run.compute,
            notes=tuple(filter(None, [self.left_out])),
        )

    def __str__(self) -> str:
        given = [str(self.pattern)] if self.pattern is not None else []
        given += [f"{name} {_said(value)}" for name in _SAID if (value := getattr(self, name)) not in (None, False)]
        return ", ".join(given)


def _said(value: object) -> str:
    """The value of an argument in words."""
    if isinstance(value, Effort):
        return described(describe_effort(value))
    return in_words(describe(value)) if isinstance(value, Solver) else str(value)


_SAID = ("solver", "effort", "mask_from", "quantize", "keep_format", "revive", "blocks")


@checked_names
@dataclass(frozen=True)
class Quantize:
    """Puts the weights that are left on a ``grid``, and fits them to what rounding changes; zeros stay.

    The same as :class:`Prune` with no more zeros and ``quantize=grid``: "int4:128" has 4 bits and a scale for each row
    and 128 inputs, "int8" a scale for each row.
    """

    grid: str | Grid = "int4:128"
    solver: str | Solver | None = None
    effort: str | Effort | None = None
    #: A note on what is not done of what was asked for.
    left_out: str = field(default="", metadata=INTERNAL)

    name: ClassVar[str] = "quantize"
    is_format: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def _as_prune(self) -> Prune:
        return Prune(0.0, self.solver, self.effort, quantize=self.grid, left_out=self.left_out)

    @property
    def settled_effort(self) -> Effort:
        """As that of :class:`Prune`."""
        return self._as_prune.settled_effort

    def check_order(self, before: tuple[Stage, ...]) -> None:
        if any(_has_grid(stage) for stage in before):
            raise UsageError("weights are on a grid already; quantize once")

    def open(self, run: Run) -> "Pruning":
        return self._as_prune.open(run)

    def __str__(self) -> str:
        given = [
            f"{name} {_said(value)}" for name in ("solver", "effort") if (value := getattr(self, name)) is not None
        ]
        return ", ".join([str(self.grid), *given])


def _has_grid(stage: Stage) -> bool:
    """Whether a stage puts weights on a grid."""
    return isinstance(stage, Quantize) or (isinstance(stage, Prune) and stage.quantize is not None)


class Pruning:
    """:class:`Prune`, opened for a run: the model that it reads, the texts, and what of the request suits these."""

    def __init__(self, given: Request, run: Run) -> None:
        self._given = given
        self._open(run)
        run.progress.status("reading the text to calibrate on")
        calibration = with_answers(self.model, given.calibration, given.compute.budget, run.world, run.progress)
        self.texts = Texts.read(self.model, calibration, self.request.measurement, USUAL_WINDOWS)
        self.record: Record = self.request.record(self.model, self.texts)
        run.seen = self.record.calibration
        run.foreseen["pruning_config"] = pruning_config(self.record)

    def _open(self, run: Run) -> None:
        """Opens the model that is read, and checks that what is asked for can be done to it."""
        given, compute = self._given, self._given.compute
        checkpoint = Checkpoint(run.reading)
        self.format = _format(given, checkpoint)
        self.written = checkpoint.stored if given.keep_format else checkpoint
        self.carried = run.carried(self.written, self.written.size)
        self.model = model = StreamedModel(checkpoint, compute.device, compute.dtype, run.budget)
        self.request = given.settled(model, run.is_first)
        self.chosen = self.request.chosen(len(model.blocks))
        if not given.blocks:
            model.check_coverage()
        model.limit(self.chosen)
        if compute.budget is not None:
            run.budget.left = max(0, compute.budget - _needed(model, self.request))
        if given.grid:
            given.grid.check(matrix.shape[1] for matrix in model.matrices())
        self.pattern_of: PatternOf = patterns_of(given.pattern, given.mask_model, model)
        self._is_first = run.is_first

    def measure_on(self, heldout: dict[str, Windows]) -> None:
        self.texts = dataclasses.replace(self.texts, heldout=heldout)

    def asked(self) -> dict[str, Any]:
        asked = self.request.fingerprint(self.model, self.texts, self.record)
        return asked if self._is_first else {name: value for name, value in asked.items() if name != "model"}

    def extent(self, run: Run) -> tuple[int, int]:
        return max(0, run.journal.blocks - self.chosen.start), len(self.chosen)

    def work(self, run: Run) -> Record:
        if not run.is_first:
            self._open(run)
            self.record = self.request.record(self.model, self.texts)
        record = run.resumed(self.record, len(self.model.blocks))
        store = WeightStore(run, self.format)
        walk = Walk(self.model, self.request, self.pattern_of, record, run, store)
        with products(tf32=record.tf32 == "always"):
            if run.place and self.carried:
                self._write(walk, run, run.place, self.carried)
            else:
                walk.blocks(self.texts)
        return walk.record

    def _write(self, walk: Walk, run: Run, place: Workplace, carried: CarriedFiles) -> None:
        """The walk over the blocks and all that is written."""
        model, checkpoint = self.model, self.written
        added = self.format.added(checkpoint, model.matrices())
        place.clear([*checkpoint.shards, FILE])
        carried.copy(place.directory)
        with CheckpointWriter(checkpoint, place.directory, place.journal.blocks > 0, added) as walk.store.writer:
            walk.blocks(self.texts)
            if self.request.keep_format:
                walk.store.check_written(model.matrices)
        run.clock.lap("write")
        walk.record.notes += [note for note in carried.notes if note not in walk.record.notes]
        if run.earlier:
            walk.record = walk.record.after(run.earlier, only_rounds=run.stages[run.number].name == "quantize")
        write_config(place.directory, checkpoint.config, walk.record)
        self.format.verify(place.directory, checkpoint, model.matrices(), place.journal.zeros)
        run.clock.lap("check")


def _format(request: Request, checkpoint: Checkpoint) -> WeightFormat:
    """What the matrices of ``checkpoint`` are written in."""
    if request.keep_format:
        return KeptFormat(checkpoint)
    return OnGrid(request.grid) if request.grid else WeightFormat()


def _needed(model: StreamedModel, request: Request) -> int:
    """Bytes that a run takes without its hidden states, estimated from above: solvers differ."""
    blocks = [model.matrices(index) for index in range(len(model.blocks))]
    rows, columns = max(model.matrices(), key=lambda matrix: matrix.size).shape
    solving = 4 * (2 * columns**2 + 7 * rows * columns)
    grams = max(sum(4 * matrix.shape[1] ** 2 for matrix in block) for block in blocks)
    running = 2 * model.block_size  # its weights, which are not there while matrices are solved, and activations
    weights = max(sum(matrix.size for matrix in block) for block in blocks)
    copies = COPIES + (1 if request.grid or request.keep_format else 0)  # as they are rounded
    fitting = model.block_size + copies * 4 * weights if request.effort.fit.epochs else 0
    shared = sum(4 * matrix.shape[1] ** 2 for matrix in model.matrices() if matrix.blocks)  # until they are pruned
    return resident() + shared + max(grams + max(running, solving), fitting)
