"""The walk over the blocks: inputs in, matrices solved, weights and measurements out."""

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor

from niwaki.effort import Effort
from niwaki.errors import NumericalError, UnsupportedModelError
from niwaki.layer.block_types import BlockGrid
from niwaki.layer.grid import AnyGrid
from niwaki.models.block import DecoderBlock
from niwaki.models.formats import OnGrid
from niwaki.models.gram_capture import InputGram
from niwaki.models.hidden_states import HiddenStates
from niwaki.models.layout import Matrix, fused, stacked
from niwaki.models.streamed import Reference, StreamedModel
from niwaki.models.training import Fit, samples_to_fit, trained_matrices
from niwaki.pruning.mixed_bits import choose_alike, costs_of_bits, in_words
from niwaki.pruning.plan import LaterInputs, Plan, coupled, later_inputs, plan
from niwaki.pruning.request import PatternOf, Request
from niwaki.pruning.solve import BlockSolver, Solved
from niwaki.records.record import FEW_ZEROS, Record
from niwaki.runs.stage import Run, joined, written
from niwaki.runs.store import WeightStore, kept_once
from niwaki.texts.conversations import Samples
from niwaki.texts.texts import Texts
from niwaki.windows import Windows


class Streams(NamedTuple):
    """Hidden states on their way through the blocks: of each text in the pruned and in the dense model, if needed."""

    calibration: HiddenStates | None
    calibration_dense: HiddenStates | None
    heldout: HiddenStates | None
    heldout_dense: HiddenStates | None


