"""The matrices of a block: each is solved in one of the processes, or its rows are spread over all of them."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from niwaki.errors import NumericalError, named
from niwaki.layer.patterns import Among, Pattern
from niwaki.layer.patterns.rows import ALL, Rows
from niwaki.layer.problem import Gram, LayerProblem, Solution, relative
from niwaki.models.block import DecoderBlock
from niwaki.models.formats import WeightFormat
from niwaki.models.gram_capture import InputGram
from niwaki.models.layout import Matrix
from niwaki.models.processes import World
from niwaki.pruning.plan import Plan
from niwaki.pruning.request import PatternOf, Request
from niwaki.records.progress import Progress
from niwaki.records.record import MatrixRecord


class Solved(NamedTuple):
    """A matrix as the checkpoint has it, with the further parts that it has in its format."""

    stored: Tensor
    parts: tuple[Tensor, ...]
    record: MatrixRecord


@dataclass
class BlockSolver:
    """Solves the matrices of one block after the other; all processes call it alike."""

    request: Request
    format: WeightFormat
    pattern_of: PatternOf
    plan: Plan
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

    def round(self, block: DecoderBlock, keep: Callable[[Matrix, Solved], None]) -> None:
        """Gives each matrix to ``keep`` with its weights rounded to the nearest, in all processes alike."""
        block.release(block.matrices)
        for matrix in block.matrices:
            keep(matrix, self._rounded(block, matrix))
            self.progress.step()

    def _rounded(self, block: DecoderBlock, matrix: Matrix) -> Solved:
        began, stored_as = time.perf_counter(), block.stored_dtype(matrix)
        with named(matrix.label):
            W = block.weight(matrix)
            rounded, parts = self.format.nearest(matrix, W, stored_as)
            stored = block.stored(matrix, rounded)
        error = relative(float((rounded - W).square().sum()), float(W.square().sum()))
        places = W != 0
        lost = int(places.count_nonzero()) - int(rounded.count_nonzero())
        stats: dict[str, float | int | str] = {"error_before_rounding": 0.0, "rounded_to_zero": lost}
        if not bool(places.all()):
            stats |= _zeros(matrix, stored, places)
        sparsity, seconds = self.format.zeros(stored, parts) / stored.numel(), time.perf_counter() - began
        return Solved(
            stored, parts, MatrixRecord(block.index, matrix.name, matrix.shape, sparsity, error, seconds, 0, stats)
        )

    def _received(self, block: DecoderBlock, matrix: Matrix, solved: Solved | None, source: int) -> Solved:
        """The result of process ``source``, which has it as ``solved``."""
        record = self.world.received(solved and solved.record, source)
        assert record is not None
        stored = self.world.send(solved.stored if solved else block.empty(matrix), source)
        like = self.format.parts_like(matrix, stored.dtype)
        empty = (torch.empty(shape, dtype=dtype, device=stored.device) for shape, dtype in like)
        parts = tuple(self.world.send(part, source) for part in (solved.parts if solved else empty))
        return Solved(stored, parts, record)

    def _cost_together(self, matrix: Matrix) -> float | None:
        """What a matrix costs each process if all have some of its rows; None if its rows depend on each other."""
        (rows, columns), size = matrix.shape, self.world.size
        separable = self.request.solving.separable_rows and self.format.is_separable(matrix)
        separable &= matrix.place not in self.plan.together
        if not separable or rows < size or self.pattern_of(matrix).for_rows(self.world.rows(rows)) is None:
            return None
        return self._flops(math.ceil(rows / size), columns)

    def _flops(self, rows: int, columns: int) -> float:
        return self.request.solving.flops(rows, columns) + self.format.round_flops(rows, columns)

    def _solve(self, block: DecoderBlock, matrix: Matrix, gram: Gram, inputs: InputGram, rows: Rows = ALL) -> Solved:
        """The whole matrix, also where this process has only some ``rows`` of it."""
        began = time.perf_counter()
        with named(matrix.label):
            W = block.weight(matrix)
            places = W != 0 if int(W.count_nonzero()) < W.numel() else None
            problem, solution = self._solution(matrix, rows.own(W), gram, self._pattern(matrix, places, rows), rows)
            if places is not None and solution.factors is None:
                idle = rows.total(int((solution.mask & (solution.W == 0)).count_nonzero()))
                solution = _with_stats(solution, kept_at_zero=idle) if idle else solution
            parts: tuple[Tensor, ...] = ()
            error, stored_as = _error(problem, solution, rows), block.stored_dtype(matrix)
            if self.format.parts_like(matrix, stored_as):
                solution = _with_stats(solution, error_before_rounding=error)
                if (together := self.plan.together.get(matrix.place)) is not None:
                    problem = replace(problem, together=together.to(W.device))
                # The weights themselves are rounded, not what importance makes of them.
                solution, parts = self.format.rounded(matrix, problem, solution, rows, stored_as)
                error = _error(problem, solution, rows)
            stored = block.stored(matrix, rows.joined(solution.W))
        if places is not None:
            solution = _with_stats(solution, **_zeros(matrix, stored, places))
        sparsity = self.format.zeros(stored, parts) / stored.numel()
        seconds, stats = time.perf_counter() - began, solution.stats
        record = MatrixRecord(block.index, matrix.name, matrix.shape, sparsity, error, seconds, inputs.tokens, stats)
        return Solved(stored, parts, record)

    def _solution(
        self, matrix: Matrix, W: Tensor, gram: Gram, pattern: Pattern, rows: Rows
    ) -> tuple[LayerProblem, Solution]:
        """(The problem of these ``rows`` of ``matrix``, its solution), which importance has no part in any more."""
        weights = self.plan.importance.get(matrix.place)
        if weights is not None:
            weights = rows.own(weights).unsqueeze(1).to(W.device)
            W.mul_(weights)
        problem = LayerProblem(W, gram)
        # With a monitor solvers may ask the pattern more often, and only the first process has one.
        watched = self.progress.wants_steps and rows is ALL
        monitor = partial(self.progress.solving, matrix.name) if watched else None
        solution = self.request.solving(problem, pattern, monitor)
        if weights is not None:
            problem = LayerProblem(problem.W.div_(weights), gram)
            factors = solution.factors and (solution.factors[0] / weights, solution.factors[1])
            solution = problem.solution(solution.W.div_(weights), solution.mask, **solution.stats)
            solution = replace(solution, factors=factors)
        return problem, solution

    def _pattern(self, matrix: Matrix, places: Tensor | None, rows: Rows) -> Pattern:
        """The pattern of these ``rows`` of ``matrix``, whose weights are not zero at ``places``, or nowhere."""
        pattern = self.pattern_of(matrix)
        # A product has no zeros to keep.
        if places is not None and not (self.request.revive or pattern.has_factors):
            pattern = Among(pattern, places)
        of_rows = pattern if rows is ALL else pattern.for_rows(rows)
        assert of_rows is not None
        return of_rows


def _with_stats(solution: Solution, **stats: float | int | str) -> Solution:
    return replace(solution, stats={**solution.stats, **stats})


def _zeros(matrix: Matrix, stored: Tensor, places: Tensor) -> dict[str, int]:
    """How many weights of a matrix were zero, those not at ``places``, and how many of these no longer are."""
    W = stored.T if matrix.is_stored_transposed else stored
    revived = int(W.masked_fill(places, 0.0).count_nonzero())
    return {"zeros_before": places.numel() - int(places.count_nonzero()), "revived": revived}


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
