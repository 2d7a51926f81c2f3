"""Formats of compressed-tensors, for vLLM, SGLang and transformers: packed integers, and 8 bits for inputs too."""

import copy
import json
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from niwaki.checkpoints.reading import Checkpoint
from niwaki.checkpoints.writing import Shards
from niwaki.errors import CheckpointError, UnsupportedModelError, UsageError
from niwaki.files import replace_file
from niwaki.layer.floats import E4M3, TiledFloats
from niwaki.layer.grid import FloatGrid, Grid, fp4_codes, scale_dtype, shared_power
from niwaki.models.layout import Matrix, fused
from niwaki.models.scales import (
    bits_in,
    grid_of,
    layers_of_expert,
    read_scales,
    stored_as_usual,
    verify_grid,
    whole_numbers_of,
    why_no_layer,
)
from niwaki.models.streamed import StreamedModel
from niwaki.records.progress import Progress
from niwaki.records.wording import counted, markdown
from niwaki.runs.card import check_card, restate, write_card_of_form
from niwaki.runs.conversion import Conversion

_CARD = """
# {name}, {what}

{text} in the format compressed-tensors: for vLLM, and for transformers where the package compressed-tensors is
installed.

    vllm serve DIR
"""
_BELOW_0 = (
    "some scales are below 0, which transformers and vLLM multiply with as with others; not so vLLM 0.25.1 with "
    "VLLM_MARLIN_INPUT_DTYPE=int8, which is not to be set: https://github.com/vllm-project/vllm/issues/48905"
)
#: The note that replaces the one that weights are not packed.
_PACKED = (
    "weights are packed in the format {!r} of compressed-tensors, which has to be installed to "
    "load them in transformers"
)
#: What all servers have kernels for.
_USUAL = {4, 8}
_NEW = (
    "other bits than 4 and 8 are packed without gaps, as compressed-tensors 0.17 and vLLM 0.33 have them; older ones "
    "read other numbers"
)
_WIDER = (
    "{} of fewer bits take the space of more, and keep their whole numbers: servers compute with them as one with "
    "others; stages 'quantize' and 'export' in one run choose bits with that in mind"
)
#: And of mixtures, whose experts transformers runs as one tensor.
_NO_EXPERTS = "transformers (up to 5.24) loads no experts in this format; it is for vLLM"
#: Types of models whose files have experts in one tensor, that servers read one by one too, and if transformers does.
_ONE_BY_ONE = {
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), True),
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_vl_moe_text", "gemma4", "gemma4_text"), False),
}
_EXPERTS = "transformers unpacks experts as it loads them: in memory they are as large as before"


