"""A model with fewer blocks, heads or neurons: its configuration, its files, and whether it is what was meant."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from niwaki.errors import NiwakiError, OutputError, UnsupportedModelError
from niwaki.models.hidden_states import HiddenStates
from niwaki.models.streamed import StreamedModel
from niwaki.models.structure import structure
from niwaki.pruning.structured.units import Cut

#: Entries of configurations with a value for each block.
_FOR_EACH = ("layer_types", "mlp_layer_types", "no_rope_layers")
#: Those that list blocks.
_LISTS = ("mlp_only_layers", "moe_layers")
#: Those that say how many blocks, from the first, are of one kind.
_FIRST = ("max_window_layers", "first_k_dense_replace")
#: Rules for what is in ``_FOR_EACH`` and ``_LISTS`` then; they no longer hold.
_RULES = (
    *("sliding_window_pattern", "_sliding_window_pattern", "no_rope_layer_interval"),
    "interleave_moe_layer_step",
)
#: Attributes of modules that say where a block is, and how many heads and neurons it has.
_SIZES = {
    *("layer_idx", "layer_number", "num_heads", "num_attention_heads", "num_key_value_heads"),
    *("num_key_value_groups", "intermediate_size", "ffn_dim", "in_features", "out_features", "nf", "nx"),
}
#: How far hidden states may be apart, relative to them, by what blocks run in.
_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}


def configuration(model: StreamedModel, kept: Sequence[int], cuts: Sequence[Cut]) -> dict[str, Any]:
    """config.json with the blocks ``kept`` only, and with ``cuts``.

    Raises:
        UnsupportedModelError: it is not known where it has such entries.
    """
    values = dict(model.checkpoint.config)
    text = values
    if isinstance(values.get("text_config"), dict):
        text = values["text_config"] = dict(values["text_config"])
    elif model.config is not model.model.config:
        raise UnsupportedModelError(f"{model.checkpoint.path} has the configuration of its blocks in an unknown place")
    changes = {name: value for cut in cuts for name, value in cut.config.items()}
    if len(kept) < len(model.blocks):
        changes |= _of_blocks(model, kept)
        for name in _RULES:
            text.pop(name, None)
    for name, value in changes.items():
        actual = model.config.attribute_map.get(name, name)
        there = {key for key in (name, actual) if key in text} or {actual}
        text.update(dict.fromkeys(there, value))
    return values


def _of_blocks(model: StreamedModel, kept: Sequence[int]) -> dict[str, Any]:
    found = {name: getattr(model.config, name, None) for name in (*_FOR_EACH, *_LISTS, *_FIRST)}
    changes: dict[str, Any] = {"num_hidden_layers": len(kept)}
    for name, value in found.items():
        if name in _FOR_EACH and isinstance(value, list | tuple) and len(value) == len(model.blocks):
            changes[name] = [value[index] for index in kept]
        elif name in _LISTS and isinstance(value, list | tuple):
            changes[name] = [new for new, index in enumerate(kept) if index in value]
        elif name in _FIRST and isinstance(value, int):
            changes[name] = sum(index < value for index in kept)
    return changes


def check_structure(model: StreamedModel, directory: Path, kept: Sequence[int], cuts: Sequence[Cut]) -> None:
    """Builds the model of the config.json in ``directory``, without weights, and compares its blocks.

    Raises:
        UnsupportedModelError: they are not the blocks ``kept`` of ``model`` with ``cuts``.
    """
    kind = model.checkpoint.config.get("model_type")
    cannot = f"{model.checkpoint.path} ({kind}) cannot become smaller like this:"
    try:
        smaller = structure(directory, model.dtype).get_submodule(model.path)
    except NiwakiError as error:
        reason = str(error).replace(str(directory), "the smaller one")
        raise UnsupportedModelError(f"{cannot} {reason}") from error
    for new, old in enumerate(kept):
        was, became = _traits(model.blocks[old]), _traits(smaller.get_submodule(str(new)))
        for cut in cuts:
            for part in cut.sites[old].parts:
                shape = list(was[part.name])
                shape[part.dimension] = part.times * (cut.units - cut.count) * part.size
                was[part.name] = tuple(shape)
        for name in was | became:
            if was.get(name) != became.get(name):
                raise UnsupportedModelError(
                    f"{cannot} in block {old} as block {new} of {len(kept)}, {name} would be {became.get(name)} "
                    f"and should be {was.get(name)}"
                )


def _traits(block: nn.Module) -> dict[str, Any]:
    """What tells the kind of a block: classes of modules, their numbers and words, shapes of parameters."""
    found: dict[str, Any] = {name: tuple(value.shape) for name, value in block.named_parameters()}
    for path, module in block.named_modules():
        found[path or "the block"] = type(module).__name__
        for name, value in vars(module).items():
            simple = isinstance(value, bool | int | float | str)
            if simple and not name.startswith("_") and name not in _SIZES:
                found[f"{path}.{name}".lstrip(".")] = value
    return found


def tensors_of_blocks(model: StreamedModel) -> tuple[list[str], list[dict[str, str]]]:
    """(keys outside of blocks, for each block its keys), of all tensors of the checkpoint.

    A block's keys come with what they become in another place, with ``{}`` for the number. Tensors that are no
    parameters of the model, such as buffers in old files, are told by their names.

    Raises:
        UnsupportedModelError: a key of a block does not say of which.
    """
    last = model.path.rpartition(".")[2]
    prefixes: set[str] = set()  # what is before the number of a block in keys
    for index, block in enumerate(model.blocks):
        for name in block.state_dict():
            for key in model.layout.keys(f"{model.path}.{index}.{name}"):
                prefix, found, _ = f".{key}".partition(f".{last}.{index}.")
                if not found:
                    raise UnsupportedModelError(f"{key!r} does not say that it belongs to block {index}")
                prefixes.add(f"{prefix}.{last}.".removeprefix("."))
    numbered = re.compile(rf"({'|'.join(map(re.escape, sorted(prefixes)))})(\d+)(\..*)")
    outside: list[str] = []
    blocks: list[dict[str, str]] = [{} for _ in model.blocks]
    for key in model.checkpoint.entries:
        match = numbered.fullmatch(key)
        if match is None or int(match[2]) >= len(blocks):
            outside.append(key)
        else:
            blocks[int(match[2])][key] = f"{match[1]}{{}}{match[3]}"
    return outside, blocks


def check_outputs(smaller: StreamedModel, states: HiddenStates) -> None:
    """Raises OutputError unless ``smaller`` does what the large model does without what was removed.

    ``states`` are those behind the last block that was kept of the large model; their first batch is compared.
    """
    probe = smaller.embed(states.tokens[0])
    for block in smaller.stream():
        block.advance(probe)
    wanted, found = states.hidden[0].double(), probe.hidden[0].double()
    apart = ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-30)).mean().item()
    if not apart <= _ROUNDING[smaller.dtype]:
        raise OutputError(
            f"what was written answers otherwise than the model without what was removed (by {apart:.2g} of its "
            "hidden states); please report this model"
        )
