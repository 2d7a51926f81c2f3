"""The effort "heal": a model is pruned, and what is left of it then trained, as one run."""

import dataclasses
from pathlib import Path

from niwaki.models.checkpoint.reading import Checkpoint, locate_model
from niwaki.models.conversations import check_no_images
from niwaki.models.output import check_output, discard, unfinished
from niwaki.options import Calibration
from niwaki.pruning.healing import heal
from niwaki.pruning.prune import run
from niwaki.pruning.request import Request
from niwaki.pruning.session import current_session
from niwaki.records.progress import Progress
from niwaki.records.record import Record


def prune_and_heal(request: Request, out: str | Path, restart: bool, progress: Progress | None) -> Record:
    """Prunes as ``request`` says, and trains the result on ``request.effort.healing`` times as many tokens.

    The pruned model is next to ``out`` in a hidden directory until then. Each part resumes where it was stopped when
    the same is asked for again. Returns the record of the healing; ``niwaki.base.json`` has that of the pruning.
    NiwakiError as in :func:`niwaki.prune` and :func:`niwaki.heal`; for what cannot be healed, before any pruning.
    """
    world, source, compute = current_session().world, locate_model(request.model), request.compute
    target = check_output(source, out) if world.first else Path(out)
    check_no_images(request.calibration, "healing")
    heal.check(Checkpoint(source), compute)
    first = target.with_name(f"{target.name}.pruned")
    effort = dataclasses.replace(request.effort, healing=0.0)
    pruned = run(dataclasses.replace(request, effort=effort), first, restart, progress, is_all=False)
    tokens = pruned.calibration["samples"] * pruned.calibration["sequence_length"]
    record = heal.heal(
        unfinished(first),
        target,
        request.model,
        tokens=max(1, int(request.effort.healing * tokens)),
        calibration=dataclasses.replace(request.calibration, samples=Calibration().samples),
        measurement=request.measurement,
        compute=dataclasses.replace(compute, tf32="auto"),
        called=request.model,
        restart=restart,
        progress=progress,
    )
    if world.first:
        discard(first)
    return record
