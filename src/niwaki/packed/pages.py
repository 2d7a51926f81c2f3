"""Memory in large pages, from which a processor reads weights faster."""

from __future__ import annotations

import mmap
from dataclasses import replace

import torch
from torch import Tensor

from niwaki.packed.matrix import PackedMatrix

#: Bytes of a large page where they are of use, on x86-64 and most others.
_PAGE = 1 << 21


def in_large_pages(W: PackedMatrix) -> PackedMatrix:
    """``W``, on the CPU, with mask and values in memory for which the system is asked for large pages.

    A stream of weights goes through thousands of small pages, each of which has to be looked up and stops the
    hardware's reading ahead (docs/log.md). The system may have no large pages to give; then this is a copy. It is W
    itself where the system has no such thing (Linux has), and where W is small. What is behind the last whole page
    stays in small ones.
    """
    return replace(W, mask=_moved(W.mask), values=_moved(W.values))


def _moved(value: Tensor) -> Tensor:
    if value.nbytes < 2 * _PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return value
    try:
        # One page more, to begin where one does; what is not written to takes no memory.
        memory = mmap.mmap(-1, value.nbytes + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        begin = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % _PAGE
        # Only whole ones: with the padding, half of 2,048 x 2,048 numbers would take 6 MiB for 4.
        memory.madvise(mmap.MADV_HUGEPAGE, begin, value.nbytes // _PAGE * _PAGE)
    except OSError:  # a system without them
        return value
    moved = torch.frombuffer(memory, dtype=value.dtype, count=value.numel(), offset=begin)
    return moved.view(value.shape).copy_(value)
