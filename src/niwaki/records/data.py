"""Dataclasses, and solvers and efforts among their values, as the text of JSON files, and back.

A solver or an effort is its "name" and its parameters by name. Where a solver takes the mask of another, its parameters
are "mask" and "update", each of them a solver as data.
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import msgspec

from niwaki.arguments import checked
from niwaki.errors import CheckpointError, UsageError
from niwaki.files import given_path

T = TypeVar("T")

# What fields may be, checked where a file is read: all that is made of them can be computed, shown and drawn.
Name = Annotated[str, msgspec.Meta(max_length=5000)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Whole = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
Finite = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e300)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Stages = Annotated[dict[Name, Seconds], msgspec.Meta(max_length=100)]


class JsonFile:
    """A dataclass that is stored in a JSON file."""

    def to_json(self) -> str:
        """The values as indented JSON text."""
        return json.dumps(self._values(), indent=2, allow_nan=False) + "\n"

    def _values(self) -> dict[str, Any]:
        values: Any = self
        return dataclasses.asdict(values)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what :meth:`to_json` wrote; what later versions added is ignored.

        Raises:
            CheckpointError: the text is anything else.
        """
        try:
            values = json.loads(text)
            if isinstance(values, dict):
                cls._check_version(values)
            return msgspec.convert(values, cls)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{error}") from error

    @staticmethod
    def _check_version(values: dict[str, Any]) -> None:
        """Raises CheckpointError where another version of niwaki wrote the values, which this one cannot read."""

    @classmethod
    @checked
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads the JSON file at ``path``.

        Raises:
            CheckpointError: the file cannot be read.
        """
        return load(given_path(path), cls.from_json)


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


def check_plain(value: Any, name: str, depth: int = 0) -> None:
    """Raises UsageError where ``value``, called ``name``, has a number that JSON does not have, or no end in sight."""
    if depth > 20:
        raise UsageError(f"{name} is nested more than 20 deep")
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{name} has {value}, which is not a finite number")
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        check_plain(each, name, depth + 1)


def plain(described: dict[str, Any]) -> dict[str, Any]:
    """``described``, with text in place of values that JSON does not have, as a user's solvers may have."""
    values: dict[str, Any] = json.loads(json.dumps(described, default=repr), parse_constant=str)
    return values
