"""One number instead of many commands: the stages that bring a model to a size, for the program that runs it.

What gains most in each program is known, and so is its order (docs/when-to-prune.md): whole numbers of 8 bits cost next
to nothing, and matrices get 4 of them where that costs the loss least. Below 4 bits each, llama.cpp gains by what is
removed, and niwaki's own format by zeros.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from niwaki.arguments import checked
from niwaki.checkpoints.reading import Checkpoint
from niwaki.choices import Runtime
from niwaki.errors import UnsupportedModelError, UsageError
from niwaki.exports.export import Export, Pack
from niwaki.healing.heal import Heal
from niwaki.models.ends import embedding_keys
from niwaki.models.locate import locate_model
from niwaki.models.streamed import StreamedModel
from niwaki.options import Calibration, Compute, Measurement, Text
from niwaki.pruning.embeddings import QuantizeEmbeddings
from niwaki.pruning.prune import Prune, Quantize
from niwaki.quantities import fraction, parse_parameters, parse_size
from niwaki.recipes import run
from niwaki.records.progress import Progress
from niwaki.records.record import Record
from niwaki.records.wording import size as in_bytes
from niwaki.runs.stage import Stage
from niwaki.shrinking.shrink import Shrink

#: Weights that share a scale, and bytes of a scale.
_GROUPS = {"niwaki": 64, "llama.cpp": 32}
_SCALE = 2
#: Headers of files, relative and in bytes: what a foreseen size may be too small by.
_HEADERS, _HEADER = 0.002, 1 << 16
#: In percent, the fewest zeros that are smaller than 4 bits a weight, whose mask has a bit for each.
_LEAST_ZEROS = 26
#: The most zeros, and what stays at least of the parameters: beyond it another, smaller model is better.
_MOST_ZEROS, _LEAST_LEFT = 70, 60


@dataclass(frozen=True)
class Way:
    """One way to a size: its ``stages``, in ``words``, and the ``size`` of its weights in bytes that is foreseen."""

    words: str
    size: int
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class Compression:
    """What is going to be done to a model.

    Attributes:
        model: Its name.
        runtime: The program that is to run the result.
        before: Bytes of its weights now.
        asked: Bytes that they may have.
        way: What is done.
        others: What else there is for this program, in ascending order of size, and reaches other sizes.
    """

    model: str
    runtime: Runtime
    before: int
    asked: int
    way: Way
    others: tuple[Way, ...]

    def __str__(self) -> str:
        share = f"{in_bytes(self.way.size)} ({self.way.size / self.before:.2f} of {in_bytes(self.before)})"
        lines = [f"for {self.runtime}: {self.way.words}: {share}"]
        lines += [f"  stage {i}: {stage.name} {stage}".rstrip() for i, stage in enumerate(self.way.stages, 1)]
        lines += ["besides:"] if self.others else []
        lines += [f"  {in_bytes(way.size):>9} ({way.size / self.before:.2f}): {way.words}" for way in self.others]
        return "\n".join(lines)


@checked
def compress(
    model: str | Path,
    out: str | Path,
    size: float | str | None = None,
    *,
    parameters: float | str | None = None,
    runtime: Runtime | None = None,
    max_time: float | str | None = None,
    calibration: Calibration | Text = Calibration(),
    measurement: Measurement | Text | None = Measurement(),
    compute: Compute | str = Compute(),
    restart: bool = False,
    progress: Progress | None = None,
) -> Record:
    """Brings the model in directory ``model`` to a ``size``, for the program that runs it, and writes it to ``out``.

    It decides on stages by the model and the program, see :func:`plan_compression`, and does them as
    :func:`niwaki.run` does.

    Args:
        model: A directory with config.json and safetensors, a GGUF file, or a Hugging Face hub id.
        out: A directory that does not exist or is empty. It appears when all is written and checked.
        size: What the weights may take in files, such as 0.4 of what they take now, or "80MB". It is never exceeded.
        parameters: Instead of it, for transformers, how many of the parameters may stay, such as 0.75 or "100M".
        runtime: What runs the result: "niwaki" (a packed model), "llama.cpp" (a GGUF file) or "transformers" (a smaller
            dense model); by default transformers where ``parameters`` are given, and else niwaki.
        max_time: How long healing may take, such as "30m"; None for no healing.
        calibration: As in :func:`niwaki.run`.
        measurement: As in :func:`niwaki.run`.
        compute: As in :func:`niwaki.run`.
        restart: As in :func:`niwaki.run`.
        progress: Receives how it goes.

    Returns:
        The record of all stages.

    Raises:
        UsageError: the size cannot be reached, which says how far it goes, or is no smaller than the model.
        NiwakiError: see :mod:`niwaki.errors`. What is done is kept, and the same call resumes.
    """
    planned = plan_compression(model, size, parameters=parameters, runtime=runtime, max_time=max_time)
    if progress:
        progress.note(str(planned))
    return run(
        *(model, out, planned.way.stages),
        calibration=calibration,
        measurement=measurement,
        compute=compute,
        restart=restart,
        progress=progress,
    )


@checked
def plan_compression(
    model: str | Path,
    size: float | str | None = None,
    *,
    parameters: float | str | None = None,
    runtime: Runtime | None = None,
    max_time: float | str | None = None,
) -> Compression:
    """What :func:`compress` would do, and what else there is; arguments and errors are the same.

    For "niwaki": matrices of 4 and 8 bits, as many as the size allows where they matter most; embeddings and head of 8
    bits, or of 4 where there is no other way; below that zeros, up to 70 %, with 4 bits. For "llama.cpp": the same
    bits in groups of 32, embeddings and head in Q8_0; below that a smaller model. For "transformers": a smaller dense
    model, in the dtype that it has.
    """
    runtime = runtime or ("niwaki" if parameters is None else "transformers")
    if (size is None) == (parameters is None):
        raise UsageError("say how small: a size such as 0.4 or 80MB, or for transformers a share of the parameters")
    if (runtime == "transformers") != (parameters is not None):
        given = "parameters are" if parameters is not None else "a size is"
        raise UsageError(f"{given} not for {runtime}: transformers takes parameters, the others a size")
    checkpoint = Checkpoint(locate_model(str(model)))
    before = sum(entry.size for entry in checkpoint.entries.values())
    heal = () if max_time is None else (Heal(max_time=max_time),)
    if parameters is not None:
        left, there = parse_parameters(parameters), sum(math.prod(each.shape) for each in checkpoint.entries.values())
        words, part = (f"{left:g} of the", left) if left < 1 else (f"{left:,.0f} of {there:,}", left / there)
        way = Way(f"{words} parameters", int(before * min(part, 1.0)), (Shrink(parameters=parameters), *heal))
        return Compression(str(model), runtime, before, way.size, way, ())
    assert size is not None
    share = fraction(size)
    asked = int(float(share) * before) if share is not None and 0 < share <= 1 else parse_size(str(size))
    if asked >= before:
        raise UsageError(f"the weights have {in_bytes(before)}, which is not more than the {in_bytes(asked)} asked for")
    parts = _Parts.of(StreamedModel(checkpoint, "cpu"), before, runtime)
    ways = _Ways(parts, runtime, heal)
    way, others = ways.to(asked)
    return Compression(str(model), runtime, before, asked, way, others)


@dataclass(frozen=True)
class _Parts:
    """What a model is made of: numbers of weights, and bytes of all else."""

    matrices: int
    embeddings: int
    others: int

    @classmethod
    def of(cls, model: StreamedModel, before: int, runtime: Runtime) -> "_Parts":
        """UnsupportedModelError where the program's formats cannot have the model."""
        if model.pairs is not None:
            raise UnsupportedModelError(
                f"{model.checkpoint.path} is an encoder with a decoder, which is only compressed for transformers"
            )
        group, matrices = _GROUPS[runtime], model.matrices()
        if odd := [matrix for matrix in matrices if matrix.shape[1] % group]:
            raise UnsupportedModelError(
                f"{odd[0].key!r} of {model.checkpoint.path} has rows of {odd[0].shape[1]}, which do not divide into "
                f"groups of {group}, as {runtime} has them"
            )
        entries = model.checkpoint.entries
        keys = {*embedding_keys(model)}
        embeddings = sum(math.prod(entries[key].shape) for key in keys)
        of_blocks = {matrix.key for matrix in matrices}
        others = sum(entry.size for key, entry in entries.items() if key not in keys | of_blocks)
        wider = 2 if runtime == "llama.cpp" else 1  # which has them in float32
        return cls(sum(matrix.size for matrix in matrices), embeddings, wider * others)


