"""RIA: keeps the weights that matter most in their row and their column, as they are; ICLR 2024."""

from dataclasses import dataclass

import torch

from niwaki.layer.patterns import Pattern
from niwaki.layer.problem import LayerProblem, Monitor, Solution
from niwaki.layer.solvers._base import Solver, at_least


@dataclass(frozen=True)
class RIA(Solver):
    """Keeps the weights that matter most in their row and their column, as they are.

    A row or a column of small weights is therefore not lost as a whole. What = M * W0 with

        M = the pattern's mask of  (|W_ij| / sum_k |W_ik|  +  |W_ij| / sum_k |W_kj|)  |X_j|_2^a

    with a the ``power`` and |X_j|_2 the norm of input j over the calibration tokens, which is sqrt(H_jj) up to a
    factor. By default weights compete across the whole matrix, as in the published code.

    Differences from the paper:

    1. There is no channel permutation for n:m: it moves inputs between groups, which changes the layers before this one
       too.

    Cost: one selection; memory for one matrix.
    Reference: Zhang et al., "Plug-and-Play: An Efficient Post-training Pruning Method for Large Language Models", ICLR
    2024, https://iclr.cc/virtual/2024/poster/18549; the code is
    github.com/biomedical-cybernetics/Relative-importance-and-activation-pruning.
    """

    power: float = at_least(0, 0.5)

    def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
        size, norm = problem.W.abs(), problem.gram.norm
        # Relative to the greatest, so that the power of a scaled text is rounded as that of the text itself.
        activation = norm / torch.where(norm.max() > 0, norm.max(), 1.0)
        # A weight of a dead input comes last even with power 0, where 0^0 would be 1.
        activation = activation.pow(self.power).masked_fill_(norm == 0, 0.0)
        tiny = torch.finfo(size.dtype).tiny  # of a row or column of zeros the share is 0
        shares = size / size.sum(dim=1, keepdim=True).clamp(min=tiny)
        shares += size / size.sum(dim=0).clamp(min=tiny)
        return problem.solution(problem.W, pattern.mask(shares * activation))