class CompressedTensors(Conversion):
    """A model whose matrices are to be written as codes and scales.

    A matrix becomes what :meth:`parts` makes of it, and all else is copied. Names are those of the files, also of
    experts, which transformers joins where it loads them. ``name`` is what errors call the model: UsageError where it
    is not one for the format; UnsupportedModelError where a matrix is not the weight of a linear layer, or transformers
    cannot load the result.
    """

    #: As config.json calls it, and of which type inputs are that are rounded to 8 bits, a token at a time, if they are.
    format: ClassVar[str]
    inputs: ClassVar[str] = ""
    #: A grid for an example of what it is made of, and whether matrices lose the name that transformers has for them.
    example: ClassVar[str] = "int4:64"
    renames: ClassVar[bool] = False
    #: What there is to say of a mixture.
    of_experts: ClassVar[str] = _EXPERTS
    #: What the card says that the model is, and that its weights are.
    what: ClassVar[str]
    text: ClassVar[str]

    def __init__(self, checkpoint: Checkpoint, name: str, progress: Progress) -> None:
        super().__init__(checkpoint, progress)
        check_card(checkpoint.path)
        if checkpoint.pruning.has_factors:
            raise UsageError(
                f"the matrices of {name} are products of two sparse factors, which compressed-tensors does not have; "
                "'niwaki pack' writes the factors"
            )
        self._model = StreamedModel(checkpoint, "cpu")
        #: By key, the bits of each matrix in the files.
        self._bits: dict[str, int] = {}

    def check(self, name: str) -> None:
        self._bits = {matrix.key: 8 for matrix in self._model.matrices()}

    def _check_loads(self, name: str) -> None:
        """UnsupportedModelError where transformers cannot have other tensors in the place of all matrices."""
        model = self._model
        for matrix in model.matrices():
            if why := why_no_layer(matrix, self.checkpoint.config["model_type"] in _ONE_BY_ONE):
                raise UnsupportedModelError(
                    f"compressed-tensors has linear layers alone, and {matrix.key!r} of {name} is none: {why}; 'niwaki "
                    "pack' writes it"
                )
        if not self.renames:
            return
        whole = copy.deepcopy(model.model)
        for path in _modules(model):
            del whole.get_submodule(path).weight
        try:
            whole.initialize_weights()  # as where it loads a model: some kinds look for the weights that are not there
        except AttributeError as error:
            raise UnsupportedModelError(
                f"{name}: transformers cannot load packed integers into {type(model.model).__name__}; use the model as "
                "it is, or 'niwaki pack'"
            ) from error

    @abstractmethod
    def parts(self, matrix: Matrix, W: Tensor) -> dict[str, Tensor]:
        """The tensors to store of a matrix, by their names."""

    @abstractmethod
    def weights(self, bits: int) -> dict[str, Any]:
        """What config.json says of matrices of so many ``bits``."""

    def restate(self, directory: Path) -> None:
        """Corrects the notes of the record."""

    def notes(self) -> dict[str, bool]:
        """What there is to say of the result, each with whether it is true."""
        mixed = [matrix for matrix in self._model.matrices() if matrix.expert is not None]
        loads = not any(map(layers_of_expert, mixed)) or _ONE_BY_ONE[self.checkpoint.config["model_type"]]
        return {self.of_experts if loads else _NO_EXPERTS: bool(mixed)}

    def write(self, directory: Path, name: str) -> list[str]:
        """Writes the shards, and corrects what the other files say of them."""
        self.restate(directory)
        bits = " or ".join(map(str, sorted({*self._bits.values()})))
        text = _CARD.format(name=markdown(name), what=self.what, text=self.text.format(bits=bits))
        own = "the card of the model that it was made from"
        write_card_of_form(directory, "transformers", {"niwaki", "compressed-tensors"}, text, own)
        self._write_shards(directory)
        config = {**self.checkpoint.config, "quantization_config": _config(self, self._model, self._bits)}
        replace_file(directory / "config.json", json.dumps(config, indent=2) + "\n")
        return [note for note, said in self.notes().items() if said]

    def _write_shards(self, directory: Path) -> None:
        """Writes the shards, in which others take the place of each matrix, and their index."""
        shards, checkpoint = Shards(directory), self.checkpoint
        matrices, count = defaultdict[str, list[Matrix]](list), 0
        for matrix in self._model.matrices():
            matrices[matrix.key].append(matrix)
        for shard in checkpoint.shards:
            tensors: dict[str, Tensor] = {}
            for key in (key for key, entry in checkpoint.entries.items() if entry.shard == shard):
                count += 1
                self.progress.status("exporting, tensor", count, len(checkpoint.entries))
                for matrix in matrices.get(key, ()):
                    tensors |= _by_layers(matrix, self.parts(matrix, matrix.read(checkpoint)))
                if key not in matrices:
                    tensors[key] = checkpoint.read(key)
            shards.write(shard, tensors, tensors.__getitem__)
        shards.finish()


