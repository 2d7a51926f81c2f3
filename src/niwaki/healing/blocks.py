"""Healing of a model with one decoder block in memory, and the dense model's beside it."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import NamedTuple

import torch
from torch import Tensor

from niwaki.effort import Fitting
from niwaki.healing.run import HealingRun, block_memory
from niwaki.models.block import DecoderBlock
from niwaki.models.device import resident
from niwaki.models.formats import WeightFormat
from niwaki.models.generation import device_memory
from niwaki.models.hidden_states import HiddenStates, MemoryBudget
from niwaki.models.layout import NOT_FITTED, Matrix
from niwaki.models.pairs import count_tokens
from niwaki.models.streamed import Reference
from niwaki.models.training import Fit, Projection, trained_matrices
from niwaki.records.record import HealingPoint
from niwaki.runs.store import WeightStore

#: Forward passes that the text takes for each block: of the dense and of the healed one, and four of the fit, of which
#: a backward pass is two and what is held out there less than one.
_PASSES = 6
#: The share of a limit of time that the walk over the blocks may take.
_WALK_TIME = 0.9
#: The least seconds for the fit of a block.
_LEAST_TIME = 0.1


class Held(NamedTuple):
    """What is held out, on its way through three models."""

    dense: HiddenStates
    pruned: HiddenStates  # as it came
    healed: HiddenStates


class HealingStreams(NamedTuple):
    """Hidden states on their way through the blocks."""

    inputs: HiddenStates  # in the healed model
    targets: HiddenStates  # in the dense one
    held: Held | None  # in the first process


@dataclass
class BlockRun(HealingRun):
    """Fits the weights that are left in each block to the dense block's outputs, one block after the other.

    A block's inputs are those that the healed blocks before it give, its targets what the dense model has after the
    same block, and the fit is that of the efforts (:class:`niwaki.models.training.Fit`), on more text. What is held out
    passes through the model as it came and the healed one: where the healed one is not nearer to the dense model, the
    result is the model as it came.

    Cost: for each token two forward passes, and a forward and a backward pass for each use in the fit. Memory: a block
    of each model, five float32 copies of its weights, and two hidden states for each token, on disk where ``memory`` is
    not enough for them.
    """

    @property
    def _kept(self) -> list[str]:
        factors = self.format.files if self.format.has_factors else ()
        return [*self.model.checkpoint.shards, *factors]

    def _train(self, tokens: Tensor) -> None:
        """The first process saves after each block."""
        run, place, healing = self.run, self.run.place, self.healing
        # Of weights on a grid the scales stay as they are.
        self._store = WeightStore(run, self.format if self.format.has_factors else WeightFormat())
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._budget())
            if place:
                writer = self._writer(place.directory, run.journal.blocks > 0)
                self._store.writer = stack.enter_context(writer)
            streams = self._embedded(self.share(tokens))
            self._walk(streams)
            if self._store.writer:
                self.write_signless_zeros(self._store.writer)
            healing.points = run.world.received(self._points(streams.held) if streams.held else [])
        healing.best = int(healing.points[1].error < healing.points[0].error)
        if healing.best == 0:
            self.run.note(
                self.record,
                "the weights are those of the pruned model: healed blocks were not better on what was held out",
            )
            if place:
                with self._writer(place.directory) as writer:
                    self.write_signless_zeros(writer)
                    for matrix in self.model.matrices() if self.format.has_factors else ():  # all else is copied
                        parts = self.format.read_parts(self.model.checkpoint, matrix)
                        self.format.write(writer, matrix, self.model.checkpoint.read(*matrix.entry), parts)

    def _budget(self) -> contextlib.closing[MemoryBudget]:
        """For the hidden states of both models: what the blocks leave."""
        there = self.run.compute.budget
        if there is None:
            there = device_memory(self.model.device)
        taken = resident() + block_memory(self.model, self.dense, self.format)
        self.model.budget = self.dense.budget = MemoryBudget(max(0, there - taken))
        return contextlib.closing(self.model.budget)

    def _embedded(self, tokens: Tensor) -> HealingStreams:
        """The inputs of the first block, of ``tokens`` of which those that are held out are the first."""
        healing, world, length, together = self.healing, self.run.world, tokens.shape[1], None
        held, rest = tokens.split([count := self.held if world.first else 0, len(tokens) - count])
        if world.first:
            together = Held(self.dense.embed(held), self.model.embed(held), self.model.embed(held))
        if healing.limit is not None and not self.run.journal.blocks:
            enough = world.received(self._enough(together, length) if together else 0)
            if enough < healing.tokens:
                healing.tokens = enough
                self.run.note(self.record, f"the time is enough to train on {enough:,} tokens")
        rest = rest[: math.ceil(healing.tokens / (length * world.size))]
        there = sum(world.collected(count_tokens(rest)))
        if there < healing.tokens:
            self.note_reuse(there)
        self._fitting = Fitting(epochs=healing.tokens / there, rate=healing.rate, batch=healing.batch)
        part = self._fitting.tokens_per_part(world.size)
        self._step = max(1, part // length) * length * world.size  # tokens
        streams = HealingStreams(self.model.embed(rest, part), self.dense.embed(rest, part), together)
        if any(matrix.blocks for matrix in self.model.matrices()):
            self.run.note(self.record, NOT_FITTED)
        if self.model.budget.spilled:
            self.run.note(self.record, "hidden states are also spilled to disk (memory limit reached)")
        self.run.clock.lap("prepare")
        return streams

    def _enough(self, held: Held, length: int) -> int:
        """How many tokens there is time for, by how long what is held out takes in the first block."""
        block = next(stream := self.model.stream())
        began = monotonic()
        for i, hidden in enumerate(held.pruned.hidden):
            with torch.no_grad():
                block.forward(hidden, held.pruned, i)
        pace = (monotonic() - began) / sum(map(Tensor.numel, held.pruned.tokens))
        stream.close()
        return max(length, int(self._left / (_PASSES * pace * len(self.model.blocks))) * self.run.world.size)

    @property
    def _left(self) -> float:
        """Seconds that are left for the walk over the blocks, at least 1."""
        assert self.healing.limit is not None
        return max(1.0, _WALK_TIME * (self.healing.limit - self.measuring) - self.run.clock.total())

    def _walk(self, streams: HealingStreams) -> None:
        held, clock, progress = streams.held, self.run.clock, self.run.progress
        last = len(self.model.blocks) - 1
        for block, dense in zip(self.model.stream(), self.dense.stream(), strict=True):
            clock.lap("read")
            began = monotonic()
            progress.stage(block.index, "advance", len(streams.targets.hidden))
            dense.advance(streams.targets, progress.step)
            if held:
                dense.advance(held.dense)
                block.advance(held.pruned)
            clock.lap("advance")
            trained = trained_matrices(block)
            if trained and not self._store.is_done(block.index, trained):
                self._fit(block, streams, began)
                self._store.finish(block.index, trained, self.record)
            else:
                self._store.restore(block, trained)
            if held:
                block.advance(held.healed)
            if block.index < last:
                block.advance(streams.inputs)
            clock.lap("advance")

    def _fit(self, block: DecoderBlock, streams: HealingStreams, began: float) -> None:
        """Fits ``block``, whose turn ``began`` at this time, and writes its weights."""
        run, seconds = self.run, math.inf
        if self.healing.limit is not None:
            # The outputs of the healed block take about as long as what was done so far.
            share = self._left / (len(self.model.blocks) - block.index)
            seconds = max(_LEAST_TIME, share - (monotonic() - began))
        inputs, targets, parts = streams.inputs, streams.targets, self._parts(block)
        factors = parts if self.format.has_factors else None
        on_grid: Projection | None = partial(self._on_grid, parts) if parts and not factors else None
        world, done, project_factors = run.world, run.progress.step, self.format.project_factors
        fit = Fit(block, inputs, targets, self._fitting, world, done, on_grid, factors, project_factors, seconds)
        run.progress.stage(block.index, "fit", fit.batches)
        self._store.begin(block.index, self.record)
        self.record.fits.append(fit.run())
        run.progress.fitted(self.record.fits[-1])
        self._store.write_trained(block, fit.factors)
        run.clock.lap("fit")

    def _parts(self, block: DecoderBlock) -> dict[str, tuple[Tensor, ...]]:
        """The parts of the matrices of ``block`` by name, where these have such."""
        found = {}
        for matrix in trained_matrices(block):
            if parts := self.format.read_parts(self.model.checkpoint, matrix):
                found[matrix.name] = tuple(part.to(block.device) for part in parts)
        return found

    def _on_grid(self, parts: Mapping[str, Sequence[Tensor]], matrix: Matrix, W: Tensor) -> Tensor:
        return self.format.project(matrix, W, parts[matrix.name])

    def _points(self, held: Held) -> list[HealingPoint]:
        """How far the model is from the dense one as it came, and as it is now."""
        steps = sum(fit.steps for fit in self.record.fits)
        tokens = round(steps / max(1, len(self.record.fits)) * self._step)
        spent = self.run.clock.total()
        points = [
            HealingPoint(0, 0, 0.0, self._distance(held.dense, held.pruned), None),
            HealingPoint(tokens, steps, spent, self._distance(held.dense, held.healed), None),
        ]
        for last in (1, 2):
            self.run.progress.healing(replace(self.healing, points=points[:last]), 1.0, spent)
        self.run.clock.lap("heal")
        return points

    def _distance(self, dense: HiddenStates, states: HiddenStates) -> float:
        """The mean KL divergence from the dense model's predictions, in nats a token."""
        divergences, _ = self.model.divergences(states, Reference(self.dense, dense))
        return max(0.0, divergences.sum(dtype=torch.float64).item() / sum(each.numel() for each in states.tokens))
