"""Makes large language models smaller and faster after training."""

from typing import TYPE_CHECKING, Any

from niwaki._version import __version__ as __version__

#: The public names by the module that defines them, loaded when they are asked for: ``niwaki --help`` is to be quick.
_PUBLIC = {
    "niwaki.options": ("Calibration", "Compute", "Measurement"),
    "niwaki.errors": ("NiwakiError",),
    "niwaki.effort": ("EFFORTS", "Effort", "Fitting", "Planning"),
    "niwaki.compression.compress": ("Compression", "compress", "plan_compression"),
    "niwaki.recipes": ("heal", "prune", "quantize", "run", "shrink"),
    "niwaki.healing.heal": ("Heal",),
    "niwaki.pruning.embeddings": ("QuantizeEmbeddings",),
    "niwaki.pruning.prune": ("Prune", "Quantize"),
    "niwaki.shrinking.shrink": ("Shrink",),
    "niwaki.shrinking.vocabulary": ("ShrinkVocabulary",),
    "niwaki.evaluation.bench": ("bench",),
    "niwaki.evaluation.compare": ("compare",),
    "niwaki.evaluation.evaluate": ("evaluate",),
    "niwaki.evaluation.tasks": ("evaluate_tasks",),
    "niwaki.evaluation.generate": ("generate",),
    "niwaki.evaluation.inspect": ("inspect",),
    "niwaki.finetuning.adapters": ("merge_lora",),
    "niwaki.finetuning.callback": ("KeepZeros",),
    "niwaki.finetuning.teacher": ("Teacher",),
    "niwaki.finetuning.zeros": ("KeptZeros", "keep_zeros"),
    "niwaki.exports.export": ("Export", "Pack", "export"),
    "niwaki.exports.push": ("Publication", "push"),
    "niwaki.packed.load": ("load",),
    "niwaki.packed.pack": ("pack", "unpack"),
    "niwaki.reports.page": ("report",),
    "niwaki.records.comparison": ("Comparison",),
    "niwaki.records.record": ("Perplexity", "Record"),
    "niwaki.records.recipe": ("Recipe",),
    "niwaki.records.progress": ("Progress",),
    "niwaki.progress_bar": ("ProgressBar",),
    "niwaki.windows": ("Windows",),
    "niwaki.layer.problem": ("Gram", "LayerProblem", "Monitor", "Solution"),
    "niwaki.layer.solvers": (
        *("SOLVERS", "Solver", "make_solver", "MaskThenUpdate", "Magnitude", "Wanda", "RIA", "OBSSaliency", "DSnoT"),
        *("Swaps", "SparseGPT", "OBC", "ALPS", "ADMM", "Continuation", "DoubleSparse", "Descent"),
        *("ConjugateGradients", "Exact"),
    ),
    "niwaki.layer.patterns": ("Pattern", "Unstructured", "PerRow", "NM", "Fixed", "TwoFactors"),
    "niwaki.layer.grid": ("Grid",),
}
_HOMES = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from niwaki.compression.compress import (
        Compression as Compression,
        compress as compress,
        plan_compression as plan_compression,
    )
    from niwaki.effort import EFFORTS as EFFORTS, Effort as Effort, Fitting as Fitting, Planning as Planning
    from niwaki.errors import NiwakiError as NiwakiError
    from niwaki.evaluation.bench import bench as bench
    from niwaki.evaluation.compare import compare as compare
    from niwaki.evaluation.evaluate import evaluate as evaluate
    from niwaki.evaluation.generate import generate as generate
    from niwaki.evaluation.inspect import inspect as inspect
    from niwaki.evaluation.tasks import evaluate_tasks as evaluate_tasks
    from niwaki.exports.export import Export as Export, Pack as Pack, export as export
    from niwaki.exports.push import Publication as Publication, push as push
    from niwaki.finetuning.adapters import merge_lora as merge_lora
    from niwaki.finetuning.callback import KeepZeros as KeepZeros
    from niwaki.finetuning.teacher import Teacher as Teacher
    from niwaki.finetuning.zeros import KeptZeros as KeptZeros, keep_zeros as keep_zeros
    from niwaki.healing.heal import Heal as Heal
    from niwaki.layer.grid import Grid as Grid
    from niwaki.layer.patterns import (
        NM as NM,
        Fixed as Fixed,
        Pattern as Pattern,
        PerRow as PerRow,
        TwoFactors as TwoFactors,
        Unstructured as Unstructured,
    )
    from niwaki.layer.problem import (
        Gram as Gram,
        LayerProblem as LayerProblem,
        Monitor as Monitor,
        Solution as Solution,
    )
    from niwaki.layer.solvers import (
        ADMM as ADMM,
        ALPS as ALPS,
        OBC as OBC,
        RIA as RIA,
        SOLVERS as SOLVERS,
        ConjugateGradients as ConjugateGradients,
        Continuation as Continuation,
        Descent as Descent,
        DoubleSparse as DoubleSparse,
        DSnoT as DSnoT,
        Exact as Exact,
        Magnitude as Magnitude,
        MaskThenUpdate as MaskThenUpdate,
        OBSSaliency as OBSSaliency,
        Solver as Solver,
        SparseGPT as SparseGPT,
        Swaps as Swaps,
        Wanda as Wanda,
        make_solver as make_solver,
    )
    from niwaki.options import Calibration as Calibration, Compute as Compute, Measurement as Measurement
    from niwaki.packed.load import load as load
    from niwaki.packed.pack import pack as pack, unpack as unpack
    from niwaki.progress_bar import ProgressBar as ProgressBar
    from niwaki.pruning.embeddings import QuantizeEmbeddings as QuantizeEmbeddings
    from niwaki.pruning.prune import Prune as Prune, Quantize as Quantize
    from niwaki.recipes import (
        heal as heal,
        prune as prune,
        quantize as quantize,
        run as run,
        shrink as shrink,
    )
    from niwaki.records.comparison import Comparison as Comparison
    from niwaki.records.perplexity import Perplexity as Perplexity
    from niwaki.records.progress import Progress as Progress
    from niwaki.records.recipe import Recipe as Recipe
    from niwaki.records.record import Record as Record
    from niwaki.reports.page import report as report
    from niwaki.shrinking.shrink import Shrink as Shrink
    from niwaki.shrinking.vocabulary import ShrinkVocabulary as ShrinkVocabulary
    from niwaki.windows import Windows as Windows


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # for completion, also of what is not loaded yet
