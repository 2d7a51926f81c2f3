"""The structure of a model, as transformers builds it from ``config.json``, without its weights."""

import contextlib
import re
from collections.abc import Iterable
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
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from niwaki.checkpoints.reading import pipeline
from niwaki.checkpoints.tensors import read_json
from niwaki.errors import CheckpointError, UnsupportedModelError, one_line, raised_as

# What differs between model families, as data; all else is found by looking at the model.

#: Parts of the names of matrices that choose between experts, tokens to attend to, or streams. They are small,
#: everything after them depends on them, no gradient says how, and they are never pruned. Adapters of matrices that
#: several blocks share are as small: they choose what such a matrix is in each of them.
_CHOICES = {
    **dict.fromkeys(("gate", "router", "shared_expert_gate"), "router"),
    "indexer": "indexer",
    "altup": "weights of streams",
    **dict.fromkeys((*(f"linear_{each}_adapter_list" for each in "qkv"), "gate_up_proj_adapter_list"), "adapter"),
}

#: Parts of the names of attention to what another model has made of images, sound or another text.
_CROSS_ATTENTION = ("encoder_attn", "crossattention", "cross_attn")

#: Beginnings of the names of modules that make states of images and sound, beside or within a language model.
_TOWERS = ("vision", "visual", "image", "img", "audio", "speech", "vqmodel")

#: Beginnings of the names of layers that draft several tokens at once, which files have beside the model's blocks; and
#: parts of the names of matrices and norms that such a layer has, and no block.
_DRAFTS = ("mtp", "nextn", "multi_token", "eagle", "medusa", "draft")
_OF_DRAFTS = frozenset({"eh_proj", "enorm", "hnorm", "shared_head"})

#: Where the matrices of experts are (experts, in, out) in the model, and transformers does not say so itself.
EXPERTS_TRANSPOSED = frozenset({"llama4", "llama4_text", "recurrent_gemma"})

#: Parameters of three dimensions that are not the matrices of experts: those of the heads of Zamba's Mamba.
OF_HEADS = frozenset({"A_log", "x_proj_weight", "dt_proj_weight"})

_FUSED_ATTENTION = "q, k and v are one matrix, with one threshold"
_EXPERTS = "each expert's matrices from the tokens that are routed to it"

_SHARED = "a transformer that several blocks share is pruned once, on its inputs in all of them"

#: The families that the tests cover, by the ``model_type`` of config.json, with remarks for the documentation.
FAMILIES = {
    "llama": "LLaMA 1 to 3",
    "llama4": _EXPERTS + "; gate and up are one matrix",
    "llama4_text": _EXPERTS + "; gate and up are one matrix",
    "mistral": "",
    "mixtral": _EXPERTS,
    "qwen2": "",
    "qwen2_moe": _EXPERTS + "; shared experts as any MLP",
    "qwen3": "",
    "qwen3_moe": _EXPERTS,
    "gemma2": "",
    "gemma3": "the language model; the vision tower stays",
    "gemma3_text": "",
    "gemma3n_text": "embeddings for each block, and keys and values of earlier ones; what mixes the streams stays",
    "gemma4_text": "the small ones too, with embeddings for each block and keys and values of earlier ones",
    "phi3": "q, k, v are one matrix, gate and up another, each with one threshold",
    "opt": "",
    "gpt2": _FUSED_ATTENTION,
    "gpt_neox": "Pythia; " + _FUSED_ATTENTION,
    "bloom": _FUSED_ATTENTION,
    "falcon": _FUSED_ATTENTION,
    "cohere2": "",
    "olmo2": "",
    "olmoe": _EXPERTS,
    "gpt_oss": _EXPERTS + "; gate and up are one matrix; files in MXFP4 too",
    "deepseek_v2": _EXPERTS + "; shared experts as any MLP",
    "deepseek_v3": _EXPERTS + "; shared experts as any MLP; files in FP8 too",
    "zamba": _SHARED,
    "zamba2": _SHARED + "; adapters stay",
}

#: Likewise those of an encoder with a decoder, which are calibrated on pairs.
ENCODER_DECODERS = {
    "t5": "also Flan-T5 and ByT5; mT5 and UMT5 are built alike",
    "switch_transformers": _EXPERTS,
    "bart": "also mBART, Pegasus, BlenderBot and others that are built alike",
    "marian": "OPUS-MT",
    "whisper": "sources are files of sound; convolutions stay",
}