@dataclass
class Walk:
    """The walk over the blocks of ``model``, which keeps ``record`` up to date."""

    model: StreamedModel
    request: Request
    effort: Effort
    pattern_of: PatternOf
    record: Record
    run: Run
    store: WeightStore

    def blocks(self, texts: Texts) -> None:
        """Prunes all blocks and measures the result, on this process's share of ``texts``."""
        model, run, store = self.model, self.run, self.store
        texts = texts.shared(run.world)
        samples, heldout = texts.samples, texts.only
        stop = model.matrices()[-1].block + 1
        run.progress.begin(self.record, len(model.blocks) if heldout else stop, len(model.matrices()))
        planned = self._planned(samples, texts)
        if planned.bits:
            assert isinstance(store.format, OnGrid)
            store.format = dataclasses.replace(store.format, bits_of=lambda matrix: planned.bits[matrix.place])
        if isinstance(samples, Tensor):
            samples = joined(run, samples, planned.synthetic)
        counts = run.world.collected(len(samples))
        self._tokens = {at: tokens.split(counts)[run.world.rank] for at, tokens in planned.tokens.items()}
        pattern_of = partial(planned.pattern, usual=self.pattern_of)
        self._solver = BlockSolver(self.request, store.format, pattern_of, planned, run.world, run.progress)
        self._later = self._later_inputs(samples)
        run.clock.lap("plan")
        streams = self._embedded(samples, heldout)
        run.clock.lap("capture")
        if model.budget.spilled:
            size = f"{model.budget.spilled / 2**20:,.1f} MiB"
            run.note(self.record, f"{size} of hidden states were spilled to disk (memory limit reached)")
        for block in model.stream():
            if block.index >= stop and not heldout:
                break
            run.clock.lap("read")
            for dense in (streams.heldout_dense, streams.calibration_dense):
                if dense:  # the block is still as it was
                    block.advance(dense)
            run.clock.lap("advance")
            if block.matrices and not store.is_done(block.index, block.matrices):
                self._prune(block, streams)
                store.finish(block.index, block.matrices, self.record)
            else:
                store.restore(block, [*block.matrices, *block.shared])
            batches = streams.calibration or streams.heldout
            run.progress.stage(block.index, "advance", len(batches.hidden) if batches else 1)
            if streams.heldout:
                block.advance(streams.heldout)
            if streams.calibration and block.index < stop - 1:
                block.advance(streams.calibration, run.progress.step)
            run.clock.lap("advance")
        self._measure(streams, heldout)

    def _embedded(self, samples: Samples, heldout: Windows | None) -> Streams:
        """The inputs of the first block, as far as they are needed."""
        fitting, before, embed = self.effort.fit, self.run.measured.before, self.model.embed
        part, dense = None, None
        if fitting.epochs:
            part = fitting.tokens_per_part(self.run.world.size)
            order, count = samples_to_fit(len(samples), fitting.epochs)
            samples, self._tokens = samples[order], {at: tokens[order] for at, tokens in self._tokens.items()}
            dense = embed(samples[:count], part)
        return Streams(
            calibration=None if self.request.rounds_to_nearest else embed(samples, part),
            calibration_dense=dense,
            heldout_dense=embed(heldout.tokens) if heldout and before else None,
            heldout=embed(heldout.tokens) if heldout else None,
        )

    @property
    def _mixed(self) -> AnyGrid | None:
        """The grid of mixed bits that weights are put on, if it is one."""
        grid = self.request.grid
        return grid if grid and grid.is_mixed else None

    def _planned(self, samples: Samples, texts: Texts) -> Plan:
        """The plan for all processes; a resumed run has the one it began with."""
        effort = self.effort
        if not (effort.plan.is_needed or effort.synthetic or self._mixed):
            return Plan()
        return kept_once(self.run, Plan, lambda: self._made(samples, texts))

    def _made(self, samples: Samples, texts: Texts) -> Plan:
        """The plan, of what is known of the dense model."""
        effort, revive, tf32, run = self.effort, self.request.revive, self.record.tf32, self.run
        made = plan(self.model, effort.plan, self.pattern_of, samples, tf32, run.world, run.progress, revive)
        if (grid := self._mixed) and isinstance(samples, Tensor):
            costs = costs_of_bits(self.model, grid, samples, tf32, run.world, run.progress)
            assert grid.average is not None
            together = fused if run.stages[-1].fuses_layers else attrgetter("place")
            alike = stacked if isinstance(grid, BlockGrid) else together
            chosen = choose_alike(costs, grid.average, self.model.matrices(), alike)
            run.note(self.record, in_words(costs, chosen, grid))
            made = dataclasses.replace(made, bits=chosen)
        if effort.synthetic and isinstance(samples, Tensor):
            own = written(run, self.model, self.record, effort.synthetic, samples, texts.windows.bos)
            made = dataclasses.replace(made, synthetic=own)
        if effort.plan.together and isinstance(samples, Tensor):
            samples = joined(run, samples, made.synthetic)
            try:
                made = coupled(made, self.model, effort.plan.together, samples, run.world, run.progress)
            except (NumericalError, UnsupportedModelError) as error:
                run.note(self.record, f"each row of a matrix is rounded alone: {error}")
        return made

    def _later_inputs(self, samples: Samples) -> LaterInputs:
        """The inputs of matrices that blocks share, unless an earlier run has pruned all of these."""
        sharing = dict.fromkeys(matrix.block for matrix in self.model.matrices() if matrix.blocks)
        if self.request.rounds_to_nearest or all(
            self.store.is_done(block, self.model.matrices(block)) for block in sharing
        ):
            return LaterInputs()
        return later_inputs(self.model, samples, self.record.tf32, self.run.world, self.run.progress)

    def _prune(self, block: DecoderBlock, streams: Streams) -> None:
        """Prunes the matrices of a block, and fits it if asked to."""
        run, store, states = self.run, self.store, streams.calibration
        store.begin(block.index, self.record)
        for matrix in block.matrices:
            run.journal.zeros.pop(matrix.key, None)
        store.restore(block, block.shared)
        grams = self._input_grams(block, states) if states else []
        borrowed = _borrowed(block, grams)
        run.progress.stage(block.index, "solve", len(block.matrices))
        keep = partial(self._keep, block)
        if states:
            self._solver.solve(block, grams, keep)
        else:
            self._solver.round(block, keep)
        run.clock.lap("solve")
        if block.released:
            store.restore(block, block.matrices)
        run.clock.lap("write")
        if borrowed:
            run.note(self.record, borrowed)
        if states and streams.calibration_dense and trained_matrices(block):
            self._fit(block, states, streams.calibration_dense)

    def _input_grams(self, block: DecoderBlock, states: HiddenStates) -> list[InputGram]:
        """The Gram matrices of all inputs of the block's matrices."""
        run = self.run
        run.progress.stage(block.index, "capture", len(states.hidden))
        weights = {name: tokens for (index, name), tokens in self._tokens.items() if index == block.index}
        grams = block.input_grams(states, run.progress.step, run.world, self.record.tf32, weights=weights)
        grams = self._later.joined(block, grams)
        run.clock.lap("capture")
        return grams

    def _fit(self, block: DecoderBlock, states: HiddenStates, dense: HiddenStates) -> None:
        run, store, fitting = self.run, self.store, self.effort.fit
        world, done, project_factors = run.world, run.progress.step, store.format.project_factors
        fit = Fit(block, states, dense, fitting, world, done, store.on_grid, store.factors, project_factors)
        run.progress.stage(block.index, "fit", fit.batches)
        self.record.fits.append(fit.run())
        store.write_trained(block, fit.factors)
        run.clock.lap("fit")

    def _keep(self, block: DecoderBlock, matrix: Matrix, solved: Solved) -> None:
        """Writes a matrix that was solved, and records it."""
        (stored, parts, record), run = solved, self.run
        run.progress.solved(record)
        if not block.released:
            block.put(matrix, stored)
        self.store.write(matrix, stored, parts)
        zeros = self.store.format.zeros(stored, parts)
        run.journal.zeros[matrix.key] = run.journal.zeros.get(matrix.key, 0) + zeros
        asked, used = record.stats.get("damping_asked"), record.stats.get("damping")
        if isinstance(asked, float) and isinstance(used, float) and used > asked * 1.01 + 1e-6:
            raised = f"damping raised from {asked:g} to {used:g}, because the Gram matrix is close to singular"
            run.note(self.record, f"block {record.block} {record.name}: {raised}")
        self.record.matrices.append(record)

    def _measure(self, streams: Streams, heldout: Windows | None) -> None:
        """Puts sparsity and perplexity into the record, after the last block."""
        model, record, run = self.model, self.record, self.run
        zeros = "" if run.earlier else _zeros_before(record, self.request)  # of another stage they are no news
        run.note(record, *filter(None, (zeros, _kept_at_zero(record))))
        record.sparsity = sum(run.journal.zeros.values()) / sum(matrix.size for matrix in model.matrices())
        if streams.heldout_dense:
            run.reference = Reference(model, streams.heldout_dense)
        for when, states in (("before", streams.heldout_dense), ("after", streams.heldout)):
            if heldout and states:
                to = run.reference_for(model, heldout) if when == "after" else None
                run.progress.stage(0, "perplexity", len(states.tokens))
                record.perplexity[when] = model.measured(states, heldout, run.world, done=run.progress.step, to=to)
        run.clock.lap("perplexity")


def _zeros_before(record: Record, request: Request) -> str:
    """What to note of the weights that were zero in the model that was given; else ""."""
    zeros, revived = (
        sum(int(matrix.stats.get(name, 0)) for matrix in record.matrices) for name in ("zeros_before", "revived")
    )
    weights = sum(math.prod(matrix.shape) for matrix in record.matrices)
    revive = request.revive
    if revived:
        share = f"{100 * revived / zeros:.3g} %"
        allowed = ", as --revive allows" if revive else ""
        return f"{revived:,} of the {zeros:,} weights that were zero in the model no longer are ({share}){allowed}"
    if revive or zeros < FEW_ZEROS * weights:
        return ""
    hint = "" if request.only_rounds else "; --revive prunes as if they were not"
    return (
        f"{zeros:,} weights ({100 * zeros / weights:.3g} %) were zero in the model that was given, and stay zero{hint}"
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
