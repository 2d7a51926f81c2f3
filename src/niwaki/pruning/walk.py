"""The walk over the blocks: inputs in, matrices solved, weights and measurements out."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from niwaki.checkpoints.writing import CheckpointWriter
from niwaki.errors import OutputError, UnsupportedModelError
from niwaki.models.block import DecoderBlock
from niwaki.models.device import peak_memory
from niwaki.models.fit import Fit, samples_to_fit
from niwaki.models.gram_capture import InputGram
from niwaki.models.hidden_states import HiddenStates
from niwaki.models.kept_format import KeptFormat
from niwaki.models.layout import Matrix
from niwaki.models.processes import World
from niwaki.models.scales import scale_key
from niwaki.models.streamed import StreamedModel
from niwaki.models.training import trained_matrices, trained_weights
from niwaki.pruning.later_inputs import LaterInputs, later_inputs
from niwaki.pruning.plan import Plan, plan
from niwaki.pruning.request import PatternOf, Request
from niwaki.pruning.solve import BlockSolver, Solved
from niwaki.records.perplexity import Perplexity
from niwaki.records.progress import Progress
from niwaki.records.record import Record
from niwaki.runs.begin import FEW_ZEROS
from niwaki.runs.clock import Clock
from niwaki.runs.journal import Journal
from niwaki.runs.workplace import Workplace
from niwaki.texts.conversations import Samples
from niwaki.texts.synthesis import synthesize
from niwaki.texts.texts import Texts
from niwaki.windows import Windows


class Streams(NamedTuple):
    """Hidden states on their way through the blocks: of each text in the pruned and in the dense model, if needed."""

    calibration: HiddenStates
    calibration_dense: HiddenStates | None
    heldout: HiddenStates | None
    heldout_dense: HiddenStates | None


@dataclass
class Walk:
    """The walk over the blocks of ``model``, which keeps ``record`` and ``clock`` up to date."""

    model: StreamedModel
    request: Request
    pattern_of: PatternOf
    world: World
    record: Record
    progress: Progress
    clock: Clock
    journal: Journal  # what an earlier run has done; of the first process that in ``place``
    place: Workplace | None  # of the first process, where the journal and the plan are kept
    kept: KeptFormat | None = None  # in which matrices are written, if that is asked for
    writer: CheckpointWriter | None = None  # of the first process, where weights go
    _done: dict[int, bool] = field(default_factory=dict)  # by block, of those that an earlier run has done
    _scales: dict[str, Tensor] = field(default_factory=dict)  # of the present block's matrices, by name

    def blocks(self, texts: Texts) -> None:
        """Prunes all blocks and measures the result, on this process's share of ``texts``."""
        model, world, progress, clock = self.model, self.world, self.progress, self.clock
        texts = texts.shared(world)
        samples, heldout = texts.samples, texts.only
        stop = model.matrices()[-1].block + 1
        progress.begin(self.record, len(model.blocks) if heldout else stop, len(model.matrices()))
        planned = self._planned(samples, texts)
        if planned.synthetic is not None and isinstance(samples, Tensor):
            samples = torch.cat([samples, world.share(planned.synthetic)])
        self._solver = BlockSolver(
            self.request,
            self.kept,
            lambda m: planned.pattern(m, self.pattern_of(m)),
            planned.importance,
            world,
            progress,
        )
        self._later = self._later_inputs(samples)
        clock.lap("plan")
        streams = self._embedded(samples, heldout)
        clock.lap("capture")
        if model.budget.spilled:
            self._note(f"{model.budget.spilled / 2**20:,.1f} MiB of hidden states are in a file, for want of memory")
        for block in model.stream():
            if block.index >= stop and not heldout:
                break
            clock.lap("read")
            last = block.index >= stop - 1
            for dense in (streams.heldout_dense, streams.calibration_dense):
                if dense:  # the block is still as it was
                    block.advance(dense)
            clock.lap("advance")
            if block.matrices and not self._is_done(block.index):
                self._prune(block, streams)
                self._save(block)
            else:
                self._restore(block, [*block.matrices, *block.shared])
            progress.stage(block.index, "advance", len(streams.calibration.hidden))
            if streams.heldout:
                block.advance(streams.heldout)
            if not last:
                block.advance(streams.calibration, progress.step)
            clock.lap("advance")
        self._measure(streams, heldout)

    def _note(self, text: str) -> None:
        """Adds a note to the record, unless it has it from an earlier run that this one resumes."""
        if text not in self.record.notes:
            self.record.notes.append(text)
        self.progress.note(text)

    def _embedded(self, samples: Samples, heldout: Windows | None) -> Streams:
        """The inputs of the first block, as far as they are needed."""
        fitting, before, embed = self.request.effort.fit, self.request.measurement.before, self.model.embed
        part, dense = None, None
        if fitting.epochs:
            part = fitting.tokens_per_part(self.world.size)
            order, count = samples_to_fit(len(samples), fitting.epochs)
            samples = samples[order]
            dense = embed(samples[:count], part)
        return Streams(
            calibration=embed(samples, part),
            calibration_dense=dense,
            heldout_dense=embed(heldout.tokens) if heldout and before else None,
            heldout=embed(heldout.tokens) if heldout else None,
        )

    def _planned(self, samples: Samples, texts: Texts) -> Plan:
        """The plan for all processes; a resumed run has the one it began with."""
        planning, synthetic, place, world = (
            self.request.effort.plan,
            self.request.effort.synthetic,
            self.place,
            self.world,
        )
        if not (planning.is_needed or synthetic):
            return Plan()
        kept = Plan.load(place.plan, self.journal.plan) if place and self.journal.blocks else None
        if (kept := world.received(kept)) is not None:
            return kept
        if self.journal.blocks:
            self.progress.note("the plan of the earlier run is damaged and made again")
        made = plan(
            self.model, planning, self.pattern_of, samples, self.record.tf32, world, self.progress, self.request.revive
        )
        if synthetic and isinstance(samples, Tensor):
            count = max(world.size, round(synthetic * sum(world.collected(len(samples)))))
            length, budget = samples.shape[1], self.request.compute.budget
            try:
                bos = texts.windows.bos
                text = synthesize(self.model, count, length, budget, world, self.progress, bos=bos)
                made = dataclasses.replace(made, synthetic=text)
            except UnsupportedModelError as error:
                count = 0
                self._note(
                    f"the dense model wrote no text to calibrate on: {error}; more --samples of real text do as well"
                )
            self.record.calibration["synthetic"] = count
        if place:
            self.journal.plan = made.save(place.plan, self.journal.plan)
        return made

    def _later_inputs(self, samples: Samples) -> LaterInputs:
        """The inputs of matrices that blocks share, unless an earlier run has pruned all of these."""
        sharing = dict.fromkeys(matrix.block for matrix in self.model.matrices() if matrix.blocks)
        if all(map(self._is_done, sharing)):
            return LaterInputs()
        return later_inputs(self.model, samples, self.record.tf32, self.world, self.progress)

    def _is_done(self, block: int) -> bool:
        """Whether an earlier run has done a block, and what it wrote is still there."""
        if block >= self.journal.blocks:
            return False
        if block not in self._done:
            places = self._places(self.model.matrices(block))
            done = not self.writer or self.writer.digest(places) == self.journal.digests[block]
            self._done[block] = self.world.received(done)
            if not self._done[block]:
                self.progress.note(f"block {block} of the earlier run is damaged on disk and done again")
        return self._done[block]

    def _places(self, matrices: list[Matrix]) -> list[tuple[str, int | None]]:
        """Key and index of all that is written for the ``matrices`` of a block."""
        if self.kept:
            return [(key, matrix.index) for matrix in matrices for key in self.kept.keys(matrix)]
        keys = [matrix.entry for matrix in matrices]
        return keys + [(scale_key(matrix), matrix.index) for matrix in matrices if self.request.grid]

    def _prune(self, block: DecoderBlock, streams: Streams) -> None:
        """Prunes the matrices of a block, and fits it if asked to."""
        world, progress, clock = self.world, self.progress, self.clock
        states, dense = streams.calibration, streams.calibration_dense
        self._forget(block.index)
        self._scales.clear()
        self._restore(block, block.shared)
        progress.stage(block.index, "capture", len(states.hidden))
        grams = block.input_grams(states, progress.step, world, self.record.tf32)
        grams = self._later.joined(block, grams)
        clock.lap("capture")
        borrowed = _borrowed(block, grams)
        progress.stage(block.index, "solve", len(block.matrices))
        self._solver.solve(block, grams, lambda matrix, solved: self._keep(block, matrix, solved))
        clock.lap("solve")
        if block.released:
            self._restore(block, block.matrices)
        clock.lap("write")
        if borrowed:
            self._note(borrowed)
        if dense and trained_matrices(block):
            on_grid = self._on_grid if self.request.grid or self.kept else None
            fit = Fit(block, states, dense, self.request.effort.fit, world, progress.step, on_grid)
            progress.stage(block.index, "fit", fit.batches)
            self.record.fits.append(fit.run())
            for matrix, stored in trained_weights(block):
                self._write(matrix, stored)
            clock.lap("fit")

    def _keep(self, block: DecoderBlock, matrix: Matrix, solved: Solved) -> None:
        """Writes a matrix that was solved, and records it."""
        stored, scales, record = solved
        self.progress.solved(record)
        if not block.released:
            block.put(matrix, stored)
        if scales is not None:
            self._scales[matrix.name] = scales
            if self.writer and self.request.grid:
                self.writer.write(scale_key(matrix), scales, matrix.index)
        self._write(matrix, stored)
        zeros = stored.numel() - int(stored.count_nonzero())
        self.journal.zeros[matrix.key] = self.journal.zeros.get(matrix.key, 0) + zeros
        asked, used = record.stats.get("damping_asked"), record.stats.get("damping")
        if isinstance(asked, float) and isinstance(used, float) and used > asked * 1.01 + 1e-6:
            self._note(
                f"block {record.block} {record.name}: damping raised from {asked:g} to {used:g}, "
                "because the Gram matrix is close to singular"
            )
        self.record.matrices.append(record)

    def _write(self, matrix: Matrix, stored: Tensor) -> None:
        """Writes the weights of a matrix of the present block, in the format that is kept if it has one."""
        if self.writer and self.kept and self.kept.of(matrix):
            self.kept.write(self.writer, matrix, stored, self._scales[matrix.name])
        elif self.writer:
            self.writer.write(matrix.key, stored, matrix.index)

    def _on_grid(self, matrix: Matrix, W: Tensor) -> Tensor:
        """(out, in), W on the grid of ``matrix`` or in its format, with the same zeros."""
        scales = self._scales.get(matrix.name)
        if scales is None:
            return W
        if self.request.grid:
            return self.request.grid.project(W, scales.float(), scales.dtype, same_zeros=True)
        numbers = self.kept.of(matrix) if self.kept else None
        assert numbers
        return numbers.project(W, numbers.factors(scales, W.shape), W != 0)

    def _restore(self, block: DecoderBlock, matrices: list[Matrix]) -> None:
        """Puts the weights of ``matrices`` into ``block`` that were written, by this run or an earlier one."""
        for matrix in matrices:
            stored = block.empty(matrix)
            if self.writer:
                kept, writer = self.kept, self.writer
                stored.copy_(kept.read(writer, matrix) if kept else writer.read(matrix.key, matrix.index))
            block.put(matrix, self.world.send(stored, 0))

    def _forget(self, block: int) -> None:
        """Takes out of the record and the journal what an earlier run did to ``block``."""
        self.record.matrices = [each for each in self.record.matrices if each.block != block]
        self.record.fits = [each for each in self.record.fits if each.block != block]
        for matrix in self.model.matrices(block):
            self.journal.zeros.pop(matrix.key, None)

    def _save(self, block: DecoderBlock) -> None:
        """Makes sure that a stopped run can be resumed after ``block``."""
        self.record.matrices.sort(key=lambda each: each.block)
        self.record.fits.sort(key=lambda each: each.block)
        if self.writer and self.place:
            self.writer.sync()
            self.record.seconds = dict(self.clock.seconds)
            self.place.save_block(block.index, self.writer.digest(self._places(block.matrices)), self.record)
        self.clock.lap("write")

    def check_written(self) -> None:
        """Raises OutputError unless what is on disk for each block is what was written, to the bit."""
        assert self.writer
        for block, digest in enumerate(self.journal.digests):
            places = self._places(self.model.matrices(block))
            if places and self.writer.digest(places, on_disk=True) != digest:
                raise OutputError(f"block {block} is not on disk as it was written; was the disk full?")

    def _measure(self, streams: Streams, heldout: Windows | None) -> None:
        """Puts sparsity, perplexity and memory into the record, after the last block."""
        model, record = self.model, self.record
        for said in (_zeros_before(record, self.request.revive), _kept_at_zero(record)):
            if said:
                self._note(said)
        record.sparsity = sum(self.journal.zeros.values()) / sum(matrix.size for matrix in model.matrices())
        for when, states in (("before", streams.heldout_dense), ("after", streams.heldout)):
            if heldout and states:
                losses = torch.cat(self.world.collected(model.losses(states)))
                record.perplexity[when] = Perplexity.of(losses, heldout.source, heldout.origin)
        self.clock.lap("perplexity")
        peaks = self.world.collected(peak_memory(model.device))
        record.peak_memory = {where: max(peak[where] for peak in peaks) for where in peaks[0]}


def _zeros_before(record: Record, revive: bool) -> str:
    """What to note of the weights that were zero in the model that was given; else ""."""
    zeros, revived = (
        sum(int(matrix.stats.get(name, 0)) for matrix in record.matrices) for name in ("zeros_before", "revived")
    )
    weights = sum(math.prod(matrix.shape) for matrix in record.matrices)
    if revived:
        return (
            f"{revived:,} of the {zeros:,} weights that were zero in the model are not any more "
            f"({100 * revived / zeros:.3g} %)" + ", as --revive allows" * revive
        )
    if revive or zeros < FEW_ZEROS * weights:
        return ""
    return (
        f"{zeros:,} weights ({100 * zeros / weights:.3g} %) were zero in the model that was given, and stay zero; "
        "--revive prunes as if they were not"
    )


def _kept_at_zero(record: Record) -> str:
    """What to note of zeros that a pattern would keep as weights; else ""."""
    count = sum(int(matrix.stats.get("kept_at_zero", 0)) for matrix in record.matrices)
    if not count:
        return ""
    return (
        f"{count:,} weights that the pattern keeps were zero in the model and still are: they have nothing to make up "
        "for where a row loses no other weight or their input is always 0, and some solvers only choose"
    )


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
