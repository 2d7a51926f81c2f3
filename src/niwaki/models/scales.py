"""The scales of weights on a grid: a file beside the checkpoint's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from niwaki.checkpoints.reading import Checkpoint
from niwaki.checkpoints.tensors import Entry, new_shard, read_beside
from niwaki.errors import CheckpointError, OutputError, UsageError
from niwaki.layer.block_types import BlockGrid, stored_type
from niwaki.layer.grid import AnyGrid, FloatGrid, Grid, parse_grid
from niwaki.models.layout import Matrix

#: In a folder of its own, because some programs load every safetensors file that lies beside config.json.
FOLDER = "quantization"
FILE = f"{FOLDER}/scales.safetensors"
#: Groups of what the packed format stores as whole numbers are a multiple of it.
_PACKED_GROUP = 64
#: Of token embeddings and the head, which are on a grid of their own.
EMBEDDINGS = f"{FOLDER}/embeddings.safetensors"


def grid_of(checkpoint: Checkpoint) -> AnyGrid | None:
    """The grid of a model's weights, as its configuration names it; CheckpointError where there is none such."""
    return _parsed(checkpoint, checkpoint.pruning.quantization)


def embedding_grid_of(checkpoint: Checkpoint) -> AnyGrid | None:
    """The grid of a model's token embeddings and head; CheckpointError where its configuration names no such grid."""
    return _parsed(checkpoint, checkpoint.pruning.embeddings)


def _parsed(checkpoint: Checkpoint, name: str | None) -> AnyGrid | None:
    try:
        return parse_grid(name) if name else None
    except UsageError as error:
        raise CheckpointError(f"{checkpoint.path / 'config.json'}, pruning_config: {error}") from error


def whole_numbers_of(checkpoint: Checkpoint) -> Grid | None:
    """The grid of a model's weights; UsageError where they are not whole numbers alone."""
    return _whole_numbers(checkpoint, grid_of(checkpoint))


def embedding_numbers_of(checkpoint: Checkpoint) -> Grid | None:
    """The same of token embeddings and head."""
    return _whole_numbers(checkpoint, embedding_grid_of(checkpoint))


def _whole_numbers(checkpoint: Checkpoint, grid: AnyGrid | None) -> Grid | None:
    if isinstance(grid, BlockGrid):
        raise UsageError(
            f"{checkpoint.path} has weights in {grid}, a type of llama.cpp's; 'niwaki export --format gguf' "
            "writes the file for it"
        )
    if isinstance(grid, FloatGrid):
        raise UsageError(
            f"{checkpoint.path} has weights in {grid}, which are for servers; 'niwaki export' writes the files for them"
        )
    return grid


def stored_as_usual(grid: AnyGrid, matrices: Iterable[Matrix]) -> str:
    """The note of ``prune`` on ``matrices``, which ``export`` has to take back."""
    ways = _small_forms(grid, [*matrices])
    packs = f", and {' and '.join(ways)} make{'' if len(ways) > 1 else 's'} them small" if ways else ""
    return (
        f"weights on the grid {grid} are stored as usual until they are packed, so that they load wherever the "
        f"dense model does; their scales are in {FILE}{packs}"
    )


def _small_forms(grid: AnyGrid, matrices: Sequence[Matrix]) -> list[str]:
    """The commands that make a small model of ``matrices`` on ``grid``."""
    if isinstance(grid, BlockGrid):
        return ["'niwaki export --format gguf'"]
    if any(matrix.blocks for matrix in matrices):
        return []
    ways = ["'niwaki pack'"] if grid.group is None or grid.group % _PACKED_GROUP == 0 else []
    return ways if any(map(why_no_layer, matrices)) else [*ways, "'niwaki export'"]


#: The linear layers that a matrix is the rows of where one tensor has those of all experts, by its name.
_OF_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def layers_of_expert(matrix: Matrix) -> list[str]:
    """The keys of the linear layers that ``matrix`` is the rows of, as servers read them one by one.

    Only where a tensor has the matrices of all experts; none where these are not what servers make of it: LLaMA 4 and
    gpt-oss have inputs before outputs, and the latter rows of both layers in turns.
    """
    path, _, name = matrix.key.rpartition(".")
    if matrix.index is None or matrix.transposed or not path.endswith(".experts"):
        return []
    return [f"{path}.{matrix.index}.{layer}.weight" for layer in _OF_EXPERTS.get(name, ())]


