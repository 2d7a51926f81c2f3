"""Files of sound or images that pairs have as their sources, as a model's own processor makes them."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from niwaki.checkpoints.tensors import raw_bytes
from niwaki.errors import CalibrationError, first_line, panics_as_errors, raised_as
from niwaki.models.pairs import SOURCES

#: The modules that each kind of file is read with, and the packages that have them.
_NEEDED = {"sound": (("soundfile", "soxr"), "soundfile soxr"), "image": (("PIL",), "pillow torchvision")}


def read_sources(
    model: Path, kind: Literal["sound", "image"], files: Sequence[tuple[str, Path]]
) -> tuple[list[list[int]], str]:
    """The number of each of ``files`` among all sources, and a digest of what the ``model`` receives of them.

    Each comes with where it is named. All are read once, so that errors show before the work: CalibrationError where
    one is missing or cannot be read, where the model has no processor for them, or an extra is missing.
    """
    modules, packages = _NEEDED[kind]
    if any(importlib.util.find_spec(module) is None for module in modules):
        raise CalibrationError(f"files of {kind}, as in {files[0][0]}, need an extra: pip install {packages}")
    processor = _processor(model, kind)
    settings = hashlib.sha256(processor.to_json_string().encode()).hexdigest()
    digest, numbers = hashlib.sha256(), list[list[int]]()
    for where, path in files:
        if not path.is_file():
            raise CalibrationError(f"{where}: there is no file of {kind} {path}")
        read = partial(_sound if kind == "sound" else _image, processor, path, where)
        for name, value in sorted(read().items()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(raw_bytes(value))
        numbers.append([SOURCES.number(f"{settings} {path}", read)])
    return numbers, digest.hexdigest()


def _processor(path: Path, kind: str) -> Any:
    from transformers import AutoFeatureExtractor, AutoImageProcessor

    of: Any = AutoFeatureExtractor if kind == "sound" else AutoImageProcessor
    what = f"{path} has no processor of {kind} that can be loaded"
    with raised_as(CalibrationError, what, reason=first_line), panics_as_errors():
        return of.from_pretrained(path, trust_remote_code=False)


def _sound(extractor: Any, path: Path, where: str) -> dict[str, Tensor]:
    """What a model receives of a file of sound, of all channels together."""
    import soundfile
    import soxr

    with raised_as(CalibrationError, f"{where}: {path} cannot be read as sound", reason=first_line):
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
        wanted, mono = extractor.sampling_rate, samples.mean(axis=1)
        made = extractor(
            mono if rate == wanted else soxr.resample(mono, rate, wanted), sampling_rate=wanted, return_tensors="pt"
        )
    return _tensors(made)


def _image(processor: Any, path: Path, where: str) -> dict[str, Tensor]:
    """What a model receives of an image."""
    from PIL import Image

    what = f"{where}: {path} cannot be read as an image"
    with raised_as(CalibrationError, what, reason=first_line), Image.open(path) as image:
        return _tensors(processor(images=image.convert("RGB"), return_tensors="pt"))


def _tensors(made: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in made.items() if isinstance(value, Tensor)}
