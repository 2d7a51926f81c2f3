"""The format that a pruned checkpoint's matrices are in."""

from niwaki.checkpoints.reading import Checkpoint
from niwaki.models.factors import Factored
from niwaki.models.scales import grid_of
from niwaki.models.weight_format import OnGrid, WeightFormat


def format_of(checkpoint: Checkpoint) -> WeightFormat:
    """What the matrices of ``checkpoint`` were made: two factors, numbers of a grid, or weights as of any model.

    CheckpointError where its configuration names a grid that there is not.
    """
    grid = grid_of(checkpoint)
    if checkpoint.pruning.has_factors:
        return Factored(grid, checkpoint.pruning.blocks)
    return OnGrid(grid) if grid else WeightFormat()
