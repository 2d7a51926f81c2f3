"""The tensors of a block with fewer units: as they are written, and as the smaller block in memory has them."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from niwaki.checkpoints.shards import Shards
from niwaki.models.block import DecoderBlock
from niwaki.models.layout import Matrix
from niwaki.models.streamed import StreamedModel
from niwaki.shrinking.units import Removal


class BlockTensors:
    """The tensors of block ``index`` of ``model`` as they will be, read when they are written.

    ``names`` are its keys with what they become, see :func:`.configuration.tensors_of_blocks`.
    """

    def __init__(self, model: StreamedModel, index: int, names: dict[str, str]) -> None:
        self._model, self._index, self._names = model, index, dict(names)
        self._values: dict[str, dict[int | None, Tensor]] = defaultdict(dict)  # by key and index there
        self._smaller: dict[str, dict[int | None, Tensor]] = defaultdict(dict)  # likewise, when units are left out
        self._changes: dict[str, list[Callable[[Tensor], Tensor]]] = defaultdict(list)
        self._units: dict[str, Callable[[Tensor], Tensor]] = {}  # by parameter, what leaves out units
        #: Of matrices that were replaced: the weights written, how many were zero before, and no longer are.
        self.counts: Counter[str] = Counter()

    def replace(self, matrix: Matrix, stored: Tensor, is_smaller: bool = False) -> None:
        """``matrix`` becomes ``stored``, in the layout of the checkpoint: with all units, or as it ``is_smaller``."""
        (self._smaller if is_smaller else self._values)[matrix.key][matrix.index] = stored

    def keep(self, removal: Removal, kept: Tensor) -> None:
        """Only the units in the mask ``kept`` (units,) stay. Experts get numbers without gaps."""
        numbers = {expert: number for number, expert in enumerate(kept.nonzero().squeeze(1).tolist())}
        layout = self._model.layout
        self._units |= self._without(removal, kept)
        for parameter in removal.parameters[self._index]:
            for key, expert in layout.experts(self._model.places[self._index] + parameter.name).items():
                if expert is None:
                    self._changes[key].append(self._units[parameter.name])
                elif expert in numbers:
                    head, number, tail = self._names[key].rpartition(f".{expert}.")
                    self._names[key] = f"{head}{number.replace(str(expert), str(numbers[expert]))}{tail}"
                else:
                    del self._names[key]

    def write(self, number: int, file: str, shards: Shards) -> None:
        """Writes them to ``file``, one at a time, as those of the block that is ``number`` now."""
        checkpoint, keys = self._model.checkpoint, {name.format(number): key for key, name in self._names.items()}

        def read(name: str) -> Tensor:
            key, value = keys[name], checkpoint.read(keys[name])
            zeros = self._left(key, value == 0) if key in self._values or key in self._smaller else None
            value = self._changed(key, value)
            if zeros is not None:
                revived = int((zeros & (value != 0)).sum())
                self.counts.update(weights=value.numel(), zeros=int(zeros.sum()), revived=revived)
            for values in (self._values, self._smaller):
                values.pop(key, None)  # frees them
            return value

        shards.write(file, {name: self._changed(key, checkpoint.like(key)) for name, key in keys.items()}, read)

    def _changed(self, key: str, value: Tensor) -> Tensor:
        """What ``value``, the tensor under ``key``, becomes, in its own memory if possible."""
        for index, stored in self._values.get(key, {}).items():
            (value if index is None else value[index]).copy_(stored)
        value = self._left(key, value)
        for index, stored in self._smaller.get(key, {}).items():
            (value if index is None else value[index]).copy_(stored)
        return value

    def _left(self, key: str, value: Tensor) -> Tensor:
        """What is left of ``value``, in the shape of the tensor under ``key``, without the units that go."""
        for change in self._changes.get(key, ()):
            value = change(value)
        return value

    def move(self, block: DecoderBlock, smaller: nn.Module, removal: Removal, kept: Tensor) -> DecoderBlock:
        """The ``smaller`` block of the experts in the mask ``kept`` with the weights of ``block``, which has none then.

        Those of experts are read again, so that both blocks do not have to fit in memory.
        """
        values = block.module.state_dict()
        free(block.module)
        units = self._units | self._without(removal, kept)
        stacks = [name for name, value in values.items() if name in units and value.ndim > 2]
        for name in stacks:
            del values[name]
        weights = {name: units[name](value) if name in units else value for name, value in values.items()}
        experts = kept.nonzero().squeeze(1).tolist()
        for name in stacks:
            weights[name] = block.layout.read_experts(block.path + name, experts).to(block.device)
        smaller.load_state_dict(weights, strict=False, assign=True)
        numbers = {None: None, **{expert: number for number, expert in enumerate(experts)}}
        matrices = [replace(each, expert=numbers[each.expert]) for each in block.matrices if each.expert in numbers]
        return replace(block, module=smaller, matrices=matrices)

    def _without(self, removal: Removal, kept: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
        """By parameter, what leaves out units."""
        return {each.name: partial(each.without, kept=kept) for each in removal.parameters[self._index]}


def free(block: nn.Module) -> None:
    """Frees the weights of a block."""
    weights = {name: torch.empty_like(value, device="meta") for name, value in block.state_dict().items()}
    block.load_state_dict(weights, strict=False, assign=True)
