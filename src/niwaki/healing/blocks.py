"""Healing of a model with one decoder block in memory, and the dense model's beside it."""

import contextlib
import math
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import NamedTuple

import torch
from torch import Tensor

from niwaki.checkpoints.writing import CheckpointWriter
from niwaki.effort import Fitting
from niwaki.healing.divergence import divergence
from niwaki.healing.method import block_memory
from niwaki.healing.run import HealingRun
from niwaki.models.block import DecoderBlock
from niwaki.models.device import resident
from niwaki.models.fit import Fit, OnGrid
from niwaki.models.generation import device_memory
from niwaki.models.hidden_states import HiddenStates
from niwaki.models.layout import Matrix
from niwaki.models.scales import grid_of, read_scales
from niwaki.models.sharing import NOT_FITTED
from niwaki.models.spill import MemoryBudget
from niwaki.models.training import trained_matrices, trained_weights
from niwaki.records.healing import HealingPoint, HealingRecord

#: Forward passes that the text takes for each block: of the dense and of the healed one, and four of the fit, of which
#: a backward pass is two and what is held out there less than one.
_PASSES = 6
#: The share of a limit of time that the walk over the blocks may take, and the least seconds for the fit of a block.
_WALK_TIME, _LEAST_TIME = 0.9, 0.1


class Held(NamedTuple):
    """What is held out, on its way through three models."""

    dense: HiddenStates
    pruned: HiddenStates  # as it came
    healed: HiddenStates


class Streams(NamedTuple):
    """Hidden states on their way through the blocks."""

    inputs: HiddenStates  # in the healed model
    targets: HiddenStates  # in the dense one
    held: Held | None  # in the first process


