"""Prunes large language models after training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Comparison",
    "LayerProblem",
    "Record",
    "Solution",
    "compare",
    "evaluate",
    "evaluate_tasks",
    "export",
    "load",
    "make_solver",
    "pack",
    "prune",
    "shrink",
    "unpack",
]

if TYPE_CHECKING:
    from niwaki.comparison import compare
    from niwaki.exporting import export
    from niwaki.packed.loading import load
    from niwaki.packed.packing import pack, unpack
    from niwaki.perplexity import evaluate
    from niwaki.pipeline import prune
    from niwaki.problem import LayerProblem, Solution
    from niwaki.record import Record
    from niwaki.shrinking import shrink
    from niwaki.solvers import make_solver
    from niwaki.table import Comparison
    from niwaki.tasks import evaluate_tasks

_HOMES = {
    "Comparison": "niwaki.table",
    "LayerProblem": "niwaki.problem",
    "Record": "niwaki.record",
    "Solution": "niwaki.problem",
    "compare": "niwaki.comparison",
    "evaluate": "niwaki.perplexity",
    "evaluate_tasks": "niwaki.tasks",
    "export": "niwaki.exporting",
    "load": "niwaki.packed.loading",
    "make_solver": "niwaki.solvers",
    "pack": "niwaki.packed.packing",
    "prune": "niwaki.pipeline",
    "shrink": "niwaki.shrinking",
    "unpack": "niwaki.packed.packing",
}


def __getattr__(name: str) -> Any:
    """Loads torch and transformers when they are needed, so that ``niwaki --help`` is quick."""
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """For completion, also of what is not loaded yet."""
    return sorted({*globals(), *__all__})
