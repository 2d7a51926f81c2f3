"""The walk over the blocks: inputs in, matrices solved, weights and measurements out."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from niwaki.models.block import DecoderBlock
from niwaki.models.checkpoint import CheckpointWriter
from niwaki.models.device import peak_memory
from niwaki.models.gram_capture import InputGram
from niwaki.models.hidden_states import HiddenStates
from niwaki.models.layout import Matrix
from niwaki.models.output import Journal, Workplace
from niwaki.models.processes import World
from niwaki.models.scales import scale_key
from niwaki.models.streamed import StreamedModel
from niwaki.models.text import Windows
from niwaki.models.training import trained_weights
from niwaki.pruning.fit import batches, fit, tokens_per_part
from niwaki.pruning.masks import PatternOf
from niwaki.pruning.own_text import steps, synthesize
from niwaki.pruning.plan import Plan, plan
from niwaki.pruning.request import Request
from niwaki.pruning.solve import BlockSolver, Solved
from niwaki.records.clock import Clock
from niwaki.records.progress import Progress
from niwaki.records.record import MatrixRecord, Perplexity, Record


@dataclass
class Log:
    """What a run keeps track of.

    Attributes:
        record: What was done.
        progress: Called as the run proceeds.
        clock: Seconds by stage.
        journal: What an earlier run has done.
    """

    record: Record
    progress: Progress
    clock: Clock
    journal: Journal

    def note(self, text: str) -> None:
        """Adds a note to the record, unless it has it from an earlier run that this one resumes."""
        if text not in self.record.notes:
            self.record.notes.append(text)
        self.progress.note(text)


class Streams(NamedTuple):
    """Hidden states on their way through the blocks: of each text in the pruned and in the dense model, if needed."""

    calibration: HiddenStates
    calibration_dense: HiddenStates | None
    heldout: HiddenStates | None
    heldout_dense: HiddenStates | None


class Walk:
    """The walk over the blocks of ``model``.

    Attributes:
        log: What it keeps track of.
    """

    def __init__(self, model: StreamedModel, request: Request, pattern_of: PatternOf, world: World, log: Log) -> None:
        self.log = log
        self._model = model
        self._request = request
        self._world = world
        self._solver = BlockSolver(request, pattern_of, world, log.progress)
        self._writer: CheckpointWriter | None = None
        self._place: Workplace | None = None

    def blocks(
        self,
        windows: Windows,
        heldout: Windows | None,
        writer: CheckpointWriter | None = None,
        place: Workplace | None = None,
    ) -> None:
        """Prunes all blocks; the first process has a ``writer``, and a ``place`` for the journal."""
        model, log, progress, clock = self._model, self.log, self.log.progress, self.log.clock
        self._writer, self._place = writer, place
        done = log.journal.blocks
        stop = model.matrices()[-1].block + 1
        progress.begin(log.record, len(model.blocks) if heldout else stop, len(model.matrices()))
        self._solver.plan = self._planned(windows)
        if self._solver.plan.synthetic is not None:
            own = self._world.share(self._solver.plan.synthetic)
            windows = dataclasses.replace(windows, tokens=torch.cat([windows.tokens, own]))
        clock.lap("plan")
        streams = self._embedded(windows, heldout)
        clock.lap("capture")
        if model.budget.file.size:
            log.note(f"{model.budget.file.size / 2**20:,.1f} MiB of hidden states are in a file, for want of memory")
        for block in model.stream():
            if block.index >= stop and not heldout:
                break
            clock.lap("read")
            last = block.index >= stop - 1
            if streams.heldout_dense:
                block.advance(streams.heldout_dense)
            if block.index >= done and block.matrices:
                self._prune(block, streams, last)
                self._save(block.index + 1)
            else:
                if streams.calibration_dense and not last:
                    block.advance(streams.calibration_dense)
                self._restore(block)
            progress.stage(block.index, "advance", len(streams.calibration.hidden))
            if streams.heldout:
                block.advance(streams.heldout)
            if not last:
                block.advance(streams.calibration, progress.step)
            clock.lap("advance")
        self._measure(streams, heldout)

    def _embedded(self, windows: Windows, heldout: Windows | None) -> Streams:
        """The inputs of the first block, as far as they are needed."""
        effort, measure, embed = self._request.effort, self._request.measure, self._model.embed
        part = tokens_per_part(effort, self._world) if effort.epochs else None
        tokens, dense_tokens = self._divided(windows.tokens)
        calibration = embed(tokens, part)
        calibration_dense = embed(dense_tokens, part) if effort.dense else None
        heldout_dense = embed(heldout.tokens) if heldout and measure == "both" else None
        heldout_pruned = embed(heldout.tokens) if heldout and measure != "none" else None
        return Streams(calibration, calibration_dense, heldout_pruned, heldout_dense)

    def _divided(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(``tokens`` in an order that begins with those for which the dense model's states are needed, these)."""
        share = self._request.effort.epochs
        if self._request.effort.dense_targets or not 0 < share < 1:
            return tokens, tokens
        order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))
        return tokens[order], tokens[order[: max(1, round(share * len(tokens)))]]

    def _planned(self, windows: Windows) -> Plan:
        """The plan for all processes; a resumed run has the one it began with."""
        effort, log, place = self._request.effort, self.log, self._place
        if not effort.plans:
            return Plan()
        if log.journal.blocks:
            return self._world.told(Plan.load(place.plan) if place else Plan())
        pattern_of, tf32 = self._solver.pattern_of, log.record.tf32
        made = plan(self._model, effort, pattern_of, windows.tokens, tf32, self._world, log.progress)
        if effort.synthetic:
            made = dataclasses.replace(made, synthetic=self._synthesized(windows))
        if place:
            made.save(place.plan)
        return made

    def _synthesized(self, windows: Windows) -> Tensor | None:
        """Text of the dense model's own for all processes, if there is memory for it."""
        model, world, log, memory = self._model, self._world, self.log, self._request.compute.budget
        given = sum(world.collected(len(windows.tokens)))
        count = max(world.size, round(self._request.effort.synthetic * given))
        mine = math.ceil(count / world.size)
        log.progress.stage(0, "synthesis", steps(model, windows.tokens.shape[1], mine, memory))
        text = synthesize(model, windows.tokens, count, memory, world, log.progress.step)
        log.record.calibration["synthetic"] = 0 if text is None else count
        if text is None:
            log.note(
                f"the dense model wrote no text to calibrate on: its {model.size / 2**30:,.1f} GiB do not fit in "
                "memory; more --samples of real text do as well"
            )
        return text

    def _prune(self, block: DecoderBlock, streams: Streams, last: bool) -> None:
        """Prunes the matrices of a block, and fits it if the effort says so.

        ``streams.calibration_dense``, the inputs of the dense block, become its outputs, unless this is the last block
        and nothing needs them.
        """
        effort, log, world = self._request.effort, self.log, self._world
        progress, clock = log.progress, log.clock
        states, dense = streams.calibration, streams.calibration_dense
        if dense:
            block.keep_original()
        progress.stage(block.index, "capture", len(states.hidden))
        targets = dense if effort.dense_targets else None
        grams = block.input_grams(states, progress.step, world, log.record.tf32, dense=targets)
        clock.lap("capture")
        borrowed = _borrowed(block, grams)
        progress.stage(block.index, "solve", len(block.matrices))
        self._solver.solve(block, grams, lambda matrix, solved: self._keep(block, matrix, solved))
        clock.lap("solve")
        if block.released:
            self._restore(block)
        clock.lap("write")
        if borrowed:
            log.note(borrowed)
        if dense and (effort.epochs or not last):
            with block.original():
                block.advance(dense)
            clock.lap("advance")
        if dense and effort.epochs:
            progress.stage(block.index, "fit", batches(states, dense, effort, world))
            on_grid = self._solver.nearest if self._request.grid else None
            log.record.fits.append(fit(block, states, dense, effort, world, progress.step, on_grid))
            for key, index, stored in trained_weights(block):
                if self._writer:
                    self._writer.write(key, stored, index)
            clock.lap("fit")

    def _keep(self, block: DecoderBlock, matrix: Matrix, solved: Solved) -> None:
        """Writes a matrix that was solved, and records it."""
        log, (stored, scales, record) = self.log, solved
        log.progress.solved(record)
        if not block.released:
            block.put(matrix, stored)
        if self._writer:
            self._writer.write(matrix.key, stored, matrix.index)
            if scales is not None:
                self._writer.write(scale_key(matrix), scales, matrix.index)
        zeros = stored.numel() - int(stored.count_nonzero())
        log.journal.zeros[matrix.key] = log.journal.zeros.get(matrix.key, 0) + zeros
        self._note_damping(record)
        log.record.matrices.append(record)

    def _note_damping(self, matrix: MatrixRecord) -> None:
        asked, used = matrix.stats.get("damping_asked"), matrix.stats.get("damping")
        if isinstance(asked, float) and isinstance(used, float) and used > asked * 1.01 + 1e-6:
            self.log.note(
                f"block {matrix.block} {matrix.name}: damping raised from {asked:g} to {used:g}, "
                "because the Gram matrix is close to singular"
            )

    def _restore(self, block: DecoderBlock) -> None:
        """Puts the weights into ``block`` that were written for it, by this run or an earlier one."""
        for matrix in block.matrices:
            stored = block.empty(matrix)
            if self._writer:
                stored.copy_(self._writer.read(matrix.key, matrix.index))
            block.put(matrix, self._world.send(stored, 0))

    def _save(self, blocks: int) -> None:
        """Makes sure that a stopped run can be resumed after so many ``blocks``."""
        log = self.log
        if self._writer and self._place:
            self._writer.sync()
            log.record.seconds = dict(log.clock.seconds)
            self._place.save(blocks=blocks, record=log.record.to_json())
        log.clock.lap("write")

    def _measure(self, streams: Streams, heldout: Windows | None) -> None:
        """Puts sparsity, perplexity and memory into the record, after the last block."""
        model, log = self._model, self.log
        weights = sum(math.prod(matrix.shape) for matrix in model.matrices())
        log.record.sparsity = sum(log.journal.zeros.values()) / weights
        for when, states in (("before", streams.heldout_dense), ("after", streams.heldout)):
            if heldout and states:
                losses = self._world.joined(model.losses(states))
                log.record.perplexity[when] = Perplexity.of(losses, heldout.source, heldout.origin)
        log.clock.lap("perplexity")
        peaks = self._world.collected(peak_memory(model.device))
        log.record.peak_memory = {where: max(peak[where] for peak in peaks) for where in peaks[0]}


def _borrowed(block: DecoderBlock, grams: list[InputGram]) -> str:
    """What to note if experts had fewer tokens than inputs; else ""."""
    experts = {matrix.name for matrix in block.matrices if matrix.expert is not None}
    inputs = [gram for gram in grams if gram.names[0] in experts]
    poor = [gram for gram in inputs if gram.borrowed]
    if not poor:
        return ""
    fewest = min(poor, key=lambda gram: gram.tokens / len(gram.H))
    return (
        f"block {block.index}: {len(poor)} of {len(inputs)} inputs of experts had fewer tokens than inputs "
        f"(fewest: {', '.join(fewest.names)}, {fewest.tokens:,} of {len(fewest.H):,}); the mean of all "
        "experts stands in for what is missing"
    )
