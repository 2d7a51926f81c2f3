"""What a run is asked for: checked, fingerprinted, recorded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from niwaki.errors import UnknownNameError, UsageError
from niwaki.layer.grid import Grid
from niwaki.layer.patterns import Pattern
from niwaki.layer.solvers import MaskThenUpdate, Solver, describe, make_solver
from niwaki.layer.tf32 import has_tf32
from niwaki.models.checkpoint import Checkpoint, locate_model
from niwaki.models.device import device_name
from niwaki.models.processes import World
from niwaki.models.scales import stored_as_usual
from niwaki.models.streamed import StreamedModel
from niwaki.models.text import Texts
from niwaki.options import Calibration, Compute, Measurement
from niwaki.pruning.effort import Effort, describe as describe_effort
from niwaki.records.data import plain
from niwaki.records.record import Record, versions


@dataclass(frozen=True)
class Request:
    """The arguments of :func:`niwaki.prune`, as values that have been checked.

    Attributes:
        method: What the solver is called.
        solver: It takes its masks from another one if that was asked for.
        pattern: None where only a mask was given.
        mask_from: Where masks come from, as it was given.
        mask_model: The pruned model that has them, where they come from one.
    """

    model: str
    method: str
    solver: Solver
    effort: Effort
    pattern: Pattern | None
    mask_from: str | None
    mask_model: str | None
    grid: Grid | None
    blocks: tuple[int, int] | None
    calibration: Calibration
    measurement: Measurement
    compute: Compute

    def chosen(self, count: int) -> range:
        """The blocks to prune, of ``count``; raises UsageError where there are no such blocks."""
        start, stop = self.blocks or (0, count)
        if not 0 <= start < stop <= count:
            raise UsageError(f"invalid range of blocks {start}:{stop}; the model's are 0:{count}")
        return range(start, stop)

    def record(self, model: StreamedModel, texts: Texts, command: str, world: World) -> Record:
        """The record of the run, as far as it is known before the run."""
        tf32 = self.compute.tf32 if has_tf32(model.device) else "never"
        chosen, pattern, notes = self.chosen(len(model.blocks)), str(self.pattern), [*model.notes]
        if self.mask_model is not None:
            within = "" if self.pattern is None else f", within {self.pattern}"
            pattern = f"the mask of {self.mask_model}{within}"
        if self.compute.tf32 == "always" and tf32 == "never":
            notes.append(f"--tf32 always has no effect: {model.device} has no TF32, products are in float32")
        record = Record(
            command=command,
            model=self.model,
            method=self.method,
            solver=plain(describe(self.solver)),
            effort=describe_effort(self.effort),
            quantization=str(self.grid) if self.grid else None,
            pattern=pattern,
            mask_from=self.mask_from,
            calibration=texts.calibration.described(self.calibration.seed),
            device=device_name(model.device, world),
            dtype=str(model.dtype).removeprefix("torch."),
            tf32=tf32,
            blocks=[chosen.start, chosen.stop] if len(chosen) < len(model.blocks) else None,
            flops=float(sum(self.solver.flops(*matrix.shape) for matrix in model.matrices())),
            versions=versions(),
            notes=[*notes, *texts.notes],
        )
        if self.grid:
            record.notes.append(stored_as_usual(self.grid))
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
            "solver": repr(self.solver),
            "effort": repr(self.effort),
            "quantize": record.quantization,
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
    if mask_from is None or Path(mask_from).expanduser().is_dir() or "/" in mask_from:
        return solver, mask_from
    try:
        return MaskThenUpdate(make_solver(mask_from), solver), None
    except UnknownNameError as error:
        raise UsageError(f"there is no directory {mask_from} to take masks from, and {error}") from None
