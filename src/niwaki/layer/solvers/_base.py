"""What all solvers have in common, and two of them in sequence."""

import abc
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from niwaki.arguments import check_fields
from niwaki.errors import NumericalError, PatternError, UsageError, shown
from niwaki.layer.patterns import Fixed, Pattern, Unstructured, make_pattern
from niwaki.layer.patterns.rows import ALL
from niwaki.layer.problem import LayerProblem, Monitor, Solution

#: Weights up to 2 to this power, or down to its inverse, have squares and sums of them that float32 holds.
_LARGEST = 50
N = TypeVar("N", int, float)
T = TypeVar("T")


def _checked(call: Callable[..., Solution]) -> Callable[..., Solution]:
    """A solver's ``call``, with arguments and a result that are what they should be."""

    @functools.wraps(call)
    def run(self: "Solver", problem: LayerProblem, pattern: Any, monitor: Monitor | None = None) -> Solution:
        if not isinstance(problem, LayerProblem):
            raise UsageError(f"a solver takes a LayerProblem; got {shown(problem)}")
        pattern = make_pattern(pattern, self.default_pattern)
        self.check(pattern)
        # Processes that have some rows each compare their weights with those of the others.
        if pattern.rows is not ALL or abs(exponent := problem.exponent) <= _LARGEST:
            solution = call(self, problem, pattern, monitor)
        else:
            solution = call(self, problem.times(-exponent), pattern, monitor)
            solution = solution.times(exponent, problem)
        if pattern.rows is ALL and not math.isfinite(solution.error):
            raise NumericalError(
                f"the error of its outputs is {solution.error}: they are 0 without pruning, or beyond {problem.W.dtype}"
            )
        return solution

    return run


@dataclass(frozen=True)
class Solver(abc.ABC):
    """The base class of all solvers, each of which is a frozen dataclass whose fields are its parameters.

    Call it with a problem and a pattern to prune one matrix. On the command line parameters go
    with the name, as in ``adam:iterations=50``. A new solver is one file with one subclass and one line in ``SOLVERS``.

    Raises:
        UsageError: a parameter is out of range.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__call__" in vars(cls):
            cls.__call__ = _checked(cls.__call__)  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        check_fields(self)
        for each in fields(self):
            if "range" in each.metadata:
                self._require(each.name, each.metadata["accepts"](getattr(self, each.name)), each.metadata["range"])

    @abc.abstractmethod
    def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
        """Prunes one matrix without changing W or H; iterative solvers call ``monitor`` after each step.

        Callers may also give the pattern as a fraction of zeros or as text, as for :func:`niwaki.prune`.

        Raises:
            PatternError: the pattern does not fit the shape of W.
            NumericalError: H cannot be factorized, or the result is not finite.
        """

    def flops(self, rows: int, columns: int) -> float:
        """Floating-point operations in products and factorizations for one matrix with an H of its own.

        In this class, it is those that measure the error.
        """
        return 2 * product(rows, columns)

    def check(self, pattern: Pattern) -> None:
        """Raises PatternError if the solver does not support this kind of ``pattern``."""
        if pattern.has_factors:
            raise PatternError(f"only the solver double-sparse makes {pattern}; leave the solver out, or take that one")

    @property
    def separable_rows(self) -> bool:
        """Whether runs of rows may be solved in different processes, each with ``pattern.for_rows`` of its rows.

        True promises that (1) a row depends on the other rows only through the pattern's answers, to within rounding;
        (2) which of the pattern's methods (and ``sparsity``) are called, and in which order, depends only on the
        pattern and on ``pattern.weights``, not on the values or the number of a process's rows, because processes wait
        for each other in these methods; (3) ``stats`` depend only on H.
        """
        return False

    def default_pattern(self, sparsity: float) -> Pattern:
        """The pattern that the method's paper means by "60 % sparsity"."""
        return Unstructured(sparsity)

    def _require(self, name: str, accepted: bool, range_: str) -> None:
        """Raises UsageError unless ``accepted`` and finite, saying what ``name`` should have been."""
        value = getattr(self, name)
        if not accepted or (isinstance(value, float) and not math.isfinite(value)):
            raise UsageError(f"{name} must be {range_}; got {value!r}")


@dataclass(frozen=True)
class MaskThenUpdate(Solver):
    """Two solvers in sequence: ``mask`` chooses the weights that stay, and ``update`` refits the dense ones to it.

    On the command line it is written ``mask+update``; more than two are taken from left to right.
    """

    mask: Solver
    update: Solver

    def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
        mask = self.mask(problem, pattern).mask
        return self.update(problem, Fixed(mask, rows=pattern.rows), monitor)

    def check(self, pattern: Pattern) -> None:
        self.mask.check(pattern)
        self.update.check(pattern)

    @property
    def separable_rows(self) -> bool:
        return self.mask.separable_rows and self.update.separable_rows

    def flops(self, rows: int, columns: int) -> float:
        return self.mask.flops(rows, columns) + self.update.flops(rows, columns)

    def default_pattern(self, sparsity: float) -> Pattern:
        return self.mask.default_pattern(sparsity)


def parameter(default: T, range_: str, accepts: Callable[[T], bool]) -> T:
    """A parameter with this default, and its range in words and as a test, which finite numbers have to pass."""
    return field(default=default, metadata={"range": range_, "accepts": accepts})


def at_least(least: int, default: N) -> N:
    """A parameter with this default, which is at least ``least``."""
    return parameter(default, f"{least} or more", lambda value: value >= least)


def above_0(default: float) -> float:
    """A parameter with this default, which is above 0."""
    return parameter(default, "above 0", lambda value: value > 0)


def product(rows: int, columns: int) -> float:
    """Floating-point operations of a product (out, in) x (in, in)."""
    return 2.0 * rows * columns**2
