"""The layer-wise problem, and its solution.

    minimize  tr((W - What) H (W - What)^T)  =  |X W^T - X What^T|^2 / tokens,   H = X^T X / tokens,

over What whose support a pattern allows. X (tokens, in) are the layer's inputs on the calibration text. An objective
with other targets is the same problem with another W.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from niwaki.errors import NumericalError, UsageError, shown
from niwaki.layer.linalg import STRIP, is_finite, quadratic_form

T = TypeVar("T")

#: What rounding may leave of symmetry, and of eigenvalues that are 0, relative to a unit diagonal: much less than the
#: damping of solvers, and more than sums of many tokens in float32 do.
_ROUNDING = 1e-3
#: What is added to the damping for each input of a token: see benchmarks/LOG.md, "Damping".
_SAMPLING = 13.0
#: The most that is added for that.
_MOST_SAMPLING = 0.28


@runtime_checkable
class Monitor(Protocol):
    """A function that a solver calls after each of its steps; anything that takes three numbers will do."""

    def __call__(self, step: int, steps: int, error: float, /) -> None:
        """Called after ``step`` of ``steps`` with the relative squared ``error``, estimated from some of the rows."""


class Gram:
    """The Gram matrix H = X^T X / tokens of a layer's inputs, and what solvers derive from it.

    Make one if several matrices have the same input, so that they share factorizations.

    Args:
        H: (in, in) float32 or float64, symmetric and positive semidefinite. It is not changed.
        shared: Whether several problems use it, so that factorizations are worth the memory to keep them.
        trusted: Whether H is known to be X^T X / tokens of some X, so that it need not be checked.
        tokens: Number of tokens, if known: the fewer there are, the more the default solver damps H.

    Raises:
        UsageError: H cannot be a Gram matrix.
        NumericalError: H has NaN or infinite entries.
    """

    def __init__(
        self,
        H: Tensor,
        shared: bool = True,
        trusted: bool = False,
        tokens: int | None = None,
    ) -> None:
        H = _numbers("the Gram matrix", H)
        if H.shape[0] != H.shape[1] or not len(H):
            raise UsageError(f"a Gram matrix is square (in, in); got {tuple(H.shape)}")
        self.H, self.shared, self.tokens = H, shared, tokens
        self._ridge = torch.zeros_like(H.diagonal())  # see damped
        self._memo: dict[Any, Any] = {}
        if not trusted and (fault := self._fault()):
            raise UsageError(f"H {fault}, and is not a Gram matrix; compute it as X.T @ X / len(X) from X (tokens, in)")

    def _fault(self) -> str:
        """What a symmetric, positive semidefinite matrix has not, up to rounding; "" for nothing."""
        if (self.H.diagonal() < 0).any():
            return "has an entry below 0 on its diagonal"
        # What underflows on the diagonal does not elsewhere.
        norm = (self.H.diagonal() + torch.finfo(self.H.dtype).tiny).sqrt()
        strips = zip(self.H.split(STRIP), self.H.split(STRIP, dim=1), norm.split(STRIP), strict=True)
        for rows, columns, norms in strips:
            scaled = rows / norm / norms.unsqueeze(1)
            if scaled.abs().max() > 1 + _ROUNDING:
                return "has an entry H_ij above the root of H_ii H_jj"
            if (scaled - columns.T / norm / norms.unsqueeze(1)).abs().max() > _ROUNDING:
                return "is not symmetric"
        H = self.live()
        H.diagonal().add_(_ROUNDING)
        return "has eigenvalues below 0" if torch.linalg.cholesky_ex(H)[1] else ""

    @cached_property
    def norm(self) -> Tensor:
        """(in,) root mean square of each input; 0 for an input that is never active."""
        return (self.H.diagonal().clamp(min=0) + self._ridge).sqrt()

    @property
    def inputs_per_token(self) -> float:
        """Inputs per token: the larger, the less H says about other text of its kind; 0 if tokens are not known."""
        return len(self.H) / self.tokens if self.tokens else 0.0

    def damped(self, damping: float) -> "Gram":
        """A Gram matrix that acts as H + ``damping`` diag(h_j g)^(1/2), except that errors are still measured with H.

        h is the diagonal of H and g the geometric mean of its nonzero entries. H comes from the calibration text, and
        in another text inputs have other powers. A ridge in proportion to each input's own power protects the weights
        of weak inputs too little, and an equal ridge does so with those of strong ones; this one, in between, gives the
        lowest errors on texts of another kind (benchmarks/LOG.md).
        """

        def make() -> Gram:
            gram = Gram(self.H, self.shared, trusted=True, tokens=self.tokens)
            h = self.H.diagonal().clamp(min=0)
            live = h > 0
            if bool(live.any()):
                gram._ridge = damping * (h * h[live].double().log().mean().exp().to(h.dtype)).sqrt()
            return gram

        return self.derived(("damped", damping), make)

    def with_ridge(self) -> Tensor:
        """H with what :meth:`damped` adds to it: a new (in, in) tensor."""
        H = self.H.clone()
        H.diagonal().add_(self._ridge)
        return H

    def unit(self) -> Tensor:
        """H in coordinates where active inputs have unit norm: a new (in, in) tensor, 0 for dead inputs."""
        inverse = torch.where(self.norm > 0, 1 / self.norm, 0.0)
        H = (self.H * inverse).mul_(inverse.unsqueeze(1))
        H.diagonal().add_(self._ridge * inverse.square())
        return H

    def live(self) -> Tensor:
        """:meth:`unit` with 1 on the diagonal of dead inputs, which then need no damping; a new (in, in) tensor."""
        H = self.unit()
        H.diagonal().add_(self.norm == 0)
        return H

    def derived(self, key: object, compute: Callable[[], T]) -> T:
        """Returns ``compute()``, called only once for each ``key`` so that matrices share a factorization."""
        value: T = self._memo[key] if key in self._memo else compute()
        if self.shared:
            self._memo[key] = value
        return value


def damping_for(damping: float, gram: Gram) -> float:
    """``damping``, which is for texts of other kinds, and what H needs for what its tokens do not say of their own."""
    return damping + min(_MOST_SAMPLING, _SAMPLING * gram.inputs_per_token)


@dataclass(frozen=True)
class Solution:
    """A pruned matrix, as a solver returns it.

    Attributes:
        W: (out, in) in the dtype of the problem's W, exactly +0.0 where the mask is False.
        mask: (out, in) bool, True for the weights that are kept, whose number is exactly that of the pattern.
        error: tr((W - What) H (W - What)^T) / tr(W H W^T), the squared error of the outputs relative to their square.
        stats: Other figures for the record, such as the damping that was used.
        factors: (out, n) and (n, in), two sparse matrices whose product is W; None if W is one sparse matrix. For a
            product, the mask is True everywhere.
    """

    W: Tensor
    mask: Tensor
    error: float
    stats: dict[str, float | int | str] = field(default_factory=dict)
    factors: tuple[Tensor, Tensor] | None = None

    def times(self, exponent: int, problem: "LayerProblem") -> "Solution":
        """The solution of ``problem``, whose W is 2^exponent times that of this solution's problem."""

        def scaled(M: Tensor, power: int) -> Tensor:
            return M.double().mul(2.0**power).to(M.dtype)

        solution = problem.solution(scaled(self.W, exponent), self.mask, **self.stats)
        if self.factors is None:
            return solution
        left, right = self.factors
        half = exponent // 2
        return replace(solution, factors=(scaled(left, half), scaled(right, exponent - half)))


