"""Which scores are kept: the selections of patterns.

True means kept, counts are exact, and of equal scores the first are dropped. Where ``scores`` are some ``rows`` of a
matrix, counts are those of the whole matrix and the mask has these rows.
"""

import math

import numpy as np
import torch
from torch import Tensor

from niwaki.layer.patterns.rows import ALL, Rows


def keep_highest(scores: Tensor, zeros: int, rows: Rows = ALL) -> Tensor:
    """True except at the ``zeros`` lowest scores, in the shape of ``scores``."""
    if zeros <= 0:
        return torch.ones_like(scores, dtype=torch.bool)
    flat = scores.reshape(-1)
    threshold = kth_smallest(flat, zeros, rows)
    mask = flat > threshold
    surplus = rows.total(mask.numel() - int(mask.count_nonzero())) - zeros
    if surplus:  # more ties at the threshold than zeros: the last ones stay
        ties = (flat == threshold).nonzero().squeeze(1)
        stay = surplus - rows.sum_after(len(ties))
        if stay > 0:
            mask[ties[-stay:]] = True
    return mask.view(scores.shape)


def keep_highest_per_row(scores: Tensor, zeros: int, rows: Rows = ALL) -> Tensor:
    """True except at ``zeros`` in total: the lowest of each row, one more in those whose next score is the lowest."""
    here, columns = scores.shape
    each, extra = divmod(zeros, rows.of(here))
    mask = torch.ones_like(scores, dtype=torch.bool)
    if each:
        mask = scores > kth_smallest_per_row(scores, each)
        if int(mask.count_nonzero()) != here * (columns - each):  # ties: the first ones go
            order = scores.argsort(dim=1, stable=True)
            mask = torch.ones_like(mask).scatter_(1, order[:, :each], False)
    if extra:
        next_score, next_index = scores.masked_fill(~mask, math.inf).min(dim=1)
        chosen = (~keep_highest(next_score, extra, rows)).nonzero().squeeze(1)
        mask[chosen, next_index[chosen]] = False
    return mask


def keep_highest_of_each(scores: Tensor, n: int, m: int) -> Tensor:
    """True at the ``n`` highest of every ``m`` consecutive scores of a row."""
    zeros = m - n
    grouped = scores.reshape(-1, m)
    if (n, m) == (2, 4):  # three times faster than the ranks below
        mask = grouped >= torch.maximum(*_middle_of_four(grouped)).unsqueeze(1)
        if int(mask.count_nonzero()) == n * grouped.shape[0]:  # otherwise there are ties
            return mask.view(scores.shape)
    if m > 16:
        return keep_highest_per_row(grouped, zeros * grouped.shape[0]).view(scores.shape)
    # Ranks by m (m - 1) / 2 comparisons: many times faster than sorting many short rows.
    place = grouped.T.contiguous()  # (m, groups)
    rank = torch.zeros(place.shape, dtype=torch.uint8, device=scores.device)
    for i in range(m):
        for j in range(i):
            later_wins = place[i] >= place[j]
            rank[i] += later_wins
            rank[j] += ~later_wins
    return (rank >= zeros).T.reshape(scores.shape)


def middle_of_each(scores: Tensor, n: int, m: int) -> Tensor:
    """In the shape of ``scores``: for every m of a row the middle between its n-th highest and the next one."""
    grouped = scores.reshape(-1, m)
    if (n, m) == (2, 4):  # six times faster than sorting at 2,048 x 2,048
        one, other = _middle_of_four(grouped)
        middle = (one + other).mul_(0.5)
    else:
        ordered = grouped.sort(dim=1).values
        middle = (ordered[:, m - n - 1] + ordered[:, m - n]).mul_(0.5)
    return middle.repeat_interleave(m).view(scores.shape)


def kth_smallest(values: Tensor, k: int, rows: Rows = ALL) -> Tensor:
    """The k-th smallest (from 1) of a flat tensor, exactly, over all processes with ``rows``.

    By counting on a GPU, because kthvalue of one long row uses one of its hundred multiprocessors, and for several
    processes, which exchange counts only.
    """
    if rows is not ALL or (values.device.type == "cuda" and values.dtype == torch.float32):
        return _kth_by_counting(values, k, rows)
    return kth_smallest_per_row(values, k)


def _kth_by_counting(values: Tensor, k: int, rows: Rows = ALL) -> Tensor:
    """:func:`kth_smallest` of float32 or float64: 16 bits of the result at a time, highest first."""
    kind = torch.int32 if values.dtype == torch.float32 else torch.int64
    width, limits = 8 * values.element_size(), torch.iinfo(kind)
    bits = values.view(kind)
    # As unsigned numbers these are in the order of the values: negative ones have all bits flipped, others the sign.
    keys = (bits >> (width - 1)).bitwise_or_(limits.min).bitwise_xor_(bits)
    bits_so_far = torch.zeros(1, dtype=torch.int64, device=values.device)
    rank = torch.full_like(bits_so_far, k)
    for shift in range(width - 16, -1, -16):
        digits = (keys >> shift).bitwise_and_(0xFFFF)
        counts = rows.sum(torch.bincount(digits, minlength=1 << 16))
        ends = counts.cumsum(0)
        digit = torch.searchsorted(ends, rank)
        rank -= ends[digit] - counts[digit]
        bits_so_far |= digit << shift
        if shift:
            keys = keys[digits == digit]
    positive = (bits_so_far >> (width - 1)) & 1 == 1
    return torch.where(positive, bits_so_far & limits.max, ~bits_so_far).to(kind).view(values.dtype)


def kth_smallest_per_row(scores: Tensor, k: int) -> Tensor:
    """(rows, 1): the k-th smallest (from 1) of each row.

    On a CPU by numpy, whose partition is 9 times faster than kthvalue at 2,048 x 2,048: that would take longer than the
    product of a step of ADMM, with a selection in each.
    """
    if scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.partition(scores.detach().numpy(), k - 1)[..., k - 1 : k].copy())
    return scores.kthvalue(k, keepdim=True).values


def _middle_of_four(grouped: Tensor) -> tuple[Tensor, Tensor]:
    """(groups,) twice: the second and the third highest of each row of (groups, 4), in either order."""
    a, b, c, d = grouped.unbind(dim=1)
    least_of_highest = torch.minimum(torch.maximum(a, b), torch.maximum(c, d))
    return least_of_highest, torch.maximum(torch.minimum(a, b), torch.minimum(c, d))
