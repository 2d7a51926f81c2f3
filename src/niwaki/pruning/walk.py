"""The walk over the blocks: inputs in, matrices solved, weights and measurements out."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import NamedTuple

import torch
from torch import Tensor

from niwaki.errors import NumericalError
from niwaki.layer.dense_targets import dense_targets
from niwaki.layer.grid import Grid, scale_dtype
from niwaki.layer.patterns import Pattern
from niwaki.layer.patterns.rows import ALL, Rows
from niwaki.layer.problem import Gram, LayerProblem, Monitor, Solution, relative
from niwaki.layer.rounding import flops, onto_grid
from niwaki.layer.solvers import Solver
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
from niwaki.pruning.effort import Effort
from niwaki.pruning.fit import batches, fit, tokens_per_part
from niwaki.pruning.masks import PatternOf, named
from niwaki.pruning.own_text import steps, synthesize
from niwaki.pruning.plan import Plan, plan
from niwaki.records.clock import Clock
from niwaki.records.progress import Progress
from niwaki.records.record import MatrixRecord, Perplexity, Record


class Walk:
    """The walk over the blocks.

    Attributes:
        record: Of the run.
        clock: Likewise.
    """

    def __init__(
        self,
        model: StreamedModel,
        solver: Solver,
        effort: Effort,
        pattern_of: PatternOf,
        grid: Grid | None,
        memory: int | None,
        record: Record,
        progress: Progress,
        clock: Clock,
        world: World,
        journal: Journal,
    ) -> None:
        self._model = model
        self._solver = solver
        self._effort = effort
        self._usual = pattern_of
        self._memory = memory
        self._plan = Plan()
        self._grid = grid
        #: Of the present block's matrices, by name.
        self._scales: dict[str, Tensor] = {}
        self.record = record
        self._progress = progress
        self.clock = clock
        self._world = world
        self._journal = journal
        self._writer: CheckpointWriter | None = None

    def blocks(
        self,
        windows: Windows,
        held: Windows | None,
        measure: str,
        writer: CheckpointWriter | None = None,
        place: Workplace | None = None,
    ) -> None:
        """Walks; the first of the processes has a ``writer`` and a ``place`` for the journal."""
        model, progress, clock = self._model, self._progress, self.clock
        self._writer = writer
        stop = model.matrices()[-1].block + 1
        progress.begin(self.record, len(model.blocks) if held else stop, len(model.matrices()))
        self._plan = self._planned(windows, place)
        if self._plan.synthetic is not None:
            own = self._world.share(self._plan.synthetic)
            windows = dataclasses.replace(windows, tokens=torch.cat([windows.tokens, own]))
        clock.lap("plan")
        part = tokens_per_part(self._effort, self._world) if self._effort.epochs else None
        tokens, dense_tokens = self._divided(windows.tokens)
        states = model.embed(tokens, part)
        # The same text in the dense model, next to that in the pruned one, as far as it is needed.
        origin = model.embed(dense_tokens, part) if self._effort.dense else None
        dense = model.embed(held.tokens) if held and measure == "both" else None
        pruned = model.embed(held.tokens) if held and measure != "none" else None
        clock.lap("capture")
        if model.room.outside:
            self._note(f"{model.room.outside / 2**20:,.1f} MiB of hidden states are in a file, for want of memory")
        done = self._journal.blocks
        for block in model.stream():
            if block.index >= stop and not held:
                break
            clock.lap("read")
            last = block.index >= stop - 1
            if dense:
                block.advance(dense)
            if block.index < done:
                if origin and not last:
                    block.advance(origin)
                self._restore(block, block.matrices, self._effort.fits_norms)
            elif block.matrices:
                self._prune(block, states, origin, last)
                if writer and place:
                    writer.sync()
                    self.record.seconds = dict(clock.seconds)
                    place.save(blocks=block.index + 1, record=self.record.to_json())
                clock.lap("write")
            elif origin and not last:
                block.advance(origin)
            progress.stage(block.index, "advance", len(states.hidden))
            if pruned:
                block.advance(pruned)
            if not last:
                block.advance(states, progress.step)
            clock.lap("advance")
        total = sum(rows * columns for rows, columns in (m.shape for m in model.matrices()))
        self.record.sparsity = sum(self._journal.zeros.values()) / total
        for name, end in (("before", dense), ("after", pruned)):
            if held and end:
                losses = self._world.joined(model.losses(end))
                measured = Perplexity.of(losses, held.source, held.origin)
                self.record.perplexity[name] = dataclasses.asdict(measured)
        clock.lap("perplexity")
        self.record.peak_memory = {
            where: max(found[where] for found in self._world.collected(peak_memory(model.device)))
            for where in peak_memory(model.device)
        }

    def _divided(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """``tokens`` in an order in which the first ones are those of which the dense model's states are needed."""
        share = self._effort.epochs
        if self._effort.dense_targets or not 0 < share < 1:
            return tokens, tokens
        order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))
        return tokens[order], tokens[order[: max(1, round(share * len(tokens)))]]

    def _planned(self, windows: Windows, place: Workplace | None) -> Plan:
        """The plan for all processes: of a run that was stopped the one that it had."""
        if not self._effort.plans:
            return Plan()
        if self._journal.blocks:
            return self._world.told(Plan.load(place.plan) if place else Plan())
        made = plan(
            self._model,
            self._effort,
            self._usual,
            windows.tokens,
            self.record.tf32,
            self._world,
            self._progress,
        )
        if self._effort.synthetic:
            made = dataclasses.replace(made, synthetic=self._synthesized(windows))
        if place:
            made.save(place.plan)
        return made

    def _synthesized(self, windows: Windows) -> Tensor | None:
        """Text of the dense model's own for all processes, if there is memory for it."""
        given = sum(self._world.collected(len(windows.tokens)))
        count = max(self._world.size, round(self._effort.synthetic * given))
        mine = math.ceil(count / self._world.size)
        length = windows.tokens.shape[1]
        self._progress.stage(0, "synthesis", steps(self._model, length, mine, self._memory))
        found = synthesize(self._model, windows.tokens, count, self._memory, self._world, self._progress.step)
        self.record.calibration["synthetic"] = 0 if found is None else count
        if found is None:
            self._note(
                f"the dense model wrote no text to calibrate on: its {self._model.size / 2**30:,.1f} GiB do not fit in "
                "memory; more --samples of real text do as well"
            )
        return found

    def _pattern_of(self, matrix: Matrix) -> Pattern:
        return self._plan.pattern(matrix, self._usual(matrix))

    def _restore(self, block: DecoderBlock, matrices: list[Matrix], vectors: bool = False) -> None:
        """Puts the weights into ``block`` that were written for it, by this run or an earlier one."""
        for matrix in matrices:
            stored = block.empty(matrix)
            if self._writer:
                stored.copy_(self._writer.read(matrix.key, matrix.part))
            block.put(matrix, self._world.send(stored, 0))
        for name, key in block.vectors.items() if vectors and matrices else ():
            value = block.vector(name)
            if self._writer:
                value.copy_(self._writer.read(key))
            self._world.send(value, 0)

    def _prune(self, block: DecoderBlock, states: HiddenStates, origin: HiddenStates | None, last: bool) -> None:
        """Prunes the matrices of a block, and fits it if asked for.

        ``origin``, the inputs of the dense block, become its outputs, unless this is the last block and nothing needs
        them.
        """
        effort, progress, clock = self._effort, self._progress, self.clock
        experts: list[_Counts] = []
        if origin:
            block.keep()
        for group in block.groups(states) if effort.groups else [block.matrices]:
            progress.stage(block.index, "capture", len(states.hidden))
            grams = block.input_grams(
                states,
                progress.step,
                self._world,
                self.record.tf32,
                group,
                origin if effort.dense_targets else None,
            )
            clock.lap("capture")
            experts += _counts(grams, {matrix.name for matrix in group if matrix.expert is not None})
            progress.stage(block.index, "solve", len(group))
            self._solve_all(block, grams)
            clock.lap("solve")
            if block.released:
                self._restore(block, group)
            clock.lap("write")
        self._note_loans(block, experts)
        if origin and (effort.epochs or not last):
            with block.original():
                block.advance(origin, inner=effort.fits_apart)
            clock.lap("advance")
        if origin and effort.epochs:
            progress.stage(block.index, "fit", batches(states, origin, effort, self._world))
            on_grid = self._nearest if self._grid else None
            self.record.fits.append(fit(block, states, origin, effort, self._world, progress.step, on_grid))
            for key, part, stored in block.trained(effort.norms):
                if self._writer:
                    self._writer.write(key, stored, part)
            clock.lap("fit")

    def _solve_all(self, block: DecoderBlock, grams: list[InputGram]) -> None:
        """Solves the matrices with these inputs, each in one process or the rows in all, and tells the results to all.

        ``grams`` is empty then: each goes when it is not needed any more.
        """
        names = [name for inputs in grams for name in inputs.names]
        matrices = {matrix.name: matrix for matrix in block.matrices if matrix.name in names}
        costs = [self._flops(*matrices[name].shape) for name in names]
        owners = self._world.owners(costs, lambda i: self._cost_together(matrices[names[i]]))
        owner = dict(zip(names, owners, strict=True))
        found: dict[str, _Solved] = {}
        block.release(matrices.values())
        for inputs in grams:
            shared = [matrices[name] for name in inputs.names if owner[name] is None]
            if shared:
                gram = Gram(inputs.H, shared=len(shared) > 1, mean=inputs.mean)
            for matrix in shared:
                rows = self._world.rows(matrix.shape[0])
                found[matrix.name] = self._solve(block, matrix, gram, inputs, rows)
                self._progress.step()
        while grams:
            inputs = grams.pop(0)
            mine = [matrices[name] for name in inputs.names if owner[name] == self._world.rank]
            gram = Gram(inputs.H, shared=len(mine) > 1, mean=inputs.mean)
            for matrix in mine:
                solved = self._solve(block, matrix, gram, inputs)
                self._progress.step()
                if self._world.size == 1:
                    self._keep(block, matrix, solved)
                else:
                    found[matrix.name] = solved
                del solved
        if self._world.size == 1:
            return
        for name in names:  # in the order of computation, whoever was first
            matrix, mine_, source = matrices[name], name in found, owner[name]
            result = found.pop(name) if mine_ else None
            if source is not None:
                result = self._sent(block, matrix, result, source)
            assert result is not None
            if not mine_:
                self._progress.step()
            self._keep(block, matrix, result)

    def _sent(self, block: DecoderBlock, matrix: Matrix, solved: _Solved | None, source: int) -> _Solved:
        """What process ``source`` has as ``solved``."""
        done = self._world.told(solved and solved.record, source)
        assert done is not None
        stored = self._world.send(solved.stored if solved else block.empty(matrix), source)
        if not self._grid:
            return _Solved(stored, None, done)
        rows, columns = matrix.shape
        shape, dtype = (rows, self._grid.groups(columns)), scale_dtype(stored.dtype)
        scales = solved.scales if solved else torch.empty(shape, dtype=dtype, device=stored.device)
        assert scales is not None
        return _Solved(stored, self._world.send(scales, source), done)

    def _keep(self, block: DecoderBlock, matrix: Matrix, solved: _Solved) -> None:
        """Writes a matrix as it is solved, and what was found."""
        stored, scales, done = solved
        self._progress.solved(done)
        if not block.released:
            block.put(matrix, stored)
        if self._writer:
            self._writer.write(matrix.key, stored, matrix.part)
        if scales is not None:
            self._scales[matrix.name] = scales
            if self._writer:
                self._writer.write(scale_key(matrix), scales, matrix.part)
        zeros = stored.numel() - int(stored.count_nonzero())
        self._journal.zeros[matrix.key] = self._journal.zeros.get(matrix.key, 0) + zeros
        self._note_damping(done)
        self.record.matrices.append(done)

    def _cost_together(self, matrix: Matrix) -> float | None:
        """What a matrix costs each process that has some of its rows; None if rows cannot be solved apart."""
        rows, columns = matrix.shape
        if rows < self._world.size or not self._solver.rows_apart:
            return None
        if self._pattern_of(matrix).among(self._world.rows(rows)) is None:
            return None
        return self._flops(math.ceil(rows / self._world.size), columns)

    def _flops(self, rows: int, columns: int) -> float:
        return self._solver.flops(rows, columns) + (flops(rows, columns) if self._grid else 0.0)

    def _nearest(self, matrix: Matrix, W: Tensor) -> Tensor:
        """(out, in), W on the grid that ``matrix`` has in the present block, with the same zeros."""
        assert self._grid is not None
        scales = self._scales[matrix.name]
        return self._grid.project(W, scales.float(), scales.dtype, same_zeros=True)

    def _solve(self, block: DecoderBlock, matrix: Matrix, gram: Gram, inputs: InputGram, rows: Rows = ALL) -> _Solved:
        """Of the whole matrix, also where ``rows`` are only some of it."""
        began = time.perf_counter()
        with named(matrix):
            W = rows.own(block.weight(matrix))
            if inputs.cross is not None:
                W = dense_targets(W, gram, inputs.cross, self._effort.dense_targets, self._effort.ridge)
            weights = self._plan.importance.get((matrix.block, matrix.name))
            if weights is not None:
                weights = rows.own(weights).unsqueeze(1).to(W.device)
                W = W.mul_(weights)
            problem = LayerProblem(W, gram)
            del W
            pattern, monitor = self._pattern_of(matrix), self._monitor(matrix.name)
            if rows is not ALL:
                among = pattern.among(rows)
                assert among is not None
                # For a monitor solvers may ask the pattern more, and only the first process has one.
                pattern, monitor = among, None
            solution = self._solver(problem, pattern, monitor)
            if weights is not None:
                problem = LayerProblem(problem.W.div_(weights), gram)
                solution = problem.solution(solution.W.div_(weights), solution.mask, **solution.stats)
            error, stats, scales = _error(problem, solution, rows), solution.stats, None
            stored_as = block.dtype(matrix)
            if self._grid:  # the weights themselves are on it, not what importance makes of them
                kept = int(solution.W.count_nonzero())
                solution, scales = onto_grid(problem, solution, self._grid, scale_dtype(stored_as))
                lost = rows.total(kept - int(solution.W.count_nonzero()))
                stats = {**stats, "error_before_rounding": error, "rounded_to_zero": lost}
                scales = rows.joined(scales).to(scale_dtype(stored_as))
                error = _error(problem, solution, rows)
            stored = block.stored(matrix, rows.joined(solution.W))
        sparsity = (stored.numel() - int(stored.count_nonzero())) / stored.numel()
        seconds = time.perf_counter() - began
        done = MatrixRecord(block.index, matrix.name, matrix.shape, sparsity, error, seconds, inputs.tokens, stats)
        return _Solved(stored, scales, done)

    def _monitor(self, name: str) -> Monitor | None:
        if not self._progress.wants_steps:
            return None
        return lambda step, steps, error: self._progress.solving(name, step, steps, error)

    def _note_loans(self, block: DecoderBlock, experts: list[_Counts]) -> None:
        poor = [counts for counts in experts if counts.borrowed]
        if poor:
            fewest = min(poor, key=lambda counts: counts.tokens / counts.width)
            self._note(
                f"block {block.index}: {len(poor)} of {len(experts)} inputs of experts had fewer tokens than inputs "
                f"(fewest: {', '.join(fewest.names)}, {fewest.tokens:,} of {fewest.width:,}); the mean of all "
                "experts stands in for what is missing"
            )

    def _note_damping(self, matrix: MatrixRecord) -> None:
        asked, used = matrix.stats.get("damping_asked"), matrix.stats.get("damping")
        if isinstance(asked, float) and isinstance(used, float) and used > asked * 1.01 + 1e-6:
            self._note(
                f"block {matrix.block} {matrix.name}: damping raised from {asked:g} to {used:g}, "
                "because the Gram matrix is close to singular"
            )

    def _note(self, text: str) -> None:
        if text not in self.record.notes:  # by an earlier run that this one goes on with
            self.record.notes.append(text)
        self._progress.note(text)


class _Solved(NamedTuple):
    """A matrix as it is stored, with its scales (out, groups) in their dtype if it is on a grid."""

    stored: Tensor
    scales: Tensor | None
    record: MatrixRecord


class _Counts(NamedTuple):
    """What is noted of the inputs of an expert's matrices."""

    names: list[str]
    width: int
    tokens: int
    borrowed: int


def _counts(grams: list[InputGram], experts: set[str]) -> list[_Counts]:
    return [
        _Counts(inputs.names, len(inputs.H), inputs.tokens, inputs.borrowed)
        for inputs in grams
        if inputs.names[0] in experts
    ]


def _error(problem: LayerProblem, solution: Solution, rows: Rows) -> float:
    """The error of a whole matrix, of which ``problem`` and ``solution`` are ``rows``.

    Raises:
        NumericalError: it is not finite.
    """
    error = solution.error
    if rows is not ALL:
        power = problem.power
        loss = error * power if power > 0 else problem.loss(solution.W)
        error = relative(*rows.sum(torch.tensor([loss, power], dtype=torch.float64)).tolist())
    if not math.isfinite(error):
        raise NumericalError(f"the error of its outputs is {error}; its weights or inputs are too large, or not finite")
    return error
