"""A model with fewer blocks, heads or neurons: its configuration, its tensors, and checks that it is what was meant."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import NiwakiError, OutputError, UnsupportedModelError, first_line
from niwaki.models.hidden_states import HiddenStates
from niwaki.models.outside import DRAFT_COUNTS, ExtraTensors, find_extra
from niwaki.models.streamed import StreamedModel
from niwaki.models.structure import find_parts, structure
from niwaki.shrinking.experts import COUNTS
from niwaki.shrinking.units import Removal

#: Entries of configurations with a value for each block.
_FOR_EACH = ("layer_types", "mlp_layer_types", "no_rope_layers")
#: Entries that list blocks.
_LISTS = ("mlp_only_layers", "moe_layers", "attn_layer_indices", "full_attn_idxs")
#: Entries that say how many blocks, from the first, are of one kind.
_FIRST = ("max_window_layers", "first_k_dense_replace")
#: Rules for all these entries, which no longer hold when blocks are removed.
_RULES = ("sliding_window_pattern", "_sliding_window_pattern", "no_rope_layer_interval", "interleave_moe_layer_step")
#: How many blocks an encoder and a decoder have.
_DEPTHS = (
    ("encoder_layers", "decoder_layers"),
    ("num_layers", "num_decoder_layers"),
    ("encoder_num_hidden_layers", "decoder_num_hidden_layers"),
)
#: Attributes of modules that say where a block is, and how many heads and neurons it has.
_SIZES = {
    "layer_idx", "layer_number", "num_heads", "num_attention_heads", "num_key_value_heads", "num_key_value_groups",
    "intermediate_size", "intermediate_dim", "ffn_dim", "in_features", "out_features", "nf", "nx", *COUNTS,
}  # fmt: skip
#: How much hidden states may differ, relative to their norm, by the dtype of the blocks.
_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}


def configuration(
    model: StreamedModel, kept: Sequence[int], removals: Sequence[Removal], left: Sequence[ExtraTensors] = ()
) -> dict[str, Any]:
    """config.json for the blocks ``kept`` only, after ``removals`` and without the tensors ``left`` out.

    UnsupportedModelError where it is unlike others.
    """
    values = dict(model.checkpoint.config)
    text = values
    if isinstance(values.get("text_config"), dict):
        text = values["text_config"] = dict(values["text_config"])
    elif model.config is not model.model.config:
        raise UnsupportedModelError(f"{model.checkpoint.path} has the configuration of its blocks in an unknown place")
    changes = {name: value for removal in removals for name, value in removal.config.items()}
    drafts = any(each.is_draft for each in left)
    if drafts or len(kept) < len(model.blocks):  # lists may have values for draft layers
        changes |= _of_blocks(model, kept)
    if drafts:  # also where it is transformers that says that there are some
        changes |= {name: 0 for name in DRAFT_COUNTS if getattr(model.config, name, None)}
    if len(kept) < len(model.blocks):
        for name in _RULES:
            text.pop(name, None)
        if isinstance(layers := text.get("per_layer_config"), dict):  # of some blocks only, by their numbers
            text["per_layer_config"] = {str(i): layers[str(old)] for i, old in enumerate(kept) if str(old) in layers}
    for name, value in changes.items():
        actual = model.config.attribute_map.get(name, name)
        aliases = [alias for alias, meant in model.config.attribute_map.items() if meant == actual]
        present = {key for key in (name, actual, *aliases) if key in text} or {actual}
        text.update(dict.fromkeys(present, value))
    return _without_drafts(values) if drafts else values


def _without_drafts(values: dict[str, Any]) -> dict[str, Any]:
    """The configuration ``values`` with no draft layers, wherever it says how many."""
    inner = {name: _without_drafts(value) for name, value in values.items() if isinstance(value, dict)}
    return {**values, **inner, **{name: 0 for name in DRAFT_COUNTS if values.get(name)}}


def _of_blocks(model: StreamedModel, kept: Sequence[int]) -> dict[str, Any]:
    """What changes in the configuration where only the blocks ``kept`` stay."""
    changes: dict[str, Any] = _depths(model, kept)
    for name in (*_FOR_EACH, *_LISTS, *_FIRST):
        value = getattr(model.config, name, None)
        own = getattr(type(model.config), model.config.attribute_map.get(name, name), None)
        if isinstance(own, property) and own.fset is None:  # it follows from other entries
            continue
        if name in _FOR_EACH and isinstance(value, list | tuple) and len(value) == len(model.blocks):
            changes[name] = [value[index] for index in kept]
        elif name in _LISTS and isinstance(value, list | tuple):
            changes[name] = [new for new, index in enumerate(kept) if index in value]
        elif name in _FIRST and isinstance(value, int):
            changes[name] = sum(index < value for index in kept)
    return changes


def _depths(model: StreamedModel, kept: Sequence[int]) -> dict[str, int]:
    """How many blocks there are, by the configuration's names for that."""
    if model.pairs is None:
        return {"num_hidden_layers": len(kept)}
    first = model.starts[1]
    counts = sum(index < first for index in kept), sum(index >= first for index in kept)
    names = next((names for names in _DEPTHS if all(hasattr(model.config, name) for name in names)), None)
    if names is None:
        raise UnsupportedModelError(
            f"{model.checkpoint.path} has the numbers of its encoder's and decoder's blocks in an unknown place"
        )
    return dict(zip(names, counts, strict=True))


