"""Efforts that heal: a model is pruned, and what is left of it then trained, as one run."""

import dataclasses
from pathlib import Path

from torch import Tensor

from niwaki.models.checkpoint.reading import Checkpoint, locate_model
from niwaki.models.conversations import has_images
from niwaki.models.output import check_output, check_same_run, finish_move, first_part, is_begun
from niwaki.models.text import Windows
from niwaki.options import Calibration, Measurement
from niwaki.pruning import prune
from niwaki.pruning.healing import heal
from niwaki.pruning.request import Request
from niwaki.pruning.session import current_session
from niwaki.records.progress import Progress
from niwaki.records.record import Record


def prune_and_heal(request: Request, out: str | Path, restart: bool, progress: Progress | None) -> Record:
    """Prunes as ``request`` says, and trains the result on ``request.effort.healing`` times as many tokens.

    The pruned model is beside what is written for ``out`` until that is complete, see :mod:`niwaki.models.output`. Each
    part resumes where it was stopped when the same is asked for again. What cannot be healed as a whole is pruned
    alone, with a note that says so first. Returns the record of both. NiwakiError as in :func:`niwaki.prune` and
    :func:`niwaki.heal`.
    """
    world, source = current_session().world, locate_model(request.model)
    masks = [locate_model(request.mask_model)] if request.mask_model else []
    target = check_output(source, out, *masks) if world.first else Path(out)
    if why := world.received(_refusal(request, source)):  # the memory that is left may differ between processes
        note = f"what is left is not trained (healing, of the effort): {why}"
        return prune.run(dataclasses.replace(request, notes=(note,)), target, restart, progress)
    if world.first and not restart:
        check_same_run(target)
    measured_later = dataclasses.replace(request, measurement=Measurement(samples=0))
    pruned = prune.run(measured_later, target, restart, progress, "first")
    if (moved := world.received(finish_move(target) if world.first else None)) is not None:
        if progress and world.first:
            progress.end(moved)
        return moved
    asked = heal.HealingRequest(
        pruned=str(first_part(target)),
        teacher=request.model,
        tokens=max(1, int(request.effort.healing * pruned.calibration_tokens)),
        calibration=dataclasses.replace(
            request.calibration, samples=Calibration().samples, order=request.calibration.order or "first"
        ),
        measurement=request.measurement,
        compute=dataclasses.replace(request.compute, tf32="auto"),
        pruning=pruned,
    )
    try:
        return heal.run(asked, target, restart, progress)
    except BaseException:
        if progress and world.first and not is_begun(target):  # of what is begun healing says how far it came
            blocks = len({matrix.block for matrix in pruned.matrices})
            progress.stopped(blocks, blocks)
        raise


def _refusal(request: Request, source: Path) -> str:
    """Why the result is not to be healed; "" where it is."""
    if request.blocks:
        return "only some blocks are pruned, and training would change all"
    if request.keep_format:
        return "the format is kept, which trained weights would leave"
    if has_images(request.calibration):
        return "it is calibrated on images"
    if _windows(request.calibration) <= current_session().world.size:
        return "some text is held out, and there is only one window of it for each process"
    return heal.refusal(Checkpoint(source), request.compute)


def _windows(calibration: Calibration) -> int:
    """How many there are of the text."""
    given = [text.tokens if isinstance(text, Windows) else text for text in calibration.texts]
    return sum(len(text) for text in given if isinstance(text, Tensor)) or calibration.samples
