"""A decoder block as the native library has it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.activations import ACT2FN

from niwaki.packed import kernels
from niwaki.packed.kernels import NativeMatrix
from niwaki.packed.linear import SparseLinear

#: What the library computes with.
DTYPES = (torch.bfloat16, torch.float32)
#: The most tokens of a prompt: the library has their states in float32.
_MOST_TOKENS = 1024
_CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_ATTENTION = ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"})
_WITHIN = ("", "self_attn", "mlp")  # the modules that have others


class _Linear(ctypes.Structure):
    _fields_ = [  # as ctypes wants it
        ("weight", NativeMatrix),
        ("bias", ctypes.c_void_p),
        ("right", NativeMatrix),
        ("inner", ctypes.c_int64),
    ]


class _Norm(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("epsilon", ctypes.c_float)]


class _Block(ctypes.Structure):
    _fields_ = [
        ("path", ctypes.c_int),
        ("half", ctypes.c_int),
        ("rounds", ctypes.c_int),
        *((name, ctypes.c_int64) for name in ("width", "heads", "pairs", "size", "inner")),
        ("scaling", ctypes.c_float),
        *((name, _Norm) for name in ("before_attention", "before_mlp", "queries", "keys")),
        *((name, _Linear) for name in ("q", "k", "v", "o", "gate", "up", "down")),
    ]


class _Cache(ctypes.Structure):
    _fields_ = [("numbers", ctypes.c_void_p), ("head", ctypes.c_int64), ("position", ctypes.c_int64)]


class _Attention(ctypes.Structure):
    _fields_ = [("keys", _Cache), ("values", _Cache), ("mask", ctypes.c_void_p), ("length", ctypes.c_int64)]


class _Caches(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.POINTER(ctypes.c_void_p)) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("head", "position", "length")),
    ]


@dataclass(frozen=True)
class Prepared:
    """A block, for the library."""

    native: _Block
    dtype: torch.dtype
    tensors: list[Tensor]  # that are there, and stay as long as this does
    most: float  # of the tokens of a prompt, up to which its products are faster than torch's

    def accepts(self, x: Tensor, angles: Any) -> bool:
        """Whether states of tokens (1, count, width) and the angles of their positions are what the library reads."""
        if x.dtype != self.dtype or x.dim() != 3 or x.shape[::2] != (1, self.native.width) or type(angles) is not tuple:
            return False
        cosines, sines = angles
        size = cosines.shape[-1]
        return bool(
            0 < x.shape[1] <= self.most
            and cosines.shape == sines.shape == (1, x.shape[1], size)
            and size % 2 == 0
            and size <= self.native.size
            and all(t.dtype == self.dtype and t.is_contiguous() and t.device.type == "cpu" for t in (x, cosines, sines))
        )

    def begin(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (1, heads, count, size)."""
        native, (cosines, sines), count = self.native, angles, x.shape[1]
        queries = x.new_empty(1, native.heads, count, native.size)
        keys, values = (x.new_empty(1, native.pairs, count, native.size) for _ in range(2))
        given = (x.data_ptr(), cosines.data_ptr(), sines.data_ptr(), cosines.shape[-1])
        found = (queries.data_ptr(), keys.data_ptr(), values.data_ptr())
        library, block, threads = kernels.loaded(), ctypes.byref(native), torch.get_num_threads()
        if count == 1:
            library.niwaki_block_begin(block, *given, *found, threads)
        else:
            library.niwaki_tokens_begin(block, count, *given, *found, threads)
        return queries, keys, values

    def end_of_prompt(self, x: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The states behind the block of tokens that see those before them, and nothing else."""
        native, count = self.native, x.shape[1]
        if keys.shape[2] != count or values.shape[2] != count:
            raise RuntimeError(f"a cache of keys and values has {keys.shape[2]} positions for {count} tokens")
        found = scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=native.scaling, enable_gqa=native.heads != native.pairs
        )
        found, out = found.transpose(1, 2).contiguous(), torch.empty_like(x)
        given = (count, x.data_ptr(), found.data_ptr(), out.data_ptr(), torch.get_num_threads())
        kernels.loaded().niwaki_tokens_end(ctypes.byref(native), *given)
        return out

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
        kernels.loaded().niwaki_block_end(ctypes.byref(native), *given, out.data_ptr(), torch.get_num_threads())
        return out


class Chain:
    """Blocks of the same shape, one behind the other, for the library; ValueError where their shapes differ."""

    def __init__(self, blocks: list[Prepared]) -> None:
        self.first = blocks[0]
        #: How many blocks there are, and the heads of each cache and their size.
        self.shape = (len(blocks), self.first.native.pairs, self.first.native.size)
        if len({_shape(block.native) for block in blocks}) > 1:
            raise ValueError("blocks of several shapes")
        self._blocks = blocks  # which stay as long as this does
        self._native = (_Block * len(blocks))(*(block.native for block in blocks))

    def run(self, x: Tensor, angles: tuple[Tensor, Tensor], caches: list[Tensor], length: int) -> Tensor:
        """The state behind all blocks of a token whose state is ``x``.

        Args:
            x: As in ``first.accepts``, and ``angles`` too.
            angles: Cosines and sines of its position.
            caches: The keys of each block, then the values, each (1, heads, room, size) and contiguous. The token's
                own are written here.
            length: Positions that the token sees, with its own, the last one: at most those that there is room for.
        """
        count, heads, size = self.shape
        room = caches[0].shape[2] if len(caches) == 2 * count and caches[0].dim() == 4 else 0
        shape, dtype = (1, heads, room, size), x.dtype
        if not 0 < length <= room or any(
            each.shape != shape or each.dtype != dtype or each.device.type != "cpu" or not each.is_contiguous()
            for each in caches
        ):
            raise RuntimeError(f"caches of {[tuple(each.shape) for each in caches]} have no room for position {length}")
        places = [each.data_ptr() for each in caches]
        keys, values = ((ctypes.c_void_p * count)(*those) for those in (places[:count], places[count:]))
        native = _Caches(keys, values, room * size, size, length)
        cosines, sines = angles
        out = torch.empty_like(x)
        given = (x.data_ptr(), cosines.data_ptr(), sines.data_ptr(), cosines.shape[-1], ctypes.byref(native))
        kernels.loaded().niwaki_blocks(self._native, count, *given, out.data_ptr(), torch.get_num_threads())
        return out


def _shape(block: _Block) -> tuple[int, ...]:
    return block.path, block.half, block.width, block.heads, block.pairs, block.size


def modules_of(block: nn.Module) -> dict[str, Any]:
    """The modules within a block, by their own names."""
    return {name.rpartition(".")[2]: module for name, module in block.named_modules() if name}


def has_parts(block: nn.Module) -> bool:
    """Whether a block's parts are those of LLaMA, Mistral, Qwen 2 and 3, and its matrices packed.

    That is not enough to compute it: what its class makes of the parts is another question (:mod:`.replica`).
    """
    if {name for name, _ in block.named_children()} != _CHILDREN:
        return False
    attention, mlp = block.get_submodule("self_attn"), block.get_submodule("mlp")
    modules = modules_of(block)
    return (
        {name for name, _ in attention.named_children()} in _ATTENTION
        and {name for name, _ in mlp.named_children()} == _MLP
        and type(mlp.get_submodule("act_fn")) is type(ACT2FN["silu"])
        and all(type(m) is SparseLinear for name, m in modules.items() if name.endswith("_proj"))
        and all(_epsilon(m) is not None for name, m in modules.items() if name.endswith("norm"))
        and not any(_has_tensors(block.get_submodule(name)) for name in _WITHIN)
        and isinstance(getattr(attention, "scaling", None), float)
        and isinstance(getattr(attention, "layer_idx", None), int)
    )


def is_undisturbed(block: nn.Module) -> bool:
    """Whether a block with these parts is computed by its classes, and attention as the library does it."""
    modules = modules_of(block)
    return (
        # Others have other masks, or attend to something else.
        getattr(getattr(modules["self_attn"], "config", None), "_attn_implementation", None) == "sdpa"
        and not any(m.training for m in block.modules())
        and not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in modules.values())
    )


def prepare(modules: dict[str, Any], tensors: list[Tensor]) -> Prepared | None:
    """None where shapes, dtypes or devices are not those that the library takes."""
    dtype = modules["input_layernorm"].weight.dtype
    size, width = modules["self_attn"].head_dim, modules["q_proj"].in_features
    seen, inner = modules["q_proj"].out_features, modules["gate_proj"].out_features
    heads, pairs = seen // size, modules["k_proj"].out_features // size
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
    small = [modules[name].weight for name in norms if name in modules]
    small += [modules[name].bias for name in shapes if modules[name].bias is not None]
    if (
        dtype not in DTYPES
        or any((modules[name].out_features, modules[name].in_features) != shape for name, shape in shapes.items())
        or any(modules[name].weight.shape != (length,) for name, length in norms.items() if name in modules)
        or pairs == 0
        or heads % pairs
        or any(t.dtype != dtype or t.device.type != "cpu" or not t.is_contiguous() for t in small)
        or any(modules[name].values.device.type != "cpu" for name in shapes)
    ):
        return None
    numbers = (width, heads, pairs, size, inner, modules["self_attn"].scaling)
    parts = [*(_norm(modules.get(name)) for name in norms), *(_linear(modules[name]) for name in shapes)]
    native = _Block(kernels.best_path(), dtype == torch.bfloat16, kernels.rounds(dtype), *numbers, *parts)
    matrices = [each for name in shapes for each in (modules[name].packed, modules[name].right) if each is not None]
    most = min(_MOST_TOKENS, *(kernels.most_vectors(each, dtype) for each in matrices))
    return Prepared(native, dtype, tensors, most)


def _has_tensors(module: nn.Module) -> bool:
    """Whether a module has any of its own."""
    return any(value is not None for values in (module._parameters, module._buffers) for value in values.values())


def _epsilon(norm: nn.Module) -> float | None:
    """The epsilon of an RMS norm; None for what is none."""
    if [name for name, _ in (*norm.named_parameters(), *norm.named_buffers())] != ["weight"]:
        return None
    values = (getattr(norm, name, None) for name in ("variance_epsilon", "eps"))
    return next((value for value in values if isinstance(value, float)), None)


def _linear(layer: SparseLinear) -> _Linear:
    bias = None if layer.bias is None else layer.bias.data_ptr()
    if (right := layer.right) is None:
        return _Linear(kernels.native_matrix(layer.packed), bias)
    return _Linear(kernels.native_matrix(layer.packed), bias, kernels.native_matrix(right), right.shape[0])


def _norm(norm: Any) -> _Norm:
    return _Norm(None, 0.0) if norm is None else _Norm(norm.weight.data_ptr(), _epsilon(norm))
