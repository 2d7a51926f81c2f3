"""A token, or a short prompt, through a model with packed matrices, by few calls of the native library.

Where text is generated, a small model spends more time between its products than in them. So blocks of the structure
that LLaMA has, which most models share, leave single tokens and prompts to the library, and so does the head; all else
is computed by transformers as before. Where a decoder only hands tokens from one such block to the next, all of them
are one call.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from niwaki.packed import kernels, replica
from niwaki.packed.block import Chain, Prepared, has_parts, is_undisturbed, modules_of, prepare
from niwaki.packed.linear import SparseLinear

#: What a block's cache is called, in transformers from 5.24 on and before.
CACHES = ("cache", "past_key_values")
_CACHE_OF_OUTPUT = next(name for name in CACHES if name in BaseModelOutputWithPast.__dataclass_fields__)
#: What the library reads of a block's arguments, besides the state.
_READ = {*CACHES, "attention_mask", "position_embeddings"}
#: What else may be passed to blocks, with any value or the one here. That it has no influence is tried in a replica.
_PASSED: dict[str, Any] = {"position_ids": ..., "cache_position": ..., "use_cache": ..., "output_attentions": False}
#: The parts of a decoder that is tried, and what of its configuration limits how far back a token sees.
_DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}
_WINDOWS = ("sliding_window", "attention_chunk_size")
#: Positions that a cache has room for beyond those that it needs: a share of these, and so many.
_MORE, _LEAST_MORE = 0.25, 256
#: Kinds of rotary positions whose angles do not depend on how many positions there are.
_CONSTANT = {"default", "linear", "llama3", "yarn"}
#: Positions whose angles are computed at once.
_AT_ONCE = 256
#: What every module has for hooks.
_HOOKS = {name for name in vars(nn.Module()) if "hooks" in name}


def attach(model: Any, blocks: Iterable[nn.Module]) -> None:
    """Lets ``model``, on the CPU, compute tokens natively where the structure of ``blocks`` is one for it."""
    if kernels.library() is None:
        return
    blocks = [*blocks]
    for block in blocks:
        if has_parts(block) and "forward" not in vars(block):
            block.forward = NativeBlock(block)
    for module in model.modules():
        if module._modules.keys() == _DECODER and [*module.layers] == blocks and "forward" not in vars(module):
            module.forward = NativeDecoder(module)
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
    """The forward of a block: one token, or a prompt, without gradients natively, all else by the block's class."""

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
        if hidden_states.shape[1] > 1:
            return prepared.end_of_prompt(hidden_states, queries, keys, values)
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
        if x.shape[1] > 1 and not (named.get("attention_mask") is None and _is_empty(named[cache], self._seen.layer)):
            return None
        return prepared if self._seen.agrees(x.dtype, angles[0].shape[-1], others, cache) else None


