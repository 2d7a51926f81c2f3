"""Dataclasses as the text of JSON files, and back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from niwaki.errors import CheckpointError

T = TypeVar("T")


def to_text(value: Any, **first: Any) -> str:
    """A dataclass as JSON, indented, after the values of ``first``."""
    return json.dumps({**first, **dataclasses.asdict(value)}, indent=2, allow_nan=False) + "\n"


def from_text(text: str, kind: type[T], update: Callable[[dict[str, Any]], None] | None = None) -> T:
    """The dataclass ``kind`` from its text; values that a later version added are ignored.

    ``update`` changes what an earlier version wrote into what this one reads.

    Raises:
        CheckpointError: it is not JSON, or not of this dataclass.
    """
    try:
        values = json.loads(text)
        if update is not None and isinstance(values, dict):
            update(values)
        return msgspec.convert(values, kind)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{error}") from error


def load(path: Path, read: Callable[[str], T]) -> T:
    """What ``read`` makes of the text in a file.

    Raises:
        CheckpointError: the file cannot be read, or was not written by niwaki.
    """
    try:
        return read(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, CheckpointError) as error:
        raise CheckpointError(f"{path} cannot be read as what niwaki writes there: {error}") from error
