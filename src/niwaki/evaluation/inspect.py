"""What a model directory holds that can be pruned, and how sparse it is already."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from niwaki.arguments import checked
from niwaki.layer.grid import ROWS_TO_SEE, scales_of_q4_0
from niwaki.models.layout import Matrix
from niwaki.models.locate import locate_model
from niwaki.models.streamed import StreamedModel
from niwaki.packed.format import open_checkpoint

#: The n:m patterns that hardware knows.
KNOWN_PATTERNS = ((1, 4), (2, 4), (4, 8))
_WIDEST = 8  # of their m, powers of two


@dataclass(frozen=True)
class MatrixSummary:
    """How sparse a matrix is, and which n:m patterns it has.

    Attributes:
        dtype: The dtype that ``matrix`` is stored in.
        row_zeros: The least and the greatest number of zeros in a row.
        fitting: For each n:m in ``KNOWN_PATTERNS``, the fraction of groups of m that have at most n nonzero weights: 1
            if the matrix has the pattern, NaN if m does not divide the number of its columns.
        is_q4_0: Whether its first rows are numbers of llama.cpp's Q4_0, as after training with these, but for the
            rounding to ``dtype``: 'niwaki export --format gguf-q4_0' keeps them.
    """

    matrix: Matrix
    dtype: str
    zeros: int
    row_zeros: tuple[int, int]
    fitting: dict[str, float]
    is_q4_0: bool = False

    @property
    def sparsity(self) -> float:
        """Fraction of zeros."""
        return self.zeros / self.matrix.size


@checked
def inspect(model: str | Path) -> Iterator[MatrixSummary]:
    """Yields a summary of each matrix of a model that would be pruned; one matrix is in memory at a time.

    Args:
        model: A directory or hub id.

    Raises:
        NiwakiError: see :mod:`niwaki.errors`.
    """
    yield from summaries(opened(model))


def opened(model: str | Path) -> StreamedModel:
    """A model in a directory (or hub id), dense or packed, to look at."""
    return StreamedModel(open_checkpoint(locate_model(str(model), tokenizer=False)), "cpu", "float32")


def summaries(model: StreamedModel) -> Iterator[MatrixSummary]:
    """Each matrix that would be pruned, one in memory at a time."""
    checkpoint = model.checkpoint
    for matrix in model.matrices():
        W, dtype = matrix.read(checkpoint), checkpoint.dtype(matrix.key)
        kept = (W != 0).view(torch.uint8)
        in_groups, width = {1: kept}, 1  # added in pairs: sums of rows of so few numbers take ten times as long
        while width < _WIDEST and matrix.shape[1] % (2 * width) == 0:
            pairs, width = in_groups[width], 2 * width
            in_groups[width] = pairs[:, ::2] + pairs[:, 1::2]
        per_row = matrix.shape[1] - in_groups[width].sum(dim=1)
        fitting = {}
        for n, m in KNOWN_PATTERNS:
            groups = in_groups[m] <= n if m in in_groups else torch.empty(0)
            fitting[f"{n}:{m}"] = groups.float().mean().item()
        rows = int(per_row.min()), int(per_row.max())
        of_it = checkpoint.entries[matrix.key].dtype, int(per_row.sum()), rows, fitting
        yield MatrixSummary(matrix, *of_it, scales_of_q4_0(W[:ROWS_TO_SEE].float(), dtype) is not None)
