"""The products of a module with its parameters, as they are computed."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from niwaki.errors import UnsupportedModelError
from niwaki.models.layout import Matrix

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
