"""Options that several commands have."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class Order(str, Enum):
    """Which windows of a text."""

    first = "first"
    random = "random"


class TF32(str, Enum):
    """Where GPUs may use TF32."""

    auto = "auto"
    always = "always"
    never = "never"


Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A model directory, a hub id, or 'demo' for the embedded model."),
]
Length = Annotated[
    int | None,
    typer.Option("--seqlen", help="Tokens in a window. \\[default: 2048, or the model's positions if fewer]"),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...; auto is a GPU if there is one.")]
Dtype = Annotated[str, typer.Option(help="What blocks run in: float32, bfloat16, float16 or auto.")]
Output = Annotated[Path, typer.Argument(metavar="OUT", help="A directory that does not exist or is empty.")]
Samples = Annotated[int, typer.Option(help="Windows of calibration text.")]
TextSamples = Annotated[int, typer.Option(help="Windows of it; 0 for no perplexity.")]
RecordFile = Annotated[Path | None, typer.Option("--record", help="Also write the record to this JSON file.")]
TEXT = "A text file, JSONL, data set (c4, c4-validation, ptb, wikitext2, REPO:CONFIG:SPLIT), demo or demo-held."
HeldText = Annotated[
    str | None,
    typer.Option(help="What to measure perplexity on, as --calibration. \\[default: more of that text]"),
]
