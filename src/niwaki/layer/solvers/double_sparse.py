"""DoubleSparse: makes two sparse factors of each matrix, by ADMM for one and the other in turns; arXiv 2409.18850."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from niwaki.errors import PatternError
from niwaki.layer.linalg import conjugate_gradients, eigenvectors, inverse_of_damped, with_unit_diagonal
from niwaki.layer.patterns import Pattern, TwoFactors
from niwaki.layer.patterns.selection import keep_highest, kth_smallest
from niwaki.layer.problem import LayerProblem, Monitor, Normalized, Solution, damping_for
from niwaki.layer.solvers._base import Solver, at_least, parameter, product

#: Of the penalty of the other factor: the square one, which begins as the identity, has further to go.
_SQUARE_PENALTY = 0.5
_TINY = torch.finfo(torch.float32).tiny


def _penalty(default: float) -> float:
    return parameter(default, "from 0.001 to 1000", lambda value: 1e-3 <= value <= 1e3)


@dataclass(frozen=True)
class DoubleSparse(Solver):
    """W = A B with sparse A (out, n) and B (n, in), n = min(out, in), in the bytes of one sparse matrix.

    Take it if values keep 16 bits: at the bytes of one matrix with 50 % zeros, the squared error of the outputs is
    about half of continuation's (docs/two-factors.md). The pattern is :class:`~niwaki.layer.patterns.TwoFactors`.

    H is damped as in :class:`~niwaki.layer.solvers.Continuation` and has unit diagonal; W0 is W in these coordinates.
    The square factor begins as the identity, the other one as W0 with its largest weights, both with U = 0. Each of the
    ``rounds`` t = 1..k, with x = (t - 1) / (k - 1), takes one step of ADMM for the square factor, then one for the
    other, with rho going geometrically from ``penalty_start`` to ``penalty_end``, and half of it for the square factor:

        right:  K = A^T A, the rows of B in units where K has unit diagonal;   K X H + rho X = A^T W0 H + rho (Z - U)
        left:   G = B H B^T, the columns of A in units where G has;            X (G + rho I) = W0 H B^T + rho (Z - U)
        then:   V = 2 X - Z + U,    Z = P(|V|) * V,    U = V - Z,    and Z is the factor
        P(S) = 1 / (1 + (theta / S)^p)    p from ``hardness_start`` to ``hardness_end`` geometrically

    theta is the lowest score that would be kept; in the last round P is the mask. Between rounds the units change while
    the numbers in U stay. X of the right factor is found in the coordinates of the eigenvectors of H, where its columns
    are separate problems, by ``steps`` of conjugate gradients from Z: K has eigenvalues of about 0.1 to 5. At the end
    ``finish`` steps of conjugate gradients refit each factor on its mask.

    Differences from the paper and its code:

    1. Both halves see all of H; the code (github.com/usamec/double_sparse) sees its diagonal while it alternates.
    2. One step of ADMM per round, and a soft choice, which lets masks move for longer.
    3. U stays in units that follow the other factor: in those of the weights it may diverge.
    4. The fraction of the weights that the square factor gets was chosen by measurement, see the pattern.

    Inputs that are never active get no weights; other solvers leave the dense ones there.

    Cost: 9 in^3 for the eigenvectors, once for matrices with the same input; in each round four products out x in x n,
    about six of n^2 in, and an inverse of n^3; memory for the eigenvectors and some twenty copies of W.
    Reference: Boza and Macko 2024, arXiv 2409.18850.
    """

    rounds: int = at_least(1, 20)
    penalty_start: float = _penalty(0.2)
    penalty_end: float = _penalty(1.0)
    hardness_start: float = parameter(5.0, "1 or more", lambda value: value >= 1)
    hardness_end: float = parameter(10.0, "1 or more", lambda value: value >= 1)
    steps: int = at_least(1, 3)
    damping: float = at_least(0, 0.02)
    finish: int = at_least(0, 3)

    def default_pattern(self, sparsity: float) -> Pattern:
        return TwoFactors(sparsity)

    def check(self, pattern: Pattern) -> None:
        if not pattern.has_factors:
            raise PatternError(
                f"double-sparse makes two factors, and {pattern} is a pattern of one matrix; "
                "give a fraction of zeros, such as 0.5"
            )

    def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
        damping = damping_for(self.damping, problem.gram)
        scaled = Normalized(LayerProblem(problem.W, problem.gram.damped(damping)))
        factors = _Factors.start(scaled, pattern.kept_in_factors(problem.W.shape), self.steps)
        total = self.rounds + (self.finish > 0)
        for number in range(self.rounds):
            done = number / max(1, self.rounds - 1)
            rho = self.penalty_start * (self.penalty_end / self.penalty_start) ** done
            hardness = self.hardness_start * (self.hardness_end / self.hardness_start) ** done
            factors.round(rho, hardness if number + 1 < self.rounds else None)
            scaled.report_rows(monitor, number + 1, total, factors.rows)
        if self.finish:
            factors.refit(self.finish)
            scaled.report_rows(monitor, total, total, factors.rows)
        A, B = factors.balanced(scaled.gram.norm)
        W = A @ B
        solution = problem.solution(W, torch.ones_like(W, dtype=torch.bool), damping=damping, damping_asked=damping)
        counts = {"kept_left": int(A.count_nonzero()), "kept_right": int(B.count_nonzero())}
        return replace(solution, factors=(A, B), stats={**solution.stats, **counts})

    def flops(self, rows: int, columns: int) -> float:
        least = min(rows, columns)
        in_round = 4 * 2.0 * rows * columns * least + 6 * product(columns, least) + 2.0 * least**3
        return 9.0 * columns**3 + (self.rounds + 1) * in_round + 2 * product(rows, columns)


@dataclass
class _Factors:
    """A and B with what ADMM keeps of them. Names that end in P are in coordinates of the eigenvectors P of H."""

    A: Tensor
    B: Tensor
    kept: tuple[int, int]  # weights of A and of B
    steps: int
    P: Tensor  # (in, in)
    eigenvalues: Tensor  # (in,)
    WHP: Tensor  # (out, in)
    BP: Tensor
    UA: Tensor
    UB: Tensor
    UBP: Tensor

    @classmethod
    def start(cls, scaled: Normalized, kept: tuple[int, int], steps: int) -> "_Factors":
        W0 = scaled.W
        rows, columns = W0.shape
        eigenvalues, P = scaled.gram.derived("eigenvectors", lambda: eigenvectors(scaled.new_H))
        is_left = rows < columns  # the square factor
        square = torch.eye(min(rows, columns), dtype=W0.dtype, device=W0.device)
        wide = W0 * keep_highest(W0.abs(), W0.numel() - kept[is_left])
        A, B = (square, wide) if is_left else (wide, square * (scaled.gram.norm > 0))
        UA, UB, UBP = torch.zeros_like(A), torch.zeros_like(B), torch.zeros_like(B)
        WHP = (W0 @ P).mul_(eigenvalues)
        return cls(A, B, kept, steps, P, eigenvalues, WHP, BP=B @ P, UA=UA, UB=UB, UBP=UBP)

    @property
    def is_left(self) -> bool:
        """Whether the square factor is the left one."""
        return len(self.A) < self.B.shape[1]

    def rows(self, rows: slice) -> Tensor:
        """Some of the product."""
        return self.A[rows] @ self.B

    def round(self, rho: float, hardness: float | None) -> None:
        """A step for each factor, the square one first; without ``hardness`` they get their masks."""
        square = _SQUARE_PENALTY * rho
        if self.is_left:
            self._step_left(square, hardness)
            self._step_right(rho, hardness)
        else:
            self._step_right(square, hardness)
            self._step_left(rho, hardness)

    def _step_left(self, rho: float, hardness: float | None) -> None:
        G, units, target = self._left()
        Z = self.A * units
        inverse, _ = inverse_of_damped(G.clone, rho)
        X = target.add_(Z - self.UA, alpha=rho) @ inverse
        V = X.mul_(2).sub_(Z).add_(self.UA)
        Z = _chosen(V, self.kept[0], hardness)
        self.UA, self.A = V.sub_(Z), Z.div_(units)

    def _step_right(self, rho: float, hardness: float | None) -> None:
        K, units, target = self._right()
        ZP = self.BP * units
        residual = target.add_(ZP - self.UBP, alpha=rho)
        residual.sub_((K @ ZP).mul_(self.eigenvalues)).sub_(ZP, alpha=rho)
        XP = conjugate_gradients(
            lambda D: (K @ D).mul_(self.eigenvalues).add_(D, alpha=rho), residual, ZP, self.steps, dim=0
        )
        XP.mul_(2).sub_(ZP)
        V = torch.addmm(self.UB, XP, self.P.T)
        Z = _chosen(V, self.kept[1], hardness)
        self.BP = Z @ self.P
        self.UBP = XP.add_(self.UBP).sub_(self.BP)
        self.BP.div_(units)
        self.UB, self.B = V.sub_(Z), Z.div_(units)

    def _left(self) -> tuple[Tensor, Tensor, Tensor]:
        """(G, the units of A's columns in which its diagonal is 1, W0 H B^T in these)."""
        G, units = with_unit_diagonal((self.BP * self.eigenvalues) @ self.BP.T)
        return G, units, (self.WHP @ self.BP.T).div_(units)

    def _right(self) -> tuple[Tensor, Tensor, Tensor]:
        """(K, the units of B's rows in which its diagonal is 1, A^T W0 H P in these)."""
        K, units = with_unit_diagonal(self.A.T @ self.A)
        units = units.unsqueeze(1)
        return K, units, (self.A.T @ self.WHP).div_(units)

    def refit(self, steps: int) -> None:
        """Steps of conjugate gradients for each factor on its mask, the square one first."""
        for refit in (self._refit_left, self._refit_right)[:: 1 if self.is_left else -1]:
            refit(steps)

    def _refit_left(self, steps: int) -> None:
        G, units, target = self._left()
        mask, Z = self.A != 0, self.A * units
        residual = target.sub_(Z @ G).mul_(mask)
        self.A = conjugate_gradients(lambda D: (D @ G).mul_(mask), residual, Z, steps).div_(units)

    def _refit_right(self, steps: int) -> None:
        K, units, target = self._right()
        mask, Z = self.B != 0, self.B * units
        residual = (target.sub_((K @ (self.BP * units)).mul_(self.eigenvalues)) @ self.P.T).mul_(mask)

        def apply(D: Tensor) -> Tensor:
            return ((K @ (D @ self.P)).mul_(self.eigenvalues) @ self.P.T).mul_(mask)

        self.B = conjugate_gradients(apply, residual, Z, steps).div_(units)
        self.BP = self.B @ self.P

    def balanced(self, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The factors for inputs of this ``norm``, column and row of the same length: for formats of few bits."""
        B = self.B / torch.where(norm > 0, norm, 1.0)
        left, right = torch.linalg.vector_norm(self.A, dim=0), torch.linalg.vector_norm(B, dim=1)
        # A column without a row, or a row without a column, counts for nothing, and may be of any size.
        units = torch.where((left > 0) & (right > 0), (right / left).sqrt(), math.inf)
        inverse = torch.where(units < math.inf, 1 / units, 0.0)
        units = torch.where(units < math.inf, units, 0.0)
        # Adding +0.0 makes +0.0 of -0.0.
        return (self.A * units).add_(0.0), (B * inverse.unsqueeze(1)).add_(0.0)


def _chosen(V: Tensor, kept: int, hardness: float | None) -> Tensor:
    """P(|V|) * V; without ``hardness`` the weights with the ``kept`` highest magnitudes."""
    scores, zeros = V.abs(), V.numel() - kept
    if hardness is None:
        return V.masked_fill(~keep_highest(scores, zeros), 0.0)
    theta = kth_smallest(scores.view(-1), zeros) if zeros > 0 else scores.new_zeros(1)
    return scores.log_().sub_(theta.clamp(min=_TINY).log()).mul_(hardness).sigmoid_().mul_(V)
