"""What callers from Python give, checked against annotations: arguments of functions, fields of dataclasses.

A whole number or a number of numpy is as good as Python's; True and False are no numbers. Anything of another type, and
a number with which nobody can reckon, is a UsageError that names the argument. Annotations that only type checkers can
resolve are not checked here.
"""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import math
import operator
import re
import types
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from niwaki.errors import UsageError, either, shown

Call = TypeVar("Call", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound=type)

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    Path: "a path",
    type(None): "None",
}
_UNKNOWN = (Any, inspect.Parameter.empty)
#: The metadata of a dataclass's field that the program sets and no caller; it is not among those that errors list.
INTERNAL = {"internal": True}


#: Of whole numbers, what 64 bits hold; of others, those whose products with counts, and inverses, are finite counts.
_WHOLE, _SMALL, _LARGE = 1 << 63, 1e-15, 1e15


def checked(call: Call) -> Call:
    """``call``, which checks its arguments first."""
    signature = functools.cache(lambda: inspect.signature(call, eval_str=True))

    @functools.wraps(call)
    def run(*arguments: Any, **named: Any) -> Any:
        bound = _bound(call.__name__, signature(), arguments, named)
        for name, value in bound.arguments.items():
            bound.arguments[name] = _checked(name, value, signature().parameters[name].annotation)
        return call(*bound.args, **bound.kwargs)

    return run  # type: ignore[return-value]


def checked_names(kind: Kind) -> Kind:
    """A dataclass ``kind``, of which a field that it does not have is a UsageError; its types are for check_fields."""
    init: Any = vars(kind)["__init__"]
    signature = functools.cache(lambda: inspect.signature(kind))

    @functools.wraps(init)
    def run(self: Any, *arguments: Any, **named: Any) -> None:
        _bound(kind.__name__, signature(), arguments, named, given_fields(kind))
        init(self, *arguments, **named)

    setattr(kind, "__init__", run)  # noqa: B010
    return kind


def given_fields(kind: Any) -> list[str]:
    """The fields of a dataclass that callers give."""
    return [field.name for field in dataclasses.fields(kind) if field.init and not field.metadata.get("internal")]


#: What other tools or the command line call an argument.
_ALSO_CALLED = {
    "sparsity": "pattern",
    "sparsities": "patterns",
    "grid": "quantize",
    "quantization": "quantize",
    "mask": "mask_from",
    "revive_zeros": "revive",
    "seqlen": "length",
    "windows": "order",
    "text": "measurement",
    "dataset": "calibration",
    "time": "max_time",
    "budget": "max_time",
    "memory": "max_memory",
    "output": "out",
}


