"""One decoder block of a transformers model: its forward pass, its weights, its matrices' inputs and gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from niwaki.errors import NiwakiError, NumericalError, WorkerError
from niwaki.layer.linalg import is_finite
from niwaki.models.checkpoint import Checkpoint
from niwaki.models.gram_capture import InputGram, InputGrams
from niwaki.models.hidden_states import HiddenStates, MemoryBudget
from niwaki.models.layout import Matrix
from niwaki.models.processes import World
from niwaki.models.products import Product, Products
from niwaki.options import TF32


class Model(Protocol):
    """What a block asks the model that it is from, see :class:`niwaki.models.streamed.StreamedModel`."""

    checkpoint: Checkpoint
    room: MemoryBudget
    device: torch.device
    dtype: torch.dtype

    def matrices(self, block: int) -> list[Matrix]:
        """What can be pruned in a block."""

    def vectors(self, block: int) -> dict[str, str]:
        """Its norms and biases: path in the block to key."""

    def parameter(self, block: int, name: str) -> Tensor:
        """The original weights of one of its parameters, on the device."""


class DecoderBlock:
    """One decoder block with its weights in memory.

    Attributes:
        index: Its place, from 0.
        matrices: What can be pruned in it.
    """

    def __init__(self, index: int, module: nn.Module, model: Model) -> None:
        self.index = index
        self.matrices = model.matrices(index)
        self._module = module
        self._model = model
        #: Norms and biases: the path of each parameter of one dimension, and its key in the checkpoint.
        self.vectors = model.vectors(index)
        self._released: set[str] = set()
        #: By path, the original weights of what was put since :meth:`keep`; None for those in the checkpoint only.
        self._kept: dict[str, Tensor | None] | None = None

    @torch.no_grad()
    def advance(self, states: HiddenStates, done: Callable[[], None] = lambda: None, inner: bool = False) -> None:
        """Runs the block: ``states`` become the inputs of the next one. ``done`` is called after each batch.

        With ``inner``, ``states`` get the outputs of its sub-blocks too, see :meth:`apart`.
        """
        for i in range(len(states.hidden)):
            with self.apart(inner) as outputs:
                states.hidden[i] = out = self._run(states.hidden[i], states)
            states.keep(i, [output.reshape(out.shape) for output in outputs])
            done()

    @torch.no_grad()
    def input_grams(
        self,
        states: HiddenStates,
        done: Callable[[], None] = lambda: None,
        world: World | None = None,
        tf32: TF32 = "auto",
        matrices: list[Matrix] | None = None,
        dense: HiddenStates | None = None,
    ) -> list[InputGram]:
        """The Gram matrices of all distinct inputs, from one pass that leaves ``states`` alone.

        Args:
            states: The block's inputs.
            done: Is called after each batch.
            world: The processes of which each has some of the states.
            tf32: See :mod:`niwaki.layer.tf32`.
            matrices: Those whose inputs are wanted; by default all that can be pruned.
            dense: The inputs that the block has in the dense model, of the same tokens: for ``InputGram.cross``.
                The block has to :meth:`keep` its weights; each batch takes another forward pass with them.

        Raises:
            NumericalError: an activation is NaN or infinite.
        """
        wanted = self.matrices if matrices is None else matrices
        parameters = dict(self._module.named_parameters())
        grams = InputGrams(wanted, parameters, tf32)
        others = InputGrams(wanted, parameters, gather=False)
        for i, hidden in enumerate(states.hidden):
            targets = None
            if dense is not None:
                with self.original():
                    targets = others.inputs(lambda i=i: self._run(dense.hidden[i], dense))  # type: ignore[misc]
            grams.watch(lambda hidden=hidden: self._run(hidden, states), targets)  # type: ignore[misc]
            done()
        try:
            return grams.finish(world or World())
        except WorkerError:
            raise
        except NiwakiError as error:
            raise type(error)(f"block {self.index}: {error}") from error

    @torch.no_grad()
    def groups(self, states: HiddenStates) -> list[list[Matrix]]:
        """The matrices with the same inputs together, in the order of computation; one batch tells.

        Those of all experts are one group for each parameter, because their tokens change from batch to batch. Within
        a group matrices have the order of :attr:`matrices`, which is the same in all processes.
        """
        grams = InputGrams(self.matrices, dict(self._module.named_parameters()))
        grams.watch(lambda: self._run(states.hidden[0], states))
        first = {name: names[0] for names in grams.names for name in names}
        order = list(first)
        found: dict[str, list[Matrix]] = {}
        for matrix in self.matrices:
            called = first.get(matrix.name, matrix.name) if matrix.expert is None else matrix.parameter
            found.setdefault(called, []).append(matrix)

        def place(group: list[Matrix]) -> int:
            used = [order.index(matrix.name) for matrix in group if matrix.name in first]
            return min(used, default=len(order))

        return sorted(found.values(), key=place)

    def keep(self) -> None:
        """From now on the weights that :meth:`put` replaces can be had back, see :meth:`original`.

        They stay in memory; if that is limited they are read again each time.
        """
        self._kept = {}

    def forget(self) -> None:
        """Lets go of the weights that it was told to :meth:`keep`."""
        self._kept = None

    @contextlib.contextmanager
    def original(self) -> Iterator[None]:
        """The block with the weights that it had when it was told to :meth:`keep` them."""
        kept = self._kept or {}
        parameters = {name: self._module.get_parameter(name) for name in kept}
        pruned = {name: parameter.data for name, parameter in parameters.items()}
        try:
            for name, value in kept.items():
                parameters[name].data = self._model.parameter(self.index, name) if value is None else value
            yield
        finally:
            for name, value in pruned.items():
                parameters[name].data = value

    def weight(self, matrix: Matrix) -> Tensor:
        """(out, in) float32: its original weights."""
        return matrix.read(self._model.checkpoint).to(self._model.device, torch.float32)

    @property
    def released(self) -> bool:
        """Whether weights are missing."""
        return bool(self._released)

    def release(self, matrices: Collection[Matrix]) -> None:
        """Lets go of the weights of ``matrices`` if memory is limited; :meth:`put` them back before the block runs."""
        if not self._model.room.limited:
            return
        sizes: dict[str, int] = {}
        for matrix in matrices:
            sizes[matrix.parameter] = sizes.get(matrix.parameter, 0) + matrix.shape[0] * matrix.shape[1]
        for name, size in sizes.items():
            parameter = self._module.get_parameter(name)
            if size == parameter.numel():  # nothing is in it besides
                self._released.add(name)
                parameter.data = parameter.data.new_empty(1).expand(parameter.shape)

    def stored(self, matrix: Matrix, W: Tensor) -> Tensor:
        """W (out, in) in the layout and dtype of the checkpoint, with zeros that are exactly +0.0.

        Raises:
            NumericalError: a weight is too large for that dtype.
        """
        stored = W.to(self.dtype(matrix)).add_(0.0)  # rounding can leave -0.0
        _finite(matrix.key, stored)
        return stored.T.contiguous() if matrix.transposed else stored

    def dtype(self, matrix: Matrix) -> torch.dtype:
        """What the checkpoint has it in."""
        return self._model.checkpoint.dtype(matrix.key)

    def empty(self, matrix: Matrix) -> Tensor:
        """Memory for ``matrix`` in the layout and dtype of the checkpoint."""
        shape = matrix.shape[::-1] if matrix.transposed else matrix.shape
        return torch.empty(shape, dtype=self.dtype(matrix), device=self._model.device)

    def put(self, matrix: Matrix, stored: Tensor) -> None:
        """Computes with ``stored``, in the layout of the checkpoint, in the place of ``matrix`` from now on."""
        value = stored.T if matrix.transposed else stored
        parameter = self._module.get_parameter(matrix.parameter)
        if self._kept is not None and matrix.parameter not in self._kept:
            limited = self._model.room.limited
            self._kept[matrix.parameter] = None if limited else parameter.data
            if not limited:
                parameter.data = parameter.data.clone()
        if matrix.parameter in self._released:
            self._released.remove(matrix.parameter)
            parameter.data = parameter.data.new_empty(parameter.shape)
        matrix.within(parameter).copy_(value)

    @property
    def smallest(self) -> float:
        """A magnitude that is not rounded to 0 in the dtype of the block, nor in that of the checkpoint."""
        dtypes = {self._model.dtype, *(self.dtype(matrix) for matrix in self.matrices)}
        return max(torch.finfo(dtype).tiny for dtype in dtypes)

    @contextlib.contextmanager
    def training(self, vectors: bool) -> Iterator[list[nn.Parameter]]:
        """The parameters that ``matrices`` are in, and ``vectors`` if asked for, with gradients.

        All parameters of the block are in float32 meanwhile. In the end it computes with what they have become, in its
        own dtype. What it computed with before is not changed in place.
        """
        names = [
            *dict.fromkeys(matrix.parameter for matrix in self.matrices),
            *(self.vectors if vectors else ()),
        ]
        trained = [self._module.get_parameter(name) for name in names]
        dtypes = {value: value.dtype for value in self._module.parameters()}
        try:
            for value in dtypes:
                value.data = value.data.float()
            for value in trained:
                value.data = value.data.clone()
                value.requires_grad_(True)
            yield trained
        finally:
            for value, dtype in dtypes.items():
                value.requires_grad_(False)
                value.grad = None
                value.data = value.data.to(dtype)

    @contextlib.contextmanager
    def projected(self, project: Callable[[Matrix, Tensor], Tensor] | None) -> Iterator[None]:
        """While in :meth:`training`, the block with ``project(matrix, its weights)``, if that is given.

        Weights are as before at the end, with the gradients of those that it computed with meanwhile.
        """
        if project is None:
            yield
            return
        parameters = {m.parameter: self._module.get_parameter(m.parameter) for m in self.matrices}
        before = {name: parameter.data for name, parameter in parameters.items()}
        try:
            for parameter in parameters.values():
                parameter.data = parameter.data.clone()
            for matrix in self.matrices:
                weights = matrix.within(parameters[matrix.parameter].data)
                weights.copy_(project(matrix, weights))
            yield
        finally:
            for name, value in before.items():
                parameters[name].data = value

    def trained(self, vectors: bool) -> Iterator[tuple[str, int | None, Tensor]]:
        """(key, part, tensor) as the checkpoint has them, of each matrix, and of ``vectors`` if asked for.

        From then on the block computes with what is stored.
        """
        for matrix in self.matrices:
            stored = self.stored(matrix, matrix.within(self._module.get_parameter(matrix.parameter)))
            self.put(matrix, stored)
            yield matrix.key, matrix.part, stored
        for name, key in self.vectors.items() if vectors else ():
            parameter = self._module.get_parameter(name)
            stored = _finite(key, parameter.to(self._model.checkpoint.dtype(key)))
            parameter.copy_(stored)
            yield key, None, stored

    def vector(self, name: str) -> Tensor:
        """What the block computes with as the parameter ``name`` of ``vectors``; what is copied into it counts."""
        return self._module.get_parameter(name).data

    @torch.enable_grad()
    def pull(self, hidden: Tensor, gradient: Tensor, states: HiddenStates, inputs: Product, outputs: Product) -> Tensor:
        """(samples, length, width): the gradient with respect to ``hidden``, given that with respect to the outputs.

        Args:
            hidden: One of the batches of inputs of ``states``.
            gradient: Likewise, in the same dtype.
            states: What else the block is called with.
            inputs: Is told of the inputs of each matrix, in the forward pass; see :class:`.products.Products`.
            outputs: Is told of the gradients with respect to the outputs of each matrix, in the backward pass.
        """
        parameters = dict(self._module.named_parameters())
        hidden = hidden.detach().requires_grad_()
        with Products(self.matrices, parameters, inputs):
            out = self._run(hidden, states)
        with Products(self.matrices, parameters, outputs, backward=True):
            return torch.autograd.grad(out, hidden, gradient)[0]

    @contextlib.contextmanager
    def apart(self, wanted: bool) -> Iterator[list[Tensor]]:
        """Meanwhile no gradients go from one sub-block, such as attention or MLP, to another, if ``wanted``.

        What each answers comes into the list.

        Sub-blocks are the modules right under the block that have matrices to prune. Such matrices right under it are
        one together, as the MLP of OPT. Gradients end behind each, so that its own reach the norm before it.
        """
        names = [matrix.parameter.split(".") for matrix in self.matrices]
        single = [name for name, *rest in names if len(rest) == 1]
        outputs: list[Tensor] = []

        def cut(_: nn.Module, args: Any, answer: Any) -> Any:
            several = isinstance(answer, tuple | list)
            parts = answer if several else (answer,)
            outputs.append(parts[0])
            # Copies, because Falcon adds to them in place.
            found = tuple(part.detach().clone() if isinstance(part, Tensor) else part for part in parts)
            return found if several else found[0]

        ends = dict.fromkeys(name for name, *_ in names if name not in single[:-1])
        with contextlib.ExitStack() as hooks:
            for name in ends if wanted else ():
                hooks.enter_context(self._module.get_submodule(name).register_forward_hook(cut))
            yield outputs

    def run(self, hidden: Tensor, states: HiddenStates) -> Tensor:
        """The outputs for ``hidden``, one of the batches of ``states``, with gradients where they are wanted.

        Of a model in half precision products are in bfloat16: in float16 small gradients would be 0.
        """
        half = self._model.dtype != torch.float32
        with torch.autocast(self._model.device.type, torch.bfloat16, enabled=half):
            return self._run(hidden, states)

    def _run(self, hidden: Tensor, states: HiddenStates) -> Tensor:
        args, kwargs = states.arguments[self.index, hidden.shape[0]]
        out = self._module(hidden, *args, **kwargs)
        return out[0] if isinstance(out, tuple | list) else out  # type: ignore[no-any-return]


def _finite(key: str, stored: Tensor) -> Tensor:
    if not is_finite(stored):
        raise NumericalError(f"{key}: a pruned weight is too large for {stored.dtype}")
    return stored
