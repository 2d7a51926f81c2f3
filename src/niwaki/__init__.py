"""Prunes large language models after training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LayerProblem", "Record", "Solution", "evaluate", "make_solver", "prune"]

if TYPE_CHECKING:
    from niwaki.evaluate import evaluate
    from niwaki.problem import LayerProblem, Solution
    from niwaki.prune import prune
    from niwaki.record import Record
    from niwaki.solvers import make_solver

_HOMES = {
    "LayerProblem": "niwaki.problem",
    "Record": "niwaki.record",
    "Solution": "niwaki.problem",
    "evaluate": "niwaki.evaluate",
    "make_solver": "niwaki.solvers",
    "prune": "niwaki.prune",
}


def __getattr__(name: str) -> Any:
    """Loads torch and transformers when they are needed, so that ``niwaki --help`` is quick."""
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
