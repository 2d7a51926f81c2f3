"""Attention heads and MLP neurons: how many to remove from each block, and which parameters have entries for each."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from niwaki.errors import UnsupportedModelError, UsageError
from niwaki.models.layout import Matrix
from niwaki.models.streamed import StreamedModel

#: By the last name of the matrix that neurons go into: the matrices they may come from.
_UP = {
    "down_proj": ("gate_proj", "up_proj", "gate_up_proj"),
    "fc2": ("fc1",),
    "dense_4h_to_h": ("dense_h_to_4h",),
    "c_proj": ("c_fc",),
    "wo": ("wi", "wi_0", "wi_1"),
}
#: Names of the number of neurons in configurations.
_WIDTHS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim")
#: Block formats of other programs and the tiles of GPUs take rows of multiples of it.
_MULTIPLE = 32
#: Packed models take rows of multiples of it.
_OF_LARGE = 64
#: In MLPs of at least so many neurons that is no coarse step.
_LARGE = 2048


@dataclass(frozen=True)
class UnitParameter:
    """A parameter of a block with entries for each unit."""

    name: str  # its path in the block
    dimension: int  # that of the units
    size: int  # entries per unit, next to each other
    times: int = 1  # how often all units are repeated: 2 for gate and up in one matrix

    def without(self, value: Tensor, kept: Tensor) -> Tensor:
        """``value`` with the entries of the units in the mask ``kept`` (units,) only."""
        entries = kept.repeat_interleave(self.size).repeat(self.times).nonzero().squeeze(1)
        return value.index_select(self.dimension, entries.to(value.device))


@dataclass(frozen=True)
class Units:
    """The parts that blocks have as many of, and of which the same number can go from each."""

    kind: str  # "heads", "neurons" or "experts"
    units: int  # in a block: experts, neurons, or groups of heads that share keys and values
    parameters: list[list[UnitParameter]]  # of each block
    matrices: list[Matrix]  # those that are fitted

    @property
    def size(self) -> int:
        """Columns per unit, where its outputs are columns of the input of one matrix in each block."""
        return self.matrices[0].shape[1] // self.units


@dataclass(frozen=True)
class Removal(Units):
    """What is removed from each block."""

    count: int  # units to remove
    config: dict[str, Any]  # what changes in the configuration


#: The matrix that units go into, which is fitted, and all parameters with entries for them, this matrix first.
_Fitted = tuple[Matrix, list[UnitParameter]]


@dataclass(frozen=True)
class ColumnUnits(Units):
    """The heads or the neurons of a model, of which the same number can go from each block."""

    counts: Sequence[int]  # how many can go, in ascending order
    configuration: Callable[[int], dict[str, Any]]  # what changes if so many go

    def without(self, count: int) -> Removal:
        """The removal of so many units of each block."""
        return Removal(self.kind, self.units, self.parameters, self.matrices, count, self.configuration(count))


def neurons_of(model: StreamedModel) -> ColumnUnits:
    """The MLP neurons of each block; of those of widths that are multiples of 32 or 64, such a multiple stays.

    UnsupportedModelError where a block has not exactly one known MLP.
    """
    blocks = [_mlp(model, index) for index in range(len(model.blocks))]
    width = _width(model, "neurons", blocks)
    names = [name for name in _WIDTHS if getattr(model.config, name, 0) in (width, None)]
    if not names:
        raise refused(model, "neurons", f"its configuration has no entry for their number, {width}")
    step = _step(width)

    def configuration(count: int) -> dict[str, Any]:
        return dict.fromkeys(names, width - count)

    return ColumnUnits("neurons", width, *_separate(blocks), range(step, width, step), configuration)


def neuron_removal(model: StreamedModel, fraction: float) -> Removal:
    """Removes ``fraction`` of the MLP neurons of each block, rounded as in :func:`_rounded`.

    Raises UsageError where these are none or all, UnsupportedModelError as :func:`neurons_of`.
    """
    neurons = neurons_of(model)
    width = neurons.units
    count = _rounded(width, fraction) or round(fraction * width)
    if not 0 < count < width:
        raise UsageError(f"neurons {fraction:g} of {width} would be {count}; from 1 to {width - 1} can be removed")
    return neurons.without(count)


def _rounded(width: int, fraction: float) -> int | None:
    """About ``fraction`` of ``width`` neurons, such that a multiple as ``width`` is one stays; None where it is none.

    The request counts for more: None also where all or none would go, and where 32 neurons are more than a quarter.
    """
    step = _step(width)
    count = step * round(fraction * width / step)
    return count if step > 1 and 0 < count < width else None


def _step(width: int) -> int:
    """What the neurons that go, of so many, are a multiple of."""
    if width >= _LARGE and width % _OF_LARGE == 0:
        return _OF_LARGE
    return _MULTIPLE if width % _MULTIPLE == 0 and width >= 4 * _MULTIPLE else 1


def notes_on(removal: Removal, fraction: float | None = None) -> list[str]:
    """What a record should say of the number of neurons that stay, where ``fraction`` of them was asked for."""
    if removal.kind != "neurons":
        return []
    left = removal.units - removal.count
    stay = f"{left:,} of {removal.units:,} {removal.kind} stay"
    if removal.units % _MULTIPLE == 0 and left % _MULTIPLE:
        return [f"{stay}, no multiple of {_MULTIPLE}: block formats of other programs, such as Q8_0, cannot store them"]
    if fraction is not None and left % _MULTIPLE == 0 and removal.count != round(fraction * removal.units):
        shares = f"{100 * removal.count / removal.units:.3g} % go instead of {100 * fraction:.3g} %"
        return [f"{stay}, a multiple of {_step(removal.units)} as block formats and GPUs want it, so {shares}"]
    return []


def removed_of(blocks: int, depth: int, removals: Iterable[Removal]) -> str:
    """Words for what goes: so many of the blocks, and of each that stays what ``removals`` remove."""
    shares = [f"{100 * each.count / each.units:.3g} % of the {each.kind} of each block" for each in removals]
    return ", ".join([f"{blocks} of {depth} blocks", *shares] if blocks else shares)


def heads_of(model: StreamedModel) -> ColumnUnits:
    """The attention heads of each block, those that share keys and values together.

    UnsupportedModelError where none can be removed, or attention is not made of q, k, v and o with a number of heads in
    the configuration.
    """
    heads = int(getattr(model.config, "num_attention_heads", None) or 0)
    if not heads:
        raise refused(model, "heads", "its configuration does not say how many there are")
    groups = int(getattr(model.config, "num_key_value_heads", None) or heads)
    blocks = [_attention(model, index, heads, groups) for index in range(len(model.blocks))]
    width = _width(model, "heads", blocks)
    sizes = {"num_attention_heads": heads // groups, "num_key_value_heads": 1}  # for each group that stays

    def configuration(count: int) -> dict[str, Any]:
        left = {name: each * (groups - count) for name, each in sizes.items()}
        return {**left, "head_dim": width // heads}

    allowed = [count for count in range(1, groups) if accepted(model.config, configuration(count))]
    if not allowed:
        raise refused(model, "heads", f"none of its {groups} {_named(heads, groups)} can be removed")
    return ColumnUnits("heads", groups, *_separate(blocks), allowed, configuration)


def head_removal(model: StreamedModel, fraction: float) -> Removal:
    """Removes ``fraction`` of the attention heads of each block, those that share keys and values together.

    Raises UsageError where this number of heads cannot be removed, UnsupportedModelError as :func:`heads_of`.
    """
    heads = heads_of(model)
    count = round(fraction * heads.units)
    if count not in heads.counts:
        raise UsageError(
            f"heads {fraction:g} of {heads.units} {_named(model.config.num_attention_heads, heads.units)} would be "
            f"{count}; its configuration allows {', '.join(f'{n / heads.units:.4g}' for n in heads.counts)}"
        )
    return heads.without(count)


def _named(heads: int, groups: int) -> str:
    """What goes together of so many heads in so many groups."""
    return "heads" if groups == heads else f"groups of {heads // groups} heads that share keys and values"


def _separate(blocks: list[_Fitted]) -> tuple[list[list[UnitParameter]], list[Matrix]]:
    return [parameters for _, parameters in blocks], [matrix for matrix, _ in blocks]


def _mlp(model: StreamedModel, index: int) -> _Fitted:
    if any(matrix.expert is not None for matrix in model.matrices(index)):
        raise refused(model, "neurons", f"block {index} has experts")
    found = mlps(model.matrices(index))
    if len(found) != 1:
        raise refused(model, "neurons", f"block {index} has {len(found)} MLPs of a known kind")
    down, ups = found[0]
    return down, [_columns(down, 1), *(row for up in ups for row in _rows(model, up, 1, up.shape[0] // down.shape[1]))]


def mlps(matrices: Iterable[Matrix]) -> list[tuple[Matrix, list[Matrix]]]:
    """For each MLP among the ``matrices`` of a block the matrix that neurons go into, and those that they come from."""
    by_name = {matrix.name: matrix for matrix in matrices if matrix.is_module}
    found = []
    for name, down in by_name.items():
        path, dot, last = name.rpartition(".")
        ups = [by_name[path + dot + up] for up in _UP.get(last, ()) if path + dot + up in by_name]
        if ups:
            found.append((down, ups))
    return found


def _attention(model: StreamedModel, index: int, heads: int, groups: int) -> _Fitted:
    matrices = {matrix.name: matrix for matrix in model.matrices(index) if matrix.is_module}
    paths = [name.removesuffix("q_proj") for name in matrices if name.endswith("q_proj")]
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    if len(paths) != 1 or not all(paths[0] + name in matrices for name in names):
        raise refused(model, "heads", f"attention of block {index} is not made of {', '.join(names)}")
    q, k, v, o = (matrices[paths[0] + name] for name in names)
    width = o.shape[1] // heads
    if heads % groups or [m.shape[0] for m in (q, k, v)] != [heads * width, groups * width, groups * width]:
        raise refused(model, "heads", f"attention of block {index} is not {heads} heads in {groups} groups")
    rows = [row for matrix in (q, k, v) for row in _rows(model, matrix, matrix.shape[0] // groups)]
    return o, [_columns(o, o.shape[1] // groups), *rows]


def _columns(matrix: Matrix, size: int) -> UnitParameter:
    return UnitParameter(matrix.parameter, 0 if matrix.transposed else 1, size)


def _rows(model: StreamedModel, matrix: Matrix, size: int, times: int = 1) -> Iterator[UnitParameter]:
    """The weight of ``matrix``, and its bias if it has one."""
    yield UnitParameter(matrix.parameter, 1 if matrix.transposed else 0, size, times)
    if f"{matrix.name}.bias" in model.blocks[matrix.block].state_dict():
        yield UnitParameter(f"{matrix.name}.bias", 0, size, times)


def accepted(config: Any, changes: dict[str, Any]) -> bool:
    """Whether transformers accepts the configuration with ``changes``."""
    try:
        changed = type(config).from_dict({**config.to_dict(), **changes})
    except Exception:  # its checks raise errors of their own, of huggingface_hub and ValueError
        return False
    return all(getattr(changed, name) == value for name, value in changes.items())


def _width(model: StreamedModel, kind: str, blocks: list[_Fitted]) -> int:
    """Columns of the matrices that are fitted, the same in all blocks."""
    widths = {matrix.shape[1] for matrix, _ in blocks}
    if len(widths) != 1:
        raise refused(model, kind, f"blocks differ: {', '.join(map(str, sorted(widths)))} columns")
    return widths.pop()


def refused(model: StreamedModel, kind: str, reason: str) -> UnsupportedModelError:
    """The error for units that cannot be removed for this ``reason``."""
    name = model.checkpoint.config.get("model_type")
    return UnsupportedModelError(f"{kind} of this model ({name}) cannot be removed: {reason}")
