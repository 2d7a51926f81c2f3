"""Models of transformers with packed weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from niwaki.models.checkpoint import locate_model
from niwaki.models.device import stored_dtype
from niwaki.models.streamed import StreamedModel
from niwaki.packed import kernels
from niwaki.packed import two_four as semi_structured
from niwaki.packed.format import PackedCheckpoint, open_checkpoint
from niwaki.packed.linear import SparseLinear
from niwaki.packed.pages import in_large_pages

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)


def load(
    model: str | Path, device: str = "auto", dtype: str | torch.dtype = "auto", *, two_four: bool = False
) -> PreTrainedModel:
    """A model of transformers, ready to generate text, with weights that stay packed in memory.

    Linear layers whose weights are packed become :class:`SparseLinear`; other packed tensors (experts in one tensor)
    are unpacked. Of a dense directory nothing is packed.

    Args:
        model: What ``niwaki pack`` wrote, or any model directory or hub id.
        device: "cpu", "cuda", "cuda:1"...; "auto" is a GPU if there is one.
        dtype: What is computed in: "float32", "bfloat16", "float16", or one of torch's; "auto" is the checkpoint's
            own, but float32 for float16 on a CPU. Packed weights stay as they are.
        two_four: On a GPU, linear layers whose weights have the pattern 2:4 become torch's semi-structured ones, and
            nothing stays packed. While it is read the model takes as much memory as the dense one.

    Raises:
        UsageError: ``two_four`` without a GPU, not in half precision, or of a model without the pattern.
        CheckpointError: it is damaged or incomplete.
        UnsupportedModelError: it is of a kind that niwaki does not know.
    """
    checkpoint = open_checkpoint(locate_model(str(model)))
    dtype = str(dtype).removeprefix("torch.")
    # Elsewhere blocks run on much text at a time, in float32 on a CPU; here weights are read for a few vectors, and
    # in half the bytes in half the time.
    if dtype == "auto" and stored_dtype(checkpoint) == torch.bfloat16:
        dtype = "bfloat16"
    streamed = StreamedModel(checkpoint, device, dtype)
    if two_four:
        semi_structured.check(streamed.device, streamed.dtype)
        loaded = streamed.load()
        semi_structured.convert(streamed)
        return loaded
    if not isinstance(checkpoint, PackedCheckpoint):
        return streamed.load()
    packed = [m for m in streamed.matrices() if m.expert is None and checkpoint.is_packed(m.key)]
    if packed and streamed.device.type == "cpu" and kernels.library() is None:
        _log.warning("packed weights are computed with by %s", kernels.describe())
    whole = streamed.load(skip=[matrix.key for matrix in packed])
    # It is no sign of the model in memory, which can be saved like any other.
    vars(whole.config).pop("quantization_config", None)
    for matrix in packed:
        parent, _, name = matrix.name.rpartition(".")
        inside = streamed.blocks[matrix.block].get_submodule(parent)
        weight = checkpoint.packed(matrix.key)
        weight = in_large_pages(weight) if streamed.device.type == "cpu" else weight.to(streamed.device)
        setattr(inside, name, SparseLinear(weight, getattr(inside, name).bias, matrix.transposed))
    return whole
