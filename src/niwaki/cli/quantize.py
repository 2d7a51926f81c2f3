"""``niwaki quantize``."""

from typing import Annotated

from niwaki.cli.common import record_file
from niwaki.cli.options import Model, Output, RecordFile, options
from niwaki.cli.work import Work


@options()
def quantize(
    model: Model,
    output: Output,
    grid: Annotated[str, "GRID"],
    embeddings: Annotated[str | None, "GRID"] = None,
    effort: Annotated[str | None, "NAME"] = None,
    work: Work = Work(),
    record: RecordFile = None,
) -> None:
    """Put the weights of MODEL on a grid of few bits and write the result to OUT; 'niwaki pack' then makes it small.

    Options:
        grid: int8, int4:64 and the like: bits, and how many inputs share a scale; int8 has a scale for each row.
        embeddings: A grid for the token embeddings and the head as well, such as int8:64. In small models they are much
            of the size, and packed they are read for each token.
        effort: none rounds to the nearest, in seconds, without a text; fast, balanced and best make up for what
            rounding changes, on --calibration. [default: none for int8, where more gains next to nothing; balanced
            below]
    """
    with work.begun(f"quantizing {model}", output) as common:
        from niwaki.recipes import quantize as run

        file = record_file(record, "matrices")
        result = run(model, output, grid, embeddings=embeddings, effort=effort, **common)
        if file is not None:
            result.save(file)
