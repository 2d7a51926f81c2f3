"""Pairs for models that are an encoder with a decoder: rows of a table with a source and a target."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from niwaki.checkpoints.tensors import raw_bytes
from niwaki.choices import Order
from niwaki.errors import CalibrationError, CheckpointError, first_line, panics_as_errors, raised_as, shown
from niwaki.files import given_path
from niwaki.models.pairs import SOURCES, rows_of
from niwaki.models.streamed import StreamedModel
from niwaki.records.wording import counted, several
from niwaki.texts.files import ROWS, kind, rows
from niwaki.texts.rows import Rows
from niwaki.texts.sources import DATASETS, EXCERPTS, data_set_rows, find_file
from niwaki.windows import Windows

# Files of sound or images that pairs have as their sources, as a model's own processor makes them.

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


SOURCE, TARGET = "source", "target"
_HOW = 'a file of rows, such as JSONL, with {"source": ..., "target": ...} in each line'


@dataclass(frozen=True)
class _Pair:
    where: str  # the file and the line
    source: str
    target: str


def read_pairs(
    model: StreamedModel,
    name: str,
    length: int,
    needed: int | None,
    spare: int = 0,
    order: Order = "first",
    seed: int = 0,
) -> Windows:
    """The pairs of the file or data set ``name`` as rows of tokens, of which ``needed`` have to be there.

    None stands for all; ``spare`` more are welcome. Sources and targets are cut to ``length`` tokens, with a note.
    Where the encoder reads sound or images, sources are files, relative to the folder of ``name``. CalibrationError
    where the text has no pairs or too few, and as of :func:`.read_sources`.
    """
    assert model.pairs is not None
    of = model.pairs.sources
    found, folder = _rows(name)
    wanted = None if needed is None else needed + spare
    if order == "random":
        pairs = [_pair(row, where) for where, row in found]
        pairs = random.Random(seed).sample(pairs, len(pairs))[:wanted]
    else:
        pairs = [_pair(row, where) for where, row in itertools.islice(found, wanted)]
    if len(pairs) < (needed or 1):
        there = counted(len(pairs), "pair")
        raise CalibrationError(f"{name} has {there}, and {needed or 1} are needed; give more, or fewer --samples")
    digest = ""
    targets, cut = _targets(model, [pair.target for pair in pairs], length)
    if of != "text":
        sources, digest = read_sources(
            model.checkpoint.path, of, [(pair.where, folder / given_path(pair.source)) for pair in pairs]
        )
    else:
        longest = min(length, model.pairs.positions or length)
        sources, too_long = _tokens(model, [pair.source for pair in pairs], longest)
        cut += too_long
    for pair, target in zip(pairs, targets, strict=True):
        if len(target) < 2:
            raise CalibrationError(f"{pair.where}: the model's tokenizer makes no tokens of the target")
    tokens = rows_of(zip(sources, targets, strict=True))
    notes = (f"{counted(cut, 'source or target', 'sources and targets')} of {name} cut to {length:,} tokens",)
    which = "a source and a target" if of == "text" else f"{of} and text"
    sizes = tuple(len(pair.target.encode()) or 1 for pair in pairs)
    return Windows(
        tokens, name, order, f"{name}, pairs of {which}, {order} ones", notes if cut else (), bytes=sizes, digest=digest
    )


def _rows(name: str) -> tuple[Rows, Path]:
    """The rows of a table, and the folder that files are relative to; CalibrationError where it is running text."""
    path = find_file(name)
    if (path and kind(path) in ROWS) or (path is None and name not in (*DATASETS, *EXCERPTS)):
        return (rows(path, name), path.parent) if path else (data_set_rows(name), Path())
    raise CalibrationError(
        f"{name} is running text, and this model is an encoder with a decoder, which needs pairs: give {_HOW} (to "
        "calibrate on, --calibration; to measure on, --text)"
    )


def _pair(row: Any, where: str) -> _Pair:
    values: list[Any] = [row.get(column) if isinstance(row, dict) else None for column in (SOURCE, TARGET)]
    for column, value in zip((SOURCE, TARGET), values, strict=True):
        if not isinstance(value, str) or not value.strip():
            has = f"columns {several([shown(each) for each in row], 12)}" if isinstance(row, dict) else shown(row)
            raise CalibrationError(f"{where}: no {column} that is text; pairs are {_HOW}, and this one has {has}")
    return _Pair(where, *values)


def _tokens(model: StreamedModel, texts: list[str], length: int, name: str = "text") -> tuple[list[list[int]], int]:
    """Each text as the tokenizer makes it for a model, with what it puts around it; how many it had to cut."""
    with raised_as(CalibrationError, "the model's tokenizer fails on this text"), panics_as_errors():
        made: list[list[int]] = model.tokenizer(**{name: texts})["input_ids"]
        long = [number for number, ids in enumerate(made) if len(ids) > length]
        for number in long:
            cut = model.tokenizer(**{name: texts[number]}, truncation=True, max_length=length)
            made[number] = cut["input_ids"]
    return made, len(long)


def _targets(model: StreamedModel, texts: list[str], length: int) -> tuple[list[list[int]], int]:
    """Each target as tokens after the one that decoders begin with; how many were cut."""
    made, cut = _tokens(model, texts, length, "text_target")
    firsts = [_first(model, target) for target in made]
    return [ids if ids[:1] == [first] else [first, *ids] for ids, first in zip(made, firsts, strict=True)], cut


def _first(model: StreamedModel, labels: list[int]) -> int:
    """What the decoder begins with to write ``labels``; of some models that is a language, which is in these."""
    shift = getattr(model.model, "prepare_decoder_input_ids_from_labels", None)
    if shift is None or not labels:
        return int(getattr(model.config, "decoder_start_token_id", None) or 0)
    try:
        return int(shift(labels=torch.tensor([labels]))[0, 0])
    except (AttributeError, ValueError) as error:  # of a configuration that does not say it
        raise CheckpointError(
            f"{model.checkpoint.path / 'config.json'} has no decoder_start_token_id, with which the decoder begins; "
            "add it (of T5 it is pad_token_id)"
        ) from error
