"""The record of a stage, as far as it is known before the work."""

from typing import Any

from niwaki.models.device import device_name
from niwaki.models.streamed import StreamedModel
from niwaki.options import Calibration
from niwaki.records.record import Record, versions
from niwaki.runs.session import current_session
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


def begin_record(name: str, model: StreamedModel, texts: Texts, calibration: Calibration, **others: Any) -> Record:
    """The record of a run on ``model``, called ``name``, with the fields that need nothing else and ``others``."""
    session, notes = current_session(), [*model.notes]
    if model.checkpoint.is_encoded and not others.get("kept_format"):
        notes.append("the model's files are in FP8 or MXFP4; what is written is in bfloat16")
    return Record(
        command=session.command,
        model=name,
        calibration=texts.described(calibration.seed),
        device=device_name(model.device, session.world),
        dtype=str(model.dtype).removeprefix("torch."),
        versions=versions(),
        notes=[*notes, *texts.notes],
        left_dense=model.left_dense,
        **others,
    )
