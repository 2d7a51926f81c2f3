"""Pairs for models that are an encoder with a decoder: rows of a table with a source and a target."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from niwaki.checkpoints.tensors import raw_bytes
from niwaki.choices import Order
from niwaki.errors import CalibrationError, first_line, named, panics_as_errors, raised_as, shown
from niwaki.files import given_path
from niwaki.models.pairs import SOUNDS, rows_of
from niwaki.models.streamed import StreamedModel
from niwaki.records.wording import several
from niwaki.texts.files import ROWS, kind, rows
from niwaki.texts.rows import Rows
from niwaki.texts.sources import DATASETS, EXCERPTS, data_set_rows, find_file
from niwaki.windows import Windows

SOURCE, TARGET = "source", "target"
_EXTRA = "pip install '.[sound]' in niwaki's checkout"
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

    None stands for all; ``spare`` more are welcome. Sources and targets are cut to ``length`` tokens, with a note. The
    sources of a model that hears are files of sound, relative to the file's folder. CalibrationError where the text has
    no pairs or too few, files of sound are missing or cannot be read, or an extra is missing.
    """
    found, folder = _rows(name)
    wanted = None if needed is None else needed + spare
    if order == "random":
        pairs = [_pair(row, where) for where, row in found]
        pairs = random.Random(seed).sample(pairs, len(pairs))[:wanted]
    else:
        pairs = [_pair(row, where) for where, row in itertools.islice(found, wanted)]
    if len(pairs) < (needed or 1):
        raise CalibrationError(f"{name} has {len(pairs)} pairs, and {needed or 1} are needed; give more --calibration")
    digest = ""
    if model.hears:
        sources, digest = _heard(model, pairs, folder)
    else:
        sources = _tokens(model, [pair.source for pair in pairs], length)
    targets = _targets(model, [pair.target for pair in pairs], length)
    for pair, target in zip(pairs, targets, strict=True):
        if len(target) < 2:
            raise CalibrationError(f"{pair.where}: the model's tokenizer makes no tokens of the target")
    tokens = rows_of(zip(sources, targets, strict=True))
    notes = _notes(name, length, sources, targets, is_text=not model.hears)
    which = "sounds and what they say" if model.hears else "pairs of a source and a target"
    sizes = tuple(len(pair.target.encode()) or 1 for pair in pairs)
    return Windows(tokens, name, order, f"{name}, {which}, {order} ones", notes, bytes=sizes, digest=digest)


def _rows(name: str) -> tuple[Rows, Path]:
    """The rows of a table, and the folder that files are relative to; CalibrationError where it is running text."""
    path = find_file(name)
    if (path and kind(path) in ROWS) or (path is None and name not in (*DATASETS, *EXCERPTS)):
        return (rows(path, name), path.parent) if path else (data_set_rows(name), Path())
    raise CalibrationError(
        f"{name} is running text, and this model is an encoder with a decoder, which needs pairs: give {_HOW}"
    )


def _pair(row: Any, where: str) -> _Pair:
    values: list[Any] = [row.get(column) if isinstance(row, dict) else None for column in (SOURCE, TARGET)]
    for column, value in zip((SOURCE, TARGET), values, strict=True):
        if not isinstance(value, str) or not value.strip():
            has = f"columns {several([shown(each) for each in row], 12)}" if isinstance(row, dict) else shown(row)
            raise CalibrationError(f"{where}: no {column} that is text; pairs are {_HOW}, and this one has {has}")
    return _Pair(where, *values)


def _tokens(model: StreamedModel, texts: list[str], length: int, **kwargs: Any) -> list[list[int]]:
    """Each text as the tokenizer makes it for a model, with what it puts around it."""
    with raised_as(CalibrationError, "the model's tokenizer fails on this text"), panics_as_errors():
        ids: list[list[int]] = model.tokenizer(texts, truncation=True, max_length=length, **kwargs)["input_ids"]
    return ids


def _targets(model: StreamedModel, texts: list[str], length: int) -> list[list[int]]:
    """Likewise for targets, with the token before them that decoders begin with."""
    with raised_as(CalibrationError, "the model's tokenizer fails on targets"), panics_as_errors():
        made = model.tokenizer(text_target=texts, truncation=True, max_length=length)["input_ids"]
    firsts = [_first(model, target) for target in made]
    return [target if target[:1] == [first] else [first, *target] for target, first in zip(made, firsts, strict=True)]


def _first(model: StreamedModel, labels: list[int]) -> int:
    """What the decoder begins with to write ``labels``; of some models that is a language, which is in these."""
    shift = getattr(model.model, "prepare_decoder_input_ids_from_labels", None)
    if shift is None or not labels:
        return int(model.config.decoder_start_token_id or 0)
    return int(shift(labels=torch.tensor([labels]))[0, 0])


def _notes(
    name: str, length: int, sources: list[list[int]], targets: list[list[int]], is_text: bool
) -> tuple[str, ...]:
    cut = sum(len(source) >= length for source in sources) if is_text else 0
    cut += sum(len(target) > length for target in targets)
    if not cut:
        return ()
    return (f"{cut:,} sources and targets of {name} were cut to {length:,} tokens, or are as long",)


class _Sound:
    """A file of sound, and what the model receives of it."""

    def __init__(self, path: Path, where: str, extractor: Any) -> None:
        self._path, self._where, self._extractor = path, where, extractor

    @cached_property
    def name(self) -> str:
        """Which it is, for all processes and stages of a run."""
        return str(self._path)

    def read(self) -> dict[str, Tensor]:
        """CalibrationError, which names the line, where it is missing or cannot be read."""
        import soundfile
        import soxr

        if not self._path.is_file():
            raise CalibrationError(f"{self._where}: there is no file of sound {self._path}")
        with raised_as(CalibrationError, f"{self._where}: {self._path} cannot be read as sound", reason=first_line):
            samples, rate = soundfile.read(self._path, dtype="float32", always_2d=True)
            wanted = self._extractor.sampling_rate
            mono = samples.mean(axis=1)
            mono = mono if rate == wanted else soxr.resample(mono, rate, wanted)
            made = self._extractor(mono, sampling_rate=wanted, return_tensors="pt")
        return {name: value for name, value in made.items() if isinstance(value, Tensor)}


def _heard(model: StreamedModel, pairs: list[_Pair], folder: Path) -> tuple[list[list[int]], str]:
    """The number of each source among all sounds, and a digest of what the model receives of them."""
    if any(importlib.util.find_spec(package) is None for package in ("soundfile", "soxr")):
        raise CalibrationError(f"files of sound, as in {pairs[0].where}, need an extra: {_EXTRA}")
    from transformers import AutoFeatureExtractor

    path = model.checkpoint.path
    with raised_as(CalibrationError, f"{path} has no processor of sound that can be loaded"), panics_as_errors():
        extractor = AutoFeatureExtractor.from_pretrained(path, trust_remote_code=False)
    digest, numbers = hashlib.sha256(), list[list[int]]()
    for pair in pairs:
        sound = _Sound(folder / given_path(pair.source), pair.where, extractor)
        with named(pair.where):
            for name, value in sorted(sound.read().items()):
                digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                digest.update(raw_bytes(value))
        numbers.append([SOUNDS.number(sound.name, sound.read)])
    return numbers, digest.hexdigest()
