"""What can be taken out of each block: neurons and heads, and which tensors have rows for them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from niwaki.blocks import StreamedModel
from niwaki.errors import UnsupportedModelError, UsageError
from niwaki.layout import Matrix

#: By the last part of the name of the matrix that neurons go into: what they may come out of.
_SOURCES = {
    "down_proj": ("gate_proj", "up_proj", "gate_up_proj"),
    "fc2": ("fc1",),
    "dense_4h_to_h": ("dense_h_to_4h",),
    "c_proj": ("c_fc",),
}
#: What configurations call the number of neurons.
_WIDTHS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint with rows for the units.

    Attributes:
        key: Its key.
        dimension: Where it has the rows.
        times: How often it has all of them, one after the other: 2 for gate and up in one.
        head: Rows of a head.
        shared: Heads that share the rows of one: as many as a group has, for keys and values.
    """

    key: str
    dimension: int = 0
    times: int = 1
    head: int = 1
    shared: int = 1

    def rows(self, kept: Tensor, columns: int) -> Tensor:
        """Which rows stay where of ``columns`` those with the numbers ``kept`` stay."""
        rows = (kept // (self.head * self.shared) * self.head + kept % self.head).unique()
        return torch.cat([rows + i * columns for i in range(self.times)])


@dataclass(frozen=True)
class Site:
    """A matrix whose inputs can be dropped, and where they come from."""

    matrix: Matrix
    sources: list[Source]


@dataclass(frozen=True)
class Cut:
    """How much is dropped in each block.

    Attributes:
        kind: "heads" or "neurons".
        unit: What goes as one: "neuron", "head" or "group of 4 heads".
        size: Columns in a unit.
        units: Units that there are.
        count: Units to drop.
        parts: Runs of units of which each loses the same number.
        config: What changes in the configuration.
        sites: One for each block.
    """

    kind: str
    unit: str
    size: int
    units: int
    count: int
    parts: int
    config: dict[str, Any]
    sites: list[Site]

    def columns(self, units: list[int]) -> Tensor:
        """Numbers of the columns that stay when ``units`` go."""
        kept = torch.ones(self.units, dtype=torch.bool)
        kept[units] = False
        return kept.repeat_interleave(self.size).nonzero().squeeze(1)

    def lengths(self, index: int) -> Iterator[tuple[str, int, int]]:
        """(key, dimension, its new length) of each tensor of a block that becomes smaller."""
        run, each = self.units // self.parts, self.count // self.parts
        some = [part * run + i for part in range(self.parts) for i in range(each)]
        kept = self.columns(some)  # whichever go, the lengths are the same
        matrix = self.sites[index].matrix
        yield matrix.key, 0 if matrix.transposed else 1, len(kept)
        for source in self.sites[index].sources:
            yield source.key, source.dimension, len(source.rows(kept, matrix.shape[1]))


def neurons_cut(model: StreamedModel, fraction: float) -> Cut:
    """Dropping ``fraction`` of the neurons of each block.

    Raises:
        UsageError: that is none, or all.
        UnsupportedModelError: blocks have other MLPs than one with a known number of neurons in each.
    """
    sites = [_mlp(model, index) for index in range(len(model.blocks))]
    width = _only(model, "neurons", {site.matrix.shape[1] for site in sites})
    names = [name for name in _WIDTHS if getattr(model.config, name, 0) in (width, None)]
    if not names:
        raise _refused(model, "neurons", f"its configuration has no entry for their number, {width}")
    count = _rounded(fraction * width)
    if not 0 < count < width:
        raise UsageError(
            f"--neurons {fraction:g} of {width} neurons would be {count}; 1 to {width - 1} can be dropped"
        )
    return Cut("neurons", "neuron", 1, width, count, 1, dict.fromkeys(names, width - count), sites)


def heads_cut(model: StreamedModel, fraction: float) -> Cut:
    """Dropping ``fraction`` of the attention heads of each block.

    Of heads that share keys and values whole groups go, if that comes out even, and otherwise as many of each group.

    Raises:
        UsageError: that is no number of heads that can be dropped.
        UnsupportedModelError: attention is not made of q, k, v and o with a number of heads in the configuration.
    """
    total = int(model.config.num_attention_heads)
    groups = int(getattr(model.config, "num_key_value_heads", None) or total)
    each = total // groups
    sites = [_attention(model, index, total, groups) for index in range(len(model.blocks))]
    width = _only(model, "heads", {site.matrix.shape[1] for site in sites})
    size = width // total

    def cut(fewer: int, of_groups: int) -> Cut:
        changes = {"num_attention_heads": fewer, "num_key_value_heads": of_groups, "head_dim": size}
        if of_groups < groups:
            unit = "head" if each == 1 else f"group of {each} heads"
            return Cut("heads", unit, size * each, groups, groups - of_groups, 1, changes, sites)
        return Cut("heads", "head", size, total, total - fewer, groups, changes, sites)

    possible = {groups * n: cut(groups * n, groups) for n in range(1, each)}
    possible |= {n * each: cut(n * each, n) for n in range(1, groups)}
    possible = {number: found for number, found in possible.items() if _accepted(model.config, found.config)}
    if not possible:
        raise _refused(model, "heads", f"no number below {total}, in {groups} groups, is valid for it")
    count = _rounded(fraction * total)
    if total - count not in possible:
        fractions = ", ".join(f"{(total - number) / total:.4g}" for number in sorted(possible, reverse=True))
        raise UsageError(
            f"--heads {fraction:g} of {total} heads would be {count}; with {groups} groups of keys and values and a "
            f"hidden size of {model.config.hidden_size} its configuration allows {fractions}"
        )
    return possible[total - count]


def _mlp(model: StreamedModel, index: int) -> Site:
    found = {matrix.name: matrix for matrix in model.matrices(index)}
    if any(matrix.expert is not None for matrix in found.values()):
        raise _refused(model, "neurons", f"block {index} has experts")
    sites = []
    for name, matrix in found.items():
        parent, _, last = name.rpartition(".")
        path = f"{parent}." if parent else ""
        sources = [found[path + source] for source in _SOURCES.get(last, ()) if path + source in found]
        if sources:
            sites.append((matrix, sources))
    if len(sites) != 1:
        raise _refused(model, "neurons", f"block {index} has {len(sites)} MLPs of a known kind")
    matrix, sources = sites[0]
    width, tensors = matrix.shape[1], []
    for source in sources:
        times = source.shape[0] // width
        if source.shape[0] != (2 if source.name.endswith("gate_up_proj") else 1) * width:
            raise _refused(model, "neurons", f"{source.name} has {source.shape[0]} rows for {width} neurons")
        tensors += _tensors(model, index, source, times=times)
    return Site(matrix, tensors)


def _attention(model: StreamedModel, index: int, heads: int, groups: int) -> Site:
    found = {matrix.name: matrix for matrix in model.matrices(index)}
    parents = [name.removesuffix("q_proj") for name in found if name.endswith("q_proj")]
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    if len(parents) != 1 or not all(parents[0] + name in found for name in names):
        raise _refused(model, "heads", f"attention of block {index} is not made of {', '.join(names)}")
    q, k, v, o = (found[parents[0] + name] for name in names)
    width = o.shape[1] // heads
    wanted = (heads * width, groups * width, groups * width)
    if heads % groups or o.shape[1] % heads or (q.shape[0], k.shape[0], v.shape[0]) != wanted:
        raise _refused(model, "heads", f"attention of block {index} is not {heads} heads in {groups} groups")
    tensors = _tensors(model, index, q, head=width)
    for matrix in (k, v):
        tensors += _tensors(model, index, matrix, head=width, shared=heads // groups)
    return Site(o, tensors)


def _tensors(model: StreamedModel, index: int, matrix: Matrix, **layout: int) -> list[Source]:
    """The tensor of ``matrix``, and its bias if it has one."""
    bias = model.vectors(index).get(f"{matrix.name}.bias")
    weight = Source(matrix.key, 1 if matrix.transposed else 0, **layout)
    return [weight] if bias is None else [weight, Source(bias, 0, **layout)]


def _accepted(config: Any, changes: dict[str, Any]) -> bool:
    """Whether transformers takes the configuration with ``changes``."""
    try:
        changed = type(config).from_dict({**config.to_dict(), **changes})
    except Exception:  # its checks raise errors of their own, of huggingface_hub and ValueError
        return False
    return all(getattr(changed, name) == value for name, value in changes.items())


def _only(model: StreamedModel, kind: str, widths: set[int]) -> int:
    if len(widths) != 1:
        found = ", ".join(map(str, sorted(widths)))
        raise _refused(model, kind, f"blocks differ: {found} columns")
    return widths.pop()


def _rounded(number: float) -> int:
    return math.floor(number + 0.5)


def _refused(model: StreamedModel, kind: str, reason: str) -> UnsupportedModelError:
    name = f"{model.checkpoint.path} ({model.checkpoint.config.get('model_type')})"
    return UnsupportedModelError(f"{kind} of {name} cannot be dropped: {reason}")