def why_no_layer(matrix: Matrix, one_by_one: bool = True) -> str:
    """Why files do not have ``matrix`` as the weight of a linear layer, or of an expert's; "" where they do.

    Experts that are one tensor can be written ``one_by_one`` for programs that read them so.
    """
    if matrix.index is not None:
        return "" if one_by_one and layers_of_expert(matrix) else "it is one tensor with the matrices of all experts"
    if matrix.is_stored_transposed:
        return "it is stored the other way around, as (inputs, outputs)"
    if matrix.blocks:
        return "several blocks share it"
    if not (matrix.is_module or matrix.expert is not None) or not matrix.key.endswith(".weight"):
        return "it is a part of a larger matrix of transformers' model"
    return ""


def scale_key(matrix: Matrix) -> str:
    """The key of its scales there."""
    return f"{matrix.key}_scale"


def places(checkpoint: Checkpoint, matrices: Sequence[Matrix], grid: AnyGrid) -> dict[str, Entry]:
    """Where the scales of ``matrices`` go: (out, groups), or (experts, out, groups) where a tensor has all experts."""
    tensors = {}
    for matrix in matrices:
        entry = checkpoint.entries[matrix.key]
        experts = () if matrix.index is None else entry.shape[:1]
        shape = (*experts, matrix.shape[0], grid.groups(matrix.shape[1]))
        tensors[scale_key(matrix)] = grid.scale_dtype(checkpoint.dtype(matrix.key)), shape
    return new_shard(FILE, tensors)


def read_scales(checkpoint: Checkpoint, matrix: Matrix, grid: AnyGrid) -> Tensor:
    """(out, groups), in their own dtype; CheckpointError where they are not there, or cannot be its scales."""
    where = places(checkpoint, [matrix], grid)
    return _read(checkpoint.path / FILE, where, matrix.key, f"the weights on {grid} have it", grid, matrix.index)


def bits_in(checkpoint: Checkpoint, matrix: Matrix, grid: AnyGrid) -> float:
    """How many bits ``matrix`` has on a ``grid``: of mixed ones, by its whole numbers or by its type."""
    if isinstance(grid, BlockGrid):
        return stored_type(read_scales(checkpoint, matrix, grid)).bits
    if not grid.is_mixed:
        return grid.bits
    return grid.fewest(grid.codes(matrix.read(checkpoint).float(), read_scales(checkpoint, matrix, grid).float()))


def embedding_places(checkpoint: Checkpoint, keys: Iterable[str], grid: AnyGrid) -> dict[str, Entry]:
    """Where the scales of token embeddings and a head go, the tensors ``keys``: (rows, groups)."""
    tensors = {}
    for key in keys:
        rows, columns = checkpoint.entries[key].shape
        tensors[f"{key}_scale"] = grid.scale_dtype(checkpoint.dtype(key)), (rows, grid.groups(columns))
    return new_shard(EMBEDDINGS, tensors)


def read_embedding_scales(checkpoint: Checkpoint, key: str, grid: AnyGrid) -> Tensor:
    """(rows, groups), in their own dtype; CheckpointError where they are not there, or cannot be its scales."""
    where = embedding_places(checkpoint, [key], grid)
    return _read(checkpoint.path / EMBEDDINGS, where, key, f"embeddings on {grid} have it", grid)


def _read(file: Path, where: dict[str, Entry], key: str, have: str, grid: AnyGrid, index: int | None = None) -> Tensor:
    """The scales of the tensor ``key``, checked; of one of several matrices those at ``index``."""
    (scales,) = read_beside(file, where, f"scales of {key!r}", f", as {have}")
    scales = scales if index is None else scales[index]
    check_scales(scales, file, f"{key}_scale", grid)
    return scales


def check_scales(scales: Tensor, file: Path, key: str, grid: AnyGrid) -> None:
    """CheckpointError unless the tensor ``key`` of ``file`` can be scales."""
    if not grid.are_scales(scales):
        raise CheckpointError(f"{file}: {key!r} has scales that are 0 or not finite; quantize the model again")


def verify_grid(directory: Path, matrices: Sequence[Matrix], grid: AnyGrid) -> None:
    """Raises OutputError unless all that was written is on the grid: a whole number times its scale, to the bit."""
    written = Checkpoint(directory)
    for matrix in matrices:
        if not written.pruning.includes(matrix.block):
            continue
        if not grid.has(matrix.read(written), read_scales(written, matrix, grid)):
            raise OutputError(f"{directory}: {matrix.key!r} has weights on disk that are not on its grid {grid}")
