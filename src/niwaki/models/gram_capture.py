"""Gram matrices of the inputs of each matrix of a block, whatever kind of module computes with it.

They are seen as factors of products with a weight's memory: for nn.Linear and its relatives, for GPT-2's Conv1D, for
experts in three-dimensional parameters, one at a time or all in one call.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from niwaki.choices import TF32
from niwaki.errors import NumericalError, UnsupportedModelError
from niwaki.layer.linalg import gram_in_tf32, is_finite, products
from niwaki.layer.problem import Gram
from niwaki.models.layout import Matrix
from niwaki.models.processes import World

_ATEN = torch.ops.aten

#: Where the first of the two factors is among the arguments.
_PRODUCTS = {_ATEN.mm.default: 0, _ATEN.bmm.default: 0, _ATEN.addmm.default: 1, _ATEN.baddbmm.default: 1}

#: What :class:`Products` calls: see ``on_product`` there.
OnProduct = Callable[[str, int | None, Tensor, bool], bool | None]


class _StopError(Exception):
    """Torch has no other way to leave a forward pass."""


class Products(TorchDispatchMode):
    """A context in which products with ``matrices`` are seen, by the memory of their ``parameters``, which are by path.

    ``on_product`` receives the parameter's path, which expert's matrix (None outside of experts), its inputs (.., rows,
    in) or in a ``backward`` pass the gradient with respect to its outputs (.., rows, out), and whether all experts run
    together on the same number of rows each. If it returns True the pass ends there, and with it the context.
    """

    def __init__(
        self, matrices: list[Matrix], parameters: Mapping[str, Tensor], on_product: OnProduct, backward: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # In a backward pass weights are the transposes of what they were in the forward pass.
        self._transposed = {matrix.parameter: matrix.transposed != backward for matrix in matrices}
        self._parameters = parameters
        self._by_memory = {parameters[name].untyped_storage().data_ptr(): name for name in self._transposed}
        self._on_product = on_product

    def __exit__(self, *raised: Any) -> bool:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        return isinstance(raised[1], _StopError)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        at = _PRODUCTS.get(func)
        if at is not None:
            left, right = args[at], args[at + 1]
            self._product(right, left, -2)
            self._product(left, right.mT, -1)
        return func(*args, **(kwargs or {}))

    def _product(self, weight: Tensor, X: Tensor, inner: int) -> None:
        """A product of X (.., rows, in) with what may be a weight whose dimension ``inner`` is summed over."""
        parameter = self._by_memory.get(weight.untyped_storage().data_ptr())
        if parameter is None:
            return
        whole = self._parameters[parameter]
        transposed = weight.stride(inner) != whole.stride(-1)
        if transposed != self._transposed[parameter] and 1 not in weight.shape[-2:]:
            raise UnsupportedModelError(
                f"{parameter} is used as the transpose of what its module suggests; please report this model"
            )
        expert, step = None, 0
        if whole.ndim == 3:
            expert = (weight.storage_offset() - whole.storage_offset()) // whole.stride(0)
            step = weight.stride(0) // whole.stride(0)
        together = weight.ndim == 3 and weight.stride(0) != 0
        for i, rows in enumerate(X if together else [X]):
            if self._on_product(parameter, expert if expert is None else expert + i * step, rows, together):
                raise _StopError


#: Rows of a Gram matrix that are computed at a time: few enough to leave out nearly all below the diagonal.
_STRIP = 256


@dataclass(eq=False)
class InputGram:
    """The Gram matrix of an input that one or more matrices of a block share."""

    names: list[str]  # of the matrices in the block, in the order of computation
    H: Tensor  # (in, in) float32, X^T X / tokens
    tokens: int = 0  # rows of X
    borrowed: int = 0  # tokens that stand in for missing ones: see InputGrams.finish

    def gram(self, shared: bool) -> Gram:
        """H for solvers, ``shared`` by several problems or not."""
        return Gram(self.H, shared, trusted=True, tokens=self.tokens + self.borrowed)


def _mixtures(matrices: Iterable[Matrix]) -> list[list[str]]:
    """The names of the same matrix of all experts, for each one that experts have.

    Experts may be in one parameter, or modules of a list or dictionary of that name.
    """
    found = defaultdict[str, list[str]](list)
    for matrix in matrices:
        if matrix.expert is not None:
            found[matrix.parameter].append(matrix.name)
        elif ".experts." in matrix.name:
            found[re.sub(r"\d+", "*", matrix.name)].append(matrix.name)
    return list(found.values())


@dataclass
class InputGrams:
    """Gathers the Gram matrices of ``matrices`` over several forward passes of their block."""

    matrices: list[Matrix]
    parameters: Mapping[str, Tensor]  # theirs by path, with the memory that the passes use
    tf32: TF32 = "auto"  # see niwaki.layer.linalg
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # (tokens) of the next pass, by the name of a matrix

    def __post_init__(self) -> None:
        self._by_expert: dict[tuple[str, int | None], list[Matrix]] = {}
        for matrix in self.matrices:
            self._by_expert.setdefault((matrix.parameter, matrix.expert), []).append(matrix)
        self._grams: dict[str, InputGram] = {}  # by the name of each matrix, like all but the next one
        #: Of this pass, with its input: while that stays, no other tensor takes its place in memory.
        self._seen: dict[object, tuple[InputGram, Tensor]] = {}
        self._uses: Counter[str] = Counter()  # in this pass
        self._once = False  # whether the last pass used each matrix once: the next ends where all have their inputs

    @property
    def names(self) -> list[list[str]]:
        """The matrices that have had inputs, those with the same one together, in the order of computation."""
        return [gram.names for gram in dict.fromkeys(self._grams.values())]

    def watch(self, run: Callable[[], object], to_the_end: bool = False) -> None:
        """Calls ``run``, one forward pass of the block ``to_the_end``, or as much of it as there are inputs to see."""
        self._once &= not to_the_end
        try:
            # Each time: between two passes a parameter can move to other memory.
            with Products(self.matrices, self.parameters, self._on_product):
                run()
            self._once = all(self._uses[matrix.name] == 1 for matrix in self.matrices)
        finally:
            self._seen.clear()
            self._uses.clear()

    def finish(self, world: World) -> list[InputGram]:
        """The Gram matrices of all distinct inputs over all processes, in the order of computation.

        An expert with fewer tokens than inputs borrows for each missing one the mean over all tokens of all experts,
        for full rank. NumericalError for NaN or infinite activations, UnsupportedModelError for unused matrices.
        """
        used = {m.parameter for m in self.matrices if m.name in self._grams}
        mixtures = _mixtures(self.matrices)
        of_expert = {name: names for names in mixtures for name in names}
        for (parameter, _), matrices in self._by_expert.items():
            if parameter not in used and self._grams.keys().isdisjoint(of_expert.get(matrices[0].name, ())):
                raise UnsupportedModelError(f"{parameter} is not used when its block runs; please report this model")
            if matrices[0].name not in self._grams:
                self._new([m.name for m in matrices], matrices[0].shape[1], self.parameters[parameter].device)
        grams = self._summed(world)
        for names in mixtures:
            self._lend(names)
        for gram in grams:
            for start in range(0, len(gram.H), _STRIP):
                stop = start + _STRIP
                gram.H[stop:, start:stop] = gram.H[start:stop, stop:].T
            gram.H.div_(max(1, gram.tokens + gram.borrowed))
            if not is_finite(gram.H):
                raise NumericalError(
                    f"the inputs of {gram.names[0]} are NaN or infinite on the calibration text; try dtype float32, "
                    "or another text"
                )
        return grams

    def _summed(self, world: World) -> list[InputGram]:
        """Sums over the processes, in the first one's order: others may see experts in another."""
        order = world.received(self.names)
        grams = [self._grams[names[0]] for names in order]
        tokens = torch.tensor([gram.tokens for gram in grams])
        world.sum([tokens, *(gram.H for gram in grams)])
        for gram, names, count in zip(grams, order, tokens.tolist(), strict=True):
            gram.names, gram.tokens = names, count
        return grams

    def _on_product(self, parameter: str, expert: int | None, X: Tensor, together: bool) -> bool:
        names = [matrix.name for matrix in self._by_expert.get((parameter, expert), [])]
        if not names:
            return False
        # Where all experts run on the same number of rows, those of other experts' tokens are zero.
        rows = X[X.any(dim=1)] if together else X.flatten(0, -2)
        self._uses.update(names)
        self._gather(names, rows, X)
        return self._once and len(self._uses) == len(self.matrices)

    def _gather(self, names: list[str], X: Tensor, origin: Tensor) -> None:
        key = (origin.data_ptr(), origin.shape, origin.stride(), origin._version)
        if key not in self._seen:
            gram = self._grams.get(names[0]) or self._new(names, X.shape[1], X.device)
            with products(gram_in_tf32(self.tf32, X.dtype)):
                X = X.float()
                if (weights := self.weights.get(names[0])) is not None:
                    X = X * weights.to(X.device, X.dtype).sqrt().view(-1, 1)
                for start in range(0, X.shape[1], _STRIP):  # the upper triangle is enough
                    strip = slice(start, start + _STRIP)
                    gram.H[strip, start:].addmm_(X[:, strip].T, X[:, start:])
            gram.tokens += X.shape[0]
            self._seen[key] = gram, origin
        gram, _ = self._seen[key]
        for name in names:
            self._grams.setdefault(name, gram)
            if name not in gram.names:
                gram.names.append(name)

    def _new(self, names: list[str], width: int, device: torch.device) -> InputGram:
        gram = InputGram(list(names), torch.zeros(width, width, device=device))
        self._grams |= dict.fromkeys(names, gram)
        return gram

    def _lend(self, experts: Sequence[str]) -> None:
        grams = dict.fromkeys(self._grams[name] for name in experts)
        poor = [gram for gram in grams if gram.tokens < gram.H.shape[0] and not gram.borrowed]
        total = sum(gram.tokens for gram in grams)
        if not (poor and total):
            return
        H = torch.zeros_like(poor[0].H)
        for gram in grams:  # in place: these matrices are large
            H += gram.H
        H /= total
        for gram in poor:
            gram.borrowed = gram.H.shape[0] - gram.tokens
            gram.H.add_(H, alpha=gram.borrowed)
