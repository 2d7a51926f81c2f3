"""One token at a time through a model with packed matrices, by few calls of the native library.

Where text is generated, a small model spends more time between its products than in them. So blocks of the structure
that LLaMA has, which most models share, leave single tokens to the library, and so does the head; all else is computed
by transformers as before.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers.activations import ACT2FN

from niwaki.packed import kernels
from niwaki.packed.kernels import NativeMatrix
from niwaki.packed.linear import SparseLinear

_log = logging.getLogger(__name__)

_CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_ATTENTION = ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"})
#: What a block's cache is called, in transformers from 5.24 on and before.
CACHES = ("cache", "past_key_values")
#: What the library reads of a block's arguments, besides the state.
_READ = {*CACHES, "attention_mask", "position_embeddings"}
#: What is passed to blocks without an influence on one token's output, or as one of the values here.
_PASSED: dict[str, Any] = {"position_ids": ..., "cache_position": ..., "use_cache": ..., "output_attentions": False}
#: How far outputs may be from transformers', relative to what the block adds to the state.
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-4}
_PAST = 5  # positions of the cache with which that is tried


class _Linear(ctypes.Structure):
    _fields_ = [("weight", NativeMatrix), ("bias", ctypes.c_void_p)]  # as ctypes wants it


class _Norm(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("epsilon", ctypes.c_float)]


class _Block(ctypes.Structure):
    _fields_ = [
        ("path", ctypes.c_int),
        ("half", ctypes.c_int),
        *((name, ctypes.c_int64) for name in ("width", "heads", "pairs", "size", "inner")),
        ("scaling", ctypes.c_float),
        *((name, _Norm) for name in ("before_attention", "before_mlp", "queries", "keys")),
        *((name, _Linear) for name in ("q", "k", "v", "o", "gate", "up", "down")),
    ]


class _Cache(ctypes.Structure):
    _fields_ = [("numbers", ctypes.c_void_p), ("head", ctypes.c_int64), ("position", ctypes.c_int64)]


class _Attention(ctypes.Structure):
    _fields_ = [
        ("keys", _Cache),
        ("values", _Cache),
        ("mask", ctypes.c_void_p),
        ("length", ctypes.c_int64),
    ]


def attach(model: Any, blocks: Iterable[nn.Module]) -> None:
    """Lets ``model``, on the CPU, compute single tokens natively where the structure of ``blocks`` is one for it."""
    if kernels.library() is None:
        return
    for block in blocks:
        if _has_structure(block):
            block.forward = NativeBlock(block)
    head: Any = model.get_output_embeddings()
    if type(head) is nn.Linear and getattr(head, "bias", None) is None:
        head.forward = NativeHead(head)  # type: ignore[method-assign]


class NativeHead:
    """The forward of a dense layer without a bias: one vector in bfloat16 natively, all else by torch.

    torch's product with one vector reads such a matrix at about half of the rate that memory has.
    """

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002  # as torch has it
        W = self._layer.weight
        rows, columns = W.shape
        given = (W, input)
        if (
            input.numel() != columns
            or input.shape[-1] != columns
            or any(t.dtype != torch.bfloat16 or t.device.type != "cpu" or not t.is_contiguous() for t in given)
            or not _plain()
        ):
            return nn.Linear.forward(self._layer, input)
        y = input.new_empty(*input.shape[:-1], rows)
        path, threads = kernels.best_path(), torch.get_num_threads()
        _library().niwaki_dense(path, W.data_ptr(), rows, columns, input.data_ptr(), y.data_ptr(), threads)
        return y


class NativeBlock:
    """The forward of a block: one token without gradients natively, all else by the block's class.

    Structure does not say how a model turns positions, or scales. So the first token is computed in both ways, and
    where they differ the block is left to transformers from then on.
    """

    def __init__(self, block: nn.Module, agrees: bool | None = None) -> None:
        self._block = block
        self._prepared: _Prepared | None = None
        self._agrees = agrees

    def __reduce__(self) -> tuple[Any, ...]:  # pointers are of this process
        return NativeBlock, (self._block, self._agrees)

    @functools.cached_property
    def _layers(self) -> dict[str, Any]:
        return _layers(self._block)

    @functools.cached_property
    def _owners(self) -> list[dict[str, Any]]:
        """Where its tensors are."""
        return [values for module in self._layers.values() for values in (module._buffers, module._parameters)]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, hidden_states: Tensor, *positional: Any, **named: Any) -> Any:
        prepared = None if positional or self._agrees is False else self._prepared_for(hidden_states, named)
        if prepared is not None and self._agrees is None:
            self._agrees = self._compare(prepared, hidden_states, named)
        if prepared is None or not self._agrees:
            return type(self._block).forward(self._block, hidden_states, *positional, **named)
        queries, *new = prepared.begin(hidden_states, named["position_embeddings"])
        keys, values = named[_cache_in(named)].update(*new, self._layers["self_attn"].layer_idx)
        return prepared.end(hidden_states, queries, keys, values, named.get("attention_mask"))

    def _prepared_for(self, x: Tensor, named: dict[str, Any]) -> _Prepared | None:
        """The block as it is now, for the library; None for what that cannot compute, or not alone."""
        if not _cache_in(named) or not _plain() or not _readable(named.get("attention_mask")):
            return None
        others = {key: value for key, value in named.items() if key not in _READ and value is not None}
        if any(key not in _PASSED or _PASSED[key] not in (..., value) for key, value in others.items()):
            return None
        if any(module._forward_hooks or module._forward_pre_hooks for module in self._layers.values()):
            return None
        tensors = [value for values in self._owners for value in values.values() if value is not None]
        pointers = [tensor.data_ptr() for tensor in tensors]
        if self._prepared is None or self._prepared.pointers != pointers:
            self._prepared = _prepare(self._layers, pointers, [tensor.detach() for tensor in tensors])
        prepared = self._prepared
        return prepared if prepared is not None and prepared.accepts(x, named.get("position_embeddings")) else None

    def _compare(self, prepared: _Prepared, x: Tensor, named: dict[str, Any]) -> bool:
        """Whether transformers has the same for ``x`` behind a few random keys and values."""
        generator = torch.Generator().manual_seed(0)
        past = torch.randn(2, 1, prepared.native.pairs, _PAST, prepared.native.size, generator=generator).to(x.dtype)
        replaced = _Replaced(past)
        others = {**named, _cache_in(named): replaced, "attention_mask": None}
        theirs = type(self._block).forward(self._block, x, **others)
        queries, *new = prepared.begin(x, named["position_embeddings"])
        ours = prepared.end(x, queries, *replaced.update(*new), None)
        if not isinstance(theirs, Tensor) or theirs.shape != ours.shape or len(replaced.seen) != 2:
            return False
        pairs = [(theirs - x, ours - x), *zip(replaced.seen[0], new, strict=True)]
        tolerance = _TOLERANCE[x.dtype]
        agrees = all(bool((a - b).float().norm() <= tolerance * a.float().norm()) for a, b in pairs)
        if not agrees:
            _log.info("decoder blocks compute single tokens in another way than LLaMA's: they are left to transformers")
        return agrees


def _cache_in(named: dict[str, Any]) -> str:
    """What the cache is called among a block's arguments; "" where there is none."""
    return next((name for name in CACHES if named.get(name) is not None), "")


