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
    """Apply several stages to MODEL: shrink, prune, quantize, heal, export. Write the result to OUT.

    Perplexity is measured after each stage. Interrupted runs resume when the command is repeated.

    Example: niwaki run MODEL OUT -s 'shrink neurons=0.25' -s 'prune 2:4' -s 'heal max_time=30m'

    Options:
        stages: Stage with its parameters, in quotes. Examples: 'shrink neurons=0.25', 'prune 2:4', 'quantize int4:128',
            'heal max_time=30m', 'embeddings int8:64', 'pack' or 'export gguf-q8_0'. May be repeated; stages run in the
            order given.
        recipe: TOML file with the stages instead, such as the recipe.toml of another result. It has tables called
            [[stages]] and may have options; those on the command line override them.
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
