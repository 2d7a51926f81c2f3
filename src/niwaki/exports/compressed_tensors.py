"""Weights on a grid as packed integers: the format ``pack-quantized`` of compressed-tensors."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from niwaki.checkpoints.reading import Checkpoint
from niwaki.checkpoints.writing import Shards
from niwaki.errors import CheckpointError, UnsupportedModelError, UsageError
from niwaki.files import replace_file
from niwaki.layer.grid import Grid
from niwaki.models.scales import read_scales, stored_as_usual, verify_grid, whole_numbers_of, why_no_layer
from niwaki.models.streamed import StreamedModel
from niwaki.records.progress import Progress
from niwaki.records.wording import markdown
from niwaki.runs.card import check_card, restate, write_card_of_form
from niwaki.runs.conversion import Conversion

_CARD = """
# {name}, packed integers

Weights as integers of {bits} bits in the format compressed-tensors: for vLLM, and for transformers where the package
compressed-tensors is installed.

    vllm serve DIR
"""
_BELOW_0 = (
    "some scales are below 0, which transformers and vLLM multiply with as with others; not so vLLM 0.25.1 with "
    "VLLM_MARLIN_INPUT_DTYPE=int8, which is not to be set: https://github.com/vllm-project/vllm/issues/48905"
)
#: The note that replaces the one that weights are not packed.
_PACKED = (
    "weights are packed integers in the format 'pack-quantized' of compressed-tensors, which has to be installed to "
    "load them in transformers"
)
#: And of mixtures, whose experts transformers runs as one tensor.
_EXPERTS = "transformers unpacks experts as it loads them: in memory they are as large as before"


class CompressedTensors(Conversion):
    """A model whose weights are on a grid, to be written as packed integers.

    A matrix becomes ``weight_packed`` (out, in bits / 32) int32, ``weight_scale`` (out, groups) and ``weight_shape``;
    all else is copied, and names are those of the files, also of experts, which transformers unpacks and joins where it
    loads them. ``name`` is what errors call the model: UsageError where its weights are not on a grid, or it has other
    than 4 or 8 bits; UnsupportedModelError where a matrix is not the weight of a linear layer, or transformers cannot
    load the result.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, progress: Progress) -> None:
        super().__init__(checkpoint, progress)
        check_card(checkpoint.path)
        if checkpoint.pruning.has_factors:
            raise UsageError(
                f"the matrices of {name} are products of two sparse factors, which compressed-tensors does not have; "
                "'niwaki pack' writes the factors"
            )
        grid, blocks = whole_numbers_of(checkpoint), checkpoint.pruning.blocks
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
        if blocks is not None:
            mixtures = {matrix.block for matrix in self._model.matrices() if matrix.expert is not None}
            if len(mixtures & {*range(*blocks)}) not in (0, len(mixtures)):
                raise UnsupportedModelError(
                    f"{name} has experts in its blocks {blocks} on a grid and others that are not, and transformers "
                    "loads packed integers of either all or none; quantize all blocks, or use 'niwaki pack'"
                )
            self._model.limit(range(*blocks))
            if not self._model.matrices():
                raise CheckpointError(
                    f"{checkpoint.path / 'config.json'} says that blocks {blocks} are pruned, but there are no such "
                    "blocks"
                )
        _check_loads(self._model, name)
        self._config = {**checkpoint.config, "quantization_config": _config(self._model, grid)}

    def check(self, name: str) -> None:
        """CheckpointError where scales cannot be those of the weights, OutputError where these have left the grid."""
        verify_grid(self.checkpoint.path, self._model.matrices(), self._grid)

    def write(self, directory: Path, name: str) -> list[str]:
        """Writes the shards, and corrects what the other files say of them."""
        restate(directory, stored_as_usual(self._grid, self._model.matrices()), _PACKED)
        text, own = (
            _CARD.format(name=markdown(name), bits=self._grid.bits),
            "the card of the model that it was made from",
        )
        write_card_of_form(directory, "transformers", {"niwaki", "compressed-tensors"}, text, own)
        least = self._write_shards(directory)
        replace_file(directory / "config.json", json.dumps(self._config, indent=2) + "\n")
        has_experts = any(matrix.expert is not None for matrix in self._model.matrices())
        return [*([_BELOW_0] if least < 0 else []), *([_EXPERTS] if has_experts else [])]

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


def packed_integers(codes: Tensor, bits: int) -> Tensor:
    """(out, in bits / 32 rounded up) int32: the whole numbers q (out, in) as q + 2^(bits-1), the first ones lowest."""
    each = 32 // bits
    unsigned = codes.to(torch.int64) + 2 ** (bits - 1)
    unsigned = nn.functional.pad(unsigned, (0, -codes.shape[1] % each)).unflatten(1, (-1, each))
    words = (unsigned << (bits * torch.arange(each))).sum(dim=2)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def _config(model: StreamedModel, grid: Grid) -> dict[str, Any]:
    """``quantization_config`` of config.json."""
    modules, stored = _modules(model), {matrix.key for matrix in model.matrices()}
    linear = [name for name, module in model.model.named_modules() if isinstance(module, nn.Linear)]
    # vLLM has the files' names, and linear layers where transformers has none: routers, and draft layers.
    others = [key for key, entry in model.checkpoint.entries.items() if len(entry.shape) > 1 and key not in stored]
    ignored = [name for name in linear if name not in modules]
    ignored += [key.removesuffix(".weight") for key in others if key.endswith(".weight")]
    groups = {"strategy": "group" if grid.group else "channel", "group_size": grid.group}
    weights = {"num_bits": grid.bits, "type": "int", "symmetric": True, **groups, "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": list(dict.fromkeys(ignored)),
    }


def _modules(model: StreamedModel) -> set[str]:
    """Where transformers' model has the matrices that are linear layers of their own."""
    return {model.places[matrix.block] + matrix.name for matrix in model.matrices() if matrix.is_module}


def _check_loads(model: StreamedModel, name: str) -> None:
    """UnsupportedModelError where transformers cannot have packed integers in the place of all matrices."""
    for matrix in model.matrices():
        if why := why_no_layer(matrix):
            raise UnsupportedModelError(
                f"compressed-tensors has linear layers alone, and {matrix.key!r} of {name} is none: {why}; 'niwaki "
                "pack' writes it"
            )
    whole = copy.deepcopy(model.model)
    for path in _modules(model):
        del whole.get_submodule(path).weight
    try:
        whole.initialize_weights()  # as where it loads a model: some kinds look for the weights that are not there
    except AttributeError as error:
        raise UnsupportedModelError(
            f"{name}: transformers cannot load packed integers into {type(model.model).__name__}; use the model as it "
            "is, or 'niwaki pack'"
        ) from error
