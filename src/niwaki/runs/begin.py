"""The record of a stage, as far as it is known before the work."""

from typing import Any

from niwaki.checkpoints.reading import Checkpoint, Pruning
from niwaki.models.device import device_name
from niwaki.models.streamed import StreamedModel
from niwaki.records.record import Record, versions
from niwaki.runs.session import current_session
from niwaki.runs.stage import Run
from niwaki.texts.texts import Texts


def usually_asked(model: StreamedModel, texts: Texts, record: Record) -> dict[str, Any]:
    """What nearly every stage on ``model`` has to share with a run that it resumes, see :meth:`.stage.Task.asked`."""
    return {
        "model": model.checkpoint.fingerprint(),
        "calibration": texts.calibration and texts.calibration.fingerprint(),
        "text": texts.only and texts.only.fingerprint(),
        "device": model.device.type,
        "dtype": record.dtype,
        "versions": record.versions,
    }


def begin_record(run: Run, model: StreamedModel, texts: Texts, read: Checkpoint | None = None, **others: Any) -> Record:
    """The record of the stage of ``run`` that is opened, with the fields that need nothing else and ``others``.

    What config.json says of the model that is ``read``, by default ``model``, is kept as far as the stage leaves it
    true; what is not kept, and not among ``others``, is dropped with a note.
    """
    session, notes, made = current_session(), [*model.notes], (read or model.checkpoint).pruning
    kept: dict[str, Any] = {"embeddings": made.embeddings}  # which no stage changes but those that put them on a grid
    if run.stages[run.number].keeps_matrices:
        blocks = made.blocks and [*made.blocks]
        kept |= {"quantization": made.quantization, "blocks": blocks, "sparsity": made.sparsity}
    else:
        notes += _dropped(made, others)
    if model.checkpoint.is_encoded and not others.get("kept_format"):
        notes.append("the model's files are in FP8 or MXFP4; what is written is in bfloat16")
    return Record(
        command=session.command,
        model=run.model,
        calibration=texts.described(run.calibration.seed),
        device=device_name(model.device, session.world),
        dtype=str(model.dtype).removeprefix("torch."),
        versions=versions(),
        notes=[*notes, *texts.notes],
        left_dense=model.left_dense,
        **{**kept, **others},
    )


def _dropped(made: Pruning, others: dict[str, Any]) -> list[str]:
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
