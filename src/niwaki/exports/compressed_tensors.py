"""Weights on a grid as packed integers: the format ``pack-quantized`` of compressed-tensors."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from niwaki.checkpoints.reading import Checkpoint
from niwaki.checkpoints.shards import Shards
from niwaki.errors import CheckpointError, UnsupportedModelError, UsageError
from niwaki.files import replace_file
from niwaki.layer.grid import Grid
from niwaki.models.extra import ExtraTensors, find_extra
from niwaki.models.scales import grid_of, read_scales, stored_as_usual, verify_grid
from niwaki.models.streamed import StreamedModel
from niwaki.records.progress import Progress
from niwaki.records.record import Record
from niwaki.runs.conversion import Form
from niwaki.runs.model_card import replace_note

_BELOW_0 = (
    "some scales are below 0, which transformers and vLLM multiply with as with others; not so vLLM 0.25.1 with "
    "VLLM_MARLIN_INPUT_DTYPE=int8, which is not to be set: https://github.com/vllm-project/vllm/issues/48905"
)
#: The note that replaces the one that weights are not packed.
_PACKED = (
    "weights are packed integers in the format 'pack-quantized' of compressed-tensors, which has to be installed to "
    "load them in transformers"
)


class CompressedTensors(Form):
    """A model whose weights are on a grid, to be written as packed integers.

    A matrix becomes ``weight_packed`` (out, in bits / 32) int32, ``weight_scale`` (out, groups) and ``weight_shape``;
    all else is copied. ``name`` is what errors call the model: UsageError where its weights are not on a grid, or it
    has other than 4 or 8 bits; UnsupportedModelError where a matrix is not the weight of a linear layer of its own,
    with the same name in the files.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, progress: Progress) -> None:
        super().__init__(checkpoint, progress)
        if checkpoint.pruning.has_factors:
            raise UsageError(
                f"the matrices of {name} are products of two sparse factors, which compressed-tensors does not have; "
                "'niwaki pack' writes the factors"
            )
        grid, blocks = grid_of(checkpoint), checkpoint.pruning.blocks
        if grid is None:
            raise UsageError(
                f"{name} has no weights on a grid, which compressed-tensors needs: quantize it first, as in 'niwaki "
                "quantize MODEL OUT int4:128'; 'niwaki pack' writes a pruned model without its zeros"
            )
        if grid.is_mixed:
            raise UsageError(
                f"{name} has matrices of mixed bits ({grid}), and compressed-tensors has one number for all; 'niwaki "
                "pack' writes them"
            )
        if grid.bits not in (4, 8):  # which kernels of other programs take
            raise UsageError(
                f"compressed-tensors has 4 or 8 bits, and the weights of {name} have {grid.bits}; 'niwaki pack' writes "
                "them"
            )
        self._grid, self._model = grid, StreamedModel(checkpoint, "cpu")
        if self._model.model.base_model_prefix == "transformer" and self._model.pairs is not None:  # T5 and its kin
            raise UnsupportedModelError(
                f"{name}: transformers cannot load packed integers into {type(self._model.model).__name__}; use the "
                "model as it is, or 'niwaki pack'"
            )
        if blocks is not None:
            self._model.limit(range(*blocks))
            if not self._model.matrices():
                raise CheckpointError(
                    f"{checkpoint.path / 'config.json'} says that blocks {blocks} are pruned, but there are no such "
                    "blocks"
                )
        self._config = {**checkpoint.config, "quantization_config": _config(self._model, grid)}

    def check(self, name: str) -> None:
        """CheckpointError where scales cannot be those of the weights, OutputError where these have left the grid."""
        verify_grid(self.checkpoint.path, self._model.matrices(), self._grid)

    def write(self, directory: Path, name: str) -> list[str]:
        """Writes the shards, and corrects what the other files say of them."""
        self._note(directory)
        least = self._write_shards(directory)
        replace_file(directory / "config.json", json.dumps(self._config, indent=2) + "\n")
        return [_BELOW_0] if least < 0 else []

    def _write_shards(self, directory: Path) -> float:
        """Writes the shards, in which three tensors replace each matrix, and their index; the least of all scales."""
        shards, checkpoint, grid = Shards(directory), self.checkpoint, self._grid
        matrices, count, least = {matrix.key: matrix for matrix in self._model.matrices()}, 0, 0.0
        for shard in checkpoint.shards:
            tensors: dict[str, Tensor] = {}
            for key in (key for key, entry in checkpoint.entries.items() if entry.shard == shard):
                W, count = checkpoint.read(key), count + 1
                self.progress.status("exporting, tensor", count, len(checkpoint.entries))
                if key not in matrices:
                    tensors[key] = W
                    continue
                scales = read_scales(checkpoint, matrices[key], grid)
                least = min(least, float(scales.min()))
                packed = packed_integers(grid.codes(W.float(), scales.float()), grid.bits)
                tensors |= {f"{key}_packed": packed, f"{key}_scale": scales, f"{key}_shape": torch.tensor(W.shape)}
            shards.write(shard, tensors, tensors.__getitem__)
        shards.finish()
        return least

    def _note(self, directory: Path) -> None:
        """Replaces the note on weights that are not packed, in the record and on the model card."""
        file, old = directory / "niwaki.json", stored_as_usual(self._grid, self._model.matrices())
        if file.is_file():
            record = Record.load(file)
            record.notes = [_PACKED if note == old else note for note in record.notes]
            record.save(file)
            replace_note(directory, old, _PACKED)


def packed_integers(codes: Tensor, bits: int) -> Tensor:
    """(out, in bits / 32 rounded up) int32: the whole numbers q (out, in) as q + 2^(bits-1), the first ones lowest."""
    each = 32 // bits
    unsigned = codes.to(torch.int64) + 2 ** (bits - 1)
    unsigned = nn.functional.pad(unsigned, (0, -codes.shape[1] % each)).unflatten(1, (-1, each))
    words = (unsigned << (bits * torch.arange(each))).sum(dim=2)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def _config(model: StreamedModel, grid: Grid) -> dict[str, Any]:
    """``quantization_config`` of config.json."""
    matrices = {model.places[matrix.block] + matrix.name: matrix for matrix in model.matrices()}
    for name, matrix in matrices.items():
        if matrix.transposed or not matrix.is_module or matrix.key != f"{name}.weight" or matrix.blocks:
            raise UnsupportedModelError(
                f"{matrix.key!r} of {model.checkpoint.path} cannot be packed: it is not the weight of a linear layer "
                "of its own; use the model as it is"
            )
    linear = [name for name, module in model.model.named_modules() if isinstance(module, nn.Linear)]
    # Other programs run draft layers too, and would look for packed integers there.
    linear += [key.removesuffix(".weight") for key in _matrices_of(find_extra(model), model.checkpoint)]
    groups = {"strategy": "group" if grid.group else "channel", "group_size": grid.group}
    weights = {"num_bits": grid.bits, "type": "int", "symmetric": True, **groups, "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": [name for name in linear if name not in matrices],
    }


def _matrices_of(extra: list[ExtraTensors], checkpoint: Checkpoint) -> list[str]:
    """The keys of tensors that may be the weights of linear layers, but not of transformers' model."""
    keys = [key for each in extra for key in each.keys]
    return [key for key in keys if key.endswith(".weight") and len(checkpoint.entries[key].shape) > 1]
