"""Shares, patterns, sizes, times and ranges as people write them."""

import contextlib
import dataclasses
import math
import re
import shlex
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Literal, TypeVar, get_origin, get_type_hints

from niwaki.choices import BLOCK_TYPE_BITS, FIRST_PARAMETERS, FLOAT_GRIDS, TWO_FACTORS
from niwaki.errors import PatternError, UnknownNameError, UsageError, shown

#: In texts, as short as anybody needs.
_NUMBER = r"(\d{1,15}(?:\.\d{1,15})?)"
#: No model has fewer parameters.
_FEW_PARAMETERS = 1000
#: Logits are divided by the temperature: far below it they are infinite.
COLDEST = 1e-3
#: How small, where a command is not told that.
HOW_SMALL = (
    "say how small: a size such as 0.4 or 80MB, or for transformers a share of the parameters; or a loss such as 0.05, "
    "or a speed such as 2.0"
)
#: What is said where a command is not told what to do.
HOW_SPARSE = "say how sparse: a sparsity such as 0.6, or a pattern such as 2:4"
NOTHING_TO_REMOVE = "there is nothing to remove; give parameters, blocks, neurons, heads, experts or vocabulary"


def fraction(given: float | str) -> Decimal | None:
    """0.6, "0.6" or "60 %" as a decimal, so that 0.333 and 33.3 % are the same; None for everything else."""
    text = str(given).strip()
    try:
        share = Decimal(text.removesuffix("%").strip())
        return +share / 100 if text.endswith("%") else +share
    except ArithmeticError:  # no number, or one of a million digits
        return None


def check_sparsity(given: float) -> None:
    """PatternError where it is not a fraction of zeros that a matrix can have."""
    if not 0 <= given < 1:
        raise PatternError(f"sparsity is the fraction of zeros, from 0 to below 1; got {as_fraction(given)}")


def check_n_of_m(pattern: str, n: int, m: int) -> None:
    """PatternError where a ``pattern`` cannot keep ``n`` of every ``m`` weights."""
    if not 0 < n <= m:
        raise PatternError(f"the pattern {pattern} keeps n of every m weights; n must be 1 to m")


def read_pattern(text: str) -> tuple[Any, ...]:
    """What the text of a pattern says, as its kind and numbers; PatternError if not valid.

    Of "2:4" that is ("", 2, 4), of "per-row:0.6" ("per-row", 0.6), and of "two-factors:0.5:int8" ("two-factors", 0.5,
    "int8"), whose last part may be "".
    """
    kind, _, rest = text.strip().partition(":")
    if kind.isdecimal() and rest.isdecimal() and max(len(kind), len(rest)) < 10:
        check_n_of_m(text.strip(), int(kind), int(rest))
        return "", int(kind), int(rest)
    if kind in ("unstructured", "per-row", TWO_FACTORS):
        number, _, grid = rest.partition(":") if kind == TWO_FACTORS else (rest, "", "")
        if (share := fraction(number)) is not None and (not grid or grid.startswith("int")):
            check_sparsity(float(share))
            if grid:
                parse_bits(grid)
            return (kind, float(share), grid) if kind == TWO_FACTORS else (kind, float(share))
    raise PatternError(
        f"{shown(text)} is not a valid pattern; try 2:4, unstructured:0.6, per-row:0.6 or two-factors:0.5"
    )


def parse_bits(text: str) -> tuple[int, int | None, float | None]:
    """The bits, the size of groups and the mean of bits of a grid; UsageError if not valid.

    Of "int4:128" they are 4, 128 and None, of "int8" 8, None and None, and of "int5.5:64", whose matrices have
    different ones, 8, 64 and 5.5.
    """
    match = re.fullmatch(r"int([0-9]{1,9}(?:\.[0-9]{1,9})?)(?::([0-9]{1,9}))?", text.strip().lower())
    if match is None:
        raise UsageError(
            f"{text!r} is not a valid grid; try int4:128, int8, or int5.5:64 for mixed bits; q4_k, or q4.25 for mixed "
            "types, are for llama.cpp, nvfp4 and mxfp4 for servers; FP8 and W8A8 are formats, as in 'niwaki export "
            "MODEL OUT --format fp8'"
        )
    average = float(match[1]) if "." in match[1] else None
    bits, group = int(match[1]) if average is None else 8, int(match[2]) if match[2] else None
    check_grid(bits, group, average)
    return bits, group, average


