"""Whole experts removed from a mixture: by REAP's score alone, and with the others fitted to what is gone.

    python scripts/train_reference.py CORPUS/train.txt.xz MOE --architecture qwen3_moe --blocks 4 --mlp 128 \
        --tokens 9000000 --held CORPUS/held.txt.xz
    python benchmarks/experts.py MOE CORPUS --record benchmarks/results/experts.json

CORPUS has train.txt.xz (books), held.txt.xz (books by others), wikitext2.valid.txt and wikitext2.test.txt. Calibrated
on books or on WikiText-2, 128 windows of 256 tokens; measured on 64 windows of both. "reap" is
`niwaki shrink --experts` without the fit, which is all that it adds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import common  # first: it sets what OpenMP reads when torch is loaded
from transformers.utils import logging

import niwaki
from niwaki.layer import expert_fit
from niwaki.options import Calibration, Measurement
from niwaki.shrinking import experts

LENGTH, SAMPLES, TEXT_SAMPLES = 256, 128, 64
FRACTIONS = (0.25, 0.5)
CALIBRATIONS = {"books": "train.txt.xz", "wikitext2": "wikitext2.valid.txt"}
MEASURED = {"books": "held.txt.xz", "wikitext2": "wikitext2.test.txt"}


def not_fitted(old: Any, inputs: Any, parts: int, residual: Any) -> expert_fit.SumFit:
    """:func:`niwaki.layer.expert_fit.fit_sum` without a sweep."""
    error = float(residual.double().square().sum())
    return expert_fit.SumFit([old(part) for part in range(parts)], error, error, 0)


def main() -> None:
    """Runs all, prints a line for each and writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--record", type=Path, help="write JSON there")
    arguments = parser.parse_args()
    logging.disable_progress_bar()

    def losses(model: str | Path) -> dict[str, list[float]]:
        return {
            name: list(
                niwaki.evaluate(
                    model, Measurement(str(arguments.corpus / file), length=LENGTH, samples=TEXT_SAMPLES)
                ).losses
            )
            for name, file in MEASURED.items()
        }

    cells: list[dict[str, Any]] = []

    def keep(losses: dict[str, list[float]], **cell: Any) -> None:
        cells.append({**cell, "losses": losses})
        means = ", ".join(f"{name} {sum(values) / len(values):.4f}" for name, values in losses.items())
        print(f"{cell}: {means} nats", flush=True)
        common.save(arguments.record, length=LENGTH, samples=SAMPLES, text_samples=TEXT_SAMPLES, cells=cells)

    keep(losses(arguments.model), method="dense")
    for calibration, file in CALIBRATIONS.items():
        text = Calibration(str(arguments.corpus / file), samples=SAMPLES, length=LENGTH)
        for fraction in FRACTIONS:
            for method, fit in {"reap": not_fitted, "fitted": expert_fit.fit_sum}.items():
                with TemporaryDirectory() as scratch, mock.patch.object(experts, "fit_sum", fit):
                    out = Path(scratch) / "out"
                    record = niwaki.shrink(
                        arguments.model, out, experts=fraction, calibration=text, measurement=Measurement(samples=0)
                    )
                    assert record.structure is not None
                    keep(
                        losses(out),
                        method=method,
                        experts=fraction,
                        calibration=calibration,
                        removed=record.structure.removed,
                        seconds=record.seconds["total"],
                        errors=[each.error for each in record.matrices],
                    )


if __name__ == "__main__":
    main()