class NativeDecoder:
    """The forward of a decoder: one token by one call for all blocks, where it does nothing between them.

    That is tried with copies of its blocks that only take notes, once for each way in which it is called. The cache has
    its keys and values then in memory with room for more, and is a cache like any other for whoever looks at it.
    """

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._watch: _Watch | None = None
        self._angles = _Angles(decoder)
        #: By the names of what is given, all blocks; None where something else is done between them.
        self._chains: dict[tuple[str, ...], Chain | None] = {}
        self._rooms = WeakKeyDictionary[DynamicCache, _Room]()

    def __reduce__(self) -> tuple[Any, ...]:  # pointers are of this process
        return NativeDecoder, (self._decoder,)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *positional: Any, **named: Any) -> Any:
        chain = None if positional else self._chain_for(named)
        if chain is not None:
            x, angles = self._begin(named)
            cache = named[_cache_in(named)]
            if chain.first.accepts(x, angles) and (room := self._room_of(cache, chain, x.dtype)) is not None:
                for block in self._decoder.layers:
                    vars(block)["forward"].was_native = True
                room.add_one(cache)
                out = self._decoder.norm(chain.run(x, angles, room.numbers, room.length))
                return BaseModelOutputWithPast(last_hidden_state=out, **{_CACHE_OF_OUTPUT: cache})
        if self._rooms and type(cache := named.get(_cache_in(named))) is DynamicCache:
            self._rooms.pop(cache, None)  # which now gets other tensors
        return type(self._decoder).forward(self._decoder, *positional, **named)

    def _begin(self, named: dict[str, Any]) -> tuple[Tensor, Any]:
        """The token's embedding, and the angles of its position."""
        x = self._decoder.embed_tokens(named["input_ids"])
        positions = named.get("position_ids")
        position = named[_cache_in(named)].get_seq_length() if positions is None else int(positions)
        return x, self._angles.at(position, x)

    def _chain_for(self, named: dict[str, Any]) -> Chain | None:
        """All blocks as they are now; None for what they cannot compute in one call."""
        given, cache = named.get("input_ids"), named.get(_cache_in(named))
        if not isinstance(given, Tensor) or given.shape != (1, 1) or type(cache) is not DynamicCache or not _plain():
            return None
        length = cache.get_seq_length() + 1
        mask, positions = named.get("attention_mask"), named.get("position_ids")
        names = [name for name, value in named.items() if value is not None]
        if (
            not 1 < length <= self._longest()
            or len(cache.layers) != len(self._decoder.layers)
            or any(type(layer) is not DynamicLayer for layer in cache.layers)
            or (mask is not None and not (isinstance(mask, Tensor) and mask.shape == (1, length) and bool(mask.all())))
            or (positions is not None and not (isinstance(positions, Tensor) and positions.shape == (1, 1)))
            or (positions is None and "cache_position" in names)
            or any(name not in _PASSED and name not in (*CACHES, "input_ids", "attention_mask") for name in names)
            or named.get("output_attentions")
        ):
            return None
        asked = tuple(sorted(names))
        if self._watch is None or self._watch.is_old():
            self._watch = _Watch(self._decoder.modules())
            self._angles = _Angles(self._decoder)
            self._chains.clear()
        elif self._watch.has_moved():
            self._chains.clear()
        if asked not in self._chains:
            self._chains[asked] = self._tried(self._watch, named)
        return self._chains[asked]

    def _longest(self) -> float:
        """The most positions that a token sees."""
        limits = (getattr(self._decoder.config, name, None) for name in _WINDOWS)
        return min((limit for limit in limits if limit is not None), default=math.inf)

    def _tried(self, watch: _Watch, named: dict[str, Any]) -> Chain | None:
        """All blocks, if the decoder, so called, gives each what the one before made of the token, and nothing else."""
        blocks = [block for block in self._decoder.layers if isinstance(vars(block).get("forward"), NativeBlock)]
        if len(blocks) != len(self._decoder.layers) or watch.has_hooks():
            return None
        try:
            given = self._handed_on(blocks, named)
            found = [block.forward._prepared_for(*each) for block, each in zip(blocks, given, strict=True)]
            return None if None in found else Chain(found)
        except Exception:  # whatever a class does with blocks that are not its own; or these have several shapes
            return None

    def _handed_on(self, blocks: list[Any], named: dict[str, Any]) -> list[tuple[Tensor, dict[str, Any]]]:
        """What each of ``blocks`` is given; ValueError where that is not what the one before made."""
        decoder, notes = self._decoder, list[tuple[Tensor, dict[str, Any]]]()
        made = list[Tensor]()

        def note(x: Tensor, **given: Any) -> Tensor:
            notes.append((x, given))
            made.append(x + 1)
            return made[-1]

        x, angles = self._begin(named)
        state = torch.linspace(-1, 2, x.numel()).to(x).view(x.shape)  # a token's embedding could be 0
        copies = [_copied(block, forward=note) for block in blocks]
        parts = {**decoder._modules, "layers": nn.ModuleList(copies)}
        parts["embed_tokens"] = _copied(decoder.embed_tokens, forward=lambda _: state)
        out = type(decoder).forward(_copied(decoder, _modules=parts), **named)
        cache, first = named[_cache_in(named)], notes[0][1]
        if (
            len(notes) != len(blocks)
            or any(x is not before for (x, _), before in zip(notes[1:], made[:-1], strict=True))
            or any(given.keys() != first.keys() for _, given in notes)
            or any(given[name] is not first[name] for _, given in notes for name in given)
            or first.get("attention_mask") is not None
            or first[_cache_in(first)] is not cache
            or not torch.equal(notes[0][0], state)
            or not all(map(torch.equal, first["position_embeddings"], angles))
            or type(out) is not BaseModelOutputWithPast
            or out.keys() != {"last_hidden_state", _CACHE_OF_OUTPUT}
            or out[_CACHE_OF_OUTPUT] is not cache
            or not torch.equal(out["last_hidden_state"], decoder.norm(made[-1]))
        ):
            raise ValueError("something is done between blocks")
        return notes

    def _room_of(self, cache: DynamicCache, chain: Chain, dtype: torch.dtype) -> _Room | None:
        """What ``cache`` has, with room for a position more; None where that is not what the blocks read."""
        room = self._rooms.get(cache)
        if room is None or not room.is_of(cache):
            self._rooms.pop(cache, None)
            _, heads, size = chain.shape
            shape, cpu = (1, heads, cache.get_seq_length(), size), torch.device("cpu")
            if any((t.shape, t.dtype, t.device) != (shape, dtype, cpu) for t in _tensors_of(cache)):
                return None
            room = self._rooms[cache] = _Room(cache)
        return room


