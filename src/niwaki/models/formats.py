"""Formats of a checkpoint's pruned matrices: how they are rounded, written, read and verified."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from niwaki.checkpoints.encodings import EncodedFloats
from niwaki.checkpoints.reading import Checkpoint, PruningConfig
from niwaki.checkpoints.tensors import Entry, new_shard, read_beside, read_tensor
from niwaki.checkpoints.writing import CheckpointWriter, check_zeros, verify
from niwaki.errors import OutputError, UnsupportedModelError, UsageError
from niwaki.layer.floats import TiledFloats
from niwaki.layer.grid import AnyGrid, Grid, holding, scale_dtype
from niwaki.layer.linalg import products
from niwaki.layer.patterns.rows import Rows
from niwaki.layer.problem import LayerProblem, Solution
from niwaki.layer.rounding import factor_flops, factors_onto_grid, flops, onto_floats, onto_grid, to_nearest
from niwaki.models.layout import Matrix
from niwaki.models.scales import (
    FILE,
    bits_in,
    check_scales,
    grid_of,
    places,
    read_scales,
    scale_key,
    stored_as_usual,
    verify_grid,
    whole_numbers_of,
)
from niwaki.models.streamed import StreamedModel

#: Shape and dtype.
Like = tuple[tuple[int, int], torch.dtype]


class WeightFormat:
    """Weights as the checkpoint has them; formats with further parts of a matrix, such as scales, derive from it."""

    #: Whether the parts of a matrix are two factors, whose product it is.
    has_factors = False
    #: Whether a weight of 0 is one of its numbers.
    keeps_zeros = True
    #: Whether there are scales that healing can train.
    trains_scales = False
    #: Names of the files beside the checkpoint's own that have the parts.
    files: tuple[str, ...] = ()

    def part_keys(self, matrix: Matrix) -> tuple[str, ...]:
        """The key of each part that ``matrix`` has beside its weights, in the files that have the parts."""
        return ()

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
        return [(key, matrix.index) for key in (matrix.key, *self.part_keys(matrix))]

    def write(self, writer: CheckpointWriter, matrix: Matrix, stored: Tensor, parts: Sequence[Tensor]) -> None:
        """Writes ``stored``, as the checkpoint would have ``matrix``, which is in this format with these ``parts``."""
        writer.write(matrix.key, stored, matrix.index)
        for key, part in zip(self.part_keys(matrix), parts, strict=bool(parts)):
            writer.write(key, part, matrix.index)

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

    grid: AnyGrid
    bits_of: Callable[[Matrix], float] | None = field(default=None, compare=False)

    files = (FILE,)

    @property
    def keeps_zeros(self) -> bool:  # type: ignore[override]
        return self.grid.keeps_zeros

    @property
    def trains_scales(self) -> bool:  # type: ignore[override]
        return self.grid.trains_scales

    def grid_of(self, matrix: Matrix) -> AnyGrid:
        """The grid that ``matrix`` is on."""
        return self.grid if self.bits_of is None else self.grid.of(self.bits_of(matrix))

    def _holding(self, matrix: Matrix, W: Tensor, stored: torch.dtype) -> AnyGrid:
        """The same; a type that has the numbers of W, unless it is an expert's, of which all in a block have one."""
        grid = self.grid_of(matrix)
        return grid if matrix.expert is not None else holding(grid, W, scale_dtype(stored))

    def part_keys(self, matrix: Matrix) -> tuple[str, ...]:
        return (scale_key(matrix),)

    def parts_like(self, matrix: Matrix, stored: torch.dtype) -> list[Like]:
        return [((matrix.shape[0], self.grid.groups(matrix.shape[1])), self.grid.scale_dtype(stored))]

    def read_parts(self, checkpoint: Checkpoint, matrix: Matrix) -> tuple[Tensor, ...]:
        return (read_scales(checkpoint, matrix, self.grid),) if checkpoint.pruning.includes(matrix.block) else ()

    def notes(self, matrices: Iterable[Matrix]) -> list[str]:
        return [stored_as_usual(self.grid, matrices)]

    def round_flops(self, rows: int, columns: int) -> float:
        return flops(rows, columns)

    def rounded(
        self, matrix: Matrix, problem: LayerProblem, solution: Solution, rows: Rows, stored: torch.dtype
    ) -> tuple[Solution, tuple[Tensor, ...]]:
        before, grid = solution.W != 0, self.grid_of(matrix)
        lying = self._holding(matrix, problem.W, stored)
        grid = lying if rows.total(int(lying == grid)) == 0 else grid  # one type for the rows of all processes
        solution, scales = onto_grid(problem, solution, grid, scale_dtype(stored))
        after = solution.W != 0
        lost, raised = (rows.total(int(each.count_nonzero())) for each in (before & ~after, after & ~before))
        stats = {**solution.stats, "rounded_to_zero": lost}
        if raised:  # kept weights of 0
            stats["revived_by_rounding"] = raised
        return replace(solution, stats=stats), (rows.joined(scales).to(self.grid.scale_dtype(stored)),)

    def nearest(self, matrix: Matrix, W: Tensor, stored: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        weights, scales = to_nearest(W, self._holding(matrix, W, stored), scale_dtype(stored))
        return weights, (scales.to(self.grid.scale_dtype(stored)),)

    def project(self, matrix: Matrix, W: Tensor, parts: Sequence[Tensor]) -> Tensor:
        (scales,) = parts
        return self.grid_of(matrix).project(W, scales.float(), scales.dtype, same_zeros=True)

    def added(self, checkpoint: Checkpoint, matrices: list[Matrix]) -> dict[str, Entry]:
        return places(checkpoint, matrices, self.grid)

    def verify(self, directory: Path, checkpoint: Checkpoint, matrices: list[Matrix], zeros: Mapping[str, int]) -> None:
        super().verify(directory, checkpoint, matrices, zeros)
        verify_grid(directory, matrices, self.grid)


# The two sparse factors that matrices were made of: a file beside the checkpoint's own, which has their products.

#: In a folder of its own, because some programs load every safetensors file that lies beside config.json.
FACTORS_FILE = "factors/factors.safetensors"
STORED_AS_PRODUCTS = (
    "matrices are stored as the products of their two factors, dense and no smaller than before, so that they load "
    f"wherever the dense model does; the sparse factors are in {FACTORS_FILE}, and 'niwaki pack' writes these alone"
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
    files = (FACTORS_FILE,)

    def _is_product(self, matrix: Matrix) -> bool:
        return PruningConfig(blocks=self.blocks).includes(matrix.block)

    def part_keys(self, matrix: Matrix) -> tuple[str, ...]:
        return factor_keys(matrix.key, self.grid is not None) if self._is_product(matrix) else ()

    def parts_like(self, matrix: Matrix, stored: torch.dtype) -> list[Like]:
        if not self._is_product(matrix):
            return []
        (rows, columns), inner = matrix.shape, min(matrix.shape)
        factors = (rows, inner), (inner, columns)
        scales = [(height, self.grid.groups(width)) for height, width in factors] if self.grid else []
        return [*((shape, stored) for shape in factors), *((shape, scale_dtype(stored)) for shape in scales)]

    def read_parts(self, checkpoint: Checkpoint, matrix: Matrix) -> tuple[Tensor, ...]:
        """(out, n) and (n, in) in their own dtype, and on a ``grid`` the scales of both; none of what is no product.

        CheckpointError where they are not there, or cannot be those of ``matrix``.
        """
        if not self._is_product(matrix):
            return ()
        file, places = checkpoint.path / FACTORS_FILE, self.added(checkpoint, [matrix])
        why = f", as factors on {self.grid} have it" if self.grid else ""
        parts = tuple(read_beside(file, places, f"factors of {matrix.key!r}", why))
        for key, scales in zip([*places][2:], parts[2:], strict=True):
            assert self.grid  # without one there are no scales
            check_scales(scales, file, key, self.grid)
        return parts

    def notes(self, matrices: Iterable[Matrix]) -> list[str]:
        return [STORED_AS_PRODUCTS]

    def round_flops(self, rows: int, columns: int) -> float:
        return factor_flops(rows, columns) if self.grid else 0.0

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

    def added(self, checkpoint: Checkpoint, matrices: list[Matrix]) -> dict[str, Entry]:
        tensors = {}
        for matrix in matrices:
            like = self.parts_like(matrix, checkpoint.dtype(matrix.key))
            for key, (shape, dtype) in zip(self.part_keys(matrix), like, strict=True):
                tensors[key] = dtype, shape
        return new_shard(FACTORS_FILE, tensors)

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


def zeros_of(matrix: Matrix, checkpoint: Checkpoint) -> int:
    """How many weights of a matrix are zero, or fewer in its two factors."""
    weight_format = format_of(checkpoint)
    return weight_format.zeros(matrix.read(checkpoint), weight_format.read_parts(checkpoint, matrix))


def sparsity(model: StreamedModel) -> float:
    """The fraction of zeros in all matrices of the blocks of ``model``, as its files have them."""
    zeros = sum(zeros_of(matrix, model.checkpoint) for matrix in model.matrices())
    return zeros / sum(matrix.size for matrix in model.matrices())


def format_of(checkpoint: Checkpoint) -> WeightFormat:
    """What the matrices of ``checkpoint`` were made: two factors, numbers of a grid, or weights as of any model.

    CheckpointError where its configuration names a grid that there is not.
    """
    grid = grid_of(checkpoint)
    if checkpoint.pruning.has_factors:
        return Factored(whole_numbers_of(checkpoint), checkpoint.pruning.blocks)
    if grid is None:
        return WeightFormat()
    return OnGrid(grid, cache(partial(bits_in, checkpoint, grid=grid))) if grid.is_mixed else OnGrid(grid)


# Pruned matrices put back into the FP8 or MXFP4 of the files that they are from.


@dataclass(frozen=True)
class KeptFormat(WeightFormat):
    """The format of each matrix of ``checkpoint`` that is in FP8 or MXFP4; UsageError where none is."""

    checkpoint: Checkpoint

    def __post_init__(self) -> None:
        if not any(isinstance(each, EncodedFloats) for each in self.checkpoint.encoded.values()):
            raise UsageError(
                f"{self.checkpoint.path} is neither in FP8 nor in MXFP4, so there is no format to keep; leave out "
                "--keep-format"
            )

    def __str__(self) -> str:
        return self.checkpoint.encoded_as

    def _encoded(self, matrix: Matrix) -> EncodedFloats | None:
        """How the files have ``matrix``; None where its numbers are stored as they are."""
        encoded = self.checkpoint.encoded.get(matrix.key)
        return encoded if isinstance(encoded, EncodedFloats) else None

    def of(self, matrix: Matrix) -> TiledFloats | None:
        """The format of ``matrix`` (out, in); None for one whose numbers are stored as they are."""
        if (encoded := self._encoded(matrix)) is None:
            return None
        return encoded.format.transposed if matrix.is_stored_transposed else encoded.format

    def scales(self, matrix: Matrix) -> Tensor:
        """The scales of ``matrix`` in the dense model's files, as its format has them."""
        encoded = self._encoded(matrix)
        assert encoded
        place = encoded.scales.at(matrix.index)
        tiles = encoded.tiles(read_tensor(self.checkpoint.path / place.shard, encoded.keys[1], place))
        return tiles.T if matrix.is_stored_transposed else tiles

    def parts_like(self, matrix: Matrix, stored: torch.dtype) -> list[Like]:
        numbers = self.of(matrix)
        return [(numbers.tiles(matrix.shape), torch.float32)] if numbers else []

    def is_separable(self, matrix: Matrix) -> bool:
        return self.of(matrix) is None  # rows share scales

    def rounded(
        self, matrix: Matrix, problem: LayerProblem, solution: Solution, rows: Rows, stored: torch.dtype
    ) -> tuple[Solution, tuple[Tensor, ...]]:
        numbers = self.of(matrix)
        assert numbers
        solution, scales = onto_floats(problem, solution, numbers, self.scales(matrix).to(problem.W.device))
        return solution, (scales,)

    def project(self, matrix: Matrix, W: Tensor, parts: Sequence[Tensor]) -> Tensor:
        numbers, (scales,) = self.of(matrix), parts
        assert numbers
        return numbers.project(W, numbers.factors(scales, W.shape), W != 0)

    def places(self, matrix: Matrix) -> list[tuple[str, int | None]]:
        encoded = self._encoded(matrix)
        return [(key, matrix.index) for key in encoded.keys] if encoded else super().places(matrix)

    def write(self, writer: CheckpointWriter, matrix: Matrix, stored: Tensor, parts: Sequence[Tensor]) -> None:
        """Writes ``stored`` in the format of the files; OutputError unless the very values can be read again."""
        encoded = self._encoded(matrix)
        if encoded is None:
            super().write(writer, matrix, stored, parts)
            return
        (scales,) = parts
        tiles, values = scales.cpu(), stored.cpu()
        codes = encoded.encode(values, tiles.T if matrix.is_stored_transposed else tiles)
        if not torch.equal(encoded.decode(*codes), values):
            raise OutputError(f"{matrix.label} has weights that are not in its format, {encoded}")
        for key, part in zip(encoded.keys, codes, strict=True):
            writer.write(key, part, matrix.index)

    def read(self, writer: CheckpointWriter, matrix: Matrix) -> Tensor:
        parts = [writer.read(*place) for place in self.places(matrix)]
        encoded = self._encoded(matrix)
        return encoded.decode(*parts) if encoded else parts[0]

    def verify(self, directory: Path, checkpoint: Checkpoint, matrices: list[Matrix], zeros: Mapping[str, int]) -> None:
        verify(directory, checkpoint, {})
        written = Checkpoint(directory)
        for key, count in zeros.items():
            check_zeros(directory, key, written.read(key), count)
