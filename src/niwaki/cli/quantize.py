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
    """Quantize the weights of MODEL and write the result to OUT.

    Files only become smaller when you then run 'niwaki pack' on OUT.

    Example: niwaki quantize MODEL OUT int8:64

    Options:
        grid: Bits and group size, such as int8 or int4:64. Each group of inputs shares a scale; int8 has one scale per
            row.
        embeddings: Also quantize token embeddings and the head, to a grid such as int8:64. In small models they are a
            large part of the size, and a packed model reads them for each token.
        effort: How hard to compensate for rounding: none, fast, balanced, best or heal. none rounds to the nearest, in
            seconds and without text; the others use --calibration, and heal is best with three times as much training.
            [default: none for 8 bits, where compensation gains almost nothing; balanced for fewer]
    """
    with work.begun(f"quantizing {model}", output) as common:
        from niwaki.recipes import quantize as run

        file = record_file(record, "matrices")
        result = run(model, output, grid, embeddings=embeddings, effort=effort, **common)
        if file is not None:
            result.save(file)
