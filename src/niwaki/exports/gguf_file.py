"""One file in the format GGUF, which llama.cpp and programs built on it (Ollama, LM Studio) run."""

import contextlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from niwaki.arguments import checked
from niwaki.checkpoints.reading import Checkpoint
from niwaki.errors import OutputError, UnsupportedModelError, UsageError
from niwaki.exports.gguf_architectures import (
    ARCHITECTURES,
    ExportedTensor,
    add_sizes,
    check_configuration,
    context_length,
    find_tensors,
    rope_factors,
)
from niwaki.exports.gguf_tokenizer import Tokenizer
from niwaki.files import check_space, given_path, new_file
from niwaki.models.extra import find_extra
from niwaki.models.locate import locate_model
from niwaki.models.streamed import StreamedModel
from niwaki.models.structure import read_config, refusals
from niwaki.records.wording import several

Kind = Literal["F16", "Q8_0", "Q4_0"]

_GROUP = 32  # weights that have a scale in Q8_0 and Q4_0
#: By what the largest weight of a group is divided, which gives the scale.
_STEPS = {"Q8_0": 127, "Q4_0": 8}
_LARGEST = 65504.0  # in float16
#: How far all of a tensor may be from itself in float16, relative to its norm: that is 0.0005 at most where numbers
#: are not too small for it.
_FAR = 0.01
#: In names of models llama.cpp takes these as a reason to treat special tokens otherwise.
_NAMES = ("phi-3", "phi3", "modern-bert")


@checked
def export_gguf(model: str | Path, out: str | Path, kind: Kind = "Q8_0") -> list[str]:
    """Writes the directory ``model``, dense, pruned, healed or smaller, to the file ``out``, which llama.cpp runs.

    Matrices are in ``kind``: F16, or Q8_0 (8.5 bits a weight) or Q4_0 (4.5 bits) in groups of 32 with a scale, rounded
    by the package ``gguf``; with Q4_0 embeddings and head are in Q8_0, and what has rows that are no multiples of 32
    is in F16. All else is float32. Zeros stay zeros, and take as much space as other weights. A tensor is in memory at
    a time. Returned is what there is to say of the file, a sentence each, such as where llama.cpp differs.

    Raises:
        UnsupportedModelError: llama.cpp computes something else than transformers, as far as niwaki knows, or a
            weight is beyond what the format holds.
        UsageError: ``out`` exists, is inside the model's directory, or is being written by another process.
        NiwakiError: see :mod:`niwaki.errors`. Nothing is left then.
    """
    try:
        import gguf
    except ImportError as error:
        raise OutputError("files for llama.cpp need gguf: pip install '.[gguf]' in niwaki's checkout") from error
    path = locate_model(str(model))
    file = _check_place(out, [path, given_path(model)])
    checkpoint = Checkpoint(path)
    model_type = str(checkpoint.config.get("model_type"))
    if model_type not in ARCHITECTURES or checkpoint.config.get("quantization_config") is not None:
        raise UnsupportedModelError(
            f"{path} ({model_type}) cannot be exported to GGUF; niwaki knows {', '.join(ARCHITECTURES)}, in 16 bits"
        )
    with refusals(path / "config.json"):
        config = read_config(path)
    architecture = ARCHITECTURES[model_type]
    check_configuration(config, architecture, path)
    factors = rope_factors(config, architecture, path)
    tensors = find_tensors(checkpoint, config, architecture)
    notes = [context_length(config)[1], *_choose_kinds(tensors, kind)]
    if extra := find_extra(StreamedModel(checkpoint, "cpu", "float32")):
        notes.append(f"left out, as not in transformers' model either: {several(list(map(str, extra)))}")
    tokenizer = Tokenizer(path, config.vocab_size, config.eos_token_id)
    check_space(file.parent, checkpoint.size)
    name = gguf.MODEL_ARCH_NAMES[getattr(gguf.MODEL_ARCH, architecture.name)]
    with (
        new_file(file, lambda there: there.read(4) == b"GGUF") as temporary,
        contextlib.closing(gguf.GGUFWriter(temporary, name)) as writer,
        np.errstate(all="ignore"),  # values are looked at before
    ):
        if not any(name in path.resolve().name.lower() for name in _NAMES):
            writer.add_name(path.resolve().name)
        add_sizes(writer, config, architecture, path)
        tokenizer.write(writer)
        writer.add_file_type(getattr(gguf.LlamaFileType, f"MOSTLY_{kind}"))
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _write_tensors(gguf, writer, checkpoint, tensors, factors)
    return [note for note in (*notes, *tokenizer.notes) if note]


