"""``niwaki demo``."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from niwaki.cli.common import in_session
from niwaki.cli.display import TableDisplay
from niwaki.cli.options import RecordFile
from niwaki.files import write_json
from niwaki.options import Calibration, Measurement


def demo(
    samples: Annotated[int, Option(help="Windows of 256 tokens to calibrate on.")] = 64,
    text_samples: Annotated[int, Option(help="Windows of 256 tokens to measure on.")] = 64,
    record: RecordFile = None,
) -> None:
    """Prune the embedded model by the methods of the paper's table 1 and by the default."""
    calibration = Calibration("demo", samples=samples, length=256)
    measurement = Measurement("demo-held", samples=text_samples)
    with TableDisplay("pruning the embedded model by several methods") as display, in_session():
        from niwaki.evaluation.compare import compare
        from niwaki.models.output import check_record

        record = record and check_record(record)
        comparison = compare("demo", calibration=calibration, measurement=measurement, progress=display)
    if record is not None:
        write_json(record, comparison.to_json())