def choice(name: str) -> str | None:
    """What a module or parameter belongs to that chooses, such as "router", if to any."""
    return next((_CHOICES[part] for part in name.split(".") if part in _CHOICES), None)


def is_cross_attention(name: str) -> bool:
    """Whether a module or parameter belongs to attention that a text alone does not reach."""
    return any(part in _CROSS_ATTENTION for part in name.split("."))


def is_reached(block: nn.Module) -> bool:
    """Whether a text alone runs a decoder block: it has other attention than that, or none."""
    parts = {name: part for name, part in block.named_children() if "att" in name}
    attention = [name for name, part in parts.items() if any(value.ndim > 1 for value in part.parameters())]
    return not attention or not all(map(is_cross_attention, attention))


def is_draft(name: str) -> bool:
    """Whether a tensor of the files belongs to a layer that drafts several tokens."""
    return any(part.startswith(_DRAFTS) or part in _OF_DRAFTS for part in name.split("."))


def is_in_tower(name: str) -> bool:
    """Whether a module or parameter belongs to what makes states of images or sound."""
    return any(part.startswith(_TOWERS) for part in name.split("."))


#: Decoder blocks, and experts of one: the largest number that a family of transformers has is 16,384 (Doge).
_MOST_PARTS = 1 << 15
#: Names of entries of configurations that count them; sizes, such as ``vocab_size_per_layer_input``, have others.
_COUNTS = re.compile(r"(.*_)?(n|num)_(.*_)?(layer|expert).*|.*(layers|experts|expert_num)")
#: What gives scores of texts or of tokens, by the end of its class's name in config.json.
_CLASSIFIERS = {
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
}
#: What predicts words: decoders, and what writes of sound or another text.
_DECODERS = AutoModelForCausalLM, AutoModelForMultimodalLM
_WRITERS = AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq
#: The names of heads that predict words, as files have them.
_HEADS = re.compile(r"(.*\.)?(lm_head|embed_out)\..*")
#: What transformers itself has for attention and experts, everywhere.
_OWN_CODE = (None, "eager", "sdpa", "grouped_mm", "batched_mm")


def structure(directory: Path, dtype: torch.dtype, has_words: bool = True) -> PreTrainedModel:
    """The model of ``config.json`` without memory for its parameters; buffers, which are computed, are real.

    With a head for words if it ``has_words``, see :func:`predicts_words`. UnsupportedModelError where it is several
    models, CheckpointError where transformers refuses the configuration.
    """
    with refusals(directory / "config.json"):
        config = read_config(directory)
        config.name_or_path = ""  # nothing hangs on where it is
        if config.is_encoder_decoder:
            _check_writes(config, directory)
        for each in (config, config.get_text_config()):  # some files ask for more, or for tuples
            each.return_dict, each.output_hidden_states, each.output_attentions = True, False, False
            if hasattr(each, "rescale_every"):  # RWKV's way to stay within float16, which changes weights as it runs
                each.rescale_every = 0
            if hasattr(each, "output_router_logits"):  # of blocks, which are not there when the head runs alone
                each.output_router_logits = False
        with init_empty_weights(include_buffers=False), no_init_weights(), _UntouchedZeros():
            # One expert after the other: the other ways of running them sort tokens into one large product.
            model = auto_class(config, has_words).from_config(
                config, dtype=dtype, experts_implementation="eager", trust_remote_code=False
            )
    assert isinstance(model, PreTrainedModel)
    try:
        embeddings = model.get_input_embeddings()
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"{directory} is several models in one ({config.model_type}), and transformers does not say which one "
            "reads text"
        ) from error
    if not has_words and not isinstance(embeddings, nn.Embedding):
        raise UnsupportedModelError(f"{directory} ({config.model_type}) reads no tokens of a text")
    _compute_positions(model)
    model.eval().requires_grad_(False)
    return model


def _check_writes(config: PreTrainedConfig, directory: Path) -> None:
    """UnsupportedModelError where an encoder with a decoder writes no text."""
    named = next(iter(config.architectures or ()), "")
    if named.endswith((*_CLASSIFIERS, "EncoderModel")):
        raise UnsupportedModelError(
            f"{directory} is a {named}; of encoders with a decoder, only those are supported that have both and write"
        )
    if type(config) not in auto_class(config)._model_mapping:
        raise UnsupportedModelError(
            f"{directory} is an encoder with a decoder ({config.model_type}), and transformers has no model of "
            "this kind that writes text"
        )


