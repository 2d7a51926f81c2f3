# The public names, for type checkers and for __init__.py, which loads each from its module when it is asked for.

from niwaki._version import __version__ as __version__
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
from niwaki.exports.imatrix import importance_matrix as importance_matrix
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
    RIA as RIA,
    SOLVERS as SOLVERS,
    ConjugateGradients as ConjugateGradients,
    Continuation as Continuation,
    Descent as Descent,
    DoubleSparse as DoubleSparse,
    Exact as Exact,
    Magnitude as Magnitude,
    MaskThenUpdate as MaskThenUpdate,
    Solver as Solver,
    SparseGPT as SparseGPT,
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

__all__: list[str]

def __dir__() -> list[str]: ...
