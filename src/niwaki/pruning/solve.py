"""The matrices of a block: each is solved in one of the processes, or its rows are spread over all of them."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from niwaki.errors import NumericalError, named
from niwaki.layer.grid import scale_dtype
from niwaki.layer.patterns import Among, Pattern
from niwaki.layer.patterns.rows import ALL, Rows
from niwaki.layer.problem import Gram, LayerProblem, Solution, relative
from niwaki.layer.rounding import flops, onto_floats, onto_grid
from niwaki.models.block import DecoderBlock
from niwaki.models.gram_capture import InputGram
from niwaki.models.kept_format import KeptFormat
from niwaki.models.layout import Matrix
from niwaki.models.processes import World
from niwaki.pruning.request import PatternOf, Request
from niwaki.records.progress import Progress
from niwaki.records.record import MatrixRecord


class Solved(NamedTuple):
    """A matrix as the checkpoint has it, with its scales if it is on a grid or in a format that is kept."""

    stored: Tensor
    scales: Tensor | None
    record: MatrixRecord


@dataclass
class BlockSolver:
    """Solves the matrices of one block after the other; all processes call it alike."""

    request: Request
    kept: KeptFormat | None
    pattern_of: PatternOf
    importance: Mapping[tuple[int, str], Tensor]
    world: World
    progress: Progress

    def solve(self, block: DecoderBlock, grams: list[InputGram], keep: Callable[[Matrix, Solved], None]) -> None:
        """Gives the result of each matrix to ``keep``, in the same order in all processes; ``grams`` becomes empty."""
        names = [name for inputs in grams for name in inputs.names]
        matrices = {matrix.name: matrix for matrix in block.matrices if matrix.name in names}
        costs = [self._flops(*matrices[name].shape) for name in names]
        owners = self.world.owners(costs, lambda i: self._cost_together(matrices[names[i]]))
        owner = dict(zip(names, owners, strict=True))
        results: dict[str, Solved] = {}
        block.release(matrices.values())
        for inputs in grams:
            shared = [matrices[name] for name in inputs.names if owner[name] is None]
            if shared:
                gram = inputs.gram(shared=len(shared) > 1)
            for matrix in shared:
                results[matrix.name] = self._solve(block, matrix, gram, inputs, self.world.rows(matrix.shape[0]))
                self.progress.step()
        while grams:
            inputs = grams.pop(0)
            mine = [matrices[name] for name in inputs.names if owner[name] == self.world.rank]
            gram = inputs.gram(shared=len(mine) > 1)
            for matrix in mine:
                results[matrix.name] = self._solve(block, matrix, gram, inputs)
                self.progress.step()
                if self.world.size == 1:
                    keep(matrix, results.pop(matrix.name))
        if self.world.size == 1:
            return
        for name in names:  # in the order of computation, whoever was first
            matrix, source, own = matrices[name], owner[name], results.pop(name, None)
            result = own if source is None else self._received(block, matrix, own, source)
            assert result is not None
            if own is None:
                self.progress.step()
            keep(matrix, result)

    def _received(self, block: DecoderBlock, matrix: Matrix, solved: Solved | None, source: int) -> Solved:
        """The result of process ``source``, which has it as ``solved``."""
        record = self.world.received(solved and solved.record, source)
        assert record is not None
        stored = self.world.send(solved.stored if solved else block.empty(matrix), source)
        scales = solved.scales if solved else None
        if scales is None and (place := self._scales_place(matrix, stored.dtype)):
            scales = torch.empty(place[0], dtype=place[1], device=stored.device)
        if scales is not None:
            self.world.send(scales, source)
        return Solved(stored, scales, record)

    def _scales_place(self, matrix: Matrix, stored: torch.dtype) -> tuple[tuple[int, int], torch.dtype] | None:
        """Shape and dtype of the scales of ``matrix``; None where it has none."""
        if grid := self.request.grid:
            return (matrix.shape[0], grid.groups(matrix.shape[1])), scale_dtype(stored)
        numbers = self.kept.of(matrix) if self.kept else None
        return (numbers.tiles(matrix.shape), torch.float32) if numbers else None

    def _cost_together(self, matrix: Matrix) -> float | None:
        """What a matrix costs each process if all have some of its rows; None if its rows depend on each other."""
        if self.kept and self.kept.of(matrix):  # rows share scales
            return None
        rows, columns = matrix.shape
        separable = rows >= self.world.size and self.request.solver.separable_rows
        if separable and self.pattern_of(matrix).for_rows(self.world.rows(rows)) is not None:
            return self._flops(math.ceil(rows / self.world.size), columns)
        return None

    def _flops(self, rows: int, columns: int) -> float:
        return self.request.solver.flops(rows, columns) + (flops(rows, columns) if self.request.grid else 0.0)

    def _solve(self, block: DecoderBlock, matrix: Matrix, gram: Gram, inputs: InputGram, rows: Rows = ALL) -> Solved:
        """The whole matrix, also where this process has only some ``rows`` of it."""
        began = time.perf_counter()
        with named(matrix.label):
            W = block.weight(matrix)
            places = W != 0 if int(W.count_nonzero()) < W.numel() else None
            W = rows.own(W)
            weights = self.importance.get(matrix.place)
            if weights is not None:
                weights = rows.own(weights).unsqueeze(1).to(W.device)
                W = W.mul_(weights)
            problem = LayerProblem(W, gram)
            del W
            # With a monitor solvers may ask the pattern more often, and only the first process has one.
            watched = self.progress.wants_steps and rows is ALL
            monitor = partial(self.progress.solving, matrix.name) if watched else None
            solution = self.request.solver(problem, self._pattern(matrix, places, rows), monitor)
            if weights is not None:
                problem = LayerProblem(problem.W.div_(weights), gram)
                solution = problem.solution(solution.W.div_(weights), solution.mask, **solution.stats)
            if places is not None and (idle := rows.total(int((solution.mask & (solution.W == 0)).count_nonzero()))):
                solution = replace(solution, stats={**solution.stats, "kept_at_zero": idle})
            # The weights themselves are rounded, not what importance makes of them.
            solution, scales, error = self._rounded(matrix, block.stored_dtype(matrix), problem, solution, rows)
            stored = block.stored(matrix, rows.joined(solution.W))
        stats = solution.stats
        if places is not None:
            W = stored.T if matrix.is_stored_transposed else stored
            revived = int(W.masked_fill(places, 0.0).count_nonzero())
            stats = {**stats, "zeros_before": places.numel() - int(places.count_nonzero()), "revived": revived}
        sparsity = (stored.numel() - int(stored.count_nonzero())) / stored.numel()
        seconds = time.perf_counter() - began
        record = MatrixRecord(block.index, matrix.name, matrix.shape, sparsity, error, seconds, inputs.tokens, stats)
        return Solved(stored, scales, record)

    def _pattern(self, matrix: Matrix, places: Tensor | None, rows: Rows) -> Pattern:
        """That of these ``rows`` of ``matrix``, whose weights are not zero at ``places``, or nowhere."""
        pattern: Pattern | None = self.pattern_of(matrix)
        if pattern is not None and places is not None and not self.request.revive:
            pattern = Among(pattern, places)
        if pattern is not None and rows is not ALL:
            pattern = pattern.for_rows(rows)
        assert pattern is not None
        return pattern

    def _rounded(
        self, matrix: Matrix, stored_as: torch.dtype, problem: LayerProblem, solution: Solution, rows: Rows
    ) -> tuple[Solution, Tensor | None, float]:
        """(The solution on the grid or in the format that is kept, if any; its scales; the error of all rows)."""
        error, scales = _error(problem, solution, rows), None
        if self.request.grid:
            before, stats = solution.W != 0, solution.stats
            solution, scales = onto_grid(problem, solution, self.request.grid, scale_dtype(stored_as))
            after = solution.W != 0
            lost, raised = (rows.total(int(each.count_nonzero())) for each in (before & ~after, after & ~before))
            stats = {**stats, "error_before_rounding": error, "rounded_to_zero": lost}
            if raised:  # kept weights of 0
                stats["revived_by_rounding"] = raised
            solution = replace(solution, stats=stats)
            scales = rows.joined(scales).to(scale_dtype(stored_as))
            error = _error(problem, solution, rows)
        elif self.kept and (numbers := self.kept.of(matrix)):
            solution, scales = onto_floats(problem, solution, numbers, self.kept.scales(matrix).to(problem.W.device))
            solution = replace(solution, stats={**solution.stats, "error_before_rounding": error})
            error = solution.error
        return solution, scales, error


def _error(problem: LayerProblem, solution: Solution, rows: Rows) -> float:
    """The error of a whole matrix, of which ``problem`` and ``solution`` are ``rows``."""
    error = solution.error
    if rows is not ALL:
        power = problem.power
        loss = error * power if power > 0 else problem.loss(solution.W)
        error = relative(*rows.sum(torch.tensor([loss, power], dtype=torch.float64)).tolist())
    if not math.isfinite(error):
        raise NumericalError(f"the error of its outputs is {error}; its weights or inputs are too large, or not finite")
    return error
