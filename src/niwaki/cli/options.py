"""Options of the command line. Each is written once, and those that belong together are a group that commands share.

A parameter of a command, or a field of a group, is an option: ``rate: Annotated[float, "RATE"] = 1.0`` is ``--rate
RATE``. Words of the annotation are what the help calls the value, and with dashes the names of an option that is not
called like the parameter, or has several. Without a default and without such names it is an argument. The help is what
the docstring says of it under "Options" or "More options"; ``{solvers}`` and the like stand for names in
:data:`_NAMES`. ``--help`` shows the first sentence of what is under "Options", ``--help-all`` all of both.
"""

import copy
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer import Argument, Context, Option
from typer.core import TyperCommand

from niwaki.choices import MASK_NAMES, PATTERN_NAMES, SOLVER_NAMES, TF32, WEIGHT_NAMES, Order
from niwaki.cli.checks import check
from niwaki.effort import EFFORTS
from niwaki.errors import either
from niwaki.options import (
    BLOCKS_RATE,
    HEALING_LENGTH,
    HEALING_RATE,
    SCALES_RATE,
    USUAL_TEXT,
    Calibration,
    Compute,
    Measurement,
)

Function = TypeVar("Function", bound=Callable[..., None])

#: The section of a docstring, and of the help, for options that few need.
_MORE = "More options"
_SECTIONS = re.compile(rf"\n*^(Options|{_MORE}):$", re.MULTILINE)
#: In the context of a command, whether all of its help is asked for.
_ALL = "niwaki.help_all"

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
    "text": "A text is a file (text, JSONL, JSON, CSV or Parquet), a data set (c4, c4-validation, ptb, wikitext2 or "
    "REPO:CONFIG:SPLIT), or one that ships with niwaki (demo or demo-held).",
    "usual_text": USUAL_TEXT,
    "healing_length": HEALING_LENGTH,
    "healing_rate": HEALING_RATE,
    "blocks_rate": BLOCKS_RATE,
    "scales_rate": SCALES_RATE,
}


class Help(NamedTuple):
    """What the help says of an option, and whether that is one that few need."""

    text: str = ""
    is_more: bool = False


class _CommonOptions:
    """Options that several commands have, unless their own docstrings describe them.

    Options:
        model: Directory, GGUF file or hub id of the model, or 'demo'. 'demo' is a small model that ships with niwaki.
        output: Output directory, new or empty.
        restart: Start over instead of resuming an interrupted run.
        length: Tokens per window. [default: 2048; fewer for models with fewer positions, and short texts]

    More options:
        record: Also write the record to this JSON file.
        field: Column that holds the texts or conversations, in files and data sets with rows. [default: text, or
            messages, or columns such as instruction and output]
        bos: Begin each window with the tokenizer's beginning-of-text token, if it has one.
    """


class _CalibrationOptions:
    """Options for :class:`niwaki.Calibration`.

    Options:
        calibration: Calibration text: a file, a data set such as wikitext2, or 'answers'. {text} 'answers' are the
            model's own answers to prompts that ship with niwaki. May be repeated; each text then gets an equal share.
            'prune' also accepts JSONL with images.
        samples: Windows of calibration text to use. [default: 128, or what the text has and a CPU can do in an hour]

    More options:
        order: Use the first windows of the text, or random ones from all of it. [default: first]
        seed: Random seed for choosing windows and for text that the model generates.
        answers: Calibrate on the model's own answers to the prompts in the first text, a file with 'prompt' or
            'messages'. Answers already in the file are replaced.
    """

    calibration: Annotated[list[str], "TEXT"]
    samples: Annotated[int | None, "N"]
    length: Length
    order: Order | None
    seed: Annotated[int, "N"]
    answers: Literal["own"] | None
    field: Field
    bos: bool


class _MeasurementOptions:
    """Options for :class:`niwaki.Measurement`.

    Options:
        text: Text to measure perplexity on. {text} [default: the rest of the calibration text]

    More options:
        text_samples: Windows to measure on; 0 skips measuring.
    """

    text: Annotated[str | None, "TEXT"]
    text_samples: Annotated[int | None, "N"]
    field: Field
    bos: bool


class _ComputeOptions:
    """Options for :class:`niwaki.Compute`.

    Options:
        device: cpu, cuda, cuda:1 ...; auto uses a GPU if there is one.
        max_memory: Memory limit, such as 8GiB. Hidden states beyond it are spilled to disk.

    More options:
        dtype: Compute dtype: float32, bfloat16, float16 or auto.
        tf32: When to use TF32 on a GPU. auto: only for Gram matrices of half-precision activations, where it loses
            nothing; always: for all products in float32; never.
    """

    device: Annotated[str, "DEVICE"]
    dtype: Annotated[str, "DTYPE"]
    tf32: TF32
    max_memory: Annotated[str | None, "SIZE"]


