"""A pruned model in memory, of which something can be trained."""

import contextlib
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from niwaki.errors import NumericalError
from niwaki.healing.objective import Logits, States
from niwaki.layer.grid import AnyGrid
from niwaki.layer.linalg import is_finite
from niwaki.models.formats import Factored, OnGrid, factor_keys, format_of, product
from niwaki.models.layout import Matrix
from niwaki.models.scales import scale_key
from niwaki.models.streamed import StreamedModel
from niwaki.models.structure import choice
from niwaki.models.training import root_mean_square

#: The rank of what the method lora adds to each matrix, see docs/healing.md.
RANK = 16
#: Tokens in a window up to which a CPU trains faster in bfloat16 where attention is plain products and a softmax: the
#: backward pass of torch's own takes twice their time. What they keep grows with the square of the window.
_SHORT = 512
#: What a scale that is trained may be of what it was, at least and at most.
_FACTORS = (0.25, 4.0)
#: What is added to the name of scales for that of minima, and how far these go in a step, relative to scales: a minimum
#: moves all weights of a block in the same direction.
_MINIMA, _OF_MINIMA = ".minima", 0.2


class Student:
    """The pruned model, as a whole and in float32; with ``half`` it and its head compute in bfloat16.

    It is to be trained on windows of ``length`` tokens. ``logits`` says how its head makes them, see
    :func:`.objective.find_logits`.
    Trained are the matrices of its blocks, where they are not zero, and the vectors of blocks and of the last norm.
    Embeddings, routers and the head stay. Where matrices are on a grid, it computes with trained weights rounded to it
    (straight-through gradients: Bengio et al. 2013, arXiv:1308.3432), and scales stay.

    Attributes:
        head: In the dtype that it computes in.
        parameters: What is trained, by name, in float32.
        masks: Of those that are matrices, where weights are not pruned.
        sizes: The magnitude that changes of each parameter are relative to.
    """

    def __init__(self, stream: StreamedModel, logits: Logits | States, length: int, half: bool = False) -> None:
        self.device, self._stream, self._half = stream.device, stream, half
        model = stream.load().eval().requires_grad_(False)
        dtype = torch.bfloat16 if half else stream.dtype
        is_short = dtype == torch.bfloat16 and self.device.type == "cpu" and length <= _SHORT
        if is_short and model._can_set_attn_implementation():  # it would warn where it cannot
            model.set_attn_implementation("eager")
        ends = model.get_input_embeddings(), model.get_output_embeddings()
        self.head = logits.of(model, dtype)
        inside = {id(value) for value in stream.decoder.parameters()} - {id(end.weight) for end in ends if end}
        matrices = defaultdict[str, list[Matrix]](list)  # by the parameter that they are in
        for matrix in stream.matrices():
            matrices[stream.places[matrix.block] + matrix.parameter].append(matrix)
        named = {name: value for name, value in model.named_parameters() if id(value) in inside}
        vectors = {name for name, value in named.items() if value.ndim == 1 and not choice(name)}
        self.parameters: dict[str, nn.Parameter] = {}
        self.masks: dict[str, Tensor] = {}
        # Before anything small is allocated that stays: between them, memory for temporary copies would not be free.
        self.sizes = {
            name: root_mean_square(value) for name, value in named.items() if name in matrices or name in vectors
        }
        self._format = format_of(stream.checkpoint)
        #: The matrices in a parameter that are in a format, with their parts.
        self._in_format: dict[str, list[tuple[Matrix, tuple[Tensor, ...]]]] = {}
        for name in named:
            if name in matrices:
                self._train_matrix(name, named[name], matrices[name])
            elif name in vectors:
                self._train_vector(name, named[name])

    def _train_matrix(self, name: str, value: nn.Parameter, matrices: list[Matrix]) -> None:
        self._train_vector(name, value)
        self.masks[name] = value.detach() != 0
        if parts := self._parts(matrices):
            self._in_format[name] = parts

    def _parts(self, matrices: list[Matrix]) -> list[tuple[Matrix, tuple[Tensor, ...]]]:
        """The ``matrices`` that are in the format of the model, with their parts."""
        read = ((matrix, self._format.read_parts(self._stream.checkpoint, matrix)) for matrix in matrices)
        return [(matrix, parts) for matrix, parts in read if parts]

    def _train_vector(self, name: str, value: nn.Parameter) -> None:
        value.requires_grad_(True)
        self.parameters[name] = value

    def states(self, tokens: Tensor) -> Tensor:
        """(tokens, width): after the last norm, for ``tokens`` (windows, length); of pairs for what predicts."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._half):
            if self._stream.pairs is not None:
                return self._stream.target_states(tokens)
            states: Tensor = self._stream.decoder(input_ids=tokens, use_cache=False).last_hidden_state
        return states.flatten(0, 1)

    @torch.no_grad()
    def stored(self) -> dict[str, Tensor]:
        """All that is trained as files are to have it: on the CPU, in their dtype, with the same weights zero."""
        return {
            name: rounded(name, self._formatted(name, value), self._dtype(name), self.masks.get(name)).cpu()
            for name, value in self.parameters.items()
        }

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """While gradients are computed, the weights are those on the grid, where there is one."""
        values = {name: self._formatted(name, self.parameters[name]) for name in self._in_format}
        return self.holding(values) if values else contextlib.nullcontext()

    def _formatted(self, name: str, value: Tensor) -> Tensor:
        """The weights that are trained, or where they are on a grid, a copy on it with the same zeros."""
        value = value.detach()
        if name in self._in_format:
            value = value.clone()
            for matrix, parts in self._in_format[name]:
                weights = matrix.within(value)
                weights.copy_(self._format.project(matrix, weights, [part.to(value.device) for part in parts]))
        return value

    @contextlib.contextmanager
    def holding(self, stored: dict[str, Tensor]) -> Iterator[None]:
        """The model as it would be read from a file with ``stored``."""
        trained = {name: self.parameters[name].data for name in stored}
        try:
            for name in trained:
                value = self.parameters[name]
                value.data = stored[name].to(value.device, value.dtype)
            yield
        finally:
            for name, data in trained.items():
                self.parameters[name].data = data

    def tensors(self, stored: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(key, tensor) of the checkpoint, for all that ``stored`` changes."""
        for name, value in stored.items():
            yield from self._stream.layout.split(name, value)

    def _dtype(self, name: str) -> torch.dtype:
        """The dtype that the checkpoint has what is trained in."""
        layout = self._stream.layout
        return layout.checkpoint.dtype(layout.keys(name)[0])


