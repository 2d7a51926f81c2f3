"""Gradients through a decoder block, and training of its weights."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from niwaki.effort import Fitting
from niwaki.errors import NumericalError
from niwaki.models.block import DecoderBlock
from niwaki.models.gram_capture import OnProduct, Products
from niwaki.models.hidden_states import Handed, HiddenStates, MemoryBudget, SpillList
from niwaki.models.layout import Matrix
from niwaki.models.processes import World
from niwaki.records.record import FitRecord

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
        """The gradients of the values, which are also where an optimizer looks for them."""
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
    """The root mean square of what is not zero in ``value``."""
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


#: The least mean square that errors in a place of the states are relative to, of the median of all places.
_LEAST = 1e-4
#: One batch in this many is held out, the first one at least, to see whether a fit holds.
_HELD = 16

#: How many times the weights are in memory, in float32: as they are, as they were best, two averages and gradients.
COPIES = 5


@dataclass
class Fit:
    """Fits the weights of ``block`` that are not zero, so that its outputs come near those of the dense block.

    Adam on |f(x) - y|^2, where x are the block's inputs in the pruned model and y the outputs of the dense block for
    the dense model's inputs (as in EBFT, arXiv 2402.12419), with each of the ``width`` places of a state relative to
    its mean square in y: in many models a few places hold nearly all of the sum, and a fit to that sum loses the rest.
    Steps are relative to the root mean square of each parameter's weights that are not zero, and decrease linearly to
    0. Some batches are held out (of one batch alone, itself); the weights are those of the epoch with the lowest error
    there, or the original ones if none is better. No weight becomes zero. A step takes one batch of each process. With
    ``on_grid`` the block computes with rounded weights, whose gradients change unrounded ones. Where matrices are
    products of two ``factors``, the first of their parts by name, these are trained on their own masks, in the same way
    with ``project_factors``, and are replaced by what has become of them.

    Cost: per epoch a forward and a backward pass of the block for all batches; memory of five float32 copies of the
    weights and of the activations of a batch.
    """

    block: DecoderBlock
    states: HiddenStates  # the inputs of the pruned block, which stay as they are
    targets: HiddenStates  # what its outputs should be, in batches for the same parts; of the first samples at least
    settings: Fitting
    world: World
    done: Callable[[], None]  # called after each of the ``batches`` that pass through the block
    on_grid: Projection | None = None
    factors: Mapping[str, Sequence[Tensor]] | None = None
    project_factors: FactorProjection | None = None
    seconds: float = math.inf  # that it may take; the rate then decreases with the share that is left of them

    def __post_init__(self) -> None:
        self.states.arguments.share_calls(self.targets.arguments)  # the last batch can be smaller there
        self._parts = self.targets.steps(self.settings.tokens_per_part(self.world.size))
        count = min(self.world.collected(len(self._parts)))
        self._held = list(range(0, count, _HELD))
        self._rest = [i for i in range(count) if i % _HELD] or self._held
        some = sum(map(len, self.targets.tokens)) < sum(map(len, self.states.tokens))
        self._steps = max(1, round((1.0 if some else self.settings.epochs) * len(self._rest)))
        self.batches = len(self._held) * (1 + math.ceil(self._steps / len(self._rest))) + self._steps

    def run(self) -> FitRecord:
        """The fit; NumericalError where its error is not finite."""
        began = time.perf_counter()
        block, steps, rest = self.block, self._steps, self._rest
        self._weights = self._found_weights()
        order = torch.Generator().manual_seed(block.index)
        with trainable(block) as weights:
            factors = None
            if self.factors and self.project_factors:
                factors = TrainedFactors(block, self.factors, self.project_factors)
            self._trained = factors or TrainedWeights(block, weights, self.on_grid)
            parameters = self._trained.values
            masks = [value != 0 for value in parameters]
            optimizer = _optimizer(parameters, self.settings.rate)
            best = before = self._error()
            kept, at = [value.detach().clone() for value in parameters], 0.0
            for step in range(steps):
                if step % len(rest) == 0:
                    epoch = torch.randperm(len(rest), generator=order).tolist()
                with self._trained.computing(), gradients(parameters[0].device):
                    for squares in self._squares(rest[epoch[step % len(rest)]]):
                        squares.sum().backward()
                found = self._trained.gradients()
                self.world.sum(found)
                for gradient, mask in zip(found, masks, strict=True):
                    gradient.mul_(mask)  # a pruned weight without gradient stays where it is
                share = self._share(step, began)
                for group in optimizer.param_groups:
                    group["lr"] = group["rate"] * (1 - share)
                optimizer.step()
                optimizer.zero_grad()
                self.done()
                is_last = step + 1 == steps or share == 1
                if (step + 1) % len(rest) and not is_last:
                    continue
                now = self._error()
                if now < best:
                    best, at = now, (step + 1) / len(rest)
                    for old, value in zip(kept, parameters, strict=True):
                        old.copy_(value.detach())
                if is_last:
                    break
            for old, value, mask in zip(kept, parameters, masks, strict=True):
                value.data = _off_zero(old, mask, smallest_weight(block))
            self._trained.settle()
            self.factors = factors.parts if factors else None
        return FitRecord(block.index, before, best, at, time.perf_counter() - began, step + 1)

    def _share(self, step: int, began: float) -> float:
        """How much of what the fit may take is behind it before ``step``, up to 1, in all processes."""
        if math.isinf(self.seconds):
            return step / self._steps
        return self.world.received(min(1.0, max(step / self._steps, (time.perf_counter() - began) / self.seconds)))

    def _target(self, part: tuple[int, slice]) -> Tensor:
        return self.targets.hidden.samples(*part)

    def _found_weights(self) -> Tensor:
        """(width,) float32: what a squared error counts in each place of the states, so that all places count alike.

        It is relative to what the held-out targets have in that place: the error is the mean of what they make.
        """
        held = (self._target(part) for i in self._held for part in self._parts[i])
        squares = torch.stack([target.double().flatten(0, -2).square().sum(0) for target in held]).sum(0)
        self.world.sum([squares])
        least = max(_LEAST * float(squares.median()), 1e-30)  # a place that is hardly used is not all that counts
        return squares.clamp_(min=least).mul_(len(squares)).reciprocal_().float()

    def _squares(self, i: int) -> Iterator[Tensor]:
        """What each output of the parts of step ``i`` contributes to the error."""
        for part in self._parts[i]:
            answer = self.block.run(self.states.hidden.samples(*part), self.states, *part)
            wanted = self._target(part).float()
            yield (answer.reshape(wanted.shape).float() - wanted).square() * self._weights

    def _error(self) -> float:
        """The error of what is held out, in all processes."""
        error = 0.0
        with self._trained.computing():
            for i in self._held:
                with torch.no_grad():  # in float64 a few huge activations do not hide the rest
                    error += sum(float(squares.sum(dtype=torch.float64)) for squares in self._squares(i))
                self.done()
        error = sum(self.world.collected(error))
        if not math.isfinite(error):
            raise NumericalError(
                f"block {self.block.index}: fitting it arrived at NaN or infinite outputs; try a lower rate than "
                f"rate={self.settings.rate:g}, or dtype float32"
            )
        return error


def samples_to_fit(count: int, epochs: float) -> tuple[Tensor, int]:
    """An order of so many samples, and on how many of the first of them the dense model runs.

    For less than one epoch these are only some, drawn from all; in more than one, all are used again.
    """
    if epochs >= 1:
        return torch.arange(count), count
    return torch.randperm(count, generator=torch.Generator().manual_seed(0)), max(1, round(epochs * count))


def _optimizer(parameters: list[nn.Parameter], rate: float) -> torch.optim.Adam:
    """Each parameter with its own "rate"."""
    groups = [{"params": [value], "rate": rate * root_mean_square(value)} for value in parameters]
    # Relative errors of large blocks have gradients far below the usual epsilon, 1e-8.
    return torch.optim.Adam(groups, lr=0.0, eps=1e-16, fused=True)


def _off_zero(value: Tensor, mask: Tensor, smallest: float) -> Tensor:
    """``value`` with weights on the mask no smaller than ``smallest``: rounded to 0 they would count as pruned."""
    close = mask & (value.abs() < smallest)
    return value.masked_scatter_(close, torch.full_like(value[close], smallest).copysign(value[close]))
