"""What was done to a model."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Annotated, Any, TypedDict

import msgspec

from niwaki.choices import NEAREST, NO_ZEROS, TF32, TWO_FACTORS
from niwaki.errors import CheckpointError, UsageError
from niwaki.files import given_path, replace_file
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
)
from niwaki.records.perplexity import Agreement, Difference, Perplexity, Similarity
from niwaki.records.wording import (
    counted,
    in_words,
    kind,
    other_samples,
    several,
    short_text,
    size as in_bytes,
    two_digits,
)

# What was removed from a model as a whole.


@dataclass(frozen=True)
class StructureRecord:
    """What structured pruning removed, see :mod:`niwaki.shrinking.shrink`.

    Attributes:
        parameters: Number of parameters in all tensors of the files, "before" and "after".
        removed: Fraction of the blocks' parameters that was removed.
        influence: If blocks were removed, for each block: how much the model without it alone loses, in nats a token,
            see :func:`niwaki.shrinking.search.costs_of_runs`.
        blocks: Numbers of the blocks that were removed; all numbers here and below count from 0.
        heads: For each remaining block, the heads that were removed; for heads that share keys and values, the groups.
        neurons: For each remaining block, the neurons that were removed.
        experts: For each remaining block that has experts, those that were removed.
        vocabulary: Number of tokens of the model, "before" and "after"; empty if none were removed.
        combinations: If only a size was requested, what each combination of that size would cost, in nats a token, see
            :func:`niwaki.shrinking.search.costs_of_combinations`.
    """

    parameters: dict[str, Positive]
    removed: Fraction
    influence: list[Finite] = field(default_factory=list)
    blocks: list[Count] = field(default_factory=list)
    heads: list[list[Count]] = field(default_factory=list)
    neurons: list[list[Count]] = field(default_factory=list)
    experts: list[list[Count]] = field(default_factory=list)
    vocabulary: dict[str, Positive] = field(default_factory=dict)
    combinations: dict[str, Finite] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.parameters.keys() >= {"before", "after"}:
            raise UsageError(f"parameters are those before and after; got {self.parameters}")

    def after(self, earlier: StructureRecord) -> StructureRecord:
        """What this stage and the ``earlier`` one, which removed tokens, removed together."""
        parameters = {**self.parameters, "before": earlier.parameters["before"]}
        return replace(self, parameters=parameters, vocabulary=earlier.vocabulary)

    @property
    def share(self) -> str:
        """The fraction of all parameters that was removed, such as "25.7 %"."""
        return f"{100 * (1 - self.parameters['after'] / self.parameters['before']):.1f} %"

    def __str__(self) -> str:
        numbers = "{after:,} of {before:,}".format(**self.parameters)
        words = "{after:,} of {before:,} tokens, ".format(**self.vocabulary) if self.vocabulary else ""
        return f"{words}{numbers} ({self.share} fewer, of those in blocks {100 * self.removed:.1f} %)"


# How the weights of a pruned model were trained.

#: Points of a training: more are too many to show.
LARGEST_CURVE = 10_000


@dataclass(frozen=True)
class HealingPoint:
    """A point of a training: its state after this many ``tokens``, ``steps`` and ``seconds``.

    Attributes:
        error: Mean KL divergence of the pruned model from the dense one on held-out text, in nats a token, for weights
            as the files have them. For models without a head, the squared distance of states, relative to their
            squares.
        loss: The same on the text trained on since the last point; None if there is none, as at the first point, and if
            blocks are trained, each towards its own.
    """

    tokens: Count
    steps: Count
    seconds: Seconds
    error: Amount
    loss: Finite | None


@dataclass
class HealingRecord:
    """How a pruned model's weights were trained, see :mod:`niwaki.healing.heal`.

    Attributes:
        teacher: The dense model, as it was given.
        method: What was trained: "full", "lora", "norms", or "blocks" one after the other.
        tokens: Largest number of tokens to train on.
        limit: Time limit in seconds; None for no limit.
        rate: Learning rate, relative to the root mean square of each parameter's weights.
        batch: Tokens per step.
        held: Number of held-out tokens.
        own_text: Fraction of the training text that the dense model was to generate.
        of_states: Whether states were trained towards those of the dense model, which has no head, instead of
            predictions.
        halved: How often the rate was halved because outputs were not finite.
        points: The points, from the pruned model as it was given to the end.
        best: Number of the point with the lowest error, whose weights are the result.
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
    of_states: bool = False
    points: list[HealingPoint] = field(default_factory=list)
    best: Count = 0

    def __post_init__(self) -> None:
        if self.points and self.best >= len(self.points):
            raise UsageError(f"the best of {len(self.points)} points cannot be number {self.best}")
        if len(self.points) > LARGEST_CURVE:
            raise UsageError(f"a training has {len(self.points):,} points, too many to show")

    @property
    def by_block(self) -> bool:
        """Whether blocks were trained one after the other, so that points have no loss."""
        return self.method == "blocks"

    def __str__(self) -> str:
        if not self.points:
            return f"0 tokens towards {self.teacher}"
        first, best, last = self.points[0], self.points[self.best], self.points[-1]
        after = "" if best == last else f" after {best.tokens:,}"
        what, unit = ("distance of states", "of their squares") if self.of_states else ("KL", "nats a token")
        return (
            f"{last.tokens:,} tokens towards {self.teacher}; {what} from it on {self.held:,} held-out tokens "
            f"{first.error:.4g} to {best.error:.4g} {unit}{after}"
        )