def _bound(
    name: str,
    signature: inspect.Signature,
    arguments: Sequence[Any],
    named: dict[str, Any],
    public: Sequence[str] | None = None,
) -> inspect.BoundArguments:
    """The arguments by name; UsageError where the function or class called ``name`` does not take them.

    It lists those that are ``public``, which are all where that is None.
    """
    try:
        return signature.bind(*arguments, **named)
    except TypeError as error:
        known = {key: each for key, each in signature.parameters.items() if public is None or key in public}
        for given in named:
            if given not in signature.parameters:
                raise UsageError(f"{name}() has no argument {given!r}; {_meant(given, known)}") from None
        places = [each.name for each in known.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
        raise UsageError(f"{name}(): {error}; without names it takes {', '.join(places) or 'nothing'}") from None


def _meant(given: str, known: Mapping[str, inspect.Parameter]) -> str:
    """What may be meant by the argument ``given``: one of the ``known`` ones, or a field of what one of them takes."""
    given = given if given in known else _ALSO_CALLED.get(given, given)
    for name, parameter in known.items():
        for kind in get_args(parameter.annotation):
            fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
            if given not in known and given in [field.name for field in fields]:
                return f"give {name}={_in_words(kind).split()[-1]}({given}=...)"
    meant = [given] if given in known else difflib.get_close_matches(given, known, n=1, cutoff=0.5)
    hint = f"did you mean {meant[0]!r}? It has " if meant else "it has "
    return f"{hint}{', '.join(known)}"


def check_fields(instance: Any) -> None:
    """Checks the fields of a dataclass, for its ``__post_init__``."""
    kind: Any = type(instance)
    for name, hint in _hints(kind).items():
        object.__setattr__(instance, name, _checked(name, getattr(instance, name), hint))


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    try:
        hints = get_type_hints(kind)
    except NameError:
        hints = {}
    return {field.name: hints.get(field.name, field.type) for field in dataclasses.fields(kind)}


def _checked(name: str, value: Any, hint: Any) -> Any:
    try:
        return _fitted(name, value, hint)
    except TypeError:
        what = f"{name} must be {_in_words(hint)}"
        if hasattr(value, "save_pretrained"):  # a model or a tokenizer in memory
            kind = type(value).__name__
            raise UsageError(f"{what}; got a {kind}: save it with save_pretrained(DIR) and give DIR") from None
        raise UsageError(f"{what}; got {shown(value)}{meant_word(value, get_args(hint))}") from None


def meant_word(given: Any, words: Sequence[Any]) -> str:
    """The question "did you mean", where ``given`` is nearly one of ``words``, whatever the case of its letters."""
    if not isinstance(given, str):
        return ""
    known = {name: word for word in words for name in (str(word).lower(), str(word).lower().rpartition("-")[2])}
    if given.lower() not in known and "gguf" in known and re.fullmatch(r"(gguf-)?i?q\d\w*", given.lower()):
        return "; for a type such as q4_k, 'niwaki quantize MODEL OUT q4_k' comes first, and then the format gguf"
    near = difflib.get_close_matches(given.lower(), known, n=1, cutoff=0.65)
    return f"; did you mean {known[near[0]]}?" if near else ""


def _fitted(name: str, value: Any, hint: Any) -> Any:
    """``value``, with Python's numbers for numpy's; TypeError where it is of another type, UsageError out of range."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for each in inner:
            with contextlib.suppress(TypeError):
                return _fitted(name, value, each)
        raise TypeError
    if origin in (tuple, Sequence):
        _require(isinstance(value, list | tuple))
        hints = inner if origin is tuple and Ellipsis not in inner else inner[:1] * len(value)
        _require(len(hints) == len(value))
        members = [_fitted(name, each, its) for each, its in zip(value, hints, strict=True)]
        return members if origin is Sequence and isinstance(value, list) else tuple(members)
    if hint in (int, float, bool):
        return _number(name, value, hint)
    if origin is Literal:
        _require(isinstance(value, str) and value in inner)
    elif isinstance(kind := PathLike if hint is Path else origin or hint, type) and hint not in _UNKNOWN:
        _require(isinstance(value, kind))
    return value


def _number(name: str, value: Any, kind: type) -> Any:
    _require(isinstance(value, bool) == (kind is bool))
    if kind is bool:
        return value
    try:
        if kind is int:
            whole = operator.index(value)
            if abs(whole) >= _WHOLE:
                limit = "less than 2^63" if whole > 0 else "more than -2^63"
                raise UsageError(f"{name} must be {limit}; got {shown(value)}")
            return whole
        _require(isinstance(value, Real))
        number = math.inf if isinstance(value, int) and abs(value) >= _WHOLE else float(value)
    except OverflowError:
        raise TypeError from None
    # What is infinite or no number is for the range that each has of its own.
    if number and (isinstance(value, int) or math.isfinite(number)) and not _SMALL <= abs(number) <= _LARGE:
        raise UsageError(f"{name} must be 0, or of a magnitude from 1e-15 to 1e15; got {shown(value)}")
    return value if isinstance(value, int) else number


def _require(fits: bool) -> None:
    if not fits:
        raise TypeError


def _in_words(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return either([_in_words(each) for each in inner])
    if origin is Literal:
        return either(inner)
    if origin is tuple:
        return f"({', '.join(map(_in_words, inner))})"
    if origin is Sequence:
        return f"a list of {_in_words(inner[0])}"
    name = str(getattr(origin or hint, "__name__", hint))
    return _WORDS.get(hint) or f"{'an' if name[0] in 'AEIO' else 'a'} {name}"
