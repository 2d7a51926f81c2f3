"""Structured pruning: blocks, heads or neurons out, a smaller dense model on disk."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path

from torch import Tensor

from niwaki import __version__, shrink_card
from niwaki.alike import check_alike, check_outputs
from niwaki.blocks import TOKENS_PER_BATCH, Block, StreamedModel
from niwaki.calibration import Order, Windows
from niwaki.checkpoint import Checkpoint, carry_over, locate_model
from niwaki.depth import check_count, configuration, influences, kept_blocks
from niwaki.distributed import World
from niwaki.errors import NiwakiError, UnsupportedModelError, UsageError
from niwaki.output import Workplace, check_output, fingerprint, workplace
from niwaki.perplexity import perplexity
from niwaki.pipeline import DEFAULT_TEXT_SAMPLES, device_name, read_texts
from niwaki.precision import products
from niwaki.problem import LayerProblem
from niwaki.progress import Progress
from niwaki.record import versions, write_json
from niwaki.reshape import ReshapingWriter, targets, verify
from niwaki.shrink_record import DroppedRecord, ShrinkRecord
from niwaki.states import States
from niwaki.structured import drop_units
from niwaki.units import Cut, heads_cut, neurons_cut
from niwaki.walk import Clock, Measure, peak_memory


def shrink(
    model: str | Path,
    out: str | Path,
    *,
    blocks: int = 0,
    neurons: float = 0.0,
    heads: float = 0.0,
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
    restart: bool = False,
    command: str = "",
    progress: Progress | None = None,
) -> ShrinkRecord:
    """Writes a smaller dense model to directory ``out``, which transformers loads as any other.

    Blocks go first, those of the lowest influence (:func:`niwaki.depth.influences`). Then, block by block and with
    the inputs that what is left before it gives, heads and neurons go whose absence costs the outputs of o_proj and
    down_proj least, and these two are fitted without them (:func:`niwaki.structured.drop_units`). All else stays.

    Args:
        model: A directory with config.json and safetensors, or a Hugging Face hub id.
        out: A directory that does not exist or is empty. It appears when all is written and checked.
        blocks: How many decoder blocks to drop.
        neurons: Fraction of the MLP neurons of each block to drop.
        heads: Fraction of the attention heads of each block to drop; of heads that share keys and values whole
            groups, if that comes out even, or else as many of each group.
        calibration: As in :func:`niwaki.prune`, and so are all arguments that follow.
        samples: Windows of calibration text.
        length: Tokens in a window.
        order: "first" or "random" windows of the text.
        seed: For random windows.
        text: What to measure perplexity on.
        text_samples: How many windows of it.
        measure: Perplexity "both" before and after, only "after", or "none".
        device: Where blocks run.
        dtype: What they run in.
        record_to: Also write the record to this file.
        restart: Discard what another run that was stopped has left for ``out``.
        command: The command line, for the record.
        progress: Is told how it goes.

    Returns:
        The record, which is also in ``out/niwaki.json``.

    Raises:
        NiwakiError: see :mod:`niwaki.errors`. Nothing is left behind then.
    """
    clock, progress = Clock(), progress or Progress()
    for name, fraction in (("--neurons", neurons), ("--heads", heads)):
        if not 0 <= fraction < 1:
            raise UsageError(f"{name} is a fraction, from 0 to below 1; got {fraction:g}")
    if not (blocks or neurons or heads):
        raise UsageError("there is nothing to drop; give --blocks, --neurons or --heads")
    if order not in ("first", "random"):
        raise UsageError(f"the order of windows is first or random; got {order!r}")
    if text_samples < 1 or samples < 1:
        raise UsageError(f"samples must be 1 or more; got {min(samples, text_samples)}")
    source_path = locate_model(str(model))
    out_path = check_output(source_path, Path(out), Path(record_to) if record_to is not None else None)
    checkpoint = Checkpoint(source_path)
    streamed = StreamedModel(checkpoint, device, dtype)
    check_count(streamed, blocks)
    cuts = [make(streamed, part) for make, part in ((heads_cut, heads), (neurons_cut, neurons)) if part]
    length, note = streamed.window_length(length)
    notes = [*streamed.notes, *([note] if note else [])]
    windows, held = read_texts(
        source_path, calibration, samples, length, order, seed, text, text_samples, measure, notes
    )
    for tokens in (windows.tokens, *([held.tokens] if held else [])):
        streamed.check(tokens)
    record = ShrinkRecord(
        command=command,
        model=str(model),
        blocks=blocks,
        neurons=neurons,
        heads=heads,
        calibration={
            "source": windows.source,
            "samples": len(windows.tokens),
            "sequence_length": windows.tokens.shape[1],
            "order": windows.order,
            "seed": seed,
            "tokens_sha256": windows.fingerprint(),
        },
        device=device_name(streamed.device, World()),
        dtype=str(streamed.dtype).removeprefix("torch."),
        versions=versions(),
        notes=notes,
    )
    asked = {
        "model": fingerprint(checkpoint),
        "shrink": [blocks, neurons, heads],
        "calibration": windows.fingerprint(),
        "text": held and held.fingerprint(),
        "measure": measure,
        "device": streamed.device.type,
        "dtype": record.dtype,
    }
    for note in notes:
        progress.note(note)
    clock.lap("prepare")
    with products(tf32=False), workplace(out_path, asked, restart) as place:
        if place.journal.complete:  # it was stopped just before it had its name
            record = ShrinkRecord.from_json(place.journal.record)
        else:
            run = _Run(streamed, cuts, record, clock, progress)
            run.write(place, windows, held, measure)
        place.move()
        if record_to is not None:
            write_json(Path(record_to).expanduser(), record.to_json())
    return record


class _Run:
    def __init__(
        self, model: StreamedModel, cuts: list[Cut], record: ShrinkRecord, clock: Clock, progress: Progress
    ) -> None:
        self._model = model
        self._cuts = cuts
        self._record = record
        self._clock = clock
        self._progress = progress

    def write(self, place: Workplace, windows: Windows, held: Windows | None, measure: Measure) -> None:
        """All that is computed and written, up to the point where only the name is missing."""
        model, record, clock = self._model, self._record, self._clock
        checkpoint = model.checkpoint
        if held and measure == "both":
            self._measure("before", model, held)
        if record.blocks:
            record.influence = influences(model, model.embed(windows.tokens), self._progress)
        record.kept = kept_blocks(record.influence or [0.0] * len(model.blocks), record.blocks)
        clock.lap("score")
        meant = targets(model, record.kept, self._cuts)
        record.parameters = {
            "before": sum(math.prod(entry.shape) for entry in checkpoint.entries.values()),
            "after": sum(math.prod(target.shape) for target in meant.values()),
        }
        place.clear([])
        left = carry_over(checkpoint.path, place.directory, checkpoint.shards)
        if left:
            record.notes.append(f"not carried over, because they hold the dense weights: {', '.join(left)}")
        self._write_config(place.directory)
        with ReshapingWriter(checkpoint, place.directory, meant) as writer:
            smaller = self._smaller(place.directory)
            states = self._walk(windows, writer)
        clock.lap("write")
        verify(place.directory, checkpoint, meant)
        check_outputs(smaller, states)
        clock.lap("check")
        if held:
            self._measure("after", smaller, held)
        record.peak_memory = peak_memory(model.device)
        shrink_card.write(place.directory, record)
        record.seconds = {**clock.seconds, "total": clock.total()}
        write_json(place.directory / "niwaki.json", record.to_json())
        place.save(record=record.to_json(), complete=True)

    def _write_config(self, directory: Path) -> None:
        record = self._record
        changes = {name: value for cut in self._cuts for name, value in cut.config.items()}
        config = configuration(self._model, record.kept, changes)
        config["pruning_config"] = {
            "library": "niwaki",
            "version": __version__,
            "method": "shrink",
            "blocks": [index for index in range(len(self._model.blocks)) if index not in record.kept],
            "neurons": record.neurons,
            "heads": record.heads,
        }
        write_json(directory / "config.json", json.dumps(config, indent=2) + "\n")

    def _smaller(self, directory: Path) -> StreamedModel:
        """The model in ``directory``, whose tensors have their shapes already.

        Raises:
            UnsupportedModelError: it is not what was meant.
        """
        model = self._model
        try:
            smaller = StreamedModel(
                Checkpoint(directory), str(model.device), str(model.dtype).removeprefix("torch.")
            )
            check_alike(model, smaller, self._record.kept)
        except NiwakiError as error:
            kind = model.checkpoint.config.get("model_type")
            reason = str(error).replace(str(directory), "the smaller one")
            raise UnsupportedModelError(
                f"{model.checkpoint.path} ({kind}) cannot become smaller like this: {reason}"
            ) from error
        return smaller

    def _walk(self, windows: Windows, writer: ReshapingWriter) -> States:
        """Drops and writes; the states behind the last block of the large model, with zeros for what was dropped."""
        tokens = windows.tokens
        if not self._cuts:  # only to know what the outputs should be
            tokens = tokens[: max(1, TOKENS_PER_BATCH // tokens.shape[1])]
        states = self._model.embed(tokens)
        last = self._record.kept[-1]
        for block in self._model.stream():
            if block.index not in self._record.kept:
                continue
            for cut in self._cuts:
                self._drop(block, cut, states, writer)
            self._progress.stage(block.index, "advance", len(states.hidden))
            block.advance(states, self._progress.step)
            self._clock.lap("advance")
            if block.index == last:
                break
        return states

    def _drop(self, block: Block, cut: Cut, states: States, writer: ReshapingWriter) -> None:
        site, checkpoint = cut.sites[block.index], self._model.checkpoint
        matrix = site.matrix
        self._progress.stage(block.index, cut.kind, len(states.hidden))
        (inputs,) = block.input_grams(states, self._progress.step, matrices=[matrix])
        self._clock.lap("capture")
        began = time.perf_counter()
        try:
            problem = LayerProblem(block.weight(matrix), inputs.H)
            found = drop_units(problem, cut.size, cut.count, cut.parts)
        except NiwakiError as error:
            raise type(error)(f"block {block.index} {matrix.name}: {error}") from error
        stored = block.stored(matrix, found.W)
        block.put(matrix, stored)
        seconds = time.perf_counter() - began
        self._clock.lap("solve")
        kept = cut.columns(found.units)
        writer.write(matrix.key, stored.cpu().index_select(0 if matrix.transposed else 1, kept))
        for source in site.sources:
            rows = source.rows(kept, matrix.shape[1])
            writer.write(source.key, checkpoint.read(source.key).index_select(source.dimension, rows))
        self._clock.lap("write")
        self._record.dropped.append(
            DroppedRecord(
                block.index,
                cut.kind,
                matrix.name,
                cut.unit,
                cut.units,
                found.units,
                found.error,
                found.alone if cut.kind == "heads" else [],
                found.damping,
                inputs.tokens,
                seconds,
            )
        )

    def _measure(self, name: str, model: StreamedModel, held: Windows) -> None:
        found = perplexity(
            model, held, lambda block, blocks: self._progress.stage(block - 1, "perplexity", blocks)
        )
        self._record.perplexity[name] = dataclasses.asdict(found)
        self._clock.lap("perplexity")