@dataclass
class BlockRun(HealingRun):
    """Fits the weights that are left in each block to the dense block's outputs, one block after the other.

    A block's inputs are those that the healed blocks before it give, its targets what the dense model has after the
    same block, and the fit is that of the efforts (:class:`niwaki.models.fit.Fit`), on more text. What is held out
    passes through the model as it came and the healed one: where the healed one is not nearer to the dense model, the
    result is the model as it came.

    Cost: for each token two forward passes, and a forward and a backward pass for each use in the fit. Memory: a block
    of each model, five float32 copies of its weights, and two hidden states for each token, on disk where ``memory`` is
    not enough for them.
    """

    _writer: CheckpointWriter | None = field(default=None, init=False)  # of the first process

    @property
    def _kept(self) -> list[str]:
        return list(self.model.checkpoint.shards)

    def _resumed(self, earlier: HealingRecord) -> tuple[int, str]:
        return self.journal.blocks, f"the first {self.journal.blocks} of {len(self.model.blocks)} blocks"

    def _train(self, tokens: Tensor) -> None:
        """The first process saves after each block."""
        checkpoint, place, healing = self.model.checkpoint, self.place, self.healing
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._budget())
            if place:
                writer = CheckpointWriter(checkpoint, place.directory, self.journal.blocks > 0)
                self._writer = stack.enter_context(writer)
            streams = self._embedded(self.share(tokens))
            self._walk(streams)
            if self._writer:
                self.write_signless_zeros(self._writer)
            healing.points = self.world.received(self._points(streams.held) if streams.held else [])
        healing.best = int(healing.points[1].error < healing.points[0].error)
        if healing.best == 0:
            self.note(["the weights are those of the pruned model: healed blocks were not better on what was held out"])
            if place:
                with CheckpointWriter(checkpoint, place.directory) as writer:
                    self.write_signless_zeros(writer)  # all else is copied

    def _budget(self) -> contextlib.closing[MemoryBudget]:
        """For the hidden states of both models: what the blocks leave."""
        there = device_memory(self.model.device) if self.memory is None else self.memory
        taken = resident() + block_memory(self.model, self.dense, grid_of(self.model.checkpoint) is not None)
        self.model.budget = self.dense.budget = MemoryBudget(max(0, there - taken))
        return contextlib.closing(self.model.budget)

    def _embedded(self, tokens: Tensor) -> Streams:
        """The inputs of the first block, of ``tokens`` of which those that are held out are the first."""
        held, rest = tokens.split([count := self.held if self.world.first else 0, len(tokens) - count])
        healing, length, together = self.healing, tokens.shape[1], None
        if self.world.first:
            together = Held(self.dense.embed(held), self.model.embed(held), self.model.embed(held))
        if healing.limit is not None and not self.journal.blocks:
            self._limit_tokens(together, length)
        rest = rest[: math.ceil(healing.tokens / (length * self.world.size))]
        there = sum(self.world.collected(rest.numel()))
        if there < healing.tokens:
            self.note_reuse(there)
        self._fitting = Fitting(epochs=healing.tokens / there, rate=healing.rate, batch=healing.batch)
        part = self._fitting.tokens_per_part(self.world.size)
        self._step = max(1, part // length) * length * self.world.size  # tokens
        streams = Streams(self.model.embed(rest, part), self.dense.embed(rest, part), together)
        if any(matrix.blocks for matrix in self.model.matrices()):
            self.note([NOT_FITTED])
        if self.model.budget.spilled:
            self.note(["hidden states are in a file too, for want of memory"])
        self.clock.lap("prepare")
        return streams

    def _limit_tokens(self, held: Held | None, length: int) -> None:
        """Trains on no more tokens than there is time for."""
        enough = self.world.received(self._enough(held, length) if held else 0)
        if enough < self.healing.tokens:
            self.healing.tokens = enough
            self.note([f"the time is enough to train on {enough:,} tokens"])

    def _enough(self, held: Held, length: int) -> int:
        """How many tokens there is time for, by how long what is held out takes in the first block."""
        block = next(stream := self.model.stream())
        began = monotonic()
        for i, hidden in enumerate(held.pruned.hidden):
            with torch.no_grad():
                block.forward(hidden, held.pruned, i)
        pace = (monotonic() - began) / sum(map(Tensor.numel, held.pruned.tokens))
        stream.close()
        return max(length, int(self._left / (_PASSES * pace * len(self.model.blocks))) * self.world.size)

    @property
    def _left(self) -> float:
        """Seconds that are left for the walk over the blocks, at least 1."""
        assert self.healing.limit is not None
        return max(1.0, _WALK_TIME * (self.healing.limit - self.measuring) - self.clock.total())

    def _walk(self, streams: Streams) -> None:
        held, progress = streams.held, self.progress
        last = len(self.model.blocks) - 1
        for block, dense in zip(self.model.stream(), self.dense.stream(), strict=True):
            self.clock.lap("read")
            began = monotonic()
            progress.stage(block.index, "advance", len(streams.targets.hidden))
            dense.advance(streams.targets, progress.step)
            if held:
                dense.advance(held.dense)
                block.advance(held.pruned)
            self.clock.lap("advance")
            if trained_matrices(block) and not self._is_done(block):
                self._fit(block, streams, began)
                self._save(block)
            else:
                self._restore(block)
            if held:
                block.advance(held.healed)
            if block.index < last:
                block.advance(streams.inputs)
            self.clock.lap("advance")

    def _fit(self, block: DecoderBlock, streams: Streams, began: float) -> None:
        """Fits ``block``, whose turn ``began`` at this time, and writes its weights."""
        seconds = math.inf
        if self.healing.limit is not None:
            # The outputs of the healed block take about as long as what was done so far.
            share = self._left / (len(self.model.blocks) - block.index)
            seconds = max(_LEAST_TIME, share - (monotonic() - began))
        inputs, targets, on_grid = streams.inputs, streams.targets, self._on_grid(block)
        fit = Fit(block, inputs, targets, self._fitting, self.world, self.progress.step, on_grid, seconds)
        self.progress.stage(block.index, "fit", fit.batches)
        self.record.fits = [each for each in self.record.fits if each.block != block.index]
        self.record.fits.append(fit.run())
        self.progress.fitted(self.record.fits[-1])
        for matrix, stored in trained_weights(block):
            if self._writer:
                self._writer.write(matrix.key, stored, matrix.index)
        self.clock.lap("fit")

    def _on_grid(self, block: DecoderBlock) -> OnGrid | None:
        """What rounds the weights of ``block`` to their grid, if they are on one."""
        checkpoint = self.model.checkpoint
        grid = grid_of(checkpoint)
        if grid is None:
            return None
        scales = {
            matrix.name: read_scales(checkpoint, matrix, grid).to(block.device) for matrix in trained_matrices(block)
        }

        def on_grid(matrix: Matrix, W: Tensor) -> Tensor:
            own = scales[matrix.name]
            return grid.project(W, own.float(), own.dtype, same_zeros=True)

        return on_grid

    def _is_done(self, block: DecoderBlock) -> bool:
        """Whether an earlier run has healed ``block``, and what it wrote is still there."""
        if block.index >= self.journal.blocks:
            return False
        done = not self._writer or self._writer.digest(_places(block)) == self.journal.digests[block.index]
        if not (done := self.world.received(done)):
            self.progress.note(f"block {block.index} of the earlier run is damaged on disk and healed again")
        return done

    def _restore(self, block: DecoderBlock) -> None:
        """Puts the weights into ``block`` that an earlier run wrote for it."""
        for matrix in trained_matrices(block):
            stored = block.empty(matrix)
            if self._writer:
                stored.copy_(self._writer.read(matrix.key, matrix.index))
            block.put(matrix, self.world.send(stored, 0))

    def _save(self, block: DecoderBlock) -> None:
        """Makes sure that a stopped run can be resumed after ``block``."""
        if self._writer and self.place:
            self._writer.sync()
            self.record.seconds = dict(self.clock.seconds)
            self.place.save_block(block.index, self._writer.digest(_places(block)), self.record)
        self.clock.lap("write")

    def _points(self, held: Held) -> list[HealingPoint]:
        """How far the model is from the dense one as it came, and as it is now."""
        steps = sum(fit.steps for fit in self.record.fits)
        tokens = round(steps / max(1, len(self.record.fits)) * self._step)
        spent = self.clock.total()
        points = [
            HealingPoint(0, 0, 0.0, divergence(self.dense, self.model, held.dense, held.pruned), None),
            HealingPoint(tokens, steps, spent, divergence(self.dense, self.model, held.dense, held.healed), None),
        ]
        for last in (1, 2):
            self.progress.healing(replace(self.healing, points=points[:last]), 1.0, spent)
        self.clock.lap("heal")
        return points


def _places(block: DecoderBlock) -> list[tuple[str, int | None]]:
    """Key and index of all that is written for ``block``."""
    return [matrix.entry for matrix in trained_matrices(block)]
