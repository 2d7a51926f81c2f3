"""Tensors that a stage decides once and keeps until it is done, so that a resumed run has the same."""

import hashlib
import os
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from niwaki.errors import OutputError
from niwaki.files import output_errors


def save_tensors(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None, expected: str = ""
) -> str:
    """Writes ``tensors``, in safetensors; the file's SHA-256. OutputError if another one was ``expected``."""
    data = save(tensors, metadata=metadata)
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
        return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118 - no dict
