"""A solver of your own, next to niwaki's: on one matrix, and on a whole model.

python examples/own_solver.py
"""

from dataclasses import dataclass

import torch

import niwaki
from niwaki import NM, LayerProblem, Monitor, Pattern, Solution, Solver, make_solver


@dataclass(frozen=True)
class Power(Solver):
    """Scores |weight| x |input|^power: magnitude for 0, Wanda for 1."""

    power: float = 0.5

    def __call__(self, problem: LayerProblem, pattern: Pattern, monitor: Monitor | None = None) -> Solution:
        scores = problem.W.abs() * problem.gram.norm**self.power
        return problem.solution(problem.W, pattern.mask(scores))

    def flops(self, rows: int, columns: int) -> float:
        return 4.0 * rows * columns**2  # of the two products that measure the error


generator = torch.Generator().manual_seed(0)
W = torch.randn(64, 128, generator=generator)  # (out, in)
X = torch.randn(512, 128, generator=generator) * torch.linspace(0.1, 2, 128)  # (tokens, in)
problem = LayerProblem(W, X.T @ X / len(X))
for solver in (Power(), make_solver("wanda"), make_solver("continuation")):
    print(f"{solver}: relative error {solver(problem, NM(2, 4)).error:.4f}")

comparison = niwaki.compare(
    "demo",
    solvers=[Power(), "wanda"],
    patterns=[0.5],
    calibration=niwaki.Calibration("demo", samples=8, length=64),
    measurement=niwaki.Measurement("demo-held", samples=8),
)
print(*comparison.cells, sep="\n")
