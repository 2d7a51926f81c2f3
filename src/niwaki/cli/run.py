"""``niwaki run``."""

from typing import Annotated

from typer import Context

from niwaki.cli.options import Model, Output, chosen, options
from niwaki.cli.work import Work
from niwaki.errors import UsageError
from niwaki.records.recipe import Recipe


@options()
def run(
    context: Context,
    model: Model,
    output: Output,
    stages: Annotated[list[str] | None, "STAGE", "--stage", "-s"] = None,
    recipe: Annotated[str | None, "FILE"] = None,
    work: Work = Work(),
) -> None:
    """Run stages such as shrink, prune, quantize, heal and export on MODEL and write the result to OUT.

    Perplexity is measured after each stage. If a run is interrupted, repeat the command to resume it.

    Example: niwaki run MODEL OUT -s 'shrink neurons=0.25' -s 'prune 2:4' -s 'heal max_time=30m'

    Options:
        stages: A stage with its parameters, in quotes, such as 'prune 2:4'; may be repeated. Stages run in the order
            given. More examples: 'shrink neurons=0.25', 'quantize int4:128', 'heal max_time=30m', 'embeddings int8:64',
            'pack' and 'export gguf-q8_0'.
        recipe: TOML file with the stages instead, such as the recipe.toml of an earlier result. It has tables called
            [[stages]] and may set options; options on the command line override them.
    """
    if bool(stages) == (recipe is not None):
        raise UsageError("say what to do, by --stage or by --recipe FILE; such as --stage 'prune 0.5' --stage heal")
    read = None if recipe is None else Recipe.read(recipe)
    with work.begun(f"running {model}", output) as common:
        from niwaki.recipes import run as work_on

        if read is not None:
            given = chosen(work, context)
            # What was given goes into the recipe; but of several processes each has its own device.
            common |= {name: type(common[name])() for name in given if common[name] == getattr(work, name)}
            work_on(model, output, read.with_options(**given), **common)
        else:
            work_on(model, output, stages or [], **common)
