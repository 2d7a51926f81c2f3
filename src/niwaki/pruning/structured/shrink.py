"""Structured pruning: fewer blocks, attention heads or neurons, and a smaller dense model on disk."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from niwaki.errors import NumericalError, UsageError
from niwaki.files import write_json
from niwaki.layer.problem import LayerProblem
from niwaki.layer.tf32 import products
from niwaki.layer.unit_removal import DAMPING, flops, remove_units
from niwaki.models.block import DecoderBlock
from niwaki.models.checkpoint import Checkpoint, locate_model
from niwaki.models.device import device_name, peak_memory
from niwaki.models.hidden_states import HiddenStates
from niwaki.models.output import Workplace, check_output, fingerprint, workplace, write_config
from niwaki.models.perplexity import perplexity
from niwaki.models.processes import World
from niwaki.models.shards import Shards
from niwaki.models.streamed import TOKENS_PER_BATCH, StreamedModel
from niwaki.models.text import Texts, Windows
from niwaki.options import Calibration, Compute, Measurement, Text
from niwaki.pruning import card
from niwaki.pruning.masks import named
from niwaki.pruning.prune import USUAL_WINDOWS
from niwaki.pruning.session import current_session
from niwaki.pruning.structured.configuration import (
    check_outputs,
    check_structure,
    configuration,
    tensors_of_blocks,
)
from niwaki.pruning.structured.units import Cut, heads_cut, neurons_cut
from niwaki.records.clock import Clock
from niwaki.records.progress import Progress
from niwaki.records.record import MatrixRecord, Record, StructureRecord, versions


def shrink(
    model: str | Path,
    out: str | Path,
    *,
    blocks: int = 0,
    neurons: float = 0.0,
    heads: float = 0.0,
    calibration: Calibration | Text = Calibration(),
    measurement: Measurement | Text | None = Measurement(),
    compute: Compute | str = Compute(),
    restart: bool = False,
    progress: Progress | None = None,
) -> Record:
    """Writes a smaller dense model to directory ``out``, which transformers loads as any other.

    Blocks go first, those of the lowest influence (:func:`influences`). Then, block by block and with the inputs
    that what is left before it gives, heads and neurons go whose absence costs the outputs of o_proj and down_proj
    least, and these two are fitted without them (:func:`niwaki.layer.unit_removal.remove_units`). All else stays.

    Args:
        model: A directory with config.json and safetensors, or a Hugging Face hub id.
        out: A directory that does not exist or is empty. It appears when all is written and checked.
        blocks: How many decoder blocks to remove.
        neurons: Fraction of the MLP neurons of each block to remove.
        heads: Fraction of the attention heads of each block to remove; those that share keys and values go together.
        calibration: As in :func:`niwaki.prune`, and so are all arguments that follow.
        measurement: What to measure perplexity on.
        compute: Where blocks run; ``tf32`` and ``memory`` are not used.
        restart: Discard what another interrupted run has left for ``out``.
        progress: Receives how it goes.

    Returns:
        The record, which is also in ``out/niwaki.json``.

    Raises:
        NiwakiError: see :mod:`niwaki.errors`. Nothing is left behind then.
    """
    clock, progress, session = Clock(), progress or Progress(), current_session()
    calibration, measurement, compute = Calibration.of(calibration), Measurement.of(measurement), Compute.of(compute)
    measurement.only_text("shrink")
    compute.only("shrink", "device", "dtype")
    for name, fraction in (("--neurons", neurons), ("--heads", heads)):
        if not 0 <= fraction < 1:
            raise UsageError(f"{name} is a fraction, from 0 to below 1; got {fraction:g}")
    if not (blocks or neurons or heads):
        raise UsageError("there is nothing to remove; give --blocks, --neurons or --heads")
    source_path = locate_model(str(model))
    out_path = check_output(source_path, Path(out))
    checkpoint = Checkpoint(source_path)
    streamed = StreamedModel(checkpoint, compute.device, compute.dtype)
    depth = len(streamed.blocks)
    if not 0 <= blocks < depth:
        raise UsageError(f"--blocks {blocks} of {depth}: from 0 to {depth - 1} can go")
    cuts = [make(streamed, part) for make, part in ((heads_cut, heads), (neurons_cut, neurons)) if part]
    progress.status("reading the text to calibrate on")
    texts = Texts.read(streamed, calibration, measurement, USUAL_WINDOWS)
    windows, held = texts.calibration, texts.only
    gone = [f"{blocks} of {depth} blocks"] if blocks else []
    gone += [f"{100 * cut.count / cut.units:.3g} % of the {cut.kind} of each block" for cut in cuts]
    record = Record(
        command=session.command,
        model=str(model),
        method="shrink",
        solver=f"Shrink(blocks={blocks}, neurons={neurons:g}, heads={heads:g}, damping={DAMPING:g})",
        pattern=", ".join(gone),
        mask_from=None,
        calibration=windows.described(calibration.seed),
        device=device_name(streamed.device, World()),
        dtype=str(streamed.dtype).removeprefix("torch."),
        flops=(depth - blocks) * sum(flops(*cut.sites[0].matrix.shape, removed=cut.size * cut.count) for cut in cuts),
        versions=versions(),
        notes=[*streamed.notes, *texts.notes],
    )
    asked = {
        "model": fingerprint(checkpoint),
        "solver": record.solver,
        "calibration": windows.fingerprint(),
        "text": held and held.fingerprint(),
        **({} if measurement.before else {"measure": "after"}),
        "device": streamed.device.type,
        "dtype": record.dtype,
        "versions": record.versions,
    }
    clock.lap("prepare")
    with products(tf32=False), workplace(out_path, asked, restart) as place:
        if place.journal.complete:  # it was stopped just before it had its name
            record = Record.from_json(place.journal.record)
        else:
            _Run(streamed, cuts, record, clock, progress, measurement.before).write(place, windows, held, blocks)
        place.move()
    progress.end(record)
    return record


def influences(model: StreamedModel, states: HiddenStates, progress: Progress) -> list[float]:
    """The influence of each block: 1 - the mean cosine of its input and output over the tokens.

    Cost: a forward pass; ``states``, the inputs of the first block, are those behind the last block then.

    Reference: ShortGPT, arXiv 2403.03853, eq. 1. Differences: none known.

    Raises:
        NumericalError: a block's outputs are not finite.
    """
    found = []
    for block in model.stream():
        progress.stage(block.index, "influence", len(states.hidden))
        total, tokens = 0.0, 0
        for i in range(len(states.hidden)):
            before = states.hidden[i]
            with torch.no_grad():
                after = block.run(before, states).to(before.dtype)
            cosines = nn.functional.cosine_similarity(before.float(), after.float(), dim=-1)
            total += float(cosines.sum(dtype=torch.float64))
            tokens += cosines.numel()
            states.hidden[i] = after
            progress.step()
        if not math.isfinite(total):
            raise NumericalError(
                f"block {block.index}: its outputs are NaN or infinite on the calibration text; try --dtype float32"
            )
        found.append(1 - total / tokens)
    return found


def lowest(scores: Sequence[float], count: int) -> list[int]:
    """The ``count`` blocks of lowest score, in ascending order; of equal ones the first."""
    return sorted(sorted(range(len(scores)), key=lambda index: scores[index])[:count])


@dataclass
class _Run:
    model: StreamedModel
    cuts: list[Cut]
    record: Record
    clock: Clock
    progress: Progress
    before: bool

    def write(self, place: Workplace, windows: Windows, held: Windows | None, count: int) -> None:
        """All that is computed and written, up to the point where only the name is missing."""
        model, record, clock, directory = self.model, self.record, self.clock, place.directory
        depth = len(model.blocks)
        self.progress.begin(record, depth, (depth - count) * len(self.cuts))
        if held and self.before:
            self._measure("before", model, held)
        influence = influences(model, model.embed(windows.tokens), self.progress) if count else []
        clock.lap("influence")
        removed = lowest(influence, count)
        kept = [index for index in range(depth) if index not in removed]
        outside, blocks = tensors_of_blocks(model)
        place.clear([])
        record.notes += place.carry_over(model.checkpoint)
        write_config(directory, configuration(model, kept, self.cuts), record)
        check_structure(model, directory, kept, self.cuts)
        shards = Shards(directory)
        shards.write(_shard(0, len(kept)), {key: model.checkpoint.read(key) for key in outside})
        record.structure = StructureRecord({}, 0.0, influence, removed)
        clock.lap("write")
        states = self._walk(windows, kept, blocks, shards)
        shards.finish()
        smaller = StreamedModel(Checkpoint(directory), str(model.device), record.dtype)
        check_outputs(smaller, states)
        clock.lap("check")
        if held:
            self._measure("after", smaller, held)
        sizes = [_sizes(found.checkpoint, outside) for found in (model, smaller)]
        record.structure = dataclasses.replace(
            record.structure,
            parameters={"before": sum(sizes[0]), "after": sum(sizes[1])},
            removed=1 - sizes[1][1] / sizes[0][1],
        )
        record.peak_memory = peak_memory(model.device)
        card.write(directory, record)
        record.seconds = {**clock.seconds, "total": clock.total()}
        write_json(directory / "niwaki.json", record.to_json())
        place.save(record=record.to_json(), complete=True)

    def _walk(self, windows: Windows, kept: list[int], blocks: list[dict[str, str]], shards: Shards) -> HiddenStates:
        """Removes and writes; the states behind the last block of the large model, with zeros for what is gone."""
        tokens = windows.tokens
        if not self.cuts:  # only to know what the outputs should be
            tokens = tokens[: max(1, TOKENS_PER_BATCH // tokens.shape[1])]
        states = self.model.embed(tokens)
        for block in self.model.stream():
            if block.index in kept:
                tensors = {key: self.model.checkpoint.read(key) for key in blocks[block.index]}
                for cut in self.cuts:
                    self._remove(block, cut, states, tensors)
                number = kept.index(block.index)
                renamed = {blocks[block.index][key].format(number): value for key, value in tensors.items()}
                shards.write(_shard(1 + number, len(kept)), renamed)
                del tensors
                self.clock.lap("write")
                self.progress.stage(block.index, "advance", len(states.hidden))
                block.advance(states, self.progress.step)
                self.clock.lap("advance")
            if block.index == kept[-1]:
                break
        return states

    def _remove(self, block: DecoderBlock, cut: Cut, states: HiddenStates, tensors: dict[str, Tensor]) -> None:
        """Removes the units of ``cut`` from ``tensors``, and puts zeros into ``block`` for them."""
        site, structure = cut.sites[block.index], self.record.structure
        matrix = site.matrix
        self.progress.stage(block.index, "capture", len(states.hidden))
        (inputs,) = block.input_grams(states, self.progress.step, matrices=[matrix])
        self.clock.lap("capture")
        self.progress.stage(block.index, "solve", 1)
        began = time.perf_counter()
        with named(matrix):
            found = remove_units(LayerProblem(block.weight(matrix), inputs.H), cut.size, cut.count)
            tensors[matrix.key] = block.stored(matrix, found.W)
        block.put(matrix, tensors[matrix.key])
        for part in site.parts:
            key = self.model.layout.key(f"{self.model.path}.{block.index}.{part.name}")
            tensors[key] = part.without(tensors[key].cpu(), found.kept)
        assert structure is not None
        gone = structure.heads if cut.kind == "heads" else structure.neurons
        gone.append((~found.kept).nonzero().squeeze(1).tolist())
        rows, columns = matrix.shape
        done = MatrixRecord(
            block.index,
            matrix.name,
            (rows, columns - cut.size * cut.count),
            0.0,
            found.error,
            time.perf_counter() - began,
            inputs.tokens,
            {"damping_asked": DAMPING, "damping": found.damping},
        )
        self.record.matrices.append(done)
        self.progress.solved(done)
        self.clock.lap("solve")

    def _measure(self, name: str, model: StreamedModel, held: Windows) -> None:
        found = perplexity(model, held, lambda block, _: self.progress.stage(block - 1, "perplexity", 1))
        self.record.perplexity[name] = dataclasses.asdict(found)
        self.clock.lap("perplexity")


def _shard(number: int, blocks: int) -> str:
    """The file of a block, from 1, or of all that is outside of blocks, 0."""
    return f"model-{1 + number:05}-of-{1 + blocks:05}.safetensors"


def _sizes(checkpoint: Checkpoint, outside: Sequence[str]) -> tuple[int, int]:
    """Parameters (outside of blocks, in blocks)."""
    found = {key: math.prod(entry.shape) for key, entry in checkpoint.entries.items()}
    others = sum(found[key] for key in outside)
    return others, sum(found.values()) - others