def smaller_blocks(
    model: StreamedModel, directory: Path, kept: Sequence[int], removals: Sequence[Removal]
) -> list[nn.Module]:
    """The blocks of config.json in ``directory``, without weights.

    UnsupportedModelError unless they are the blocks ``kept`` after ``removals``.
    """
    kind = model.checkpoint.config.get("model_type")
    cannot = f"{model.checkpoint.path} ({kind}) cannot become smaller like this:"
    try:
        smaller = find_parts(structure(directory, model.dtype, model.has_head), str(kind)).blocks
    except NiwakiError as error:
        reason = str(error).replace(f"{directory / 'config.json'}", "the smaller model's config.json")
        reason = reason.replace(str(directory), "the smaller model")
        raise UnsupportedModelError(f"{cannot} {reason}") from error
    if model.has_head and model.pairs is None:
        broken = _continued(directory, model.dtype)
        if broken and broken != _continued(model.checkpoint.path, model.dtype):
            raise UnsupportedModelError(f"{cannot} it could not continue a text ({broken})")
    for new, old in enumerate(kept):
        was, became = _traits(model.blocks[old]), _traits(smaller[new])
        for removal in removals:
            for parameter in removal.parameters[old]:
                shape = list(was[parameter.name])
                shape[parameter.dimension] = parameter.times * (removal.units - removal.count) * parameter.size
                was[parameter.name] = tuple(shape)
        for name in was | became:
            if was.get(name) != became.get(name):
                raise UnsupportedModelError(
                    f"{cannot} in block {old} as block {new} of {len(kept)}, {name} would be {became.get(name)} "
                    f"and should be {was.get(name)}"
                )
    return smaller


