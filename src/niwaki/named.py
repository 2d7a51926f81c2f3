"""What is chosen by name: solvers and efforts as in ``adam:iterations=50``, and stages as in ``prune 2:4``."""

import dataclasses
import shlex
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_origin, get_type_hints

from niwaki.choices import FIRST_PARAMETERS
from niwaki.errors import UnknownNameError, UsageError

T = TypeVar("T")

#: Of stages, for words without a name.
_EXAMPLES = {"shrink": "neurons=0.25", "prune": "pattern=0.5", "quantize": "grid=int4:128", "heal": "max_time=30m"}


def choose(kind: str, text: str, known: Mapping[str, T]) -> T:
    """The dataclass of ``known`` that ``text`` names, with parameters changed as in ``adam:iterations=50``.

    ``kind`` is what it is in errors, such as "solver". UnknownNameError is for names and parameters, UsageError for
    values that are missing, of another type or out of their range.
    """
    name, given = parse_name(text)
    value = find(kind, name, known)
    check_known(name, given, parameters(value))
    return changed(name, value, given)


def parse_name(text: str) -> tuple[str, dict[str, str]]:
    """The name and the parameters in text such as ``adam:iterations=50``; UsageError for one without a value."""
    name, *pairs = text.split(":")
    for pair in pairs:
        if "=" not in pair:
            raise UsageError(f"{name}:{pair}: parameters are written {name}:NAME=VALUE")
    return name, dict(pair.split("=", 1) for pair in pairs)


def parse_stage(text: str) -> tuple[str, dict[str, Any]]:
    """The name of a stage and its parameters, of text such as "prune 2:4 effort=best".

    UsageError where it is not valid; UnknownNameError, which is one, for its name.
    """
    try:
        name, *words = shlex.split(text) or [""]
    except ValueError as error:
        raise UsageError(f"{text!r} is not a valid stage: {error}; such as 'shrink neurons=0.25'") from None
    find("stage", name, FIRST_PARAMETERS)
    given: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            first = FIRST_PARAMETERS[name]
            if not first or first in given:
                hint = f", such as {_EXAMPLES[name]}" if name in _EXAMPLES else ""
                raise UsageError(f"{word!r} of the stage {text!r} has no name; parameters are written NAME=VALUE{hint}")
            key, value = first, word
        if key in given:
            raise UsageError(f"the stage {text!r} gives {key} twice")
        given[key] = value
    return name, given


def find(kind: str, name: str, known: Mapping[str, T]) -> T:
    """The one of ``known`` called ``name``; UnknownNameError, which calls it a ``kind``, where there is none."""
    if name not in known:
        raise UnknownNameError(kind, name, known)
    return known[name]


def check_known(name: str, given: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
    """UsageError where something is ``given`` that is not among the ``usual`` parameters of what is called ``name``."""
    for key in given:
        if not usual:
            raise UsageError(f"{name} has no parameters; got {key}")
        if key not in usual:
            raise UnknownNameError(f"parameter of {name}", key, usual)


def changed(name: str, value: T, given: Mapping[str, str]) -> T:
    """A dataclass, called ``name`` in errors, with some fields as the texts ``given`` say."""
    made: Any = value
    types = get_type_hints(type(value))
    changes: dict[str, Any] = {}
    for key, wanted in given.items():
        # A Literal's values are checked by the dataclass, together with the ranges of numbers.
        type_ = str if get_origin(types[key]) is Literal else types[key]
        try:
            changes[key] = {"true": True, "false": False}[wanted.lower()] if type_ is bool else type_(wanted)
        except (ValueError, KeyError):
            raise UsageError(f"{key}={wanted!r}: {name} wants {type_.__name__} here") from None
    result: T = dataclasses.replace(made, **changes)
    return result


def parameters(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, as :func:`choose` takes them."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def name_of(
    value: object, known: Mapping[str, object], parameters: Callable[[Any], dict[str, Any]] = parameters
) -> str:
    """Of the names in ``known`` for the class of ``value`` the one with the fewest ``parameters`` to change.

    A class that is not there goes by its own name in small letters.
    """

    def changes(name: str) -> tuple[int, int]:
        usual = parameters(known[name])
        changed = [each for key, each in parameters(value).items() if each != usual[key]]
        return sum(isinstance(each, str) for each in changed), len(changed)  # a word changes more than a number

    names = [name for name, other in known.items() if type(other) is type(value)]
    return min(names, key=changes, default=type(value).__name__.lower())


def text_of(
    value: object, known: Mapping[str, object], parameters: Callable[[Any], dict[str, Any]] = parameters
) -> str:
    """The text for :func:`choose` to make ``value`` of: a name of ``known`` and the parameters that differ from its.

    KeyError where its class is not there.
    """
    name = name_of(value, known, parameters)
    usual = parameters(known[name])
    return ":".join([name, *(f"{key}={each}" for key, each in parameters(value).items() if each != usual[key])])
