"""Whether transformers computes tokens of a block as the native library does.

A block's parts do not say what its class makes of them: some turn neighbours instead of halves by their positions, or
only in some layers, or scale queries, keys or sums. So a copy of the block is made, with all attributes that it has and
random numbers for its weights, and computed in both ways: in float32, where nothing is lost in rounding, and with
angles, positions, sizes and masks at which all of that would show. No weight or token of the model plays a part.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from niwaki.packed.block import Prepared, modules_of, prepare
from niwaki.packed.linear import SparseLinear
from niwaki.packed.matrix import PADDING, PackedMatrix, stride

_log = logging.getLogger(__name__)

#: How far the two may be apart in float32, relative to what the block adds to the state and to the state itself.
_TOLERANCE, _OF_STATE = 2e-5, 5e-7
#: In bfloat16, how much larger one's error over some tokens may be than the other's: both are rounding alone.
_APART, _TOKENS = 1.7, 16
_VALUES = 16  # in a row of a matrix
_LOUD, _QUIET = 32.0, 1 / 1024  # powers of two, so that weights come back as they were
#: What every module has.
_OF_ALL = set(vars(nn.Module()))
_NUMBER = ("self_attn", "layer_idx")
#: What was found, by all that it depends on.
_found: dict[Any, bool] = {}


@dataclass(frozen=True)
class _Setting:
    """A token or a prompt, of which each position has its own random numbers."""

    position: int
    past: int  # positions in the cache
    state: float = 1.0  # how large its numbers are
    gains: Mapping[str, float] = field(default_factory=dict)  # what matrices are multiplied with
    masked: bool = False
    tokens: int = 1  # of a prompt, each of which sees those before it


#: Where limits, thresholds and epsilons would show too.
_SETTINGS = (
    _Setting(0, 0),
    _Setting(1, 7, state=_QUIET, gains={"o_proj": _QUIET}, masked=True),
    _Setting(17, 40, masked=True),
    _Setting(5_000, 7, gains={"q_proj": _LOUD, "v_proj": _LOUD}),
    _Setting(100_000, 7, gains={"k_proj": _LOUD, "up_proj": _LOUD}, masked=True),
    _Setting(1 << 24, 40, state=_LOUD, gains={"o_proj": _LOUD, "gate_proj": _LOUD}),
    _Setting(1 << 30, 7, gains={"q_proj": _QUIET, "k_proj": _QUIET}),
    _Setting(5_000, 0, gains={"q_proj": _LOUD, "gate_proj": _LOUD}, tokens=13),
)


def agrees(block: nn.Module, dtype: torch.dtype, rotary: int, named: Mapping[str, Any], cache: str) -> bool:
    """Whether ``block``, of the structure that the library knows, is computed by transformers as by the library.

    Args:
        block: On the CPU.
        dtype: That of the model: float32 or bfloat16.
        rotary: How many cosines there are for a position.
        named: The other arguments of the block's forward that transformers gives, such as ``position_ids``: positions
            are replaced.
        cache: The name of the argument for the cache.
    """
    asked = (dtype, rotary, cache, *sorted(named))
    try:
        key = asked, _description(block)
        if key not in _found:
            difference = _difference(block, dtype, rotary, named, cache)
            _found[key] = not difference
            if difference:
                _say(type(block).__name__, difference)
        return _found[key]
    except _UnknownError as error:
        _say(type(block).__name__, f"nothing is known of {error}")
        return False


@functools.cache
def _say(kind: str, reason: str) -> None:
    """Logs, once for each kind of block and reason, that it is left to transformers."""
    _log.info("single tokens of %s are left to transformers: %s", kind, reason)


def _difference(block: nn.Module, dtype: torch.dtype, rotary: int, named: Mapping[str, Any], cache: str) -> str:
    """In which way the two differ; "" if they do not."""
    try:
        exact = _Replica(block, torch.float32)
        for setting in _SETTINGS:
            theirs, ours = exact.both(setting, rotary, named, cache)
            for what, a, b in zip(("state", "keys", "values"), theirs, ours, strict=True):
                scale = _TOLERANCE * a.norm() + (_OF_STATE * setting.state * a.numel() ** 0.5 if what == "state" else 0)
                if not bool((a - b).norm() <= scale):  # which NaN is not
                    return f"another {what} at position {setting.position:,}"
        if dtype != torch.float32:
            rounded, errors = _Replica(block, dtype), torch.zeros(2, 3, dtype=torch.float64)
            for position in range(17, 17 + _TOKENS):
                setting = _Setting(position, 40, masked=True)
                right, _ = exact.both(setting, rotary, named, cache)
                for row, found in zip(errors, rounded.both(setting, rotary, named, cache), strict=True):
                    row += torch.stack([(a - b).double().square().sum() for a, b in zip(found, right, strict=True)])
            for what, theirs, ours in zip(("state", "keys", "values"), *errors.sqrt().tolist(), strict=True):
                if not theirs / _APART <= ours <= _APART * theirs:
                    return f"another {what} in {dtype}: errors of {theirs:.2g} and {ours:.2g}"
    except Exception as error:  # whatever a class does with numbers that are not its model's
        return f"{type(error).__name__}: {error}"
    return ""


class _UnknownError(Exception):
    """An attribute of which nobody can say whether two blocks have the same."""


def _description(block: nn.Module) -> tuple[Any, ...]:
    """All that a replica is made from; _UnknownError where that cannot be said."""
    found = []
    for path, module in block.named_modules():
        own = {name: value for name, value in vars(module).items() if name not in _OF_ALL}
        # These are the native forward itself, and what a replica does not have.
        own = {name: value for name, value in own.items() if (path, name) not in {("", "forward"), _NUMBER}}
        if isinstance(module, SparseLinear):
            own = {"shape": (module.out_features, module.in_features), "bias": module.bias is not None}
        shapes = [(name, value.shape) for name, value in module.named_parameters(recurse=False)]
        found.append((path, type(module), type(module).forward, _frozen(own, path), tuple(shapes)))
    return tuple(found)


def _frozen(value: Any, name: str) -> Any:
    """``value`` of an attribute, as what can be compared and does not change."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str, torch.dtype) or isinstance(value, type | FunctionType):
        return kind, value
    if kind in (list, tuple):
        return kind, *(_frozen(each, name) for each in value)
    if kind is set:
        return kind, frozenset(_frozen(each, name) for each in value)
    if kind is dict:
        return kind, *((key, _frozen(each, f"{name}.{key}")) for key, each in value.items())
    if isinstance(value, PreTrainedConfig):
        return kind, _frozen(vars(value), name)
    raise _UnknownError(f"{name}, a {kind.__name__}")


