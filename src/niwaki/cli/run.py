"""``niwaki run``."""

from typing import Annotated

from typer import Context

from niwaki.cli.options import Model, Output, chosen, options
from niwaki.cli.work import Work
from niwaki.errors import UsageError


@options()
def run(
    context: Context,
    model: Model,
    output: Output,
    stages: Annotated[list[str] | None, "STAGE", "--stage", "-s"] = None,
    recipe: Annotated[str | None, "FILE"] = None,
    work: Work = Work(),
) -> None:
    """Do several things to MODEL, one after the other: shrink, prune, quantize, heal, export. Write the result to OUT.

    Perplexity is measured after each stage. An interrupted run resumes in the stage that was at work.

    Options:
        stages: What to do next, in quotes: its name and its parameters, such as 'shrink neurons=0.25', 'prune 2:4',
            'quantize int4:128', 'heal max_time=30m', 'embeddings int8:64', 'pack' or 'export gguf-q8_0'. May be given
            several times: they are done in this order.
        recipe: A TOML file that lists the stages instead, in tables called [[stages]], and may have options of a run:
            the recipe.toml of another result makes that again. Options on the command line come before its own.
    """
    if bool(stages) == (recipe is not None):
        raise UsageError("say what to do, by --stage or by --recipe FILE; such as --stage 'prune 0.5' --stage heal")
    with work.begun(f"running {model}", output) as common:
        from niwaki.recipes import run as work_on
        from niwaki.records.recipe import Recipe

        if recipe is not None:
            given = chosen(work, context)
            # What was given goes into the recipe; but of several processes each has its own device.
            common |= {name: type(common[name])() for name in given if common[name] == getattr(work, name)}
            work_on(model, output, Recipe.read(recipe).with_options(**given), **common)
        else:
            work_on(model, output, stages or [], **common)
