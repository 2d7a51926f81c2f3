"""Structured pruning: fewer blocks, heads, neurons or experts, and a smaller dense model on disk."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from niwaki.arguments import checked
from niwaki.errors import NumericalError, UnsupportedModelError, UsageError, named
from niwaki.layer.problem import LayerProblem
from niwaki.layer.products import products
from niwaki.layer.unit_removal import DAMPING, flops, remove_units
from niwaki.models.answers import with_answers
from niwaki.models.block import DecoderBlock
from niwaki.models.carried import CarriedFiles, find_carried
from niwaki.models.checkpoint.reading import Checkpoint, locate_model
from niwaki.models.checkpoint.shards import Shards
from niwaki.models.device import peak_memory
from niwaki.models.extra import find_extra, generation_without_drafts, notes_of
from niwaki.models.hidden_states import HiddenStates
from niwaki.models.layout import check_dtypes
from niwaki.models.output import Workplace, check_output, workplace, write_config
from niwaki.models.processes import World
from niwaki.models.streamed import TOKENS_PER_BATCH, StreamedModel
from niwaki.models.text import Texts, Windows
from niwaki.options import Calibration, Compute, Measurement, Text, parse_share
from niwaki.pruning import card
from niwaki.pruning.prune import USUAL_WINDOWS
from niwaki.pruning.request import begin_record
from niwaki.pruning.structured.block_tensors import BlockTensors, free
from niwaki.pruning.structured.configuration import check_outputs, configuration, smaller_blocks, tensors_of_blocks
from niwaki.pruning.structured.expert_neurons import ExpertNeuronRemoval, expert_neuron_removal, fit_expert_neurons
from niwaki.pruning.structured.experts import ExpertRemoval, choose_experts, expert_removal, fit_experts
from niwaki.pruning.structured.units import ColumnRemoval, Removal, head_removal, neuron_removal, notes_on
from niwaki.records.progress import Progress
from niwaki.records.record import Clock, MatrixRecord, Record, StructureRecord


@checked
def shrink(
    model: str | Path,
    out: str | Path,
    *,
    blocks: int = 0,
    neurons: float | str = 0.0,
    heads: float | str = 0.0,
    experts: float | str = 0.0,
    expert_neurons: float | str = 0.0,
    calibration: Calibration | Text = Calibration(),
    measurement: Measurement | Text | None = Measurement(),
    compute: Compute | str = Compute(),
    restart: bool = False,
    progress: Progress | None = None,
) -> Record:
    """Writes a smaller dense model to directory ``out``, which transformers loads as any other.

    First the blocks of lowest influence (:func:`influences`) are removed. Then, block by block with the inputs from the
    smaller blocks before it, those heads and neurons whose absence costs the outputs of o_proj and down_proj least, and
    these two are fitted without them (:func:`niwaki.layer.unit_removal.remove_units`), and the experts that contribute
    least, for which the others are fitted (:func:`niwaki.pruning.structured.experts.fit_experts`). All else stays.

    Args:
        model: A directory with config.json and safetensors, or a Hugging Face hub id.
        out: A directory that does not exist or is empty. It appears when all is written and checked.
        blocks: How many decoder blocks to remove.
        neurons: Fraction of the MLP neurons of each block to remove, such as 0.25 or "25 %". Where a block has a
            multiple of 32, the nearest multiple of 32 stays.
        heads: Fraction of the attention heads of each block to remove, those that share keys and values together.
        experts: Fraction of the experts of each block to remove, of a mixture of experts.
        expert_neurons: Fraction of the neurons of each of them to remove, not at the same time; rounded likewise.
        calibration: As in :func:`niwaki.prune`, and so are all arguments that follow.
        measurement: What to measure perplexity on.
        compute: Where blocks run; ``tf32`` and ``memory`` are not used.
        restart: Discard what another interrupted run has left for ``out``. One of this function keeps nothing, and
            starts over.
        progress: Receives how it goes.

    Returns:
        The record, which is also in ``out/niwaki.json``.

    Raises:
        NiwakiError: see :mod:`niwaki.errors`. Nothing is left then.
    """
    clock, progress = Clock(), progress or Progress()
    calibration, measurement, compute = Calibration.of(calibration), Measurement.of(measurement), Compute.of(compute)
    measurement.only_text("shrink")
    compute.only("shrink", "device", "dtype")
    given = {"neurons": neurons, "heads": heads, "experts": experts, "expert_neurons": expert_neurons}
    shares = {name: parse_share(name, value) for name, value in given.items()}
    neurons, heads, experts, expert_neurons = shares.values()
    if not (blocks or any(shares.values())):
        raise UsageError("there is nothing to remove; give blocks, neurons, heads, experts or expert_neurons")
    if experts and expert_neurons:
        raise UsageError("experts and their neurons are removed in two runs, one after the other")
    source = locate_model(str(model))
    target = check_output(source, out)
    checkpoint = Checkpoint(source)
    carried = find_carried(checkpoint, target)
    streamed = StreamedModel(checkpoint, compute.device, compute.dtype)
    depth = len(streamed.blocks)
    if any(matrix.blocks for matrix in streamed.matrices()):
        raise UnsupportedModelError(
            f"{source} has blocks that share weights, of which nothing can be removed; prune it"
        )
    if not 0 <= blocks < depth:
        raise UsageError(f"blocks {blocks} of {depth}: from 0 to {depth - 1} can be removed")
    columns = [make(streamed, share) for make, share in ((head_removal, heads), (neuron_removal, neurons)) if share]
    mixtures: list[ExpertRemoval | ExpertNeuronRemoval] = []
    if experts:
        mixtures.append(expert_removal(streamed, experts))
    if expert_neurons:
        mixtures.append(expert_neuron_removal(streamed, expert_neurons))
    removals = [*columns, *mixtures]
    check_dtypes(checkpoint, (matrix for removal in removals for matrix in removal.matrices))
    progress.status("reading the text to calibrate on")
    written = with_answers(streamed, calibration, compute.budget, World(), progress)
    texts = Texts.read(streamed, written, measurement, USUAL_WINDOWS)
    parts = [f"{100 * each.count / each.units:.3g} % of the {each.kind} of each block" for each in removals]
    record = begin_record(
        str(model),
        streamed,
        texts,
        calibration,
        method="shrink",
        solver={"name": "shrink", "blocks": blocks, **shares, "damping": DAMPING},
        pattern=", ".join([f"{blocks} of {depth} blocks", *parts] if blocks else parts),
        mask_from=None,
        flops=(depth - blocks) * sum(flops(*each.matrices[0].shape, each.size * each.count) for each in columns),
    )
    record.notes += notes_of(streamed, is_smaller=True)
    for each in removals:
        record.notes += notes_on(each, shares[each.kind.replace(" ", "_")])
    clock.lap("prepare")
    asked = _fingerprint(streamed, texts, measurement, record)
    with products(tf32=False), workplace(target, asked, restart) as place:
        if place.journal.complete:  # it was interrupted just before it was moved into place
            record = place.finished_record
        else:
            run = _Run(streamed, columns, mixtures, record, clock, progress, carried)
            try:
                run.write(place, texts, measurement.before, blocks)
            except KeyboardInterrupt:
                if not place.journal.complete:
                    progress.lost()
                raise
        place.move()
    progress.end(record)
    return record


def _fingerprint(model: StreamedModel, texts: Texts, measurement: Measurement, record: Record) -> dict[str, Any]:
    """By name, all that has to be the same for a run that was complete to be moved into place."""
    return {
        "model": model.checkpoint.fingerprint(),
        "solver": record.solver,
        "calibration": texts.windows.fingerprint(),
        "text": texts.only and texts.only.fingerprint(),
        **({} if measurement.before else {"measure": "after"}),
        "device": model.device.type,
        "dtype": record.dtype,
        "versions": record.versions,
    }


def influences(model: StreamedModel, states: HiddenStates, progress: Progress) -> list[float]:
    """The influence of each block: 1 - the mean cosine of its input and output over the tokens.

    ShortGPT, arXiv 2403.03853, eq. 1; differences: none known. Cost: a forward pass, in which ``states``, the inputs of
    the first block, become the outputs of the last one. Raises NumericalError where a block's outputs are not finite.
    """
    influence = []
    for block in model.stream():
        progress.stage(block.index, "influence", len(states.hidden))
        total, tokens = 0.0, 0
        for i in range(len(states.hidden)):
            before = states.hidden[i]
            handed = states.arguments.handed(block.index, i)
            with torch.no_grad():
                after = block.run(before, states, i, handed=handed).to(before.dtype)
            cosines = nn.functional.cosine_similarity(before.float(), after.float(), dim=-1)
            total += float(cosines.sum(dtype=torch.float64))
            tokens += cosines.numel()
            states.hidden[i] = after
            states.arguments.hand_on(block.index, i, handed)
            progress.step()
        if not math.isfinite(total):
            raise NumericalError(
                f"block {block.index}: its outputs are NaN or infinite on the calibration text; try dtype float32"
            )
        influence.append(1 - total / tokens)
    return influence


def lowest(scores: Sequence[float], count: int) -> list[int]:
    """The ``count`` blocks with the lowest scores, in ascending order; of equal ones the first."""
    return sorted(sorted(range(len(scores)), key=lambda index: scores[index])[:count])


@dataclass
class _Run:
    model: StreamedModel
    columns: list[ColumnRemoval]
    mixtures: list[ExpertRemoval | ExpertNeuronRemoval]
    record: Record
    clock: Clock
    progress: Progress
    carried: CarriedFiles
    #: By kind, for each block that stays, the units that were removed.
    removed: dict[str, list[list[int]]] = field(default_factory=lambda: {"heads": [], "neurons": [], "experts": []})

    @property
    def removals(self) -> list[Removal]:
        """All of them."""
        return [*self.columns, *self.mixtures]

    def write(self, place: Workplace, texts: Texts, measure_before: bool, count: int) -> None:
        """Removes ``count`` blocks and all units, and writes everything; then it only has to be moved into place."""
        model, record, clock, directory = self.model, self.record, self.clock, place.directory
        windows, heldout, depth = texts.windows, texts.only, len(self.model.blocks)
        mixed = sum(path is not None for mixture in self.mixtures for path in mixture.paths)
        self.progress.begin(record, depth, (depth - count) * len(self.columns) + mixed)
        if heldout and measure_before:
            self._measure("before", model, heldout)
        influence = influences(model, model.embed(windows.tokens), self.progress) if count else []
        clock.lap("influence")
        dropped = lowest(influence, count)
        kept = [index for index in range(depth) if index not in dropped]
        left = [each for each in find_extra(model) if each.follows]
        outside, blocks = tensors_of_blocks(model, left)
        place.clear([])
        self.carried.copy(directory)
        record.notes += self.carried.notes
        if any(each.is_draft for each in left):
            generation_without_drafts(directory)
        write_config(directory, configuration(model, kept, self.removals, left), record)
        smaller_modules = smaller_blocks(model, directory, kept, self.removals)
        shards = Shards(directory)
        shards.write(_shard(0, kept), {key: model.checkpoint.like(key) for key in outside}, model.checkpoint.read)
        clock.lap("write")
        states = self._walk(windows, dict(zip(kept, smaller_modules, strict=True)), blocks, shards)
        shards.finish()
        smaller = StreamedModel(Checkpoint(directory), str(model.device), record.dtype)
        check_outputs(smaller, states)
        clock.lap("check")
        if heldout:
            self._measure("after", smaller, heldout)
        of_all = (key for keys in (outside, *blocks) for key in keys)
        before, after = _size(model.checkpoint, of_all), _size(smaller.checkpoint, smaller.checkpoint.entries)
        others = _size(model.checkpoint, outside)
        removed = 1 - (after - others) / (before - others)
        parameters = {"before": before, "after": after}
        record.structure = StructureRecord(parameters, removed, influence, dropped, **self.removed)
        record.peak_memory = peak_memory(model.device)
        card.finish(place, record, clock)

    def _walk(
        self, windows: Windows, smaller: dict[int, nn.Module], blocks: list[dict[str, str]], shards: Shards
    ) -> HiddenStates:
        """Removes and writes; the outputs after the last block, with zeros for neurons and heads that were removed.

        ``smaller`` are the blocks to be, by the numbers that they had.
        """
        tokens, kept = windows.tokens, list(smaller)
        if not self.removals:  # some samples are enough to know what the outputs should be
            tokens = tokens[: max(1, TOKENS_PER_BATCH // tokens.shape[1])]
        states = self.model.embed(tokens)
        for block in self.model.stream():
            if block.index not in kept:
                continue
            number = kept.index(block.index)
            tensors = BlockTensors(self.model, block.index, blocks[block.index])
            for removal in self.columns:
                self._remove(block, removal, states, tensors)
            for mixture in self.mixtures:
                if mixture.paths[block.index]:
                    block = self._remove_experts(block, mixture, smaller[block.index], states, tensors)
            tensors.write(number, _shard(1 + number, kept), shards)
            self.clock.lap("write")
            self.progress.stage(block.index, "advance", len(states.hidden))
            block.advance(states, self.progress.step)
            self.clock.lap("advance")
            free(smaller[block.index])
            if block.index == kept[-1]:
                break
        return states

    def _remove(self, block: DecoderBlock, removal: ColumnRemoval, states: HiddenStates, tensors: BlockTensors) -> None:
        """Removes heads or neurons from ``tensors``, and puts zeros into ``block`` for them."""
        matrix = removal.matrices[block.index]
        self.progress.stage(block.index, "capture", len(states.hidden))
        (inputs,) = block.input_grams(states, self.progress.step, matrices=[matrix])
        self.clock.lap("capture")
        self.progress.stage(block.index, "solve", 1)
        began = time.perf_counter()
        with named(matrix.label):
            solution = remove_units(
                LayerProblem(block.weight(matrix), inputs.gram(shared=False)), removal.size, removal.count
            )
            stored = block.stored(matrix, solution.W)
        block.put(matrix, stored)
        tensors.replace(matrix, stored)
        kept = solution.mask[0, :: removal.size]
        tensors.keep(removal, kept)
        self.removed[removal.kind].append((~kept).nonzero().squeeze(1).tolist())
        shape = (matrix.shape[0], matrix.shape[1] - removal.size * removal.count)
        seconds, tokens = time.perf_counter() - began, inputs.tokens
        self._record(
            MatrixRecord(block.index, matrix.name, shape, 0.0, solution.error, seconds, tokens, solution.stats)
        )

    def _remove_experts(
        self,
        block: DecoderBlock,
        removal: ExpertRemoval | ExpertNeuronRemoval,
        smaller: nn.Module,
        states: HiddenStates,
        tensors: BlockTensors,
    ) -> DecoderBlock:
        """Removes experts, or neurons of them, from ``tensors``; the block to go on with.

        That is ``block`` with zeros for neurons, and for experts ``smaller``, in memory instead of it.
        """
        path = str(removal.paths[block.index])
        self.progress.stage(block.index, "capture", len(states.hidden))
        began = time.perf_counter()
        with named(f"block {block.index}, {path}"):
            if isinstance(removal, ExpertRemoval):
                chosen = choose_experts(block, removal, states, self.progress)
                block = tensors.move(block, smaller, removal, chosen.mask)
                fit = fit_experts(block, path, chosen)
                self.removed["experts"].append((~fit.mask).nonzero().squeeze(1).tolist())
            else:
                fit = fit_expert_neurons(block, removal, states, self.progress)
        for matrix, stored in fit.weights:
            tensors.replace(matrix, stored)
        tensors.keep(removal, fit.mask)
        seconds, shape = time.perf_counter() - began, removal.matrices[0].shape
        columns = fit.mask.sum().item() if fit.mask.ndim == 2 else shape[1] * len(fit.weights)
        size = (shape[0], int(columns))
        self._record(MatrixRecord(block.index, path, size, 0.0, fit.error, seconds, fit.tokens, fit.stats))
        return block

    def _record(self, record: MatrixRecord) -> None:
        self.record.matrices.append(record)
        self.progress.solved(record)
        self.clock.lap("solve")

    def _measure(self, name: str, model: StreamedModel, heldout: Windows) -> None:
        progress = self.progress
        self.record.perplexity[name] = model.perplexity(heldout, lambda i, _: progress.stage(i - 1, "perplexity", 1))
        self.clock.lap("perplexity")


def _shard(number: int, kept: Sequence[int]) -> str:
    """The file of a block, from 1, or of everything outside blocks, 0."""
    return f"model-{1 + number:05}-of-{1 + len(kept):05}.safetensors"


def _size(checkpoint: Checkpoint, keys: Iterable[str]) -> int:
    return sum(math.prod(checkpoint.entries[key].shape) for key in keys)
