"""One file in the format GGUF, which llama.cpp and programs built on it (Ollama, LM Studio) run."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from niwaki.arguments import checked
from niwaki.errors import CheckpointError, OutputError, UnsupportedModelError, UsageError
from niwaki.files import check_space, given_path, output_errors, set_usual_mode
from niwaki.models.checkpoint.reading import Checkpoint, locate_model
from niwaki.models.checkpoint.tensors import read_json
from niwaki.models.structure import refusals

Kind = Literal["F16", "Q8_0", "Q4_0"]


@dataclass(frozen=True)
class _Family:
    """What llama.cpp calls the architecture of a ``model_type``."""

    name: str  # in gguf.MODEL_ARCH
    neighbours: bool = (
        False  # whether rotary positions turn neighbours there, where transformers turns halves of a head
    )


_FAMILIES = {
    "llama": _Family("LLAMA", neighbours=True),
    "mistral": _Family("LLAMA", neighbours=True),
    "qwen2": _Family("QWEN2"),
    "qwen3": _Family("QWEN3"),
    "qwen3_moe": _Family("QWEN3MOE"),
}

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: By the steps of a tokenizer that split a text into words, llama.cpp's name for them.
_SPLITTERS = {
    ("ByteLevel",): "gpt-2",
    ("Digits", "ByteLevel"): "smollm",
    (f"{_CONTRACTIONS}{_OTHERS}", "ByteLevel"): "qwen2",
    (f"{_CONTRACTIONS}{{1,3}}{_OTHERS}", "ByteLevel"): "llama-bpe",
}
#: Kinds of tokens.
_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5


@dataclass
class _Tensor:
    """A tensor of the file, made of one of the model, or of one for each expert."""

    name: str
    keys: list[str] = field(default_factory=list)
    kind: str = "F32"
    heads: int = 0  # whose rows change places; 0 where none do


@checked
def export_gguf(model: str | Path, out: str | Path, kind: Kind = "Q8_0") -> None:
    """Writes the directory ``model``, dense, pruned, healed or smaller, to the file ``out``, which llama.cpp runs.

    Matrices are in ``kind``: F16, or Q8_0 (8.5 bits a weight) or Q4_0 (4.5 bits) in groups of 32 with a scale, rounded
    by the package ``gguf``; with Q4_0 embeddings and head are in Q8_0. All else is float32. Zeros stay zeros, and take
    as much space as other weights. A tensor is in memory at a time.

    Raises:
        UnsupportedModelError: the family, its tokenizer or its positions are unknown here.
        UsageError: ``out`` exists, or rows are not multiples of 32.
        NiwakiError: see :mod:`niwaki.errors`. Nothing is left then.
    """
    try:
        import gguf
    except ImportError as error:
        raise OutputError("files for llama.cpp need gguf: pip install '.[gguf]' in niwaki's checkout") from error
    path, file = locate_model(str(model)), given_path(out, 12).absolute()
    if file.exists():
        raise UsageError(f"{out} exists; choose another name or remove it")
    if not file.parent.is_dir():
        raise UsageError(f"there is no directory {file.parent}")
    checkpoint = Checkpoint(path)
    model_type = str(checkpoint.config.get("model_type"))
    if model_type not in _FAMILIES or checkpoint.config.get("quantization_config") is not None:
        raise UnsupportedModelError(
            f"{path} ({model_type}) cannot be exported to GGUF; niwaki knows {', '.join(sorted(_FAMILIES))}, in 16 bits"
        )
    with refusals(path / "config.json"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    family = _FAMILIES[model_type]
    architecture = getattr(gguf.MODEL_ARCH, family.name)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors = _tensors(checkpoint, config, names, family, kind)
    check_space(file.parent, checkpoint.size)
    temporary = file.with_name(f".{file.name}.partial")
    with output_errors(file.parent), _removed_on_failure(temporary):
        writer = gguf.GGUFWriter(temporary, gguf.MODEL_ARCH_NAMES[architecture])
        writer.add_name(path.name)
        _add_sizes(writer, config)
        _add_tokenizer(gguf, writer, path, config.vocab_size)
        writer.add_file_type(getattr(gguf.LlamaFileType, f"MOSTLY_{kind}"))
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        factors = _rope_factors(path, config, family)
        if factors is not None:
            writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
        for tensor in tensors:
            stored = getattr(gguf.GGMLQuantizationType, tensor.kind)
            shape = _shape(checkpoint, tensor)
            as_bytes = gguf.quant_shape_to_byte_shape(shape, stored) if tensor.kind.startswith("Q") else shape
            dtype = np.dtype({"F32": np.float32, "F16": np.float16}.get(tensor.kind, np.uint8))
            writer.add_tensor_info(tensor.name, as_bytes, dtype, int(np.prod(as_bytes)) * dtype.itemsize, stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for tensor in tensors:
            stored = getattr(gguf.GGMLQuantizationType, tensor.kind)
            writer.write_tensor_data(gguf.quants.quantize(_read(checkpoint, tensor), stored))
        writer.close()
        set_usual_mode(temporary, 0o666)
        temporary.rename(file)


@contextlib.contextmanager
def _removed_on_failure(file: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        file.unlink(missing_ok=True)
        raise


def _tensors(
    checkpoint: Checkpoint, config: PreTrainedConfig, names: Any, family: _Family, kind: Kind
) -> list[_Tensor]:
    """What the file has; UnsupportedModelError for a tensor that llama.cpp has no name for."""
    tensors: dict[str, _Tensor] = {}
    experts: dict[str, dict[int, str]] = defaultdict(dict)
    for key in checkpoint.entries:
        whole, dot, last = key.rpartition(".")
        before, middle, after = whole.partition(".mlp.experts.")
        number, _, matrix = after.partition(".")
        name = names.get_name(f"{before}{middle}{matrix}" if middle else whole)
        if name is None or (middle and not number.isdigit()):
            raise UnsupportedModelError(f"{checkpoint.path}: llama.cpp has no tensor for {key!r}")
        name = f"{name}{dot}{last}"
        if middle:
            experts[name][int(number)] = key
        else:
            tensors[name] = _Tensor(name, [key])
        if family.neighbours and whole.endswith((".q_proj", ".k_proj")):
            is_query = whole.endswith(".q_proj")
            tensors[name].heads = config.num_attention_heads if is_query else config.num_key_value_heads
    for name, keys in experts.items():
        tensors[name] = _Tensor(name, [keys[expert] for expert in sorted(keys)])
    for tensor in tensors.values():
        shape = checkpoint.entries[tensor.keys[0]].shape
        if len(shape) != 2 or "ffn_gate_inp" in tensor.name:  # norms, biases, routers
            continue
        if kind != "F16" and shape[1] % 32:
            raise UsageError(f"{tensor.keys[0]!r} has rows of {shape[1]}, no multiple of 32; export it as F16")
        is_end = tensor.name in ("token_embd.weight", "output.weight")
        tensor.kind = "Q8_0" if kind == "Q4_0" and is_end else kind
    return list(tensors.values())


def _shape(checkpoint: Checkpoint, tensor: _Tensor) -> tuple[int, ...]:
    shape = checkpoint.entries[tensor.keys[0]].shape
    return shape if ".ffn_" not in tensor.name or "_exps" not in tensor.name else (len(tensor.keys), *shape)


def _read(checkpoint: Checkpoint, tensor: _Tensor) -> np.ndarray[Any, Any]:
    """float32, in the order that llama.cpp has."""
    parts = [checkpoint.read(key).float() for key in tensor.keys]
    value = parts[0] if len(_shape(checkpoint, tensor)) == parts[0].ndim else torch.stack(parts)
    if tensor.heads:
        value = value.unflatten(0, (tensor.heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return value.contiguous().numpy()


def _add_sizes(writer: Any, config: PreTrainedConfig) -> None:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if experts := getattr(config, "num_experts", 0):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _rope_factors(path: Path, config: PreTrainedConfig, family: _Family) -> np.ndarray[Any, Any] | None:
    """(half a head,) by what each frequency of rotary positions is divided; None where by nothing."""
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        return None
    unknown = UnsupportedModelError(f"{path} has rotary positions of the kind {kind!r}, which niwaki cannot export")
    if kind not in ("linear", "llama3") or not family.neighbours:
        raise unknown
    scaled, attention = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    if attention != 1:
        raise unknown
    width = 2 * len(scaled)
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    factors: np.ndarray[Any, Any] = (plain / scaled.double()).float().numpy()
    return factors


def _add_tokenizer(gguf: Any, writer: Any, path: Path, size: int) -> None:
    """The tokenizer of a model whose vocabulary has ``size`` entries, of which some may have no token."""
    file = path / "tokenizer.json"
    content = read_json(file)
    splitter = _SPLITTERS.get(_steps(content.get("pre_tokenizer")))
    if (
        content.get("model", {}).get("type") != "BPE"
        or splitter is None
        or content.get("normalizer")
        not in (
            None,
            {"type": "NFC"},
        )
    ):
        raise UnsupportedModelError(f"{file} splits text in a way that niwaki cannot tell llama.cpp")
    tokens, kinds = [f"[PAD{number}]" for number in range(size)], [_UNUSED] * size
    added = {each["id"]: each for each in content.get("added_tokens", [])}
    for token, number in {**content["model"]["vocab"], **{each["content"]: i for i, each in added.items()}}.items():
        if not 0 <= number < size:
            raise CheckpointError(f"{file} has the token {number}, of {size} in the model")
        special = added.get(number)
        tokens[number] = token
        kinds[number] = _NORMAL if special is None else _CONTROL if special.get("special") else _USER
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    gguf.SpecialVocab(path, load_merges=True, n_vocab=size).add_to_gguf(writer, quiet=True)


def _steps(value: Any) -> tuple[str, ...]:
    """The steps of a ``pre_tokenizer``: their types, or of one that splits by an expression this."""
    steps = value.get("pretokenizers", [value]) if isinstance(value, dict) else []
    return tuple(step.get("pattern", {}).get("Regex") or step.get("type", "") for step in steps)
