"""Options that several commands have, and those of the objects in :mod:`niwaki.options`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from niwaki.options import TF32, Calibration, Compute, Measurement, Order

Command = TypeVar("Command", bound=Callable[..., None])

TEXT = "A text file, JSONL, data set (c4, c4-validation, ptb, wikitext2, REPO:CONFIG:SPLIT), demo or demo-held."

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A model directory, a hub id, or 'demo' for the embedded model."),
]
Output = Annotated[Path, typer.Argument(metavar="OUT", help="A directory that does not exist or is empty.")]
RecordFile = Annotated[Path | None, typer.Option("--record", help="Also write the record to this JSON file.")]
Restart = Annotated[
    bool, typer.Option("--restart", help="Start over instead of resuming an interrupted run that was to write OUT.")
]

Length = Annotated[
    int | None,
    typer.Option("--seqlen", help="Tokens in a window. \\[default: 2048, or the model's positions if fewer]"),
]

#: The options of each object: (field, option's parameter, what typer is to know of it, default).
_OPTIONS: dict[type, list[tuple[str, str, Any, Any]]] = {
    Calibration: [
        ("text", "calibration", Annotated[str, typer.Option(help=TEXT)], "c4"),
        ("samples", "samples", Annotated[int, typer.Option(help="Windows of calibration text.")], 128),
        ("length", "length", Length, None),
        (
            "order",
            "windows",
            Annotated[Order, typer.Option(help="The first windows of the text, or random ones.")],
            "first",
        ),
        ("seed", "seed", Annotated[int, typer.Option(help="For random windows.")], 0),
    ],
    Measurement: [
        (
            "text",
            "text",
            Annotated[
                str | None,
                typer.Option(help="What to measure perplexity on, as --calibration. \\[default: more of that text]"),
            ],
            None,
        ),
        ("samples", "text_samples", Annotated[int, typer.Option(help="Windows of it; 0 for no perplexity.")], 16),
    ],
    Compute: [
        (
            "device",
            "device",
            Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...; auto is a GPU if there is one.")],
            "auto",
        ),
        (
            "dtype",
            "dtype",
            Annotated[str, typer.Option(help="What blocks run in: float32, bfloat16, float16 or auto.")],
            "auto",
        ),
        (
            "tf32",
            "tf32",
            Annotated[
                TF32,
                typer.Option(
                    help="TF32 in products on a GPU: auto for Gram matrices of half-precision activations, where no "
                    "factor changes; always for all products of float32; never."
                ),
            ],
            "auto",
        ),
        (
            "memory",
            "memory",
            Annotated[
                str | None,
                typer.Option(
                    metavar="SIZE", help="Such as 8GiB: hidden states that do not fit are kept in a temporary file."
                ),
            ],
            None,
        ),
    ],
}


def spread(*, without: tuple[str, ...] = (), **changed: Any) -> Callable[[Command], Command]:
    """Gives a command an option for each field of the objects among its parameters, and makes the objects from them.

    Args:
        without: Options, by their parameters, that the command does not have.
        changed: By parameter, what typer is to know of an option where this command says it in another way, as
            (annotation, default).
    """

    def decorate(command: Command) -> Command:
        hints = get_type_hints(command, include_extras=True)
        objects = {name: hint for name, hint in hints.items() if hint in _OPTIONS}
        parameters: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(command).parameters.items():
            if name not in objects:
                parameters.append(parameter.replace(annotation=hints[name]))
                continue
            for _, option, annotation, default in _OPTIONS[objects[name]]:
                if option not in without:
                    kind, usual = changed.get(option, (annotation, default))
                    parameters.append(
                        inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=usual, annotation=kind)
                    )

        @functools.wraps(command)
        def run(**given: Any) -> None:
            for name, kind in objects.items():
                fields = {field: option for field, option, *_ in _OPTIONS[kind] if option in given}
                given[name] = kind(**{field: given.pop(option) for field, option in fields.items()})
            command(**given)

        in_order = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
        run.__signature__ = inspect.Signature(in_order)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in in_order}
        return run  # type: ignore[return-value]

    return decorate
