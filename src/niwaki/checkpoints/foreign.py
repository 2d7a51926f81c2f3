"""What people have and take for a model that can be pruned: what it is, and what to do with it."""

import contextlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from niwaki.records.wording import several

PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
#: Pickles beside weights: what a training run left.
_OF_TRAINING = re.compile(r"training_args.*|optimizer.*|scheduler.*|scaler.*|rng_state.*")
_LFS = b"version https://git-lfs"
_FOR_TRANSFORMERS = "use its version for transformers, with config.json and model.safetensors"
_ORIGINAL = "prune the original model, and quantize the result"


#: By globs of a file or folder, separated by spaces: what a directory is that has such and no weights of a model of its
#: own, and what to do. ``{base}`` is the model that an adapter is of, ``{inside}`` are the models in the directory.
_DIRECTORIES = {
    "adapter_config.json": (
        "an adapter{base} and not a model",
        "merge it into its base model (in peft: merge_and_unload, then save_pretrained), and give that",
    ),
    "model_index.json": ("a pipeline of Diffusers", "niwaki prunes language models{inside}"),
    "*_Transformer": ("a pipeline of sentence-transformers", "its transformer is what can be pruned{inside}"),
    "zero_to_fp32.py": (
        "a checkpoint of DeepSpeed",
        "convert it with this script and --safe_serialization, and add config.json and the tokenizer",
    ),
    "*.distcp */*.distcp": (
        "a checkpoint of a sharded training run",
        "merge it into a model (accelerate merge-weights)",
    ),
    "*.nemo": ("a model of NeMo", _FOR_TRANSFORMERS),
    "consolidated.*": ("a model in its maker's own format", _FOR_TRANSFORMERS),
    "model*.fp16.safetensors model*.bf16.safetensors model.safetensors.index.*.json": (
        "without weights, except in a variant",
        "save the model without variant=...",
    ),
    "model-*-of-*.safetensors": ("without the index of its shards", "is the download complete?"),
    "*.h5": ("a model of TensorFlow", "load it in transformers 4 with from_tf=True, and save_pretrained"),
    "*.msgpack": ("a model of Flax", "load it in transformers 4 with from_flax=True, and save_pretrained"),
    "*.ot": ("a model of rust-bert", _FOR_TRANSFORMERS),
    "*.onnx */*.onnx": ("a model in ONNX", _FOR_TRANSFORMERS),
    "openvino_model.*": ("a model of OpenVINO", _FOR_TRANSFORMERS),
    "*.ml[mp]*": ("a model of Core ML", _FOR_TRANSFORMERS),
    "weights*.npz": ("a model of MLX", _FOR_TRANSFORMERS),
}
#: How the names of tensors end that quantized weights have in GPTQ and AWQ, bitsandbytes, compressed-tensors, EXL2,
#: HQQ, torch and quanto.
_QUANTIZED = (
    *(".qweight", ".qzeros", ".absmax", ".SCB", ".weight_packed", ".q_weight", ".W_q"),
    *("._packed_params", ".weight._data"),
)
#: By parts of tensors' names, what has wrapped the model when it was saved, and what to save instead.
_WRAPPED = {
    "_orig_mod": ("torch.compile", "save the model inside: model._orig_mod.save_pretrained(...)"),
    "_fsdp_wrapped_module": ("FSDP", "save with its full state dict (accelerate: get_state_dict)"),
    "_checkpoint_wrapped_module": ("activation checkpointing", "save the model without that"),
    "_forward_module": ("Lightning or DeepSpeed", "save the model inside"),
    **dict.fromkeys(("lora_A", "lora_B", "base_layer"), ("peft, not merged", "merge_and_unload, then save_pretrained")),
    # Its weights are dense, and have zeros where it multiplies with these.
    "_weight_mask": ("Model-Optimizer, with its masks", "modelopt.torch.sparsity.export(model), then save_pretrained"),
    # These are how all names begin.
    "base_model.model.": ("peft", "merge_and_unload, then save_pretrained"),
    "module.": ("DataParallel", "save the model inside: model.module.save_pretrained(...)"),
}


