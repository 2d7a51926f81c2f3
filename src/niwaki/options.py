"""What callers choose, as frozen dataclasses that check themselves (UsageError); and sizes and times as text.

Nothing here imports torch, so that the command line can be read before it is loaded.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, Union, get_origin, get_type_hints

from niwaki.arguments import check_fields, checked_names
from niwaki.choices import TF32, Order
from niwaki.errors import UnknownNameError, UsageError, shown

if TYPE_CHECKING:
    from torch import Tensor

    from niwaki.windows import Windows

T = TypeVar("T")

#: In texts, as short as anybody needs.
_NUMBER = r"(\d{1,15}(?:\.\d{1,15})?)"

#: The solver with the lowest layer errors for its time; see docs/methods.md.
DEFAULT_SOLVER = "continuation"
#: The texts of the hub that are read where nobody gives one, to calibrate on and to measure on.
USUAL_CALIBRATION, USUAL_TEXT = "c4", "wikitext2"
#: What healing trains on, where nobody says how much: hours on a CPU, minutes on a GPU; and tokens in its windows.
HEALING_TOKENS, HEALING_LENGTH = "2M", 512
#: Its learning rate, relative to the size of the weights, that of the method blocks, and tokens in a step; see
#: docs/healing.md.
HEALING_RATE, BLOCKS_RATE, HEALING_BATCH = 0.0007, 0.01, 512
#: The share of what healing trains on that the dense model writes itself; see docs/healing.md.
OWN_TEXT = 0.25
#: The text that stands for the model's own answers to the prompts that ship with niwaki.
OWN_ANSWERS = "answers"
#: A text by name (see :mod:`niwaki.texts.sources`), windows of one, or (samples, length) int64 tokens.
Text: TypeAlias = Union[str, os.PathLike[str], "Windows", "Tensor"]
Chosen = TypeVar("Chosen", bound="_Options")


class _Options:
    @classmethod
    def of(cls: type[Chosen], value: Any) -> Chosen:
        """``value``, or where it is something else the options with it in the first field and the usual rest."""
        return value if isinstance(value, cls) else cls(value)  # type: ignore[call-arg]

    def only(self, caller: str, *names: str) -> None:
        """Raises UsageError where another field than ``names`` was chosen, which ``caller`` does not use."""
        values: Any = self  # one of the dataclasses below
        for field in dataclasses.fields(values):
            if field.name not in names and getattr(self, field.name) != field.default:
                raise UsageError(f"{caller} does not use {field.name}; got {field.name}={getattr(self, field.name)!r}")


@checked_names
@dataclass(frozen=True)
class Calibration(_Options):
    """The text that matrices and blocks are fitted on; a text alone will do, as in ``calibration="text.txt"``.

    Attributes:
        text: A file, a data set, "demo", "answers", windows of a text, or (samples, length) int64 tokens; or several,
            which share the ``samples`` alike and take turns. For windows and tokens ``samples``, ``order`` and ``seed``
            are not used. For :func:`niwaki.prune` also a JSONL file of conversations with images, alone.
        samples: The number of windows.
        length: Tokens in a window; None for 2,048, or the model's positions if fewer, or what given windows have.
        order: The "first" windows of the text, or "random" ones, drawn by ``seed`` from all of it; None for the first,
            and in healing for random ones of files.
        answers: "own" where the text, or the first of several, is a JSONL file of prompts, which the dense model is to
            answer, see :mod:`niwaki.texts.answers`. The text "answers" stands for prompts that ship with niwaki.
        bos: Whether windows begin with the token that the model's tokenizer puts before a text, where it puts one.
        field: The column of files and data sets of rows that has the text, or conversations; None for "text", or else
            conversations or tasks with answers by their usual names, see :mod:`niwaki.texts.rows`.
    """

    text: Text | Sequence[Text] = USUAL_CALIBRATION
    samples: int = 128
    length: int | None = None
    order: Order | None = None
    seed: int = 0
    answers: Literal["own"] | None = None
    bos: bool = True
    field: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "text", _one_or_several(self.text))
        if self.answers and (not isinstance(self.texts[0], str) or self.texts[0] == USUAL_CALIBRATION):
            hint = "such as --calibration prompts.jsonl"
            raise UsageError(f"answers are written to prompts in a file, {hint}; got {shown(self.texts[0])}")
        check_count("samples", self.samples, len(self.texts))
        check_count("the length of windows", self.length, 2)
        check_count("the seed", self.seed, 0)

    @property
    def texts(self) -> tuple[Text, ...]:
        """All of its texts, which is one or several."""
        return self.text if isinstance(self.text, tuple) else (self.text,)

    @property
    def shares(self) -> list[int]:
        """How many windows each of the texts has."""
        count = len(self.texts)
        return [self.samples // count + (i < self.samples % count) for i in range(count)]

    @property
    def answered(self) -> list[bool]:
        """Of each of the texts, whether it is prompts that the model is to answer."""
        return [
            isinstance(text, str) and (text == OWN_ANSWERS or (self.answers == "own" and i == 0))
            for i, text in enumerate(self.texts)
        ]


@checked_names
@dataclass(frozen=True)
class Measurement(_Options):
    """The text that perplexity is measured on; a text alone will do, as in ``measurement="wikitext2"``.

    Attributes:
        text: As in :class:`Calibration`; None, or the calibration text itself, for what follows the calibration windows
            in that text. Without a calibration None is WikiText-2. For comparisons also several texts.
        samples: The first N windows of it; 0 measures nothing. None for the usual number: 16 for prune and shrink,
            256 of what follows the calibration windows for compare, all of the text otherwise.
        length: Tokens in a window; None for as many as in those of the calibration.
        before: Whether prune and shrink measure the dense model also.
        bos: As in :class:`Calibration`; it is given, and not predicted. What follows the calibration windows begins as
            they do, and is read as they are.
        field: As in :class:`Calibration`.
    """

    text: Text | Sequence[str] | None = None
    samples: int | None = None
    length: int | None = None
    before: bool = True
    bos: bool = True
    field: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        text = _name_of(self.text)
        if isinstance(text, tuple) and not all(isinstance(name, str) for name in text):
            raise UsageError(f"several texts are given by their names; got {shown(list(text))}")
        object.__setattr__(self, "text", text)
        check_count("samples", self.samples, 0)
        check_count("the length of windows", self.length, 2)

    @property
    def texts(self) -> tuple[Text | None, ...]:
        """All of its texts, of which most measurements have one."""
        return self.text if isinstance(self.text, tuple) else (self.text,)

    def only_text(self, caller: str) -> None:
        """Raises UsageError where there are several texts, or none."""
        if len(self.texts) != 1:
            raise UsageError(f"{caller} measures one text at a time; got {len(self.texts)}")

    def some(self) -> None:
        """Raises UsageError where no window is measured."""
        if self.samples == 0:
            raise UsageError("samples must be 1 or more; got 0")


@checked_names
@dataclass(frozen=True)
class Compute(_Options):
    """Where and in what a model runs; a device alone will do, as in ``compute="cuda"``.

    Attributes:
        device: "cpu", "cuda", "cuda:1"...; "auto" is a GPU if there is one. It is checked when the model is opened.
        dtype: What blocks run in: "float32", "bfloat16", "float16"; "auto" is float32 on a CPU and the checkpoint's own
            on a GPU. Gram matrices and solvers always use float32.
        tf32: Where GPUs may round the factors of float32 products to TF32: "auto" for Gram matrices of half-precision
            activations, where that changes no factor; "always" for all products; "never". Factorisations and inverses
            never use it.
        max_memory: Bytes that the process may use, or text such as "8GiB": hidden states that do not fit are kept in a
            file in the system's temporary directory. None for no limit.
    """

    device: str = "auto"
    dtype: str = "auto"
    tf32: TF32 = "auto"
    max_memory: int | str | None = None

    def __post_init__(self) -> None:
        for name in ("device", "dtype"):
            given: Any = getattr(self, name)
            if type(given).__module__ == "torch" and type(given).__name__ == name:  # without torch
                object.__setattr__(self, name, str(given).removeprefix("torch."))
        check_fields(self)
        if isinstance(self.max_memory, str):
            object.__setattr__(self, "max_memory", parse_size(self.max_memory))
        check_count("max_memory", self.budget, 1)

    @property
    def budget(self) -> int | None:
        """``max_memory`` in bytes."""
        assert not isinstance(self.max_memory, str)
        return self.max_memory


def choose(kind: str, text: str, known: Mapping[str, T], settings: Mapping[str, Any] | None = None) -> T:
    """The dataclass of ``known`` that ``text`` names, with parameters changed as in ``adam:iterations=50``.

    ``settings`` has more parameters, and ``kind`` is what it is in errors, such as "solver". UnknownNameError is for
    names and parameters, UsageError for values that are missing, of another type or out of their range.
    """
    name, given = parse_name(text)
    given |= settings or {}
    value = find(kind, name, known)
    check_known(name, given, parameters(value))
    return changed(name, value, given)


def parse_name(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the parameters in text such as ``adam:iterations=50``; UsageError for one without a value."""
    name, *pairs = text.split(":")
    for pair in pairs:
        if "=" not in pair:
            raise UsageError(f"{name}:{pair}: parameters are written {name}:NAME=VALUE")
    return name, dict(pair.split("=", 1) for pair in pairs)


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


