"""Which tensors of a checkpoint make up which parameter of a model, and which of them can be pruned.

Files and modules have different names for the same thing, and experts that are one parameter (experts, out, in) in a
module are often a tensor each in the files. The list of these differences is transformers' own; here it is applied to
one tensor at a time, so that a block can be read without the rest.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.pytorch_utils import Conv1D

from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import CheckpointError, UnsupportedModelError
from niwaki.models.structure import EXPERTS_TRANSPOSED, OF_HEADS, choice, is_cross_attention, is_in_tower, is_reached
from niwaki.records.wording import counted

#: What pruned weights can be stored in. Formats of 8 bits need scales beside them, and torch cannot compute in them.
_STORED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
#: The operations of transformers that put tensors together and are followed here, each with its dimension, and whether
#: there is a tensor for each expert.
_STACKING: dict[tuple[tuple[str, int | None], ...], bool] = {
    (("MergeModulelist", 0),): True,
    (("MergeModulelist", 0), ("Concatenate", 1)): True,
    (("Concatenate", 0),): False,
}


#: By their names, matrices with the same inputs that servers compute as one.
_FUSED = tuple(
    frozenset(names.split())
    for names in (
        *("q_proj k_proj v_proj", "query key value", "wq wk wv", "gate_proj up_proj", "w1 w3"),
        *("q_a_proj kv_a_proj_with_mqa", "in_proj_qkv in_proj_z", "in_proj_b in_proj_a"),
    )
)


@dataclass(frozen=True)
class _Piece:
    """A tensor of the checkpoint that a parameter is made from."""

    key: str
    expert: int | None = None  # its index in the parameter's first dimension; None if it is not one expert's
    start: int = 0  # its first row there
    flipped: bool = False  # the last two dimensions are the other way around than the parameter's

    def within(self, whole: Tensor, rows: int) -> Tensor:
        """The view of a parameter that it makes up, with so many rows."""
        value = whole if self.expert is None else whole[self.expert]
        return value[self.start : self.start + rows]


@dataclass(frozen=True)
class Matrix:
    """A matrix that can be pruned."""

    block: int  # index of its block
    name: str  # in the block, such as "mlp.experts.3.up_proj"
    key: str  # the checkpoint's, of the tensor that it is, or is in
    shape: tuple[int, int]  # (out, in)
    parameter: str  # path in the block of the parameter that it is, or is in
    expert: int | None = None  # which one's it is; None outside of experts
    start: int = 0  # its first row in the parameter, or in the expert's matrix there
    index: int | None = None  # in the checkpoint's tensor, if that has all experts
    transposed: bool = False  # the parameter has it as (in, out)
    flipped: bool = False  # the checkpoint has it the other way around than the parameter
    blocks: tuple[int, ...] = ()  # those that compute with it, where several do

    @property
    def entry(self) -> tuple[str, int | None]:
        """What it is in the checkpoint."""
        return self.key, self.index

    @property
    def place(self) -> tuple[int, str]:
        """Where it is in the model: its block and its name there."""
        return self.block, self.name

    @property
    def is_module(self) -> bool:
        """Whether it is all weights of a module of its name."""
        return self.parameter == f"{self.name}.weight" and self.expert is None

    @property
    def is_stored_transposed(self) -> bool:
        """Whether the checkpoint has it as (in, out)."""
        return self.transposed != self.flipped

    @property
    def size(self) -> int:
        """The number of its weights."""
        return self.shape[0] * self.shape[1]

    @property
    def label(self) -> str:
        """What errors call it: its key."""
        return self.key if self.index is None else f"{self.key}[{self.index}]"

    def read(self, checkpoint: Checkpoint) -> Tensor:
        """(out, in): it, as ``checkpoint`` has it."""
        value = checkpoint.read(self.key, self.index)
        return value.T.contiguous() if self.is_stored_transposed else value

    def within(self, parameter: Tensor) -> Tensor:
        """The view (out, in) of ``parameter`` that this matrix is."""
        value = parameter if self.expert is None else parameter[self.expert]
        value = value.T if self.transposed else value
        return value[self.start : self.start + self.shape[0]]


def stacked(matrix: Matrix) -> Hashable:
    """The same for all experts of a block, which are one tensor in files for llama.cpp."""
    return matrix.place if matrix.expert is None else (matrix.block, re.sub(r"\d+", "*", matrix.name))


def fused(matrix: Matrix) -> Hashable:
    """The same for matrices that servers such as vLLM make one of, which has one number of bits; for all experts."""
    if matrix.expert is not None:
        return "experts"
    path, _, name = matrix.name.rpartition(".")
    return matrix.block, path, next((names for names in _FUSED if name in names), name)


def check_dtypes(checkpoint: Checkpoint, keys: Iterable[str]) -> None:
    """UnsupportedModelError where the dtype of one of the tensors ``keys`` is none for weights that change."""
    for key in keys:
        if checkpoint.dtype(key) not in _STORED:
            stored = checkpoint.entries[key].dtype
            raise UnsupportedModelError(
                f"{checkpoint.path}: {key!r} is {stored}, which cannot be pruned; load the model in "
                "transformers in bfloat16, save it, and prune that"
            )


class Layout:
    """The pieces of all parameters of a model, which need no memory.

    UnsupportedModelError where a parameter is made from tensors in a way that is unknown here, or not of real numbers;
    CheckpointError where a tensor is missing, there twice, or has another shape.
    """

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._parameters: dict[str, Tensor] = model.state_dict()
        #: Keys of the checkpoint that the model has nothing for, see :mod:`.outside`.
        self.unused: list[str] = []
        self._pieces = self._find_pieces(model)
        self._experts_transposed = checkpoint.config.get("model_type") in EXPERTS_TRANSPOSED
        #: Parameters that the checkpoint lacks, with those that they are the same as.
        self.ties: dict[str, str] = {}
        sources = self._sources(model.all_tied_weights_keys)
        for name, value in model.named_parameters(remove_duplicate=False):
            if name in self._pieces:
                self._check(name)
            elif is_in_tower(name) or not value.is_meta:  # what stays in the files, whatever they call it; or computed
                continue
            elif name not in sources:
                raise CheckpointError(f"{checkpoint.path} lacks {name!r}, which its config.json asks for")
            else:
                self.ties[name] = sources[name]
        self._pieces |= {name: self._pieces[other] for name, other in self.ties.items()}

    def _sources(self, ties: Mapping[str, str]) -> dict[str, str]:
        """For each parameter that is tied to others, as is said by ``ties``, the one that the checkpoint has."""
        groups: dict[str, list[str]] = {}
        for name, other in ties.items():
            groups.setdefault(other, [other]).append(name)
        return {name: there for names in groups.values() for there in names if there in self._pieces for name in names}

    def keys(self, name: str) -> list[str]:
        """The checkpoint's keys of all tensors that a parameter or buffer is made from, if any."""
        return [piece.key for piece in self._pieces.get(name, ())]

    def same(self, name: str) -> list[str]:
        """The parameter ``name`` and all that are tied to it."""
        there = self.ties.get(name, name)
        others = [tied for tied, other in self.ties.items() if other == there]
        return [there, *others]

    def experts(self, name: str) -> dict[str, int | None]:
        """The expert of each of the tensors of :meth:`keys`; None for one that is of all, or of no expert."""
        return {piece.key: piece.expert for piece in self._pieces[name]}

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The parameter or buffer ``name`` of the model, on the CPU, in ``dtype``, by default what the model has."""
        like, pieces = self._parameters[name], self._pieces[name]
        dtype = dtype or like.dtype
        parts = (self._turned(piece, self.checkpoint.read(piece.key)) for piece in pieces)
        if self._is_whole(name):
            return next(parts).to(dtype)
        whole = torch.empty(like.shape, dtype=dtype)
        for piece, part in zip(pieces, parts, strict=True):
            piece.within(whole, len(part)).copy_(part)
        return whole

    def read_experts(self, name: str, experts: Sequence[int]) -> Tensor:
        """The entries of ``experts`` in the parameter ``name``, which has all of a mixture, read one by one."""
        like = self._parameters[name]
        whole = torch.empty((len(experts), *like.shape[1:]), dtype=like.dtype)
        for piece in self._pieces[name]:
            for number, expert in enumerate(experts):
                if piece.expert is None:
                    whole[number] = self._turned(piece, self.checkpoint.read(piece.key, expert))
                elif piece.expert == expert:
                    part = self._turned(piece, self.checkpoint.read(piece.key))
                    replace(piece, expert=number).within(whole, len(part)).copy_(part)
        return whole

    def split(self, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(key, tensor) of all that :meth:`read` makes the parameter ``name`` from, where it is to be ``value``."""
        for piece in self._pieces[name]:
            rows = len(value) if self._is_whole(name) else self.checkpoint.entries[piece.key].shape[0]
            yield piece.key, self._turned(piece, piece.within(value, rows))

    def _is_whole(self, name: str) -> bool:
        """Whether a parameter is one tensor of the checkpoint."""
        return len(self._pieces[name]) == 1 and self._pieces[name][0].expert is None

    @staticmethod
    def _turned(piece: _Piece, value: Tensor) -> Tensor:
        return value.mT.contiguous() if piece.flipped else value

    def matrices(self, index: int, prefix: str, block: nn.Module, crosses: bool = False) -> list[Matrix]:
        """What can be pruned in block ``index``, whose parameters' names start with ``prefix``.

        Attention to something else than the text is left out, unless the model ``crosses`` from an encoder.
        """
        matrices: list[Matrix] = []
        if not crosses and not is_reached(block):
            return matrices
        for path, module in block.named_modules():
            if choice(path) or (is_cross_attention(path) and not crosses):
                continue
            if isinstance(module, nn.Linear | Conv1D):
                is_transposed = isinstance(module, Conv1D)
                matrices += self._within(index, prefix, f"{path}.weight", module.weight, is_transposed)
            for own, value in module.named_parameters(recurse=False):
                is_of_experts = value.ndim == 3 and own not in OF_HEADS and 1 not in value.shape[1:]
                if is_of_experts and not isinstance(module, nn.Conv1d):
                    is_transposed = getattr(module, "is_transposed", self._experts_transposed)
                    matrices += self._within(index, prefix, f"{path}.{own}", value, is_transposed)
        return matrices

    def _within(self, index: int, prefix: str, parameter: str, value: Tensor, transposed: bool) -> Iterator[Matrix]:
        """The matrices in a parameter of a block: one or, of experts, one for each; several if the files have them."""
        pieces, path = self._pieces[prefix + parameter], parameter.removesuffix(".weight")
        first, *others = pieces
        rows, columns = value.shape[:-3:-1] if transposed else value.shape[-2:]
        if value.ndim == 2 and self._is_whole(prefix + parameter):
            yield Matrix(index, path, first.key, (rows, columns), parameter, transposed=transposed)
            return
        if value.ndim == 3 and first.expert is None:  # the checkpoint has them in one tensor too
            if others:
                raise UnsupportedModelError(f"{parameter!r} consists of {len(pieces)} tensors, each of several experts")
            for expert in range(len(value)):
                at = expert, 0, expert, transposed, first.flipped
                yield Matrix(index, f"{parameter}.{expert}", first.key, (rows, columns), parameter, *at)
            return
        for piece in pieces:
            if piece.expert is None:  # matrices of the files that run as one
                name = f"{path.rpartition('.')[0]}.{piece.key.split('.')[-2]}"
            else:  # the name in the files, which is what people know: experts.3.w1, not some rows of gate_up_proj
                name = re.sub(r"^.*?(?=[^.]+\.experts\.)", "", piece.key).removesuffix(".weight")
            rows, columns = self.checkpoint.entries[piece.key].shape
            yield Matrix(index, name, piece.key, (rows, columns), parameter, piece.expert, piece.start)

    def _find_pieces(self, model: PreTrainedModel) -> dict[str, list[_Piece]]:
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, core_model_loading.WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, core_model_loading.WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        pieces: dict[str, list[_Piece]] = {}
        sources: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for key in self.checkpoint.entries:
            name, pattern = core_model_loading.rename_source_key(
                key, renamings, converters, model.base_model_prefix, self._parameters
            )
            if name not in self._parameters and key in self._parameters:
                name, pattern = key, None
            if name not in self._parameters:
                self.unused.append(key)
                continue
            if pattern is None:
                if name in pieces:
                    raise self._twice(name, pieces[name][0].key, key)
                pieces[name] = [_Piece(key)]
            else:
                sources[name][pattern].append(key)
        for name, keys in sources.items():
            if name not in pieces and not is_in_tower(name):  # a file may have it whole
                pieces[name] = self._stacked(name, by_pattern[next(iter(keys))], keys)
        return pieces

    def _twice(self, name: str, key: str, other: str) -> CheckpointError:
        """The error for a parameter that the checkpoint has as two tensors: which one counts is up to the reader."""
        return CheckpointError(f"{self.checkpoint.path} has {name!r} twice, as {key!r} and {other!r}")

    def _stacked(self, name: str, rule: Any, sources: dict[str, list[str]]) -> list[_Piece]:
        operations = tuple((type(each).__name__, getattr(each, "dim", None)) for each in rule.operations)
        if operations == (("Transpose", None),) and {rule.operations[0].dim0, rule.operations[0].dim1} == {1, 2}:
            key, *others = [key for keys in sources.values() for key in keys]
            if others:
                raise self._twice(name, key, others[0])
            fits = self.checkpoint.entries[key].shape == tuple(self._parameters[name].shape)
            return [_Piece(key, flipped=not (fits and rule.operations[0].check_dims))]
        if operations not in _STACKING:
            raise UnsupportedModelError(
                f"{name!r} is made from the tensors of {self.checkpoint.path} by "
                f"{', '.join(kind for kind, _ in operations)}, which niwaki does not follow"
            )
        has_experts, start = _STACKING[operations], 0
        pieces: list[_Piece] = []
        for pattern in rule.source_patterns:
            keys = sorted(sources.get(pattern, []), key=core_model_loading.dot_natural_key)
            wanted = len(self._parameters[name]) if has_experts else max(1, len(keys))
            if len(keys) != wanted:
                raise CheckpointError(
                    f"{self.checkpoint.path} has {counted(len(keys), 'tensor')} like {pattern!r} for {name!r}, which "
                    f"is made of {wanted}"
                )
            for side_by_side in [keys] if has_experts else [[key] for key in keys]:
                for expert, key in enumerate(side_by_side):
                    pieces.append(_Piece(key, expert if has_experts else None, start))
                start += sum(self.checkpoint.entries[side_by_side[0]].shape[:1])
        return pieces

    def _check(self, name: str) -> None:
        wanted = tuple(self._parameters[name].shape)
        shapes = [(piece, self.checkpoint.entries[piece.key].shape) for piece in self._pieces[name]]
        heights: Counter[int | None] = Counter()
        for piece, shape in shapes:
            heights[piece.expert] += sum(shape[:1])
        for piece, shape in shapes:
            if not self.checkpoint.dtype(piece.key).is_floating_point or 0 in shape:
                stored = f"{self.checkpoint.entries[piece.key].dtype} {shape}"
                raise UnsupportedModelError(f"{self.checkpoint.path}: {piece.key!r} is {stored}, and not real numbers")
            whole = (*shape[:-2], *shape[:-3:-1]) if piece.flipped else shape
            if not self._is_whole(name):
                whole = (*wanted[: 0 if piece.expert is None else 1], heights[piece.expert], *shape[1:])
            if whole != wanted:
                raise CheckpointError(
                    f"{self.checkpoint.path}: {piece.key!r} has shape {shape}, its config.json asks for "
                    f"{wanted if self._is_whole(name) else f'a part of {wanted}'}"
                )


