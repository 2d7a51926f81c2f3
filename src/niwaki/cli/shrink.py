"""``niwaki shrink``."""

from typing import Annotated

from typer import Option

from niwaki.cli.common import in_session, written
from niwaki.cli.display import Display
from niwaki.cli.options import Model, Output, spread
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
RESTART = Option("--restart", metavar="", help="Discard what an interrupted run of another command left for OUT.")


@spread(without=("tf32", "memory"))
def shrink(
    model: Model,
    output: Output,
    blocks: Annotated[int, BLOCKS] = 0,
    neurons: Annotated[str, NEURONS] = "0",
    heads: Annotated[str, HEADS] = "0",
    experts: Annotated[str, EXPERTS] = "0",
    expert_neurons: Annotated[str, EXPERT_NEURONS] = "0",
    calibration: Calibration = Calibration(),
    measurement: Measurement = Measurement(samples=16),
    compute: Compute = Compute(),
    restart: Annotated[bool, RESTART] = False,
) -> None:
    """Remove blocks, attention heads, neurons or experts of MODEL; write a smaller dense model to OUT.

    An interrupted run keeps nothing: the same command starts over.
    """
    with Display(f"shrinking {model}") as display, in_session():
        from niwaki.recipes import shrink as run

        run(
            model,
            output,
            blocks=blocks,
            neurons=neurons,
            heads=heads,
            experts=experts,
            expert_neurons=expert_neurons,
            calibration=calibration,
            measurement=measurement,
            compute=compute,
            restart=restart,
            progress=display,
        )
    written(output)
