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
    from niwaki.evaluation.compare import compare
    from niwaki.evaluation.evaluate import evaluate
    from niwaki.evaluation.tasks import evaluate_tasks
    from niwaki.layer.problem import LayerProblem, Solution
    from niwaki.layer.solvers import make_solver
    from niwaki.packed.compressed_tensors import export
    from niwaki.packed.load import load
    from niwaki.packed.pack import pack, unpack
    from niwaki.pruning.prune import prune
    from niwaki.pruning.structured.shrink import shrink
    from niwaki.records.comparison import Comparison
    from niwaki.records.record import Record

_HOMES = {
    "Comparison": "niwaki.records.comparison",
    "LayerProblem": "niwaki.layer.problem",
    "Record": "niwaki.records.record",
    "Solution": "niwaki.layer.problem",
    "compare": "niwaki.evaluation.compare",
    "evaluate": "niwaki.evaluation.evaluate",
    "evaluate_tasks": "niwaki.evaluation.tasks",
    "export": "niwaki.packed.compressed_tensors",
    "load": "niwaki.packed.load",
    "make_solver": "niwaki.layer.solvers",
    "pack": "niwaki.packed.pack",
    "prune": "niwaki.pruning.prune",
    "shrink": "niwaki.pruning.structured.shrink",
    "unpack": "niwaki.packed.pack",
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
