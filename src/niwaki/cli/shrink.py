"""``niwaki shrink``."""

from dataclasses import dataclass
from typing import Annotated

from niwaki.cli.options import Model, Output, options
from niwaki.cli.work import Work


@dataclass(frozen=True)
class Removal:
    """What is removed: arguments of :func:`niwaki.shrink`.

    Options:
        vocabulary: Tokens that stay, such as 24576; or a fraction of them to remove, such as 0.5 or 50%; or those that
            the calibration text uses: used, or used:0.9995 for the most common ones that make up so much of it. All of
            the text is counted. Any text can still be encoded.
        blocks: Decoder blocks to remove: those without which the predictions change least.
        neurons: Fraction of the MLP neurons of each block to remove, such as 0.25 or 25%. Rounded so that a multiple of
            32 stays, if there was one before: block formats such as Q8_0 need it.
        heads: Fraction of the attention heads of each block to remove.
        experts: Fraction of the experts of each block to remove, of a mixture of experts.
        expert_neurons: Fraction of the neurons of each expert to remove, rounded as for --neurons.
        parameters: Size of the result, such as 0.75 of the parameters or 110M of them: the blocks, heads and neurons go
            that together cost least. With --vocabulary 0.75 is of what that leaves.
        effort: fast fits the matrices that lose columns or stand before a gap, balanced and best also all that is left
            of each block, to text that the model writes too; best then heals. With parameters as in best:healing=0. By
            default balanced:synthetic=0.5, and fast where experts go.
    """

    vocabulary: Annotated[str | None, "SIZE"] = None
    blocks: Annotated[int, "N"] = 0
    neurons: Annotated[str, "FRACTION"] = "0"
    heads: Annotated[str, "FRACTION"] = "0"
    experts: Annotated[str, "FRACTION"] = "0"
    expert_neurons: Annotated[str, "FRACTION"] = "0"
    parameters: Annotated[str | None, "SIZE"] = None
    effort: Annotated[str | None, "NAME"] = None


@options(without=("tf32", "max_memory"))
def shrink(model: Model, output: Output, removal: Removal = Removal(), work: Work = Work()) -> None:
    """Remove tokens, blocks, attention heads, neurons or experts of MODEL; write a smaller dense model to OUT.

    An interrupted run resumes when the command is repeated.
    """
    with work.begun(f"shrinking {model}", output) as common:
        from niwaki.recipes import shrink as run

        run(model, output, **vars(removal), **common)
