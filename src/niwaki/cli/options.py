"""Options of the command line. Each is written once, and those that belong together are a group that commands share.

A parameter of a command, or a field of a group, is an option: ``rate: Annotated[float, "RATE"] = 1.0`` is ``--rate
RATE``. Words of the annotation are what the help calls the value, and with dashes the names of an option that is not
called like the parameter, or has several. Without a default and without such names it is an argument. The help is what
the docstring says of it under "Options"; ``{solvers}`` and the like stand for names in :data:`_NAMES`.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from typer import Argument, Context, Option

from niwaki.choices import MASK_NAMES, PATTERN_NAMES, SOLVER_NAMES, TF32, WEIGHT_NAMES, Order
from niwaki.cli.checks import check
from niwaki.effort import EFFORTS, Allocation
from niwaki.errors import either
from niwaki.options import BLOCKS_RATE, HEALING_LENGTH, HEALING_RATE, USUAL_TEXT, Calibration, Compute, Measurement

Command = TypeVar("Command", bound=Callable[..., None])

# Paths are text: an empty one would become the working directory.
Model = Annotated[str, "MODEL"]
Output = Annotated[str, "OUT"]
RecordFile = Annotated[str | None, "FILE", "--record"]
Length = Annotated[int | None, "N"]
Field = Annotated[str | None, "NAME"]

#: Names that help has from data.
_NAMES = {
    "solver": SOLVER_NAMES[0],
    "solvers": either(SOLVER_NAMES[1:]),
    "masks": ", ".join(MASK_NAMES),
    "weights": ", ".join(WEIGHT_NAMES),
    "patterns": ", ".join(PATTERN_NAMES),
    "efforts": either(EFFORTS),
    "allocations": either(get_args(Allocation)),
    "text": "A file (text, JSONL, JSON, CSV, Parquet), data set (c4, c4-validation, ptb, wikitext2, "
    "REPO:CONFIG:SPLIT), demo or demo-held.",
    "usual_text": USUAL_TEXT,
    "healing_length": HEALING_LENGTH,
    "healing_rate": HEALING_RATE,
    "blocks_rate": BLOCKS_RATE,
}


class _Shared:
    """What several commands have, where their own docstrings say nothing of it.

    Options:
        model: A model directory, a GGUF file, a hub id, or 'demo' for the embedded model.
        output: A directory that does not exist or is empty.
        record: Also write the record to this JSON file.
        restart: Start over instead of resuming an interrupted run that was to write OUT.
        length: Tokens in a window. [default: 2048, or the model's positions if fewer]
        field: The column of files and data sets of rows that has texts or conversations. [default: text, or messages,
            or columns such as instruction and output]
        bos: Begin each window with the token that the model's tokenizer puts before a text, where it puts one.
    """


class _Calibration:
    """Options for :class:`niwaki.Calibration`.

    Options:
        calibration: {text} answers: what the model itself answers to prompts that ship with niwaki. May be given
            several times, for equal shares. For prune also JSONL of conversations with images.
        samples: Windows of calibration text.
        order: The first windows of the text, or random ones from all of it. [default: first]
        seed: For random windows, and for what the model writes itself.
        answers: Where the (first) text is a file of prompts ('prompt' or 'messages'): the model answers them, also in
            the place of answers that are there.
    """

    calibration: Annotated[list[str], "TEXT"]
    samples: Annotated[int, "N"]
    length: Length
    order: Order | None
    seed: Annotated[int, "N"]
    answers: Literal["own"] | None
    field: Field
    bos: bool


class _Measurement:
    """Options for :class:`niwaki.Measurement`.

    Options:
        text: What to measure perplexity on, as --calibration. [default: the calibration text after its windows]
        text_samples: Windows of it; 0 for no perplexity.
    """

    text: Annotated[str | None, "TEXT"]
    text_samples: Annotated[int | None, "N"]
    field: Field
    bos: bool


class _Compute:
    """Options for :class:`niwaki.Compute`.

    Options:
        device: cpu, cuda, cuda:1 ...; auto is a GPU if there is one.
        dtype: Numbers to compute in: float32, bfloat16, float16 or auto.
        tf32: TF32 in products on a GPU: auto for Gram matrices of half-precision activations, where no factor changes;
            always for all products of float32; never.
        max_memory: Memory to use, such as 8GiB; hidden states beyond it go to a temporary file.
    """

    device: Annotated[str, "DEVICE"]
    dtype: Annotated[str, "DTYPE"]
    tf32: TF32
    max_memory: Annotated[str | None, "SIZE"]


#: Groups whose options are written here, because the class itself is for Python; and options that do not have the name
#: of the field there.
_OPTIONS: Mapping[type, type] = {Calibration: _Calibration, Measurement: _Measurement, Compute: _Compute}
_FIELDS = {"calibration": "text", "text_samples": "samples"}


def options(*, without: tuple[str, ...] = (), **changed: Any) -> Callable[[Command], Command]:
    """Makes a function a command for typer, with an option for each parameter, or for each field of a group.

    Options ``without`` are left out and keep their default; ``changed`` are annotations of options that are of another
    type here than in their group.
    """

    def decorate(command: Command) -> Command:
        parameters = inspect.signature(command, eval_str=True).parameters
        helps = _helps(_Shared) | _helps(command)
        known: dict[str, Parameter] = {}
        for name, each in parameters.items():
            known |= _options(name, each.annotation, each.default, helps, changed)
        shown = {name: each for name, each in known.items() if name not in without}

        @functools.wraps(command)
        def run(**given: Any) -> None:
            check(given)
            groups = {name for name, each in parameters.items() if _is_group(each.annotation)}
            made = {name: _made(each.default, given) for name, each in parameters.items() if name in groups}
            command(**{name: made[name] if name in groups else given[name] for name in parameters})

        run.__doc__ = (inspect.getdoc(command) or "").partition("\nOptions:\n")[0]
        run.__signature__ = inspect.Signature(list(shown.values()))  # type: ignore[attr-defined]
        run.__annotations__ = {name: each.annotation for name, each in shown.items()}
        return run  # type: ignore[return-value]

    return decorate


def _is_group(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint)


def _fields(group: Any) -> dict[str, tuple[str, Any]]:
    """Of each option of a group the field that it is for, and its annotation."""
    listed = _OPTIONS.get(group, group)
    renamed = _FIELDS if group in _OPTIONS else {}
    return {name: (renamed.get(name, name), hint) for name, hint in get_type_hints(listed, include_extras=True).items()}


def _made(usual: Any, given: Mapping[str, Any]) -> Any:
    """``usual``, a group, with what was ``given`` for its options."""
    values = {}
    for name, (field, hint) in _fields(type(usual)).items():
        if _is_group(hint):
            values[field] = _made(getattr(usual, field), given)
        elif name in given:
            values[field] = given[name]
    return dataclasses.replace(usual, **values)


def chosen(group: Any, context: Context) -> dict[str, dict[str, Any]]:
    """Of each group in a ``group`` that was made from the command line, what was given there, by its field."""

    def is_given(option: str) -> bool:
        source = context.get_parameter_source(option)
        return source is not None and source.name == "COMMANDLINE"

    found: dict[str, dict[str, Any]] = {}
    for part in dataclasses.fields(group):
        value = getattr(group, part.name)
        if _is_group(type(value)):
            found[part.name] = {
                field: getattr(value, field) for option, (field, _) in _fields(type(value)).items() if is_given(option)
            }
    return found


def _options(
    name: str, hint: Any, default: Any, helps: Mapping[str, str], changed: Mapping[str, Any]
) -> dict[str, Parameter]:
    """What typer is to know of a parameter, or of all options of a group; the outermost of the ``helps`` counts."""
    if hint is Context:
        return {name: Parameter(name, Parameter.KEYWORD_ONLY, annotation=hint)}
    if not _is_group(hint):
        return {name: _option(name, changed.get(name, hint), default, helps.get(name))}
    helps = {**_helps(_OPTIONS.get(hint, hint)), **helps}
    found: dict[str, Parameter] = {}
    for option, (field, kind) in _fields(hint).items():
        found |= _options(option, kind, getattr(default, field), helps, changed)
    return found


def _option(name: str, hint: Any, default: Any, about: str | None) -> Parameter:
    kind, *words = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if not all(isinstance(word, str) for word in words):  # typer's own
        return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)
    flags = [word for word in words if word.startswith("-")]
    metavar = next((word for word in words if word not in flags), None)
    dashed = f"--{name.replace('_', '-')}"
    is_argument = default is Parameter.empty and not flags
    if kind is bool:
        metavar = ""
        flags = flags or [f"{dashed}/--no-{dashed[2:]}" if default else dashed]
    elif get_origin(kind) is list and isinstance(default, str):
        default = [default]
    if not is_argument:
        # Left to itself, typer 0.27 and 0.28 would call --device --DEVICE, after its value in the help.
        flags = flags or [dashed]
    make: Any = Argument if is_argument else Option
    info = make(*flags, metavar=metavar, help=about and about.replace("[", r"\["))  # no markup
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def _helps(described: Any) -> dict[str, str]:
    """What a docstring says of parameters or attributes, by name."""
    text = (inspect.getdoc(described) or "").format_map(_NAMES)
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in entries}
