"""The pipeline: blocks x calibration x solver -> checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from niwaki.errors import UnknownNameError, UsageError
from niwaki.files import write_json
from niwaki.layer.grid import Grid, parse_grid
from niwaki.layer.patterns import Pattern
from niwaki.layer.solvers import DEFAULT_SOLVER, MaskThenUpdate, Solver, make_solver
from niwaki.layer.tf32 import check_tf32, has_tf32, products
from niwaki.models.checkpoint import Checkpoint, CheckpointWriter, locate_model, verify
from niwaki.models.device import device_name, resident
from niwaki.models.hidden_states import MemoryBudget
from niwaki.models.output import Journal, Workplace, check_output, fingerprint, workplace, write_config
from niwaki.models.processes import World
from niwaki.models.scales import FOLDER, places, stored_as_usual, verify_grid
from niwaki.models.streamed import StreamedModel
from niwaki.models.text import Windows, read_texts
from niwaki.options import TF32, Measure, Order
from niwaki.pruning import card
from niwaki.pruning.effort import Effort, make_effort, usual_effort
from niwaki.pruning.fit import COPIES
from niwaki.pruning.masks import described, patterns_of, wanted_pattern
from niwaki.pruning.solve import Method
from niwaki.pruning.walk import Session, Walk
from niwaki.records.clock import Clock
from niwaki.records.progress import Progress
from niwaki.records.record import Record, versions

#: Windows for the perplexity before and after, behind those of the calibration.
DEFAULT_TEXT_SAMPLES = 16


def prune(
    model: str | Path,
    out: str | Path,
    *,
    solver: str | Solver | None = None,
    method: str | None = None,
    effort: str | Effort | None = None,
    sparsity: float | None = None,
    pattern: str | Pattern | None = None,
    mask_from: str | None = None,
    quantize: str | Grid | None = None,
    calibration: str | Tensor | Windows = "c4",
    samples: int = 128,
    length: int | None = None,
    order: Order = "first",
    seed: int = 0,
    text: str | Tensor | None = None,
    text_samples: int = DEFAULT_TEXT_SAMPLES,
    measure: Measure = "both",
    device: str = "auto",
    dtype: str = "auto",
    tf32: TF32 = "auto",
    blocks: tuple[int, int] | None = None,
    memory: int | None = None,
    record_to: str | Path | None = None,
    restart: bool = False,
    command: str = "",
    progress: Progress | None = None,
    world: World | None = None,
) -> Record:
    """Prunes the model in directory ``model`` and writes the result to directory ``out``.

    One decoder block is in memory at a time, with its Gram matrices and the hidden states of the
    calibration text. Embeddings, norms and the head are copied; norms and biases of blocks are changed only where
    the effort says so.

    Args:
        model: A directory with config.json and safetensors, or a Hugging Face hub id.
        out: A directory that does not exist or is empty. It appears when all is written and checked.
        solver: A name of ``niwaki.layer.solvers.SOLVERS``, or a solver; by default continuation.
        method: What to call the solver in the record; by default its name.
        effort: A name of ``EFFORTS``, with parameters as in "best:epochs=3", or an effort: what is
            done for the whole model, and for matrices and blocks to fit together. By default "balanced", and where
            a solver or a mask is given "fast": methods as they were published.
        sparsity: Fraction of zeros in the matrices, in the pattern that the solver's paper uses.
        pattern: A pattern instead, such as "2:4" or ``PerRow(0.6)``.
        mask_from: The name of another solver, or a pruned model, whose mask is to be used. Of a pruned model
            the mask is kept as it is, whatever its pattern. A sparsity or a pattern besides has to be one
            that the mask satisfies: solvers that refine masks (swaps, dsnot) start from it and keep to that.
        quantize: A grid that the remaining weights are put on, such as "int4:128": whole numbers of 4 bits, with a
            scale for each row and 128 inputs; "int8" has one for each row. Kept weights that are 0 there are zeros
            besides those of the pattern. Scales are in ``out/quantization/scales.safetensors``.
        calibration: A text (see :mod:`niwaki.models.text`), windows of one, or (samples, length) int64 tokens.
        samples: Windows of calibration text.
        length: Tokens in a window; by default 2,048, or what the model has positions for if fewer.
        order: "first" or "random" windows of the text.
        seed: For random windows.
        text: What to measure perplexity on, as ``calibration``; by default the calibration text behind
            the calibration windows.
        text_samples: How many windows of it.
        measure: Perplexity "both" before and after, only "after", or "none".
        device: "cpu", "cuda", "cuda:1"...; "auto" is a GPU if there is one.
        dtype: What blocks run in: "float32", "bfloat16", "float16"; "auto" is float32 on CPU and the
            checkpoint's on a GPU. Gram matrices and solvers always use float32.
        tf32: Where GPUs may round the factors of float32 products to TF32: "auto" for Gram matrices of
            half-precision activations, where that changes no factor; "always" for all products, those of
            blocks in float32 among them; "never". Factorisations and inverses never use it.
        blocks: Only those from the first number to before the second one are pruned.
        memory: Bytes that the process may have, as far as hidden states decide it: what would go beyond that
            is kept in a file in the system's temporary directory.
        record_to: Also write the record to this file.
        restart: Discard what a run that was stopped has left for ``out``, instead of going on with it.
        command: The command line, for the record.
        progress: Is told how it goes.
        world: The processes that prune together, see :mod:`niwaki.models.processes`; by default this one alone.

    Returns:
        The record, which is also in ``out/niwaki.json``.

    Raises:
        NiwakiError: see :mod:`niwaki.errors`. Before the first block is done nothing is left behind then;
            later the same call goes on behind the last block that is done.
    """
    clock = Clock()
    world = world or World()
    progress = progress if progress and world.first else Progress()
    if effort is None:
        effort = usual_effort(solver, mask_from)
    effort = make_effort(effort) if isinstance(effort, str) else effort
    if solver is None:
        solver = DEFAULT_SOLVER
    method = method or (solver if isinstance(solver, str) else type(solver).__name__.lower())
    solver = make_solver(solver) if isinstance(solver, str) else solver
    grid = parse_grid(quantize) if isinstance(quantize, str) else quantize
    if order not in ("first", "random"):
        raise UsageError(f"the order of windows is first or random; got {order!r}")
    check_tf32(tf32)
    if text_samples < 1 or samples < 1:
        raise UsageError(f"samples must be 1 or more; got {min(samples, text_samples)}")
    wanted = wanted_pattern(solver, sparsity, pattern)
    mask_model = mask_from
    if mask_from is not None and not Path(mask_from).expanduser().is_dir() and "/" not in mask_from:
        try:
            solver, mask_model = MaskThenUpdate(make_solver(mask_from), solver), None
        except UnknownNameError as error:
            raise UsageError(f"there is no directory {mask_from} to take masks from, and {error}") from None
    source_path = locate_model(str(model))
    out_path = Path(out)
    if world.first:
        out_path = check_output(source_path, out_path, Path(record_to) if record_to is not None else None)

    checkpoint = Checkpoint(source_path)
    room = MemoryBudget()
    streamed = StreamedModel(checkpoint, device, dtype, room)
    chosen = _chosen(blocks, len(streamed.blocks))
    streamed.limit(chosen)
    if memory is not None:
        room.limit(max(0, memory - _needed(streamed, effort, grid)))
    if grid:
        grid.check(matrix.shape[1] for matrix in streamed.matrices())
    pattern_of = patterns_of(wanted, mask_model, streamed)
    length, note = streamed.window_length(length)
    notes = [*streamed.notes, *([note] if note else [])]
    used = tf32 if has_tf32(streamed.device) else "never"
    if tf32 == "always" and used == "never":
        notes.append(f"--tf32 always has no effect: {streamed.device} has no TF32, products are in float32")
    windows, held = read_texts(
        source_path, calibration, samples, length, order, seed, text, text_samples, measure, notes
    )
    for tokens in (windows.tokens, *([held.tokens] if held else [])):
        streamed.check(tokens)
    record = Record(
        command=command,
        model=str(model),
        method=method,
        solver=repr(solver),
        effort=repr(effort),
        quantization=str(grid) if grid else None,
        pattern=described(wanted, mask_model),
        mask_from=mask_from,
        calibration=windows.described(seed),
        device=device_name(streamed.device, world),
        dtype=str(streamed.dtype).removeprefix("torch."),
        tf32=used,
        blocks=[chosen.start, chosen.stop] if len(chosen) < len(streamed.blocks) else None,
        flops=float(sum(solver.flops(*matrix.shape) for matrix in streamed.matrices())),
        versions=versions(),
        notes=notes,
    )
    if grid:
        notes.append(stored_as_usual(grid))
    if record.part:
        notes.append(f"only {record.part} of {len(streamed.blocks)}, counted from 0: no other is pruned")
    asked = {
        "model": fingerprint(checkpoint),
        "mask_from": mask_from and (fingerprint(Checkpoint(locate_model(mask_model))) if mask_model else mask_from),
        "solver": repr(solver),
        "effort": repr(effort),
        "quantize": record.quantization,
        "pattern": str(wanted),
        "calibration": windows.fingerprint(),
        "text": held and held.fingerprint(),
        "measure": measure,
        "blocks": [chosen.start, chosen.stop],
        "device": streamed.device.type,
        "dtype": record.dtype,
        "tf32": record.tf32,
        "versions": record.versions,
    }
    _check_same(asked, world)
    shares = windows, held = _share(windows, world), held and _share(held, world)
    clock.lap("prepare")
    with (
        contextlib.closing(room),
        products(tf32=record.tf32 == "always"),
        workplace(out_path, asked, restart) if world.first else contextlib.nullcontext() as place,
        _told_when_stopped(place, progress, chosen),
    ):
        told = world.told(place.journal if place else Journal({}))
        journal = place.journal if place else told
        if journal.blocks:
            record = dataclasses.replace(Record.from_json(journal.record), command=command, device=record.device)
        if not journal.complete:
            if journal.blocks:
                record.resumed.append(journal.blocks)
                clock.add(record.seconds)
                progress.note(
                    f"going on behind the first {journal.blocks} of {len(streamed.blocks)} blocks, where an "
                    "earlier run was stopped; these run again for their outputs"
                )
            session = Session(record, progress, clock, world, journal, memory)
            run = Walk(streamed, Method(solver, effort, pattern_of, grid), session)
            if place:
                _write(run, place, streamed, grid, shares, measure)
            else:
                run.blocks(*shares, measure)
        record = world.told(record)
        if place:
            place.move()
            if record_to is not None:
                write_json(Path(record_to).expanduser(), record.to_json())
    progress.end(record)
    return record


def _write(
    run: Walk,
    place: Workplace,
    model: StreamedModel,
    grid: Grid | None,
    shares: tuple[Windows, Windows | None],
    measure: Measure,
) -> None:
    """The walk over the blocks and all that is written."""
    record, clock, journal, checkpoint = run.session.record, run.session.clock, place.journal, model.checkpoint
    added = places(checkpoint, model.matrices(), grid) if grid else None
    place.clear([*checkpoint.shards, FOLDER])
    with CheckpointWriter(checkpoint, place.directory, journal.blocks > 0, added) as writer:
        run.blocks(*shares, measure, writer, place)
    place.plan.unlink(missing_ok=True)
    clock.lap("write")
    record.notes += place.carry_over(checkpoint)
    write_config(place.directory, checkpoint.config, record)
    card.write(place.directory, record)
    verify(place.directory, checkpoint, journal.zeros)
    if grid:
        verify_grid(place.directory, model.matrices(), grid)
    clock.lap("check")
    record.seconds = {**clock.seconds, "total": clock.total()}
    write_json(place.directory / "niwaki.json", record.to_json())
    place.save(record=record.to_json(), complete=True)


@contextlib.contextmanager
def _told_when_stopped(place: Workplace | None, progress: Progress, chosen: range) -> Iterator[None]:
    """Tells what stays of a run that ends early, if anything does."""
    try:
        yield
    except BaseException:
        if place and place.has_more_to_come:
            progress.stopped(place.journal.blocks - chosen.start, len(chosen))
        raise


def _share(windows: Windows, world: World) -> Windows:
    return dataclasses.replace(windows, tokens=world.share(windows.tokens))


def _check_same(asked: dict[str, Any], world: World) -> None:
    """Raises UsageError where the processes were not asked for the same."""
    for rank, other in enumerate(world.collected(asked)):
        differing = [name for name in asked if asked[name] != other[name]]
        if differing:
            raise UsageError(
                f"process {rank} was asked for another run than process {world.rank}: they differ in "
                f"{', '.join(differing)}"
            )


def _chosen(blocks: tuple[int, int] | None, count: int) -> range:
    """The blocks to prune.

    Raises:
        UsageError: there are no such blocks.
    """
    start, stop = blocks or (0, count)
    if not 0 <= start < stop <= count:
        raise UsageError(f"{start}:{stop} is no range of blocks here; the model's are 0:{count}")
    return range(start, stop)


def _needed(model: StreamedModel, effort: Effort, grid: Grid | None) -> int:
    """Bytes that a run takes without its hidden states, estimated from above: solvers differ."""
    largest = max(model.matrices(), key=lambda matrix: matrix.shape[0] * matrix.shape[1])
    rows, columns = largest.shape
    solving = 4 * (2 * columns**2 + 7 * rows * columns)
    blocks = [model.matrices(index) for index in range(len(model.blocks))]
    grams = max(sum(4 * matrix.shape[1] ** 2 for matrix in matrices) for matrices in blocks)
    if effort.dense_targets:
        grams *= 2
    # Its weights, which are not there while matrices are solved, and activations; for the dense model's states those
    # weights once more.
    running = (3 if effort.dense else 2) * model.block_size
    weights = max(sum(math.prod(matrix.shape) for matrix in matrices) for matrices in blocks)
    copies = COPIES + 1 if grid else COPIES  # on the grid
    fitting = model.block_size + copies * 4 * weights if effort.epochs else 0
    return resident() + max(grams + max(running, solving), fitting)
