"""Some rows of a matrix whose other rows are in other processes, which exchange counts and no weights."""

import torch
from torch import Tensor


class Rows:
    """All rows of a matrix. In a derived class some, and all processes call the same methods in the same order."""

    def of(self, rows: int) -> int:
        """The number of rows of the matrix, of which ``rows`` are in this process."""
        return rows

    def own(self, whole: Tensor) -> Tensor:
        """(own rows, ...) of (all rows, ...)."""
        return whole

    def sum(self, values: Tensor) -> Tensor:
        """The sum of ``values`` over all processes; they may be overwritten."""
        return values

    def sum_after(self, count: int) -> int:
        """The sum of ``count`` over the processes with the rows below these."""
        return 0

    def joined(self, own: Tensor) -> Tensor:
        """(all rows, ...) of the (own rows, ...) of each process."""
        return own

    def total(self, count: int) -> int:
        """The sum of ``count`` over all processes."""
        return int(self.sum(torch.tensor([count])))


#: All rows are in this process.
ALL = Rows()
