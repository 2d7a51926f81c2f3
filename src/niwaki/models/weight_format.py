"""How a run writes the weights of matrices: as the checkpoint has them, on a grid, or in the format of the files."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from niwaki.checkpoints.reading import Checkpoint
from niwaki.checkpoints.tensors import Entry
from niwaki.checkpoints.writing import CheckpointWriter, verify
from niwaki.layer.grid import Grid, scale_dtype
from niwaki.layer.patterns.rows import Rows
from niwaki.layer.problem import LayerProblem, Solution
from niwaki.layer.rounding import flops, onto_grid, to_nearest
from niwaki.models.layout import Matrix
from niwaki.models.scales import FILE, places, read_scales, scale_key, stored_as_usual, verify_grid

#: Shape and dtype.
Like = tuple[tuple[int, int], torch.dtype]


class WeightFormat:
    """As the checkpoint has them; formats whose matrices have further parts, such as scales, derive from it."""

    #: Whether the parts of a matrix are two factors, whose product it is.
    has_factors = False
    #: Names of the files beside the checkpoint's own that have the parts.
    files: tuple[str, ...] = ()

    def parts_like(self, matrix: Matrix, stored: torch.dtype) -> list[Like]:
        """Shape and dtype of each part that ``matrix`` has beside its weights, which are ``stored`` so."""
        return []

    def read_parts(self, checkpoint: Checkpoint, matrix: Matrix) -> tuple[Tensor, ...]:
        """The parts that ``checkpoint`` has of ``matrix``; none of one that was not pruned."""
        return ()

    def notes(self, matrices: Iterable[Matrix]) -> list[str]:
        """What a record is to say of ``matrices`` in this format."""
        return []

    def round_flops(self, rows: int, columns: int) -> float:
        """Floating-point operations of :meth:`rounded`, as far as they count."""
        return 0.0

    def is_separable(self, matrix: Matrix) -> bool:
        """Whether some rows of ``matrix`` are rounded as they are in all of it."""
        return True

    def rounded(
        self, matrix: Matrix, problem: LayerProblem, solution: Solution, rows: Rows, stored: torch.dtype
    ) -> tuple[Solution, tuple[Tensor, ...]]:
        """The ``solution`` of these ``rows`` in this format, fitted to what rounding changes, and the parts of all."""
        raise NotImplementedError

    def nearest(self, matrix: Matrix, W: Tensor, stored: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(out, in), W in this format without regard to inputs, and its parts."""
        raise NotImplementedError

    def project(self, matrix: Matrix, W: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """(out, in), W in this format, with the same zeros."""
        raise NotImplementedError

    def project_factors(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The two factors that are the first of these ``parts`` of a matrix, in this format, with the same zeros."""
        raise NotImplementedError

    def zeros(self, stored: Tensor, parts: Sequence[Tensor]) -> int:
        """How many zeros a matrix has."""
        return stored.numel() - int(stored.count_nonzero())

    def places(self, matrix: Matrix) -> list[tuple[str, int | None]]:
        """Key and index of all that is written for ``matrix``."""
        return [matrix.entry]

    def write(self, writer: CheckpointWriter, matrix: Matrix, stored: Tensor, parts: Sequence[Tensor]) -> None:
        """Writes ``stored``, as the checkpoint would have ``matrix``, which is in this format with these ``parts``."""
        writer.write(matrix.key, stored, matrix.index)

    def read(self, writer: CheckpointWriter, matrix: Matrix) -> Tensor:
        """What :meth:`write` wrote as ``stored``."""
        return writer.read(matrix.key, matrix.index)

    def added(self, checkpoint: Checkpoint, matrices: list[Matrix]) -> dict[str, Entry]:
        """The tensors that are written in addition to those of ``checkpoint``."""
        return {}

    def verify(self, directory: Path, checkpoint: Checkpoint, matrices: list[Matrix], zeros: Mapping[str, int]) -> None:
        """OutputError unless ``directory`` has the tensors of ``checkpoint``, those by key with these ``zeros``."""
        verify(directory, checkpoint, dict(zeros))


@dataclass(frozen=True)
class OnGrid(WeightFormat):
    """Weights on a grid, with scales in a file of their own.

    On one of mixed bits ``bits_of`` says how many a matrix has.
    """

    grid: Grid
    bits_of: Callable[[Matrix], int] | None = field(default=None, compare=False)

    files = (FILE,)

    def _grid(self, matrix: Matrix) -> Grid:
        return self.grid if self.bits_of is None else self.grid.of(self.bits_of(matrix))

    def parts_like(self, matrix: Matrix, stored: torch.dtype) -> list[Like]:
        return [((matrix.shape[0], self.grid.groups(matrix.shape[1])), scale_dtype(stored))]

    def read_parts(self, checkpoint: Checkpoint, matrix: Matrix) -> tuple[Tensor, ...]:
        return (read_scales(checkpoint, matrix, self.grid),) if checkpoint.pruning.includes(matrix.block) else ()

    def notes(self, matrices: Iterable[Matrix]) -> list[str]:
        return [stored_as_usual(self.grid, matrices)]

    def round_flops(self, rows: int, columns: int) -> float:
        return flops(rows, columns)

    def rounded(
        self, matrix: Matrix, problem: LayerProblem, solution: Solution, rows: Rows, stored: torch.dtype
    ) -> tuple[Solution, tuple[Tensor, ...]]:
        before = solution.W != 0
        solution, scales = onto_grid(problem, solution, self._grid(matrix), scale_dtype(stored))
        after = solution.W != 0
        lost, raised = (rows.total(int(each.count_nonzero())) for each in (before & ~after, after & ~before))
        stats = {**solution.stats, "rounded_to_zero": lost}
        if raised:  # kept weights of 0
            stats["revived_by_rounding"] = raised
        return replace(solution, stats=stats), (rows.joined(scales).to(scale_dtype(stored)),)

    def nearest(self, matrix: Matrix, W: Tensor, stored: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        dtype = scale_dtype(stored)
        weights, scales = to_nearest(W, self._grid(matrix), dtype)
        return weights, (scales.to(dtype),)

    def project(self, matrix: Matrix, W: Tensor, parts: Sequence[Tensor]) -> Tensor:
        (scales,) = parts
        return self._grid(matrix).project(W, scales.float(), scales.dtype, same_zeros=True)

    def places(self, matrix: Matrix) -> list[tuple[str, int | None]]:
        return [matrix.entry, (scale_key(matrix), matrix.index)]

    def write(self, writer: CheckpointWriter, matrix: Matrix, stored: Tensor, parts: Sequence[Tensor]) -> None:
        super().write(writer, matrix, stored, parts)
        for scales in parts:
            writer.write(scale_key(matrix), scales, matrix.index)

    def added(self, checkpoint: Checkpoint, matrices: list[Matrix]) -> dict[str, Entry]:
        return places(checkpoint, matrices, self.grid)

    def verify(self, directory: Path, checkpoint: Checkpoint, matrices: list[Matrix], zeros: Mapping[str, int]) -> None:
        super().verify(directory, checkpoint, matrices, zeros)
        verify_grid(directory, matrices, self.grid)
