"""Models whose 2:4 weights are torch's semi-structured tensors, for the sparse tensor cores of a GPU."""

import torch
from torch import Tensor, nn
from torch.sparse import to_sparse_semi_structured

from niwaki.errors import UnsupportedModelError, UsageError, first_line
from niwaki.models.streamed import StreamedModel


def check(device: torch.device, dtype: torch.dtype) -> None:
    """Raises UsageError where torch has no such tensors."""
    if device.type != "cuda":
        raise UsageError(f"2:4 products need a GPU with CUDA, and the model is on {device}; leave two_four out")
    if dtype not in (torch.float16, torch.bfloat16):
        shown = str(dtype).removeprefix("torch.")
        raise UsageError(f"2:4 products are in half precision, and this would be {shown}; give dtype='float16'")


def is_two_four(weight: Tensor) -> bool:
    """Whether of every four consecutive weights of a row (out, in) at least two are 0."""
    return weight.shape[1] % 4 == 0 and bool(((weight != 0).unflatten(1, (-1, 4)).sum(2) <= 2).all())


def convert(streamed: StreamedModel) -> None:
    """Converts the linear layers of a loaded model that have the pattern (UsageError if none has it).

    UnsupportedModelError where torch refuses one, for its size or on this GPU.
    """
    converted = False
    for matrix in streamed.matrices():
        layer = streamed.blocks[matrix.block].get_submodule(matrix.name) if matrix.is_module else None
        if not isinstance(layer, nn.Linear) or not is_two_four(layer.weight):
            continue
        try:
            weight = to_sparse_semi_structured(layer.weight.detach())
        except (RuntimeError, NotImplementedError) as error:
            raise UnsupportedModelError(
                f"torch cannot make a 2:4 tensor of {matrix.name} of block {matrix.block}, "
                f"{' x '.join(map(str, matrix.shape))} ({first_line(error)}); leave two_four out"
            ) from error
        layer.weight = nn.Parameter(weight, requires_grad=False)
        for use in streamed.uses(matrix):
            streamed.blocks[use.block].get_submodule(use.name).weight = layer.weight
        converted = True
    if not converted:
        raise UsageError(
            f"no linear layer of {streamed.checkpoint.path} has two zeros in every four weights; "
            "prune to the pattern 2:4, or leave two_four out"
        )
