"""The format that a pruned checkpoint's matrices are in."""

from functools import cache, partial

from niwaki.checkpoints.reading import Checkpoint
from niwaki.models.factors import Factored
from niwaki.models.layout import Matrix
from niwaki.models.scales import bits_in, grid_of
from niwaki.models.streamed import StreamedModel
from niwaki.models.weight_format import OnGrid, WeightFormat


def zeros_of(matrix: Matrix, checkpoint: Checkpoint) -> int:
    """How many weights of a matrix are zero, or fewer in its two factors."""
    weight_format = format_of(checkpoint)
    return weight_format.zeros(matrix.read(checkpoint), weight_format.read_parts(checkpoint, matrix))


def sparsity(model: StreamedModel) -> float:
    """The fraction of zeros in all matrices of the blocks of ``model``, as its files have them."""
    zeros = sum(zeros_of(matrix, model.checkpoint) for matrix in model.matrices())
    return zeros / sum(matrix.size for matrix in model.matrices())


def format_of(checkpoint: Checkpoint) -> WeightFormat:
    """What the matrices of ``checkpoint`` were made: two factors, numbers of a grid, or weights as of any model.

    CheckpointError where its configuration names a grid that there is not.
    """
    grid = grid_of(checkpoint)
    if checkpoint.pruning.has_factors:
        return Factored(grid, checkpoint.pruning.blocks)
    if grid is None:
        return WeightFormat()
    return OnGrid(grid, cache(partial(bits_in, checkpoint, grid=grid))) if grid.is_mixed else OnGrid(grid)
