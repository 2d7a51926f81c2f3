"""The structure of a model, as transformers builds it from ``config.json``, without its weights."""

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from niwaki.checkpoints.tensors import read_json
from niwaki.errors import CheckpointError, UnsupportedModelError, one_line, raised_as
from niwaki.models.families import is_in_tower

#: Decoder blocks, and experts of one.
_MOST_PARTS = 10_000
#: What transformers itself has for attention and experts, everywhere.
_OWN_CODE = (None, "eager", "sdpa", "grouped_mm", "batched_mm")


def structure(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of ``config.json`` without memory for its parameters; buffers, which are computed, are real.

    UnsupportedModelError where it is not a decoder only, CheckpointError where transformers refuses the configuration.
    """
    file = directory / "config.json"
    with refusals(file):
        check_sizes(read_json(file), file)
        config = read_config(directory)
        if config.is_encoder_decoder:
            raise UnsupportedModelError(
                f"{directory} is an encoder with a decoder ({config.model_type}); niwaki prunes models that "
                "are a decoder only"
            )
        for each in (config, config.get_text_config()):  # some files ask for more, or for tuples
            each.return_dict, each.output_hidden_states, each.output_attentions = True, False, False
            if hasattr(each, "output_router_logits"):  # of blocks, which are not there when the head runs alone
                each.output_router_logits = False
        with init_empty_weights(include_buffers=False), no_init_weights(), _UntouchedZeros():
            # One expert after the other: the other ways of running them sort tokens into one large product.
            model = auto_class(config).from_config(
                config, dtype=dtype, experts_implementation="eager", trust_remote_code=False
            )
    assert isinstance(model, PreTrainedModel)
    try:
        model.get_input_embeddings()
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"{directory} is several models in one ({config.model_type}), of which transformers does not say which one "
            "reads text"
        ) from error
    model.eval().requires_grad_(False)
    return model


def read_config(directory: Path) -> PreTrainedConfig:
    """``config.json`` as transformers has it, but for names of code: a file does not choose what runs.

    Attention or experts may name packages or code on the hub there, which transformers would take; its own ways of
    running them stay.
    """
    config: PreTrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    parts, seen = [config], set[int]()
    while parts:
        part = parts.pop()
        if id(part) not in seen:
            seen.add(id(part))
            parts += [value for value in vars(part).values() if isinstance(value, PreTrainedConfig)]
            for name in ("_attn_implementation_internal", "_experts_implementation_internal"):
                if getattr(part, name, None) not in _OWN_CODE:
                    setattr(part, name, None)
    return config


def auto_class(config: PreTrainedConfig) -> Any:
    """What transformers makes the model of ``config`` with: one of text alone, or one of images or sound as well.

    An encoder may come without a head, as those that make embeddings of texts do.
    """
    base = MODEL_MAPPING_NAMES.get(config.model_type)
    if getattr(config, "is_decoder", True) is False and config.architectures == [base]:
        return AutoModel
    with_more = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(config.model_type)
    takes_text_alone = type(config) in AutoModelForCausalLM._model_mapping and with_more not in (
        config.architectures or ()
    )
    return AutoModelForCausalLM if takes_text_alone else AutoModelForMultimodalLM


@dataclass(frozen=True)
class Parts:
    """The parts of a model that are run apart."""

    model: PreTrainedModel
    path: str  # of the decoder blocks
    blocks: nn.ModuleList
    decoder: nn.Module  # all of the language model but its head
    decoder_path: str  # with a dot at the end

    @property
    def head(self) -> nn.Module | None:
        """What makes predictions: an encoder may have none."""
        head: nn.Module | None = self.model.get_output_embeddings()
        return head

    @property
    def speaker(self) -> PreTrainedModel:
        """The decoder with the head: some models have other parts around both, which do not run without images."""
        models = [module for module in self.model.modules() if isinstance(module, PreTrainedModel)]
        both = {self.head, self.blocks[0]}
        return [self.model, *(model for model in models if both.issubset(model.modules()))][-1]


def find_parts(model: PreTrainedModel, kind: str) -> Parts:
    """The parts of a model; UnsupportedModelError where there is no list of decoder blocks in it.

    Blocks are the first list in the decoder that is as long as the model is deep.
    """
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    # Some families call their head the decoder, and LLaMA 4 says that it is part of that.
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    decoder = model.base_model if decoder is head else decoder
    within = set(decoder.modules())
    for path, module in model.named_modules():
        is_deep = isinstance(module, nn.ModuleList) and 0 < len(module) == depth
        if is_deep and module in within and not is_in_tower(path):
            if head is not None and head in within:
                decoder = model.get_submodule(path.rpartition(".")[0])
            where = next(f"{name}." for name, each in model.named_modules() if each is decoder)
            return Parts(model, path, module, decoder, where)
    which = "list of decoder blocks" if depth is None else f"list of {depth} decoder blocks"
    raise UnsupportedModelError(f"no {which} can be found in a model of type {kind!r}")


class _UntouchedZeros(TorchFunctionMode):
    """Takes zeros as the system hands them out: Llama 4's experts are made of them, all to be dropped at once."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.zeros and not kwargs:
            like = torch.empty(*args, device="meta")
            return torch.from_numpy(np.zeros(like.nbytes, np.uint8)).view(like.dtype).view(like.shape)
        return function(*args, **(kwargs or {}))


def check_sizes(values: dict[str, Any], file: Path) -> None:
    """CheckpointError where building the model would not end: for each layer and expert there are objects."""
    for name, value in values.items():
        if isinstance(value, dict):
            check_sizes(value, file)
        elif isinstance(value, int | float) and value > _MOST_PARTS and re.search("layer|expert", name):
            raise CheckpointError(f"{file} asks for {name} {value:,}; no model has more than {_MOST_PARTS:,}")


def refusals(file: Path) -> contextlib.AbstractContextManager[None]:
    """CheckpointError for what transformers refuses: it checks some values of ``file``, and fails on others somehow."""

    def reason(error: Exception) -> str:
        return one_line(error).split(" Model type should be one of ")[0]  # and a list of them all

    return raised_as(CheckpointError, f"{file} is refused by transformers", reason=reason)