def changed(name: str, value: T, given: Mapping[str, Any]) -> T:
    """A dataclass, called ``name`` in errors, with some fields as ``given``, of which text may stand for numbers."""
    made: Any = value
    types = get_type_hints(type(value))
    changes: dict[str, Any] = {}
    for key, wanted in given.items():
        # What is not text, and a Literal's values, are checked by the dataclass, together with the ranges of numbers.
        type_ = str if get_origin(types[key]) is Literal else types[key]
        if not isinstance(wanted, str):
            changes[key] = wanted
            continue
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


def fraction(given: float | str) -> Decimal | None:
    """0.6, "0.6" or "60 %" as a decimal, so that 0.333 and 33.3 % are the same; None for everything else."""
    text = str(given).strip()
    try:
        share = Decimal(text.removesuffix("%").strip())
        return +share / 100 if text.endswith("%") else +share
    except ArithmeticError:  # no number, or one of a million digits
        return None


def parse_share(name: str, given: float | str) -> float:
    """The share that 0.25, "0.25" or "25 %" is, from 0 to below 1; UsageError with its ``name`` for all else."""
    share = fraction(given)
    if share is None:
        raise UsageError(f"{name} is a fraction, such as 0.25 or 25%; got {shown(given)}")
    if not 0 <= float(share) < 1:
        raise UsageError(f"{name} is a fraction, from 0 to below 1; got {as_fraction(float(share))}")
    return float(share)


