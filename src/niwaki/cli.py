"""The command line: thin."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import signal
import sys
import time
from enum import Enum
from pathlib import Path
from typing import Annotated

# Before torch is imported by anything. OpenMP threads that wait by spinning take the core away from
# the thread they wait for when another program is busy: on two cores with one other busy process, the
# products of small models took 30 times as long. Short spinning costs nothing measurable otherwise.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import niwaki
from niwaki.display import Display, TableDisplay, survey_tables
from niwaki.effort import PLAIN_EFFORT, usual_effort
from niwaki.errors import NiwakiError, UsageError
from niwaki.record import write_json
from niwaki.table import METHODS

app = typer.Typer(
    help="Prunes large language models after training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# No emoji: ":m:" is a part of n:m here. Where the output is a file, lines are as long as they need to be.
out = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else 160)


class Order(str, Enum):
    """Which windows of a text."""

    first = "first"
    random = "random"


class TF32(str, Enum):
    """Where GPUs may use TF32."""

    auto = "auto"
    always = "always"
    never = "never"


Model = Annotated[str, typer.Argument(help="A model directory, a hub id, or 'demo' for the embedded model.")]
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
TEXT = "A text file, JSONL, data set (c4, wikitext2, REPO:CONFIG:SPLIT), or 'demo'."
HeldText = Annotated[
    str | None,
    typer.Option(help="What to measure perplexity on, as --calibration. \\[default: more of that text]"),
]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        out.print(f"niwaki {niwaki.__version__}")
        raise typer.Exit


@app.command()
def prune(
    model: Model,
    output: Output,
    solver: Annotated[
        str | None,
        typer.Option(
            help="continuation (the default), admm-grad, alps, sparsegpt or obc; for masks magnitude, wanda, ria, obs, "
            "dsnot, swaps; for weights admm1, adam, sgd, cg, exact; or several, as in wanda+swaps+exact."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A parameter of the solver.")
    ] = None,
    effort: Annotated[
        str | None,
        typer.Option(
            help="fast, balanced or best: what is done for the model as a whole and for its parts to fit together; "
            "with parameters as in best:epochs=3. \\[default: balanced; with --solver or --mask-from "
            "fast, methods as they were published]"
        ),
    ] = None,
    allocation: Annotated[
        str | None,
        typer.Option(
            help="How zeros are shared out among matrices: uniform, or by loss, error or owl. \\[default: the effort's]"
        ),
    ] = None,
    sparsity: Annotated[
        float | None, typer.Option(help="Fraction of zeros in the matrices, such as 0.6.")
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(help="A pattern instead: 2:4, per-row:0.6, block-4x4:0.5, 2:4+per-row:0.6 ..."),
    ] = None,
    mask_from: Annotated[
        str | None,
        typer.Option(
            help="Take the mask of this solver or pruned model, update the weights for it. Within --pattern "
            "swaps and dsnot refine the mask of a model; others keep it."
        ),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="GRID",
            help="Put the remaining weights on a grid: int4:128 has 4 bits and a scale for each row and 128 inputs, "
            "int8 a scale for each row. With --sparsity 0 that alone.",
        ),
    ] = None,
    calibration: Annotated[str, typer.Option(help=TEXT)] = "c4",
    samples: Samples = 128,
    length: Length = None,
    windows: Annotated[
        Order, typer.Option(help="The first windows of the text, or random ones.")
    ] = Order.first,
    seed: Annotated[int, typer.Option(help="For random windows.")] = 0,
    text: HeldText = None,
    text_samples: TextSamples = 16,
    device: Device = "auto",
    dtype: Dtype = "auto",
    tf32: Annotated[
        TF32,
        typer.Option(
            help="TF32 in products on a GPU: auto for Gram matrices of half-precision activations, where no factor "
            "changes; always for all products of float32; never."
        ),
    ] = TF32.auto,
    blocks: Annotated[
        str | None,
        typer.Option(metavar="FROM:TO", help="Prune only these blocks, such as 0:2 for the first two."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Such as 8GiB: hidden states that do not fit are kept in a temporary file."
        ),
    ] = None,
    record: RecordFile = None,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Discard what a stopped run has left for OUT instead of going on."),
    ] = False,
) -> None:
    """Prune MODEL and write the result to OUT. A run that was stopped goes on when asked for again."""
    _quiet_libraries()
    from niwaki.distributed import world
    from niwaki.pipeline import prune as run
    from niwaki.solvers import DEFAULT_SOLVER, make_solver
    from niwaki.states import parse_size

    name = solver or DEFAULT_SOLVER
    effort = effort or usual_effort(solver, mask_from)
    if allocation is not None:
        effort += f":allocation={allocation}"
    with world(device) as (team, device), Display(out) as display:
        run(
            model,
            output,
            solver=make_solver(name, _settings(settings or [])),
            method=name,
            effort=effort,
            sparsity=sparsity,
            pattern=pattern,
            mask_from=mask_from,
            quantize=quantize,
            calibration=calibration,
            samples=samples,
            length=length,
            order=windows.value,
            seed=seed,
            text=text,
            text_samples=text_samples or 1,
            measure="both" if text_samples else "none",
            device=device,
            dtype=dtype,
            tf32=tf32.value,
            blocks=_range(blocks) if blocks is not None else None,
            memory=parse_size(memory) if memory is not None else None,
            record_to=record,
            restart=restart,
            command=shlex.join(["niwaki", *sys.argv[1:]]),
            progress=display,
            world=team,
        )
        if team.first:
            out.print(f"written to {output}", soft_wrap=True, markup=False)


@app.command()
def shrink(
    model: Model,
    output: Output,
    blocks: Annotated[
        int, typer.Option(metavar="N", help="Decoder blocks to remove: those that change their inputs least.")
    ] = 0,
    neurons: Annotated[
        float, typer.Option(metavar="FRACTION", help="Fraction of the MLP neurons of each block to remove.")
    ] = 0.0,
    heads: Annotated[
        float,
        typer.Option(metavar="FRACTION", help="Fraction of the attention heads of each block to remove."),
    ] = 0.0,
    calibration: Annotated[str, typer.Option(help=TEXT)] = "c4",
    samples: Samples = 128,
    length: Length = None,
    text: HeldText = None,
    text_samples: TextSamples = 16,
    device: Device = "auto",
    dtype: Dtype = "auto",
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard what a run that was stopped has left for OUT.")
    ] = False,
) -> None:
    """Remove blocks, attention heads or neurons of MODEL; write a smaller dense model to OUT."""
    _quiet_libraries()
    from niwaki.display import Display
    from niwaki.shrinking import shrink as run

    with Display(out) as display:
        run(
            model,
            output,
            blocks=blocks,
            neurons=neurons,
            heads=heads,
            calibration=calibration,
            samples=samples,
            length=length,
            text=text,
            text_samples=text_samples,
            device=device,
            dtype=dtype,
            restart=restart,
            command=shlex.join(["niwaki", *sys.argv[1:]]),
            progress=display,
        )
    out.print(f"written to {output}", soft_wrap=True, markup=False)


@app.command("eval")
def evaluate(
    model: Model,
    text: Annotated[str, typer.Option(help=TEXT)] = "wikitext2",
    length: Length = None,
    samples: Annotated[int | None, typer.Option(help="The first so many windows. \\[default: all]")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    record: RecordFile = None,
) -> None:
    """Measure the perplexity of MODEL."""
    _quiet_libraries()
    from niwaki.perplexity import evaluate as run
    from niwaki.record import versions

    began = time.perf_counter()
    with out.status("reading") as status:
        found = run(
            model,
            text,
            length=length,
            samples=samples,
            device=device,
            dtype=dtype,
            done=lambda block, blocks: status.update(f"block {block}/{blocks}"),
        )
    out.print(f"perplexity {found}", soft_wrap=True, markup=False)
    if record is not None:
        values = {
            "command": shlex.join(["niwaki", *sys.argv[1:]]),
            "model": model,
            "perplexity": dataclasses.asdict(found),
            "seconds": time.perf_counter() - began,
            "versions": versions(),
        }
        write_json(record, json.dumps(values, indent=2) + "\n")


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="A directory that 'prune --quantize' wrote.")],
    output: Output,
) -> None:
    """Write MODEL, whose weights are on a grid of 4 or 8 bits, to OUT as packed integers (compressed-tensors)."""
    _quiet_libraries()
    from niwaki.exporting import export as run

    with out.status("exporting"):
        run(model, output)
    out.print(f"written to {output}", soft_wrap=True, markup=False)


@app.command()
def report(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="What `niwaki prune` or `niwaki compare` wrote.")
    ],
    file: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="\\[default: DIR/report.html]")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="paper: published results too, marked as such and not measured.")
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", metavar="TEXT", help="What the models go on with; can be given several times."
        ),
    ] = None,
    samples: Annotated[bool, typer.Option(help="Generate text from the model, dense and pruned.")] = True,
) -> None:
    """Write a page about a pruned model or a comparison: one HTML file that needs nothing else."""
    from niwaki.report import check_extra, load, render, write

    material = load(directory)
    check_extra()
    found = None
    with out.status("reading masks and generating text" if not material.compared else "drawing"):
        if not material.compared:
            _quiet_libraries()
            from niwaki.specimens import extras

            (record,) = (run.record for run in material.runs)
            assert record is not None
            found = extras(directory, record, (prompts or None) if samples else [])
        path = write(render(material, found, reference=reference), directory, file)
    size = path.stat().st_size / 2**20
    out.print(f"written to {path} ({size:.1f} MiB)", soft_wrap=True, markup=False)


@app.command()
def inspect(model: Model) -> None:
    """Show what would be pruned in MODEL, and how sparse it is."""
    _quiet_libraries()
    from niwaki.survey import survey

    with out.status("reading"):
        found = list(survey(model))
    for table in survey_tables(found):
        out.print(table)
        out.print()


@app.command()
def solvers() -> None:
    """List the solvers and their parameters, for --solver and --set."""
    from niwaki.solvers import SOLVERS

    table = Table("name", "what it does", "parameters and defaults", box=None, padding=(0, 2, 0, 0))
    for name, solver in SOLVERS.items():
        module = sys.modules[type(solver).__module__]
        what = (module.__doc__ or "").partition(":")[2].strip() or (module.__doc__ or "")
        values = ", ".join(f"{key}={value}" for key, value in dataclasses.asdict(solver).items())
        table.add_row(name, what, values)
    out.print(table)


@app.command()
def compare(
    model: Model,
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--out", metavar="DIR", help="For the table and all records; gone on with if there."
        ),
    ],
    solvers: Annotated[
        str, typer.Option(help="Names as for prune --solver, each with an effort behind an @ if you like.")
    ] = ",".join(METHODS),
    sparsity: Annotated[
        str, typer.Option(help="Fractions, and patterns such as 2:4 or per-row:0.6.")
    ] = "0.5,0.6,0.7,0.8,2:4",
    effort: Annotated[
        str, typer.Option(help="For solvers that have none of their own: fast, balanced or best.")
    ] = PLAIN_EFFORT,
    calibration: Annotated[str, typer.Option(help=TEXT)] = "c4",
    samples: Annotated[int, typer.Option(help="Windows of calibration text.")] = 128,
    length: Length = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="What to measure perplexity on; may be given several times. \\[default: wikitext2]"
        ),
    ] = None,
    text_samples: Annotated[
        int | None, typer.Option(help="Windows of each. \\[default: all, or 256 of the calibration text]")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Such as 8GiB; as for prune.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the pruned models, in DIR/models.")] = False,
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Such as 90m or 2h: start no run that would not end by then."),
    ] = None,
) -> None:
    """Prune MODEL by several methods to several sparsities; table, JSON, CSV and all records go to DIR.

    What is done in DIR is not done again: a call that was stopped goes on, and one with more solvers or
    sparsities adds to the table.
    """
    seconds = _seconds(budget) if budget is not None else None
    _quiet_libraries()
    from niwaki.comparison import compare as run
    from niwaki.states import parse_size

    with TableDisplay(out) as display:
        run(
            model,
            output,
            solvers=_list(solvers),
            sparsities=_list(sparsity),
            effort=effort,
            calibration=calibration,
            samples=samples,
            length=length,
            texts=text or ["wikitext2"],
            text_samples=text_samples,
            device=device,
            dtype=dtype,
            memory=parse_size(memory) if memory is not None else None,
            keep=keep,
            budget=seconds,
            command=shlex.join(["niwaki", *sys.argv[1:]]),
            progress=display,
        )
        out.print(f"written to {output}", soft_wrap=True, markup=False)


@app.command()
def demo(
    samples: Annotated[int, typer.Option(help="Windows of 256 tokens to calibrate on.")] = 64,
    text_samples: Annotated[int, typer.Option(help="Windows of 256 tokens to measure on.")] = 64,
    record: RecordFile = None,
) -> None:
    """Prune the embedded model by the methods of the paper's table 1 and by the default."""
    _quiet_libraries()
    from niwaki.comparison import compare as run

    with TableDisplay(out) as display:
        found = run(
            "demo",
            calibration="demo",
            samples=samples,
            length=256,
            texts=["demo-held"],
            text_samples=text_samples,
            command=shlex.join(["niwaki", *sys.argv[1:]]),
            progress=display,
        )
    if record is not None:
        write_json(record, found.to_json())