class _Angles:
    """What a decoder turns queries and keys by at each position, of which many are computed at once."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._first, self._tables = 0, list[Tensor]()
        self._version: Any = None

    def at(self, position: int, x: Tensor) -> Any:
        """Cosines and sines of one position, for a state ``x``."""
        rotary = self._decoder.rotary_emb
        # Of tensors made in inference mode it cannot be told whether their numbers are still the same.
        if getattr(rotary, "rope_type", None) not in _CONSTANT or rotary.inv_freq.is_inference():
            return rotary(x, position_ids=torch.tensor([[position]]))
        version = x.dtype, rotary.inv_freq._version  # which changes where its numbers do
        if version != self._version or not 0 <= position - self._first < self._tables[0].shape[1]:
            self._first, self._version = position, version
            self._tables = [*rotary(x, position_ids=torch.arange(position, position + _AT_ONCE).unsqueeze(0))]
        return tuple(table.narrow(1, position - self._first, 1) for table in self._tables)


class _Room:
    """The keys of each block, then the values, each in memory that has room for more positions than there are."""

    def __init__(self, cache: DynamicCache) -> None:
        self.length = cache.get_seq_length()
        self._views, self.numbers = list[Tensor](), list[Tensor]()
        self._grow(cache)

    def _grow(self, cache: DynamicCache) -> None:
        """Moves ``cache`` to more room, a tensor after the other, so that little is there twice."""
        room = self.length + max(_LEAST_MORE, int(self.length * _MORE))
        self._views.clear()
        self.numbers.clear()
        layers: list[Any] = cache.layers
        for name in ("keys", "values"):
            for layer in layers:
                there = getattr(layer, name)
                # Not what something else left in memory: a cache can be saved, and then all of its room is.
                self.numbers.append(there.new_zeros(*there.shape[:2], room, there.shape[3]))
                self.numbers[-1][:, :, : self.length] = there
                setattr(layer, name, self.numbers[-1][:, :, : self.length])
        self._show(cache)

    def _show(self, cache: DynamicCache) -> None:
        layers: list[Any] = cache.layers
        self._views = [each.narrow(2, 0, self.length) for each in self.numbers]
        for layer, keys, values in zip(layers, self._views, self._views[len(layers) :], strict=False):
            layer.keys, layer.values = keys, values

    def is_of(self, cache: DynamicCache) -> bool:
        """Whether ``cache`` has what was last handed to it, and this nothing more."""
        return self._views[0].shape[2] == self.length and all(map(operator.is_, _tensors_of(cache), self._views))

    def add_one(self, cache: DynamicCache) -> None:
        """Hands one more position to ``cache``, whose numbers are still to be written."""
        if self.length == self.numbers[0].shape[2]:
            self._grow(cache)
        self.length += 1
        self._show(cache)


def _tensors_of(cache: DynamicCache) -> list[Tensor]:
    """The keys of all layers, then the values."""
    layers: list[Any] = cache.layers
    return [*(layer.keys for layer in layers), *(layer.values for layer in layers)]


def _copied(module: nn.Module, **others: Any) -> Any:
    """``module`` with ``others`` in the place of some attributes; all else is shared."""
    copied: nn.Module = object.__new__(type(module))
    vars(copied).update({key: value for key, value in vars(module).items() if key != "forward"}, **others)
    return copied


class _Watch:
    """Modules as they were when somebody looked at them.

    Weights displace from the processor's caches whatever is looked at between tokens, so that as little as can be is.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = [*modules]
        # What packed layers, which are most modules, have is niwaki's own: only something more would be another's.
        others = [module for module in modules if type(module) is not SparseLinear]
        self._hooks = [each for module in modules for each in (module._forward_hooks, module._forward_pre_hooks)]
        self._counted = [vars(module) for module in modules]
        self._attributes = [
            (operator.itemgetter(*(name for name in vars(module) if name not in _HOOKS)), vars(module))
            for module in others
        ]
        self._values = [*{id(each): each for module in others for each in _configured(module)}.values()]
        #: Where tensors and modules are.
        self._owners = [values for module in modules for values in (module._buffers, module._parameters)]
        self._parameters = [values for module in modules if (values := module._parameters)]
        self._members: list[dict[str, Any]] = [*self._owners, *(module._modules for module in others)]
        self._last_hook, self._hooked = RemovableHandle.next_id, self.has_hooks()
        self._before = self._now()
        self._copies = [each.copy() for each in self._values]
        self._pointers = self._where()

    def has_hooks(self) -> bool:
        """Whether any of the modules had one."""
        return any(self._hooks)

    def is_old(self) -> bool:
        """Whether an attribute, a tensor, a module or a hook is another now."""
        if self._hooked or self._last_hook != RemovableHandle.next_id:  # somebody has added one, to whatever it may be
            if self.has_hooks() != self._hooked:
                return True
            self._last_hook = RemovableHandle.next_id
        try:
            return self._now() != self._before or self._values != self._copies
        except (KeyError, RuntimeError, ValueError):  # of what is gone, and of tensors exchanged for others
            return True

    def _now(self) -> tuple[list[Any], ...]:
        return (
            [*map(len, self._counted)],
            [*itertools.chain.from_iterable(map(dict.values, self._members))],
            [found(attributes) for found, attributes in self._attributes],
        )

    def has_moved(self) -> bool:
        """Whether a parameter's numbers are at another place than when this was asked last.

        Those of buffers move with the buffers: by torch's own ways these are exchanged for others.
        """
        before, self._pointers = self._pointers, self._where()
        return before != self._pointers

    def tensors(self) -> list[Tensor]:
        """All that the modules have now."""
        return [value for values in self._owners for value in values.values() if value is not None]

    def _where(self) -> list[int]:
        return [value.data_ptr() for values in self._parameters for value in values.values() if value is not None]


