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
    """Quantize the weights of MODEL and write the result to OUT. Run 'niwaki pack' afterwards to reduce its size.

    Example: niwaki quantize MODEL OUT int8:64

    Options:
        grid: Bits and group size, such as int8 or int4:64. Each group of inputs shares a scale; int8 has a scale for
            each row.
        embeddings: Also quantize token embeddings and the head, to a grid such as int8:64. In small models they are a
            large part of the size, and when packed they are read for each token.
        effort: none, fast, balanced or best: how hard to compensate for rounding. none rounds to the nearest, in
            seconds and without text; the others use --calibration. [default: none for int8, where more gains next to
            nothing; balanced below]
    """
    with work.begun(f"quantizing {model}", output) as common:
        from niwaki.recipes import quantize as run

        file = record_file(record, "matrices")
        result = run(model, output, grid, embeddings=embeddings, effort=effort, **common)
        if file is not None:
            result.save(file)
