"""What a run is asked for: checked, fingerprinted, recorded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from niwaki.errors import UnknownNameError, UsageError
from niwaki.layer.grid import Grid, parse_grid
from niwaki.layer.patterns import Pattern, make_pattern
from niwaki.layer.solvers import DEFAULT_SOLVER, MaskThenUpdate, Solver, describe, make_solver
from niwaki.layer.tf32 import has_tf32
from niwaki.models.checkpoint import Checkpoint, locate_model
from niwaki.models.device import device_name
from niwaki.models.processes import World
from niwaki.models.scales import stored_as_usual
from niwaki.models.streamed import StreamedModel
from niwaki.models.text import Texts
from niwaki.options import TF32, Calibration, Compute, Measurement, Text
from niwaki.pruning.effort import Effort, make_effort, usual_effort
from niwaki.pruning.effort import describe as describe_effort
from niwaki.pruning.masks import described
from niwaki.records.parameters import plain
from niwaki.records.record import Record, versions


@dataclass(frozen=True)
class Request:
    """Everything that :func:`niwaki.prune` was asked for; its arguments, as values that have been checked.

    Attributes:
        model: The directory or hub id, as it was given.
        method: What the solver is called.
        solver: The solver, which takes its masks from another one if that was asked for.
        effort: What is done for the whole model.
        pattern: The pattern; None where only a mask was given.
        mask_from: Where masks come from, as it was given.
        mask_model: The pruned model that has them, where they come from one.
        grid: What the remaining weights are put on.
        blocks: The first block to prune and the one after the last; None for all.
        calibration: The text to calibrate on.
        measurement: The text to measure on.
        compute: Where blocks run.
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

    @classmethod
    def of(
        cls,
        model: str | Path,
        pattern: float | str | Pattern | None = None,
        *,
        solver: str | Solver | None = None,
        effort: str | Effort | None = None,
        mask_from: str | Path | None = None,
        grid: str | Grid | None = None,
        blocks: tuple[int, int] | None = None,
        calibration: Calibration | Text = Calibration(),
        measurement: Measurement | Text | None = Measurement(),
        compute: Compute | str = Compute(),
    ) -> Request:
        """From the arguments of :func:`niwaki.prune`, most of which may be text.

        Raises:
            UsageError: one of them is not valid, whatever the model.
        """
        if effort is None:
            effort = usual_effort(solver, mask_from)
        given = DEFAULT_SOLVER if solver is None else solver
        chosen = make_solver(given) if isinstance(given, str) else given
        method = given if isinstance(given, str) else str(describe(given)["name"])
        wanted = None if pattern is None else make_pattern(pattern, chosen.default_pattern)
        mask_model = mask_from = None if mask_from is None else str(mask_from)
        if mask_from is not None and not Path(mask_from).expanduser().is_dir() and "/" not in mask_from:
            try:
                chosen, mask_model = MaskThenUpdate(make_solver(mask_from), chosen), None
            except UnknownNameError as error:
                raise UsageError(f"there is no directory {mask_from} to take masks from, and {error}") from None
        measurement = Measurement.of(measurement)
        measurement.only_text("prune")
        return cls(
            model=str(model),
            method=method,
            solver=chosen,
            effort=make_effort(effort) if isinstance(effort, str) else effort,
            pattern=wanted,
            mask_from=mask_from,
            mask_model=mask_model,
            grid=parse_grid(grid) if isinstance(grid, str) else grid,
            blocks=blocks,
            calibration=Calibration.of(calibration),
            measurement=measurement,
            compute=Compute.of(compute),
        )

    def chosen(self, count: int) -> range:
        """The blocks to prune, of ``count``.

        Raises:
            UsageError: there are no such blocks.
        """
        start, stop = self.blocks or (0, count)
        if not 0 <= start < stop <= count:
            raise UsageError(f"invalid range of blocks {start}:{stop}; the model's are 0:{count}")
        return range(start, stop)

    def tf32(self, model: StreamedModel) -> TF32:
        """What can be used of it where ``model`` runs."""
        return self.compute.tf32 if has_tf32(model.device) else "never"

    def record(self, model: StreamedModel, texts: Texts, command: str, world: World) -> Record:
        """The record of the run, as far as it is known before the run."""
        used, chosen = self.tf32(model), self.chosen(len(model.blocks))
        notes = [*model.notes]
        if self.compute.tf32 == "always" and used == "never":
            notes.append(f"--tf32 always has no effect: {model.device} has no TF32, products are in float32")
        record = Record(
            command=command,
            model=self.model,
            method=self.method,
            solver=plain(describe(self.solver)),
            effort=describe_effort(self.effort),
            quantization=str(self.grid) if self.grid else None,
            pattern=described(self.pattern, self.mask_model),
            mask_from=self.mask_from,
            calibration=texts.calibration.described(self.calibration.seed),
            device=device_name(model.device, world),
            dtype=str(model.dtype).removeprefix("torch."),
            tf32=used,
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
        mask_from = self.mask_from
        if self.mask_model:
            mask_from = Checkpoint(locate_model(self.mask_model)).fingerprint()
        heldout = texts.only
        chosen = self.chosen(len(model.blocks))
        return {
            "model": model.checkpoint.fingerprint(),
            "mask_from": mask_from,
            "solver": repr(self.solver),
            "effort": repr(self.effort),
            "quantize": record.quantization,
            "pattern": str(self.pattern),
            "calibration": texts.calibration.fingerprint(),
            "text": heldout and heldout.fingerprint(),
            "measure": self.measure,
            "blocks": [chosen.start, chosen.stop],
            "device": model.device.type,
            "dtype": record.dtype,
            "tf32": record.tf32,
            "versions": record.versions,
        }

    @property
    def measure(self) -> str:
        """Which models perplexity is measured of: "both", "after" or "none"."""
        if self.measurement.samples == 0:
            return "none"
        return "both" if self.measurement.before else "after"
