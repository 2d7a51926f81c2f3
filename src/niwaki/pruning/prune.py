"""The stage that prunes: blocks x calibration x solver -> checkpoint."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from niwaki.arguments import INTERNAL, checked_names, given_fields
from niwaki.checkpoints.reading import Checkpoint
from niwaki.checkpoints.writing import CheckpointWriter
from niwaki.choices import NO_ZEROS
from niwaki.effort import Effort, describe as describe_effort, described
from niwaki.errors import UsageError
from niwaki.layer.grid import AnyGrid
from niwaki.layer.linalg import has_tf32, products
from niwaki.layer.solvers import Solver, describe
from niwaki.models.device import resident
from niwaki.models.formats import (
    FACTORS_FILE,
    Factored,
    KeptFormat,
    OnGrid,
    WeightFormat,
    check_one_matrix,
    check_own_tensors,
)
from niwaki.models.layout import sharing_notes
from niwaki.models.locate import locate_model
from niwaki.models.outside import notes_of
from niwaki.models.scales import FILE as SCALES
from niwaki.models.streamed import StreamedModel
from niwaki.models.training import COPIES
from niwaki.pruning.request import PatternOf, Request, notes_on_masks, patterns_of, read_texts
from niwaki.pruning.walk import Walk
from niwaki.records.data import plain
from niwaki.records.record import Record, calibration_tokens
from niwaki.records.wording import in_words
from niwaki.runs.card import pruning_config, write_config
from niwaki.runs.carried import CarriedFiles
from niwaki.runs.duration import measuring, nearest, pruning
from niwaki.runs.stage import Run, Stage, Task, usually_asked
from niwaki.runs.store import WeightStore
from niwaki.runs.workplace import Workplace
from niwaki.texts.conversations import has_images
from niwaki.texts.texts import Texts


@checked_names
@dataclass(frozen=True)
class Prune(Request, Stage):
    """The stage that makes weights zero and updates the others: see :func:`niwaki.prune` for its arguments."""

    name: ClassVar[str] = "prune"
    makes_zeros: ClassVar[bool] = True

    @property
    def reads(self) -> tuple[str | Path, ...]:
        return (self.mask_model,) if self.mask_model else ()

    @property
    def not_healed(self) -> str:
        if self.blocks:
            return "only some blocks are pruned, and training would change all"
        return "the format is kept, which trained weights would leave" if self.keep_format else ""

    def check_order(self, before: tuple[Stage, ...]) -> None:
        if any(stage.grid for stage in before):
            raise UsageError("prune first and quantize then: pruned again, weights would leave the grid")

    def open(self, run: Run) -> "Pruning":
        return Pruning(self, run)

    def __str__(self) -> str:
        return _in_words(self)


@checked_names
@dataclass(frozen=True)
class Quantize(Stage):
    """The stage that puts the remaining weights on a ``grid``: see :func:`niwaki.quantize` for its arguments.

    Zeros stay zeros: it is the same as :class:`Prune` with no more zeros and ``quantize=grid``.
    """

    grid: str | AnyGrid = "int4:128"
    solver: str | Solver | None = None
    effort: str | Effort | None = None
    #: A note on what is not done of what was asked for.
    left_out: str = field(default="", metadata=INTERNAL)

    name: ClassVar[str] = "quantize"

    @cached_property
    def _as_prune(self) -> Prune:
        return Prune(0.0, self.solver, self.effort, quantize=self.grid, left_out=self.left_out)

    @property
    def settled_effort(self) -> Effort:
        return self._as_prune.settled_effort

    @property
    def rounds_to_nearest(self) -> bool:
        return self._as_prune.rounds_to_nearest

    def check_order(self, before: tuple[Stage, ...]) -> None:
        if any(stage.grid for stage in before):
            raise UsageError("weights are on a grid already; quantize once")

    def open(self, run: Run) -> "Pruning":
        return self._as_prune.open(run)

    def __str__(self) -> str:
        return _in_words(self)


def _in_words(stage: Prune | Quantize) -> str:
    """The arguments that were given; the first one needs no name."""
    first, *others = given_fields(stage)
    given = [] if (value := getattr(stage, first)) is None else [str(value)]
    given += [f"{name} {_said(value)}" for name in others if (value := getattr(stage, name)) not in (None, False)]
    return ", ".join(given)


def _said(value: object) -> str:
    """The value of an argument in words."""
    if isinstance(value, Effort):
        return described(describe_effort(value))
    return in_words(describe(value)) if isinstance(value, Solver) else str(value)


class Pruning(Task):
    """:class:`Prune`, opened for a run: the model that it reads, the texts, and what of the request suits these."""

    texts: Texts

    def __init__(self, request: Request, run: Run) -> None:
        self.request = request
        request.check()
        self._open(run)
        run.foreseen["pruning_config"] = pruning_config(self._begun(run))

    def read(self, run: Run) -> None:
        calibrates = not self.request.rounds_to_nearest
        texts = read_texts(self.model, run, self.measurement, calibrates=calibrates)
        self.texts = run.sentences.apart(self.model, texts)
        self.notes += tuple(notes_on_masks(self.request.wanted, self.request.mask_model, self.model))
        self.record: Record = self._begun(run)
        run.seen = self.record.calibration or run.seen

    def _open(self, run: Run) -> None:
        """Opens the model that is read, and checks that what is asked for can be done to it."""
        request, compute = self.request, run.compute
        checkpoint = Checkpoint(run.reading)
        check_one_matrix(checkpoint, "pruning")
        self.format = _format(request, checkpoint)
        self.written = checkpoint.stored if request.keep_format else checkpoint
        self.carried = run.carried(self.written, self.written.size)
        self.model = model = StreamedModel(checkpoint, compute.device, compute.dtype, run.budget)
        self._settle(run)
        self.chosen = request.chosen(len(model.blocks))
        if not request.blocks:
            model.check_coverage()
        model.limit(self.chosen)
        if compute.budget is not None:
            run.budget.left = max(0, compute.budget - self._needed())
        if request.makes_factors:
            check_own_tensors(model.matrices())
        if request.grid:
            request.grid.check(width for matrix in model.matrices() for width in request.widths(matrix))
        self.pattern_of: PatternOf = patterns_of(request.wanted, request.mask_model, model)

    def _settle(self, run: Run) -> None:
        """Sets the effort and the measurement that can be done, and notes on what cannot."""
        reasons = []
        self.measurement = run.measured
        if not self.model.has_head:
            what = "scores" if self.model.has_scores else "sentence vectors"
            near = "" if self.measurement.samples == 0 else f", but how near its {what} are to the dense model's"
            reasons.append(f"this model predicts no words: no perplexity is measured{near}")
        if has_images(run.calibration) and not self.request.rounds_to_nearest:
            reasons.append("calibrated on images: what needs text is left out")
        self.effort = self.request.applied_effort(predicts=not reasons, writes=self.model.pairs is None)
        if reasons and self.effort != self.request.applied_effort():
            reasons[0] += f", and the effort is {described(describe_effort(self.effort, self.request.settled_effort))}"
        if run.compute.tf32 == "always" and not has_tf32(self.model.device):
            reasons.append(f"--tf32 always has no effect: {self.model.device} has no TF32, products are in float32")
        self.notes = tuple(reasons)

    def _needed(self) -> int:
        """Bytes that a run takes without its hidden states, estimated from above: solvers differ."""
        model, request = self.model, self.request
        blocks = [model.matrices(index) for index in range(len(model.blocks))]
        rows, columns = max(model.matrices(), key=lambda matrix: matrix.size).shape
        factors = 2.5 if request.makes_factors else 1  # a square matrix has two of its size, and eigenvectors
        solving = factors * 4 * (2 * columns**2 + 7 * rows * columns)
        grams = max(sum(4 * matrix.shape[1] ** 2 for matrix in block) for block in blocks)
        running = 2 * model.block_size  # its weights, which are not there while matrices are solved, and activations
        weights = factors * max(sum(matrix.size for matrix in block) for block in blocks)
        copies = COPIES + (1 if request.grid or request.keep_format else 0)  # as they are rounded
        fitting = model.block_size + copies * 4 * weights if self.effort.fit.epochs else 0
        shared = sum(4 * matrix.shape[1] ** 2 for matrix in model.matrices() if matrix.blocks)  # until they are pruned
        return int(resident() + shared + max(grams + max(running, solving), fitting))

    def _begun(self, run: Run) -> Record:
        """The record of the run, as far as it is known before the run."""
        request, model, chosen = self.request, self.model, self.chosen
        tf32 = run.compute.tf32 if has_tf32(model.device) else "never"
        has_no_solver, grid = request.rounds_to_nearest or request.only_fits, request.grid
        before = model.checkpoint.pruning.pattern if grid and grid.keeps_zeros else None
        pattern = (before or NO_ZEROS) if has_no_solver else str(request.wanted)
        if request.mask_model is not None:
            within = "" if request.wanted is None else f", within {request.wanted}"
            pattern = f"the mask of {request.mask_model}{within}"
        record = self.begin_record(
            run,
            model,
            method=request.method,
            solver={"name": request.method} if has_no_solver else plain(describe(request.solving)),
            effort={} if request.rounds_to_nearest else describe_effort(self.effort, request.settled_effort),
            quantization=str(grid) if grid else None,
            kept_format=str(KeptFormat(model.checkpoint)) if request.keep_format else None,
            pattern=pattern,
            mask_from=request.mask_source,
            tf32=tf32,
            blocks=[chosen.start, chosen.stop] if len(chosen) < len(model.blocks) else None,
            flops=self._flops(),
        )
        record.notes += [*filter(None, [request.left_out]), *notes_of(model)]
        widest = max(matrix.shape[1] for matrix in model.matrices())
        if record.calibration and (tokens := calibration_tokens(record.calibration)) < widest:
            record.notes.append(
                f"calibrated on {tokens:,} tokens, and the widest matrix has {widest:,} inputs; give more text"
            )
        record.notes += sharing_notes(model.matrices(), fits=self.effort.fit.epochs > 0)
        if not run.stages[-1].is_format:  # which stores them in its own way
            record.notes += self.format.notes(model.matrices())
        if record.kept_format:
            record.notes.append(
                f"the model's files are in {record.kept_format}, and what is pruned is written in that format again"
            )
        if record.part:
            record.notes.append(f"only {record.part} of {len(model.blocks)}, counted from 0: no other is pruned")
        return record

    def _flops(self) -> float:
        """Floating-point operations of the solver, for all matrices."""
        if self.request.rounds_to_nearest:
            return 0.0
        return float(sum(self.request.solving.flops(*matrix.shape) for matrix in self.model.matrices()))

    def asked(self) -> dict[str, Any]:
        request, record, lender = self.request, self.record, self.request.mask_model
        measured = "both" if self.measurement.before else "after"
        return {
            **usually_asked(self.model, self.texts),
            "mask_from": Checkpoint(locate_model(lender)).fingerprint() if lender else request.mask_source,
            "solver": record.solver,
            "effort": record.effort,
            "quantize": record.quantization,
            "keep_format": request.keep_format,
            "revive": request.revive,
            "pattern": str(request.wanted),
            "measure": "none" if self.measurement.samples == 0 else measured,
            "blocks": record.blocks or [0, len(self.model.blocks)],
            "tf32": record.tf32,
        }

    def expected(self, speed: float) -> float | None:
        samples = self.texts.samples
        if not isinstance(samples, Tensor):  # images are of any size
            return None
        operations = measuring(self.model, self.texts, self.measurement.before)
        if self.request.rounds_to_nearest:
            operations += sum(nearest(*matrix.shape) for matrix in self.model.matrices())
        else:
            rounding = sum(self.format.round_flops(*matrix.shape) for matrix in self.model.matrices())
            operations += pruning(self.model, self.effort, samples.numel(), self._flops() + rounding)
        return operations / speed

    def extent(self, run: Run) -> tuple[int, int]:
        return max(0, run.journal.blocks - self.chosen.start), len(self.chosen)

    def work(self, run: Run) -> Record:
        if not run.is_first:
            self._open(run)
            self.notes += tuple(notes_on_masks(self.request.wanted, self.request.mask_model, self.model))
            self.record = self._begun(run)
        measures = self.texts.heldout or run.sentences.windows
        if not measures and self.request.rounds_to_nearest and self.measurement.samples != 0:
            self.record.notes.append("no text was given to measure perplexity on; --text names one")
        record = run.resumed(self.record, len(self.model.blocks))
        store = WeightStore(run, self.format)
        walk = Walk(self.model, self.request, self.effort, self.pattern_of, record, run, store)
        with products(tf32=record.tf32 == "always"):
            if run.place and self.carried:
                self._write(walk, run, run.place, self.carried)
            else:
                walk.blocks(self.texts)
        return walk.record

    def _write(self, walk: Walk, run: Run, place: Workplace, carried: CarriedFiles) -> None:
        """The walk over the blocks and all that is written."""
        request, model, checkpoint = self.request, self.model, self.written
        added = self.format.added(checkpoint, model.matrices())
        run.begin_output(carried, [*checkpoint.shards, SCALES, FACTORS_FILE])
        with CheckpointWriter(checkpoint, place.directory, place.journal.blocks > 0, added) as walk.store.writer:
            walk.blocks(self.texts)
            if request.keep_format:
                walk.store.check_written(model.matrices)
        run.clock.lap("write")
        if run.earlier:
            walk.record = walk.record.after(run.earlier, only_rounds=request.only_rounds)
        write_config(place.directory, checkpoint.config, walk.record)
        self.format.verify(place.directory, checkpoint, model.matrices(), place.journal.zeros)
        run.clock.lap("check")


def _format(request: Request, checkpoint: Checkpoint) -> WeightFormat:
    """What the matrices of ``checkpoint`` are written in."""
    if request.keep_format:
        return KeptFormat(checkpoint)
    if request.makes_factors:
        return Factored(request.factor_grid)
    return OnGrid(request.grid) if request.grid else WeightFormat()