class _Replica:
    """A copy of a block with random weights, the same ones in every dtype but for rounding; all of it on the CPU."""

    def __init__(self, block: nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(0)
        self._block = self._copied(block)
        self._modules = modules_of(self._block)
        self._layer = _Number()
        self._modules["self_attn"].layer_idx = self._layer
        found = prepare(self._modules, [])
        if found is None:
            raise ValueError("sizes that do not fit each other")
        self._prepared: Prepared = found

    def _copied(self, module: nn.Module) -> nn.Module:
        if isinstance(module, SparseLinear):
            bias = None if module.bias is None else self._parameter(0.5 * self._random(module.out_features))
            inner = module.packed.columns
            right = self._matrix(inner, module.in_features) if module.is_product else None
            return SparseLinear(self._matrix(module.out_features, inner), bias, right=right).eval()
        copied: nn.Module = object.__new__(type(module))
        values = vars(copied)
        values.update(vars(module))
        values.pop("forward", None)  # of the block itself: the native one
        # Norms are all that has parameters; their weights are not all alike, and none is 0.
        values["_parameters"] = {
            name: None if value is None else self._parameter(1 + 0.3 * self._random(*value.shape))
            for name, value in module._parameters.items()
        }
        values["_modules"] = {name: self._copied(child) for name, child in module.named_children()}
        return copied

    def _parameter(self, value: Tensor) -> nn.Parameter:
        return nn.Parameter(value.bfloat16().to(self._dtype), requires_grad=False)

    def _random(self, *shape: int) -> Tensor:
        """Numbers that bfloat16 has too."""
        values = torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")
        return values.bfloat16().float()

    def _matrix(self, rows: int, columns: int) -> PackedMatrix:
        """One with few values in each row, so that large ones take no time."""
        count = min(columns, _VALUES)
        first = torch.randint(columns, (rows, 1), generator=self._generator, dtype=torch.int64, device="cpu")
        places = (first + torch.arange(count, device="cpu") * (columns // count)) % columns
        mask = torch.zeros(rows * stride(columns), dtype=torch.uint8, device="cpu")
        rows_before = torch.arange(rows, device="cpu").unsqueeze(1) * stride(columns)
        bits = torch.bitwise_left_shift(torch.ones_like(places), places % 8).to(torch.uint8)
        mask.index_add_(0, (rows_before + places // 8).flatten(), bits.flatten())
        values = torch.zeros(rows * count + PADDING, dtype=self._dtype, device="cpu")
        values[:-PADDING] = self._random(rows * count) / 4  # the root of their count
        starts = torch.arange(rows + 1, device="cpu") * count
        return PackedMatrix(mask.view(rows, -1), values, columns, self._dtype, starts)

    def _multiply(self, gains: Mapping[str, float]) -> None:
        for name, gain in gains.items():
            layer = self._modules[name]
            for values in (layer.values, *(() if layer.bias is None else (layer.bias,))):
                values.mul_(gain)

    def both(
        self, setting: _Setting, rotary: int, named: Mapping[str, Any], cache: str
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What the block adds to the state, keys and values, by transformers and by the library, in float32."""
        self._generator.manual_seed(1 + setting.position)
        native, size, count = self._prepared.native, setting.past + 1, setting.tokens
        x, angles, past = (
            self._random(*shape).to(self._dtype)
            for shape in (
                (1, count, native.width),
                (2, 1, count, rotary),
                (2, 1, native.pairs, setting.past, native.size),
            )
        )
        x *= setting.state
        mask = None
        if setting.masked:
            mask = torch.rand((1, 1, 1, size), generator=self._generator, dtype=torch.float32, device="cpu") < 0.7
            mask[..., -1] = True
        positions = {
            name: _positions(value, setting) if isinstance(value, Tensor) else value for name, value in named.items()
        }
        turned = (angles[0].contiguous(), angles[1].contiguous())
        kept = _FixedCache(past, self._layer)
        given = {**positions, cache: kept, "attention_mask": mask, "position_embeddings": turned}
        self._multiply(setting.gains)
        try:
            theirs = type(self._block).forward(self._block, x.clone(), **given)
            queries, *new = self._prepared.begin(x, turned)
            if count > 1:
                ours = self._prepared.end_of_prompt(x, queries, *new)
            else:
                ours = self._prepared.end(x, queries, *kept.behind(*new), mask)
        finally:
            self._multiply({name: 1 / gain for name, gain in setting.gains.items()})
        if not isinstance(theirs, Tensor) or theirs.shape != ours.shape or len(kept.seen) != 1:
            raise ValueError("another form of results")
        return [theirs.float() - x.float(), *(t.float() for t in kept.seen[0])], [
            ours.float() - x.float(),
            *(t.float() for t in new),
        ]


def _positions(value: Tensor, setting: _Setting) -> Tensor:
    """In place of positions: those of the tokens, in the dtype of ``value``."""
    shape = *value.shape[:-1], setting.tokens
    return (setting.position + torch.arange(setting.tokens)).to(value).expand(shape)


class _FixedCache:
    """In place of a cache: has what it was given first, and keeps what it is given."""

    def __init__(self, past: Tensor, layer: object) -> None:
        self._past, self._layer = past, layer
        self.seen: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor, values: Tensor, layer: object, kwargs: object = None) -> tuple[Tensor, Tensor]:
        """Takes what the library's caller gives, for the layer's own number. Caches leave ``kwargs`` unread."""
        if layer is not self._layer:
            raise ValueError("a cache of another layer")
        self.seen.append((keys, values))
        return self.behind(keys, values)

    def behind(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([self._past[0], keys], dim=2), torch.cat([self._past[1], values], dim=2)


class _Number:
    """In place of a layer's number: can be handed on, and not reckoned with, so that layers differ in nothing else."""

    __hash__ = None  # type: ignore[assignment]

    def _refuse(self, *_: object) -> Any:
        raise TypeError("what it computes depends on the number of its layer")

    __eq__ = __ne__ = __bool__ = __index__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