@dataclass(frozen=True)
class _Ways:
    parts: _Parts
    runtime: Runtime
    heal: tuple[Stage, ...]

    def to(self, asked: int) -> tuple[Way, tuple[Way, ...]]:
        """The way to a size, and others."""
        few, more = self._sizes
        eight, four = self._bits(8.0, few), self._bits(4.0, few)
        beyond = self._beyond()
        least = beyond[-1]
        known = {way.size: way for way in (eight, four, least)}
        if asked < least.size:
            raise UsageError(
                f"{in_bytes(asked)} cannot be reached for {self.runtime}: {least.words} have {in_bytes(least.size)}; "
                f"give at least that, or take a smaller model"
            )
        if asked >= eight.size:
            way = eight
        elif asked >= four.size:
            way = self._bits(self._average(asked, few), few)
        elif more != few and asked >= (small := self._bits(4.0, more)).size:
            way = self._bits(self._average(asked, more), more)
            known[small.size] = small
        else:
            way = next(each for each in beyond if each.size <= asked)
        return way, tuple(each for _, each in sorted(known.items()) if each.words != way.words)

    @property
    def _sizes(self) -> tuple[int, int]:
        """Bits of embeddings and head: usual ones, and where there is no other way."""
        return (8, 4) if self.runtime == "niwaki" else (8, 8)

    def _bytes(self, bits: float, ends: int, matrices: float) -> int:
        scale = _SCALE / _GROUPS[self.runtime]
        whole = matrices * (bits / 8 + scale) + self.parts.embeddings * (ends / 8 + scale) + self.parts.others
        return int(whole * (1 + _HEADERS)) + _HEADER

    def _average(self, asked: int, ends: int) -> float:
        """The most bits a weight, in hundredths, with which the size is not exceeded."""
        low, high = self._bytes(4, ends, self.parts.matrices), self._bytes(8, ends, self.parts.matrices)
        return min(8.0, math.floor(100 * (4 + 4 * (asked - low) / (high - low))) / 100)

    def _bits(self, bits: float, ends: int) -> Way:
        group = _GROUPS[self.runtime]
        grid = f"int{bits:g}:{group}" if bits in (4, 8) else f"int{bits:.2f}:{group}"
        words = f"{bits:g} bits a weight, embeddings and head of {ends}"
        stages: tuple[Stage, ...] = (Quantize(grid), *self.heal, *self._ends(ends, bits == 8))
        return Way(words, self._bytes(bits, ends, self.parts.matrices), stages)

    def _ends(self, bits: int, eight: bool = False) -> tuple[Stage, ...]:
        """Embeddings and head, and the format, for matrices of ``eight`` bits or of fewer and mixed ones."""
        grid = f"int{bits}:{_GROUPS[self.runtime]}"
        file = Export("gguf-q8_0") if eight else Export("gguf-q4_0")
        return QuantizeEmbeddings(grid), Pack() if self.runtime == "niwaki" else file

    def _beyond(self) -> list[Way]:
        """The ways to sizes below 4 bits a weight, in descending order."""
        if self.runtime == "niwaki":
            return [self._zeros(percent / 100) for percent in range(_LEAST_ZEROS, _MOST_ZEROS + 1)]
        return [self._smaller(percent / 100) for percent in range(99, _LEAST_LEFT - 1, -1)]

    def _zeros(self, share: float) -> Way:
        bits = 1 + 4 * (1 - share)  # of a mask, and of what is not zero
        stages: tuple[Stage, ...] = (Prune(share, quantize="int4:64"), *self.heal, *self._ends(4))
        words = f"{100 * share:.3g} % zeros, 4 bits for each other weight, embeddings and head of 4"
        return Way(words, self._bytes(bits, 4, self.parts.matrices), stages)

    def _smaller(self, left: float) -> Way:
        parts = self.parts
        everything = parts.matrices + parts.embeddings
        matrices = parts.matrices - (1 - left) * everything
        stages: tuple[Stage, ...] = (Shrink(parameters=left), Quantize("int4:32"), *self.heal, *self._ends(8))
        return Way(f"{left:g} of the parameters, 4 bits for each", self._bytes(4, 8, matrices), stages)
