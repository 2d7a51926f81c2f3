"""Healing: what is left of a pruned model is trained towards the dense model's predictions."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from niwaki.arguments import checked
from niwaki.errors import CalibrationError, UnsupportedModelError, UsageError
from niwaki.layer.products import products
from niwaki.models.answers import with_answers
from niwaki.models.carried import find_carried
from niwaki.models.checkpoint.reading import Checkpoint, locate_model
from niwaki.models.device import training_dtype
from niwaki.models.extra import notes_of
from niwaki.models.journal import Journal
from niwaki.models.output import Part, check_output, workplace
from niwaki.models.scales import FILE, grid_of, stored_as_usual
from niwaki.models.streamed import StreamedModel
from niwaki.models.text import Texts
from niwaki.options import (
    BLOCKS_RATE,
    HEALING_BATCH,
    HEALING_LENGTH,
    HEALING_RATE,
    HEALING_TOKENS,
    OWN_TEXT,
    Calibration,
    Compute,
    HealingMethod,
    Measurement,
    Text,
    parse_number,
    parse_share,
    parse_time,
)
from niwaki.pruning.healing.blocks import BlockRun
from niwaki.pruning.healing.checks import base_record, check_vocabulary, check_zeros
from niwaki.pruning.healing.method import choose
from niwaki.pruning.healing.objective import find_logits
from niwaki.pruning.healing.run import Run
from niwaki.pruning.healing.whole import WholeRun
from niwaki.pruning.prune import USUAL_WINDOWS
from niwaki.pruning.request import begin_record
from niwaki.pruning.session import current_session
from niwaki.records.healing import HealingRecord
from niwaki.records.progress import Progress
from niwaki.records.record import Clock, Record
from niwaki.records.wording import counted

#: Tokens that are held out: enough for an error that means something, and, because they are measured at each point, no
#: more than that share of those to train on, but for the smaller number.
_LEAST_HELD, _MOST_HELD, _SHARE_HELD = 2048, 8192, 1 / 50
#: Above any number that makes sense, and below what a record can have.
_LIMIT = 1 << 50


@dataclass(frozen=True)
class HealingRequest:
    """The arguments of :func:`heal`, as values that have been checked."""

    pruned: str
    teacher: str
    tokens: int
    calibration: Calibration
    measurement: Measurement
    compute: Compute
    method: HealingMethod = "auto"
    limit: float | None = None
    rate: float | None = None
    batch: int = HEALING_BATCH
    own_text: float = OWN_TEXT
    pruning: Record | None = None  # how it was pruned, where that is a part of the same run

    def __post_init__(self) -> None:
        self.measurement.only_text("heal")
        self.calibration.only("heal", "text", "length", "order", "seed", "answers", "bos", "field")
        self.compute.only("heal", "device", "dtype", "memory")
        numbers = {"tokens": self.tokens, "time": self.limit, "rate": self.rate, "batch": self.batch}
        for name, value in numbers.items():
            if value is not None and not 0 < value < _LIMIT:
                raise UsageError(f"{name} must be above 0 and below 2^50; got {value}")


@checked
def heal(
    pruned: str | Path,
    out: str | Path,
    teacher: str | Path,
    *,
    method: HealingMethod = "auto",
    tokens: int | str = HEALING_TOKENS,
    time: float | str | None = None,
    rate: float | None = None,
    batch: int | str = HEALING_BATCH,
    own_text: float | str = OWN_TEXT,
    calibration: Calibration | Text = Calibration(),
    measurement: Measurement | Text | None = Measurement(),
    compute: Compute | str = Compute(),
    restart: bool = False,
    progress: Progress | None = None,
) -> Record:
    """Trains the weights of a pruned model that are not zero, and writes the result to directory ``out``.

    Its predictions of the next token come near those of the dense model (:class:`.training.Training`,
    :class:`.blocks.BlockRun`). For anything that was pruned, by niwaki or others, with zeros or to a smaller shape: all
    zeros stay. The dense model is asked a block at a time, the pruned one is in memory as a whole where it fits.

    Args:
        pruned: The pruned model: a directory with config.json and safetensors, or a Hugging Face hub id.
        out: A directory that does not exist or is empty. It appears when all is written and checked.
        teacher: The dense model, likewise; one of the same vocabulary will do.
        method: "full" trains all weights that are left, with three more float32 numbers for each; "lora" adds products
            of low rank to them, in little more memory than the weights take; "norms" trains norms and biases alone.
            "blocks" trains one block after the other towards the dense model's, with one of each in memory. "auto" is
            the first of "full", "lora" and "blocks" that memory is enough for.
        tokens: How many to train on, such as "2M". Where the text has fewer, it is used again.
        time: Seconds, or text such as "1h", that it may take in all; None for no limit. The same tokens give the same
            bytes, the same time does not.
        rate: The learning rate, relative to the root mean square of each parameter's weights; None for 0.0007, or 0.01
            with the method "blocks".
        batch: Tokens in a step, at least one window; such as "1k".
        own_text: The share of what is trained on that the dense model writes itself, from 0 to less than 1.
        calibration: The text to train on, alone or as a :class:`~niwaki.options.Calibration`, whose ``samples`` are
            not used; by default in windows of 512 tokens.
        measurement: The text to measure perplexity on, as in :func:`niwaki.prune`.
        compute: The device; ``tf32`` is not used. Half precision is bfloat16, with weights in float32; "auto" is that
            also on processors with units for it (AMX or AVX512-BF16), where files are in it.
        restart: Discard what an interrupted run has left for ``out``, instead of resuming it.
        progress: Receives how it goes.

    Returns:
        The record, which is also in ``out/niwaki.json``; that of the pruned model is in ``out/niwaki.base.json``.

    Raises:
        NiwakiError: see :mod:`niwaki.errors`. After the first point the same call resumes at the last one.
    """
    request = HealingRequest(
        pruned=str(pruned),
        teacher=str(teacher),
        method=method,
        tokens=parse_number(tokens) if isinstance(tokens, str) else tokens,
        limit=parse_time(time) if isinstance(time, str) else time,
        rate=rate,
        batch=parse_number(batch) if isinstance(batch, str) else batch,
        own_text=parse_share("own_text", own_text),
        calibration=Calibration.of(calibration),
        measurement=Measurement.of(measurement),
        compute=Compute.of(compute),
    )
    return run(request, out, restart, progress)


def run(request: HealingRequest, out: str | Path, restart: bool, progress: Progress | None) -> Record:
    """What :func:`heal` does."""
    clock, world = Clock(), current_session().world
    progress = progress if progress and world.first else Progress()
    calibration, measurement, compute = request.calibration, request.measurement, request.compute
    source, teacher = locate_model(request.pruned), locate_model(request.teacher)
    target = check_output(source, out, teacher) if world.first else Path(out)
    progress.status(f"reading {request.pruned}")
    checkpoint = Checkpoint(source)
    grid = grid_of(checkpoint)
    part: Part = "second" if request.pruning else "whole"
    keep = FILE if grid else ""
    carried = find_carried(checkpoint, target, checkpoint.size, keep, part) if world.first else None
    knowing = Checkpoint(teacher)
    dense = StreamedModel(knowing, compute.device, training_dtype(compute.dtype, compute.device, knowing))
    student, method, notes = choose(checkpoint, dense, compute, request.method)
    check_vocabulary(student, dense)
    base = base_record(checkpoint.path)
    check_zeros(student, dense, base)
    if "pruning_config" in knowing.config:  # it may be meant: one with fewer zeros, say
        notes.append(
            f"{request.teacher} was pruned itself; the pruned model comes near it, and not the model before that"
        )
    make_run = _make_run(student, method)
    rate = request.rate or (BLOCKS_RATE if method == "blocks" else HEALING_RATE)
    progress.status("reading the text to train on")
    length = calibration.length
    if length is None and all(isinstance(text, str) for text in calibration.texts):  # and no windows, which have theirs
        length = min(HEALING_LENGTH, student.window_length(None))
    usual = length or HEALING_LENGTH
    seen = _seen(request, usual)
    samples = seen + math.ceil(request.tokens / usual) + _held(request.tokens, usual)
    more = replace(calibration, samples=max(samples, len(calibration.texts)), length=length)
    written = with_answers(dense, more, compute.budget, world, progress)
    texts = Texts.read(dense, written, measurement, USUAL_WINDOWS, fewer=True)
    student.check(texts.windows.tokens)
    windows, length = texts.windows.tokens.shape
    held = min(_held(request.tokens, length), max(1, windows // 8))
    texts = replace(
        texts, calibration=replace(texts.windows, tokens=_drawn(texts.windows.tokens, seen, held, calibration.seed))
    )
    if windows <= world.size:
        raise CalibrationError(
            f"the text to train on has {counted(windows, 'window')} of {length} tokens, one is held out, and each "
            "process needs one; give more text, or a shorter --seqlen"
        )
    settings: dict[str, Any] = {
        "method": method,
        "rate": rate,
        "batch": request.batch,
        "own_text": request.own_text,
    }
    record = begin_record(
        request.pruning.model if request.pruning else request.pruned,
        dense,
        texts,
        calibration,
        method="heal",
        solver={"name": "heal", **settings},
        pattern=base.pattern if base else "as it came",
        mask_from=None,
        blocks=base.blocks if base else None,
        quantization=str(grid) if grid else None,
        healing=HealingRecord(
            request.teacher, **settings, tokens=request.tokens, limit=request.limit, held=held * length
        ),
    )
    stored = [stored_as_usual(grid, student.matrices())] if grid else []
    record.notes += [*notes, *stored, *notes_of(student)]
    fingerprint = {
        "model": checkpoint.fingerprint(),
        "teacher": dense.checkpoint.fingerprint(),
        "calibration": texts.windows.fingerprint(),
        "text": texts.only and texts.only.fingerprint(),
        **settings,
        "tokens": request.tokens,
        "device": dense.device.type,
        "dtype": record.dtype,
        "versions": record.versions,
    }
    world.check_same(fingerprint)
    clock.lap("prepare")
    with (
        products(tf32=False),
        workplace(target, fingerprint, restart, part) if world.first else contextlib.nullcontext() as place,
    ):
        shared = world.received(place.journal if place else Journal({}))
        journal = place.journal if place else shared
        if journal.complete:
            record = place.finished_record if place else record
        else:
            parts = world, journal, place, compute.budget, request.pruning
            healing = make_run(dense, student, held, record, clock, progress, *parts)
            try:
                if carried:
                    healing.write(texts, measurement.before, carried)
                else:
                    healing.train(texts.windows)
            except BaseException as error:
                if place and place.has_more_to_come:
                    progress.stopped(*healing.done)
                elif isinstance(error, KeyboardInterrupt) and part == "whole":
                    progress.lost()
                raise
            record = healing.record
        record = world.received(record)
        if place:
            place.move()
    progress.end(record)
    return record


def refusal(checkpoint: Checkpoint, compute: Compute) -> str:
    """Why a pruned model of this one cannot be healed as a whole; "" where it can."""
    name = training_dtype(compute.dtype, compute.device, checkpoint)
    dense = StreamedModel(checkpoint, compute.device, name)
    try:
        find_logits(choose(checkpoint, dense, compute, "auto", is_whole=True)[0])
    except UnsupportedModelError as error:
        return str(error)
    return ""


def _make_run(model: StreamedModel, method: HealingMethod) -> Callable[..., Run]:
    """What heals ``model`` by a method; UnsupportedModelError where it cannot be healed."""
    if method == "blocks":
        model.check_head()
        return BlockRun
    return partial(WholeRun, logits=find_logits(model))


def _seen(request: HealingRequest, length: int) -> int:
    """How many windows of the text the model was pruned on, where it has more: what is new is worth more."""
    calibration, pruning = request.calibration, request.pruning
    if pruning is None or calibration.order != "first" or any(calibration.answered):  # answers take long to write
        return 0
    if not all(isinstance(text, str) for text in calibration.texts):
        return 0
    windows = pruning.calibration
    first = "bos" in windows  # which each window has beside the text
    return math.ceil(windows["samples"] * (windows["sequence_length"] - first) / (length - first))


def _drawn(tokens: Tensor, seen: int, held: int, seed: int) -> Tensor:
    """All windows in an order that ``seed`` draws, so that the first ones, as time ends, are of all kinds of text.

    Those that were ``seen`` come after the others, but for the last ``held``, which are new too.
    """
    drawing = torch.Generator().manual_seed(seed)
    old, new = (part[torch.randperm(len(part), generator=drawing)] for part in (tokens[:seen], tokens[seen:]))
    held = min(held, len(new))
    return torch.cat([new[: len(new) - held], old, new[len(new) - held :]])


def _held(tokens: int, length: int) -> int:
    """Windows to hold out of so many tokens to train on."""
    return max(1, min(_MOST_HELD, max(_LEAST_HELD, int(tokens * _SHARE_HELD))) // length)
