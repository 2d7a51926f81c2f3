"""``niwaki generate`` and ``niwaki bench``."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from niwaki.cli.common import command_line, out, quiet_libraries
from niwaki.cli.options import Device, Dtype, Model
from niwaki.files import write_json
from niwaki.records.record import SPEED_NAME


def generate(
    model: Model,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="What the model goes on with; of a long text the end.")
    ],
    tokens: Annotated[int, typer.Option(help="Write at most so many tokens.")] = 100,
    temperature: Annotated[
        float, typer.Option(help="0: the most likely token each time; 1: drawn by the model's probabilities.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Write what MODEL, dense or packed, goes on with after PROMPT."""
    quiet_libraries()
    from niwaki.evaluation.generate import check, continue_text
    from niwaki.models.checkpoint import locate_model
    from niwaki.models.text import load_tokenizer
    from niwaki.packed.load import load

    begin = iter([prompt])  # goes before the first piece: nothing is written where nothing is generated

    def say(text: str) -> None:
        sys.stdout.write(next(begin, "") + text)
        sys.stdout.flush()

    check(prompt, tokens, temperature)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what the terminal's encoding lacks
    tokenizer = load_tokenizer(locate_model(model))
    loaded = load(model, device, dtype)
    continue_text(loaded, tokenizer, prompt, tokens, temperature=temperature, seed=seed, say=say)
    say("\n")


def bench(
    model: Model,
    prompt: Annotated[int, typer.Option("--prompt-tokens", help="Tokens of the prompt.")] = 128,
    tokens: Annotated[int, typer.Option(help="Tokens to write behind it.")] = 32,
    repeats: Annotated[int, typer.Option(help="How often; medians count.")] = 3,
    device: Device = "auto",
    dtype: Dtype = "auto",
    record: Annotated[
        Path | None, typer.Option("--record", help="\\[default: niwaki-bench.json in MODEL, for its report]")
    ] = None,
) -> None:
    """Measure the pruned MODEL, dense and packed: tokens per second, memory, disk.

    The form that is not there is made in the temporary directory (TMPDIR), for as long as it takes.
    """
    quiet_libraries()
    from niwaki.cli.tables import speed_table
    from niwaki.evaluation.bench import bench as run
    from niwaki.models.checkpoint import locate_model
    from niwaki.models.output import check_record

    file = check_record(record or locate_model(model) / SPEED_NAME)
    with out.status("reading") as status:
        found = run(
            model,
            prompt=prompt,
            tokens=tokens,
            repeats=repeats,
            device=device,
            dtype=dtype,
            command=command_line(),
            say=status.update,
        )
    out.print(speed_table(found))
    out.print(found.conditions(), soft_wrap=True, markup=False)
    write_json(file, found.to_json())
    out.print(f"written to {file}", soft_wrap=True, markup=False)
