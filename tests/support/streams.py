"""Streamed models in tests: what is in memory, and what is to be left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from niwaki.checkpoints.reading import Checkpoint
from niwaki.models.block import DecoderBlock
from niwaki.models.hidden_states import HiddenStates
from niwaki.models.layout import Matrix
from niwaki.models.streamed import StreamedModel
from support.models import decoder_blocks, random_model


def stream_of(directory: Path) -> StreamedModel:
    return StreamedModel(Checkpoint(directory), "cpu", "float32")


def walked(model: StreamedModel, tokens: Tensor) -> HiddenStates:
    """The states behind the last block."""
    states = model.embed(tokens)
    for block in model.stream():
        block.advance(states)
    return states


def losses_of(model: StreamedModel, tokens: Tensor) -> Tensor:
    """Of all tokens but the first, a block at a time."""
    return model.losses(walked(model, tokens))


@torch.no_grad()
def whole_losses(whole: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The same by transformers."""
    log_p: Tensor = whole(input_ids=tokens).logits.log_softmax(-1)
    return -log_p[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2)


def materialized(module: nn.Module) -> list[str]:
    """The parameters that are in memory."""
    named = module.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if not parameter.is_meta]


def memory(block: DecoderBlock) -> int:
    """Bytes of its weights."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in block.module.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


def assert_clean(model: StreamedModel) -> None:
    """No hooks, no replaced forward passes, no weights."""
    for module in model.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)
    assert materialized(model.model) == []


def save_starved(path: Path) -> Path:
    """A Mixtral whose last expert gets no token, and the one before few."""
    model = random_model("mixtral")
    model.config.num_experts_per_tok = 1
    for block in decoder_blocks(model):
        one, other = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
        gate: Any = block.get_submodule("mlp.gate").weight
        with torch.no_grad():
            gate.copy_(torch.stack([one, -one, 0.25 * other, 0 * one]))
    model.save_pretrained(path)
    return path


def halved(value: Tensor, seed: int = 0) -> Tensor:
    """``value`` with half of its weights."""
    kept = torch.rand(value.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    return value * kept


def prune(block: DecoderBlock, matrices: list[Matrix], whole: PreTrainedModel | None = None) -> None:
    """Halves ``matrices``, in a whole model too."""
    for matrix in matrices:
        W = halved(block.weight(matrix))
        block.put(matrix, block.stored(matrix, W))
        if whole is not None:
            parameter = decoder_blocks(whole)[block.index].get_parameter(matrix.parameter)
            matrix.within(parameter.data).copy_(W)


def error_by_places(found: Tensor, wanted: Tensor) -> float:
    """The squared error of states (.., width), relative to what is wanted in each place: the mean of all places."""
    wrong, power = (each.flatten(0, -2).square().sum(0) for each in (found - wanted, wanted))
    return float((wrong / power).mean())
