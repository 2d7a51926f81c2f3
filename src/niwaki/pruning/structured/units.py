"""Attention heads and MLP neurons: how many of each block to remove, and which parameters have a part for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from niwaki.errors import UnsupportedModelError, UsageError
from niwaki.models.layout import Matrix
from niwaki.models.streamed import StreamedModel

#: By the last part of the name of the matrix that takes neurons in: those that may put them out.
_UP = {
    "down_proj": ("gate_proj", "up_proj", "gate_up_proj"),
    "fc2": ("fc1",),
    "dense_4h_to_h": ("dense_h_to_4h",),
    "c_proj": ("c_fc",),
}
#: What configurations call the number of neurons.
_WIDTHS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")


@dataclass(frozen=True)
class Part:
    """A parameter of a block with entries for each unit.

    Attributes:
        name: Its path in the block.
        dimension: Along which it has them.
        size: Entries of a unit, next to each other.
        times: How often it has all units, one after the other: 2 for gate and up in one matrix.
    """

    name: str
    dimension: int
    size: int
    times: int = 1

    def without(self, value: Tensor, kept: Tensor) -> Tensor:
        """``value`` with the entries of the units ``kept`` (units,) bool only."""
        entries = kept.cpu().repeat_interleave(self.size).repeat(self.times)
        return value.index_select(self.dimension, entries.nonzero().squeeze(1))


@dataclass(frozen=True)
class Site:
    """Units in one block: the matrix that takes them in, which is fitted, and all parts, the matrix's the first."""

    matrix: Matrix
    parts: list[Part]


@dataclass(frozen=True)
class Cut:
    """What is removed from each block.

    Attributes:
        kind: "heads" or "neurons".
        size: Columns of a unit in the matrices that are fitted.
        units: Units that there are: neurons, or groups of heads that share keys and values.
        count: Units to remove.
        config: What changes in the configuration.
        sites: One for each block.
    """

    kind: str
    size: int
    units: int
    count: int
    config: dict[str, Any]
    sites: list[Site]


def neurons_cut(model: StreamedModel, fraction: float) -> Cut:
    """To remove ``fraction`` of the MLP neurons of each block.

    Raises:
        UsageError: that is none, or all.
        UnsupportedModelError: blocks have other MLPs than one with a known number of neurons in each.
    """
    sites = [_mlp(model, index) for index in range(len(model.blocks))]
    width = _only(model, "neurons", {site.matrix.shape[1] for site in sites})
    names = [name for name in _WIDTHS if getattr(model.config, name, 0) in (width, None)]
    if not names:
        raise _refused(model, "neurons", f"its configuration has no entry for their number, {width}")
    count = round(fraction * width)
    if not 0 < count < width:
        raise UsageError(f"--neurons {fraction:g} of {width} would be {count}; from 1 to {width - 1} can go")
    return Cut("neurons", 1, width, count, dict.fromkeys(names, width - count), sites)


def heads_cut(model: StreamedModel, fraction: float) -> Cut:
    """To remove ``fraction`` of the attention heads of each block, with the keys and values that are theirs alone.

    Heads that share keys and values go together.

    Raises:
        UsageError: that is no number of heads that can go.
        UnsupportedModelError: attention is not made of q, k, v and o with a number of heads in the configuration.
    """
    heads = int(getattr(model.config, "num_attention_heads", None) or 0)
    if not heads:
        raise _refused(model, "heads", "its configuration does not say how many there are")
    groups = int(getattr(model.config, "num_key_value_heads", None) or heads)
    sites = [_attention(model, index, heads, groups) for index in range(len(model.blocks))]
    width = _only(model, "heads", {site.matrix.shape[1] for site in sites})

    def config(count: int) -> dict[str, Any]:
        return {
            "num_attention_heads": heads // groups * (groups - count),
            "num_key_value_heads": groups - count,
            "head_dim": width // heads,
        }

    unit = "heads" if groups == heads else f"groups of {heads // groups} heads that share keys and values"
    count = round(fraction * groups)
    allowed = [n for n in range(1, groups) if _accepted(model.config, config(n))]
    if not allowed:
        raise _refused(model, "heads", f"none of its {groups} {unit} can be spared")
    if count not in allowed:
        raise UsageError(
            f"--heads {fraction:g} of {groups} {unit} would be {count}; its configuration allows "
            f"{', '.join(f'{n / groups:.4g}' for n in allowed)}"
        )
    return Cut("heads", width // groups, groups, count, config(count), sites)


def _mlp(model: StreamedModel, index: int) -> Site:
    found = {matrix.name: matrix for matrix in model.matrices(index)}
    if any(matrix.expert is not None for matrix in found.values()):
        raise _refused(model, "neurons", f"block {index} has experts")
    sites = []
    for name, down in found.items():
        path, last = name[: name.rfind(".") + 1], name[name.rfind(".") + 1 :]
        ups = [found[path + up] for up in _UP.get(last, ()) if path + up in found]
        if ups:
            parts = [part for up in ups for part in _rows(model, up, 1, up.shape[0] // down.shape[1])]
            sites.append(Site(down, [_columns(down, 1), *parts]))
    if len(sites) != 1:
        raise _refused(model, "neurons", f"block {index} has {len(sites)} MLPs of a known kind")
    return sites[0]


def _attention(model: StreamedModel, index: int, heads: int, groups: int) -> Site:
    found = {matrix.name: matrix for matrix in model.matrices(index)}
    paths = [name.removesuffix("q_proj") for name in found if name.endswith("q_proj")]
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    if len(paths) != 1 or not all(paths[0] + name in found for name in names):
        raise _refused(model, "heads", f"attention of block {index} is not made of {', '.join(names)}")
    q, k, v, o = (found[paths[0] + name] for name in names)
    width = o.shape[1] // heads
    if heads % groups or [m.shape[0] for m in (q, k, v)] != [heads * width, groups * width, groups * width]:
        raise _refused(model, "heads", f"attention of block {index} is not {heads} heads in {groups} groups")
    rows = [part for matrix in (q, k, v) for part in _rows(model, matrix, matrix.shape[0] // groups)]
    return Site(o, [_columns(o, o.shape[1] // groups), *rows])


def _columns(matrix: Matrix, size: int) -> Part:
    return Part(matrix.parameter, 0 if matrix.transposed else 1, size)


def _rows(model: StreamedModel, matrix: Matrix, size: int, times: int = 1) -> Iterator[Part]:
    """The weight of ``matrix``, and its bias if it has one."""
    yield Part(matrix.parameter, 1 if matrix.transposed else 0, size, times)
    if f"{matrix.name}.bias" in model.vectors(matrix.block):
        yield Part(f"{matrix.name}.bias", 0, size, times)


def _accepted(config: Any, changes: dict[str, Any]) -> bool:
    """Whether transformers takes the configuration with ``changes``."""
    try:
        changed = type(config).from_dict({**config.to_dict(), **changes})
    except Exception:  # its checks raise errors of their own, of huggingface_hub and ValueError
        return False
    return all(getattr(changed, name) == value for name, value in changes.items())


def _only(model: StreamedModel, kind: str, widths: set[int]) -> int:
    if len(widths) != 1:
        raise _refused(model, kind, f"blocks differ: {', '.join(map(str, sorted(widths)))} columns")
    return widths.pop()


def _refused(model: StreamedModel, kind: str, reason: str) -> UnsupportedModelError:
    name = f"{model.checkpoint.path} ({model.checkpoint.config.get('model_type')})"
    return UnsupportedModelError(f"{kind} of {name} cannot be removed: {reason}")
