"""Gradients through a decoder block, and training of its weights."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor, nn

from niwaki.models.block import DecoderBlock
from niwaki.models.hidden_states import Handed, HiddenStates
from niwaki.models.layout import Matrix
from niwaki.models.products import OnProduct, Products
from niwaki.models.spill import MemoryBudget, SpillList

#: (out, in), the weights of a matrix rounded to its grid, with the same zeros.
Projection = Callable[[Matrix, Tensor], Tensor]
#: The two factors of a matrix as :meth:`.WeightFormat.project_factors` makes them of its parts.
FactorProjection = Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]


@contextlib.contextmanager
def gradients(device: torch.device) -> Iterator[None]:
    """Within it torch records what gradients need, and computes them on ``device`` in an order that does not change.

    On a GPU threads otherwise add the gradients of attention as they come, and two runs have other bytes. An operation
    that has no other way is left as it is.
    """
    with torch.enable_grad(), contextlib.ExitStack() as held:
        if device.type == "cuda":
            held.callback(
                torch.use_deterministic_algorithms,
                torch.are_deterministic_algorithms_enabled(),
                warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            )
            torch.use_deterministic_algorithms(True, warn_only=True)
        yield


def trained_matrices(block: DecoderBlock) -> list[Matrix]:
    """The matrices that :func:`trainable` trains: those of no other block."""
    return [matrix for matrix in block.matrices if not matrix.blocks]


def _trained(block: DecoderBlock) -> dict[str, nn.Parameter]:
    """The parameters that they are in, by path."""
    return {matrix.parameter: block.module.get_parameter(matrix.parameter) for matrix in trained_matrices(block)}


@contextlib.contextmanager
def trainable(block: DecoderBlock) -> Iterator[list[nn.Parameter]]:
    """The parameters that :func:`trained_matrices` are in, with gradients; meanwhile all of the block are in float32.

    At the end it computes with what they have become, in its dtype. What it computed with before is not changed.
    """
    parameters = list(_trained(block).values())
    dtypes = {value: value.dtype for value in block.module.parameters()}
    try:
        for value in dtypes:
            value.data = value.data.float()
        for value in parameters:
            value.data = value.data.clone()
            value.requires_grad_(True)
        yield parameters
    finally:
        for value, dtype in dtypes.items():
            value.requires_grad_(False)
            value.grad = None
            value.data = value.data.to(dtype)


@contextlib.contextmanager
def projected(block: DecoderBlock, project: Projection | None) -> Iterator[None]:
    """While it is :func:`trainable`, the block with ``project(matrix, its weights)``, if that is given.

    Weights are as before at the end, with the gradients of those that it computed with meanwhile.
    """
    if project is None:
        yield
        return
    parameters = _trained(block)
    before = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for parameter in parameters.values():
            parameter.data = parameter.data.clone()
        for matrix in trained_matrices(block):
            weights = matrix.within(parameters[matrix.parameter].data)
            weights.copy_(project(matrix, weights))
        yield
    finally:
        for name, value in before.items():
            parameters[name].data = value


class TrainedWeights:
    """What a fit changes of a block that is :func:`trainable`: its ``parameters``.

    It computes with them as they are, or in the format that ``project`` puts them in.
    """

    def __init__(self, block: DecoderBlock, parameters: list[nn.Parameter], project: Projection | None) -> None:
        self.values, self._block, self._project = parameters, block, project

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """While the block computes with them."""
        with projected(self._block, self._project):
            yield

    def gradients(self) -> list[Tensor]:
        """Those of the values, which are also where an optimizer looks for them."""
        for value in self.values:
            if value.grad is None:  # experts that none of these tokens went to
                value.grad = torch.zeros_like(value)
        return [value.grad for value in self.values if value.grad is not None]

    def settle(self) -> None:
        """From now on the block computes with what has become of them."""
        with self.computing():
            settled = [value.data for value in self.values]
        for value, data in zip(self.values, settled, strict=True):
            value.data = data


class TrainedFactors(TrainedWeights):
    """Two factors of each matrix, the first of its parts by name, as they are stored; the block has their products.

    It computes with what ``project_factors`` makes of them and the other parts, which stay as they are; gradients of
    that change the factors themselves.
    """

    def __init__(
        self, block: DecoderBlock, parts: Mapping[str, Sequence[Tensor]], project_factors: FactorProjection
    ) -> None:
        self._matrices = trained_matrices(block)
        self._weights = _trained(block)
        self._parts, self._project_factors = parts, project_factors
        values = [factor.float() for matrix in self._matrices for factor in parts[matrix.name][:2]]
        # Not changed where they are in float32 already.
        super().__init__(block, [nn.Parameter(value.clone(), requires_grad=False) for value in values], None)

    def _pairs(self) -> Iterator[tuple[Matrix, nn.Parameter, nn.Parameter]]:
        return zip(self._matrices, self.values[::2], self.values[1::2], strict=True)

    def _projected(self, matrix: Matrix, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """What the block computes with in the place of these factors."""
        return self._project_factors([left, right, *self._parts[matrix.name][2:]])

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        for matrix, *factors in self._pairs():
            left, right = self._projected(matrix, *(factor.data for factor in factors))
            matrix.within(self._weights[matrix.parameter].data).copy_(left @ right)
        yield

    def gradients(self) -> list[Tensor]:
        found: list[Tensor] = []
        for matrix, left, right in self._pairs():
            whole = self._weights[matrix.parameter].grad
            of_product = torch.zeros(matrix.shape, device=left.device) if whole is None else matrix.within(whole)
            seen_left, seen_right = self._projected(matrix, left.data, right.data)
            left.grad, right.grad = of_product @ seen_right.T, seen_left.T @ of_product
            found += [left.grad, right.grad]
        for weights in self._weights.values():
            weights.grad = None
        return found

    def settle(self) -> None:
        for matrix, left, right in self._pairs():
            dtypes = [part.dtype for part in self._parts[matrix.name]]
            seen = self._projected(matrix, left.data, right.data)
            left.data, right.data = (factor.to(dtype).float() for factor, dtype in zip(seen, dtypes, strict=False))
        with self.computing():
            pass

    @property
    def parts(self) -> dict[str, tuple[Tensor, ...]]:
        """What has become of them, with the other parts, by the names of matrices."""
        found = {}
        for matrix, left, right in self._pairs():
            of_left, of_right, *others = self._parts[matrix.name]
            found[matrix.name] = (left.data.to(of_left.dtype), right.data.to(of_right.dtype), *others)
        return found


def trained_weights(block: DecoderBlock) -> Iterator[tuple[Matrix, Tensor]]:
    """Each trained matrix and its weights, as the checkpoint has them; from then on the block computes with these."""
    for matrix in trained_matrices(block):
        stored = block.stored(matrix, matrix.within(block.module.get_parameter(matrix.parameter)))
        block.put(matrix, stored)
        yield matrix, stored


def smallest_weight(block: DecoderBlock) -> float:
    """A magnitude that is not rounded to 0 in the dtype of the block, nor in that of the checkpoint."""
    dtypes = {block.dtype, *(block.stored_dtype(matrix) for matrix in block.matrices)}
    return max(torch.finfo(dtype).tiny for dtype in dtypes)


def root_mean_square(value: Tensor) -> float:
    """Of what is not zero."""
    squares = float(value.detach().square().sum(dtype=torch.float64))
    return math.sqrt(squares / max(1, int(value.count_nonzero())))


class HandedGradients:
    """Gradients of the loss with respect to what blocks hand on, in float32 within ``budget``."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._sums: dict[tuple[int, str | int], SpillList] = {}  # of each batch, by name

    def add(self, i: int, handed: Mapping[str | int, tuple[Tensor, ...]], gradients: Sequence[Tensor]) -> None:
        """Adds ``gradients`` with respect to all tensors in ``handed``, of batch ``i``."""
        remaining = iter(gradients)
        for name, values in handed.items():
            sums = self._sums.setdefault((i, name), SpillList(self._budget))
            for n, gradient in enumerate(islice(remaining, len(values))):
                sums.put(n, gradient.float() + sums[n] if n < len(sums) else gradient.float())

    def take(self, i: int, handed: Mapping[str | int, tuple[Tensor, ...]]) -> list[Tensor]:
        """The gradients with respect to all tensors in ``handed``, of batch ``i``, in their dtype."""
        found = []
        for name, values in handed.items():
            sums = self._sums.get((i, name))
            found += [torch.zeros_like(v) if sums is None else sums[n].to(v.dtype) for n, v in enumerate(values)]
        return found

    def scale(self, i: int, exponent: int) -> None:
        """Multiplies those of batch ``i`` by 2^exponent."""
        for (batch, _), sums in self._sums.items():
            if batch == i:
                for n, value in enumerate(sums):
                    sums[n] = value.double().mul_(2.0**exponent).float()


