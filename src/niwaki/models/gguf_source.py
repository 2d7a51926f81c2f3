"""GGUF files as models: transformers reads one, and a model directory of it stays in Hugging Face's cache.

What comes of a file depends on its name, its bytes and the versions of the libraries alone, so that runs can resume.
"""

import contextlib
import copy
import functools
import hashlib
import io
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from huggingface_hub import cached_assets_path
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from niwaki.errors import CheckpointError, UnsupportedModelError, one_line
from niwaki.files import check_space, output_errors, write_json
from niwaki.layer.linalg import is_finite
from niwaki.models.checkpoint.reading import ORIGIN
from niwaki.models.journal import digest
from niwaki.models.structure import refusals
from niwaki.records.record import versions

#: What a model is written in, by the type that most weights of its file have; of all other types bfloat16.
_DTYPES = {"F32": torch.float32, "F16": torch.float16}
#: Sizes that the reader takes from files of some architectures only: their names there and in configurations.
_SIZES = {"attention.key_length": "head_dim", "expert_feed_forward_length": "moe_intermediate_size"}
#: Stretched positions of which files have nothing but the factors: those of LLaMA 3.1 and 3.2.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_STRETCHED = [{"rope_type": "llama3", "factor": factor, **_LLAMA3} for factor in (8.0, 32.0)]
#: The tensors of those factors begin with it.
_ROPE = "rope_"


def as_directory(file: Path) -> Path:
    """The model directory of a GGUF file, made when it is first asked for; the model is in memory meanwhile.

    CheckpointError for a file that is damaged or that transformers refuses, and where the package gguf is missing;
    UnsupportedModelError where something in it would be left out; OutputError where the cache cannot be written.
    """
    try:
        import gguf
    except ImportError as error:
        hint = "pip install '.[gguf]' in niwaki's checkout"
        raise CheckpointError(f"{file} is a GGUF file, and reading it needs gguf: {hint}") from error
    with output_errors(file), _damage(file):
        status = file.stat()
        sha256 = _digest(file.absolute(), status.st_size, status.st_mtime_ns)
    # Python 3.10 does not find the distribution of a package by its name, and transformers then asks the package.
    version = vars(gguf)["__version__"] = metadata.version("gguf")
    made_by = [file.name, sha256, version, versions()]
    key = hashlib.sha256(json.dumps(made_by).encode()).hexdigest()[:16]
    try:
        place: Path = cached_assets_path("niwaki", "gguf", f"{file.stem[:100]}-{key}")
    except (OSError, ValueError) as error:
        reason = one_line(error)
        raise CheckpointError(
            f"{file} is converted in Hugging Face's cache, which cannot be written: {reason}"
        ) from error
    made = place / "model"
    if not made.is_dir():
        with output_errors(place), tempfile.TemporaryDirectory(dir=place) as temporary:
            directory = Path(temporary) / "model"
            directory.mkdir()
            _convert(gguf, file, directory)
            write_json(directory / ORIGIN, json.dumps({"file": file.name, "sha256": sha256}) + "\n")
            with contextlib.suppress(OSError) if made.is_dir() else contextlib.nullcontext():  # another process has
                directory.rename(made)
    return made


@functools.lru_cache(maxsize=16)
def _digest(file: Path, size: int, changed: int) -> str:
    """SHA-256 of a file, read once as long as its ``size`` and the time when it was ``changed`` are the same."""
    return digest(file)


@contextlib.contextmanager
def _damage(file: Path) -> Iterator[None]:
    """CheckpointError for whatever reading a header of ``file`` fails with."""
    try:
        yield
    except Exception as error:
        reason = one_line(error)
        raise CheckpointError(f"{file} cannot be read as GGUF ({reason}); is the download complete?") from error


def _convert(gguf: Any, file: Path, directory: Path) -> None:
    """Writes the model of ``file`` with its tokenizer to ``directory``."""
    with _damage(file):
        reader = gguf.GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items() if ".ggml." not in name}
        architecture = str(fields["general.architecture"])
    if (parts := fields.get("split.count", 1)) > 1:
        raise UnsupportedModelError(
            f"{file} is one of {parts} files of a model; join them first (llama-gguf-split --merge)"
        )
    sizes = Counter[str]()
    for tensor in reader.tensors:
        if not tensor.name.startswith(_ROPE):
            sizes[tensor.tensor_type.name] += int(tensor.n_elements)
    dtype = _DTYPES.get(sizes.most_common(1)[0][0] if sizes else "", torch.bfloat16)
    check_space(directory, sizes.total() * dtype.itemsize)
    with refusals(file), contextlib.redirect_stderr(io.StringIO()):  # where a reader draws bars of its own
        config: PreTrainedConfig = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        for name, own in _SIZES.items():
            if hasattr(config, own) and (size := fields.get(f"{architecture}.{name}")):
                setattr(config, own, size)
        factors = {t.name: torch.from_numpy(t.data.copy()) for t in reader.tensors if t.name.startswith(_ROPE)}
        _stretch(config, file, fields.get(f"{architecture}.rope.scaling.type"), factors)
        model = _read(config, file, dtype, sizes.total())
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def _read(config: PreTrainedConfig, file: Path, dtype: torch.dtype, size: int) -> PreTrainedModel:
    """The model of ``file``, which has ``size`` weights, without marks of where it is from."""
    options: dict[str, Any] = {"gguf_file": file.name, "config": copy.deepcopy(config), "dtype": dtype}
    if hasattr(transformers, "GgufConfig"):  # without which some versions keep weights as they are
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    auto: Any = AutoModelForCausalLM  # whose annotations do not know that there are two answers
    read, said = auto.from_pretrained(file.parent, output_loading_info=True, **options)
    if said["missing_keys"]:
        raise CheckpointError(f"{file} lacks {min(said['missing_keys'])!r}, which its architecture asks for")
    if (count := sum(value.numel() for value in read.parameters())) != size:
        raise UnsupportedModelError(
            f"{file} has {size:,} weights, of which transformers' reader makes a model of {count:,}; prune the model "
            "that the file was made from"
        )
    for name, value in read.state_dict().items():
        if value.is_floating_point() and not is_finite(value):
            raise CheckpointError(f"{file}: {name!r} has NaN or infinite values in {dtype}")
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    return model


def _stretch(config: PreTrainedConfig, file: Path, kind: str | None, tensors: Mapping[str, torch.Tensor]) -> None:
    """Gives ``config`` the stretched positions of ``file``, which the reader does not take from all files.

    ``kind`` is what the file calls them. UnsupportedModelError where they are unknown here.
    """
    rope = config.rope_parameters if isinstance(getattr(config, "rope_parameters", None), dict) else {}
    if (kind in (None, "none") and not tensors) or rope.get("rope_type", "default") != "default":
        return
    factors = tensors.get("rope_freqs.weight", torch.zeros(1)).float()
    for candidate in [{"rope_type": "linear", "factor": float(factors[0])}, *_STRETCHED] if factors.any() else []:
        stretched = copy.deepcopy(config)
        stretched.rope_parameters = {**rope, **candidate}
        scaled, _ = ROPE_INIT_FUNCTIONS[str(candidate["rope_type"])](stretched, torch.device("cpu"))
        width = 2 * len(scaled)
        plain = rope["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
        if torch.allclose((plain / scaled.double()).float(), factors, rtol=1e-4):
            config.rope_parameters = stretched.rope_parameters
            return
    raise UnsupportedModelError(
        f"{file} has stretched rotary positions ({kind or ', '.join(tensors)}) that transformers' reader leaves out; "
        "prune the model that the file was made from"
    )
