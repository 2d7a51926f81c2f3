"""The scales of weights on a grid: a file beside the checkpoint's own."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from niwaki.errors import CheckpointError, OutputError
from niwaki.layer.grid import Grid, scale_dtype
from niwaki.models.checkpoint.reading import Checkpoint
from niwaki.models.checkpoint.tensors import Entry, new_shard
from niwaki.models.layout import Matrix

#: In a folder of its own, because some programs load every safetensors file that lies beside config.json.
FOLDER = "quantization"
FILE = f"{FOLDER}/scales.safetensors"


def stored_as_usual(grid: Grid) -> str:
    """The note of ``prune``, which ``export`` has to take back."""
    return (
        f"weights on the grid {grid} are stored as usual, not packed, so that they load wherever the dense model "
        f"does; their scales are in {FILE}, and 'niwaki export' packs 4 and 8 bits"
    )


def scale_key(matrix: Matrix) -> str:
    """The key of its scales there."""
    return f"{matrix.key}_scale"


def places(checkpoint: Checkpoint, matrices: Sequence[Matrix], grid: Grid) -> dict[str, Entry]:
    """Where the scales of ``matrices`` go: (out, groups), or (experts, out, groups) where a tensor has all experts."""
    tensors = {}
    for matrix in matrices:
        entry = checkpoint.entries[matrix.key]
        experts = () if matrix.index is None else entry.shape[:1]
        shape = (*experts, matrix.shape[0], grid.groups(matrix.shape[1]))
        tensors[scale_key(matrix)] = scale_dtype(checkpoint.dtype(matrix.key)), shape
    return new_shard(FILE, tensors)


def read_scales(directory: Path, matrix: Matrix) -> Tensor:
    """(out, groups), in their own dtype; CheckpointError where they are not there."""
    try:
        with safe_open(directory / FILE, framework="pt") as file:
            scales: Tensor = file.get_tensor(scale_key(matrix))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory / FILE} has no scales of {matrix.key!r}: {error}") from error
    return scales if matrix.index is None else scales[matrix.index]


def verify_grid(directory: Path, matrices: Sequence[Matrix], grid: Grid) -> None:
    """Raises OutputError unless all that was written is on the grid: a whole number times its scale, to the bit."""
    written = Checkpoint(directory)
    for matrix in matrices:
        W, scales = matrix.read(written).float(), read_scales(directory, matrix)
        nearest = grid.project(W, scales.float(), scales.dtype)
        if not torch.equal(nearest, W) or not bool((scales > 0).all()):
            raise OutputError(f"{directory}: {matrix.key!r} has weights on disk that are not on its grid {grid}")