def input_gradient(
    block: DecoderBlock,
    hidden: Tensor,
    states: HiddenStates,
    i: int,
    handed: HandedGradients,
    on_input: OnProduct,
    on_out: OnProduct,
) -> Tensor:
    """(samples, length, width): the gradient with respect to ``hidden``, given that with respect to the outputs.

    ``hidden`` is what batch ``i`` of ``states`` was before the block, and that batch is now the gradient. ``handed``
    has the gradients with respect to what blocks hand on, from all later blocks, and gets what this one contributes.
    ``on_input`` receives the inputs of each matrix, ``on_out`` the gradients with respect to its outputs, see
    :class:`Products`.
    """
    parameters, matrices = dict(block.module.named_parameters()), [*block.matrices, *block.shared]
    hidden = hidden.detach().requires_grad_()
    earlier = states.arguments.handed(block.index, i)
    received = Handed({name: tuple(v.detach().requires_grad_() for v in values) for name, values in earlier.items()})
    now = Handed(received)
    with gradients(hidden.device):
        with Products(matrices, parameters, on_input):
            out = block.forward(hidden, states, i, handed=now)
        made = {name: values for name, values in now.items() if name not in received}
        outputs, inputs = [out, *_flat(made)], [hidden, *_flat(received)]
        given = [states.hidden[i], *handed.take(i, made)]
        with Products(matrices, parameters, on_out, backward=True):
            pulled, *others = torch.autograd.grad(outputs, inputs, given, allow_unused=True, materialize_grads=True)
    handed.add(i, received, others)
    return pulled


def _flat(handed: Mapping[str | int, tuple[Tensor, ...]]) -> list[Tensor]:
    return [value for values in handed.values() for value in values]