class FactoredStudent(Student):
    """The pruned model whose matrices are products of two sparse factors, each of which is trained on its mask.

    Linear layers multiply with one factor and then with the other: for few tokens that is less work than the product.
    All else, such as experts in one parameter, computes with the products, whose gradients give those of the factors.
    These have the names that they have in files. Where they are on a grid, the model computes with what they are there,
    and scales stay.
    """

    def __init__(self, stream: StreamedModel, logits: Logits | States, length: int, half: bool = False) -> None:
        #: By name in the model, the parameters that are products of factors, and those of them that it computes with.
        self._products: dict[str, tuple[nn.Parameter, list[Matrix]]] = {}
        self._computed: list[tuple[nn.Parameter, list[Matrix]]] = []
        self._dtypes: dict[str, torch.dtype] = {}  # of factors
        self._scales: dict[str, tuple[Tensor, ...]] = {}  # of each factor, none if it is not on a grid
        super().__init__(stream, logits, length, half)

    def _train_matrix(self, name: str, value: nn.Parameter, matrices: list[Matrix]) -> None:
        parts = self._parts(matrices)
        if not parts:  # of a block that was left as it was
            super()._train_matrix(name, value, matrices)
            return
        self._products[name] = value, matrices
        if (layer := self._linear(name, matrices[0])) is not None:
            multiply = _two_products(self, factor_keys(matrices[0].key), layer.bias)
            layer.forward = multiply  # type: ignore[method-assign, assignment]
        else:
            value.requires_grad_(True)
            self._computed.append((value, matrices))
        for matrix, (left, right, *scales) in parts:
            for at, (key, factor) in enumerate(zip(factor_keys(matrix.key), (left, right), strict=True)):
                trained = factor.to(self.device, torch.float32, copy=True)
                self.parameters[key], self.masks[key] = nn.Parameter(trained), trained != 0
                self.sizes[key], self._dtypes[key] = root_mean_square(factor), factor.dtype
                self._scales[key] = tuple(scales[at : at + 1])

    def _linear(self, name: str, matrix: Matrix) -> nn.Linear | None:
        """The layer whose weights ``matrix`` is, all of them; None where it is no linear layer of one block alone."""
        layer = self._stream.model.get_submodule(name.rpartition(".")[0])
        alone = matrix.is_module and not matrix.blocks
        return layer if alone and type(layer) is nn.Linear else None

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """While gradients are computed; then the factors have theirs."""
        with self.holding({key: self._formatted(key, self.parameters[key]) for key in self._scales}):
            yield
            for whole, matrices in self._computed:
                if whole.grad is None:  # as of experts that none of these tokens went to
                    continue
                for matrix in matrices:
                    left, right = (self.parameters[key] for key in factor_keys(matrix.key))
                    gradient = matrix.within(whole.grad)
                    left.grad, right.grad = gradient @ right.detach().T, left.detach().T @ gradient
                whole.grad = None

    @contextlib.contextmanager
    def holding(self, stored: dict[str, Tensor]) -> Iterator[None]:
        with super().holding(stored):
            for whole, matrices in self._computed:
                for matrix in matrices:
                    factors = [self.parameters[key].data for key in factor_keys(matrix.key)]
                    matrix.within(whole.data).copy_(product(factors))
            yield

    def tensors(self, stored: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        yield from super().tensors({name: value for name, value in stored.items() if name not in self._scales})
        for name, (whole, matrices) in self._products.items():
            products = torch.empty_like(whole, device="cpu")
            for matrix in matrices:
                own = factor_keys(matrix.key)
                matrix.within(products.data).copy_(product([stored[key] for key in own]))
                scales = [each for key in own for each in self._scales[key]]
                every = factor_keys(matrix.key, scaled=bool(scales))
                yield from zip(every, [*(stored[key] for key in own), *scales], strict=True)
            yield from self._stream.layout.split(name, products.data.to(self._dtype(name)).add_(0.0))

    def _formatted(self, name: str, value: Tensor) -> Tensor:
        if name not in self._scales:
            return super()._formatted(name, value)
        scales = [each.to(value.device) for each in self._scales[name]]
        assert isinstance(self._format, Factored)
        return self._format.project_factor(value.detach(), scales)

    def _dtype(self, name: str) -> torch.dtype:
        return self._dtypes.get(name) or super()._dtype(name)


def _two_products(student: FactoredStudent, keys: Sequence[str], bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The forward pass of a linear layer of two factors, which ``student`` has under these ``keys``."""
    owner = weakref.proxy(student)  # so that the layer, which is there for longer, does not keep them

    def forward(x: Tensor) -> Tensor:
        left, right = (owner.parameters[key] for key in keys)
        return nn.functional.linear(nn.functional.linear(x, right), left, bias)

    return forward


class LowRankStudent(Student):
    """The pruned model in the dtype of ``stream``, with a product of two thin factors added to each matrix (LoRA).

    The product, of rank ``rank``, is added only where weights are not pruned. Trained are the factors, and the vectors
    of blocks, or with rank 0 these alone. It is for models that fit in memory without gradients and moments of all
    weights: those of one block at a time are computed, and computed again in the backward pass.

    Source: Hu et al. 2021, arXiv:2106.09685; masked: Zimmer et al. 2023, arXiv:2312.15230.
    """

    def __init__(self, stream: StreamedModel, logits: Logits | States, length: int, rank: int) -> None:
        self._rank = rank
        #: What vectors are trained in multiples of.
        self._units: dict[str, Tensor] = {}
        self._drawing = torch.Generator().manual_seed(0)
        self._trained: list[dict[str, str]] = [{} for _ in stream.blocks]  # by path in each block: names in the model
        super().__init__(stream, logits, length)
        for block, trained in zip(stream.blocks, self._trained, strict=True):
            block.forward = self._forward(block, trained)

    def _train_matrix(self, name: str, value: nn.Parameter, matrices: list[Matrix]) -> None:
        if not self._rank:
            return
        *experts, rows, columns = value.shape
        rank = min(self._rank, rows, columns)
        down = torch.randn(*experts, rank, columns, generator=self._drawing).div_(math.sqrt(rank))
        self._add(f"{name}.up", torch.zeros(*experts, rows, rank), self.sizes[name])  # the product is 0 at first
        self._add(f"{name}.down", down, 1 / math.sqrt(rank))
        self._computed_with(name)

    def _train_vector(self, name: str, value: nn.Parameter) -> None:
        if name.startswith(tuple(self._stream.places)) and self.sizes[name]:  # zeros alone say nothing of how far to go
            numbers = value.detach().float()
            self._units[name] = _units(numbers)
            self._add(name, numbers / self._units[name], 1.0)
            self._computed_with(name)

    def _add(self, name: str, value: Tensor, size: float) -> None:
        self.parameters[name], self.sizes[name] = nn.Parameter(value.to(self.device)), size

    def _computed_with(self, name: str) -> None:
        """From now on its blocks compute with what has become of this parameter."""
        for use in self._stream.layout.same(name):
            for trained, place in zip(self._trained, self._stream.places, strict=True):
                if use.startswith(place):
                    trained[use.removeprefix(place)] = name

    def _forward(self, block: nn.Module, trained: dict[str, str]) -> Callable[..., Any]:
        """A forward pass with what is trained, of which only the inputs stay in memory."""
        module = _Called(block)

        def run(*args: Any, **kwargs: Any) -> Any:
            # Its parameters are not kept here, so that they can be unloaded.
            named = ((path, name, block.get_parameter(path)) for path, name in trained.items())
            changed = {f"block.{path}": self._changed(name, value) for path, name, value in named}
            return functional_call(module, changed, args, kwargs)

        return lambda *args, **kwargs: checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    def _changed(self, name: str, value: Tensor) -> Tensor:
        """What has become of a parameter, as files have it and in the dtype of ``value``."""
        trained = self.parameters
        changed = self._vector(name, trained) if name in self._units else self._sum(name, value, trained)
        return changed.to(self._dtype(name)).to(value.dtype)

    def _vector(self, name: str, trained: Mapping[str, Tensor]) -> Tensor:
        """What has become of a vector."""
        return trained[name] * self._units[name].to(trained[name].device)

    @staticmethod
    def _sum(name: str, value: Tensor, factors: Mapping[str, Tensor]) -> Tensor:
        """A matrix and, where it is not zero, the product of its factors, in the dtype of the matrix."""
        up, down = (factors[f"{name}.{factor}"].to(value.dtype) for factor in ("up", "down"))
        return (torch.addmm if value.ndim == 2 else torch.baddbmm)(value, up, down) * (value != 0)

    @torch.no_grad()
    def stored(self) -> dict[str, Tensor]:
        """All that is trained, in float32 on the CPU."""
        stored = {name: value.detach().cpu().clone() for name, value in self.parameters.items()}
        for name, value in stored.items():
            _check_finite(name, value)
        return stored

    @torch.no_grad()
    def tensors(self, stored: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(key, tensor) of the checkpoint, for all that ``stored`` changes, one after another."""
        layout = self._stream.layout
        for name in dict.fromkeys(name for trained in self._trained for name in trained.values()):
            dtype = self._dtype(name)
            if name in self._units:
                value, mask = self._vector(name, stored), None
            else:
                before = layout.read(name, dtype)
                value, mask = self._sum(name, before, stored), before != 0
            yield from layout.split(name, rounded(name, value, dtype, mask))


class ScaledStudent(LowRankStudent):
    """The pruned model whose matrices are on a grid, of which the scales are trained, with the vectors of blocks.

    Whole numbers stay to the bit, and with them zeros on grids that have a 0, so that files are as large as before and
    every program reads them. A scale is what it was, times a number that is trained: 1 at first, and within
    ``_FACTORS``, so that no scale becomes 0, infinite or of another sign. The model computes with scales as files have
    them, rounded to their dtype (straight-through gradients). In llama.cpp's types the numbers in float16 are trained;
    the whole numbers of groups, which are multiples of these, stay.

    Source: Kim et al. 2023 (PEQA), arXiv:2305.14152, there for a task.
    """

    def __init__(self, stream: StreamedModel, logits: Logits | States, length: int) -> None:
        #: By name in the model: the matrices of a parameter, each with its grid, its whole numbers and its scales.
        self._scaled: dict[str, list[tuple[Matrix, AnyGrid, Tensor, Tensor]]] = {}
        super().__init__(stream, logits, length, rank=0)

    def _train_matrix(self, name: str, value: nn.Parameter, matrices: list[Matrix]) -> None:
        assert isinstance(self._format, OnGrid)
        for matrix, (scales,) in self._parts(matrices):
            grid, scales = self._format.grid_of(matrix), scales.to(self.device)
            codes = grid.codes(matrix.within(value.detach()).float(), scales.float()).to(torch.int8)
            self._scaled.setdefault(name, []).append((matrix, grid, codes, scales))
            name_of, free = _name_of_scales(matrix), grid.free(scales.float())
            ones = torch.ones(len(free), grid.scaled(scales), device=self.device)
            self._add(name_of, ones, 1.0)
            if free.shape[1] > ones.shape[1]:
                self._add(f"{name_of}{_MINIMA}", ones.clone(), _OF_MINIMA)
        if name in self._scaled:
            self._computed_with(name)

    def _changed(self, name: str, value: Tensor) -> Tensor:
        if name not in self._scaled:
            return super()._changed(name, value)
        whole = value.detach().clone()
        for matrix, grid, codes, scales in self._scaled[name]:
            new = self._scales(matrix, grid, scales, self.parameters)
            matrix.within(whole).copy_(grid.values(codes.float(), new.float(), scales.dtype))
        return whole.to(self._dtype(name)).to(value.dtype)

    @staticmethod
    def _scales(matrix: Matrix, grid: AnyGrid, scales: Tensor, factors: Mapping[str, Tensor]) -> Tensor:
        """Those that ``scales`` of a matrix have become, in their dtype."""
        name, exact = _name_of_scales(matrix), scales.float()
        factor = factors[name].to(scales.device).clamp(*_FACTORS)
        if (minima := factors.get(f"{name}{_MINIMA}")) is not None:  # of all numbers of a block, and of its minima more
            factor = torch.cat([factor, (factor * minima.to(scales.device)).clamp(*_FACTORS)], dim=1)
        free = grid.free(exact)
        new = (free * factor).to(scales.dtype).float()
        return grid.with_free(exact, torch.where((new == 0) & (free != 0), free, new)).to(scales.dtype)

    @torch.no_grad()
    def tensors(self, stored: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        layout = self._stream.layout
        for name in dict.fromkeys(name for trained in self._trained for name in trained.values()):
            dtype = self._dtype(name)
            if name not in self._scaled:
                yield from layout.split(name, rounded(name, self._vector(name, stored), dtype, None))
                continue
            whole, every = layout.read(name, dtype), defaultdict[str, list[Tensor]](list)
            for matrix, grid, codes, scales in self._scaled[name]:
                new = self._scales(matrix, grid, scales, stored)
                weights = grid.values(codes.float(), new.float(), scales.dtype)
                matrix.within(whole).copy_(rounded(matrix.key, weights, dtype, None))
                every[scale_key(matrix)].append(new.cpu())
            for matrix, *_ in self._scaled[name]:
                if of_it := every.pop(scale_key(matrix), None):
                    yield scale_key(matrix), of_it[0] if matrix.index is None else torch.stack(of_it)
            yield from layout.split(name, whole)


def _units(vector: Tensor) -> Tensor:
    """A power of two, so that nothing is rounded, near the magnitude of each number, or a tenth of their mean.

    A step changes all numbers by the same share of these. Gemma's norms have weights of 0.03 beside such of 700: a
    share of their root mean square would be many times what most of them are.
    """
    least = 0.1 * float(vector.abs().mean())
    return torch.ldexp(torch.ones_like(vector), torch.frexp(vector.abs().clamp(min=least)).exponent - 1)


def _name_of_scales(matrix: Matrix) -> str:
    """What the trained factors of the scales of ``matrix`` are called; experts may share a tensor of scales."""
    return scale_key(matrix) if matrix.index is None else f"{scale_key(matrix)}.{matrix.index}"


class _Called(nn.Module):
    """A block's own forward pass, whatever is called in its place."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.block).forward(self.block, *args, **kwargs)


def rounded(name: str, value: Tensor, dtype: torch.dtype, mask: Tensor | None) -> Tensor:
    """A copy of ``value`` in ``dtype``, in which nothing on the mask is zero, and no zero is -0.0.

    NumericalError, which calls it ``name``, where it is not finite.
    """
    result = value.to(dtype, copy=True).add_(0.0)  # -0.0 is not what sparse kernels expect
    if mask is not None:
        lost = mask & (result == 0)
        result[lost] = torch.full_like(result[lost], torch.finfo(dtype).tiny).copysign(value[lost].to(dtype))
    _check_finite(name, result)
    return result


def _check_finite(name: str, value: Tensor) -> None:
    if not is_finite(value):
        raise NumericalError(f"{name}: a trained weight is too large for {value.dtype}")