class PackedIntegers(CompressedTensors):
    """Weights on a grid, as packed integers.

    A matrix becomes ``weight_packed`` (out, in bits / 32) int32, ``weight_scale`` (out, groups) and ``weight_shape``.
    Of mixed bits each matrix has its own, and those that servers make one of have the most of them.
    """

    format, renames = "pack-quantized", True
    what = "packed integers"
    text = "Weights as integers of {bits} bits"

    def __init__(self, checkpoint: Checkpoint, name: str, progress: Progress) -> None:
        super().__init__(checkpoint, name, progress)
        grid, blocks = self.grid_of(checkpoint), checkpoint.pruning.blocks
        if grid is None:
            raise UsageError(
                f"{name} has no weights on a grid, which compressed-tensors needs: quantize it first, as in 'niwaki "
                f"quantize MODEL OUT {self.example}', or give the format fp8, for which no text is needed; 'niwaki "
                "pack' writes a pruned model without its zeros"
            )
        self._grid, self._least = grid, 0.0
        if blocks is not None:
            experts = [matrix for matrix in self._model.matrices() if matrix.expert is not None]
            mixtures = {matrix.block for matrix in experts}
            some = len(mixtures & {*range(*blocks)}) or any(matrix.index is not None for matrix in experts)
            if some and not mixtures <= {*range(*blocks)}:
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
        self._check_loads(name)

    def grid_of(self, checkpoint: Checkpoint) -> Grid | None:
        """The grid of the weights; UsageError where it is none for the format."""
        return whole_numbers_of(checkpoint)

    def check(self, name: str) -> None:
        """CheckpointError where scales cannot be those of the weights, OutputError where these have left the grid."""
        matrices, grid = self._model.matrices(), self._grid
        verify_grid(self.checkpoint.path, matrices, grid)
        own = {matrix.entry: int(bits_in(self.checkpoint, matrix, grid)) for matrix in matrices}
        most = Counter[Any]()
        for matrix in matrices:
            most[fused(matrix)] = max(most[fused(matrix)], own[matrix.entry])
        self._bits = {matrix.key: most[fused(matrix)] for matrix in matrices}
        self._wider = sum(self._bits[key] > bits for (key, _), bits in own.items())

    def parts(self, matrix: Matrix, W: Tensor) -> dict[str, Tensor]:
        key, scales = matrix.key, read_scales(self.checkpoint, matrix, self._grid)
        self._least = min(self._least, float(scales.min()))
        codes = self._grid.codes(W.float(), scales.float())
        return {**self.codes(key, codes), f"{key}_scale": scales}

    def codes(self, key: str, codes: Tensor) -> dict[str, Tensor]:
        """The tensors for the whole numbers of a matrix."""
        return {f"{key}_packed": packed_integers(codes, self._bits[key]), f"{key}_shape": torch.tensor(codes.shape)}

    def weights(self, bits: int) -> dict[str, Any]:
        group = self._grid.group
        kind = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False}
        return {**kind, "strategy": "group" if group else "channel", "group_size": group}

    def restate(self, directory: Path) -> None:
        restate(directory, stored_as_usual(self._grid, self._model.matrices()), _PACKED.format(self.format))

    def notes(self) -> dict[str, bool]:
        return {
            _BELOW_0: self._least < 0,
            **super().notes(),
            _NEW: not {*self._bits.values()} <= _USUAL,
            _WIDER.format(counted(self._wider, "matrix", "matrices")): self._wider > 0,
        }


