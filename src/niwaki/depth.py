"""Which decoder blocks a model can do without, and what a configuration says for each of its blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from niwaki.blocks import StreamedModel
from niwaki.errors import NumericalError, UnsupportedModelError, UsageError
from niwaki.progress import Progress
from niwaki.states import States

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


def influences(model: StreamedModel, states: States, progress: Progress) -> list[float]:
    """The influence of each block: 1 - the mean cosine of its input and output over the tokens.

    Cost: a forward pass; ``states`` are those behind the last block then.

    Reference: ShortGPT, arXiv 2403.03853, eq. 1. Differences: none known.

    Raises:
        NumericalError: a block's outputs are not finite.
    """
    found = []
    for block in model.stream():
        progress.stage(block.index, "score", len(states.hidden))
        total, tokens = 0.0, 0
        for i in range(len(states.hidden)):
            before = states.hidden[i]
            with torch.no_grad():
                after = block.run(before, states).to(before.dtype)
            cosines = nn.functional.cosine_similarity(before.float(), after.float(), dim=-1)
            total += float(cosines.sum(dtype=torch.float64))
            tokens += cosines.numel()
            states.hidden[i] = after
            progress.step()
        if not math.isfinite(total):
            raise NumericalError(
                f"block {block.index}: its outputs are NaN or infinite on the calibration text; try --dtype float32"
            )
        found.append(1 - total / tokens)
    return found


def kept_blocks(scores: Sequence[float], count: int) -> list[int]:
    """The blocks that stay when the ``count`` of lowest score go; of equal ones the first goes."""
    order = sorted(range(len(scores)), key=lambda index: scores[index])
    return sorted(order[count:])


def check_count(model: StreamedModel, count: int) -> None:
    """Raises UsageError where the model has no ``count`` blocks to spare."""
    if not 0 <= count < len(model.blocks):
        raise UsageError(
            f"--blocks {count} of {len(model.blocks)}: from 0 to {len(model.blocks) - 1} can be dropped"
        )


def configuration(model: StreamedModel, kept: Sequence[int], changes: dict[str, Any]) -> dict[str, Any]:
    """config.json with the blocks ``kept`` only, and with ``changes``.

    Raises:
        UnsupportedModelError: it is not known where it has such entries.
    """
    values = dict(model.checkpoint.config)
    text = values
    if isinstance(values.get("text_config"), dict):
        text = values["text_config"] = dict(values["text_config"])
    elif model.config is not model.model.config:
        raise UnsupportedModelError(
            f"{model.checkpoint.path} has the configuration of its blocks in an unknown place"
        )
    if len(kept) < len(model.blocks):
        changes = {**_of_blocks(model, kept), **changes}
        for name in _RULES:
            text.pop(name, None)
    for name, value in changes.items():
        actual = model.config.attribute_map.get(name, name)
        there = {key for key in (name, actual) if key in text} or {actual}
        text.update(dict.fromkeys(there, value))
    return values


def _of_blocks(model: StreamedModel, kept: Sequence[int]) -> dict[str, Any]:
    config, depth = model.config, len(model.blocks)
    changes: dict[str, Any] = {"num_hidden_layers": len(kept)}
    for name in _FOR_EACH:
        values = getattr(config, name, None)
        if isinstance(values, list | tuple) and len(values) == depth:
            changes[name] = [values[index] for index in kept]
    for name in _LISTS:
        values = getattr(config, name, None)
        if isinstance(values, list | tuple):
            changes[name] = [new for new, index in enumerate(kept) if index in values]
    for name in _FIRST:
        value = getattr(config, name, None)
        if isinstance(value, int):
            changes[name] = sum(index < value for index in kept)
    return changes
