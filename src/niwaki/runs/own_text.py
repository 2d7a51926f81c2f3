"""Text that the dense model writes for a stage to calibrate on, beside the text that was given."""

import torch
from torch import Tensor

from niwaki.errors import UnsupportedModelError
from niwaki.models.streamed import StreamedModel
from niwaki.records.record import Record
from niwaki.runs.session import remembered
from niwaki.runs.stage import Run
from niwaki.texts.synthesis import synthesize


def written(
    run: Run, model: StreamedModel, record: Record, share: float, samples: Tensor, bos: int | None
) -> Tensor | None:
    """(count, length) int64, the same in all processes: a ``share`` of as many windows as ``samples`` of all of them.

    Each window begins with ``bos`` if there is one. None where the model cannot write, and ``record`` has a note
    that says so; see :func:`niwaki.texts.synthesis.synthesize`.
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
