"""The weights of a model whose structure has none: read where they are needed, and freed after that."""

import contextlib
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from niwaki.errors import UnsupportedModelError
from niwaki.models.device import return_freed
from niwaki.models.families import is_in_tower
from niwaki.models.layout import Layout
from niwaki.models.structure import Parts


class Weights:
    """The weights of a model with these ``parts``, which the checkpoint has as its ``layout`` says.

    UnsupportedModelError where blocks share weights with the rest of the model.
    """

    def __init__(self, parts: Parts, layout: Layout, device: torch.device) -> None:
        self._model, self._blocks, self._layout, self._device = parts.model, parts.blocks, layout, device
        self._inside, self._places = parts.inside, parts.places
        #: What is needed of towers: where they are in the decoder, and where a model takes its device from.
        self._with_text = {name for name in self._names if name.startswith(parts.decoder_path)}
        for path, module in self._model.named_modules():
            if isinstance(module, PreTrainedModel):
                self._with_text |= {f"{path}.{name}".lstrip(".") for name, _ in [*module.named_parameters()][:1]}
        #: Parameters outside the blocks that are the same as others, for as long as these are there.
        self._ties = {name: other for name, other in layout.ties.items() if not name.startswith(self._inside)}
        for name, other in layout.ties.items():
            if name.startswith(self._inside) != other.startswith(self._inside):
                raise UnsupportedModelError(
                    f"{name!r} is the same as {other!r}; blocks that share weights with the rest of the model are not "
                    "supported"
                )

    def of_block(self, index: int) -> dict[str, Tensor]:
        """Those of a block, by their names in it, on the device."""
        prefix, names = self._places[index], self._blocks[index].state_dict()
        return self._read([name for name in names if self._layout.keys(prefix + name)], prefix)

    @contextlib.contextmanager
    def outside(self, dtype: torch.dtype | None = None, has_towers: bool = False) -> Iterator[None]:
        """The model with all outside the blocks: embeddings, last norm, head, maybe towers; in another dtype if given.

        Towers are there if it ``has_towers``, and what else is needed of them.
        """
        names = [name for name in self._names if self._is_read(name) and not name.startswith(self._inside)]
        weights = self._read([name for name in names if has_towers or not is_in_tower(name) or name in self._with_text])
        if dtype is not None:
            weights = {name: value.to(dtype) if value.is_floating_point() else value for name, value in weights.items()}
        with holding(self._model, weights):
            del weights
            own = {name: self._model.get_parameter(name) for name in self._ties}
            try:
                for name, other in self._ties.items():
                    self._set(name, self._model.get_parameter(other))
                yield
            finally:
                for name, value in own.items():
                    self._set(name, value)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """The model with all of them."""
        with contextlib.ExitStack() as held:
            held.enter_context(self.outside())
            for index, block in enumerate(self._blocks):
                held.enter_context(holding(block, self.of_block(index)))
            yield

    def load(self, skip: Collection[str]) -> None:
        """Reads all of them to stay, but those that are in keys of the checkpoint to ``skip``."""
        left = {name for name in self._names if not {*skip}.isdisjoint(self._layout.keys(name))}
        names = (name for name in self._names if self._is_read(name) and name not in left)
        weights = {name: self._layout.read(name).to(self._device) for name in names}
        self._model.load_state_dict(weights, strict=False, assign=True)
        if any(value.is_meta for name, value in self._model.named_parameters() if name not in left):
            self._model.tie_weights()

    def unload(self) -> None:
        """Frees what :meth:`load` has read; from then on the model does not run."""
        self._model.to_empty(device="meta")
        return_freed()

    @property
    def _names(self) -> Iterable[str]:
        return self._model.state_dict()

    def _is_read(self, name: str) -> bool:
        """Whether the checkpoint has a parameter or buffer, and under no other name."""
        return bool(self._layout.keys(name)) and name not in self._layout.ties

    def _read(self, names: list[str], prefix: str = "") -> dict[str, Tensor]:
        """The parameters ``names``, which the model has behind ``prefix``, on the device."""
        if self._device.type != "cuda":
            return {name: self._layout.read(prefix + name).to(self._device) for name in names}
        # On a stream of its own, so that copies and the present block's products run side by side.
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            pinned = ((name, self._layout.read(prefix + name).pin_memory()) for name in names)
            weights = {name: value.to(self._device, non_blocking=True) for name, value in pinned}
        stream.synchronize()
        for value in weights.values():  # their memory is not to be used again before the other stream is done
            value.record_stream(torch.cuda.default_stream(self._device))
        return weights

    def _set(self, name: str, parameter: nn.Parameter) -> None:
        path, _, own = name.rpartition(".")
        setattr(self._model.get_submodule(path), own, parameter)


@contextlib.contextmanager
def holding(module: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """``module`` with ``weights``, which it frees at the end."""
    empty = {name: value for name, value in module.state_dict().items() if name in weights}
    try:
        module.load_state_dict(weights, strict=False, assign=True)
        del weights  # or what a block releases would stay
        yield
    finally:
        module.load_state_dict(empty, strict=False, assign=True)