def as_fraction(given: float) -> str:
    """``given``, which is no fraction, for errors: with a question where it would be one in percent."""
    return f"{given:g}; did you mean {given / 100:g} ({given:g} %)?" if 2 <= given < 100 else f"{given:g}"


def parse_size(text: str) -> int:
    """Bytes of a size such as "8GiB", "500 MB" or "4G"; UsageError where it is not one, or has no unit and is tiny."""
    match = re.fullmatch(rf"\s*{_NUMBER}\s*([kmgt]?)(i?)b?\s*", text.lower())
    if match is None or (match[3] and not match[2]) or not float(match[1]):
        raise UsageError(f"invalid memory size {shown(text)}; try 8GiB or 500MB")
    if text.strip() == match[1] and (count := float(match[1])) < 100_000:  # "8" is not meant as bytes
        raise UsageError(
            f"a memory size of {match[1]} bytes; did you mean {match[1]}{'GiB' if count < 1000 else 'MB'}?"
        )
    power = " kmgt".index(match[2] or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def parse_number(text: str) -> int:
    """The number that "2M", "500k" or "300000" stand for; UsageError where it is not one."""
    match = re.fullmatch(rf"{_NUMBER}([kmg]?)", text.lower().replace(" ", "").replace(",", ""))
    if match is None:
        raise UsageError(f"invalid number {shown(text)}; try 2M or 500k")
    return int(float(match[1]) * 1000 ** " kmg".index(match[2] or " "))


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


def _name_of(text: Any) -> Any:
    """A path as text; several texts as a tuple, in which no name comes twice; everything else as it is.

    UsageError where a text is not given by its name.
    """
    if isinstance(text, list | tuple):
        names = [_name_of(each) for each in text]
        return tuple(name for i, name in enumerate(names) if not isinstance(name, str) or name not in names[:i])
    if isinstance(text, str) and _is_prose(text):
        raise UsageError(
            f"{shown(text)} is neither a file nor a known data set; to use it as text, write it to a file and give the "
            "file's name, or from Python its tokens, (samples, length)"
        )
    return os.fspath(text) if isinstance(text, os.PathLike) else text


def _is_prose(name: str) -> bool:
    """Whether what should be the name of a text is text itself."""
    if len(name.split()) < 3 or name.startswith((".", "/", "~")) or re.search(r"\.\w{1,8}$", name):
        return "\n" in name.strip()
    try:
        return not os.path.exists(name)
    except ValueError:  # what no file can be called
        return True


def _one_or_several(text: Any) -> Any:
    """As of :func:`_name_of`, where a single one is no tuple; UsageError where there is none."""
    texts = _name_of(text)
    if isinstance(texts, tuple) and not texts:
        raise UsageError("no text to calibrate on was given")
    return texts[0] if isinstance(texts, tuple) and len(texts) == 1 else texts


def check_count(name: str, given: int | None, least: int) -> None:
    """Raises UsageError where a number is below ``least`` or more than 64 bits can hold."""
    if given is not None and given < least:
        raise UsageError(f"{name} must be {least} or more; got {given}")
    if given is not None and given >= 1 << 63:
        raise UsageError(f"{name} must be less than 2^63")
