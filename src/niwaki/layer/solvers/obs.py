"""OBS: keeps the weights whose loss the others could least make up for, as they are; Hassibi & Stork 1993."""

from dataclasses import dataclass

from niwaki.layer.linalg import inverse_diagonal
from niwaki.layer.patterns import Pattern
from niwaki.layer.problem import LayerProblem, Monitor, Normalized, Solution
from niwaki.layer.solvers._base import Solver, at_least, product


@dataclass(frozen=True)
class OBSSaliency(Solver):
    """Keeps the weights with the largest optimal-brain-surgeon saliency, computed once for all, as they are.

    What = M * W0 with M the pattern's mask of sqrt(L_q). With unit diagonal and w a row of W0,

        L_q = w_q^2 / [(H + lambda I)^-1]_qq                                                   (eq. 5)

    is, up to a factor, how much the squared error grows when weight q is set to zero and all others of the row are
    refitted. With H = I the mask is Wanda's; without damping the score of the first column is SparseGPT's.

    Differences from the paper:

    1. The paper removes one weight at a time, updates the others and computes H^-1 again. Here all scores are those of
       the dense row, so two weights that can replace each other may both be removed; ``obs+cg`` updates the others.
    2. H is damped, because that of a text is often singular. Dead inputs have score 0.

    Cost: in^3 for the inverse and one selection; memory for the inverse and one matrix.
    Reference: Hassibi & Stork 1993, "Second order derivatives for network pruning: optimal brain surgeon", eq. 5.
    """

    damping: float = at_least(0, 0.01)

    separable_rows = True

    def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
        scaled = Normalized(problem)
        key = ("obs", self.damping)
        diagonal, used = problem.gram.derived(key, lambda: inverse_diagonal(problem.gram.live, self.damping))
        # A dead input has weight 0 in these coordinates, and so score 0.
        mask = pattern.mask(scaled.W.abs().div_(diagonal.sqrt()))
        return problem.solution(problem.W, mask, damping=used, damping_asked=self.damping)

    def flops(self, rows: int, columns: int) -> float:
        return columns**3 + 2 * product(rows, columns)
