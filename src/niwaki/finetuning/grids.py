"""Weights on a grid that stay there while a model is trained by any program that uses optimizers of torch."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import CheckpointError, UnsupportedModelError
from niwaki.files import output_errors
from niwaki.models.formats import format_of
from niwaki.models.layout import Matrix
from niwaki.models.locate import locate_model
from niwaki.models.scales import grid_of
from niwaki.models.streamed import StreamedModel

#: What DDP, torch.compile and PEFT put into the names of parameters.
_ADDED = re.compile(r"(^|\.)(module|_orig_mod|base_model\.model|base_layer)(?=\.)")


def plain_name(name: str) -> str:
    """The name of a parameter in the model itself, without what wrappers put into it."""
    return _ADDED.sub("", name).removeprefix(".")


class KeptGrid:
    """The grid of a model's weights, as its configuration tells, and the weights as optimizers see them.

    Between steps the model has weights on the grid, so that it computes with these and is saved so. A step changes the
    weights that are not rounded, which takes a copy of them in float32, and they are rounded after it: straight-through
    gradients (Bengio et al. 2013, arXiv:1308.3432).

    UnsupportedModelError where the model is split over processes; CheckpointError where the scales are not to be found.
    """

    def __init__(self, model: nn.Module) -> None:
        name = str(getattr(getattr(model, "config", None), "_name_or_path", ""))
        try:
            self._checkpoint = Checkpoint(locate_model(name).resolve())
            stream = StreamedModel(self._checkpoint, "cpu")
        except Exception as error:
            raise CheckpointError(
                f"the model's weights are on a grid, whose scales are not to be found in {name or 'its directory'} "
                f"({error}); load it from the directory that niwaki has written"
            ) from error
        self._format = format_of(self._checkpoint)
        matrices = defaultdict[str, list[tuple[Matrix, tuple[Tensor, ...]]]](list)
        for matrix in stream.matrices():
            if parts := self._format.read_parts(self._checkpoint, matrix):
                matrices[stream.places[matrix.block] + matrix.parameter].append((matrix, parts))
        found = {plain_name(name): value for name, value in model.named_parameters()}
        if any(isinstance(found.get(name), DTensor) for name in matrices):
            raise UnsupportedModelError(
                "the model's weights are on a grid, which cannot be kept while they are split over processes (FSDP); "
                "use DDP, or quantize after training"
            )
        self._matrices = {id(found[name]): some for name, some in matrices.items() if name in found}
        #: By the number of a parameter, what optimizers have made of it.
        self._exact: dict[int, Tensor] = {}

    def before_step(self, optimizer: Optimizer) -> None:
        """Gives the optimizer weights that are not rounded."""
        for value in values_of(optimizer):
            number = id(value)
            if number in self._exact:
                value.copy_(self._exact[number])
            elif number in self._matrices:  # its first step: it is on the grid yet
                self._exact[number] = value.detach().float().clone()

    def after_step(self, optimizer: Optimizer) -> None:
        """Keeps what it has made of them, and gives the model what these are on the grid."""
        for value in values_of(optimizer):
            if (exact := self._exact.get(id(value))) is None:
                continue
            exact.copy_(value)
            for matrix, parts in self._matrices[id(value)]:
                # In the dtype that they will be stored in beside these weights.
                stored = self._format.parts_like(matrix, value.dtype)
                scales = [part.to(value.device, dtype) for part, (_, dtype) in zip(parts, stored, strict=True)]
                matrix.within(value).copy_(self._format.project(matrix, matrix.within(exact), scales))

    def complete(self, directory: Path) -> None:
        """Puts the scales into a directory that the model was saved in, if it says that it is on the grid."""
        saved = Checkpoint(directory)
        if (grid := grid_of(saved)) is None:
            return
        for name in self._format.files:
            scales = load_file(self._checkpoint.path / name)
            dtypes = {key: grid.scale_dtype(saved.dtype(key.removesuffix("_scale"))) for key in scales}
            with output_errors(directory):
                (directory / name).parent.mkdir(exist_ok=True)
                save_file({key: value.to(dtypes[key]) for key, value in scales.items()}, directory / name)


def told_of(model: nn.Module) -> dict[str, Any]:
    """What the configuration of a model tells of its pruning; nothing where it was not niwaki that pruned it."""
    told: Any = getattr(getattr(model, "config", None), "pruning_config", None)
    return told if isinstance(told, dict) else {}


def grid_in(model: nn.Module) -> str | None:
    """The name of the grid that the configuration of a model tells its weights are on."""
    return told_of(model).get("quantization")


def values_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that ``optimizer`` trains."""
    return [value for group in optimizer.param_groups for value in group["params"]]