def main() -> None:
    """The entry point: one line for what went wrong, 2 for usage and 1 for failure."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        app(prog_name="niwaki")
    except NiwakiError as error:
        several = os.environ.get("WORLD_SIZE", "1") != "1"
        what = f"error in process {os.environ.get('RANK', 0)}: " if several else "error: "
        Console(stderr=True).print(Text.assemble((what, "bold red"), str(error)), soft_wrap=True)
        sys.exit(error.exit_code)


def _settings(pairs: list[str]) -> dict[str, str]:
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--set takes NAME=VALUE; got {pair!r}")
        settings[name.strip()] = value.strip()
    return settings


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if match is None:
        raise UsageError(f"--blocks takes FROM:TO, such as 0:2 for the first two; got {text!r}")
    return int(match[1]), int(match[2])


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _seconds(text: str) -> float:
    """Of a time such as "2h", "90 min" or "1h30m"."""
    number = r"(\d+(?:\.\d+)?)"
    match = re.fullmatch(rf"(?:{number}h)?(?:{number}m(?:in)?)?(?:{number}s)?", text.lower().replace(" ", ""))
    parts = match.groups(default="0") if match else ()
    seconds = sum(float(part) * unit for part, unit in zip(parts, (3600, 60, 1), strict=False))
    if not seconds:
        raise UsageError(f"--budget takes a time such as 2h, 90m or 1h30m; got {text!r}")
    return seconds


def _stop(*_: object) -> None:
    """SIGTERM, from Slurm or ``timeout``, cleans up as Ctrl-C does."""
    raise KeyboardInterrupt


def _quiet_libraries() -> None:
    """What libraries print about themselves would tear the progress bar apart."""
    import logging

    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for name in ("huggingface_hub", "datasets"):  # each retry of a hub out of reach is a line
        logging.getLogger(name).setLevel(logging.ERROR)


if __name__ == "__main__":
    main()
