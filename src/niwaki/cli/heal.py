"""``niwaki heal``."""

import dataclasses
from typing import Annotated

from typer import Argument, Option

from niwaki.choices import HealingMethod, Order
from niwaki.cli.common import in_session, written
from niwaki.cli.display import Display
from niwaki.cli.options import TEXT, Output, Restart, spread
from niwaki.options import (
    BLOCKS_RATE,
    HEALING_BATCH,
    HEALING_LENGTH,
    HEALING_RATE,
    HEALING_TOKENS,
    OWN_TEXT,
    Calibration,
    Compute,
    Measurement,
)

PRUNED = Argument(metavar="PRUNED", help="The pruned model: a directory or a hub id.")
TEACHER = Option(metavar="DENSE", help="The dense model that it was pruned from.")
METHOD = Option(
    help="What is trained: all weights (full), products of low rank (lora), norms and biases (norms), or one block "
    "after the other, in the memory of one (blocks). auto is the first of full, lora and blocks that fits in memory."
)
TOKENS = Option(metavar="N", help="How many tokens to train on, such as 500k or 2M.")
TIME = Option(metavar="TIME", help="A limit for all of it, such as 90m or 2h.")
RATE = Option(
    metavar="RATE",
    help="The learning rate, relative to the size of the weights. "
    rf"\[default: {HEALING_RATE}, or {BLOCKS_RATE} for blocks]",
)
BATCH = Option(metavar="TOKENS", help="Tokens in a step, such as 512 or 1k.")
OWN = Option(metavar="SHARE", help="The share of what is trained on that the dense model writes itself; 0 for none.")
TRAINED = Option(metavar="TEXT", help=f"What to train on. {TEXT} May be given several times, for equal shares.")
LENGTH = Option(
    "--seqlen",
    metavar="N",
    help=rf"Tokens in a window. \[default: {HEALING_LENGTH}, or the model's positions if fewer]",
)
WINDOWS = Option(
    help="Which windows to train on: random ones from all of the text, or its first ones. "
    r"\[default: random, of data sets first]"
)


@spread(
    without=("samples", "tf32"),
    calibration=Annotated[list[str], TRAINED],
    length=Annotated[int | None, LENGTH],
    windows=Annotated[Order | None, WINDOWS],
)
def heal(
    pruned: Annotated[str, PRUNED],
    output: Output,
    teacher: Annotated[str, TEACHER],
    method: Annotated[HealingMethod, METHOD] = "auto",
    tokens: Annotated[str, TOKENS] = HEALING_TOKENS,
    time: Annotated[str | None, TIME] = None,
    rate: Annotated[float | None, RATE] = None,
    batch: Annotated[str, BATCH] = str(HEALING_BATCH),
    own_text: Annotated[str, OWN] = str(OWN_TEXT),
    calibration: Calibration = Calibration(),
    measurement: Measurement = Measurement(samples=16),
    compute: Compute = Compute(),
    restart: Restart = False,
) -> None:
    """Train what is left of PRUNED towards the dense model; all zeros stay. Write the result to OUT."""
    with Display(f"healing {pruned}") as display:
        from niwaki.models.processes import world
        from niwaki.recipes import heal as run

        with world(compute.device) as (team, device), in_session(team):
            run(
                pruned,
                output,
                teacher,
                method=method,
                tokens=tokens,
                time=time,
                rate=rate,
                batch=batch,
                own_text=own_text,
                calibration=calibration,
                measurement=measurement,
                compute=dataclasses.replace(compute, device=device),
                restart=restart,
                progress=display,
            )
    if team.first:
        written(output)
