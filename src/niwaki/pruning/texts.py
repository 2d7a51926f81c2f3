"""The texts of a stage that puts weights on a grid or makes them zero."""

from niwaki.models.streamed import StreamedModel
from niwaki.options import Measurement
from niwaki.runs.stage import USUAL_WINDOWS, Run
from niwaki.texts.texts import Texts


def read_texts(model: StreamedModel, run: Run, measurement: Measurement, calibrates: bool) -> Texts:
    """What the stage ``calibrates`` and measures on; where it rounds to the nearest only the latter, if there is one.

    Errors are as of :meth:`.Texts.read`.
    """
    if not calibrates:
        return Texts.to_measure(model, run.calibration, measurement, USUAL_WINDOWS)
    run.progress.status("reading the text to calibrate on")
    return Texts.read(model, run.written(model, run.calibration), measurement, USUAL_WINDOWS)
