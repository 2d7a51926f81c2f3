"""A linear layer that computes with a packed matrix."""

import functools
import importlib.util
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual

from niwaki.errors import UsageError
from niwaki.packed import kernels
from niwaki.packed.matrix import COMPONENTS, PackedMatrix, in_rows

#: The most vectors for which a product reads the packed matrix as it is, by the kind of other devices than processors.
#: With more, unpacking it once for all is cheaper (docs/results-speed.md).
DIRECT = {"cuda": 16}


class SparseLinear(nn.Module):
    """y = x W^T + b, like ``nn.Linear``, with W packed. For inference: gradients flow to x, W and b are constants.

    With a ``right`` factor W is ``weight`` times that, and a product is two: x right^T first, in the dtype of x.

    Few vectors are multiplied with W as it is, by the native kernels or Triton's, added up in float32; otherwise some
    rows of W at a time are unpacked for torch. If ``transposed``, ``state_dict()`` has W^T (in_features, out_features),
    and so has ``weight``, in the model's ``dtype``.
    """

    mask: Tensor | None
    values: Tensor
    starts: Tensor | None
    scales: Tensor | None
    right_values: Tensor | None
    bias: nn.Parameter | None

    def __init__(
        self,
        weight: PackedMatrix,
        bias: nn.Parameter | None = None,
        transposed: bool = False,
        dtype: torch.dtype | None = None,
        right: PackedMatrix | None = None,
    ) -> None:
        super().__init__()
        if right is not None and (right.shape[0], right.dtype) != (weight.shape[1], weight.dtype):
            raise UsageError(
                f"factors {weight.shape} {weight.dtype} and {right.shape} {right.dtype} cannot be multiplied"
            )
        self.out_features, self.in_features = weight.shape[0], (weight if right is None else right).shape[1]
        self._dtype, self._transposed, self._dense_dtype = weight.dtype, transposed, dtype or weight.dtype
        self._inner = weight.shape[1]
        self._strips = any(each is not None and each.strips for each in (weight, right))
        for name in COMPONENTS:
            self.register_buffer(name, getattr(weight, name), persistent=False)
            self.register_buffer(f"right_{name}", getattr(right, name, None), persistent=False)
        self.register_parameter("bias", bias)
        #: Whether the weights are those of another module, which has them in the ``state_dict()``.
        self.is_tied = False

    @property
    def packed(self) -> PackedMatrix:
        """W, or its left factor."""
        return self._matrix("", self._inner)

    @property
    def is_product(self) -> bool:
        """Whether W is a product of two factors."""
        return self.right_values is not None

    @property
    def right(self) -> PackedMatrix | None:
        """The right factor, if W is a product."""
        return None if self._buffers["right_values"] is None else self._matrix("right_", self.in_features)

    def _matrix(self, prefix: str, columns: int) -> PackedMatrix:
        buffers = cast("dict[str, Any]", self._buffers)  # attributes of modules are slow to find
        found = {name: buffers[f"{prefix}{name}"] for name in COMPONENTS}
        return PackedMatrix(**found, columns=columns, dtype=self._dtype, strips=self._strips)

    @property
    def weight(self) -> Tensor:
        """The dense weight in the model's dtype, unpacked each time: slow, for models that read it, such as Jamba."""
        return self._dense().to(self._dense_dtype)

    def _dense(self) -> Tensor:
        W = kernels.expand(self.packed)
        if (right := self.right) is not None:
            W = (W.float() @ kernels.expand(right).float()).to(W.dtype)
        return W.T.contiguous() if self._transposed else W

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]  # as nn.Module has it
        # A change of dtype is for what is computed with: packed values only move to another device.
        buffers = cast("dict[str, Any]", self._buffers)
        before = {name: value for name, value in buffers.items() if value is not None}
        self._dense_dtype = fn(torch.empty(0, dtype=self._dense_dtype, device=self.values.device)).dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in before.items():
            setattr(self, name, value.to(getattr(self, name).device))
        if self._strips and not kernels.reads_strips(self.values.device, self._dense_dtype):
            for prefix, each in (("", self.packed), ("right_", self.right)):
                for name, value in ({} if each is None else in_rows(each).components).items():
                    setattr(self, f"{prefix}{name}", value)
            self._strips = False
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:  # type: ignore[no-untyped-def]
        # That of the dense layer, so that what is saved is the model.
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.is_tied:
            destination[f"{prefix}weight"] = self._dense()

    def _load_from_state_dict(  # type: ignore[no-untyped-def]  # as nn.Module has it
        self, state_dict, prefix, metadata, strict, missing, unexpected, errors
    ) -> None:
        key = f"{prefix}weight"
        weight = state_dict.pop(key, None)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        if weight is not None:
            state_dict[key] = weight
            if not torch.equal(self._dense().to(weight), weight):
                errors.append(f"packed weights are constants and {key} has others; unpack the model for that")
        elif strict and not self.is_tied:
            missing.append(key)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # what compilers see of the library makes no sense
    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features), in the dtype of x; RuntimeError where W and x do not fit."""
        if torch._C._get_tracing_state() is not None:
            raise RuntimeError("layers with packed weights cannot be traced; unpack the model for that")
        kind = x.device.type
        if not x.is_floating_point() or self.values.device.type != kind:
            raise RuntimeError(
                f"packed weights on {self.values.device} cannot be multiplied with {x.dtype} on {x.device}"
            )
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        y = x.reshape(-1, self.in_features)
        if (right := self.right) is not None:
            y = _multiply(right, y, kind)
        y = _multiply(self.packed, y, kind)
        y = y if self.bias is None else y + self.bias.to(y.dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        kept = self.packed.kept + (0 if (right := self.right) is None else right.kept)
        sparsity = 1 - kept / (self.out_features * self.in_features)
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"sparsity={sparsity:.3f}, values={str(self.values.dtype).removeprefix('torch.')}"
        )


class SparseEmbedding(SparseLinear):
    """Token embeddings that stay packed, like ``nn.Embedding``: the rows of W that are asked for are made each time.

    W has no mask, so that any of its rows can be read by itself.
    """

    def __init__(self, weight: PackedMatrix, dtype: torch.dtype | None = None) -> None:
        super().__init__(weight, dtype=dtype)
        self.num_embeddings, self.embedding_dim = weight.shape

    def forward(self, tokens: Tensor) -> Tensor:
        """(...) int64 to (..., columns), in the dtype that the model computes in."""
        found = kernels.expand_rows(self.packed, tokens.flatten())
        return found.to(self._dense_dtype).view(*tokens.shape, self.embedding_dim)


def _multiply(W: PackedMatrix, x: Tensor, device: str) -> Tensor:
    """(n, rows) in the dtype of x (n, columns): x W^T, by what a kind of device has for n vectors."""
    derived = (torch.is_grad_enabled() and x.requires_grad) or unpack_dual(x).tangent is not None
    most = kernels.most_vectors(W, x.dtype) if device == "cpu" else DIRECT.get(device, 0)
    direct = 0 < len(x) <= most and not derived and torch.float64 not in (W.dtype, x.dtype)
    if direct and device == "cpu" and kernels.library() is not None:
        return kernels.multiply(W, x).to(x.dtype)
    if direct and device == "cuda" and W.mask is not None and _has_triton():
        from niwaki.packed import gpu

        return gpu.multiply(W, x)
    return kernels.multiply_by_tiles(W, x)


@functools.cache
def _has_triton() -> bool:  # which comes with torch for GPUs
    return importlib.util.find_spec("triton") is not None
