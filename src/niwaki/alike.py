"""Whether a smaller model is what it was meant to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from niwaki.blocks import StreamedModel
from niwaki.errors import OutputError, UnsupportedModelError
from niwaki.states import States

#: Attributes of modules that say where a block is, and how many heads and neurons it has.
_SIZES = {
    *("layer_idx", "layer_number", "num_heads", "num_attention_heads", "num_key_value_heads"),
    *("num_key_value_groups", "intermediate_size", "ffn_dim", "in_features", "out_features", "nf", "nx"),
}
#: How far hidden states may be apart, relative to them, by what blocks run in.
_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}


def check_alike(model: StreamedModel, smaller: StreamedModel, kept: Sequence[int]) -> None:
    """Raises UnsupportedModelError unless the blocks of ``smaller`` are of the same kind as those ``kept``."""
    for new, old in enumerate(kept):
        was, became = _traits(model.blocks[old]), _traits(smaller.blocks[new])
        differing = [name for name in was | became if was.get(name) != became.get(name)]
        if differing:
            name = differing[0]
            raise UnsupportedModelError(
                f"block {old} as block {new} of {len(kept)} would be of another kind: {name} is "
                f"{became.get(name)} and was {was.get(name)}"
            )


def _traits(block: nn.Module) -> dict[str, Any]:
    """What tells the kind of a block: the classes of its modules, and their numbers and words."""
    found: dict[str, Any] = {}
    for path, module in block.named_modules():
        found[path or "the block"] = type(module).__name__
        for name, value in vars(module).items():
            if (
                not name.startswith("_")
                and name not in _SIZES
                and isinstance(value, bool | int | float | str)
            ):
                found[f"{path}.{name}".lstrip(".")] = value
    return found


def check_outputs(smaller: StreamedModel, states: States) -> None:
    """Raises OutputError unless ``smaller`` does what the large model does without what was dropped.

    ``states`` are those behind the last block that was kept of the large model; their first batch is compared.
    """
    probe = smaller.embed(states.tokens[0])
    for block in smaller.stream():
        block.advance(probe)
    wanted, found = states.hidden[0].double(), probe.hidden[0].double()
    apart = ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-30)).mean().item()
    if not apart <= _ROUNDING[smaller.dtype]:
        raise OutputError(
            f"what was written answers otherwise than the model without what was dropped (by {apart:.2g} of its "
            "hidden states); please report this model"
        )
