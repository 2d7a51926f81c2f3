"""Arguments of prune, shrink and compare from one flat list of names, as tests vary them one at a time."""

from __future__ import annotations

from typing import Any

from niwaki import Calibration, Compute, Measurement

_CALIBRATION = {"calibration": "text", "samples": "samples", "length": "length", "order": "order", "seed": "seed"}
_MEASUREMENT = {"text": "text", "text_samples": "samples", "before": "before"}
_COMPUTE = {"device": "device", "dtype": "dtype", "tf32": "tf32", "max_memory": "max_memory"}


def arguments(**flat: Any) -> dict[str, Any]:
    """``arguments(sparsity=0.5, calibration="demo", samples=4, device="cpu", solver="wanda")`` and so on.

    ``measure`` is "both", "after" or "none": the models that perplexity is measured of.
    """
    for name, new in (("sparsity", "pattern"), ("sparsities", "patterns"), ("texts", "text")):
        if flat.get(name) is not None:
            flat[new] = flat[name]
        flat.pop(name, None)
    match flat.pop("measure", "both"):
        case "none":
            flat["text_samples"] = 0
        case "after":
            flat["before"] = False
    for name, kind, fields in (
        ("calibration", Calibration, _CALIBRATION),
        ("measurement", Measurement, _MEASUREMENT),
        ("compute", Compute, _COMPUTE),
    ):
        given = {field: flat.pop(key) for key, field in fields.items() if key in flat}
        if given:
            flat[name] = kind(**given)
    return flat
