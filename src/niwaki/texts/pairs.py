"""Pairs for models that are an encoder with a decoder: rows of a table with a source and a target."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from niwaki.choices import Order
from niwaki.errors import CalibrationError, panics_as_errors, raised_as, shown
from niwaki.files import given_path
from niwaki.models.pairs import rows_of
from niwaki.models.streamed import StreamedModel
from niwaki.records.wording import counted, several
from niwaki.texts.files import ROWS, kind, rows
from niwaki.texts.rows import Rows
from niwaki.texts.source_files import read_sources
from niwaki.texts.sources import DATASETS, EXCERPTS, data_set_rows, find_file
from niwaki.windows import Windows

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
    """Likewise for targets, with the token before them that decoders begin with."""
    made, cut = _tokens(model, texts, length, "text_target")
    firsts = [_first(model, target) for target in made]
    return [ids if ids[:1] == [first] else [first, *ids] for ids, first in zip(made, firsts, strict=True)], cut


def _first(model: StreamedModel, labels: list[int]) -> int:
    """What the decoder begins with to write ``labels``; of some models that is a language, which is in these."""
    shift = getattr(model.model, "prepare_decoder_input_ids_from_labels", None)
    if shift is None or not labels:
        return int(model.config.decoder_start_token_id or 0)
    return int(shift(labels=torch.tensor([labels]))[0, 0])