def _check_place(out: str | Path, models: list[Path]) -> Path:
    """``out`` as an absolute path; UsageError where it is taken, cannot be a file, or is in one of ``models``."""
    file = given_path(out, 12).absolute()
    if file.exists() or file.is_symlink():
        raise UsageError(f"{out} exists; choose another name or remove it")
    if not file.parent.is_dir():
        raise UsageError(f"there is no directory {file.parent}")
    if any(file.parent.resolve().is_relative_to(each.resolve()) for each in models):
        raise UsageError(f"{out} is inside the model's own directory; choose another place")
    return file


def _choose_kinds(tensors: list[ExportedTensor], kind: Kind) -> list[str]:
    """Gives matrices the form they are stored in; what there is to say of it."""
    odd = []
    for tensor in tensors:
        if len(tensor.shape) != 2 or "ffn_gate_inp" in tensor.name:  # norms, biases, routers
            continue
        is_end = tensor.name in ("token_embd.weight", "output.weight")
        tensor.kind = "Q8_0" if kind == "Q4_0" and is_end else kind
        if kind != "F16" and tensor.shape[1] % _GROUP:
            tensor.kind = "F16"
            odd.append(tensor)
    if not odd:
        return []
    return [
        f"{len(odd)} of {len(tensors)} tensors are in F16, such as {odd[0].keys[0]!r}: {kind} needs rows of a multiple "
        f"of {_GROUP}, and not of {odd[0].shape[1]}"
    ]


def _write_tensors(
    gguf: Any, writer: Any, checkpoint: Checkpoint, tensors: list[ExportedTensor], factors: np.ndarray[Any, Any] | None
) -> None:
    """Writes the header, and then the tensors one after the other."""
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for tensor in tensors:
        stored = getattr(gguf.GGMLQuantizationType, tensor.kind)
        shape = tensor.whole_shape
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


def _read(checkpoint: Checkpoint, tensor: ExportedTensor) -> np.ndarray[Any, Any]:
    """float32, in the order that llama.cpp has; UnsupportedModelError for values that its form cannot hold."""
    parts = []
    for key in tensor.keys:
        part = checkpoint.read(key).float()
        _check_values(key, part.numpy(), tensor.kind)
        parts.append(part)
    value = torch.stack(parts) if len(tensor.whole_shape) > len(tensor.shape) else parts[0]
    if tensor.heads:
        value = value.unflatten(0, (tensor.heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return value.contiguous().numpy()


def _check_values(key: str, value: np.ndarray[Any, Any], kind: str) -> None:
    """UnsupportedModelError where weights, or the scales of groups, are too large or too small for float16.

    A weight that is too large for that is so in all forms: llama.cpp has keys, values and what comes into matrices in
    float16 or less, so that what it makes of an input of 1 would be infinite.
    """
    if not np.isfinite(value).all():
        raise UnsupportedModelError(f"{key!r} has values beyond float32, which llama.cpp computes in")
    if kind == "F32":
        return
    largest = float(np.abs(value).max(initial=0.0))
    if largest > _LARGEST:
        raise UnsupportedModelError(
            f"{key!r} has a weight of {largest:.6g}, and llama.cpp computes in float16, up to 65,504; scale what comes "
            "before or after it"
        )
    numbers, what = value, "weights"
    if kind != "F16":
        numbers, what = np.abs(value.reshape(-1, _GROUP)).max(axis=1) / _STEPS[kind], "scales of groups"
    half, wide = numbers.astype(np.float16), numbers.astype(np.float64)
    if np.linalg.norm(half - wide) > _FAR * np.linalg.norm(wide):
        lost = int(((half == 0) & (numbers != 0)).sum())
        raise UnsupportedModelError(
            f"{key!r} has no weight above {largest:.6g}, too small for {kind}: {lost:,} of {numbers.size:,} {what} "
            "become 0, and others are far off; scale what comes before or after it"
        )
