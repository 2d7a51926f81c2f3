"""``niwaki prune``."""

from dataclasses import dataclass
from typing import Annotated

from niwaki.cli.common import record_file
from niwaki.cli.options import Model, Output, RecordFile, options
from niwaki.cli.work import Work
from niwaki.errors import UsageError
from niwaki.files import is_model
from niwaki.quantities import HOW_SPARSE


@dataclass(frozen=True)
class Pruning:
    """How to prune, apart from the method: arguments of :func:`niwaki.prune`.

    Options:
        quantize: Also quantize the remaining weights, to a grid such as int4:128. int4:128 has 4 bits and a scale for
            each row and 128 inputs, int8 a scale for each row. To quantize without pruning, use 'niwaki quantize'.

    More options:
        mask_from: Take the mask from this solver or pruned model and only update the weights. With --pattern, zeros
            that a model's mask lacks are added, and swaps and dsnot refine it within the pattern.
        keep_format: Write the pruned matrices of an FP8 or MXFP4 model in that format again instead of bfloat16.
        revive: Allow weights that are 0 in MODEL to become nonzero; otherwise they stay 0.
        blocks: Prune only these decoder blocks, such as 0:2 for the first two.
    """

    mask_from: Annotated[str | None, "SOURCE"] = None
    quantize: Annotated[str | None, "GRID"] = None
    keep_format: bool = False
    revive: bool = False
    blocks: Annotated[str | None, "FROM:TO"] = None


@options()
def prune(
    model: Model,
    output: Output,
    sparsity: Annotated[str | None, "FRACTION"] = None,
    pattern: Annotated[str | None, "PATTERN"] = None,
    solver: Annotated[str | None, "NAME"] = None,
    effort: Annotated[str | None, "NAME"] = None,
    pruning: Pruning = Pruning(),
    work: Work = Work(),
    record: RecordFile = None,
) -> None:
    """Prune MODEL and write the result to OUT.

    If a run is interrupted, repeat the command to resume it.

    Example: niwaki prune MODEL OUT --sparsity 0.6 --calibration text.txt

    Options:
        sparsity: Fraction of the weights to set to zero, such as 0.6 or 60%.
        pattern: Pattern of zeros instead of --sparsity, such as 2:4. Available: {patterns}.
        solver: Pruning method, such as {solver} or wanda; 'niwaki solvers' lists them. Available: {solver} (the
            default), {solvers}; for masks {masks}; for weights {weights}; or several combined, as in wanda+swaps+exact.
            Parameters can be set, as in admm1:rho=0.5.
        effort: How much to do for the model as a whole, beyond pruning each matrix: {efforts}. Efforts distribute zeros
            over matrices, fit blocks and heal; heal is best with three times as much training. Parameters can be set,
            as in best:healing=0. [default: balanced; fast with --solver or --mask-from]
    """
    if sparsity is not None and pattern is not None:
        raise UsageError("give --sparsity or --pattern, not both")
    if sparsity is None and pattern is None and (pruning.mask_from is None or not is_model(pruning.mask_from)):
        raise UsageError(HOW_SPARSE)
    with work.begun(f"pruning {model}", output) as common:
        from niwaki.recipes import prune as run

        file = record_file(record, "matrices")
        zeros = sparsity if pattern is None else pattern
        result = run(model, output, zeros, solver=solver, effort=effort, **vars(pruning), **common)
        if file is not None:
            result.save(file)
