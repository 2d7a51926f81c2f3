"""GGUF files as models: transformers reads one, and a model directory of it stays in Hugging Face's cache.

What comes of a file depends on its name, its bytes and the versions of the libraries alone, so that runs can resume.
"""

import contextlib
import copy
import functools
import io
import json
import re
import tempfile
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from niwaki.cache import cached_directory
from niwaki.checkpoints.gguf_header import (
    ANOTHER,
    ORIGINAL,
    TOKENIZER,
    CutOffError,
    GgufTensor,
    Header,
    read_header,
    write_without_tokens,
)
from niwaki.checkpoints.reading import ORIGIN
from niwaki.errors import CheckpointError, UnsupportedModelError, one_line, raised_as, shown
from niwaki.files import check_space, digest, input_errors, output_errors, replace_file
from niwaki.layer.linalg import is_finite
from niwaki.models.gguf_keys import check_keys, follow_keys, stretch
from niwaki.models.gguf_source_tokenizer import check_parts, read_tokenizer
from niwaki.models.structure import check_sizes, refusals
from niwaki.records.record import versions

#: What a model is written in, by the type that most weights of its file have; of all other types bfloat16.
_DTYPES = {"F32": torch.float32, "F16": torch.float16}
#: The tensors of stretched positions begin with it.
_ROPE = "rope_"
#: Part of the name of what is made: other versions of this module may make something else of a file.
_MAKER = 4
#: Bytes of a file's name in that of its directory.
_NAME = 100


def as_directory(file: Path, tokenizer: bool = True) -> Path:
    """The model directory of a GGUF file, made when it is first asked for; the model is in memory meanwhile.

    Without ``tokenizer`` it may have none, whose making takes longer than that of a small model's weights.
    CheckpointError for a file that is damaged or that transformers refuses, and where the package gguf is missing;
    UnsupportedModelError where something in it would be left out; OutputError where the cache cannot be written.
    Nothing beside the file is looked at, and no code is taken from anywhere.
    """
    try:
        import gguf
    except ImportError as error:
        hint = "pip install gguf"
        raise CheckpointError(f"{file} is a GGUF file, and reading it needs gguf: {hint}") from error
    with input_errors(file):
        status = file.stat()
        sha256 = _digest(file.absolute(), status.st_size, status.st_mtime_ns)
    version = metadata.version("gguf")
    made_by = [file.name, sha256, version, versions(), _MAKER]
    stem = file.stem.encode()[:_NAME].decode(errors="ignore")  # names are limited in bytes
    what = f"{file} is converted in Hugging Face's cache, which cannot be written"
    with raised_as(CheckpointError, what, (OSError, ValueError), reason=one_line):
        place = cached_directory("gguf", made_by, f"{stem}-")
    made = place / "model"
    if (made / ORIGIN).is_file() or (made.is_dir() and not tokenizer):  # which is the last file
        return made
    with raised_as(CheckpointError, f"{file} cannot be read as GGUF", reason=_damage), input_errors(file):
        header = read_header(file, {kind.value: size for kind, size in gguf.GGML_QUANT_SIZES.items()})
    with output_errors(place), tempfile.TemporaryDirectory(dir=place) as temporary:
        directory = Path(temporary) / "model"
        directory.mkdir()
        _convert(gguf, file, header, directory, not made.is_dir(), tokenizer)
        if tokenizer:
            replace_file(directory / ORIGIN, json.dumps({"file": file.name, "sha256": sha256}) + "\n")
        try:
            directory.rename(made)
        except OSError:
            if not made.is_dir():
                raise
            for path in sorted(directory.iterdir(), key=lambda path: path.name == ORIGIN):
                path.replace(made / path.name)
    return made


@functools.lru_cache(maxsize=16)
def _digest(file: Path, size: int, changed: int) -> str:
    """SHA-256 of a file, read once as long as its ``size`` and the time when it was ``changed`` are the same."""
    return digest(file)


def _damage(error: Exception) -> str:
    """What is wrong with a file by the ``error`` that its header is read with, and what to do."""
    return f"{one_line(error)}; {'is the download complete?' if isinstance(error, CutOffError) else ANOTHER}"


