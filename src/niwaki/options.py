"""What callers choose, as frozen dataclasses that check themselves (UsageError).

Nothing here imports torch, so that the command line can be read before it is loaded.
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, Union

from niwaki.arguments import check_fields, checked_names
from niwaki.choices import TF32, Order
from niwaki.errors import UsageError, either, shown
from niwaki.quantities import parse_size

if TYPE_CHECKING:
    from torch import Tensor

    from niwaki.windows import Windows

#: The solver with the lowest layer errors for its time; see docs/methods.md.
DEFAULT_SOLVER = "continuation"
#: The texts of the hub that are read where nobody gives one, to calibrate on and to measure on.
USUAL_CALIBRATION, USUAL_TEXT = "c4", "wikitext2"
#: The most windows that are calibrated on, where nobody says how many.
USUAL_SAMPLES = 128
#: What healing trains on, where nobody says how much: hours on a CPU, minutes on a GPU; and tokens in its windows.
HEALING_TOKENS, HEALING_LENGTH = "2M", 512
#: Its learning rate, relative to the size of the weights, those of the methods scales (at most) and blocks, and tokens
#: in a step; see docs/healing.md.
HEALING_RATE, SCALES_RATE, BLOCKS_RATE, HEALING_BATCH = 0.0007, 0.002, 0.01, 512
#: The share of what healing trains on that the dense model writes itself; see docs/healing.md.
OWN_TEXT = 0.25
#: The text that stands for the model's own answers to the prompts that ship with niwaki.
OWN_ANSWERS = "answers"
#: What a model runs in.
DTYPES = ("float32", "bfloat16", "float16")
#: A text by name (see :mod:`niwaki.texts.sources`), windows of one, or (samples, length) int64 tokens.
Text: TypeAlias = Union[str, os.PathLike[str], "Windows", "Tensor"]


class _Options:
    @classmethod
    def of(cls, value: Any) -> Self:
        """``value``, or where it is something else the options with it in the first field and the usual rest."""
        return value if isinstance(value, cls) else cls(value)  # type: ignore[call-arg]

    @property
    def chosen(self) -> dict[str, Any]:
        """The fields, by name, that differ from their defaults."""
        values: Any = self  # one of the dataclasses below
        fields = [(field.name, getattr(values, field.name), field.default) for field in dataclasses.fields(values)]
        # Arrays, which are no texts, have no truth value.
        return {name: value for name, value, usual in fields if type(value) is not type(usual) or value != usual}

    def over(self, others: Mapping[str, Any]) -> Self:
        """These options, with those of ``others``, by name, where nothing was chosen here."""
        return type(self)(**{**others, **self.chosen})

    def only(self, caller: str, *names: str, hint: str = "") -> None:
        """Raises UsageError where another field than ``names`` was chosen, which ``caller`` does not use."""
        for name, value in self.chosen.items():
            if name not in names:
                raise UsageError(f"{caller} does not use {name}; got {name}={value!r}{hint}")


@checked_names
@dataclass(frozen=True)
class Calibration(_Options):
    """The text that matrices and blocks are fitted on; a text alone will do, as in ``calibration="text.txt"``.

    Attributes:
        text: A file, a data set, "demo", "answers", :class:`~niwaki.Windows` or (samples, length) int64 tokens; or
            several of these, which contribute equal shares of ``samples`` and take turns. ``samples``, ``order`` and
            ``seed`` do not apply to windows and tokens. :func:`niwaki.prune` also accepts a JSONL file of conversations
            with images, as the only text.
        samples: Number of windows; None for 128, or as many as the text has, of which a few are left to measure on, or
            as a CPU calibrates a model of this size on in an hour or two. A note says which.
        length: Tokens in a window; None for 2,048, or the model's positions if fewer, or the length of the given
            windows. If ``samples`` is None too, windows are shorter (128 tokens or more) where there would be fewer
            than 16.
        order: "first" for the first windows of the text, "random" for windows drawn from all of it with ``seed``; None
            for the first, except in healing, where windows of files are random.
        seed: Random seed, for random windows and for the text that the model writes.
        answers: "own" if the text, or the first of several, is a JSONL file of prompts that the dense model is to
            answer, see :mod:`niwaki.texts.own`. The text "answers" stands for prompts that ship with niwaki.
        bos: Whether each window begins with the token that the model's tokenizer puts before a text, if it has one.
        field: Column that holds the text or the conversations, in files and data sets with rows; None for "text", or
            else for conversations or tasks with answers in columns of the usual names, see :mod:`niwaki.texts.rows`.

    Raises:
        UsageError: a value is out of range, or prompts to answer are not in a file.
    """

    text: Text | Sequence[Text] = USUAL_CALIBRATION
    samples: int | None = None
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
        """The texts as a tuple, also where there is only one."""
        return self.text if isinstance(self.text, tuple) else (self.text,)

    def shares(self, samples: int) -> list[int]:
        """The number of windows that each text contributes to so many, at least one."""
        count = len(self.texts)
        return [max(1, samples // count + (i < samples % count)) for i in range(count)]

    @property
    def answered(self) -> list[bool]:
        """For each text, whether it consists of prompts that the model is to answer."""
        return [
            isinstance(text, str) and (text == OWN_ANSWERS or (self.answers == "own" and i == 0))
            for i, text in enumerate(self.texts)
        ]


@checked_names
@dataclass(frozen=True)
class Measurement(_Options):
    """The text that perplexity is measured on; a text alone will do, as in ``measurement="wikitext2"``.

    Attributes:
        text: As in :class:`Calibration`. None, or the calibration text itself, stands for the part of that text after
            the calibration windows; where nothing is calibrated, None stands for WikiText-2. Comparisons also accept
            several texts.
        samples: Number of windows, from the beginning of the text; 0 measures nothing. None for the default: 16 in a
            run that writes a model, 256 in a comparison that measures on the rest of the calibration text, and
            otherwise all of the text.
        length: Tokens in a window; None for the same number as in the calibration windows.
        before: Whether a run that writes a model also measures the dense model.
        bos: As in :class:`Calibration`. The token is given and not predicted. The part of a text after the calibration
            windows is read, and begins, as they do.
        field: As in :class:`Calibration`.

    Raises:
        UsageError: a value is out of range.
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
        """The texts as a tuple; most measurements have one."""
        return self.text if isinstance(self.text, tuple) else (self.text,)

    def only_text(self, caller: str) -> None:
        """Raises UsageError unless there is exactly one text."""
        if len(self.texts) != 1:
            raise UsageError(f"{caller} measures one text at a time; got {len(self.texts)}")

    def some(self) -> None:
        """Raises UsageError if no window is to be measured."""
        if self.samples == 0:
            raise UsageError("samples must be 1 or more; got 0")


