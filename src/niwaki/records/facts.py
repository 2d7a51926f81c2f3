"""What was done to a model, in names and values for tables: of the screen, the model card and reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from niwaki.records.record import Record
from niwaki.records.wording import counted, other_samples, short_text, two_digits


def facts(record: Record) -> dict[str, str]:
    """By name what was asked for and what it came to, without what was measured of the model."""
    structure, sparsities = record.structure, [100 * matrix.sparsity for matrix in record.matrices] or [0.0]
    low, high = min(sparsities), max(sparsities)
    between = f", {low:.1f} to {high:.1f} % in one" if high - low > 0.1 else ""
    number = counted(len(record.matrices), "matrix", "matrices") if record.matrices else "the matrices"
    mean = f"geometric mean over matrices{record.of_which_stage}"
    has_zeros = not (record.only_shrinks or record.only_quantizes)
    zeros = "fewer weights" if record.has_factors else "zeros"
    shown: dict[str, object] = {
        "removed" if record.only_shrinks else "pattern": "" if record.only_quantizes else record.pattern,
        "mask from": record.mask_from,
        "parameters": structure,
        zeros: f"{100 * record.sparsity:.2f} % of {number}{between}" if has_zeros else "",
        "left dense": "" if structure else record.stays,
        "healed": record.healing,
        "error": f"{two_digits(record.mean_error)} of the {record.error_of} square ({mean})" if record.matrices else "",
        "format of the weights" if record.kept_format else "grid of the weights": record.rounding,
        "embeddings and head": record.embeddings,
        "own text": record.own_text,
    }
    return {name: str(value) for name, value in shown.items() if value}


def calibration_of(calibration: Mapping[str, Any]) -> str:
    """How much of which text, such as "128 windows of 2,048 tokens of c4"."""
    windows = counted(calibration.get("samples", "?"), "window")
    what = other_samples(calibration) or f"{windows} of {counted(calibration.get('sequence_length', '?'), 'token')}"
    return f"{what} of {' + '.join(map(short_text, str(calibration.get('source', '?')).split(' + ')))}"
