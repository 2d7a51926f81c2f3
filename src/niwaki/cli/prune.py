"""``niwaki prune``."""

import dataclasses
from typing import Annotated

from typer import Option

from niwaki.cli.common import in_session, written
from niwaki.cli.display import Display
from niwaki.cli.options import Model, Output, RecordFile, Restart, spread
from niwaki.effort import usual_effort
from niwaki.errors import UsageError
from niwaki.options import DEFAULT_SOLVER, Calibration, Compute, Measurement

SOLVER = Option(
    metavar="NAME",
    help="continuation (the default), admm-grad, alps, sparsegpt or obc; for masks magnitude, wanda, ria, obs, dsnot, "
    "swaps; for weights admm1, adam, sgd, cg, exact; or several, as in wanda+swaps+exact.",
)
SETTINGS = Option("--set", metavar="NAME=VALUE", help="A parameter of the solver.")
EFFORT = Option(
    metavar="NAME",
    help="fast, balanced or best: what is done for the model as a whole and for its parts to fit together; heal is "
    r"best with three times the training; with parameters as in best:healing=0. \[default: balanced; with --solver or "
    "--mask-from fast, methods as they were published]",
)
ALLOCATION = Option(
    metavar="NAME",
    help=r"How zeros are shared out among matrices: uniform, or by loss, error or owl. \[default: the effort's]",
)
MASK_FROM = Option(
    metavar="SOURCE",
    help="Take the mask of this solver or pruned model, update the weights for it. With --pattern the mask of a model "
    "gets the zeros that it lacks, and swaps and dsnot refine it within that.",
)
QUANTIZE = Option(
    metavar="GRID",
    help="Put the remaining weights on a grid: int4:128 has 4 bits and a scale for each row and 128 inputs, int8 a "
    "scale for each row. With --sparsity 0 that alone.",
)
KEEP_FORMAT = Option(
    "--keep-format",
    metavar="",
    help="Write the pruned matrices of a model in FP8 or MXFP4 in that format again, instead of bfloat16.",
)
REVIVE = Option(
    "--revive-zeros",
    metavar="",
    help="Let weights that are 0 in MODEL become others again: prune as if they were not 0. Without it they stay 0.",
)
SPARSITY = Option(metavar="FRACTION", help="Fraction of zeros in the matrices, such as 0.6 or 60%.")
PATTERN = Option(metavar="PATTERN", help="A pattern instead: 2:4, 4:8, per-row:0.6, 2:4+per-row:0.6 ...")
BLOCKS = Option(metavar="FROM:TO", help="Prune only these blocks, such as 0:2 for the first two.")


@spread()
def prune(
    model: Model,
    output: Output,
    solver: Annotated[str | None, SOLVER] = None,
    settings: Annotated[list[str] | None, SETTINGS] = None,
    effort: Annotated[str | None, EFFORT] = None,
    allocation: Annotated[str | None, ALLOCATION] = None,
    sparsity: Annotated[str | None, SPARSITY] = None,
    pattern: Annotated[str | None, PATTERN] = None,
    mask_from: Annotated[str | None, MASK_FROM] = None,
    quantize: Annotated[str | None, QUANTIZE] = None,
    keep_format: Annotated[bool, KEEP_FORMAT] = False,
    revive_zeros: Annotated[bool, REVIVE] = False,
    calibration: Calibration = Calibration(),
    measurement: Measurement = Measurement(samples=16),
    compute: Compute = Compute(),
    blocks: Annotated[str | None, BLOCKS] = None,
    record: RecordFile = None,
    restart: Restart = False,
) -> None:
    """Prune MODEL and write the result to OUT. An interrupted run resumes when the command is repeated."""
    if sparsity is not None and pattern is not None:
        raise UsageError("give --sparsity or --pattern, not both")
    parameters = dict(map(_setting, settings or []))
    effort = usual_effort(solver, mask_from) if effort is None else effort
    if allocation is not None:
        effort += f":allocation={allocation}"
    with Display(f"pruning {model}") as display:
        from niwaki.layer.solvers import make_solver
        from niwaki.models.processes import world
        from niwaki.recipes import prune as run
        from niwaki.runs.workplace import check_record

        with world(compute.device) as (team, device), in_session(team):
            file = check_record(record, "matrices") if record is not None and team.first else None
            result = run(
                model,
                output,
                sparsity if pattern is None else pattern,
                solver=make_solver(DEFAULT_SOLVER if solver is None else solver, parameters) if parameters else solver,
                effort=effort,
                mask_from=mask_from,
                quantize=quantize,
                keep_format=keep_format,
                revive=revive_zeros,
                blocks=blocks,
                calibration=calibration,
                measurement=measurement,
                compute=dataclasses.replace(compute, device=device),
                restart=restart,
                progress=display,
            )
            if file is not None:
                result.save(file)
    if team.first:
        written(output)


def _setting(pair: str) -> tuple[str, str]:
    name, equals, value = pair.partition("=")
    if not equals:
        raise UsageError(f"--set takes NAME=VALUE; got {pair!r}")
    return name.strip(), value.strip()