def recognized(directory: Path, has_weights: bool) -> str:
    """What ``directory``, which is no whole model, is instead, and what to do; "" where that is not known."""
    for shows, (what, hint) in {} if has_weights else _DIRECTORIES.items():
        if found := [name for glob in shows.split() for name in sorted(path.name for path in directory.glob(glob))]:
            what, hint = what.format(base=_base(directory)), hint.format(inside=_inside(directory, ": give "))
            return f"{directory} is {what} ({found[0]}); {hint}"
    if not has_weights and (pickled := _pickled(directory)):
        return (
            f"{directory} holds pickled weights ({pickled}), which can run code when they are read; "
            "convert them to safetensors (load in transformers where you trust them, then save_pretrained)"
        )
    if inside := _inside(directory, ""):
        return f"{directory} is not a model but a directory of models; give {inside}"
    return ""


def of_file(file: Path) -> str:
    """What to do instead of giving ``file``, which is no model."""
    if (file.parent / "config.json").exists():
        return f"{file} is a file of a model; give its directory, {file.parent}"
    return f"{file} is a file; a model is a directory, a GGUF file or a hub id"


def is_pointer(file: Path) -> bool:
    """Whether ``file`` was not fetched: it is what Git LFS has in its place."""
    with contextlib.suppress(OSError), file.open("rb") as opened:
        return opened.read(len(_LFS)) == _LFS
    return False


def quantized(config: Mapping[str, Any], keys: Iterable[str]) -> str:
    """What to say of a model that has the tensors ``keys`` if it is quantized; "" otherwise."""
    settings = config.get("quantization_config")
    if settings == {}:
        return "said to be quantized by an empty quantization_config in config.json; remove that if it is not"
    if settings is not None:
        method = settings.get("quant_method") if isinstance(settings, dict) else None
        return f"quantized{f' ({method})' if isinstance(method, str) else ''}; {_ORIGINAL}"
    if isinstance(mlx := config.get("quantization"), dict) and "bits" in mlx:
        return f"quantized (MLX, {mlx['bits']} bits); {_ORIGINAL}"
    shows = next((key for key in keys if key.endswith(_QUANTIZED)), "")
    return f"quantized (as {shows!r} shows); {_ORIGINAL}" if shows else ""


def wrapped(keys: Iterable[str]) -> str:
    """What to say of a model that was saved within something else, as the ``keys`` of its tensors show, if it was."""
    keys = list(keys)
    parts = (part for key in keys for part in key.split(".") if part in _WRAPPED)
    starts = (start for start in _WRAPPED if start.endswith(".") and keys and all(k.startswith(start) for k in keys))
    if (found := next(itertools.chain(parts, starts), None)) is None:
        return ""
    name, hint = _WRAPPED[found]
    return f"saved within something else ({name}): its tensors have {found!r} in their names; {hint}"


def _base(directory: Path) -> str:
    """The model that an adapter is of."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        name = json.loads((directory / "adapter_config.json").read_text("utf-8")).get("base_model_name_or_path")
        return f" of {name}" if isinstance(name, str) else ""
    return ""


def _inside(directory: Path, before: str) -> str:
    """The models in a directory; with ``before`` in front of them, if there are any."""
    found = [path.parent for depth in ("*", "*/*") for path in directory.glob(f"{depth}/config.json")]
    models = [folder for folder in found if any(folder.glob("*.safetensors")) or _pickled(folder)]
    names = [str(path) for path in sorted(set(models), key=_natural)]
    return f"{before}{'one of ' if len(names) > 1 else ''}{several(names, 3)}" if names else ""


def _natural(path: Path) -> list[tuple[str, int]]:
    """A key by which checkpoint-1000 comes behind checkpoint-500."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D+)(\d*)", str(path))]


def _pickled(directory: Path) -> str:
    """The first file of pickled weights."""
    found = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLE_SUFFIXES)
    return next((name for name in found if not _OF_TRAINING.fullmatch(name)), "")
