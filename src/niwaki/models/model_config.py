"""What niwaki adds to ``config.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from niwaki import __version__
from niwaki.files import write_json
from niwaki.records.record import Record


def write_config(directory: Path, values: dict[str, Any], record: Record) -> None:
    """``config.json``: ``values`` with ``pruning_config``, an extra key that transformers keeps and ignores.

    Not ``quantization_config``: with a sparsity format there, transformers loads random weights.
    """
    pruning = {
        "library": "niwaki",
        "version": __version__,
        **{name: getattr(record, name) for name in ("method", "solver", "effort", "mask_from", "pattern")},
        "sparsity": round(record.sparsity, 6),
        **{name: value for name in ("quantization", "blocks") if (value := getattr(record, name))},
    }
    write_json(directory / "config.json", json.dumps({**values, "pruning_config": pruning}, indent=2) + "\n")
