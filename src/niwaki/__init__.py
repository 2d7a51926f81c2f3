"""Prunes large language models after training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

#: Where each public name is defined. They are loaded when they are asked for, so that ``niwaki --help`` is quick.
_HOMES = {
    "Calibration": "niwaki.options",
    "Compute": "niwaki.options",
    "Measurement": "niwaki.options",
    "NiwakiError": "niwaki.errors",
    "Effort": "niwaki.pruning.effort",
    "prune": "niwaki.pruning.prune",
    "shrink": "niwaki.pruning.structured.shrink",
    "bench": "niwaki.evaluation.bench",
    "compare": "niwaki.evaluation.compare",
    "evaluate": "niwaki.evaluation.evaluate",
    "evaluate_tasks": "niwaki.evaluation.tasks",
    "generate": "niwaki.evaluation.generate",
    "inspect": "niwaki.evaluation.inspect",
    "export": "niwaki.packed.compressed_tensors",
    "load": "niwaki.packed.load",
    "pack": "niwaki.packed.pack",
    "unpack": "niwaki.packed.pack",
    "report": "niwaki.reports.page",
    "Comparison": "niwaki.records.comparison",
    "Perplexity": "niwaki.records.record",
    "Progress": "niwaki.records.progress",
    "Record": "niwaki.records.record",
    "Windows": "niwaki.models.text",
    "Gram": "niwaki.layer.problem",
    "LayerProblem": "niwaki.layer.problem",
    "Solution": "niwaki.layer.problem",
    "Solver": "niwaki.layer.solvers",
    "make_solver": "niwaki.layer.solvers",
    "NM": "niwaki.layer.patterns",
    "Pattern": "niwaki.layer.patterns",
    "PerRow": "niwaki.layer.patterns",
    "Unstructured": "niwaki.layer.patterns",
}
__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from niwaki.errors import NiwakiError as NiwakiError
    from niwaki.evaluation.bench import bench as bench
    from niwaki.evaluation.compare import compare as compare
    from niwaki.evaluation.evaluate import evaluate as evaluate
    from niwaki.evaluation.generate import generate as generate
    from niwaki.evaluation.inspect import inspect as inspect
    from niwaki.evaluation.tasks import evaluate_tasks as evaluate_tasks
    from niwaki.layer.patterns import NM as NM
    from niwaki.layer.patterns import Pattern as Pattern
    from niwaki.layer.patterns import PerRow as PerRow
    from niwaki.layer.patterns import Unstructured as Unstructured
    from niwaki.layer.problem import Gram as Gram
    from niwaki.layer.problem import LayerProblem as LayerProblem
    from niwaki.layer.problem import Solution as Solution
    from niwaki.layer.solvers import Solver as Solver
    from niwaki.layer.solvers import make_solver as make_solver
    from niwaki.models.text import Windows as Windows
    from niwaki.options import Calibration as Calibration
    from niwaki.options import Compute as Compute
    from niwaki.options import Measurement as Measurement
    from niwaki.packed.compressed_tensors import export as export
    from niwaki.packed.load import load as load
    from niwaki.packed.pack import pack as pack
    from niwaki.packed.pack import unpack as unpack
    from niwaki.pruning.effort import Effort as Effort
    from niwaki.pruning.prune import prune as prune
    from niwaki.pruning.structured.shrink import shrink as shrink
    from niwaki.records.comparison import Comparison as Comparison
    from niwaki.records.progress import Progress as Progress
    from niwaki.records.record import Perplexity as Perplexity
    from niwaki.records.record import Record as Record
    from niwaki.reports.page import report as report


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # for completion, also of what is not loaded yet