def parse_block_types(text: str) -> tuple[str, float] | None:
    """The name and the bits of one of llama.cpp's types, or "" and the mean of "q4.25"; None for all else."""
    name = text.strip().lower()
    if name in BLOCK_TYPE_BITS:
        return name, BLOCK_TYPE_BITS[name]
    if (match := re.fullmatch(r"q([0-9]{1,9}\.[0-9]{1,9})", name)) is None:
        return None
    least, most = min(BLOCK_TYPE_BITS.values()), max(BLOCK_TYPE_BITS.values())
    if not least <= float(match[1]) <= most:
        raise UsageError(f"llama.cpp's types have {least:g} to {most:g} bits a weight; got {match[1]}")
    return "", float(match[1])


def check_grid_name(text: str) -> None:
    """UsageError where there is no grid of that name."""
    if text.strip().lower() not in FLOAT_GRIDS and parse_block_types(text) is None:
        parse_bits(text)


def check_grid(bits: int, group: int | None, average: float | None = None) -> None:
    """UsageError where there is no grid of so many ``bits``, with a scale for so many inputs."""
    if not 2 <= bits <= 8:
        raise UsageError(f"a grid has 2 to 8 bits; got {bits}")
    if group is not None and group < 1:
        raise UsageError(f"a scale is for 1 input or more; got groups of {group}")
    least = 4 if group and group % 64 else 2
    if average is not None and not (least <= average <= 8 and bits == 8):
        raise UsageError(f"matrices of mixed bits have a mean of {least} to 8 in such groups; got {average:g}")


def parse_share(name: str, given: float | str) -> float:
    """The share that 0.25, "0.25" or "25 %" is, from 0 to below 1; UsageError with its ``name`` for all else."""
    share = fraction(given)
    if share is None:
        raise UsageError(f"{name} is a fraction, such as 0.25 or 25%; got {shown(given)}")
    if not 0 <= float(share) < 1:
        raise UsageError(f"{name} is a fraction, from 0 to below 1; got {as_fraction(float(share))}")
    return float(share)


def parse_parameters(given: float | str) -> float:
    """The share, below 1, or the number of a model's parameters that 0.75, "75 %", 110000000 or "110M" is.

    UsageError for all else.
    """
    share, text = fraction(given), str(given)
    if share is not None and 0 < float(share) < 1:
        return float(share)
    try:
        number = parse_number(text.lower().replace("b", "g"))
    except UsageError:
        number = 0
    if (share is not None and text.strip().endswith("%")) or number < _FEW_PARAMETERS:
        raise UsageError(f"parameters is how much is left, such as 0.75, 75% or 110M; got {shown(given)}")
    return float(number)


def parse_compressed_size(given: float | str) -> float:
    """The share of a model's bytes, from above 0 to 1, that 0.4 or "40 %" is, or the bytes of "80MB".

    UsageError for all else.
    """
    share = fraction(given)
    if share is not None and share.is_finite() and 0 < share <= 1:
        return float(share)
    with contextlib.suppress(UsageError):
        if (count := parse_size(str(given))) > 1:
            return count
    number = share is not None and share.is_finite() and not str(given).strip().endswith("%")
    got = as_fraction(float(share or 0), f" or {given}MB") if number else shown(given)
    raise UsageError(
        f"size is a share of what the weights take now, such as 0.4 or 40%, or bytes, such as 80MB; got {got}"
    )


def check_how_small(
    size: float | str | None,
    parameters: float | str | None,
    loss: float | str | None,
    speed: float | str | None,
    runtime: str | None,
) -> None:
    """UsageError where these do not say how small a model is to be, or say what the program cannot have."""
    given = sum(each is not None for each in (size, parameters, loss, speed))
    if not given:
        raise UsageError(HOW_SMALL)
    if given > 1:
        raise UsageError("give only one of these: a size, parameters, a loss or a speed")
    if runtime == "transformers" and size is not None:
        raise UsageError("transformers takes parameters, such as 0.75, and no size: it reads no packed weights")
    if runtime not in (None, "transformers") and parameters is not None:
        raise UsageError(f"parameters are for transformers; give a size or a loss for {runtime}")
    if runtime == "vllm" and speed is not None:
        raise UsageError("the speed of vllm is not measured here; give a size or a loss")


