"""What a run is asked for: checked, fingerprinted, recorded; and the pattern of each matrix."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from niwaki.checkpoints.reading import Checkpoint
from niwaki.effort import Effort, describe as describe_effort, described
from niwaki.errors import UnknownNameError, UsageError, named
from niwaki.files import given_path
from niwaki.layer.grid import Grid
from niwaki.layer.patterns import Among, Fixed, MixedNM, Pattern
from niwaki.layer.products import has_tf32
from niwaki.layer.solvers import MaskThenUpdate, Solver, describe, make_solver
from niwaki.models.extra import notes_of
from niwaki.models.kept_format import KeptFormat
from niwaki.models.layout import Matrix, check_dtypes
from niwaki.models.locate import locate_model
from niwaki.models.scales import stored_as_usual
from niwaki.models.sharing import sharing_notes
from niwaki.models.streamed import StreamedModel
from niwaki.options import Calibration, Compute, Measurement
from niwaki.records.data import plain
from niwaki.records.record import Record
from niwaki.records.wording import counted
from niwaki.runs.begin import begin_record
from niwaki.texts.conversations import has_images
from niwaki.texts.texts import Texts

PatternOf = Callable[[Matrix], Pattern]


@dataclass(frozen=True)
class Request:
    """The arguments of :func:`niwaki.prune`, as values that have been checked."""

    model: str
    method: str  # what the solver is called
    solver: Solver  # with the masks of another one if that was asked for
    effort: Effort
    pattern: Pattern | None  # None where only a mask was given
    mask_from: str | None  # where masks come from, as it was given
    mask_model: str | None  # the pruned model that has them, where they come from one
    grid: Grid | None
    keep_format: bool
    revive: bool  # whether weights that are zero in the model may become others
    blocks: tuple[int, int] | None
    calibration: Calibration
    measurement: Measurement
    compute: Compute
    notes: tuple[str, ...] = ()  # on what is not done of what was asked for

    def __post_init__(self) -> None:
        if isinstance(self.pattern, MixedNM) and self.effort.plan.allocation == "owl":
            raise UsageError(f"owl wants sparsities that {self.pattern} has not; take the allocation loss, or error")
        if self.keep_format and self.grid:
            raise UsageError(f"weights are on the grid {self.grid} or keep their format, not both; leave one out")

    @property
    def _shares(self) -> bool:
        """Whether some matrices may have more zeros than others."""
        return self.mask_model is None and self.pattern is not None and self.pattern.at(0.0) is not None

    def settled(self, model: StreamedModel, is_first: bool) -> "Request":
        """The same with what can be done of it for ``model``, which gets a note on what cannot.

        Only the first stage of a run measures the dense model.
        """
        reasons, measurement = [], replace(self.measurement, before=self.measurement.before and is_first)
        if not model.has_head:
            reasons.append("this model has no head: no perplexity is measured")
            measurement = replace(measurement, samples=0)
        if has_images(self.calibration):
            reasons.append("calibrated on images: what needs text is left out")
        effort = self.effort.settled(self._shares, predicts=not reasons)
        if reasons and effort != self.effort.settled(self._shares):
            reasons[0] += f", and the effort is {described(describe_effort(effort))}"
        model.notes += reasons
        return replace(self, effort=effort, measurement=measurement)

    def chosen(self, count: int) -> range:
        """The blocks to prune, of ``count``; raises UsageError where there are no such blocks."""
        start, stop = self.blocks or (0, count)
        if not 0 <= start < stop <= count:
            raise UsageError(f"invalid range of blocks {start}:{stop}; the model's are 0:{count}")
        return range(start, stop)

    def record(self, model: StreamedModel, texts: Texts) -> Record:
        """The record of the run, as far as it is known before the run."""
        tf32 = self.compute.tf32 if has_tf32(model.device) else "never"
        chosen, pattern = self.chosen(len(model.blocks)), str(self.pattern)
        if self.mask_model is not None:
            within = "" if self.pattern is None else f", within {self.pattern}"
            pattern = f"the mask of {self.mask_model}{within}"
        record = begin_record(
            self.model,
            model,
            texts,
            self.calibration,
            method=self.method,
            solver=plain(describe(self.solver)),
            effort=describe_effort(self.effort),
            quantization=str(self.grid) if self.grid else None,
            kept_format=str(KeptFormat(model.checkpoint)) if self.keep_format else None,
            pattern=pattern,
            mask_from=self.mask_from,
            tf32=tf32,
            blocks=[chosen.start, chosen.stop] if len(chosen) < len(model.blocks) else None,
            flops=float(sum(self.solver.flops(*matrix.shape) for matrix in model.matrices())),
        )
        if self.compute.tf32 == "always" and tf32 == "never":
            note = f"--tf32 always has no effect: {model.device} has no TF32, products are in float32"
            record.notes.insert(len(model.notes), note)
        record.notes += [*self.notes, *notes_of(model)]
        if (tokens := record.calibration_tokens) < (widest := max(matrix.shape[1] for matrix in model.matrices())):
            record.notes.append(
                f"calibrated on {tokens:,} tokens, and the widest matrix has {widest:,} inputs; give more text"
            )
        record.notes += sharing_notes(model.matrices(), fits=self.effort.fit.epochs > 0)
        if self.grid:
            record.notes.append(stored_as_usual(self.grid, model.matrices()))
        if record.kept_format:
            record.notes.append(
                f"the model's files are in {record.kept_format}, and what is pruned is written in that format again"
            )
        if record.part:
            record.notes.append(f"only {record.part} of {len(model.blocks)}, counted from 0: no other is pruned")
        return record

    def fingerprint(self, model: StreamedModel, texts: Texts, record: Record) -> dict[str, Any]:
        """By name, all that has to be the same for a run to resume, or for processes to share one."""
        masks = Checkpoint(locate_model(self.mask_model)).fingerprint() if self.mask_model else self.mask_from
        measured = "both" if self.measurement.before else "after"
        return {
            "model": model.checkpoint.fingerprint(),
            "mask_from": masks,
            "solver": record.solver,
            "effort": record.effort,
            "quantize": record.quantization,
            "keep_format": self.keep_format,
            "revive": self.revive,
            "pattern": str(self.pattern),
            "calibration": texts.calibration.fingerprint(),
            "text": texts.only and texts.only.fingerprint(),
            "measure": "none" if self.measurement.samples == 0 else measured,
            "blocks": record.blocks or [0, len(model.blocks)],
            "device": model.device.type,
            "dtype": record.dtype,
            "tf32": record.tf32,
            "versions": record.versions,
        }


def take_masks(solver: Solver, mask_from: str | None) -> tuple[Solver, str | None]:
    """(``solver``, with another one's masks where ``mask_from`` names that; ``mask_from``, where it is a pruned model).

    Raises UsageError where it is neither.
    """
    if mask_from is None or given_path(mask_from).is_dir() or "/" in mask_from:
        return solver, mask_from
    try:
        return MaskThenUpdate(make_solver(mask_from), solver), None
    except UnknownNameError as error:
        raise UsageError(f"there is no directory {mask_from} to take masks from, and {error}") from None


def patterns_of(wanted: Pattern | None, mask_model: str | None, streamed: StreamedModel) -> PatternOf:
    """The pattern of each matrix: the same for all, or the mask that it has in another model.

    With both, a mask with too few zeros for the pattern gets more, and may be refined within it; where masks have other
    zeros than it asks for, the model gets a note. All are checked first, so that no error comes after hours: UsageError
    where there is neither, or the pattern does not fit the matrices; errors of
    :func:`~niwaki.models.layout.check_dtypes`.
    """
    matrices = streamed.matrices()
    check_dtypes(streamed.checkpoint, matrices)
    if wanted is not None:
        for matrix in matrices:
            with named(matrix.label):
                wanted.check(matrix.shape)
    if mask_model is None:
        if wanted is None:
            raise UsageError("say how sparse: a sparsity such as 0.6, or a pattern such as 2:4")
        return lambda _: wanted
    lender, own = Checkpoint(locate_model(mask_model)), streamed.checkpoint
    for matrix in matrices:
        shape = own.entries[matrix.key].shape
        if matrix.key not in lender.entries or lender.entries[matrix.key].shape != shape:
            raise UsageError(f"{mask_model} cannot lend its mask: no {matrix.key!r} of shape {shape}")

    def masked(matrix: Matrix) -> Pattern:
        mask = (matrix.read(lender) != 0).to(streamed.device)
        return Fixed(mask) if wanted is None else _extended(mask, wanted)

    if wanted is not None:
        streamed.notes += _notes_on_masks(matrices, lender, wanted, mask_model)
    return masked


def _extended(mask: Tensor, pattern: Pattern) -> Pattern:
    """``mask`` as it is where ``pattern`` asks for no zeros beyond its own, else with those that are missing."""
    extended = Among(pattern, mask, refinable=True)
    return Fixed(mask, pattern) if torch.equal(extended.mask(mask.float()), mask) else extended


def _notes_on_masks(matrices: list[Matrix], lender: Checkpoint, pattern: Pattern, source: str) -> list[str]:
    """What to note where the masks of ``source`` have other zeros than ``pattern`` asks for."""
    zeros = asked = added = 0
    for matrix in matrices:
        with named(matrix.label):
            mask = matrix.read(lender) != 0
            # With scores 1 for kept and 0 for pruned weights an allowed mask is the best one.
            nearest, extended = (each.mask(mask.float()) for each in (pattern, Among(pattern, mask)))
            zeros += mask.numel() - int(mask.count_nonzero())
            asked += mask.numel() - int(nearest.count_nonzero())
            added += int((mask & ~extended).count_nonzero())
    if not added and zeros == asked:
        return []
    percent = 100 / sum(matrix.size for matrix in matrices)
    how = f"to satisfy it {counted(added, 'weight')} more become zero" if added else "all of them stay"
    return [
        f"the mask of {source} has {zeros:,} zeros ({zeros * percent:.3g} %), and {pattern} asks for {asked:,} "
        f"({asked * percent:.3g} %): {how}"
    ]