#: Of ``niwaki.json``.
FORMAT = 2
#: Blocks times kinds of matrices: more cells than that are no table, and their chart takes gigabytes.
LARGEST_TABLE = 50_000
#: Fewer zeros in a model than this share of its weights are chance, and nobody's pruning.
FEW_ZEROS = 0.01
#: Stages of a run.
MOST_STAGES = 100
#: What `niwaki report` and `niwaki bench` write into a directory: about it, and not about what is made from it.
FINDINGS = REPORT_NAME, SPEED_NAME = "report.html", "niwaki-bench.json"


@dataclass(frozen=True)
class MatrixRecord:
    """What was done to one matrix.

    Attributes:
        block: Number of its block, from 0.
        name: Its path in the block.
        shape: (out, in).
        sparsity: Fraction of zeros in the tensor that was written.
        error: Squared output error relative to the squared output, on the calibration text, before the block is fitted;
            for weights that were rounded without a text, their squared error relative to their squares.
        seconds: Time that the solver took.
        tokens: Tokens in its Gram matrix.
        stats: Figures of the solver, such as the damping that was used. On a grid they include "error_before_rounding",
            the solver's error; "rounded_to_zero", the number of weights that the solver kept and the grid made 0; and,
            if any, "revived_by_rounding", the number of weights that were 0 and are not on the grid. In a format that
            was kept they include the first of these, and "raised_from_zero", the number of weights that became the
            format's smallest number instead of 0. If the model had zeros, "zeros_before" is their number and "revived"
            how many of them became nonzero; "kept_at_zero", if any, is how many of them the pattern keeps and the
            solver left at 0.
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
    """How the remaining weights of one block were fitted to the dense block's outputs.

    Attributes:
        block: Number of the block, from 0.
        before: Squared error of its outputs on held-out samples, in each place of the hidden states relative to the
            dense block's squared outputs there: the mean of all places.
        after: The same error at the end.
        epochs: Number of epochs after which the error was lowest, where the fit ends; 0 if the weights stayed as they
            were.
        steps: Number of steps made.
    """

    block: Count
    before: Amount
    after: Amount
    epochs: Amount
    seconds: Seconds
    steps: Count = 0


@dataclass(frozen=True)
class StageRecord:
    """One stage of a run of several.

    Attributes:
        name: What was done: "shrink", "prune", "quantize", "heal" and so on.
        asked: The parameters, in words.
        seconds: How long it took.
        perplexity: Perplexity of the model after the stage, if it was measured.
    """

    name: Name
    asked: str
    seconds: Seconds
    perplexity: Perplexity | None = None


@dataclass
class LeftDense:
    """Tensors that are not pruned: those with the same name in all blocks, with * for numbers in it.

    Attributes:
        size: Number of weights, in all blocks together.
        share: Fraction of the decoder's weights in tensors with two dimensions or more, without embeddings.
        reason: Why they are not pruned.
    """

    name: Name
    size: Count
    share: Fraction
    reason: Name

    def __str__(self) -> str:
        return f"{self.name} ({self.reason}, {100 * self.share:.2g} %)"


class CalibrationRecord(TypedDict, total=False):
    """The windows of a calibration text; ``seed`` is for random ones, and ``synthetic`` is how many the model wrote.

    If there are ``images``, the samples are conversations with that many images, the longest of ``sequence_length``
    tokens. If there are ``pairs``, they are pairs of a source and a target, with that many tokens together. ``origin``
    says in words which text it is and how it became windows; ``bos`` is the token that all windows begin with, if there
    is one.
    """

    source: Name
    samples: Count
    images: Count
    pairs: Count
    sequence_length: Count
    origin: str
    bos: Count
    order: str
    seed: int
    tokens_sha256: str
    synthetic: Count


def calibration_tokens(calibration: CalibrationRecord) -> int:
    """How many tokens there are in it; of conversations, at most."""
    pairs = calibration.get("pairs")
    return calibration.get("samples", 0) * calibration.get("sequence_length", 0) if pairs is None else pairs


@dataclass
class Record(JsonFile):
    """Everything that was done to a model, with the results: ``niwaki.json``.

    Attributes:
        command: The command line; "" for a call from Python.
        model: Name of the model, as it was given.
        method: Name of the solver, or of its class.
        solver: The solver's "name" and all its parameters, see :mod:`niwaki.records.data`; ``effort`` likewise, empty
            where none applies.
        pattern: The pattern, or what was removed, in words.
        mask_from: Source of the masks, if not the solver.
        calibration: Source, samples, sequence length, order, seed and SHA-256 of the tokens; "synthetic" is the number
            of windows that the dense model added, if the effort asks for that. Empty if no text was needed.
        device: Device on which blocks ran, in ``dtype``, and matrices were solved.
        flops: Floating-point operations that the solver needs for all matrices, estimated before it begins: products
            and factorizations, as if no two matrices had the same inputs, without those of the effort and the grid.
        versions: Versions of niwaki, Python and the libraries that decide the result, by name.
        sparsity: Fraction of zeros in all pruned ``matrices`` together; these are in the order of computation.
        matrices: What was done to each matrix.
        fits: How each block was fitted, if it was.
        perplexity: Perplexities measured "before" and "after"; healing also has that of the "pruned" model.
        vectors: For models that make sentence vectors and predict no words: how close the vectors are to the dense
            model's, "after" and, for a model that was pruned before, as "pruned".
        scores: The same for classifiers and rerankers: how close their scores are.
        seconds: Duration of each stage of the work, and in "total".
        peak_memory: Bytes: the greatest resident size of the process and, on a GPU, of its allocator.
        notes: What a careful reader should know, such as damping that was raised, text left out, or files not carried
            over.
        resumed: For each time that the run resumed, the number of blocks, or steps of healing, that were done by then.
        blocks: The first block that was pruned and the first one after the pruned ones; None for all blocks.
        tf32: When TF32 was used on a GPU, as in :class:`~niwaki.options.Compute`; "never" on a device without it.
        structure: What structured pruning removed; None if nothing was removed.
        quantization: The grid that the weights are on, such as "int4:128"; None for no grid.
        embeddings: The grid that the token embeddings and the head are on; None for no grid.
        kept_format: The format of the dense model's files, such as "MXFP4", in which matrices were written again; None
            if numbers are stored as they are.
        healing: How the weights were trained after pruning; None if they were not.
        left_dense: The tensors of the decoder with two dimensions or more that are not pruned, without embeddings.
        size: Bytes of the files with weights, "before" and "after". Empty in records of earlier versions.
        loss: By how much the loss rose, in nats for each token of the model before; None where that was not measured.
        stages: The stages of a run of several, in order. Everything else is about all of them together, except that
            ``matrices``, ``solver``, ``effort`` and ``pattern`` are about the last one that pruned.
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
    vectors: dict[Annotated[str, msgspec.Meta(pattern="^(pruned|after)$")], Similarity] = field(default_factory=dict)
    scores: dict[Annotated[str, msgspec.Meta(pattern="^(pruned|after)$")], Agreement] = field(default_factory=dict)
    seconds: Stages = field(default_factory=dict)
    peak_memory: Annotated[dict[str, Count], msgspec.Meta(max_length=100)] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    resumed: list[Count] = field(default_factory=list)
    blocks: Annotated[list[Count], msgspec.Meta(min_length=2, max_length=2)] | None = None
    tf32: TF32 = "never"
    effort: dict[str, Any] = field(default_factory=dict)
    structure: StructureRecord | None = None
    quantization: str | None = None
    embeddings: str | None = None
    kept_format: str | None = None
    healing: HealingRecord | None = None
    left_dense: Annotated[list[LeftDense], msgspec.Meta(max_length=1000)] = field(default_factory=list)
    size: Annotated[dict[str, Count], msgspec.Meta(max_length=2)] = field(default_factory=dict)
    loss: Finite | None = None
    stages: Annotated[list[StageRecord], msgspec.Meta(max_length=MOST_STAGES)] = field(default_factory=list)

    def __str__(self) -> str:
        """What came out, in a few lines; all of it is in the attributes, and in :meth:`to_json`."""
        lines = [f"{self.model}: {self.outcome or self.pattern}", self.summary, f"by {self.solved_by}"]
        lines += [f"perplexity {when} {measured}" for when, measured in self.perplexity.items()]
        if self.notes:
            lines.append(f"{counted(len(self.notes), 'note')}, such as: {self.notes[-1]}")
        return "\n".join(filter(None, lines))

    @property
    def summary(self) -> str:
        """Size and loss, in words; "" where neither is known."""
        parts = []
        if {"before", "after"} <= self.size.keys():
            before, after = self.size["before"], self.size["after"]
            parts.append(f"{in_bytes(after)}, {after / max(1, before):.2f} of {in_bytes(before)}")
        if self.loss is not None:
            parts.append(f"{self.perplexity['after'].lost_from(self.perplexity['before']).words} lost")
        return "; ".join(parts)

    def __post_init__(self) -> None:
        check_plain(self.solver, "the solver")
        check_plain(self.effort, "the effort")
        if self.blocks is not None and not self.blocks[0] < self.blocks[1]:
            raise UsageError(f"blocks go from one to before another; got {self.blocks}")
        kinds, blocks = ({*map(of, self.matrices)} for of in (lambda one: kind(one.name), lambda one: one.block))
        if len(kinds) * len(blocks) > LARGEST_TABLE:
            raise UsageError(f"the matrices are of {len(kinds):,} kinds in {len(blocks):,} blocks, too many to show")

    def after(self, earlier: Record, only_rounds: bool = False) -> Record:
        """The record of this stage and all stages before it together.

        If this stage ``only_rounds`` weights to a grid, ``earlier`` says what was pruned and how.
        """
        whole = self
        if self.only_heals:
            whole = dataclasses.replace(earlier, command=self.command, healing=self.healing, device=self.device)
        elif only_rounds and not earlier.of_shrinking:
            same = {name: getattr(earlier, name) for name in ("method", "solver", "effort", "pattern", "mask_from")}
            whole = dataclasses.replace(self, **same)
        structure = earlier.structure or self.structure
        if earlier.structure and earlier.structure.vocabulary and self.structure:  # of what is left of it
            structure = self.structure.after(earlier.structure)
            whole = dataclasses.replace(whole, pattern=f"{earlier.pattern}, {self.pattern}")
        before = earlier.perplexity
        perplexity = {name: before[name] for name in ("before",) if name in before}
        if self.only_heals and "after" in before:
            perplexity["pruned"] = before["after"]
        peaks = {**earlier.peak_memory, **self.peak_memory}
        return dataclasses.replace(
            whole,
            model=earlier.model,
            structure=structure,
            healing=self.healing or earlier.healing,
            perplexity={**perplexity, **self.perplexity},
            peak_memory={name: max(of.peak_memory.get(name, 0) for of in (earlier, self)) for name in peaks},
            notes=[*earlier.notes, *(note for note in self.notes if note not in earlier.notes)],
            resumed=[*earlier.resumed, *self.resumed],
            flops=earlier.flops + self.flops,
            stages=earlier.stages,
        )

    @property
    def of_which_stage(self) -> str:
        """Text to follow figures of matrices if several stages had some: they are from the last one."""
        solved = [stage.name for stage in self.stages if stage.name in ("prune", "quantize")]
        return f" of the stage {solved[-1]}" if len(solved) > 1 else ""

    @property
    def solved_by(self) -> str:
        """The solver in words; where weights were only rounded, how: what the solver is called says nothing then."""
        if self.method == NEAREST:
            return "rounding to the nearest"
        if self.only_quantizes and self.quantization:
            return "weights fitted to the grid on the calibration text"
        return in_words(self.solver)

    @property
    def error_of(self) -> str:
        """What the errors are relative to: the square of the outputs or of the weights, as a word."""
        return "weights'" if self._only_rounded else "output's"

    @property
    def _only_rounded(self) -> bool:
        """Whether the last stage with matrices has rounded them to the nearest, without a text."""
        return bool(self.matrices) and not any(matrix.tokens for matrix in self.matrices)

    @property
    def mean_error(self) -> float:
        """The geometric mean of the matrices' errors; 0 if one of them is 0."""
        return _geometric_mean([matrix.error for matrix in self.matrices])

    @property
    def only_heals(self) -> bool:
        """Whether the record is from ``niwaki heal``, which does not know how the model was pruned before."""
        return self.method == "heal"

    @property
    def of_shrinking(self) -> bool:
        """Whether no stage after the one that shrank the model had matrices, so that ``matrices`` are of that."""
        return self.method == "shrink"

    @property
    def only_shrinks(self) -> bool:
        """Whether parts were removed and no weights became zero."""
        return self.structure is not None and self.sparsity == 0

    @property
    def only_quantizes(self) -> bool:
        """Whether weights were put on a grid, and neither this run nor one before it made zeros."""
        if not (self.quantization or self.embeddings) or self.structure:
            return False
        if self.pattern != NO_ZEROS and not self.pattern.endswith(":0"):  # as earlier versions had it
            return False
        zeros = sum(int(matrix.stats.get("zeros_before", 0)) for matrix in self.matrices)
        return zeros <= FEW_ZEROS * sum(math.prod(matrix.shape) for matrix in self.matrices)

    def measured(self) -> dict[str, str]:
        """In words, by what it is and when, all that was measured of the model as a whole."""
        kinds: dict[str, Mapping[str, Any]]
        kinds = {"perplexity": self.perplexity, "sentence vectors": self.vectors, "scores": self.scores}
        found = {f"{kind} {when}": str(value) for kind, values in kinds.items() for when, value in values.items()}
        distances = {when: value.divergence for when, value in self.perplexity.items() if value.divergence}
        return found | {f"divergence {when}": f"KL from the dense model {value}" for when, value in distances.items()}

    def costs(self) -> list[tuple[StageRecord, Difference | None]]:
        """The stages, each with its cost: how many nats a token the loss after it is above the loss before it.

        Where one of them changes the tokens, all are in bits a byte, so that they add up.
        """
        found, before = list[tuple[StageRecord, Difference | None]](), self.perplexity.get("before")
        measured = [each for each in (before, *(stage.perplexity for stage in self.stages)) if each]
        by_bytes = any(each.counts != measured[0].counts for each in measured)
        for stage in self.stages:
            after = stage.perplexity
            found.append((stage, after.above(before, by_bytes) if after and before else None))
            before = after or before
        return found

    @property
    def teacher(self) -> str:
        """The dense model that ``niwaki heal`` was given; "" in other records, where it is ``model``."""
        return self.healing.teacher if self.healing and self.only_heals else ""

    @property
    def rounding(self) -> str:
        """What the grid, or the format that was kept, did to the matrices, in words; "" if there is neither."""
        name, count = self.quantization or self.kept_format or "", "rounded_to_zero"
        if not name or not self.matrices:
            return name
        matrices, became = self.matrices, "0"
        if not self.quantization:
            count, became = "raised_from_zero", "the smallest number instead of 0"
            matrices = [matrix for matrix in matrices if count in matrix.stats]  # others are stored as they are
        try:
            before = [float(matrix.stats["error_before_rounding"]) for matrix in matrices]
            changed = sum(max(0, int(matrix.stats[count])) for matrix in matrices)
            raised = sum(int(matrix.stats.get("revived_by_rounding", 0)) for matrix in matrices)
        except (KeyError, ValueError):  # another program wrote it
            return name
        kept = sum(round((1 - matrix.sparsity) * math.prod(matrix.shape)) for matrix in matrices)
        kept += changed - raised if self.quantization else 0
        weights = "weights" if self.only_quantizes else "remaining weights"
        zeros = f"{100 * changed / max(1, kept):.2g} % of the {weights} became {became}"
        if self._only_rounded or self.only_quantizes:  # whose error is all of rounding, and told apart
            return f"{name}: {zeros}"
        after = _geometric_mean([matrix.error for matrix in matrices])
        return (
            f"{name}: error {two_digits(_geometric_mean(before))} before rounding, {two_digits(after)} after; {zeros}"
        )

    @property
    def stays(self) -> str:
        """The tensors that are not pruned, in words; "" if there are none."""
        return several(list(map(str, self.left_dense)))

    @property
    def own_text(self) -> str:
        """The calibration text that the dense model wrote, in words; "" if it wrote none."""
        count = self.calibration.get("synthetic", 0)
        return f"{counted(count, 'window')} that the dense model wrote itself" if count else ""

    @property
    def where(self) -> str:
        """Text to follow what was done in some blocks only, such as ``" in blocks 0 to 2"``; "" if all were pruned."""
        return f" in {self.part}" if self.part else ""

    @property
    def outcome(self) -> str:
        """What the model has become, for headings: "25.7 % smaller, 50 % sparse, int4:64, healed"."""
        parts = [f"{self.structure.share} smaller"] if self.structure else []
        if not (self.only_shrinks or self.only_quantizes or (self.only_heals and not self.sparsity)):
            where = "" if self.structure or self.only_heals else self.where
            parts.append(f"{100 * self.sparsity:.4g} % sparse{where}")
        parts += [self.quantization] if self.quantization else []
        parts += [f"embeddings in {self.embeddings}"] if self.embeddings else []
        return ", ".join(parts + ["healed"] * bool(self.healing or self.only_heals))

    @property
    def has_factors(self) -> bool:
        """Whether matrices are products of two factors; ``sparsity`` is then how many fewer weights these have."""
        return self.pattern.startswith(TWO_FACTORS)

    @property
    def part(self) -> str:
        """The blocks that were pruned, such as "blocks 0 to 2"; "" if all were."""
        if self.blocks is None:
            return ""
        first, last = self.blocks[0], self.blocks[1] - 1
        return f"block {first}" if first == last else f"blocks {first} to {last}"

    def _values(self) -> dict[str, Any]:
        return {"format": FORMAT, **super()._values()}

    @staticmethod
    def _check_version(values: dict[str, Any]) -> None:
        if (version := values.get("format", FORMAT)) != FORMAT:
            raise CheckpointError(f"it has format {version}, made by another niwaki; this one reads {FORMAT}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the record to a JSON file at ``path``, completely or not at all.

        Raises:
            OutputError: the file cannot be written.
        """
        replace_file(given_path(path), self.to_json())


def _geometric_mean(values: list[float]) -> float:
    """The geometric mean of ``values``; 0 where one is 0, and where there are none."""
    if not values or min(values) <= 0:
        return 0.0
    return math.exp(sum(map(math.log, values)) / len(values))


def versions() -> dict[str, str]:
    """Versions of niwaki, Python and the libraries that decide the result."""
    libraries = ("niwaki", "torch", "transformers", "tokenizers", "safetensors")
    return {"python": platform.python_version(), **{name: _version(name) for name in libraries}}


@functools.cache
def _version(library: str) -> str:
    """The version of an installed ``library``, read once, because the files it is in are long."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "not installed"


# What was done to a model, in names and values for tables: of the screen, the model card and reports.


def facts(record: Record) -> dict[str, str]:
    """What was asked for and what it came to, by name, without what was measured of the model."""
    structure, sparsities = record.structure, [100 * matrix.sparsity for matrix in record.matrices] or [0.0]
    low, high = min(sparsities), max(sparsities)
    between = f", {low:.1f} to {high:.1f} % in one" if high - low > 0.1 else ""
    number = counted(len(record.matrices), "matrix", "matrices") if record.matrices else "the matrices"
    mean = f"geometric mean over matrices{record.of_which_stage}"
    has_zeros = not (record.only_shrinks or record.only_quantizes)
    zeros = "fewer weights" if record.has_factors else "zeros"
    shown: dict[str, object] = {
        "removed" if record.only_shrinks else "pattern": "" if record.only_quantizes else record.pattern,
        "mask from": record.mask_from,
        "parameters": structure,
        zeros: f"{100 * record.sparsity:.2f} % of {number}{between}" if has_zeros else "",
        "left dense": "" if structure else record.stays,
        "healed": record.healing,
        "error": f"{two_digits(record.mean_error)} of the {record.error_of} square ({mean})" if record.matrices else "",
        "format of the weights" if record.kept_format else "grid of the weights": record.rounding,
        "embeddings and head": record.embeddings,
        "own text": record.own_text,
    }
    return {name: str(value) for name, value in shown.items() if value}


def calibration_of(calibration: Mapping[str, Any]) -> str:
    """How much of which text, such as "128 windows of 2,048 tokens of c4"."""
    windows = counted(calibration.get("samples", "?"), "window")
    what = other_samples(calibration) or f"{windows} of {counted(calibration.get('sequence_length', '?'), 'token')}"
    return f"{what} of {' + '.join(map(short_text, str(calibration.get('source', '?')).split(' + ')))}"