def _convert(gguf: Any, file: Path, header: Header, directory: Path, weights: bool, tokenizer: bool) -> None:
    """Writes the model of ``file`` to ``directory``: its configuration and ``weights``, its ``tokenizer``, or both."""
    fields = header.fields
    _check(file, header)
    check_keys(file, fields)
    check_parts(file, fields)
    sizes = Counter[str]()
    for tensor in header.tensors:
        if not tensor.name.startswith(_ROPE):
            sizes[gguf.GGMLQuantizationType(tensor.kind).name] += tensor.count
    dtype = _DTYPES.get(sizes.most_common(1)[0][0] if sizes else "", torch.bfloat16)
    check_space(directory, weights * (sizes.total() * dtype.itemsize + file.stat().st_size))
    # transformers looks at what lies beside a file, and would take code from there.
    alone, short = (directory.parent / name / "model.gguf" for name in ("alone", "short"))
    with refusals(file), contextlib.redirect_stderr(io.StringIO()):  # where a reader draws bars of its own
        if tokenizer:
            alone.parent.mkdir()
            alone.symlink_to(file.absolute())
            read_tokenizer(file, alone, fields).save_pretrained(directory)
        if weights:
            short.parent.mkdir()
            write_without_tokens(file, header, short)
            config = _configuration(file, short, header)
            _read(config, file, short, dtype, sizes.total()).save_pretrained(directory)


def _configuration(file: Path, short: Path, header: Header) -> PreTrainedConfig:
    """What ``file`` says, which is ``short`` without its tokens, as a configuration."""
    fields = header.fields
    said: dict[str, Any] = PreTrainedConfig.get_config_dict(short.parent, gguf_file=short.name)[0]
    said["vocab_size"] = fields.get(f"{fields['general.architecture']}.vocab_size", len(fields[f"{TOKENIZER}tokens"]))
    if said["model_type"] == "mistral":  # by general.name alone, and of this type the reader knows no tensors
        said = {**said, "model_type": "llama"}
        said.pop("sliding_window", None)
    config: PreTrainedConfig = AutoConfig.for_model(**said)
    config._name_or_path = ""
    check_sizes(config.to_dict(), file)
    factors = {t.name: _factors(file, t) for t in header.tensors if t.name.startswith(_ROPE)}
    stretch(config, file, fields, factors)
    follow_keys(config, file, fields)
    return config


def _check(file: Path, header: Header) -> None:
    """Refuses what is no model, or one that would take for ever to make."""
    architecture, kind = header.fields.get("general.architecture"), header.fields.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(
            f"{file} is not a model: its general.type is {shown(kind)}; give the file of the model that it belongs to"
        )
    if not isinstance(architecture, str):
        was = "no field" if architecture is None else f"{shown(architecture)} as its"
        raise CheckpointError(f"{file} has {was} general.architecture, which says what model it is; {ANOTHER}")
    if (parts := header.fields.get("split.count", 1)) > 1:
        raise UnsupportedModelError(
            f"{file} is one of {parts} files of a model; join them first (llama-gguf-split --merge)"
        )
    blocks = {found[1] for tensor in header.tensors if (found := re.match(r"blk\.(\d+)\.", tensor.name))}
    said = header.fields.get(f"{architecture}.block_count")
    if said is not None and said != len(blocks):
        raise CheckpointError(
            f"{file} has tensors of {len(blocks):,} blocks, and says that it has {said!r} "
            f"({architecture}.block_count); {ANOTHER}"
        )


def _factors(file: Path, tensor: GgufTensor) -> torch.Tensor:
    """The numbers of a tensor in float32."""
    if tensor.size != 4 * tensor.count:
        raise CheckpointError(f"{file}: {tensor.name!r} is not in float32, as llama.cpp has it; {ANOTHER}")
    return torch.from_numpy(np.fromfile(file, np.float32, tensor.count, offset=tensor.offset))


def _read(config: PreTrainedConfig, file: Path, short: Path, dtype: torch.dtype, size: int) -> PreTrainedModel:
    """The model of ``file``, which has ``size`` weights, by ``short``; without marks of where it is from."""
    options: dict[str, Any] = {"gguf_file": short.name, "config": copy.deepcopy(config), "dtype": dtype}
    if hasattr(transformers, "GgufConfig"):  # without which some versions keep weights as they are
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    # A tensor that is missing is named below; here, what memory is taken for is looked at first.
    if (count := sum(value.numel() for value in model.parameters())) > 2 * size + config.vocab_size:
        raise CheckpointError(f"{file} has {size:,} weights, of the {count:,} that its sizes ask for; {ANOTHER}")
    auto: Any = AutoModelForCausalLM  # whose annotations do not know that there are two answers
    read, said = auto.from_pretrained(short.parent, output_loading_info=True, trust_remote_code=False, **options)
    if said["missing_keys"]:
        raise CheckpointError(
            f"{file} lacks the tensor that transformers calls {min(said['missing_keys'])!r}, which its architecture "
            f"asks for; {ANOTHER}"
        )
    if (count := sum(value.numel() for value in read.parameters())) != size:
        raise UnsupportedModelError(
            f"{file} has {size:,} weights, but transformers' reader makes a model of {count:,}; {ORIGINAL}"
        )
    for name, value in read.state_dict().items():
        if value.is_floating_point() and not is_finite(value):
            raise CheckpointError(
                f"{file}: the tensor that transformers calls {name!r} has NaN or infinite values in {dtype}; {ANOTHER}"
            )
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    return model
