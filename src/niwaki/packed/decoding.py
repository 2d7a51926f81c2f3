"""One token at a time through a model with packed matrices, by few calls of the native library.

Where text is generated, a small model spends more time between its products than in them. So blocks of the structure
that LLaMA has, which most models share, leave single tokens to the library, and so does the head; all else is computed
by transformers as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook
from transformers import PreTrainedConfig

from niwaki.packed import kernels, replica
from niwaki.packed.block import Prepared, has_parts, is_undisturbed, modules_of, prepare
from niwaki.packed.linear import SparseLinear

#: What a block's cache is called, in transformers from 5.24 on and before.
CACHES = ("cache", "past_key_values")
#: What the library reads of a block's arguments, besides the state.
_READ = {*CACHES, "attention_mask", "position_embeddings"}
#: What else may be passed to blocks, with any value or the one here. That it has no influence is tried in a replica.
_PASSED: dict[str, Any] = {"position_ids": ..., "cache_position": ..., "use_cache": ..., "output_attentions": False}


def attach(model: Any, blocks: Iterable[nn.Module]) -> None:
    """Lets ``model``, on the CPU, compute single tokens natively where the structure of ``blocks`` is one for it."""
    if kernels.library() is None:
        return
    for block in blocks:
        if has_parts(block) and "forward" not in vars(block):
            block.forward = NativeBlock(block)
    head: Any = model.get_output_embeddings()
    if type(head) is nn.Linear and getattr(head, "bias", None) is None and "forward" not in vars(head):
        head.forward = NativeHead(head)  # type: ignore[method-assign]


def one_by_one(model: Any) -> int:
    """How many packed matrices are in blocks that transformers computed when ``model`` wrote the last token.

    0 where there are no native kernels: on a GPU, or if they were not built.
    """
    if kernels.library() is None or model.device.type != "cpu":
        return 0
    natively = {
        id(module)
        for block in model.modules()
        if isinstance(forward := vars(block).get("forward"), NativeBlock) and forward.was_native
        for module in block.modules()
    }
    others = {id(module) for module in model.modules() if type(module) is SparseLinear} - natively
    return len(others - {id(model.get_output_embeddings())})


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
            getattr(self._layer, "bias", None) is not None
            or input.numel() != columns
            or input.shape[-1] != columns
            or any(t.dtype != torch.bfloat16 or t.device.type != "cpu" or not t.is_contiguous() for t in given)
            or not _plain()
        ):
            return nn.Linear.forward(self._layer, input)
        y = input.new_empty(*input.shape[:-1], rows)
        path, threads = kernels.best_path(), torch.get_num_threads()
        kernels.loaded().niwaki_dense(path, W.data_ptr(), rows, columns, input.data_ptr(), y.data_ptr(), threads)
        return y


class NativeBlock:
    """The forward of a block: one token without gradients natively, all else by the block's class."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._seen: _Seen | None = None
        #: Whether the last call was left to the library.
        self.was_native = False

    def __reduce__(self) -> tuple[Any, ...]:  # pointers are of this process
        return NativeBlock, (self._block,)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, hidden_states: Tensor, *positional: Any, **named: Any) -> Any:
        prepared = None if positional else self._prepared_for(hidden_states, named)
        self.was_native = prepared is not None
        if prepared is None or self._seen is None:
            return type(self._block).forward(self._block, hidden_states, *positional, **named)
        queries, *new = prepared.begin(hidden_states, named["position_embeddings"])
        keys, values = named[_cache_in(named)].update(*new, self._seen.layer)
        return prepared.end(hidden_states, queries, keys, values, named.get("attention_mask"))

    def _prepared_for(self, x: Tensor, named: dict[str, Any]) -> Prepared | None:
        """The block as it is now, for the library; None for what that cannot compute, or not alone."""
        cache = _cache_in(named)
        if not cache or not _plain() or not _readable(named.get("attention_mask")):
            return None
        others = {key: value for key, value in named.items() if key not in _READ and value is not None}
        if any(key not in _PASSED or _PASSED[key] not in (..., value) for key, value in others.items()):
            return None
        if self._seen is None or self._seen.is_old():
            self._seen = _Seen(self._block)
        prepared = self._seen.prepared()
        angles: Any = named.get("position_embeddings")
        if prepared is None or not prepared.accepts(x, angles):
            return None
        return prepared if self._seen.agrees(x.dtype, angles[0].shape[-1], others, cache) else None


class _Seen:
    """A block as it was when somebody looked at it, and whether it still is."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._known = has_parts(block) and is_undisturbed(block)
        modules = [*block.modules()]
        #: Its number.
        self.layer: int = block.get_submodule("self_attn").layer_idx if self._known else -1  # type: ignore[assignment]
        #: Where its tensors are.
        self._owners = [values for module in modules for values in (module._buffers, module._parameters)]
        self._modules = modules_of(block)
        self._prepared: Prepared | None = None
        self._agrees: dict[Any, bool] = {}
        watched = [values for module in modules for values in _watched(module)]
        self._copies = [(values, values.copy()) for values in watched]

    def is_old(self) -> bool:
        """Whether an attribute, a module or a hook within the block is another now."""
        try:
            return any(now != then for now, then in self._copies)
        except (RuntimeError, ValueError):  # of tensors that were exchanged for others
            return True

    def prepared(self) -> Prepared | None:
        """The block with its tensors as they are now."""
        if not self._known:
            return None
        tensors = [value for values in self._owners for value in values.values() if value is not None]
        pointers = [tensor.data_ptr() for tensor in tensors]
        if self._prepared is None or self._prepared.pointers != pointers:
            self._prepared = prepare(self._modules, pointers, [tensor.detach() for tensor in tensors])
        return self._prepared

    def agrees(self, dtype: torch.dtype, rotary: int, others: dict[str, Any], cache: str) -> bool:
        """Whether transformers computes single tokens that are given in this way as the library does."""
        asked = (dtype, rotary, cache, *others)
        if asked not in self._agrees:
            self._agrees[asked] = replica.agrees(self._block, dtype, rotary, others, cache)
        return self._agrees[asked]


def _watched(module: nn.Module) -> Iterator[Any]:
    """The dicts and lists on which it depends what a module computes, besides its tensors."""
    yield from (vars(module), module._modules, module._forward_hooks, module._forward_pre_hooks)
    for value in vars(module).values():
        if isinstance(value, PreTrainedConfig):
            yield vars(value)
            yield from (each for each in vars(value).values() if isinstance(each, dict | list))


def _cache_in(named: dict[str, Any]) -> str:
    """What the cache is called among a block's arguments; "" where there is none."""
    return next((name for name in CACHES if named.get(name) is not None), "")


def _plain() -> bool:
    """Whether nothing but values is wanted: no gradients, no other dtypes, no trace, no hooks of all modules."""
    return (
        not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
        and not _has_any_global_hook()
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
