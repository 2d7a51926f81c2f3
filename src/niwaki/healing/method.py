"""What is trained of a pruned model: as much as there is memory for."""

import math

import torch

from niwaki.checkpoints.reading import Checkpoint
from niwaki.choices import HealingMethod
from niwaki.errors import UnsupportedModelError
from niwaki.healing.student import RANK
from niwaki.models.fit import COPIES
from niwaki.models.formats import format_of
from niwaki.models.generation import device_memory
from niwaki.models.layout import Matrix
from niwaki.models.streamed import StreamedModel
from niwaki.models.weight_format import WeightFormat
from niwaki.options import Compute
from niwaki.records.wording import size

#: Bytes of memory for each trained weight, in addition to it: its gradient, two moments, and the best so far.
_BYTES = 4 + 8 + 4
#: Bytes for each weight of a block whose changes are computed, and their gradients.
_BLOCK_BYTES = 24


def choose(
    checkpoint: Checkpoint, dense: StreamedModel, compute: Compute, asked: HealingMethod, is_whole: bool = False
) -> tuple[StreamedModel, HealingMethod, list[str]]:
    """The pruned model, the method by which it is healed towards ``dense``, and notes on that.

    ``auto`` is the first of full, lora (norms on a grid) and, unless the model ``is_whole`` in memory, blocks that
    memory is enough for. UnsupportedModelError where it is not enough, or the method does not suit the model.
    """
    weight_format, half = format_of(checkpoint), dense.dtype != torch.float32
    thin: HealingMethod = "norms" if weight_format.files else "lora"
    if asked == "lora" != thin:
        made = "products of two sparse factors" if weight_format.has_factors else "on a grid"
        raise UnsupportedModelError(
            f"the weights of {checkpoint.path} are {made}, which products of low rank would leave; try the method "
            "full or norms"
        )
    there = device_memory(dense.device) if compute.budget is None else compute.budget
    usual: tuple[HealingMethod, ...] = ("full", thin) if is_whole else ("full", thin, "blocks")
    methods: tuple[HealingMethod, ...] = usual if asked == "auto" else (asked,)
    too_large = list[str]()
    for method in methods:
        dtype = "bfloat16" if half and method != "full" else "float32"
        model = StreamedModel(checkpoint, compute.device, dtype)
        if method == "blocks":
            _check_blocks(model, dense, too_large, there)
        needed = _needed(method, model, dense, weight_format)
        if needed <= there:
            tried = " and ".join(too_large)
            notes = [f"healing takes {tried}, and there are {size(there)} of memory: {method} instead"]
            return model, method, notes if too_large else []
        too_large.append(f"{size(needed)} ({method})")
    raise UnsupportedModelError(
        f"healing {checkpoint.path} takes {', '.join(too_large)} of memory, and there are {size(there)}"
        + ("" if method == "blocks" else "; try the method blocks")
    )


def trains_factors(weight_format: WeightFormat, method: str) -> bool:
    """Whether ``method`` changes parts of matrices in this format: factors, but not scales."""
    return weight_format.has_factors and method != "norms"


def block_memory(model: StreamedModel, dense: StreamedModel, weight_format: WeightFormat) -> int:
    """Bytes that healing a block at a time takes, without hidden states."""
    blocks = [model.matrices(index) for index in range(len(model.blocks))]
    fits = (4 * COPIES * weights + extra for weights, extra in (_trained(block, weight_format) for block in blocks))
    return max(model.block_size + dense.block_size + max(fits), sum(_ends(each) for each in (model, dense)))


def _trained(matrices: list[Matrix], weight_format: WeightFormat) -> tuple[int, int]:
    """(How many weights are trained of these; bytes of what they are made in each step, and its gradient)."""
    size = sum(matrix.size for matrix in matrices)
    if weight_format.has_factors:
        shapes = (shape for matrix in matrices for shape, _ in weight_format.parts_like(matrix, torch.float32))
        return sum(map(math.prod, shapes)), 4 * 2 * size
    return size, 4 * size if weight_format.files else 0


def _needed(method: HealingMethod, model: StreamedModel, dense: StreamedModel, weight_format: WeightFormat) -> int:
    """Bytes of memory that a method takes."""
    if method == "blocks":
        return block_memory(model, dense, weight_format)
    if method == "full":
        weights, extra = _trained(model.matrices(), weight_format)
        half = dense.dtype != torch.float32
        return model.size + (_BYTES + 2 * half) * weights + extra
    factors = 0 if method == "norms" else RANK * sum(sum(matrix.shape) for matrix in model.matrices())
    return model.size + (4 + _BYTES) * factors + _BLOCK_BYTES * (model.block_size // model.dtype.itemsize)


def _ends(model: StreamedModel) -> int:
    """Bytes of all weights outside the blocks, which measuring takes."""
    return model.size - sum(value.nbytes for block in model.blocks for value in block.parameters())


def _check_blocks(model: StreamedModel, dense: StreamedModel, too_large: list[str], there: int) -> None:
    """UnsupportedModelError where blocks of the two models have no outputs to compare."""
    shapes = [(len(each.blocks), each.config.hidden_size) for each in (model, dense)]
    whole = f", which takes {', '.join(too_large)}, and there are {size(there)} of memory" if too_large else ""
    tokens = [each.config.vocab_size for each in (model, dense)]
    if tokens[0] != tokens[1]:
        raise UnsupportedModelError(
            f"{model.checkpoint.path} has {tokens[0]:,} tokens and {dense.checkpoint.path} {tokens[1]:,}, so that it "
            f"can only be healed as a whole (full, lora, norms){whole}"
        )
    if shapes[0] != shapes[1]:
        raise UnsupportedModelError(
            f"{model.checkpoint.path} has {shapes[0][0]} blocks of width {shapes[0][1]} and {dense.checkpoint.path} "
            f"{shapes[1][0]} of {shapes[1][1]}, so that it can only be healed as a whole{whole}"
        )