class PackedFloats(PackedIntegers):
    """Weights on a :class:`.FloatGrid`, in NVFP4 or MXFP4.

    A matrix becomes ``weight_packed`` (out, in / 2) uint8 and ``weight_scale`` (out, groups): float8_e4m3fn, and with
    it ``weight_global_scale`` (1) float32, by which it is divided, or the exponents of powers of two, uint8. Matrices
    that servers make one of have the same global scale.
    """

    of_experts = _NO_EXPERTS
    what = "floating-point numbers of 4 bits"
    text = "Weights as floating-point numbers of {bits} bits"

    def __init__(self, checkpoint: Checkpoint, name: str, progress: Progress) -> None:
        super().__init__(checkpoint, name, progress)
        self.format = f"{self._grid}-pack-quantized"  # type: ignore[misc]
        if str(self._grid) == "mxfp4":
            self.of_experts = _EXPERTS  # type: ignore[misc]
        #: Exponents of what scales are multiples of, by what servers make one of.
        self._powers: dict[Hashable, int] = {}

    def grid_of(self, checkpoint: Checkpoint) -> Grid | None:
        grid = grid_of(checkpoint)
        return grid if isinstance(grid, FloatGrid) else None

    def check(self, name: str) -> None:
        super().check(name)
        if str(self._grid) != "nvfp4":
            return
        together = defaultdict[Hashable, list[Matrix]](list)
        for matrix in self._model.matrices():
            together[self._shares(matrix)].append(matrix)
        for which, matrices in together.items():
            scales = [read_scales(self.checkpoint, matrix, self._grid).float().flatten() for matrix in matrices]
            if (power := shared_power(torch.cat(scales))) is None:
                raise UnsupportedModelError(
                    f"{name}: scales of {', '.join(matrix.key for matrix in matrices)}, which servers make one matrix "
                    "of, differ by more than numbers in FP8 can; quantize to mxfp4 instead"
                )
            self._powers[which] = power

    @staticmethod
    def _shares(matrix: Matrix) -> Hashable:
        """The same for matrices that servers make one of, also of an expert, of which each has its own scales."""
        return fused(replace(matrix, expert=None))

    def parts(self, matrix: Matrix, W: Tensor) -> dict[str, Tensor]:
        key, scales = matrix.key, read_scales(self.checkpoint, matrix, self._grid).float()
        packed = {f"{key}_packed": fp4_codes(self._grid.codes(W.float(), scales))}
        # Codes are twice the numbers of E2M1.
        if (power := self._powers.get(self._shares(matrix))) is None:
            return {**packed, f"{key}_scale": (torch.frexp(scales)[1] + 127).to(torch.uint8)}
        shared = torch.tensor([2.0 ** -(power + 1)])
        return {**packed, f"{key}_scale": torch.ldexp(scales, torch.tensor(-power)).to(torch.float8_e4m3fn)} | {
            f"{key}_global_scale": shared
        }

    def weights(self, bits: int) -> dict[str, Any]:
        kind = {"num_bits": bits, "type": "float", "symmetric": True, "dynamic": False, "group_size": self._grid.group}
        if self._powers:
            return {**kind, "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
        return {**kind, "strategy": "group", "scale_dtype": "torch.uint8"}


class W8A8(PackedIntegers):
    """Weights of 8 bits with a scale for each row, for products with inputs that are rounded to 8 bits.

    A matrix becomes ``weight`` (out, in) int8 and ``weight_scale`` (out, 1).
    """

    format, inputs, example, renames, of_experts = "int-quantized", "int", "int8", False, _NO_EXPERTS
    what = "8 bits for weights and inputs"
    text = "Weights as integers of 8 bits, for inputs that are rounded to 8 bits as they come,"

    def __init__(self, checkpoint: Checkpoint, name: str, progress: Progress) -> None:
        super().__init__(checkpoint, name, progress)
        if (self._grid.bits, self._grid.group, self._grid.average) != (8, None, None):
            raise UsageError(
                f"{name} is on the grid {self._grid}, and w8a8 has integers of 8 bits and one scale for each row: "
                "'niwaki quantize MODEL OUT int8' makes these"
            )

    def codes(self, key: str, codes: Tensor) -> dict[str, Tensor]:
        return {key: codes.to(torch.int8)}


class Float8(CompressedTensors):
    """Weights in FP8 (E4M3) with the scale of each row that loses least, for inputs that are rounded to FP8.

    A matrix becomes ``weight`` (out, in) float8_e4m3fn and ``weight_scale`` (out, 1). Zeros stay zeros, and no other
    weight becomes one.
    """

    format, inputs = "float-quantized", "float"
    what = "FP8"
    text = "Weights in FP8 (E4M3) with a scale for each row, for inputs that are rounded to FP8 as they come,"

    def __init__(self, checkpoint: Checkpoint, name: str, progress: Progress) -> None:
        super().__init__(checkpoint, name, progress)
        if (grid := grid_of(checkpoint)) is not None:
            raise UsageError(
                f"{name} has weights on the grid {grid}, and FP8 would round them once more; give the model that it "
                "was made from, or another format"
            )
        self._check_loads(name)

    def parts(self, matrix: Matrix, W: Tensor) -> dict[str, Tensor]:
        numbers = TiledFloats(E4M3, (1, W.shape[1]), scale_dtype(W.dtype))
        V = W.float()
        scales = numbers.scales(V, V.new_ones(V.shape[1]), V.new_zeros(len(V), 1))
        codes = numbers.codes(V, numbers.factors(scales, V.shape), V != 0)
        key = matrix.key
        return {key: codes.view(torch.float8_e4m3fn), f"{key}_scale": scales.to(scale_dtype(W.dtype))}

    def weights(self, bits: int) -> dict[str, Any]:
        return {"num_bits": bits, "type": "float", "symmetric": True, "dynamic": False, "strategy": "channel"}


def _by_layers(matrix: Matrix, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """The ``parts`` of a matrix of which servers read the rows of each layer; of others as they are."""
    if not (layers := layers_of_expert(matrix)):
        return parts
    shape, found = torch.tensor([matrix.shape[0] // len(layers), matrix.shape[1]]), dict[str, Tensor]()
    for name, value in parts.items():
        ending, same = name.removeprefix(matrix.key), [value] * len(layers)
        some = [shape] * len(layers) if ending == "_shape" else value.chunk(len(layers)) if value.ndim > 1 else same
        found |= {key + ending: part for key, part in zip(layers, some, strict=True)}
    return found


def packed_integers(codes: Tensor, bits: int) -> Tensor:
    """(out, in bits / 32 rounded up) int32: the whole numbers q (out, in) as q + 2^(bits-1), the lowest bits first.

    A row is a stream of bits, in which a number can be in two words.
    """
    unsigned = (codes + 2 ** (bits - 1)).to(torch.uint8).numpy()
    digits = unsigned[:, :, None] >> np.arange(bits, dtype=np.uint8) & 1
    packed = np.packbits(digits.reshape(len(digits), -1), axis=1, bitorder="little")
    return torch.from_numpy(np.pad(packed, ((0, 0), (0, -packed.shape[1] % 4))).view("<i4"))


def _config(form: CompressedTensors, model: StreamedModel, bits: dict[str, int]) -> dict[str, Any]:
    """``quantization_config`` of config.json, of matrices that have these ``bits`` by key."""
    modules, stored = _modules(model), {matrix.key for matrix in model.matrices()}
    linear = [name for name, module in model.model.named_modules() if isinstance(module, nn.Linear)]
    # vLLM has the files' names, and linear layers where transformers has none: routers, and draft layers.
    others = [key for key, entry in model.checkpoint.entries.items() if len(entry.shape) > 1 and key not in stored]
    ignored = [name for name in linear if name not in modules]
    ignored += [key.removesuffix(".weight") for key in others if key.endswith(".weight")]
    ignored += _head(model)
    # Experts, or else most others, are all linear layers that are not named.
    usual = max(Counter(bits.values()).items(), key=lambda each: each[::-1])[0]
    of_experts = {bits[matrix.key] for matrix in model.matrices() if matrix.expert is not None}
    usual = next(iter(of_experts), usual)
    named: dict[int, list[str]] = {}
    for matrix in model.matrices():
        if bits[matrix.key] != usual:
            names = (model.places[matrix.block] + matrix.name, matrix.key.removesuffix(".weight"))
            named.setdefault(bits[matrix.key], []).extend(dict.fromkeys(names))
    inputs = {"num_bits": 8, "type": form.inputs, "symmetric": True, "strategy": "token", "dynamic": True}
    # transformers takes the first group for experts, and warns of names that come after all linear layers.
    rest = (usual, ["Linear"])
    in_order = [rest, *named.items()] if of_experts else [*named.items(), rest]
    return {
        "quant_method": "compressed-tensors",
        "format": form.format,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {
                "targets": targets,
                "weights": form.weights(each),
                **({"input_activations": inputs} if form.inputs else {}),
            }
            for i, (each, targets) in enumerate(in_order)
        },
        "ignore": list(dict.fromkeys(ignored)),
    }


def _modules(model: StreamedModel) -> set[str]:
    """Where transformers' model has the matrices that are linear layers of their own."""
    return {model.places[matrix.block] + matrix.name for matrix in model.matrices() if matrix.is_module}


def _head(model: StreamedModel) -> list[str]:
    """The head of the class that config.json names, which can share its weights and be in no file."""
    kind = getattr(transformers, next(iter(model.config.architectures or ()), ""), None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        return []
    with torch.device("meta"):
        whole = kind(copy.deepcopy(model.config))
    head = whole.get_output_embeddings()
    return [name for name, module in whole.named_modules() if module is head]
