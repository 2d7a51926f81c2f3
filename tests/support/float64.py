"""Whole models in float64, as references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from support.models import decoder_blocks, reference


class Float64:
    """The dense model in float64, block by block, with what its blocks receive from transformers itself."""

    def __init__(self, source: Path, tokens: Tensor) -> None:
        self.model: Any = reference(source).double()
        self.blocks: list[Any] = list(decoder_blocks(self.model))
        self.tokens = tokens

    @torch.no_grad()
    def run(self, gone: list[int], at: tuple[int, str] | None = None) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """(logits, inputs of each block that stays and the last outputs, inputs of the matrix of block ``at``)."""
        states, seen, hooks = list[Tensor](), list[Tensor](), []
        kept = [block for index, block in enumerate(self.blocks) if index not in gone]
        hooks += [block.register_forward_pre_hook(lambda _, args: states.append(args[0])) for block in kept]
        hooks.append(kept[-1].register_forward_hook(lambda _, __, out: states.append(out)))
        if at is not None:
            matrix = self.blocks[at[0]].get_submodule(at[1])
            hooks.append(matrix.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1))))
        stack = self.model.model.layers
        self.model.model.layers = nn.ModuleList(kept)
        logits = self.model(self.tokens, use_cache=False).logits
        self.model.model.layers = stack
        for hook in hooks:
            hook.remove()
        return logits, states, seen[0] if seen else None
