"""The two sparse factors that matrices were made of: a file beside the checkpoint's own, which has their products."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from niwaki.checkpoints.reading import Checkpoint
from niwaki.checkpoints.tensors import Entry, new_shard, read_beside
from niwaki.checkpoints.writing import CheckpointWriter, verify
from niwaki.errors import OutputError, UnsupportedModelError, UsageError
from niwaki.layer.patterns.rows import Rows
from niwaki.layer.problem import LayerProblem, Solution
from niwaki.layer.products import products
from niwaki.models.layout import Matrix
from niwaki.models.weight_format import Like, WeightFormat

#: In a folder of its own, because some programs load every safetensors file that lies beside config.json.
FILE = "factors/factors.safetensors"
STORED_AS_PRODUCTS = (
    "matrices are stored as the products of their two factors, dense and no smaller than before, so that they load "
    f"wherever the dense model does; the sparse factors are in {FILE}, and 'niwaki pack' writes these alone"
)


def product(factors: Sequence[Tensor]) -> Tensor:
    """(out, in) float32: what the factors stand for."""
    left, right = factors
    with products(tf32=False):
        return left.float() @ right.float()


def is_product(W: Tensor, factors: Sequence[Tensor]) -> bool:
    """Whether W (out, in) is the product of ``factors``, up to rounding: other processors add up in another order."""
    made = product(factors)
    of_sums = 2 * torch.finfo(torch.float32).eps * math.sqrt(made.shape[0] + made.shape[1])
    return bool((W.float() - made).norm() <= (torch.finfo(W.dtype).eps + of_sums) * made.norm())


def factor_keys(key: str) -> tuple[str, str]:
    """The keys of the left and the right factor of the matrix ``key``."""
    return f"{key}_left", f"{key}_right"


def read_factors(checkpoint: Checkpoint, matrix: Matrix) -> tuple[Tensor, Tensor]:
    """(out, n) and (n, in) in their own dtype; CheckpointError where they are not there, or cannot be its factors."""
    places = _places(checkpoint, [matrix])
    left, right = read_beside(checkpoint.path / FILE, places, f"factors of {matrix.key!r}", "")
    return left, right


def check_one_matrix(checkpoint: Checkpoint, what: str) -> None:
    """UsageError where the weights of ``checkpoint`` are products of two factors, which ``what`` would not keep."""
    if checkpoint.pruning.has_factors:
        raise UsageError(
            f"{checkpoint.path} was pruned to two factors, of which {what} would make dense matrices again; begin with "
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


def _places(checkpoint: Checkpoint, matrices: Sequence[Matrix]) -> dict[str, Entry]:
    """Where the factors of ``matrices`` go."""
    tensors = {}
    for matrix in matrices:
        for key, shape in zip(factor_keys(matrix.key), _shapes(matrix), strict=True):
            tensors[key] = checkpoint.dtype(matrix.key), shape
    return new_shard(FILE, tensors)


@dataclass(frozen=True)
class Factored(WeightFormat):
    """Products of two sparse factors, which are in a file of their own, in the dtype of the checkpoint.

    What counts as zeros of a matrix is how many weights fewer than its own the two factors have. Only matrices of these
    ``blocks`` are products, by default all.
    """

    blocks: tuple[int, int] | None = None

    has_factors = True
    files = (FILE,)

    def _is_product(self, matrix: Matrix) -> bool:
        start, stop = self.blocks or (0, math.inf)
        return start <= matrix.block < stop

    def parts_like(self, matrix: Matrix, stored: torch.dtype) -> list[Like]:
        return [(shape, stored) for shape in _shapes(matrix)] if self._is_product(matrix) else []

    def read_parts(self, checkpoint: Checkpoint, matrix: Matrix) -> tuple[Tensor, ...]:
        return read_factors(checkpoint, matrix) if self._is_product(matrix) else ()

    def notes(self, matrices: Iterable[Matrix]) -> list[str]:
        return [STORED_AS_PRODUCTS]

    def is_separable(self, matrix: Matrix) -> bool:
        return False

    def rounded(
        self, matrix: Matrix, problem: LayerProblem, solution: Solution, rows: Rows, stored: torch.dtype
    ) -> tuple[Solution, tuple[Tensor, ...]]:
        assert solution.factors
        parts = tuple(factor.to(stored) for factor in solution.factors)
        whole = problem.solution(product(parts).to(problem.W.dtype), solution.mask, **solution.stats)
        return replace(whole, factors=solution.factors), parts

    def zeros(self, stored: Tensor, parts: Sequence[Tensor]) -> int:
        if not parts:
            return super().zeros(stored, parts)
        return stored.numel() - sum(int(part.count_nonzero()) for part in parts)

    def places(self, matrix: Matrix) -> list[tuple[str, int | None]]:
        keys = factor_keys(matrix.key) if self._is_product(matrix) else ()
        return [matrix.entry, *((key, None) for key in keys)]

    def write(self, writer: CheckpointWriter, matrix: Matrix, stored: Tensor, parts: Sequence[Tensor]) -> None:
        super().write(writer, matrix, stored, parts)
        for key, part in zip(factor_keys(matrix.key), parts, strict=bool(parts)):
            writer.write(key, part)

    def added(self, checkpoint: Checkpoint, matrices: list[Matrix]) -> dict[str, Entry]:
        return _places(checkpoint, [matrix for matrix in matrices if self._is_product(matrix)])

    def verify(self, directory: Path, checkpoint: Checkpoint, matrices: list[Matrix], zeros: Mapping[str, int]) -> None:
        """Also OutputError unless all products are on disk as their factors make them."""
        verify(directory, checkpoint, {})
        written, found = Checkpoint(directory), dict.fromkeys(zeros, 0)
        for matrix in matrices:
            W, factors = matrix.read(written), self.read_parts(written, matrix)
            if factors and not is_product(W, factors):
                raise OutputError(f"{directory}: {matrix.key!r} is not on disk as the product of its factors")
            found[matrix.key] += self.zeros(W, factors)
        if found != dict(zeros):
            raise OutputError(f"{directory}: the factors on disk have other zeros than were made")
