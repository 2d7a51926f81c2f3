"""Tensors that a stage decides once and keeps until it is done, so that a resumed run has the same."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from niwaki.errors import OutputError
from niwaki.files import output_errors
from niwaki.runs.stage import Run

T = TypeVar("T")
#: The entry of the file that has all metadata, as JSON.
_METADATA = "metadata"


def kept_once(
    run: Run, load: Callable[[Path, str], T | None], make: Callable[[], T], save: Callable[[T, Path, str], str]
) -> T:
    """What a stage decides before its blocks, the same in all processes; a resumed run has what it began with.

    ``load`` reads it, or None where the file has another SHA-256; ``make`` decides it, and ``save`` writes it, which
    gives the SHA-256 and raises OutputError where another one is expected.
    """
    place, journal = run.place, run.journal
    kept = load(place.plan, journal.plan) if place and journal.blocks else None
    if (kept := run.world.received(kept)) is not None:
        return kept
    if journal.blocks:
        run.progress.note("the plan of the earlier run is damaged and made again")
    made = make()
    if place:
        journal.plan = save(made, place.plan, journal.plan)
    return made


def save_tensors(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None, expected: str = ""
) -> str:
    """Writes ``tensors``, in safetensors; the file's SHA-256. OutputError if another one was ``expected``."""
    # In one entry: several are written in an order that changes.
    data = save(tensors, metadata={_METADATA: json.dumps(metadata or {}, sort_keys=True)})
    digest = hashlib.sha256(data).hexdigest()
    if expected not in ("", digest):
        raise OutputError(f"{path} was damaged, and made again it is not what it was; start over with --restart")
    with output_errors(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return digest


def load_tensors(path: Path, digest: str) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """What :func:`save_tensors` wrote, and its metadata; None where it is not there or has another SHA-256."""
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        return None
    with safe_open(path, "pt") as file:
        metadata = json.loads((file.metadata() or {}).get(_METADATA, "{}"))
        return {key: file.get_tensor(key) for key in file.keys()}, metadata  # noqa: SIM118 - no dict