@dataclass(frozen=True)
class LayerProblem:
    """One matrix to prune: W (out, in), with the Gram matrix H (in, in) of its inputs.

    Solvers take it together with a pattern, as in ``Continuation()(LayerProblem(W, H), NM(2, 4))``. Neither W nor H is
    changed, and gradients do not reach them.

    Attributes:
        W: (out, in) float32 or float64, with a row for each output.
        H: (in, in) of the same dtype, on the same device; a tensor, or a :class:`Gram` that several problems share.
        together: What errors of outputs cost together, for :func:`.onto_grid` alone: the blocks of so many consecutive
            outputs on the diagonal of a positive semidefinite (out, out) matrix, below each other, (out, width) with
            zeros to the right of a smaller last one. None where each output counts alone, and all alike.

    Raises:
        UsageError: shapes, dtypes or devices do not match, or H is not a Gram matrix.
        NumericalError: W or H is not finite.
    """

    W: Tensor
    H: Tensor | Gram
    together: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "W", _numbers("W", self.W))
        if not self.W.numel():
            raise UsageError(f"W is {tuple(self.W.shape)} and has no weights")
        H = self.gram.H
        if self.W.shape[1] != H.shape[0]:
            raise UsageError(f"W is (out, in) and H is (in, in); got {tuple(self.W.shape)}, {tuple(H.shape)}")
        if self.W.dtype != H.dtype or self.W.device != H.device:
            raise UsageError(
                f"W ({self.W.dtype}, {self.W.device}) and H ({H.dtype}, {H.device}) must have the same dtype and device"
            )
        if self.together is not None:
            if self.together.ndim != 2 or len(self.together) != len(self.W) or not self.together.shape[1]:
                raise UsageError(f"together is (out, width), for {len(self.W)} rows; got {tuple(self.together.shape)}")
            if not is_finite(self.together):
                raise NumericalError("what errors cost together has NaN or infinite entries")

    @cached_property
    def gram(self) -> Gram:
        return self.H if isinstance(self.H, Gram) else Gram(self.H, shared=False)

    @cached_property
    def power(self) -> float:
        """tr(W H W^T), the mean squared norm of the layer's output."""
        return quadratic_form(self.W, self.gram.H)

    @cached_property
    def exponent(self) -> int:
        """Exponent of the power of two next to the largest weight, with H of unit diagonal; 0 if all are 0."""
        columns = torch.linalg.vector_norm(self.W, math.inf, dim=0).double() * self.gram.norm.double()
        return math.frexp(float(columns.max()))[1]

    def times(self, exponent: int) -> "LayerProblem":
        """The problem with 2^exponent times W, which changes no digit."""
        return LayerProblem(self.W.double().mul(2.0**exponent).to(self.W.dtype), self.gram)

    def loss(self, What: Tensor) -> float:
        """tr((W - What) H (W - What)^T), at the cost of one (out, in) x (in, in) product."""
        return quadratic_form(self.W, self.gram.H, What)

    def error(self, What: Tensor) -> float:
        """The loss of ``What`` relative to :attr:`power`."""
        return relative(self.loss(What), self.power)

    def solution(self, What: Tensor, mask: Tensor, **stats: float | int | str) -> Solution:
        """The solution with the weights ``What``, set to +0.0 where ``mask`` is False, with its error and ``stats``.

        Raises:
            NumericalError: a weight is NaN or infinite.
        """
        # masked_fill, not a product: a negative weight times False is -0.0. Adding +0.0 changes -0.0 on the mask too.
        W = What.masked_fill(~mask, 0.0).add_(0.0)
        if not is_finite(W):
            raise NumericalError("the solver arrived at NaN or infinite weights; raise its damping")
        return Solution(W, mask, self.error(W), dict(stats))


