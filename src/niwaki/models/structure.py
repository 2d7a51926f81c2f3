"""The structure of a model without memory for its weights, and where its decoder blocks are."""

from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from niwaki.errors import CheckpointError, UnsupportedModelError, one_line
from niwaki.models.checkpoint.reading import Checkpoint


def check_supported(checkpoint: Checkpoint) -> None:
    """Raises UnsupportedModelError for weights that are quantised."""
    if "quantization_config" in checkpoint.config:
        raise UnsupportedModelError(
            f"{checkpoint.path} was exported for other programs; give the directory that it was made from"
            if "quantization" in checkpoint.config.get("pruning_config", {})
            else f"{checkpoint.path} is quantised; prune the original and quantise the result"
        )


def structure(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of ``config.json`` without memory for its parameters; buffers, which are computed, are real.

    UnsupportedModelError where it is not a decoder only, CheckpointError where transformers refuses the configuration.
    """
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        if config.is_encoder_decoder:
            raise UnsupportedModelError(
                f"{directory} is an encoder with a decoder ({config.model_type}); niwaki prunes models that "
                "are a decoder only"
            )
        with init_empty_weights(include_buffers=False):
            # One expert after the other: the other ways of running them sort tokens into one large product.
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager")
    except UnsupportedModelError:
        raise
    except Exception as error:  # transformers checks some values and fails on others in any way
        reason = one_line(error).split(" Model type should be one of ")[0]  # and a list of them all
        raise CheckpointError(f"{directory / 'config.json'} is refused by transformers: {reason}") from error
    assert isinstance(model, PreTrainedModel)
    model.eval().requires_grad_(False)
    return model


def find_blocks(model: PreTrainedModel, kind: str) -> tuple[str, nn.ModuleList]:
    """(path, decoder blocks): the first list in the decoder that is as long as the model is deep."""
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    decoder = set(model.get_decoder().modules())
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth and module in decoder:
            return path, module
    raise UnsupportedModelError(f"no list of {depth} decoder blocks can be found in a model of type {kind!r}")