def parse_vocabulary(given: float | str) -> tuple[int | None, float | None, float | None]:
    """How many tokens stay, the share to remove, or how much of a text those that stay make up: one of the three.

    Of 24576, "24576", 0.5, "50 %", "used" or "used:0.9995"; UsageError for all else.
    """
    text = str(given).strip()
    if match := re.fullmatch(r"used(?::(.+))?", text):
        used = fraction(match[1] or "1")
        if used is None or used.is_nan() or not 0 < used <= 1:
            raise UsageError(
                f"used takes a share of the text's tokens, from above 0 to 1, such as used:0.9995; got {shown(given)}"
            )
        return None, None, float(used)
    asked = fraction(text)
    if asked is not None and not asked.is_nan() and asked < 1:
        if not (share := parse_share("vocabulary", given)):
            raise UsageError("vocabulary 0 removes no tokens; give how many stay, such as 24576, or a share to remove")
        return None, share, None
    try:
        count = parse_number(text.removesuffix(".0"))
    except UsageError:
        count = 0
    if count < 2:
        raise UsageError(
            f"vocabulary is how many tokens stay, such as 24576, a share to remove, such as 0.5 or 50%, or "
            f"used:0.9995; got {shown(given)}"
        )
    return count, None, None


def parse_positive(name: str, given: float | str) -> float:
    """The number above 0 that a loss or a speed is; UsageError with its ``name`` for all else."""
    number = fraction(given)
    if number is None or not number.is_finite() or not 0 < number < 1000 or str(given).strip().endswith("%"):
        example = "0.05 for a perplexity 5 % higher" if name == "loss" else "2.0 for twice the tokens a second"
        raise UsageError(f"{name} is a number above 0, such as {example}; got {given!r}")
    return float(number)


def check_temperature(given: float) -> None:
    """UsageError where no token can be sampled at this temperature."""
    if given != 0 and not COLDEST <= given < math.inf:
        raise UsageError(
            f"the temperature must be 0, for the most likely token each time, or {COLDEST} or more; got {given}"
        )


def as_fraction(given: float, also: str = "") -> str:
    """``given``, which is no fraction, for errors: with a question where it would be one in percent, or ``also``."""
    return f"{given:g}; did you mean {given / 100:g} ({given:g} %){also}?" if 2 <= given < 100 else f"{given:g}"


def parse_size(text: str) -> int:
    """Bytes of a size such as "8GiB", "500 MB" or "4G"; UsageError where it is not one, or has no unit and is tiny."""
    match = re.fullmatch(rf"\s*{_NUMBER}\s*([kmgt]?)(i?)b?\s*", text.lower())
    if match is None or (match[3] and not match[2]) or not float(match[1]):
        raise UsageError(f"invalid size {shown(text)}; try 8GiB or 500MB")
    if text.strip() == match[1] and (count := float(match[1])) < 100_000:  # "8" is not meant as bytes
        raise UsageError(f"a size of {match[1]} bytes; did you mean {match[1]}{'GiB' if count < 1000 else 'MB'}?")
    power = " kmgt".index(match[2] or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def parse_number(text: str) -> int:
    """The number that "2M", "500k" or "300000" stand for; UsageError where it is not one."""
    match = re.fullmatch(rf"{_NUMBER}([kmg]?)", text.lower().replace(" ", "").replace(",", ""))
    if match is None:
        raise UsageError(f"invalid number {shown(text)}; try 2M or 500k")
    return int(float(match[1]) * 1000 ** " kmg".index(match[2] or " "))


def parse_multiple(text: str) -> float | None:
    """What "3x" or "0.5x" is a multiple by; None of texts that are none."""
    match = re.fullmatch(rf"{_NUMBER}x", text.lower().replace(" ", ""))
    return float(match[1]) if match else None


def parse_time(text: str) -> float:
    """Seconds of a time such as "2h", "90 min" or "1h30m"; UsageError where it is not one."""
    units = rf"(?:{_NUMBER}h)?(?:{_NUMBER}m(?:in)?)?(?:{_NUMBER}s)?"
    match = re.fullmatch(units, text.lower().replace(" ", ""))
    parts = match.groups(default="0") if match else ()
    seconds = sum(float(part) * unit for part, unit in zip(parts, (3600, 60, 1), strict=False))
    if not seconds:
        bare = re.fullmatch(_NUMBER, text.strip())
        hint = f"did you mean {bare[1]}m or {bare[1]}h?" if bare and float(bare[1]) else "try 2h, 90m or 1h30m"
        raise UsageError(f"invalid time {shown(text)}; {hint}")
    return seconds


def parse_range(text: str) -> tuple[int, int]:
    """(first, last + 1) of a range such as "0:2", which is 0 and 1; UsageError where it is not one."""
    match = re.fullmatch(r"(\d{1,15}):(\d{1,15})", text.strip())
    if match is None:
        raise UsageError(f"invalid range {shown(text)}; give FROM:TO, such as 0:2 for the first two")
    return int(match[1]), int(match[2])


# What is chosen by name: solvers and efforts as in ``adam:iterations=50``, and stages as in ``prune 2:4``.

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
    """The name in ``known`` from which ``value`` differs in the fewest ``parameters``, among those for its class.

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