class Normalized:
    """The problem in coordinates where H has unit diagonal: W (out, in) is its W times the norms of the inputs.

    There a weight's magnitude is its Wanda score, damping and penalties have no unit, and H needs no preconditioner
    (Boza 2024, section 3.1). ``metric`` (in,), positive, has further factors of the weights, ``order`` (in,) a new
    order of the columns.
    """

    def __init__(self, problem: LayerProblem, metric: Tensor | None = None, order: Tensor | None = None) -> None:
        self._problem, self._metric, self._order = problem, metric, order
        self.gram = problem.gram
        # One factor, and not one after the other: a weight that comes back has been rounded only twice.
        self._scale = self.gram.norm if metric is None else self.gram.norm * metric
        W = problem.W * self._scale
        self.W = W if order is None else W[:, order]

    def new_H(self, damping: float | Tensor = 0.0) -> Tensor:  # noqa: N802 - as the papers call it
        """(in, in), new: H with unit diagonal (without a metric), 0 for dead inputs, then diag(``damping``) added."""
        H = self.gram.unit()
        if self._metric is not None:
            H.div_(self._metric).div_(self._metric.unsqueeze(1))
        if self._order is not None:
            for rows in H.split(STRIP):
                rows.copy_(rows[:, self._order])
            for columns in H.split(STRIP, dim=1):
                columns.copy_(columns[self._order])
        H.diagonal().add_(damping)
        return H

    def restore(self, W: Tensor, rows: slice = slice(None)) -> Tensor:
        """W, which has these ``rows``, in the problem's own coordinates; dead inputs get their old weights back."""
        live = self._scale > 0
        scale, old = torch.where(live, self._scale, 1.0), self._problem.W[rows]
        restored = torch.empty_like(W)
        for V, new, before in zip(W.split(STRIP), restored.split(STRIP), old.split(STRIP), strict=True):
            torch.where(live, self.original(V) / scale, before, out=new)
        return restored

    def original(self, M: Tensor) -> Tensor:
        """``M`` (out, in) with its columns in the problem's order: for masks."""
        return M if self._order is None else torch.empty_like(M).index_copy_(1, self._order, M)

    def report(self, monitor: Monitor | None, step: int, steps: int, V: Tensor, mask: Tensor) -> None:
        """Calls ``monitor``, if any, with the error of V on the mask for some 32 rows, at little cost."""
        self.report_rows(monitor, step, steps, lambda rows: V[rows] * mask[rows])

    def report_rows(self, monitor: Monitor | None, step: int, steps: int, made: Callable[[slice], Tensor]) -> None:
        """The same for what ``made`` returns of these rows."""
        if monitor is not None:
            rows, some = self._some_rows
            monitor(step, steps, some.error(self.restore(made(rows), rows)))

    @cached_property
    def _some_rows(self) -> tuple[slice, LayerProblem]:
        rows = slice(None, None, max(1, self.W.shape[0] // 32))
        return rows, LayerProblem(self._problem.W[rows], self.gram)


def _numbers(name: str, values: Any, dimensions: int = 2) -> Tensor:
    """``values`` as solvers take them: a dense, finite matrix without gradients; it may share its memory."""
    if not isinstance(values, Tensor) or values.layout != torch.strided or values.is_meta:
        raise UsageError(f"{name} must be a dense tensor; got {shown(values)}")
    if values.ndim != dimensions:
        raise UsageError(f"{name} has {dimensions} dimensions; got {tuple(values.shape)}")
    if values.dtype not in (torch.float32, torch.float64):
        raise UsageError(f"{name} must be float32 or float64, not {values.dtype}; convert it first")
    numbers: Tensor = values.detach().contiguous()
    if not is_finite(numbers):
        raise NumericalError(f"{name} has NaN or infinite entries")
    return numbers


def relative(loss: float, power: float) -> float:
    """A squared error relative to the squared output."""
    loss = max(loss, 0.0)  # which rounding can take below
    return loss / power if power > 0 else (0.0 if loss == 0 else math.inf)