@checked_names
@dataclass(frozen=True)
class Compute(_Options):
    """Device, dtype and memory with which a model runs; a device alone will do, as in ``compute="cuda"``.

    Attributes:
        device: "cpu", "cuda", "cuda:1"...; "auto" is a GPU if there is one. It is checked when the model is opened.
        dtype: Compute dtype of the blocks: "float32", "bfloat16" or "float16"; "auto" is float32 on a CPU and the
            checkpoint's own on a GPU. Gram matrices and solvers always use float32.
        tf32: When a GPU may round the factors of float32 products to TF32: "auto" for Gram matrices of half-precision
            activations, which it leaves exact; "always" for all products; or "never". Factorizations and inverses never
            use it.
        max_memory: Memory limit of the process, in bytes or as text such as "8GiB"; hidden states beyond it are spilled
            to disk, in the system's temporary directory. None for no limit.

    Raises:
        UsageError: a value is not valid.
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
        """``max_memory`` in bytes; None for no limit."""
        assert not isinstance(self.max_memory, str)
        return self.max_memory


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
    """What :func:`_name_of` makes of ``text``; a single text is no tuple, and none at all a UsageError."""
    texts = _name_of(text)
    if isinstance(texts, tuple) and not texts:
        raise UsageError("no text to calibrate on was given")
    return texts[0] if isinstance(texts, tuple) and len(texts) == 1 else texts


def check_device(name: str) -> None:
    """UsageError where no device can be called ``name``."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", name):
        raise UsageError(f"the device {name!r} cannot be used; it is cpu, cuda, cuda:1 ... or auto")


def check_dtype(name: str) -> None:
    """UsageError where ``name`` is no dtype to compute in."""
    if name not in ("auto", *DTYPES):
        raise UsageError(f"dtype must be {either(('auto', *DTYPES))}; got {name}")


def check_count(name: str, given: int | None, least: int) -> None:
    """Raises UsageError where a number is below ``least``."""
    if given is not None and given < least:
        raise UsageError(f"{name} must be {least} or more; got {given}")
