"""``niwaki run``."""

import dataclasses
from typing import Annotated

from typer import Option

from niwaki.cli.common import in_session, written
from niwaki.cli.display import Display
from niwaki.cli.options import Model, Output, Restart, spread
from niwaki.errors import UsageError
from niwaki.options import Calibration, Compute, Measurement

STAGE = Option(
    "--stage",
    "-s",
    metavar="STAGE",
    help="What to do next, in quotes: its name and its parameters, such as 'shrink neurons=0.25', 'prune 2:4', "
    "'quantize int4:128', 'heal time=30m', 'pack' or 'export gguf-q8_0'. May be given several times: they are done in "
    "this order.",
)
RECIPE = Option(
    "--recipe", metavar="FILE", help="A TOML file that lists the stages instead, in tables called [[stages]]."
)


@spread()
def run(
    model: Model,
    output: Output,
    stages: Annotated[list[str] | None, STAGE] = None,
    recipe: Annotated[str | None, RECIPE] = None,
    calibration: Calibration = Calibration(),
    measurement: Measurement = Measurement(samples=16),
    compute: Compute = Compute(),
    restart: Restart = False,
) -> None:
    """Do several things to MODEL, one after the other: shrink, prune, quantize, heal, export. Write the result to OUT.

    Perplexity is measured after each stage. An interrupted run resumes in the stage that was at work.
    """
    if bool(stages) == (recipe is not None):
        raise UsageError("say what to do, by --stage or by --recipe FILE; such as --stage 'prune 0.5' --stage heal")
    with Display(f"running {model}") as display:
        from niwaki.models.processes import world
        from niwaki.recipes import run as work
        from niwaki.stages import read_recipe

        chosen = stages if recipe is None else read_recipe(recipe)
        with world(compute.device) as (team, device), in_session(team):
            work(
                model,
                output,
                list(chosen or []),
                calibration=calibration,
                measurement=measurement,
                compute=dataclasses.replace(compute, device=device),
                restart=restart,
                progress=display,
            )
    if team.first:
        written(output)
