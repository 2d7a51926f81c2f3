"""``niwaki shrink``."""

from dataclasses import dataclass
from typing import Annotated

from niwaki.cli.options import Model, Output, options
from niwaki.cli.work import Work
from niwaki.errors import UsageError
from niwaki.quantities import NOTHING_TO_REMOVE


@dataclass(frozen=True)
class Removal:
    """What is removed: arguments of :func:`niwaki.shrink`.

    Options:
        parameters: Parameters to keep, such as 0.75 or 110M. The blocks, heads and neurons that together cost least are
            removed. With --vocabulary, a fraction refers to what that leaves.
        vocabulary: Number of tokens to keep, such as 24576, or fraction to remove, such as 0.5. 'used' keeps the tokens
            that occur in the calibration text, and 'used:0.9995' the most common ones that make up this share of it.
            The whole text is counted. Any text can still be encoded.
        blocks: Number of decoder blocks to remove. Those that change the predictions least are chosen.
        neurons: Fraction of the MLP neurons of each block to remove. Rounded so that the number left is a multiple of
            32 if it was one before (of 64 from 2,048 neurons on): formats with groups of 32, such as Q8_0, need that.
        heads: Fraction of the attention heads of each block to remove.
        experts: Fraction of the experts of each block to remove.
        effort: How well to fit the remaining weights: fast, balanced, best or heal. fast fits the matrices that lose
            columns or precede a removed block; the others fit all of each block, also on text that the model writes;
            best then heals, and heal does so three times as long. Parameters can be set, as in best:healing=0.
            [default: balanced:synthetic=0.5; fast with --experts]
    """

    vocabulary: Annotated[str | None, "SIZE"] = None
    blocks: Annotated[int, "N"] = 0
    neurons: Annotated[str, "FRACTION"] = "0"
    heads: Annotated[str, "FRACTION"] = "0"
    experts: Annotated[str, "FRACTION"] = "0"
    parameters: Annotated[str | None, "SIZE"] = None
    effort: Annotated[str | None, "NAME"] = None


@options(without=("tf32", "max_memory"))
def shrink(model: Model, output: Output, removal: Removal = Removal(), work: Work = Work()) -> None:
    """Remove tokens, blocks, attention heads, neurons or experts from MODEL; write a smaller dense model to OUT.

    If a run is interrupted, repeat the command to resume it.

    Example: niwaki shrink MODEL OUT --parameters 0.75
    """
    if removal == Removal(effort=removal.effort):
        raise UsageError(NOTHING_TO_REMOVE)
    with work.begun(f"shrinking {model}", output) as common:
        from niwaki.recipes import shrink as run

        run(model, output, **vars(removal), **common)