def _continued(directory: Path, dtype: torch.dtype) -> str:
    """What goes wrong where the model of config.json continues a text with a cache; "" where nothing does.

    Without weights and numbers, so that parts of some models, such as the choice of experts, fail for that alone.
    """
    whole: Any = structure(directory, dtype)
    model, tokens = whole.to("meta").eval(), torch.zeros(1, 2, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            cache = model(input_ids=tokens, use_cache=True).past_key_values
            model(input_ids=tokens[:, :1], use_cache=True, past_key_values=cache)
    except Exception as error:  # of any kind, from any of transformers' models
        return first_line(error)
    return ""


def _traits(block: nn.Module) -> dict[str, Any]:
    """What identifies the kind of a block: classes of modules, their simple attributes, shapes of parameters."""
    traits: dict[str, Any] = {name: tuple(value.shape) for name, value in block.state_dict().items()}
    for path, module in block.named_modules():
        traits[path or "the block"] = type(module).__name__
        for name, value in vars(module).items():
            simple = isinstance(value, bool | int | float | str)
            if simple and not name.startswith("_") and name not in _SIZES:
                traits[f"{path}.{name}".lstrip(".")] = value
    return traits


@dataclass(frozen=True)
class Tensors:
    """The tensors of a model, by what becomes of them in the smaller one."""

    left: list[ExtraTensors]  # those that are left out
    outside: list[str]  # keys of those outside blocks
    blocks: list[dict[str, str]]  # of each block keys, with what they become, see :func:`tensors_of_blocks`

    @classmethod
    def of(cls, model: StreamedModel) -> "Tensors":
        """UnsupportedModelError where nothing can be removed."""
        if any(matrix.blocks for matrix in model.matrices()):
            raise UnsupportedModelError(
                f"{model.checkpoint.path} has blocks that share weights, so nothing can be removed; prune it"
            )
        left = [each for each in find_extra(model) if each.follows]
        return cls(left, *tensors_of_blocks(model, left))

    def size(self, model: StreamedModel, removals: Sequence[Removal], count: int) -> int:
        """Bytes of the tensors outside blocks and, after ``removals``, of the ``count`` largest blocks."""

        def size(key: str) -> int:
            return model.checkpoint.like(key).nbytes

        blocks = self._blocks(model, removals, size)
        return sum(map(size, self.outside)) + sum(sorted(blocks)[len(blocks) - count :])

    def parameters(self, model: StreamedModel, removals: Sequence[Removal], dropped: Collection[int] = ()) -> int:
        """Numbers in the tensors that stay after ``removals`` and without the blocks ``dropped``."""
        blocks = self._blocks(model, removals, lambda key: numbers(model.checkpoint, [key]))
        return numbers(model.checkpoint, self.outside) + sum(
            each for index, each in enumerate(blocks) if index not in dropped
        )

    def _blocks(self, model: StreamedModel, removals: Sequence[Removal], size: Callable[[str], int]) -> list[int]:
        """What the tensors of each block have after ``removals``, where each has ``size`` before."""
        blocks = []
        for index, names in enumerate(self.blocks):
            left = sum(map(size, names))
            for removal in removals:
                keys = {
                    key
                    for parameter in removal.parameters[index]
                    for key in model.layout.keys(model.places[index] + parameter.name)
                }
                left -= removal.count * sum(map(size, keys)) // removal.units
            blocks.append(left)
        return blocks


def numbers(checkpoint: Checkpoint, keys: Iterable[str]) -> int:
    """How many there are in the tensors ``keys`` of the files."""
    return sum(math.prod(checkpoint.entries[key].shape) for key in keys)


def tensors_of_blocks(
    model: StreamedModel, left: Sequence[ExtraTensors] = ()
) -> tuple[list[str], list[dict[str, str]]]:
    """(keys outside blocks, for each block its keys with what they become elsewhere, ``{}`` for the block's number).

    By names, so that buffers in old files are assigned too, and without the tensors ``left`` out;
    UnsupportedModelError where a name lacks the number.
    """
    out = {key for each in left for key in each.keys}
    starts: dict[str, int] = {}  # by what is before the number of a block in keys, which block is the first one there
    for index, (place, block) in enumerate(zip(model.places, model.blocks, strict=True)):
        *_, last, number, _ = place.split(".")
        for name in block.state_dict():
            for key in model.layout.keys(place + name):
                prefix, separator, _ = f".{key}".partition(f".{last}.{number}.")
                if not separator:
                    raise UnsupportedModelError(f"{key!r} does not say that it belongs to block {index}")
                starts[f"{prefix}.{last}.".removeprefix(".")] = index - int(number)
    numbered = re.compile(rf"({'|'.join(map(re.escape, sorted(starts)))})(\d+)(\..*)")
    outside: list[str] = []
    blocks: list[dict[str, str]] = [{} for _ in model.blocks]
    for key in (key for key in model.checkpoint.entries if key not in out):
        match = numbered.fullmatch(key)
        index = starts[match[1]] + int(match[2]) if match else len(blocks)
        if match is None or index >= len(blocks):
            outside.append(key)
        else:
            before, after = (part.replace("{", "{{").replace("}", "}}") for part in (match[1], match[3]))
            blocks[index][key] = f"{before}{{}}{after}"
    return outside, blocks


def check_outputs(smaller: StreamedModel, states: HiddenStates) -> None:
    """Raises OutputError unless ``smaller`` does what the large model does with zeros for what was removed.

    ``states`` are the large model's after the last block that was kept; their first batch is compared.
    """
    probe = smaller.embed((states.rows or states.tokens)[0])
    for block in smaller.stream():
        block.advance(probe)
    expected, actual = states.hidden[0].double(), probe.hidden[0].double()
    difference = ((actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)).mean().item()
    if not difference <= _ROUNDING[smaller.dtype]:
        raise OutputError(
            f"the written model's hidden states differ from those of the original without what was removed (by "
            f"{difference:.2g} of their norm); please report this model"
        )