class _Replaced:
    """In place of a cache: keeps what it is given, and changes nothing."""

    def __init__(self, past: Tensor) -> None:
        self._past = past
        self.seen: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.seen.append((keys, values))
        return torch.cat([self._past[0], keys], dim=2), torch.cat([self._past[1], values], dim=2)


@dataclass(frozen=True)
class _Prepared:
    """A block as the library has it."""

    native: _Block
    dtype: torch.dtype
    pointers: list[int]
    tensors: list[Tensor]  # that are there, and stay as long as this does

    def accepts(self, x: Tensor, angles: Any) -> bool:
        """Whether the token's state and the angles of its position are what the library reads."""
        if x.dtype != self.dtype or x.shape != (1, 1, self.native.width) or type(angles) is not tuple:
            return False
        cosines, sines = angles
        size = cosines.shape[-1]
        return bool(
            cosines.shape == sines.shape == (1, 1, size)
            and size % 2 == 0
            and size <= self.native.size
            and all(t.dtype == self.dtype and t.is_contiguous() and t.device.type == "cpu" for t in (x, cosines, sines))
        )

    def begin(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (1, heads, 1, size)."""
        native, (cosines, sines) = self.native, angles
        queries = x.new_empty(1, native.heads, 1, native.size)
        keys, values = (x.new_empty(1, native.pairs, 1, native.size) for _ in range(2))
        given = (x.data_ptr(), cosines.data_ptr(), sines.data_ptr(), cosines.shape[-1])
        found = (queries.data_ptr(), keys.data_ptr(), values.data_ptr())
        _library().niwaki_block_begin(ctypes.byref(native), *given, *found, torch.get_num_threads())
        return queries, keys, values

    def end(self, x: Tensor, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """The state behind the block; RuntimeError where the cache gave something else than keys and values."""
        native = self.native
        length = keys.shape[2]
        for tensor in (keys, values):
            if (
                tensor.shape != (1, native.pairs, length, native.size)
                or tensor.dtype != self.dtype
                or tensor.device.type != "cpu"
                or tensor.stride(3) != 1
            ):
                raise RuntimeError(f"a cache of keys and values has {tensor.dtype} {tuple(tensor.shape)}")
        if mask is not None and mask.shape[3] != length:
            raise RuntimeError(f"an attention mask for {mask.shape[3]} positions was given, and the cache has {length}")
        caches = (_Cache(t.data_ptr(), t.stride(1), t.stride(2)) for t in (keys, values))
        attention = _Attention(*caches, None if mask is None else mask.data_ptr(), length)
        out = torch.empty_like(x)
        given = (x.data_ptr(), queries.data_ptr(), ctypes.byref(attention))
        _library().niwaki_block_end(ctypes.byref(native), *given, out.data_ptr(), torch.get_num_threads())
        return out


def _library() -> ctypes.CDLL:
    native = kernels.library()
    assert native is not None
    return native


def _plain() -> bool:
    """Whether nothing but values is wanted: no gradients, no other dtypes, no trace."""
    return (
        not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
    )


def _readable(mask: Any) -> bool:
    """Whether the library can read the attention mask of a token: there is none, or a row of bools."""
    return mask is None or (
        isinstance(mask, Tensor)
        and mask.dtype == torch.bool
        and mask.device.type == "cpu"
        and mask.dim() == 4
        and mask.shape[:3] == (1, 1, 1)
        and mask.is_contiguous()
    )


def _has_structure(block: nn.Module) -> bool:
    """Whether its parts are those of LLaMA, Mistral, Qwen 2 and 3, and its matrices are packed."""
    if {name for name, _ in block.named_children()} != _CHILDREN or dict(block.named_parameters(recurse=False)):
        return False
    attention, mlp = block.get_submodule("self_attn"), block.get_submodule("mlp")
    return (
        {name for name, _ in attention.named_children()} in _ATTENTION
        and {name for name, _ in mlp.named_children()} == _MLP
        and type(mlp.get_submodule("act_fn")) is type(ACT2FN["silu"])
        and all(isinstance(m, SparseLinear) for name, m in _layers(block).items() if name.endswith("_proj"))
        and all(_epsilon(m) is not None for name, m in _layers(block).items() if name.endswith("norm"))
        and not any(dict(module.named_parameters(recurse=False)) for module in (attention, mlp))
        and isinstance(getattr(attention, "scaling", None), float)
        and isinstance(getattr(attention, "layer_idx", None), int)
    )


def _layers(block: nn.Module) -> dict[str, Any]:
    """The block's modules by their own names."""
    return {name.rpartition(".")[2]: module for name, module in block.named_modules() if name}


def _epsilon(norm: nn.Module) -> float | None:
    """That of an RMS norm; None for what is none."""
    values = [getattr(norm, name, None) for name in ("variance_epsilon", "eps")]
    only_weight = [name for name, _ in norm.named_parameters()] == ["weight"]
    return next((float(value) for value in values if isinstance(value, float)), None) if only_weight else None


def _prepare(layers: dict[str, Any], pointers: list[int], tensors: list[Tensor]) -> _Prepared | None:
    """None where shapes, dtypes or devices are not those that the library takes."""
    dtype = layers["input_layernorm"].weight.dtype
    size, width = layers["self_attn"].head_dim, layers["q_proj"].in_features
    seen, inner = layers["q_proj"].out_features, layers["gate_proj"].out_features
    heads, pairs = seen // size, layers["k_proj"].out_features // size
    shapes = {
        "q_proj": (heads * size, width),
        "k_proj": (pairs * size, width),
        "v_proj": (pairs * size, width),
        "o_proj": (width, seen),
        "gate_proj": (inner, width),
        "up_proj": (inner, width),
        "down_proj": (width, inner),
    }
    norms = {"input_layernorm": width, "post_attention_layernorm": width, "q_norm": size, "k_norm": size}
    small = [layers[name].weight for name in norms if name in layers]
    small += [layers[name].bias for name in shapes if layers[name].bias is not None]
    if (
        dtype not in _TOLERANCE
        or any((layers[name].out_features, layers[name].in_features) != shape for name, shape in shapes.items())
        or any(layers[name].weight.shape != (length,) for name, length in norms.items() if name in layers)
        or pairs == 0
        or heads % pairs
        or any(t.dtype != dtype or t.device.type != "cpu" or not t.is_contiguous() for t in small)
        or any(layers[name].mask.device.type != "cpu" for name in shapes)
    ):
        return None
    native_norms = [_norm(layers.get(name)) for name in norms]
    linears = [
        _Linear(kernels.native_matrix(layers[name].packed), None if (b := layers[name].bias) is None else b.data_ptr())
        for name in shapes
    ]
    sizes = (width, heads, pairs, size, inner)
    path = kernels.best_path()
    native = _Block(path, dtype == torch.bfloat16, *sizes, layers["self_attn"].scaling, *native_norms, *linears)
    return _Prepared(native, dtype, pointers, tensors)


def _norm(norm: Any) -> _Norm:
    return _Norm(None, 0.0) if norm is None else _Norm(norm.weight.data_ptr(), _epsilon(norm))
