"""``niwaki prune`` and ``niwaki shrink``."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from niwaki.cli.common import command_line, out, quiet_libraries
from niwaki.cli.display import Display
from niwaki.cli.options import (
    TEXT,
    TF32,
    Device,
    Dtype,
    HeldText,
    Length,
    Model,
    Order,
    Output,
    RecordFile,
    Samples,
    TextSamples,
)
from niwaki.errors import UsageError
from niwaki.pruning.effort import usual_effort


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
    sparsity: Annotated[float | None, typer.Option(help="Fraction of zeros in the matrices, such as 0.6.")] = None,
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
    windows: Annotated[Order, typer.Option(help="The first windows of the text, or random ones.")] = Order.first,
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
        typer.Option(metavar="SIZE", help="Such as 8GiB: hidden states that do not fit are kept in a temporary file."),
    ] = None,
    record: RecordFile = None,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Discard what a stopped run has left for OUT instead of going on."),
    ] = False,
) -> None:
    """Prune MODEL and write the result to OUT. A run that was stopped goes on when asked for again."""
    quiet_libraries()
    from niwaki.layer.solvers import DEFAULT_SOLVER, make_solver
    from niwaki.models.processes import world
    from niwaki.options import parse_size
    from niwaki.pruning.prune import prune as run

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
            command=command_line(),
            progress=display,
            world=team,
        )
        if team.first:
            out.print(f"written to {output}", soft_wrap=True, markup=False)


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
    quiet_libraries()
    from niwaki.pruning.structured.shrink import shrink as run

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
            command=command_line(),
            progress=display,
        )
    out.print(f"written to {output}", soft_wrap=True, markup=False)


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
