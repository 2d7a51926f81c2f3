"""A pruned model in memory, whose remaining weights can be trained."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from niwaki.errors import NumericalError
from niwaki.layer.linalg import is_finite
from niwaki.models.families import ROUTERS
from niwaki.models.streamed import StreamedModel
from niwaki.pruning.healing.objective import Head


class Student:
    """The pruned model, as a whole and in float32; with ``half`` it computes in bfloat16.

    ``scale`` is that of its head, see :func:`.objective.head_scale`.
    Trained are the matrices of its blocks, where they are not zero, and the vectors of blocks and of the last norm.
    Embeddings, routers and the head stay.
    """

    def __init__(self, stream: StreamedModel, scale: float, half: bool = False) -> None:
        matrices = {f"{stream.path}.{matrix.block}.{matrix.parameter}" for matrix in stream.matrices()}
        self.device, self._layout, self._half = stream.device, stream.layout, half
        model = stream.load().eval().requires_grad_(False)
        self._decoder = stream.decoder
        ends = model.get_input_embeddings(), model.get_output_embeddings()
        inside = {id(value) for value in self._decoder.parameters()} - {id(end.weight) for end in ends}
        bias = getattr(ends[1], "bias", None)
        self.head = Head(ends[1].weight.detach(), None if bias is None else bias.detach(), scale)
        self.parameters: dict[str, nn.Parameter] = {
            name: value
            for name, value in model.named_parameters()
            if id(value) in inside and (name in matrices or (value.ndim == 1 and ROUTERS.isdisjoint(name.split("."))))
        }
        for value in self.parameters.values():
            value.requires_grad_(True)
        #: Which weights of each matrix are not pruned.
        self.masks = {name: value.detach() != 0 for name, value in self.parameters.items() if name in matrices}

    def states(self, tokens: Tensor) -> Tensor:
        """(tokens, width): after the last norm, for ``tokens`` (windows, length)."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._half):
            states: Tensor = self._decoder(input_ids=tokens, use_cache=False).last_hidden_state
        return states.flatten(0, 1)

    @torch.no_grad()
    def stored(self) -> dict[str, Tensor]:
        """All that is trained as files are to have it: on the CPU, in their dtype, with the same weights zero."""
        stored = {}
        for name, value in self.parameters.items():
            dtype = self._layout.checkpoint.dtype(self._layout.keys(name)[0])
            rounded = value.detach().to(dtype, copy=True).add_(0.0)  # -0.0 is not what sparse kernels expect
            if name in self.masks:
                lost = self.masks[name] & (rounded == 0)
                rounded[lost] = torch.full_like(rounded[lost], torch.finfo(dtype).tiny).copysign(value[lost].to(dtype))
            stored[name] = rounded.cpu()
            if not is_finite(stored[name]):
                raise NumericalError(f"{name}: a trained weight is too large for {dtype}")
        return stored

    @contextlib.contextmanager
    def holding(self, stored: dict[str, Tensor]) -> Iterator[None]:
        """The model as it would be read from a file with ``stored``."""
        trained = {name: value.data for name, value in self.parameters.items()}
        try:
            for name, value in self.parameters.items():
                value.data = stored[name].to(value.device, value.dtype)
            yield
        finally:
            for name, data in trained.items():
                self.parameters[name].data = data

    def tensors(self, stored: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(key, tensor) of the checkpoint, for all of ``stored``."""
        for name, value in stored.items():
            yield from self._layout.split(name, value)
