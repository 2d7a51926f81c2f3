"""The two sparse factors that matrices were made of: a file beside the checkpoint's own, which has their products."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from niwaki.checkpoints.reading import Checkpoint, Pruning
from niwaki.checkpoints.tensors import Entry, new_shard, read_beside
from niwaki.checkpoints.writing import CheckpointWriter, verify
from niwaki.errors import OutputError, UnsupportedModelError, UsageError
from niwaki.layer.factor_rounding import factors_onto_grid, flops
from niwaki.layer.grid import Grid, scale_dtype
from niwaki.layer.patterns.rows import Rows
from niwaki.layer.problem import LayerProblem, Solution
from niwaki.layer.products import products
from niwaki.models.layout import Matrix
from niwaki.models.scales import check_scales
from niwaki.models.weight_format import Like, WeightFormat

#: In a folder of its own, because some programs load every safetensors file that lies beside config.json.
FILE = "factors/factors.safetensors"
STORED_AS_PRODUCTS = (
    "matrices are stored as the products of their two factors, dense and no smaller than before, so that they load "
    f"wherever the dense model does; the sparse factors are in {FILE}, and 'niwaki pack' writes these alone"
)


def product(factors: Sequence[Tensor]) -> Tensor:
    """(out, in) float32: what the factors stand for, the first two of these."""
    left, right = factors[:2]
    with products(tf32=False):
        return left.float() @ right.float()


def is_product(W: Tensor, factors: Sequence[Tensor]) -> bool:
    """Whether W (out, in) is the product of ``factors``, up to rounding: other processors add up in another order."""
    made = product(factors)
    of_sums = 2 * torch.finfo(torch.float32).eps * math.sqrt(made.shape[0] + made.shape[1])
    return bool((W.float() - made).norm() <= (torch.finfo(W.dtype).eps + of_sums) * made.norm())


def factor_keys(key: str, scaled: bool = False) -> tuple[str, ...]:
    """The keys of the left and the right factor of the matrix ``key``, and of the scales of both if they have any."""
    factors = f"{key}_left", f"{key}_right"
    return (*factors, *(f"{factor}_scale" for factor in factors)) if scaled else factors


def read_factors(checkpoint: Checkpoint, matrix: Matrix, grid: Grid | None = None) -> tuple[Tensor, ...]:
    """(out, n) and (n, in) in their own dtype, and on a ``grid`` the scales of both.

    CheckpointError where they are not there, or cannot be those of ``matrix``.
    """
    file, places = checkpoint.path / FILE, _places(checkpoint, [matrix], grid)
    why = f", as factors on {grid} have it" if grid else ""
    parts = tuple(read_beside(file, places, f"factors of {matrix.key!r}", why))
    for key, scales in zip([*places][2:], parts[2:], strict=True):
        check_scales(scales, file, key)
    return parts


def check_one_matrix(checkpoint: Checkpoint, what: str) -> None:
    """UsageError where the weights of ``checkpoint`` are products of two factors, which ``what`` would not keep."""
    if checkpoint.pruning.has_factors:
        raise UsageError(
            f"{checkpoint.path} was pruned to two factors, and {what} would make them dense again; begin with "
            "the dense model, or with a pattern of one matrix, such as 0.5"
        )


def check_own_tensors(matrices: Sequence[Matrix]) -> None:
    """UnsupportedModelError where a tensor has several of ``matrices``, whose factors no packed file has."""
    if shared := [matrix for matrix in matrices if matrix.index is not None]:
        raise UnsupportedModelError(
            f"{shared[0].key!r} has the matrices of all experts, which cannot become two factors; leave its blocks "
            "out, or take a pattern of one matrix, such as 0.5"
        )


def _shapes(matrix: Matrix) -> tuple[tuple[int, int], tuple[int, int]]:
    rows, columns = matrix.shape
    inner = min(rows, columns)
    return (rows, inner), (inner, columns)


def _like(matrix: Matrix, stored: torch.dtype, grid: Grid | None) -> list[Like]:
    """Shapes and dtypes of its factors, and of their scales on a ``grid``."""
    factors = _shapes(matrix)
    scales = [(rows, grid.groups(columns)) for rows, columns in factors] if grid else []
    return [*((shape, stored) for shape in factors), *((shape, scale_dtype(stored)) for shape in scales)]


def _places(checkpoint: Checkpoint, matrices: Sequence[Matrix], grid: Grid | None) -> dict[str, Entry]:
    """Where the factors of ``matrices`` go, and their scales."""
    tensors = {}
    for matrix in matrices:
        like = _like(matrix, checkpoint.dtype(matrix.key), grid)
        for key, (shape, dtype) in zip(factor_keys(matrix.key, grid is not None), like, strict=True):
            tensors[key] = dtype, shape
    return new_shard(FILE, tensors)


@dataclass(frozen=True)
class Factored(WeightFormat):
    """Products of two sparse factors, which are in a file of their own, in the dtype of the checkpoint.

    The parts of a matrix are the left and the right factor; on a ``grid`` also the scales of the one and of the other.
    What counts as zeros of a matrix is how many weights fewer than its own the two factors have. Only matrices of these
    ``blocks`` are products, by default all.
    """

    grid: Grid | None = None
    blocks: tuple[int, int] | None = None

    has_factors = True
    files = (FILE,)

    def _is_product(self, matrix: Matrix) -> bool:
        return Pruning(blocks=self.blocks).includes(matrix.block)

    def parts_like(self, matrix: Matrix, stored: torch.dtype) -> list[Like]:
        return _like(matrix, stored, self.grid) if self._is_product(matrix) else []

    def read_parts(self, checkpoint: Checkpoint, matrix: Matrix) -> tuple[Tensor, ...]:
        return read_factors(checkpoint, matrix, self.grid) if self._is_product(matrix) else ()

    def notes(self, matrices: Iterable[Matrix]) -> list[str]:
        return [STORED_AS_PRODUCTS]

    def round_flops(self, rows: int, columns: int) -> float:
        return flops(rows, columns) if self.grid else 0.0

    def is_separable(self, matrix: Matrix) -> bool:
        return False

    def rounded(
        self, matrix: Matrix, problem: LayerProblem, solution: Solution, rows: Rows, stored: torch.dtype
    ) -> tuple[Solution, tuple[Tensor, ...]]:
        assert solution.factors
        factors, stats, scales = solution.factors, {**solution.stats}, tuple[Tensor, ...]()
        if self.grid:
            dtype, damping = scale_dtype(stored), float(stats.get("damping", 0.0))
            factors, of_both = factors_onto_grid(problem, factors, self.grid, dtype, damping)
            scales = tuple(each.to(dtype) for each in of_both)
            kept = [sum(int(each.count_nonzero()) for each in pair) for pair in (solution.factors, factors)]
            stats["rounded_to_zero"] = kept[0] - kept[1]
        parts = tuple(factor.to(stored) for factor in factors)
        whole = problem.solution(product(parts).to(problem.W.dtype), solution.mask, **stats)
        return replace(whole, factors=factors), (*parts, *scales)

    def project_factors(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        left, right, *scales = parts
        return self.project_factor(left, scales[:1]), self.project_factor(right, scales[1:])

    def project_factor(self, factor: Tensor, scales: Sequence[Tensor]) -> Tensor:
        """One factor in this format, in float32, with the same zeros; ``scales`` are its own, if it has any."""
        if self.grid is None:
            return factor.float()
        (own,) = scales
        return self.grid.project(factor.float(), own.float(), own.dtype, same_zeros=True)

    def zeros(self, stored: Tensor, parts: Sequence[Tensor]) -> int:
        if not parts:
            return super().zeros(stored, parts)
        return stored.numel() - sum(int(factor.count_nonzero()) for factor in parts[:2])

    def places(self, matrix: Matrix) -> list[tuple[str, int | None]]:
        keys = factor_keys(matrix.key, self.grid is not None) if self._is_product(matrix) else ()
        return [matrix.entry, *((key, None) for key in keys)]

    def write(self, writer: CheckpointWriter, matrix: Matrix, stored: Tensor, parts: Sequence[Tensor]) -> None:
        super().write(writer, matrix, stored, parts)
        for key, part in zip(factor_keys(matrix.key, self.grid is not None), parts, strict=bool(parts)):
            writer.write(key, part)

    def added(self, checkpoint: Checkpoint, matrices: list[Matrix]) -> dict[str, Entry]:
        return _places(checkpoint, [matrix for matrix in matrices if self._is_product(matrix)], self.grid)

    def verify(self, directory: Path, checkpoint: Checkpoint, matrices: list[Matrix], zeros: Mapping[str, int]) -> None:
        """Also OutputError unless all products are on disk as their factors make them, and these are on the grid."""
        verify(directory, checkpoint, {})
        written, found = Checkpoint(directory), dict.fromkeys(zeros, 0)
        for matrix in matrices:
            W, parts = matrix.read(written), self.read_parts(written, matrix)
            if parts and not is_product(W, parts):
                raise OutputError(f"{directory}: {matrix.key!r} is not on disk as the product of its factors")
            if self.grid and not all(map(self.grid.has, parts[:2], parts[2:])):
                raise OutputError(
                    f"{directory}: {matrix.key!r} has factors on disk that are not on their grid {self.grid}"
                )
            found[matrix.key] += self.zeros(W, parts)
        if found != dict(zeros):
            raise OutputError(f"{directory}: the factors on disk have other zeros than were made")
