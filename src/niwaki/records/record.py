"""What was done to a model."""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypedDict

import msgspec

from niwaki.errors import CheckpointError, UsageError
from niwaki.files import given_path, write_json
from niwaki.options import TF32
from niwaki.records.data import (
    Amount,
    Count,
    Finite,
    Fraction,
    JsonFile,
    Name,
    Positive,
    Seconds,
    Stages,
    Whole,
    check_plain,
    from_repr,
)
from niwaki.records.wording import counted, is_cut, kind, number

if TYPE_CHECKING:
    from torch import Tensor


#: So many are named where there is not room for all.
_NAMED = 6
#: Of ``niwaki.json``. Before it had a number, solver and effort were text.
FORMAT = 2
#: Blocks times kinds of matrices: more cells than that are no table, and their chart takes gigabytes.
LARGEST_TABLE = 50_000
#: Points of a training, likewise.
LARGEST_CURVE = 10_000
#: What `niwaki report` and `niwaki bench` write into a directory: about it, and not about what is made from it.
FINDINGS = REPORT_NAME, SPEED_NAME = "report.html", "niwaki-bench.json"


class Difference(NamedTuple):
    """Of two models' mean losses on the same windows, in nats a token.

    The standard error is that of the windows' own differences ("paired"), which is much less than that of either loss,
    because what makes a window hard for one model makes it hard for the other. None where windows were not kept.
    """

    nats: float
    standard_error: float | None

    @property
    def clear(self) -> bool:
        """Whether it is more than two standard errors away from 0; without an error, whether it is not 0."""
        return abs(self.nats) > 2 * (self.standard_error or 0.0)

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ±{self.standard_error:.4f}"
        return f"{self.nats:.4f}{error}"


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean cross-entropy, and what it is the perplexity of.

    In each of the non-overlapping ``windows`` of ``context`` tokens the first token is given and the others are
    predicted, ``tokens`` in all; this is the protocol of the SparseGPT and Wanda papers (docs/reproduce.md).
    Perplexities of different contexts do not compare.

    Attributes:
        standard_error: Of ``value``, from the spread of the windows' mean losses: how another text of this kind would
            differ. Two models on the same text compare more tightly, see :meth:`above`. None where there is one window.
        origin: Where ``text`` is from and how it became windows, in words; "" where that is not known.
        losses: The mean cross-entropy of each window in nats; none in records of earlier versions.
    """

    value: Annotated[float, msgspec.Meta(ge=0.5, le=1e305)]  # 1 or more, but for rounding
    standard_error: Annotated[float, msgspec.Meta(ge=0, le=1e305)] | None
    tokens: Positive
    context: Positive
    windows: Positive
    text: Name
    origin: str = ""
    losses: Annotated[tuple[Finite, ...], msgspec.Meta(max_length=1_000_000)] = ()

    @classmethod
    def of(cls, losses: Tensor, text: str, origin: str = "") -> Perplexity:
        """From (windows, context - 1) cross-entropies in nats."""
        means = losses.double().mean(dim=1)
        value = math.exp(min(means.mean().item(), 700.0))  # soon beyond it there is no float
        error = min(1e304, value * means.std().item() / math.sqrt(len(means))) if len(means) > 1 else None
        kept = tuple(round(mean, 7) for mean in means.tolist())
        return cls(value, error, losses.numel(), losses.shape[1] + 1, len(means), text, origin, kept)

    @property
    def nats(self) -> float:
        """The mean cross-entropy of a token."""
        return math.log(self.value)

    def above(self, other: Perplexity) -> Difference:
        """By how much the mean loss of a token is greater than ``other``, which is of the same windows."""
        nats = self.nats - other.nats
        if len(self.losses) != len(other.losses) or len(self.losses) < 2:
            return Difference(nats, None)
        differences = [mine - theirs for mine, theirs in zip(self.losses, other.losses, strict=True)]
        return Difference(nats, statistics.stdev(differences) / math.sqrt(len(differences)))

    @property
    def protocol(self) -> str:
        """All that another program needs to measure the same, in words."""
        return (
            f"{self.origin or self.text}; {counted(self.windows, 'non-overlapping window')} of {self.context:,} "
            f"tokens, the first token of each given and {self.context - 1:,} predicted; exp of the mean loss"
        )

    @property
    def figure(self) -> str:
        """``"44.87 ± 1.20"``, without its error where there is none, or where the value is too large for a float."""
        if is_cut(self.value):
            return number(self.value)
        digits, of_error = (".2f", ".2f") if self.value < 1e6 else (".3g", ".2g")
        return f"{self.value:{digits}}" + (
            "" if self.standard_error is None else f" ± {self.standard_error:{of_error}}"
        )

    def __str__(self) -> str:
        return f"{self.figure} ({self.tokens:,} tokens of {self.text}, context {self.context:,})"


@dataclass(frozen=True)
class MatrixRecord:
    """One pruned matrix: its block, from 0, its path there, its shape (out, in) and the seconds that the solver took.

    Attributes:
        sparsity: Fraction of zeros in the tensor that was written.
        error: Squared output error relative to the squared output, on the calibration text, before the block is
            fitted; with dense targets of those.
        tokens: Tokens in its Gram matrix.
        stats: The solver's own, such as the damping that was used. On a grid also "error_before_rounding", the
            solver's, and "rounded_to_zero", the number of weights that the solver kept and the grid did not; in a
            format that was kept the first, and "raised_from_zero", the number of those that became its smallest number.
    """

    block: Count
    name: Name
    shape: tuple[Positive, Positive]
    sparsity: Fraction
    error: Amount
    seconds: Seconds
    tokens: Count
    stats: dict[str, Finite | Whole | str]


@dataclass(frozen=True)
class FitRecord:
    """One block, by its number from 0, whose remaining weights were fitted to the dense block's outputs.

    Attributes:
        before: Squared error of its outputs on held-out samples, relative to the dense block's squared outputs.
        after: The same in the end.
        epochs: After how many it was lowest, which is the end; 0 where the weights stayed as they were.
        steps: How many were made.
    """

    block: Count
    before: Amount
    after: Amount
    epochs: Amount
    seconds: Seconds
    steps: Count = 0


@dataclass(frozen=True)
class StructureRecord:
    """What structured pruning removed, see :mod:`niwaki.pruning.structured.shrink`.

    Attributes:
        parameters: Numbers in all tensors of the files, "before" and "after".
        removed: Fraction of the blocks' parameters that is gone.
        influence: Of each block, where blocks were to go: 1 - the mean cosine of its input and output.
        blocks: Numbers of the blocks that went, from 0, as are all that follow.
        heads: For each block that stayed, the heads that went; of heads that share keys and values, the groups.
        neurons: Likewise.
        experts: Likewise, of blocks that have some.
    """

    parameters: dict[str, Positive]
    removed: Fraction
    influence: list[Finite] = field(default_factory=list)
    blocks: list[Count] = field(default_factory=list)
    heads: list[list[Count]] = field(default_factory=list)
    neurons: list[list[Count]] = field(default_factory=list)
    experts: list[list[Count]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.parameters.keys() >= {"before", "after"}:
            raise UsageError(f"parameters are those before and after; got {self.parameters}")

    @property
    def share(self) -> str:
        """How much of all parameters is gone, such as "25.7 %"."""
        return f"{100 * (1 - self.parameters['after'] / self.parameters['before']):.1f} %"

    def __str__(self) -> str:
        numbers = "{after:,} of {before:,}".format(**self.parameters)
        return f"{numbers} ({self.share} fewer, of those in blocks {100 * self.removed:.1f} %)"


@dataclass(frozen=True)
class HealingPoint:
    """A moment of a training: after so many ``tokens``, ``steps`` and ``seconds``.

    Attributes:
        error: The mean KL of the dense from the pruned model on what is held out, in nats a token; of weights as files
            have them.
        loss: The same on what was trained on since the last point; None where blocks are trained, each towards its own.
    """

    tokens: Count
    steps: Count
    seconds: Seconds
    error: Amount
    loss: Finite | None


@dataclass
class LeftDense:
    """Tensors that stay as they are: those that have the same name in all blocks, with * for numbers in it.

    Attributes:
        size: The number of their weights, of all blocks together.
        share: What that is of the decoder's weights in tensors with two dimensions or more, without embeddings.
        reason: Why they are not pruned.
    """

    name: Name
    size: Count
    share: Fraction
    reason: Name

    def __str__(self) -> str:
        return f"{self.name} ({self.reason}, {100 * self.share:.2g} %)"


@dataclass
class HealingRecord:
    """A training of a pruned model's weights, see :mod:`niwaki.pruning.healing.heal`.

    Attributes:
        teacher: The dense model, as it was given.
        method: What was trained: "full", "lora", "norms", or one of the "blocks" after the other.
        tokens: How many were to be trained on, at most.
        limit: The seconds that it was given; None for no limit.
        rate: The learning rate, relative to the root mean square of each parameter's weights.
        batch: Tokens in a step.
        held: Tokens that were held out.
        own_text: The share of what was trained on that the dense model was to write itself.
        halved: How often the rate was halved, after outputs that were not finite.
        points: From the pruned model as it came to the end.
        best: The number of the point with the lowest error, whose weights are the result.
    """

    teacher: Name
    method: Name
    tokens: Positive
    limit: Seconds | None
    rate: Amount
    batch: Positive
    held: Positive
    own_text: Fraction = 0.0
    halved: Count = 0
    points: list[HealingPoint] = field(default_factory=list)
    best: Count = 0

    def __post_init__(self) -> None:
        if self.points and self.best >= len(self.points):
            raise UsageError(f"the best of {len(self.points)} points cannot be number {self.best}")
        if len(self.points) > LARGEST_CURVE:
            raise UsageError(f"a training has {len(self.points):,} points, too many to show")

    def __str__(self) -> str:
        if not self.points:
            return f"0 tokens towards {self.teacher}"
        first, best, last = self.points[0], self.points[self.best], self.points[-1]
        after = "" if best == last else f" after {best.tokens:,}"
        return (
            f"{last.tokens:,} tokens towards {self.teacher}; KL from it on {self.held:,} held-out tokens "
            f"{first.error:.4g} to {best.error:.4g} nats a token{after}"
        )


class CalibrationRecord(TypedDict, total=False):
    """The windows of a calibration text: ``seed`` is that of random ones, ``synthetic`` windows were written.

    With ``images`` the samples are conversations that have so many, the longest of ``sequence_length`` tokens.
    """

    source: Name
    samples: Count
    images: Count
    sequence_length: Count
    order: str
    seed: int
    tokens_sha256: str
    synthetic: Count


@dataclass
class Record(JsonFile):
    """All that was done to a model: ``niwaki.json``.

    Attributes:
        command: The command line, or "" where it was called from Python.
        method: The solver's name, or that of its class.
        solver: The solver's "name" and all its parameters, see :mod:`niwaki.records.data`; ``effort`` likewise, what
            was done to blocks (nothing in structured pruning).
        mask_from: Where the masks came from, if not from the solver.
        calibration: Source, samples, sequence length, order, seed and SHA-256 of the tokens; where the effort asks for
            it how many more windows the dense model wrote, as "synthetic".
        device: Where blocks ran, in ``dtype``, and matrices were solved.
        flops: Floating-point operations that the solver needs for all matrices, estimated before it begins: those of
            products and factorisations, as if no two matrices had the same inputs, without the effort's and the grid's.
        sparsity: Fraction of zeros in all pruned ``matrices`` together, which are in the order of computation.
        perplexity: "before" and "after", where measured.
        seconds: By stage, and in "total".
        peak_memory: Bytes: the greatest resident size of the process; on a GPU also that of its allocator.
        notes: What a careful reader should know: damping raised, text left out, files not carried over.
        resumed: After which numbers of blocks, or of a healing steps, the run was stopped and resumed.
        blocks: The first block that was pruned and the first one after them; None for all blocks.
        tf32: What used TF32 on a GPU, as in :class:`~niwaki.options.Compute`; "never" on a device that has none.
        structure: What structured pruning removed; None where weights became zeros.
        quantization: The grid that weights are on, such as "int4:128"; None for none.
        kept_format: The format of the dense model's files in which matrices were written again, such as "MXFP4"; None
            where numbers are stored as they are.
        healing: How the weights were trained after pruning; None where they were not.
        left_dense: The tensors with two dimensions or more in the decoder that are not pruned, without embeddings.
    """

    command: str
    model: Name
    method: Name
    solver: dict[str, Any]
    pattern: Name
    mask_from: str | None
    calibration: CalibrationRecord
    device: str
    dtype: str
    flops: Amount = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    sparsity: Fraction = 0.0
    matrices: list[MatrixRecord] = field(default_factory=list)
    fits: list[FitRecord] = field(default_factory=list)
    perplexity: dict[Annotated[str, msgspec.Meta(pattern="^(before|pruned|after)$")], Perplexity] = field(
        default_factory=dict
    )
    seconds: Stages = field(default_factory=dict)
    peak_memory: Annotated[dict[str, Count], msgspec.Meta(max_length=100)] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    resumed: list[Count] = field(default_factory=list)
    blocks: Annotated[list[Count], msgspec.Meta(min_length=2, max_length=2)] | None = None
    tf32: TF32 = "never"
    effort: dict[str, Any] = field(default_factory=dict)
    structure: StructureRecord | None = None
    quantization: str | None = None
    kept_format: str | None = None
    healing: HealingRecord | None = None
    left_dense: Annotated[list[LeftDense], msgspec.Meta(max_length=1000)] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_plain(self.solver, "the solver")
        check_plain(self.effort, "the effort")
        if self.blocks is not None and not self.blocks[0] < self.blocks[1]:
            raise UsageError(f"blocks go from one to before another; got {self.blocks}")
        kinds, blocks = ({*map(of, self.matrices)} for of in (lambda one: kind(one.name), lambda one: one.block))
        if len(kinds) * len(blocks) > LARGEST_TABLE:
            raise UsageError(f"the matrices are of {len(kinds):,} kinds in {len(blocks):,} blocks, too many to show")

    @property
    def mean_error(self) -> float:
        """The geometric mean of the matrices' errors; 0 where one is 0."""
        return _geometric_mean([matrix.error for matrix in self.matrices])

    @property
    def rounding(self) -> str:
        """What the grid, or the format that was kept, did to the matrices, in words; "" without either."""
        name, count = self.quantization or self.kept_format or "", "rounded_to_zero"
        if not name or not self.matrices:
            return name
        matrices, became = self.matrices, "0"
        if not self.quantization:
            count, became = "raised_from_zero", "the smallest number instead of 0"
            matrices = [matrix for matrix in matrices if count in matrix.stats]  # others are stored as they are
        try:
            before = [float(matrix.stats["error_before_rounding"]) for matrix in matrices]
            changed = sum(int(matrix.stats[count]) for matrix in matrices)
        except (KeyError, ValueError):  # another program wrote it
            return name
        kept = sum(round((1 - matrix.sparsity) * math.prod(matrix.shape)) for matrix in matrices)
        kept += changed if self.quantization else 0
        after = _geometric_mean([matrix.error for matrix in matrices])
        return (
            f"{name}: error {_geometric_mean(before):.4g} before rounding, {after:.4g} after; "
            f"{100 * changed / max(1, kept):.2g} % of the remaining weights became {became}"
        )

    @property
    def stays(self) -> str:
        """What is not pruned, in words; "" where that is nothing."""
        left = self.left_dense
        named = list(map(str, left[:_NAMED]))
        more = [f"and {len(left) - _NAMED} more"] if len(left) > _NAMED else []
        return ", ".join([*named, *more])

    @property
    def own_text(self) -> str:
        """What the dense model wrote to calibrate on; "" if it wrote nothing."""
        count = self.calibration.get("synthetic", 0)
        return f"{counted(count, 'window')} that the dense model wrote itself" if count else ""

    @property
    def part(self) -> str:
        """Which blocks were pruned, such as "blocks 0 to 2"; "" if all were."""
        if self.blocks is None:
            return ""
        first, last = self.blocks[0], self.blocks[1] - 1
        return f"block {first}" if first == last else f"blocks {first} to {last}"

    def _values(self) -> dict[str, Any]:
        return {"format": FORMAT, **super()._values()}

    @staticmethod
    def _update(values: dict[str, Any]) -> None:
        version = values.pop("format", 1)
        if not isinstance(version, int) or version > FORMAT:
            raise CheckpointError(f"it has format {version}, and this niwaki reads up to {FORMAT}; install a later one")
        names = {"solver": str(values.get("method", "")).partition(":")[0], "effort": "effort"}
        for key, name in names.items():
            if isinstance(text := values.get(key), str):
                values[key] = from_repr(text, name) if text else {}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a JSON file, whole or not at all (OutputError)."""
        write_json(given_path(path), self.to_json())


def _geometric_mean(values: list[float]) -> float:
    """0 where one is 0, and of no values."""
    if not values or min(values) <= 0:
        return 0.0
    return math.exp(sum(map(math.log, values)) / len(values))


class Clock:
    """A stopwatch for ``Record.seconds``: each lap counts as time of a stage."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self.seconds: dict[str, float] = defaultdict(float)

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] += now - self._last
        self._last = now

    def add(self, seconds: dict[str, float]) -> None:
        """Counts the time of an earlier run also."""
        for stage, value in seconds.items():
            self.seconds[stage] += value
            self._began -= value

    def total(self) -> float:
        return time.perf_counter() - self._began


def versions() -> dict[str, str]:
    """Versions of niwaki, Python and the libraries that decide the result."""
    installed = {"python": platform.python_version()}
    for name in ("niwaki", "torch", "transformers", "tokenizers", "safetensors"):
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return installed
