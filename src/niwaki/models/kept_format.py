"""Pruned matrices put back into the FP8 or MXFP4 of the files that they are from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from niwaki.checkpoints.reading import Checkpoint
from niwaki.checkpoints.tensors import read_tensor
from niwaki.checkpoints.writing import CheckpointWriter, check_zeros, verify
from niwaki.errors import OutputError, UsageError
from niwaki.layer.floats import TiledFloats
from niwaki.layer.patterns.rows import Rows
from niwaki.layer.problem import LayerProblem, Solution
from niwaki.layer.rounding import onto_floats
from niwaki.models.layout import Matrix
from niwaki.models.weight_format import Like, WeightFormat


@dataclass(frozen=True)
class KeptFormat(WeightFormat):
    """The format of each matrix of ``checkpoint`` that is in FP8 or MXFP4; UsageError where none is."""

    checkpoint: Checkpoint

    def __post_init__(self) -> None:
        if not self.checkpoint.is_encoded:
            raise UsageError(
                f"{self.checkpoint.path} is neither in FP8 nor in MXFP4, so there is no format to keep; leave out "
                "--keep-format"
            )

    def __str__(self) -> str:
        return " and ".join(sorted({str(each) for each in self.checkpoint.encoded.values()}))

    def of(self, matrix: Matrix) -> TiledFloats | None:
        """The format of ``matrix`` (out, in); None for one whose numbers are stored as they are."""
        if (encoded := self.checkpoint.encoded.get(matrix.key)) is None:
            return None
        return encoded.format.transposed if matrix.is_stored_transposed else encoded.format

    def scales(self, matrix: Matrix) -> Tensor:
        """The scales of ``matrix`` in the dense model's files, as its format has them."""
        encoded = self.checkpoint.encoded[matrix.key]
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
        encoded = self.checkpoint.encoded.get(matrix.key)
        return [(key, matrix.index) for key in encoded.keys] if encoded else super().places(matrix)

    def write(self, writer: CheckpointWriter, matrix: Matrix, stored: Tensor, parts: Sequence[Tensor]) -> None:
        """As of :class:`WeightFormat`; OutputError unless the very values can be read again."""
        encoded = self.checkpoint.encoded.get(matrix.key)
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
        encoded = self.checkpoint.encoded.get(matrix.key)
        return encoded.decode(*parts) if encoded else parts[0]

    def verify(self, directory: Path, checkpoint: Checkpoint, matrices: list[Matrix], zeros: Mapping[str, int]) -> None:
        verify(directory, checkpoint, {})
        written = Checkpoint(directory)
        for key, count in zeros.items():
            check_zeros(directory, key, written.read(key), count)