#: Groups whose options are written here, because the class itself is for Python; and options that do not have the name
#: of the field there.
_OPTIONS: Mapping[type, type] = {
    Calibration: _CalibrationOptions,
    Measurement: _MeasurementOptions,
    Compute: _ComputeOptions,
}
_FIELDS = {"calibration": "text", "text_samples": "samples"}


def options(*, without: tuple[str, ...] = (), **changed: Any) -> Callable[[Function], Function]:
    """Makes a function a command for typer, with an option for each parameter, or for each field of a group.

    Options ``without`` are left out and keep their default; ``changed`` are annotations of options that are of another
    type here than in their group.
    """

    def decorate(command: Function) -> Function:
        parameters = inspect.signature(command, eval_str=True).parameters
        helps = _helps(_CommonOptions) | _helps(command)
        known: dict[str, Parameter] = {}
        for name, each in parameters.items():
            known |= _options(name, each.annotation, each.default, helps, changed)
        shown = {name: each for name, each in known.items() if name not in without}
        shown["help_all"] = _HELP_ALL

        @functools.wraps(command)
        def run(**given: Any) -> None:
            del given["help_all"]
            check(given)
            groups = {name for name, each in parameters.items() if _is_group(each.annotation)}
            made = {name: _made(each.default, given) for name, each in parameters.items() if name in groups}
            command(**{name: made[name] if name in groups else given[name] for name in parameters})

        run.__doc__ = _SECTIONS.split(inspect.getdoc(command) or "")[0]
        run.__signature__ = inspect.Signature(list(shown.values()))  # type: ignore[attr-defined]
        run.__annotations__ = {name: each.annotation for name, each in shown.items()}
        return run  # type: ignore[return-value]

    return decorate


def _is_group(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint)


def _fields(group: Any) -> dict[str, tuple[str, Any]]:
    """By option of a group, the field that it is for and its annotation."""
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
    """By field of a ``group`` that was made from the command line, what was given there for the group in it."""

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
    name: str, hint: Any, default: Any, helps: Mapping[str, Help], changed: Mapping[str, Any]
) -> dict[str, Parameter]:
    """What typer is to know of a parameter, or of all options of a group; the outermost of the ``helps`` counts."""
    if hint is Context:
        return {name: Parameter(name, Parameter.KEYWORD_ONLY, annotation=hint)}
    if not _is_group(hint):
        return {name: _option(name, changed.get(name, hint), default, helps.get(name, Help()))}
    helps = {**_helps(_OPTIONS.get(hint, hint)), **helps}
    found: dict[str, Parameter] = {}
    for option, (field, kind) in _fields(hint).items():
        found |= _options(option, kind, getattr(default, field), helps, changed)
    return found


def _option(name: str, hint: Any, default: Any, about: Help) -> Parameter:
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
    panel = _MORE if about.is_more else None
    info = make(*flags, metavar=metavar, help=about.text.replace("[", r"\["), rich_help_panel=panel)  # no markup
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def _helps(described: Any) -> dict[str, Help]:
    """What a docstring says of parameters or attributes, by name."""
    _, *parts = _SECTIONS.split((inspect.getdoc(described) or "").format_map(_NAMES))
    found = {}
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        for name, words in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE):
            found[name] = Help(" ".join(words.split()), is_more=title == _MORE)
    return found


class Command(TyperCommand):
    """A command whose ``--help`` fits on a screen: common options, a sentence each; ``--help-all`` has all of both."""

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        whole = self.params
        if not ctx.meta.get(_ALL):
            self.params = [_in_short(option) for option in whole]
        try:
            super().format_help(ctx, formatter)
        finally:
            self.params = whole


def _in_short(option: Any) -> Any:
    short = copy.copy(option)
    short.hidden = getattr(option, "rich_help_panel", None) == _MORE
    short.help = first_sentence(option.help or "")
    return short


def first_sentence(text: str) -> str:
    """The first sentence of an option's help, with its default, if that is at the end."""
    said, default = re.fullmatch(r"(.*?)(\s*\\?\[default: [^]]*\])?", text).groups("")  # type: ignore[union-attr]
    return re.split(r"(?<=[^.]\.)\s", said)[0] + default


def _show_all(context: Context, is_asked: bool) -> None:
    if is_asked:
        context.meta[_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


_HELP_ALL = Parameter(
    "help_all",
    Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool, Option("--help-all", metavar="", is_eager=True, callback=_show_all, help="Show all options in full.")
    ],
)
