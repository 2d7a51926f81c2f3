"""The tensors of a block with fewer units: as they are written, and as the smaller block in memory has them."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from niwaki.models.layout import Matrix
from niwaki.models.streamed import StreamedModel
from niwaki.pruning.structured.units import Removal


class BlockTensors:
    """The tensors of block ``index`` of ``model`` as they will be, read when they are written.

    ``names`` are its keys with what they become, see :func:`.configuration.tensors_of_blocks`.
    """

    def __init__(self, model: StreamedModel, index: int, names: dict[str, str]) -> None:
        self._model, self._index, self._names = model, index, dict(names)
        self._changes: dict[str, list[Callable[[Tensor], Tensor]]] = defaultdict(list)
        self._units: dict[str, Callable[[Tensor], Tensor]] = {}  # by parameter, what leaves out units

    def replace(self, matrix: Matrix, stored: Tensor) -> None:
        """``matrix`` becomes ``stored``, which has the layout of the checkpoint."""

        def change(value: Tensor) -> Tensor:
            (value if matrix.index is None else value[matrix.index]).copy_(stored)
            return value

        self._changes[matrix.key].append(change)

    def keep(self, removal: Removal, kept: Tensor) -> None:
        """Only the units in the mask ``kept`` stay, (units,) or for each expert. Experts get numbers without gaps."""
        numbers = {expert: number for number, expert in enumerate(kept.nonzero()[:, 0].tolist())}
        layout = self._model.layout
        for parameter in removal.parameters[self._index]:
            self._units[parameter.name] = without = partial(parameter.without, kept=kept)
            for key, expert in layout.experts(f"{self._model.path}.{self._index}.{parameter.name}").items():
                if expert is None:
                    self._changes[key].append(without)
                elif kept.ndim == 2:
                    self._changes[key].append(partial(parameter.of_expert, kept=kept[expert]))
                elif expert in numbers:
                    head, number, tail = self._names[key].rpartition(f".{expert}.")
                    self._names[key] = f"{head}{number.replace(str(expert), str(numbers[expert]))}{tail}"
                else:
                    del self._names[key]

    def read(self, number: int) -> dict[str, Tensor]:
        """By their new keys, all tensors, of the block that is ``number`` now."""
        tensors = {}
        for key, name in self._names.items():
            value = self._model.checkpoint.read(key)
            for change in self._changes.pop(key, ()):
                value = change(value)
            tensors[name.format(number)] = value
        return tensors

    def move(self, block: nn.Module, smaller: nn.Module) -> None:
        """Gives what stays of the weights of ``block`` to the ``smaller`` one; ``block`` has none then."""
        values = block.state_dict()
        for name in [*self._units, *(values.keys() - self._units)]:
            value = values.pop(name)
            part = self._units[name](value) if name in self._units else value
            smaller.load_state_dict({name: part}, strict=False, assign=True)
            block.load_state_dict({name: torch.empty_like(value, device="meta")}, strict=False, assign=True)
            del value, part


def free(block: nn.Module) -> None:
    """Frees the weights of a block."""
    weights = {name: torch.empty_like(value, device="meta") for name, value in block.state_dict().items()}
    block.load_state_dict(weights, strict=False, assign=True)