class _Seen:
    """A block as it was when somebody looked at it, and whether it still is."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._known = has_parts(block) and is_undisturbed(block)
        #: Its number.
        self.layer: int = block.get_submodule("self_attn").layer_idx if self._known else -1  # type: ignore[assignment]
        self._watch = _Watch(block.modules())
        self.is_old = self._watch.is_old
        self._modules = modules_of(block)
        self._prepared: Prepared | None = None
        self._agrees: dict[Any, bool] = {}

    def prepared(self) -> Prepared | None:
        """The block with its tensors as they are now."""
        if not self._known:
            return None
        if self._watch.has_moved() or self._prepared is None:
            self._prepared = prepare(self._modules, [tensor.detach() for tensor in self._watch.tensors()])
        return self._prepared

    def agrees(self, dtype: torch.dtype, rotary: int, others: dict[str, Any], cache: str) -> bool:
        """Whether transformers computes single tokens that are given in this way as the library does."""
        asked = (dtype, rotary, cache, *others)
        if asked not in self._agrees:
            self._agrees[asked] = replica.agrees(self._block, dtype, rotary, others, cache)
        return self._agrees[asked]


def _configured(module: nn.Module) -> Iterator[Any]:
    """The dicts and lists of its configuration, on which it depends what a module computes."""
    for value in vars(module).values():
        if isinstance(value, PreTrainedConfig):
            yield vars(value)
            yield from (each for each in vars(value).values() if isinstance(each, dict | list))


def _cache_in(named: dict[str, Any]) -> str:
    """What the cache is called among a block's arguments; "" where there is none."""
    return next((name for name in CACHES if named.get(name) is not None), "")


def _is_empty(cache: Any, layer: int) -> bool:
    """Whether a cache has nothing of a layer, and gives back what it is given."""
    return type(cache) is DynamicCache and cache.get_seq_length(layer) == 0


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
