"""Some rows of a matrix, where others have the other rows: what has to be known of all of them.

Counts and thresholds of patterns are those of the whole matrix. Who has some of its rows asks the others for their
counts; nobody sees the others' weights.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Rows:
    """The rows of a matrix that are here: all of them. Derived classes have some, and ask the others.

    Where others have rows, all call the same methods in the same order.
    """

    def of(self, rows: int) -> int:
        """How many rows the matrix has, of which ``rows`` are here."""
        return rows

    def own(self, whole: Tensor) -> Tensor:
        """Of (all rows, ...) those that are here."""
        return whole

    def sum(self, values: Tensor) -> Tensor:
        """The sum of ``values`` over all who have rows; they may be overwritten."""
        return values

    def sum_after(self, count: int) -> int:
        """The sum of ``count`` over those who have the rows below these."""
        return 0

    def joined(self, part: Tensor) -> Tensor:
        """(all rows, ...): everybody's ``part``, which is (rows that are here, ...)."""
        return part

    def total(self, count: int) -> int:
        """The sum of ``count`` over all who have rows."""
        return int(self.sum(torch.tensor([count])))


#: All rows are here.
ALL = Rows()
