"""Layer solvers: one method, one file, one paper.

``SOLVERS`` holds each method with its default parameters; :func:`make_solver` makes one with others.

In all formulas W0 (out, in) are the dense weights, What the result, M the mask, lambda the ``damping``, and * and ^2
are elementwise. "Unit diagonal" stands for the coordinates in which H has one
(:class:`~niwaki.layer.problem.Normalized`): there |W0| is Wanda's score, and lambda and penalties are relative to 1.
Methods that fit weights to a mask take Wanda's where the pattern leaves a choice.
"""

import functools
from typing import Any

from niwaki.arguments import checked
from niwaki.errors import UsageError, shown
from niwaki.layer.solvers._base import MaskThenUpdate, Solver
from niwaki.layer.solvers.admm import ADMM
from niwaki.layer.solvers.alps import ALPS
from niwaki.layer.solvers.conjugate import ConjugateGradients
from niwaki.layer.solvers.continuation import Continuation
from niwaki.layer.solvers.descent import Descent
from niwaki.layer.solvers.double_sparse import DoubleSparse
from niwaki.layer.solvers.exact import Exact
from niwaki.layer.solvers.magnitude import Magnitude
from niwaki.layer.solvers.ria import RIA
from niwaki.layer.solvers.sparsegpt import SparseGPT
from niwaki.layer.solvers.wanda import Wanda
from niwaki.options import DEFAULT_SOLVER
from niwaki.quantities import choose, name_of, parameters, text_of

__all__ = [
    "ADMM", "ALPS", "DEFAULT_SOLVER", "RIA", "SOLVERS", "ConjugateGradients", "Continuation", "Descent",
    "DoubleSparse", "Exact", "Magnitude", "MaskThenUpdate", "Solver", "SparseGPT", "Wanda",
    "describe", "make_solver", "solver_text",
]  # fmt: skip

#: The most solvers that may choose a mask one after the other.
_MOST = 20
#: By the name on the command line: those that choose a mask and leave the weights, those that do both, and those that
#: fit the weights to a mask.
SOLVERS: dict[str, Solver] = {
    "magnitude": Magnitude(),
    "wanda": Wanda(),
    "ria": RIA(),
    "sparsegpt": SparseGPT(),
    "alps": ALPS(),
    "admm-grad": ADMM(),
    "continuation": Continuation(),
    "double-sparse": DoubleSparse(),
    "admm1": ADMM(sparsification_steps=1),
    "adam": Descent(),
    "sgd": Descent("sgd", learning_rate=1.0),
    "cg": ConjugateGradients(),
    "exact": Exact(),
}


@checked
def make_solver(name: str) -> Solver:
    """Makes the solver called ``name``, with some of its parameters changed.

    Args:
        name: A key of ``SOLVERS``, with parameters as in ``adam:iterations=50:learning_rate=0.3``; or several joined by
            ``+``, see :class:`MaskThenUpdate`.

    Raises:
        UnknownNameError: there is no such solver or parameter.
        UsageError: a value is missing, or is not of the parameter's type or range.
    """
    names = name.split("+")
    if len(names) > _MOST + 1:
        raise UsageError(f"{len(names)} solvers in sequence are too many; got {shown(names[-1])} as the last one")
    return functools.reduce(MaskThenUpdate, (choose("solver", each, SOLVERS) for each in names))


def describe(solver: Solver) -> dict[str, Any]:
    """The solver as data, for records: its "name", as in ``SOLVERS`` or "wanda+exact", and all parameters by name.

    Those of :class:`MaskThenUpdate` are two such descriptions.
    """
    if isinstance(solver, MaskThenUpdate):
        mask, update = describe(solver.mask), describe(solver.update)
        return {"name": f"{mask['name']}+{update['name']}", "mask": mask, "update": update}
    return {"name": name_of(solver, SOLVERS), **parameters(solver)}


def solver_text(solver: Solver) -> str:
    """The text for :func:`make_solver` to make ``solver`` of; KeyError where it is not of a class in ``SOLVERS``."""
    if isinstance(solver, MaskThenUpdate):
        return f"{solver_text(solver.mask)}+{solver_text(solver.update)}"
    return text_of(solver, SOLVERS)
