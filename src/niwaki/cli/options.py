"""Options that several commands have, and those of the objects in :mod:`niwaki.options`."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, get_args

from typer import Argument, Option

from niwaki.choices import TF32, Order
from niwaki.options import Calibration, Compute, Measurement

Command = TypeVar("Command", bound=Callable[..., None])

TEXT = (
    "A file (text, JSONL, JSON, CSV, Parquet), data set (c4, c4-validation, ptb, wikitext2, REPO:CONFIG:SPLIT), demo "
    "or demo-held."
)
_CALIBRATION = (
    f"{TEXT} answers: what the model itself answers to prompts that ship with niwaki. May be given several times, for "
    "equal shares. For prune also JSONL of conversations with images."
)
_ANSWERS = (
    "Where the (first) text is a file of prompts ('prompt' or 'messages'): the model answers them, also in the place "
    "of answers that are there."
)

Model = Annotated[
    str, Argument(metavar="MODEL", help="A model directory, a GGUF file, a hub id, or 'demo' for the embedded model.")
]
# Paths are text here: an empty one would become the working directory.
Output = Annotated[str, Argument(metavar="OUT", help="A directory that does not exist or is empty.")]
RecordFile = Annotated[str | None, Option("--record", metavar="FILE", help="Also write the record to this JSON file.")]
_RESTART = Option(
    "--restart", metavar="", help="Start over instead of resuming an interrupted run that was to write OUT."
)
_LENGTH = Option(
    "--seqlen", metavar="N", help=r"Tokens in a window. \[default: 2048, or the model's positions if fewer]"
)
_ORDER = r"The first windows of the text, or random ones from all of it. \[default: first]"
_MEASURED = Option(
    metavar="TEXT",
    help=r"What to measure perplexity on, as --calibration. \[default: the calibration text after its windows]",
)
_BOS = Option(
    "--bos/--no-bos",
    metavar="",
    help="Begin each window with the token that the model's tokenizer puts before a text, where it puts one.",
)
_FIELD = Option(
    metavar="NAME",
    help=r"The column of files and data sets of rows that has texts or conversations. \[default: text, or messages, or "
    "columns such as instruction and output]",
)
_TF32 = Option(
    help="TF32 in products on a GPU: auto for Gram matrices of half-precision activations, where no factor changes; "
    "always for all products of float32; never."
)
_MEMORY = Option(metavar="SIZE", help="Memory to use, such as 8GiB; hidden states beyond it go to a temporary file.")
Restart = Annotated[bool, _RESTART]
Length = Annotated[int | None, _LENGTH]
Bos = Annotated[bool, _BOS]
Field = Annotated[str | None, _FIELD]

#: The options of each object: field to the option's parameter and what typer is to know of it; several share one.
_OPTIONS: dict[Any, dict[str, tuple[str, Any]]] = {
    Calibration: {
        "text": ("calibration", Annotated[list[str], Option(metavar="TEXT", help=_CALIBRATION)]),
        "samples": ("samples", Annotated[int, Option(metavar="N", help="Windows of calibration text.")]),
        "length": ("length", Length),
        "order": ("windows", Annotated[Order | None, Option(help=_ORDER)]),
        "seed": (
            "seed",
            Annotated[int, Option(metavar="N", help="For random windows, and for what the model writes itself.")],
        ),
        "answers": ("answers", Annotated[Literal["own"] | None, Option(help=_ANSWERS)]),
        "field": ("field", Field),
        "bos": ("bos", Bos),
    },
    Measurement: {
        "text": ("text", Annotated[str | None, _MEASURED]),
        "samples": ("text_samples", Annotated[int, Option(metavar="N", help="Windows of it; 0 for no perplexity.")]),
        "field": ("field", Field),
        "bos": ("bos", Bos),
    },
    Compute: {
        "device": (
            "device",
            Annotated[str, Option(metavar="DEVICE", help="cpu, cuda, cuda:1 ...; auto is a GPU if there is one.")],
        ),
        "dtype": (
            "dtype",
            Annotated[str, Option(metavar="DTYPE", help="Numbers to compute in: float32, bfloat16, float16 or auto.")],
        ),
        "tf32": ("tf32", Annotated[TF32, _TF32]),
        "memory": ("memory", Annotated[str | None, _MEMORY]),
    },
}


def spread(*, without: tuple[str, ...] = (), **changed: Any) -> Callable[[Command], Command]:
    """Gives a command an option for each field of the objects among its parameters, and makes the objects from them.

    Defaults are those of the parameters. Options ``without`` are left out; ``changed`` is what typer knows of others.
    """

    def decorate(command: Command) -> Command:
        # Not typing.get_type_hints, which before Python 3.11 wraps what has the default None.
        parameters = inspect.signature(command, eval_str=True).parameters
        hints = {name: each.annotation for name, each in parameters.items()}
        usual = {name: each.default for name, each in parameters.items()}
        objects = {name: _OPTIONS[hints[name]] for name in usual if hints[name] in _OPTIONS}
        options: dict[str, tuple[Any, Any]] = {}  # what typer is to know, and the default
        for name, default in usual.items():
            if name not in objects:
                options[name] = hints[name], default
            for field, (option, kind) in objects.get(name, {}).items():
                if option not in without:
                    value = getattr(default, field)
                    several = get_args(kind)[0] == list[str] and isinstance(value, str)
                    options[option] = changed.get(option, kind), [value] if several else value

        @functools.wraps(command)
        def run(**given: Any) -> None:
            made: dict[str, Any] = {}
            for name, fields in objects.items():
                values = {field: given[option] for field, (option, _) in fields.items() if option in given}
                made[name] = dataclasses.replace(usual[name], **values)
            spent = {option for fields in objects.values() for option, _ in fields.values()}
            command(**made, **{option: value for option, value in given.items() if option not in spent})

        keyword = inspect.Parameter.KEYWORD_ONLY
        known = [inspect.Parameter(o, keyword, default=d, annotation=kind) for o, (kind, d) in options.items()]
        run.__signature__ = inspect.Signature(known)  # type: ignore[attr-defined]
        run.__annotations__ = {option: kind for option, (kind, _) in options.items()}
        return run  # type: ignore[return-value]

    return decorate
