"""What earlier calls found out and left on disk, beside what transformers keeps there (``HF_HOME``)."""

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
from huggingface_hub import cached_assets_path

from niwaki.files import replace_file


def cached_directory(kind: str, asked: Any, name: str = "") -> Path:
    """The directory for what is found of this ``kind``: the same for all who ask the same, and for nobody else.

    Its name begins with ``name``. OSError or ValueError where there can be none.
    """
    key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32]
    return Path(cached_assets_path("niwaki", kind, f"{name}{key}"))


def read_cached(file: Path, kind: Any) -> Any:
    """What :func:`write_cached` wrote; None where that is not there, or is anything else than ``kind``."""
    with contextlib.suppress(OSError, msgspec.MsgspecError, RecursionError):
        return msgspec.json.decode(file.read_bytes(), type=kind)
    return None


def write_cached(file: Path, value: Any) -> None:
    """Writes ``value``, as JSON; NiwakiError where that is not possible."""
    replace_file(file, msgspec.json.encode(value))
