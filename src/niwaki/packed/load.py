"""Models of transformers with packed weights."""

import logging
import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from niwaki.arguments import checked
from niwaki.models.device import stored_dtype
from niwaki.models.locate import locate_model
from niwaki.models.outside import embedding_keys
from niwaki.models.streamed import StreamedModel
from niwaki.options import Compute
from niwaki.packed import decoding, kernels
from niwaki.packed.format import PackedCheckpoint, open_checkpoint
from niwaki.packed.linear import SparseEmbedding, SparseLinear
from niwaki.packed.matrix import PackedMatrix, in_strips, with_bytes

_log = logging.getLogger(__name__)
_PAGE = 1 << 21  # bytes of a large page on x86-64 and most others


@checked
def load(model: str | Path, device: str | torch.device = "auto", dtype: str | torch.dtype = "auto") -> PreTrainedModel:
    """Loads a model of transformers, ready to generate text; packed weights stay packed in memory.

    Packed linear layers, the head included, become :class:`SparseLinear`, and packed embeddings stay packed too. Other
    packed tensors (experts in one tensor) are unpacked.

    Args:
        model: A directory that ``niwaki pack`` wrote; any other model directory or hub id is loaded as it is.
        device: "cpu", "cuda", "cuda:1"...; "auto" is a GPU if there is one.
        dtype: Compute dtype: "float32", "bfloat16", "float16", or a dtype of torch; "auto" is the checkpoint's own,
            except that float16 becomes float32 on a CPU. Packed weights stay as they are.

    Returns:
        The model, in evaluation mode.

    Raises:
        CheckpointError: the model is damaged or incomplete.
        UnsupportedModelError: niwaki does not support models of this kind.
    """
    compute = Compute(str(device), str(dtype).removeprefix("torch."))
    checkpoint = open_checkpoint(locate_model(str(model)))
    device, dtype = compute.device, compute.dtype
    # Elsewhere blocks run on much text, in float32 on a CPU. Here half the bytes take half the time.
    if dtype == "auto" and stored_dtype(checkpoint) == torch.bfloat16:
        dtype = "bfloat16"
    streamed = StreamedModel(checkpoint, device, dtype)
    if not isinstance(checkpoint, PackedCheckpoint):
        return streamed.load()
    stored = checkpoint.index.tensors
    # A row of a layer is an output. One that is packed the other way around, as no niwaki does it, is read whole.
    packed = [
        m
        for m in streamed.matrices()
        if m.is_module and stored[m.key].packed and stored[m.key].transposed == m.transposed
    ]
    on_cpu = streamed.device.type == "cpu"
    if packed and on_cpu and kernels.library() is None:
        _log.warning("packed weights are computed with by %s", kernels.describe())
    ends = _packed_ends(streamed, checkpoint)
    whole = streamed.load(skip=[*(matrix.key for matrix in packed), *ends])
    # The model in memory has no such quantization and can be saved like any other.
    vars(whole.config).pop("quantization_config", None)
    for key, modules in ends.items():
        (weight,) = checkpoint.packed(key)
        weight = _in_memory(weight, streamed) if on_cpu else weight.to(streamed.device)
        for number, name in enumerate(modules):
            end: Any = whole.get_submodule(name)
            if isinstance(end, nn.Linear):
                sparse = SparseLinear(weight, end.bias, dtype=streamed.dtype)
            else:
                sparse = SparseEmbedding(weight, streamed.dtype)
            sparse.is_tied = number > 0
            whole.set_submodule(name, sparse.train(end.training))
    if any(len(modules) > 1 for modules in ends.values()):
        vars(whole)["tie_weights"] = _tied_already
    for matrix in packed:
        weights = [
            _in_memory(each, streamed) if on_cpu else with_bytes(each).to(streamed.device)
            for each in checkpoint.packed(matrix.key)
        ]
        for use in streamed.uses(matrix):
            block = streamed.blocks[use.block]
            layer: Any = block.get_submodule(use.name)
            sparse = SparseLinear(weights[0], layer.bias, use.transposed, streamed.dtype, *weights[1:])
            block.set_submodule(use.name, sparse.train(layer.training))
    if on_cpu:
        decoding.attach(whole, streamed.blocks)
    return whole


def _tied_already(*_: Any, **__: Any) -> None:
    """In the place of ``tie_weights`` of a model whose packed embeddings and head share what transformers looks for."""


def _packed_ends(streamed: StreamedModel, checkpoint: PackedCheckpoint) -> dict[str, list[str]]:
    """The modules that are token embeddings or the head and whose weights are packed, by the key of these.

    None of a key that other modules read too, such as embeddings that are scaled: that is unpacked.
    """
    found: dict[str, list[str]] = {}
    for name, module in streamed.model.named_modules(remove_duplicate=False):
        for key in streamed.layout.keys(f"{name}.weight"):
            found.setdefault(key, []).append(name if type(module) in (nn.Embedding, nn.Linear) else "")
    stored = checkpoint.index.tensors
    keys = [key for key in embedding_keys(streamed) if stored[key].whole and not stored[key].transposed]
    return {key: found[key] for key in keys if all(found[key])}


def _in_memory(W: PackedMatrix, streamed: StreamedModel) -> PackedMatrix:
    """``W`` on the CPU as products with it are fastest."""
    if W.mask is None and kernels.reads_strips(streamed.device, streamed.dtype):
        return in_strips(W, lambda value: torch.empty_like(value) if (room := _large(value)) is None else room)
    return in_large_pages(W)


def in_large_pages(W: PackedMatrix) -> PackedMatrix:
    """``W`` on the CPU with mask and values in large pages: reading ahead stops at a page's end (benchmarks/LOG.md).

    Small tensors stay where they are, and so does everything on systems other than Linux.
    """
    return replace(W, mask=None if W.mask is None else _moved(W.mask), values=_moved(W.values))


def _moved(value: Tensor) -> Tensor:
    return value if (room := _large(value)) is None else room.copy_(value)


def _large(value: Tensor) -> Tensor | None:
    """Room for a tensor like ``value`` in large pages; None for small ones, and where the system has no such pages."""
    if value.nbytes < 2 * _PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        # One page more, to begin where one does; what is not written to takes no memory.
        memory = mmap.mmap(-1, value.nbytes + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        begin = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % _PAGE
        # Only whole ones: with the padding, half of 2,048 x 2,048 numbers would take 6 MiB for 4.
        memory.madvise(mmap.MADV_HUGEPAGE, begin, value.nbytes // _PAGE * _PAGE)
    except OSError:  # a system without them
        return None
    return torch.frombuffer(memory, dtype=value.dtype, count=value.numel(), offset=begin).view(value.shape)
