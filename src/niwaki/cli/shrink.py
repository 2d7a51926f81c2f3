"""``niwaki shrink``."""

import dataclasses
from typing import Annotated

from typer import Option

from niwaki.cli.common import in_session, written
from niwaki.cli.display import Display
from niwaki.cli.options import Model, Output, Restart, spread
from niwaki.options import Calibration, Compute, Measurement

BLOCKS = Option(metavar="N", help="Decoder blocks to remove: those that change their inputs least.")
NEURONS = Option(
    metavar="FRACTION",
    help="Fraction of the MLP neurons of each block to remove, such as 0.25 or 25%. Rounded so that a multiple of 32 "
    "stays, if there was one before: block formats such as Q8_0 need it.",
)
HEADS = Option(metavar="FRACTION", help="Fraction of the attention heads of each block to remove.")
EXPERTS = Option(metavar="FRACTION", help="Fraction of the experts of each block to remove, of a mixture of experts.")
EXPERT_NEURONS = Option(
    metavar="FRACTION", help="Fraction of the neurons of each expert to remove, rounded as for --neurons."
)
EFFORT = Option(
    metavar="NAME",
    help="fast fits the matrices that lose columns, balanced and best also all that is left of each block; best then "
    "heals. With parameters as in best:healing=0.",
)


@spread(without=("tf32", "memory"))
def shrink(
    model: Model,
    output: Output,
    blocks: Annotated[int, BLOCKS] = 0,
    neurons: Annotated[str, NEURONS] = "0",
    heads: Annotated[str, HEADS] = "0",
    experts: Annotated[str, EXPERTS] = "0",
    expert_neurons: Annotated[str, EXPERT_NEURONS] = "0",
    effort: Annotated[str, EFFORT] = "fast",
    calibration: Calibration = Calibration(),
    measurement: Measurement = Measurement(samples=16),
    compute: Compute = Compute(),
    restart: Restart = False,
) -> None:
    """Remove blocks, attention heads, neurons or experts of MODEL; write a smaller dense model to OUT.

    An interrupted run resumes when the command is repeated.
    """
    with Display(f"shrinking {model}") as display:
        from niwaki.models.processes import world
        from niwaki.recipes import shrink as run

        with world(compute.device) as (team, device), in_session(team):
            run(
                model,
                output,
                blocks=blocks,
                neurons=neurons,
                heads=heads,
                experts=experts,
                expert_neurons=expert_neurons,
                effort=effort,
                calibration=calibration,
                measurement=measurement,
                compute=dataclasses.replace(compute, device=device),
                restart=restart,
                progress=display,
            )
    if team.first:
        written(output)
