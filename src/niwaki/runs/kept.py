"""Tensors that a stage decides once and keeps until it is done, so that a resumed run has the same."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from niwaki.errors import OutputError
from niwaki.files import output_errors
from niwaki.runs.stage import Run

K = TypeVar("K", bound="Kept")
#: The entry of the file that has all metadata, as JSON.
_METADATA = "metadata"


class Kept:
    """A dataclass of tensors, of what JSON has, and of dicts of such by text or tuples: it can be kept on disk."""

    def save(self, path: Path, expected: str = "") -> str:
        """Writes it, on disk at the return; the file's SHA-256. OutputError if another one was ``expected``."""
        tensors: dict[str, Tensor] = {}
        rest = json.dumps(_taken_apart(vars(self), tensors))
        # In one entry: several are written in an order that changes.
        data = save(tensors, metadata={_METADATA: rest})
        digest = hashlib.sha256(data).hexdigest()
        if expected not in ("", digest):
            raise OutputError(f"{path} was damaged, and made again it is not what it was; start over with --restart")
        with output_errors(path):
            path.parent.mkdir(exist_ok=True)
            with path.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        return digest

    @classmethod
    def load(cls, path: Path, digest: str) -> Self | None:
        """What :meth:`save` wrote; None where it is not there or has another SHA-256."""
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            return None
        try:
            with safe_open(path, "pt") as file:
                return cls(**_joined(json.loads(file.metadata()[_METADATA]), file.get_tensor))
        except (KeyError, TypeError, ValueError):  # another version wrote it
            return None


def kept_once(run: Run, kind: type[K], make: Callable[[], K]) -> K:
    """What a stage decides before its blocks, the same in all processes; a resumed run has what it began with."""
    place, journal = run.place, run.journal
    kept = kind.load(place.plan, journal.plan) if place and journal.blocks else None
    if (kept := run.world.received(kept)) is not None:
        return kept
    if journal.blocks:
        run.progress.note("the plan of the earlier run is damaged and made again")
    made = make()
    if place:
        journal.plan = made.save(place.plan, journal.plan)
    return made


def _taken_apart(value: Any, tensors: dict[str, Tensor]) -> Any:
    """``value`` as JSON has it; its tensors, which JSON has not, go to ``tensors`` under numbers."""
    if isinstance(value, Tensor):
        tensors[number := str(len(tensors))] = value.cpu().contiguous()
        return {"tensor": number}
    if isinstance(value, dict):
        return {"items": [[key, _taken_apart(item, tensors)] for key, item in value.items()]}
    return value


def _joined(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The inverse of :func:`_taken_apart`."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensor(value["tensor"])
    return {tuple(key) if isinstance(key, list) else key: _joined(item, tensor) for key, item in value["items"]}
