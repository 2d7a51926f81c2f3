"""Which pattern each matrix gets: the same for all, or the mask that it has in another model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from niwaki.errors import PatternError, UsageError, named
from niwaki.layer.patterns import Fixed, Pattern, Unstructured
from niwaki.models.checkpoint import Checkpoint, locate_model
from niwaki.models.layout import Matrix
from niwaki.models.streamed import StreamedModel

PatternOf = Callable[[Matrix], Pattern]


def patterns_of(wanted: Pattern | None, mask_model: str | None, streamed: StreamedModel) -> PatternOf:
    """The pattern of each matrix: the same for all, or the mask that it has in another model.

    With both, the mask may be refined within the pattern, and all masks are checked first, so that an error in the
    last block does not come after hours.

    Raises:
        UsageError: there is neither, or the pattern does not fit the matrices or their masks.
    """
    matrices = streamed.matrices()
    if wanted is not None:
        for matrix in matrices:
            with named(matrix.label):
                wanted.check(matrix.shape)
    if mask_model is None:
        if wanted is None:
            raise UsageError("say how sparse: --sparsity 0.6, or a pattern such as --pattern 2:4")
        return lambda _: wanted
    lender, own = Checkpoint(locate_model(mask_model)), streamed.checkpoint
    for matrix in matrices:
        shape = own.entries[matrix.key].shape
        if matrix.key not in lender or lender.entries[matrix.key].shape != shape:
            raise UsageError(f"{mask_model} cannot lend its mask: no {matrix.key!r} of shape {shape}")
    if wanted is not None:
        for matrix in matrices:
            with named(matrix.label):
                _check_mask(matrix.read(lender) != 0, wanted, mask_model)
    return lambda matrix: Fixed((matrix.read(lender) != 0).to(streamed.device), wanted)


def _check_mask(mask: Tensor, pattern: Pattern, source: str) -> None:
    """Raises PatternError, with what differs, where ``pattern`` does not allow ``mask``."""
    # With scores 1 for kept and 0 for pruned weights an allowed mask is the best one.
    nearest = pattern.mask(mask.float())
    if torch.equal(nearest, mask):
        return
    zeros, asked = (values.numel() - int(values.count_nonzero()) for values in (mask, nearest))
    what = f"has {zeros} zeros of {mask.numel()} ({100 * zeros / mask.numel():.4g} %), and {pattern} asks for {asked}"
    other = ""
    if zeros == asked:
        row, column = (nearest != mask).nonzero()[0].tolist()
        first, width = column - column % pattern.group, pattern.group
        where = f"row {row}" if width == 1 else f"row {row}, columns {first} to {first + width - 1}"
        what = f"has as many zeros as {pattern} asks for, but in other places, first in {where}"
        other = f", or {Unstructured(pattern.sparsity)}"
    hint = f"try the pattern that it was made for{other}, or none, which keeps the mask as it is"
    raise PatternError(f"the mask of {source} {what}; {hint}")
