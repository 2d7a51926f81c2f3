"""Token sequences on their way through a model."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from niwaki.models.block_arguments import BlockArguments
from niwaki.models.spill import MemoryBudget, SpillList


@dataclass
class HiddenStates:
    """Token sequences between two blocks."""

    tokens: list[Tensor]  # batches of (samples, length) int64
    hidden: SpillList  # for each batch (samples, length, [streams,] width), the inputs of the next block
    #: What blocks receive besides these.
    arguments: BlockArguments = field(default_factory=lambda: BlockArguments(MemoryBudget()))
    leading: int = 0  # dimensions that blocks have before the samples, for streams

    def minibatches(self, tokens: int) -> list[tuple[int, slice]]:
        """Pieces of batches with ``tokens`` tokens, at least one sample: the index of the batch, and which samples."""
        pieces = []
        for i, batch in enumerate(self.tokens):
            size = max(1, tokens // batch.shape[1])
            pieces += [(i, slice(start, min(start + size, len(batch)))) for start in range(0, len(batch), size)]
        return pieces


def samples_first(hidden: Tensor, leading: int) -> Tensor:
    """(samples, length, [streams,] width): what a block has with so many dimensions before the samples."""
    return hidden.movedim([*range(leading)], [*range(2, 2 + leading)]).contiguous() if leading else hidden


def streams_first(hidden: Tensor, leading: int) -> Tensor:
    """([streams,] samples, length, width): the inverse of :func:`samples_first`."""
    return hidden.movedim([*range(2, 2 + leading)], [*range(leading)]) if leading else hidden


def pieces(rows: int, *values: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Corresponding views of ``values`` (samples, length, ..), each of so many tokens: whole samples if possible."""
    samples = max(1, rows // values[0].shape[1])
    for some in zip(*(value.split(samples) for value in values), strict=True):
        yield from zip(*(value.split(rows, dim=1) for value in some), strict=True)
