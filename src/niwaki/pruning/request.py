"""What pruning is asked for, and the pattern of each matrix."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from niwaki.arguments import INTERNAL
from niwaki.checkpoints.reading import Checkpoint
from niwaki.choices import LEAST_SQUARES, NEAREST, TWO_FACTORS
from niwaki.effort import NO_EFFORT, Effort, Planning, make_effort, usual_effort
from niwaki.errors import UnknownNameError, UsageError, named
from niwaki.files import is_model
from niwaki.layer.block_types import BlockGrid
from niwaki.layer.grid import AnyGrid, FloatGrid, Grid, parse_grid
from niwaki.layer.patterns import Among, Fixed, Pattern, TwoFactors, make_pattern
from niwaki.layer.solvers import DEFAULT_SOLVER, MaskThenUpdate, Solver, describe, make_solver
from niwaki.models.layout import Matrix, check_dtypes
from niwaki.models.locate import locate_model
from niwaki.models.streamed import StreamedModel
from niwaki.options import Measurement
from niwaki.quantities import HOW_SPARSE, fraction, parse_range
from niwaki.records.wording import counted
from niwaki.runs.stage import USUAL_WINDOWS, Run
from niwaki.texts.texts import Texts

PatternOf = Callable[[Matrix], Pattern]

#: From so many bits on text would regain less than 0.002 nats of what the nearest numbers of a grid lose.
_FINE = 8
#: Bits of a weight, up to which rows of a matrix make up for each other's rounding: it takes as long as all else.
_MOST_TOGETHER = 5.5


@dataclass(frozen=True)
class Request:
    """What :func:`niwaki.prune` is asked for: its arguments as they were given, and what they stand for.

    UsageError where one is not valid comes from :class:`~niwaki.runs.stage.Stage`, which checks all fields.
    """

    pattern: float | str | Pattern | None = None
    solver: str | Solver | None = None
    effort: str | Effort | None = None
    mask_from: str | Path | None = None
    quantize: str | AnyGrid | None = None
    keep_format: bool = False
    revive: bool = False
    blocks: tuple[int, int] | str | None = None
    #: A note on what is not done of what was asked for.
    left_out: str = field(default="", metadata=INTERNAL)

    def check(self) -> None:
        """UsageError where two arguments exclude each other."""
        if self.keep_format and self.grid:
            raise UsageError(f"weights are on the grid {self.grid} or keep their format, not both; leave one out")
        if self.grid and self.grid.is_mixed and (self.makes_factors or self.rounds_to_nearest):
            what = "of two factors" if self.makes_factors else "without a text"
            raise UsageError(f"mixed bits ({self.grid}) are not for weights {what}; take a whole number of bits")
        if self.grid and not self.grid.keeps_zeros and not self.only_rounds:
            raise UsageError(f"{self.grid} has no zeros to keep; prune onto a grid such as int4:32, or quantize alone")
        if self.makes_factors:
            self._check_factors()
        if self.wanted is not None:
            self.solving.check(self.wanted)

    def _check_factors(self) -> None:
        """UsageError where two factors cannot have what is asked for."""
        if self.mask_source is not None:
            raise UsageError("two factors have their own masks; leave out --mask-from (mask_from)")
        if self.revive:
            raise UsageError("a product of two factors keeps no zeros, with or without revive; leave that out")
        if self.keep_format:
            raise UsageError("two factors are in the dtype of the model or on a grid; leave out keep_format")

    @property
    def makes_factors(self) -> bool:
        """Whether matrices become products of two sparse factors."""
        return self.wanted is not None and self.wanted.has_factors

    @property
    def _usual(self) -> str | Solver:
        """The argument ``solver``, also where none was given."""
        if self.solver is not None:
            return self.solver
        if self.only_rounds:
            return "magnitude"  # which leaves all weights as they are; others would solve for what they have
        # A fraction of zeros is of one matrix.
        return "double-sparse" if TWO_FACTORS in str(self.pattern) else DEFAULT_SOLVER

    @property
    def only_rounds(self) -> bool:
        """Whether no zeros are asked for, and weights are only put on a grid."""
        return fraction(str(self.pattern)) == 0 and self.mask_from is None

    @property
    def rounds_to_nearest(self) -> bool:
        """Whether weights go to the nearest numbers of the grid, whatever inputs they meet, so that no text is read.

        By default that is so for grids of 8 bits.
        """
        if self.grid is None or not self.only_rounds or self.solver is not None:
            return False
        return rounds_to_nearest(self.grid, self.effort)

    @property
    def only_fits(self) -> bool:
        """Whether weights are put on a grid, fitted to their inputs, and no solver was named, which would have none."""
        return self.grid is not None and self.only_rounds and self.solver is None and not self.rounds_to_nearest

    @property
    def method(self) -> str:
        """What the solver is called."""
        if self.rounds_to_nearest:
            return NEAREST
        if self.only_fits:
            return LEAST_SQUARES
        return self._usual if isinstance(self._usual, str) else str(describe(self._usual)["name"])

    @cached_property
    def _updating(self) -> Solver:
        """The solver, without the masks of another one."""
        return make_solver(self._usual) if isinstance(self._usual, str) else self._usual

    @property
    def mask_source(self) -> str | None:
        """Where masks come from, as it was given."""
        return None if self.mask_from is None else str(self.mask_from)

    @cached_property
    def _masking(self) -> tuple[Solver, str | None]:
        """(The solver, with another one's masks where ``mask_from`` names that; ``mask_from``, where it is a model).

        Raises UsageError where it is neither.
        """
        source = self.mask_source
        if source is None or is_model(source):
            return self._updating, source
        try:
            return MaskThenUpdate(make_solver(source), self._updating), None
        except UnknownNameError as error:
            raise UsageError(f"there is no directory {source} to take masks from, and {error}") from None

    @property
    def solving(self) -> Solver:
        """The solver, with the masks of another one if that was asked for."""
        return self._masking[0]

    @property
    def mask_model(self) -> str | None:
        """The pruned model that has the masks, where they come from one."""
        return self._masking[1]

    @property
    def settled_effort(self) -> Effort:
        """The effort, also where none was given."""
        if self.rounds_to_nearest:
            return Effort()
        usual = usual_effort(self.solver, self.mask_from, self.makes_factors or None)
        given = usual if self.effort is None else self.effort
        return make_effort(given) if isinstance(given, str) else given

    def applied_effort(self, predicts: bool = True, writes: bool = True) -> Effort:
        """What of the effort applies here, and to a model that predicts words, or writes them from nothing.

        Where zeros are made, rows that make up for each other's rounding were not shown to gain.
        """
        applied = self.settled_effort.settled(self.shares_zeros, predicts, writes)
        plan, grid = applied.plan, self.grid
        if self.only_rounds:  # there are no zeros to share out, and no weights to choose
            plan = Planning(together=plan.together)
        if grid is None or not self.only_fits or (grid.average or grid.bits) > _MOST_TOGETHER:
            plan = replace(plan, together=0)
        return replace(applied, plan=plan)

    @cached_property
    def wanted(self) -> Pattern | None:
        """The pattern; None where only a mask was given."""
        if self.pattern is None:
            return None
        pattern = make_pattern(self.pattern, self._updating.default_pattern)
        if not isinstance(pattern, TwoFactors):
            return pattern
        if pattern.grid and pattern.grid != self.grid:
            raise UsageError(f"{pattern} counts values on the grid {pattern.grid}; give that grid too, or leave it out")
        # On a grid values have fewer bits, and the same bytes more of them.
        return replace(pattern, grid=self.factor_grid)

    @property
    def factor_grid(self) -> Grid | None:
        """The grid that two factors are put on; UsageError where it is none of whole numbers."""
        if isinstance(grid := self.grid, BlockGrid | FloatGrid):
            raise UsageError(f"two factors are whole numbers on a grid, and not in {grid}; take int8")
        return grid

    @property
    def grid(self) -> AnyGrid | None:
        """The grid that weights are put on, if any."""
        return parse_grid(self.quantize) if isinstance(self.quantize, str) else self.quantize

    def widths(self, matrix: Matrix) -> list[int]:
        """The columns of what is made of ``matrix``: of itself, or of its two factors."""
        columns = matrix.shape[1]
        return [min(matrix.shape), columns] if self.makes_factors else [columns]

    @property
    def shares_zeros(self) -> bool:
        """Whether some matrices may have more zeros than others."""
        return self.mask_model is None and self.wanted is not None and self.wanted.at(0.0) is not None

    def chosen(self, count: int) -> range:
        """The blocks to prune, of ``count``; UsageError where there are no such blocks."""
        start, stop = (parse_range(self.blocks) if isinstance(self.blocks, str) else self.blocks) or (0, count)
        if not 0 <= start < stop <= count:
            raise UsageError(f"invalid range of blocks {start}:{stop}; the model's are 0:{count}")
        return range(start, stop)


def rounds_to_nearest(grid: AnyGrid, effort: str | Effort | None) -> bool:
    """Whether weights without zeros go to the nearest numbers of ``grid``, so that no text is read.

    By default that is so for grids of 8 bits.
    """
    return effort == NO_EFFORT or (effort is None and grid.bits >= _FINE and not grid.is_mixed)


def patterns_of(wanted: Pattern | None, mask_model: str | None, streamed: StreamedModel) -> PatternOf:
    """The pattern of each matrix: the same for all, or the mask that it has in another model.

    With both, a mask with too few zeros for the pattern gets more. All are checked first,
    so that no error comes after hours: UsageError where there is neither, or the pattern does not fit the matrices;
    errors of :func:`~niwaki.models.layout.check_dtypes`.
    """
    matrices = streamed.matrices()
    check_dtypes(streamed.checkpoint, (matrix.key for matrix in matrices))
    if wanted is not None:
        for matrix in matrices:
            with named(matrix.label):
                wanted.check(matrix.shape)
    if mask_model is None:
        if wanted is None:
            raise UsageError(HOW_SPARSE)
        return lambda _: wanted
    lender, own = Checkpoint(locate_model(mask_model)), streamed.checkpoint
    for matrix in matrices:
        shape = own.entries[matrix.key].shape
        if matrix.key not in lender.entries or lender.entries[matrix.key].shape != shape:
            raise UsageError(f"{mask_model} cannot lend its mask: no {matrix.key!r} of shape {shape}")

    def masked(matrix: Matrix) -> Pattern:
        mask = (matrix.read(lender) != 0).to(streamed.device)
        if wanted is None:
            return Fixed(mask)
        extended = Among(wanted, mask)  # with the zeros that are missing, if any are
        return Fixed(mask) if torch.equal(extended.mask(mask.float()), mask) else extended

    return masked


def notes_on_masks(pattern: Pattern | None, source: str | None, streamed: StreamedModel) -> list[str]:
    """What to note where the masks of the model ``source``, if there is one, have other zeros than ``pattern``."""
    if pattern is None or source is None:
        return []
    matrices, lender = streamed.matrices(), Checkpoint(locate_model(source))
    zeros = asked = added = 0
    for matrix in matrices:
        with named(matrix.label):
            mask = matrix.read(lender) != 0
            # With scores 1 for kept and 0 for pruned weights an allowed mask is the best one.
            nearest, extended = (each.mask(mask.float()) for each in (pattern, Among(pattern, mask)))
            zeros += mask.numel() - int(mask.count_nonzero())
            asked += mask.numel() - int(nearest.count_nonzero())
            added += int((mask & ~extended).count_nonzero())
    if not added and zeros == asked:
        return []
    percent = 100 / sum(matrix.size for matrix in matrices)
    how = f"to satisfy it {counted(added, 'weight')} more become zero" if added else "all of them stay"
    return [
        f"the mask of {source} has {zeros:,} zeros ({zeros * percent:.3g} %), and {pattern} asks for {asked:,} "
        f"({asked * percent:.3g} %): {how}"
    ]


# The texts of a stage that puts weights on a grid or makes them zero.


def read_texts(model: StreamedModel, run: Run, measurement: Measurement, calibrates: bool) -> Texts:
    """What the stage ``calibrates`` and measures on; where it rounds to the nearest only the latter, if there is one.

    Errors are as of :meth:`.Texts.read`.
    """
    if not calibrates:
        return Texts.to_measure(model, run.calibration, measurement, USUAL_WINDOWS)
    run.progress.status("reading the text to calibrate on")
    return Texts.read(model, run.written(model, run.calibration), measurement, USUAL_WINDOWS)
