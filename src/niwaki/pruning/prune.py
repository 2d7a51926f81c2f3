"""The pipeline: blocks x calibration x solver -> checkpoint."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from niwaki.arguments import checked
from niwaki.layer.grid import Grid, parse_grid
from niwaki.layer.patterns import Pattern, make_pattern
from niwaki.layer.products import products
from niwaki.layer.solvers import DEFAULT_SOLVER, Solver, describe, make_solver
from niwaki.models.answers import with_answers
from niwaki.models.carried import CarriedFiles, find_carried
from niwaki.models.checkpoint.reading import Checkpoint, locate_model
from niwaki.models.checkpoint.writing import CheckpointWriter, verify
from niwaki.models.device import resident
from niwaki.models.journal import Journal
from niwaki.models.kept_format import KeptFormat
from niwaki.models.output import Part, Workplace, check_output, workplace, write_config
from niwaki.models.scales import FILE, places, verify_grid
from niwaki.models.spill import MemoryBudget
from niwaki.models.streamed import StreamedModel
from niwaki.models.text import Texts
from niwaki.options import Calibration, Compute, Measurement, Text, parse_range
from niwaki.pruning import card
from niwaki.pruning.effort import Effort, make_effort, usual_effort
from niwaki.pruning.fit import COPIES
from niwaki.pruning.request import Request, patterns_of, take_masks
from niwaki.pruning.session import current_session
from niwaki.pruning.walk import Walk
from niwaki.records.progress import Progress
from niwaki.records.record import Clock, Record

#: Windows that perplexity is measured on, where nobody says how many.
USUAL_WINDOWS = 16


@checked
def prune(
    model: str | Path,
    out: str | Path,
    pattern: float | str | Pattern | None = None,
    *,
    solver: str | Solver | None = None,
    effort: str | Effort | None = None,
    mask_from: str | Path | None = None,
    grid: str | Grid | None = None,
    keep_format: bool = False,
    revive: bool = False,
    blocks: tuple[int, int] | str | None = None,
    calibration: Calibration | Text = Calibration(),
    measurement: Measurement | Text | None = Measurement(),
    compute: Compute | str = Compute(),
    restart: bool = False,
    progress: Progress | None = None,
) -> Record:
    """Prunes the model in directory ``model`` and writes the result to directory ``out``.

    One decoder block is in memory at a time, with its Gram matrices and the hidden states of the calibration text.
    Embeddings, norms, biases and the head are copied.

    Args:
        model: A directory with config.json and safetensors, a GGUF file, or a Hugging Face hub id.
        out: A directory that does not exist or is empty. It appears when all is written and checked.
        pattern: A fraction of zeros, such as 0.6 or "60 %", in the pattern that the solver's paper uses; or a pattern,
            such as "2:4" or ``PerRow(0.6)``.
        solver: A name of ``SOLVERS``, with parameters as in "adam:iterations=50", or a solver; by default continuation.
        effort: A name of ``EFFORTS``, with parameters as in "best:epochs=3", or an effort: what is done for the whole
            model, and for matrices and blocks to fit together. By default "balanced", and where a solver or a mask is
            given "fast": methods as they were published.
        mask_from: The name of another solver, or a pruned model, whose mask is used; a model's is kept as it is,
            whatever its pattern. With a pattern as well it gets the zeros that it lacks for that, beyond its own, and
            solvers that refine masks (swaps, dsnot) start from it and stay within the pattern.
        grid: A grid for the remaining weights, such as "int4:128": whole numbers of 4 bits, with a scale for each row
            and 128 inputs; "int8" has one for each row. Kept weights that are 0 there are zeros in addition to the
            pattern's. Scales are in ``out/quantization/scales.safetensors``.
        keep_format: Write the pruned matrices of a model in FP8 or MXFP4 in that format again, instead of bfloat16: all
            that was not pruned keeps its bytes, and zeros are those of the solver. Weights that would round to 0 become
            the smallest number. UsageError for other models, and together with ``grid``.
        revive: Prune as if weights that are 0 in ``model`` were not. By default they stay 0, and count among the zeros
            that the pattern asks for; where there are more, all stay.
        blocks: Only those from the first number to before the second one are pruned; (0, 2) or "0:2" are the first two.
        calibration: The text to calibrate on, alone or as a :class:`~niwaki.options.Calibration`.
        measurement: The text to measure perplexity on, alone or as a :class:`~niwaki.options.Measurement`; by default
            16 windows of the calibration text after the calibration windows.
        compute: The device, alone or as a :class:`~niwaki.options.Compute`.
        restart: Discard what an interrupted run has left for ``out``, instead of resuming it.
        progress: Receives how it goes.

    Returns:
        The record, which is also in ``out/niwaki.json``.

    Raises:
        NiwakiError: see :mod:`niwaki.errors`. Before the first block is done nothing is left; later the same call
            resumes after the last block that is done, as it does after an interruption.
    """
    given = DEFAULT_SOLVER if solver is None else solver
    updating = make_solver(given) if isinstance(given, str) else given
    mask_from = None if mask_from is None else str(mask_from)
    effort = usual_effort(solver, mask_from) if effort is None else effort
    masking, mask_model = take_masks(updating, mask_from)
    measurement = Measurement.of(measurement)
    measurement.only_text("prune")
    request = Request(
        model=str(model),
        method=given if isinstance(given, str) else str(describe(given)["name"]),
        solver=masking,
        effort=make_effort(effort) if isinstance(effort, str) else effort,
        pattern=None if pattern is None else make_pattern(pattern, updating.default_pattern),
        mask_from=mask_from,
        mask_model=mask_model,
        grid=parse_grid(grid) if isinstance(grid, str) else grid,
        keep_format=keep_format,
        revive=revive,
        blocks=parse_range(blocks) if isinstance(blocks, str) else blocks,
        calibration=Calibration.of(calibration),
        measurement=measurement,
        compute=Compute.of(compute),
    )
    if request.effort.healing:
        from niwaki.pruning.healing.after_pruning import prune_and_heal

        return prune_and_heal(request, out, restart, progress)
    return run(request, out, restart, progress)


def run(request: Request, given: str | Path, restart: bool, progress: Progress | None, part: Part = "whole") -> Record:
    """What :func:`prune` does; where it is the first ``part`` of a run, the result is not moved into place."""
    clock, world = Clock(), current_session().world
    progress = progress if progress and world.first else Progress()
    progress.status(f"reading {request.model}")
    source = locate_model(request.model)
    masks = [locate_model(request.mask_model)] if request.mask_model else []
    out = check_output(source, given, *masks) if world.first else Path(given)
    with contextlib.closing(MemoryBudget()) as budget:
        checkpoint = Checkpoint(source)
        kept = KeptFormat(checkpoint) if request.keep_format else None
        written = checkpoint.stored if kept else checkpoint
        carried = find_carried(written, out, written.size, part=part) if world.first else None
        model = StreamedModel(checkpoint, request.compute.device, request.compute.dtype, budget)
        request = request.for_model(model)
        chosen = request.chosen(len(model.blocks))
        if not request.blocks:
            model.check_coverage()
        model.limit(chosen)
        if request.compute.budget is not None:
            budget.left = max(0, request.compute.budget - _needed(model, request))
        if request.grid:
            request.grid.check(matrix.shape[1] for matrix in model.matrices())
        pattern_of = patterns_of(request.pattern, request.mask_model, model)
        progress.status("reading the text to calibrate on")
        calibration = with_answers(model, request.calibration, request.compute.budget, world, progress)
        texts = Texts.read(model, calibration, request.measurement, USUAL_WINDOWS)
        request = request.for_texts(texts, model)
        record = request.record(model, texts)
        asked = request.fingerprint(model, texts, record)
        world.check_same(asked)
        clock.lap("prepare")
        with (
            products(tf32=record.tf32 == "always"),
            workplace(out, asked, restart, part) if world.first else contextlib.nullcontext() as place,
            _report_interruption(place, progress, chosen),
        ):
            shared = world.received(place.journal if place else Journal({}))
            journal = place.journal if place else shared
            if journal.complete:
                record = place.finished_record if place else record
            else:
                if journal.blocks:
                    earlier = Record.from_json(journal.record)
                    record = dataclasses.replace(earlier, command=record.command, device=record.device)
                    record.resumed.append(journal.blocks)
                    clock.add(record.seconds)
                    progress.note(
                        f"resuming after the first {journal.blocks} of {len(model.blocks)} blocks, where an "
                        "earlier run was interrupted; these run again for their outputs"
                    )
                walk = Walk(model, request, pattern_of, world, record, progress, clock, journal, place, kept)
                if place and carried:
                    _write(walk, place, texts, carried)
                else:
                    walk.blocks(texts)
            record = world.received(record)
            if place and part == "whole":
                place.move()
    if part == "whole":
        progress.end(record)
    return record


def _write(walk: Walk, place: Workplace, texts: Texts, carried: CarriedFiles) -> None:
    """The walk over the blocks and all that is written."""
    kept, matrices, grid = walk.kept, walk.model.matrices(), walk.request.grid
    checkpoint = walk.model.checkpoint.stored if kept else walk.model.checkpoint
    added = places(checkpoint, matrices, grid) if grid else None
    place.clear([*checkpoint.shards, FILE])
    carried.copy(place.directory)
    with CheckpointWriter(checkpoint, place.directory, place.journal.blocks > 0, added) as walk.writer:
        walk.blocks(texts)
        if kept:
            walk.check_written()
    walk.clock.lap("write")
    walk.record.notes += carried.notes
    write_config(place.directory, checkpoint.config, walk.record)
    if kept:
        kept.verify(place.directory, place.journal.zeros)
    else:
        verify(place.directory, checkpoint, place.journal.zeros)
    if grid:
        verify_grid(place.directory, matrices, grid)
    walk.clock.lap("check")
    card.finish(place, walk.record, walk.clock)


@contextlib.contextmanager
def _report_interruption(place: Workplace | None, progress: Progress, chosen: range) -> Iterator[None]:
    """Says what stays of a run that ends early, if anything does."""
    try:
        yield
    except BaseException as error:
        if place and place.has_more_to_come:
            progress.stopped(place.journal.blocks - chosen.start, len(chosen))
        elif isinstance(error, KeyboardInterrupt) and place and not place.journal.complete:
            progress.lost()
        raise


def _needed(model: StreamedModel, request: Request) -> int:
    """Bytes that a run takes without its hidden states, estimated from above: solvers differ."""
    effort, blocks = request.effort, [model.matrices(index) for index in range(len(model.blocks))]
    rows, columns = max(model.matrices(), key=lambda matrix: matrix.size).shape
    solving = 4 * (2 * columns**2 + 7 * rows * columns)
    grams = max(sum(4 * matrix.shape[1] ** 2 for matrix in block) for block in blocks)
    # The block's weights, which are not there while matrices are solved, and activations; for the dense model's states
    # those weights once more.
    running = (3 if effort.dense else 2) * model.block_size
    weights = max(sum(matrix.size for matrix in block) for block in blocks)
    copies = COPIES + (1 if request.grid or request.keep_format else 0)  # as they are rounded
    fitting = model.block_size + copies * 4 * weights if effort.epochs else 0
    shared = sum(4 * matrix.shape[1] ** 2 for matrix in model.matrices() if matrix.blocks)  # until they are pruned
    return resident() + shared + max((2 if effort.dense_targets else 1) * grams + max(running, solving), fitting)
