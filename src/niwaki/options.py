"""Parameters of dataclasses as text: ``adam:iterations=50:learning_rate=0.3``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_origin, get_type_hints

from niwaki.errors import UnknownNameError, UsageError

T = TypeVar("T")


def choose(kind: str, text: str, known: Mapping[str, T], settings: Mapping[str, str] | None = None) -> T:
    """The value of ``known`` that ``text`` names, with the parameters behind the name changed.

    Args:
        kind: What it is, for errors, such as "solver".
        text: A name, with parameters as in ``adam:iterations=50``.
        known: Dataclasses by name.
        settings: More parameters, by name.

    Raises:
        UnknownNameError: no such name or parameter.
        UsageError: a value is not of the parameter's type, or out of its range, or a parameter has none.
    """
    name, *pairs = text.split(":")
    for pair in pairs:
        if "=" not in pair:
            raise UsageError(f"{name}:{pair}: parameters are written {name}:NAME=VALUE")
    settings = {**dict(pair.split("=", 1) for pair in pairs), **(settings or {})}
    if name not in known:
        raise UnknownNameError(kind, name, known)
    value: Any = known[name]
    types = get_type_hints(type(value))
    fields = [field.name for field in dataclasses.fields(value)]
    changes: dict[str, Any] = {}
    for key, given in settings.items():
        if key not in fields:
            if not fields:
                raise UsageError(f"{name} has no parameters; got {key}")
            raise UnknownNameError(f"parameter of {name}", key, fields)
        # A Literal's values are checked by the dataclass, together with the ranges of numbers.
        type_ = str if get_origin(types[key]) is Literal else types[key]
        try:
            changes[key] = _boolean(given) if type_ is bool else type_(given)
        except ValueError:
            raise UsageError(f"{key}={given!r}: {name} wants {type_.__name__} here") from None
    changed: T = dataclasses.replace(value, **changes)
    return changed


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def parse_size(text: str) -> int:
    """Bytes of a size such as "8GiB", "500 MB" or "4G".

    Raises:
        UsageError: it is none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match[2] not in _UNITS or not float(match[1]):
        raise UsageError(f"{text!r} is no size of memory; try 8GiB or 500MB")
    return int(float(match[1]) * _UNITS[match[2]])


Order = Literal["first", "random"]


#: Where to use TF32: for Gram matrices of half-precision activations, for all products, or for none.
TF32 = Literal["auto", "always", "never"]


Measure = Literal["both", "after", "none"]
