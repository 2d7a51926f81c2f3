"""Dataclasses, and solvers and efforts among their values, as the text of JSON files, and back.

A solver or an effort is its "name" and its parameters by name. Where a solver takes the mask of another, its parameters
are "mask" and "update", each of them a solver as data.
"""

import ast
import contextlib
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from niwaki.arguments import checked
from niwaki.errors import CheckpointError

T = TypeVar("T")
Kept = TypeVar("Kept", bound="JsonFile")


class JsonFile:
    """A dataclass that is kept in a JSON file."""

    def to_json(self) -> str:
        """JSON text, indented."""
        return json.dumps(self._values(), indent=2, allow_nan=False) + "\n"

    def _values(self) -> dict[str, Any]:
        values: Any = self
        return dataclasses.asdict(values)

    @classmethod
    def from_json(cls: type[Kept], text: str) -> Kept:
        """The inverse of :meth:`to_json`, also of what earlier versions wrote (CheckpointError if it is anything else).

        What later versions added is ignored.
        """
        try:
            values = json.loads(text)
            if isinstance(values, dict):
                cls._update(values)
            return msgspec.convert(values, cls)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{error}") from error

    @staticmethod
    def _update(values: dict[str, Any]) -> None:
        """Changes what an earlier version wrote into what this one reads."""

    @classmethod
    @checked
    def load(cls: type[Kept], path: str | os.PathLike[str]) -> Kept:
        """From a file; CheckpointError if it cannot be read."""
        return load(Path(path).expanduser(), cls.from_json)


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


def plain(described: dict[str, Any]) -> dict[str, Any]:
    """With text in place of all values that JSON does not have, as solvers of the user's own may have them."""
    values: dict[str, Any] = json.loads(json.dumps(described, default=repr), parse_constant=str)
    return values


def from_repr(text: str, name: str) -> dict[str, Any]:
    """What was a ``repr`` in old records: its values under ``name``, or as it was written if they are not all plain."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        match ast.parse(text, mode="eval").body:
            case ast.Call(ast.Name(), [], keywords):
                return plain({"name": name, **{str(each.arg): ast.literal_eval(each.value) for each in keywords}})
    return {"name": name, "as written": text}