# Matrices that several blocks compute with, such as those of Zamba, which uses one transformer at several depths.
#
# Each belongs to the first of these blocks, where it is pruned; the later ones compute with what it has become.

#: What to note where blocks are fitted.
NOT_FITTED = "matrices that several blocks share are not fitted to the outputs of any of them"


def by_first_use(used: Sequence[list[Matrix]]) -> tuple[list[list[Matrix]], list[list[Matrix]]]:
    """What each block prunes, and what it shares with an earlier one, of the matrices that each computes with."""
    blocks: dict[tuple[str, int | None], list[int]] = defaultdict(list)
    for matrix in (matrix for matrices in used for matrix in matrices):
        blocks[matrix.entry].append(matrix.block)
    own: list[list[Matrix]] = [[] for _ in used]
    shared: list[list[Matrix]] = [[] for _ in used]
    for index, matrices in enumerate(used):
        for matrix in matrices:
            first, *others = blocks[matrix.entry]
            matrix = replace(matrix, blocks=(first, *others) if others else ())
            (own if index == first else shared)[index].append(matrix)
    return own, shared


def only_in(
    blocks: range, own: list[list[Matrix]], shared: list[list[Matrix]]
) -> tuple[list[list[Matrix]], list[list[Matrix]], list[str]]:
    """What is left of :func:`by_first_use` where only ``blocks`` are pruned, and what to note about it."""
    own = [matrices if index in blocks else [] for index, matrices in enumerate(own)]
    chosen = {matrix.entry for matrices in own for matrix in matrices}
    there = range(len(shared))[blocks.start : blocks.stop]  # a configuration may name others
    left = {matrix.entry for index in there for matrix in shared[index]} - chosen
    notes = list[str]()
    if left:
        which = counted(len(left), "matrix is", "matrices are")
        notes.append(f"{which} shared with blocks before these, where alone they would be pruned: they stay")
    return own, [[matrix for matrix in matrices if matrix.entry in chosen] for matrices in shared], notes


def sharing_notes(matrices: Iterable[Matrix], fits: bool) -> list[str]:
    """What to note about those of ``matrices`` that several blocks compute with, in a run that ``fits`` blocks."""
    groups: dict[tuple[int, ...], int] = defaultdict(int)
    for matrix in matrices:
        if matrix.blocks:
            groups[matrix.blocks] += 1
    parts = [
        f"blocks {', '.join(map(str, blocks))} share {counted(count, 'matrix', 'matrices')}"
        for blocks, count in groups.items()
    ]
    if not parts:
        return []
    note = (
        f"{'; '.join(parts)}: each is pruned once, in the first of its blocks, on its inputs in all of them, of which "
        "those of later blocks are the dense model's"
    )
    return [note, NOT_FITTED] if fits else [note]
