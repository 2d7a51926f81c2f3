"""The pipeline: blocks x calibration x solver -> checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from niwaki import card
from niwaki.blocks import Block, InputGram, Matrix, StreamedModel
from niwaki.calibration import Order, Windows, load_tokenizer, read_windows
from niwaki.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    carry_over,
    locate_model,
    verify,
)
from niwaki.errors import NiwakiError, PatternError, UsageError
from niwaki.output import check_output, output_directory, write_config
from niwaki.patterns import Fixed, Pattern, Unstructured, parse_pattern
from niwaki.perplexity import Perplexity
from niwaki.problem import Gram, LayerProblem, Monitor
from niwaki.progress import Progress
from niwaki.record import MatrixRecord, Record, versions, write_json
from niwaki.solvers import DEFAULT_SOLVER, MaskThenUpdate, Solver, make_solver

#: Windows for the perplexity before and after, behind those of the calibration.
DEFAULT_TEXT_SAMPLES = 16

Measure = Literal["both", "after", "none"]
PatternOf = Callable[[Matrix], Pattern]


def prune(
    model: str | Path,
    out: str | Path,
    *,
    solver: str | Solver = DEFAULT_SOLVER,
    method: str | None = None,
    sparsity: float | None = None,
    pattern: str | Pattern | None = None,
    mask_from: str | None = None,
    calibration: str | Tensor = "c4",
    samples: int = 128,
    length: int | None = None,
    order: Order = "first",
    seed: int = 0,
    text: str | Tensor | None = None,
    text_samples: int = DEFAULT_TEXT_SAMPLES,
    measure: Measure = "both",
    device: str = "auto",
    dtype: str = "auto",
    record_to: str | Path | None = None,
    command: str = "",
    progress: Progress | None = None,
) -> Record:
    """Prunes the model in directory ``model`` and writes the result to directory ``out``.

    One decoder block is in memory at a time, with its Gram matrices and the hidden states of the
    calibration text. Embeddings, norms and the head are copied.

    Args:
        model: A directory with config.json and safetensors, or a Hugging Face hub id.
        out: A directory that does not exist or is empty. It appears when all is written and checked.
        solver: A name of ``niwaki.solvers.SOLVERS``, or a solver.
        method: What to call the solver in the record; by default its name.
        sparsity: Fraction of zeros in every matrix, in the pattern that the solver's paper uses.
        pattern: A pattern instead, such as "2:4" or ``PerRow(0.6)``.
        mask_from: The name of another solver, or a pruned model, whose mask is to be used. Of a pruned model
            the mask is kept as it is, whatever its pattern. A sparsity or a pattern besides has to be one
            that the mask satisfies: solvers that refine masks (swaps, dsnot) start from it and keep to that.
        calibration: A text (see :mod:`niwaki.calibration`), or (samples, length) int64 tokens.
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
        record_to: Also write the record to this file.
        command: The command line, for the record.
        progress: Is told how it goes.

    Returns:
        The record, which is also in ``out/niwaki.json``.

    Raises:
        NiwakiError: see :mod:`niwaki.errors`; nothing is left behind then.
    """
    clock = _Clock()
    progress = progress or Progress()
    method = method or (solver if isinstance(solver, str) else type(solver).__name__.lower())
    solver = make_solver(solver) if isinstance(solver, str) else solver
    if order not in ("first", "random"):
        raise UsageError(f"the order of windows is first or random; got {order!r}")
    if text_samples < 1 or samples < 1:
        raise UsageError(f"samples must be 1 or more; got {min(samples, text_samples)}")
    wanted = _pattern(solver, sparsity, pattern)
    mask_model = mask_from
    if mask_from is not None and not Path(mask_from).expanduser().is_dir() and "/" not in mask_from:
        solver, mask_model = MaskThenUpdate(make_solver(mask_from), solver), None
    source_path = locate_model(str(model))
    out_path = check_output(source_path, Path(out), Path(record_to) if record_to is not None else None)

    checkpoint = Checkpoint(source_path)
    streamed = StreamedModel(checkpoint, device, dtype)
    pattern_of = _patterns(wanted, mask_model, streamed)
    length, note = streamed.window_length(length)
    notes = [note] if note else []
    windows, held = _texts(
        source_path, calibration, samples, length, order, seed, text, text_samples, measure, notes
    )
    for tokens in (windows.tokens, *([held.tokens] if held else [])):
        streamed.check(tokens)
    record = Record(
        command=command,
        model=str(model),
        method=method,
        solver=repr(solver),
        pattern=_described(wanted, mask_model),
        mask_from=mask_from,
        calibration={
            "source": windows.source,
            "samples": len(windows.tokens),
            "sequence_length": windows.tokens.shape[1],
            "order": windows.order,
            "seed": seed,
            "tokens_sha256": windows.fingerprint(),
        },
        device=_device_name(streamed.device),
        dtype=str(streamed.dtype).removeprefix("torch."),
        flops=float(sum(solver.flops(*matrix.shape) for matrix in streamed.matrices())),
        versions=versions(),
        notes=notes,
    )
    clock.lap("prepare")
    run = _Run(streamed, solver, pattern_of, record, progress, clock)
    with output_directory(out_path) as directory:
        with CheckpointWriter(checkpoint, directory) as writer:
            run.blocks(writer, windows, held, measure)
        clock.lap("write")
        left = carry_over(source_path, directory, checkpoint.shards)
        if left:
            notes.append(f"not carried over, because they hold the dense weights: {', '.join(left)}")
        write_config(directory, checkpoint, record)
        card.write(directory, record)
        verify(directory, checkpoint, run.zeros)
        clock.lap("check")
        _finish(record, clock, streamed.device)
        write_json(directory / "niwaki.json", record.to_json())
    if record_to is not None:
        write_json(Path(record_to).expanduser(), record.to_json())
    progress.end(record)
    return record


class _Run:
    """The walk over the blocks."""

    def __init__(
        self,
        model: StreamedModel,
        solver: Solver,
        pattern_of: PatternOf,
        record: Record,
        progress: Progress,
        clock: _Clock,
    ) -> None:
        self._model = model
        self._solver = solver
        self._pattern_of = pattern_of
        self._record = record
        self._progress = progress
        self._clock = clock
        #: By checkpoint key, the number of zeros that was written.
        self.zeros: dict[str, int] = {}

    def blocks(
        self, writer: CheckpointWriter, windows: Windows, held: Windows | None, measure: Measure
    ) -> None:
        model, progress, clock = self._model, self._progress, self._clock
        shapes = {(m.block, m.name): m for m in model.matrices()}
        progress.begin(self._record, len(model.blocks), len(model.family.matrices))
        states = model.embed(windows.tokens)
        dense = model.embed(held.tokens) if held and measure == "both" else None
        pruned = model.embed(held.tokens) if held and measure != "none" else None
        clock.lap("capture")
        for block in model.stream():
            clock.lap("read")
            progress.stage(block.index, "capture", len(states.hidden))
            if dense:
                block.advance(dense)
            grams = block.input_grams(states, progress.step)
            clock.lap("capture")
            progress.stage(block.index, "solve", len(model.family.matrices))
            while grams:
                self._solve(block, grams.pop(0), shapes, writer)
            clock.lap("solve")
            last = block.index == len(model.blocks) - 1
            progress.stage(block.index, "advance", len(states.hidden))
            if pruned:
                block.advance(pruned)
            if not last:
                block.advance(states, progress.step)
            clock.lap("advance")
        entries = {m.key: m.shape for m in model.matrices()}
        total = sum(rows * columns for rows, columns in entries.values())
        self._record.sparsity = sum(self.zeros.values()) / total
        for name, end in (("before", dense), ("after", pruned)):
            if held and end:
                measured = Perplexity.of(model.losses(end), held.source)
                self._record.perplexity[name] = dataclasses.asdict(measured)
        clock.lap("perplexity")

    def _solve(
        self, block: Block, inputs: InputGram, shapes: dict[tuple[int, str], Matrix], writer: CheckpointWriter
    ) -> None:
        gram = Gram(inputs.H, shared=len(inputs.names) > 1, mean=inputs.mean)
        for name in inputs.names:
            matrix = shapes[block.index, name]
            began = time.perf_counter()
            with _named(matrix.key):
                problem = LayerProblem(block.weight(name), gram)
                solution = self._solver(problem, self._pattern_of(matrix), self._monitor(name))
                stored = block.replace(name, solution.W)
            writer.write(matrix.key, stored)
            zeros = self.zeros[matrix.key] = stored.numel() - int(stored.count_nonzero())
            done = MatrixRecord(
                block.index,
                name,
                matrix.shape,
                zeros / stored.numel(),
                solution.error,
                time.perf_counter() - began,
                inputs.tokens,
                solution.stats,
            )
            self._note_damping(done)
            self._record.matrices.append(done)
            self._progress.solved(done)
            self._progress.step()

    def _monitor(self, name: str) -> Monitor | None:
        if not self._progress.wants_steps:
            return None
        return lambda step, steps, error: self._progress.solving(name, step, steps, error)

    def _note_damping(self, matrix: MatrixRecord) -> None:
        asked, used = matrix.stats.get("damping_asked"), matrix.stats.get("damping")
        if isinstance(asked, float) and isinstance(used, float) and used > asked * 1.01 + 1e-6:
            note = (
                f"block {matrix.block} {matrix.name}: damping raised from {asked:g} to {used:g}, "
                "because the Gram matrix is close to singular"
            )
            self._record.notes.append(note)
            self._progress.note(note)


class _Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self.seconds: dict[str, float] = defaultdict(float)

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] += now - self._last
        self._last = now

    def total(self) -> float:
        return time.perf_counter() - self._began


def _pattern(solver: Solver, sparsity: float | None, pattern: str | Pattern | None) -> Pattern | None:
    if sparsity is not None and pattern is not None:
        raise UsageError("give a sparsity or a pattern, not both")
    if sparsity is not None:
        return solver.default_pattern(sparsity)
    return parse_pattern(pattern) if isinstance(pattern, str) else pattern


def _patterns(wanted: Pattern | None, mask_model: str | None, streamed: StreamedModel) -> PatternOf:
    """The pattern of each matrix: the same for all, or the mask that it has in another model.

    With both, the mask may be refined within the pattern, and all masks are looked at first: an error in
    the last block should not come after hours.

    Raises:
        UsageError: there is neither, or the pattern does not fit the matrices or their masks.
    """
    matrices = streamed.matrices()
    if wanted is not None:
        for matrix in matrices:
            with _named(matrix.key):
                wanted.check(matrix.shape)
    if mask_model is None:
        if wanted is None:
            raise UsageError("say how sparse: --sparsity 0.6, or a pattern such as --pattern 2:4")
        return lambda _: wanted
    lender = Checkpoint(locate_model(mask_model))
    for matrix in matrices:
        if matrix.key not in lender or lender.entries[matrix.key].shape != matrix.shape:
            raise UsageError(f"{mask_model} cannot lend its mask: no {matrix.key!r} of shape {matrix.shape}")
    if wanted is not None:
        for matrix in matrices:
            with _named(matrix.key):
                _check_mask(lender.read(matrix.key) != 0, wanted, mask_model)
    return lambda matrix: Fixed((lender.read(matrix.key) != 0).to(streamed.device), wanted)


def _check_mask(mask: Tensor, pattern: Pattern, source: str) -> None:
    """Raises PatternError, with what differs, where ``pattern`` does not allow ``mask``."""
    # Of scores 1 for kept and 0 for pruned weights a mask that is allowed is the best.
    nearest = pattern.mask(mask.float())
    if torch.equal(nearest, mask):
        return
    zeros, asked = (values.numel() - int(values.count_nonzero()) for values in (mask, nearest))
    if zeros != asked:
        share = 100 * zeros / mask.numel()
        what = f"has {zeros} zeros of {mask.numel()} ({share:.4g} %), and {pattern} asks for {asked}"
        other = ""
    else:
        row, column = (nearest != mask).nonzero()[0].tolist()
        first, width = column - column % pattern.group, pattern.group
        where = f"row {row}" if width == 1 else f"row {row}, columns {first} to {first + width - 1}"
        what = f"has as many zeros as {pattern} asks for, but in other places, first in {where}"
        other = f", or {Unstructured(pattern.sparsity)}"
    raise PatternError(
        f"the mask of {source} {what}; try the pattern that it was made for{other}, or none, which keeps the "
        "mask as it is"
    )


def _described(wanted: Pattern | None, mask_model: str | None) -> str:
    """The pattern for the record."""
    if mask_model is None:
        return str(wanted)
    return f"the mask of {mask_model}" + (f", within {wanted}" if wanted is not None else "")


def _texts(
    model: Path,
    calibration: str | Tensor,
    samples: int,
    length: int,
    order: Order,
    seed: int,
    text: str | Tensor | None,
    text_samples: int,
    measure: Measure,
    notes: list[str],
) -> tuple[Windows, Windows | None]:
    """The windows to calibrate on and those to measure perplexity on."""
    tokenizer = load_tokenizer(model) if isinstance(calibration, str) or isinstance(text, str) else None
    spare = text_samples if measure != "none" and text is None else 0
    if isinstance(calibration, Tensor):
        windows = Windows(calibration, "given tokens")
    else:
        assert tokenizer is not None
        windows = read_windows(calibration, tokenizer, length, samples, spare=spare, order=order, seed=seed)
        windows, rest = (
            dataclasses.replace(windows, tokens=windows.tokens[:samples]),
            windows.tokens[samples:],
        )
        if spare and len(rest):
            return windows, Windows(rest, f"the text behind the calibration windows of {calibration}", order)
    if measure == "none":
        return windows, None
    if isinstance(text, Tensor):
        return windows, Windows(text, "given tokens")
    if text is not None:
        assert tokenizer is not None
        return windows, read_windows(text, tokenizer, length, 1, spare=text_samples - 1)
    notes.append("perplexity was not measured: no text was given and the calibration text has no more of it")
    return windows, None


@contextlib.contextmanager
def _named(key: str) -> Iterator[None]:
    """Puts the matrix's name before what goes wrong with it."""
    try:
        yield
    except NiwakiError as error:
        if key in str(error):
            raise
        raise type(error)(f"{key}: {error}") from error


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({torch.get_num_threads()} threads)"


def _finish(record: Record, clock: _Clock, device: torch.device) -> None:
    record.seconds = {**clock.seconds, "total": clock.total()}
    if sys.platform != "win32":
        import resource

        # Kilobytes on Linux, bytes on macOS.
        unit = 1 if sys.platform == "darwin" else 1024
        record.peak_memory["resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if device.type == "cuda":
        record.peak_memory["device"] = torch.cuda.max_memory_allocated(device)
