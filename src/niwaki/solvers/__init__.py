"""Layer solvers: one method, one file, one paper.

``SOLVERS`` holds each method with its default parameters; :func:`make_solver` makes one with others.
"""

from __future__ import annotations

from collections.abc import Mapping

from niwaki.settings import choose
from niwaki.solvers._base import Solver
from niwaki.solvers._compose import MaskThenUpdate
from niwaki.solvers.admm import ADMM
from niwaki.solvers.alps import ALPS
from niwaki.solvers.conjugate import ConjugateGradients
from niwaki.solvers.continuation import Continuation
from niwaki.solvers.descent import Descent
from niwaki.solvers.dsnot import DSnoT
from niwaki.solvers.exact import Exact
from niwaki.solvers.magnitude import Magnitude
from niwaki.solvers.obc import OBC
from niwaki.solvers.obs import OBSSaliency
from niwaki.solvers.ria import RIA
from niwaki.solvers.sparsegpt import SparseGPT
from niwaki.solvers.swaps import Swaps
from niwaki.solvers.wanda import Wanda

__all__ = [
    "ADMM",
    "ALPS",
    "DEFAULT_SOLVER",
    "OBC",
    "RIA",
    "SOLVERS",
    "ConjugateGradients",
    "Continuation",
    "DSnoT",
    "Descent",
    "Exact",
    "Magnitude",
    "MaskThenUpdate",
    "OBSSaliency",
    "Solver",
    "SparseGPT",
    "Swaps",
    "Wanda",
    "make_solver",
]

#: By the name on the command line: those that choose a mask and leave the weights, those that do both,
#: and those that fit the weights to a mask (Wanda's, where they are not given one).
SOLVERS: dict[str, Solver] = {
    "magnitude": Magnitude(),
    "wanda": Wanda(),
    "ria": RIA(),
    "obs": OBSSaliency(),
    "dsnot": DSnoT(),
    "swaps": Swaps(),
    "sparsegpt": SparseGPT(),
    "obc": OBC(),
    "alps": ALPS(),
    "admm-grad": ADMM(),
    "continuation": Continuation(),
    "admm1": ADMM(sparsification_steps=1),
    "adam": Descent(),
    "sgd": Descent("sgd", learning_rate=1.0),
    "cg": ConjugateGradients(),
    "exact": Exact(),
}

#: The lowest layer errors for its time; see docs/methods.md.
DEFAULT_SOLVER = "continuation"


def make_solver(name: str, settings: Mapping[str, str] | None = None) -> Solver:
    """The solver called ``name`` with some of its parameters changed.

    Args:
        name: A key of ``SOLVERS``, with parameters as in ``adam:iterations=50:learning_rate=0.3``; or
            several joined by ``+``: the mask of those before with the weights of the last one, see
            :class:`MaskThenUpdate`.
        settings: Parameter name to value, as text; of the last solver of several.

    Raises:
        UnknownNameError: no such solver or parameter.
        UsageError: a value is not of the parameter's type, or out of its range, or a parameter has none.
    """
    mask, plus, name = name.rpartition("+")
    if plus:
        return MaskThenUpdate(make_solver(mask), make_solver(name, settings))
    return choose("solver", name, SOLVERS, settings)