def _compute_positions(model: PreTrainedModel) -> None:
    """Makes the parameters real that files are without because they are computed, such as Marian's positions."""
    for name in model._keys_to_ignore_on_save or ():
        path = name.rpartition(".")[0]
        if name in dict(model.named_parameters()):
            model._init_weights(model.get_submodule(path).to_empty(device="cpu", recurse=False))


def read_config(directory: Path) -> PreTrainedConfig:
    """``config.json`` as transformers has it, but for names of code: a file does not choose what runs.

    Attention or experts may name packages or code on the hub there, which transformers would take; its own ways of
    running them stay. CheckpointError where it asks for so many layers that reading it would not end.
    """
    check_sizes(read_json(directory / "config.json"), directory / "config.json")
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


def config_of_text(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the language model in a model with this one; of an encoder with a decoder, the decoder's."""
    if not config.is_encoder_decoder:
        return config.get_text_config()
    nested = (getattr(config, name, None) for name in ("decoder", "decoder_config", "text_config"))
    return next((each for each in nested if isinstance(each, PreTrainedConfig)), config)


def predicts_words(directory: Path, keys: Iterable[str]) -> bool:
    """Whether the model in ``directory`` with tensors ``keys`` has a head that predicts words.

    Others make vectors or scores of texts: encoders, unless config.json names the class that writes with them;
    classifiers; and decoders without the tensor of a head that config.json names so, or that sentence-transformers
    pools.
    """
    with refusals(directory / "config.json"):
        config = read_config(directory)
        if config.is_encoder_decoder:
            return True
        kind, named = config.model_type, next(iter(config.architectures or ()), "")
        if _classifier(config):
            return False
        if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
            return named == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
        if not any(type(config) in each._model_mapping for each in (*_DECODERS, *_WRITERS)):
            return False
        pools = any(layer.endswith("Pooling") for layer, _ in pipeline(directory))
        return not (pools or named == MODEL_MAPPING_NAMES.get(kind)) or any(map(_HEADS.fullmatch, keys))


def is_bidirectional(config: PreTrainedConfig) -> bool:
    """Whether each token sees those after it, in models of a kind that does not say whether it is a decoder."""
    says_so = getattr(config, "use_bidirectional_attention", False) is True
    return says_so or config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def auto_class(config: PreTrainedConfig, has_words: bool = True) -> Any:
    """What transformers makes the model of ``config`` with: one of text alone, or one of images or sound as well.

    One that ``has_words`` predicts them, maybe as an encoder with a decoder; others are a classifier, or without a
    head.
    """
    if not has_words:
        return _classifier(config) or AutoModel
    if config.is_encoder_decoder or not any(type(config) in each._model_mapping for each in _DECODERS):
        return next((each for each in _WRITERS if type(config) in each._model_mapping), AutoModelForMultimodalLM)
    with_more = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(config.model_type)
    takes_text_alone = type(config) in AutoModelForCausalLM._model_mapping and with_more not in (
        config.architectures or ()
    )
    return AutoModelForCausalLM if takes_text_alone else AutoModelForMultimodalLM


def _classifier(config: PreTrainedConfig) -> Any:
    """What makes the model where config.json names one that gives scores; None where it names another."""
    named = next(iter(config.architectures or ()), "")
    auto: Any = next((each for end, each in _CLASSIFIERS.items() if named.endswith(end)), None)
    if auto and type(config) not in auto._model_mapping:
        raise UnsupportedModelError(f"transformers has no {named}, which config.json names, for {config.model_type!r}")
    return auto


@dataclass(frozen=True)
class Stack:
    """A list of blocks that run one after the other, and where it is in the model."""

    path: str
    blocks: nn.ModuleList


@dataclass(frozen=True)
class Parts:
    """The parts of a model that are run apart."""

    model: PreTrainedModel
    stacks: tuple[Stack, ...]  # of blocks: the decoder's, after those of an encoder if there is one
    decoder: nn.Module  # all of the language model but its head
    decoder_path: str  # with a dot at the end

    @property
    def blocks(self) -> list[nn.Module]:
        """All of them, in the order in which they run."""
        return [block for stack in self.stacks for block in stack.blocks]

    @property
    def encoded(self) -> int:
        """How many of the blocks are those of an encoder before the decoder."""
        return sum(len(stack.blocks) for stack in self.stacks[:-1])

    @property
    def places(self) -> list[str]:
        """Where each block is in the model, with a dot at the end."""
        return [f"{stack.path}.{index}." for stack in self.stacks for index in range(len(stack.blocks))]

    @property
    def inside(self) -> tuple[str, ...]:
        """What the names of all parameters of blocks begin with."""
        return tuple(f"{stack.path}." for stack in self.stacks)

    @property
    def head(self) -> nn.Module | None:
        """What makes predictions: an encoder may have none."""
        head: nn.Module | None = self.model.get_output_embeddings()
        return head

    @property
    def has_scores(self) -> bool:
        """Whether it is a classifier, of texts or of tokens."""
        return type(self.model).__name__.endswith(tuple(_CLASSIFIERS))

    @property
    def speaker(self) -> PreTrainedModel:
        """The decoder with the head: some models have other parts around both, which do not run without images."""
        if self.encoded:
            return self.model
        models = _models_within(self.model)
        both = {self.head, self.stacks[-1].blocks[0]}
        return [self.model, *(model for model in models if both.issubset(model.modules()))][-1]


def find_parts(model: PreTrainedModel, kind: str) -> Parts:
    """The parts of a model; UnsupportedModelError where there is no list of decoder blocks in it.

    Blocks are the first list in the decoder that is as long as the model is deep; of an encoder with a decoder they
    are the largest list in each of the two.
    """
    if model.config.is_encoder_decoder:
        return _parts_of_both(model, kind)
    config = model.config.get_text_config()
    depth, other = getattr(config, "num_hidden_layers", None), getattr(config, "num_layers", None)
    # Some families call their head the decoder, and LLaMA 4 says that it is part of that.
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if head is None and any(each.get_output_embeddings() is not None for each in _models_within(model)):
        raise UnsupportedModelError(f"a model of type {kind!r} has a head within that transformers does not tell of")
    decoder = model.base_model if decoder is head else decoder
    within = set(decoder.modules())
    lists = [(path, each) for path, each in model.named_modules() if isinstance(each, nn.ModuleList) and len(each)]
    inner = {each for _, list_ in lists for block in list_ for each in block.modules()}
    lists = [(path, each) for path, each in lists if each in within - inner and not is_in_tower(path)]
    # LongCat-Flash says how often there is attention, twice in each block.
    for path, module in sorted(lists, key=lambda each: len(each[1]) != depth):
        if len(module) in (depth, other):
            if head is not None and head in within:
                decoder = model.get_submodule(path.rpartition(".")[0])
            return Parts(model, (Stack(path, module),), decoder, _path_of(decoder, model))
    which = "list of decoder blocks" if depth is None else f"list of {depth} decoder blocks"
    raise UnsupportedModelError(f"no {which} can be found in a model of type {kind!r}")


def _models_within(model: nn.Module) -> list[PreTrainedModel]:
    return [each for each in model.modules() if isinstance(each, PreTrainedModel)]


def _parts_of_both(model: PreTrainedModel, kind: str) -> Parts:
    stacks = []
    for which, part in (("encoder", model.get_encoder()), ("decoder", model.get_decoder())):
        lists = {path: each for path, each in part.named_modules() if isinstance(each, nn.ModuleList) and len(each)}
        if part is model or not lists:
            raise UnsupportedModelError(f"no list of blocks can be found in the {which} of a model of type {kind!r}")
        sizes = {path: _linear_weights(each) for path, each in lists.items()}
        largest = max(sizes, key=sizes.__getitem__)  # the first of several, which is not within another one
        stacks.append(Stack(_path_of(part, model) + largest, lists[largest]))
    return Parts(model, tuple(stacks), model.base_model, _path_of(model.base_model, model))


def _linear_weights(module: nn.Module) -> int:
    """How many weights it has in linear layers, and not in convolutions."""
    return sum(each.weight.numel() for each in module.modules() if isinstance(each, nn.Linear))


def _path_of(part: nn.Module, model: nn.Module) -> str:
    """Where it is, with a dot at the end; "" of the model itself."""
    return next(f"{name}.".lstrip(".") for name, each in model.named_modules() if each is part)


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
        elif isinstance(value, int | float) and value > _MOST_PARTS and _COUNTS.fullmatch(name):
            raise CheckpointError(f"{file} asks for {name} {value:,}; no model has more than {_MOST_PARTS:,}")


def refusals(file: Path) -> contextlib.AbstractContextManager[None]:
    """CheckpointError for what transformers refuses: it checks some values of ``file``, and fails on others somehow."""

    def reason(error: Exception) -> str:
        return one_line(error).split(" Model type should be one of ")[0]  # and a list of them all

    return raised_as(CheckpointError, f"{file} is refused by transformers", reason=reason)
